//! The `max_blocks` bound: the deepest least recently used blocks of the largest worker go first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::worker::{NodeId, PresenceId};
use super::{Index, State};

/// Above the bound, this share of it goes at once, so that the search for the deepest is paid rarely.
const SLACK: usize = 64;

impl Index {
    /// Drops blocks while there are more than `max_blocks`.
    pub(super) fn enforce_bound(&self, state: &mut State) {
        let max = self.bounds.max_blocks;
        if max == 0 {
            return;
        }
        loop {
            let slots = state.ranks.iter().map(|(_, rank)| rank.slot);
            let sizes: Vec<(usize, u32)> =
                slots.map(|slot| (state.ledger.worker(slot).entries(), slot)).collect();
            let all: usize = sizes.iter().map(|(entries, _)| entries).sum();
            let Some(&(largest, slot)) = sizes.iter().max() else { return };
            if all <= max {
                return;
            }
            state.ledger.evict_most_idle(slot, all - max + max / SLACK);
            state.ledger.finish();
            let dropped = largest - state.ledger.worker(slot).entries();
            state.evicted += dropped as u64;
            if dropped == 0 {
                return;
            }
        }
    }
}

impl Ledger {
    /// Drops orphans, then blocks: nodes that no query used first, from their ends.
    fn evict_most_idle(&mut self, slot: u32, mut surplus: usize) {
        let orphans: Vec<u64> = self.worker(slot).orphans.keys().copied().take(surplus).collect();
        surplus -= orphans.len();
        for orphan in orphans {
            self.drop_orphan(slot, orphan);
        }
        let mut idle: BinaryHeap<(Reverse<bool>, u32, Reverse<PresenceId>)> = self
            .worker(slot)
            .presences
            .iter()
            .filter_map(|(presence, part)| {
                let shard = self.trie.shard(shard_of(part.node)).read();
                let touched = shard.nodes[index_of(part.node)].is_touched();
                let last = self.last_with_copies(slot, presence, part.bound.end())?;
                Some((Reverse(touched), part.start + last, Reverse(presence)))
            })
            .collect();
        let mut went_round = false;
        while surplus > 0
            && let Some((touched, depth, Reverse(presence))) = idle.pop()
        {
            went_round |= touched.0;
            let offset = depth - self.part(slot, presence).start;
            for binding in self.bindings(slot, presence, offset) {
                if !binding.counts.is_empty() {
                    self.evict(slot, binding.engine_hash);
                    surplus = surplus.saturating_sub(1);
                }
            }
            // The presence may be gone with the block, if a ghost had to go for this one.
            if self.worker(slot).presences.get(presence).is_some()
                && let Some(last) = self.last_with_copies(slot, presence, offset)
            {
                idle.push((touched, self.part(slot, presence).start + last, Reverse(presence)));
            }
        }
        if !went_round {
            return;
        }
        for (_, part) in self.worker(slot).presences.iter() {
            self.trie.shard(shard_of(part.node)).read().nodes[index_of(part.node)].set_touched(false);
        }
    }

    /// Marks a node and those above it as used; stops where they are marked already.
    pub fn touch(&self, mut node: NodeId) {
        while node != 0 {
            let shard = self.trie.shard(shard_of(node)).read();
            let run = &shard.nodes[index_of(node)];
            if run.is_touched() {
                return;
            }
            run.set_touched(true);
            node = self.nodes[node].parent;
        }
    }

    fn last_with_copies(&self, slot: u32, presence: PresenceId, below: u32) -> Option<u32> {
        let worker = self.worker(slot);
        (0..below).rev().find(|&offset| {
            worker.presences[presence].bound.contains(offset) && worker.has_copies(presence, offset)
        })
    }
}
