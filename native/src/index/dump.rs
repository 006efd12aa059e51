//! One consistent cut of a worker rank: out as a list in depth-first order, and in again.

use std::fmt;

use hashbrown::{HashMap, HashSet};

use super::ledger::{Cursor, Ledger, ROOT};
use super::nodes::{index_of, shard_of};
use super::store::Target;
use super::worker::{Counts, NodeId, ORPHAN_LIMIT, Orphan, Worker, device_copies};
use super::{Index, WorkerName};

/// One block of a dump: an engine hash bound to a prefix, or a hole above one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedBlock {
    /// None: a hole.
    pub engine_hash: Option<u64>,
    /// Position of the parent's first entry; None: the block begins a prompt.
    pub parent: Option<usize>,
    pub local_hash: u64,
    /// Sorted; empty for a hole.
    pub counts: Counts,
}

/// One orphan of a dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpedOrphan {
    pub engine_hash: u64,
    pub parent_engine_hash: u64,
    pub local_hash: u64,
    pub counts: Counts,
}

/// The cut; the same state gives an equal one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkerDump {
    pub epoch: u64,
    pub last_event_id: Option<u64>,
    /// Known groups, sorted, and whether each is full attention.
    pub groups: Vec<(u32, bool)>,
    pub blocks: Vec<DumpedBlock>,
    /// Sorted by engine hash.
    pub orphans: Vec<DumpedOrphan>,
    /// Why the worker is not indexed; then it has no blocks. Empty: it is.
    pub incompatible: String,
}

/// Why a dump cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadError {
    UnknownWorker,
    /// The dump contradicts itself, in this field.
    Contradiction {
        field: String,
        message: String,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownWorker => f.write_str("the worker is not known"),
            Self::Contradiction { field, message } => write!(f, "{field}: {message}"),
        }
    }
}

impl Index {
    /// One consistent cut of a worker rank; None if it is not known.
    pub fn dump(&self, name: WorkerName<'_>) -> Option<WorkerDump> {
        let state = self.state.lock();
        let rank = &state.ranks[state.handle(name)?];
        let worker = state.ledger.worker(rank.slot);
        let mut orphans: Vec<DumpedOrphan> = worker
            .orphans
            .iter()
            .map(|(&engine_hash, orphan)| DumpedOrphan {
                engine_hash,
                parent_engine_hash: orphan.parent,
                local_hash: orphan.local,
                counts: orphan.counts.clone(),
            })
            .collect();
        orphans.sort_by_key(|orphan| orphan.engine_hash);
        Some(WorkerDump {
            epoch: rank.epoch,
            last_event_id: rank.last_event_id,
            groups: worker.groups.clone(),
            blocks: state.ledger.dump_blocks(rank.slot),
            orphans,
            incompatible: rank.incompatible.clone(),
        })
    }

    /// Replaces all that events said of a worker rank.
    pub fn load(&self, name: WorkerName<'_>, dump: &WorkerDump) -> Result<(), LoadError> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let worker = state.handle(name).ok_or(LoadError::UnknownWorker)?;
        check(dump)?;
        self.forget(state, worker);
        let rank = &mut state.ranks[worker];
        (rank.epoch, rank.last_event_id) = (dump.epoch, dump.last_event_id);
        rank.incompatible.clone_from(&dump.incompatible);
        let slot = rank.slot;
        state.ledger.worker_mut(slot).groups.clone_from(&dump.groups);
        state.ledger.refresh_groups(slot);
        // Those of orphans too: they are bound when their parent comes, on any tier.
        let counts = dump
            .blocks
            .iter()
            .map(|block| &block.counts)
            .chain(dump.orphans.iter().map(|orphan| &orphan.counts));
        let tiers = counts.flatten().fold(0_u8, |all, copies| all | 1 << copies.tier);
        for tier in (1..super::TIERS).filter(|tier| tiers >> tier & 1 == 1) {
            self.open_level(state, worker, tier);
        }
        state.ledger.load_blocks(slot, &dump.blocks);
        for orphan in &dump.orphans {
            state.ledger.load_orphan(slot, orphan);
        }
        let filled = dump.blocks.len() + dump.orphans.len();
        self.enforce_bound(state, filled);
        self.drain(state, filled + 1);
        Ok(())
    }
}

