//! The index and its writer's state: ranks that come and go, the slots of their content, and queries.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};

use super::directory::{Directory, Handle, Row, WorkerName, WorkerRank};
use super::ledger::Ledger;
use super::prompt::Prompt;
use super::shared::{SharedCache, SharedOptions, extend_rows};
use super::trie::{Match, Trie};
use super::types::{IGNORED, MAX_SLOTS, NO_BIT, SLICE};
use super::waiting;
use super::window::query::cut_rows;
use super::worker::Worker;
use crate::slab::Slab;

/// Slots that wait to be drained; with more each that comes has a slice of the oldest drained.
const MAX_DROPPED: usize = 4096;

/// Slots in use; with more the oldest is drained at once, whatever it holds.
const SCARCE_SLOTS: usize = MAX_SLOTS / 4 * 3;

/// What the index must know of a worker rank besides its events.
#[derive(Debug, Clone, Default)]
pub struct WorkerOptions {
    /// Every count stays at 1.
    pub set_copies: bool,
    /// LoRA number → adapter name.
    pub adapters: HashMap<i128, String>,
    /// Blocks of the rank's device cache; 0: unknown.
    pub total_kv_blocks: u64,
    /// The cache that it shares with others.
    pub shared: SharedOptions,
}

/// How an index is bounded.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Bound hashes and orphans of all workers; 0: no bound.
    pub max_blocks: usize,
    /// (block, worker) predictions.
    pub max_predictions: usize,
    /// Share of `max_predictions` that pruning leaves.
    pub prune_ratio: f64,
}

/// A worker rank, around the content of its slot.
#[derive(Debug)]
pub struct Rank {
    pub(super) slot: u32,
    /// Another number after each reset: what was begun for one content is not for the next.
    pub(super) content: u64,
    pub(super) options: WorkerOptions,
    pub(super) epoch: u64,
    pub(super) last_event_id: Option<u64>,
    pub(super) incompatible: String,
    pub(super) ignored: [u64; IGNORED],
    pub(super) shared: Option<Arc<SharedCache>>,
}

impl Rank {
    pub(super) fn over_capacity(&self, worker: &Worker) -> bool {
        self.options.total_kv_blocks > 0 && worker.device_copies > self.options.total_kv_blocks
    }
}

/// The writer's state.
#[derive(Debug)]
pub struct State {
    pub(super) ledger: Ledger,
    pub(super) handles: HashMap<WorkerRank, Handle>,
    pub(super) ranks: Slab<Rank>,
    /// By name; each has members.
    pub(super) shared: HashMap<String, Arc<SharedCache>>,
    /// Slots that may be used.
    pub(super) free_slots: Vec<u32>,
    /// Slots whose content is being taken out of the trie.
    pub(super) dropped: VecDeque<u32>,
    /// There were more predictions than may be, and still are more than pruning leaves.
    pub(super) pruning: bool,
    pub(super) unknown_worker: u64,
    pub(super) evicted: u64,
    /// Contents that are out of the trie; whoever gives the lock back frees their memory.
    pub(super) garbage: Vec<Worker>,
    /// Entries that may have come in this round of the bound's clock.
    pub(super) added: usize,
}

impl State {
    pub(super) fn handle(&self, name: WorkerName<'_>) -> Option<Handle> {
        self.handles.get(&name).copied()
    }
}

/// The index; see the module.
#[derive(Debug)]
pub struct Index {
    pub(super) block_size: usize,
    pub(super) eagle: bool,
    pub(super) bounds: Bounds,
    pub(super) secret: u64,
    pub(super) trie: Arc<Trie>,
    // What queries write and what writers write: on cache lines of their own, or each would take the others' away.
    pub(super) directory: CachePadded<RwLock<Directory>>,
    pub(super) state: CachePadded<Mutex<State>>,
    pub(super) queries: CachePadded<AtomicU64>,
    /// When the first prediction ends, as the bits of a float.
    pub(super) next_expiry: AtomicU64,
    pub(super) contents: AtomicU64,
}

