//! What the window groups of workers leave of the rows of an answer.

use super::serve::View;
use crate::hashing::sequence_hashes;
use crate::index::directory::{Directory, Row};
use crate::index::prompt::Prompt;
use crate::index::types::{PREDICTED, TIERS};

/// Cuts the rows of workers with window groups down to what all their groups serve.
pub fn cut_rows(directory: &Directory, prompt: &mut impl Prompt, rows: &mut Vec<Row>) {
    let views = directory.views();
    for (&worker, _) in views.iter().filter(|(_, view)| view.alone) {
        if !rows.iter().any(|row| row.worker == worker) {
            rows.push(Row { worker, blocks: [0; PREDICTED + 1] });
        }
    }
    let blocks = prompt.len();
    let longest = |row: &Row| match views.get(&row.worker) {
        Some(View { alone: true, .. }) => blocks,
        Some(_) => row.blocks[TIERS - 1] as usize,
        None => 0,
    };
    let most = rows.iter().map(longest).max().unwrap_or(0);
    if most == 0 {
        rows.retain(|row| row.blocks[PREDICTED] > 0 || row.blocks[TIERS - 1] > 0);
        return;
    }
    let usable = prompt.usable();
    let keys = sequence_hashes(prompt.hashes(most)[..most].iter().copied());
    for row in rows.iter_mut() {
        let Some(view) = views.get(&row.worker) else { continue };
        let windows = view.windows.read();
        let full = row.blocks;
        for tier in 0..TIERS {
            let most = if view.alone { blocks } else { full[tier] as usize };
            let before = tier.checked_sub(1);
            let same = before.is_some_and(|before| view.alone || full[tier] == full[before]);
            row.blocks[tier] = match before {
                Some(before) if same && !windows.slower => row.blocks[before],
                _ => windows.usable(&keys, most, usable, tier) as u32,
            };
        }
        // What is predicted beyond what is held will come with its windows.
        let predicted = if full[PREDICTED] > full[0] { full[PREDICTED] } else { 0 };
        row.blocks[PREDICTED] = predicted.max(row.blocks[0]);
    }
    rows.retain(|row| row.blocks[PREDICTED] > 0 || row.blocks[TIERS - 1] > 0);
}
