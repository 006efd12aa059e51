//! A query's prompt: local hashes that are ready, or tokens that are hashed as far as the search gets.

use crate::hashing::{BlockHasher, TOKEN_BYTES};

/// Blocks hashed at once: a prompt of which nothing is cached costs no more than these.
const CHUNK: usize = 64;

/// The local hashes of a prompt's complete blocks.
pub trait Prompt {
    /// Number of complete blocks.
    fn len(&self) -> usize;

    /// At least the first `count` local hashes; `count` is at most `len`.
    fn hashes(&mut self, count: usize) -> &[u64];

    /// Leading blocks that an engine may take from its cache: it always computes the last token.
    fn usable(&self) -> usize {
        self.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Ready hashes.
impl Prompt for &[u64] {
    #[inline]
    fn len(&self) -> usize {
        (**self).len()
    }

    #[inline]
    fn hashes(&mut self, _count: usize) -> &[u64] {
        self
    }
}

/// Ready hashes of a prompt of which more is known.
#[derive(Debug)]
pub struct HashedPrompt<'a> {
    pub hashes: &'a [u64],
    /// See `Prompt::usable`.
    pub usable: usize,
}

impl Prompt for HashedPrompt<'_> {
    fn len(&self) -> usize {
        self.hashes.len()
    }

    fn hashes(&mut self, _count: usize) -> &[u64] {
        self.hashes
    }

    fn usable(&self) -> usize {
        self.usable
    }
}

/// Token ids, hashed lazily.
#[derive(Debug)]
pub struct TokenPrompt<'a> {
    hasher: BlockHasher<'a>,
    tokens: &'a [u8],
    blocks: usize,
    usable: usize,
    hashes: Vec<u64>,
}

impl<'a> TokenPrompt<'a> {
    /// A prompt of little-endian token ids.
    pub fn new(hasher: BlockHasher<'a>, tokens: &'a [u8]) -> Self {
        let count = tokens.len() / TOKEN_BYTES;
        let blocks = hasher.block_count(count);
        let usable = blocks.min(count.saturating_sub(1) / hasher.block_size());
        Self { hasher, tokens, blocks, usable, hashes: Vec::new() }
    }
}

impl Prompt for TokenPrompt<'_> {
    fn len(&self) -> usize {
        self.blocks
    }

    fn usable(&self) -> usize {
        self.usable
    }

    fn hashes(&mut self, count: usize) -> &[u64] {
        if self.hashes.len() < count {
            // The first block decides whether anything is cached at all, so it goes alone.
            let end =
                if self.hashes.is_empty() { count } else { count.next_multiple_of(CHUNK).min(self.blocks) };
            let start = self.hashes.len();
            if start == 1 {
                self.hashes.reserve_exact(self.blocks);
            }
            self.hasher.hash_blocks(self.tokens, start..end, &mut self.hashes);
        }
        &self.hashes
    }
}
