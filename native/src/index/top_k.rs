//! Few rows for many workers: what most have alike is said once. As `kvscout_blocks.index.top_k`.

use std::cmp::Reverse;

use hashbrown::{HashMap, HashSet};

use super::directory::{Directory, Handle, Row};
use super::types::LEVELS;

/// What every worker rank without a row has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common {
    pub ranks: usize,
    /// Each has exactly these blocks; else at least.
    pub exact: bool,
    pub blocks: [u32; LEVELS],
    /// Of all worker ranks.
    pub digest: u64,
}

/// The rows that differ from what most have, which stands for the others; of more than `most` the longest.
///
/// Those of `incomplete` ranks are among them if there is room, so that nothing is left open of the others.
pub fn top_k(
    rows: &[Row],
    most: usize,
    directory: &Directory,
    incomplete: &HashSet<Handle>,
) -> (Vec<Row>, Common) {
    let (none, digest) = ([0; LEVELS], directory.digest());
    let mut groups: HashMap<[u32; LEVELS], usize> = HashMap::new();
    groups.insert(none, directory.ranks() - rows.len());
    // Those with the same come one after the other, mostly.
    for alike in rows.chunk_by(|a, b| a.blocks == b.blocks) {
        *groups.entry(alike[0].blocks).or_insert(0) += alike.len();
    }
    let (blocks, alike) =
        groups.into_iter().max_by_key(|&(blocks, ranks)| (ranks, blocks)).unwrap_or((none, 0));
    let mut shown: Vec<Row>;
    if directory.ranks() - alike <= most {
        let usual = |row: &&Row| row.blocks == blocks;
        shown = rows.iter().filter(|row| !usual(row)).copied().collect();
        if blocks != none && directory.ranks() > rows.len() {
            let without = directory.without_row(rows).into_iter();
            shown.extend(without.map(|worker| Row { worker, blocks: none }));
        }
        if !incomplete.is_empty() {
            let open = rows.iter().filter(usual).filter(|row| incomplete.contains(&row.worker));
            let open: Vec<Row> = open.copied().collect();
            if shown.len() + open.len() <= most {
                shown.extend(open);
            }
        }
        let ranks = directory.ranks() - shown.len();
        return (shown, Common { ranks, exact: true, blocks, digest });
    }
    shown = rows.to_vec();
    shown.sort_by_key(|row| Reverse(row.blocks));
    let rest = shown.split_off(most);
    let mut least = if directory.ranks() > rows.len() { none } else { [u32::MAX; LEVELS] };
    for row in &rest {
        least = std::array::from_fn(|level| least[level].min(row.blocks[level]));
    }
    let ranks = directory.ranks() - shown.len();
    (shown, Common { ranks, exact: false, blocks: least, digest })
}
