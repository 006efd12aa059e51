//! Blocks that a worker probably holds, until they expire: routed prompts, and history after a loss.
//!
//! Refreshing a prediction leaves its entry in the heap; when that surfaces it is pushed again with the new
//! time. Entries of predictions that were cancelled are stale, and thrown out when they prevail.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::ledger::{Cursor, Prediction, ROOT};
use super::worker::{Binding, PREDICTED, PresenceId};
use super::{Index, State, WorkerName};

const STALE_SLACK: usize = 1024;

/// Soonest first, deeper blocks before their parents, then in the order of their making.
#[derive(Debug, Clone, Copy)]
struct Entry {
    expiry: f64,
    depth: u32,
    serial: u64,
    id: u32,
}

impl Entry {
    fn key(&self, other: &Self) -> Ordering {
        let depth = Reverse(self.depth).cmp(&Reverse(other.depth));
        self.expiry.total_cmp(&other.expiry).then(depth).then(self.serial.cmp(&other.serial))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key(other).reverse()
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Entry {}

/// When predictions end.
#[derive(Debug, Default)]
pub struct Expiries {
    heap: BinaryHeap<Entry>,
    serial: u64,
}

impl Index {
    /// Predicts a prompt's blocks on a worker; how many were not predicted before.
    pub fn predict(&self, name: WorkerName<'_>, local: &[u64], ttl_seconds: f64, now: f64) -> u64 {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(worker) = state.handle(name) else { return 0 };
        let slot = state.ranks[worker].slot;
        expire(state, now);
        self.open_level(state, worker, PREDICTED);
        state.ledger.cursor = ROOT;
        let mut added = 0;
        let mut done = 0;
        while done < local.len() {
            let (node, offset, blocks) = state.ledger.advance(slot, &local[done..]);
            for offset in offset..offset + blocks {
                added +=
                    u64::from(predict_block(state, slot, Cursor { node, next: offset }, now + ttl_seconds));
            }
            state.ledger.doubt(node);
            done += blocks as usize;
        }
        state.ledger.cursor = ROOT;
        state.ledger.finish();
        self.prune_predictions(state);
        self.drain(state, added as usize);
        added
    }

    /// Turns what a worker holds into predictions; how many blocks are now predicted.
    pub fn demote(&self, name: WorkerName<'_>, ttl_seconds: f64, now: f64) -> u64 {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(worker) = state.handle(name) else { return 0 };
        let slot = state.ranks[worker].slot;
        let until = now + ttl_seconds;
        self.open_level(state, worker, PREDICTED);
        let ledger = &mut state.ledger;
        let blocks: Vec<(PresenceId, u32, Vec<Binding>)> = ledger.bound_blocks(slot);
        let mut on_device = Vec::new();
        for (presence, offset, mut bindings) in blocks {
            if bindings.iter().all(|binding| binding.counts.is_empty()) {
                continue;
            }
            let part = ledger.part(slot, presence);
            if part.level(offset) == 0 {
                on_device.push(Cursor { node: part.node, next: offset });
            }
            for binding in &mut bindings {
                if !binding.counts.is_empty() {
                    binding.counts.clear();
                    ledger.worker_mut(slot).demoted.insert(binding.engine_hash);
                }
            }
            ledger.put_bindings(slot, presence, offset, bindings);
        }
        let worker = ledger.worker_mut(slot);
        worker.orphans.clear();
        worker.waiting.clear();
        worker.device_copies = 0;
        worker.demoted_until = worker.demoted_until.max(until);
        let added = on_device.into_iter().filter(|&block| predict_block(state, slot, block, until)).count();
        state.ledger.finish();
        self.prune_predictions(state);
        self.drain(state, added);
        added as u64
    }

    /// Ends the predictions whose time has come, if there are any.
    pub fn expire(&self, now: f64) {
        if now < f64::from_bits(self.next_expiry.load(Acquire)) {
            return;
        }
        let mut state = self.state.lock();
        expire(&mut state, now);
        self.publish_next_expiry(&state);
    }

    fn publish_next_expiry(&self, state: &State) {
        let next = state.expiries.heap.peek().map_or(f64::INFINITY, |entry| entry.expiry);
        self.next_expiry.store(next.to_bits(), Release);
    }

    /// Above the maximum, ends those that end soonest, until the share that pruning leaves.
    fn prune_predictions(&self, state: &mut State) {
        if state.ledger.live_predictions > self.bounds.max_predictions as u64 {
            let keep = (self.bounds.max_predictions as f64 * self.bounds.prune_ratio) as u64;
            while state.ledger.live_predictions > keep
                && let Some(entry) = state.expiries.heap.pop()
            {
                end(state, entry, f64::INFINITY);
            }
            state.ledger.finish();
        }
        self.publish_next_expiry(state);
    }
}

/// Predicts one block that the worker has not on the device; whether it was not predicted before.
fn predict_block(state: &mut State, slot: u32, block: Cursor, expiry: f64) -> bool {
    let ledger = &mut state.ledger;
    let Cursor { node, next: offset } = block;
    if let Some(presence) = ledger.nodes[node].presence(slot) {
        let part = ledger.part(slot, presence);
        if part.is_predicted(offset) {
            let id = part.more.as_ref().map_or(0, |more| more.prediction[offset as usize]);
            let prediction = &mut ledger.predictions[id];
            prediction.expiry = prediction.expiry.max(expiry);
            return false;
        }
        if part.level(offset) == 0 {
            return false;
        }
    }
    let presence = ledger.presence(slot, node);
    let part = ledger.part(slot, presence);
    let (pinned, depth) = (part.pins(offset), part.start + offset);
    state.expiries.serial += 1;
    let serial = state.expiries.serial;
    let id = ledger.predictions.insert(Prediction { slot, presence, depth, expiry, serial });
    let more = ledger.part_mut(slot, presence).more_mut();
    more.predicted.insert(offset);
    if more.prediction.len() <= offset as usize {
        more.prediction.resize(offset as usize + 1);
    }
    more.prediction[offset as usize] = id;
    if !pinned {
        ledger.pin(node, offset, true);
    }
    ledger.mark(slot, presence);
    ledger.worker_mut(slot).predictions += 1;
    ledger.live_predictions += 1;
    state.expiries.heap.push(Entry { expiry, depth, serial, id });
    true
}

/// Handles an entry that was popped: ends its prediction, or pushes it again if it was refreshed.
fn end(state: &mut State, entry: Entry, now: f64) {
    let Some(&prediction) = state.ledger.predictions.get(entry.id) else { return };
    if prediction.serial != entry.serial || state.ledger.worker(prediction.slot).dropped {
        return;
    }
    if prediction.expiry > entry.expiry {
        let refreshed = Entry { expiry: prediction.expiry, ..entry };
        if prediction.expiry > now || now == f64::INFINITY {
            state.expiries.heap.push(refreshed);
            return;
        }
    }
    let Prediction { slot, presence, depth, .. } = prediction;
    let offset = depth - state.ledger.part(slot, presence).start;
    state.ledger.cancel_prediction(slot, presence, offset);
}

fn expire(state: &mut State, now: f64) {
    let mut any = false;
    while let Some(&entry) = state.expiries.heap.peek()
        && entry.expiry <= now
    {
        state.expiries.heap.pop();
        end(state, entry, now);
        any = true;
    }
    if any {
        state.ledger.finish();
    }
    let State { ledger, expiries, .. } = state;
    if expiries.heap.len() > 2 * ledger.predictions.len() + STALE_SLACK {
        expiries.heap.retain(|entry| {
            ledger.predictions.get(entry.id).is_some_and(|prediction| prediction.serial == entry.serial)
        });
    }
}
