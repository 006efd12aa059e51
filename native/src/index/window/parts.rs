//! A map of which no part grows, or is copied, for long.

use hashbrown::HashMap;

use crate::table::mix;

/// Maps in one `Parts`.
pub const PARTS: usize = 256;

/// A map in parts.
#[derive(Debug)]
pub struct Parts<V> {
    pub parts: Box<[HashMap<u64, V>]>,
    pub len: usize,
}

impl<V> Default for Parts<V> {
    fn default() -> Self {
        Self { parts: (0..PARTS).map(|_| HashMap::new()).collect(), len: 0 }
    }
}

impl<V> Parts<V> {
    fn part(key: u64) -> usize {
        (mix(key, 0) >> 32) as usize % PARTS
    }

    pub fn get(&self, key: u64) -> Option<&V> {
        self.parts[Self::part(key)].get(&key)
    }

    pub fn get_mut(&mut self, key: u64) -> Option<&mut V> {
        self.parts[Self::part(key)].get_mut(&key)
    }

    pub fn or_insert_with(&mut self, key: u64, value: impl FnOnce() -> V) -> &mut V {
        let len = &mut self.len;
        self.parts[Self::part(key)].entry(key).or_insert_with(|| {
            *len += 1;
            value()
        })
    }

    pub fn remove(&mut self, key: u64) -> Option<V> {
        let value = self.parts[Self::part(key)].remove(&key)?;
        self.len -= 1;
        Some(value)
    }

    pub fn bytes(&self) -> usize {
        self.parts.iter().map(HashMap::allocation_size).sum::<usize>()
            + size_of::<HashMap<u64, V>>() * self.parts.len()
    }
}
