//! How far the window groups of a worker let an overlap reach: the queries' side.

use std::sync::Arc;

use crate::index::parts::Parts;
use crate::index::types::TIERS;
use parking_lot::RwLock;

/// Who holds a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The groups on each tier, by their place.
    pub groups: [u64; TIERS],
    /// The engine hash that has copies, or the first of several.
    pub engine_hash: u64,
}

/// What groups of one shape need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The groups, by their place.
    pub groups: u64,
    /// Blocks before the end, at least 1.
    pub needed: u32,
    /// Blocks of the index in one of theirs.
    pub ratio: u32,
}

/// What queries read.
#[derive(Debug, Default)]
pub struct Windows {
    pub rules: Vec<Rule>,
    /// Prefixes end at multiples of so many blocks.
    pub alignment: u32,
    pub held: Parts<Held>,
    /// Copies on slower tiers than the device: there were some.
    pub slower: bool,
}

impl Windows {
    /// The longest prefix of at most `most` blocks that all groups serve on some tiers.
    ///
    /// Each rule only ever shortens it, so that what is left in the end is the longest that suits them all.
    fn longest(&self, keys: &[u64], most: usize, tier: usize) -> usize {
        let groups_at = |block: usize| {
            let held = self.held.get(keys[block]);
            held.map_or(0, |held| held.groups[..=tier].iter().fold(0, |all, groups| all | groups))
        };
        let alignment = self.alignment.max(1) as usize;
        let mut end = most - most % alignment;
        loop {
            let before = end;
            for rule in &self.rules {
                end = rule.longest(end, alignment, groups_at);
            }
            if end == before {
                return end;
            }
        }
    }

    /// `longest` for a prompt of which an engine takes at most `usable` blocks from its cache.
    pub fn usable(&self, keys: &[u64], most: usize, usable: usize, tier: usize) -> usize {
        let longest = self.longest(keys, most, tier);
        if longest <= usable {
            return longest;
        }
        let shorter = self.longest(keys, usable, tier);
        if shorter < usable { shorter } else { longest }
    }
}

impl Rule {
    fn longest(&self, end: usize, alignment: usize, groups_at: impl Fn(usize) -> u64) -> usize {
        let ratio = self.ratio as usize;
        let mut end = end;
        let mut run = 0;
        // Downwards from the end; a block that is not there is the next candidate's end.
        let mut block = end / ratio;
        while block > 0 && run < self.needed as usize {
            block -= 1;
            if groups_at((block + 1) * ratio - 1) & self.groups == self.groups {
                run += 1;
            } else {
                end = block * ratio - block * ratio % alignment;
                (block, run) = (end / ratio, 0);
            }
        }
        end
    }
}

/// Notes that groups hold a prefix on a tier.
pub fn show(windows: &mut Windows, key: u64, engine_hash: u64, tier: u8, group: u64) {
    windows.slower |= tier > 0;
    let held = windows.held.or_insert_with(key, || Held { groups: [0; TIERS], engine_hash });
    held.groups[usize::from(tier)] |= group;
}

/// Least common multiple, or the largest number.
pub fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// A worker's windows, as a query finds them.
#[derive(Debug)]
pub struct View {
    pub windows: Arc<RwLock<Windows>>,
    /// The worker has no full-attention group: its windows alone decide.
    pub alone: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(rules: &[Rule], held: &[(usize, u64)]) -> (Windows, Vec<u64>) {
        let mut windows = Windows { rules: rules.to_vec(), alignment: 1, ..Windows::default() };
        for rule in rules {
            windows.alignment = lcm(windows.alignment, rule.ratio);
        }
        let keys: Vec<u64> = (100..120).collect();
        for &(block, groups) in held {
            show(&mut windows, keys[block], block as u64, 0, groups);
        }
        (windows, keys)
    }

    #[test]
    fn a_prefix_ends_where_the_blocks_of_its_window_are_held() {
        let rule = Rule { groups: 1, needed: 2, ratio: 1 };
        for (held, expected) in [(&[3, 4][..], 5), (&[0, 1], 2), (&[], 0), (&[1, 3, 5], 0), (&[0, 3, 5], 1)] {
            let held: Vec<(usize, u64)> = held.iter().map(|&block| (block, 1)).collect();
            let (windows, keys) = windows(&[rule], &held);
            assert_eq!(windows.longest(&keys, 6, 0), expected, "{held:?}");
        }
    }

    #[test]
    fn groups_of_several_windows_agree_on_the_longest_prefix() {
        let rules = [Rule { groups: 1, needed: 1, ratio: 1 }, Rule { groups: 6, needed: 3, ratio: 1 }];
        let held = [(0, 7), (1, 7), (2, 7), (3, 1), (4, 6), (5, 7), (6, 6), (7, 1)];
        let (windows, keys) = windows(&rules, &held);
        // Eight ends in the first, seven and six in the others only.
        assert_eq!(windows.longest(&keys, 8, 0), 3);
        assert_eq!(windows.longest(&keys, 2, 0), 2);
    }

    #[test]
    fn larger_blocks_end_prefixes_at_their_multiples() {
        let rules = [Rule { groups: 1, needed: 1, ratio: 1 }, Rule { groups: 2, needed: 1, ratio: 3 }];
        let held: Vec<(usize, u64)> = (0..10).map(|block| (block, if block == 5 { 3 } else { 1 })).collect();
        let (windows, keys) = windows(&rules, &held);
        assert_eq!(windows.longest(&keys, 10, 0), 6);
        assert_eq!(windows.longest(&keys, 5, 0), 0);
    }

    #[test]
    fn a_prompt_that_ends_with_a_block_is_computed_from_the_block_before_it() {
        let rule = Rule { groups: 1, needed: 2, ratio: 1 };
        let (windows, keys) = windows(&[rule], &[(0, 1), (1, 1), (4, 1), (5, 1)]);
        assert_eq!(windows.usable(&keys, 6, 6, 0), 6);
        assert_eq!(windows.usable(&keys, 6, 5, 0), 2);
        assert_eq!(windows.usable(&keys, 2, 1, 0), 2);
    }
}
