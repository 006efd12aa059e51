//! A set of bits: words of 64 bits, from the first one that is not 0 to the last.
//!
//! With up to 64 workers, and for a block that one worker holds, that is one word without an allocation.

use smallvec::SmallVec;

/// The set; see the module.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct BitSet {
    words: SmallVec<[u64; 1]>,
    /// Index of the first of `words` among the words of all bits.
    base: u32,
}

impl BitSet {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    pub fn len(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Words in use.
    pub fn words(&self) -> usize {
        self.words.len()
    }

    pub fn contains(&self, bit: u32) -> bool {
        self.word(bit / 64) >> (bit % 64) & 1 == 1
    }

    #[inline]
    fn word(&self, index: u32) -> u64 {
        self.words.get(index.wrapping_sub(self.base) as usize).copied().unwrap_or(0)
    }

    pub fn insert(&mut self, bit: u32) {
        let index = bit / 64;
        if let Some(word) = self.words.get_mut(index.wrapping_sub(self.base) as usize) {
            *word |= 1 << (bit % 64);
            return;
        }
        if self.words.is_empty() {
            self.base = index;
        }
        if index < self.base {
            let missing = (self.base - index) as usize;
            self.words.insert_many(0, std::iter::repeat_n(0, missing));
            self.base = index;
        }
        let position = (index - self.base) as usize;
        if self.words.len() <= position {
            self.words.resize(position + 1, 0);
        }
        self.words[position] |= 1 << (bit % 64);
    }

    pub fn remove(&mut self, bit: u32) {
        let position = (bit / 64).wrapping_sub(self.base) as usize;
        let Some(word) = self.words.get_mut(position) else { return };
        *word &= !(1 << (bit % 64));
        if *word != 0 {
            return;
        }
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        let empty = self.words.iter().take_while(|&&word| word == 0).count();
        if empty > 0 {
            self.words.drain(..empty);
            self.base += empty as u32;
        }
        if self.words.len() == 1 && self.words.spilled() {
            self.words.shrink_to_fit();
        }
    }

    /// Calls `each` for the bits that are here and not in `other`.
    #[inline]
    pub fn for_each_without(&self, other: Option<&Self>, mut each: impl FnMut(u32)) {
        for (position, &word) in self.words.iter().enumerate() {
            let index = self.base + position as u32;
            let mut left = word & !other.map_or(0, |other| other.word(index));
            while left != 0 {
                each(index * 64 + left.trailing_zeros());
                left &= left - 1;
            }
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().zip(self.base..).flat_map(|(&word, index)| {
            (0..64).filter(move |shift| word >> shift & 1 == 1).map(move |shift| index * 64 + shift)
        })
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        if self.words.spilled() { self.words.capacity() * size_of::<u64>() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn behaves_like_a_set_under_random_operations() {
        let mut state = 5_u32;
        let mut random = move |below: u32| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 8) % below
        };
        let mut sets = [BitSet::default(), BitSet::default()];
        let mut models: [BTreeSet<u32>; 2] = Default::default();
        for _ in 0..50_000 {
            let which = random(2) as usize;
            let bit = random(400);
            if random(16) < 7 {
                sets[which].insert(bit);
                models[which].insert(bit);
            } else {
                sets[which].remove(bit);
                models[which].remove(&bit);
            }
            assert!(sets[which].iter().eq(models[which].iter().copied()));
            assert_eq!(sets[which].len() as usize, models[which].len());
            assert_eq!(sets[which].is_empty(), models[which].is_empty());
            let mut without = Vec::new();
            sets[0].for_each_without(Some(&sets[1]), |bit| without.push(bit));
            assert!(without.iter().eq(models[0].difference(&models[1])));
        }
    }
}
