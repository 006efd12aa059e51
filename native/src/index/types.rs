//! Numbers, limits and reasons that the files of the index share.

/// Tiers: device, host, disk, external.
pub const TIERS: usize = 4;

/// Levels of an answer: the tiers, cumulative, and predicted.
pub const LEVELS: usize = 5;

/// The level of predictions: on the device, or predicted.
pub const PREDICTED: usize = 4;

/// A level on which the worker never had anything, so that it has no bit.
pub const NO_BIT: u32 = u32::MAX;

/// Engine hashes by which a worker knows one block at most.
pub const TWIN_LIMIT: usize = 16;

/// Node number over all shards; 0 is none.
pub type NodeId = u32;

/// Number of a presence of one worker; 0 is none.
pub type PresenceId = u32;

/// Engine hashes looked up at once, so that their cache misses overlap.
pub const BATCH: usize = 16;

/// Slots, since a block counts in 16 bits how many need it.
pub const MAX_SLOTS: usize = u16::MAX as usize;

/// Blocks that are stored, or as much other work, before the lock is given back: well below a millisecond.
pub const SLICE: usize = 512;

/// Cache groups known for each worker rank.
pub const GROUP_LIMIT: usize = 64;

/// Why something an engine said was not indexed; as in `kvscout_blocks.index.block_index.Ignored`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    Incompatible,
    SkippedGroup,
    UnknownMoved,
    BadLength,
    BlockSize,
    EagleMismatch,
    UnnamedLora,
    HashConflict,
    OrphanLimit,
    TwinLimit,
    IndexFull,
    WindowLimit,
    BatchLimit,
    UnknownRemoved,
}

impl Ignored {
    /// Whether a limit of the index kept out what the worker said: it may have more than is found.
    pub fn is_limit(self) -> bool {
        use Ignored::{BatchLimit, IndexFull, OrphanLimit, TwinLimit, WindowLimit};
        matches!(self, OrphanLimit | TwinLimit | IndexFull | WindowLimit | BatchLimit)
    }
}

/// Number of reasons.
pub const IGNORED: usize = 14;
