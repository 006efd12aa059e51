//! Heads of requests and answers. What two readers may take for two different things is refused: lines that do not end
//! with CRLF, folded ones, two lengths, a length beside chunks, transfer codings other than chunks.

use super::body::Decoder;

/// Headers, in the order in which they came.
pub type Headers = Vec<(String, String)>;

#[derive(Debug, PartialEq, Eq)]
pub struct RequestHead {
    pub method: String,
    /// Path and query, as they came.
    pub target: String,
    pub headers: Headers,
    pub body: Decoder,
    pub keep_alive: bool,
    pub version_11: bool,
    pub expects_continue: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub struct AnswerHead {
    pub status: u16,
    pub headers: Headers,
    pub body: Decoder,
    pub keep_alive: bool,
}

/// A status and what is wrong.
pub type Refusal = (u16, &'static str);

const END: &[u8] = b"\r\n\r\n";

/// How long the head is at the start of the bytes; `seen` of them had none.
pub fn length(bytes: &[u8], seen: usize) -> Option<usize> {
    let from = seen.saturating_sub(END.len() - 1);
    memchr::memmem::find(&bytes[from..], END).map(|at| from + at + END.len())
}

/// Reads a request's head.
///
/// # Errors
/// What is wrong with it.
pub fn request(head: &[u8], max_headers: usize) -> Result<RequestHead, Refusal> {
    check_lines(head).map_err(|text| (400, text))?;
    let mut slots = vec![httparse::EMPTY_HEADER; max_headers];
    let mut parsed = httparse::Request::new(&mut slots);
    match parsed.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Err((400, "the head makes no sense")),
        Err(httparse::Error::TooManyHeaders) => return Err((431, "too many headers")),
        Err(httparse::Error::Version) => return Err((505, "only HTTP/1.1 is spoken here")),
        Err(_) => return Err((400, "the head makes no sense")),
    }
    let version_11 = parsed.version == Some(1);
    let found = Fields::of(parsed.headers).map_err(|text| (400, text))?;
    if version_11 && found.hosts != 1 || found.hosts > 1 {
        return Err((400, "one Host header is needed"));
    }
    let body = match (found.chunked, found.length) {
        (Some(true), None) if version_11 => Decoder::chunked(),
        (None, length) => Decoder::of_length(length.unwrap_or(0)),
        _ => return Err((400, "a length and a transfer coding, or one that is not known here")),
    };
    let expects_continue = match found.expects {
        None => false,
        Some(true) => version_11 && !body.is_done(),
        Some(false) => return Err((417, "100-continue is all that may be expected")),
    };
    Ok(RequestHead {
        method: parsed.method.unwrap_or_default().to_owned(),
        target: target(parsed.path.unwrap_or_default()).ok_or((400, "the target is not a path"))?,
        headers: headers(parsed.headers),
        body,
        keep_alive: found.keeps_alive(version_11),
        version_11,
        expects_continue,
    })
}

/// Reads an answer's head; `None`: an interim one, behind which the answer is still to come.
///
/// # Errors
/// What is wrong with it.
pub fn answer(head: &[u8], max_headers: usize, method: &str) -> Result<Option<AnswerHead>, &'static str> {
    check_lines(head)?;
    let mut slots = vec![httparse::EMPTY_HEADER; max_headers];
    let mut parsed = httparse::Response::new(&mut slots);
    match parsed.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Err("too many headers"),
        _ => return Err("the head makes no sense"),
    }
    let status = parsed.code.unwrap_or_default();
    let found = Fields::of(parsed.headers)?;
    if status == 101 || status < 100 {
        return Err("a status that makes no sense");
    }
    if status < 200 {
        return Ok(None);
    }
    let none = method == "HEAD" || status == 204 || status == 304;
    let body = match (found.chunked, found.length) {
        (Some(false), _) => return Err("a transfer coding that is not known here"),
        (Some(true), Some(_)) => return Err("a length and a transfer coding"),
        _ if none => Decoder::of_length(0),
        (Some(true), None) => Decoder::chunked(),
        (None, Some(length)) => Decoder::of_length(length),
        (None, None) => Decoder::UntilEnd,
    };
    let keep_alive = found.keeps_alive(parsed.version == Some(1)) && body != Decoder::UntilEnd;
    Ok(Some(AnswerHead { status, headers: headers(parsed.headers), body, keep_alive }))
}

/// Every line ends with CRLF.
fn check_lines(head: &[u8]) -> Result<(), &'static str> {
    let bare = memchr::memchr_iter(b'\n', head).any(|at| at == 0 || head[at - 1] != b'\r');
    if bare { Err("a line that does not end with CRLF") } else { Ok(()) }
}

