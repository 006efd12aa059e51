//! Engine bytes → events: the msgpack batches of vLLM and SGLang, whatever their release.
//!
//! A twin of `decode_batch` in `kvscout_blocks.bytes.wire`, which says what the fields mean. One pass over the
//! bytes: fields that are known are decoded where they stand, others are stepped over. An event that cannot
//! be read costs itself; bytes that are no msgpack, or no batch, cost the batch.

use crate::events::{Batch, Event, FaultKind, Removed, Span, Stored};
use crate::hashing::engine_hash_of_bytes;

/// Larger payloads are refused before they are read.
pub const MAX_PAYLOAD_BYTES: usize = 64 * 1024 * 1024;

/// Elements of one array: four times the tokens of the longest prompts engines take.
const MAX_ARRAY: usize = 4 * 1024 * 1024;

/// Entries of one map: engines send at most 17.
const MAX_MAP: usize = 256;

/// Arrays and maps within one another.
const MAX_NESTING: u32 = 512;

const MAX_GROUP: i128 = 65_535;
const REASON_CHARS: usize = 200;
const FULL_ATTENTION: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];

const SLIDING_WINDOW: [&str; 2] = ["sliding_window", "sliding_window_mla"];

/// In the order of the array form; the last ones are of the map form only.
const STORED_FIELDS: [&str; 13] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "lookahead_token_ids",
    "cache_salt",
];
const STORED_ARRAY_FIELDS: usize = 11;
const REMOVED_FIELDS: [&str; 3] = ["block_hashes", "medium", "group_idx"];
const BATCH_FIELDS: [&str; 3] = ["ts", "events", "data_parallel_rank"];

/// Why a payload is no batch, and which part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    pub field: &'static str,
    pub message: String,
}

/// Why a value was not read.
enum Failure {
    /// The bytes are no msgpack: nothing after them can be read either.
    Bytes(String),
    /// The value is not what belongs here: the event is lost.
    Meaning(String),
}

type Read<T> = Result<T, Failure>;

fn broken<T>(what: &str) -> Read<T> {
    Err(Failure::Bytes(what.into()))
}

fn bad<T>(what: impl Into<String>) -> Read<T> {
    Err(Failure::Meaning(what.into()))
}

/// One value; arrays and maps with their length only: their elements follow.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Value<'a> {
    Nil,
    Bool(bool),
    Int(i128),
    Float(f64),
    /// Not necessarily UTF-8.
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    Map(usize),
}

