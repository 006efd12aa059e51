//! A reader of msgpack over bytes from outside: values one by one, within bounds, and fields by name.

/// Entries of one map: engines send at most 17.
const MAX_MAP: usize = 256;

/// Arrays and maps within one another, as in Python's msgpack.
const MAX_NESTING: u32 = 1024;

/// Why a value was not read.
pub(super) enum Failure {
    /// The bytes are no msgpack: nothing after them can be read either.
    Bytes(String),
    /// The value is not what belongs here: the event is lost.
    Meaning(String),
}

pub(super) type Read<T> = Result<T, Failure>;

fn broken<T>(what: &str) -> Read<T> {
    Err(Failure::Bytes(what.into()))
}

pub(super) fn bad<T>(what: impl Into<String>) -> Read<T> {
    Err(Failure::Meaning(what.into()))
}

/// One value; arrays and maps with their length only: their elements follow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    Nil,
    Bool(bool),
    Int(i128),
    Float(f64),
    /// Not necessarily UTF-8.
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(usize),
    Map(usize),
    /// Of an extension type, which no field has: only its end matters.
    Extension,
}

/// A position in a payload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
    max_array: usize,
    /// How many arrays and maps may be within one another in the next value.
    nesting: u32,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], max_array: usize) -> Self {
        Reader { bytes, at: 0, max_array, nesting: MAX_NESTING }
    }

    /// Reads what is in an array or map, with one level fewer.
    pub(super) fn within<T>(&mut self, read: impl FnOnce(&mut Self) -> Read<T>) -> Read<T> {
        let nesting = self.nesting;
        self.nesting = nesting.saturating_sub(1);
        let found = read(self);
        self.nesting = nesting;
        found
    }

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
    pub(super) fn value(&mut self) -> Read<Value<'a>> {
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
            0xc7..=0xc9 => {
                let length = self.length(1 << (tag - 0xc7))?;
                return self.extension(length);
            }
            0xd4..=0xd8 => return self.extension(1 << (tag - 0xd4)),
            0xc1 => return broken("a tag without a meaning"),
        })
    }

    /// Type and bytes of an extension: of any type, but a timestamp must be one of its three forms.
    fn extension(&mut self, length: usize) -> Read<Value<'a>> {
        const TIMESTAMP: u8 = -1_i8 as u8;
        let extension_type = self.take(1)?[0];
        let bytes = self.take(length)?;
        if extension_type == TIMESTAMP {
            let nanoseconds = match (length, bytes.first_chunk()) {
                (4, _) => Some(0),
                // 30 bits, before the 34 of the seconds.
                (8, Some(number)) => Some(u32::from_be_bytes(*number) >> 2),
                (12, Some(number)) => Some(u32::from_be_bytes(*number)),
                _ => None,
            };
            if nanoseconds.is_none_or(|nanoseconds| nanoseconds >= 1_000_000_000) {
                return broken("an extension of the type of timestamps is none");
            }
        }
        Ok(Value::Extension)
    }

    /// Steps over a value with all that is in it.
    pub(super) fn skip(&mut self) -> Read<()> {
        let value = self.value()?;
        self.skip_rest_of(value)
    }

    pub(super) fn skip_rest_of(&mut self, value: Value<'a>) -> Read<()> {
        let (elements, is_map) = match value {
            Value::Array(length) => (length, false),
            Value::Map(length) => (2 * length, true),
            _ => return Ok(()),
        };
        if self.nesting == 0 {
            return broken("values are nested too deeply");
        }
        self.within(|reader| {
            for element in 0..elements {
                let value = reader.value()?;
                if is_map && element % 2 == 0 && matches!(value, Value::Array(_) | Value::Map(_)) {
                    return broken("the key of a map is not a scalar");
                }
                reader.skip_rest_of(value)?;
            }
            Ok(())
        })
    }

    /// A value's elements, as positions, if it is an array; else None, and the reader is after it.
    pub(super) fn elements(&mut self) -> Read<Option<usize>> {
        match self.value()? {
            Value::Array(length) => Ok(Some(length)),
            other => self.skip_rest_of(other).map(|()| None),
        }
    }
}

/// Reads the named fields of an array (after its tag) or map; the first ones are passed to `read` by number.
///
/// A map may name a field twice: the last one counts, also where the one before it cannot be read.
pub(super) fn for_each_field<'a>(
    reader: &mut Reader<'a>,
    head: Value<'a>,
    names: &[&str],
    mut read: impl FnMut(&mut Reader<'a>, usize) -> Read<()>,
) -> Read<()> {
    match head {
        Value::Array(length) => reader.within(|reader| {
            for field in 0..length {
                if field < names.len() { read(reader, field)? } else { reader.skip()? }
            }
            Ok(())
        }),
        Value::Map(length) => reader.within(|reader| {
            // Engines send the fields in order, so each is looked for after the one before it first.
            let mut next = 0;
            let mut unread: Vec<(usize, String)> = Vec::new();
            for _ in 0..length {
                let key = reader.value()?;
                if matches!(key, Value::Array(_) | Value::Map(_)) {
                    return broken("the key of a map is not a scalar");
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
                let Some(field) = field else {
                    reader.skip()?;
                    continue;
                };
                next = field + 1;
                let start = *reader;
                let found = read(reader, field);
                unread.retain(|&(earlier, _)| earlier != field);
                match found {
                    Err(Failure::Meaning(message)) => {
                        *reader = start;
                        reader.skip()?;
                        unread.push((field, message));
                    }
                    found => found?,
                }
            }
            unread.into_iter().next().map_or(Ok(()), |(_, message)| bad(message))
        }),
        _ => bad("neither array nor map"),
    }
}

/// A value that must be whole in itself: of arrays and maps only the head, which no field wants.
pub(super) fn read_scalar<'a>(reader: &mut Reader<'a>) -> Read<Value<'a>> {
    let value = reader.value()?;
    reader.skip_rest_of(value)?;
    Ok(value)
}
