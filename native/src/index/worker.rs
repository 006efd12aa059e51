//! What one worker rank holds: the writer's side, which no query reads.
//!
//! ```text
//! engine hash ──table──▶ (presence, depth) ──▶ presence: this worker's part of one node
//!                                               own[offset]    the engine hash bound there
//!                                               bound          offsets that have one
//!                                               tiers[t]       offsets with a copy on tier t
//! ```
//!
//! A block is *plain* if one engine hash is bound to it, and on each tier it has one copy in every
//! full-attention group or none at all: then the sets say all. Other blocks are *odd*: `Worker::odd` has
//! their counts, and of the tier sets only the one of their level contains them. A hash that is bound
//! without a copy is demoted. What was removed is a ghost.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::copies::{Binding, Counts, Odd, plain_counts};
use super::cut::Cut;
use super::demoted::{Demoted, Demotion};
use super::ghosts::{Above, Ghost, Ghosts};
use super::idle::Idle;
use super::orphans::Orphans;
use super::presence::Presence;
use super::trie::MAX_RUN;
use super::types::{BATCH, LEVELS, NO_BIT, PREDICTED, PresenceId, TIERS};
use super::unrooted::Unrooted;
use super::window::WindowGroups;
use crate::events::Stored;
use crate::slab::Slab;
use crate::table::{Slot, Table, mix};

/// Bits of a table's payload: the depth modulo `MAX_RUN` and the presence.
const DEPTH_BITS: u32 = MAX_RUN.ilog2();
const PRESENCE_BITS: u32 = 26;
const PAYLOAD_BITS: u32 = DEPTH_BITS + PRESENCE_BITS;

/// Presences of one worker: above 10 GB of them.
pub const MAX_PRESENCES: PresenceId = (1 << PRESENCE_BITS) - 1;

/// Odd blocks by presence and depth.
type OddBlocks = HashMap<(PresenceId, u32), Odd>;

/// One worker rank; see the module.
#[derive(Debug, Default)]
pub struct Worker {
    /// One bit a level, or `NO_BIT`.
    pub bits: [u32; LEVELS],
    secret: u64,
    table: Table<PAYLOAD_BITS>,
    pub presences: Slab<Presence>,
    /// `end` of a node → the first of the presences in its children, while there is no presence in the node itself.
    pub detached: HashMap<u64, PresenceId>,
    /// Known groups, sorted, and whether each is full attention.
    pub groups: Vec<(u32, bool)>,
    pub full_groups: SmallVec<[u32; 2]>,
    /// (presence, depth) → the bindings of an odd block.
    pub odd: OddBlocks,
    pub ghosts: Ghosts,
    pub demoted: Demoted,
    pub demoted_until: f64,
    pub orphans: Orphans,
    /// Prefixes held on any tier.
    pub held: u64,
    /// Prefixes that queries see on each level: Σ reach of the presences.
    pub rooted: [u64; LEVELS],
    /// Σ device copies, orphans included.
    pub device_copies: u64,
    pub predictions: u64,
    /// Its content is hidden from queries, and on its way out of the trie.
    pub dropped: bool,
    /// It is the content of a rank.
    pub is_shown: bool,
    /// It changed since it was counted.
    pub is_touched: bool,
    pub counted: super::totals::Counts,
    /// Heap memory of the presences.
    pub parts_bytes: usize,
    /// A limit kept something of it out.
    pub incomplete: bool,
    /// A prompt began without a parent, or a block was called 0: so a parent 0 is a block like any other.
    pub zero_is_block: bool,
    /// It named a tier other than the device, or a block without its content: what was removed may be asked for.
    pub moves_blocks: bool,
    /// The next presence to take out of the trie, once the worker is dropped; 0: the highest.
    pub drain_next: PresenceId,
    /// The last presence whose reach on levels that were opened is computed; None: all are.
    pub filling: Option<PresenceId>,
    pub unrooted: Unrooted,
    /// Where the bound takes next.
    pub idle: Idle,
    /// Groups with a sliding window, if there are any.
    pub windows: Option<Box<WindowGroups>>,
    /// Under way: what is to become predictions.
    pub demotion: Option<Demotion>,
    /// Under way: who copies the content.
    pub cuts: Vec<Arc<Mutex<Cut>>>,
}

