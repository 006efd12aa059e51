//! What the index tells of itself, and the check of its invariants.

use std::sync::atomic::Ordering;

use super::copies::{device_copies, level_of};
use super::directory::{Handle, WorkerName};
use super::ghosts::GHOST_LIMIT;
use super::nodes::{Refs, index_of, shard_of};
use super::orphans::ORPHAN_LIMIT;
use super::state::{Index, State};
use super::trie::MAX_RUN;
use super::types::{IGNORED, LEVELS, NO_BIT, NodeId, PREDICTED, TIERS};
use super::waiting;
use super::worker::Worker;
use hashbrown::{HashMap, HashSet};

/// State of one worker rank; as in `kvscout_blocks.index.block_index.WorkerStats`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct WorkerStats {
    pub blocks: u64,
    pub hidden: u64,
    pub orphans: u64,
    pub ghosts: u64,
    pub predictions: u64,
    pub device_copies: u64,
    pub window_blocks: u64,
    /// Groups that are neither full attention nor states, nor known to have a window: what they lack is not seen.
    pub unjudged_groups: Vec<u32>,
    pub over_capacity: bool,
    /// A limit kept something out since the worker was empty.
    pub incomplete: bool,
    pub incompatible: String,
    pub ignored: [u64; IGNORED],
}

/// State of the whole index; as in `kvscout_blocks.index.block_index.IndexStats`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct IndexStats {
    pub blocks: u64,
    pub memberships: u64,
    pub workers: u64,
    pub orphans: u64,
    pub hidden: u64,
    pub ghosts: u64,
    pub predictions: u64,
    pub bytes: u64,
    pub evicted: u64,
    pub queries: u64,
    pub unknown_worker: u64,
}

impl Index {
    /// State of a worker rank; None if it is not known.
    pub fn worker_stats(&self, name: WorkerName<'_>) -> Option<WorkerStats> {
        let state = self.state.lock();
        let rank = &state.ranks[state.handle(name)?];
        let worker = state.ledger.worker(rank.slot);
        Some(WorkerStats {
            blocks: worker.held,
            // While a level is filled, too many.
            hidden: worker.hidden(),
            orphans: worker.orphans.len() as u64,
            ghosts: worker.ghosts.len() as u64,
            predictions: worker.predictions,
            device_copies: worker.device_copies,
            window_blocks: worker.windows.as_ref().map_or(0, |windows| windows.len() as u64),
            unjudged_groups: unjudged(worker),
            over_capacity: rank.over_capacity(worker),
            incomplete: worker.incomplete,
            incompatible: rank.incompatible.clone(),
            ignored: rank.ignored,
        })
    }

    /// State of the index: counters, so that neither blocks nor workers are walked over.
    pub fn stats(&self) -> IndexStats {
        let mut state = self.state.lock();
        let counts = state.ledger.counts();
        let ledger = &state.ledger;
        let shared: usize = state.shared.values().map(|cache| cache.bytes()).sum();
        let bytes =
            counts.bytes + self.trie.bytes() + ledger.nodes.bytes() + ledger.predictions.bytes() + shared;
        IndexStats {
            blocks: ledger.blocks,
            memberships: counts.held as u64,
            workers: counts.holders as u64,
            orphans: counts.orphans as u64,
            hidden: counts.hidden as u64,
            ghosts: counts.ghosts as u64,
            predictions: ledger.live_predictions,
            evicted: state.evicted,
            queries: self.queries.load(Ordering::Relaxed),
            unknown_worker: state.unknown_worker,
            bytes: bytes as u64,
        }
    }

