//! Blocks that a worker probably holds, until they expire: routed prompts, and history after a loss.
//!
//! Whatever concerns many predictions at once (their end, the maximum, a demotion) is done in slices: by the calls
//! that add some, by queries if nobody else writes, and by `maintain`.

use super::copies::{Counts, device_copies};
use super::demoted::Demotion;
use super::directory::WorkerName;
use super::ledger::{ROOT, Tip};
use super::predictions::Prediction;
use super::state::{Index, State};
use super::types::{PREDICTED, PresenceId, SLICE, TIERS};
use std::sync::atomic::Ordering::{Acquire, Release};

/// Predictions that a query ends at most.
const ENDED_BY_QUERY: usize = 64;

impl Index {
    /// Predicts a prompt's blocks on a worker; how many were not predicted before.
    pub fn predict(&self, name: WorkerName<'_>, local: &[u64], ttl_seconds: f64, now: f64) -> u64 {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(worker) = state.handle(name) else { return 0 };
        let slot = state.ranks[worker].slot;
        self.complete(state, slot);
        if !state.ledger.has_room(0, local) {
            return 0;
        }
        let mut budget = local.len() + SLICE;
        self.expire_slice(state, now, &mut budget);
        self.open_level(state, worker, PREDICTED);
        state.ledger.tip = ROOT;
        let (mut added, mut last, mut done) = (0, 0, 0);
        while done < local.len() {
            let (node, offset, blocks) = state.ledger.advance(slot, &local[done..]);
            for offset in offset..offset + blocks {
                let block = Tip { node, next: offset };
                // Deeper ones end first.
                let (id, is_new) = predict_block(state, slot, block, now + ttl_seconds, last);
                last = if id == 0 { last } else { id };
                added += u64::from(is_new);
            }
            state.ledger.doubt(node);
            done += blocks as usize;
        }
        state.ledger.tip = ROOT;
        state.ledger.finish();
        self.prune_predictions(state, added as usize + SLICE);
        self.publish_next_expiry(state);
        self.drain(state, added as usize);
        added
    }

    /// Turns what a worker holds into predictions, slice by slice; how many blocks are now predicted.
    pub fn demote(&self, name: WorkerName<'_>, ttl_seconds: f64, now: f64) -> u64 {
        self.begin_demotion(name, ttl_seconds, now);
        let mut added = 0;
        while let Some(some) = self.go_on_demoting(name) {
            added += some;
        }
        added
    }

    /// Begins to turn what a worker holds into predictions: the next write to the worker finds it done.
    pub fn begin_demotion(&self, name: WorkerName<'_>, ttl_seconds: f64, now: f64) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(handle) = state.handle(name) else { return };
        let slot = state.ranks[handle].slot;
        self.complete(state, slot);
        let until = now + ttl_seconds;
        self.open_level(state, handle, PREDICTED);
        let worker = state.ledger.worker_mut(slot);
        let orphans = std::mem::take(&mut worker.orphans);
        worker.device_copies -= orphans.iter().map(|(_, orphan)| device_copies(&orphan.counts)).sum::<u64>();
        worker.ghosts.doubt_evicted();
        worker.demoted_until = worker.demoted_until.max(until);
        worker.demotion = Some(Demotion { until, next: 0 });
        let windows = self.empty_windows(state, handle);
        drop(guard);
        drop((orphans, windows));
    }

    /// Demotes a slice; how many blocks of it were not predicted before, None if nothing was left to demote.
    pub fn go_on_demoting(&self, name: WorkerName<'_>) -> Option<u64> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let slot = state.ranks[state.handle(name)?].slot;
        state.ledger.worker(slot).demotion.as_ref()?;
        let (_, added) = self.demote_slice(state, slot, SLICE);
        Some(added)
    }

    /// Demotes about `budget` blocks of a worker that is being demoted; how many it looked at, and how many of them
    /// were not predicted before.
    pub(super) fn demote_slice(&self, state: &mut State, slot: u32, budget: usize) -> (usize, u64) {
        let mut looked_at = state.ledger.fill(slot, budget);
        let mut added = 0;
        if state.ledger.worker(slot).filling.is_some() {
            return (looked_at, added);
        }
        while looked_at < budget {
            let worker = state.ledger.worker_mut(slot);
            let entries = worker.entries();
            let Some(demotion) = &mut worker.demotion else { break };
            if entries == 0 {
                worker.demotion = None;
                break;
            }
            // Splits may add presences, above as well: it goes on until no hash has a copy.
            let presence = if demotion.next == 0 { worker.presences.highest() } else { demotion.next };
            demotion.next = presence - 1;
            looked_at += 1;
            if let Some(part) = worker.presences.get(presence) {
                let (until, end) = (demotion.until, part.end_of_copies());
                looked_at += end as usize;
                added += demote_presence(state, slot, presence, end, until);
            }
        }
        state.ledger.finish();
        self.prune_predictions(state, added as usize + SLICE);
        self.publish_next_expiry(state);
        self.drain(state, added as usize);
        (looked_at, added)
    }