/// What frames a message.
#[derive(Default)]
struct Fields {
    length: Option<u64>,
    /// The one transfer coding there is: whether it is chunks.
    chunked: Option<bool>,
    close: bool,
    keep_alive: bool,
    hosts: usize,
    expects: Option<bool>,
}

impl Fields {
    fn of(headers: &[httparse::Header<'_>]) -> Result<Self, &'static str> {
        let mut found = Self::default();
        for header in headers {
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            let value = header.value.trim_ascii();
            if is("content-length") {
                if found.length.is_some() {
                    return Err("two lengths");
                }
                found.length = Some(decimal(value).ok_or("a length that makes no sense")?);
            } else if is("transfer-encoding") {
                if found.chunked.is_some() {
                    return Err("two transfer codings");
                }
                found.chunked = Some(value.eq_ignore_ascii_case(b"chunked"));
            } else if is("connection") {
                for option in value.split(|byte| *byte == b',') {
                    found.close |= option.trim_ascii().eq_ignore_ascii_case(b"close");
                    found.keep_alive |= option.trim_ascii().eq_ignore_ascii_case(b"keep-alive");
                }
            } else if is("host") {
                found.hosts += 1;
            } else if is("expect") {
                found.expects = Some(value.eq_ignore_ascii_case(b"100-continue"));
            }
        }
        Ok(found)
    }

    fn keeps_alive(&self, version_11: bool) -> bool {
        !self.close && (version_11 || self.keep_alive)
    }
}

/// Digits and nothing else.
fn decimal(value: &[u8]) -> Option<u64> {
    let digits = (1..=18).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
    if digits { std::str::from_utf8(value).ok()?.parse().ok() } else { None }
}

/// Path and query of a request's target.
fn target(target: &str) -> Option<String> {
    if target.starts_with('/') {
        return Some(target.to_owned());
    }
    let (scheme, rest) = target.split_once("://")?;
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return None;
    }
    Some(rest.find('/').map_or_else(|| "/".to_owned(), |at| rest[at..].to_owned()))
}

fn headers(parsed: &[httparse::Header<'_>]) -> Headers {
    parsed.iter().map(|header| (header.name.to_owned(), text(header.value))).collect()
}

/// UTF-8, as most say it, or else Latin-1, as it was once.
fn text(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) => text.to_owned(),
        Err(_) => value.iter().map(|byte| *byte as char).collect(),
    }
}

/// Headers that are of one connection, and not of a message.
fn of_connection(name: &str) -> bool {
    ["connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "proxy-connection"]
        .iter()
        .any(|own| name.eq_ignore_ascii_case(own))
}

/// How a body that is sent says where it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    Length(u64),
    Chunks,
    /// By the end of the connection.
    Close,
    /// There is none.
    None,
}

/// Writes a head behind its first line: the headers but those of a connection and a length, and those that frame it.
///
/// # Errors
/// The header that cannot be sent.
pub fn write<'a>(
    out: &mut Vec<u8>,
    headers: impl IntoIterator<Item = &'a (String, String)>,
    framing: Framing,
    closes: bool,
) -> Result<(), String> {
    for (name, value) in headers {
        if of_connection(name) || name.eq_ignore_ascii_case("content-length") {
            continue;
        }
        let right = !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':')
            && !value.bytes().any(|byte| matches!(byte, b'\r' | b'\n' | 0));
        if !right {
            return Err(format!("the header {name:?} cannot be sent"));
        }
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b": ");
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    match framing {
        Framing::Length(length) => out.extend_from_slice(format!("Content-Length: {length}\r\n").as_bytes()),
        Framing::Chunks => out.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
        Framing::Close | Framing::None => {}
    }
    if closes {
        out.extend_from_slice(b"Connection: close\r\n");
    }
    out.extend_from_slice(b"\r\n");
    Ok(())
}

/// Writes a whole request.
///
/// # Errors
/// What of it cannot be sent.
pub fn write_request(
    method: &str,
    target: &str,
    host: &str,
    headers: &[(String, String)],
    body: &[u8],
) -> Result<Vec<u8>, String> {
    let visible = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    if !visible(method) || !visible(target) || !visible(host) {
        return Err(format!("{method:?}, {target:?} or {host:?} cannot be sent"));
    }
    let mut out = Vec::with_capacity(512 + body.len());
    out.extend_from_slice(format!("{method} {target} HTTP/1.1\r\nHost: {host}\r\n").as_bytes());
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("accept-encoding")) {
        // A packed answer is none: a few bytes of it may unpack to anything.
        out.extend_from_slice(b"Accept-Encoding: identity\r\n");
    }
    let has_body = !body.is_empty() || !matches!(method, "GET" | "HEAD" | "DELETE" | "OPTIONS");
    let framing = if has_body { Framing::Length(body.len() as u64) } else { Framing::None };
    let others = headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("host"));
    write(&mut out, others, framing, false)?;
    out.extend_from_slice(body);
    Ok(out)
}

