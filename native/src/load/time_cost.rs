//! What each candidate costs in seconds.
//!
//! Native backend of `kvscout_scheduler.costs.time_cost`, which has the formula; every number is computed in the same order, so that
//! both backends give equal ones.

use super::{Costs, Scores};

/// For how long it counts how busy a worker was, in seconds.
const HORIZON: f64 = 20.0;
/// So many times a prompt counts at most.
const MOST_CROWDED: f64 = 7.0;
/// What a prefill that takes longer than it should can add, in seconds.
const MOST_OVERDUE: f64 = 5.0;

/// Of those who wait where the fewest do.
const WAITING_WEIGHT: f64 = 3.0;
/// Of a request that gets no token while a prompt is computed.
const DECODING_WEIGHT: f64 = 0.05;
/// Stages of an output.
const STAGES: usize = 5;

/// Declares a row and the order of its numbers, which is that of `TimeRow` in Python: single ones, then one a stage.
macro_rules! row {
    ($($number:ident)*; $($stages:ident)*) => {
        /// What is under way on one worker; `TimeRow` of the reference backend explains the numbers.
        #[derive(Debug, Clone, Copy)]
        pub struct Row {
            $(pub $number: f64,)*
            $(pub $stages: [f64; STAGES],)*
        }

        impl Row {
            /// Numbers in one row.
            pub const LENGTH: usize = [$(stringify!($number)),*].len() + STAGES * [$(stringify!($stages)),*].len();

            /// Names of the numbers, in order.
            pub fn names() -> Vec<String> {
                let stages = [$(stringify!($stages)),*].into_iter();
                let staged = stages.flat_map(|name| (0..STAGES).map(move |stage| format!("{name}_{stage}")));
                [$(stringify!($number).to_owned()),*].into_iter().chain(staged).collect()
            }

            /// Reads a row of a table.
            pub fn new(numbers: [f64; Self::LENGTH]) -> Self {
                let mut at = 0;
                let mut next = || {
                    at += 1;
                    numbers[at - 1]
                };
                Self { $($number: next(),)* $($stages: std::array::from_fn(|_| next()),)* }
            }
        }
    };
}

row! { behind due_at pace used seen prefills room reuse decode_pace decoding; contexts requests }

impl Row {
    /// Seconds of prefill that are left of what is booked.
    pub(super) fn ahead(&self, now: f64) -> f64 {
        if self.prefills == 0.0 {
            return 0.0;
        }
        let left = self.due_at - now;
        self.behind + if left > 0.0 { left } else { (-left).min(MOST_OVERDUE) }
    }

    /// How many times a prompt counts there: 1 / (1 − `used`) at a time, and those who decode.
    fn crowding(&self, now: f64) -> f64 {
        self.slowdown(now) + DECODING_WEIGHT * self.decoding
    }

    /// 1 / (1 − `used`) at a time: how many times as long as on an idle worker it takes beside its prompts.
    pub(super) fn slowdown(&self, now: f64) -> f64 {
        let passed = 1.0 + (now - self.seen) / HORIZON;
        let idle = if self.prefills == 0.0 { passed - self.used } else { 1.0 - self.used };
        (passed / idle).min(MOST_CROWDED)
    }

    /// Seconds of prefill of the uncached tokens of a prompt, and of those that they evict, as much as they count.
    fn own(&self, inputs: &TimeCostInputs, isl_tokens: f64, cached: f64) -> f64 {
        let uncached = isl_tokens - cached;
        let copied = (inputs.popular_tokens - cached).max(0.0);
        let evicted = (uncached - self.room).max(0.0);
        let lost = (inputs.empty + self.reuse) * evicted;
        self.pace * inputs.own_seconds * (uncached - inputs.popular_discount * copied + lost)
    }

    /// Seconds that count for decoding.
    fn decode(&self, inputs: &TimeCostInputs, isl_tokens: f64) -> f64 {
        let mut seconds = inputs.step_seconds;
        for (stage, (contexts, requests)) in
            inputs.stage_seconds.iter().zip(self.contexts.iter().zip(&self.requests))
        {
            seconds += stage * (contexts + requests * isl_tokens);
        }
        self.decode_pace * seconds
    }
}

