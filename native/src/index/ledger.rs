//! The writer's state and its structural steps; `store` changes content with them.
//!
//! A step that changes what a worker holds notes the presence in `dirty`; `finish` then brings the trie in
//! step: it recomputes the reach of every dirty presence, goes on to the presences below where one became
//! rooted or hidden, and takes out of the trie what nobody needs any more (`doubtful`). Between steps the
//! trie may show a reach that is too short, never one that is too long.

use std::hint::black_box;
use std::sync::Arc;

use hashbrown::HashMap;

use super::nodes::{NodeEntry, Nodes, Refs, index_of, node_id, shard_of};
use super::presence::Presence;
use super::run::Run;
use super::trie::{self, Node, Trie};
use super::waiting;
use super::worker::{LEVELS, MAX_PRESENCES, NO_SEAT, NodeId, PresenceId, TIERS, Worker};
use crate::slab::Slab;
use smallvec::{SmallVec, smallvec};

/// Where a chain goes on: below a block, or at the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tip {
    /// 0: the root.
    pub node: NodeId,
    /// Offset in the node after the last block.
    pub next: u32,
}

pub const ROOT: Tip = Tip { node: 0, next: 0 };

/// Runs shorter than this grow, whatever has to be copied for it.
const GROWING: u32 = 256;

/// Longest run.
const MAX: usize = trie::MAX_RUN as usize;

/// One prediction.
#[derive(Debug, Clone, Copy)]
pub struct Prediction {
    pub slot: u32,
    pub presence: PresenceId,
    pub depth: u32,
    pub expiry: f64,
    pub serial: u64,
}

/// Everything but the queries' side.
#[derive(Debug)]
pub struct Ledger {
    pub trie: Arc<Trie>,
    /// There is a bound: workers keep in order what it may take.
    pub is_bounded: bool,
    pub nodes: Nodes,
    /// By slot; a slot is one content of a worker rank, from its birth to when it was drained.
    pub workers: Vec<Option<Box<Worker>>>,
    /// Distinct blocks held by any worker.
    pub blocks: u64,
    pub predictions: Slab<Prediction>,
    /// Predictions of workers that are not dropped.
    pub live_predictions: u64,
    /// Where the chain that is being stored stands; splits keep it right.
    pub tip: Tip,
    /// The chain's tip while another block is placed.
    pub side_tip: Option<Tip>,
    /// (node, offset) → the engine hash that was bound there until the event in hand removed it.
    pub names_gone: HashMap<(NodeId, u32), u64>,
    /// Entries that came back after the bound had dropped them, since that was asked last.
    pub restored: usize,
    /// Presences whose reach may be wrong.
    pub dirty: Vec<(u32, PresenceId)>,
    /// Nodes that may have a tail that nobody needs.
    pub doubtful: Vec<NodeId>,
}

impl Ledger {
    pub fn new(trie: Arc<Trie>, is_bounded: bool) -> Self {
        Self {
            trie,
            is_bounded,
            nodes: Nodes::default(),
            workers: Vec::new(),
            blocks: 0,
            predictions: Slab::default(),
            live_predictions: 0,
            tip: ROOT,
            side_tip: None,
            names_gone: HashMap::new(),
            restored: 0,
            dirty: Vec::new(),
            doubtful: Vec::new(),
        }
    }

    #[inline]
    pub fn worker(&self, slot: u32) -> &Worker {
        self.workers[slot as usize].as_deref().expect("a slot in use")
    }

    #[inline]
    pub fn worker_mut(&mut self, slot: u32) -> &mut Worker {
        self.workers[slot as usize].as_deref_mut().expect("a slot in use")
    }

    #[inline]
    pub fn part(&self, slot: u32, presence: PresenceId) -> &Presence {
        &self.worker(slot).presences[presence]
    }

    #[inline]
    pub fn part_mut(&mut self, slot: u32, presence: PresenceId) -> &mut Presence {
        &mut self.worker_mut(slot).presences[presence]
    }

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

