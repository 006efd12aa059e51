//! An open-addressing table of 64-bit entries: some bits of a key's hash, and a payload.
//!
//! ```text
//! entry   [ fragment: the top bits of the hash | payload, never 0 ]        0: empty
//! slot    fragment * slots >> fragment bits, then the next free one, cyclic
//! ```
//!
//! The key itself is not stored: the caller tells whether a payload is the one that it looks for. Slots are
//! ordered by fragment, so growing the table is one pass over both arrays in order, whatever the factor,
//! and the factor can be small: at most four fifths of the slots are used, mostly about three quarters.
//!
//! Complexity: O(1) expected for every operation. Bytes an entry: 10 to 13.

/// Share of the slots that may be used, in fifths: linear probing lengthens quickly above it.
const MAX_FIFTHS: usize = 4;
const MIN_SLOTS: usize = 16;

/// A table whose payloads have `PAYLOAD` bits.
#[derive(Debug)]
pub struct Table<const PAYLOAD: u32> {
    slots: Vec<u64>,
    len: usize,
}

impl<const PAYLOAD: u32> Default for Table<PAYLOAD> {
    fn default() -> Self {
        Self { slots: Vec::new(), len: 0 }
    }
}

/// Where an entry is, until the next insert or remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(usize);

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
        self.slots.capacity() * size_of::<u64>()
    }

    fn home(&self, fragment: u64) -> usize {
        // A fragment has at most 32 bits and there are fewer than 2^32 slots.
        ((fragment * self.slots.len() as u64) >> Self::FRAGMENT) as usize
    }

    fn next(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    /// Reads the entry where a search for this hash begins: many such reads overlap, searches do not.
    #[inline]
    pub fn warm(&self, hash: u64) -> u64 {
        if self.slots.is_empty() { 0 } else { self.slots[self.home(hash >> PAYLOAD)] }
    }

    /// The entry with this hash whose payload `is` the right one.
    #[inline]
    pub fn find(&self, hash: u64, mut is: impl FnMut(u64) -> bool) -> Option<(Slot, u64)> {
        if self.slots.is_empty() {
            return None;
        }
        let fragment = hash >> PAYLOAD;
        let mut slot = self.home(fragment);
        loop {
            let entry = self.slots[slot];
            if entry == 0 {
                return None;
            }
            if entry >> PAYLOAD == fragment && is(entry & Self::mask()) {
                return Some((Slot(slot), entry & Self::mask()));
            }
            slot = self.next(slot);
        }
    }

    /// Adds an entry; the caller knows that its key is not there.
    #[inline]
    pub fn insert(&mut self, hash: u64, payload: u64) {
        debug_assert!(payload != 0 && payload <= Self::mask());
        self.reserve(1);
        self.put((hash >> PAYLOAD) << PAYLOAD | payload);
        self.len += 1;
    }

    /// Adds an entry unless one with this hash `is` there already, whose payload is then returned.
    #[inline]
    pub fn insert_new(&mut self, hash: u64, payload: u64, mut is: impl FnMut(u64) -> bool) -> Option<u64> {
        debug_assert!(payload != 0 && payload <= Self::mask());
        self.reserve(1);
        let fragment = hash >> PAYLOAD;
        let mut slot = self.home(fragment);
        loop {
            let entry = self.slots[slot];
            if entry == 0 {
                self.slots[slot] = fragment << PAYLOAD | payload;
                self.len += 1;
                return None;
            }
            if entry >> PAYLOAD == fragment && is(entry & Self::mask()) {
                return Some(entry & Self::mask());
            }
            slot = self.next(slot);
        }
    }

    /// Gives an entry another payload.
    pub fn replace(&mut self, slot: Slot, payload: u64) {
        debug_assert!(payload != 0 && payload <= Self::mask());
        self.slots[slot.0] = self.slots[slot.0] & !Self::mask() | payload;
    }

    /// Takes an entry out and closes the gap.
    pub fn remove(&mut self, slot: Slot) {
        let mut gap = slot.0;
        let mut probe = gap;
        loop {
            probe = self.next(probe);
            let entry = self.slots[probe];
            if entry == 0 {
                break;
            }
            let home = self.home(entry >> PAYLOAD);
            // An entry may move back to the gap if its home is not behind it, cyclically.
            let stays = if gap <= probe { gap < home && home <= probe } else { gap < home || home <= probe };
            if !stays {
                self.slots[gap] = entry;
                gap = probe;
            }
        }
        self.slots[gap] = 0;
        self.len -= 1;
        if self.slots.len() > 4 * MIN_SLOTS && self.len * 4 < self.slots.len() {
            self.rebuild(self.len * 2);
        }
    }

    /// Makes room for so many more entries.
    pub fn reserve(&mut self, more: usize) {
        let needed = (self.len + more) * 5 / MAX_FIFTHS + 1;
        if needed > self.slots.len() {
            self.rebuild(needed.max(self.slots.len() * 3 / 2).max(MIN_SLOTS));
        }
    }

    fn rebuild(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![0; slots.max(MIN_SLOTS)]);
        for entry in old.into_iter().filter(|&entry| entry != 0) {
            self.put(entry);
        }
    }

    fn put(&mut self, entry: u64) {
        let mut slot = self.home(entry >> PAYLOAD);
        while self.slots[slot] != 0 {
            slot = self.next(slot);
        }
        self.slots[slot] = entry;
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
                    assert_eq!(table.insert_new(hash, key + 1, is), None);
                    assert_eq!(table.insert_new(hash, key + 1, is), Some(key + 1));
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
            assert!(probes < keys as usize * 2, "{probes} payloads were compared for {keys} keys");
        }
    }
}
