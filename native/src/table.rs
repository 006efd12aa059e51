//! An open-addressing table of 64-bit entries: some bits of a key's hash, and a payload.
//!
//! ```text
//! entry    [ fragment: the top bits of the hash | payload, never 0 ]        0: empty
//! bucket   8 entries, one cache line; an entry's home is bucket fragment * buckets >> fragment bits
//! ```
//!
//! The key itself is not stored: the caller says whether a payload is the one that it looks for. An entry
//! whose home is full goes to the next bucket that is not, cyclically, so a search ends at the first bucket
//! that is not full: mostly the first one, and one cache miss. Homes are ordered by fragment, so growing the
//! table is one pass over both arrays in order, whatever the factor, and the factor can be small.
//!
//! Complexity: O(1) expected for every operation. Bytes an entry: 10 to 15, more where many were removed.

/// Entries of a bucket.
const WIDTH: usize = 8;

/// A bucket holds this many entries on average at most: full ones become frequent quickly above it.
const MAX_LOAD: usize = 6;

/// A table shrinks when it is full to less than the reciprocal: little is left to move, for those who wait meanwhile.
const SHRUNK_BELOW: usize = 64;

/// One of more buckets, 4 MB, does only once it is empty: reading all of it takes longer than anybody is to wait.
const READ_AT_ONCE: usize = 1 << 16;

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket([u64; WIDTH]);

impl Bucket {
    /// A byte an entry, of which the highest bit is set where the entry begins with a fragment; the others are 0.
    #[inline]
    fn beginning_with<const PAYLOAD: u32>(&self, fragment: u64) -> u64 {
        // In 32 bits, and a byte each: the widths that every processor compares several of at once.
        let equal = |entry: u64| (entry >> PAYLOAD) as u32 == fragment as u32;
        u64::from_le_bytes(self.0.map(|entry| if equal(entry) { 0x80 } else { 0 }))
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        self.0.iter().position(|&entry| entry == 0)
    }
}

/// A table whose payloads have `PAYLOAD` bits, at least 32.
#[derive(Debug)]
pub struct Table<const PAYLOAD: u32> {
    buckets: Vec<Bucket>,
    len: usize,
}

impl<const PAYLOAD: u32> Default for Table<PAYLOAD> {
    fn default() -> Self {
        Self { buckets: Vec::new(), len: 0 }
    }
}

/// Where an entry is, until the next insert or remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    bucket: usize,
    entry: usize,
}

impl<const PAYLOAD: u32> Table<PAYLOAD> {
    const FRAGMENT: u32 = 64 - PAYLOAD;

