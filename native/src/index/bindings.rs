//! Which engine hashes are bound to a block of one worker, with which copies, and how plainly that is kept.

use super::copies::{Binding, Counts, Odd, level_of};
use super::ledger::Ledger;
use super::types::{NO_BIT, NodeId, PREDICTED, PresenceId, TIERS, TWIN_LIMIT};

impl Ledger {
    /// Binds an engine hash that is not bound to a block.
    pub fn bind(&mut self, slot: u32, node: NodeId, offset: u32, engine_hash: u64, counts: Counts) {
        let presence = self.presence(slot, node);
        let part = self.part(slot, presence);
        let depth = part.start + offset;
        if part.bound.contains(offset) {
            // A twin: this worker knows the block by another engine hash too.
            let mut odd = self.bindings(slot, presence, offset);
            odd.push(Binding { engine_hash, counts });
            self.worker_mut(slot).odd.insert((presence, depth), odd.clone());
            self.part_mut(slot, presence).more_mut().odd.insert(offset);
            self.worker_mut(slot).enter(&[engine_hash], presence, offset);
            self.put_bindings(slot, presence, offset, odd);
            return;
        }
        let pinned = part.pins(offset);
        let part = self.part_mut(slot, presence);
        if part.own.len() <= offset as usize {
            part.own.resize(offset as usize + 1);
        }
        part.own[offset as usize] = engine_hash;
        part.bound.insert(offset);
        if !pinned {
            self.pin(node, offset, true);
        }
        self.worker_mut(slot).enter(&[engine_hash], presence, offset);
        self.put_bindings(slot, presence, offset, vec![Binding { engine_hash, counts }]);
    }

    /// Ends a binding that leaves nothing behind; its copies must be gone.
    pub fn unbind(&mut self, slot: u32, engine_hash: u64) {
        self.end_binding(slot, engine_hash);
        // Nor is it what it was before it was bound.
        self.worker_mut(slot).ghosts.take(engine_hash);
    }

    /// Ends a binding; its copies must be gone.
    pub fn end_binding(&mut self, slot: u32, engine_hash: u64) {
        // The table finds the entry through `own` and `odd`, so it goes first.
        let Some((presence, offset)) = self.worker_mut(slot).leave(engine_hash) else { return };
        if self.part(slot, presence).is_odd(offset) {
            let mut bindings = self.bindings(slot, presence, offset);
            bindings.retain(|binding| binding.engine_hash != engine_hash);
            if !bindings.is_empty() {
                self.put_bindings(slot, presence, offset, bindings);
                return;
            }
            let depth = self.part(slot, presence).start + offset;
            self.worker_mut(slot).odd.remove(&(presence, depth));
            self.set_tiers(slot, presence, offset, [false; TIERS]);
        }
        let part = self.part_mut(slot, presence);
        debug_assert_eq!(part.level(offset), TIERS);
        part.bound.remove(offset);
        if let Some(more) = &mut part.more {
            more.odd.remove(offset);
        }
        let node = part.node;
        let (pinned, empty) = (part.pins(offset), part.is_empty());
        if !pinned {
            self.pin(node, offset, false);
        }
        if empty {
            self.drop_presence(slot, presence);
        } else {
            self.mark(slot, presence);
        }
    }

    /// The bindings of a bound block, whether it is plain or odd.
    pub fn bindings(&self, slot: u32, presence: PresenceId, offset: u32) -> Odd {
        let worker = self.worker(slot);
        let part = &worker.presences[presence];
        if part.is_odd(offset) {
            return worker.odd[&(presence, part.start + offset)].clone();
        }
        vec![Binding {
            engine_hash: part.own[offset as usize],
            counts: worker.plain_counts(presence, offset),
        }]
    }

    /// Writes the bindings of a block back, as plain as they are.
    pub fn put_bindings(&mut self, slot: u32, presence: PresenceId, offset: u32, bindings: Odd) {
        let worker = self.worker_mut(slot);
        let part = &mut worker.presences[presence];
        let key = (presence, part.start + offset);
        part.own[offset as usize] = bindings[0].engine_hash;
        let plain = match &bindings[..] {
            [only] => worker.plain_tiers(&only.counts),
            _ => None,
        };
        let tiers = plain.unwrap_or_else(|| {
            let level = bindings.iter().map(|binding| level_of(&binding.counts, &worker.full_groups)).min();
            std::array::from_fn(|tier| Some(tier) == level)
        });
        let part = &mut worker.presences[presence];
        if plain.is_some() {
            if let Some(more) = &mut part.more {
                more.odd.remove(offset);
                worker.odd.remove(&key);
            }
        } else {
            part.more_mut().odd.insert(offset);
            worker.odd.insert(key, bindings);
        }
        self.set_tiers(slot, presence, offset, tiers);
    }

