//! Which active requests share which blocks, on which workers: a radix tree over local hashes.
//!
//! Native backend of `kvscout_scheduler.load.prefix_tree`, which has the picture and the invariants. Nodes are numbers of a
//! slab; the first block of a run is its key among its siblings.
//!
//! Complexity: O(nodes on the path), each a memory comparison of its run.

use hashbrown::HashMap;

use super::holders::Holders;
use crate::slab::Slab;

const ROOT: u32 = 1;

/// A run of blocks without a branch.
#[derive(Debug, Default)]
struct Node {
    run: Box<[u64]>,
    parent: u32,
    /// Requests that end here.
    ends: u32,
    holders: Holders,
    children: HashMap<u64, u32>,
}

/// Active prefixes of the workers of one pool_key.
#[derive(Debug)]
pub struct PrefixTree {
    nodes: Slab<Node>,
}

impl Default for PrefixTree {
    fn default() -> Self {
        let mut nodes = Slab::default();
        nodes.insert(Node::default());
        Self { nodes }
    }
}

impl PrefixTree {
    /// Adds a request on a worker: what to give `remove`, and how many of its blocks were not active there before.
    pub fn add(&mut self, hashes: &[u64], slot: u32) -> (u32, usize) {
        let (mut node, mut rest, mut new) = (ROOT, hashes, 0);
        while let Some(first) = rest.first() {
            let Some(&child) = self.nodes[node].children.get(first) else {
                let mut leaf = Node { run: rest.into(), parent: node, ..Node::default() };
                leaf.holders.add(slot);
                let leaf = self.nodes.insert(leaf);
                self.nodes[node].children.insert(*first, leaf);
                node = leaf;
                new += rest.len();
                break;
            };
            let (common, length) = (common(&self.nodes[child].run, rest), self.nodes[child].run.len());
            node = if common < length { self.split(child, common) } else { child };
            if self.nodes[node].holders.add(slot) {
                new += common;
            }
            rest = &rest[common..];
        }
        self.nodes[node].ends += 1;
        (node, new)
    }

    /// Removes a request that `add` put at a node: how many blocks are no longer active on its worker.
    pub fn remove(&mut self, end: u32, slot: u32) -> usize {
        self.nodes[end].ends -= 1;
        let (mut gone, mut node) = (0, end);
        while node != ROOT {
            let passed = &mut self.nodes[node];
            if passed.holders.remove(slot) {
                gone += passed.run.len();
            }
            node = passed.parent;
        }
        let mut end = end;
        if end != ROOT && self.nodes[end].holders.is_empty() {
            let removed = self.nodes.remove(end);
            self.nodes[removed.parent].children.remove(&removed.run[0]);
            end = removed.parent;
        }
        if end != ROOT && self.nodes[end].ends == 0 && self.nodes[end].children.len() == 1 {
            self.join(end);
        }
        gone
    }

    /// Leading blocks of a prompt that are active, by worker: told for every run on the way, so that the last thing
    /// said of a worker holds.
    pub fn shared(&self, hashes: &[u64], mut visit: impl FnMut(u32, usize)) {
        let (mut node, mut at) = (ROOT, 0);
        while let Some(&child) = hashes.get(at).and_then(|first| self.nodes[node].children.get(first)) {
            let found = &self.nodes[child];
            let common = common(&found.run, &hashes[at..]);
            at += common;
            found.holders.iter().for_each(|(slot, _)| visit(slot, at));
            if common < found.run.len() {
                break;
            }
            node = child;
        }
    }

    /// Cuts a run in two; the upper part's number. The lower part stays the node that requests point at.
    fn split(&mut self, lower: u32, at: usize) -> u32 {
        let node = &mut self.nodes[lower];
        let (parent, holders) = (node.parent, node.holders.clone());
        let (top, bottom): (Box<[u64]>, Box<[u64]>) = (node.run[..at].into(), node.run[at..].into());
        let (first, second) = (top[0], bottom[0]);
        node.run = bottom;
        let upper =
            Node { run: top, parent, ends: 0, holders, children: HashMap::from_iter([(second, lower)]) };
        let upper = self.nodes.insert(upper);
        self.nodes[lower].parent = upper;
        self.nodes[parent].children.insert(first, upper);
        upper
    }

    /// Gives the run of a node where nothing ends to its only child, whose holders are the same.
    fn join(&mut self, upper: u32) {
        let upper = self.nodes.remove(upper);
        let Some(&child) = upper.children.values().next() else { return };
        let first = upper.run[0];
        let lower = &mut self.nodes[child];
        lower.run = [&*upper.run, &*lower.run].concat().into();
        lower.parent = upper.parent;
        self.nodes[upper.parent].children.insert(first, child);
    }

    /// Distinct active blocks by worker, counted from the runs; `told` adds up.
    pub fn recount(&self, mut visit: impl FnMut(u32, usize)) {
        for (_, node) in self.nodes.iter() {
            node.holders.iter().for_each(|(slot, _)| visit(slot, node.run.len()));
        }
    }

    /// Heap memory, in bytes; about.
    pub fn bytes(&self) -> usize {
        let of_node =
            |node: &Node| size_of_val(&*node.run) + node.holders.bytes() + node.children.allocation_size();
        self.nodes.bytes() + self.nodes.iter().map(|(_, node)| of_node(node)).sum::<usize>()
    }

