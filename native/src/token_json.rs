//! Token ids as JSON has them: a list of numbers.
//!
//! Native backend of `kvscout_common.http.token_json_reference`.

use crate::json_text::space;

/// Bytes of a packed token id.
const TOKEN_BYTES: usize = 4;

/// Appends numbers with commas between them.
///
/// `packed` is little-endian u32; what is left over at its end is passed over.
pub fn write(packed: &[u8], into: &mut Vec<u8>) {
    let mut digits = itoa::Buffer::new();
    for (number, token) in packed.chunks_exact(TOKEN_BYTES).enumerate() {
        if number > 0 {
            into.push(b',');
        }
        let token = u32::from_le_bytes(token.try_into().expect("a chunk has four bytes"));
        into.extend_from_slice(digits.format(token).as_bytes());
    }
}

/// Reads a list of nothing but numbers of 32 bits, without sign, fraction and exponent.
///
/// The numbers, little-endian, and how many bytes of `text` they took; `None`: it begins with no such list.
pub fn read(text: &[u8]) -> Option<(Vec<u8>, usize)> {
    let mut at = space(text, mark(text, 0, b'[')?);
    if text.get(at) == Some(&b']') {
        return Some((Vec::new(), at + 1));
    }
    // Few numbers are shorter, with their comma, than they are packed.
    let mut packed = Vec::with_capacity(text.len());
    loop {
        let rest = text.get(at..)?;
        let (value, digits) = short_number(rest).or_else(|| number(rest))?;
        packed.extend_from_slice(&value.to_le_bytes());
        at = space(text, at + digits);
        match text.get(at)? {
            b',' => at = space(text, at + 1),
            b']' => return Some((packed, at + 1)),
            _ => return None,
        }
    }
}

/// A number of up to seven digits and how many those are, from eight bytes at once: a token id's length cannot be
/// foreseen, so that a branch for each digit costs more than the digit. `None`: `number` is to look.
fn short_number(text: &[u8]) -> Option<(u32, usize)> {
    let word = u64::from_le_bytes(*text.first_chunk()?);
    let tens = (word & each(0xF0)) ^ each(0x30);
    // What six more takes out of 0x30..0x3F is 0x3A..0x3F. A carry out of a byte comes behind one that is no digit.
    let past_nine = (word.wrapping_add(each(6)) & each(0xF0)) ^ each(0x30);
    let bits = (tens | past_nine).trailing_zeros() & !7;
    // What is usual behind a number lacks this bit of a digit, which is known sooner; the next number waits for it.
    let likely_bits = (!word & each(0x10)).trailing_zeros() & !7;
    let leads_with_zero = word & 0xFF == u64::from(b'0') && bits > 8;
    if bits != likely_bits || bits == 0 || bits == u64::BITS || leads_with_zero {
        return None;
    }
    // The first digit is the lowest byte: what is missing of eight digits become zeros before it.
    let digits = (word & each(0x0F)) << (u64::BITS - likely_bits);
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8) & 0x00FF_00FF_00FF_00FF;
    let fours = pairs.wrapping_mul(100).wrapping_add(pairs >> 16) & 0x0000_FFFF_0000_FFFF;
    let value = fours.wrapping_mul(10_000).wrapping_add(fours >> 32) & 0xFFFF_FFFF;
    Some((u32::try_from(value).ok()?, (likely_bits / 8) as usize))
}

/// A byte in each place of a word.
const fn each(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

fn number(text: &[u8]) -> Option<(u32, usize)> {
    let mut value = 0u64;
    let mut digits = 0;
    while let Some(digit @ b'0'..=b'9') = text.get(digits) {
        value = value * 10 + u64::from(digit - b'0');
        if value > u64::from(u32::MAX) {
            return None;
        }
        digits += 1;
    }
    let leads_with_zero = text.first() == Some(&b'0') && digits > 1;
    if digits == 0 || leads_with_zero {
        return None;
    }
    Some((u32::try_from(value).ok()?, digits))
}

fn mark(text: &[u8], at: usize, mark: u8) -> Option<usize> {
    (*text.get(at)? == mark).then_some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(tokens: &[u32]) -> Vec<u8> {
        tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
    }

    #[test]
    fn what_was_written_is_read() {
        for tokens in [&[][..], &[0], &[1, 22, 333, 4_294_967_295, 0]] {
            let mut text = b"[".to_vec();
            write(&packed(tokens), &mut text);
            text.extend_from_slice(b"], more");
            assert_eq!(read(&text), Some((packed(tokens), text.len() - 6)));
        }
    }

    #[test]
    fn numbers_of_any_length_are_read_however_much_of_the_text_is_left() {
        let tokens: Vec<u32> =
            (0..10).flat_map(|power| [10u32.pow(power), 987_654_321 / 10u32.pow(power)]).collect();
        for token in tokens {
            for more in ["]", ",7]", " ]", "\n, 1234567]", "]            "] {
                let text = format!("[{token}{more}");
                let found = read(text.as_bytes()).expect("it is a list");
                assert_eq!(found.0[..4], token.to_le_bytes(), "{text}");
                assert_eq!(found.1, text.trim_end().len(), "{text}");
            }
        }
    }

    #[test]
    fn no_byte_beside_the_digits_counts_as_one() {
        for byte in (0..=u8::MAX).filter(|byte| !b"0123456789,] \t\n\r".contains(byte)) {
            for digits in 0..9 {
                let mut text = b"[".to_vec();
                text.resize(1 + digits, b'9');
                text.push(byte);
                text.extend_from_slice(b"1,2345678]");
                assert_eq!(read(&text), None, "{byte:#x} after {digits} digits");
            }
        }
    }

    #[test]
    fn space_is_passed_over_where_json_has_it() {
        assert_eq!(read(b"[ 1\t,\r\n2 ]"), Some((packed(&[1, 2]), 10)));
        assert_eq!(read(b"[ ]"), Some((Vec::new(), 3)));
    }

    #[test]
    fn whatever_else_is_no_list_of_token_ids() {
        let lists = [
            "",
            "[",
            "[1",
            "[1,",
            "[1,]",
            "[,1]",
            "[01]",
            "[-0]",
            "[+1]",
            "[1.0]",
            "[1e3]",
            "[4294967296]",
            "[1 2]",
        ];
        let others =
            [" [1]", "1", "[true]", "[null]", "[\"1\"]", "[[1]]", "[1}", "{}", "[99999999999999999999999]"];
        for text in lists.into_iter().chain(others) {
            assert_eq!(read(text.as_bytes()), None, "{text}");
        }
    }
}
