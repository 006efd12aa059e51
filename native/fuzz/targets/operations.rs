//! Any sequence of calls on one index; the bytes choose them.
//!
//! Invariants after every few calls, and at the end dump → load → equal, in dumps and in answers.

#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use kvscout_native::events::{Batch, Event, Removed, Span, Stored};
use kvscout_native::index::{Index, WorkerOptions};
use kvscout_native_fuzz::{check, found, index, name};
use libfuzzer_sys::fuzz_target;

const WORKERS: [&str; 3] = ["a", "b", "c"];
const MOST_CALLS: usize = 200;
const CALLS_A_CHECK: usize = 8;

/// Numbers are taken from a few, so that they meet.
#[derive(Debug, Arbitrary)]
enum Call {
    Stored { parent: Option<u8>, engine: Vec<u8>, content: Vec<u8>, place: u8 },
    Moved { engine: Vec<u8>, place: u8 },
    Removed { engine: Vec<u8>, place: u8 },
    Cleared,
    Reset,
    RemoveRank,
    AddWorker { set_copies: bool },
    Demote { ttl: u8 },
    Predict { content: Vec<u8>, ttl: u8 },
    Find { content: Vec<u8>, early_exit: bool },
    Later { seconds: u8, budget: u8 },
    Reload,
}

fn engine_hash(byte: u8) -> u64 {
    u64::from(byte % 24)
}

fn local_hash(byte: u8) -> u64 {
    u64::from(byte % 3) + 1
}

/// Group 2 is no full attention.
fn place(byte: u8) -> (u8, u32) {
    (byte % 4, u32::from(byte / 4 % 3))
}

fn stored(batch: &mut Batch, parent: Option<u64>, engine: &[u8], content: &[u8], at: u8) -> Event {
    let (tier, group) = place(at);
    let engine_hashes = named(batch, engine);
    let local_hashes = batch.add_hashes(&prompt(content));
    let full_attention = group < 2;
    Event::Stored(Stored {
        engine_hashes,
        parent,
        tier,
        group,
        full_attention,
        local_hashes,
        ..Stored::default()
    })
}

fn named(batch: &mut Batch, engine: &[u8]) -> Span {
    let hashes: Vec<u64> = engine.iter().copied().map(engine_hash).collect();
    batch.add_hashes(&hashes)
}

fn prompt(content: &[u8]) -> Vec<u64> {
    content.iter().copied().map(local_hash).collect()
}

/// Loads an index's state into an empty one and compares the two.
fn reload(source: &Index) -> Index {
    let copy = index(0);
    for rank in source.workers() {
        let rank = name(&rank.worker_id);
        let dump = source.dump(rank).expect("a known worker");
        copy.add_worker(rank, WorkerOptions::default());
        copy.load(rank, &dump).expect("a dump of our own");
        assert_eq!(copy.dump(rank), Some(dump));
    }
    check(&copy);
    copy
}

fn run(bytes: &[u8]) -> Result<()> {
    let mut input = Unstructured::new(bytes);
    let bound = if input.arbitrary()? { 12 } else { 0 };
    let mut index = index(bound);
    let mut now = 0.0;
    for call in 0..MOST_CALLS {
        if input.is_empty() {
            break;
        }
        let worker = name(WORKERS[usize::from(input.arbitrary::<u8>()?) % WORKERS.len()]);
        let mut batch = Batch::default();
        let apply = |mut batch: Batch, event| {
            batch.events.push(event);
            index.apply(worker, &batch, 0, None);
        };
        match input.arbitrary()? {
            Call::Stored { parent, engine, content, place } => {
                let blocks = engine.len().min(content.len());
                let parent = parent.map(engine_hash);
                let event = stored(&mut batch, parent, &engine[..blocks], &content[..blocks], place);
                apply(batch, event);
            }
            Call::Moved { engine, place } => {
                let event = stored(&mut batch, None, &engine, &[], place);
                apply(batch, event);
            }
            Call::Removed { engine, place: at } => {
                let (tier, group) = place(at);
                let engine_hashes = named(&mut batch, &engine);
                apply(batch, Event::Removed(Removed { engine_hashes, tier, group }));
            }
            Call::Cleared => apply(batch, Event::Cleared),
            Call::Reset => index.reset(worker),
            Call::RemoveRank => {
                index.remove_rank(worker);
            }
            Call::AddWorker { set_copies } => {
                index.add_worker(worker, WorkerOptions { set_copies, ..WorkerOptions::default() });
            }
            Call::Demote { ttl } => {
                index.demote(worker, ttl.into(), now);
            }
            Call::Predict { content, ttl } => {
                index.predict(worker, &prompt(&content), ttl.into(), now);
            }
            Call::Find { content, early_exit } => {
                let prompt = prompt(&content);
                if early_exit {
                    index.find(&mut &prompt[..], now, true, |_, _| ());
                } else {
                    found(&index, &prompt, now);
                }
            }
            Call::Later { seconds, budget } => {
                now += f64::from(seconds);
                index.maintain(now, budget.into());
            }
            Call::Reload if bound == 0 => index = reload(&index),
            Call::Reload => {}
        }
        if call % CALLS_A_CHECK == 0 {
            check(&index);
        }
    }
    check(&index);
    // What is no part of a dump must be gone before the two can answer alike.
    index.maintain(f64::INFINITY, usize::MAX);
    let copy = reload(&index);
    for content in 0..81_u8 {
        let prompt = prompt(&[content, content / 3, content / 9, content / 27]);
        assert_eq!(found(&copy, &prompt, now), found(&index, &prompt, now), "{prompt:?}");
    }
    while index.maintain(f64::INFINITY, usize::MAX) {}
    WORKERS.iter().for_each(|worker| {
        index.remove_rank(name(worker));
    });
    while index.maintain(f64::INFINITY, usize::MAX) {}
    check(&index);
    let stats = index.stats();
    assert_eq!((stats.blocks, stats.memberships, stats.predictions, stats.ghosts), (0, 0, 0, 0));
    Ok(())
}

fuzz_target!(|bytes: &[u8]| {
    // Too few bytes for the last call is the end of the sequence.
    let _ = run(bytes);
});
