//! The writer's state, and what every step of it ends with: `store`, `remove` and `bindings` change content, `chain`
//! and `hanging` where it is, `reach` what queries see of it.
//!
//! A step that changes what a worker holds notes the presence in `dirty`; `finish` then brings the trie in
//! step: it recomputes the reach of every dirty presence, goes on to the presences below where one became
//! rooted or hidden, and takes out of the trie what nobody needs any more (`doubtful`). Between steps the
//! trie may show a reach that is too short, never one that is too long.

use std::sync::Arc;

use hashbrown::HashMap;

use super::nodes::{Nodes, index_of, shard_of};
use super::predictions::Predictions;
use super::presence::Presence;
use super::totals::Totals;
use super::trie::Trie;
use super::types::{NodeId, PresenceId, SLICE, TIERS};
use super::waiting;
use super::worker::Worker;

/// Where a chain goes on: below a block, or at the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tip {
    /// 0: the root.
    pub node: NodeId,
    /// Offset in the node after the last block.
    pub next: u32,
}

pub const ROOT: Tip = Tip { node: 0, next: 0 };

/// Everything but the queries' side.
#[derive(Debug)]
pub struct Ledger {
    pub trie: Arc<Trie>,
    /// There is a bound: workers keep in order what it may take.
    pub is_bounded: bool,
    pub nodes: Nodes,
    /// By slot; a slot is one content of a worker rank, from its birth to when it was drained.
    pub workers: Vec<Option<Box<Worker>>>,
    pub totals: Totals,
    /// Distinct blocks held by any worker.
    pub blocks: u64,
    pub predictions: Predictions,
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
            totals: Totals::default(),
            blocks: 0,
            predictions: Predictions::default(),
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
        let worker = self.workers[slot as usize].as_deref_mut().expect("a slot in use");
        if !worker.is_touched {
            worker.is_touched = true;
            self.totals.touch(slot);
        }
        worker
    }

    #[inline]
    pub fn part(&self, slot: u32, presence: PresenceId) -> &Presence {
        &self.worker(slot).presences[presence]
    }

    #[inline]
    pub fn part_mut(&mut self, slot: u32, presence: PresenceId) -> &mut Presence {
        &mut self.worker_mut(slot).presences[presence]
    }

    /// Ends an operation: the trie is in step and has nothing that nobody needs.
    ///
    /// Below a block that came back more may be left to be rooted than one operation does: see `root_slice`.
    pub fn finish(&mut self) {
        self.finish_within(&mut SLICE.clone());
    }

    /// The same, rooting no more presences than a budget, which it reduces.
    pub fn finish_within(&mut self, rooting: &mut usize) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for &(slot, presence) in &dirty {
            self.refresh(slot, presence);
            self.measure(slot, presence);
        }
        for slot in dirty.drain(..).map(|(slot, _)| slot) {
            if !self.worker(slot).dropped {
                *rooting -= self.root_slice(slot, *rooting);
            }
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
                    self.measure(slot, presence);
                }
                self.nodes.measure(node);
                waiting::write(self.trie.shard(shard_of(node)))
                    .change(index_of(node), |run| run.truncate(live));
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
}
