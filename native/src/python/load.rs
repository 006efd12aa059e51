//! Python binding of `load`.

use pyo3::buffer::{PyBuffer, ReadOnlyCell};
use pyo3::exceptions::{PyAssertionError, PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyTuple};

use crate::hashing::hashes_from_bytes;
use crate::load::{
    self, Columns, Limits, Others, PoolKey, Question, SlotSet, StepTimes, TimeCostInputs, TimeRow,
};

/// Load columns of one pool; see the stub.
#[pyclass(module = "kvscout_native")]
struct ActiveLoad {
    load: load::ActiveLoad,
}

/// What one request occupies.
#[pyclass(module = "kvscout_native")]
struct Allocation {
    allocation: load::Allocation,
}

#[pymethods]
impl Allocation {
    #[getter]
    fn slot(&self) -> u32 {
        self.allocation.slot
    }
}

fn key_of((block_size, eagle): (u32, bool)) -> PoolKey {
    PoolKey { block_size, eagle }
}

/// The hashes in a packed column.
fn unpacked(packed: &[u8]) -> PyResult<std::borrow::Cow<'_, [u64]>> {
    hashes_from_bytes(packed).ok_or_else(|| PyValueError::new_err("packed hashes are whole u64s"))
}

#[pymethods]
impl ActiveLoad {
    #[new]
    fn new(track_blocks: bool) -> Self {
        Self { load: load::ActiveLoad::new(track_blocks) }
    }

    #[getter]
    fn requests(&self) -> Vec<i64> {
        self.load.requests.clone()
    }

    #[getter]
    fn prefill_tokens(&self) -> Vec<i64> {
        self.load.prefill_tokens.clone()
    }

    #[getter]
    fn decode_blocks(&self) -> Vec<i64> {
        self.load.decode_blocks.clone()
    }

    /// (requests, prefill tokens, decode blocks)
    fn at(&self, slot: usize) -> PyResult<(i64, i64, i64)> {
        let load = &self.load;
        if slot >= load.requests.len() {
            return Err(PyIndexError::new_err("a slot that there is no room for"));
        }
        Ok((load.requests[slot], load.prefill_tokens[slot], load.decode_blocks[slot]))
    }

    fn ensure_slot(&mut self, slot: u32) {
        self.load.ensure_slot(slot);
    }

    fn limit(&mut self, slot: u32, limits: (i64, i64, i64)) -> PyResult<()> {
        self.check_slots(&[slot])?;
        let (prefill_tokens, decode_blocks, queued_prefill_tokens) = limits;
        self.load.limit(slot, Limits { prefill_tokens, decode_blocks, queued_prefill_tokens });
        Ok(())
    }

