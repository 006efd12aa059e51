//! Caches that several worker ranks read, such as a Mooncake store or a shared file system: their *members*.
//!
//! ```text
//! events of all members ── engine hash ──▶ block: sequence hash      (writer)
//!                          sequence hash ──▶ engine hash             (queries)
//! ```
//!
//! What one member announces on the external tier, every member can read. So a query counts, beyond the blocks that a
//! rank holds by itself, those that follow in the shared cache without a gap. Blocks outlive the rank that stored them,
//! until a member says that they were removed, all members have cleared their caches, or the last member leaves.
//!
//! Members name a prefix alike, or they would not find each other's blocks: one whose names mostly differ reads nothing
//! here. A block whose parent neither its publisher nor the cache has is not shared, since its prefix is unknown.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use parking_lot::RwLock;

use super::directory::{Directory, Handle, Row};
use super::dump::WorkerDump;
use super::parts::Parts;
use super::prompt::Prompt;
use super::state::{Index, State};
use super::types::{LEVELS, PREDICTED, TIERS};
use super::waiting;
use super::window::settle::HashedNodes;
use crate::events::{Batch, Event};
use crate::hashing::extend_sequence;

/// Blocks of a shared cache, where its members do not say how many it has room for.
pub const SHARED_LIMIT: usize = 1 << 22;

/// The tier of shared blocks: external.
pub const SHARED_TIER: u8 = TIERS as u8 - 1;

/// What a worker was registered with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedOptions {
    /// "": it shares none.
    pub name: String,
    /// The tier on which its engine announces shared blocks, besides the external one.
    pub tier: Option<u8>,
    /// Blocks that it has room for; 0: unknown.
    pub blocks: u64,
}

/// State of a shared cache; as in `kvscout_blocks.index.block_index.SharedCacheStats`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct SharedCacheStats {
    pub name: String,
    pub blocks: u64,
    pub members: u64,
    pub disagreeing: u64,
    pub evicted: u64,
}

#[derive(Debug)]
struct Block {
    key: u64,
    /// Number of its place in the order.
    place: u64,
}

#[derive(Debug)]
struct Held {
    engine_hash: u64,
    /// Held in this round of clearing, and in the one before.
    round: u32,
}

#[derive(Debug, Default)]
struct Content {
    blocks: Parts<Block>,
    held: Parts<Held>,
    /// Engine hashes as they came; what went since keeps its place.
    order: VecDeque<u64>,
    /// Number of the first place in the order.
    first: u64,
    limit: usize,
    evicted: u64,
    /// How often all members had cleared their caches.
    round: u32,
    /// Blocks of this round or the next one.
    live: usize,
    /// Blocks of the next round: announced by members that have cleared their caches in this one.
    fresh: usize,
    cleared: HashSet<Handle>,
    /// Blocks that each member named as others did, less those that it named otherwise.
    agreement: HashMap<Handle, i64>,
}

impl Content {
    /// Whether a block that is held is known by this name.
    fn is_named(&mut self, engine_hash: u64, key: u64, round: u32) -> Option<bool> {
        let held = self.held.get_mut(key).filter(|held| held.round >= self.round)?;
        let same = held.engine_hash == engine_hash;
        if same && held.round < round {
            held.round = round;
            self.fresh += 1;
        }
        Some(same)
    }

    /// Adds a block that is not held.
    fn add(&mut self, engine_hash: u64, key: u64, round: u32) {
        if let Some(block) = self.blocks.get(engine_hash)
            && block.key != key
            && self.held.get(block.key).is_some_and(|held| held.round >= self.round)
        {
            return;
        }
        self.drop_block(engine_hash);
        if let Some(old) = self.held.get(key).map(|held| held.engine_hash) {
            self.drop_block(old);
        }
        let place = self.first + self.order.len() as u64;
        self.order.push_back(engine_hash);
        self.blocks.or_insert_with(engine_hash, || Block { key, place });
        self.held.or_insert_with(key, || Held { engine_hash, round });
        self.live += 1;
        self.fresh += usize::from(round > self.round);
        while self.order.len() > self.limit {
            self.evict();
        }
    }

