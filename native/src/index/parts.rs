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
    /// Heap memory of the parts.
    heap: usize,
}

impl<V> Default for Parts<V> {
    fn default() -> Self {
        Self { parts: (0..PARTS).map(|_| HashMap::new()).collect(), len: 0, heap: 0 }
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
        let part = &mut self.parts[Self::part(key)];
        if !part.contains_key(&key) {
            let before = part.allocation_size();
            part.insert(key, value());
            self.len += 1;
            self.heap += part.allocation_size() - before;
        }
        part.get_mut(&key).expect("it is there")
    }

    pub fn remove(&mut self, key: u64) -> Option<V> {
        let value = self.parts[Self::part(key)].remove(&key)?;
        self.len -= 1;
        Some(value)
    }

    pub fn bytes(&self) -> usize {
        self.heap + size_of::<HashMap<u64, V>>() * self.parts.len()
    }
}