    /// Ends some of the predictions whose time has come, if there are any, and nobody else writes.
    pub fn expire(&self, now: f64) {
        if now < f64::from_bits(self.next_expiry.load(Acquire)) {
            return;
        }
        let Some(mut state) = self.state.try_lock() else { return };
        end_due(&mut state, now, &mut ENDED_BY_QUERY.clone());
        self.publish_next_expiry(&state);
    }

    /// Ends predictions whose time has come, for a budget that it reduces; whether more are left.
    pub(super) fn expire_slice(&self, state: &mut State, now: f64, budget: &mut usize) -> bool {
        end_due(state, now, budget);
        self.prune_predictions(state, *budget);
        state.pruning || state.ledger.predictions.first().is_some_and(|(_, expiry)| expiry <= now)
    }

    pub(super) fn publish_next_expiry(&self, state: &State) {
        let next = state.ledger.predictions.first().map_or(f64::INFINITY, |(_, expiry)| expiry);
        self.next_expiry.store(next.to_bits(), Release);
    }

    /// Above the maximum, ends those that end soonest, until the share that pruning leaves, but at most `budget`.
    fn prune_predictions(&self, state: &mut State, mut budget: usize) {
        let live = |state: &State| state.ledger.live_predictions;
        let keep = (self.bounds.max_predictions as f64 * self.bounds.prune_ratio) as u64;
        state.pruning =
            live(state) > self.bounds.max_predictions as u64 || state.pruning && live(state) > keep;
        if !state.pruning {
            return;
        }
        while live(state) > keep
            && budget > 0
            && let Some((id, _)) = state.ledger.predictions.first()
        {
            end(state, id);
            budget -= 1;
        }
        state.pruning = live(state) > keep;
        state.ledger.finish();
    }
}

/// Demotes the blocks of a presence before `end`; how many were not predicted before.
fn demote_presence(state: &mut State, slot: u32, presence: PresenceId, end: u32, until: f64) -> u64 {
    let mut added = 0;
    // From the end: what is taken from there leaves an interval.
    for offset in (0..end).rev() {
        let ledger = &mut state.ledger;
        let part = ledger.part(slot, presence);
        if !part.bound.contains(offset) {
            continue;
        }
        let (node, level) = (part.node, part.level(offset));
        if part.is_odd(offset) {
            let mut bindings = ledger.bindings(slot, presence, offset);
            for binding in bindings.iter_mut().filter(|binding| !binding.counts.is_empty()) {
                let worker = ledger.worker_mut(slot);
                worker.device_copies -= device_copies(&binding.counts);
                worker.demoted.insert(binding.engine_hash);
                binding.counts = Counts::new();
            }
            ledger.put_bindings(slot, presence, offset, bindings);
        } else if level < TIERS {
            let engine_hash = part.own[offset as usize];
            let copies = device_copies(&ledger.worker(slot).plain_counts(presence, offset));
            let worker = ledger.worker_mut(slot);
            worker.device_copies -= copies;
            worker.demoted.insert(engine_hash);
            ledger.set_tiers(slot, presence, offset, [false; TIERS]);
        }
        if level == 0 {
            let (_, is_new) = predict_block(state, slot, Tip { node, next: offset }, until, 0);
            added += u64::from(is_new);
        }
    }
    added
}

/// Predicts one block that the worker has not on the device, which ends before `next` as `Predictions::insert` says.
/// Its number, 0 if it was not changed, and whether it was not predicted before.
fn predict_block(state: &mut State, slot: u32, block: Tip, expiry: f64, next: u32) -> (u32, bool) {
    let ledger = &mut state.ledger;
    let Tip { node, next: offset } = block;
    if let Some(presence) = ledger.nodes[node].presence(slot) {
        let part = ledger.part(slot, presence);
        if part.is_predicted(offset) {
            let id = part.more.as_ref().map_or(0, |more| more.prediction[offset as usize]);
            let refreshed = ledger.predictions.refresh(id, expiry, next);
            return (if refreshed { id } else { 0 }, false);
        }
        if part.level(offset) == 0 {
            return (0, false);
        }
    }
    let presence = ledger.presence(slot, node);
    let part = ledger.part(slot, presence);
    let (pinned, depth) = (part.pins(offset), part.start + offset);
    let id = ledger.predictions.insert(slot, presence, depth, expiry, next);
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
    (id, true)
}

/// Ends predictions whose time has come, for a budget that it reduces.
fn end_due(state: &mut State, now: f64, budget: &mut usize) {
    while *budget > 0
        && let Some((id, expiry)) = state.ledger.predictions.first()
        && expiry <= now
    {
        end(state, id);
        *budget -= 1;
    }
    state.ledger.finish();
}

/// Ends a prediction; those of a worker that was dropped go when that is drained.
fn end(state: &mut State, id: u32) {
    let ledger = &mut state.ledger;
    let Prediction { slot, presence, depth, .. } = ledger.predictions[id];
    if ledger.worker(slot).dropped {
        ledger.predictions.unlink(id);
        return;
    }
    let offset = depth - ledger.part(slot, presence).start;
    ledger.cancel_prediction(slot, presence, offset);
}
