//! Judges events, in the order of `Ignored`, and stores what is left of them.

use super::store::Target;
use super::{Handle, Index, State, WorkerName, WorkerOptions};
use crate::events::{Batch, Event, Removed, Stored};
use crate::hashing::{BlockHasher, MmSpan, mm_hash, token_bytes};

/// Cache groups known for each worker rank.
const GROUP_LIMIT: usize = 64;

/// Blocks of dropped content that each batch frees, beside as many as its events have: drains faster than events
/// can fill.
const DRAINED_BY_APPLY: usize = 512;

/// Why something an engine said was not indexed; as in `kvscout_blocks.index.Ignored`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ignored {
    Incompatible,
    SkippedGroup,
    UnknownMoved,
    BadLength,
    BlockSize,
    EagleMismatch,
    UnnamedLora,
    HashConflict,
    OrphanLimit,
    UnknownRemoved,
}

/// Number of reasons.
pub const IGNORED: usize = 10;

/// What became of one batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    pub events: usize,
    pub faults: usize,
    pub over_capacity: bool,
    pub incompatible: String,
}

impl Index {
    /// Applies one batch and moves the worker's cursor.
    pub fn apply(&self, name: WorkerName<'_>, batch: &Batch, epoch: u64, event_id: Option<u64>) -> Applied {
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut applied =
            Applied { events: batch.events.len(), faults: batch.faults.len(), ..Applied::default() };
        let Some(worker) = state.handle(name) else {
            state.unknown_worker += 1;
            return applied;
        };
        let mut filled = 0;
        for event in &batch.events {
            let blocks = match event {
                Event::Cleared => 0,
                Event::Stored(stored) => stored.engine_hashes.len(),
                Event::Removed(removed) => removed.engine_hashes.len(),
            };
            match event {
                Event::Cleared => self.renew(state, worker),
                _ if !state.ranks[worker].incompatible.is_empty() => {
                    count(state, worker, Ignored::Incompatible, 1)
                }
                Event::Stored(stored) => self.stored(state, worker, stored),
                Event::Removed(removed) => removed_event(state, worker, removed),
            }
            state.ledger.finish();
            // Event by event, since each Cleared takes a slot.
            self.drain(state, blocks + 1);
            filled += blocks;
        }
        self.enforce_bound(state, filled);
        self.drain(state, DRAINED_BY_APPLY);
        let rank = &mut state.ranks[worker];
        if event_id.is_some() {
            (rank.epoch, rank.last_event_id) = (epoch, event_id);
        }
        applied.over_capacity = rank.over_capacity(state.ledger.worker(rank.slot));
        applied.incompatible.clone_from(&rank.incompatible);
        applied
    }

    /// Empties a worker at once; its groups stay known.
    fn renew(&self, state: &mut State, worker: Handle) {
        let slot = state.ranks[worker].slot;
        let groups = state.ledger.worker(slot).groups.clone();
        self.drop_slot(state, slot);
        let slot = self.new_slot(state, worker);
        state.ledger.worker_mut(slot).groups = groups;
        state.ledger.refresh_groups(slot);
        state.ranks[worker].slot = slot;
    }

    fn stored(&self, state: &mut State, worker: Handle, event: &Stored) {
        let slot = state.ranks[worker].slot;
        if !state.ledger.learn_group(slot, event.group, event.full_attention, GROUP_LIMIT) {
            count(state, worker, Ignored::SkippedGroup, 1);
            return;
        }
        let to = Target { group: event.group, tier: event.tier, set: state.ranks[worker].options.set_copies };
        if event.tokens.is_empty() && event.local_hashes.is_empty() {
            self.open_level(state, worker, usize::from(to.tier));
            for &engine_hash in &event.engine_hashes {
                if !state.ledger.store_known(slot, engine_hash, to) {
                    count(state, worker, Ignored::UnknownMoved, 1);
                }
            }
            return;
        }
        if let Some(reason) = self.judge_content(&state.ranks[worker].options, event) {
            count(state, worker, reason, 1);
            if reason == Ignored::BlockSize {
                self.renew(state, worker);
                state.ranks[worker].incompatible = format!(
                    "the engine's blocks have {} tokens, the registration says {}",
                    event.block_size, self.block_size
                );
            }
            return;
        }
        self.open_level(state, worker, usize::from(to.tier));
        let computed;
        let local = if event.local_hashes.is_empty() {
            computed = self.local_hashes(&state.ranks[worker].options, event);
            &computed
        } else {
            &event.local_hashes
        };
        let refused = state.ledger.store(slot, event.parent, &event.engine_hashes, local, to);
        count(state, worker, Ignored::HashConflict, refused.conflicts);
        count(state, worker, Ignored::OrphanLimit, refused.orphan_limit);
    }

    /// Why a Stored event with content cannot be indexed; None if it can.
    fn judge_content(&self, options: &WorkerOptions, event: &Stored) -> Option<Ignored> {
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
        let named = event.lora_id == 0
            || !event.lora_name.is_empty()
            || options.adapters.contains_key(&event.lora_id);
        (!named).then_some(Ignored::UnnamedLora)
    }

    fn local_hashes(&self, options: &WorkerOptions, event: &Stored) -> Vec<u64> {
        let lora = match event.lora_name.as_str() {
            "" if event.lora_id != 0 => options.adapters.get(&event.lora_id).map_or("", String::as_str),
            name => name,
        };
        let salt = if event.parent.is_none() { event.cache_salt.as_str() } else { "" };
        let spans: Vec<MmSpan> = event
            .mm_items
            .iter()
            .take(event.engine_hashes.len())
            .enumerate()
            .flat_map(|(block, items)| items.iter().map(move |item| (block, item)))
            .map(|(block, item)| MmSpan { hash: mm_hash(item), offset: block * self.block_size, length: 1 })
            .collect();
        let with_lookahead;
        let tokens = match event.lookahead {
            Some(token) if self.eagle && !event.pairs => {
                with_lookahead = [&event.tokens[..], &[token]].concat();
                &with_lookahead
            }
            _ => &event.tokens,
        };
        BlockHasher::new(self.block_size, lora, salt, &spans, self.eagle)
            .map_or_else(|_| Vec::new(), |hasher| hasher.local_hashes(&token_bytes(tokens)))
    }
}

fn removed_event(state: &mut State, worker: Handle, event: &Removed) {
    let slot = state.ranks[worker].slot;
    if state.ledger.worker(slot).groups.contains(&(event.group, false)) {
        count(state, worker, Ignored::SkippedGroup, 1);
        return;
    }
    let unknown = state.ledger.remove(slot, &event.engine_hashes, event.group, event.tier);
    count(state, worker, Ignored::UnknownRemoved, unknown);
}

fn count(state: &mut State, worker: Handle, reason: Ignored, number: u64) {
    state.ranks[worker].ignored[reason as usize] += number;
}