    pub const fn mask() -> u64 {
        (1 << PAYLOAD) - 1
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    #[inline]
    fn home(&self, fragment: u64) -> usize {
        // A fragment has at most 32 bits and there are fewer than 2^32 buckets.
        ((fragment * self.buckets.len() as u64) >> Self::FRAGMENT) as usize
    }

    #[inline]
    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Buckets from one to another, onwards.
    fn distance(&self, from: usize, to: usize) -> usize {
        if from <= to { to - from } else { to + self.buckets.len() - from }
    }

    /// Reads the bucket where a search for this hash begins: many such reads overlap, searches do not.
    #[inline]
    pub fn warm(&self, hash: u64) -> u64 {
        self.buckets.get(self.home(hash >> PAYLOAD)).map_or(0, |bucket| bucket.0[0])
    }

    /// The entry with this hash whose payload `is` the right one.
    #[inline]
    pub fn find(&self, hash: u64, mut is: impl FnMut(u64) -> bool) -> Option<(Slot, u64)> {
        if self.buckets.is_empty() {
            return None;
        }
        let fragment = hash >> PAYLOAD;
        let mut at = self.home(fragment);
        loop {
            let bucket = &self.buckets[at];
            let mut candidates = bucket.beginning_with::<PAYLOAD>(fragment);
            while candidates != 0 {
                let entry = candidates.trailing_zeros() as usize / 8;
                let payload = bucket.0[entry] & Self::mask();
                // Fragment 0 equals that of an empty entry, whose payload is 0.
                if payload != 0 && is(payload) {
                    return Some((Slot { bucket: at, entry }, payload));
                }
                candidates &= candidates - 1;
            }
            if bucket.free().is_some() {
                return None;
            }
            at = self.next(at);
        }
    }

    /// Where the entry with this hash and payload is, which no other entry has.
    #[inline]
    pub fn slot_of(&self, hash: u64, payload: u64) -> Option<Slot> {
        self.find(hash, |there| there == payload).map(|(slot, _)| slot)
    }

    /// Adds an entry; the caller knows that its key is not there.
    #[inline]
    pub fn insert(&mut self, hash: u64, payload: u64) {
        self.reserve(1);
        self.find_or_insert(hash, payload, |_| false);
    }

    /// The entry with this hash that `is` there already; None: it was added. The caller reserved the room.
    #[inline]
    pub fn find_or_insert(
        &mut self,
        hash: u64,
        payload: u64,
        mut is: impl FnMut(u64) -> bool,
    ) -> Option<(Slot, u64)> {
        debug_assert!(payload != 0 && payload <= Self::mask());
        debug_assert!(self.len < self.buckets.len() * WIDTH);
        let fragment = hash >> PAYLOAD;
        let mut at = self.home(fragment);
        loop {
            let bucket = &mut self.buckets[at];
            let mut candidates = bucket.beginning_with::<PAYLOAD>(fragment);
            while candidates != 0 {
                let entry = candidates.trailing_zeros() as usize / 8;
                let there = bucket.0[entry] & Self::mask();
                if there != 0 && is(there) {
                    return Some((Slot { bucket: at, entry }, there));
                }
                candidates &= candidates - 1;
            }
            if let Some(free) = bucket.free() {
                bucket.0[free] = fragment << PAYLOAD | payload;
                self.len += 1;
                return None;
            }
            at = self.next(at);
        }
    }

    /// Gives an entry another payload.
    pub fn replace(&mut self, slot: Slot, payload: u64) {
        debug_assert!(payload != 0 && payload <= Self::mask());
        let entry = &mut self.buckets[slot.bucket].0[slot.entry];
        *entry = *entry & !Self::mask() | payload;
    }

    /// Takes an entry out; where its bucket was full, an entry that had to go further comes back.
    pub fn remove(&mut self, slot: Slot) {
        let mut gap = slot;
        let mut probe = gap.bucket;
        let mut go_on = self.buckets[gap.bucket].free().is_none();
        self.buckets[gap.bucket].0[gap.entry] = 0;
        while go_on {
            probe = self.next(probe);
            if probe == gap.bucket {
                break;
            }
            go_on = self.buckets[probe].free().is_none();
            // An entry may come back to the gap if its home is not behind it, cyclically.
            let reach = self.distance(gap.bucket, probe);
            let came_by =
                |&entry: &u64| entry != 0 && self.distance(self.home(entry >> PAYLOAD), probe) >= reach;
            if let Some(entry) = self.buckets[probe].0.iter().position(came_by) {
                self.buckets[gap.bucket].0[gap.entry] = std::mem::take(&mut self.buckets[probe].0[entry]);
                gap = Slot { bucket: probe, entry };
            }
        }
        self.len -= 1;
        let is_spare = self.len * SHRUNK_BELOW < self.buckets.len() * MAX_LOAD && self.buckets.len() > WIDTH;
        if is_spare && (self.len == 0 || self.buckets.len() <= READ_AT_ONCE) {
            self.rebuild(self.len * 2 / MAX_LOAD);
        }
    }

    /// Makes room for a number of further entries.
    #[inline]
    pub fn reserve(&mut self, more: usize) {
        let needed = (self.len + more).div_ceil(MAX_LOAD);
        if needed > self.buckets.len() {
            self.rebuild(needed.max(self.buckets.len() * 3 / 2));
        }
    }

    fn rebuild(&mut self, buckets: usize) {
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::default(); buckets.max(2)]);
        // Of a table that shrinks most buckets are empty.
        let filled = old.iter().filter(|bucket| bucket.0.iter().fold(0, |any, entry| any | entry) != 0);
        for entry in filled.flat_map(|bucket| bucket.0).filter(|&entry| entry != 0).take(self.len) {
            let mut at = self.home(entry >> PAYLOAD);
            loop {
                if let Some(free) = self.buckets[at].free() {
                    self.buckets[at].0[free] = entry;
                    break;
                }
                at = self.next(at);
            }
        }
    }
}

/// A hash of a key for a `Table`: one folded multiplication, with a secret of this process.
#[inline]
pub fn mix(key: u64, secret: u64) -> u64 {
    let product = u128::from(key ^ secret) * 0x9e37_79b9_7f4a_7c15_u128;
    // The fold alone leaves short runs of keys in order of the low half; one more multiplication spreads it.
    ((product >> 64) as u64 ^ product as u64).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn behaves_like_a_map_under_random_operations() {
        let mut state = 7_u64;
        let mut random = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            mix(state, 1)
        };
        // Keys are few, so that they come and go; payload = key number + 1.
        let mut table = Table::<39>::default();
        let mut model: HashMap<u64, u64> = HashMap::new();
        for step in 0..200_000 {
            let range = if step % 20_000 < 15_000 { 5_000 } else { 50 };
            let key = random() % range;
            let hash = mix(key, 99);
            let is = |payload: u64| payload % 5_001 == (key + 1) % 5_001;
            match table.find(hash, is) {
                Some((slot, payload)) => {
                    assert_eq!(model[&key], payload);
                    if random() % 2 == 0 {
                        table.remove(slot);
                        model.remove(&key);
                    } else {
                        table.replace(slot, key + 1 + 5_001);
                        model.insert(key, key + 1 + 5_001);
                    }
                }
                None => {
                    assert!(!model.contains_key(&key));
                    table.reserve(1);
                    assert!(table.find_or_insert(hash, key + 1, is).is_none());
                    assert_eq!(table.find_or_insert(hash, key + 1, is), table.find(hash, is));
                    model.insert(key, key + 1);
                }
            }
            assert_eq!(table.len(), model.len());
        }
    }

    #[test]
    fn sequential_and_shifted_keys_spread() {
        for shift in [0, 20, 40, 56] {
            let mut table = Table::<39>::default();
            let keys = 1_u64 << (64 - shift).min(8 + 8);
            for key in 0..keys {
                table.insert(mix(key << shift, 3), key + 1);
            }
            let probes: usize = (0..keys)
                .map(|key| {
                    let mut probes = 0;
                    table.find(mix(key << shift, 3), |payload| {
                        probes += 1;
                        payload == key + 1
                    });
                    probes
                })
                .sum();
            assert!(probes < keys as usize * 3 / 2, "{probes} payloads were compared for {keys} keys");
        }
    }
}
