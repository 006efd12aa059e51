//! The part of the index that queries read: prefixes as runs of blocks, and who holds how much of each.
//!
//! ```text
//! shard (by first local hash)
//!   node 1  [a b c d]      any {0,1,2}  full {0,1}  partial [(2, 3)]     bit 2 ends at block c
//!     ├ node 2  [e f]      any {0}      full {0}
//!     └ node 3  [g]        any {1}      full {1}
//! ```
//!
//! A *bit* is one worker on one level (device; host or faster; ...): what it holds below the first hole is
//! invisible here. Invariants:
//!
//! 1. `full` and the bits of `partial` are disjoint, `any` is both together.
//! 2. A partial bit's reach is in 1 .. run length - 1, a full bit's is the run length.
//! 3. A bit in a node's `any` is in its parent's `full`: along a path the bits only become fewer.
//! 4. Siblings differ in their first local hash, by which `children` finds them.
//!
//! A writer holds the lock of one shard for one node's change at a time, so readers wait for no more than that. What
//! a change touches it reads before, while readers may go on: a writer that loses its core seldom loses it just when
//! readers would have to wait for it.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};

use crossbeam_utils::CachePadded;
use parking_lot::RwLock;
use smallvec::SmallVec;

use super::bit_set::BitSet;
use super::prompt::Prompt;
use super::run::Run;
use super::waiting;
use crate::slab::Slab;
use crate::table::{Table, mix};

/// Shards of the trie: enough that a writer and a reader seldom meet in one.
pub const SHARDS: usize = 64;

/// Longest run of one node: a block's depth modulo this names it within its node.
pub const MAX_RUN: u32 = 1024;

/// Local hashes compared at once; a prompt of tokens is hashed in such chunks.
const CHUNK: usize = 64;

/// A node's number in its shard; 0 is none.
pub type NodeIndex = u32;

/// A run of blocks; see the module.
#[derive(Debug)]
pub struct Node {
    /// The node above; 0: the run begins a prompt.
    pub parent: NodeIndex,
    /// Depth of the first block.
    pub start: u32,
    pub local: Run<u64>,
    any: BitSet,
    full: BitSet,
    partial: SmallVec<[(u32, u32); 2]>,
    /// The round in which it was used last; never before one below it.
    used: AtomicU32,
}

impl Node {
    pub fn new(parent: NodeIndex, start: u32, local: Run<u64>) -> Self {
        Self {
            parent,
            start,
            local,
            any: BitSet::default(),
            full: BitSet::default(),
            partial: SmallVec::new(),
            used: AtomicU32::new(0),
        }
    }

    /// Blocks of the run.
    pub fn len(&self) -> u32 {
        self.local.len() as u32
    }

    /// How many blocks from the first one a bit has.
    pub fn reach(&self, bit: u32) -> u32 {
        if self.full.contains(bit) {
            return self.len();
        }
        self.partial.iter().find(|(partial, _)| *partial == bit).map_or(0, |(_, reach)| *reach)
    }

    /// Sets how many blocks from the first one a bit has.
    pub fn set_reach(&mut self, bit: u32, reach: u32) {
        let position = self.partial.iter().position(|(partial, _)| *partial == bit);
        if reach == 0 {
            self.any.remove(bit);
        } else {
            self.any.insert(bit);
        }
        if reach == self.len() {
            self.full.insert(bit);
        } else {
            self.full.remove(bit);
        }
        match (position, reach > 0 && reach < self.len()) {
            (Some(position), true) => self.partial[position].1 = reach,
            (Some(position), false) => {
                self.partial.swap_remove(position);
                if self.partial.is_empty() {
                    self.partial = SmallVec::new();
                }
            }
            (None, true) => self.partial.push((bit, reach)),
            (None, false) => {}
        }
    }

    /// Appends blocks; nobody has them yet.
    pub fn extend(&mut self, local: &[u64]) {
        let len = self.len();
        for bit in std::mem::take(&mut self.full).iter() {
            self.partial.push((bit, len));
        }
        self.local.extend(local);
    }

    /// Drops the blocks from `len` on, which no bit has.
    pub fn truncate(&mut self, len: u32) {
        self.local.truncate(len as usize);
        let full = &mut self.full;
        self.partial.retain(|&mut (bit, reach)| {
            if reach == len {
                full.insert(bit);
            }
            reach < len
        });
    }