impl Ledger {
    fn dump_blocks(&self, slot: u32) -> Vec<DumpedBlock> {
        let worker = self.worker(slot);
        // How many blocks of each node are needed, the nodes above those of the worker included.
        let mut needed: HashMap<NodeId, u32> = HashMap::new();
        let mut below: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        for (presence, part) in worker.presences.iter() {
            let last = part.bound.iter().filter(|&offset| worker.has_copies(presence, offset)).last();
            let Some(last) = last else { continue };
            let mut step = (part.node, last + 1);
            while step.0 != 0 {
                let parent = self.nodes[step.0].parent;
                let known = needed.get(&step.0).copied();
                needed.insert(step.0, known.unwrap_or(0).max(step.1));
                if known.is_some() {
                    break;
                }
                below.entry(parent).or_default().push(step.0);
                step = (parent, if parent == 0 { 0 } else { self.nodes[parent].len() });
            }
        }
        // A node above another is needed whole, whichever of them was seen first.
        for &above in below.keys().filter(|&&above| above != 0) {
            needed.insert(above, self.nodes[above].len());
        }
        let first = |node: &NodeId| self.trie.shard(shard_of(*node)).read().nodes[index_of(*node)].local[0];
        let mut blocks = Vec::new();
        let mut stack = vec![(0, None)];
        while let Some((node, mut parent)) = stack.pop() {
            if node != 0 {
                let presence = self.nodes[node].presence(slot);
                let local = self.trie.shard(shard_of(node)).read().nodes[index_of(node)].local.clone();
                for offset in 0..needed[&node] {
                    let position = blocks.len();
                    let local_hash = local[offset as usize];
                    if let Some(presence) = presence
                        && worker.presences[presence].bound.contains(offset)
                    {
                        let mut bindings = self.bindings(slot, presence, offset);
                        bindings.retain(|binding| !binding.counts.is_empty());
                        bindings.sort_by_key(|binding| binding.engine_hash);
                        blocks.extend(bindings.into_iter().map(|binding| DumpedBlock {
                            engine_hash: Some(binding.engine_hash),
                            parent,
                            local_hash,
                            counts: binding.counts,
                        }));
                    }
                    if blocks.len() == position {
                        blocks.push(DumpedBlock {
                            engine_hash: None,
                            parent,
                            local_hash,
                            counts: Counts::new(),
                        });
                    }
                    parent = Some(position);
                }
            }
            if let Some(children) = below.get_mut(&node) {
                children.sort_by_cached_key(|child| std::cmp::Reverse(first(child)));
                stack.extend(children.iter().map(|&child| (child, parent)));
            }
        }
        blocks
    }

