//! Tokens, names and items of any content and size; the lazy prompt equals the whole one.

#![no_main]

use arbitrary::Arbitrary;
use kvscout_native::hashing::{
    BlockHasher, MmSpan, engine_hash_of_bytes, hashes_from_bytes, mm_hash, sequence_hashes,
};
use kvscout_native::index::{Prompt, TokenPrompt};
use kvscout_native_fuzz::bounded;
use libfuzzer_sys::fuzz_target;

/// What besides its tokens makes a prompt, and bytes that are tokens or hashes.
#[derive(Debug, Arbitrary)]
struct Input {
    block_size: u16,
    eagle: bool,
    lora: String,
    salt: String,
    /// Id, offset, length.
    items: Vec<(String, usize, usize)>,
    bytes: Vec<u8>,
}

fuzz_target!(|input: Input| {
    let Input { block_size, eagle, lora, salt, items, bytes } = input;
    let spans: Vec<MmSpan> = items
        .iter()
        .map(|(id, offset, length)| MmSpan { hash: mm_hash(id), offset: *offset, length: *length })
        .collect();
    engine_hash_of_bytes(&bytes);
    let _ = bounded(&bytes, |bytes| hashes_from_bytes(bytes).map(|hashes| hashes.len()));
    let tokens = &bytes[..bytes.len() / 4 * 4];
    let Ok(hasher) = BlockHasher::new(block_size.into(), &lora, &salt, &spans, eagle) else { return };
    let local = hasher.local_hashes(tokens);
    let blocks = (tokens.len() / 4).saturating_sub(usize::from(eagle)) / usize::from(block_size);
    assert_eq!(local.len(), blocks);
    assert_eq!(sequence_hashes(local.iter().copied()).len(), blocks);
    let mut prompt = TokenPrompt::new(hasher, tokens);
    assert_eq!(prompt.len(), blocks);
    for count in [1, blocks / 2, blocks] {
        let count = count.min(blocks);
        assert_eq!(prompt.hashes(count)[..count], local[..count]);
    }
});
