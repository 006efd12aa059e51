//! Which worker and level each seat belongs to, and the workers' names: what a query reads besides the trie.
//!
//! Dropping a worker's content takes its seats out of here, which hides it from all queries at once; the
//! seats are used again when the content is out of the trie.

use std::sync::Arc;

use hashbrown::{Equivalent, HashMap, HashSet};

use super::trie::Match;
use super::types::{LEVELS, NO_SEAT, PREDICTED};
use super::window::View;
use crate::slab::Slab;

/// A data-parallel rank of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerRank {
    pub worker_id: Arc<str>,
    pub dp_rank: u32,
}

/// A worker rank by borrowed name, to look it up with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WorkerName<'a> {
    pub worker_id: &'a str,
    pub dp_rank: u32,
}

impl WorkerRank {
    pub fn name(&self) -> WorkerName<'_> {
        WorkerName { worker_id: &self.worker_id, dp_rank: self.dp_rank }
    }
}

impl From<WorkerName<'_>> for WorkerRank {
    fn from(name: WorkerName<'_>) -> Self {
        Self { worker_id: Arc::from(name.worker_id), dp_rank: name.dp_rank }
    }
}

// Hashes of both agree: an `Arc<str>` hashes as the `str`.
impl Equivalent<WorkerRank> for WorkerName<'_> {
    fn equivalent(&self, rank: &WorkerRank) -> bool {
        *self == rank.name()
    }
}

/// Number of a worker rank while it is known.
pub type Handle = u32;

/// Leading blocks that one worker rank has, by level: the tiers, cumulative, and predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    pub worker: Handle,
    pub blocks: [u32; LEVELS],
}

#[derive(Debug, Clone, Copy)]
struct Seat {
    /// 0: the seat is free, or what it has is being taken out.
    worker: Handle,
    level: usize,
}

/// The seats and the names.
#[derive(Debug, Default)]
pub struct Directory {
    seats: Vec<Seat>,
    free: Vec<u32>,
    names: Slab<WorkerRank>,
    /// Seats in use on levels above the device.
    upper: usize,
    /// Of workers with window groups.
    views: HashMap<Handle, View>,
    /// Of which a limit kept something out: they may have more than is found.
    incomplete: HashSet<Handle>,
}

impl Directory {
    pub fn name(&self, worker: Handle) -> Option<&WorkerRank> {
        self.names.get(worker)
    }

    pub fn add(&mut self, name: WorkerRank) -> Handle {
        self.names.insert(name)
    }

    pub fn remove(&mut self, worker: Handle) {
        self.names.remove(worker);
    }

    /// A seat for a worker's level; of handle 0, one that no query sees.
    pub fn open(&mut self, worker: Handle, level: usize) -> u32 {
        let seat = Seat { worker, level };
        self.upper += usize::from(worker != 0 && level > 0);
        if let Some(number) = self.free.pop() {
            self.seats[number as usize] = seat;
            return number;
        }
        self.seats.push(seat);
        self.seats.len() as u32 - 1
    }

    /// Hides what seats have from now on.
    pub fn hide(&mut self, seats: &[u32; LEVELS]) {
        for &seat in seats.iter().filter(|&&seat| seat != NO_SEAT) {
            let seat = &mut self.seats[seat as usize];
            self.views.remove(&seat.worker);
            self.incomplete.remove(&seat.worker);
            self.upper -= usize::from(seat.worker != 0 && seat.level > 0);
            seat.worker = 0;
        }
    }

    /// Shows hidden seats of a worker in place of those that it had.
    pub fn replace(&mut self, old: &[u32; LEVELS], new: &[u32; LEVELS], worker: Handle) {
        self.hide(old);
        for &seat in new.iter().filter(|&&seat| seat != NO_SEAT) {
            let seat = &mut self.seats[seat as usize];
            seat.worker = worker;
            self.upper += usize::from(seat.level > 0);
        }
    }

    /// Shows what a worker's window groups hold, until its seats are hidden.
    pub fn show_windows(&mut self, worker: Handle, view: View) {
        self.views.insert(worker, view);
    }

    /// Workers with window groups.
    pub fn views(&self) -> &HashMap<Handle, View> {
        &self.views
    }

    /// Notes that a limit kept something of a worker out, until its seats are hidden.
    pub fn mark_incomplete(&mut self, worker: Handle) {
        self.incomplete.insert(worker);
    }

    /// Workers of which a limit kept something out.
    pub fn incomplete(&self) -> &HashSet<Handle> {
        &self.incomplete
    }

    /// Frees seats that have nothing any more.
    pub fn free(&mut self, seats: &[u32; LEVELS]) {
        self.free.extend(seats.iter().filter(|&&seat| seat != NO_SEAT));
    }

    /// One row a worker from what its seats have.
    pub fn rows(&self, found: &[Match], rows: &mut Vec<Row>) {
        if self.upper == 0 {
            let live = found.iter().map(|found| (self.seats[found.seat as usize].worker, found.blocks));
            rows.extend(
                live.filter(|&(worker, _)| worker != 0)
                    .map(|(worker, blocks)| Row { worker, blocks: [blocks; LEVELS] }),
            );
            return;
        }
        let mut places = vec![u32::MAX; self.names.highest() as usize + 1];
        for found in found {
            let seat = self.seats[found.seat as usize];
            if seat.worker == 0 {
                continue;
            }
            let place = &mut places[seat.worker as usize];
            if *place == u32::MAX {
                *place = rows.len() as u32;
                rows.push(Row { worker: seat.worker, blocks: [0; LEVELS] });
            }
            rows[*place as usize].blocks[seat.level] = found.blocks;
        }
        // A level without a seat has what the faster one has; one with a seat never has less.
        for row in rows {
            for level in 1..PREDICTED {
                row.blocks[level] = row.blocks[level].max(row.blocks[level - 1]);
            }
            row.blocks[PREDICTED] = row.blocks[PREDICTED].max(row.blocks[0]);
        }
    }
}
