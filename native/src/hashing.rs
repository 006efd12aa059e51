//! Block hashes: the identity of a block of tokens and of the prefix that it ends.
//!
//! Token ids come as their little-endian bytes, four a token: that is what XXH3 reads and what the wire
//! carries, so nothing is copied. The formulas are those of `kvscout_common.hashing`.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use siphasher::sip::SipHasher24;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Seed of every chain, and of every block of a prompt without adapter and salt.
pub const SEED: u64 = 1337;

/// Bytes of one token id.
pub const TOKEN_BYTES: usize = 4;

/// Token ids as little-endian bytes; on a little-endian machine they are that already.
pub fn token_bytes(tokens: &[u32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(tokens))
    } else {
        Cow::Owned(tokens.iter().flat_map(|token| token.to_le_bytes()).collect())
    }
}

/// Hashes from little-endian bytes; copied only if they are not aligned.
pub fn hashes_from_bytes(bytes: &[u8]) -> Option<Cow<'_, [u64]>> {
    if !bytes.len().is_multiple_of(8) {
        return None;
    }
    if cfg!(target_endian = "little")
        && let Ok(words) = bytemuck::try_cast_slice(bytes)
    {
        return Some(Cow::Borrowed(words));
    }
    let (words, _) = bytes.as_chunks::<8>();
    Some(Cow::Owned(words.iter().map(|word| u64::from_le_bytes(*word)).collect()))
}

/// The block size was zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroBlockSize;

impl fmt::Display for ZeroBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("must be at least 1 token")
    }
}

/// Seed of a block: `SEED + XXH3(lora_name, 0)`, for the first block `+ XXH3(cache_salt, 1)`, wrapping.
pub fn block_seed(lora_name: &str, cache_salt: &str, first: bool) -> u64 {
    let mut seed = SEED;
    if !lora_name.is_empty() {
        seed = seed.wrapping_add(xxh3_64(lora_name.as_bytes()));
    }
    if first && !cache_salt.is_empty() {
        seed = seed.wrapping_add(xxh3_64_with_seed(cache_salt.as_bytes(), 1));
    }
    seed
}

/// Number of a multimodal item: the first 16 digits of a 64-digit hex id, else `XXH3(id, 0)`.
pub fn mm_hash(id: &str) -> u64 {
    if id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit()) {
        // Sixteen hex digits always fit, so this cannot fail.
        if let Ok(value) = u64::from_str_radix(&id[..16], 16) {
            return value;
        }
    }
    xxh3_64(id.as_bytes())
}

/// Engine hash of a digest: its last eight bytes, big-endian; shorter ones are taken whole.
pub fn engine_hash_of_bytes(digest: &[u8]) -> u64 {
    digest[digest.len().saturating_sub(8)..].iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Sequence hash of a block: its local hash at the root, else `XXH3(parent ‖ local, SEED)`.
#[inline]
pub fn extend_sequence(parent: Option<u64>, local: u64) -> u64 {
    let Some(parent) = parent else { return local };
    let mut pair = [0; 16];
    pair[..8].copy_from_slice(&parent.to_le_bytes());
    pair[8..].copy_from_slice(&local.to_le_bytes());
    xxh3_64_with_seed(&pair, SEED)
}

/// Sequence hashes of a chain of local hashes that begins at the root.
pub fn sequence_hashes(local: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let mut parent = None;
    local.into_iter().map(|hash| *parent.insert(extend_sequence(parent, hash))).collect()
}

/// SipHash-2-4 of the sequence hash of every `stride`-th block of a chain of local hashes, as its little-endian bytes:
/// equal prefixes have equal ones, and nobody without the key finds tokens for them.
pub fn keyed_sequence_hashes(local: &[u64], stride: usize, key: &[u8; 16]) -> Vec<u64> {
    let hasher = SipHasher24::new_with_key(key);
    let mut parent = None;
    let mut keyed = Vec::with_capacity(local.len() / stride);
    for blocks in local.chunks_exact(stride) {
        for &hash in blocks {
            parent = Some(extend_sequence(parent, hash));
        }
        keyed.extend(parent.map(|prefix| hasher.hash(&prefix.to_le_bytes())));
    }
    keyed
}

/// A multimodal item of a prompt: the number of its id and the tokens that stand for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmSpan {
    pub hash: u64,
    /// First token.
    pub offset: usize,
    /// Number of tokens, at least 1.
    pub length: usize,
}

/// What besides its tokens makes the blocks of a prompt what they are.
#[derive(Debug, Clone, Copy)]
pub struct BlockHasher<'a> {
    block_size: usize,
    first_seed: u64,
    seed: u64,
    mm: &'a [MmSpan],
    eagle: bool,
}