    fn busy<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.load.busy().to_bytes())
    }

    fn full<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.load.full().to_bytes())
    }

    fn arrange(&mut self, ranks: Vec<(PyBackedStr, u32, u32)>) {
        self.load.arrange(ranks.iter().map(|(worker_id, dp_rank, slot)| (&**worker_id, *dp_rank, *slot)));
    }

    #[pyo3(signature = (slot, pool_key, hashes, *, private_blocks=0, prefill_tokens=0))]
    fn add(
        &mut self,
        slot: u32,
        pool_key: (u32, bool),
        hashes: &[u8],
        private_blocks: i64,
        prefill_tokens: i64,
    ) -> PyResult<Allocation> {
        self.check_slots(&[slot])?;
        let hashes = unpacked(hashes)?;
        let allocation = self.load.add(slot, key_of(pool_key), &hashes, private_blocks, prefill_tokens);
        Ok(Allocation { allocation })
    }

    fn complete_prefill(&mut self, mut allocation: PyRefMut<'_, Allocation>) {
        self.load.complete_prefill(&mut allocation.allocation);
    }

    fn add_private(&mut self, mut allocation: PyRefMut<'_, Allocation>, blocks: i64) {
        self.load.add_private(&mut allocation.allocation, blocks);
    }

    fn remove(&mut self, mut allocation: PyRefMut<'_, Allocation>) {
        self.load.remove(&mut allocation.allocation);
    }

    fn shared(
        &self,
        pool_key: (u32, bool),
        hashes: &[u8],
    ) -> PyResult<std::collections::HashMap<u32, usize>> {
        let hashes = unpacked(hashes)?;
        let mut found = std::collections::HashMap::new();
        self.load.shared(key_of(pool_key), &hashes, |slot, blocks| {
            found.insert(slot, blocks);
        });
        Ok(found)
    }

    fn score(
        slf: &Bound<'_, Self>,
        inputs: ScoreInputs<'_>,
        overlaps: Option<&Overlaps>,
        slots: Option<&[u8]>,
    ) -> PyResult<Scores> {
        let slots = slots.map(SlotSet::from_bytes);
        inputs.hashes()?;
        let scores = slf.borrow().load.score(slots.as_ref(), &inputs.question(overlaps));
        Ok(Scores { scores, load: slf.clone().unbind(), hashes: inputs.1.unbind() })
    }

    /// The slot of least cost, its leading blocks on the device, effective ones, the cost, and what the one with most
    /// blocks on its device would cost more. Of several that is `home`, or the one that `draw` says of so many.
    #[allow(clippy::too_many_arguments)] // a question, and three answers to what it leaves open
    fn cheapest(
        &self,
        py: Python<'_>,
        inputs: ScoreInputs<'_>,
        overlaps: Option<&Overlaps>,
        slots: Option<&[u8]>,
        times: Option<Times>,
        home: i64,
        draw: &Bound<'_, PyAny>,
    ) -> PyResult<(u32, u32, f64, f64, f64)> {
        let slots = slots.map(SlotSet::from_bytes);
        let hashes = inputs.hashes()?;
        let scores = self.load.score(slots.as_ref(), &inputs.question(overlaps));
        let costs = match &times {
            Some(times) => times.costs(py, &scores)?,
            None => self.load.costs_with(&scores, &hashes),
        };
        let least = costs.least();
        let at_home = || least.iter().position(|&candidate| i64::from(scores.slots[candidate]) == home);
        let index = match least.len() {
            1 => 0,
            ties => at_home().map_or_else(|| draw.call1((ties,))?.extract(), Ok)?,
        };
        let candidate = *least.get(index).ok_or_else(|| PyIndexError::new_err("no such candidate"))?;
        let (device, effective) = (scores.device_blocks[candidate], scores.effective_blocks[candidate]);
        let cost = costs.0[candidate];
        let most = scores.device_blocks.iter().copied().max().unwrap_or(device);
        let holders = scores.device_blocks.iter().zip(&costs.0).filter(|(blocks, _)| **blocks == most);
        let holder = holders.map(|(_, &cost)| cost).fold(f64::INFINITY, f64::min);
        Ok((scores.slots[candidate], device, effective, cost, holder - cost))
    }

    fn check_invariants(&self, allocations: Vec<PyRef<'_, Allocation>>) -> PyResult<()> {
        self.load
            .check(allocations.iter().map(|allocation| &allocation.allocation))
            .map_err(PyAssertionError::new_err)
    }
}

impl ActiveLoad {
    fn check_slots(&self, slots: &[u32]) -> PyResult<()> {
        match slots.iter().any(|&slot| slot as usize >= self.load.requests.len()) {
            true => Err(PyIndexError::new_err("a slot that there is no room for")),
            false => Ok(()),
        }
    }
}

/// `ScoreInputs` of the reference backend, a named tuple: (block format, packed hashes, prompt tokens, weight of overlaps,
/// (weight of host, of disk), the prefill is charged, scale)
#[derive(FromPyObject)]
struct ScoreInputs<'py>((u32, bool), Bound<'py, PyBytes>, u32, f64, (f64, f64), bool, f64);

impl ScoreInputs<'_> {
    fn hashes(&self) -> PyResult<std::borrow::Cow<'_, [u64]>> {
        unpacked(self.1.as_bytes())
    }

    fn question<'a>(&self, overlaps: Option<&'a Overlaps>) -> Question<'a> {
        let &Self(block_format, _, isl_tokens, overlap_score_weight, tiers, charge_prefill, scale) = self;
        Question {
            pool_key: key_of(block_format),
            overlaps: overlaps.map(|overlaps| &overlaps.overlaps),
            isl_tokens,
            overlap_score_weight,
            host_weight: tiers.0,
            disk_weight: tiers.1,
            charge_prefill,
            scale,
        }
    }
}

