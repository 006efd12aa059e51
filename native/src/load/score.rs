//! The columns of one decision: what each candidate has of a prompt, what it would have to do, and what that costs.
//!
//! Native backend of `kvscout_scheduler.costs.cost.Scores`, which has the formulas; every number is computed in the same order, so
//! that both backends give equal ones.

use super::{ActiveLoad, Overlaps, PoolKey, SlotSet};

/// Times the median distance from the least cost: what is beyond does not count to the range of costs.
const OUTLIER: f64 = 10.0;

/// The question of one decision.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub pool_key: PoolKey,
    pub overlaps: Option<&'a Overlaps>,
    pub isl_tokens: u32,
    /// Of prefill against decode; 0: prefix caches are ignored.
    pub overlap_score_weight: f64,
    pub host_weight: f64,
    pub disk_weight: f64,
    /// False: the prompt is computed elsewhere.
    pub charge_prefill: bool,
    /// Size of the pool_key's blocks in units of those that costs are compared in.
    pub scale: f64,
}

/// One entry a candidate, in the order of the slots of the question.
#[derive(Debug)]
pub struct Scores {
    pub slots: Vec<u32>,
    pub device_blocks: Vec<u32>,
    pub effective_blocks: Vec<f64>,
    pub cached_tokens: Vec<f64>,
    pub isl_tokens: f64,
    pool_key: PoolKey,
    request_blocks: i64,
    charge_prefill: bool,
    overlap_score_weight: f64,
    scale: f64,
}

/// What each candidate costs.
#[derive(Debug)]
pub struct Costs(pub Vec<f64>);

impl ActiveLoad {
    /// Scores the arranged slots of a set, by rank; None: all that are arranged.
    pub fn score(&self, slots: Option<&SlotSet>, question: &Question<'_>) -> Scores {
        let Question { overlap_score_weight, scale, .. } = *question;
        let size = self.requests.len();
        // By slot; the weighted overlap only where it is not that of the device.
        let rest = question.overlaps.map(Overlaps::rest);
        let mut device = vec![rest.map_or(0, |rest| rest.device); size];
        let mut weighted = Vec::new();
        if let Some(overlaps) = question.overlaps {
            if overlaps.slower_tiers {
                let rest = overlaps.rest().effective(question.host_weight, question.disk_weight);
                weighted.resize(size, rest);
            }
            let mut search = self.names.search();
            for (worker_id, row) in overlaps.rows() {
                if let Some(slot) = search.slot(worker_id, row.dp_rank) {
                    device[slot as usize] = row.device;
                    if let Some(effective) = weighted.get_mut(slot as usize) {
                        *effective = row.effective(question.host_weight, question.disk_weight);
                    }
                }
            }
        }
        let block_size = f64::from(question.pool_key.block_size);
        let isl_tokens = f64::from(question.isl_tokens);
        let request_blocks = i64::from(question.isl_tokens.div_ceil(question.pool_key.block_size));
        let some: Vec<u32>;
        let candidates = match slots {
            None => &self.order,
            Some(members) => {
                some = self.order.iter().copied().filter(|&slot| members.has(slot)).collect();
                &some
            }
        };
        let slots = candidates.iter().map(|&slot| slot as usize);
        // Column by column: each is one simple loop.
        let device_blocks: Vec<u32> = slots.clone().map(|slot| device[slot]).collect();
        let effective_blocks: Vec<f64> = match (overlap_score_weight, weighted.is_empty()) {
            (0.0, _) => vec![0.0; slots.len()],
            (_, true) => device_blocks.iter().map(|&blocks| f64::from(blocks)).collect(),
            (_, false) => slots.clone().map(|slot| weighted[slot]).collect(),
        };
        let cached_tokens: Vec<f64> =
            effective_blocks.iter().map(|effective| (effective * block_size).min(isl_tokens)).collect();
        Scores {
            slots: candidates.to_vec(),
            device_blocks,
            effective_blocks,
            cached_tokens,
            isl_tokens,
            pool_key: question.pool_key,
            request_blocks,
            charge_prefill: question.charge_prefill,
            overlap_score_weight,
            scale,
        }
    }
}

