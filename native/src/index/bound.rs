//! The `max_blocks` bound: what no query can match goes first, then what was used longest ago, deepest first.
//!
//! ```text
//! worker   [a b c] ─ [d e]        used in round 7, 5      e d c b a: the order in which rooted blocks go
//!              └ hole [x y]       used in round 7         y x go before them, and orphans before those
//! ```

use hashbrown::HashSet;

use super::copies::{Copies, Counts, device_copies};
use super::ghosts::Above;
use super::ledger::{Ledger, ROOT, Tip};
use super::nodes::{index_of, shard_of};
use super::state::{Index, State};
use super::types::{NodeId, PresenceId, SLICE, TIERS};
use super::worker::Worker;

/// Rounds of the clock in which as many blocks are stored as may be.
const ROUNDS: usize = 64;

impl Index {
    /// Drops what is above the bound, after so many entries or ghosts may have been added.
    pub(super) fn enforce_bound(&self, state: &mut State, added: usize) {
        let max = self.bounds.max_blocks;
        if max == 0 {
            return;
        }
        state.added += added;
        if state.added >= (max / ROUNDS).max(1) {
            state.added = 0;
            self.trie.next_round();
        }
        self.evict_surplus(state, usize::MAX);
        state.ledger.forget_ghosts(max);
    }

    /// Drops a slice of what is above the bound, if there is any; whether more is left.
    pub(super) fn evict_slice(&self, state: &mut State) -> bool {
        self.evict_surplus(state, SLICE)
    }

    fn evict_surplus(&self, state: &mut State, most: usize) -> bool {
        let max = self.bounds.max_blocks;
        let all = state.ledger.counts().entries;
        if max == 0 || all <= max {
            return false;
        }
        let surplus = all - max;
        state.ledger.evict(surplus.min(most) + (max / ROUNDS).min(SLICE));
        state.evicted += (all - state.ledger.counts().entries) as u64;
        surplus > most
    }
}

impl Ledger {
    /// Forgets ghosts above the bound, the oldest of whoever has most.
    fn forget_ghosts(&mut self, max: usize) {
        while self.counts().ghosts > max {
            let mut largest = self.totals.by_ghosts.iter().rev();
            let (Some(&(ghosts, slot)), next) = (largest.next(), largest.next()) else { return };
            // As many as it has more than the next one.
            let more = ghosts - next.map_or(0, |(ghosts, _)| *ghosts);
            let some = (self.totals.sum.ghosts - max).min(more.max(1));
            (0..some).for_each(|_| self.worker_mut(slot).ghosts.forget_oldest());
        }
    }

    /// Drops a surplus: what no query can match, then rooted blocks of the largest worker.
    fn evict(&mut self, mut surplus: usize) {
        let mut smaller = (usize::MAX, u32::MAX);
        while surplus > 0
            && let Some(&next) = self.totals.unmatchable.range(..smaller).next_back()
        {
            surplus -= self.evict_unmatchable(next.1, surplus).min(surplus);
            self.settle();
            smaller = next;
        }
        while surplus > 0
            && let Some(&(_, slot)) = self.totals.by_entries.last()
        {
            let dropped = self.evict_rooted(slot, surplus);
            assert!(dropped > 0, "the largest worker has rooted blocks");
            surplus -= dropped.min(surplus);
            self.settle();
        }
    }

    fn prepare_eviction(&mut self, slot: u32) {
        self.complete_cuts(slot);
        self.fill(slot, usize::MAX);
    }

    /// Drops entries of a worker that no query can match, about as many as are asked for; how many there were.
    fn evict_unmatchable(&mut self, slot: u32, surplus: usize) -> usize {
        let worker = self.worker(slot);
        if worker.orphans.is_empty() && worker.idle.unmatchable.is_empty() {
            return 0;
        }
        self.prepare_eviction(slot);
        let orphans: Vec<u64> =
            self.worker(slot).orphans.iter().map(|(orphan, _)| orphan).take(surplus).collect();
        let mut dropped = orphans.len();
        for orphan in orphans {
            self.drop_orphan(slot, orphan);
        }
        let parts: Vec<PresenceId> =
            self.worker(slot).idle.unmatchable.iter().copied().take(surplus - dropped).collect();
        for presence in parts {
            let worker = self.worker(slot);
            let first = worker.presences[presence].reach_on(worker.slowest_level());
            dropped += self.evict_end(slot, presence, first, surplus.saturating_sub(dropped));
        }
        self.forget_names();
        self.finish();
        dropped
    }

