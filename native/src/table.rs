//! An open-addressing table of 64-bit entries: some bits of a key's hash, and a payload.
//!
//! ```text
//! table    [ part | part | ... ]                                           one, and from some size on many
//! part     [ bucket | bucket | ... ]
//! bucket   8 entries, one cache line
//! entry    [ fragment: the top bits of the hash | payload, never 0 ]        0: empty
//! ```
//!
//! The key itself is not stored: the caller tells whether a payload is the one that it looks for. A fragment is a
//! number below 1, which says where in the table an entry's home is: its first digits the part, the next ones the
//! bucket. An entry whose home is full goes to the next bucket of the part that is not, cyclically, so a search ends at
//! the first bucket that is not full: mostly the first one, and one cache miss. Homes are ordered by fragment, so growing
//! a part is one pass over both arrays in order, whatever the factor, and the factor can be small. Parts grow by
//! themselves, so that whoever adds an entry never waits until millions are moved.
//!
//! Complexity: O(1) expected for every operation. Bytes an entry: 10 to 15, more where many were removed.

use smallvec::{SmallVec, smallvec};

/// Entries of a bucket.
const WIDTH: usize = 8;

/// A bucket holds this many entries on average at most: full ones become frequent quickly above it.
const MAX_LOAD: usize = 6;

/// A part shrinks when it is full to less than the reciprocal: little is left to move, for those who wait meanwhile.
const SHRUNK_BELOW: usize = 64;

/// Parts of a large table.
const PARTS: usize = 256;

/// Most buckets of a table that is one part, 256 KB: moving what they contain takes a few tenths of a millisecond.
const ONE_PART: usize = 4096;

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

    /// The place and the payload of the entry that begins with a fragment and `is` the right one.
    #[inline]
    fn find<const PAYLOAD: u32>(
        &self,
        fragment: u64,
        is: &mut impl FnMut(u64) -> bool,
    ) -> Option<(usize, u64)> {
        let mut candidates = self.beginning_with::<PAYLOAD>(fragment);
        while candidates != 0 {
            let entry = candidates.trailing_zeros() as usize / 8;
            let payload = self.0[entry] & Table::<PAYLOAD>::mask();
            // Fragment 0 equals that of an empty entry, whose payload is 0.
            if payload != 0 && is(payload) {
                return Some((entry, payload));
            }
            candidates &= candidates - 1;
        }
        None
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        self.0.iter().position(|&entry| entry == 0)
    }
}

/// A table whose payloads have `PAYLOAD` bits, at least 32.
#[derive(Debug)]
pub struct Table<const PAYLOAD: u32> {
    /// One, or `PARTS`.
    parts: SmallVec<[Part<PAYLOAD>; 1]>,
    len: usize,
}

impl<const PAYLOAD: u32> Default for Table<PAYLOAD> {
    fn default() -> Self {
        Self { parts: smallvec![Part::new(1, 0)], len: 0 }
    }
}

