//! A set of block offsets that is mostly an interval from 0.
//!
//! ```text
//! {0, 1, 2, 3}          prefix 4, rest none
//! {0, 1, 2, 3, 5, 6}    prefix 4, rest {5, 6}
//! ```
//!
//! Invariants: `prefix` is not in the set; `rest` is the members above it, and absent if there are none.

use std::ops::Range;

/// The set; see the module.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Extent {
    prefix: u32,
    // Boxed: most extents have none, and each worker has several for each node.
    #[allow(clippy::box_collection)]
    rest: Option<Box<Vec<u64>>>,
}

impl Extent {
    /// Length of the longest interval from 0.
    #[inline]
    pub fn prefix(&self) -> u32 {
        self.prefix
    }

    pub fn is_empty(&self) -> bool {
        self.prefix == 0 && self.rest.is_none()
    }

    #[cfg(test)]
    pub fn len(&self) -> u32 {
        self.prefix + self.rest.as_ref().map_or(0, |bits| bits.iter().map(|word| word.count_ones()).sum())
    }

    #[inline]
    pub fn contains(&self, offset: u32) -> bool {
        offset < self.prefix || self.rest.as_ref().is_some_and(|bits| bit(bits, offset))
    }

    /// One more than the largest member; 0 if empty.
    pub fn end(&self) -> u32 {
        let Some(bits) = &self.rest else { return self.prefix };
        let last = bits.iter().rposition(|&word| word != 0).unwrap_or(0);
        (last as u32 + 1) * 64 - bits[last].leading_zeros()
    }

    pub fn insert(&mut self, offset: u32) {
        self.insert_range(offset..offset + 1);
    }

    #[inline]
    pub fn insert_range(&mut self, range: Range<u32>) {
        if range.is_empty() || range.end <= self.prefix {
            return;
        }
        if range.start > self.prefix {
            let bits = self.rest.get_or_insert_default();
            for offset in range {
                set(bits, offset);
            }
            return;
        }
        self.prefix = range.end;
        if let Some(bits) = &mut self.rest {
            while bit(bits, self.prefix) {
                self.prefix += 1;
            }
            clear_below(bits, self.prefix);
            self.tidy();
        }
    }

    pub fn remove(&mut self, offset: u32) {
        if offset < self.prefix {
            if offset + 1 < self.prefix {
                let bits = self.rest.get_or_insert_default();
                for above in offset + 1..self.prefix {
                    set(bits, above);
                }
            }
            self.prefix = offset;
        } else if let Some(bits) = &mut self.rest {
            if let Some(word) = bits.get_mut(offset as usize / 64) {
                *word &= !(1 << (offset % 64));
            }
            self.tidy();
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let above = self.rest.iter().flat_map(|bits| bits.iter().enumerate()).flat_map(|(index, &word)| {
            (0..64).filter(move |shift| word >> shift & 1 == 1).map(move |shift| index as u32 * 64 + shift)
        });
        (0..self.prefix).chain(above)
    }

    /// Takes the members from `at` on out, as offsets from there.
    pub fn split_off(&mut self, at: u32) -> Self {
        let mut tail = Self::default();
        if self.prefix > at {
            tail.prefix = self.prefix - at;
            self.prefix = at;
        }
        if let Some(bits) = self.rest.take() {
            let all = Self { prefix: 0, rest: Some(bits) };
            for offset in all.iter() {
                if offset >= at { tail.insert(offset - at) } else { self.insert(offset) }
            }
        }
        tail
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.rest.as_ref().map_or(0, |bits| size_of::<Vec<u64>>() + bits.capacity() * size_of::<u64>())
    }

    fn tidy(&mut self) {
        let Some(bits) = &mut self.rest else { return };
        while bits.last() == Some(&0) {
            bits.pop();
        }
        if bits.is_empty() {
            self.rest = None;
        }
    }
}

fn bit(bits: &[u64], offset: u32) -> bool {
    bits.get(offset as usize / 64).is_some_and(|word| word >> (offset % 64) & 1 == 1)
}

fn set(bits: &mut Vec<u64>, offset: u32) {
    let index = offset as usize / 64;
    if bits.len() <= index {
        bits.resize(index + 1, 0);
    }
    bits[index] |= 1 << (offset % 64);
}

fn clear_below(bits: &mut [u64], end: u32) {
    let whole = (end as usize / 64).min(bits.len());
    bits[..whole].fill(0);
    if let Some(word) = bits.get_mut(end as usize / 64) {
        *word &= u64::MAX << (end % 64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn behaves_like_a_set_under_random_operations() {
        let mut state = 11_u32;
        let mut random = move |below: u32| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) % below
        };
        let mut extent = Extent::default();
        let mut model: BTreeSet<u32> = BTreeSet::new();
        for _ in 0..50_000 {
            let offset = random(200);
            match random(4) {
                0 => {
                    let end = offset + random(20);
                    extent.insert_range(offset..end);
                    model.extend(offset..end);
                }
                1 if random(20) == 0 => {
                    let tail = extent.split_off(offset);
                    let expected: Vec<u32> = model.split_off(&offset).iter().map(|o| o - offset).collect();
                    assert_eq!(tail.iter().collect::<Vec<_>>(), expected);
                }
                _ => {
                    extent.remove(offset);
                    model.remove(&offset);
                }
            }
            assert!(extent.iter().eq(model.iter().copied()));
            assert_eq!(extent.len() as usize, model.len());
            assert_eq!(extent.is_empty(), model.is_empty());
            assert_eq!(extent.end(), model.last().map_or(0, |last| last + 1));
            assert!(!extent.contains(extent.prefix()));
        }
    }
}
