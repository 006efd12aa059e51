//! Metadata: what HTTP/2 headers and trailers are to a call.

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::status::{Status, UNKNOWN};

/// Names and values in order; a name that ends in "-bin" has bytes, any other text.
pub type Metadata = Vec<(String, Vec<u8>)>;

const STATUS: &str = "grpc-status";
const MESSAGE: &str = "grpc-message";
/// A serialised `google.rpc.Status`, which the protocol leaves to the application.
const DETAILS: &str = "grpc-status-details-bin";

/// What of headers or trailers a call gets to see: all but the protocol's own.
pub fn visible(headers: &HeaderMap) -> Metadata {
    headers
        .iter()
        .filter(|(name, _)| !reserved(name.as_str()))
        .filter_map(|(name, value)| {
            let name = name.as_str();
            let value = if name.ends_with("-bin") {
                from_base64(value.as_bytes())?
            } else {
                value.as_bytes().to_vec()
            };
            Some((name.to_owned(), value))
        })
        .collect()
}

fn reserved(name: &str) -> bool {
    matches!(name, "te" | "content-type" | "content-length" | "connection" | "trailer")
        || (name.starts_with("grpc-") && name != DETAILS)
}

/// Adds metadata to headers or trailers.
///
/// # Errors
/// The name that is none, or that is the protocol's own, or whose value no header can carry.
pub fn add(headers: &mut HeaderMap, metadata: &Metadata) -> Result<(), String> {
    for (name, value) in metadata {
        let header = HeaderName::from_bytes(name.as_bytes()).map_err(|_| name.clone())?;
        if reserved(header.as_str()) {
            return Err(name.clone());
        }
        let value = if name.ends_with("-bin") {
            HeaderValue::from_str(&to_base64(value)).map_err(|_| name.clone())?
        } else {
            HeaderValue::from_bytes(value).map_err(|_| name.clone())?
        };
        headers.append(header, value);
    }
    Ok(())
}

/// Adds a status to trailers.
pub fn add_status(trailers: &mut HeaderMap, status: &Status) {
    trailers.insert(STATUS, HeaderValue::from(u16::from(status.code)));
    if !status.message.is_empty() {
        let message = HeaderValue::from_str(&percent_encoded(&status.message)).expect("printable ASCII");
        trailers.insert(MESSAGE, message);
    }
}

/// The status that trailers carry; None: none.
pub fn status_of(trailers: &HeaderMap) -> Option<Status> {
    let code = trailers.get(STATUS)?.to_str().ok().and_then(|code| code.parse::<u8>().ok());
    let message = trailers.get(MESSAGE).map(|value| percent_decoded(value.as_bytes())).unwrap_or_default();
    Some(Status { code: code.filter(|code| *code <= 16).unwrap_or(UNKNOWN), message })
}

/// What "grpc-timeout" says, in microseconds; None: nothing that can be read.
pub fn timeout_us(value: &[u8]) -> Option<u64> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let count = digits.iter().fold(0u64, |count, digit| count * 10 + u64::from(digit - b'0'));
    Some(match unit {
        b'H' => count * 3_600_000_000,
        b'M' => count * 60_000_000,
        b'S' => count * 1_000_000,
        b'm' => count * 1_000,
        b'u' => count,
        b'n' => count / 1_000,
        _ => return None,
    })
}