// What a policy may not look at; by the load as it is now.
impl ActiveLoad {
    /// Prompt tokens that each candidate has to compute, the request's included.
    pub fn prefill_with(&self, scores: &Scores) -> Vec<f64> {
        let missing = |cached: &f64| if scores.charge_prefill { scores.isl_tokens - cached } else { 0.0 };
        let columns = scores.slots.iter().zip(&scores.cached_tokens);
        columns.map(|(&slot, cached)| self.prefill_tokens[slot as usize] as f64 + missing(cached)).collect()
    }

    /// Blocks active on each candidate with the request added, whose hashes these are.
    pub fn decode_with(&self, scores: &Scores, hashes: &[u64]) -> Vec<i64> {
        if !self.track_blocks {
            return vec![0; scores.slots.len()];
        }
        let mut shared = vec![0_u32; self.requests.len()];
        self.shared(scores.pool_key, hashes, |slot, blocks| shared[slot as usize] = blocks as u32);
        let slots = scores.slots.iter().map(|&slot| slot as usize);
        slots.map(|slot| self.decode_blocks[slot] + scores.request_blocks - i64::from(shared[slot])).collect()
    }

    /// Prefill and decode of each candidate, in blocks.
    pub fn costs_with(&self, scores: &Scores, hashes: &[u64]) -> Costs {
        let (weight, scale, block_size) =
            (scores.overlap_score_weight, scores.scale, f64::from(scores.pool_key.block_size));
        let decode = self.decode_with(scores, hashes).into_iter().map(|blocks| blocks as f64);
        Costs(match weight {
            0.0 => decode.map(|decode| scale * decode).collect(),
            _ => (self.prefill_with(scores).into_iter())
                .zip(decode)
                .map(|(prefill, decode)| scale * (weight * (prefill / block_size) + decode))
                .collect(),
        })
    }
}

impl Costs {
    /// The candidates of least cost, ascending; none of no candidates.
    pub fn least(&self) -> Vec<usize> {
        // In lanes, which do not wait for each other.
        let (chunks, rest) = self.0.as_chunks::<8>();
        let mut lanes = [f64::INFINITY; 8];
        for chunk in chunks {
            for (least, &cost) in lanes.iter_mut().zip(chunk) {
                *least = if cost < *least { cost } else { *least };
            }
        }
        let least = lanes
            .iter()
            .chain(rest)
            .fold(f64::INFINITY, |least, &cost| if cost < least { cost } else { least });
        let ties = self.0.iter().enumerate().filter(|&(_, &cost)| cost == least);
        ties.map(|(candidate, _)| candidate).collect()
    }

    /// The candidate that a number in 0 .. 1 draws at a temperature above 0: softmax over costs that are normalised by
    /// their range without outliers, as in `kvscout_scheduler.costs.choose`; None of no candidates.
    pub fn draw(&self, temperature: f64, uniform: f64) -> Option<usize> {
        let finite = || self.0.iter().copied().filter(|cost| cost.is_finite());
        // Halved first: the range of two finite costs may be infinite, that of their halves is not.
        let least = finite().fold(f64::INFINITY, f64::min) / 2.0;
        let span = span(finite().map(|cost| cost / 2.0 - least).filter(|&further| further > 0.0).collect());
        let weights: Vec<f64> = (self.0.iter())
            .map(|&cost| match (least.is_finite(), cost.is_finite()) {
                (false, _) => 1.0,
                (true, false) => 0.0,
                (true, true) if span == 0.0 => 1.0,
                (true, true) => (-((cost / 2.0 - least) / span / temperature)).exp(),
            })
            .collect();
        let total: f64 = weights.iter().sum();
        let mut reached = 0.0;
        let reaches: Vec<f64> = (weights.iter())
            .map(|weight| {
                reached += weight / total;
                reached
            })
            .collect();
        let last = reaches.len().checked_sub(1)?;
        Some(reaches[..last].partition_point(|&reach| reach <= uniform * reached))
    }
}

