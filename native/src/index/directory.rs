//! Which worker and level each bit belongs to, and the workers' names: what a query reads besides the trie.
//!
//! Dropping a worker's content takes its bits out of here, which hides it from all queries at once; the
//! bits are used again when the content is out of the trie.

use std::sync::Arc;

use hashbrown::{Equivalent, HashMap, HashSet};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::shared::SharedCache;
use super::trie::Match;
use super::types::{LEVELS, NO_BIT, PREDICTED};
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
struct BitOwner {
    /// 0: the bit is free, or what it has is being taken out.
    worker: Handle,
    level: usize,
}

/// The bits and the names.
#[derive(Debug, Default)]
pub struct Directory {
    bits: Vec<BitOwner>,
    free: Vec<u32>,
    names: Slab<WorkerRank>,
    handles: HashMap<WorkerRank, Handle>,
    /// Of all names; see `RankSet` in Python.
    digest: u64,
    /// Bits in use on levels above the device.
    upper: usize,
    /// Of workers with window groups.
    views: HashMap<Handle, View>,
    /// Of which a limit kept something out: they may have more than is found.
    incomplete: HashSet<Handle>,
    /// Shared caches, and the workers that read them.
    shared: Vec<(Arc<SharedCache>, HashSet<Handle>)>,
}

impl Directory {
    pub fn name(&self, worker: Handle) -> Option<&WorkerRank> {
        self.names.get(worker)
    }

    /// How many worker ranks there are.
    pub fn ranks(&self) -> usize {
        self.names.len()
    }

    /// Which worker ranks these are: the sum of a hash of each name.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    pub fn handle(&self, name: &WorkerRank) -> Option<Handle> {
        self.handles.get(name).copied()
    }

    /// The worker ranks that have no row, sorted by name.
    pub fn without_row(&self, rows: &[Row]) -> Vec<Handle> {
        let mut seen = vec![false; self.names.highest() as usize + 1];
        rows.iter().for_each(|row| seen[row.worker as usize] = true);
        let mut rest: Vec<_> = self.names.iter().filter(|(worker, _)| !seen[*worker as usize]).collect();
        rest.sort_unstable_by_key(|(_, name)| *name);
        rest.into_iter().map(|(worker, _)| worker).collect()
    }

    pub fn add(&mut self, name: WorkerRank) -> Handle {
        self.digest = self.digest.wrapping_add(hash_of(&name));
        let handle = self.names.insert(name.clone());
        self.handles.insert(name, handle);
        handle
    }

    pub fn remove(&mut self, worker: Handle) {
        let name = self.names.remove(worker);
        self.digest = self.digest.wrapping_sub(hash_of(&name));
        self.handles.remove(&name);
    }

    /// A bit for a worker's level; of handle 0, one that no query sees.
    pub fn open(&mut self, worker: Handle, level: usize) -> u32 {
        let bit = BitOwner { worker, level };
        self.upper += usize::from(worker != 0 && level > 0);
        if let Some(number) = self.free.pop() {
            self.bits[number as usize] = bit;
            return number;
        }
        self.bits.push(bit);
        self.bits.len() as u32 - 1
    }

    /// Hides what bits have from now on.
    pub fn hide(&mut self, bits: &[u32; LEVELS]) {
        for &bit in bits.iter().filter(|&&bit| bit != NO_BIT) {
            let bit = &mut self.bits[bit as usize];
            self.views.remove(&bit.worker);
            self.incomplete.remove(&bit.worker);
            self.upper -= usize::from(bit.worker != 0 && bit.level > 0);
            bit.worker = 0;
        }
    }

    /// Shows hidden bits of a worker in place of those that it had.
    pub fn replace(&mut self, old: &[u32; LEVELS], new: &[u32; LEVELS], worker: Handle) {
        self.hide(old);
        for &bit in new.iter().filter(|&&bit| bit != NO_BIT) {
            let bit = &mut self.bits[bit as usize];
            bit.worker = worker;
            self.upper += usize::from(bit.level > 0);
        }
    }

    /// Shows what a worker's window groups hold, until its bits are hidden.
    pub fn show_windows(&mut self, worker: Handle, view: View) {
        self.views.insert(worker, view);
    }

    /// Workers with window groups.
    pub fn views(&self) -> &HashMap<Handle, View> {
        &self.views
    }

    /// Lets a worker read a shared cache, and no other.
    pub fn set_shared(&mut self, worker: Handle, cache: Option<Arc<SharedCache>>) {
        for (_, readers) in &mut self.shared {
            readers.remove(&worker);
        }
        self.shared.retain(|(_, readers)| !readers.is_empty());
        let Some(cache) = cache else { return };
        match self.shared.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &cache)) {
            Some((_, readers)) => drop(readers.insert(worker)),
            None => self.shared.push((cache, HashSet::from([worker]))),
        }
    }

    /// The shared cache that a worker reads.
    pub fn shared_of(&self, worker: Handle) -> Option<&Arc<SharedCache>> {
        self.shared.iter().find(|(_, readers)| readers.contains(&worker)).map(|(cache, _)| cache)
    }

    /// Shared caches, and the workers that read them.
    pub fn shared(&self) -> &[(Arc<SharedCache>, HashSet<Handle>)] {
        &self.shared
    }

    /// Notes that a limit kept something of a worker out, until its bits are hidden.
    pub fn mark_incomplete(&mut self, worker: Handle) {
        self.incomplete.insert(worker);
    }

    /// Workers of which a limit kept something out.
    pub fn incomplete(&self) -> &HashSet<Handle> {
        &self.incomplete
    }

    /// Frees bits that have nothing any more.
    pub fn free(&mut self, bits: &[u32; LEVELS]) {
        self.free.extend(bits.iter().filter(|&&bit| bit != NO_BIT));
    }

    /// One row a worker from what its bits have.
    pub fn rows(&self, found: &[Match], rows: &mut Vec<Row>) {
        if self.upper == 0 {
            let live = found.iter().map(|found| (self.bits[found.bit as usize].worker, found.blocks));
            rows.extend(
                live.filter(|&(worker, _)| worker != 0)
                    .map(|(worker, blocks)| Row { worker, blocks: [blocks; LEVELS] }),
            );
            return;
        }
        let mut places = vec![u32::MAX; self.names.highest() as usize + 1];
        for found in found {
            let bit = self.bits[found.bit as usize];
            if bit.worker == 0 {
                continue;
            }
            let place = &mut places[bit.worker as usize];
            if *place == u32::MAX {
                *place = rows.len() as u32;
                rows.push(Row { worker: bit.worker, blocks: [0; LEVELS] });
            }
            rows[*place as usize].blocks[bit.level] = found.blocks;
        }
        // A level without a bit has what the faster one has; one with a bit never has less.
        for row in rows {
            for level in 1..PREDICTED {
                row.blocks[level] = row.blocks[level].max(row.blocks[level - 1]);
            }
            row.blocks[PREDICTED] = row.blocks[PREDICTED].max(row.blocks[0]);
        }
    }
}

fn hash_of(name: &WorkerRank) -> u64 {
    xxh3_64_with_seed(name.worker_id.as_bytes(), u64::from(name.dp_rank))
}