/// A "grpc-timeout": at most 8 digits, rounded up.
pub fn timeout_value(us: u64) -> HeaderValue {
    let (count, unit) = [(1, 'u'), (1_000, 'm'), (1_000_000, 'S'), (60_000_000, 'M'), (3_600_000_000, 'H')]
        .into_iter()
        .map(|(size, unit)| (us.div_ceil(size), unit))
        .find(|(count, _)| *count < 100_000_000)
        .unwrap_or((99_999_999, 'H'));
    HeaderValue::from_str(&format!("{count}{unit}")).expect("ASCII")
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if (0x20..=0x7e).contains(&byte) && byte != b'%' {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

fn percent_decoded(value: &[u8]) -> String {
    let mut decoded = Vec::with_capacity(value.len());
    let mut rest = value;
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = |digit: Option<&u8>| digit.and_then(|digit| char::from(*digit).to_digit(16));
        match (byte, hex(tail.first()), hex(tail.get(1))) {
            (b'%', Some(high), Some(low)) => {
                decoded.push((high * 16 + low) as u8);
                rest = &tail[2..];
            }
            _ => {
                decoded.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Without padding, as gRPC prefers it.
fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..=group.len() {
            text.push(char::from(ALPHABET[(bits >> (18 - 6 * place) & 63) as usize]));
        }
    }
    text
}

/// With or without padding; None: it is none.
fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.iter().rposition(|byte| *byte != b'=').map_or(&text[..0], |last| &text[..=last]);
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    for group in digits.chunks(4) {
        if group.len() == 1 {
            return None;
        }
        let mut bits = 0u32;
        for digit in group {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' | b'-' => 62,
                b'/' | b'_' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_survives_the_way_there_and_back() {
        for length in 0..50u8 {
            let bytes: Vec<u8> = (0..length).map(|byte| byte.wrapping_mul(37) ^ 0xa5).collect();
            assert_eq!(from_base64(to_base64(&bytes).as_bytes()), Some(bytes.clone()));
        }
        assert_eq!(to_base64(b"any carnal pleas"), "YW55IGNhcm5hbCBwbGVhcw");
        assert_eq!(from_base64(b"YW55IGNhcm5hbCBwbGVhcw=="), Some(b"any carnal pleas".to_vec()));
        assert_eq!(from_base64(b"YW5*"), None);
        assert_eq!(from_base64(b"Y"), None);
        assert_eq!(from_base64(b"==="), Some(Vec::new()));
    }

    #[test]
    fn messages_survive_whatever_is_in_them() {
        for text in ["", "plain", "50 % of it\n", "naïve – 漢字 %41"] {
            let mut trailers = HeaderMap::new();
            add_status(&mut trailers, &Status::new(3, text));
            assert_eq!(status_of(&trailers), Some(Status::new(3, text)));
        }
        assert_eq!(percent_decoded(b"100%, %4, %zz"), "100%, %4, %zz");
        assert_eq!(percent_decoded(b"%ff"), "\u{fffd}");
    }

    #[test]
    fn timeouts_are_read_and_written() {
        assert_eq!(timeout_us(b"20m"), Some(20_000));
        assert_eq!(timeout_us(b"99999999H"), Some(99_999_999 * 3_600_000_000));
        for bad in [&b""[..], b"m", b"123456789u", b"-1S", b"5x", b"1.5S"] {
            assert_eq!(timeout_us(bad), None);
        }
        for us in [0, 1, 99_999_999, 100_000_000, 12_345_678_901, u64::MAX / 4] {
            let read = timeout_us(timeout_value(us).as_bytes()).unwrap();
            assert!(
                read >= us.min(99_999_999 * 3_600_000_000) && read <= us + us / 1_000 + 60_000_000,
                "{us} {read}"
            );
        }
    }

    #[test]
    fn what_is_the_protocols_own_is_neither_shown_nor_set() {
        let mut headers = HeaderMap::new();
        headers.insert("te", HeaderValue::from_static("trailers"));
        headers.insert("grpc-timeout", HeaderValue::from_static("1S"));
        add(&mut headers, &vec![("a-bin".into(), vec![0, 255]), ("b".into(), b"x y".to_vec())]).unwrap();
        assert_eq!(
            visible(&headers),
            [("a-bin".to_owned(), vec![0, 255]), ("b".to_owned(), b"x y".to_vec())]
        );
        assert_eq!(
            add(&mut headers, &vec![("grpc-status".into(), b"0".to_vec())]),
            Err("grpc-status".into())
        );
        assert_eq!(add(&mut headers, &vec![("b".into(), b"x\ny".to_vec())]), Err("b".into()));
    }
}
