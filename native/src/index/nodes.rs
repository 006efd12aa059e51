//! The writer's side of the trie's nodes: which workers need which blocks, and the links between nodes.

use super::run::Run;
use super::trie::{NodeIndex, SHARDS};
use super::worker::{NodeId, PresenceId};
use crate::slab::Slab;
use smallvec::SmallVec;

/// How many workers need a block, and how many of them hold it on any tier.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Refs {
    /// Bound (ghosts and demoted ones included) or predicted.
    pub pins: u16,
    pub held: u16,
}

/// One node, as the writer sees it; its length is that of `refs`.
#[derive(Debug, Default)]
pub struct NodeEntry {
    pub parent: NodeId,
    /// Depth of the first block.
    pub start: u32,
    pub refs: Run<Refs>,
    /// (worker slot, presence), sorted.
    pub presences: SmallVec<[(u32, PresenceId); 1]>,
    pub first_child: NodeId,
    pub next: NodeId,
    pub previous: NodeId,
}

impl NodeEntry {
    pub fn len(&self) -> u32 {
        self.refs.len() as u32
    }

    /// The presence of a worker.
    #[inline]
    pub fn presence(&self, slot: u32) -> Option<PresenceId> {
        self.presences
            .binary_search_by_key(&slot, |(owner, _)| *owner)
            .ok()
            .map(|position| self.presences[position].1)
    }

    pub fn set_presence(&mut self, slot: u32, presence: PresenceId) {
        match self.presences.binary_search_by_key(&slot, |(owner, _)| *owner) {
            Ok(position) => self.presences[position].1 = presence,
            Err(position) => self.presences.insert(position, (slot, presence)),
        }
    }

    pub fn drop_presence(&mut self, slot: u32) {
        if let Ok(position) = self.presences.binary_search_by_key(&slot, |(owner, _)| *owner) {
            self.presences.remove(position);
        }
    }

    fn bytes(&self) -> usize {
        let presences = if self.presences.spilled() { self.presences.capacity() } else { 0 };
        self.refs.bytes() + presences * size_of::<(u32, PresenceId)>()
    }
}

/// Shard of a node.
#[inline]
pub fn shard_of(node: NodeId) -> usize {
    node as usize % SHARDS
}

/// Number of a node in its shard.
#[inline]
pub fn index_of(node: NodeId) -> NodeIndex {
    node / SHARDS as u32
}

/// Number of a node over all shards.
#[inline]
pub fn node_id(shard: usize, index: NodeIndex) -> NodeId {
    index * SHARDS as u32 + shard as u32
}

/// All nodes.
#[derive(Debug)]
pub struct Nodes {
    shards: Vec<Slab<NodeEntry>>,
}

impl Default for Nodes {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Slab::default()).collect() }
    }
}

impl Nodes {
    pub fn get(&self, node: NodeId) -> Option<&NodeEntry> {
        self.shards[shard_of(node)].get(index_of(node))
    }

    pub fn insert(&mut self, shard: usize, entry: NodeEntry) -> NodeId {
        let parent = entry.parent;
        let node = node_id(shard, self.shards[shard].insert(entry));
        self.link(node, parent);
        node
    }

    pub fn remove(&mut self, node: NodeId) -> NodeEntry {
        self.unlink(node);
        self.shards[shard_of(node)].remove(index_of(node))
    }

    /// Puts a node under another parent.
    pub fn reparent(&mut self, node: NodeId, parent: NodeId) {
        self.unlink(node);
        self[node].parent = parent;
        self.link(node, parent);
    }

    pub fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let first = self[node].first_child;
        std::iter::successors((first != 0).then_some(first), |&child| {
            let next = self[child].next;
            (next != 0).then_some(next)
        })
    }

    fn link(&mut self, node: NodeId, parent: NodeId) {
        if parent == 0 {
            return;
        }
        let next = std::mem::replace(&mut self[parent].first_child, node);
        self[node].next = next;
        if next != 0 {
            self[next].previous = node;
        }
    }

    fn unlink(&mut self, node: NodeId) {
        let entry = &mut self[node];
        let parent = entry.parent;
        let next = std::mem::take(&mut entry.next);
        let previous = std::mem::take(&mut entry.previous);
        if next != 0 {
            self[next].previous = previous;
        }
        if previous != 0 {
            self[previous].next = next;
        } else if parent != 0 {
            self[parent].first_child = next;
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &NodeEntry)> {
        self.shards
            .iter()
            .enumerate()
            .flat_map(|(shard, slab)| slab.iter().map(move |(index, entry)| (node_id(shard, index), entry)))
    }

    /// Heap memory, in bytes. O(nodes).
    pub fn bytes(&self) -> usize {
        self.shards
            .iter()
            .map(|slab| slab.bytes() + slab.iter().map(|(_, entry)| entry.bytes()).sum::<usize>())
            .sum()
    }
}

impl std::ops::Index<NodeId> for Nodes {
    type Output = NodeEntry;

    #[inline]
    fn index(&self, node: NodeId) -> &NodeEntry {
        &self.shards[shard_of(node)][index_of(node)]
    }
}

impl std::ops::IndexMut<NodeId> for Nodes {
    #[inline]
    fn index_mut(&mut self, node: NodeId) -> &mut NodeEntry {
        &mut self.shards[shard_of(node)][index_of(node)]
    }
}
