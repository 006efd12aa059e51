//! Blocks that wait for a parent which their worker never had.

use super::copies::Counts;
use hashbrown::HashMap;

/// Orphans kept for each worker rank.
pub const ORPHAN_LIMIT: usize = 65_536;

/// A block stored under a parent that this worker never had, between its siblings in the order of their coming.
#[derive(Debug, Clone)]
pub struct Orphan {
    pub parent: u64,
    pub local: u64,
    pub counts: Counts,
    previous: Option<u64>,
    next: Option<u64>,
}

/// Orphans by engine hash, and by the parent that they wait for.
#[derive(Debug, Default)]
pub struct Orphans {
    by_hash: HashMap<u64, Orphan>,
    /// Parent hash → the first and the last one that wait for it.
    waiting: HashMap<u64, (u64, u64)>,
}

impl Orphans {
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    pub fn reserve(&mut self, more: usize) {
        self.by_hash.reserve(more);
    }

    pub fn get(&self, engine_hash: u64) -> Option<&Orphan> {
        self.by_hash.get(&engine_hash)
    }

    /// The counts of one, to change them.
    pub fn counts_mut(&mut self, engine_hash: u64) -> Option<&mut Counts> {
        self.by_hash.get_mut(&engine_hash).map(|orphan| &mut orphan.counts)
    }

    pub fn contains(&self, engine_hash: u64) -> bool {
        self.by_hash.contains_key(&engine_hash)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &Orphan)> {
        self.by_hash.iter().map(|(&engine_hash, orphan)| (engine_hash, orphan))
    }

    /// Adds one that is not there, the last of its siblings.
    pub fn insert(&mut self, engine_hash: u64, parent: u64, local: u64, counts: Counts) {
        let (_, last) = self.waiting.entry(parent).or_insert((engine_hash, engine_hash));
        let previous = (*last != engine_hash).then_some(*last);
        *last = engine_hash;
        if let Some(before) = previous.and_then(|before| self.by_hash.get_mut(&before)) {
            before.next = Some(engine_hash);
        }
        self.by_hash.insert(engine_hash, Orphan { parent, local, counts, previous, next: None });
    }

    /// Takes one out.
    pub fn remove(&mut self, engine_hash: u64) -> Option<Orphan> {
        let orphan = self.by_hash.remove(&engine_hash)?;
        if let Some(before) = orphan.previous.and_then(|before| self.by_hash.get_mut(&before)) {
            before.next = orphan.next;
        }
        if let Some(after) = orphan.next.and_then(|after| self.by_hash.get_mut(&after)) {
            after.previous = orphan.previous;
        }
        match (orphan.previous, orphan.next) {
            (None, None) => {
                self.waiting.remove(&orphan.parent);
            }
            (before, after) => {
                if let Some(ends) = self.waiting.get_mut(&orphan.parent) {
                    *ends = (
                        after.filter(|_| before.is_none()).unwrap_or(ends.0),
                        before.filter(|_| after.is_none()).unwrap_or(ends.1),
                    );
                }
            }
        }
        Some(orphan)
    }

    /// Takes the first one out that waits for a parent.
    pub fn take_waiting(&mut self, parent: u64) -> Option<(u64, Orphan)> {
        let (first, _) = *self.waiting.get(&parent)?;
        self.remove(first).map(|orphan| (first, orphan))
    }

    /// Those that wait for a parent, in order.
    pub fn waiting_for(&self, parent: u64) -> impl Iterator<Item = u64> + '_ {
        std::iter::successors(self.waiting.get(&parent).map(|ends| ends.0), |engine_hash| {
            self.by_hash[engine_hash].next
        })
    }

    pub fn bytes(&self) -> usize {
        self.by_hash.allocation_size() + self.waiting.allocation_size()
    }
}
