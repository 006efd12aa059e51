//! Blocks that an engine stored again though it should have had them.

use super::directory::WorkerName;
use super::nodes::node_id;
use super::state::Index;
use super::trie::{Trie, common_prefix};
use super::types::PresenceId;
use super::worker::Worker;

impl Index {
    /// How many of a prompt's blocks, from `first` on, a worker has several device copies of by one name.
    pub fn repeated(&self, name: WorkerName<'_>, local: &[u64], first: usize) -> u64 {
        let state = self.state.lock();
        let (Some(handle), Some(&root)) = (state.handle(name), local.first()) else { return 0 };
        let slot = state.ranks[handle].slot;
        let worker = state.ledger.worker(slot);
        let number = Trie::shard_of(root);
        let shard = self.trie.shard(number).read();
        let (mut index, mut done, mut repeated) = (0, 0, 0);
        while done < local.len() {
            index = shard.child(index, local[done]);
            if index == 0 {
                break;
            }
            let node = &shard.nodes[index];
            let same = common_prefix(&node.local, &local[done..]);
            if let Some(presence) = state.ledger.nodes[node_id(number, index)].presence(slot) {
                let counted = first.saturating_sub(done)..same;
                repeated +=
                    counted.filter(|&offset| is_repeated(worker, presence, offset as u32)).count() as u64;
            }
            done += same;
            if same < node.len() as usize {
                break;
            }
        }
        repeated
    }
}

/// Whether an odd block has a name with several device copies in one group; others have one.
fn is_repeated(worker: &Worker, presence: PresenceId, offset: u32) -> bool {
    let part = &worker.presences[presence];
    part.is_odd(offset)
        && worker.odd[&(presence, part.start + offset)]
            .iter()
            .any(|binding| binding.counts.iter().any(|copies| copies.tier == 0 && copies.number > 1))
}
