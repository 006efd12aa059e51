//! Events as messages: `kvscout.v1.KvEventBatch` → the batch that an index applies.

use super::decode::{DecodeError, fields, invalid, narrow, read_fixed64, tier_from_wire};
use super::{FULL_ATTENTION, Identity, OTHER_ATTENTION, VERSION};
use crate::events::{Batch, Event, FAULT_LIMIT, FaultKind, Removed, Span, Stored};
use crate::protobuf::Field;

/// Events of one source, as a publisher sent them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Published {
    pub identity: Identity,
    pub epoch: u64,
    pub event_id: Option<u64>,
    /// The source starts anew: what was known of it goes first.
    pub reset: bool,
    pub batch: Batch,
}

/// Reads one message of events; an event that cannot be read costs itself, as in the engines' own batches.
pub fn decode_events(message: &[u8]) -> Result<Published, DecodeError> {
    let mut published = Published::default();
    let (mut version, mut events) = (0, Vec::new());
    fields("batch", message, |number, field| {
        match (number, field) {
            (1, Field::Varint(value)) => version = value,
            (2..=7, field) => published.identity.read(number, field)?,
            (8, Field::Varint(value)) => published.epoch = value,
            (9, Field::Varint(value)) => published.event_id = Some(value),
            (10, Field::Fixed64(value)) => published.batch.timestamp = f64::from_bits(value),
            (11, Field::Bytes(value)) => events.push(value),
            _ => {}
        }
        Ok(())
    })?;
    if version != VERSION {
        return Err(DecodeError::Version(version));
    }
    published.batch.dp_rank = Some(published.identity.dp_rank);
    for (place, bytes) in events.into_iter().enumerate() {
        if published.batch.faults.len() > FAULT_LIMIT {
            return Err(invalid("events", format!("more than {FAULT_LIMIT} of them cannot be read")));
        }
        let mut kind = None;
        fields("events", bytes, |number, field| {
            if let (1..=5, Field::Bytes(value)) = (number, field) {
                kind = Some((number, value));
            }
            Ok(())
        })?;
        let read = match kind {
            Some((1, bytes)) => {
                stored(bytes, published.identity.block_size, &mut published.batch).map(Event::Stored)
            }
            Some((2, bytes)) => removed(bytes, &mut published.batch).map(Event::Removed),
            Some((3, _)) => Ok(Event::Cleared),
            Some((4, _)) if place == 0 => {
                published.reset = true;
                continue;
            }
            Some((4, _)) => return Err(invalid("events", "a reset comes first")),
            Some(_) => return Err(invalid("events", "state chunks come by themselves")),
            None => {
                published.batch.faults.push((FaultKind::UnknownTag, "no kind that is known".to_owned()));
                continue;
            }
        };
        match read {
            Ok(event) => published.batch.events.push(event),
            Err(error) => published.batch.faults.push((FaultKind::BadEvent, error.to_string())),
        }
    }
    Ok(published)
}

fn stored(message: &[u8], block_size: u32, batch: &mut Batch) -> Result<Stored, DecodeError> {
    let mut event = Stored { block_size, ..Stored::default() };
    let (mut kind, mut foreign) = (0, 0);
    fields("stored", message, |number, field| {
        match (number, field) {
            (2, Field::Fixed64(value)) => event.parent = Some(value),
            (4, Field::Varint(value)) => event.tier = tier_from_wire(value)?,
            (5, Field::Varint(value)) => event.group = narrow("group", value)?,
            (6, Field::Varint(value)) => kind = value,
            (7, Field::Varint(value)) => foreign = value,
            (8, Field::Varint(value)) => event.window = narrow("sliding_window", value)?,
            _ => {}
        }
        Ok(())
    })?;
    event.engine_hashes = hashes("engine_hashes", 1, message, batch)?;
    event.local_hashes = hashes("local_hashes", 3, message, batch)?;
    event.full_attention = match kind {
        FULL_ATTENTION => true,
        OTHER_ATTENTION => false,
        _ => event.group == 0,
    };
    if event.full_attention {
        event.window = 0;
    }
    if foreign != 0 {
        event.block_size = narrow("block_size", foreign)?;
    }
    if event.window == 0 && event.block_size != block_size {
        event.foreign = true;
        event.local_hashes = Span::default();
    }
    if !event.local_hashes.is_empty() && event.local_hashes.len() != event.engine_hashes.len() {
        return Err(invalid("local_hashes", "not one a block"));
    }
    Ok(event)
}

/// The values of a field, which may come in chunks and between others: so each field is read by itself.
fn hashes(name: &'static str, wanted: u32, message: &[u8], batch: &mut Batch) -> Result<Span, DecodeError> {
    let start = batch.hashes.len();
    fields(name, message, |number, field| {
        match field {
            Field::Bytes(value) if number == wanted => read_fixed64(name, value, &mut batch.hashes)?,
            Field::Fixed64(value) if number == wanted => batch.hashes.push(value),
            _ => {}
        }
        Ok(())
    })?;
    Ok(Span::since(start, &batch.hashes))
}

fn removed(message: &[u8], batch: &mut Batch) -> Result<Removed, DecodeError> {
    let mut event = Removed::default();
    fields("removed", message, |number, field| {
        match (number, field) {
            (2, Field::Varint(value)) => event.tier = tier_from_wire(value)?,
            (3, Field::Varint(value)) => event.group = narrow("group", value)?,
            _ => {}
        }
        Ok(())
    })?;
    event.engine_hashes = hashes("engine_hashes", 1, message, batch)?;
    Ok(event)
}
