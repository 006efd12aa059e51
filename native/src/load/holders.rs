//! Which workers hold a run, and through how many requests.

use smallvec::SmallVec;

/// Counts by worker slot, none of them 0, ascending: most runs are of one request, few are of all workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders(SmallVec<[(u32, u32); 2]>);

impl Holders {
    /// One more request on a worker; whether it is the worker's first.
    pub fn add(&mut self, slot: u32) -> bool {
        match self.find(slot) {
            Ok(place) => {
                self.0[place].1 += 1;
                false
            }
            Err(place) => {
                self.0.insert(place, (slot, 1));
                true
            }
        }
    }

    /// One request less on a worker that has some; whether it was the worker's last.
    pub fn remove(&mut self, slot: u32) -> bool {
        let place = self.find(slot).expect("a request that was added");
        self.0[place].1 -= 1;
        let last = self.0[place].1 == 0;
        if last {
            self.0.remove(place);
        }
        last
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// (slot, requests)
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        self.0.iter().copied()
    }

    /// Requests on a worker.
    pub fn count(&self, slot: u32) -> u32 {
        self.find(slot).map_or(0, |place| self.0[place].1)
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        if self.0.spilled() { self.0.capacity() * size_of::<(u32, u32)>() } else { 0 }
    }

    fn find(&self, slot: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&slot, |&(there, _)| there)
    }
}
