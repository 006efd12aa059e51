//! Judges events, in the order of `Ignored`, and stores what is left of them.

use super::directory::{Handle, WorkerName};
use super::ghosts::limit_for;
use super::shared::SHARED_TIER;
use super::state::{Index, Rank, State};
use super::store::{Refused, Target};
use super::types::{GROUP_LIMIT, Ignored, SLICE};
use super::waiting;
use super::window::WindowGroups;
use super::window::settle::remove_window_blocks;
use crate::acceptance::Rules;
use crate::events::{Batch, Event, Removed, Stored};

/// Blocks of one batch.
const BATCH_LIMIT: usize = 1 << 20;

/// Blocks of dropped content that each batch frees, beside as many as its events have: drains faster than events
/// can fill.
const DRAINED_BY_APPLY: usize = 512;

/// What became of one batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    pub events: usize,
    pub faults: usize,
    pub over_capacity: bool,
    pub incompatible: String,
}

/// An event with the external tier in place of the one on which the worker's engine announces shared blocks.
fn on_shared_tier(event: &Event, shared: u8) -> Event {
    let tier_of = |tier: u8| if shared == tier { SHARED_TIER } else { tier };
    match *event {
        Event::Stored(stored) => Event::Stored(Stored { tier: tier_of(stored.tier), ..stored }),
        Event::Removed(removed) => Event::Removed(Removed { tier: tier_of(removed.tier), ..removed }),
        Event::Cleared => Event::Cleared,
    }
}

impl Index {
    /// Applies one batch and moves the worker's cursor.
    pub fn apply(&self, name: WorkerName<'_>, batch: &Batch, epoch: u64, event_id: Option<u64>) -> Applied {
        let mut guard = waiting::lock(&self.state);
        let state = &mut *guard;
        let mut applied =
            Applied { events: batch.events.len(), faults: batch.faults.len(), ..Applied::default() };
        let Some(worker) = state.handle(name) else {
            state.unknown_worker += 1;
            return applied;
        };
        self.complete(state, state.ranks[worker].slot);
        self.limit_ghosts(state, worker);
        let mut filled = 0;
        let mut rooting = SLICE;
        for event in &batch.events {
            let tiered;
            let event = match state.ranks[worker].options.shared.tier {
                Some(tier) => {
                    tiered = on_shared_tier(event, tier);
                    &tiered
                }
                None => event,
            };
            let blocks = match event {
                Event::Cleared => 0,
                Event::Stored(stored) => stored.engine_hashes.len(),
                Event::Removed(removed) => removed.engine_hashes.len(),
            };
            match event {
                Event::Cleared => self.renew(state, worker),
                _ if filled + blocks > BATCH_LIMIT => {
                    if let Event::Removed(_) = event {
                        // What it no longer has cannot be told from what it has.
                        self.renew(state, worker);
                    }
                    self.count(state, worker, Ignored::BatchLimit, blocks as u64);
                    continue;
                }
                _ if !state.ranks[worker].incompatible.is_empty() => {
                    self.count(state, worker, Ignored::Incompatible, 1)
                }
                Event::Stored(stored) => self.stored(state, worker, batch, stored),
                Event::Removed(removed) => self.removed(state, worker, batch, removed),
            }
            self.share(state, worker, batch, event);
            rooting += blocks;
            state.ledger.finish_within(&mut rooting);
            // Event by event, since each Cleared takes a slot.
            self.drain(state, blocks + 1);
            filled += blocks;
        }
        let unknown = self.settle_windows(state, worker, batch);
        self.count(state, worker, Ignored::UnknownMoved, unknown);
        let restored = std::mem::take(&mut state.ledger.restored);
        self.enforce_bound(state, filled + restored);
        self.drain(state, DRAINED_BY_APPLY);
        state.ledger.settle_many();
        let rank = &mut state.ranks[worker];
        if event_id.is_some() {
            (rank.epoch, rank.last_event_id) = (epoch, event_id);
        }
        applied.over_capacity = rank.over_capacity(state.ledger.worker(rank.slot));
        applied.incompatible.clone_from(&rank.incompatible);
        let garbage = std::mem::take(&mut state.garbage);
        drop(guard);
        drop(garbage);
        applied
    }

