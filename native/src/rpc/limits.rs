//! What a peer may cost.

use std::sync::Arc;
use std::time::Duration;

use h2::{client, server};

use crate::budget::Budget;

/// Streams that were reset here are remembered: what was on its way is ignored, and not answered with another reset.
const REMEMBERED: usize = 1_000;
const REMEMBERED_FOR: Duration = Duration::from_secs(10);
/// Resets by which a peer is answered that breaks a stream's rules. `h2` counts them for as long as a connection lives.
const ANSWERED_WITH_RESET: usize = 10_000;

#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest message in either direction, bytes.
    pub max_message: usize,
    /// Streams open at once on a connection that was accepted.
    pub max_streams: u32,
    /// Connections accepted and open at once; further ones are closed.
    pub max_connections: usize,
    /// Bytes that a peer may send ahead of what was handled: of a stream, of a connection.
    pub stream_window: u32,
    pub connection_window: u32,
    /// Of a connection of which no call was admitted yet.
    pub first_window: u32,
    /// Bytes of messages that came and are not handled. With no room left new calls are refused, and calls whose
    /// message is still coming end.
    pub budget: Arc<Budget>,
    /// Longest time that one message may take to come, and how many bytes of it each window has to bring.
    pub message: Duration,
    pub message_window: Duration,
    pub message_window_bytes: usize,
    /// Of one stream, to be sent; with more, whoever sends has to wait.
    pub send_queue: usize,
    pub max_headers: u32,
    pub resets_per_second: u32,
    /// After which a peer is asked to open no more calls on a connection that was accepted; `None` = it may for ever.
    pub max_age: Option<Duration>,
    /// From the connection to the end of the HTTP/2 preface.
    pub handshake: Duration,
    /// Silence after which a peer is pinged, and how long it has to answer.
    pub keepalive: Duration,
    pub keepalive_timeout: Duration,
    /// After which a peer that acknowledges nothing at TCP level is gone.
    pub vanished: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_message: 64 << 20,
            max_streams: 1_000,
            max_connections: 10_000,
            stream_window: 1 << 20,
            connection_window: 4 << 20,
            first_window: 65_535,
            budget: Budget::new(256 << 20, 256 << 20),
            message: Duration::from_secs(60),
            message_window: Duration::from_secs(10),
            message_window_bytes: 10 << 10,
            send_queue: 64 << 10,
            max_headers: 16 << 10,
            resets_per_second: 500,
            max_age: None,
            handshake: Duration::from_secs(10),
            keepalive: Duration::from_secs(5),
            keepalive_timeout: Duration::from_secs(4),
            vanished: Duration::from_secs(60),
        }
    }
}

impl Limits {
    /// Of a call: bytes of one message after which its window opens early, bytes to be sent after which senders wait.
    pub fn windows(&self) -> (usize, usize) {
        (self.stream_window as usize / 2, self.send_queue)
    }

    /// Streams that a peer may reset in a second: at least all that it may have open, which it may have to give up at once.
    pub fn resets(&self) -> u32 {
        self.resets_per_second.max(self.max_streams)
    }

    pub fn server(&self) -> server::Builder {
        let mut builder = server::Builder::new();
        builder
            .max_concurrent_streams(self.max_streams)
            .initial_window_size(self.stream_window)
            .initial_connection_window_size(self.first_window)
            // By itself `h2` allows half a window of it: the first one is too small for a burst of short messages that
            // comes with the headers of its call, before anybody could admit it.
            .data_frame_budget(self.connection_window as usize / 2)
            .max_header_list_size(self.max_headers)
            .max_send_buffer_size(self.send_queue.max(1 << 20))
            .max_concurrent_reset_streams(REMEMBERED)
            .reset_stream_duration(REMEMBERED_FOR)
            .max_local_error_reset_streams(Some(ANSWERED_WITH_RESET))
            // Reset in the same read that brought them: `Connection::stream_reset` counts these and all others.
            .max_pending_accept_reset_streams(self.resets() as usize);
        builder
    }

    pub fn client(&self) -> client::Builder {
        let mut builder = client::Builder::new();
        builder
            .enable_push(false)
            .initial_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
            .max_header_list_size(self.max_headers)
            .max_send_buffer_size(self.send_queue.max(1 << 20))
            .max_concurrent_reset_streams(REMEMBERED)
            .reset_stream_duration(REMEMBERED_FOR)
            .max_local_error_reset_streams(Some(ANSWERED_WITH_RESET));
        builder
    }
}
