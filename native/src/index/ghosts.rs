//! Blocks that went, of one worker: what it takes to put one back below its parent.
//!
//! ```text
//! tombstones   oldest ─▶ [engine hash | parent's engine hash | local hash | older one of its bucket] ... ◀─ youngest
//! buckets      [youngest of these hashes] [ ... ]         as far as lookups went
//! ```
//!
//! Most engines never ask for a ghost, and a block that goes has its line of cache taken away by the next ones soon: so
//! one that goes is written down and nothing else. Buckets are brought in step by lookups. A tombstone is taken again once
//! there are as many younger ones as its worker may have (`limit_for`); a chain ends where it comes to one that was. A block that is stored
//! again keeps its tombstone, too: a ghost counts only while its hash is not bound. Those that the `max_blocks` bound
//! dropped are *evicted*: the engine still has them.

use crate::table::mix;

/// Blocks that went last and are remembered, for each worker rank: a power of two.
pub const GHOST_LIMIT: usize = 65_536;

/// The same of a rank that never moved a block from one tier to another: nobody asks for them.
const FEW_GHOSTS: usize = 1024;

/// Ghosts of a rank at most, a power of two: as many as its cache has blocks (0: unknown). `asked`: they may be asked
/// for, since the rank moves blocks, or a bound drops them.
pub fn limit_for(total_kv_blocks: u64, asked: bool) -> usize {
    let blocks = match total_kv_blocks {
        _ if !asked => FEW_GHOSTS,
        0 => GHOST_LIMIT,
        blocks => blocks.min(GHOST_LIMIT as u64) as usize,
    };
    blocks.next_power_of_two().max(FEW_GHOSTS)
}

/// Tombstones that there are at first.
const FIRST_TOMBSTONES: usize = 16;

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

/// A ghost in 32 bytes.
#[derive(Debug, Default, Clone, Copy)]
struct Tombstone {
    engine_hash: u64,
    local: u64,
    /// Engine hash of the block above.
    above: u64,
    /// Number of the next older one of its bucket, without its upper half.
    older: u32,
    tiers: u8,
    began: bool,
    /// It came back, or it is not known any more what was above it.
    is_over: bool,
}

/// The ghosts; see the module.
#[derive(Debug, Default)]
pub struct Ghosts {
    secret: u64,
    /// By number, a power of two of them.
    tombstones: Vec<Tombstone>,
    /// As many as there are tombstones, or none yet.
    buckets: Vec<u32>,
    /// Numbers in use: from the oldest one's to before the next one's.
    first: u64,
    next: u64,
    /// Numbers before this are in buckets.
    in_buckets: u64,
    /// Tombstones of evicted ones.
    evicted: usize,
    /// As `limit_for`.
    limit: usize,
}

impl Ghosts {
    /// None; the secret scatters the buckets.
    pub fn new(secret: u64) -> Self {
        Self { secret, limit: GHOST_LIMIT, ..Self::default() }
    }