/// A position in a payload.
#[derive(Debug, Clone, Copy)]
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    max_array: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Read<&'a [u8]> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.bytes.len());
        let Some(end) = end else { return broken("the bytes end within a value") };
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Read<[u8; N]> {
        let bytes = self.take(N)?;
        let mut number = [0; N];
        number.copy_from_slice(bytes);
        Ok(number)
    }

    fn length(&mut self, bytes: usize) -> Read<usize> {
        Ok(self.take(bytes)?.iter().fold(0, |length, &byte| length << 8 | usize::from(byte)))
    }

    fn array(&self, length: usize) -> Read<Value<'a>> {
        if length > self.max_array { broken("an array is too long") } else { Ok(Value::Array(length)) }
    }

    fn map(length: usize) -> Read<Value<'a>> {
        if length > MAX_MAP { broken("a map is too long") } else { Ok(Value::Map(length)) }
    }

    /// The next value, or the head of it.
    fn value(&mut self) -> Read<Value<'a>> {
        let tag = self.take(1)?[0];
        Ok(match tag {
            0x00..=0x7f => Value::Int(i128::from(tag)),
            0x80..=0x8f => return Self::map(usize::from(tag & 0x0f)),
            0x90..=0x9f => return self.array(usize::from(tag & 0x0f)),
            0xa0..=0xbf => Value::Str(self.take(usize::from(tag & 0x1f))?),
            0xc0 => Value::Nil,
            0xc2 | 0xc3 => Value::Bool(tag == 0xc3),
            0xc4..=0xc6 => {
                let length = self.length(1 << (tag - 0xc4))?;
                Value::Bin(self.take(length)?)
            }
            0xca => Value::Float(f32::from_be_bytes(self.number()?).into()),
            0xcb => Value::Float(f64::from_be_bytes(self.number()?)),
            0xcc => Value::Int(u8::from_be_bytes(self.number()?).into()),
            0xcd => Value::Int(u16::from_be_bytes(self.number()?).into()),
            0xce => Value::Int(u32::from_be_bytes(self.number()?).into()),
            0xcf => Value::Int(u64::from_be_bytes(self.number()?).into()),
            0xd0 => Value::Int(i8::from_be_bytes(self.number()?).into()),
            0xd1 => Value::Int(i16::from_be_bytes(self.number()?).into()),
            0xd2 => Value::Int(i32::from_be_bytes(self.number()?).into()),
            0xd3 => Value::Int(i64::from_be_bytes(self.number()?).into()),
            0xd9..=0xdb => {
                let length = self.length(1 << (tag - 0xd9))?;
                Value::Str(self.take(length)?)
            }
            0xdc | 0xdd => {
                let length = self.length(2 << (tag - 0xdc))?;
                return self.array(length);
            }
            0xde | 0xdf => {
                let length = self.length(2 << (tag - 0xde))?;
                return Self::map(length);
            }
            0xe0..=0xff => Value::Int(i128::from(tag as i8)),
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => return broken("a type that engines do not send"),
        })
    }

    /// Steps over a value with all that is in it.
    fn skip(&mut self) -> Read<()> {
        let value = self.value()?;
        self.skip_rest_of(value, MAX_NESTING)
    }

    fn skip_rest_of(&mut self, value: Value<'a>, nesting: u32) -> Read<()> {
        let (elements, is_map) = match value {
            Value::Array(length) => (length, false),
            Value::Map(length) => (2 * length, true),
            _ => return Ok(()),
        };
        if nesting == 0 {
            return broken("values are nested too deeply");
        }
        for element in 0..elements {
            let value = self.value()?;
            if is_map && element % 2 == 0 && matches!(value, Value::Array(_) | Value::Map(_)) {
                return broken("the key of a map is no scalar");
            }
            self.skip_rest_of(value, nesting - 1)?;
        }
        Ok(())
    }

    /// A value's elements, as positions, if it is an array; else None, and the reader is after it.
    fn elements(&mut self) -> Read<Option<usize>> {
        match self.value()? {
            Value::Array(length) => Ok(Some(length)),
            other => self.skip_rest_of(other, MAX_NESTING).map(|()| None),
        }
    }
}

