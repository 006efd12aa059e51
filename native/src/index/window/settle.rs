//! Events of window groups, and the prefixes of what they store: the writer's side, with what else it knows.

use std::sync::Arc;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::serve::View;
use super::{WINDOW_LIMIT, WindowGroup, WindowGroups};
use crate::acceptance::Rules;
use crate::events::{Batch, Event, Removed, STATE_WINDOW, Stored};
use crate::hashing::extend_sequence;
use crate::index::directory::Handle;
use crate::index::ledger::Ledger;
use crate::index::nodes::{index_of, shard_of};
use crate::index::state::{Index, State};
use crate::index::types::NodeId;

/// Sequence hashes of the blocks of nodes.
pub(in crate::index) type HashedNodes = HashMap<NodeId, Vec<u64>>;

impl Index {
    /// Stores an event of a group that is not full attention; how many blocks there was no room for, None if the group
    /// has no window either.
    pub(in crate::index) fn window_stored(
        &self,
        state: &mut State,
        worker: Handle,
        batch: &Batch,
        event: &Stored,
    ) -> Option<u64> {
        let slot = state.ranks[worker].slot;
        let known = state.ledger.worker(slot).groups.contains(&(event.group, false));
        if !known || !self.learn_window(state, worker, event) {
            return None;
        }
        let set = state.ranks[worker].options.set_copies;
        let limit = if self.bounds.max_blocks > 0 { self.bounds.max_blocks } else { WINDOW_LIMIT };
        let windows = state.ledger.worker_mut(slot).windows.as_mut()?;
        Some(windows.store(batch.hashes(event.engine_hashes), event.group, event.tier, set, limit))
    }

    /// Notes a group's window the first time it is told; whether it has one that can be judged.
    fn learn_window(&self, state: &mut State, worker: Handle, event: &Stored) -> bool {
        let slot = state.ranks[worker].slot;
        let content = state.ledger.worker_mut(slot);
        if content.windows.as_ref().is_some_and(|windows| windows.place_of(event.group).is_some()) {
            return true;
        }
        // A state stands where it ends, whatever the size of its block.
        let is_state = event.window == STATE_WINDOW && event.block_size > 0;
        let block_size = if is_state { self.block_size as u32 } else { event.block_size };
        if event.window == 0 || !self.is_whole(block_size) {
            return false;
        }
        let windows = content.windows.get_or_insert_default();
        let (number, window) = (event.group, event.window);
        windows.groups.push(WindowGroup { number, window, block_size });
        windows.make_rules(self.block_size);
        self.show_windows(state, worker);
        true
    }

    /// Whether blocks of so many tokens consist of the index's own.
    pub(in crate::index) fn is_whole(&self, block_size: u32) -> bool {
        block_size > 0 && (block_size as usize).is_multiple_of(self.block_size)
    }

    /// Lets queries see a worker's window groups, if it has any.
    pub(in crate::index) fn show_windows(&self, state: &State, worker: Handle) {
        let content = state.ledger.worker(state.ranks[worker].slot);
        let view = content.windows.as_ref().map(|windows| View {
            windows: Arc::clone(&windows.shared),
            alone: content.full_groups.is_empty(),
        });
        if let Some(view) = view {
            self.directory.write().show_windows(worker, view);
        }
    }

    /// Empties the window groups of a worker; they stay known. What they held is the caller's to drop.
    pub(in crate::index) fn empty_windows(
        &self,
        state: &mut State,
        worker: Handle,
    ) -> Option<Box<WindowGroups>> {
        let content = state.ledger.worker_mut(state.ranks[worker].slot);
        let old = content.windows.take()?;
        content.windows = Some(Box::new(old.emptied(self.block_size)));
        self.show_windows(state, worker);
        Some(old)
    }

