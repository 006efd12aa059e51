//! A dump becomes a worker rank's content: built aside in slices, then in place of the old content at once.

use super::copies::device_copies;
use super::directory::{WorkerName, WorkerRank};
use super::dump::{DumpedBlock, DumpedOrphan, LoadError, WorkerDump, check};
use super::ledger::{Ledger, ROOT, Tip};
use super::shared::SHARED_TIER;
use super::state::{Index, State};
use super::store::Target;
use super::types::{SLICE, TIERS};
use super::waiting;
use super::window::WindowGroups;
use std::ops::Range;

/// A load under way. Its content is in a slot that no query sees until `commit`.
#[derive(Debug)]
pub struct Loading {
    name: WorkerRank,
    dump: WorkerDump,
    slot: u32,
    /// Which content of the rank it is to replace; a reset or a removal in between ends it.
    content: u64,
    blocks: usize,
    orphans: usize,
    /// In place of the slot's with the rest: nobody sees them before.
    windows: Option<Box<WindowGroups>>,
    /// Engine and sequence hashes of its blocks on the external tier, for the cache that the rank shares.
    shared: Vec<(u64, u64)>,
    /// All is loaded; the dump's lists go.
    filled: bool,
}

/// Blocks of a dump that are freed in the time in which one is stored.
const FREED_FOR_ONE: usize = 16;

impl Loading {
    /// Frees some of what was loaded, where nobody waits for it; whether more is left.
    fn free_some(&mut self) -> bool {
        let WorkerDump { blocks, orphans, .. } = &mut self.dump;
        orphans.truncate(orphans.len().saturating_sub(FREED_FOR_ONE * SLICE));
        blocks.truncate(blocks.len().saturating_sub(FREED_FOR_ONE * SLICE));
        // Now, or all of it would go to the system at once.
        orphans.shrink_to_fit();
        blocks.shrink_to_fit();
        !blocks.is_empty() || !orphans.is_empty()
    }
}

impl Index {
    /// Begins to load a dump; nothing changes for anybody before `commit`.
    pub fn begin_load(&self, name: WorkerName<'_>, dump: WorkerDump) -> Result<Loading, LoadError> {
        check(&dump)?;
        let windows = WindowGroups::of_groups(&dump.windows, self.block_size);
        if let Some(at) = dump.windows.iter().position(|group| !self.is_whole(group.block_size)) {
            let message = format!("its blocks are not multiples of {} tokens", self.block_size);
            return Err(LoadError::Contradiction { field: format!("windows.{at}"), message });
        }
        let tiers = dump.tiers();
        let shared =
            if tiers.contains(&usize::from(SHARED_TIER)) { dump.shared_blocks() } else { Vec::new() };
        let mut state = self.state.lock();
        let state = &mut *state;
        let handle = state.handle(name).ok_or(LoadError::UnknownWorker)?;
        let slot = self.new_slot(state, 0);
        let worker = state.ledger.worker_mut(slot);
        worker.groups.clone_from(&dump.groups);
        // With room for what comes next: a table that is full grows at once, 20 ns an entry.
        worker.reserve(dump.blocks.len() + dump.blocks.len() / 8);
        worker.orphans.reserve(dump.orphans.len());
        state.ledger.refresh_groups(slot);
        // Levels of orphans, too: they are bound when their parent comes, on any tier.
        for tier in tiers {
            self.open_slot_level(state, slot, 0, tier);
        }
        let content = state.ranks[handle].content;
        Ok(Loading {
            name: name.into(),
            dump,
            slot,
            content,
            blocks: 0,
            orphans: 0,
            windows,
            shared,
            filled: false,
        })
    }

