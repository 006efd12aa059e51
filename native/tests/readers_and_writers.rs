//! Queries during writes see what was held at some time, never more.

use std::sync::atomic::{AtomicBool, Ordering};

use kvscout_native::events::{Batch, Event, Removed, Stored};
use kvscout_native::hashing::sequence_hashes;
use kvscout_native::index::{Bounds, Index, WorkerName, WorkerOptions};
use kvscout_native::table::mix;

const BLOCKS: usize = 300;

fn name(worker_id: &str) -> WorkerName<'_> {
    WorkerName { worker_id, dp_rank: 0 }
}

fn stored(parent: Option<u64>, engine: &[u64], local: &[u64]) -> Batch {
    let mut batch = Batch::default();
    let (engine_hashes, local_hashes) = (batch.add_hashes(engine), batch.add_hashes(local));
    let stored = Stored { engine_hashes, parent, local_hashes, full_attention: true, ..Stored::default() };
    batch.events.push(Event::Stored(stored));
    batch
}

fn removed(engine: &[u64]) -> Batch {
    let mut batch = Batch::default();
    let engine_hashes = batch.add_hashes(engine);
    batch.events.push(Event::Removed(Removed { engine_hashes, tier: 0, group: 0 }));
    batch
}

fn apply(index: &Index, worker: &str, batch: Batch) {
    index.apply(name(worker), &batch, 0, None);
}

#[test]
fn queries_during_writes_see_no_more_than_was_held() {
    let index = Index::new(16, false, Bounds { max_blocks: 0, max_predictions: 1 << 20, prune_ratio: 0.8 });
    index.add_worker(name("steady"), WorkerOptions::default());
    index.add_worker(name("busy"), WorkerOptions::default());
    let prompt: Vec<u64> = (0..BLOCKS as u64).map(|block| mix(block, 3)).collect();
    let chain = sequence_hashes(prompt.iter().copied());
    // All of the time both hold the first 100 blocks; the busy one at times 200, never more.
    apply(&index, "steady", stored(None, &chain[..100], &prompt[..100]));
    apply(&index, "busy", stored(None, &chain[..100], &prompt[..100]));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = || {
            let mut queries = 0_u64;
            while !done.load(Ordering::Relaxed) || queries < 100 {
                index.find(&mut &prompt[..], 0.0, false, |rows, directory| {
                    let of = |worker: &str| {
                        let is = |row: &&kvscout_native::index::Row| {
                            directory.name(row.worker).is_some_and(|name| &*name.worker_id == worker)
                        };
                        rows.iter().find(is).map_or(0, |row| row.blocks[0])
                    };
                    assert_eq!(of("steady"), 100);
                    assert!((100..=200).contains(&of("busy")), "{}", of("busy"));
                    assert!(of("passing") <= 300);
                });
                queries += 1;
            }
        };
        scope.spawn(reader);
        scope.spawn(reader);
        for round in 0..2000_u64 {
            apply(&index, "busy", stored(Some(chain[99]), &chain[100..200], &prompt[100..200]));
            // Another branch cuts the run where it is read.
            let branch = 100 + (round % 90) as usize;
            let other = mix(round + 1_000_000, 3);
            apply(&index, "busy", stored(Some(chain[branch]), &[other], &[other]));
            index.add_worker(name("passing"), WorkerOptions::default());
            apply(&index, "passing", stored(None, &chain, &prompt));
            assert!(index.remove_rank(name("passing")));
            let mut gone = chain[100..200].to_vec();
            gone.push(other);
            apply(&index, "busy", removed(&gone));
            index.maintain(0.0, 4096);
        }
        done.store(true, Ordering::Relaxed);
    });
    index.check_invariants().expect("invariants after all writes");
}

#[test]
fn the_bound_makes_no_holes_while_queries_mark_what_they_use() {
    const MAX_BLOCKS: usize = 512;
    let index =
        Index::new(16, false, Bounds { max_blocks: MAX_BLOCKS, max_predictions: 1 << 20, prune_ratio: 0.8 });
    index.add_worker(name("only"), WorkerOptions::default());
    // Many prompts branch off a few: runs of one block, each marked by itself.
    let prompt = |number: u64| -> Vec<u64> {
        (0..12).map(|depth| mix(depth << 32 | number >> (11 - depth), 3)).collect()
    };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (index, done) = (&index, &done);
            scope.spawn(move || {
                let mut queries = 0_u64;
                while !done.load(Ordering::Relaxed) || queries < 100 {
                    let asked = prompt(mix(queries, reader) % 4096);
                    index.find(&mut &asked[..], 0.0, false, |rows, _| assert!(rows.len() <= 1));
                    queries += 1;
                }
            });
        }
        for round in 0..1500_u64 {
            let local = prompt(mix(round, 9) % 4096);
            let chain = sequence_hashes(local.iter().copied());
            apply(&index, "only", stored(None, &chain, &local));
            let stats = index.stats();
            assert_eq!(stats.hidden, 0, "round {round}");
            assert!(stats.memberships <= MAX_BLOCKS as u64);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(index.stats().evicted > MAX_BLOCKS as u64, "the bound was at work");
    index.check_invariants().expect("invariants after all writes");
}
