//! What leaves one worker: copies that an engine dropped or the bound took, and what becomes a ghost.

use std::ops::RangeInclusive;

use super::copies::{device_copies, drop_copy};
use super::ghosts::{Above, Ghost};
use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::types::{BATCH, PresenceId, TIERS};
use hashbrown::HashMap;
use smallvec::SmallVec;

impl Ledger {
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
            let above = self.nodes[parent].presence(slot).map(|above| &worker.presences[above]);
            (parent, above, self.nodes[parent].len() - 1)
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
}
