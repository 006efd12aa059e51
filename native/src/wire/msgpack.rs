//! A reader of msgpack over bytes from outside: values one by one, within bounds, and fields by name.

/// Entries of one map: engines send at most 17.
const MAX_MAP: usize = 256;

/// Arrays and maps within one another.
pub(super) const MAX_NESTING: u32 = 512;

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
}

/// A position in a payload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) at: usize,
    pub(super) max_array: usize,
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
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => return broken("a type that engines do not send"),
        })
    }

    /// Steps over a value with all that is in it.
    pub(super) fn skip(&mut self) -> Read<()> {
        let value = self.value()?;
        self.skip_rest_of(value, MAX_NESTING)
    }

    pub(super) fn skip_rest_of(&mut self, value: Value<'a>, nesting: u32) -> Read<()> {
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
                return broken("the key of a map is not a scalar");
            }
            self.skip_rest_of(value, nesting - 1)?;
        }
        Ok(())
    }

    /// A value's elements, as positions, if it is an array; else None, and the reader is after it.
    pub(super) fn elements(&mut self) -> Read<Option<usize>> {
        match self.value()? {
            Value::Array(length) => Ok(Some(length)),
            other => self.skip_rest_of(other, MAX_NESTING).map(|()| None),
        }
    }
}

/// Reads the named fields of an array (after its tag) or map; the first ones are passed to `read` by number.
pub(super) fn for_each_field<'a>(
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

/// A value that must be whole in itself: of arrays and maps only the head, which no field wants.
pub(super) fn read_scalar<'a>(reader: &mut Reader<'a>) -> Read<Value<'a>> {
    let value = reader.value()?;
    reader.skip_rest_of(value, MAX_NESTING)?;
    Ok(value)
}
