//! Sets of worker slots: a bit each.

/// Slots; see `kvscout_scheduler.values.slot_sets`.
#[derive(Debug, Clone, Default)]
pub struct SlotSet {
    words: Vec<u64>,
}

impl SlotSet {
    /// Reads a set whose lowest slots come first.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let word = |chunk: &[u8]| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        };
        Self { words: bytes.chunks(8).map(word).collect() }
    }

    /// The same as bytes; none of an empty set.
    pub fn to_bytes(&self) -> Vec<u8> {
        let used = self.words.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
        self.words[..used].iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[inline]
    pub fn has(&self, slot: u32) -> bool {
        self.words.get(slot as usize / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    /// Puts a slot in, or takes it out.
    pub fn set(&mut self, slot: u32, here: bool) {
        let (at, bit) = (slot as usize / 64, 1 << (slot % 64));
        match (self.words.get_mut(at), here) {
            (Some(word), true) => *word |= bit,
            (Some(word), false) => *word &= !bit,
            (None, true) => {
                self.words.resize(at + 1, 0);
                self.words[at] = bit;
            }
            (None, false) => (),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_the_same_after_bytes() {
        let mut set = SlotSet::default();
        assert!(set.to_bytes().is_empty() && !set.has(7));
        for slot in [3, 64, 200] {
            set.set(slot, true);
        }
        set.set(200, false);
        set.set(900, false);
        assert_eq!(set.to_bytes(), [8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        let again = SlotSet::from_bytes(&set.to_bytes()[..9]);
        let slots: Vec<u32> = (0..1000).filter(|&slot| again.has(slot)).collect();
        assert_eq!(slots, [3, 64]);
    }
}
