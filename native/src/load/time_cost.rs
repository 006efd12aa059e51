//! What each candidate costs in seconds.
//!
//! The twin of `kvscout_scheduler.time_cost`, which has the formula; every number is computed in the same order, so that
//! both twins give equal ones.

use super::{Costs, Scores};

/// For how long it counts how busy a worker was, in seconds.
const HORIZON: f64 = 20.0;
/// So many times a prompt counts at most.
const MOST_CROWDED: f64 = 7.0;
/// What a prefill that takes longer than it should can add, in seconds.
const MOST_OVERDUE: f64 = 5.0;

/// What is under way on one worker; see the twin.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub behind: f64,
    pub due_at: f64,
    pub pace: f64,
    pub used: f64,
    pub seen: f64,
    pub contexts: f64,
    pub requests: f64,
    pub prefills: f64,
    pub room: f64,
}

impl Row {
    /// Numbers in one.
    pub const LENGTH: usize = 9;

    /// One of a table, its numbers in the order of the fields.
    pub fn new(numbers: [f64; Self::LENGTH]) -> Self {
        let [behind, due_at, pace, used, seen, contexts, requests, prefills, room] = numbers;
        Self { behind, due_at, pace, used, seen, contexts, requests, prefills, room }
    }

    /// Seconds of prefill that are left of what is booked.
    fn ahead(&self, now: f64) -> f64 {
        if self.prefills == 0.0 {
            return 0.0;
        }
        let left = self.due_at - now;
        self.behind + if left > 0.0 { left } else { (-left).min(MOST_OVERDUE) }
    }

    /// Uncached tokens of a prompt, and those that they evict, as much as they count.
    fn priced_tokens(&self, uncached: f64, kept: f64) -> f64 {
        uncached + kept * (uncached - self.room).max(0.0)
    }

    /// 1 / (1 − `used`) at a time.
    fn crowding(&self, now: f64) -> f64 {
        let passed = 1.0 + (now - self.seen) / HORIZON;
        let idle = if self.prefills == 0.0 { passed - self.used } else { 1.0 - self.used };
        (passed / idle).min(MOST_CROWDED)
    }
}

/// What is known beside the rows; see the twin.
#[derive(Debug, Clone, Copy)]
pub struct TimeQuestion {
    pub now: f64,
    pub weight: f64,
    pub own_seconds: f64,
    pub decode_seconds: f64,
    pub kept: f64,
}

impl Scores {
    /// Costs in seconds; None: there is no row for a slot.
    pub fn seconds(&self, question: &TimeQuestion, row: impl Fn(u32) -> Option<Row>) -> Option<Costs> {
        let &TimeQuestion { now, weight, own_seconds, decode_seconds, kept } = question;
        let cost = |(&slot, cached): (&u32, &f64)| {
            let row = row(slot)?;
            let tokens = row.priced_tokens(self.isl_tokens - cached, kept);
            let own = row.crowding(now) * row.pace * own_seconds * tokens;
            let beside = decode_seconds * (row.contexts + row.requests * self.isl_tokens);
            Some(weight * (row.ahead(now) + own) + beside)
        };
        self.slots.iter().zip(&self.cached_tokens).map(cost).collect::<Option<_>>().map(Costs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Row = Row {
        behind: 0.0,
        due_at: 0.0,
        pace: 1.0,
        used: 0.0,
        seen: 0.0,
        contexts: 0.0,
        requests: 0.0,
        prefills: 0.0,
        room: f64::INFINITY,
    };

    #[test]
    fn what_is_ahead_melts_away_and_counts_as_late_for_a_while() {
        let row = Row { behind: 0.5, due_at: 3.0, prefills: 2.0, ..IDLE };
        assert_eq!([2.0, 3.0, 4.0, 100.0].map(|now| row.ahead(now)), [1.5, 0.5, 1.5, 5.5]);
        assert_eq!(IDLE.ahead(100.0), 0.0);
    }

    #[test]
    fn what_evicts_others_counts_as_more_tokens() {
        let row = Row { room: 30.0, ..IDLE };
        assert_eq!([10.0, 30.0, 50.0].map(|uncached| row.priced_tokens(uncached, 0.5)), [10.0, 30.0, 60.0]);
        assert_eq!(IDLE.priced_tokens(50.0, 0.5), 50.0);
    }

    #[test]
    fn crowding_grows_while_there_is_a_prompt_and_goes_when_there_is_none() {
        let (busy, free) = (Row { used: 0.5, prefills: 1.0, ..IDLE }, Row { used: 0.5, ..IDLE });
        assert_eq!([0.0, 20.0, 1e9].map(|now| busy.crowding(now)), [2.0, 4.0, 7.0]);
        assert_eq!([0.0, 10.0].map(|now| free.crowding(now)), [2.0, 1.5]);
        assert_eq!(IDLE.crowding(1e9), 1.0);
    }
}
