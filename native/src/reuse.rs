//! Reuse of prompt blocks: how many other blocks were used since a block was last used (its LRU stack distance).
//!
//! ```text
//! samples   identity of a block ──▶ (content, slot)      a fixed share of all contents, by hash
//! slots     0 ──────────▶ next                           the later the use, the higher the slot; left ones stay empty
//! fenwick   number of occupied slots up to each
//! ```
//!
//! The method is SHARDS (Waldspurger et al., FAST 2015): whether a block is sampled depends on a hash of its content
//! alone, so that each use of a sampled block is seen, and distances among samples times the weight are those among all
//! blocks. The weight, a power of two, doubles where samples become too many, in memory or for a request. Where the
//! samples reach far enough back, the least recently used one is dropped instead.
//!
//! A prompt's blocks are used from its last to its first: as engines free them, so that an LRU cache never holds a
//! block without its ancestors.
//!
//! Invariants: (1) `samples` has at most `max_samples` entries; (2) each has a slot of its own, which is occupied;
//! (3) `contents` counts the samples of each content; (4) the content of each begins with `doublings` zero bits.
//!
//! Complexity: O(1) a block, O(log max_samples) a sampled one. `kvscout_gateway.ladder.reuse_reference` defines the results.

use std::ops::AddAssign;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

/// Sampled blocks of a request, on average: above it the weight doubles. Each costs about 0.1 µs.
const MEAN_SAMPLES: u64 = 64;

/// Requests over which that average is taken.
const AVERAGED: u64 = 16;

/// Blocks, of the last ones used, that are remembered at least before the least recent are dropped.
const MIN_REACH: u64 = 1 << 20;

/// Capacities that are remembered at least before the least recently used blocks are dropped.
const REACH_CAPACITIES: u64 = 4;

/// Odd; spreads the bits of a chain.
const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;

/// Kinds of a `Reuse`: see `kvscout_gateway.ladder.reuse`.
pub const KINDS: usize = 10;

/// Estimated blocks of a request by what became of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reuse(pub [u64; KINDS]);

impl AddAssign<(usize, u64)> for Reuse {
    fn add_assign(&mut self, (kind, blocks): (usize, u64)) {
        self.0[kind] += blocks;
    }
}

/// Blocks of a request, and of the caches that it may use.
#[derive(Debug, Clone, Copy)]
pub struct Use<'a> {
    /// Local hashes.
    pub local: &'a [u64],
    /// Local hashes of the same tokens without salt and adapter; empty = the same.
    pub content: &'a [u64],
    /// Leading blocks that some worker holds.
    pub overlap: usize,
    /// Blocks that all workers hold together; 0 = unknown.
    pub capacity: u64,
    /// Blocks that the smallest of them holds; 0 = unknown.
    pub worker_capacity: u64,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    content: u64,
    slot: usize,
}

/// A sample of the blocks that were used.
#[derive(Debug)]
pub struct ReuseSampler {
    max_samples: usize,
    doublings: u32,
    /// Samples of a request, a moving average times `AVERAGED`.
    mean: u64,
    samples: HashMap<u64, Sample>,
    contents: HashMap<u64, u32>,
    owners: Vec<u64>,
    fenwick: Vec<u32>,
    /// Below it no slot is occupied.
    oldest: usize,
    next: usize,
    /// Sampled blocks of a request: position, identity, content.
    used: Vec<(usize, u64, u64)>,
}

impl ReuseSampler {
    /// An empty sampler that keeps at most so many blocks, at least one.
    pub fn new(max_samples: usize) -> Self {
        let max_samples = max_samples.max(1);
        Self {
            max_samples,
            doublings: 0,
            mean: 0,
            samples: HashMap::new(),
            contents: HashMap::new(),
            owners: vec![0; 2 * max_samples],
            fenwick: vec![0; 2 * max_samples + 1],
            oldest: 0,
            next: 0,
            used: Vec::new(),
        }
    }

    /// Blocks that each sampled one stands for.
    pub fn weight(&self) -> u64 {
        1 << self.doublings
    }

    /// Number of sampled blocks.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether nothing is sampled.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Classifies the blocks of a request, then uses them.
    pub fn observe(&mut self, request: &Use<'_>) -> Reuse {
        self.sample(request);
        let mut reuse = Reuse::default();
        let weight = self.weight();
        for &(position, identity, content) in &self.used {
            if let Some(kind) = self.kind_of(request, position, identity, content) {
                reuse += (kind, weight);
            }
        }
        let used = std::mem::take(&mut self.used);
        for &(_, identity, content) in used.iter().rev() {
            self.touch(identity, content, request.capacity);
        }
        self.mean = self.mean - self.mean / AVERAGED + used.len() as u64;
        self.used = used;
        if self.mean > MEAN_SAMPLES * AVERAGED {
            self.mean /= 2;
            self.double();
        }
        reuse
    }

    /// Checks the invariants; for tests.
    pub fn check_invariants(&self) {
        assert!(self.samples.len() <= self.max_samples);
        assert_eq!(self.samples.len() as u64, u64::from(self.occupied(self.next)));
        let mut contents = HashMap::new();
        for (&identity, sample) in &self.samples {
            assert_eq!(self.owners[sample.slot], identity);
            assert!(sample.slot >= self.oldest && sample.slot < self.next);
            assert!(sample.content.leading_zeros() >= self.doublings);
            *contents.entry(sample.content).or_insert(0) += 1;
        }
        assert_eq!(contents, self.contents);
    }

