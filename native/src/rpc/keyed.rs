//! Values by keys that are never used twice: a key that is out of date finds nothing.

/// A table; keys are a slot and, above it, how often that was used. 0 is no key.
#[derive(Debug)]
pub struct Keyed<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Keyed<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Keyed<T> {
    /// Stores what is made from its key.
    pub fn insert_with(&mut self, make: impl FnOnce(u64) -> T) -> u64 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 at once")
        });
        let entry = &mut self.slots[slot as usize];
        // The highest bit stays free for tokens of another kind.
        entry.0 = (entry.0 + 1) & 0x7fff_ffff;
        entry.0 = entry.0.max(1);
        let key = u64::from(entry.0) << 32 | u64::from(slot);
        entry.1 = Some(make(key));
        key
    }

    pub fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        let (used, value) = self.slots.get_mut(slot(key))?;
        if u64::from(*used) == key >> 32 { value.as_mut() } else { None }
    }

    pub fn get(&self, key: u64) -> Option<&T> {
        let (used, value) = self.slots.get(slot(key))?;
        if u64::from(*used) == key >> 32 { value.as_ref() } else { None }
    }

    pub fn remove(&mut self, key: u64) -> Option<T> {
        let (used, value) = self.slots.get_mut(slot(key))?;
        if u64::from(*used) != key >> 32 {
            return None;
        }
        let value = value.take()?;
        self.free.push(key as u32);
        Some(value)
    }

    /// Keys in use.
    pub fn keys(&self) -> Vec<u64> {
        let in_use = |(slot, entry): (usize, &(u32, Option<T>))| {
            entry.1.as_ref().map(|_| u64::from(entry.0) << 32 | slot as u64)
        };
        self.slots.iter().enumerate().filter_map(in_use).collect()
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

fn slot(key: u64) -> usize {
    (key & 0xffff_ffff) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_out_of_date_finds_nothing() {
        let mut table = Keyed::default();
        let first = table.insert_with(|_| 'a');
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert_with(|_| 'b');
        assert_ne!(first, second);
        assert_eq!(table.get(first), None);
        assert_eq!(table.remove(first), None);
        assert_eq!(table.get(second), Some(&'b'));
        assert_eq!(table.keys(), vec![second]);
        assert_eq!(table.get(0), None);
    }
}
