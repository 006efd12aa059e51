//! What a Stored event adds to an index: whether its content can be indexed, and its local hashes.
//!
//! Native backend of `kvscout_blocks.bytes.acceptance`; indexes apply it, and publishers send what is left of it.

use hashbrown::HashMap;
use std::borrow::Cow;

use crate::events::{Batch, Stored};
use crate::hashing::{BlockHasher, MmSpan, mm_hash, token_bytes};
use crate::index::types::Ignored;

/// What was registered of a worker that decides it.
#[derive(Debug, Clone, Copy)]
pub struct Rules<'a> {
    /// Tokens of a block.
    pub block_size: usize,
    pub eagle: bool,
    /// LoRA number → adapter name.
    pub adapters: &'a HashMap<i128, String>,
}

impl Rules<'_> {
    /// Why an event that has tokens or local hashes cannot be indexed; None if it can.
    pub fn judge_content(&self, event: &Stored) -> Option<Ignored> {
        if event.foreign {
            return Some(Ignored::BlockSize);
        }
        if !event.local_hashes.is_empty() {
            return (event.local_hashes.len() != event.engine_hashes.len()).then_some(Ignored::BadLength);
        }
        let tokens = event.tokens.len().saturating_sub(usize::from(event.pairs));
        let size = event.block_size as usize;
        if tokens < self.block_size || tokens != event.engine_hashes.len().saturating_mul(size) {
            return Some(Ignored::BadLength);
        }
        if size != self.block_size {
            return Some(Ignored::BlockSize);
        }
        if if self.eagle { event.lookahead.is_none() } else { event.pairs } {
            return Some(Ignored::EagleMismatch);
        }
        let named =
            event.lora_id == 0 || !event.lora_name.is_empty() || self.adapters.contains_key(&event.lora_id);
        (!named).then_some(Ignored::UnnamedLora)
    }

    /// Local hashes of the blocks of an event that `judge_content` accepted, one a block.
    pub fn local_hashes<'b>(&self, batch: &'b Batch, event: &Stored) -> Cow<'b, [u64]> {
        if !event.local_hashes.is_empty() {
            return Cow::Borrowed(batch.hashes(event.local_hashes));
        }
        let lora = match batch.text(event.lora_name) {
            "" if event.lora_id != 0 => self.adapters.get(&event.lora_id).map_or("", String::as_str),
            name => name,
        };
        let salt = if event.parent.is_none() { batch.text(event.cache_salt) } else { "" };
        let spans: Vec<MmSpan> = batch
            .mm_items(event.mm_items)
            .iter()
            .take(event.engine_hashes.len())
            .enumerate()
            .flat_map(|(block, items)| items.iter().map(move |item| (block, item)))
            .map(|(block, item)| MmSpan { hash: mm_hash(item), offset: block * self.block_size, length: 1 })
            .collect();
        let with_lookahead;
        let tokens = match event.lookahead {
            Some(token) if self.eagle && !event.pairs => {
                with_lookahead = [batch.tokens(event.tokens), &[token]].concat();
                &with_lookahead[..]
            }
            _ => batch.tokens(event.tokens),
        };
        let hashes = BlockHasher::new(self.block_size, lora, salt, &spans, self.eagle)
            .map_or_else(|_| Vec::new(), |hasher| hasher.local_hashes(&token_bytes(tokens)));
        Cow::Owned(hashes)
    }
}