    /// Drops rooted blocks of a worker, those used longest ago, about as many as are asked for; how many there were.
    fn evict_rooted(&mut self, slot: u32, surplus: usize) -> usize {
        self.prepare_eviction(slot);
        let mut dropped = 0;
        while dropped < surplus
            && let Some(presence) = self.next_idle(slot)
        {
            dropped += self.evict_end(slot, presence, 0, surplus - dropped);
            self.forget_names();
            self.finish();
        }
        dropped
    }

    /// Takes blocks off the end of a presence, none before an offset; how many entries there were.
    fn evict_end(&mut self, slot: u32, presence: PresenceId, first: u32, surplus: usize) -> usize {
        let mut dropped = 0;
        while dropped < surplus
            && let Some(part) = self.worker(slot).presences.get(presence)
            && let Some(last) =
                (first..part.end_of_copies()).rfind(|&offset| self.worker(slot).has_copies(presence, offset))
        {
            if part.more.is_none() && self.worker(slot).full_groups.len() == 1 {
                let blocks = (first..=last)
                    .rev()
                    .take(surplus - dropped)
                    .take_while(|&offset| part.device.contains(offset))
                    .count();
                self.bury_blocks(slot, presence, last + 1 - blocks as u32..=last, 1);
                dropped += blocks;
                continue;
            }
            for binding in self.bindings(slot, presence, last) {
                if !binding.counts.is_empty() {
                    self.evict_hash(slot, binding.engine_hash);
                    dropped += 1;
                }
            }
        }
        dropped
    }

    /// The presence whose rooted blocks go next.
    fn next_idle(&mut self, slot: u32) -> Option<PresenceId> {
        loop {
            let worker = self.worker_mut(slot);
            let (round, presence) = worker.idle.pop()?;
            // It may be gone, or another one by now that is queued elsewhere.
            let level = worker.slowest_level();
            let Some(part) = worker.presences.get_mut(presence).filter(|part| part.is_queued) else {
                continue;
            };
            part.is_queued = false;
            let node = part.node;
            let used = self.trie.shard(shard_of(node)).read().nodes[index_of(node)].used();
            if used > round {
                self.worker_mut(slot).note_idle_part(presence, used);
            } else if !self.worker(slot).is_rooted_below(presence, level) {
                return Some(presence);
            }
        }
    }

    /// Gives a block that the bound dropped its copies again, and all those above it; how many had too many twins.
    ///
    /// The engine named it, so it has them all. Where the prefix is not whole any more nothing comes back.
    pub fn restore_evicted(&mut self, slot: u32, engine_hash: u64) -> u64 {
        let worker = self.worker_mut(slot);
        if !worker.ghosts.has_evicted() || worker.locate(engine_hash).is_some() {
            return 0;
        }
        let mut chain = Vec::new();
        let mut above = None;
        let mut step = engine_hash;
        while let Some(ghost) = worker.ghosts.get(step)
            && ghost.tiers > 0
            && chain.len() < worker.ghosts.len()
        {
            chain.push(ghost);
            match ghost.above {
                Above::Root => {
                    above = Some(ROOT);
                    break;
                }
                Above::Block(parent) => step = parent,
            }
            if let Some((presence, offset)) = worker.locate(step) {
                above = Some(Tip { node: worker.presences[presence].node, next: offset + 1 });
                break;
            }
        }
        let mut refused = 0;
        if let Some(mut above) = above {
            let local: Vec<u64> = chain.iter().rev().map(|ghost| ghost.local).collect();
            if self.has_room(above.node, &local) {
                while let Some(ghost) = chain.last() {
                    let (node, offset) = self.place_below(slot, above, ghost.local);
                    if !self.make_room_for_twin(slot, node, offset) {
                        self.doubt(node);
                        break;
                    }
                    let counts = self.worker(slot).counts_on(ghost.tiers);
                    self.worker_mut(slot).device_copies += device_copies(&counts);
                    self.bind(slot, node, offset, ghost.engine_hash, counts);
                    self.touch(node);
                    self.restored += 1;
                    refused += self.adopt(slot, ghost.engine_hash);
                    // Orphans may have cut the run.
                    let Some((presence, offset)) = self.worker(slot).locate(ghost.engine_hash) else { break };
                    above = Tip { node: self.part(slot, presence).node, next: offset + 1 };
                    chain.pop();
                }
            }
        }
        for ghost in chain {
            self.worker_mut(slot).ghosts.set_tiers(ghost.engine_hash, 0);
        }
        refused
    }

