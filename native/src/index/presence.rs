//! One worker's part of one node: which of its blocks are bound, on which tiers, and predicted.

use super::extent::Extent;
use super::run::Run;
use super::types::{LEVELS, NodeId, PREDICTED, PresenceId, TIERS};
use smallvec::SmallVec;

/// What few presences need.
#[derive(Debug, Default)]
pub struct More {
    /// Host, disk, external.
    pub lower: [Extent; TIERS - 1],
    /// Offsets whose counts are in `Worker::odd`.
    pub odd: Extent,
    /// Predicted offsets.
    pub predicted: Extent,
    /// Number of the prediction at each offset, 0 for none; empty if there never was one.
    pub prediction: Run<u32>,
    /// Reach on the levels above the device.
    pub reach: [u32; LEVELS - 1],
}

impl More {
    /// Takes what is at and above an offset out, as offsets from there; reaches are divided too.
    pub fn split_off(&mut self, at: u32) -> Self {
        let mut tail = Self {
            lower: std::array::from_fn(|tier| self.lower[tier].split_off(at)),
            odd: self.odd.split_off(at),
            predicted: self.predicted.split_off(at),
            ..Self::default()
        };
        tail.prediction = self.prediction.split_off(at as usize);
        for level in 0..LEVELS - 1 {
            tail.reach[level] = self.reach[level].saturating_sub(at);
            self.reach[level] = self.reach[level].min(at);
        }
        tail
    }
}

/// This worker's part of one node.
#[derive(Debug, Default)]
pub struct Presence {
    pub node: NodeId,
    /// Depth of the node's first block.
    pub start: u32,
    pub first_child: PresenceId,
    pub next: PresenceId,
    pub previous: PresenceId,
    /// Blocks from the first one that are rooted on the device.
    pub reach: u32,
    /// Among the idle ones, from which the bound takes.
    pub is_queued: bool,
    /// Heap memory, as `Ledger::measure` counted it last.
    pub measured: u32,
    /// Engine hash at each offset; meaningful where `bound`.
    pub own: Run<u64>,
    pub bound: Extent,
    pub device: Extent,
    pub more: Option<Box<More>>,
}

impl Presence {
    pub fn tier(&self, tier: usize) -> Option<&Extent> {
        match tier {
            0 => Some(&self.device),
            _ => self.more.as_ref().map(|more| &more.lower[tier - 1]),
        }
    }

    pub fn tier_mut(&mut self, tier: usize) -> &mut Extent {
        match tier {
            0 => &mut self.device,
            _ => &mut self.more_mut().lower[tier - 1],
        }
    }

    pub fn more_mut(&mut self) -> &mut More {
        self.more.get_or_insert_default()
    }

    pub fn on_tier(&self, tier: usize, offset: u32) -> bool {
        self.tier(tier).is_some_and(|extent| extent.contains(offset))
    }

    /// The fastest tier whose set contains an offset, or `TIERS`.
    pub fn level(&self, offset: u32) -> usize {
        let tiers = if self.more.is_some() { TIERS } else { 1 };
        (0..tiers).find(|&tier| self.on_tier(tier, offset)).unwrap_or(TIERS)
    }

    /// One more than the last offset that may have copies.
    pub fn end_of_copies(&self) -> u32 {
        let more = self.more.iter().flat_map(|more| more.lower.iter().chain([&more.odd]));
        more.map(Extent::end).fold(self.device.end(), u32::max)
    }

    pub fn is_odd(&self, offset: u32) -> bool {
        self.more.as_ref().is_some_and(|more| more.odd.contains(offset))
    }

    pub fn is_predicted(&self, offset: u32) -> bool {
        self.more.as_ref().is_some_and(|more| more.predicted.contains(offset))
    }

    /// Whether an offset keeps its block alive.
    pub fn pins(&self, offset: u32) -> bool {
        self.bound.contains(offset) || self.is_predicted(offset)
    }

    pub fn is_empty(&self) -> bool {
        self.bound.is_empty() && self.more.as_ref().is_none_or(|more| more.predicted.is_empty())
    }

    pub fn reach_on(&self, level: usize) -> u32 {
        match level {
            0 => self.reach,
            _ => self.more.as_ref().map_or(0, |more| more.reach[level - 1]),
        }
    }

    pub fn set_reach_on(&mut self, level: usize, reach: u32) {
        match level {
            0 => self.reach = reach,
            _ => self.more_mut().reach[level - 1] = reach,
        }
    }

    /// Length of the interval from offset 0 that a level has.
    pub fn prefix_on(&self, level: usize) -> u32 {
        let Some(more) = &self.more else { return self.device.prefix() };
        let sets: SmallVec<[&Extent; LEVELS]> = match level {
            PREDICTED => SmallVec::from_slice(&[&self.device, &more.predicted]),
            _ => std::iter::once(&self.device).chain(&more.lower[..level]).collect(),
        };
        let mut prefix = 0;
        loop {
            let longest = sets.iter().map(|set| set.prefix()).max().unwrap_or(0);
            prefix = prefix.max(longest);
            if !sets.iter().any(|set| set.contains(prefix)) {
                return prefix;
            }
            prefix += 1;
        }
    }

    pub fn bytes(&self) -> usize {
        let extents = self.bound.bytes() + self.device.bytes();
        let more = self.more.as_ref().map_or(0, |more| {
            let lower: usize = more.lower.iter().map(Extent::bytes).sum();
            size_of::<More>() + lower + more.odd.bytes() + more.predicted.bytes() + more.prediction.bytes()
        });
        self.own.bytes() + extents + more
    }
}
