//! What events bring to one worker: chains of blocks, copies by name, and orphans until their parent comes.

use super::copies::{Counts, add_copy, device_copies};
use super::ghosts::{Above, Ghost};
use super::ledger::{Ledger, ROOT, Tip};
use super::nodes::shard_of;
use super::orphans::ORPHAN_LIMIT;
use super::trie::Trie;
use super::types::{BATCH, NodeId, PresenceId};
use std::hint::black_box;

/// Where copies go: a group, a tier, and whether every count stays at 1.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub group: u32,
    pub tier: u8,
    pub set: bool,
}

/// What of a chain could not be stored, in blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    pub conflicts: u64,
    pub orphan_limit: u64,
    pub twin_limit: u64,
    pub index_full: u64,
}

/// What became of one block of a chain.
enum Stored {
    Yes,
    /// Its engine hash is bound elsewhere, or an orphan.
    Conflict,
    /// The worker knows the block by too many others.
    TwinLimit,
}

impl Ledger {
    /// Stores a run of blocks below a parent (None: the root), or as orphans if the parent is unknown.
    pub fn store(
        &mut self,
        slot: u32,
        parent: Option<u64>,
        engine: &[u64],
        local: &[u64],
        to: Target,
    ) -> Refused {
        let few = engine.len().min(BATCH);
        self.worker(slot).warm(engine[..few].iter().copied().chain(parent));
        let mut refused = Refused::default();
        if self.is_bounded {
            // Before any run is looked at, which this may cut.
            for engine_hash in parent.into_iter().chain(engine.iter().copied()) {
                refused.twin_limit += self.restore_evicted(slot, engine_hash);
            }
        }
        let above = match parent {
            None => Some(ROOT),
            Some(parent) => self.worker(slot).locate(parent).map(|(presence, offset)| {
                let node = self.part(slot, presence).node;
                self.warm_below(slot, presence, node);
                Tip { node, next: offset + 1 }
            }),
        };
        if !self.has_room(above.map_or(0, |above| above.node), local) {
            return Refused { index_full: local.len() as u64, ..refused };
        }
        let rest = match (above, parent) {
            (None, Some(parent)) => self.store_orphans(slot, parent, engine, local, to),
            (above, _) => {
                self.tip = above.unwrap_or(ROOT);
                let rest = self.store_chain(slot, engine, local, to);
                self.touch(self.tip.node);
                self.tip = ROOT;
                rest
            }
        };
        Refused { twin_limit: refused.twin_limit + rest.twin_limit, ..rest }
    }

    /// Reads what hanging a node below another touches, at once.
    fn warm_below(&self, slot: u32, presence: PresenceId, node: NodeId) {
        let (parts, entry) = (&self.worker(slot).presences, &self.nodes[node]);
        let part = parts.get(parts[presence].first_child).map_or(0, |part| part.previous);
        black_box(part ^ self.nodes.get(entry.first_child).map_or(0, |entry| entry.previous));
    }

    /// Whether there surely is room for the nodes of a chain below a node (0: the root).
    pub fn has_room(&self, above: NodeId, local: &[u64]) -> bool {
        let of_root = || local.first().map_or(0, |&first| Trie::shard_of(first));
        let shard = if above > 0 { shard_of(above) } else { of_root() };
        self.nodes.have_room(shard, local.len())
    }

    /// Stores blocks from the tip on.
    fn store_chain(&mut self, slot: u32, engine: &[u64], local: &[u64], to: Target) -> Refused {
        let mut refused = Refused::default();
        let mut done = 0;
        while done < local.len() {
            let worker = self.worker(slot);
            let simple =
                worker.orphans.is_empty() && worker.predictions == 0 && worker.full_groups[..] == [to.group];
            // Orphans that are adopted may cut the run on which the chain goes on, so it goes block by block.
            let end = if worker.orphans.is_empty() { local.len() } else { done + 1 };
            let (node, offset, blocks) = self.advance(slot, &local[done..end]);
            let mut at = 0;
            if simple {
                at = self.bind_run(slot, node, offset, &engine[done..done + blocks as usize], to);
            }
            for step in at..blocks {
                let engine_hash = engine[done + step as usize];
                match self.store_one(slot, node, offset + step, engine_hash, to) {
                    Stored::Yes => {
                        refused.twin_limit += self.adopt(slot, engine_hash);
                        continue;
                    }
                    Stored::Conflict => refused.conflicts += 1,
                    Stored::TwinLimit => refused.twin_limit += 1,
                }
                self.doubt(node);
            }
            done += blocks as usize;
        }
        refused
    }

