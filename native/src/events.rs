//! What an engine says happened to its blocks, as `wire` reads it and the index applies it.
//!
//! ```text
//! batch   events  [Stored | Removed | Stored ...]     fields, and spans of
//!         hashes  [....|..|........]
//!         tokens  [........|.......]                  texts and multimodal ids alike
//! ```
//!
//! An event owns nothing: a batch is a few vectors, however many events it has, and can be filled again.

/// One event, in the order in which they happened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event {
    Stored(Stored),
    Removed(Removed),
    /// The rank dropped its whole cache.
    Cleared,
}

/// A part of one of the vectors of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span {
    start: u32,
    end: u32,
}

impl Span {
    pub fn len(self) -> usize {
        (self.end - self.start) as usize
    }

    pub fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// What was added to a vector since it had this length.
    pub(crate) fn since<T>(start: usize, all: &[T]) -> Self {
        Self { start: start as u32, end: all.len() as u32 }
    }

    fn of<T>(self, all: &[T]) -> &[T] {
        &all[self.start as usize..self.end as usize]
    }
}

/// Window of a group of states, in tokens: it needs the state at the end of a prefix, and no other.
pub const STATE_WINDOW: u32 = 1;

/// Blocks were stored on one tier, each the child of the one before it, one physical copy of each.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stored {
    pub engine_hashes: Span,
    /// Engine hash of the block before the first one; None: the first one begins a prompt.
    pub parent: Option<u64>,
    /// Token ids; their number may differ from blocks × block size.
    pub tokens: Span,
    /// Tokens a block, as the engine says.
    pub block_size: u32,
    pub tier: u8,
    pub group: u32,
    pub full_attention: bool,
    /// Tokens that a token sees, in a group with a sliding window; 0: it is none. `STATE_WINDOW`: a group of states.
    pub window: u32,
    /// The engine's number of the adapter, as sent; 0: none.
    pub lora_id: i128,
    pub lora_name: Span,
    /// Salt of the prompt, if the first block begins one.
    pub cache_salt: Span,
    /// Ids of the multimodal items, by block; empty: no block has any.
    pub mm_items: Span,
    /// The tokens came as EAGLE pairs: one more than the blocks' own.
    pub pairs: bool,
    /// The token after the last block.
    pub lookahead: Option<u32>,
    /// Local hashes instead of tokens.
    pub local_hashes: Span,
    /// A publisher found full blocks of `block_size` tokens, which is not the registered size; it sent no content.
    pub foreign: bool,
}

impl Stored {
    /// Whether it says what the blocks contain; else it is a tier change of blocks that are known.
    pub fn has_content(&self) -> bool {
        self.foreign || !self.tokens.is_empty() || !self.local_hashes.is_empty()
    }
}

/// One physical copy of each named block is gone from one tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    pub engine_hashes: Span,
    pub tier: u8,
    pub group: u32,
}

/// Why an event was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    UnknownTag,
    BadEvent,
}

/// What an engine published in one message; see the module.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    pub events: Vec<Event>,
    /// Seconds since the Unix epoch, by the engine's clock; 0: unknown.
    pub timestamp: f64,
    /// Data-parallel rank that the engine says it is.
    pub dp_rank: Option<u32>,
    /// Events that could not be read, and why.
    pub faults: Vec<(FaultKind, String)>,
    pub(crate) hashes: Vec<u64>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) texts: String,
    pub(crate) mm_items: Vec<Vec<String>>,
}

/// Events of one batch that may be unreadable; with more of them it is no batch.
pub const FAULT_LIMIT: usize = 1024;

/// Values of one vector that an empty batch keeps room for: those of a prompt of 16,384 tokens, and some.
const KEPT: usize = 1 << 15;

impl Batch {
    pub fn hashes(&self, span: Span) -> &[u64] {
        span.of(&self.hashes)
    }

    pub fn tokens(&self, span: Span) -> &[u32] {
        span.of(&self.tokens)
    }

    pub fn text(&self, span: Span) -> &str {
        &self.texts[span.start as usize..span.end as usize]
    }

    pub fn mm_items(&self, span: Span) -> &[Vec<String>] {
        span.of(&self.mm_items)
    }

    pub fn add_hashes(&mut self, hashes: &[u64]) -> Span {
        let start = self.hashes.len();
        self.hashes.extend_from_slice(hashes);
        Span::since(start, &self.hashes)
    }

    pub fn add_tokens(&mut self, tokens: &[u32]) -> Span {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        Span::since(start, &self.tokens)
    }

    pub fn add_text(&mut self, text: &str) -> Span {
        let start = self.texts.len();
        self.texts.push_str(text);
        Span::since(start, self.texts.as_bytes())
    }

    pub fn add_mm_items(&mut self, items: impl IntoIterator<Item = Vec<String>>) -> Span {
        let start = self.mm_items.len();
        self.mm_items.extend(items);
        Span::since(start, &self.mm_items)
    }

    /// Empties it; what most batches need stays allocated.
    pub fn clear(&mut self) {
        let Self { events, faults, hashes, tokens, texts, mm_items, .. } = std::mem::take(self);
        *self = Self {
            events: emptied(events),
            faults: emptied(faults),
            hashes: emptied(hashes),
            tokens: emptied(tokens),
            mm_items: emptied(mm_items),
            texts: String::from_utf8(emptied(texts.into_bytes())).unwrap_or_default(),
            ..Self::default()
        };
    }
}

fn emptied<T>(mut values: Vec<T>) -> Vec<T> {
    if values.capacity() > KEPT {
        return Vec::new();
    }
    values.clear();
    values
}
