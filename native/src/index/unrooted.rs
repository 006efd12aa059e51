//! Presences below which something is still to be rooted.

use super::types::{LEVELS, PresenceId};
use std::collections::BTreeMap;

/// Presences that became full on a level, and from which child on none is rooted there yet.
///
/// Hiding what is below a presence cannot wait, rooting it can. So a block with any number of children that comes and
/// goes costs no more than what was rooted below it in between, which has a budget.
#[derive(Debug, Default)]
pub struct Unrooted(pub BTreeMap<(PresenceId, usize), PresenceId>);

impl Unrooted {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Moves the first unrooted child of a presence; 0: there is none.
    pub fn set(&mut self, presence: PresenceId, level: usize, child: PresenceId) {
        if child == 0 {
            self.0.remove(&(presence, level));
        } else {
            self.0.insert((presence, level), child);
        }
    }

    /// Goes on to the next child where one leaves its presence.
    pub fn skip(&mut self, presence: PresenceId, child: PresenceId, next: PresenceId) {
        if self.0.is_empty() {
            return;
        }
        for level in 0..LEVELS {
            if self.0.get(&(presence, level)) == Some(&child) {
                self.set(presence, level, next);
            }
        }
    }

    /// Forgets a presence, to whose children this does not apply any more.
    pub fn forget(&mut self, presence: PresenceId) {
        self.rename(presence, 0);
    }

    /// Notes that children hang below another presence now (0: none).
    pub fn rename(&mut self, from: PresenceId, to: PresenceId) {
        if self.0.is_empty() {
            return;
        }
        for level in 0..LEVELS {
            if let Some(child) = self.0.remove(&(from, level))
                && to != 0
            {
                self.set(to, level, child);
            }
        }
    }
}