/// Nodes whose memory is freed within less than a millisecond.
const FREED_AT_ONCE: usize = 1024;

impl Drop for Index {
    fn drop(&mut self) {
        let empty = || Arc::new(Trie::new(0));
        let state = self.state.get_mut();
        if state.ledger.nodes.len() <= FREED_AT_ONCE && state.garbage.is_empty() {
            return;
        }
        let ledger = std::mem::replace(&mut state.ledger, Ledger::new(empty(), false));
        let all = (ledger, std::mem::replace(&mut self.trie, empty()), std::mem::take(&mut state.garbage));
        // Whoever lets go of an index last does not wait until millions of blocks are freed; without another thread
        // he has to.
        let thread = std::thread::Builder::new().name("kvscout-free".into());
        let _ = thread.spawn(move || drop(all));
    }
}

impl Index {
    pub fn new(block_size: usize, eagle: bool, bounds: Bounds) -> Self {
        let secret = RandomState::new().hash_one(block_size);
        let trie = Arc::new(Trie::new(secret));
        let state = State {
            ledger: Ledger::new(Arc::clone(&trie), bounds.max_blocks > 0),
            handles: HashMap::new(),
            ranks: Slab::default(),
            shared: HashMap::new(),
            free_slots: Vec::new(),
            dropped: VecDeque::new(),
            pruning: false,
            unknown_worker: 0,
            evicted: 0,
            garbage: Vec::new(),
            added: 0,
        };
        Self {
            block_size,
            eagle,
            bounds,
            secret,
            trie,
            directory: CachePadded::default(),
            state: CachePadded::new(Mutex::new(state)),
            queries: CachePadded::default(),
            next_expiry: AtomicU64::new(f64::INFINITY.to_bits()),
            contents: AtomicU64::new(0),
        }
    }

    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Makes a worker rank known, or replaces the options of a known one; its handle.
    pub fn add_worker(&self, name: WorkerName<'_>, options: WorkerOptions) -> Handle {
        let mut state = self.state.lock();
        if let Some(handle) = state.handle(name) {
            state.ranks[handle].options = options;
            self.join_shared(&mut state, handle);
            return handle;
        }
        let rank = WorkerRank::from(name);
        let handle = waiting::write(&self.directory).add(rank.clone());
        let slot = self.new_slot(&mut state, handle);
        let entry = Rank {
            slot,
            content: self.next_content(),
            options,
            epoch: 0,
            last_event_id: None,
            incompatible: String::new(),
            ignored: [0; IGNORED],
            shared: None,
        };
        state.ranks.put(handle, entry);
        state.handles.insert(rank, handle);
        self.join_shared(&mut state, handle);
        handle
    }

    /// Drops one rank; false if it was not known.
    pub fn remove_rank(&self, name: WorkerName<'_>) -> bool {
        let mut state = self.state.lock();
        let Some(handle) = state.handles.remove(&name) else { return false };
        self.leave_shared(&mut state, handle);
        let rank = state.ranks.take(handle);
        self.drop_slot(&mut state, rank.slot);
        waiting::write(&self.directory).remove(handle);
        true
    }

    /// Forgets all that events said of a worker rank.
    pub fn reset(&self, name: WorkerName<'_>) {
        let mut state = self.state.lock();
        if let Some(handle) = state.handle(name) {
            self.forget(&mut state, handle);
        }
    }

    pub(super) fn forget(&self, state: &mut State, handle: Handle) {
        let slot = state.ranks[handle].slot;
        self.drop_slot(state, slot);
        let slot = self.new_slot(state, handle);
        let rank = &mut state.ranks[handle];
        (rank.slot, rank.epoch, rank.last_event_id) = (slot, 0, None);
        rank.content = self.next_content();
        rank.incompatible.clear();
        self.renew_shared(state, handle);
    }