    /// Loads a slice; whether more is left.
    pub fn load_slice(&self, loading: &mut Loading) -> Result<bool, LoadError> {
        let mut budget = SLICE;
        while let (Some(windows), true) = (&mut loading.windows, budget > 0)
            && let Some(block) = loading.dump.window_blocks.pop()
        {
            windows.place(block.engine_hash, block.sequence_hash, block.counts);
            budget -= 1;
        }
        if budget < SLICE {
            return Ok(true);
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if loading.filled {
            self.share_loaded(state, loading);
            let more = self.make_room(state, loading.name.name(), loading.slot);
            drop(guard);
            return Ok(loading.free_some() || more || !loading.shared.is_empty());
        }
        let Loading { dump, slot, blocks, orphans, filled, .. } = loading;
        let before = *blocks + *orphans;
        let end = (*blocks + SLICE).min(dump.blocks.len());
        state.ledger.load_blocks(*slot, &dump.blocks, *blocks..end)?;
        let left = SLICE - (end - *blocks);
        *blocks = end;
        let end = (*orphans + left).min(dump.orphans.len());
        for orphan in &dump.orphans[*orphans..end] {
            state.ledger.load_orphan(*slot, orphan);
        }
        *orphans = end;
        let loaded = *blocks + *orphans;
        self.drain(state, loaded - before + 1);
        *filled = loaded == dump.blocks.len() + dump.orphans.len();
        Ok(true)
    }

    /// Puts what was loaded in place of what was known; false: the rank was reset or removed meanwhile, or not all
    /// is loaded.
    pub fn commit(&self, loading: Loading) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let handle = state.handle(loading.name.name()).filter(|_| loading.filled);
        let Some(handle) = handle.filter(|&handle| state.ranks[handle].content == loading.content) else {
            self.drop_slot(state, loading.slot);
            return false;
        };
        let old = std::mem::replace(&mut state.ranks[handle].slot, loading.slot);
        waiting::write(&self.directory).replace(
            &state.ledger.worker(old).bits,
            &state.ledger.worker(loading.slot).bits,
            handle,
        );
        self.drop_hidden(state, old);
        let new = state.ledger.worker_mut(loading.slot);
        (new.windows, new.is_shown) = (loading.windows, true);
        self.show_windows(state, handle);
        self.show_shared(state, handle);
        let content = self.next_content();
        let dump = loading.dump;
        let rank = &mut state.ranks[handle];
        rank.content = content;
        (rank.epoch, rank.last_event_id, rank.incompatible) =
            (dump.epoch, dump.last_event_id, dump.incompatible);
        if dump.incomplete {
            self.mark_incomplete(state, handle);
        }
        self.enforce_bound(state, loading.blocks + loading.orphans);
        true
    }

    /// Shares a slice of what a dump has on the external tier, whether it is committed or not: it is there.
    fn share_loaded(&self, state: &State, loading: &mut Loading) {
        let rank = state.handle(loading.name.name());
        let part = loading.shared.len().saturating_sub(SLICE);
        let some = loading.shared.split_off(part);
        if let Some(rank) = rank
            && let (Some(cache), [] | [(_, true)]) = (&state.ranks[rank].shared, &loading.dump.groups[..])
        {
            cache.store(rank, &some);
        }
    }

    /// Gives up a load.
    pub fn end_load(&self, loading: Loading) {
        self.drop_slot(&mut self.state.lock(), loading.slot);
    }

    /// Replaces all that events said of a worker rank, slice by slice.
    pub fn load(&self, name: WorkerName<'_>, dump: &WorkerDump) -> Result<(), LoadError> {
        let mut loading = self.begin_load(name, dump.clone())?;
        loop {
            match self.load_slice(&mut loading) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.end_load(loading);
                    return Err(error);
                }
            }
        }
        if self.commit(loading) { Ok(()) } else { Err(LoadError::Superseded) }
    }

    /// Drops a slice of what is above the bound once a slot takes the place of a rank's; whether more is left.
    fn make_room(&self, state: &mut State, name: WorkerName<'_>, slot: u32) -> bool {
        let Some(handle) = state.handle(name) else { return false };
        let old = std::mem::replace(&mut state.ranks[handle].slot, slot);
        let show = |state: &mut State, is_new: bool| {
            state.ledger.worker_mut(slot).is_shown = is_new;
            state.ledger.worker_mut(old).is_shown = !is_new;
        };
        show(state, true);
        let more = self.evict_slice(state);
        show(state, false);
        state.ranks[handle].slot = old;
        more
    }
}

