//! Few rows for many workers: what most have alike is said once. As `kvscout_blocks.index.top_k`.

use std::cmp::Reverse;

use hashbrown::HashMap;

use super::directory::{Directory, Row};
use super::types::LEVELS;

/// What every worker rank without a row has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common {
    pub ranks: usize,
    /// Each has exactly these blocks; else at least.
    pub exact: bool,
    pub blocks: [u32; LEVELS],
}

/// The rows that differ from what most have, which stands for the others; of more than `most` the longest.
pub fn top_k(rows: &[Row], most: usize, directory: &Directory) -> (Vec<Row>, Common) {
    let none = [0; LEVELS];
    let mut groups: HashMap<[u32; LEVELS], usize> = HashMap::new();
    groups.insert(none, directory.ranks() - rows.len());
    // Those with the same come one after the other, mostly.
    for alike in rows.chunk_by(|a, b| a.blocks == b.blocks) {
        *groups.entry(alike[0].blocks).or_insert(0) += alike.len();
    }
    let (blocks, ranks) =
        groups.into_iter().max_by_key(|&(blocks, ranks)| (ranks, blocks)).unwrap_or((none, 0));
    let mut shown: Vec<Row>;
    if directory.ranks() - ranks <= most {
        shown = rows.iter().filter(|row| row.blocks != blocks).copied().collect();
        if blocks != none && directory.ranks() > rows.len() {
            let without = directory.without_row(rows).into_iter();
            shown.extend(without.map(|worker| Row { worker, blocks: none }));
        }
        return (shown, Common { ranks, exact: true, blocks });
    }
    shown = rows.to_vec();
    shown.sort_by_key(|row| Reverse(row.blocks));
    let rest = shown.split_off(most);
    let mut least = if directory.ranks() > rows.len() { none } else { [u32::MAX; LEVELS] };
    for row in &rest {
        least = std::array::from_fn(|level| least[level].min(row.blocks[level]));
    }
    let ranks = directory.ranks() - shown.len();
    (shown, Common { ranks, exact: false, blocks: least })
}
