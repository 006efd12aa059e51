//! The order in which the bound takes blocks of a worker.

use std::collections::BTreeMap;

use super::types::PresenceId;
use hashbrown::HashSet;

/// From where the bound takes blocks of a worker.
#[derive(Debug, Default)]
pub struct Idle {
    /// Presences of which a rooted block may go because none below it is rooted, by a round in which they were used
    /// or an earlier one, and others.
    pub rooted: BTreeMap<u32, Vec<PresenceId>>,
    /// All in `rooted`, those that are gone included.
    pub queued: usize,
    /// Presences that hold blocks that are not rooted.
    pub unmatchable: HashSet<PresenceId>,
}

impl Idle {
    pub fn push(&mut self, presence: PresenceId, round: u32) {
        self.queued += 1;
        self.rooted.entry(round).or_default().push(presence);
    }

    /// Takes one out that was used longest ago, and the round by which it is queued.
    pub fn pop(&mut self) -> Option<(u32, PresenceId)> {
        loop {
            let mut oldest = self.rooted.first_entry()?;
            let round = *oldest.key();
            if let Some(presence) = oldest.get_mut().pop() {
                self.queued -= 1;
                return Some((round, presence));
            }
            oldest.remove();
        }
    }

    pub fn bytes(&self) -> usize {
        self.queued * size_of::<PresenceId>() + self.unmatchable.allocation_size()
    }
}
