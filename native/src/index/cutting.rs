//! One consistent cut of a worker rank: its content copied out in slices, put in order beside the lock.
//!
//! ```text
//! step  ── one presence after the other ──▶ node_parts: a node's hashes, what is held of it, the node_part above it
//! dump  ── node_parts, depth first ──▶ WorkerDump
//! ```
//!
//! Whatever is to change on the worker first has what is left copied. Writes of other workers go on between the
//! slices: they may cut nodes in two, never change where a child hangs, which is the `end` of a node; a node that
//! is cut is copied before.

use std::sync::Arc;

use super::cut::{Cut, NodePart};
use super::directory::WorkerName;
use super::dump::{DumpedOrphan, WorkerDump};
use super::ledger::Ledger;
use super::nodes::{index_of, shard_of};
use super::state::Index;
use super::types::{NodeId, PresenceId, SLICE, TIERS};
use super::window::WindowGroups;
use hashbrown::HashSet;
use parking_lot::Mutex;

/// What copying a node_part costs beside its blocks, in blocks.
const PART_COST: usize = 8;

/// Blocks that are copied in the time in which one is stored.
const COPIED_FOR_ONE: usize = 16;

/// A cut under way, or complete; whoever has it asks for each slice.
#[derive(Debug)]
pub struct Cutting {
    slot: u32,
    cut: Arc<Mutex<Cut>>,
}

impl Cutting {
    /// The dump, once nothing is left to copy; None: the worker was emptied before.
    pub fn dump(self) -> Option<WorkerDump> {
        let cut = std::mem::take(&mut *self.cut.lock());
        cut.complete.then(|| cut.dump())
    }
}

impl Index {
    /// Begins a cut of a worker rank as it is now; None if it is not known.
    pub fn begin_cut(&self, name: WorkerName<'_>) -> Option<Cutting> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let handle = state.handle(name)?;
        let slot = state.ranks[handle].slot;
        self.complete_demotion(state, slot);
        let rank = &state.ranks[handle];
        let worker = state.ledger.worker(slot);
        let orphans = worker.orphans.iter().map(|(engine_hash, orphan)| DumpedOrphan {
            engine_hash,
            parent_engine_hash: orphan.parent,
            local_hash: orphan.local,
            counts: orphan.counts.clone(),
        });
        let cut = Cut {
            // Room for all at once: growing would copy what is there.
            node_parts: Vec::with_capacity(worker.presences.len()),
            ends: HashSet::with_capacity(worker.presences.len()),
            head: WorkerDump {
                epoch: rank.epoch,
                last_event_id: rank.last_event_id,
                groups: worker.groups.clone(),
                orphans: orphans.collect(),
                windows: worker.windows.as_ref().map(|windows| windows.groups()).unwrap_or_default(),
                incompatible: rank.incompatible.clone(),
                incomplete: worker.incomplete,
                ..WorkerDump::default()
            },
            full_groups: worker.full_groups.to_vec(),
            ..Cut::default()
        };
        let cut = Arc::new(Mutex::new(cut));
        state.ledger.worker_mut(slot).cuts.push(Arc::clone(&cut));
        Some(Cutting { slot, cut })
    }

    /// Copies a slice; whether more is left.
    pub fn copy_slice(&self, cutting: &Cutting) -> bool {
        let mut state = self.state.lock();
        let Some(place) = state.ledger.place_of(cutting) else { return false };
        let more = state.ledger.copy_parts(cutting.slot, &cutting.cut, COPIED_FOR_ONE * SLICE);
        if !more {
            state.ledger.worker_mut(cutting.slot).cuts.swap_remove(place);
        }
        more
    }

    /// Gives up a cut.
    pub fn end_cut(&self, cutting: &Cutting) {
        let mut state = self.state.lock();
        if let Some(place) = state.ledger.place_of(cutting) {
            state.ledger.worker_mut(cutting.slot).cuts.swap_remove(place);
        }
    }

    /// One consistent cut of a worker rank, slice by slice; None if it is not known.
    pub fn dump(&self, name: WorkerName<'_>) -> Option<WorkerDump> {
        let cutting = self.begin_cut(name)?;
        while self.copy_slice(&cutting) {}
        cutting.dump()
    }
}

impl Ledger {
    fn place_of(&self, cutting: &Cutting) -> Option<usize> {
        let worker = self.workers[cutting.slot as usize].as_deref()?;
        worker.cuts.iter().position(|cut| Arc::ptr_eq(cut, &cutting.cut))
    }

    /// Completes every cut of a worker, because it is about to change.
    pub fn complete_cuts(&mut self, slot: u32) {
        for cut in std::mem::take(&mut self.worker_mut(slot).cuts) {
            self.copy_parts(slot, &cut, usize::MAX);
        }
    }

    /// Copies a node that is about to be cut in two, for all who may have to.
    pub fn copy_before_split(&self, node: NodeId) {
        for &(slot, presence) in &self.nodes[node].presences {
            for cut in &self.worker(slot).cuts {
                self.copy_presence(slot, presence, &mut cut.lock());
            }
        }
    }

    /// Copies about so many blocks; whether more is left.
    fn copy_parts(&self, slot: u32, cut: &Mutex<Cut>, budget: usize) -> bool {
        let mut cut = cut.lock();
        let highest = self.worker(slot).presences.highest();
        let mut copied = 0;
        while copied < budget && cut.last < highest {
            cut.last += 1;
            let presence = cut.last;
            copied += 1;
            if self.worker(slot).presences.get(presence).is_some() {
                copied += self.copy_presence(slot, presence, &mut cut);
            }
        }
        let Cut { window_parts, head, .. } = &mut *cut;
        let windows = self.worker(slot).windows.as_ref();
        if let Some(windows) = windows {
            *window_parts =
                windows.copy(*window_parts, budget.saturating_sub(copied), &mut head.window_blocks);
        }
        let windows = windows.is_none() || WindowGroups::is_copied(cut.window_parts);
        cut.complete = cut.last == highest && windows;
        !cut.complete
    }

    /// Copies a presence, if it has copies, and those nodes above that were not copied; how many blocks that is.
    fn copy_presence(&self, slot: u32, presence: PresenceId, cut: &mut Cut) -> usize {
        let worker = self.worker(slot);
        let part = &worker.presences[presence];
        if !(0..part.end_of_copies()).any(|offset| worker.has_copies(presence, offset)) {
            return 0;
        }
        let mut copied = 0;
        let mut node = part.node;
        while node != 0 && cut.ends.insert(self.nodes[node].end) {
            let entry = &self.nodes[node];
            let local = self.trie.shard(shard_of(node)).read().nodes[index_of(node)].local.to_vec();
            copied += PART_COST + local.len();
            let above = self.nodes.get(entry.parent).map_or(0, |above| above.end);
            let mut node_part = NodePart {
                end: entry.end,
                above,
                local,
                own: Vec::new(),
                tiers: Default::default(),
                odd: Vec::new(),
            };
            if let Some(presence) = entry.presence(slot) {
                let part = &worker.presences[presence];
                node_part.own = part.own.to_vec();
                node_part.tiers[0] = part.device.clone();
                if let Some(more) = &part.more {
                    for tier in 1..TIERS {
                        node_part.tiers[tier] = more.lower[tier - 1].clone();
                    }
                    let odd =
                        more.odd.iter().map(|at| (at, worker.odd[&(presence, part.start + at)].clone()));
                    node_part.odd.extend(odd);
                }
            }
            cut.node_parts.push(node_part);
            node = entry.parent;
        }
        copied
    }
}
