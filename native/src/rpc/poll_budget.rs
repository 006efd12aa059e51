//! How much is done in one poll of the event loop; the rest waits for the next, so that the loop's timers and other
//! sockets have theirs, however much a peer sends.

use std::time::{Duration, Instant};

/// Bytes that are read from one connection in one poll, and after which time nothing more is: what a byte costs depends
/// on what a peer makes of it.
pub const SHARE: usize = 64 << 10;
pub const SLICE: Duration = Duration::from_millis(2);
/// Bytes that are written to one connection in one poll: a peer on this machine may read as fast as they are written.
pub const WRITE_SHARE: usize = 256 << 10;
/// Connections that one listener accepts in one poll.
pub const ACCEPTED: usize = 64;
/// Calls that one connection begins in one poll.
pub const BEGUN: usize = 16;
/// Longest work of one poll; what was begun is finished.
const LENGTH: Duration = Duration::from_millis(5);
/// Events after which a poll ends: what they say is handled before there are more.
const EVENTS: usize = 32;

/// Time and events of one poll.
pub struct PollBudget {
    ends_at: Instant,
}

impl PollBudget {
    pub fn begin() -> Self {
        Self { ends_at: Instant::now() + LENGTH }
    }

    /// Whether what is left to do waits for the next; `events` have happened in this one.
    pub fn is_over(&self, events: usize) -> bool {
        events >= EVENTS || Instant::now() >= self.ends_at
    }
}