    /// Verifies the invariants the slow way; the first violation.
    pub fn check_invariants(&self) -> Result<(), String> {
        let mut state = self.state.lock();
        // What is filled little by little is to be right once it is filled.
        for slot in 0..state.ledger.workers.len() as u32 {
            if state.ledger.workers[slot as usize].is_some() {
                state.ledger.fill(slot, usize::MAX);
                state.ledger.root_slice(slot, usize::MAX);
            }
        }
        state.ledger.settle();
        state.ledger.check_totals()?;
        let state = &*state;
        for (_, rank) in state.ranks.iter() {
            ensure(state.ledger.worker(rank.slot).is_shown, || "ranks are counted".into())?;
        }
        let mut refs: HashMap<NodeId, Vec<Refs>> = HashMap::new();
        for (slot, worker) in state.ledger.workers.iter().enumerate() {
            if let Some(worker) = worker {
                check_worker(state, slot as u32, worker, &mut refs)?;
            }
        }
        let mut held = 0;
        for (node, entry) in state.ledger.nodes.iter() {
            let counted = refs.remove(&node).unwrap_or_default();
            let mut expected = counted;
            expected.resize(entry.refs.len(), Refs::default());
            ensure(entry.refs[..] == expected[..], || format!("the references of node {node} are counted"))?;
            held += entry.refs.iter().filter(|refs| refs.held > 0).count() as u64;
            ensure(entry.len() <= MAX_RUN, || format!("node {node} is no longer than a run may be"))?;
            let last = entry.refs.last().is_some_and(|refs| refs.pins > 0);
            ensure(last || entry.first_child != 0, || format!("node {node} is needed to its end"))?;
            let shard = self.trie.shard(shard_of(node)).read();
            let run = &shard.nodes[index_of(node)];
            ensure(run.len() == entry.len() && run.start == entry.start, || format!("node {node} is one"))?;
            let found = shard.child(run.parent, run.local[0]);
            ensure(found == index_of(node), || format!("node {node} is found"))?;
        }
        ensure(held == state.ledger.blocks, || "held blocks are counted".into())?;
        ensure(refs.is_empty(), || "presences are in nodes".into())?;
        let incomplete: HashSet<Handle> = (state.ranks.iter())
            .filter(|(_, rank)| state.ledger.worker(rank.slot).incomplete)
            .map(|(worker, _)| worker)
            .collect();
        let told = waiting::read(&self.directory).incomplete().clone();
        ensure(told == incomplete, || "queries know who is incomplete".into())?;
        let live: u64 = state.ranks.iter().map(|(_, rank)| state.ledger.worker(rank.slot).predictions).sum();
        ensure(live == state.ledger.live_predictions, || "predictions are counted".into())?;
        let entries: usize =
            state.ranks.iter().map(|(_, rank)| state.ledger.worker(rank.slot).entries()).sum();
        let bound = self.bounds.max_blocks;
        let ghosts: usize =
            state.ranks.iter().map(|(_, rank)| state.ledger.worker(rank.slot).ghosts.len()).sum();
        ensure(bound == 0 || entries.max(ghosts) <= bound, || "max_blocks is kept".into())?;
        for cache in state.shared.values() {
            cache.check()?;
        }
        if bound > 0 {
            state.ranks.iter().try_for_each(|(_, rank)| state.ledger.worker(rank.slot).check_idle())?;
        }
        Ok(())
    }
}