    /// (epoch, last event id) of a worker rank.
    pub fn cursor(&self, name: WorkerName<'_>) -> Option<(u64, Option<u64>)> {
        let state = self.state.lock();
        state.handle(name).map(|handle| (state.ranks[handle].epoch, state.ranks[handle].last_event_id))
    }

    /// Moves a worker's cursor past a batch that could not be read.
    pub fn move_cursor(&self, name: WorkerName<'_>, epoch: u64, event_id: Option<u64>) {
        let mut state = self.state.lock();
        if event_id.is_some()
            && let Some(handle) = state.handle(name)
        {
            let rank = &mut state.ranks[handle];
            (rank.epoch, rank.last_event_id) = (epoch, event_id);
        }
    }

    pub(super) fn next_content(&self) -> u64 {
        self.contents.fetch_add(1, Ordering::Relaxed)
    }

    /// Goes on with what is under way, ends predictions and frees memory of what was dropped, for about `budget`
    /// blocks; whether more is left.
    pub fn maintain(&self, now: f64, budget: usize) -> bool {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let mut left = budget;
        let mut waiting = self.expire_slice(state, now, &mut left);
        left = self.drain(state, left);
        state.ledger.settle();
        let slots: Vec<u32> = state.ledger.totals.busy.iter().copied().collect();
        for slot in slots {
            let worker = state.ledger.worker(slot);
            if worker.filling.is_some() {
                left -= state.ledger.fill(slot, left).min(left);
                waiting |= state.ledger.worker(slot).filling.is_some();
            }
            left -= state.ledger.root_slice(slot, left).min(left);
            waiting |= !state.ledger.worker(slot).unrooted.is_empty();
            if state.ledger.worker(slot).demotion.is_some() {
                left -= self.demote_slice(state, slot, left).0.min(left);
                waiting |= state.ledger.worker(slot).demotion.is_some();
            }
            let worker = state.ledger.worker_mut(slot);
            if worker.demoted.is_empty() || worker.demotion.is_some() || now < worker.demoted_until {
                continue;
            }
            let some = worker.demoted.take(left);
            left -= some.len();
            for engine_hash in some {
                state.ledger.unbind(slot, engine_hash);
            }
            waiting |= !state.ledger.worker(slot).demoted.is_empty();
        }
        state.ledger.finish();
        state.ledger.settle();
        self.publish_next_expiry(state);
        let more = waiting || !state.dropped.is_empty();
        let garbage = std::mem::take(&mut state.garbage);
        drop(guard);
        drop(garbage);
        more
    }

    /// Completes what is under way on a worker, since a write is to find it done.
    pub(super) fn complete(&self, state: &mut State, slot: u32) {
        if state.ledger.worker(slot).is_busy() {
            state.ledger.complete_cuts(slot);
            self.complete_demotion(state, slot);
        }
    }

    pub(super) fn complete_demotion(&self, state: &mut State, slot: u32) {
        if state.ledger.worker(slot).demotion.is_some() {
            self.demote_slice(state, slot, usize::MAX);
        }
    }

    /// The known worker ranks, sorted.
    pub fn workers(&self) -> Vec<WorkerRank> {
        let mut names: Vec<_> = self.state.lock().handles.keys().cloned().collect();
        names.sort();
        names
    }

    pub(super) fn new_slot(&self, state: &mut State, handle: Handle) -> u32 {
        let worker = Box::new(Worker::new(waiting::write(&self.directory).open(handle, 0), self.secret));
        let workers = &mut state.ledger.workers;
        let slot = match state.free_slots.pop() {
            Some(slot) => {
                workers[slot as usize] = Some(worker);
                slot
            }
            None => {
                assert!(workers.len() < MAX_SLOTS, "an index has more than {MAX_SLOTS} worker ranks");
                workers.push(Some(worker));
                workers.len() as u32 - 1
            }
        };
        state.ledger.worker_mut(slot).is_shown = handle != 0;
        slot
    }

