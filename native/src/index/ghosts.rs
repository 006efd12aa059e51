//! Blocks that went, of one worker: what it takes to put one back below its parent.
//!
//! ```text
//! ring   oldest ─▶ [engine hash | parent's engine hash | local hash] ... ◀─ youngest
//!                    ▲ by its number, from the worker's table
//! ```
//!
//! Nothing of the trie is kept for them. A block that comes back leaves its place in the ring empty. Those that the
//! `max_blocks` bound dropped are *evicted*: the engine still has them.

use std::collections::VecDeque;

/// Blocks that went last and are remembered, for each worker rank.
pub const GHOST_LIMIT: usize = 65_536;

/// What a block was below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Above {
    /// It began a prompt.
    Root,
    /// The engine hash of its parent.
    Block(u64),
}

/// A block that went.
#[derive(Debug, Clone, Copy)]
pub struct Ghost {
    pub engine_hash: u64,
    pub local: u64,
    pub above: Above,
    /// Where the engine still has it, a bit a tier, for it was the bound that dropped it; 0: the engine removed it.
    pub tiers: u8,
}

/// The ghosts; see the module.
#[derive(Debug, Default)]
pub struct Ghosts {
    /// None: it came back.
    ring: VecDeque<Option<Ghost>>,
    /// Number of the oldest one, which wraps around.
    first: u32,
    live: usize,
}

impl Ghosts {
    pub fn len(&self) -> usize {
        self.live
    }

    /// The ghost of a number that is in use.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&Ghost> {
        self.ring.get(number.wrapping_sub(self.first) as usize)?.as_ref()
    }

    /// The engine hashes of the oldest places, for which the next ones may take them.
    pub fn oldest(&self, places: usize) -> impl Iterator<Item = u64> + '_ {
        let over = (self.ring.len() + places).saturating_sub(GHOST_LIMIT);
        self.ring.iter().take(over).flatten().map(|ghost| ghost.engine_hash)
    }

    /// The same, to change it.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Ghost> {
        self.ring.get_mut(number.wrapping_sub(self.first) as usize)?.as_mut()
    }

    /// It is no longer known which of the evicted ones the engine has.
    pub fn doubt_evicted(&mut self) {
        self.ring.iter_mut().flatten().for_each(|ghost| ghost.tiers = 0);
    }

    /// Takes the oldest one, and its number.
    pub fn take_oldest(&mut self) -> Option<(u32, Ghost)> {
        while !self.ring.is_empty() {
            let oldest = self.pop();
            if oldest.is_some() {
                return oldest;
            }
        }
        None
    }

    /// Takes the oldest place, if there are as many as may be: its number, and the ghost unless it came back.
    pub fn make_room(&mut self) -> Option<(u32, Ghost)> {
        if self.ring.len() < GHOST_LIMIT {
            return None;
        }
        self.pop()
    }

    /// Takes the oldest place.
    fn pop(&mut self) -> Option<(u32, Ghost)> {
        let number = self.first;
        let oldest = self.ring.pop_front()?;
        self.first = number.wrapping_add(1);
        self.live -= usize::from(oldest.is_some());
        oldest.map(|ghost| (number, ghost))
    }

    /// Adds the youngest; its number.
    #[inline]
    pub fn push(&mut self, ghost: Ghost) -> u32 {
        let number = self.first.wrapping_add(self.ring.len() as u32);
        self.ring.push_back(Some(ghost));
        self.live += 1;
        number
    }

    /// Takes one out, which comes back or is known otherwise.
    pub fn take(&mut self, number: u32) -> Option<Ghost> {
        let ghost = self.ring.get_mut(number.wrapping_sub(self.first) as usize)?.take();
        self.live -= usize::from(ghost.is_some());
        ghost
    }

    pub fn bytes(&self) -> usize {
        self.ring.capacity() * size_of::<Option<Ghost>>()
    }
}