impl WorkerDump {
    /// The tiers above the device on which anything is.
    fn tiers(&self) -> Vec<usize> {
        let blocks = self.blocks.iter().map(|block| &block.counts);
        let counts = blocks.chain(self.orphans.iter().map(|orphan| &orphan.counts));
        let tiers = counts.flatten().fold(0_u8, |all, copies| all | 1 << copies.tier);
        (1..TIERS).filter(|tier| tiers >> tier & 1 == 1).collect()
    }
}

impl Ledger {
    fn load_blocks(
        &mut self,
        slot: u32,
        blocks: &[DumpedBlock],
        part: Range<usize>,
    ) -> Result<(), LoadError> {
        let mut position = part.start;
        while position < part.end {
            let (run, target) = self.plain_run(slot, &blocks[position..part.end], position);
            if let Some(to) = target {
                let part = &blocks[position..position + run];
                let engine: Vec<u64> = part.iter().filter_map(|block| block.engine_hash).collect();
                let local: Vec<u64> = part.iter().map(|block| block.local_hash).collect();
                let parent = part[0].parent.and_then(|parent| blocks[parent].engine_hash);
                if part[0].parent.is_none() || parent.is_some() {
                    let refused = self.store(slot, parent, &engine, &local, to);
                    if refused.index_full > 0 {
                        return Err(LoadError::Full);
                    }
                    position += run;
                    continue;
                }
            }
            if !self.load_block(slot, blocks, position) {
                return Err(LoadError::Full);
            }
            position += 1;
        }
        self.finish();
        Ok(())
    }

    /// Length of the chain of plain blocks that begins a list, and where their copies go.
    fn plain_run(&self, slot: u32, blocks: &[DumpedBlock], position: usize) -> (usize, Option<Target>) {
        let counts = &blocks[0].counts;
        let [only] = counts[..] else { return (1, None) };
        if only.number != 1 || self.worker(slot).full_groups[..] != [only.group] {
            return (1, None);
        }
        let run = 1
            + (1..blocks.len())
                .take_while(|&next| {
                    blocks[next].counts == *counts && blocks[next].parent == Some(position + next - 1)
                })
                .count();
        (run, Some(Target { group: only.group, tier: only.tier, set: false }))
    }

    /// Loads one block; false: there is no room for it.
    fn load_block(&mut self, slot: u32, blocks: &[DumpedBlock], position: usize) -> bool {
        let block = &blocks[position];
        let Some(engine_hash) = block.engine_hash else { return true };
        // Down from the next block above that has an engine hash: holes have no name.
        let mut path = vec![block.local_hash];
        let mut above = block.parent;
        while let Some(hole) = above.map(|above| &blocks[above]).filter(|above| above.engine_hash.is_none()) {
            path.push(hole.local_hash);
            above = hole.parent;
        }
        path.reverse();
        let anchor = above
            .and_then(|above| blocks[above].engine_hash)
            .and_then(|parent| self.worker(slot).locate(parent));
        self.tip = anchor.map_or(ROOT, |(presence, offset)| Tip {
            node: self.part(slot, presence).node,
            next: offset + 1,
        });
        if !self.has_room(self.tip.node, &path) {
            self.tip = ROOT;
            return false;
        }
        let mut place = (0, 0);
        let mut done = 0;
        while done < path.len() {
            let (node, offset, blocks) = self.advance(slot, &path[done..]);
            done += blocks as usize;
            place = (node, offset + blocks - 1);
        }
        self.tip = ROOT;
        if !self.make_room_for_twin(slot, place.0, place.1) {
            self.doubt(place.0);
            return true;
        }
        self.touch(place.0);
        self.worker_mut(slot).device_copies += device_copies(&block.counts);
        self.bind(slot, place.0, place.1, engine_hash, block.counts.clone());
        true
    }

    fn load_orphan(&mut self, slot: u32, orphan: &DumpedOrphan) {
        let worker = self.worker_mut(slot);
        worker.device_copies += device_copies(&orphan.counts);
        let DumpedOrphan { engine_hash, parent_engine_hash, local_hash, ref counts } = *orphan;
        worker.orphans.insert(engine_hash, parent_engine_hash, local_hash, counts.clone());
    }
}