/// Reads the named fields of an array (after its tag) or map; the first ones are passed to `read` by number.
fn for_each_field<'a>(
    reader: &mut Reader<'a>,
    head: Value<'a>,
    names: &[&str],
    mut read: impl FnMut(&mut Reader<'a>, usize) -> Read<()>,
) -> Read<()> {
    match head {
        Value::Array(length) => {
            for field in 0..length {
                if field < names.len() { read(reader, field)? } else { reader.skip()? }
            }
            Ok(())
        }
        Value::Map(length) => {
            // Engines send the fields in order, so each is looked for after the one before it first.
            let mut next = 0;
            for _ in 0..length {
                let key = reader.value()?;
                if matches!(key, Value::Array(_) | Value::Map(_)) {
                    return broken("the key of a map is no scalar");
                }
                let field = match key {
                    Value::Str(key) => {
                        let is_it = |name: &&str| name.as_bytes() == key;
                        if names.get(next).is_some_and(is_it) {
                            Some(next)
                        } else {
                            names.iter().position(is_it)
                        }
                    }
                    _ => None,
                };
                next = field.map_or(next, |field| field + 1);
                match field {
                    Some(field) => read(reader, field)?,
                    None => reader.skip()?,
                }
            }
            Ok(())
        }
        _ => bad("neither array nor map"),
    }
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
    let mut reader = Reader { bytes: payload, at: 0, max_array: payload.len().min(MAX_ARRAY) };
    let (mut events, mut rank) = (None, None);
    let read = (|| {
        let head = reader.value()?;
        if !matches!(head, Value::Array(_) | Value::Map(_)) {
            reader.skip_rest_of(head, MAX_NESTING)?;
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
                reader.skip_rest_of(value, MAX_NESTING)
            }
            1 => {
                // A map may name a field twice: the last one counts.
                batch.events.clear();
                batch.faults.clear();
                events = reader.elements()?;
                for _ in 0..events.unwrap_or(0) {
                    read_event(reader, batch)?;
                }
                Ok(())
            }
            _ => {
                let value = reader.value()?;
                rank = Some(value);
                reader.skip_rest_of(value, MAX_NESTING)
            }
        })
    })();
    match read {
        Err(Failure::Bytes(message)) => return Err(malformed("payload", format!("no msgpack: {message}"))),
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
            for _ in 0..length {
                let is_type = reader.value()? == Value::Str(b"type");
                let at = *reader;
                // The last "type" counts; engines send one, first.
                if is_type {
                    tag = match reader.value()? {
                        Value::Str(tag) => Some(tag),
                        _ => None,
                    };
                    if tag.is_some() && fields.at + 5 == at.at {
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

fn read_stored<'a>(reader: &mut Reader<'a>, head: Value<'a>, batch: &mut Batch) -> Read<Stored> {
    let mut stored = Stored { full_attention: true, ..Stored::default() };
    let mut seen = [false; STORED_FIELDS.len()];
    let mut kind = None;
    let mut window = Value::Nil;
    let (mut extra_keys, mut lookahead, mut salt) = (None, None, None);
    let names = match head {
        Value::Map(_) => &STORED_FIELDS[..],
        _ => &STORED_FIELDS[..STORED_ARRAY_FIELDS],
    };
    for_each_field(reader, head, names, |reader, field| {
        seen[field] = true;
        match field {
            0 => stored.engine_hashes = read_hashes(reader, batch)?,
            1 => stored.parent = read_optional_hash(reader)?,
            2 => (stored.tokens, stored.pairs, stored.lookahead) = read_tokens(reader, batch)?,
            3 => match read_scalar(reader)? {
                Value::Int(size) if (0..1 << 31).contains(&size) => stored.block_size = size as u32,
                _ => return bad("block_size is no size"),
            },
            4 => match read_scalar(reader)? {
                Value::Nil => stored.lora_id = 0,
                Value::Int(id) => stored.lora_id = id,
                _ => return bad("lora_id is no number"),
            },
            5 => stored.tier = read_tier(reader)?,
            6 => stored.lora_name = batch.add_text(read_text(reader, "lora_name")?),
            7 => {
                extra_keys = Some(*reader);
                reader.skip()?;
            }
            8 => stored.group = read_group(reader)?,
            9 => {
                kind = match read_scalar(reader)? {
                    Value::Str(kind) => Some(kind),
                    _ => None,
                }
            }
            10 => window = read_scalar(reader)?,
            11 => {
                lookahead = Some(*reader);
                reader.skip()?;
            }
            12 => {
                salt = Some(*reader);
                reader.skip()?;
            }
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if let Some(missing) = (0..4).find(|&field| !seen[field]) {
        return bad(format!("{} is missing", STORED_FIELDS[missing]));
    }
    stored.full_attention = match kind {
        Some(kind) if !kind.is_empty() => FULL_ATTENTION.iter().any(|full| full.as_bytes() == kind),
        _ => stored.group == 0,
    };
    if SLIDING_WINDOW.iter().any(|sliding| Some(sliding.as_bytes()) == kind)
        && let Value::Int(tokens) = window
    {
        stored.window = u32::try_from(tokens).unwrap_or(0);
    }
    if let Some(mut keys) = extra_keys {
        read_extra_keys(&mut keys, &mut stored, batch)?;
    }
    if let (None, true, Some(mut salt)) = (stored.parent, stored.cache_salt.is_empty(), salt) {
        stored.cache_salt = batch.add_text(read_text(&mut salt, "cache_salt")?);
    }
    if let (false, Some(mut tokens)) = (stored.pairs, lookahead) {
        stored.lookahead = read_lookahead(&mut tokens, &stored, batch.tokens(stored.tokens))?;
    }
    Ok(stored)
}

fn read_removed<'a>(reader: &mut Reader<'a>, head: Value<'a>, batch: &mut Batch) -> Read<Removed> {
    let mut removed = Removed::default();
    let mut seen = false;
    for_each_field(reader, head, &REMOVED_FIELDS, |reader, field| {
        match field {
            0 => {
                seen = true;
                removed.engine_hashes = read_hashes(reader, batch)?;
            }
            1 => removed.tier = read_tier(reader)?,
            _ => removed.group = read_group(reader)?,
        }
        Ok(())
    })?;
    if seen { Ok(removed) } else { bad("block_hashes is missing") }
}

/// A value that must be whole in itself: of arrays and maps only the head, which no field wants.
fn read_scalar<'a>(reader: &mut Reader<'a>) -> Read<Value<'a>> {
    let value = reader.value()?;
    reader.skip_rest_of(value, MAX_NESTING)?;
    Ok(value)
}

fn hash_of(value: Value<'_>) -> Read<u64> {
    match value {
        Value::Int(hash) if hash >= 0 => u64::try_from(hash).or_else(|_| bad("a block hash is too large")),
        Value::Int(hash) => {
            i64::try_from(hash).map(|hash| hash as u64).or_else(|_| bad("a block hash is too small"))
        }
        Value::Bin([]) => bad("a block hash has no bytes"),
        Value::Bin(digest) => Ok(engine_hash_of_bytes(digest)),
        _ => bad("a block hash is neither integer nor bytes"),
    }
}

fn read_optional_hash(reader: &mut Reader<'_>) -> Read<Option<u64>> {
    match read_scalar(reader)? {
        Value::Nil => Ok(None),
        value => hash_of(value).map(Some),
    }
}

fn read_hashes(reader: &mut Reader<'_>, batch: &mut Batch) -> Read<Span> {
    let Some(length) = reader.elements()? else { return bad("block_hashes is no array") };
    let hashes = &mut batch.hashes;
    let start = hashes.len();
    hashes.reserve(length);
    for _ in 0..length {
        if let Some([0xcf, number @ ..]) = reader.bytes.get(reader.at..).and_then(<[u8]>::first_chunk::<9>) {
            hashes.push(u64::from_be_bytes(*number));
            reader.at += 9;
            continue;
        }
        hashes.push(hash_of(read_scalar(reader)?)?);
    }
    Ok(Span::since(start, hashes))
}

fn token_of(value: Value<'_>) -> Read<u32> {
    match value {
        Value::Int(token) => u32::try_from(token).or_else(|_| bad("token_ids are not all 32-bit integers")),
        Value::Bool(token) => Ok(u32::from(token)),
        _ => bad("token_ids are not all 32-bit integers"),
    }
}

/// Token ids, whether they came as EAGLE pairs, and then the last pair's second.
fn read_tokens(reader: &mut Reader<'_>, batch: &mut Batch) -> Read<(Span, bool, Option<u32>)> {
    let tokens = &mut batch.tokens;
    let start = tokens.len();
    let Some(length) = reader.elements()? else { return bad("token_ids is no array") };
    let first = *reader;
    if length > 0 && matches!({ *reader }.value()?, Value::Array(_)) {
        let last = read_pairs(reader, length, tokens)?;
        return Ok((Span::since(start, tokens), true, last));
    }
    *reader = first;
    tokens.resize(start + length, 0);
    let mut rest = &reader.bytes[reader.at..];
    for token in &mut tokens[start..] {
        if let Some((number, bytes)) = rest.first_chunk().and_then(short_unsigned) {
            *token = number;
            rest = &rest[bytes..];
        } else {
            reader.at = reader.bytes.len() - rest.len();
            *token = token_of(read_scalar(reader)?)?;
            rest = &reader.bytes[reader.at..];
        }
    }
    reader.at = reader.bytes.len() - rest.len();
    Ok((Span::since(start, tokens), false, None))
}

/// The integer that begins these bytes, if it has one of the forms that tokens have, and its length.
///
/// Tokens of one, three and five bytes mix without a pattern, so that a branch on their form would be mispredicted for
/// every other one: at 16,384 tokens a batch that costs more than all else that is done with them.
#[inline]
fn short_unsigned(bytes: &[u8; 8]) -> Option<(u32, usize)> {
    let tag = bytes[0];
    if !matches!(tag, 0x00..=0x7f | 0xcc..=0xce) {
        return None;
    }
    // The bytes after the tag: none, or 1, 2 and 4 for 0xcc, 0xcd and 0xce.
    let following = u32::from(tag >> 7) << (tag & 3);
    let number = (u64::from_be_bytes(*bytes) << 8 >> 8) >> (56 - 8 * following);
    // Without a mask both sides would be branches again.
    let of_tag = u32::from(tag >> 7).wrapping_sub(1);
    Some(((number as u32 & !of_tag) | (u32::from(tag) & of_tag), 1 + following as usize))
}

/// The tokens of EAGLE pairs; the last pair's second.
fn read_pairs(reader: &mut Reader<'_>, length: usize, tokens: &mut Vec<u32>) -> Read<Option<u32>> {
    tokens.reserve(length + 1);
    let mut last: Option<u32> = None;
    for _ in 0..length {
        if reader.elements()? != Some(2) {
            return bad("token_ids mixes pairs and others");
        }
        let token = token_of(read_scalar(reader)?)?;
        if last.is_some_and(|last| last != token) {
            return bad("token_ids are pairs that do not overlap");
        }
        tokens.push(token);
        last = Some(token_of(read_scalar(reader)?)?);
    }
    tokens.extend(last);
    Ok(last)
}

fn read_lookahead(reader: &mut Reader<'_>, stored: &Stored, tokens: &[u32]) -> Read<Option<u32>> {
    let Some(length) = ({
        let mut head = *reader;
        match head.value()? {
            Value::Nil => return Ok(None),
            _ => reader.elements()?,
        }
    }) else {
        return bad("lookahead_token_ids is no array");
    };
    let mut following = Vec::new();
    for _ in 0..length {
        match read_scalar(reader)? {
            Value::Nil => {}
            value => following.push(token_of(value)?),
        }
    }
    let size = stored.block_size as usize;
    let blocks = stored.engine_hashes.len();
    // One token a block, or the tokens after the last block: the blocks' own tokens tell which.
    let starts = tokens.iter().skip(size).step_by(size.max(1)).take(if size > 0 { usize::MAX } else { 0 });
    let one_a_block =
        following.len() == blocks && blocks > 0 && following[..blocks - 1].iter().eq(starts.take(blocks - 1));
    Ok(if one_a_block { following.last() } else { following.first() }.copied())
}

fn read_text<'a>(reader: &mut Reader<'a>, name: &str) -> Read<&'a str> {
    match read_scalar(reader)? {
        Value::Nil => Ok(""),
        value => text_of(value, name),
    }
}

fn text_of<'a>(value: Value<'a>, name: &str) -> Read<&'a str> {
    let Value::Str(bytes) = value else { return bad(format!("{name} is no string")) };
    std::str::from_utf8(bytes).or_else(|_| bad(format!("{name} is no UTF-8")))
}

