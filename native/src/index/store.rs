//! What events do to one worker's content: store, move, remove; orphans and ghosts.

use std::hint::black_box;
use std::ops::RangeInclusive;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::copies::{Binding, Counts, Odd, add_copy, device_copies, drop_copy, level_of};
use super::ghosts::{Above, Ghost};
use super::ledger::{Ledger, ROOT, Tip};
use super::nodes::{index_of, shard_of};
use super::orphans::ORPHAN_LIMIT;
use super::trie::Trie;
use super::worker::{BATCH, NO_SEAT, NodeId, PREDICTED, PresenceId, TIERS, TWIN_LIMIT};

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

    /// Whether a block may get one more engine hash; the one bound longest that has no copies goes for it.
    pub fn make_room_for_twin(&mut self, slot: u32, node: NodeId, offset: u32) -> bool {
        let Some(presence) = self.nodes[node].presence(slot) else { return true };
        let worker = self.worker(slot);
        let key = (presence, worker.presences[presence].start + offset);
        let Some(twins) = worker.odd.get(&key).filter(|twins| twins.len() >= TWIN_LIMIT) else { return true };
        let Some(oldest) = twins.iter().find(|twin| twin.counts.is_empty()).map(|twin| twin.engine_hash)
        else {
            return false;
        };
        self.worker_mut(slot).demoted.remove(oldest);
        self.unbind(slot, oldest);
        true
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

    /// Binds an engine hash that is not bound to a block.
    pub fn bind(&mut self, slot: u32, node: NodeId, offset: u32, engine_hash: u64, counts: Counts) {
        let presence = self.presence(slot, node);
        let part = self.part(slot, presence);
        let depth = part.start + offset;
        if part.bound.contains(offset) {
            // A twin: this worker knows the block by another engine hash too.
            let mut odd = self.bindings(slot, presence, offset);
            odd.push(Binding { engine_hash, counts });
            self.worker_mut(slot).odd.insert((presence, depth), odd.clone());
            self.part_mut(slot, presence).more_mut().odd.insert(offset);
            self.worker_mut(slot).enter(&[engine_hash], presence, offset);
            self.put_bindings(slot, presence, offset, odd);
            return;
        }
        let pinned = part.pins(offset);
        let part = self.part_mut(slot, presence);
        if part.own.len() <= offset as usize {
            part.own.resize(offset as usize + 1);
        }
        part.own[offset as usize] = engine_hash;
        part.bound.insert(offset);
        if !pinned {
            self.pin(node, offset, true);
        }
        self.worker_mut(slot).enter(&[engine_hash], presence, offset);
        self.put_bindings(slot, presence, offset, vec![Binding { engine_hash, counts }]);
    }

    /// Ends a binding that leaves nothing behind; its copies must be gone.
    pub fn unbind(&mut self, slot: u32, engine_hash: u64) {
        self.end_binding(slot, engine_hash);
        // Nor is it what it was before it was bound.
        self.worker_mut(slot).ghosts.take(engine_hash);
    }

    /// Ends a binding; its copies must be gone.
    fn end_binding(&mut self, slot: u32, engine_hash: u64) {
        // The table finds the entry through `own` and `odd`, so it goes first.
        let Some((presence, offset)) = self.worker_mut(slot).leave(engine_hash) else { return };
        if self.part(slot, presence).is_odd(offset) {
            let mut bindings = self.bindings(slot, presence, offset);
            bindings.retain(|binding| binding.engine_hash != engine_hash);
            if !bindings.is_empty() {
                self.put_bindings(slot, presence, offset, bindings);
                return;
            }
            let depth = self.part(slot, presence).start + offset;
            self.worker_mut(slot).odd.remove(&(presence, depth));
            self.set_tiers(slot, presence, offset, [false; TIERS]);
        }
        let part = self.part_mut(slot, presence);
        debug_assert_eq!(part.level(offset), TIERS);
        part.bound.remove(offset);
        if let Some(more) = &mut part.more {
            more.odd.remove(offset);
        }
        let node = part.node;
        let (pinned, empty) = (part.pins(offset), part.is_empty());
        if !pinned {
            self.pin(node, offset, false);
        }
        if empty {
            self.drop_presence(slot, presence);
        }
    }

    /// The bindings of a bound block, whether it is plain or odd.
    pub fn bindings(&self, slot: u32, presence: PresenceId, offset: u32) -> Odd {
        let worker = self.worker(slot);
        let part = &worker.presences[presence];
        if part.is_odd(offset) {
            return worker.odd[&(presence, part.start + offset)].clone();
        }
        vec![Binding {
            engine_hash: part.own[offset as usize],
            counts: worker.plain_counts(presence, offset),
        }]
    }

    /// Writes the bindings of a block back, as plain as they are.
    pub fn put_bindings(&mut self, slot: u32, presence: PresenceId, offset: u32, bindings: Odd) {
        let worker = self.worker_mut(slot);
        let part = &mut worker.presences[presence];
        let key = (presence, part.start + offset);
        part.own[offset as usize] = bindings[0].engine_hash;
        let plain = match &bindings[..] {
            [only] => worker.plain_tiers(&only.counts),
            _ => None,
        };
        let tiers = plain.unwrap_or_else(|| {
            let level = bindings.iter().map(|binding| level_of(&binding.counts, &worker.full_groups)).min();
            std::array::from_fn(|tier| Some(tier) == level)
        });
        let part = &mut worker.presences[presence];
        if plain.is_some() {
            if let Some(more) = &mut part.more {
                more.odd.remove(offset);
                worker.odd.remove(&key);
            }
        } else {
            part.more_mut().odd.insert(offset);
            worker.odd.insert(key, bindings);
        }
        self.set_tiers(slot, presence, offset, tiers);
    }

    /// Changes the counts of a bound engine hash; returns what the change does.
    fn change_counts(
        &mut self,
        slot: u32,
        presence: PresenceId,
        offset: u32,
        engine_hash: u64,
        change: impl FnOnce(&mut Counts) -> bool,
    ) -> bool {
        let mut bindings = self.bindings(slot, presence, offset);
        let mut changed = false;
        if let Some(binding) = bindings.iter_mut().find(|binding| binding.engine_hash == engine_hash) {
            changed = change(&mut binding.counts);
        }
        if changed {
            self.put_bindings(slot, presence, offset, bindings);
        }
        changed
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

    /// Drops one copy of each engine hash; returns how many had none like it.
    pub fn remove(&mut self, slot: u32, engine: &[u64], group: u32, tier: u8) -> u64 {
        let mut unknown = 0;
        let mut done = 0;
        let mut warmed = 0;
        while done < engine.len() {
            if done >= warmed {
                warmed = engine.len().min(done + BATCH);
                self.worker(slot).warm(engine[done..warmed].iter().copied());
            }
            let removed = self.remove_run(slot, &engine[done..], group, tier);
            if removed == 0 {
                unknown += u64::from(!self.remove_one(slot, engine[done], group, tier));
            }
            done += removed.max(1);
        }
        self.forget_names();
        unknown
    }

    /// The common case: plain blocks of one run, from the last one up, whose only copies are on the device.
    ///
    /// Returns how many of the first engine hashes were such blocks; their copies are gone.
    fn remove_run(&mut self, slot: u32, engine: &[u64], group: u32, tier: u8) -> usize {
        let worker = self.worker_mut(slot);
        if tier != 0 || worker.full_groups[..] != [group] {
            return 0;
        }
        let Some((presence, last, blocks)) = worker.climb(engine) else { return 0 };
        let part = &mut worker.presences[presence];
        let held = (0..=last).rev().take(blocks as usize).take_while(|&offset| part.device.contains(offset));
        let blocks = held.count();
        if blocks == 0 {
            return 0;
        }
        self.bury_blocks(slot, presence, last + 1 - blocks as u32..=last, 0);
        blocks
    }

    /// Takes the copies of plain blocks whose only ones are on the device, in the only group: they become ghosts.
    pub fn bury_blocks(&mut self, slot: u32, presence: PresenceId, offsets: RangeInclusive<u32>, tiers: u8) {
        let (first, last) = offsets.into_inner();
        let node = self.part(slot, presence).node;
        let above = self.name_above(slot, presence, first);
        self.note_name(slot, presence, last);
        let local: SmallVec<[u64; BATCH]> = {
            let shard = self.trie.shard(shard_of(node)).read();
            SmallVec::from_slice(&shard.nodes[index_of(node)].local[first as usize..=last as usize])
        };
        let worker = self.worker_mut(slot);
        worker.bury_run(presence, first, &local, above, tiers);
        worker.held -= local.len() as u64;
        worker.device_copies -= local.len() as u64;
        let part = &mut worker.presences[presence];
        for offset in (first..=last).rev() {
            part.device.remove(offset);
            part.bound.remove(offset);
        }
        let empty = part.is_empty();
        for refs in &mut self.nodes[node].refs[first as usize..=last as usize] {
            refs.pins -= 1;
            refs.held -= 1;
            self.blocks -= u64::from(refs.held == 0);
        }
        self.doubt(node);
        if empty {
            self.drop_presence(slot, presence);
        } else {
            self.mark(slot, presence);
        }
    }

    /// What the block above one is called: what is bound there, or was until this event removed it.
    fn name_above(&self, slot: u32, presence: PresenceId, offset: u32) -> Option<Above> {
        let worker = self.worker(slot);
        let part = &worker.presences[presence];
        let (node, above, offset) = if offset > 0 {
            (part.node, Some(part), offset - 1)
        } else {
            let parent = self.nodes[part.node].parent;
            if parent == 0 {
                return Some(Above::Root);
            }
            (parent, worker.presences.get(part.parent), self.nodes[parent].len() - 1)
        };
        let bound = above.filter(|above| above.bound.contains(offset));
        let name = bound.map(|above| &above.own[offset as usize]);
        name.or_else(|| self.names_gone.get(&(node, offset))).map(|&name| Above::Block(name))
    }

    /// Notes what a block is called that is about to go, if this event may remove one below it.
    fn note_name(&mut self, slot: u32, presence: PresenceId, offset: u32) {
        let part = self.part(slot, presence);
        let (node, name) = (part.node, part.own[offset as usize]);
        let at_end = offset + 1 == self.nodes[node].len();
        if part.bound.contains(offset + 1) || at_end && part.first_child != 0 {
            self.names_gone.insert((node, offset), name);
        }
    }

    /// Ends an event that removed blocks.
    pub fn forget_names(&mut self) {
        if self.names_gone.capacity() > 2 * BATCH {
            self.names_gone = HashMap::new();
        }
        self.names_gone.clear();
    }

    /// Makes a bound engine hash a ghost; its copies must be gone.
    fn bury(&mut self, slot: u32, engine_hash: u64, tiers: u8) {
        let Some((presence, offset)) = self.worker(slot).locate(engine_hash) else { return };
        let node = self.part(slot, presence).node;
        let above = self.name_above(slot, presence, offset);
        let local = self.trie.shard(shard_of(node)).read().nodes[index_of(node)].local[offset as usize];
        self.note_name(slot, presence, offset);
        self.end_binding(slot, engine_hash);
        let ghosts = &mut self.worker_mut(slot).ghosts;
        match above {
            Some(above) => ghosts.push(Ghost { engine_hash, local, above, tiers }),
            None => drop(ghosts.take(engine_hash)),
        }
    }

    fn remove_one(&mut self, slot: u32, engine_hash: u64, group: u32, tier: u8) -> bool {
        let Some((presence, offset)) = self.worker(slot).locate(engine_hash) else {
            let worker = self.worker_mut(slot);
            if worker.ghosts.has_evicted()
                && let Some(ghost) = worker.ghosts.get(engine_hash)
            {
                worker.ghosts.set_tiers(engine_hash, ghost.tiers & !(1 << tier));
                return ghost.tiers >> tier & 1 == 1;
            }
            return self.remove_orphan_copy(slot, engine_hash, group, tier);
        };
        if self.worker(slot).predictions > 0 {
            self.cancel_prediction(slot, presence, offset);
        }
        let worker = self.worker_mut(slot);
        let counts = worker.counts(engine_hash, presence, offset);
        if counts.is_empty() {
            // Demoted: the engine says that it is gone now.
            let demoted = worker.demoted.remove(engine_hash);
            if demoted {
                self.bury(slot, engine_hash, 0);
            }
            return demoted;
        }
        if !self.change_counts(slot, presence, offset, engine_hash, |counts| drop_copy(counts, group, tier)) {
            return false;
        }
        let worker = self.worker_mut(slot);
        worker.device_copies -= u64::from(tier == 0);
        if worker.counts(engine_hash, presence, offset).is_empty() {
            self.bury(slot, engine_hash, 0);
        }
        true
    }

    /// Takes all copies of a bound engine hash, because of the bound.
    pub fn evict_hash(&mut self, slot: u32, engine_hash: u64) {
        let Some((presence, offset)) = self.worker(slot).locate(engine_hash) else { return };
        let worker = self.worker(slot);
        let counts = worker.counts(engine_hash, presence, offset);
        let has = |group, tier| counts.iter().any(|copies| (copies.group, copies.tier) == (group, tier));
        let tiers = (0..TIERS as u8)
            .filter(|&tier| worker.full_groups.iter().all(|&group| has(group, tier)))
            .fold(0, |all, tier| all | 1 << tier);
        self.change_counts(slot, presence, offset, engine_hash, |counts| {
            counts.clear();
            true
        });
        self.worker_mut(slot).device_copies -= device_copies(&counts);
        self.bury(slot, engine_hash, tiers);
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

    /// Forgets a ghost or demoted hash; false if the hash has copies.
    fn drop_memory_of(&mut self, slot: u32, engine_hash: u64) -> bool {
        if let Some((presence, offset)) = self.worker(slot).locate(engine_hash)
            && !self.worker(slot).counts(engine_hash, presence, offset).is_empty()
        {
            return false;
        }
        self.worker_mut(slot).demoted.remove(engine_hash);
        self.unbind(slot, engine_hash);
        true
    }

    fn remove_orphan_copy(&mut self, slot: u32, engine_hash: u64, group: u32, tier: u8) -> bool {
        let worker = self.worker_mut(slot);
        let Some(counts) = worker.orphans.counts_mut(engine_hash) else { return false };
        if !drop_copy(counts, group, tier) {
            return false;
        }
        let empty = counts.is_empty();
        worker.device_copies -= u64::from(tier == 0);
        if empty {
            self.drop_orphan(slot, engine_hash);
        }
        true
    }

    /// Drops an orphan, whatever copies it has.
    pub fn drop_orphan(&mut self, slot: u32, engine_hash: u64) {
        let worker = self.worker_mut(slot);
        let Some(orphan) = worker.orphans.remove(engine_hash) else { return };
        worker.device_copies -= device_copies(&orphan.counts);
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

    /// Notes a group's kind the first time; whether it is full attention.
    pub fn learn_group(&mut self, slot: u32, group: u32, full_attention: bool, limit: usize) -> bool {
        let worker = self.worker(slot);
        let known = worker.groups.binary_search_by_key(&group, |(known, _)| *known);
        match known {
            Ok(position) => worker.groups[position].1,
            Err(_) if worker.groups.len() >= limit => false,
            Err(position) => {
                self.worker_mut(slot).groups.insert(position, (group, full_attention));
                if full_attention {
                    self.refresh_groups(slot);
                }
                full_attention
            }
        }
    }

    /// Brings all blocks in step with the worker's full-attention groups.
    pub fn refresh_groups(&mut self, slot: u32) {
        let groups = &self.worker(slot).groups;
        let full = groups.iter().filter(|(_, full)| *full).map(|(group, _)| *group).collect();
        let all = self.bound_blocks(slot);
        let worker = self.worker_mut(slot);
        worker.full_groups = full;
        worker.ghosts.doubt_evicted();
        for (presence, offset, bindings) in all {
            self.put_bindings(slot, presence, offset, bindings);
        }
    }

    /// All bound blocks of a worker with their bindings.
    pub fn bound_blocks(&self, slot: u32) -> Vec<(PresenceId, u32, Odd)> {
        let parts = self.worker(slot).presences.iter();
        parts
            .flat_map(|(presence, part)| part.bound.iter().map(move |offset| (presence, offset)))
            .map(|(presence, offset)| (presence, offset, self.bindings(slot, presence, offset)))
            .collect()
    }

    /// Ends the prediction of a block, if there is one.
    pub fn cancel_prediction(&mut self, slot: u32, presence: PresenceId, offset: u32) {
        debug_assert!(self.worker(slot).seats[PREDICTED] != NO_SEAT);
        let part = self.part_mut(slot, presence);
        if !part.is_predicted(offset) {
            return;
        }
        let more = part.more_mut();
        more.predicted.remove(offset);
        let id = std::mem::take(&mut more.prediction[offset as usize]);
        let node = part.node;
        let (pinned, empty) = (part.pins(offset), part.is_empty());
        self.predictions.remove(id);
        self.worker_mut(slot).predictions -= 1;
        self.live_predictions -= 1;
        if !pinned {
            self.pin(node, offset, false);
        }
        if empty {
            self.drop_presence(slot, presence);
        } else {
            self.mark(slot, presence);
        }
    }
}