    /// Gives the first place away.
    fn evict(&mut self) {
        let Some(oldest) = self.order.pop_front() else { return };
        if self.blocks.get(oldest).is_some_and(|block| block.place == self.first) {
            self.evicted += u64::from(self.drop_block(oldest));
        }
        self.first += 1;
    }

    /// Drops a block; whether it was held.
    fn drop_block(&mut self, engine_hash: u64) -> bool {
        let Some(block) = self.blocks.remove(engine_hash) else { return false };
        let Some(held) = self.held.remove(block.key) else { return false };
        let is_held = held.round >= self.round;
        self.live -= usize::from(is_held);
        self.fresh -= usize::from(held.round > self.round);
        is_held
    }
}

/// One shared cache; see the module.
#[derive(Debug, Default)]
pub struct SharedCache {
    content: RwLock<Content>,
}

impl SharedCache {
    /// Makes a rank a member.
    ///
    /// `blocks`: what it says the cache has room for, 0 if nothing; `bound`: of the index, 0 if there is none.
    pub fn join(&self, member: Handle, blocks: u64, bound: usize) {
        let mut content = self.content.write();
        content.agreement.entry(member).or_insert(0);
        let said = usize::try_from(blocks).unwrap_or(usize::MAX);
        let room = if said == 0 { SHARED_LIMIT } else { said };
        let limit = if bound > 0 { room.min(bound) } else { room };
        content.limit = content.limit.max(limit);
    }

    /// Ends a membership; whether nobody is left.
    pub fn leave(&self, member: Handle) -> bool {
        let mut content = self.content.write();
        content.agreement.remove(&member);
        content.cleared.remove(&member);
        content.agreement.is_empty()
    }

    /// Whether a member names blocks as the others do.
    pub fn agrees(&self, member: Handle) -> bool {
        self.content.read().agreement.get(&member).is_some_and(|&balance| balance >= 0)
    }

    /// Forgets how a member named blocks: its engine began anew.
    pub fn renew(&self, member: Handle) {
        if let Some(balance) = self.content.write().agreement.get_mut(&member) {
            *balance = 0;
        }
    }

    /// Adds blocks that a member announced: engine hash and sequence hash of each.
    pub fn store(&self, member: Handle, blocks: &[(u64, u64)]) {
        let mut content = self.content.write();
        let round = content.round + u32::from(content.cleared.contains(&member));
        let mut balance = content.agreement.get(&member).copied().unwrap_or(0);
        for &(engine_hash, key) in blocks {
            match content.is_named(engine_hash, key, round) {
                Some(true) => balance += 1,
                Some(false) => balance -= 1,
                None if balance >= 0 => content.add(engine_hash, key, round),
                None => {}
            }
        }
        if let Some(known) = content.agreement.get_mut(&member) {
            *known = balance;
        }
    }

    /// The sequence hash of a block that is held.
    fn key_of(&self, engine_hash: u64) -> Option<u64> {
        let content = self.content.read();
        let block = content.blocks.get(engine_hash)?;
        content.held.get(block.key).filter(|held| held.round >= content.round).map(|_| block.key)
    }

    /// Drops blocks, whoever stored them.
    pub fn remove(&self, engine: &[u64]) {
        let mut content = self.content.write();
        for &engine_hash in engine {
            content.drop_block(engine_hash);
        }
    }

    /// Notes that a member cleared its caches. Once all have, so is the shared one, but for what they stored since.
    pub fn clear(&self, member: Handle) {
        let mut content = self.content.write();
        content.cleared.insert(member);
        if content.cleared.len() == content.agreement.len() {
            content.round += 1;
            (content.live, content.fresh) = (content.fresh, 0);
            content.cleared.clear();
        }
    }

    pub fn stats(&self, name: &str) -> SharedCacheStats {
        let content = self.content.read();
        SharedCacheStats {
            name: name.to_owned(),
            blocks: content.live as u64,
            members: content.agreement.len() as u64,
            disagreeing: content.agreement.values().filter(|&&balance| balance < 0).count() as u64,
            evicted: content.evicted,
        }
    }