    /// Finds the prefixes of what a batch stored in window groups; how many blocks have none that is known.
    pub(in crate::index) fn settle_windows(&self, state: &mut State, worker: Handle, batch: &Batch) -> u64 {
        let slot = state.ranks[worker].slot;
        let Some(windows) = state.ledger.worker_mut(slot).windows.as_mut() else { return 0 };
        let unplaced = windows.take_unplaced();
        let mut hashed = HashedNodes::new();
        let engine = unplaced.iter().map(|(engine_hash, _)| *engine_hash);
        let found =
            engine.filter_map(|hash| Some((hash, state.ledger.sequence_hash_of(slot, hash, &mut hashed)?)));
        let mut keys: HashMap<u64, u64> = found.collect();
        if keys.len() < unplaced.len() {
            self.hash_windows(state, worker, batch, &mut hashed, &mut keys);
        }
        let Some(windows) = state.ledger.worker_mut(slot).windows.as_mut() else { return 0 };
        let mut unknown = 0;
        for (engine_hash, counts) in unplaced {
            match keys.get(&engine_hash) {
                Some(&key) if windows.place(engine_hash, key, counts) => {}
                _ => unknown += 1,
            }
        }
        unknown
    }

    /// Adds sequence hashes that the content of a batch's events tells, where it tells that of all their blocks.
    fn hash_windows(
        &self,
        state: &State,
        worker: Handle,
        batch: &Batch,
        hashed: &mut HashedNodes,
        keys: &mut HashMap<u64, u64>,
    ) {
        let rank = &state.ranks[worker];
        let rules =
            Rules { block_size: self.block_size, eagle: self.eagle, adapters: &rank.options.adapters };
        let Some(windows) = &state.ledger.worker(rank.slot).windows else { return };
        for event in &batch.events {
            let Event::Stored(event) = event else { continue };
            let event = &state.ledger.worker(rank.slot).rooted(event);
            if !windows.judges(event.group) || !event.has_content() || rules.judge_content(event).is_some() {
                continue;
            }
            let mut above = None;
            if let Some(parent) = event.parent {
                let known = keys.get(&parent).copied();
                let known = known.or_else(|| windows.blocks.get(parent).map(|block| block.key));
                let held = || state.ledger.sequence_hash_of(rank.slot, parent, hashed);
                let Some(key) = known.or_else(held) else { continue };
                above = Some(key);
            }
            let engine = batch.hashes(event.engine_hashes);
            for (&engine_hash, &local) in engine.iter().zip(&*rules.local_hashes(batch, event)) {
                let key = *above.insert(extend_sequence(above, local));
                keys.entry(engine_hash).or_insert(key);
            }
        }
    }
}

/// Drops a copy of each block in a group with a window; how many had none, None if the group has no window.
pub fn remove_window_blocks(ledger: &mut Ledger, slot: u32, batch: &Batch, event: &Removed) -> Option<u64> {
    let windows = ledger.worker_mut(slot).windows.as_mut()?;
    windows.place_of(event.group)?;
    Some(windows.remove(batch.hashes(event.engine_hashes), event.group, event.tier))
}

impl Ledger {
    /// The sequence hash of an engine hash that is bound and has copies.
    pub(in crate::index) fn sequence_hash_of(
        &self,
        slot: u32,
        engine_hash: u64,
        hashed: &mut HashedNodes,
    ) -> Option<u64> {
        let worker = self.worker(slot);
        let (presence, offset) = worker.locate(engine_hash)?;
        if worker.counts(engine_hash, presence, offset).is_empty() {
            return None;
        }
        let node = self.part(slot, presence).node;
        self.hash_path(node, hashed);
        hashed[&node].get(offset as usize).copied()
    }

    /// Adds the sequence hashes of the blocks of a node, and of those above it.
    fn hash_path(&self, node: NodeId, hashes: &mut HashedNodes) {
        let mut path: SmallVec<[NodeId; 16]> = SmallVec::new();
        let mut above = node;
        while above != 0 && !hashes.contains_key(&above) {
            path.push(above);
            above = self.nodes[above].parent;
        }
        let mut parent = hashes.get(&above).and_then(|above| above.last().copied());
        for &node in path.iter().rev() {
            let shard = self.trie.shard(shard_of(node)).read();
            let local = shard.nodes[index_of(node)].local.iter();
            hashes.insert(node, local.map(|&local| *parent.insert(extend_sequence(parent, local))).collect());
        }
    }
}
