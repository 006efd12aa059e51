//! What the fuzz targets share: a bound on memory, and what they look at in an index.

#[path = "../../tests/counting_allocator/mod.rs"]
mod counting_allocator;

use counting_allocator::{Counting, MOST_BYTES_A_BYTE, MOST_BYTES_AT_ALL, peak_of};
use kvscout_native::index::{Bounds, Index, Row, WorkerDump, WorkerName};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Reads bytes; panics if that held more memory than their number allows.
pub fn bounded<R>(bytes: &[u8], read: impl FnOnce(&[u8]) -> R) -> R {
    let (result, peak) = peak_of(|| read(bytes));
    assert!(peak <= MOST_BYTES_AT_ALL + MOST_BYTES_A_BYTE * bytes.len(), "{peak} bytes for {}", bytes.len());
    result
}

/// An empty index with blocks of four tokens.
pub fn index(max_blocks: usize) -> Index {
    Index::new(4, false, Bounds { max_blocks, max_predictions: 32, prune_ratio: 0.5 })
}

/// A worker, rank 0.
pub fn name(worker_id: &str) -> WorkerName<'_> {
    WorkerName { worker_id, dp_rank: 0 }
}

/// Panics if an invariant of the index is violated.
pub fn check(index: &Index) {
    if let Err(what) = index.check_invariants() {
        panic!("{what}");
    }
}

/// Whom a query finds, and how many blocks on each level.
pub fn found(index: &Index, prompt: &[u64], now: f64) -> Vec<(String, Vec<u32>)> {
    let mut found = index.find(&mut &prompt[..], now, false, |rows: &[Row], directory| {
        let id = |row: &Row| {
            directory.name(row.worker).map_or_else(String::new, |name| name.worker_id.to_string())
        };
        rows.iter().map(|row| (id(row), row.blocks.to_vec())).collect::<Vec<_>>()
    });
    found.sort();
    found
}

/// The prefix of each block of a dump, by local hashes, as far as it is short enough to be asked for.
pub fn prompts(dump: &WorkerDump) -> Vec<Vec<u64>> {
    let mut prompts: Vec<Vec<u64>> = Vec::new();
    for block in dump.blocks.iter().take(64) {
        let mut prompt = block.parent.and_then(|parent| prompts.get(parent).cloned()).unwrap_or_default();
        prompt.push(block.local_hash);
        prompts.push(prompt);
    }
    prompts
}