    /// Sets how many there are at most; of more the oldest are forgotten.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        while self.len() > limit {
            self.forget_oldest();
        }
    }

    /// How many tombstones are in use.
    pub fn len(&self) -> usize {
        (self.next - self.first) as usize
    }

    /// Whether there may be ghosts that the engine still has.
    pub fn has_evicted(&self) -> bool {
        self.evicted > 0
    }

    /// The ghost that an engine hash is, if that is not bound.
    pub fn get(&mut self, engine_hash: u64) -> Option<Ghost> {
        let tombstone = self.find(engine_hash)?;
        let above = if tombstone.began { Above::Root } else { Above::Block(tombstone.above) };
        Some(Ghost { engine_hash, local: tombstone.local, above, tiers: tombstone.tiers })
    }

    /// Tells where the engine still has a block.
    pub fn set_tiers(&mut self, engine_hash: u64, tiers: u8) {
        let Some(tombstone) = self.find(engine_hash) else { return };
        let before = std::mem::replace(&mut tombstone.tiers, tiers);
        self.evicted = self.evicted + usize::from(tiers > 0) - usize::from(before > 0);
    }

    /// It is no longer known which of the evicted ones the engine has.
    pub fn doubt_evicted(&mut self) {
        if self.has_evicted() {
            self.tombstones.iter_mut().for_each(|tombstone| tombstone.tiers = 0);
            self.evicted = 0;
        }
    }

    /// Takes one out that comes back by its name, or is known otherwise.
    pub fn take(&mut self, engine_hash: u64) -> Option<Ghost> {
        let ghost = self.get(engine_hash)?;
        self.set_tiers(engine_hash, 0);
        self.find(engine_hash)?.is_over = true;
        Some(ghost)
    }

    /// Gives the tombstone of the oldest one away.
    pub fn forget_oldest(&mut self) {
        if self.has_evicted() {
            let oldest = self.first;
            self.evicted -= usize::from(self.tombstone(oldest).tiers > 0);
        }
        self.first += 1;
    }

    /// Adds the youngest; its hash is bound no more.
    #[inline]
    pub fn push(&mut self, ghost: Ghost) {
        if self.len() >= self.limit {
            self.forget_oldest();
        } else if self.len() == self.tombstones.len() {
            self.grow();
        }
        let Ghost { engine_hash, local, above, tiers } = ghost;
        let (began, above) = match above {
            Above::Root => (true, 0),
            Above::Block(above) => (false, above),
        };
        *self.tombstone(self.next) =
            Tombstone { engine_hash, local, above, older: 0, tiers, began, is_over: false };
        self.next += 1;
        self.evicted += usize::from(tiers > 0);
    }

    fn tombstone(&mut self, number: u64) -> &mut Tombstone {
        let mask = self.tombstones.len() - 1;
        &mut self.tombstones[number as usize & mask]
    }

    fn bucket(&mut self, engine_hash: u64) -> &mut u32 {
        let bits = self.buckets.len().ilog2();
        &mut self.buckets[(mix(engine_hash, self.secret) >> (64 - bits)) as usize]
    }

    /// The tombstone of the youngest ghost with an engine hash.
    fn find(&mut self, engine_hash: u64) -> Option<&mut Tombstone> {
        if self.len() == 0 {
            return None;
        }
        self.fill_buckets();
        let mut number = *self.bucket(engine_hash);
        let mut newest = self.next - 1;
        loop {
            // What has no place any more is older than all; with half a number, once in 2^32 it looks younger.
            let age = (newest as u32).wrapping_sub(number);
            let at = newest.checked_sub(u64::from(age)).filter(|&at| at >= self.first)?;
            let tombstone = *self.tombstone(at);
            if tombstone.engine_hash == engine_hash {
                return Some(self.tombstone(at)).filter(|tombstone| !tombstone.is_over);
            }
            if at == self.first {
                return None;
            }
            (number, newest) = (tombstone.older, at - 1);
        }
    }

    /// Puts those into buckets that are in none.
    fn fill_buckets(&mut self) {
        if self.buckets.len() < self.tombstones.len() {
            // With the number of none any more.
            self.buckets = vec![(self.first as u32).wrapping_sub(1); self.tombstones.len()];
            self.in_buckets = self.first;
        }
        for number in self.in_buckets.max(self.first)..self.next {
            let engine_hash = self.tombstone(number).engine_hash;
            let older = std::mem::replace(self.bucket(engine_hash), number as u32);
            self.tombstone(number).older = older;
        }
        self.in_buckets = self.next;
    }

    fn grow(&mut self) {
        let size = (2 * self.tombstones.len()).max(FIRST_TOMBSTONES);
        let old = std::mem::replace(&mut self.tombstones, vec![Tombstone::default(); size]);
        let first = self.first;
        for number in first..first + old.len() as u64 {
            *self.tombstone(number) = old[number as usize & (old.len() - 1)];
        }
    }

    pub fn bytes(&self) -> usize {
        self.tombstones.len() * size_of::<Tombstone>() + self.buckets.len() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, VecDeque};

    #[test]
    fn remembers_like_a_queue_and_a_map_under_random_operations() {
        let mut state = 3_u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let mut ghosts = Ghosts::new(7);
        let mut places: VecDeque<(u64, u64)> = VecDeque::new();
        let mut youngest: HashMap<u64, Ghost> = HashMap::new();
        for step in 0..400_000_u64 {
            let engine_hash = random(GHOST_LIMIT as u64 * 2);
            match random(100) {
                0 => {
                    assert_eq!(
                        ghosts.take(engine_hash).map(|ghost| ghost.local),
                        youngest.remove(&engine_hash).map(|ghost| ghost.local)
                    );
                }
                1 => {
                    ghosts.set_tiers(engine_hash, 0);
                    youngest.entry(engine_hash).and_modify(|ghost| ghost.tiers = 0);
                }
                2 if !places.is_empty() => {
                    ghosts.forget_oldest();
                    forget(&mut places, &mut youngest);
                }
                _ => {
                    let above = if step % 3 == 0 { Above::Root } else { Above::Block(step + 1) };
                    let ghost = Ghost { engine_hash, local: step, above, tiers: u8::from(step % 1000 == 0) };
                    ghosts.push(ghost);
                    if places.len() == GHOST_LIMIT {
                        forget(&mut places, &mut youngest);
                    }
                    places.push_back((engine_hash, step));
                    youngest.insert(engine_hash, ghost);
                }
            }
            assert_eq!(ghosts.len(), places.len());
            if step % 7 == 0 {
                let asked = random(GHOST_LIMIT as u64 * 2);
                let told = |ghost: Ghost| (ghost.local, ghost.above, ghost.tiers);
                assert_eq!(ghosts.get(asked).map(told), youngest.get(&asked).copied().map(told));
            }
        }
        assert!(ghosts.len() > GHOST_LIMIT / 2);
        ghosts.doubt_evicted();
        assert!(!ghosts.has_evicted());
    }

    fn forget(places: &mut VecDeque<(u64, u64)>, youngest: &mut HashMap<u64, Ghost>) {
        let Some((engine_hash, local)) = places.pop_front() else { return };
        if youngest.get(&engine_hash).is_some_and(|ghost| ghost.local == local) {
            youngest.remove(&engine_hash);
        }
    }
}