/// The presence and the offset that a payload names.
#[inline]
fn place(presences: &Slab<Presence>, payload: u64) -> (PresenceId, u32) {
    let presence = (payload >> DEPTH_BITS) as PresenceId;
    let depth = payload as u32 % MAX_RUN;
    (presence, depth.wrapping_sub(presences[presence].start) % MAX_RUN)
}

/// Whether a payload is that of an engine hash.
#[inline]
fn names(presences: &Slab<Presence>, odd: &OddBlocks, payload: u64, engine_hash: u64) -> bool {
    let (presence, offset) = place(presences, payload);
    let part = &presences[presence];
    part.own.get(offset as usize) == Some(&engine_hash)
        || part.is_odd(offset)
            && odd[&(presence, part.start + offset)].iter().any(|binding| binding.engine_hash == engine_hash)
}

impl Worker {
    pub fn new(device_bit: u32, secret: u64) -> Self {
        let mut bits = [NO_BIT; LEVELS];
        bits[0] = device_bit;
        Self { bits, secret, ghosts: Ghosts::new(secret), ..Self::default() }
    }

    fn payload(presence: PresenceId, depth: u32) -> u64 {
        u64::from(presence) << DEPTH_BITS | u64::from(depth % MAX_RUN)
    }

    /// Hash of an engine hash, for the table.
    #[inline]
    fn hash(&self, engine_hash: u64) -> u64 {
        mix(engine_hash, self.secret)
    }

    /// Brings the table's lines for some engine hashes into the cache: their misses overlap.
    #[inline]
    pub fn warm(&self, engine: impl IntoIterator<Item = u64>) {
        let lines =
            engine.into_iter().fold(0, |all, engine_hash| all | self.table.warm(self.hash(engine_hash)));
        std::hint::black_box(lines);
    }

    /// Where an engine hash is bound, demoted ones included.
    #[inline]
    pub fn locate(&self, engine_hash: u64) -> Option<(PresenceId, u32)> {
        self.find(engine_hash).map(|(_, payload)| place(&self.presences, payload))
    }

    fn find(&self, engine_hash: u64) -> Option<(Slot, u64)> {
        let is = |payload| names(&self.presences, &self.odd, payload, engine_hash);
        self.table.find(self.hash(engine_hash), is)
    }

    /// Turns blocks of a run into ghosts, the last one first; of the first one it is told what is above it, if
    /// that is known. `bound` is the caller's.
    #[inline]
    pub fn bury_run(
        &mut self,
        presence: PresenceId,
        first: u32,
        local: &[u64],
        above: Option<Above>,
        tiers: u8,
    ) {
        for (offset, &local) in (first..first + local.len() as u32).zip(local).rev() {
            let part = &self.presences[presence];
            let engine_hash = part.own[offset as usize];
            let above =
                if offset > first { Some(Above::Block(part.own[offset as usize - 1])) } else { above };
            let payload = Self::payload(presence, part.start + offset);
            if let Some(slot) = self.table.slot_of(self.hash(engine_hash), payload) {
                self.table.remove(slot);
            }
            match above {
                Some(above) => self.ghosts.push(Ghost { engine_hash, local, above, tiers }),
                // What it was before it was bound does not count again.
                None => drop(self.ghosts.take(engine_hash)),
            }
        }
    }

    /// Binds engine hashes to offsets whose `own` has them already; how many were not bound anywhere, until
    /// the first one that was.
    #[inline]
    pub fn enter(&mut self, engine: &[u64], presence: PresenceId, offset: u32) -> u32 {
        let Self { table, presences, odd, secret, .. } = self;
        table.reserve(engine.len());
        let depth = presences[presence].start + offset;
        let warm = |table: &Table<PAYLOAD_BITS>, batch: &[u64]| {
            let lines = batch.iter().fold(0, |all, &engine_hash| all | table.warm(mix(engine_hash, *secret)));
            std::hint::black_box(lines);
        };
        let mut entered = 0;
        for batch in engine.chunks(BATCH) {
            warm(table, batch);
            for &engine_hash in batch {
                let is = |payload| names(presences, odd, payload, engine_hash);
                let payload = Self::payload(presence, depth + entered);
                if table.find_or_insert(mix(engine_hash, *secret), payload, is).is_some() {
                    return entered;
                }
                entered += 1;
            }
        }
        entered
    }