fn read_tier(reader: &mut Reader<'_>) -> Read<u8> {
    const USUAL: &[u8] = b"\xa3GPU";
    if reader.bytes[reader.at..].starts_with(USUAL) {
        reader.at += USUAL.len();
        return Ok(0);
    }
    let medium = read_text(reader, "medium")?;
    Ok(match medium.to_uppercase().as_str() {
        "" | "GPU" | "DEVICE" => 0,
        "CPU" | "CPU_PINNED" | "CPU_TIER1" => 1,
        "CPU_TIER2" | "STORAGE" | "DISK" | "NVME" | "FS" => 2,
        "EXTERNAL" | "OBJ" | "REMOTE" | "NETWORK" | "SHARED" => 3,
        _ => return bad(format!("medium {medium:?} is unknown")),
    })
}

fn read_group(reader: &mut Reader<'_>) -> Read<u32> {
    match read_scalar(reader)? {
        Value::Nil => Ok(0),
        Value::Int(group) if (0..=MAX_GROUP).contains(&group) => Ok(group as u32),
        _ => bad("group_idx is no group"),
    }
}

/// The salt and each block's multimodal ids, from what else entered the engine's block hashes.
fn read_extra_keys(reader: &mut Reader<'_>, stored: &mut Stored, batch: &mut Batch) -> Read<()> {
    if { *reader }.value()? == Value::Nil {
        return Ok(());
    }
    let Some(length) = reader.elements()? else { return bad("extra_keys is no array") };
    let (first, mut salted) = (stored.parent.is_none(), false);
    let mut items: Vec<Vec<String>> = Vec::new();
    for position in 0..length {
        let mut ids = Vec::new();
        let mut keys = match { *reader }.value()? {
            Value::Array(_) => reader.elements()?.unwrap_or(0),
            Value::Nil => {
                reader.skip()?;
                0
            }
            _ => 1,
        };
        while keys > 0 {
            keys -= 1;
            match reader.value()? {
                Value::Array(2) => {
                    ids.push(text_of(read_scalar(reader)?, "the id of a multimodal item")?.to_owned());
                    reader.skip()?;
                }
                Value::Str(key) if key == batch.text(stored.lora_name).as_bytes() => {}
                Value::Str(key) if first && position == 0 && !salted => {
                    stored.cache_salt = batch.add_text(text_of(Value::Str(key), "the salt")?);
                    salted = true;
                }
                _ => return bad(format!("extra_keys of block {position} has a key out of place")),
            }
        }
        items.push(ids);
    }
    if items.iter().any(|ids| !ids.is_empty()) {
        stored.mm_items = batch.add_mm_items(items);
    }
    Ok(())
}
