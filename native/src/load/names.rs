//! Which worker rank is at which slot, found by the bytes of its name.

use hashbrown::HashTable;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A worker rank; its name is a part of the text.
#[derive(Debug, Clone, Copy)]
struct Entry {
    start: u32,
    end: u32,
    dp_rank: u32,
    slot: u32,
}

/// Worker ranks of one pool.
#[derive(Debug, Default)]
pub struct Names {
    text: Vec<u8>,
    /// By slot.
    entries: Vec<Entry>,
    /// The same, and their places.
    table: HashTable<(Entry, u32)>,
}

impl Names {
    /// The names of (worker id, rank, slot).
    pub fn new<'a>(ranks: impl Iterator<Item = (&'a str, u32, u32)>) -> Self {
        let mut made = Self::default();
        for (worker_id, dp_rank, slot) in ranks {
            let start = made.text.len() as u32;
            made.text.extend_from_slice(worker_id.as_bytes());
            made.entries.push(Entry { start, end: made.text.len() as u32, dp_rank, slot });
        }
        made.entries.sort_unstable_by_key(|entry| entry.slot);
        let Self { text, entries, table } = &mut made;
        let hash = |(entry, _): &(Entry, u32)| hash_of(name(text, entry), entry.dp_rank);
        for (place, entry) in (0..).zip(&*entries) {
            table.insert_unique(hash(&(*entry, place)), (*entry, place), hash);
        }
        made
    }

    /// A search for many ranks. Who lists them may number them as they come, as we do: after two in order, the next
    /// one is looked for in its place first.
    pub fn search(&self) -> Search<'_> {
        Search { names: self, next: 0, in_order: true }
    }
}

#[derive(Debug)]
pub struct Search<'a> {
    names: &'a Names,
    /// The place after the last one that was found.
    next: usize,
    in_order: bool,
}

impl Search<'_> {
    /// The slot of a worker rank; None: it is not here.
    #[inline]
    pub fn slot(&mut self, worker_id: &[u8], dp_rank: u32) -> Option<u32> {
        let Names { text, entries, table } = self.names;
        let is = |entry: &Entry| entry.dp_rank == dp_rank && name(text, entry) == worker_id;
        let mut found = entries.get(self.next).filter(|entry| self.in_order && is(entry));
        if found.is_none() {
            let (entry, place) = table.find(hash_of(worker_id, dp_rank), |(entry, _)| is(entry))?;
            self.in_order = *place as usize == self.next;
            self.next = *place as usize;
            found = Some(entry);
        }
        self.next += 1;
        found.map(|entry| entry.slot)
    }
}

#[inline]
fn hash_of(worker_id: &[u8], dp_rank: u32) -> u64 {
    xxh3_64_with_seed(worker_id, u64::from(dp_rank))
}

#[inline]
fn name<'a>(text: &'a [u8], entry: &Entry) -> &'a [u8] {
    &text[entry.start as usize..entry.end as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_in_any_order() {
        let names = Names::new([("b", 0, 2), ("a", 0, 0), ("a", 1, 1), ("ab", 0, 5)].into_iter());
        let mut search = names.search();
        for (worker_id, dp_rank, slot) in [
            ("a", 0, Some(0)),
            ("a", 1, Some(1)),
            ("ab", 0, Some(5)),
            ("ab", 1, None),
            ("a", 0, Some(0)),
            ("", 0, None),
        ] {
            assert_eq!(search.slot(worker_id.as_bytes(), dp_rank), slot);
        }
        assert_eq!(search.slot(b"b", 0), Some(2));
        assert_eq!(Names::default().search().slot(b"b", 0), None);
    }
}
