//! The fields of one event, Stored or Removed, as engines of any release name and order them.

use super::msgpack::{Read, Reader, Value, bad, for_each_field, read_scalar};
use super::tokens::{read_lookahead, read_tokens};
use crate::events::{Batch, Removed, STATE_WINDOW, Span, Stored};
use crate::hashing::engine_hash_of_bytes;

/// In the order of the array form; the last ones are of the map form only.
const STORED_FIELDS: [&str; 15] = [
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
    "mm_keys",
    "locality",
];

const STORED_ARRAY_FIELDS: usize = 11;
const FULL_ATTENTION: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];
const SLIDING_WINDOW: [&str; 2] = ["sliding_window", "sliding_window_mla"];
/// State-space and linear-attention layers: vLLM names them all alike.
const STATE: [&str; 1] = ["mamba"];
/// In the order of the array form; the last one is of the map form only.
const REMOVED_FIELDS: [&str; 4] = ["block_hashes", "medium", "group_idx", "locality"];
const REMOVED_ARRAY_FIELDS: usize = 3;
/// The tier of what is not the publisher's own.
const EXTERNAL: u8 = 3;
const MAX_GROUP: i128 = 65_535;

pub(super) fn read_stored<'a>(reader: &mut Reader<'a>, head: Value<'a>, batch: &mut Batch) -> Read<Stored> {
    let mut stored = Stored { full_attention: true, ..Stored::default() };
    let mut seen = [false; STORED_FIELDS.len()];
    let mut kind = None;
    let mut window = Value::Nil;
    let mut remote = false;
    let (mut extra_keys, mut lookahead, mut salt, mut mm_keys) = (None, None, None, None);
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
                _ => return bad("block_size is not a valid size"),
            },
            4 => match read_scalar(reader)? {
                Value::Nil => stored.lora_id = 0,
                Value::Int(id) => stored.lora_id = id,
                _ => return bad("lora_id is not a number"),
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
            13 => {
                mm_keys = Some(*reader);
                reader.skip()?;
            }
            14 => remote = is_remote(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if remote {
        stored.tier = EXTERNAL;
    }
    if let Some(missing) = (0..4).find(|&field| !seen[field]) {
        return bad(format!("{} is missing", STORED_FIELDS[missing]));
    }
    stored.full_attention = match kind {
        Some(kind) if !kind.is_empty() => FULL_ATTENTION.iter().any(|full| full.as_bytes() == kind),
        _ => stored.group == 0,
    };
    let is_any_of = |kinds: &[&str]| kinds.iter().any(|known| Some(known.as_bytes()) == kind);
    if is_any_of(&STATE) {
        stored.window = STATE_WINDOW;
    } else if is_any_of(&SLIDING_WINDOW)
        && let Value::Int(tokens) = window
    {
        stored.window = u32::try_from(tokens).unwrap_or(0);
    }
    if let Some(mut keys) = extra_keys {
        read_extra_keys(&mut keys, &mut stored, batch)?;
    }
    if let (true, Some(mut keys)) = (batch.mm_items(stored.mm_items).is_empty(), mm_keys) {
        read_mm_keys(&mut keys, &mut stored, batch)?;
    }
    if let (None, true, Some(mut salt)) = (stored.parent, stored.cache_salt.is_empty(), salt) {
        stored.cache_salt = batch.add_text(read_text(&mut salt, "cache_salt")?);
    }
    if let (false, Some(mut tokens)) = (stored.pairs, lookahead) {
        stored.lookahead = read_lookahead(&mut tokens, &stored, batch.tokens(stored.tokens))?;
    }
    Ok(stored)
}

pub(super) fn read_removed<'a>(reader: &mut Reader<'a>, head: Value<'a>, batch: &mut Batch) -> Read<Removed> {
    let mut removed = Removed::default();
    let (mut seen, mut remote) = (false, false);
    let names = match head {
        Value::Map(_) => &REMOVED_FIELDS[..],
        _ => &REMOVED_FIELDS[..REMOVED_ARRAY_FIELDS],
    };
    for_each_field(reader, head, names, |reader, field| {
        match field {
            0 => {
                seen = true;
                removed.engine_hashes = read_hashes(reader, batch)?;
            }
            1 => removed.tier = read_tier(reader)?,
            2 => removed.group = read_group(reader)?,
            _ => remote = is_remote(reader)?,
        }
        Ok(())
    })?;
    if remote {
        removed.tier = EXTERNAL;
    }
    if seen { Ok(removed) } else { bad("block_hashes is missing") }
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
    let Some(length) = reader.elements()? else { return bad("block_hashes is not an array") };
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

fn read_text<'a>(reader: &mut Reader<'a>, name: &str) -> Read<&'a str> {
    match read_scalar(reader)? {
        Value::Nil => Ok(""),
        value => text_of(value, name),
    }
}

fn text_of<'a>(value: Value<'a>, name: &str) -> Read<&'a str> {
    let Value::Str(bytes) = value else { return bad(format!("{name} is not a string")) };
    std::str::from_utf8(bytes).or_else(|_| bad(format!("{name} is not UTF-8")))
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
        "EXTERNAL" | "OBJ" | "REMOTE" | "NETWORK" | "SHARED" | "SHARED_STORAGE" => EXTERNAL,
        _ => return bad(format!("medium {medium:?} is unknown")),
    })
}

/// Whether a tier is not the publisher's own.
fn is_remote(reader: &mut Reader<'_>) -> Read<bool> {
    let locality = read_text(reader, "locality")?;
    match locality.to_uppercase().as_str() {
        "" | "LOCAL" => Ok(false),
        "REMOTE" => Ok(true),
        _ => bad(format!("locality {locality:?} is unknown")),
    }
}

fn read_group(reader: &mut Reader<'_>) -> Read<u32> {
    match read_scalar(reader)? {
        Value::Nil => Ok(0),
        Value::Int(group) if (0..=MAX_GROUP).contains(&group) => Ok(group as u32),
        _ => bad("group_idx is not a valid group"),
    }
}

/// The salt and each block's multimodal ids, from what else entered the engine's block hashes.
fn read_extra_keys(reader: &mut Reader<'_>, stored: &mut Stored, batch: &mut Batch) -> Read<()> {
    if { *reader }.value()? == Value::Nil {
        return Ok(());
    }
    let Some(length) = reader.elements()? else { return bad("extra_keys is not an array") };
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

/// Each block's multimodal hashes, as TensorRT-LLM sends them.
fn read_mm_keys(reader: &mut Reader<'_>, stored: &mut Stored, batch: &mut Batch) -> Read<()> {
    if { *reader }.value()? == Value::Nil {
        return Ok(());
    }
    let Some(length) = reader.elements()? else { return bad("mm_keys is not an array") };
    let mut items: Vec<Vec<String>> = Vec::new();
    for position in 0..length {
        let none = || bad(format!("mm_keys of block {position} are not maps with a hash"));
        let Some(keys) = reader.elements()? else { return none() };
        let mut hashes = Vec::new();
        for _ in 0..keys {
            let head = reader.value()?;
            let Value::Map(_) = head else { return none() };
            let mut hash = None;
            for_each_field(reader, head, &["hash"], |reader, _| {
                hash = Some(text_of(read_scalar(reader)?, "the hash of a multimodal item")?.to_owned());
                Ok(())
            })?;
            let Some(hash) = hash else { return none() };
            hashes.push(hash);
        }
        items.push(hashes);
    }
    if items.iter().any(|hashes| !hashes.is_empty()) {
        stored.mm_items = batch.add_mm_items(items);
    }
    Ok(())
}
