//! Where a worker's presences hang: below one another, as nodes do, or detached where the node above has none.
//!
//! They have links of their own, although those of the nodes would lead to them as well: below a prompt that all share
//! hang 100,000 nodes, of which a worker has ten, and whoever finds it whole or cut has to go to those ten only. The
//! links cost 12 bytes a presence, and no time that shows: small events without them took as long. Which presence is
//! above one is said by the nodes: so all that hang below one move at once, however many they are.

use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::presence::Presence;
use super::types::{NO_BIT, NodeId, PresenceId, TIERS};
use super::worker::MAX_PRESENCES;

impl Ledger {
    /// The worker's presence in a node, made if need be.
    pub fn presence(&mut self, slot: u32, node: NodeId) -> PresenceId {
        if let Some(presence) = self.nodes[node].presence(slot) {
            return presence;
        }
        let entry = &self.nodes[node];
        let (end, part) = (entry.end, Presence { node, start: entry.start, ..Presence::default() });
        let worker = self.worker_mut(slot);
        let presence = worker.presences.insert(part);
        assert!(presence <= MAX_PRESENCES, "a worker has blocks in more than {MAX_PRESENCES} runs");
        if let Some(first) = worker.detached.remove(&end) {
            worker.presences[presence].first_child = first;
        }
        self.nodes[node].set_presence(slot, presence);
        self.hang(slot, presence, self.nodes[node].parent);
        presence
    }

    /// Drops a presence that needs no block; those below it are detached from then on.
    pub fn drop_presence(&mut self, slot: u32, presence: PresenceId) {
        self.refresh(slot, presence);
        let node = self.part(slot, presence).node;
        self.disown_children(slot, presence, node);
        self.unhang(slot, presence, self.nodes[node].parent);
        self.nodes[node].drop_presence(slot);
        self.nodes.measure(node);
        self.worker_mut(slot).remove_presence(presence);
        self.doubt(node);
    }

    /// The worker's presence in the node above that of a presence; 0: there is none, or the node begins a prompt.
    pub fn above(&self, slot: u32, presence: PresenceId) -> PresenceId {
        let parent = self.nodes[self.part(slot, presence).node].parent;
        if parent == 0 { 0 } else { self.nodes[parent].presence(slot).unwrap_or(0) }
    }

    /// Hangs a presence, which hangs nowhere, below the worker's presence in a node, or notes that there is none.
    pub fn hang(&mut self, slot: u32, presence: PresenceId, node_above: NodeId) {
        if node_above == 0 {
            return;
        }
        let entry = &self.nodes[node_above];
        let (above, end) = (entry.presence(slot), entry.end);
        let worker = self.worker_mut(slot);
        let next = match above {
            Some(above) => std::mem::replace(&mut worker.presences[above].first_child, presence),
            None => worker.detached.insert(end, presence).unwrap_or(0),
        };
        let part = &mut worker.presences[presence];
        (part.previous, part.next) = (0, next);
        if next != 0 {
            worker.presences[next].previous = presence;
        }
    }

    /// Takes a presence away from where `hang` put it.
    pub fn unhang(&mut self, slot: u32, presence: PresenceId, node_above: NodeId) {
        if node_above == 0 {
            return;
        }
        let entry = &self.nodes[node_above];
        let (above, end) = (entry.presence(slot), entry.end);
        let worker = self.worker_mut(slot);
        let part = &mut worker.presences[presence];
        let (previous, next) = (std::mem::take(&mut part.previous), std::mem::take(&mut part.next));
        if let Some(above) = above {
            worker.unrooted.skip(above, presence, next);
        }
        if next != 0 {
            worker.presences[next].previous = previous;
        }
        if previous != 0 {
            worker.presences[previous].next = next;
        } else if let Some(above) = above {
            worker.presences[above].first_child = next;
        } else if next != 0 {
            worker.detached.insert(end, next);
        } else {
            worker.detached.remove(&end);
        }
    }

    /// The presences below one, until another; 0: all.
    pub fn children_until(
        &self,
        slot: u32,
        presence: PresenceId,
        end: PresenceId,
    ) -> impl Iterator<Item = PresenceId> + '_ {
        let parts = &self.worker(slot).presences;
        let first = parts[presence].first_child;
        let before_end = move |child: PresenceId| (child != 0 && child != end).then_some(child);
        std::iter::successors(before_end(first), move |&child| before_end(parts[child].next))
    }

    /// Makes the presences below one detached children of a node.
    pub fn disown_children(&mut self, slot: u32, presence: PresenceId, node: NodeId) {
        let end = self.nodes[node].end;
        let worker = self.worker_mut(slot);
        worker.unrooted.forget(presence);
        let first = std::mem::take(&mut worker.presences[presence].first_child);
        if first != 0 {
            worker.detached.insert(end, first);
        }
    }

    /// Takes content of a hidden slot out of the trie, about `budget` blocks; returns how many it took.
    pub fn drain(&mut self, slot: u32, budget: usize) -> usize {
        let mut taken = 0;
        while taken < budget && !self.worker(slot).presences.is_empty() {
            let worker = self.worker_mut(slot);
            // Splits may still add presences, above as well.
            let presence =
                if worker.drain_next == 0 { worker.presences.highest() } else { worker.drain_next };
            worker.drain_next = presence - 1;
            if worker.presences.get(presence).is_some() {
                taken += self.drain_presence(slot, presence);
            }
        }
        self.finish();
        taken
    }

    fn drain_presence(&mut self, slot: u32, presence: PresenceId) -> usize {
        let node = self.part(slot, presence).node;
        self.disown_children(slot, presence, node);
        self.unhang(slot, presence, self.nodes[node].parent);
        let part = std::mem::take(self.part_mut(slot, presence));
        self.part_mut(slot, presence).measured = part.measured;
        let bits = self.worker(slot).bits;
        let bits = bits.into_iter().filter(|&bit| bit != NO_BIT).map(|bit| (bit, 0));
        self.trie.set_reach(shard_of(part.node), index_of(part.node), bits);
        let entry = &mut self.nodes[part.node];
        let mut taken = 0;
        let end = part.bound.end().max(part.more.as_ref().map_or(0, |more| more.predicted.end()));
        for (offset, refs) in (0..end).zip(entry.refs.iter_mut()) {
            if part.pins(offset) {
                refs.pins -= 1;
                taken += 1;
            }
            if part.level(offset) < TIERS {
                refs.held -= 1;
                self.blocks -= u64::from(refs.held == 0);
            }
        }
        entry.drop_presence(slot);
        for id in part.more.iter().flat_map(|more| more.prediction.iter()).copied().filter(|&id| id != 0) {
            self.predictions.remove(id);
        }
        self.worker_mut(slot).remove_presence(presence);
        self.doubt(part.node);
        taken
    }
}