    /// Cuts the run in two at `at`; this node becomes the first part, the second one is returned.
    fn split_tail(&mut self, at: u32, own: NodeIndex) -> Self {
        let local = self.local.split_off(at as usize);
        let mut tail = Self::new(own, self.start + at, local);
        tail.used = AtomicU32::new(self.used());
        tail.full = std::mem::replace(&mut self.full, self.any.clone());
        tail.any = tail.full.clone();
        for (bit, reach) in std::mem::take(&mut self.partial) {
            if reach < at {
                self.full.remove(bit);
                self.partial.push((bit, reach));
            } else if reach > at {
                tail.any.insert(bit);
                tail.partial.push((bit, reach - at));
            }
        }
        tail
    }

    /// The round in which it was used last.
    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Marks it as used in a round; false if it was marked for that one or a later one before.
    #[inline]
    pub fn touch(&self, round: u32) -> bool {
        // A store by every query would take the cache line from the other readers.
        self.used() < round && self.used.fetch_max(round, Ordering::Relaxed) < round
    }

    fn bytes(&self) -> usize {
        let partial = if self.partial.spilled() { self.partial.capacity() } else { 0 };
        self.local.bytes() + partial * size_of::<(u32, u32)>() + self.any.bytes() + self.full.bytes()
    }
}

/// What one bit has of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    pub bit: u32,
    /// Leading blocks, at least 1.
    pub blocks: u32,
}

/// One shard: all prompts whose first local hash falls into it.
#[derive(Debug, Default)]
pub struct Shard {
    pub nodes: Slab<Node>,
    /// (parent, first local hash) → node.
    children: Table<32>,
    secret: u64,
    /// Heap memory of the nodes.
    heap: usize,
}

impl Shard {
    fn key(&self, parent: NodeIndex, local: u64) -> u64 {
        mix(local ^ u64::from(parent).wrapping_mul(0x9fb2_1c65_1e98_df25), self.secret)
    }

    /// The child of `parent` (0: of the root) that begins with a block; 0 if there is none.
    #[inline]
    pub fn child(&self, parent: NodeIndex, local: u64) -> NodeIndex {
        let is = |payload: u64| {
            let node = &self.nodes[payload as u32];
            node.parent == parent && node.local[0] == local
        };
        self.children.find(self.key(parent, local), is).map_or(0, |(_, payload)| payload as u32)
    }

    /// Puts a node in place, under its parent.
    pub fn attach(&mut self, index: NodeIndex, node: Node) {
        let key = self.key(node.parent, node.local[0]);
        self.heap += node.bytes();
        self.nodes.put(index, node);
        self.children.insert(key, u64::from(index));
    }

    /// Changes a node.
    pub fn change(&mut self, index: NodeIndex, change: impl FnOnce(&mut Node)) {
        let node = &mut self.nodes[index];
        let before = node.bytes();
        change(node);
        self.heap = self.heap + node.bytes() - before;
    }

    fn detach(&mut self, index: NodeIndex) -> Node {
        self.unlink(index);
        let node = self.nodes.take(index);
        self.heap -= node.bytes();
        node
    }

    fn unlink(&mut self, index: NodeIndex) {
        let node = &self.nodes[index];
        let key = self.key(node.parent, node.local[0]);
        if let Some((slot, _)) = self.children.find(key, |payload| payload == u64::from(index)) {
            self.children.remove(slot);
        }
    }

    /// Cuts a run at `at`: `index` keeps the first part, `tail` gets the rest and the children.
    pub fn split_tail(&mut self, index: NodeIndex, at: u32, tail: NodeIndex, children: &[NodeIndex]) {
        for &child in children {
            self.unlink(child);
        }
        let mut cut = None;
        self.change(index, |node| cut = Some(node.split_tail(at, index)));
        if let Some(node) = cut {
            self.attach(tail, node);
        }
        for &child in children {
            self.nodes[child].parent = tail;
            let key = self.key(tail, self.nodes[child].local[0]);
            self.children.insert(key, u64::from(child));
        }
    }

    /// Cuts a run at `at`: `head` gets the first part, `index` keeps the rest and the children.
    pub fn split_head(&mut self, index: NodeIndex, at: u32, head: NodeIndex) {
        let mut first = self.detach(index);
        let rest = first.split_tail(at, head);
        self.attach(head, first);
        self.attach(index, rest);
    }

    /// Heap memory, in bytes.
    fn bytes(&self) -> usize {
        self.nodes.bytes() + self.children.bytes() + self.heap
    }
}