    pub fn bytes(&self) -> usize {
        let content = self.content.read();
        content.blocks.bytes() + content.held.bytes() + content.order.capacity() * size_of::<u64>()
    }

    /// The first contradiction.
    pub fn check(&self) -> Result<(), String> {
        let content = self.content.read();
        let all = || content.blocks.parts.iter().flat_map(HashMap::iter);
        let held = || content.held.parts.iter().flat_map(HashMap::values);
        let paired = all()
            .all(|(&hash, block)| content.held.get(block.key).is_some_and(|held| held.engine_hash == hash));
        let placed = all().all(|(&hash, block)| {
            let place = block.place.checked_sub(content.first);
            place.and_then(|place| content.order.get(place as usize)) == Some(&hash)
        });
        let counted = content.blocks.len == all().count()
            && content.held.len == content.blocks.len
            && content.live == held().filter(|held| held.round >= content.round).count()
            && content.fresh == held().filter(|held| held.round > content.round).count();
        let bounded = content.order.len() <= content.limit;
        match (paired, placed, counted, bounded) {
            (true, true, true, true) => Ok(()),
            state => Err(format!("shared cache: paired, placed, counted, bounded: {state:?}")),
        }
    }
}

/// Lets the rows of members go on with what follows in their shared caches; a member without a row may get one.
pub fn extend_rows(directory: &Directory, prompt: &mut impl Prompt, rows: &mut Vec<Row>) {
    let mut keys: Vec<u64> = Vec::new();
    for (cache, members) in directory.shared() {
        let content = cache.content.read();
        let mut is_held = |block: usize| {
            if block >= prompt.len() {
                return false;
            }
            while keys.len() <= block {
                let local = prompt.hashes(keys.len() + 1)[keys.len()];
                keys.push(extend_sequence(keys.last().copied(), local));
            }
            content.held.get(keys[block]).is_some_and(|held| held.round >= content.round)
        };
        let mut run_from = |start: u32| {
            let mut end = start;
            while is_held(end as usize) {
                end += 1;
            }
            end
        };
        // Members mostly hold equally much, so that few runs are followed.
        let mut runs: HashMap<u32, u32> = HashMap::new();
        let mut missing = members.len();
        for row in rows.iter_mut().filter(|row| members.contains(&row.worker)) {
            let own = row.blocks[TIERS - 2];
            row.blocks[TIERS - 1] = *runs.entry(own).or_insert_with(|| run_from(own));
            missing -= 1;
        }
        let from_first = if missing > 0 { run_from(0) } else { 0 };
        if from_first > 0 {
            let seen: HashSet<Handle> = rows.iter().map(|row| row.worker).collect();
            let mut blocks = [0; LEVELS];
            blocks[TIERS - 1] = from_first;
            rows.extend(
                members.iter().filter(|member| !seen.contains(*member)).map(|&worker| Row { worker, blocks }),
            );
        }
    }
    rows.retain(|row| row.blocks[TIERS - 1] > 0 || row.blocks[PREDICTED] > 0);
}

impl Index {
    /// Makes a rank a member of the cache that its registration names, and of no other.
    pub(super) fn join_shared(&self, state: &mut State, worker: Handle) {
        let SharedOptions { name, blocks, .. } = &state.ranks[worker].options.shared;
        let (name, blocks) = (name.clone(), *blocks);
        let wanted = (!name.is_empty()).then(|| Arc::clone(state.shared.entry(name).or_default()));
        let before = std::mem::replace(&mut state.ranks[worker].shared, wanted.clone());
        if let Some(before) =
            before.filter(|before| !wanted.as_ref().is_some_and(|now| Arc::ptr_eq(before, now)))
            && before.leave(worker)
        {
            state.shared.retain(|_, cache| !Arc::ptr_eq(cache, &before));
        }
        if let Some(cache) = &wanted {
            cache.join(worker, blocks, self.bounds.max_blocks);
        }
        self.show_shared(state, worker);
    }