/// Where an entry is, until the next insert or remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    part: usize,
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
        let parts = if self.parts.spilled() { self.parts.capacity() * size_of::<Part<PAYLOAD>>() } else { 0 };
        parts + self.parts.iter().map(|part| part.buckets.len() * size_of::<Bucket>()).sum::<usize>()
    }

    #[inline]
    fn part_of(&self, fragment: u64) -> usize {
        ((fragment * self.parts.len() as u64) >> Self::FRAGMENT) as usize
    }

    /// Reads the bucket where a search for this hash begins: many such reads overlap, searches do not.
    #[inline]
    pub fn warm(&self, hash: u64) -> u64 {
        let fragment = hash >> PAYLOAD;
        let part = &self.parts[self.part_of(fragment)];
        part.buckets.get(part.home(fragment)).map_or(0, |bucket| bucket.0[0])
    }

    /// The entry with this hash whose payload `is` the right one.
    #[inline]
    pub fn find(&self, hash: u64, is: impl FnMut(u64) -> bool) -> Option<(Slot, u64)> {
        let part = self.part_of(hash >> PAYLOAD);
        let (bucket, entry, payload) = self.parts[part].find(hash >> PAYLOAD, is)?;
        Some((Slot { part, bucket, entry }, payload))
    }

    /// Where the entry with this hash and payload is, which no other entry has.
    #[inline]
    pub fn slot_of(&self, hash: u64, payload: u64) -> Option<Slot> {
        self.find(hash, |there| there == payload).map(|(slot, _)| slot)
    }

    /// Adds an entry; the caller knows that its key is not there.
    #[inline]
    pub fn insert(&mut self, hash: u64, payload: u64) {
        self.find_or_insert(hash, payload, |_| false);
    }

    /// The payload of the entry with this hash that `is` there already; None: it was added.
    #[inline]
    pub fn find_or_insert(&mut self, hash: u64, payload: u64, is: impl FnMut(u64) -> bool) -> Option<u64> {
        debug_assert!(payload != 0 && payload <= Self::mask());
        let mut part = self.part_of(hash >> PAYLOAD);
        if !self.parts[part].has_room() {
            if self.parts.len() == 1 && self.parts[0].buckets.len() > ONE_PART {
                self.divide(self.len * 3 / 2);
                part = self.part_of(hash >> PAYLOAD);
            } else {
                self.parts[part].grow();
            }
        }
        let there = self.parts[part].find_or_insert(hash >> PAYLOAD, payload, is);
        self.len += usize::from(there.is_none());
        there
    }

    /// Gives an entry another payload.
    pub fn replace(&mut self, slot: Slot, payload: u64) {
        debug_assert!(payload != 0 && payload <= Self::mask());
        let entry = &mut self.parts[slot.part].buckets[slot.bucket].0[slot.entry];
        *entry = *entry & !Self::mask() | payload;
    }

    /// Takes an entry out.
    pub fn remove(&mut self, slot: Slot) {
        self.parts[slot.part].remove(slot.bucket, slot.entry);
        self.len -= 1;
        if self.len == 0 && self.parts.len() > 1 {
            *self = Self::default();
        }
    }

    /// Makes room for so many more entries at once.
    pub fn reserve(&mut self, more: usize) {
        let all = self.len + more;
        if self.parts.len() > 1 {
            self.parts.iter_mut().for_each(|part| part.reserve(share(all)));
        } else if all.div_ceil(MAX_LOAD) > ONE_PART {
            self.divide(all);
        } else {
            self.parts[0].reserve(all);
        }
    }

    /// Makes many parts of one, with room for so many entries.
    fn divide(&mut self, room: usize) {
        let parts = (0..PARTS).map(|_| Part::new(PARTS, share(room).div_ceil(MAX_LOAD))).collect();
        for part in std::mem::replace(&mut self.parts, parts) {
            for entry in part.entries() {
                let part = self.part_of(entry >> PAYLOAD);
                self.parts[part].add(entry);
            }
        }
    }
}

/// Entries of which hardly any part has more, of so many in all.
fn share(entries: usize) -> usize {
    let mean = entries.div_ceil(PARTS);
    mean + 3 * mean.isqrt()
}

/// Entries whose fragments begin alike.
#[derive(Debug)]
struct Part<const PAYLOAD: u32> {
    buckets: Box<[Bucket]>,
    len: usize,
    /// How many parts there are.
    parts: usize,
}

impl<const PAYLOAD: u32> Part<PAYLOAD> {
    const FRAGMENT: u32 = 64 - PAYLOAD;

    fn new(parts: usize, buckets: usize) -> Self {
        Self { buckets: vec![Bucket::default(); buckets].into_boxed_slice(), len: 0, parts }
    }

    #[inline]
    fn home(&self, fragment: u64) -> usize {
        // A fragment has at most 32 bits, and there are fewer than 2^32 buckets.
        let behind_part = (fragment * self.parts as u64) & ((1 << Self::FRAGMENT) - 1);
        ((behind_part * self.buckets.len() as u64) >> Self::FRAGMENT) as usize
    }

    #[inline]
    fn next(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Buckets from one to another, onwards.
    fn distance(&self, from: usize, to: usize) -> usize {
        if from <= to { to - from } else { to + self.buckets.len() - from }
    }

    #[inline]
    fn find(&self, fragment: u64, mut is: impl FnMut(u64) -> bool) -> Option<(usize, usize, u64)> {
        if self.buckets.is_empty() {
            return None;
        }
        let mut at = self.home(fragment);
        loop {
            let bucket = &self.buckets[at];
            if let Some((entry, payload)) = bucket.find::<PAYLOAD>(fragment, &mut is) {
                return Some((at, entry, payload));
            }
            if bucket.free().is_some() {
                return None;
            }
            at = self.next(at);
        }
    }

    /// As that of the table; there is room.
    #[inline]
    fn find_or_insert(
        &mut self,
        fragment: u64,
        payload: u64,
        mut is: impl FnMut(u64) -> bool,
    ) -> Option<u64> {
        let mut at = self.home(fragment);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some((_, there)) = bucket.find::<PAYLOAD>(fragment, &mut is) {
                return Some(there);
            }
            if let Some(free) = bucket.free() {
                bucket.0[free] = fragment << PAYLOAD | payload;
                self.len += 1;
                return None;
            }
            at = self.next(at);
        }
    }