    /// What contradicts the description of the structure.
    pub fn check(&self) -> Result<(), String> {
        for (number, node) in self.nodes.iter() {
            let wrong = |what: &str| Err(format!("node {number}: {what}"));
            let mut through: HashMap<u32, u32> = HashMap::new();
            for (&key, &child) in &node.children {
                let Some(below) = self.nodes.get(child) else { return wrong("a child that is not there") };
                if below.parent != number || below.run.first() != Some(&key) {
                    return wrong("a child that is filed elsewhere");
                }
                below.holders.iter().for_each(|(slot, count)| *through.entry(slot).or_default() += count);
            }
            if number == ROOT {
                continue;
            }
            if node.run.is_empty() || node.holders.is_empty() {
                return wrong("nothing, or nobody's");
            }
            if node.ends == 0 && node.children.len() < 2 {
                return wrong("a run that could be longer");
            }
            if through.iter().any(|(&slot, &count)| count > node.holders.count(slot)) {
                return wrong("holders grow along the path");
            }
            let paths: u32 = node.holders.iter().map(|(_, count)| count).sum();
            if paths != through.values().sum::<u32>() + node.ends {
                return wrong("paths do not add up");
            }
        }
        Ok(())
    }
}

/// Length of the common prefix.
fn common(run: &[u64], hashes: &[u64]) -> usize {
    let most = run.len().min(hashes.len());
    if run[..most] == hashes[..most] {
        return most;
    }
    run.iter().zip(hashes).take_while(|(left, right)| left == right).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(tree: &PrefixTree, hashes: &[u64]) -> HashMap<u32, usize> {
        let mut found = HashMap::new();
        tree.shared(hashes, |slot, blocks| {
            found.insert(slot, blocks);
        });
        found
    }

    #[test]
    fn requests_that_branch_share_the_blocks_before_the_branch() {
        let mut tree = PrefixTree::default();
        let (first, new_first) = tree.add(&[10, 20, 30], 0);
        let (second, new_second) = tree.add(&[10, 20, 99], 0);
        assert_eq!((new_first, new_second), (3, 1));
        assert_eq!(shared(&tree, &[10, 20, 30, 40]), HashMap::from_iter([(0, 3)]));
        assert_eq!(tree.remove(first, 0), 1);
        assert_eq!(tree.remove(second, 0), 3);
        assert_eq!(tree.nodes.len(), 1);
    }

    #[test]
    fn shared_stops_at_the_first_block_that_differs_even_within_a_run() {
        let mut tree = PrefixTree::default();
        tree.add(&[1, 2, 3, 4], 0);
        tree.add(&[1, 2], 1);
        assert_eq!(shared(&tree, &[1, 2, 3, 9]), HashMap::from_iter([(0, 3), (1, 2)]));
        assert_eq!(shared(&tree, &[9, 2]), HashMap::new());
        assert_eq!(shared(&tree, &[]), HashMap::new());
    }

    #[test]
    fn a_cut_run_is_joined_again_when_its_reason_is_gone() {
        let mut tree = PrefixTree::default();
        let (long, _) = tree.add(&[1, 2, 3, 4, 5], 0);
        let (short, _) = tree.add(&[1, 2, 3], 1);
        assert_eq!(tree.nodes.len(), 3);
        tree.remove(short, 1);
        assert_eq!(&*tree.nodes[long].run, [1, 2, 3, 4, 5]);
        assert_eq!(tree.nodes.len(), 2);
        assert_eq!(tree.remove(long, 0), 5);
    }

    #[test]
    fn random_requests_match_sets_of_prefixes() {
        let mut state = 7_u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let mut tree = PrefixTree::default();
        let mut active: Vec<(u32, u32, Vec<u64>)> = Vec::new();
        for step in 0..10_000 {
            let before: Vec<usize> = (0..4).map(|slot| distinct(&active, slot)).collect();
            if random(40) < active.len() as u64 {
                let (end, slot, _) = active.swap_remove(random(active.len() as u64) as usize);
                let gone = tree.remove(end, slot);
                assert_eq!(gone, before[slot as usize] - distinct(&active, slot));
            } else {
                let hashes: Vec<u64> = (0..random(9)).map(|_| random(2)).collect();
                let slot = random(4) as u32;
                let (end, new) = tree.add(&hashes, slot);
                active.push((end, slot, hashes));
                assert_eq!(new, distinct(&active, slot) - before[slot as usize]);
            }
            if step % 100 == 0 {
                tree.check().unwrap();
                let mut counted = vec![0; 4];
                tree.recount(|slot, blocks| counted[slot as usize] += blocks);
                assert_eq!(counted, (0..4).map(|slot| distinct(&active, slot)).collect::<Vec<_>>());
            }
        }
        active.into_iter().for_each(|(end, slot, _)| {
            tree.remove(end, slot);
        });
        assert_eq!(tree.nodes.len(), 1);
    }

    fn distinct(active: &[(u32, u32, Vec<u64>)], slot: u32) -> usize {
        let mine = active.iter().filter(|(_, there, _)| *there == slot);
        let prefixes: std::collections::HashSet<&[u64]> =
            mine.flat_map(|(_, _, hashes)| (1..=hashes.len()).map(|end| &hashes[..end])).collect();
        prefixes.len()
    }
}