impl<'a> BlockHasher<'a> {
    /// A hasher for prompts of one adapter, salt and set of multimodal items.
    pub fn new(
        block_size: usize,
        lora_name: &str,
        cache_salt: &str,
        mm: &'a [MmSpan],
        eagle: bool,
    ) -> Result<Self, ZeroBlockSize> {
        if block_size == 0 {
            return Err(ZeroBlockSize);
        }
        Ok(Self {
            block_size,
            first_seed: block_seed(lora_name, cache_salt, true),
            seed: block_seed(lora_name, cache_salt, false),
            mm,
            eagle,
        })
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Number of complete blocks in a prompt of this length; an EAGLE block needs one token more.
    pub fn block_count(&self, tokens: usize) -> usize {
        tokens.saturating_sub(usize::from(self.eagle)) / self.block_size
    }

    /// Appends the local hashes of a range of blocks, which must be complete in `tokens`.
    #[inline]
    pub fn hash_blocks(&self, tokens: &[u8], blocks: Range<usize>, hashes: &mut Vec<u64>) {
        if !self.mm.is_empty() {
            hashes.extend(blocks.map(|index| self.hash_with_items(tokens, index)));
            return;
        }
        let mut rest = blocks;
        if rest.start == 0 && rest.next().is_some() {
            hashes.push(xxh3_64_with_seed(self.window(tokens, 0), self.first_seed));
        }
        if self.eagle {
            hashes.extend(rest.map(|index| xxh3_64_with_seed(self.window(tokens, index), self.seed)));
            return;
        }
        let size = self.block_size * TOKEN_BYTES;
        let windows = tokens[rest.start * size..rest.end * size].chunks_exact(size);
        hashes.extend(windows.map(|window| xxh3_64_with_seed(window, self.seed)));
    }

    fn window<'t>(&self, tokens: &'t [u8], index: usize) -> &'t [u8] {
        let start = index * self.block_size;
        let end = start + self.block_size + usize::from(self.eagle);
        &tokens[start * TOKEN_BYTES..end * TOKEN_BYTES]
    }

    fn hash_with_items(&self, tokens: &[u8], index: usize) -> u64 {
        let start = index * self.block_size;
        let end = start + self.block_size;
        let seed = if index == 0 { self.first_seed } else { self.seed };
        let mut items: Vec<u64> = self
            .mm
            .iter()
            .filter(|item| item.offset < end && item.offset.saturating_add(item.length) > start)
            .map(|item| item.hash)
            .collect();
        items.sort_unstable();
        let mut bytes = self.window(tokens, index).to_vec();
        bytes.extend(items.iter().flat_map(|item| item.to_le_bytes()));
        xxh3_64_with_seed(&bytes, seed)
    }

    /// Local hashes of all complete blocks of `tokens`, in order.
    pub fn local_hashes(&self, tokens: &[u8]) -> Vec<u64> {
        let blocks = self.block_count(tokens.len() / TOKEN_BYTES);
        let mut hashes = Vec::with_capacity(blocks);
        self.hash_blocks(tokens, 0..blocks, &mut hashes);
        hashes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(range: std::ops::RangeInclusive<u32>) -> Vec<u8> {
        range.flat_map(u32::to_le_bytes).collect()
    }

    fn hashes(block_size: usize, tokens: &[u8], eagle: bool) -> Vec<u64> {
        BlockHasher::new(block_size, "", "", &[], eagle).unwrap().local_hashes(tokens)
    }

    #[test]
    fn golden_vectors() {
        let local = hashes(4, &tokens(1..=12), false);
        assert_eq!(local, [14643705804678351452, 16777012769546811212, 483935686894639516]);
        assert_eq!(sequence_hashes(local), [14643705804678351452, 4945711292740353085, 12583592247330656132]);
    }

    #[test]
    fn only_complete_blocks_are_hashed() {
        assert_eq!(hashes(4, &tokens(1..=10), false).len(), 2);
        assert_eq!(hashes(4, &tokens(1..=3), false).len(), 0);
        assert_eq!(hashes(4, &tokens(1..=8), true).len(), 1);
        assert_eq!(hashes(4, &[], true).len(), 0);
        assert!(BlockHasher::new(0, "", "", &[], false).is_err());
    }

    #[test]
    fn an_item_changes_the_blocks_that_it_touches() {
        let prompt = tokens(1..=16);
        let plain = hashes(4, &prompt, false);
        let span = [MmSpan { hash: 5, offset: 3, length: 2 }];
        let with_item: Vec<u64> = BlockHasher::new(4, "", "", &span, false).unwrap().local_hashes(&prompt);
        let changed: Vec<bool> = plain.iter().zip(&with_item).map(|(a, b)| a != b).collect();
        assert_eq!(changed, [true, true, false, false]);
    }

    #[test]
    fn digests_are_their_last_eight_bytes() {
        assert_eq!(engine_hash_of_bytes(&[0xff; 32]), u64::MAX);
        assert_eq!(engine_hash_of_bytes(&[9, 0, 0, 0, 0, 0, 0, 1, 2]), 0x0102);
        assert_eq!(engine_hash_of_bytes(&[1, 2]), 0x0102);
    }
}
