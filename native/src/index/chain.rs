//! The way of a chain through the nodes: along their runs, which grow, are cut in two and made.

use super::ledger::{Ledger, Tip};
use super::nodes::{NodeEntry, Refs, index_of, node_id, shard_of};
use super::run::Run;
use super::trie::{Node, Trie};
use super::types::{NodeId, PresenceId};
use super::{trie, waiting};
use std::hint::black_box;

/// Runs shorter than this grow, whatever has to be copied for it.
const GROWING: u32 = 256;

/// Longest run.
const MAX: usize = trie::MAX_RUN as usize;

impl Ledger {
    /// Finds or makes the next blocks of a chain, from the tip, and moves it.
    ///
    /// Returns the node, the offset of the first block and how many there are, at least 1.
    pub fn advance(&mut self, slot: u32, local: &[u64]) -> (NodeId, u32, u32) {
        let Tip { node, next } = self.tip;
        let (node, offset, blocks) = if node == 0 {
            self.descend(slot, Trie::shard_of(local[0]), 0, local)
        } else if next < self.nodes[node].len() {
            let same = {
                let shard = self.trie.shard(shard_of(node)).read();
                trie::common_prefix(&shard.nodes[index_of(node)].local[next as usize..], local)
            };
            if same > 0 {
                (node, next, same as u32)
            } else {
                let head = self.split(node, next);
                self.descend(slot, shard_of(node), head, local)
            }
        } else {
            self.descend(slot, shard_of(node), node, local)
        };
        self.tip = Tip { node, next: offset + blocks };
        (node, offset, blocks)
    }

    /// The same below the end of a run.
    fn descend(&mut self, slot: u32, shard: usize, above: NodeId, local: &[u64]) -> (NodeId, u32, u32) {
        let parent = if above == 0 { 0 } else { index_of(above) };
        let held = self.trie.shard(shard).upgradable_read();
        let child = held.child(parent, local[0]);
        if child != 0 {
            let same = trie::common_prefix(&held.nodes[child].local, local);
            return (node_id(shard, child), 0, same as u32);
        }
        let (mut start, mut len) = (0, 0);
        if above != 0 {
            let entry = &mut self.nodes[above];
            len = entry.len();
            // Only where nobody else has a part of it: else the others' reach would end within the run. And only
            // where few blocks have to be copied: a long run that is full goes on in a node below it.
            let spare = if len < GROWING { MAX } else { entry.refs.capacity().min(MAX) } - len as usize;
            let alone = matches!(entry.presences[..], [(only, _)] if only == slot);
            if entry.first_child == 0 && alone && spare > 0 {
                let blocks = local.len().min(spare);
                entry.refs.resize(len as usize + blocks);
                waiting::upgrade(held).change(parent, |run| run.extend(&local[..blocks]));
                return (above, len, blocks as u32);
            }
            start = entry.start;
        }
        let start = start + len;
        let blocks = local.len().min(MAX);
        let entry = NodeEntry {
            parent: above,
            start,
            refs: Run::of(Refs::default(), blocks),
            ..NodeEntry::default()
        };
        let node = self.nodes.insert(shard, entry);
        let run = Node::new(parent, start, Run::from(&local[..blocks]));
        black_box(held.nodes.get(index_of(node)).is_none());
        waiting::upgrade(held).attach(index_of(node), run);
        (node, 0, blocks as u32)
    }

