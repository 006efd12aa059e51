//! Active load of one pool of workers, and what it costs to put a request on each of them.
//!
//! Native backend of `kvscout_scheduler.load` and `kvscout_scheduler.costs`: numbers by worker slot, the prefixes that
//! active requests share, and the columns of one decision. Knows slots, hashes and overlaps, no request and no clock.

mod holders;
pub mod messages;
mod names;
mod overlaps;
mod score;
mod slot_set;
mod targets;
mod time_cost;
mod tree;

use names::Names;
pub use overlaps::{Columns, Others, Overlaps, Row};
pub use score::{Costs, Question, Scores};
pub use slot_set::SlotSet;
pub use targets::StepTimes;
pub use time_cost::{Row as TimeRow, TimeCostInputs};
use tree::PrefixTree;

/// Workers whose block hashes are comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolKey {
    pub block_size: u32,
    pub eagle: bool,
}

/// What one request occupies; valid until removed.
#[derive(Debug)]
pub struct Allocation {
    pub slot: u32,
    pub private_blocks: i64,
    pub prefill_tokens: i64,
    /// The pool_key's number and the node where the request ends; None: it occupies no shared blocks.
    place: Option<(u32, u32)>,
}

/// Above which load a worker is busy, and above which prefill work requests wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub prefill_tokens: i64,
    pub decode_blocks: i64,
    pub queued_prefill_tokens: i64,
}

impl Limits {
    pub const NONE: Self =
        Self { prefill_tokens: i64::MAX, decode_blocks: i64::MAX, queued_prefill_tokens: i64::MAX };
}

/// Load columns of one pool; `ReferenceLoad` of the reference backend explains them.
#[derive(Debug)]
pub struct ActiveLoad {
    pub track_blocks: bool,
    pub requests: Vec<i64>,
    pub prefill_tokens: Vec<i64>,
    pub decode_blocks: Vec<i64>,
    limits: Vec<Limits>,
    /// Slots that have more load than their limits allow.
    busy: SlotSet,
    /// Those, and the ones that requests wait for.
    full: SlotSet,
    /// Slots in use, by rank.
    order: Vec<u32>,
    names: Names,
    /// Few: one a block size.
    trees: Vec<(PoolKey, PrefixTree)>,
}

impl ActiveLoad {
    pub fn new(track_blocks: bool) -> Self {
        Self {
            track_blocks,
            requests: Vec::new(),
            prefill_tokens: Vec::new(),
            decode_blocks: Vec::new(),
            limits: Vec::new(),
            busy: SlotSet::default(),
            full: SlotSet::default(),
            order: Vec::new(),
            names: Names::default(),
            trees: Vec::new(),
        }
    }

    /// Makes room for a slot; new ones are idle.
    pub fn ensure_slot(&mut self, slot: u32) {
        let size = self.requests.len().max(slot as usize + 1);
        for column in [&mut self.requests, &mut self.prefill_tokens, &mut self.decode_blocks] {
            column.resize(size, 0);
        }
        self.limits.resize(size, Limits::NONE);
    }

    /// Sets the limits of a slot that there is room for.
    pub fn limit(&mut self, slot: u32, limits: Limits) {
        self.limits[slot as usize] = limits;
        self.judge(slot);
    }

    /// The slots that have more load than their limits allow.
    pub fn busy(&self) -> &SlotSet {
        &self.busy
    }

    /// The slots that are busy, or have so much prefill work that requests wait for them.
    pub fn full(&self) -> &SlotSet {
        &self.full
    }

    /// The load of a slot has changed, or its limits have.
    fn judge(&mut self, slot: u32) {
        let (busy, full) = self.judged(slot as usize);
        self.busy.set(slot, busy);
        self.full.set(slot, full);
    }

    /// Whether a slot is busy, and whether it is full.
    fn judged(&self, slot: usize) -> (bool, bool) {
        let (limits, prefill_tokens) = (&self.limits[slot], self.prefill_tokens[slot]);
        let busy = prefill_tokens > limits.prefill_tokens || self.decode_blocks[slot] > limits.decode_blocks;
        (busy, busy || prefill_tokens > limits.queued_prefill_tokens)
    }

