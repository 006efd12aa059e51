//! The little of protobuf's wire format that the hot messages need: fields in, fields out.

/// A field's content, as the wire has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
}

const START_GROUP: u32 = 3;
const END_GROUP: u32 = 4;
/// Groups within one another; other readers refuse about as many.
const MAX_GROUPS: usize = 100;

/// Reads the fields of a message in order.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// The next field and its number; Some(None) at the end, None if the bytes are no message.
    #[allow(clippy::should_implement_trait, clippy::type_complexity)] // a message can end badly; an iterator cannot say so
    pub fn next(&mut self) -> Option<Option<(u32, Field<'a>)>> {
        while !self.rest.is_empty() {
            let tag = self.short_varint()?;
            let number = tag >> 3;
            if number == 0 {
                return None;
            }
            let field = match tag & 7 {
                0 => Field::Varint(self.varint()?),
                1 => Field::Fixed64(u64::from_le_bytes(self.take(8)?.try_into().ok()?)),
                2 => {
                    let length = self.short_varint()?;
                    Field::Bytes(self.take(length as usize)?)
                }
                START_GROUP => {
                    self.skip_group(number)?;
                    continue;
                }
                5 => Field::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
                _ => return None,
            };
            return Some(Some((number, field)));
        }
        Some(None)
    }

    /// A group is how proto2 nested messages: no message of ours has any, but one may come as an unknown field. As
    /// other readers do it, nothing in it is looked at, field numbers neither.
    fn skip_group(&mut self, number: u32) -> Option<()> {
        let mut open = vec![number];
        while let Some(&innermost) = open.last() {
            let tag = self.short_varint()?;
            let number = tag >> 3;
            match tag & 7 {
                0 => drop(self.varint()?),
                1 => drop(self.take(8)?),
                2 => {
                    let length = self.short_varint()?;
                    self.take(length as usize)?;
                }
                START_GROUP if open.len() < MAX_GROUPS => open.push(number),
                END_GROUP if number == innermost => drop(open.pop()),
                5 => drop(self.take(4)?),
                _ => return None,
            }
        }
        Some(())
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// A number, at any place of a message.
    #[inline]
    pub fn varint(&mut self) -> Option<u64> {
        if let Some(byte) = self.single_byte() { Some(u64::from(byte)) } else { self.long_varint() }
    }

    /// The first byte, if it is a number by itself, as nearly all tags and lengths are.
    #[inline]
    fn single_byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.rest.split_first().filter(|(byte, _)| **byte < 0x80)?;
        self.rest = rest;
        Some(byte)
    }

    fn long_varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                // Of the tenth byte one bit has room; other readers drop the rest, too.
                return Some(value);
            }
        }
        None
    }

    /// A tag or a length: other readers, too, refuse one that is longer than 32 bits need, even by zeros.
    #[inline]
    fn short_varint(&mut self) -> Option<u32> {
        if let Some(byte) = self.single_byte() {
            return Some(u32::from(byte));
        }
        let before = self.rest.len();
        let value = self.long_varint()?;
        (before - self.rest.len() <= 5).then_some(u32::try_from(value).ok()?)
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }
}

