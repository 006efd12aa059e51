//! Engine bytes → events: the msgpack batches of vLLM, SGLang and TensorRT-LLM, whatever their release.
//!
//! Native backend of `decode_batch` in `kvscout_blocks.bytes.wire`, which says what the fields mean. One pass over the
//! bytes: fields that are known are decoded where they stand, others are stepped over. An event that cannot
//! be read costs itself; bytes that are no msgpack, or no batch, cost the batch.

mod events;
mod msgpack;
mod tokens;

use events::{read_removed, read_stored};
use msgpack::{Failure, Read, Reader, Value, for_each_field};

use crate::events::{Batch, Event, FAULT_LIMIT, FaultKind};

/// Larger payloads are refused before they are read.
pub const MAX_PAYLOAD_BYTES: usize = 64 * 1024 * 1024;

/// Elements of one array: four times the tokens of the longest prompts engines take.
const MAX_ARRAY: usize = 4 * 1024 * 1024;

const REASON_CHARS: usize = 200;
const BATCH_FIELDS: [&str; 3] = ["ts", "events", "data_parallel_rank"];

/// Why a payload is no batch, and which part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    pub field: &'static str,
    pub message: String,
}

/// Decodes one payload.
pub fn decode_batch(payload: &[u8]) -> Result<Batch, Malformed> {
    let mut batch = Batch::default();
    decode_into(&mut batch, payload)?;
    Ok(batch)
}

/// Decodes one payload into a batch, in place of what that contains.
pub fn decode_into(batch: &mut Batch, payload: &[u8]) -> Result<(), Malformed> {
    batch.clear();
    let malformed = |field, message: String| Malformed { field, message };
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(malformed("payload", format!("{} bytes, more than {MAX_PAYLOAD_BYTES}", payload.len())));
    }
    let mut reader = Reader::new(payload, payload.len().min(MAX_ARRAY));
    let (mut events, mut rank) = (None, None);
    let read = (|| {
        let head = reader.value()?;
        if !matches!(head, Value::Array(_) | Value::Map(_)) {
            reader.skip_rest_of(head)?;
            return Ok(());
        }
        for_each_field(&mut reader, head, &BATCH_FIELDS, |reader, field| match field {
            0 => {
                let value = reader.value()?;
                batch.timestamp = match value {
                    Value::Float(seconds) => seconds,
                    Value::Int(seconds) => seconds as f64,
                    Value::Bool(seconds) => f64::from(u8::from(seconds)),
                    _ => 0.0,
                };
                reader.skip_rest_of(value)
            }
            1 => {
                batch.events.clear();
                batch.faults.clear();
                events = reader.elements()?;
                reader.within(|reader| {
                    for _ in 0..events.unwrap_or(0) {
                        read_event(reader, batch)?;
                        if batch.faults.len() > FAULT_LIMIT {
                            return Err(Failure::Meaning(String::new()));
                        }
                    }
                    Ok(())
                })
            }
            _ => {
                let value = reader.value()?;
                rank = Some(value);
                reader.skip_rest_of(value)
            }
        })
    })();
    match read {
        Err(Failure::Bytes(message)) => return Err(malformed("payload", format!("no msgpack: {message}"))),
        _ if batch.faults.len() > FAULT_LIMIT => {
            let message = format!("more than {FAULT_LIMIT} of them cannot be read");
            return Err(malformed("events", message));
        }
        Ok(()) if reader.at < payload.len() => {
            return Err(malformed("payload", "no msgpack: bytes follow the batch".into()));
        }
        Ok(()) if events.is_some() => {}
        _ => return Err(malformed("payload", "neither [timestamp, events, rank?] nor a map of it".into())),
    }
    batch.dp_rank = match rank {
        None | Some(Value::Nil) => None,
        Some(Value::Int(rank)) if (0..1 << 31).contains(&rank) => Some(rank as u32),
        _ => return Err(malformed("data_parallel_rank", "not a rank".into())),
    };
    Ok(())
}

/// Reads one event into the batch, or the fault that it is.
fn read_event(reader: &mut Reader<'_>, batch: &mut Batch) -> Read<()> {
    let start = *reader;
    let (tag, head) = match read_tag(reader)? {
        (Some(tag), head) => (tag, head),
        (None, _) => {
            *reader = start;
            reader.skip()?;
            batch.faults.push((FaultKind::UnknownTag, "no tag".into()));
            return Ok(());
        }
    };
    let read = match tag {
        b"BlockStored" => read_stored(reader, head, batch).map(Event::Stored),
        b"BlockRemoved" => read_removed(reader, head, batch).map(Event::Removed),
        b"AllBlocksCleared" => for_each_field(reader, head, &[], |_, _| Ok(())).map(|()| Event::Cleared),
        _ => {
            *reader = start;
            reader.skip()?;
            let shown: String = String::from_utf8_lossy(tag).chars().take(REASON_CHARS).collect();
            batch.faults.push((FaultKind::UnknownTag, shown));
            return Ok(());
        }
    };
    match read {
        Ok(event) => batch.events.push(event),
        Err(Failure::Bytes(message)) => return Err(Failure::Bytes(message)),
        Err(Failure::Meaning(message)) => {
            *reader = start;
            reader.skip()?;
            let reason = format!("{}: {message}", String::from_utf8_lossy(tag));
            batch.faults.push((FaultKind::BadEvent, reason.chars().take(REASON_CHARS).collect()));
        }
    }
    Ok(())
}

/// The tag of an event and the head of its fields, at which the reader then is.
fn read_tag<'a>(reader: &mut Reader<'a>) -> Read<(Option<&'a [u8]>, Value<'a>)> {
    let head = reader.value()?;
    match head {
        Value::Array(length) if length > 0 => match reader.value()? {
            Value::Str(tag) => Ok((Some(tag), Value::Array(length - 1))),
            _ => Ok((None, head)),
        },
        Value::Map(length) => {
            let fields = *reader;
            let mut tag = None;
            for entry in 0..length {
                let is_type = reader.value()? == Value::Str(b"type");
                let at = *reader;
                // Engines send one, first; without one there the last counts.
                if is_type {
                    tag = match reader.value()? {
                        Value::Str(tag) => Some(tag),
                        _ => None,
                    };
                    if tag.is_some() && entry == 0 {
                        break;
                    }
                }
                *reader = at;
                reader.skip()?;
            }
            *reader = fields;
            Ok((tag, head))
        }
        _ => Ok((None, head)),
    }
}