    fn sample(&mut self, request: &Use<'_>) {
        self.used.clear();
        let (mut identity, mut content) = (0, 0);
        for (position, &local) in request.local.iter().enumerate() {
            identity = extended(identity, local);
            content = request.content.get(position).map_or(identity, |&plain| extended(content, plain));
            if content.leading_zeros() >= self.doublings {
                self.used.push((position, identity, content));
            }
        }
    }

    fn kind_of(&self, request: &Use<'_>, position: usize, identity: u64, content: u64) -> Option<usize> {
        let Some(sample) = self.samples.get(&identity) else {
            return Some(match (position < request.overlap, self.contents.contains_key(&content)) {
                (true, _) => 9,
                (false, true) => 1,
                (false, false) => 0,
            });
        };
        if position < request.overlap {
            return None;
        }
        let newer = self.samples.len() as u64 - u64::from(self.occupied(sample.slot + 1));
        let (distance, capacity) = (newer << self.doublings, request.capacity);
        Some(match capacity {
            _ if distance < request.worker_capacity => 3,
            0 => 2,
            _ if distance < capacity => 2,
            _ if 4 * distance < 5 * capacity => 4,
            _ if 2 * distance < 3 * capacity => 5,
            _ if distance < 2 * capacity => 6,
            _ if distance < 4 * capacity => 7,
            _ => 8,
        })
    }

    fn touch(&mut self, identity: u64, content: u64, capacity: u64) {
        if content.leading_zeros() < self.doublings {
            return; // the weight has doubled meanwhile
        }
        if self.next == self.owners.len() {
            self.compact();
        }
        if !self.samples.contains_key(&identity) && self.samples.len() == self.max_samples {
            if self.max_samples as u64 * self.weight() < (REACH_CAPACITIES * capacity).max(MIN_REACH) {
                self.double();
                return self.touch(identity, content, capacity);
            }
            self.drop_oldest();
        }
        let slot = self.next;
        match self.samples.entry(identity) {
            Entry::Occupied(mut known) => {
                let left = std::mem::replace(&mut known.get_mut().slot, slot);
                self.add(left, u32::MAX);
            }
            Entry::Vacant(new) => {
                new.insert(Sample { content, slot });
                *self.contents.entry(content).or_insert(0) += 1;
            }
        }
        self.owners[slot] = identity;
        self.add(slot, 1);
        self.next += 1;
    }

    fn drop_oldest(&mut self) {
        while self.oldest < self.next {
            let (slot, identity) = (self.oldest, self.owners[self.oldest]);
            self.oldest += 1;
            if self.samples.get(&identity).is_some_and(|sample| sample.slot == slot) {
                self.add(slot, u32::MAX);
                if let Some(sample) = self.samples.remove(&identity) {
                    self.forget(sample.content);
                }
                return;
            }
        }
    }

    fn forget(&mut self, content: u64) {
        if let Entry::Occupied(mut count) = self.contents.entry(content) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    fn double(&mut self) {
        self.doublings += 1;
        let doublings = self.doublings;
        self.samples.retain(|_, sample| sample.content.leading_zeros() >= doublings);
        self.contents.retain(|content, _| content.leading_zeros() >= doublings);
        self.compact();
    }

    /// Moves the occupied slots to the front, in their order.
    fn compact(&mut self) {
        self.fenwick.fill(0);
        let end = std::mem::replace(&mut self.next, 0);
        for slot in self.oldest..end {
            let identity = self.owners[slot];
            let to = self.next;
            if let Some(sample) = self.samples.get_mut(&identity)
                && sample.slot == slot
            {
                sample.slot = to;
                self.owners[to] = identity;
                self.add(to, 1);
                self.next += 1;
            }
        }
        self.oldest = 0;
    }

    /// Adds to a slot's number, wrapping: u32::MAX takes one away.
    fn add(&mut self, slot: usize, number: u32) {
        let mut at = slot + 1;
        while at < self.fenwick.len() {
            self.fenwick[at] = self.fenwick[at].wrapping_add(number);
            at += at & at.wrapping_neg();
        }
    }

    /// Occupied slots below one.
    fn occupied(&self, below: usize) -> u32 {
        let (mut at, mut sum) = (below, 0u32);
        while at > 0 {
            sum = sum.wrapping_add(self.fenwick[at]);
            at &= at - 1;
        }
        sum
    }
}

/// The identity of a prefix, by that of the one before it.
#[inline]
fn extended(parent: u64, local: u64) -> u64 {
    let mixed = (parent ^ local).wrapping_mul(SPREAD);
    mixed ^ mixed >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(local: &[u64]) -> Use<'_> {
        Use { local, content: &[], overlap: 0, capacity: 4, worker_capacity: 0 }
    }

    #[test]
    fn a_block_expires_once_the_cache_is_full_of_others() {
        let mut sampler = ReuseSampler::new(64);
        assert_eq!(sampler.observe(&used(&[1, 2])).0[0], 2);
        assert_eq!(sampler.observe(&used(&[1, 2])).0[2], 2);
        sampler.observe(&used(&[3, 4, 5]));
        let reuse = sampler.observe(&used(&[1, 2]));
        assert_eq!(
            (reuse.0[2], reuse.0[4]),
            (1, 1),
            "three others since the first block, four since the second"
        );
        sampler.check_invariants();
    }

    #[test]
    fn memory_is_bounded_whatever_comes() {
        let mut sampler = ReuseSampler::new(32);
        for first in 0..5_000u64 {
            let local: Vec<u64> = (0..40).map(|index| first.wrapping_mul(SPREAD) ^ index).collect();
            sampler.observe(&used(&local));
        }
        sampler.check_invariants();
        assert!(sampler.weight() > 1 && sampler.len() <= 32);
    }
}
