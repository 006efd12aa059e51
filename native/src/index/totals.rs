//! What the workers of an index have together, counted as they change: whoever asks walks over nobody.
//!
//! ```text
//! worker_mut ──▶ touched [3, 17]           whom a step changed
//! settle     ──▶ each of them counted anew ──▶ sum, and the sizes by which the bound takes
//! ```

use std::collections::BTreeSet;

use super::ledger::Ledger;
use super::nodes::Nodes;
use super::types::PresenceId;
use super::worker::Worker;

/// Workers that are counted at once: some ten microseconds.
const MANY_TOUCHED: usize = 256;

/// What one worker has, or all together; of a content that no rank has (yet, or any more) the bytes only.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Workers that hold any block.
    pub holders: usize,
    /// (block, worker) pairs.
    pub held: usize,
    pub hidden: usize,
    pub orphans: usize,
    pub ghosts: usize,
    /// What the `max_blocks` bound counts, besides ghosts.
    pub entries: usize,
    pub bytes: usize,
    /// Workers with entries that no query can match.
    pub unmatchable: usize,
    /// Workers of which `maintain` has something to do, now or later.
    pub busy: usize,
}

impl Counts {
    fn of(worker: &Worker) -> Self {
        let bytes = size_of::<Worker>() + worker.bytes();
        if !worker.is_shown {
            return Self { bytes, ..Self::default() };
        }
        let orphans = worker.orphans.len();
        Self {
            holders: usize::from(worker.held > 0),
            held: worker.held as usize,
            hidden: worker.hidden() as usize,
            orphans,
            ghosts: worker.ghosts.len(),
            entries: worker.entries(),
            bytes,
            unmatchable: usize::from(orphans > 0 || !worker.idle.unmatchable.is_empty()),
            busy: usize::from(worker.has_work()),
        }
    }

    /// The sum with what is new in place of what was before.
    fn replacing(self, before: Self, now: Self) -> Self {
        Self {
            holders: self.holders + now.holders - before.holders,
            held: self.held + now.held - before.held,
            hidden: self.hidden + now.hidden - before.hidden,
            orphans: self.orphans + now.orphans - before.orphans,
            ghosts: self.ghosts + now.ghosts - before.ghosts,
            entries: self.entries + now.entries - before.entries,
            bytes: self.bytes + now.bytes - before.bytes,
            unmatchable: self.unmatchable + now.unmatchable - before.unmatchable,
            busy: self.busy + now.busy - before.busy,
        }
    }
}

/// The sums; see the module.
#[derive(Debug, Default)]
pub struct Totals {
    pub sum: Counts,
    /// (entries, slot), where there is a bound; so are the others.
    pub by_entries: BTreeSet<(usize, u32)>,
    /// (ghosts, slot)
    pub by_ghosts: BTreeSet<(usize, u32)>,
    /// (entries, slot) of workers with entries that no query can match.
    pub unmatchable: BTreeSet<(usize, u32)>,
    /// Slots of which `maintain` has something to do.
    pub busy: BTreeSet<u32>,
    touched: Vec<u32>,
}

impl Totals {
    pub fn touch(&mut self, slot: u32) {
        self.touched.push(slot);
    }

    fn replace(&mut self, slot: u32, before: Counts, now: Counts, is_bounded: bool) {
        if before == now {
            return;
        }
        self.sum = self.sum.replacing(before, now);
        match (before.busy, now.busy) {
            (0, 1) => drop(self.busy.insert(slot)),
            (1, 0) => drop(self.busy.remove(&slot)),
            _ => {}
        }
        if is_bounded {
            let all = |counts: Counts| [counts.entries, counts.ghosts, counts.unmatchable * counts.entries];
            let sets = [&mut self.by_entries, &mut self.by_ghosts, &mut self.unmatchable];
            for ((set, before), now) in sets.into_iter().zip(all(before)).zip(all(now)) {
                if before != now {
                    set.remove(&(before, slot));
                    if now > 0 {
                        set.insert((now, slot));
                    }
                }
            }
        }
    }
}

impl Ledger {
    /// Counts those anew that changed since it was done last.
    pub fn settle(&mut self) {
        while let Some(slot) = self.totals.touched.pop() {
            if let Some(worker) = self.workers[slot as usize].as_deref_mut() {
                worker.is_touched = false;
                let now = Counts::of(worker);
                let before = std::mem::replace(&mut worker.counted, now);
                self.totals.replace(slot, before, now, self.is_bounded);
            }
        }
    }

    /// The same once there are many of them: a worker that changes again and again is counted once.
    pub fn settle_many(&mut self) {
        if self.totals.touched.len() >= MANY_TOUCHED {
            self.settle();
        }
    }

    /// What all workers have together.
    pub fn counts(&mut self) -> Counts {
        self.settle();
        self.totals.sum
    }

    /// Takes a content out that was drained.
    pub fn take_worker(&mut self, slot: u32) -> Option<Worker> {
        self.settle();
        let worker = self.workers[slot as usize].take()?;
        self.totals.replace(slot, worker.counted, Counts::default(), self.is_bounded);
        Some(*worker)
    }

    /// Counts the memory of a presence and its node, if they are there, after they changed.
    pub fn measure(&mut self, slot: u32, presence: PresenceId) {
        let worker = self.worker_mut(slot);
        if let Some(part) = worker.presences.get_mut(presence) {
            let bytes = part.bytes() as u32;
            worker.parts_bytes = worker.parts_bytes + bytes as usize - part.measured as usize;
            part.measured = bytes;
            let node = part.node;
            self.nodes.measure(node);
        }
    }

    /// Verifies that what is counted is what a walk finds.
    pub fn check_totals(&self) -> Result<(), String> {
        let workers = self.workers.iter().flatten();
        let walked = workers
            .clone()
            .fold(Counts::default(), |sum, worker| sum.replacing(Counts::default(), Counts::of(worker)));
        let parts: usize = workers.clone().map(|worker| worker.parts_bytes).sum();
        let walked_parts: usize =
            workers.flat_map(|worker| worker.presences.iter()).map(|(_, presence)| presence.bytes()).sum();
        for (what, counted, walked) in [
            ("workers", self.totals.sum, walked),
            ("presences", Counts { bytes: parts, ..walked }, Counts { bytes: walked_parts, ..walked }),
            (
                "nodes",
                Counts { bytes: self.nodes.bytes(), ..walked },
                Counts { bytes: self.nodes.walked_bytes(), ..walked },
            ),
            (
                "runs",
                Counts { bytes: self.trie.bytes(), ..walked },
                Counts { bytes: self.trie.walked_bytes(), ..walked },
            ),
        ] {
            if counted != walked {
                return Err(format!("{what} are counted: {counted:?}, not {walked:?}"));
            }
        }
        Ok(())
    }
}

impl Nodes {
    /// Counts the memory of a node, if it is there, after it changed.
    pub fn measure(&mut self, node: super::types::NodeId) {
        if let Some(entry) = self.get_mut(node) {
            let bytes = entry.bytes() as u32;
            let before = std::mem::replace(&mut entry.measured, bytes);
            self.heap = self.heap + bytes as usize - before as usize;
        }
    }
}
