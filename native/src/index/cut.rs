//! The content of a worker rank as far as it was copied, and the dump that is made of it.

use std::cmp::Reverse;

use super::copies::{Counts, Odd, plain_counts};
use super::dump::{DumpedBlock, WorkerDump};
use super::extent::Extent;
use super::types::{PresenceId, TIERS};
use hashbrown::{HashMap, HashSet};

/// A node as it was, and what the worker holds of it.
#[derive(Debug)]
pub struct NodePart {
    pub end: u64,
    /// The `end` of the node_part above; 0: it begins a prompt.
    pub above: u64,
    pub local: Vec<u64>,
    pub own: Vec<u64>,
    pub tiers: [Extent; TIERS],
    pub odd: Vec<(u32, Odd)>,
}

impl NodePart {
    /// The last block with copies, and one.
    fn held(&self) -> u32 {
        let has_copies = |odd: &Odd| odd.iter().any(|binding| !binding.counts.is_empty());
        let odd = self.odd.iter().rfind(|(_, odd)| has_copies(odd)).map_or(0, |(offset, _)| offset + 1);
        self.tiers.iter().map(Extent::end).fold(odd, u32::max)
    }
}

/// The content of a worker rank, as far as it was copied.
#[derive(Debug, Default)]
pub struct Cut {
    pub node_parts: Vec<NodePart>,
    /// Ends of the nodes that are in node_parts.
    pub ends: HashSet<u64>,
    /// The last presence that was looked at.
    pub last: PresenceId,
    /// Parts of the window groups that were copied.
    pub window_parts: usize,
    pub complete: bool,
    pub head: WorkerDump,
    pub full_groups: Vec<u32>,
}

impl Cut {
    /// A node was cut in two: the first part has another end.
    pub fn split(&mut self, end: u64, head: u64) {
        if self.ends.contains(&end) {
            self.ends.insert(head);
        }
    }

    pub fn dump(self) -> WorkerDump {
        let Self { node_parts, full_groups, mut head, .. } = self;
        head.orphans.sort_unstable_by_key(|orphan| orphan.engine_hash);
        head.window_blocks.sort_unstable_by_key(|block| block.engine_hash);
        let mut below: HashMap<u64, Vec<usize>> = HashMap::new();
        for (number, node_part) in node_parts.iter().enumerate() {
            below.entry(node_part.above).or_default().push(number);
        }
        for children in below.values_mut() {
            children.sort_unstable_by_key(|&child| Reverse(node_parts[child].local[0]));
        }
        let mut blocks: Vec<DumpedBlock> = Vec::new();
        let mut stack: Vec<(usize, Option<usize>)> = Vec::new();
        let push = |stack: &mut Vec<_>, end: u64, parent: Option<usize>| {
            stack.extend(below.get(&end).into_iter().flatten().map(|&child| (child, parent)));
        };
        push(&mut stack, 0, None);
        while let Some((number, mut parent)) = stack.pop() {
            let node_part = &node_parts[number];
            // A node_part above another is needed whole.
            let needed = if below.contains_key(&node_part.end) {
                node_part.local.len()
            } else {
                node_part.held() as usize
            };
            let mut odd = node_part.odd.iter().peekable();
            for (offset, &local_hash) in (0..).zip(&node_part.local[..needed]) {
                let position = blocks.len();
                if let Some((_, bindings)) = odd.next_if(|(at, _)| *at == offset) {
                    let mut bindings = bindings.clone();
                    bindings.retain(|binding| !binding.counts.is_empty());
                    bindings.sort_by_key(|binding| binding.engine_hash);
                    blocks.extend(bindings.into_iter().map(|binding| DumpedBlock {
                        engine_hash: Some(binding.engine_hash),
                        parent,
                        local_hash,
                        counts: binding.counts,
                    }));
                } else if node_part.tiers.iter().any(|tier| tier.contains(offset)) {
                    let engine_hash = Some(node_part.own[offset as usize]);
                    let counts = plain_counts(&full_groups, |tier| node_part.tiers[tier].contains(offset));
                    blocks.push(DumpedBlock { engine_hash, parent, local_hash, counts });
                }
                if blocks.len() == position {
                    blocks.push(DumpedBlock { engine_hash: None, parent, local_hash, counts: Counts::new() });
                }
                parent = Some(position);
            }
            push(&mut stack, node_part.end, parent);
        }
        WorkerDump { blocks, ..head }
    }
}