/// The length of a body, by its headers.
pub fn told_length(headers: &[(String, String)]) -> Option<u64> {
    let (_, value) = headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"))?;
    decimal(value.as_bytes())
}

/// A status's own words.
pub fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(head: &str) -> Result<RequestHead, u16> {
        request(head.as_bytes(), 8).map_err(|(status, _)| status)
    }

    #[test]
    fn a_request_is_read() {
        let head =
            "POST http://a/x?y HTTP/1.1\r\nhost: a\r\nContent-Length: 3\r\nExpect: 100-Continue\r\n\r\n";
        let found = read(head).unwrap();
        assert_eq!((found.method.as_str(), found.target.as_str()), ("POST", "/x?y"));
        assert_eq!(found.body, Decoder::Length(3));
        assert!(found.keep_alive && found.expects_continue);
        assert!(!read("GET / HTTP/1.0\r\n\r\n").unwrap().keep_alive);
        assert!(!read("GET / HTTP/1.1\r\nHost: a\r\nConnection: x, Close\r\n\r\n").unwrap().keep_alive);
    }

    #[test]
    fn what_is_not_clear_is_refused() {
        for (rest, status) in [
            ("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
            ("Content-Length: 3\r\nContent-Length: 3\r\n", 400),
            ("Content-Length: +3\r\n", 400),
            ("Content-Length: 3, 3\r\n", 400),
            ("Content-Length: 99999999999999999999\r\n", 400),
            ("Transfer-Encoding: gzip, chunked\r\n", 400),
            ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
            ("Host: b\r\n", 400),
            ("X: 1\r\n folded\r\n", 400),
            ("X : 1\r\n", 400),
            ("X: 1\nY: 2\r\n", 400),
            ("X: \u{0}\r\n", 400),
            ("Expect: more\r\n", 417),
            (&"X: 1\r\n".repeat(9), 431),
        ] {
            assert_eq!(read(&format!("GET / HTTP/1.1\r\nHost: a\r\n{rest}\r\n")), Err(status), "{rest}");
        }
        for line in ["GET /", "GET / HTTP/2.0", "GET x HTTP/1.1", "CONNECT a:1 HTTP/1.1", "G(T / HTTP/1.1"] {
            assert!(read(&format!("{line}\r\nHost: a\r\n\r\n")).is_err(), "{line}");
        }
        assert_eq!(read("GET / HTTP/1.1\r\n\r\n"), Err(400));
        assert_eq!(read("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), Err(400));
    }

    #[test]
    fn a_head_is_found_wherever_its_bytes_were_cut() {
        let bytes = b"GET / HTTP/1.1\r\nHost: a\r\n\r\nrest";
        for seen in 0..27 {
            assert_eq!(length(bytes, seen), Some(27));
        }
        assert_eq!(length(&bytes[..26], 0), None);
    }

    #[test]
    fn an_answer_without_a_length_ends_with_its_connection() {
        let read = |head: &str, method| answer(head.as_bytes(), 8, method);
        let found = read("HTTP/1.1 200 OK\r\n\r\n", "GET").unwrap().unwrap();
        assert_eq!((found.body, found.keep_alive), (Decoder::UntilEnd, false));
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n";
        assert!(read(head, "HEAD").unwrap().unwrap().body.is_done());
        assert!(read("HTTP/1.1 100 Continue\r\n\r\n", "GET").unwrap().is_none());
        assert!(read("HTTP/1.1 101 Switching\r\n\r\n", "GET").is_err());
        let both = "HTTP/1.1 200 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert!(read(both, "GET").is_err());
    }

    #[test]
    fn a_header_that_would_be_two_is_not_written() {
        let mut out = Vec::new();
        let one = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        assert!(write(&mut out, &one("X", "1\r\nY: 2"), Framing::None, false).is_err());
        assert!(write(&mut out, &one("X: 1", "2"), Framing::None, false).is_err());
        out.clear();
        write(&mut out, &one("Connection", "x"), Framing::Chunks, true).unwrap();
        assert_eq!(out, b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n");
    }
}
