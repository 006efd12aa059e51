//! Strings and numbers of JSON as Python's `json` reads them, by their places in a text.

use std::borrow::Cow;

use memchr::{memchr, memchr2};

/// Of a string, before a search is worth its beginning.
const SHORT_BYTES: usize = 16;

/// Passes over space; where it ends.
pub fn space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// Passes over a string; where it ends, or where something else is expected.
pub fn string(text: &[u8], at: usize) -> Result<usize, usize> {
    if text.get(at) != Some(&b'"') {
        return Err(at);
    }
    let mut at = at + 1;
    loop {
        at = plain(text, at)?;
        match text.get(at) {
            Some(b'"') => return Ok(at + 1),
            Some(b'\\') => at = escape(text, at)?,
            _ => return Err(at),
        }
    }
}

/// Passes over what stands for itself in a string.
fn plain(text: &[u8], mut at: usize) -> Result<usize, usize> {
    // Names are short, and so is what stands between escapes: a search would cost more than it saves.
    for _ in 0..SHORT_BYTES {
        match text.get(at) {
            Some(0..0x20 | b'"' | b'\\') | None => return Ok(at),
            Some(_) => at += 1,
        }
    }
    let rest = &text[at..];
    let plain = memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
    if rest[..plain].iter().fold(false, |found, &byte| found | (byte < 0x20)) {
        return Err(at + rest.iter().position(|&byte| byte < 0x20).unwrap_or(0));
    }
    Ok(at + plain)
}

fn escape(text: &[u8], at: usize) -> Result<usize, usize> {
    match text.get(at + 1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 2),
        Some(b'u') if unit(text, at).is_some() => Ok(at + 6),
        _ => Err(at + 1),
    }
}

/// Passes over a number; where it ends and whether it is an integer, or where something else is expected.
pub fn number(text: &[u8], begin: usize) -> Result<(usize, bool), usize> {
    let digits = |mut at: usize| {
        while matches!(text.get(at), Some(b'0'..=b'9')) {
            at += 1;
        }
        at
    };
    let some_digits = |at| if digits(at) > at { Ok(digits(at)) } else { Err(at) };
    let first = begin + usize::from(text.get(begin) == Some(&b'-'));
    let mut at = if text.get(first) == Some(&b'0') { first + 1 } else { some_digits(first)? };
    let mut whole = true;
    if text.get(at) == Some(&b'.') {
        (at, whole) = (some_digits(at + 1)?, false);
    }
    if matches!(text.get(at), Some(b'e' | b'E')) {
        let signed = matches!(text.get(at + 1), Some(b'+' | b'-'));
        (at, whole) = (some_digits(at + 1 + usize::from(signed))?, false);
    }
    Ok((at, whole))
}

/// The characters of a string that has been passed over, from what stands between its quotation marks.
pub fn characters(raw: &[u8]) -> usize {
    let (mut at, mut count) = (0, 0);
    loop {
        let rest = &raw[at..];
        let plain = memchr(b'\\', rest).unwrap_or(rest.len());
        count += rest[..plain].iter().filter(|&&byte| byte & 0xc0 != 0x80).count();
        if plain == rest.len() {
            return count;
        }
        at += plain;
        at += escaped(raw, at).1;
        count += 1;
    }
}

/// The text of a string that has been passed over; half of a surrogate pair becomes a question mark.
pub fn decoded(raw: &str) -> Cow<'_, str> {
    let push = |text: &mut String, code| text.push(char::from_u32(code).unwrap_or('?'));
    unescape(raw, String::push_str, push).map_or(Cow::Borrowed(raw), Cow::Owned)
}

/// The same in bytes, of which half of a surrogate pair has three; None: there is no escape in it.
pub fn decoded_bytes(raw: &str) -> Option<Vec<u8>> {
    let push = |text: &mut Vec<u8>, code: u32| match char::from_u32(code) {
        Some(character) => text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
        None => text
            .extend([0xe0 | code >> 12, 0x80 | code >> 6 & 0x3f, 0x80 | code & 0x3f].map(|byte| byte as u8)),
    };
    unescape(raw, |text, plain| text.extend_from_slice(plain.as_bytes()), push)
}

fn unescape<T: Default>(
    raw: &str,
    push_plain: impl Fn(&mut T, &str),
    push: impl Fn(&mut T, u32),
) -> Option<T> {
    let bytes = raw.as_bytes();
    let mut escapes = memchr(b'\\', bytes);
    escapes?;
    let (mut at, mut text) = (0, T::default());
    while let Some(plain) = escapes {
        push_plain(&mut text, &raw[at..at + plain]);
        let (code, taken) = escaped(bytes, at + plain);
        push(&mut text, code);
        at += plain + taken;
        escapes = memchr(b'\\', &bytes[at..]);
    }
    push_plain(&mut text, &raw[at..]);
    Some(text)
}

/// The code of an escape that has been passed over, and its bytes.
fn escaped(raw: &[u8], at: usize) -> (u32, usize) {
    match raw[at + 1] {
        b'b' => (0x8, 2),
        b'f' => (0xc, 2),
        b'n' => (0xa, 2),
        b'r' => (0xd, 2),
        b't' => (0x9, 2),
        b'u' => {
            let high = unit(raw, at).expect("it was passed over");
            match unit_of_pair(raw, at, high) {
                Some(low) => (0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00), 12),
                None => (high, 6),
            }
        }
        other => (u32::from(other), 2),
    }
}

/// The code unit of the escape that begins here.
fn unit(text: &[u8], at: usize) -> Option<u32> {
    let digits = text.get(at + 2..at + 6)?;
    if text.get(at..at + 2)? != b"\\u" || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// The second half of the pair whose first half begins here.
fn unit_of_pair(text: &[u8], at: usize, high: u32) -> Option<u32> {
    let low = unit(text, at + 6)?;
    ((0xd800..0xdc00).contains(&high) && (0xdc00..0xe000).contains(&low)).then_some(low)
}