    /// The block of the first of some engine hashes, and how many of them are the ones of the blocks above
    /// it, upwards: engines free a prompt from its end. None if it is unknown, or one is not simply bound.
    pub fn climb(&self, engine: &[u64]) -> Option<(PresenceId, u32, u32)> {
        let (presence, last) = self.locate(engine[0])?;
        let part = &self.presences[presence];
        if part.more.is_some() {
            return None;
        }
        let above = (0..=last).rev().zip(engine);
        let blocks = above
            .take_while(|&(offset, engine_hash)| {
                part.bound.contains(offset) && part.own[offset as usize] == *engine_hash
            })
            .count();
        Some((presence, last, blocks as u32))
    }

    /// Ends the binding of an engine hash in the table; where it was. `own` and `odd` are the caller's.
    pub fn leave(&mut self, engine_hash: u64) -> Option<(PresenceId, u32)> {
        let (slot, payload) = self.find(engine_hash)?;
        self.table.remove(slot);
        Some(place(&self.presences, payload))
    }

    /// Renumbers the presence of a binding, before its content moves.
    pub fn move_binding(&mut self, engine_hash: u64, depth: u32, to: PresenceId) {
        if let Some((slot, _)) = self.find(engine_hash) {
            self.table.replace(slot, Self::payload(to, depth));
        }
    }

    /// Cuts a presence at an offset; returns the new one, which is the tail or the head.
    pub fn split_presence(&mut self, presence: PresenceId, at: u32, new_tail: bool) -> PresenceId {
        let part = &self.presences[presence];
        let (start, depth) = (part.start, part.start + at);
        let moved: Vec<(u64, u32)> = part
            .bound
            .iter()
            .filter(|&offset| (offset >= at) == new_tail)
            .map(|offset| (part.own[offset as usize], start + offset))
            .collect();
        let other = self.presences.insert(Presence { start, ..Presence::default() });
        for &(engine_hash, depth) in &moved {
            self.move_binding(engine_hash, depth, other);
        }
        let odd: Vec<u32> = moved
            .iter()
            .map(|&(_, depth)| depth)
            .filter(|&depth| self.odd.contains_key(&(presence, depth)))
            .collect();
        for &depth in &odd {
            let twins: SmallVec<[u64; 2]> =
                self.odd[&(presence, depth)].iter().skip(1).map(|binding| binding.engine_hash).collect();
            for engine_hash in twins {
                self.move_binding(engine_hash, depth, other);
            }
        }
        for depth in odd {
            if let Some(bindings) = self.odd.remove(&(presence, depth)) {
                self.odd.insert((other, depth), bindings);
            }
        }
        let part = &mut self.presences[presence];
        let own = part.own.split_off(at as usize);
        let mut tail = Presence {
            start: depth,
            own,
            bound: part.bound.split_off(at),
            device: part.device.split_off(at),
            reach: part.reach.saturating_sub(at),
            more: part.more.as_mut().map(|more| Box::new(more.split_off(at))),
            ..Presence::default()
        };
        part.reach = part.reach.min(at);
        if !new_tail {
            std::mem::swap(&mut tail.own, &mut part.own);
            std::mem::swap(&mut tail.bound, &mut part.bound);
            std::mem::swap(&mut tail.device, &mut part.device);
            std::mem::swap(&mut tail.reach, &mut part.reach);
            std::mem::swap(&mut tail.more, &mut part.more);
            tail.start = start;
            part.start = depth;
        }
        self.presences[other] = tail;
        other
    }

    /// Takes a presence out that nothing hangs below.
    pub fn remove_presence(&mut self, presence: PresenceId) {
        self.parts_bytes -= self.presences.remove(presence).measured as usize;
    }

