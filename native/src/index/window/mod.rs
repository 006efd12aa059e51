//! What sliding-window and state groups of hybrid models hold, and how far it lets a query's overlap reach.
//!
//! ```text
//! window groups ── engine hash ──▶ block: sequence hash, copies      (writer)
//!                  sequence hash ──▶ groups that hold it, by tier    (queries)
//! ```
//!
//! A group whose window has `w` tokens serves a prefix that ends after block n if it holds the last ⌈(w − 1) / block⌉
//! blocks before that end, or all there are: vLLM's `find_longest_cache_hit`. What full attention holds is cut down to
//! the longest prefix that every group serves. A group of states (state-space layers, linear attention) is one with a
//! window of one token: it needs the state at the end of the prefix. States stand where they end, so that the size of
//! their blocks does not matter. An engine names a block alike in all groups, and most often keeps only
//! some blocks of what an event's tokens tell: so the prefix of a block follows from the full-attention groups, once
//! the batch that stored it is applied. Where they have not got it, it follows from the event, if that tells the
//! content of each of its blocks.

pub mod query;
mod serve;
pub mod settle;

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::RwLock;
use smallvec::{SmallVec, smallvec};

use crate::index::copies::{Copies, Counts, add_copy, drop_copy};
use crate::index::parts::{PARTS, Parts};
use crate::index::types::{TIERS, TWIN_LIMIT};
pub use serve::View;
use serve::{Rule, Windows, lcm, show};

/// Blocks that the window groups of a worker rank hold at most, where nothing else bounds the index.
pub const WINDOW_LIMIT: usize = 1 << 22;

/// A sliding-window or state group of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WindowGroup {
    pub number: u32,
    /// Tokens that a token sees.
    pub window: u32,
    /// Tokens a block, a multiple of the index's own.
    pub block_size: u32,
}

/// One block in the window groups of a worker, in a dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedWindowBlock {
    pub engine_hash: u64,
    pub sequence_hash: u64,
    /// Sorted; not empty.
    pub counts: Counts,
}

/// A block in window groups.
#[derive(Debug)]
struct Block {
    key: u64,
    counts: Counts,
}

/// The window groups of one worker rank: the writer's side.
#[derive(Debug, Default)]
pub struct WindowGroups {
    shared: Arc<RwLock<Windows>>,
    /// In the order in which they were learned: a group's place is its bit.
    groups: Vec<WindowGroup>,
    blocks: Parts<Block>,
    /// Sequence hash → engine hashes, where there are several.
    twins: HashMap<u64, SmallVec<[u64; 2]>>,
    /// Stored by the batch that is being applied: their prefixes are not known yet.
    unplaced: HashMap<u64, Counts>,
    /// Their hashes, as they came.
    arrived: Vec<u64>,
}

impl WindowGroups {
    /// Empty, with the groups of another one.
    fn emptied(&self, block_size: usize) -> Self {
        let mut empty = Self { groups: self.groups.clone(), ..Self::default() };
        empty.make_rules(block_size);
        empty
    }

    pub fn of_groups(groups: &[WindowGroup], block_size: usize) -> Option<Box<Self>> {
        let known = Self { groups: groups.to_vec(), ..Self::default() };
        (!groups.is_empty()).then(|| Box::new(known.emptied(block_size)))
    }

    /// The groups, sorted.
    pub fn groups(&self) -> Vec<WindowGroup> {
        let mut groups = self.groups.clone();
        groups.sort_unstable();
        groups
    }

    /// Blocks with copies.
    pub fn len(&self) -> usize {
        self.blocks.len + self.unplaced.len()
    }

    /// Whether a group is one of them.
    pub fn judges(&self, group: u32) -> bool {
        self.place_of(group).is_some()
    }

    fn place_of(&self, group: u32) -> Option<usize> {
        self.groups.iter().position(|known| known.number == group)
    }

    fn make_rules(&mut self, block_size: usize) {
        let mut windows = self.shared.write();
        windows.rules.clear();
        windows.alignment = 1;
        for (place, group) in self.groups.iter().enumerate() {
            let ratio = group.block_size / block_size as u32;
            let needed = (group.window - 1).div_ceil(group.block_size).max(1);
            windows.alignment = lcm(windows.alignment, ratio);
            match windows.rules.iter_mut().find(|rule| (rule.needed, rule.ratio) == (needed, ratio)) {
                Some(rule) => rule.groups |= 1 << place,
                None => windows.rules.push(Rule { groups: 1 << place, needed, ratio }),
            }
        }
    }

    /// Adds copies of blocks; how many there was no room for.
    fn store(&mut self, engine: &[u64], group: u32, tier: u8, set: bool, limit: usize) -> u64 {
        let Some(place) = self.place_of(group) else { return 0 };
        let mut refused = 0;
        for &engine_hash in engine {
            if let Some(block) = self.blocks.get_mut(engine_hash) {
                add_copy(&mut block.counts, group, tier, set);
                show(&mut self.shared.write(), block.key, engine_hash, tier, 1 << place);
            } else if let Some(counts) = self.unplaced.get_mut(&engine_hash) {
                add_copy(counts, group, tier, set);
            } else if self.blocks.len + self.unplaced.len() < limit {
                self.unplaced.insert(engine_hash, smallvec![Copies { group, tier, number: 1 }]);
                self.arrived.push(engine_hash);
            } else {
                refused += 1;
            }
        }
        refused
    }