/// The largest of some distances above 0 that is no outlier; 0 of none.
fn span(mut distances: Vec<f64>) -> f64 {
    let Some(last) = distances.len().checked_sub(1) else { return 0.0 };
    let (_, &mut median, _) = distances.select_nth_unstable_by(last / 2, f64::total_cmp);
    let within = distances.iter().copied().filter(|&distance| distance <= OUTLIER * median);
    within.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Columns;

    const POOL_KEY: PoolKey = PoolKey { block_size: 16, eagle: false };

    fn load() -> ActiveLoad {
        let mut load = ActiveLoad::new(true);
        load.arrange([("a", 0, 2), ("b", 0, 0), ("b", 1, 1)].into_iter());
        load
    }

    fn question(overlaps: Option<&Overlaps>) -> Question<'_> {
        Question {
            pool_key: POOL_KEY,
            overlaps,
            isl_tokens: 160,
            overlap_score_weight: 1.0,
            host_weight: 0.75,
            disk_weight: 0.25,
            charge_prefill: true,
            scale: 1.0,
        }
    }

    #[test]
    fn the_worked_example() {
        // w0 has 2 of 10 blocks cached, w1 has 5 and 30 active blocks of others, w2 has none.
        let mut load = load();
        load.add(0, POOL_KEY, &[], 30, 0);
        let columns =
            Columns { dp_ranks: vec![0, 0], tiers: [vec![2, 5], vec![], vec![], vec![]], predicted: vec![] };
        let overlaps = Overlaps::new((*b"ab").into(), &[(0, 1), (1, 2)], columns, None).unwrap();
        let scores = load.score(None, &question(Some(&overlaps)));
        assert_eq!(scores.device_blocks, [2, 5, 0]);
        assert_eq!(load.costs_with(&scores, &[]).0, [18.0, 45.0, 20.0]);
        assert_eq!(load.costs_with(&scores, &[]).least(), [0]);
        let some = load.score(Some(&SlotSet::from_bytes(&[0b101])), &question(Some(&overlaps)));
        assert_eq!((load.costs_with(&some, &[]).0, some.slots), (vec![18.0, 45.0], vec![2, 0]));
    }

    #[test]
    fn shared_blocks_are_counted_once_and_ties_are_all_told() {
        let mut load = load();
        load.add(1, POOL_KEY, &[1, 2, 3], 0, 0);
        let scores = load.score(None, &question(None));
        assert_eq!(load.decode_with(&scores, &[1, 2, 9]), [10, 10, 11]);
        assert_eq!(load.costs_with(&scores, &[1, 2, 9]).least(), [0, 1]);
    }

    #[test]
    fn a_temperature_draws_by_cost() {
        let costs = |costs: &[f64]| Costs(costs.to_vec());
        let even = costs(&[3.0; 4]);
        assert_eq!([0.0, 0.3, 0.6, 0.99].map(|uniform| even.draw(1.0, uniform)), [0, 1, 2, 3].map(Some));
        let uneven = costs(&[f64::INFINITY, 1e300, -1e300]);
        assert_eq!([0.0, 0.1, 0.5].map(|uniform| uneven.draw(1.0, uniform)), [1, 1, 2].map(Some));
        assert_eq!(costs(&[f64::INFINITY; 2]).draw(1.0, 0.7), Some(1));
        // 1 : e^-0.5 : e^-1, with a worker that hangs or without.
        for hung in [&[][..], &[500.0]] {
            let costs = costs(&[&[0.0, 1.0, 2.0], hung].concat());
            assert_eq!(
                [0.5, 0.51, 0.81, 0.82].map(|uniform| costs.draw(1.0, uniform)),
                [0, 1, 1, 2].map(Some)
            );
        }
        assert_eq!(costs(&[]).draw(1.0, 0.5), None);
    }

    #[test]
    fn a_weight_of_zero_ignores_caches_and_prefill() {
        let columns =
            Columns { dp_ranks: vec![], tiers: [vec![9], vec![], vec![], vec![]], predicted: vec![] };
        let overlaps = Overlaps::new((*b"a").into(), &[(0, 1)], columns, None).unwrap();
        let load = load();
        let scores = load.score(None, &Question { overlap_score_weight: 0.0, ..question(Some(&overlaps)) });
        assert_eq!(load.costs_with(&scores, &[]).0, [10.0; 3]);
        assert_eq!((scores.device_blocks[0], scores.effective_blocks[0]), (9, 0.0));
    }
}
