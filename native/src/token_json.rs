//! Token ids as JSON has them: a list of numbers.
//!
//! A twin of `kvscout_common.token_json_reference`.

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
    let mut packed = Vec::new();
    if text.get(at) == Some(&b']') {
        return Some((packed, at + 1));
    }
    loop {
        let begin = at;
        let mut value = 0u64;
        while let Some(digit @ b'0'..=b'9') = text.get(at) {
            value = value * 10 + u64::from(digit - b'0');
            if value > u64::from(u32::MAX) {
                return None;
            }
            at += 1;
        }
        let leads_with_zero = text.get(begin) == Some(&b'0') && at > begin + 1;
        if at == begin || leads_with_zero {
            return None;
        }
        packed.extend_from_slice(&u32::try_from(value).ok()?.to_le_bytes());
        at = space(text, at);
        match text.get(at)? {
            b',' => at = space(text, at + 1),
            b']' => return Some((packed, at + 1)),
            _ => return None,
        }
    }
}

fn mark(text: &[u8], at: usize, mark: u8) -> Option<usize> {
    (*text.get(at)? == mark).then_some(at + 1)
}

fn space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
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