    /// Drops a copy of each block; how many had none like it.
    fn remove(&mut self, engine: &[u64], group: u32, tier: u8) -> u64 {
        let Some(place) = self.place_of(group) else { return engine.len() as u64 };
        let mut unknown = 0;
        for &engine_hash in engine {
            let placed = self.blocks.get_mut(engine_hash);
            let key = placed.as_ref().map(|block| block.key);
            let counts = placed.map(|block| &mut block.counts);
            let Some(counts) = counts.or_else(|| self.unplaced.get_mut(&engine_hash)) else {
                unknown += 1;
                continue;
            };
            if !drop_copy(counts, group, tier) {
                unknown += 1;
                continue;
            }
            let (gone, empty) = (!has(counts, group, tier), counts.is_empty());
            match key {
                Some(key) if gone => {
                    self.hide(key, group, tier, place);
                    if empty {
                        self.forget(engine_hash, key);
                    }
                }
                None if empty => {
                    self.unplaced.remove(&engine_hash);
                }
                _ => {}
            }
        }
        unknown
    }

    /// Queries no longer see a group's copy, unless another engine hash of the prefix has one.
    fn hide(&mut self, key: u64, group: u32, tier: u8, place: usize) {
        let others = self.twins.get(&key).map_or(&[][..], |twins| twins);
        let elsewhere =
            |twin: &u64| self.blocks.get(*twin).is_some_and(|block| has(&block.counts, group, tier));
        if others.iter().any(elsewhere) {
            return;
        }
        let mut windows = self.shared.write();
        if let Some(held) = windows.held.get_mut(key) {
            held.groups[usize::from(tier)] &= !(1 << place);
            if held.groups == [0; TIERS] {
                windows.held.remove(key);
            }
        }
    }

    fn forget(&mut self, engine_hash: u64, key: u64) {
        self.blocks.remove(engine_hash);
        let Some(twins) = self.twins.get_mut(&key) else { return };
        twins.retain(|twin| *twin != engine_hash);
        if let Some(held) = self.shared.write().held.get_mut(key) {
            held.engine_hash = twins[0];
        }
        if twins.len() < 2 {
            self.twins.remove(&key);
        }
    }

    /// Binds copies to a prefix; the engine hash has none yet. False: the prefix has too many engine hashes.
    pub fn place(&mut self, engine_hash: u64, key: u64, counts: Counts) -> bool {
        let first = self.shared.read().held.get(key).map(|held| held.engine_hash);
        if let Some(first) = first {
            let twins = self.twins.entry(key).or_insert_with(|| smallvec![first]);
            if twins.len() >= TWIN_LIMIT {
                return false;
            }
            twins.push(engine_hash);
        }
        let mut windows = self.shared.write();
        for copies in &counts {
            if let Some(place) = self.groups.iter().position(|known| known.number == copies.group) {
                show(&mut windows, key, engine_hash, copies.tier, 1 << place);
            }
        }
        self.blocks.or_insert_with(engine_hash, || Block { key, counts });
        true
    }

    /// Blocks that came with the batch and are still there, in order.
    fn take_unplaced(&mut self) -> Vec<(u64, Counts)> {
        let arrived = std::mem::take(&mut self.arrived);
        let some = arrived.into_iter().filter_map(|hash| Some((hash, self.unplaced.remove(&hash)?)));
        some.collect()
    }

    /// Copies some parts of the blocks from one on, until there are about so many; the next part.
    pub fn copy(&self, mut part: usize, budget: usize, into: &mut Vec<DumpedWindowBlock>) -> usize {
        let before = into.len();
        while part < PARTS && into.len() - before < budget {
            into.extend(self.blocks.parts[part].iter().map(|(&engine_hash, block)| DumpedWindowBlock {
                engine_hash,
                sequence_hash: block.key,
                counts: block.counts.clone(),
            }));
            part += 1;
        }
        part
    }

    /// Whether all parts before a number are all there are.
    pub fn is_copied(part: usize) -> bool {
        part == PARTS
    }

    pub fn bytes(&self) -> usize {
        self.blocks.bytes()
            + self.shared.read().held.bytes()
            + self.twins.allocation_size()
            + self.unplaced.allocation_size()
    }

    /// The first contradiction between what is counted and what queries see.
    pub fn check(&self) -> Result<(), String> {
        let mut seen: HashMap<u64, [u64; TIERS]> = HashMap::new();
        let blocks: Vec<(&u64, &Block)> = self.blocks.parts.iter().flat_map(HashMap::iter).collect();
        let mut hashes: HashMap<u64, usize> = HashMap::new();
        for (_, block) in &blocks {
            *hashes.entry(block.key).or_default() += 1;
            for copies in &block.counts {
                let place = self.place_of(copies.group).ok_or("copies are in window groups")?;
                seen.entry(block.key).or_default()[usize::from(copies.tier)] |= 1 << place;
            }
        }
        let windows = self.shared.read();
        let held = windows.held.parts.iter().flat_map(HashMap::iter);
        let named = held
            .clone()
            .all(|(&key, held)| self.blocks.get(held.engine_hash).is_some_and(|block| block.key == key));
        let shown: HashMap<u64, [u64; TIERS]> = held.map(|(&key, held)| (key, held.groups)).collect();
        let counted = named && blocks.len() == self.blocks.len && shown.len() == windows.held.len;
        let several = hashes.iter().filter(|(_, number)| **number > 1).map(|(key, _)| *key);
        let twins =
            several.clone().all(|key| self.twins.get(&key).is_some_and(|all| all.len() == hashes[&key]))
                && several.count() == self.twins.len();
        match (shown == seen, counted, twins, self.unplaced.is_empty() && self.arrived.is_empty()) {
            (true, true, true, true) => Ok(()),
            state => Err(format!("window groups: shown, counted, twins known, all placed: {state:?}")),
        }
    }
}

fn has(counts: &Counts, group: u32, tier: u8) -> bool {
    counts.iter().any(|copies| (copies.group, copies.tier) == (group, tier))
}
