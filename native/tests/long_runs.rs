//! Prompts of thousands of blocks that branch, against a model that looks at every block.
//!
//! The Python tests compare every operation with a model on prompts of a few blocks; runs that are cut,
//! chained at their longest, full of holes and shared by workers are met here. `KVSCOUT_TEST_SEED` reruns a
//! seed, `KVSCOUT_LONG_RUN_STEPS` sets how many steps are taken.

use std::collections::HashMap;

use kvscout_native::events::{Batch, Event, Removed, Stored};
use kvscout_native::hashing::sequence_hashes;
use kvscout_native::index::{Bounds, Index, WorkerName, WorkerOptions};
use kvscout_native::table::mix;

const WORKERS: usize = 5;
const NAMES: [&str; WORKERS] = ["w0", "w1", "w2", "w3", "w4"];

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0, 1) % end as u64) as usize
    }
}

fn name(worker: usize) -> WorkerName<'static> {
    WorkerName { worker_id: NAMES[worker], dp_rank: 0 }
}

/// Prompts that share prefixes of any length.
fn prompts(random: &mut Random) -> Vec<Vec<u64>> {
    let mut prompts: Vec<Vec<u64>> = Vec::new();
    for _ in 0..12 {
        let mut prompt = match prompts.len() {
            0 => Vec::new(),
            known => {
                let other = &prompts[random.below(known)];
                other[..random.below(other.len())].to_vec()
            }
        };
        let more = [3, 70, 300, 3000][random.below(4)];
        prompt.extend((0..1 + random.below(more)).map(|_| random.below(usize::MAX) as u64));
        prompts.push(prompt);
    }
    prompts
}

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect(name))
}

#[test]
fn long_branching_prompts_agree_with_a_model() {
    let seed = variable("KVSCOUT_TEST_SEED", std::process::id().into());
    println!("KVSCOUT_TEST_SEED={seed}");
    let mut random = Random(seed);
    let index = Index::new(16, false, Bounds { max_blocks: 0, max_predictions: 1 << 20, prune_ratio: 0.8 });
    (0..WORKERS).for_each(|worker| {
        index.add_worker(name(worker), WorkerOptions::default());
    });
    let mut known = prompts(&mut random);
    // Worker → engine hash → copies. The sequence hash names the prefix, so it serves as the engine's hash.
    let mut model: Vec<HashMap<u64, u32>> = vec![HashMap::new(); WORKERS];
    for step in 0..variable("KVSCOUT_LONG_RUN_STEPS", 400) {
        let worker = random.below(WORKERS);
        let prompt = known[random.below(known.len())].clone();
        let chain = sequence_hashes(prompt.iter().copied());
        let held = &mut model[worker];
        let mut batch = Batch::default();
        let event = match random.below(20) {
            0..8 => {
                // From the root, or from any block that is held: others would be ghosts or orphans.
                let starts: Vec<usize> =
                    (0..prompt.len()).filter(|&at| at == 0 || held.contains_key(&chain[at - 1])).collect();
                let from = starts[random.below(starts.len())];
                let to = from + 1 + random.below(prompt.len() - from);
                chain[from..to].iter().for_each(|hash| *held.entry(*hash).or_default() += 1);
                Event::Stored(Stored {
                    engine_hashes: batch.add_hashes(&chain[from..to]),
                    parent: (from > 0).then(|| chain[from - 1]),
                    local_hashes: batch.add_hashes(&prompt[from..to]),
                    full_attention: true,
                    ..Stored::default()
                })
            }
            8..19 => {
                let from = random.below(prompt.len());
                let longest = [2, 40, 4000][random.below(3)];
                let to = from + 1 + random.below((prompt.len() - from).min(longest));
                let mut engine_hashes = chain[from..to].to_vec();
                if random.below(2) == 0 {
                    engine_hashes.reverse();
                }
                for hash in &engine_hashes {
                    if let Some(copies) = held.get_mut(hash) {
                        *copies -= 1;
                        if *copies == 0 {
                            held.remove(hash);
                        }
                    }
                }
                let engine_hashes = batch.add_hashes(&engine_hashes);
                Event::Removed(Removed { engine_hashes, tier: 0, group: 0 })
            }
            _ if random.below(4) == 0 => {
                held.clear();
                Event::Cleared
            }
            _ => {
                known = prompts(&mut random);
                continue;
            }
        };
        batch.events.push(event);
        index.apply(name(worker), &batch, 0, None);
        for prompt in &known {
            let chain = sequence_hashes(prompt.iter().copied());
            let mut expected: Vec<(String, u32)> = (0..WORKERS)
                .map(|worker| {
                    (worker, chain.iter().take_while(|hash| model[worker].contains_key(hash)).count())
                })
                .filter(|&(_, blocks)| blocks > 0)
                .map(|(worker, blocks)| (NAMES[worker].to_owned(), blocks as u32))
                .collect();
            let mut found: Vec<(String, u32)> =
                index.find(&mut &prompt[..], 0.0, false, |rows, directory| {
                    let id = |handle| {
                        directory.name(handle).map_or_else(String::new, |name| name.worker_id.to_string())
                    };
                    rows.iter().map(|row| (id(row.worker), row.blocks[0])).collect()
                });
            expected.sort();
            found.sort();
            assert_eq!(found, expected, "KVSCOUT_TEST_SEED={seed}, step {step}");
        }
        if step % 25 == 0 {
            index
                .check_invariants()
                .unwrap_or_else(|what| panic!("KVSCOUT_TEST_SEED={seed}, step {step}: {what}"));
            let memberships: usize = model.iter().map(HashMap::len).sum();
            assert_eq!(
                index.stats().memberships,
                memberships as u64,
                "KVSCOUT_TEST_SEED={seed}, step {step}"
            );
            let worker = random.below(WORKERS);
            let dump = index.dump(name(worker)).expect("a known worker");
            index.load(name(worker), &dump).expect("a dump of our own");
            assert_eq!(
                index.dump(name(worker)).as_ref(),
                Some(&dump),
                "KVSCOUT_TEST_SEED={seed}, step {step}"
            );
        }
    }
    (0..WORKERS).for_each(|worker| assert!(index.remove_rank(name(worker))));
    while index.maintain(0.0, 4096) {}
    index.check_invariants().expect("an empty index");
    let stats = index.stats();
    assert_eq!((stats.blocks, stats.memberships, stats.workers), (0, 0, 0));
}
