//! The writer's side of the trie's nodes: which workers need which blocks, and the links between nodes.

use super::orphans::ORPHAN_LIMIT;
use super::run::Run;
use super::trie::{NodeIndex, SHARDS};
use super::types::{NodeId, PresenceId};
use crate::slab::Slab;
use smallvec::SmallVec;

/// Nodes of one shard: the number of one and its shard must fit into a `NodeId`.
const MAX_NODES: u32 = u32::MAX / SHARDS as u32;

/// How many workers need a block, and how many of them hold it on any tier.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Refs {
    /// Bound (demoted ones included) or predicted.
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
    /// Names the last block, and stays with it when the node is cut: children hang there.
    pub end: u64,
    /// Heap memory, as `Nodes::measure` counted it last.
    pub measured: u32,
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

    pub fn bytes(&self) -> usize {
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
    /// The `end` that was given last.
    last_end: u64,
    /// Most nodes of one shard.
    limit: u32,
    /// Heap memory of the entries.
    pub heap: usize,
}

impl Default for Nodes {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Slab::default()).collect();
        Self { shards, last_end: 0, limit: MAX_NODES, heap: 0 }
    }
}

impl Nodes {
    pub fn get(&self, node: NodeId) -> Option<&NodeEntry> {
        self.shards[shard_of(node)].get(index_of(node))
    }

    pub fn get_mut(&mut self, node: NodeId) -> Option<&mut NodeEntry> {
        self.shards[shard_of(node)].get_mut(index_of(node))
    }

    /// Whether a shard surely has room for the nodes that a chain of so many blocks may need.
    pub fn have_room(&self, shard: usize, blocks: usize) -> bool {
        // Each block may need a node, and cut another in two; orphans that it adopts may, too.
        2 * (blocks + ORPHAN_LIMIT) + self.shards[shard].len() <= self.limit as usize
    }

    #[cfg(test)]
    pub fn limit_to(&mut self, nodes: usize) {
        self.limit = (nodes + 2 * ORPHAN_LIMIT) as u32;
    }

    /// A name for the last block of a node.
    pub fn new_end(&mut self) -> u64 {
        self.last_end += 1;
        self.last_end
    }

    pub fn insert(&mut self, shard: usize, mut entry: NodeEntry) -> NodeId {
        if entry.end == 0 {
            entry.end = self.new_end();
        }
        let parent = entry.parent;
        let node = node_id(shard, self.shards[shard].insert(entry));
        self.link(node, parent);
        self.measure(node);
        node
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.shards.iter().map(Slab::len).sum()
    }

    pub fn remove(&mut self, node: NodeId) -> NodeEntry {
        self.unlink(node);
        let entry = self.shards[shard_of(node)].remove(index_of(node));
        self.heap -= entry.measured as usize;
        entry
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

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(Slab::bytes).sum::<usize>() + self.heap
    }

    /// The same, counted the slow way.
    pub fn walked_bytes(&self) -> usize {
        let entries: usize = self.iter().map(|(_, entry)| entry.bytes()).sum();
        self.shards.iter().map(Slab::bytes).sum::<usize>() + entries
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

#[cfg(test)]
mod tests {
    use super::super::{Bounds, Ignored, Index, WorkerName, WorkerOptions};
    use crate::events::{Batch, Event, Stored};

    const W: WorkerName<'_> = WorkerName { worker_id: "w", dp_rank: 0 };

    fn store(index: &Index, engine: &[u64], local: &[u64]) -> u64 {
        let mut batch = Batch::default();
        let (engine_hashes, local_hashes) = (batch.add_hashes(engine), batch.add_hashes(local));
        batch.events.push(Event::Stored(Stored {
            engine_hashes,
            local_hashes,
            full_attention: true,
            ..Stored::default()
        }));
        index.apply(W, &batch, 0, None);
        index.worker_stats(W).expect("it is known").ignored[Ignored::IndexFull as usize]
    }

    #[test]
    fn a_shard_without_numbers_for_more_nodes_refuses_blocks_and_counts_them() {
        let index = Index::new(4, false, Bounds { max_blocks: 0, max_predictions: 100, prune_ratio: 0.8 });
        index.add_worker(W, WorkerOptions::default());
        index.state.lock().ledger.nodes.limit_to(12);
        // All begin alike, so that they are in one shard; each forks off at the second block.
        let refused: Vec<u64> = (1..20).map(|n| store(&index, &[n * 10, n * 10 + 1], &[64, n])).collect();
        let first = refused.iter().position(|&refused| refused > 0).expect("it fills up");
        assert!((4..12).contains(&first), "{first}");
        assert_eq!(
            refused[first..],
            (0..refused.len() - first).map(|n| 2 * (n as u64 + 1)).collect::<Vec<_>>()
        );
        assert!(index.worker_stats(W).is_some_and(|stats| stats.incomplete));
        assert_eq!(index.incomplete(), [W.into()]);
        index.check_invariants().expect("they hold");
        assert_eq!(index.predict(W, &[64, 99], 1.0, 0.0), 0);
        // Prompts that begin in another way have numbers of their own.
        assert_eq!(store(&index, &[5], &[65]), *refused.last().expect("some"));
        assert_eq!(index.worker_stats(W).map(|stats| stats.blocks), Some(first as u64 + 2));
        index.check_invariants().expect("they hold");
        // What goes makes room.
        index.reset(W);
        while index.maintain(0.0, 1000) {}
        assert_eq!(index.incomplete(), []);
        let before = store(&index, &[10, 11], &[64, 1]);
        assert_eq!(before, *refused.last().expect("some"));
    }
}