    /// Changes the counts of a bound engine hash; returns what the change does.
    pub fn change_counts(
        &mut self,
        slot: u32,
        presence: PresenceId,
        offset: u32,
        engine_hash: u64,
        change: impl FnOnce(&mut Counts) -> bool,
    ) -> bool {
        let mut bindings = self.bindings(slot, presence, offset);
        let mut changed = false;
        if let Some(binding) = bindings.iter_mut().find(|binding| binding.engine_hash == engine_hash) {
            changed = change(&mut binding.counts);
        }
        if changed {
            self.put_bindings(slot, presence, offset, bindings);
        }
        changed
    }

    /// All bound blocks of a worker with their bindings.
    pub fn bound_blocks(&self, slot: u32) -> Vec<(PresenceId, u32, Odd)> {
        let parts = self.worker(slot).presences.iter();
        parts
            .flat_map(|(presence, part)| part.bound.iter().map(move |offset| (presence, offset)))
            .map(|(presence, offset)| (presence, offset, self.bindings(slot, presence, offset)))
            .collect()
    }

    /// Whether a block may get one more engine hash; the one bound longest that has no copies goes for it.
    pub fn make_room_for_twin(&mut self, slot: u32, node: NodeId, offset: u32) -> bool {
        let Some(presence) = self.nodes[node].presence(slot) else { return true };
        let worker = self.worker(slot);
        let key = (presence, worker.presences[presence].start + offset);
        let Some(twins) = worker.odd.get(&key).filter(|twins| twins.len() >= TWIN_LIMIT) else { return true };
        let Some(oldest) = twins.iter().find(|twin| twin.counts.is_empty()).map(|twin| twin.engine_hash)
        else {
            return false;
        };
        self.worker_mut(slot).demoted.remove(oldest);
        self.unbind(slot, oldest);
        true
    }

    /// Forgets a ghost or demoted hash; false if the hash has copies.
    pub fn drop_memory_of(&mut self, slot: u32, engine_hash: u64) -> bool {
        if let Some((presence, offset)) = self.worker(slot).locate(engine_hash)
            && !self.worker(slot).counts(engine_hash, presence, offset).is_empty()
        {
            return false;
        }
        self.worker_mut(slot).demoted.remove(engine_hash);
        self.unbind(slot, engine_hash);
        true
    }

    /// Notes a group's kind the first time; whether it is full attention.
    pub fn learn_group(&mut self, slot: u32, group: u32, full_attention: bool, limit: usize) -> bool {
        let worker = self.worker(slot);
        let known = worker.groups.binary_search_by_key(&group, |(known, _)| *known);
        match known {
            Ok(position) => worker.groups[position].1,
            Err(_) if worker.groups.len() >= limit => false,
            Err(position) => {
                self.worker_mut(slot).groups.insert(position, (group, full_attention));
                if full_attention {
                    self.refresh_groups(slot);
                }
                full_attention
            }
        }
    }

    /// Brings all blocks in step with the worker's full-attention groups.
    pub fn refresh_groups(&mut self, slot: u32) {
        let groups = &self.worker(slot).groups;
        let full = groups.iter().filter(|(_, full)| *full).map(|(group, _)| *group).collect();
        let all = self.bound_blocks(slot);
        let worker = self.worker_mut(slot);
        worker.full_groups = full;
        worker.ghosts.doubt_evicted();
        for (presence, offset, bindings) in all {
            self.put_bindings(slot, presence, offset, bindings);
        }
    }

    /// Ends the prediction of a block, if there is one.
    pub fn cancel_prediction(&mut self, slot: u32, presence: PresenceId, offset: u32) {
        debug_assert!(self.worker(slot).bits[PREDICTED] != NO_BIT);
        let part = self.part_mut(slot, presence);
        if !part.is_predicted(offset) {
            return;
        }
        let more = part.more_mut();
        more.predicted.remove(offset);
        let id = std::mem::take(&mut more.prediction[offset as usize]);
        let node = part.node;
        let (pinned, empty) = (part.pins(offset), part.is_empty());
        self.predictions.remove(id);
        self.worker_mut(slot).predictions -= 1;
        self.live_predictions -= 1;
        if !pinned {
            self.pin(node, offset, false);
        }
        if empty {
            self.drop_presence(slot, presence);
        } else {
            self.mark(slot, presence);
        }
    }
}
