//! What an engine says happened to its blocks, as `wire` reads it and the index applies it.

/// One event, in the order in which they happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Stored(Box<Stored>),
    Removed(Removed),
    /// The rank dropped its whole cache.
    Cleared,
}

/// Blocks were stored on one tier, each the child of the one before it, one physical copy of each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stored {
    pub engine_hashes: Vec<u64>,
    /// Engine hash of the block before the first one; None: the first one begins a prompt.
    pub parent: Option<u64>,
    /// Token ids; their number may differ from blocks × block size.
    pub tokens: Vec<u32>,
    /// Tokens a block, as the engine says.
    pub block_size: u32,
    pub tier: u8,
    pub group: u32,
    pub full_attention: bool,
    /// Tokens that a token sees, in a group with a sliding window; 0: it is none.
    pub window: u32,
    /// The engine's number of the adapter, as sent; 0: none.
    pub lora_id: i128,
    pub lora_name: String,
    /// Salt of the prompt, if the first block begins one.
    pub cache_salt: String,
    /// Ids of the multimodal items, by block; empty: no block has any.
    pub mm_items: Vec<Vec<String>>,
    /// The tokens came as EAGLE pairs: one more than the blocks' own.
    pub pairs: bool,
    /// The token after the last block.
    pub lookahead: Option<u32>,
    /// Local hashes instead of tokens.
    pub local_hashes: Vec<u64>,
    /// A publisher found full blocks of `block_size` tokens, which is not the registered size; it sent no content.
    pub foreign: bool,
}

/// One physical copy of each named block is gone from one tier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    pub engine_hashes: Vec<u64>,
    pub tier: u8,
    pub group: u32,
}

/// Why an event was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    UnknownTag,
    BadEvent,
}

/// What an engine published in one message.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    pub events: Vec<Event>,
    /// Seconds since the Unix epoch, by the engine's clock; 0: not told.
    pub timestamp: f64,
    /// Data-parallel rank that the engine says it is.
    pub dp_rank: Option<u32>,
    /// Events that could not be read, and why.
    pub faults: Vec<(FaultKind, String)>,
}