fn check_worker(
    state: &State,
    slot: u32,
    worker: &Worker,
    refs: &mut HashMap<NodeId, Vec<Refs>>,
) -> Result<(), String> {
    let ledger = &state.ledger;
    let (mut held, mut bindings, mut copyless, mut predictions, mut copies) = (0, 0, 0, 0, 0);
    let mut rooted = [0; LEVELS];
    for (presence, part) in worker.presences.iter() {
        let entry = ledger.nodes.get(part.node).ok_or("a presence is in a node")?;
        let at = || format!("slot {slot}, node {}", part.node);
        ensure(entry.presence(slot) == Some(presence), || format!("{}: found", at()))?;
        ensure(entry.start == part.start, || format!("{}: start", at()))?;
        ensure(!part.is_empty(), || format!("{}: needed", at()))?;
        let above = if entry.parent == 0 { None } else { ledger.nodes[entry.parent].presence(slot) };
        let first = above.map(|above| worker.presences[above].first_child);
        let end_above = if entry.parent == 0 { 0 } else { ledger.nodes[entry.parent].end };
        let first = first.or_else(|| worker.detached.get(&end_above).copied());
        let hangs = std::iter::successors(first, |&sibling| Some(worker.presences[sibling].next))
            .take_while(|&sibling| sibling != 0)
            .any(|sibling| sibling == presence);
        ensure(hangs == (entry.parent != 0), || format!("{}: hangs", at()))?;
        let both = above.is_some() && worker.detached.contains_key(&end_above);
        ensure(!both, || format!("{}: detached", at()))?;
        let refs = refs.entry(part.node).or_insert_with(|| vec![Refs::default(); entry.refs.len()]);
        for offset in 0..entry.len() {
            refs[offset as usize].pins += u16::from(part.pins(offset));
            predictions += u64::from(part.is_predicted(offset));
            let on_tier = part.level(offset) < TIERS;
            refs[offset as usize].held += u16::from(on_tier);
            held += u64::from(on_tier);
            if !part.bound.contains(offset) {
                ensure(!on_tier && !part.is_odd(offset), || format!("{}: {offset} is bound", at()))?;
                continue;
            }
            let known = ledger.bindings(slot, presence, offset);
            let best = known.iter().map(|binding| level_of(&binding.counts, &worker.full_groups)).min();
            ensure(best == Some(part.level(offset)), || format!("{}: {offset} has its level", at()))?;
            for binding in &known {
                bindings += 1;
                copyless += usize::from(binding.counts.is_empty());
                copies += device_copies(&binding.counts);
                let place = worker.locate(binding.engine_hash);
                ensure(place == Some((presence, offset)), || format!("{}: {offset} is located", at()))?;
                ensure(!worker.orphans.contains(binding.engine_hash), || "no hash is twice".into())?;
                let full = binding.counts.iter().all(|copies| worker.full_groups.contains(&copies.group));
                ensure(full, || "copies are in full-attention groups".into())?;
            }
        }
        for level in worker.levels() {
            let is_rooted = entry.parent == 0
                || above.is_some_and(|above| {
                    worker.presences[above].reach_on(level) == ledger.nodes[entry.parent].len()
                });
            let has = |offset: u32| match level {
                PREDICTED => part.level(offset) == 0 || part.is_predicted(offset),
                _ => part.level(offset) <= level,
            };
            let reach =
                if is_rooted { (0..entry.len()).take_while(|&offset| has(offset)).count() as u32 } else { 0 };
            if worker.dropped {
                continue;
            }
            ensure(part.reach_on(level) == reach, || format!("{}: reach on level {level}", at()))?;
            rooted[level] += u64::from(reach);
            let shard = ledger.trie.shard(shard_of(part.node)).read();
            let seen = shard.nodes[index_of(part.node)].reach(worker.bits[level]);
            ensure(seen == reach, || format!("{}: queries see {seen} of {reach} on level {level}", at()))?;
        }
        let mut unopened = (0..TIERS).filter(|&tier| worker.bits[tier] == NO_BIT);
        ensure(unopened.all(|tier| part.tier(tier).is_none_or(super::extent::Extent::is_empty)), || {
            format!("{}: levels are open", at())
        })?;
    }
    let orphans: u64 = worker.orphans.iter().map(|(_, orphan)| device_copies(&orphan.counts)).sum();
    ensure(worker.dropped || held == worker.held, || "held blocks of a worker are counted".into())?;
    ensure(worker.dropped || rooted == worker.rooted, || "rooted blocks of a worker are counted".into())?;
    ensure(worker.dropped || copies + orphans == worker.device_copies, || {
        "device copies are counted".into()
    })?;
    ensure(worker.dropped || bindings == worker.bindings(), || "bindings are counted".into())?;
    ensure(worker.dropped || copyless == worker.demoted.len(), || {
        "bindings without copies are demoted".into()
    })?;
    ensure(worker.dropped || predictions == worker.predictions, || {
        "predictions of a worker are counted".into()
    })?;
    if let Some(windows) = worker.windows.as_ref().filter(|_| !worker.dropped) {
        windows.check()?;
    }
    ensure(worker.ghosts.len() <= GHOST_LIMIT, || "ghosts are bounded".into())?;
    ensure(worker.orphans.len() <= ORPHAN_LIMIT, || "orphans are bounded".into())?;
    for (engine_hash, orphan) in worker.orphans.iter() {
        let waits = worker.orphans.waiting_for(orphan.parent).any(|waiting| waiting == engine_hash);
        ensure(waits, || "orphans wait".into())?;
        let parent = worker
            .locate(orphan.parent)
            .map(|(presence, offset)| worker.counts(orphan.parent, presence, offset));
        ensure(parent.is_none_or(|counts| counts.is_empty()), || "no orphan's parent is bound".into())?;
    }
    Ok(())
}

fn unjudged(worker: &Worker) -> Vec<u32> {
    let others = worker.groups.iter().filter(|(_, full)| !full).map(|(group, _)| *group);
    others.filter(|&group| worker.windows.as_ref().is_none_or(|windows| !windows.judges(group))).collect()
}

fn ensure(good: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if good { Ok(()) } else { Err(what()) }
}