    /// Takes an entry out; where its bucket was full, an entry that had to go further comes back.
    fn remove(&mut self, bucket: usize, entry: usize) {
        let (mut gap, mut probe) = ((bucket, entry), bucket);
        let mut go_on = self.buckets[bucket].free().is_none();
        self.buckets[bucket].0[entry] = 0;
        while go_on {
            probe = self.next(probe);
            if probe == gap.0 {
                break;
            }
            go_on = self.buckets[probe].free().is_none();
            // An entry may come back to the gap if its home is not behind it, cyclically.
            let reach = self.distance(gap.0, probe);
            let came_by =
                |&entry: &u64| entry != 0 && self.distance(self.home(entry >> PAYLOAD), probe) >= reach;
            if let Some(entry) = self.buckets[probe].0.iter().position(came_by) {
                self.buckets[gap.0].0[gap.1] = std::mem::take(&mut self.buckets[probe].0[entry]);
                gap = (probe, entry);
            }
        }
        self.len -= 1;
        if self.len * SHRUNK_BELOW < self.buckets.len() * MAX_LOAD && self.buckets.len() > WIDTH {
            self.rebuild(self.len * 2 / MAX_LOAD);
        }
    }

    #[inline]
    fn has_room(&self) -> bool {
        self.len < self.buckets.len() * MAX_LOAD
    }

    fn grow(&mut self) {
        self.rebuild((self.len + 1).div_ceil(MAX_LOAD).max(self.buckets.len() * 3 / 2));
    }

    /// Makes room for so many entries, those that are there included.
    fn reserve(&mut self, entries: usize) {
        let needed = entries.div_ceil(MAX_LOAD);
        if needed > self.buckets.len() {
            self.rebuild(needed.max(self.buckets.len() * 3 / 2));
        }
    }

    fn entries(&self) -> impl Iterator<Item = u64> {
        // Of a part that shrinks most buckets are empty.
        let filled =
            self.buckets.iter().filter(|bucket| bucket.0.iter().fold(0, |any, entry| any | entry) != 0);
        filled.flat_map(|bucket| bucket.0).filter(|&entry| entry != 0)
    }

    fn rebuild(&mut self, buckets: usize) {
        let old = std::mem::replace(self, Self::new(self.parts, buckets.max(2)));
        old.entries().for_each(|entry| self.add(entry));
    }

    /// Adds an entry that is not there.
    fn add(&mut self, entry: u64) {
        if !self.has_room() {
            self.grow();
        }
        let mut at = self.home(entry >> PAYLOAD);
        loop {
            if let Some(free) = self.buckets[at].free() {
                self.buckets[at].0[free] = entry;
                self.len += 1;
                return;
            }
            at = self.next(at);
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
                    assert!(table.find_or_insert(hash, key + 1, is).is_none());
                    assert_eq!(
                        table.find_or_insert(hash, key + 1, is),
                        table.find(hash, is).map(|found| found.1)
                    );
                    model.insert(key, key + 1);
                }
            }
            assert_eq!(table.len(), model.len());
        }
    }

    #[test]
    fn a_large_table_has_parts_that_grow_and_shrink_by_themselves() {
        let mut table = Table::<36>::default();
        let hash = |key: u64| mix(key, 5);
        let mut longest = 0;
        for key in 0..200_000 {
            let before = table.parts.iter().map(|part| part.buckets.len()).collect::<Vec<_>>();
            table.insert(hash(key), key + 1);
            let after = table.parts.iter().map(|part| part.buckets.len());
            let moved: usize =
                after.zip(&before).filter(|(after, before)| after != *before).map(|(after, _)| after).sum();
            longest = longest.max(moved);
        }
        assert_eq!((table.parts.len(), table.len()), (PARTS, 200_000));
        assert!(longest <= 2 * ONE_PART, "{longest} buckets were made at once");
        assert!(table.bytes() < 200_000 * 16, "{} bytes", table.bytes());
        let buckets = |table: &Table<36>| table.parts.iter().map(|part| part.buckets.len()).sum::<usize>();
        let full = buckets(&table);
        for key in 0..200_000 {
            let slot = table.slot_of(hash(key), key + 1).expect("it is there");
            table.remove(slot);
            let is_there = |key: u64| table.slot_of(hash(key), key + 1).is_some();
            assert!(key % 1000 > 0 || (key + 1..200_000).step_by(997).all(is_there));
            assert!(table.len() > 1000 || buckets(&table) < full / 8);
        }
        assert_eq!((table.parts.len(), table.bytes()), (1, 0));
    }

    #[test]
    fn room_that_is_reserved_is_there() {
        for entries in [1, 100, 24_000, 100_000] {
            let mut table = Table::<36>::default();
            (0..10).for_each(|key| table.insert(mix(key, 5), key + 1));
            table.reserve(entries);
            let before = table.bytes();
            (10..entries as u64).for_each(|key| table.insert(mix(key, 5), key + 1));
            assert!(table.bytes() <= before + before / 20, "{entries} entries");
            assert!((0..entries as u64).all(|key| table.slot_of(mix(key, 5), key + 1).is_some()));
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
