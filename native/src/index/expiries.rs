//! When predictions end: a heap of entries.
//!
//! Refreshing a prediction leaves its entry in the heap; when that surfaces it is pushed again with the new
//! time. Entries of predictions that were cancelled are stale, and go when they prevail.

use super::ledger::Ledger;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

const STALE_SLACK: usize = 1024;

/// Entries of one heap: one that grows is copied.
const HEAP_ENTRIES: usize = 16_384;

/// Entries that are looked at in the time in which one prediction ends.
const LOOKED_AT_FOR_ONE: usize = 64;

/// Soonest first, deeper blocks before their parents, then in the order of their making.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub expiry: f64,
    pub depth: u32,
    pub serial: u64,
    pub id: u32,
}

impl Entry {
    fn key(&self, other: &Self) -> Ordering {
        let depth = Reverse(self.depth).cmp(&Reverse(other.depth));
        self.expiry.total_cmp(&other.expiry).then(depth).then(self.serial.cmp(&other.serial))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key(other).reverse()
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Entry {}

/// When predictions end: heaps of which none grows for long, of entries that may be stale.
#[derive(Debug, Default)]
pub struct Expiries {
    heaps: Vec<BinaryHeap<Entry>>,
    len: usize,
    /// The next heap to be looked at for stale entries.
    next_tidied: usize,
    pub serial: u64,
}

impl Expiries {
    pub fn push(&mut self, entry: Entry) {
        self.len += 1;
        // The last one most often is it.
        match self.heaps.iter().rposition(|heap| heap.len() < HEAP_ENTRIES) {
            Some(place) => self.heaps[place].push(entry),
            None => self.heaps.push(BinaryHeap::from(vec![entry])),
        }
    }

    pub fn peek(&self) -> Option<&Entry> {
        self.heaps.iter().filter_map(BinaryHeap::peek).max()
    }

    /// Takes the first entry out if its time has come.
    pub fn pop_due(&mut self, now: f64) -> Option<Entry> {
        let place = (0..self.heaps.len()).max_by(|&a, &b| self.heaps[a].peek().cmp(&self.heaps[b].peek()))?;
        if self.heaps[place].peek()?.expiry > now {
            return None;
        }
        let entry = self.heaps[place].pop();
        self.len -= 1;
        if self.heaps[place].is_empty() {
            self.heaps.swap_remove(place);
        }
        entry
    }

    pub fn are_stale(&self, ledger: &Ledger) -> bool {
        self.len > 2 * ledger.predictions.len() + STALE_SLACK
    }

    /// Drops stale entries, heap by heap, while they prevail; how much of a budget that takes.
    pub fn tidy(&mut self, ledger: &Ledger, budget: usize) -> usize {
        let mut looked_at = 0;
        while looked_at < budget && self.are_stale(ledger) {
            let place = self.next_tidied % self.heaps.len();
            let heap = &mut self.heaps[place];
            let before = heap.len();
            looked_at += before.div_ceil(LOOKED_AT_FOR_ONE);
            heap.retain(|entry| ledger.predictions.get(entry.id).is_some_and(|p| p.serial == entry.serial));
            self.len -= before - heap.len();
            if heap.is_empty() {
                self.heaps.swap_remove(place);
            }
            self.next_tidied = place + 1;
        }
        looked_at.min(budget)
    }
}