/// Writes the fields of a message; the caller keeps them in ascending order, as other writers do.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// A number; 0 is not written, as in proto3.
    pub fn varint(&mut self, number: u32, value: u64) {
        if value != 0 {
            self.present(number, value);
        }
    }

    /// A number of a field with presence; 0 is written, too.
    pub fn present(&mut self, number: u32, value: u64) {
        self.raw_varint(u64::from(number << 3));
        self.raw_varint(value);
    }

    /// A number of fixed width; 0 is not written.
    pub fn fixed64(&mut self, number: u32, value: u64) {
        if value != 0 {
            self.present_fixed64(number, value);
        }
    }

    /// A number of fixed width with presence; 0 is written, too.
    pub fn present_fixed64(&mut self, number: u32, value: u64) {
        self.raw_varint(u64::from(number << 3 | 1));
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// A floating-point number; positive 0 is not written.
    pub fn double(&mut self, number: u32, value: f64) {
        self.fixed64(number, value.to_bits());
    }

    /// Repeated numbers of fixed width, packed; none is not written.
    pub fn packed_fixed64(&mut self, number: u32, values: &[u64]) {
        if !values.is_empty() {
            self.length(number, values.len() * 8);
            self.bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
    }

    /// A string; an empty one is not written.
    pub fn string(&mut self, number: u32, value: &str) {
        if !value.is_empty() {
            self.bytes(number, value.as_bytes());
        }
    }

    /// Fields that are written already.
    pub fn append(&mut self, fields: &Self) {
        self.bytes.extend_from_slice(&fields.bytes);
    }

    /// Bytes, a string or a message; written even if empty.
    pub fn bytes(&mut self, number: u32, value: &[u8]) {
        self.length(number, value.len());
        self.bytes.extend_from_slice(value);
    }

    /// Repeated numbers, packed; none is not written.
    pub fn packed(&mut self, number: u32, values: impl Iterator<Item = u64> + Clone) {
        let length: usize = values.clone().map(varint_length).sum();
        if length > 0 {
            self.length(number, length);
            values.for_each(|value| self.raw_varint(value));
        }
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    fn length(&mut self, number: u32, length: usize) {
        self.raw_varint(u64::from(number << 3 | 2));
        self.raw_varint(length as u64);
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }
}

fn varint_length(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Option<Vec<(u32, Field<'_>)>> {
        let mut reader = Reader::new(bytes);
        let mut fields = Vec::new();
        while let Some(field) = reader.next()? {
            fields.push(field);
        }
        Some(fields)
    }

    #[test]
    fn what_is_written_is_read() {
        let mut writer = Writer::default();
        let values = [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX];
        for value in values {
            writer.varint(1, value);
        }
        writer.bytes(2, b"");
        writer.bytes(200_000, b"abc");
        writer.packed(3, [1u64, 300].into_iter());
        writer.packed(4, std::iter::empty::<u64>());
        let mut expected: Vec<_> = values[1..].iter().map(|&value| (1, Field::Varint(value))).collect();
        expected.push((2, Field::Bytes(b"")));
        expected.push((200_000, Field::Bytes(b"abc")));
        expected.push((3, Field::Bytes(&[1, 0xac, 2])));
        assert_eq!(read(writer.as_bytes()), Some(expected));
    }

    #[test]
    fn fixed_fields_are_read() {
        let bytes = [0x0d, 1, 0, 0, 0, 0x11, 2, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(read(&bytes), Some(vec![(1, Field::Fixed32(1)), (2, Field::Fixed64(2))]));
    }

    #[test]
    fn of_a_number_64_bits_are_read() {
        let long = |last| [&[0x08][..], &[0x80; 9], &[last]].concat();
        assert_eq!(read(&long(1)), Some(vec![(1, Field::Varint(1 << 63))]));
        assert_eq!(read(&long(0x7e)), Some(vec![(1, Field::Varint(0))]));
    }

    #[test]
    fn groups_are_passed_over() {
        let group = [0x0b, 0x08, 1, 0x13, 0x1a, 1, 9, 0x14, 0x15, 1, 2, 3, 4, 0x0c];
        let message = [&[0x08, 1][..], &group, &[0x10, 2], &group].concat();
        assert_eq!(read(&message), Some(vec![(1, Field::Varint(1)), (2, Field::Varint(2))]));
        assert_eq!(read(&[0x0b, 0x00, 0x00, 0x0c]), Some(vec![]));
        let nested = |depth| [vec![0x0b; depth], vec![0x0c; depth]].concat();
        assert_eq!(read(&nested(MAX_GROUPS)), Some(vec![]));
        assert_eq!(read(&nested(MAX_GROUPS + 1)), None);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [
            &[0x08][..],                                                  // no value
            &[0x0a, 5, 1],                                                // shorter than it says
            &[0x0b],                                                      // a group without end
            &[0x0b, 0x14],                                                // with another's end
            &[0x0c],                                                      // an end without group
            &[0x00, 1],                                                   // field 0
            &[0x08, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1], // eleven bytes
            &[0x80],
            &[0x88, 0x80, 0x80, 0x80, 0x80, 0x00, 1], // a tag of six bytes
            &[0x0a, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1],
        ] {
            assert_eq!(read(bytes), None, "{bytes:?}");
        }
    }
}