    /// Hides a slot's content; `drain` frees it.
    pub(super) fn drop_slot(&self, state: &mut State, slot: u32) {
        waiting::write(&self.directory).hide(&state.ledger.worker(slot).bits);
        self.drop_hidden(state, slot);
    }

    pub(super) fn drop_hidden(&self, state: &mut State, slot: u32) {
        let worker = state.ledger.worker_mut(slot);
        (worker.dropped, worker.is_shown) = (true, false);
        // Of what is not there any more, no cut can be completed.
        worker.cuts.clear();
        (worker.filling, worker.demotion) = (None, None);
        state.ledger.live_predictions -= state.ledger.worker(slot).predictions;
        state.dropped.push_back(slot);
        if state.dropped.len() > MAX_DROPPED {
            let oldest = state.ledger.worker(state.dropped[0]);
            let all = oldest.bindings() + oldest.predictions as usize + 1;
            let used = state.ledger.workers.len() - state.free_slots.len();
            self.drain(state, if used > SCARCE_SLOTS { all } else { SLICE });
        }
    }

    /// Takes dropped content out of the trie, about `budget` blocks of it; returns what is left of the budget.
    pub(super) fn drain(&self, state: &mut State, mut budget: usize) -> usize {
        while budget > 0
            && let Some(&slot) = state.dropped.front()
        {
            budget = budget.saturating_sub(state.ledger.drain(slot, budget) + 1);
            let worker = state.ledger.worker(slot);
            if worker.presences.is_empty() {
                waiting::write(&self.directory).free(&worker.bits);
                state.garbage.extend(state.ledger.take_worker(slot));
                state.free_slots.push(slot);
                state.dropped.pop_front();
            }
        }
        budget
    }

    /// How many leading blocks of a prompt each worker rank holds.
    ///
    /// `with` gets the rows, and whom their handles stand for, while neither can change.
    pub fn find<R>(
        &self,
        prompt: &mut impl Prompt,
        now: f64,
        early_exit: bool,
        with: impl FnOnce(&[Row], &Directory) -> R,
    ) -> R {
        self.queries.fetch_add(1, Ordering::Relaxed);
        self.expire(now);
        let directory = waiting::read(&self.directory);
        let mut found: Vec<Match> = Vec::with_capacity(64);
        self.trie.find(prompt, early_exit, &mut found);
        let mut rows = Vec::with_capacity(found.len());
        directory.rows(&found, &mut rows);
        if !directory.views().is_empty() {
            cut_rows(&directory, prompt, &mut rows);
        }
        if !directory.shared().is_empty() {
            extend_rows(&directory, prompt, &mut rows);
        }
        with(&rows, &directory)
    }

    /// Of what a worker rank announced, something was kept out by a limit, until its content is another.
    pub(super) fn mark_incomplete(&self, state: &mut State, worker: Handle) {
        let content = state.ledger.worker_mut(state.ranks[worker].slot);
        if !content.incomplete {
            content.incomplete = true;
            waiting::write(&self.directory).mark_incomplete(worker);
        }
    }

    /// The worker ranks of which a limit kept something out, so that they may have more than is found.
    pub fn incomplete(&self) -> Vec<WorkerRank> {
        let directory = waiting::read(&self.directory);
        directory.incomplete().iter().filter_map(|&worker| directory.name(worker).cloned()).collect()
    }

    /// Makes a level of a worker visible; the device always is.
    pub(super) fn open_level(&self, state: &mut State, worker: Handle, level: usize) {
        self.open_slot_level(state, state.ranks[worker].slot, worker, level);
    }

    pub(super) fn open_slot_level(&self, state: &mut State, slot: u32, worker: Handle, level: usize) {
        if state.ledger.worker(slot).bits[level] == NO_BIT {
            let bit = waiting::write(&self.directory).open(worker, level);
            state.ledger.open_level(slot, level, bit);
            state.ledger.fill(slot, SLICE);
        }
    }
}