    /// Makes room for so many engine hashes at once: nothing grows while they come.
    pub fn reserve(&mut self, engine_hashes: usize) {
        self.table.reserve(engine_hashes);
    }

    /// An event in which a parent 0 is none, since some engines have no other word for it. A worker's is if it never
    /// began a prompt without a parent, and never had a block 0.
    pub fn rooted(&self, event: &Stored) -> Stored {
        let is_block = self.zero_is_block || self.locate(0).is_some() || self.orphans.contains(0);
        Stored { parent: event.parent.filter(|&parent| parent != 0 || is_block), ..*event }
    }

    /// Whether something is under way that the next write must find done.
    pub fn is_busy(&self) -> bool {
        self.demotion.is_some() || !self.cuts.is_empty()
    }

    /// Whether `maintain` has something to do, now or later.
    pub fn has_work(&self) -> bool {
        self.filling.is_some()
            || !self.unrooted.is_empty()
            || self.demotion.is_some()
            || !self.demoted.is_empty()
    }

    /// Engine hashes bound, demoted ones included.
    pub fn bindings(&self) -> usize {
        self.table.len()
    }

    /// Bound hashes with copies, and orphans: what the `max_blocks` bound counts, besides ghosts.
    pub fn entries(&self) -> usize {
        self.bindings() - self.demoted.len() + self.orphans.len()
    }

    /// The counts of a bound engine hash, found at an offset.
    pub fn counts(&self, engine_hash: u64, presence: PresenceId, offset: u32) -> Counts {
        let part = &self.presences[presence];
        if part.is_odd(offset) {
            return self.odd[&(presence, part.start + offset)]
                .iter()
                .find(|binding| binding.engine_hash == engine_hash)
                .map_or_else(Counts::new, |binding| binding.counts.clone());
        }
        self.plain_counts(presence, offset)
    }

    /// The counts that the tier sets of a plain block stand for.
    pub fn plain_counts(&self, presence: PresenceId, offset: u32) -> Counts {
        let part = &self.presences[presence];
        plain_counts(&self.full_groups, |tier| part.on_tier(tier, offset))
    }

    /// Whether a bound block has any copy.
    pub fn has_copies(&self, presence: PresenceId, offset: u32) -> bool {
        let part = &self.presences[presence];
        if part.is_odd(offset) {
            let bindings = &self.odd[&(presence, part.start + offset)];
            return bindings.iter().any(|binding| !binding.counts.is_empty());
        }
        part.level(offset) < TIERS
    }

    /// The tiers of a block that one binding with these counts makes plain; None if it is odd.
    pub fn plain_tiers(&self, counts: &Counts) -> Option<[bool; TIERS]> {
        let mut tiers = [0; TIERS];
        for copies in counts {
            if copies.number != 1 || !self.full_groups.contains(&copies.group) {
                return None;
            }
            tiers[usize::from(copies.tier)] += 1;
        }
        let all = self.full_groups.len();
        tiers.iter().all(|&groups| groups == 0 || groups == all).then(|| tiers.map(|groups| groups > 0))
    }

    /// The slowest level of a tier that has a bit: what is rooted there is rooted on any tier.
    pub fn slowest_level(&self) -> usize {
        self.levels().filter(|&level| level < PREDICTED).last().unwrap_or(0)
    }

    /// Blocks held on any tier below a hole.
    pub fn hidden(&self) -> u64 {
        self.held - self.rooted[self.slowest_level()]
    }

    /// Levels that have a bit.
    pub fn levels(&self) -> impl Iterator<Item = usize> + use<> {
        let bits = self.bits;
        (0..LEVELS).filter(move |&level| bits[level] != NO_BIT)
    }

    /// Heap memory, in bytes; of odd blocks and window groups without what their counts have beyond the usual.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
            + self.presences.bytes()
            + self.parts_bytes
            + self.ghosts.bytes()
            + self.odd.len() * size_of::<Binding>()
            + self.odd.allocation_size()
            + self.orphans.bytes()
            + self.demoted.bytes()
            + self.detached.allocation_size()
            + self.idle.bytes()
            + self.windows.as_ref().map_or(0, |windows| windows.bytes())
    }
}