    fn load_blocks(&mut self, slot: u32, blocks: &[DumpedBlock]) {
        let mut position = 0;
        while position < blocks.len() {
            let (run, target) = self.plain_run(slot, &blocks[position..], position);
            if let Some(to) = target {
                let part = &blocks[position..position + run];
                let engine: Vec<u64> = part.iter().filter_map(|block| block.engine_hash).collect();
                let local: Vec<u64> = part.iter().map(|block| block.local_hash).collect();
                let parent = part[0].parent.and_then(|parent| blocks[parent].engine_hash);
                if part[0].parent.is_none() || parent.is_some() {
                    self.store(slot, parent, &engine, &local, to);
                    position += run;
                    continue;
                }
            }
            self.load_block(slot, blocks, position);
            position += 1;
        }
        self.finish();
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

    fn load_block(&mut self, slot: u32, blocks: &[DumpedBlock], position: usize) {
        let block = &blocks[position];
        let Some(engine_hash) = block.engine_hash else { return };
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
        self.cursor = anchor.map_or(ROOT, |(presence, offset)| Cursor {
            node: self.part(slot, presence).node,
            next: offset + 1,
        });
        let mut place = (0, 0);
        let mut done = 0;
        while done < path.len() {
            let (node, offset, blocks) = self.advance(slot, &path[done..]);
            done += blocks as usize;
            place = (node, offset + blocks - 1);
        }
        self.cursor = ROOT;
        self.touch(place.0);
        self.worker_mut(slot).device_copies += device_copies(&block.counts);
        self.bind(slot, place.0, place.1, engine_hash, block.counts.clone());
    }

    fn load_orphan(&mut self, slot: u32, orphan: &DumpedOrphan) {
        let worker = self.worker_mut(slot);
        worker.device_copies += device_copies(&orphan.counts);
        worker.waiting.entry(orphan.parent_engine_hash).or_default().push(orphan.engine_hash);
        worker.orphans.insert(
            orphan.engine_hash,
            Orphan {
                parent: orphan.parent_engine_hash,
                local: orphan.local_hash,
                counts: orphan.counts.clone(),
            },
        );
    }
}

impl Worker {
    /// Whether a bound block has any copy.
    pub fn has_copies(&self, presence: super::worker::PresenceId, offset: u32) -> bool {
        let part = &self.presences[presence];
        if part.is_odd(offset) {
            return self.odd[&(presence, part.start + offset)]
                .iter()
                .any(|binding| !binding.counts.is_empty());
        }
        part.level(offset) < super::TIERS
    }
}

fn check(dump: &WorkerDump) -> Result<(), LoadError> {
    let full: Vec<u32> = dump.groups.iter().filter(|(_, full)| *full).map(|(group, _)| *group).collect();
    let mut seen = HashSet::new();
    for (position, block) in dump.blocks.iter().enumerate() {
        let field = || format!("blocks.{position}");
        if block.parent.is_some_and(|parent| parent >= position) {
            return contradiction(field(), "its parent does not come before it");
        }
        if block.engine_hash.is_none() != block.counts.is_empty() {
            return contradiction(field(), "a hole has copies, or a block has none");
        }
        check_entry(field, block.engine_hash, &block.counts, &full, &mut seen)?;
    }
    let bound: HashSet<u64> = seen.clone();
    for (position, orphan) in dump.orphans.iter().enumerate() {
        let field = || format!("orphans.{position}");
        check_entry(field, Some(orphan.engine_hash), &orphan.counts, &full, &mut seen)?;
        if orphan.counts.is_empty() {
            return contradiction(field(), "an orphan has no copies");
        }
        if bound.contains(&orphan.parent_engine_hash) {
            return contradiction(field(), "its parent is known");
        }
    }
    if dump.orphans.len() > ORPHAN_LIMIT {
        return contradiction("orphans".into(), &format!("more than {ORPHAN_LIMIT}"));
    }
    let empty = dump.blocks.is_empty() && dump.orphans.is_empty();
    if !empty && !dump.incompatible.is_empty() {
        return contradiction("incompatible".into(), "a worker that is not indexed has blocks");
    }
    Ok(())
}

fn check_entry(
    field: impl Fn() -> String,
    engine_hash: Option<u64>,
    counts: &Counts,
    full: &[u32],
    seen: &mut HashSet<u64>,
) -> Result<(), LoadError> {
    if engine_hash.is_some_and(|engine_hash| !seen.insert(engine_hash)) {
        return contradiction(field(), "its engine hash comes twice");
    }
    for copies in counts {
        if !full.contains(&copies.group) {
            return contradiction(field(), &format!("group {} is not full attention", copies.group));
        }
        if copies.number == 0 {
            return contradiction(field(), "0 copies");
        }
    }
    Ok(())
}

fn contradiction(field: String, message: &str) -> Result<(), LoadError> {
    Err(LoadError::Contradiction { field, message: message.into() })
}