    /// Binds new engine hashes to blocks of a node that this worker has not bound, with one plain copy each.
    ///
    /// Stops at the first hash that is not new; returns how many it bound.
    fn bind_run(&mut self, slot: u32, node: NodeId, offset: u32, engine: &[u64], to: Target) -> u32 {
        let presence = self.presence(slot, node);
        let worker = self.worker_mut(slot);
        let part = &mut worker.presences[presence];
        if part.bound.end() > offset {
            return 0;
        }
        part.own.truncate(offset as usize);
        part.own.resize(offset as usize);
        part.own.extend(engine);
        let bound = worker.enter(engine, presence, offset);
        let range = offset..offset + bound;
        let part = &mut worker.presences[presence];
        part.bound.insert_range(range.clone());
        part.tier_mut(usize::from(to.tier)).insert_range(range.clone());
        worker.held += u64::from(bound);
        if to.tier == 0 {
            worker.device_copies += u64::from(bound);
        }
        let mut new = 0;
        for refs in &mut self.nodes[node].refs[range.start as usize..range.end as usize] {
            refs.pins += 1;
            new += u64::from(refs.held == 0);
            refs.held += 1;
        }
        self.blocks += new;
        if self.part(slot, presence).is_empty() {
            self.drop_presence(slot, presence);
        } else {
            self.mark(slot, presence);
        }
        bound
    }

    /// Adds a copy of a block at a known prefix.
    fn store_one(&mut self, slot: u32, node: NodeId, offset: u32, engine_hash: u64, to: Target) -> Stored {
        if self.worker(slot).orphans.contains(engine_hash) {
            return Stored::Conflict;
        }
        match self.worker(slot).locate(engine_hash) {
            Some((presence, at)) if self.part(slot, presence).node == node && at == offset => {
                self.add_bound_copy(slot, presence, offset, engine_hash, to);
            }
            Some((presence, at)) => {
                if !self.worker(slot).counts(engine_hash, presence, at).is_empty() {
                    return Stored::Conflict;
                }
                if !self.make_room_for_twin(slot, node, offset) {
                    return Stored::TwinLimit;
                }
                // Demoted, at another prefix. Its block must not go before the new one is safe.
                self.worker_mut(slot).demoted.remove(engine_hash);
                self.pin(node, offset, true);
                self.unbind(slot, engine_hash);
                self.bind(slot, node, offset, engine_hash, Counts::new());
                self.pin(node, offset, false);
                self.copy_to_new(slot, engine_hash, to);
            }
            None => {
                if !self.make_room_for_twin(slot, node, offset) {
                    return Stored::TwinLimit;
                }
                self.bind(slot, node, offset, engine_hash, Counts::new());
                self.copy_to_new(slot, engine_hash, to);
            }
        }
        if self.worker(slot).predictions > 0
            && let Some((presence, at)) = self.worker(slot).locate(engine_hash)
        {
            self.cancel_prediction(slot, presence, at);
        }
        Stored::Yes
    }

    /// The first copy of a hash that was just bound.
    fn copy_to_new(&mut self, slot: u32, engine_hash: u64, to: Target) {
        if let Some((presence, at)) = self.worker(slot).locate(engine_hash) {
            self.change_counts(slot, presence, at, engine_hash, |counts| {
                add_copy(counts, to.group, to.tier, to.set)
            });
            self.worker_mut(slot).device_copies += u64::from(to.tier == 0);
        }
    }

    /// A further copy of a bound hash, or the first one of a demoted one.
    fn add_bound_copy(&mut self, slot: u32, presence: PresenceId, at: u32, engine_hash: u64, to: Target) {
        if self.worker(slot).counts(engine_hash, presence, at).is_empty() {
            self.worker_mut(slot).demoted.remove(engine_hash);
        }
        let rose = self.change_counts(slot, presence, at, engine_hash, |counts| {
            add_copy(counts, to.group, to.tier, to.set)
        });
        self.worker_mut(slot).device_copies += u64::from(rose && to.tier == 0);
    }