    /// Cuts a node before an offset and returns the node of the first part.
    ///
    /// The cheaper part gets the new number: table entries of its bindings name the presence, and children
    /// name their parent.
    pub fn split(&mut self, node: NodeId, at: u32) -> NodeId {
        let entry = &self.nodes[node];
        let (len, workers) = (entry.len(), entry.presences.len());
        // No more of them than make the tail the dearer part: there may be any number.
        let most = (at as usize * workers).saturating_sub((len - at) as usize * workers) / 4;
        let children: Vec<NodeId> = self.nodes.children(node).take(most + 1).collect();
        let new_tail = (len - at) as usize * workers + 4 * children.len() <= at as usize * workers;
        let shard = shard_of(node);
        self.copy_before_split(node);
        let (head_end, tail_end) = (self.nodes.new_end(), self.nodes[node].end);
        let entry = &mut self.nodes[node];
        let (parent, start) = (entry.parent, entry.start);
        let tail_refs = entry.refs.split_off(at as usize);
        let head_refs = std::mem::replace(&mut entry.refs, tail_refs);
        let presences = std::mem::take(&mut entry.presences);
        let (head, tail);
        if new_tail {
            let refs = std::mem::replace(&mut entry.refs, head_refs);
            entry.end = head_end;
            head = node;
            tail = self.nodes.insert(
                shard,
                NodeEntry { parent: node, start: start + at, refs, end: tail_end, ..NodeEntry::default() },
            );
            for &child in &children {
                self.nodes.reparent(child, tail);
            }
            let indices: Vec<_> = children.iter().map(|&child| index_of(child)).collect();
            waiting::write(self.trie.shard(shard)).split_tail(index_of(node), at, index_of(tail), &indices);
        } else {
            entry.start = start + at;
            tail = node;
            head = self.nodes.insert(
                shard,
                NodeEntry { parent, start, refs: head_refs, end: head_end, ..NodeEntry::default() },
            );
            self.nodes.reparent(node, head);
            waiting::write(self.trie.shard(shard)).split_head(index_of(node), at, index_of(head));
        }
        for (slot, presence) in presences {
            self.worker(slot).cuts.iter().for_each(|cut| cut.lock().split(tail_end, head_end));
            self.split_presence(slot, presence, at, head, tail, parent, new_tail);
        }
        for tip in std::iter::once(&mut self.tip).chain(&mut self.side_tip) {
            if tip.node == node {
                *tip = if tip.next <= at {
                    Tip { node: head, ..*tip }
                } else {
                    Tip { node: tail, next: tip.next - at }
                };
            }
        }
        self.nodes.measure(head);
        self.nodes.measure(tail);
        if self.doubtful.contains(&node) {
            self.doubtful.extend([head, tail]);
        }
        head
    }

    /// Distributes a worker's part of a node that was cut.
    #[allow(clippy::too_many_arguments)] // the cut: where, into what, below what, which part is new
    fn split_presence(
        &mut self,
        slot: u32,
        presence: PresenceId,
        at: u32,
        head: NodeId,
        tail: NodeId,
        above: NodeId,
        new_tail: bool,
    ) {
        let start = self.nodes[head].start;
        let part = self.part(slot, presence);
        let end = part.bound.end().max(part.more.as_ref().map_or(0, |more| more.predicted.end()));
        let first = (0..at).find(|&offset| part.pins(offset));
        self.dirty.push((slot, presence));
        if end <= at {
            // All of it is in the head.
            let part = self.part_mut(slot, presence);
            part.node = head;
            part.own.truncate(at as usize);
            self.nodes[head].set_presence(slot, presence);
            self.disown_children(slot, presence, tail);
            return;
        }
        if first.is_none() {
            // All of it is in the tail.
            self.unhang(slot, presence, above);
            let part = self.part_mut(slot, presence);
            part.node = tail;
            // Its reach was 0, or the first block would be in the head.
            part.start = start + at;
            part.own = part.own.split_off(at as usize);
            part.bound = part.bound.split_off(at);
            part.device = part.device.split_off(at);
            if let Some(more) = &mut part.more {
                **more = more.split_off(at);
            }
            self.nodes[tail].set_presence(slot, presence);
            self.hang(slot, presence, head);
            return;
        }
        let other = self.worker_mut(slot).split_presence(presence, at, new_tail);
        let moved = &self.worker(slot).presences[other];
        let ids: Vec<u32> = moved
            .more
            .iter()
            .flat_map(|more| more.prediction.iter())
            .copied()
            .filter(|&id| id != 0)
            .collect();
        for id in ids {
            self.predictions[id].presence = other;
        }
        self.dirty.push((slot, other));
        let (first, second) = if new_tail { (presence, other) } else { (other, presence) };
        let parts = &mut self.worker_mut(slot).presences;
        parts[first].node = head;
        parts[second].node = tail;
        self.nodes[head].set_presence(slot, first);
        self.nodes[tail].set_presence(slot, second);
        if new_tail {
            let worker = self.worker_mut(slot);
            worker.unrooted.rename(first, second);
            let children = std::mem::take(&mut worker.presences[first].first_child);
            worker.presences[second].first_child = children;
        } else {
            self.unhang(slot, second, above);
            self.hang(slot, first, above);
        }
        self.hang(slot, second, head);
        if self.is_bounded {
            self.worker_mut(slot).note_idle_part(other, 0);
        }
    }
}
