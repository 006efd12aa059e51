//! How far queries see each presence, level by level: what `finish` brings the trie in step with.

use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::types::{LEVELS, PresenceId};
use smallvec::{SmallVec, smallvec};

impl Ledger {
    /// Brings the reach of a presence in step with what it holds, and hides what is below it where that is not rooted
    /// any more; `root_slice` roots what is.
    pub fn refresh(&mut self, slot: u32, presence: PresenceId) {
        if self.worker(slot).filling.is_some() {
            self.refresh_above(slot, presence);
        }
        for level in self.worker(slot).levels() {
            self.refresh_level(slot, level, presence);
        }
    }

    /// Roots about `budget` presences below those that became full; how many it looked at.
    pub fn root_slice(&mut self, slot: u32, budget: usize) -> usize {
        let mut done = 0;
        while done < budget
            && let Some((&(presence, level), &child)) = self.worker(slot).unrooted.0.first_key_value()
        {
            let worker = self.worker_mut(slot);
            let next = worker.presences[child].next;
            worker.unrooted.set(presence, level, next);
            self.refresh_level(slot, level, child);
            done += 1;
        }
        done
    }

    fn refresh_level(&mut self, slot: u32, level: usize, presence: PresenceId) {
        let mut pending: SmallVec<[PresenceId; 4]> = smallvec![presence];
        while let Some(presence) = pending.pop() {
            if self.refresh_one(slot, level, presence) {
                let unrooted = self.worker_mut(slot).unrooted.0.remove(&(presence, level));
                pending.extend(self.children_until(slot, presence, unrooted.unwrap_or(0)));
            }
            if self.is_bounded {
                self.worker_mut(slot).note_unmatchable(presence);
            }
        }
    }

    /// The same of one presence; whether those below it are hidden now.
    fn refresh_one(&mut self, slot: u32, level: usize, presence: PresenceId) -> bool {
        let worker = self.worker(slot);
        let Some(part) = worker.presences.get(presence) else { return false };
        let (node, before, prefix) = (part.node, part.reach_on(level), part.prefix_on(level));
        if prefix == 0 && before == 0 {
            return false;
        }
        let entry = &self.nodes[node];
        let (len, bit, node_above) = (entry.len(), worker.bits[level], entry.parent);
        let above = self.above(slot, presence);
        let rooted = || {
            node_above == 0
                || above != 0 && worker.presences[above].reach_on(level) == self.nodes[node_above].len()
        };
        let reach = if prefix > 0 && rooted() { prefix } else { 0 };
        if reach == before {
            return false;
        }
        let first_child = part.first_child;
        let worker = self.worker_mut(slot);
        worker.presences[presence].set_reach_on(level, reach);
        if level > 0 {
            self.measure(slot, presence);
        }
        let worker = self.worker_mut(slot);
        worker.rooted[level] = worker.rooted[level] + u64::from(reach) - u64::from(before);
        if reach == len {
            worker.unrooted.set(presence, level, first_child);
        }
        let comes_first = before == 0 && worker.unrooted.0.contains_key(&(above, level));
        if self.is_bounded {
            let round = self.trie.round();
            self.worker_mut(slot).note_idle(level, presence, above, before, round);
        }
        self.trie.set_reach(shard_of(node), index_of(node), [(bit, reach)]);
        if comes_first {
            // Before those that are not rooted yet, on whatever level.
            self.unhang(slot, presence, node_above);
            self.hang(slot, presence, node_above);
            for other in self.worker(slot).levels().filter(|&other| other != level) {
                if self.worker(slot).unrooted.0.contains_key(&(above, other)) {
                    self.refresh_level(slot, other, presence);
                }
            }
        }
        before == len
    }

    /// While levels are filled, a presence's reach follows from that of those above only once they are; how many.
    fn refresh_above(&mut self, slot: u32, presence: PresenceId) -> usize {
        let mut above: SmallVec<[PresenceId; 16]> = SmallVec::new();
        let mut step = self.above(slot, presence);
        while step != 0 && !self.is_full(slot, step) {
            above.push(step);
            step = self.above(slot, step);
        }
        for &presence in above.iter().rev() {
            for level in self.worker(slot).levels() {
                self.refresh_level(slot, level, presence);
            }
        }
        above.len()
    }

    /// Whether a presence reaches the end of its node on every level, and so do all above it.
    fn is_full(&self, slot: u32, presence: PresenceId) -> bool {
        let worker = self.worker(slot);
        let part = &worker.presences[presence];
        let len = self.nodes[part.node].len();
        worker.levels().all(|level| part.reach_on(level) == len)
    }

    /// Gives a worker's level a bit, which `fill` computes.
    ///
    /// Nothing is on the level yet that is not on a faster one, which answers for it until then.
    pub fn open_level(&mut self, slot: u32, level: usize, bit: u32) {
        debug_assert!(level < LEVELS);
        let worker = self.worker_mut(slot);
        worker.bits[level] = bit;
        if !worker.presences.is_empty() {
            worker.filling = Some(0);
        }
    }

    /// Computes the reach of about `budget` presences on levels that were opened; how many it looked at.
    pub fn fill(&mut self, slot: u32, budget: usize) -> usize {
        let mut done = 0;
        while done < budget
            && let Some(last) = self.worker(slot).filling
        {
            let presence = last + 1;
            let worker = self.worker_mut(slot);
            worker.filling = (presence <= worker.presences.highest()).then_some(presence);
            if worker.presences.get(presence).is_some() {
                done += self.refresh_above(slot, presence);
                for level in self.worker(slot).levels() {
                    self.refresh_level(slot, level, presence);
                }
            }
            done += 1;
        }
        done
    }
}
