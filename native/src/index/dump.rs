//! One consistent cut of a worker rank, as a list in depth-first order; `cut` takes it, `load` takes it over.

use std::fmt;

use super::copies::Counts;
use super::orphans::ORPHAN_LIMIT;
use super::types::GROUP_LIMIT;
use super::window::{DumpedWindowBlock, WindowGroup};
use hashbrown::HashSet;

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
    /// Which groups have a sliding window, sorted.
    pub windows: Vec<WindowGroup>,
    /// What they hold, sorted by engine hash.
    pub window_blocks: Vec<DumpedWindowBlock>,
    /// Why the worker is not indexed; then it has no blocks. Empty: it is.
    pub incompatible: String,
    /// A limit kept some of the worker's blocks out.
    pub incomplete: bool,
}

/// Why a dump cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadError {
    UnknownWorker,
    /// The worker was reset or removed while it was loaded.
    Superseded,
    /// The index has no room for more prefixes.
    Full,
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
            Self::Superseded => f.write_str("the worker was reset or removed meanwhile"),
            Self::Full => f.write_str("the index has no room for it"),
            Self::Contradiction { field, message } => write!(f, "{field}: {message}"),
        }
    }
}

const NOT_FULL: &str = "is not full attention";

pub fn check(dump: &WorkerDump) -> Result<(), LoadError> {
    if let Some(at) = dump.groups.windows(2).position(|pair| pair[0].0 >= pair[1].0) {
        return contradiction(format!("groups.{}", at + 1), "does not come after the one before it");
    }
    if dump.groups.len() > GROUP_LIMIT {
        return contradiction("groups".into(), &format!("more than {GROUP_LIMIT}"));
    }
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
        check_entry(field, block.engine_hash, &block.counts, &full, NOT_FULL, &mut seen)?;
    }
    let bound: HashSet<u64> = seen.clone();
    for (position, orphan) in dump.orphans.iter().enumerate() {
        let field = || format!("orphans.{position}");
        check_entry(field, Some(orphan.engine_hash), &orphan.counts, &full, NOT_FULL, &mut seen)?;
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
    check_windows(dump)?;
    let empty = dump.blocks.is_empty() && dump.orphans.is_empty() && dump.window_blocks.is_empty();
    if !empty && !dump.incompatible.is_empty() {
        return contradiction("incompatible".into(), "a worker that is not indexed has blocks");
    }
    Ok(())
}

fn check_windows(dump: &WorkerDump) -> Result<(), LoadError> {
    if let Some(at) = dump.windows.windows(2).position(|pair| pair[0].number >= pair[1].number) {
        return contradiction(format!("windows.{}", at + 1), "does not come after the one before it");
    }
    for (position, group) in dump.windows.iter().enumerate() {
        if !dump.groups.contains(&(group.number, false)) {
            return contradiction(
                format!("windows.{position}"),
                "must be a known group other than full attention",
            );
        }
        if group.window == 0 || group.block_size == 0 {
            return contradiction(format!("windows.{position}"), "has no tokens");
        }
    }
    let groups: Vec<u32> = dump.windows.iter().map(|group| group.number).collect();
    let mut seen = HashSet::new();
    for (position, block) in dump.window_blocks.iter().enumerate() {
        let field = || format!("window_blocks.{position}");
        if block.counts.is_empty() {
            return contradiction(field(), "has no copies");
        }
        check_entry(field, Some(block.engine_hash), &block.counts, &groups, "has no window", &mut seen)?;
    }
    Ok(())
}

fn check_entry(
    field: impl Fn() -> String,
    engine_hash: Option<u64>,
    counts: &Counts,
    groups: &[u32],
    otherwise: &str,
    seen: &mut HashSet<u64>,
) -> Result<(), LoadError> {
    if engine_hash.is_some_and(|engine_hash| !seen.insert(engine_hash)) {
        return contradiction(field(), "its engine hash comes twice");
    }
    for copies in counts {
        if !groups.contains(&copies.group) {
            return contradiction(field(), &format!("group {} {otherwise}", copies.group));
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