/// Length of the common prefix of two runs.
#[inline]
pub fn common_prefix(a: &[u64], b: &[u64]) -> usize {
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut same = 0;
    for (a, b) in a.chunks(CHUNK).zip(b.chunks(CHUNK)) {
        if a != b {
            return same + a.iter().zip(b).take_while(|(a, b)| a == b).count();
        }
        same += a.len();
    }
    same
}

/// All shards.
#[derive(Debug)]
pub struct Trie {
    shards: Vec<CachePadded<RwLock<Shard>>>,
    /// The clock of the `max_blocks` bound: how often a share of it was stored.
    round: AtomicU32,
}

impl Trie {
    /// An empty trie; `secret` scatters its tables.
    pub fn new(secret: u64) -> Self {
        let shard = || CachePadded::new(RwLock::new(Shard { secret, ..Shard::default() }));
        Self { shards: (0..SHARDS).map(|_| shard()).collect(), round: AtomicU32::new(0) }
    }

    #[inline]
    pub fn round(&self) -> u32 {
        self.round.load(Ordering::Relaxed)
    }

    /// Begins a round: whatever is used from now on was used after what was not. One caller at a time.
    pub fn next_round(&self) {
        self.round.store(self.round().saturating_add(1), Ordering::Relaxed);
    }

    /// Number of the shard of prompts that begin with a block.
    #[inline]
    pub fn shard_of(first: u64) -> usize {
        // Local hashes are well mixed already.
        first as usize % SHARDS
    }

    #[inline]
    pub fn shard(&self, shard: usize) -> &RwLock<Shard> {
        &self.shards[shard]
    }

    /// Sets how many blocks of a node from the first one some bits have.
    pub fn set_reach(&self, shard: usize, index: NodeIndex, reaches: impl IntoIterator<Item = (u32, u32)>) {
        let held = self.shard(shard).upgradable_read();
        black_box(held.nodes[index].partial.len() + held.nodes[index].any.words());
        waiting::upgrade(held)
            .change(index, |node| reaches.into_iter().for_each(|(bit, reach)| node.set_reach(bit, reach)));
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| waiting::read(shard).bytes()).sum()
    }

    /// The same, counted the slow way.
    pub fn walked_bytes(&self) -> usize {
        let walked = |shard: &Shard| {
            let nodes: usize = shard.nodes.iter().map(|(_, node)| node.bytes()).sum();
            shard.bytes() - shard.heap + nodes
        };
        self.shards.iter().map(|shard| walked(&waiting::read(shard))).sum()
    }

    /// Takes a node out that has no bits and no children.
    pub fn detach(&self, shard: usize, index: NodeIndex) -> Node {
        let held = self.shard(shard).upgradable_read();
        let node = &held.nodes[index];
        black_box(held.child(node.parent, node.local[0]));
        waiting::upgrade(held).detach(index)
    }

    /// What every bit has of a prompt; bits that have nothing are left out.
    ///
    /// With `early_exit` the search ends where one bit is left, whose number is then a lower bound.
    pub fn find(&self, prompt: &mut impl Prompt, early_exit: bool, found: &mut Vec<Match>) {
        let blocks = prompt.len();
        if blocks == 0 {
            return;
        }
        let round = self.round();
        let first = prompt.hashes(1)[0];
        let shard = waiting::read(self.shard(Self::shard_of(first)));
        let mut index = shard.child(0, first);
        if index == 0 {
            return;
        }
        loop {
            let node = &shard.nodes[index];
            node.touch(round);
            let start = node.start as usize;
            let limit = node.local.len().min(blocks - start);
            let stop = early_exit && node.any.len() <= 1;
            let mut same = 0;
            while same < limit {
                // The first block is known to be equal: the child was found by it.
                let chunk = if stop { 1 } else { (limit - same).min(CHUNK) };
                let hashes = &prompt.hashes(start + same + chunk)[start + same..];
                let equal = common_prefix(&node.local[same..same + chunk], hashes);
                same += equal;
                if equal < chunk || stop {
                    break;
                }
            }
            let depth = (start + same) as u32;
            let next = if same == node.local.len() && start + same < blocks && !stop {
                shard.child(index, prompt.hashes(start + same + 1)[start + same])
            } else {
                0
            };
            for &(bit, reach) in &node.partial {
                found.push(Match { bit, blocks: (node.start + reach).min(depth) });
            }
            let below = (next != 0).then(|| &shard.nodes[next].any);
            node.full.for_each_without(below, |bit| found.push(Match { bit, blocks: depth }));
            if next == 0 {
                return;
            }
            index = next;
        }
    }
}