    /// Empties a worker at once; its groups stay known.
    fn renew(&self, state: &mut State, worker: Handle) {
        let slot = state.ranks[worker].slot;
        let old = state.ledger.worker(slot);
        let (groups, windows) = (old.groups.clone(), old.windows.as_ref().map(|windows| windows.groups()));
        let moves_blocks = old.moves_blocks;
        self.drop_slot(state, slot);
        let slot = self.new_slot(state, worker);
        let new = state.ledger.worker_mut(slot);
        (new.groups, new.moves_blocks) = (groups, moves_blocks);
        new.windows = WindowGroups::of_groups(&windows.unwrap_or_default(), self.block_size);
        state.ledger.refresh_groups(slot);
        state.ranks[worker].slot = slot;
        self.show_windows(state, worker);
        self.limit_ghosts(state, worker);
    }

    /// Lets a worker have as many ghosts as may be asked for.
    fn limit_ghosts(&self, state: &mut State, worker: Handle) {
        let Rank { slot, ref options, .. } = state.ranks[worker];
        let content = state.ledger.worker_mut(slot);
        let asked = self.bounds.max_blocks > 0 || content.moves_blocks;
        content.ghosts.set_limit(limit_for(options.total_kv_blocks, asked));
    }

    fn stored(&self, state: &mut State, worker: Handle, batch: &Batch, event: &Stored) {
        let slot = state.ranks[worker].slot;
        let content = state.ledger.worker_mut(slot);
        content.zero_is_block |=
            event.parent.is_none() && event.has_content() || batch.hashes(event.engine_hashes).contains(&0);
        if !content.moves_blocks && (event.tier > 0 || !event.has_content()) {
            content.moves_blocks = true;
            self.limit_ghosts(state, worker);
        }
        let content = state.ledger.worker_mut(slot);
        let event = &content.rooted(event);
        let full_groups = state.ledger.worker(slot).full_groups.len();
        if !state.ledger.learn_group(slot, event.group, event.full_attention, GROUP_LIMIT) {
            match self.window_stored(state, worker, batch, event) {
                Some(refused) => self.count(state, worker, Ignored::WindowLimit, refused),
                None => self.count(state, worker, Ignored::SkippedGroup, 1),
            }
            return;
        }
        if full_groups == 0 {
            self.show_windows(state, worker);
        }
        let to = Target { group: event.group, tier: event.tier, set: state.ranks[worker].options.set_copies };
        if !event.has_content() {
            self.open_level(state, worker, usize::from(to.tier));
            for &engine_hash in batch.hashes(event.engine_hashes) {
                match state.ledger.store_known(slot, engine_hash, to) {
                    Some(refused) => self.count_refused(state, worker, refused),
                    None => self.count(state, worker, Ignored::UnknownMoved, 1),
                }
            }
            return;
        }
        let rules = Rules {
            block_size: self.block_size,
            eagle: self.eagle,
            adapters: &state.ranks[worker].options.adapters,
        };
        if let Some(reason) = rules.judge_content(event) {
            self.count(state, worker, reason, 1);
            if reason == Ignored::BlockSize {
                self.renew(state, worker);
                state.ranks[worker].incompatible = format!(
                    "the engine's blocks have {} tokens, the registration says {}",
                    event.block_size, self.block_size
                );
            }
            return;
        }
        let local = rules.local_hashes(batch, event);
        self.open_level(state, worker, usize::from(to.tier));
        let refused = state.ledger.store(slot, event.parent, batch.hashes(event.engine_hashes), &local, to);
        self.count_refused(state, worker, refused);
    }

    fn removed(&self, state: &mut State, worker: Handle, batch: &Batch, event: &Removed) {
        let slot = state.ranks[worker].slot;
        let unknown = if !state.ledger.worker(slot).groups.contains(&(event.group, false)) {
            state.ledger.remove(slot, batch.hashes(event.engine_hashes), event.group, event.tier)
        } else if let Some(unknown) = remove_window_blocks(&mut state.ledger, slot, batch, event) {
            unknown
        } else {
            self.count(state, worker, Ignored::SkippedGroup, 1);
            return;
        };
        self.count(state, worker, Ignored::UnknownRemoved, unknown);
    }

    fn count_refused(&self, state: &mut State, worker: Handle, refused: Refused) {
        if refused == Refused::default() {
            return;
        }
        self.count(state, worker, Ignored::HashConflict, refused.conflicts);
        self.count(state, worker, Ignored::OrphanLimit, refused.orphan_limit);
        self.count(state, worker, Ignored::TwinLimit, refused.twin_limit);
        self.count(state, worker, Ignored::IndexFull, refused.index_full);
    }

    fn count(&self, state: &mut State, worker: Handle, reason: Ignored, number: u64) {
        if number == 0 {
            return;
        }
        state.ranks[worker].ignored[reason as usize] += number;
        if reason.is_limit() {
            self.mark_incomplete(state, worker);
        }
    }
}
