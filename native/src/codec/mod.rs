//! State and events as messages: `WorkerDump` ↔ `kvscout.v1.KvEventBatch` state chunks, `Batch` ↔ its events.
//!
//! Native backend of `kvscout_blocks.bytes.codec`, with the same bytes; `events.proto` says what each field means.

mod decode;
mod encode;
mod events;
mod publish;

pub use decode::{DecodeError, Dumped, decode};
pub use encode::encode;
pub use events::{Published, decode_events};
pub use publish::encode_events;

/// Version of the message that is written, and the only one that is read.
pub const VERSION: u64 = 1;

/// Kinds of a cache group, as on the wire.
const FULL_ATTENTION: u64 = 1;
const OTHER_ATTENTION: u64 = 2;

/// The index and the worker rank that a dump is from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    pub worker_id: String,
    pub dp_rank: u32,
    pub model: String,
    pub tenant: String,
    pub block_size: u32,
    pub eagle: bool,
}
