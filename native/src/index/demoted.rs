//! Engine hashes whose copies are no longer verified, and the demotion that makes them so.

use hashbrown::HashSet;

use super::types::PresenceId;
use crate::table::mix;

/// Hashes that `demote` left; in parts, so that none grows for long, and not all of them at the same time.
#[derive(Debug, Default)]
pub struct Demoted {
    parts: Vec<HashSet<u64>>,
    len: usize,
    /// Heap memory of the parts.
    heap: usize,
}

const DEMOTED_PARTS: usize = 1024;

impl Demoted {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn part(engine_hash: u64) -> usize {
        (mix(engine_hash, 0) >> 32) as usize % DEMOTED_PARTS
    }

    pub fn insert(&mut self, engine_hash: u64) {
        if self.parts.is_empty() {
            self.parts.resize_with(DEMOTED_PARTS, HashSet::new);
        }
        let part = &mut self.parts[Self::part(engine_hash)];
        let before = part.allocation_size();
        self.len += usize::from(part.insert(engine_hash));
        self.heap += part.allocation_size() - before;
    }

    pub fn remove(&mut self, engine_hash: u64) -> bool {
        let there = self.parts.get_mut(Self::part(engine_hash)).is_some_and(|part| part.remove(&engine_hash));
        self.len -= usize::from(there);
        there
    }

    /// Takes some out, at most so many.
    pub fn take(&mut self, most: usize) -> Vec<u64> {
        let mut taken = Vec::new();
        for part in &mut self.parts {
            let before = taken.len();
            taken.extend(part.iter().copied().take(most - before));
            if taken.len() - before == part.len() {
                self.heap -= part.allocation_size();
                *part = HashSet::new();
            }
            for engine_hash in &taken[before..] {
                part.remove(engine_hash);
            }
        }
        self.len -= taken.len();
        if self.len == 0 {
            (self.parts, self.heap) = (Vec::new(), 0);
        }
        taken
    }

    pub fn bytes(&self) -> usize {
        self.parts.capacity() * size_of::<HashSet<u64>>() + self.heap
    }
}

/// A demotion under way.
#[derive(Debug)]
pub struct Demotion {
    /// When its predictions end.
    pub until: f64,
    /// The next presence, downwards; 0: the highest.
    pub next: PresenceId,
}