    /// Says which worker ranks are at which slots, by rank: (worker id, rank, slot).
    pub fn arrange<'a>(&mut self, ranks: impl Iterator<Item = (&'a str, u32, u32)> + Clone) {
        self.order = ranks.clone().map(|(_, _, slot)| slot).collect();
        if let Some(&highest) = self.order.iter().max() {
            self.ensure_slot(highest);
        }
        self.names = Names::new(ranks);
    }

    /// Adds a request to a slot that there is room for.
    pub fn add(
        &mut self,
        slot: u32,
        pool_key: PoolKey,
        hashes: &[u64],
        private_blocks: i64,
        prefill_tokens: i64,
    ) -> Allocation {
        let (mut place, mut private) = (None, 0);
        if self.track_blocks {
            let number = self.tree_number(pool_key);
            let (node, new) = self.trees[number].1.add(hashes, slot);
            place = Some((number as u32, node));
            private = private_blocks;
            self.decode_blocks[slot as usize] += new as i64 + private;
        }
        self.requests[slot as usize] += 1;
        self.prefill_tokens[slot as usize] += prefill_tokens;
        self.judge(slot);
        Allocation { slot, private_blocks: private, prefill_tokens, place }
    }

    /// Ends the prefill phase of a request; a second time changes nothing.
    pub fn complete_prefill(&mut self, allocation: &mut Allocation) {
        self.prefill_tokens[allocation.slot as usize] -= std::mem::take(&mut allocation.prefill_tokens);
        self.judge(allocation.slot);
    }

    /// Adds blocks to a request that no other request shares.
    pub fn add_private(&mut self, allocation: &mut Allocation, blocks: i64) {
        if self.track_blocks {
            allocation.private_blocks += blocks;
            self.decode_blocks[allocation.slot as usize] += blocks;
            self.judge(allocation.slot);
        }
    }

    /// Releases all that a request occupies.
    pub fn remove(&mut self, allocation: &mut Allocation) {
        let slot = allocation.slot as usize;
        let mut gone = std::mem::take(&mut allocation.private_blocks);
        if let Some((pool_key, node)) = allocation.place.take() {
            gone += self.trees[pool_key as usize].1.remove(node, allocation.slot) as i64;
        }
        self.decode_blocks[slot] -= gone;
        self.prefill_tokens[slot] -= std::mem::take(&mut allocation.prefill_tokens);
        self.requests[slot] -= 1;
        self.judge(allocation.slot);
    }

    /// Leading blocks of a prompt that are active, by slot; the last thing told of a slot holds.
    pub fn shared(&self, pool_key: PoolKey, hashes: &[u64], visit: impl FnMut(u32, usize)) {
        if let Some((_, tree)) = self.trees.iter().find(|(there, _)| *there == pool_key) {
            tree.shared(hashes, visit);
        }
    }

    fn tree_number(&mut self, pool_key: PoolKey) -> usize {
        self.trees.iter().position(|(there, _)| *there == pool_key).unwrap_or_else(|| {
            self.trees.push((pool_key, PrefixTree::default()));
            self.trees.len() - 1
        })
    }

    /// Heap memory of the shared blocks, in bytes; about.
    pub fn bytes(&self) -> usize {
        self.trees.iter().map(|(_, tree)| tree.bytes()).sum()
    }

    /// What contradicts: the columns must follow from these allocations, all that there are.
    pub fn check<'a>(&self, allocations: impl Iterator<Item = &'a Allocation>) -> Result<(), String> {
        let size = self.requests.len();
        for slot in 0..size {
            let recorded = (self.busy.has(slot as u32), self.full.has(slot as u32));
            if recorded != self.judged(slot) {
                return Err(format!("slot {slot} is said to be busy and full: {recorded:?}"));
            }
        }
        let (mut requests, mut prefill, mut blocks) = (vec![0; size], vec![0; size], vec![0; size]);
        for allocation in allocations {
            let slot = allocation.slot as usize;
            requests[slot] += 1;
            prefill[slot] += allocation.prefill_tokens;
            blocks[slot] += allocation.private_blocks;
        }
        for (_, tree) in &self.trees {
            tree.check()?;
            tree.recount(|slot, active| blocks[slot as usize] += active as i64);
        }
        for (name, counted, column) in [
            ("requests", &requests, &self.requests),
            ("prefill tokens", &prefill, &self.prefill_tokens),
            ("blocks", &blocks, &self.decode_blocks),
        ] {
            if counted != column {
                return Err(format!("{name} do not add up: {column:?}, counted {counted:?}"));
            }
            if column.iter().any(|&value| value < 0) {
                return Err(format!("negative {name}"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL_KEY: PoolKey = PoolKey { block_size: 16, eagle: false };

    #[test]
    fn shared_blocks_count_once_and_all_ends_at_zero() {
        let mut load = ActiveLoad::new(true);
        load.ensure_slot(1);
        let mut first = load.add(1, POOL_KEY, &[10, 20, 30], 1, 48);
        let mut second = load.add(1, POOL_KEY, &[10, 20, 99], 0, 16);
        assert_eq!(load.decode_blocks, [0, 5]);
        load.complete_prefill(&mut first);
        load.complete_prefill(&mut first);
        assert_eq!(load.prefill_tokens, [0, 16]);
        load.add_private(&mut second, 2);
        load.check([&first, &second].into_iter()).unwrap();
        load.remove(&mut first);
        assert_eq!(load.decode_blocks, [0, 5]);
        load.remove(&mut second);
        assert_eq!([&load.requests, &load.prefill_tokens, &load.decode_blocks], [&[0, 0]; 3]);
        load.check([].into_iter()).unwrap();
    }

    #[test]
    fn untracked_blocks_are_never_counted() {
        let mut load = ActiveLoad::new(false);
        load.ensure_slot(0);
        let mut allocation = load.add(0, POOL_KEY, &[1, 2], 1, 7);
        load.add_private(&mut allocation, 3);
        assert_eq!((load.decode_blocks[0], load.prefill_tokens[0]), (0, 7));
        load.remove(&mut allocation);
        load.check([].into_iter()).unwrap();
    }

    #[test]
    fn limits_say_who_is_busy_and_who_has_room() {
        let mut load = ActiveLoad::new(true);
        load.arrange([("a", 0, 1), ("b", 0, 0)].into_iter());
        let both = |load: &ActiveLoad, slot| (load.busy().has(slot), load.full().has(slot));
        assert_eq!(both(&load, 0), (false, false));
        load.add(0, POOL_KEY, &[1, 2], 1, 50);
        load.limit(0, Limits { prefill_tokens: 50, decode_blocks: 3, queued_prefill_tokens: 49 });
        assert_eq!((both(&load, 0), both(&load, 1)), ((false, true), (false, false)));
        let mut extra = load.add(0, POOL_KEY, &[1, 3], 0, 0);
        assert_eq!((both(&load, 0), both(&load, 1)), ((true, true), (false, false)));
        load.remove(&mut extra);
        assert_eq!(both(&load, 0), (false, true));
    }

    #[test]
    fn lanes_share_nothing() {
        let mut load = ActiveLoad::new(true);
        load.ensure_slot(0);
        load.add(0, POOL_KEY, &[1, 2], 0, 0);
        load.add(0, PoolKey { block_size: 32, eagle: false }, &[1, 2], 0, 0);
        assert_eq!(load.decode_blocks, [4]);
    }

    #[test]
    fn a_long_request_takes_little_more_than_its_hashes() {
        let mut load = ActiveLoad::new(true);
        load.ensure_slot(0);
        for request in 0..1000_u64 {
            let hashes: Vec<u64> = (0..1024).map(|block| request << 32 | block).collect();
            load.add(0, POOL_KEY, &hashes, 0, 0);
        }
        assert!(load.bytes() / 1000 < 9000, "{} bytes a request", load.bytes() / 1000);
    }
}
