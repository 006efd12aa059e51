//! Where a worker's presences hang: below one another, as nodes do, or detached where the node above has none.
//!
//! They have links of their own, although those of the nodes would lead to them as well: below a prompt that all share
//! hang 100,000 nodes, of which a worker has ten, and whoever finds it whole or cut has to go to those ten only. The
//! links cost 12 bytes a presence, and no time that shows: small events without them took as long.

use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::presence::Presence;
use super::worker::{MAX_PRESENCES, NO_SEAT, NodeId, PresenceId, TIERS};

impl Ledger {
    /// The worker's presence in a node, made if need be.
    pub fn presence(&mut self, slot: u32, node: NodeId) -> PresenceId {
        if let Some(presence) = self.nodes[node].presence(slot) {
            return presence;
        }
        let entry = &self.nodes[node];
        let part = Presence { node, start: entry.start, ..Presence::default() };
        let worker = self.worker_mut(slot);
        let presence = worker.presences.insert(part);
        assert!(presence <= MAX_PRESENCES, "a worker has blocks in more than {MAX_PRESENCES} runs");
        if let Some(first) = worker.detached.remove(&node) {
            for child in self.siblings_from(slot, first) {
                self.hang(slot, child, presence);
            }
        }
        self.nodes[node].set_presence(slot, presence);
        self.hang_under_node(slot, presence, self.nodes[node].parent);
        presence
    }

    /// Drops a presence that needs no block; those below it are detached from then on.
    pub fn drop_presence(&mut self, slot: u32, presence: PresenceId) {
        self.refresh(slot, presence);
        let node = self.part(slot, presence).node;
        self.disown_children(slot, presence, node);
        self.unhang(slot, presence, self.nodes[node].parent);
        self.nodes[node].drop_presence(slot);
        self.worker_mut(slot).presences.remove(presence);
        self.doubt(node);
    }

    /// Hangs a presence, which hangs nowhere, under the one in a node, or notes that there is none.
    pub fn hang_under_node(&mut self, slot: u32, presence: PresenceId, parent: NodeId) {
        if parent == 0 {
            return;
        }
        match self.nodes[parent].presence(slot) {
            Some(above) => self.hang(slot, presence, above),
            None => self.detach(slot, presence, parent),
        }
    }

    /// Notes a presence whose node's parent has none: siblings are linked as below a presence.
    fn detach(&mut self, slot: u32, presence: PresenceId, parent: NodeId) {
        let worker = self.worker_mut(slot);
        let next = worker.detached.insert(parent, presence).unwrap_or(0);
        let part = &mut worker.presences[presence];
        (part.parent, part.previous, part.next) = (0, 0, next);
        if next != 0 {
            worker.presences[next].previous = presence;
        }
    }

    pub fn hang(&mut self, slot: u32, presence: PresenceId, parent: PresenceId) {
        let parts = &mut self.worker_mut(slot).presences;
        let next = std::mem::replace(&mut parts[parent].first_child, presence);
        let part = &mut parts[presence];
        (part.parent, part.previous, part.next) = (parent, 0, next);
        if next != 0 {
            parts[next].previous = presence;
        }
    }

    /// Takes a presence away from the one above it, or from the detached ones of the node above.
    pub fn unhang(&mut self, slot: u32, presence: PresenceId, node_above: NodeId) {
        let worker = self.worker_mut(slot);
        let part = &mut worker.presences[presence];
        let (parent, previous, next) = (part.parent, part.previous, part.next);
        (part.parent, part.previous, part.next) = (0, 0, 0);
        if next != 0 {
            worker.presences[next].previous = previous;
        }
        if previous != 0 {
            worker.presences[previous].next = next;
        } else if parent != 0 {
            worker.presences[parent].first_child = next;
        } else if next != 0 {
            worker.detached.insert(node_above, next);
        } else {
            worker.detached.remove(&node_above);
        }
    }

    pub fn children_of(&self, slot: u32, presence: PresenceId) -> Vec<PresenceId> {
        self.siblings_from(slot, self.part(slot, presence).first_child)
    }

    fn siblings_from(&self, slot: u32, first: PresenceId) -> Vec<PresenceId> {
        let parts = &self.worker(slot).presences;
        std::iter::successors((first != 0).then_some(first), |&child| {
            let next = parts[child].next;
            (next != 0).then_some(next)
        })
        .collect()
    }

    /// Makes the presences below one detached children of a node.
    pub fn disown_children(&mut self, slot: u32, presence: PresenceId, node: NodeId) {
        let children = self.children_of(slot, presence);
        if children.is_empty() {
            return;
        }
        self.part_mut(slot, presence).first_child = 0;
        for child in children {
            self.detach(slot, child, node);
        }
    }

    pub fn rename_detached(&mut self, from: NodeId, to: NodeId) {
        for worker in self.workers.iter_mut().flatten() {
            if let Some(children) = worker.detached.remove(&from) {
                worker.detached.insert(to, children);
            }
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
        let seats = self.worker(slot).seats;
        let seats = seats.into_iter().filter(|&seat| seat != NO_SEAT).map(|seat| (seat, 0));
        self.trie.set_reach(shard_of(part.node), index_of(part.node), seats);
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
        self.worker_mut(slot).presences.remove(presence);
        self.doubt(part.node);
        taken
    }
}
