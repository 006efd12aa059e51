//! Response times to expect of a request on each candidate.
//!
//! Native backend of `kvscout_scheduler.costs.targets`, which has the formula; every number is computed in the same order.

use super::Scores;
use super::time_cost::{Row, TimeCostInputs};

/// Seconds of the steps of a pool's workers; see `StepTimes` of the reference backend.
#[derive(Debug, Clone, Copy)]
pub struct StepTimes {
    pub prefill: f64,
    pub decode: f64,
    pub context_token: f64,
}

impl Scores {
    /// Seconds to the first token and between tokens, by the row of each slot.
    pub fn response_times(
        &self,
        inputs: &TimeCostInputs,
        steps: &StepTimes,
        rows: impl Iterator<Item = Row>,
    ) -> Vec<(f64, f64)> {
        let (now, isl_tokens) = (inputs.now, self.isl_tokens);
        rows.zip(&self.cached_tokens)
            .map(|(row, cached)| {
                let own = if inputs.own_seconds == 0.0 {
                    0.0
                } else {
                    steps.prefill + inputs.own_seconds * (isl_tokens - cached)
                };
                let step =
                    row.decode_pace * (steps.decode + steps.context_token * (row.contexts[0] + isl_tokens));
                (row.ahead(now) + row.pace * own, row.slowdown(now) * step)
            })
            .collect()
    }
}
