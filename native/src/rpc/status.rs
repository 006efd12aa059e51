//! gRPC's status codes, and what becomes one where the peer sent none.
//!
//! Codes and mappings: <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>,
//! <https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md>.

use h2::Reason;

pub const CANCELLED: u8 = 1;
pub const UNKNOWN: u8 = 2;
pub const DEADLINE_EXCEEDED: u8 = 4;
pub const PERMISSION_DENIED: u8 = 7;
pub const RESOURCE_EXHAUSTED: u8 = 8;
pub const UNIMPLEMENTED: u8 = 12;
pub const INTERNAL: u8 = 13;
pub const UNAVAILABLE: u8 = 14;
pub const UNAUTHENTICATED: u8 = 16;
/// Text of what is refused while too much waits.
pub const FULL: &str = "too many requests wait to be handled";

/// How a call ended, or why it cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub code: u8,
    pub message: String,
}

/// Whether the peer may have looked at a call that ended. One that it has not can be made again, whatever it does:
/// <https://github.com/grpc/proposal/blob/master/A6-client-retries.md#transparent-retries>.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    Maybe,
    /// It was refused; others on this connection may not be.
    Refused,
    /// It was not sent, or the connection took no more: another one may.
    NotSent,
}

impl Seen {
    pub fn at_end(error: &h2::Error) -> Self {
        match error.reason() {
            Some(Reason::REFUSED_STREAM) if error.is_reset() && error.is_remote() => Self::Refused,
            Some(Reason::NO_ERROR) if error.is_go_away() && error.is_remote() => Self::NotSent,
            _ => Self::Maybe,
        }
    }
}

impl Status {
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Of an HTTP answer that is none of gRPC's.
pub fn of_http(status: http::StatusCode) -> Status {
    let code = match status.as_u16() {
        400 => INTERNAL,
        401 => UNAUTHENTICATED,
        403 => PERMISSION_DENIED,
        404 => UNIMPLEMENTED,
        429 | 502 | 503 | 504 => UNAVAILABLE,
        _ => UNKNOWN,
    };
    Status::new(code, format!("the peer answers HTTP {status}"))
}

/// Of a stream or connection that ended with an error.
pub fn of_error(error: &h2::Error) -> Status {
    if error.is_io() {
        return Status::new(UNAVAILABLE, format!("the connection broke: {error}"));
    }
    if error.is_go_away() {
        return Status::new(UNAVAILABLE, format!("the connection is going away: {error}"));
    }
    let code = match error.reason() {
        Some(Reason::REFUSED_STREAM) => UNAVAILABLE,
        Some(Reason::CANCEL) => CANCELLED,
        Some(Reason::ENHANCE_YOUR_CALM) => RESOURCE_EXHAUSTED,
        Some(Reason::INADEQUATE_SECURITY) => PERMISSION_DENIED,
        _ => INTERNAL,
    };
    Status::new(code, format!("the stream was reset: {error}"))
}