/// `TimeCostInputs` of the reference backend, by the names of its fields.
#[derive(FromPyObject)]
struct Times {
    table: PyBuffer<f64>,
    row_of: PyBuffer<u32>,
    now: f64,
    weight: f64,
    own_seconds: f64,
    empty: f64,
    popular_tokens: f64,
    popular_discount: f64,
    step_seconds: f64,
    stage_seconds: [f64; 5],
}

impl Times {
    fn costs(&self, py: Python<'_>, scores: &load::Scores) -> PyResult<load::Costs> {
        self.with_rows(py, scores, |question, rows| {
            let rows = rows.iter().map(|numbers| TimeRow::new(numbers.each_ref().map(|number| number.get())));
            scores.seconds(question, rows)
        })
    }

    fn response_times(
        &self,
        py: Python<'_>,
        scores: &load::Scores,
        steps: &StepTimes,
    ) -> PyResult<Vec<(f64, f64)>> {
        self.with_rows(py, scores, |question, rows| {
            let rows = rows.iter().map(|numbers| TimeRow::new(numbers.each_ref().map(|number| number.get())));
            scores.response_times(question, steps, rows)
        })
    }

    /// Calls with what is known, and the row of each candidate.
    fn with_rows<T>(
        &self,
        py: Python<'_>,
        scores: &load::Scores,
        call: impl FnOnce(&TimeCostInputs, &[&[ReadOnlyCell<f64>; TimeRow::LENGTH]]) -> T,
    ) -> PyResult<T> {
        let &Self { now, weight, own_seconds, empty, popular_tokens, popular_discount, step_seconds, .. } =
            self;
        let (Some(table), Some(row_of)) = (self.table.as_slice(py), self.row_of.as_slice(py)) else {
            return Err(PyValueError::new_err("a contiguous table"));
        };
        let (rows, _) = table.as_chunks::<{ TimeRow::LENGTH }>();
        // Found once, and checked before any is read: a loop that may end early is a third slower.
        let slots = scores.slots.iter();
        let found: Option<Vec<_>> =
            slots.map(|&slot| rows.get(row_of.get(slot as usize)?.get() as usize)).collect();
        let found = found.ok_or_else(|| PyIndexError::new_err("a slot without a row"))?;
        let question = TimeCostInputs {
            now,
            weight,
            own_seconds,
            empty,
            popular_tokens,
            popular_discount,
            step_seconds,
            stage_seconds: self.stage_seconds,
        };
        Ok(call(&question, &found))
    }
}

/// What each candidate costs; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
struct Costs {
    costs: load::Costs,
}

#[pymethods]
impl Costs {
    fn __len__(&self) -> usize {
        self.costs.0.len()
    }

    fn at(&self, index: usize) -> PyResult<f64> {
        let cost = self.costs.0.get(index).copied();
        cost.ok_or_else(|| PyIndexError::new_err("no such candidate"))
    }

    fn draw(&self, temperature: f64, uniform: f64) -> PyResult<usize> {
        let drawn = self.costs.draw(temperature, uniform);
        drawn.ok_or_else(|| PyIndexError::new_err("there are no candidates"))
    }

    fn least(&self) -> Vec<usize> {
        self.costs.least()
    }

    #[getter]
    fn values(&self) -> Vec<f64> {
        self.costs.0.clone()
    }
}

/// The columns of one decision; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
struct Scores {
    scores: load::Scores,
    /// What few policies look at follows from these.
    load: Py<ActiveLoad>,
    hashes: Py<PyBytes>,
}

#[pymethods]
impl Scores {
    fn costs(&self, py: Python<'_>) -> PyResult<Costs> {
        let hashes = unpacked(self.hashes.as_bytes(py))?;
        Ok(Costs { costs: self.load.borrow(py).load.costs_with(&self.scores, &hashes) })
    }

