//! One value a block of a run: short ones are held in place, long ones grow in steps of a quarter.
//!
//! Engines store a prompt at once and then a few blocks at a time, so most runs are short, and memory that
//! doubles would be the larger part of the long ones.

use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

/// Values held in place.
const IN_PLACE: usize = 4;

/// Values for which a run that grows has room at least: what an engine generates comes a few blocks at a time.
const STEP: usize = 12;

/// The values; see the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run<T>(SmallVec<[T; IN_PLACE]>);

impl<T> Default for Run<T> {
    fn default() -> Self {
        Self(SmallVec::new())
    }
}

impl<T: Copy + Default> Run<T> {
    /// A run of equal values, without spare room.
    pub fn of(value: T, len: usize) -> Self {
        let mut run = SmallVec::new();
        run.reserve_exact(len);
        run.resize(len, value);
        Self(run)
    }

    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }

    pub fn extend(&mut self, values: &[T]) {
        self.reserve(values.len());
        self.0.extend_from_slice(values);
    }

    /// Shortens or lengthens; what is new is the default.
    pub fn resize(&mut self, len: usize) {
        self.reserve(len.saturating_sub(self.len()));
        self.0.resize(len, T::default());
    }

    /// Shortens, and gives memory back that is no longer needed.
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
        if self.0.spilled() && self.capacity() > 2 * self.len() + 2 * IN_PLACE {
            self.0.shrink_to_fit();
        }
    }

    /// Takes the values from `at` on out.
    pub fn split_off(&mut self, at: usize) -> Self {
        let at = at.min(self.len());
        let tail = Self::from(&self[at..]);
        self.0.truncate(at);
        self.0.shrink_to_fit();
        tail
    }

    /// Heap memory, in bytes.
    pub fn bytes(&self) -> usize {
        if self.0.spilled() { self.capacity() * size_of::<T>() } else { 0 }
    }

    fn reserve(&mut self, more: usize) {
        if self.capacity() - self.len() < more {
            self.0.reserve_exact(more.max(self.len() / 4).max(STEP));
        }
    }
}

impl<T: Copy + Default> From<&[T]> for Run<T> {
    fn from(values: &[T]) -> Self {
        let mut run = SmallVec::new();
        run.reserve_exact(values.len());
        run.extend_from_slice(values);
        Self(run)
    }
}

impl<T> Deref for Run<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for Run<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_by_a_quarter_and_gives_memory_back() {
        let mut run = Run::from(&[1_u64; 1024][..]);
        assert_eq!(run.capacity(), 1024);
        run.extend(&[2]);
        assert_eq!(run.capacity(), 1024 + 256);
        let tail = run.split_off(1000);
        assert_eq!((run.len(), tail.len(), tail[24]), (1000, 25, 2));
        assert_eq!((run.bytes(), tail.bytes()), (8000, 200));
        run.truncate(3);
        assert_eq!((&run[..], run.bytes()), (&[1, 1, 1][..], 0));
        run.resize(5);
        assert_eq!(&run[..], [1, 1, 1, 0, 0]);
    }
}