/// What is known beside the rows; see `TimeCostInputs` of the reference backend.
#[derive(Debug, Clone, Copy)]
pub struct TimeCostInputs {
    pub now: f64,
    pub weight: f64,
    pub own_seconds: f64,
    pub empty: f64,
    pub popular_tokens: f64,
    pub popular_discount: f64,
    pub step_seconds: f64,
    pub stage_seconds: [f64; STAGES],
}

impl Scores {
    /// Costs in seconds, by the row of each slot.
    pub fn seconds(&self, inputs: &TimeCostInputs, rows: impl Iterator<Item = Row> + Clone) -> Costs {
        let &TimeCostInputs { now, weight, .. } = inputs;
        // Rows are read twice, not copied: those of thousands of workers are hundreds of kilobytes.
        let fewest = rows.clone().map(|row| row.prefills).fold(f64::INFINITY, f64::min);
        let waiting = WAITING_WEIGHT * fewest;
        let cost = |(row, &cached): (Row, &f64)| {
            let own = row.own(inputs, self.isl_tokens, cached);
            weight * (row.ahead(now) + (row.crowding(now) + waiting) * own)
                + row.decode(inputs, self.isl_tokens)
        };
        Costs(rows.zip(&self.cached_tokens).map(cost).collect())
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
        prefills: 0.0,
        room: f64::INFINITY,
        reuse: 0.0,
        decode_pace: 1.0,
        decoding: 0.0,
        contexts: [0.0; STAGES],
        requests: [0.0; STAGES],
    };
    const INPUTS: TimeCostInputs = TimeCostInputs {
        now: 0.0,
        weight: 1.0,
        own_seconds: 0.001,
        empty: 0.5,
        popular_tokens: 0.0,
        popular_discount: 0.0,
        step_seconds: 2.0,
        stage_seconds: [0.001, 0.0, 0.0, 0.0, 0.01],
    };

    #[test]
    fn what_is_ahead_melts_away_and_counts_as_late_for_a_while() {
        let row = Row { behind: 0.5, due_at: 3.0, prefills: 2.0, ..IDLE };
        assert_eq!([2.0, 3.0, 4.0, 100.0].map(|now| row.ahead(now)), [1.5, 0.5, 1.5, 5.5]);
        assert_eq!(IDLE.ahead(100.0), 0.0);
    }

    #[test]
    fn what_evicts_others_counts_as_more_tokens() {
        let row = Row { room: 30.0, pace: 2.0, ..IDLE };
        assert_eq!(
            [10.0, 30.0, 50.0].map(|uncached| row.own(&INPUTS, 60.0, 60.0 - uncached)),
            [0.02, 0.06, 0.12]
        );
        assert_eq!(IDLE.own(&INPUTS, 60.0, 10.0), 0.05);
        // What it evicts would be used again as likely as not.
        assert_eq!(Row { reuse: 0.5, ..row }.own(&INPUTS, 60.0, 10.0), 0.14);
    }

    #[test]
    fn a_popular_prefix_that_is_not_there_counts_for_less() {
        let inputs = TimeCostInputs { popular_tokens: 50.0, popular_discount: 0.5, ..INPUTS };
        assert_eq!([0.0, 30.0, 55.0].map(|cached| IDLE.own(&inputs, 60.0, cached)), [0.035, 0.02, 0.005]);
    }

    #[test]
    fn a_stage_counts_as_far_as_both_go_through_it() {
        let contexts = [100.0, 100.0, 0.0, 0.0, 10.0];
        let row = Row { decode_pace: 3.0, contexts, requests: [2.0, 1.0, 0.0, 0.0, 0.5], ..IDLE };
        assert_eq!(row.decode(&INPUTS, 10.0), 3.0 * (2.0 + 0.001 * 120.0 + 0.01 * 15.0));
        assert_eq!(IDLE.decode(&INPUTS, 10.0), 2.0);
    }

    #[test]
    fn crowding_grows_while_there_is_a_prompt_and_goes_when_there_is_none() {
        let (busy, free) = (Row { used: 0.5, prefills: 1.0, ..IDLE }, Row { used: 0.5, ..IDLE });
        assert_eq!([0.0, 20.0, 1e9].map(|now| busy.crowding(now)), [2.0, 4.0, 7.0]);
        assert_eq!([0.0, 10.0].map(|now| free.crowding(now)), [2.0, 1.5]);
        assert_eq!(IDLE.crowding(1e9), 1.0);
        assert_eq!(Row { decoding: 20.0, ..IDLE }.crowding(0.0), 2.0);
    }
}