    /// Ends a rank's membership, since it leaves.
    pub(super) fn leave_shared(&self, state: &mut State, worker: Handle) {
        if state.ranks[worker].shared.is_some() {
            state.ranks[worker].options.shared = SharedOptions::default();
            self.join_shared(state, worker);
        }
    }

    /// Forgets how a rank named blocks: its engine began anew.
    pub(super) fn renew_shared(&self, state: &State, worker: Handle) {
        if let Some(cache) = &state.ranks[worker].shared {
            cache.renew(worker);
            self.show_shared(state, worker);
        }
    }

    /// Lets queries see whether a rank reads its shared cache.
    ///
    pub(super) fn show_shared(&self, state: &State, worker: Handle) {
        let shared = state.ranks[worker].shared.as_ref();
        let reads = shared.filter(|cache| may_share(state, worker) && cache.agrees(worker));
        if waiting::read(&self.directory).shared_of(worker).map(Arc::as_ptr) != reads.map(Arc::as_ptr) {
            waiting::write(&self.directory).set_shared(worker, reads.cloned());
        }
    }

    /// Shares what an event that was just applied says of the external tier.
    pub(super) fn share(&self, state: &State, worker: Handle, batch: &Batch, event: &Event) {
        let rank = &state.ranks[worker];
        let Some(cache) = &rank.shared else { return };
        if !may_share(state, worker) {
            self.show_shared(state, worker);
            return;
        }
        match event {
            Event::Stored(stored) if stored.tier == SHARED_TIER => {
                let named = self.named(state, rank.slot, cache, batch.hashes(stored.engine_hashes));
                cache.store(worker, &named);
                self.show_shared(state, worker);
            }
            Event::Removed(removed) if removed.tier == SHARED_TIER => {
                cache.remove(batch.hashes(removed.engine_hashes));
            }
            Event::Cleared => cache.clear(worker),
            _ => {}
        }
    }

    /// Engine hash and sequence hash of the blocks of an event whose prefix is known: to the rank, or to the cache.
    fn named(&self, state: &State, slot: u32, cache: &SharedCache, engine: &[u64]) -> Vec<(u64, u64)> {
        let mut hashed = HashedNodes::new();
        let mut named: Vec<(u64, u64)> = Vec::with_capacity(engine.len());
        for &engine_hash in engine {
            let key = state.ledger.sequence_hash_of(slot, engine_hash, &mut hashed).or_else(|| {
                let orphan = state.ledger.worker(slot).orphans.get(engine_hash)?;
                let before = named.last().filter(|(before, _)| *before == orphan.parent);
                let above = before.map(|(_, key)| *key).or_else(|| cache.key_of(orphan.parent))?;
                Some(extend_sequence(Some(above), orphan.local))
            });
            named.extend(key.map(|key| (engine_hash, key)));
        }
        named
    }

    /// The shared caches, by name.
    pub fn shared_caches(&self) -> Vec<SharedCacheStats> {
        let state = self.state.lock();
        let mut all: Vec<_> = state.shared.iter().map(|(name, cache)| cache.stats(name)).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

/// Whether what a rank announces can be shared: not with several cache groups, since a prefix hit needs them all.
fn may_share(state: &State, worker: Handle) -> bool {
    let rank = &state.ranks[worker];
    let groups = &state.ledger.worker(rank.slot).groups;
    rank.incompatible.is_empty() && matches!(groups[..], [] | [(_, true)])
}

impl WorkerDump {
    /// Engine hash and sequence hash of each block on the external tier.
    pub(super) fn shared_blocks(&self) -> Vec<(u64, u64)> {
        let mut keys: Vec<u64> = Vec::with_capacity(self.blocks.len());
        let mut shared = Vec::new();
        for block in &self.blocks {
            let key = extend_sequence(block.parent.map(|parent| keys[parent]), block.local_hash);
            keys.push(key);
            if let Some(engine_hash) = block.engine_hash
                && block.counts.iter().any(|copies| copies.tier == SHARED_TIER)
            {
                shared.push((engine_hash, key));
            }
        }
        shared
    }
}