    /// Marks a node and those above it as used in this round; stops where they are marked already.
    pub fn touch(&self, mut node: NodeId) {
        let round = self.trie.round();
        while round > 0
            && node != 0
            && self.trie.shard(shard_of(node)).read().nodes[index_of(node)].touch(round)
        {
            node = self.nodes[node].parent;
        }
    }
}

impl Worker {
    /// One copy in each full-attention group on each of some tiers.
    fn counts_on(&self, tiers: u8) -> Counts {
        let groups = self.full_groups.iter();
        groups
            .flat_map(|&group| (0..TIERS as u8).map(move |tier| Copies { group, tier, number: 1 }))
            .filter(|copies| tiers >> copies.tier & 1 == 1)
            .collect()
    }

    /// Notes that the reach of a presence, below another, changed in a round.
    pub fn note_idle(
        &mut self,
        level: usize,
        presence: PresenceId,
        above: PresenceId,
        before: u32,
        round: u32,
    ) {
        if level != self.slowest_level() {
            return;
        }
        match self.presences[presence].reach_on(level) {
            0 => self.note_idle_part(above, 0),
            // What grows is used now; what does not may have been used long ago.
            reach => self.note_idle_part(presence, if reach > before { round } else { 0 }),
        }
    }

    /// Notes a presence, used last in a round or later, of which blocks may go; whether they may is seen when it is
    /// its turn.
    pub fn note_idle_part(&mut self, presence: PresenceId, round: u32) {
        let level = self.slowest_level();
        if presence != 0
            && self.presences.get(presence).is_some_and(|part| !part.is_queued && part.reach_on(level) > 0)
        {
            self.presences[presence].is_queued = true;
            if self.idle.queued > 2 * self.presences.len() + SLICE {
                self.drop_stale_idle();
            }
            self.idle.push(presence, round);
        }
    }

    /// Those that are gone leave their numbers in the queue, until they are most of it.
    fn drop_stale_idle(&mut self) {
        let mut seen = HashSet::new();
        let presences = &self.presences;
        let mut is_live = |&presence: &PresenceId| {
            presences.get(presence).is_some_and(|part| part.is_queued) && seen.insert(presence)
        };
        self.idle.rooted.values_mut().for_each(|some| some.retain(&mut is_live));
        self.idle.rooted.retain(|_, some| !some.is_empty());
        self.idle.queued = self.idle.rooted.values().map(Vec::len).sum();
    }

    /// Notes whether a presence, if it is there, holds blocks that are not rooted.
    pub fn note_unmatchable(&mut self, presence: PresenceId) {
        let level = self.slowest_level();
        let holds = |part: &super::presence::Presence| part.end_of_copies() > part.reach_on(level);
        if self.presences.get(presence).is_some_and(holds) {
            self.idle.unmatchable.insert(presence);
        } else if !self.idle.unmatchable.is_empty() {
            self.idle.unmatchable.remove(&presence);
        }
    }

    fn is_rooted_below(&self, presence: PresenceId, level: usize) -> bool {
        let first = self.presences[presence].first_child;
        std::iter::successors((first != 0).then_some(first), |&child| {
            let next = self.presences[child].next;
            (next != 0).then_some(next)
        })
        .any(|child| self.presences[child].reach_on(level) > 0)
    }

    /// Verifies what the bound relies on.
    pub fn check_idle(&self) -> Result<(), String> {
        let level = self.slowest_level();
        for (presence, part) in self.presences.iter() {
            let reach = part.reach_on(level);
            let waits = reach == 0 || self.is_rooted_below(presence, level) || part.is_queued;
            if !waits || (part.end_of_copies() > reach) != self.idle.unmatchable.contains(&presence) {
                return Err(format!("presence {presence} is where the bound looks for it"));
            }
        }
        Ok(())
    }
}
