//! Values at stable numbers from 1, in chunks that never move: growing copies nothing.

const CHUNK: usize = 512;

/// A slab; number 0 is never used, so that it can mean "none".
#[derive(Debug)]
pub struct Slab<T> {
    chunks: Vec<Vec<Option<T>>>,
    free: Vec<u32>,
    /// Numbers handed out so far, free ones included.
    used: u32,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: Vec::new(), used: 0 }
    }
}

impl<T> Slab<T> {
    /// Stores a value and returns its number.
    pub fn insert(&mut self, value: T) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.used += 1;
            self.used
        });
        self.put(number, value);
        number
    }

    /// Stores a value at a number that another slab handed out.
    pub fn put(&mut self, number: u32, value: T) {
        let (chunk, offset) = place(number);
        while self.chunks.len() <= chunk {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let chunk = &mut self.chunks[chunk];
        while chunk.len() <= offset {
            chunk.push(None);
        }
        debug_assert!(chunk[offset].is_none());
        chunk[offset] = Some(value);
    }

    /// Takes a value out and frees its number.
    pub fn remove(&mut self, number: u32) -> T {
        let value = self.take(number);
        self.free.push(number);
        value
    }

    /// Takes a value out whose number another slab frees.
    pub fn take(&mut self, number: u32) -> T {
        let (chunk, offset) = place(number);
        self.chunks[chunk][offset].take().expect("a number in use")
    }

    /// The value at a number; None if that is not in use, as 0 never is.
    pub fn get(&self, number: u32) -> Option<&T> {
        if number == 0 {
            return None;
        }
        let (chunk, offset) = place(number);
        self.chunks.get(chunk)?.get(offset)?.as_ref()
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        if number == 0 {
            return None;
        }
        let (chunk, offset) = place(number);
        self.chunks.get_mut(chunk)?.get_mut(offset)?.as_mut()
    }

    /// Numbers in use are at most this.
    pub fn highest(&self) -> u32 {
        self.used
    }

    /// Values in use.
    pub fn len(&self) -> usize {
        self.used as usize - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.chunks
            .iter()
            .flatten()
            .zip(1_u32..)
            .filter_map(|(value, number)| value.as_ref().map(|value| (number, value)))
    }

    /// Heap memory of the slab itself, in bytes.
    pub fn bytes(&self) -> usize {
        self.chunks.len() * CHUNK * size_of::<Option<T>>() + self.free.capacity() * size_of::<u32>()
    }
}

fn place(number: u32) -> (usize, usize) {
    let index = number as usize - 1;
    (index / CHUNK, index % CHUNK)
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    #[inline]
    fn index(&self, number: u32) -> &T {
        let (chunk, offset) = place(number);
        self.chunks[chunk][offset].as_ref().expect("a number in use")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    #[inline]
    fn index_mut(&mut self, number: u32) -> &mut T {
        let (chunk, offset) = place(number);
        self.chunks[chunk][offset].as_mut().expect("a number in use")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_and_values_stay_where_they_are() {
        let mut slab = Slab::default();
        let numbers: Vec<u32> = (0..2000).map(|value| slab.insert(value)).collect();
        assert_eq!(numbers[0], 1);
        let first: *const i32 = &slab[1];
        assert_eq!(slab.remove(700), 699);
        assert_eq!(slab.insert(-1), 700);
        assert!(std::ptr::eq(first, &slab[1]));
        assert_eq!(slab.len(), 2000);
        assert_eq!(slab.iter().map(|(_, value)| i64::from(*value)).sum::<i64>(), 1999 * 1000 - 700);
    }
}