    fn seconds(&self, py: Python<'_>, times: Times) -> PyResult<Costs> {
        Ok(Costs { costs: times.costs(py, &self.scores)? })
    }

    /// (seconds to the first token, between tokens) of each candidate
    fn response_times(
        &self,
        py: Python<'_>,
        times: Times,
        prefill: f64,
        decode: f64,
        context_token: f64,
    ) -> PyResult<Vec<(f64, f64)>> {
        times.response_times(py, &self.scores, &StepTimes { prefill, decode, context_token })
    }

    fn overlap(&self, index: usize) -> PyResult<(u32, f64)> {
        let columns = (self.scores.device_blocks.get(index), self.scores.effective_blocks.get(index));
        let (Some(&device), Some(&effective)) = columns else {
            return Err(PyIndexError::new_err("no such candidate"));
        };
        Ok((device, effective))
    }

    fn slot(&self, index: usize) -> PyResult<u32> {
        let slot = self.scores.slots.get(index).copied();
        slot.ok_or_else(|| PyIndexError::new_err("no such candidate"))
    }

    #[getter]
    fn device_blocks(&self) -> Vec<u32> {
        self.scores.device_blocks.clone()
    }

    #[getter]
    fn effective_blocks(&self) -> Vec<f64> {
        self.scores.effective_blocks.clone()
    }

    #[getter]
    fn cached_tokens(&self) -> Vec<f64> {
        self.scores.cached_tokens.clone()
    }

    #[getter]
    fn prefill_tokens(&self, py: Python<'_>) -> Vec<f64> {
        self.load.borrow(py).load.prefill_with(&self.scores)
    }

    #[getter]
    fn decode_blocks(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        let hashes = unpacked(self.hashes.as_bytes(py))?;
        Ok(self.load.borrow(py).load.decode_with(&self.scores, &hashes))
    }
}

/// Overlaps that stay native; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub struct Overlaps {
    pub overlaps: load::Overlaps,
}

#[pymethods]
impl Overlaps {
    #[new]
    fn new(
        worker_ids: Vec<PyBackedStr>,
        dp_ranks: Vec<u32>,
        tiers: [Vec<u32>; 4],
        predicted: Vec<u32>,
        others: Option<Others>,
    ) -> PyResult<Self> {
        let (mut text, mut names) = (Vec::new(), Vec::with_capacity(worker_ids.len()));
        for worker_id in &worker_ids {
            let start = text.len() as u32;
            text.extend_from_slice(worker_id.as_bytes());
            names.push((start, text.len() as u32));
        }
        let overlaps =
            load::Overlaps::new(text.into(), &names, Columns { dp_ranks, tiers, predicted }, others);
        let overlaps = overlaps.ok_or_else(|| PyValueError::new_err("columns that contradict each other"))?;
        Ok(Self { overlaps })
    }

    fn within(&self, blocks: u64) -> bool {
        self.overlaps.within(blocks)
    }

    #[getter]
    fn has_predictions(&self) -> bool {
        let others = |[device, _, _, _, predicted]: Others| predicted > device;
        !self.overlaps.columns().predicted.is_empty() || self.overlaps.others().is_some_and(others)
    }

    #[getter]
    fn others(&self) -> Option<(u32, u32, u32, u32, u32)> {
        self.overlaps.others().map(Into::into)
    }

    #[getter]
    fn longest_on_device(&self) -> u32 {
        self.overlaps.longest_on_device()
    }

    /// (worker ids, ranks, device, host, disk, external, predicted)
    #[getter]
    fn columns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let names = self.overlaps.rows().map(|(name, _)| String::from_utf8_lossy(name).into_owned());
        let columns = self.overlaps.columns();
        let [device, host, disk, external] = &columns.tiers;
        let names: Vec<_> = names.collect();
        (names, &columns.dp_ranks, device, host, disk, external, &columns.predicted).into_pyobject(py)
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("TIME_ROW_FIELDS", PyTuple::new(module.py(), TimeRow::names())?)?;
    module.add_class::<ActiveLoad>()?;
    module.add_class::<Allocation>()?;
    module.add_class::<Costs>()?;
    module.add_class::<Scores>()?;
    module.add_class::<Overlaps>()
}
