//! How often an engine has a block: counts of copies by group and tier, and whom they are bound to.

use super::types::TIERS;
use smallvec::SmallVec;

/// A count of copies stays here.
pub const MAX_COPIES: u32 = u32::MAX;

/// Physical copies in one group on one tier; the number is at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Copies {
    pub group: u32,
    pub tier: u8,
    pub number: u32,
}

/// Copies of one engine hash, sorted by (group, tier).
pub type Counts = SmallVec<[Copies; 2]>;

/// Adds one copy; `set` keeps every count at 1. Returns whether a count rose.
pub fn add_copy(counts: &mut Counts, group: u32, tier: u8, set: bool) -> bool {
    match counts.binary_search_by_key(&(group, tier), |copies| (copies.group, copies.tier)) {
        Ok(at) if set || counts[at].number == MAX_COPIES => false,
        Ok(at) => {
            counts[at].number += 1;
            true
        }
        Err(at) => {
            counts.insert(at, Copies { group, tier, number: 1 });
            true
        }
    }
}

/// Drops one copy; false if there is none like it.
pub fn drop_copy(counts: &mut Counts, group: u32, tier: u8) -> bool {
    let Ok(at) = counts.binary_search_by_key(&(group, tier), |copies| (copies.group, copies.tier)) else {
        return false;
    };
    counts[at].number -= 1;
    if counts[at].number == 0 {
        counts.remove(at);
    }
    true
}

/// Σ copies on the device.
pub fn device_copies(counts: &Counts) -> u64 {
    counts.iter().filter(|copies| copies.tier == 0).map(|copies| u64::from(copies.number)).sum()
}

/// The fastest tier at which every full-attention group has a copy there or faster, or `TIERS`.
pub fn level_of(counts: &Counts, full_groups: &[u32]) -> usize {
    let fastest = |group: &u32| {
        counts.iter().find(|copies| copies.group == *group).map_or(TIERS, |copies| usize::from(copies.tier))
    };
    full_groups.iter().map(fastest).max().unwrap_or(TIERS)
}

/// An engine hash bound to an odd block; without copies it is demoted.
#[derive(Debug, Clone)]
pub struct Binding {
    pub engine_hash: u64,
    pub counts: Counts,
}

/// Bindings of an odd block, at least one; the first is the one in `Presence::own`.
pub type Odd = Vec<Binding>;

/// The counts of a plain block on some tiers.
pub fn plain_counts(full_groups: &[u32], on_tier: impl Fn(usize) -> bool) -> Counts {
    let mut counts = Counts::new();
    for &group in full_groups {
        for tier in (0..TIERS).filter(|&tier| on_tier(tier)) {
            counts.push(Copies { group, tier: tier as u8, number: 1 });
        }
    }
    counts
}
