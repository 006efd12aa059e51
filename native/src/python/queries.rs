//! Python binding of `query`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;

use super::answers::{Answers, DETACH_ABOVE_BYTES};
use super::index::BlockIndex;
use super::load::Overlaps;
use crate::hashing::hashes_from_bytes;
use crate::index::{WorkerName, WorkerRank};
use crate::load;
use crate::query::{self, PoolName};

/// Overlaps, whether there may be more, the rows whose history is incomplete, and (worker ranks, digest of them).
type Found = (Overlaps, bool, Vec<u32>, (usize, u64));

/// The indexes that queries can reach; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
#[derive(Default)]
pub struct Queries {
    queries: Arc<query::Queries>,
}

#[pymethods]
impl Queries {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn set_pool(&self, pool: PoolName, index: &Bound<'_, BlockIndex>) {
        self.queries.set_pool(pool, Arc::clone(index.get().index()));
    }

    fn remove_pool(&self, pool: PoolName) {
        self.queries.remove_pool(pool);
    }

    fn set_incomplete(&self, pool: PoolName, rank: (PyBackedStr, u32), incomplete: bool) {
        let (worker_id, dp_rank) = &rank;
        let rank = WorkerRank::from(WorkerName { worker_id, dp_rank: *dp_rank });
        self.queries.set_incomplete(pool, rank, incomplete);
    }

    fn find(
        &self,
        py: Python<'_>,
        pool: (PyBackedStr, PyBackedStr, u32, bool),
        hashes: &Bound<'_, PyBytes>,
        prompt_tokens: usize,
        top_k: usize,
        now: f64,
    ) -> PyResult<Option<Found>> {
        let Some(packed) = hashes_from_bytes(hashes.as_bytes()) else { return Ok(None) };
        let (tenant, model, block_size, eagle) = &pool;
        let run = || {
            self.queries.find_hashes(
                (tenant, model, *block_size, *eagle),
                &packed,
                prompt_tokens,
                top_k,
                now,
                |found| {
                    let ranks = found.rows.iter().map(|(rank, _)| (&*rank.worker_id, rank.dp_rank));
                    let blocks = |row: usize, level: usize| found.rows[row].1.blocks[level];
                    let overlaps =
                        load::Overlaps::of_rows(ranks, blocks, found.others.map(|others| others.blocks))?;
                    let incomplete = found.incomplete.clone();
                    Some((Overlaps { overlaps }, found.lower_bound, incomplete, found.ranks))
                },
            )
        };
        let found = if hashes.as_bytes().len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
        Ok(found.flatten())
    }

    fn answer<'py>(
        &self,
        py: Python<'py>,
        request: &Bound<'py, PyBytes>,
        now: f64,
        caller_tenant: &str,
    ) -> Option<Bound<'py, PyBytes>> {
        let request = request.as_bytes();
        let run = || self.queries.answer(request, now, caller_tenant);
        let answer = if request.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
        answer.map(|bytes| PyBytes::new(py, &bytes))
    }

    fn answer_stream<'py>(
        &self,
        py: Python<'py>,
        message: &Bound<'py, PyBytes>,
        now: f64,
        caller_tenant: &str,
    ) -> Option<Bound<'py, PyBytes>> {
        let message = message.as_bytes();
        let run = || self.queries.answer_stream(message, now, caller_tenant);
        let answers = if message.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
        answers.map(|bytes| PyBytes::new(py, &bytes))
    }

    fn answers(&self) -> Answers {
        let queries = Arc::clone(&self.queries);
        Answers::new(move |request, now, caller_tenant| queries.answer(request, now, caller_tenant))
    }

    fn stream_answers(&self) -> Answers {
        let queries = Arc::clone(&self.queries);
        Answers::new(move |message, now, caller_tenant| queries.answer_stream(message, now, caller_tenant))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Queries>()
}
