//! The fixture into an index.

use std::fs;

use crate::fixture::Fixture;
use crate::{Block, Failure, Index};

const GROUP: u64 = 64;
const IN_FLIGHT: u64 = 64;
const PAGE_BYTES: u64 = 4096;

/// Local hashes of one of the fixture's prompts; `tokens` is overwritten.
pub fn local_hashes<I: Index>(fixture: &Fixture, prompt: u64, tokens: &mut Vec<u32>) -> Vec<u64> {
    fixture.tokens(prompt, tokens);
    I::local_hashes(tokens)
}

/// Stores the fixture; says how many memberships it has.
pub fn fill<I: Index>(fixture: &Fixture, index: &I) -> Result<u64, Failure> {
    let (mut memberships, mut in_flight) = (0, 0);
    let (mut tokens, mut blocks) = (Vec::new(), Vec::new());
    for first in (0..fixture.prompts).step_by(GROUP as usize) {
        let group: Vec<_> = (first..fixture.prompts.min(first + GROUP))
            .map(|prompt| (prompt, local_hashes::<I>(fixture, prompt, &mut tokens), fixture.holders(prompt)))
            .collect();
        for start in (0..fixture.blocks).step_by(fixture.event_blocks as usize) {
            for (prompt, local, holders) in &group {
                for &(worker, length) in holders.iter().filter(|(_, length)| *length > start) {
                    let end = length.min(start + fixture.event_blocks);
                    let parent = start.checked_sub(1).map(|last| fixture.engine_hash(*prompt, last));
                    blocks.clear();
                    blocks.extend((start..end).map(|b| Block {
                        local: local[b as usize],
                        engine: fixture.engine_hash(*prompt, b),
                    }));
                    index.apply(index.stored(worker, parent, &blocks))?;
                    memberships += end - start;
                    in_flight += 1;
                    if in_flight == IN_FLIGHT {
                        index.settle()?;
                        in_flight = 0;
                    }
                }
            }
        }
    }
    index.settle()?;
    Ok(memberships)
}

/// Memory of this process.
pub fn resident_bytes() -> Result<u64, Failure> {
    let statm =
        fs::read_to_string("/proc/self/statm").map_err(|error| format!("/proc/self/statm: {error}"))?;
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.ok_or("/proc/self/statm: no resident pages")? * PAGE_BYTES)
}