    /// Adds a copy by the engine hash alone; None if it is unknown.
    pub fn store_known(&mut self, slot: u32, engine_hash: u64, to: Target) -> Option<Refused> {
        if self.is_bounded {
            self.restore_evicted(slot, engine_hash);
        }
        let worker = self.worker_mut(slot);
        if let Some(counts) = worker.orphans.counts_mut(engine_hash) {
            let rose = add_copy(counts, to.group, to.tier, to.set);
            worker.device_copies += u64::from(rose && to.tier == 0);
            return Some(Refused::default());
        }
        let Some((presence, offset)) = worker.locate(engine_hash) else {
            return worker.ghosts.take(engine_hash).map(|ghost| self.put_back(slot, ghost, to));
        };
        self.add_bound_copy(slot, presence, offset, engine_hash, to);
        let twin_limit = self.adopt(slot, engine_hash);
        if self.worker(slot).predictions > 0
            && let Some((presence, offset)) = self.worker(slot).locate(engine_hash)
        {
            self.cancel_prediction(slot, presence, offset);
        }
        Some(Refused { twin_limit, ..Refused::default() })
    }

    /// A ghost has a copy again: below its parent, or as an orphan until that comes.
    fn put_back(&mut self, slot: u32, ghost: Ghost, to: Target) -> Refused {
        let parent = match ghost.above {
            Above::Root => None,
            Above::Block(parent) => Some(parent),
        };
        self.store(slot, parent, &[ghost.engine_hash], &[ghost.local], to)
    }

    fn store_orphans(
        &mut self,
        slot: u32,
        mut parent: u64,
        engine: &[u64],
        local: &[u64],
        to: Target,
    ) -> Refused {
        for (position, (&engine_hash, &local)) in engine.iter().zip(local).enumerate() {
            let rest = (engine.len() - position) as u64;
            let worker = self.worker(slot);
            let there = worker.orphans.get(engine_hash);
            if there.is_none() && worker.orphans.len() >= ORPHAN_LIMIT {
                return Refused { orphan_limit: rest, ..Refused::default() };
            }
            let contradicts = there.is_some_and(|orphan| (orphan.parent, orphan.local) != (parent, local));
            if contradicts || !self.drop_memory_of(slot, engine_hash) {
                // What follows hangs below a block that this event contradicts.
                return Refused { conflicts: rest, ..Refused::default() };
            }
            let worker = self.worker_mut(slot);
            if !worker.orphans.contains(engine_hash) {
                worker.orphans.insert(engine_hash, parent, local, Counts::new());
            }
            if let Some(counts) = worker.orphans.counts_mut(engine_hash) {
                let rose = add_copy(counts, to.group, to.tier, to.set);
                worker.device_copies += u64::from(rose && to.tier == 0);
            }
            parent = engine_hash;
        }
        Refused::default()
    }

    /// Binds the orphans that waited for a hash, and those that waited for them; how many had too many twins.
    pub fn adopt(&mut self, slot: u32, engine_hash: u64) -> u64 {
        let mut refused = 0;
        if self.worker(slot).orphans.is_empty() {
            return refused;
        }
        let mut arrived = vec![engine_hash];
        while let Some(parent) = arrived.pop() {
            while let Some((child, orphan)) = self.worker_mut(slot).orphans.take_waiting(parent) {
                let Some((presence, offset)) = self.worker(slot).locate(parent) else { continue };
                // The chain that is being stored goes on where it was: splits move the saved tip too.
                let below = Tip { node: self.part(slot, presence).node, next: offset + 1 };
                let (node, offset) = self.place_below(slot, below, orphan.local);
                if !self.make_room_for_twin(slot, node, offset) {
                    self.worker_mut(slot).device_copies -= device_copies(&orphan.counts);
                    self.doubt(node);
                    refused += 1;
                    continue;
                }
                self.bind(slot, node, offset, child, orphan.counts);
                self.touch(node);
                arrived.push(child);
            }
        }
        refused
    }

    /// Finds or makes one block below another, without moving the chain's tip.
    pub fn place_below(&mut self, slot: u32, below: Tip, local: u64) -> (NodeId, u32) {
        let chain = self.tip;
        self.tip = below;
        self.side_tip = Some(chain);
        let (node, offset, _) = self.advance(slot, &[local]);
        self.tip = self.side_tip.take().unwrap_or(ROOT);
        (node, offset)
    }
}
