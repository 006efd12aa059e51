//! The tokens of a Stored event: plain, as EAGLE pairs, or with those that follow.

use super::msgpack::{Read, Reader, Value, bad, read_scalar};
use crate::events::{Batch, Span, Stored};

fn token_of(value: Value<'_>) -> Read<u32> {
    match value {
        Value::Int(token) => u32::try_from(token).or_else(|_| bad("token_ids are not all 32-bit integers")),
        Value::Bool(token) => Ok(u32::from(token)),
        _ => bad("token_ids are not all 32-bit integers"),
    }
}

/// Token ids, whether they came as EAGLE pairs, and then the last pair's second.
pub(super) fn read_tokens(reader: &mut Reader<'_>, batch: &mut Batch) -> Read<(Span, bool, Option<u32>)> {
    let tokens = &mut batch.tokens;
    let start = tokens.len();
    let Some(length) = reader.elements()? else { return bad("token_ids is not an array") };
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

pub(super) fn read_lookahead(reader: &mut Reader<'_>, stored: &Stored, tokens: &[u32]) -> Read<Option<u32>> {
    let Some(length) = ({
        let mut head = *reader;
        match head.value()? {
            Value::Nil => return Ok(None),
            _ => reader.elements()?,
        }
    }) else {
        return bad("lookahead_token_ids is not an array");
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
    // One token a block, or the tokens after the last block: the blocks' own tokens show which.
    let starts = tokens.iter().skip(size).step_by(size.max(1)).take(if size > 0 { usize::MAX } else { 0 });
    let one_a_block =
        following.len() == blocks && blocks > 0 && following[..blocks - 1].iter().eq(starts.take(blocks - 1));
    Ok(if one_a_block { following.last() } else { following.first() }.copied())
}