    /// Hangs a presence, which hangs nowhere, under the one in a node, or notes that there is none.
    fn hang_under_node(&mut self, slot: u32, presence: PresenceId, parent: NodeId) {
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

    fn hang(&mut self, slot: u32, presence: PresenceId, parent: PresenceId) {
        let parts = &mut self.worker_mut(slot).presences;
        let next = std::mem::replace(&mut parts[parent].first_child, presence);
        let part = &mut parts[presence];
        (part.parent, part.previous, part.next) = (parent, 0, next);
        if next != 0 {
            parts[next].previous = presence;
        }
    }

    /// Takes a presence away from the one above it, or from the detached ones of the node above.
    fn unhang(&mut self, slot: u32, presence: PresenceId, node_above: NodeId) {
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

    fn children_of(&self, slot: u32, presence: PresenceId) -> Vec<PresenceId> {
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

    /// Makes the presences below one detached children of a node.
    fn disown_children(&mut self, slot: u32, presence: PresenceId, node: NodeId) {
        let children = self.children_of(slot, presence);
        if children.is_empty() {
            return;
        }
        self.part_mut(slot, presence).first_child = 0;
        for child in children {
            self.detach(slot, child, node);
        }
    }

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
                waiting::upgrade(held).nodes[parent].extend(&local[..blocks]);
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
        let children: Vec<NodeId> = self.nodes.children(node).collect();
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
            self.rename_detached(node, tail);
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
        if self.doubtful.contains(&node) {
            self.doubtful.extend([head, tail]);
        }
        head
    }

    fn rename_detached(&mut self, from: NodeId, to: NodeId) {
        for worker in self.workers.iter_mut().flatten() {
            if let Some(children) = worker.detached.remove(&from) {
                worker.detached.insert(to, children);
            }
        }
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
            self.hang_under_node(slot, presence, head);
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
            let children = self.children_of(slot, first);
            let parts = &mut self.worker_mut(slot).presences;
            for &child in &children {
                parts[child].parent = second;
            }
            parts[second].first_child = std::mem::take(&mut parts[first].first_child);
        } else {
            self.unhang(slot, second, above);
            self.hang_under_node(slot, first, above);
        }
        self.hang(slot, second, first);
        if self.is_bounded {
            self.worker_mut(slot).note_idle_part(other, 0);
        }
    }

    /// Brings the reach of a presence in step with what it holds, and of those below where that matters.
    pub fn refresh(&mut self, slot: u32, presence: PresenceId) {
        if self.worker(slot).filling.is_some() {
            self.refresh_above(slot, presence);
        }
        for level in self.worker(slot).levels() {
            let mut pending: SmallVec<[PresenceId; 4]> = smallvec![presence];
            while let Some(presence) = pending.pop() {
                if self.refresh_one(slot, level, presence) {
                    pending.extend(self.children_of(slot, presence));
                }
                if self.is_bounded {
                    self.worker_mut(slot).note_unmatchable(presence);
                }
            }
        }
    }

    /// The same on one level; whether those below became rooted or hidden.
    fn refresh_one(&mut self, slot: u32, level: usize, presence: PresenceId) -> bool {
        let worker = self.worker(slot);
        let Some(part) = worker.presences.get(presence) else { return false };
        let (node, before, prefix) = (part.node, part.reach_on(level), part.prefix_on(level));
        if prefix == 0 && before == 0 {
            return false;
        }
        let entry = &self.nodes[node];
        let rooted = || {
            entry.parent == 0
                || part.parent != 0 && {
                    let above = &worker.presences[part.parent];
                    above.reach_on(level) == self.nodes[above.node].len()
                }
        };
        let reach = if prefix > 0 && rooted() { prefix } else { 0 };
        if reach == before {
            return false;
        }
        let (len, seat) = (entry.len(), worker.seats[level]);
        let worker = self.worker_mut(slot);
        worker.presences[presence].set_reach_on(level, reach);
        worker.rooted[level] = worker.rooted[level] + u64::from(reach) - u64::from(before);
        if self.is_bounded {
            let round = self.trie.round();
            self.worker_mut(slot).note_idle(level, presence, before, round);
        }
        self.trie.set_reach(shard_of(node), index_of(node), [(seat, reach)]);
        (reach == len) != (before == len)
    }

    /// Ends an operation: the trie is in step and has nothing that nobody needs.
    pub fn finish(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for (slot, presence) in dirty.drain(..) {
            self.refresh(slot, presence);
        }
        self.dirty = dirty;
        let mut doubtful = std::mem::take(&mut self.doubtful);
        for node in doubtful.drain(..) {
            self.prune(node);
        }
        self.doubtful = doubtful;
    }

    /// Takes blocks that nobody needs off the end of a node, then of those above.
    fn prune(&mut self, mut node: NodeId) {
        while node != 0 {
            let Some(entry) = self.nodes.get(node) else { return };
            if entry.first_child != 0 {
                return;
            }
            let len = entry.len();
            let live = entry.refs.iter().rposition(|refs| refs.pins > 0).map_or(0, |last| last as u32 + 1);
            if live == len {
                return;
            }
            if live > 0 {
                let entry = &mut self.nodes[node];
                entry.refs.truncate(live as usize);
                for (slot, presence) in entry.presences.clone() {
                    let part = self.part_mut(slot, presence);
                    part.own.truncate(live as usize);
                    if let Some(more) = &mut part.more {
                        more.prediction.truncate(live as usize);
                    }
                }
                waiting::write(self.trie.shard(shard_of(node))).nodes[index_of(node)].truncate(live);
                return;
            }
            let entry = self.nodes.remove(node);
            self.trie.detach(shard_of(node), index_of(node));
            node = entry.parent;
        }
    }

    /// Notes a node that may have a tail that nobody needs.
    pub fn doubt(&mut self, node: NodeId) {
        if self.doubtful.last() != Some(&node) {
            self.doubtful.push(node);
        }
    }

    /// Counts a worker that needs a block, or no longer.
    pub fn pin(&mut self, node: NodeId, offset: u32, pinned: bool) {
        let pins = &mut self.nodes[node].refs[offset as usize].pins;
        if pinned {
            *pins += 1;
        } else {
            *pins -= 1;
            if *pins == 0 {
                self.doubt(node);
            }
        }
    }

    /// Counts a worker that holds a block on any tier, or no longer.
    pub fn count_held(&mut self, slot: u32, node: NodeId, offset: u32, held: bool) {
        let count = &mut self.nodes[node].refs[offset as usize].held;
        if held {
            *count += 1;
            self.blocks += u64::from(*count == 1);
            self.worker_mut(slot).held += 1;
        } else {
            *count -= 1;
            self.blocks -= u64::from(*count == 0);
            self.worker_mut(slot).held -= 1;
        }
    }

    /// Puts a block on tiers, as its sets tell them, and counts it.
    pub fn set_tiers(&mut self, slot: u32, presence: PresenceId, offset: u32, tiers: [bool; TIERS]) {
        let part = self.part_mut(slot, presence);
        let before = part.level(offset) < TIERS;
        for (tier, on) in tiers.into_iter().enumerate() {
            if on {
                part.tier_mut(tier).insert(offset);
            } else if part.on_tier(tier, offset) {
                part.tier_mut(tier).remove(offset);
            }
        }
        let node = part.node;
        let held = tiers.contains(&true);
        if held != before {
            self.count_held(slot, node, offset, held);
        }
        self.mark(slot, presence);
    }

    /// Notes that the reach of a presence may be wrong.
    pub fn mark(&mut self, slot: u32, presence: PresenceId) {
        if self.dirty.last() != Some(&(slot, presence)) {
            self.dirty.push((slot, presence));
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

    /// Gives a worker's level a seat, which `fill` computes.
    ///
    /// Nothing is on the level yet that is not on a faster one, which answers for it until then.
    pub fn open_level(&mut self, slot: u32, level: usize, seat: u32) {
        debug_assert!(level < LEVELS);
        let worker = self.worker_mut(slot);
        worker.seats[level] = seat;
        if !worker.presences.is_empty() {
            worker.filling = Some(0);
        }
    }

    /// Computes the reach of about `budget` presences on levels that were opened; how many it looked at.
    pub fn fill(&mut self, slot: u32, budget: usize) -> usize {
        let mut done = 0;
        while done < budget
            && let Some(last) = self.worker(slot).filling
        {
            let presence = last + 1;
            let worker = self.worker_mut(slot);
            worker.filling = (presence <= worker.presences.highest()).then_some(presence);
            if worker.presences.get(presence).is_some() {
                done += self.refresh_above(slot, presence);
                for level in self.worker(slot).levels() {
                    self.refresh_one(slot, level, presence);
                }
            }
            done += 1;
        }
        done
    }

    /// While levels are filled, a presence's reach follows from that of those above only once they are; how many.
    fn refresh_above(&mut self, slot: u32, presence: PresenceId) -> usize {
        let mut above: SmallVec<[PresenceId; 16]> = SmallVec::new();
        let mut step = self.part(slot, presence).parent;
        while step != 0 && !self.is_full(slot, step) {
            above.push(step);
            step = self.part(slot, step).parent;
        }
        for &presence in above.iter().rev() {
            for level in self.worker(slot).levels() {
                self.refresh_one(slot, level, presence);
            }
        }
        above.len()
    }

    /// Whether a presence reaches the end of its node on every level, and so do all above it.
    fn is_full(&self, slot: u32, presence: PresenceId) -> bool {
        let worker = self.worker(slot);
        let part = &worker.presences[presence];
        let len = self.nodes[part.node].len();
        worker.levels().all(|level| part.reach_on(level) == len)
    }
}
