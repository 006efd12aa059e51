//! Which worker and level each lane belongs to, and the workers' names: what a query reads besides the trie.
//!
//! Dropping a worker's content takes its lanes out of here, which hides it from all queries at once; the
//! lanes are used again when the content is out of the trie.

use std::sync::Arc;

use hashbrown::{Equivalent, HashMap};

use super::trie::Match;
use super::window::View;
use super::worker::{LEVELS, NO_LANE, PREDICTED};
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
struct Lane {
    /// 0: the lane is free, or what it has is being taken out.
    worker: Handle,
    level: usize,
}

/// The lanes and the names.
#[derive(Debug, Default)]
pub struct Directory {
    lanes: Vec<Lane>,
    free: Vec<u32>,
    names: Slab<WorkerRank>,
    /// Lanes in use on levels above the device.
    upper: usize,
    /// Of workers with window groups.
    views: HashMap<Handle, View>,
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

    /// A lane for a worker's level; of handle 0, one that no query sees.
    pub fn open(&mut self, worker: Handle, level: usize) -> u32 {
        let lane = Lane { worker, level };
        self.upper += usize::from(worker != 0 && level > 0);
        if let Some(number) = self.free.pop() {
            self.lanes[number as usize] = lane;
            return number;
        }
        self.lanes.push(lane);
        self.lanes.len() as u32 - 1
    }

    /// Hides what lanes have from now on.
    pub fn hide(&mut self, lanes: &[u32; LEVELS]) {
        for &lane in lanes.iter().filter(|&&lane| lane != NO_LANE) {
            let lane = &mut self.lanes[lane as usize];
            self.views.remove(&lane.worker);
            self.upper -= usize::from(lane.worker != 0 && lane.level > 0);
            lane.worker = 0;
        }
    }

    /// Shows hidden lanes of a worker in place of those that it had.
    pub fn replace(&mut self, old: &[u32; LEVELS], new: &[u32; LEVELS], worker: Handle) {
        self.hide(old);
        for &lane in new.iter().filter(|&&lane| lane != NO_LANE) {
            let lane = &mut self.lanes[lane as usize];
            lane.worker = worker;
            self.upper += usize::from(lane.level > 0);
        }
    }

    /// Shows what a worker's window groups hold, until its lanes are hidden.
    pub fn show_windows(&mut self, worker: Handle, view: View) {
        self.views.insert(worker, view);
    }

    /// Workers with window groups.
    pub fn views(&self) -> &HashMap<Handle, View> {
        &self.views
    }

    /// Frees lanes that have nothing any more.
    pub fn free(&mut self, lanes: &[u32; LEVELS]) {
        self.free.extend(lanes.iter().filter(|&&lane| lane != NO_LANE));
    }

    /// One row a worker from what its lanes have.
    pub fn rows(&self, found: &[Match], rows: &mut Vec<Row>) {
        if self.upper == 0 {
            let live = found.iter().map(|found| (self.lanes[found.lane as usize].worker, found.blocks));
            rows.extend(
                live.filter(|&(worker, _)| worker != 0)
                    .map(|(worker, blocks)| Row { worker, blocks: [blocks; LEVELS] }),
            );
            return;
        }
        let mut places = vec![u32::MAX; self.names.highest() as usize + 1];
        for found in found {
            let lane = self.lanes[found.lane as usize];
            if lane.worker == 0 {
                continue;
            }
            let place = &mut places[lane.worker as usize];
            if *place == u32::MAX {
                *place = rows.len() as u32;
                rows.push(Row { worker: lane.worker, blocks: [0; LEVELS] });
            }
            rows[*place as usize].blocks[lane.level] = found.blocks;
        }
        // A level without a lane has what the faster one has; one with a lane never has less.
        for row in rows {
            for level in 1..PREDICTED {
                row.blocks[level] = row.blocks[level].max(row.blocks[level - 1]);
            }
            row.blocks[PREDICTED] = row.blocks[PREDICTED].max(row.blocks[0]);
        }
    }
}
