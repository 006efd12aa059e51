//! The `max_blocks` bound: what no query can match goes first, then what was used longest ago, deepest first.
//!
//! ```text
//! worker   [a b c] ─ [d e]        used in round 7, 5      e d c b a: the order in which rooted blocks go
//!              └ hole [x y]       used in round 7         y x go before them, and orphans before those
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::worker::{NodeId, Presence, PresenceId, Worker};
use super::{Index, State};

/// Above the bound, this share of it goes at once, so that the search for victims is paid rarely. It is also how
/// much may come in one round.
const SLACK: usize = 64;

/// Which blocks of a worker may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victims {
    Unmatchable,
    Rooted,
}

impl Index {
    /// Drops blocks if there are more than `max_blocks`, after so many may have been added.
    pub(super) fn enforce_bound(&self, state: &mut State, added: usize) {
        let max = self.bounds.max_blocks;
        if max == 0 {
            return;
        }
        state.added += added;
        if state.added >= (max / SLACK).max(1) {
            state.added = 0;
            self.trie.next_round();
        }
        state.room = state.room.saturating_sub(added);
        if state.room > 0 {
            return;
        }
        self.evict_surplus(state, usize::MAX);
        state.room = max - entries(state);
    }

    /// Drops a slice of what is above the bound, if there is any; whether more is left.
    pub(super) fn evict_slice(&self, state: &mut State) -> bool {
        // The search for victims costs about as much as a 64th of what there is.
        self.evict_surplus(state, self.bounds.max_blocks / SLACK + 1)
    }

    fn evict_surplus(&self, state: &mut State, most: usize) -> bool {
        let max = self.bounds.max_blocks;
        let mut sizes = sizes(state);
        let all: usize = sizes.iter().map(|(entries, _)| entries).sum();
        if max == 0 || all <= max {
            return false;
        }
        let surplus = all - max;
        sizes.sort_unstable_by_key(|&size| Reverse(size));
        evict(state, &sizes, surplus.min(most) + max / SLACK);
        state.evicted += (all - entries(state)) as u64;
        surplus > most
    }
}

fn entries(state: &State) -> usize {
    sizes(state).iter().map(|&(entries, _)| entries).sum()
}

/// Drops a surplus: what no query can match, then rooted blocks of the largest worker.
fn evict(state: &mut State, largest_first: &[(usize, u32)], mut surplus: usize) {
    for &(_, slot) in largest_first {
        if surplus == 0 {
            return;
        }
        surplus -= state.ledger.evict(slot, surplus, Victims::Unmatchable).min(surplus);
    }
    while surplus > 0
        && let Some((_, slot)) = sizes(state).into_iter().max()
    {
        let dropped = state.ledger.evict(slot, surplus, Victims::Rooted);
        assert!(dropped > 0, "the largest worker has rooted blocks");
        surplus -= dropped.min(surplus);
    }
}

/// Entries of each worker, and its slot.
fn sizes(state: &State) -> Vec<(usize, u32)> {
    let slots = state.ranks.iter().map(|(_, rank)| rank.slot);
    slots.map(|slot| (state.ledger.worker(slot).entries(), slot)).collect()
}

impl Ledger {
    /// Drops entries of a worker, about as many as are asked for; how many there were.
    fn evict(&mut self, slot: u32, surplus: usize, victims: Victims) -> usize {
        let mut dropped = 0;
        self.complete_cuts(slot);
        self.fill(slot, usize::MAX);
        if victims == Victims::Unmatchable {
            let orphans: Vec<u64> =
                self.worker(slot).orphans.iter().map(|(orphan, _)| orphan).take(surplus).collect();
            dropped = orphans.len();
            for orphan in orphans {
                self.drop_orphan(slot, orphan);
            }
            if !self.worker(slot).may_have_unmatchable() {
                return dropped;
            }
        }
        // The last block of each run that may go.
        let worker = self.worker(slot);
        let last: Vec<(PresenceId, u32)> = worker
            .presences
            .iter()
            .filter_map(|(presence, part)| {
                let last = worker.last_victim(presence, worker.range_of(part, victims))?;
                Some((presence, part.start + last))
            })
            .collect();
        let used = self.used(slot, &last);
        let mut idle: BinaryHeap<(Reverse<u32>, u32, Reverse<PresenceId>)> = last
            .into_iter()
            .map(|(presence, depth)| (Reverse(used[presence as usize]), depth, Reverse(presence)))
            .collect();
        while dropped < surplus
            && let Some((round, depth, Reverse(presence))) = idle.pop()
        {
            let part = self.part(slot, presence);
            let offset = depth - part.start;
            let above = self.worker(slot).range_of(part, victims).start..offset;
            for binding in self.bindings(slot, presence, offset) {
                if !binding.counts.is_empty() {
                    self.take_copies(slot, binding.engine_hash);
                    dropped += 1;
                }
            }
            // The presence may be gone with its last block.
            if self.worker(slot).presences.get(presence).is_some()
                && let Some(last) = self.worker(slot).last_victim(presence, above)
            {
                idle.push((round, self.part(slot, presence).start + last, Reverse(presence)));
            }
        }
        self.forget_names();
        self.finish();
        dropped
    }

    /// When some presences of a worker were used last, by number: none before one of them that is below it.
    fn used(&self, slot: u32, some: &[(PresenceId, u32)]) -> Vec<u32> {
        let presences = &self.worker(slot).presences;
        let mut used = vec![0; presences.highest() as usize + 1];
        for &(presence, _) in some {
            let node = presences[presence].node;
            let round = self.trie.shard(shard_of(node)).read().nodes[index_of(node)].used();
            // Queries mark one node after the other, so that one above may have been read before its mark.
            let mut above = presence;
            while above != 0 && used[above as usize] < round {
                used[above as usize] = round;
                above = presences[above].parent;
            }
        }
        used
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
    /// False proves that queries can match every entry.
    fn may_have_unmatchable(&self) -> bool {
        self.entries() as u64 != self.rooted[self.slowest_level()]
    }

    fn range_of(&self, part: &Presence, victims: Victims) -> Range<u32> {
        let rooted = part.reach_on(self.slowest_level());
        match victims {
            Victims::Unmatchable => rooted..part.end_of_copies(),
            Victims::Rooted => 0..rooted,
        }
    }

    fn last_victim(&self, presence: PresenceId, mut range: Range<u32>) -> Option<u32> {
        let bound = &self.presences[presence].bound;
        range.rfind(|&offset| bound.contains(offset) && self.has_copies(presence, offset))
    }
}
