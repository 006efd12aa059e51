//! Python binding of `ingest`.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList};

use super::index::BlockIndex;
use crate::events::Batch;
use crate::index::{WorkerName, WorkerRank};
use crate::ingest::{self, Address, Notice, Offered, Place, Position};

/// The usual case of one source; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
struct Bypass {
    bypass: Arc<ingest::Bypass>,
}

/// Last id, digests, batches applied, seconds since the last one, over capacity, incompatible.
type Taken<'py> = (u64, Bound<'py, PyBytes>, u64, Option<f64>, bool, String);

#[pymethods]
impl Bypass {
    #[new]
    fn new(index: &Bound<'_, BlockIndex>, worker: (PyBackedStr, u32), digests_kept: usize) -> Self {
        let worker = WorkerRank::from(WorkerName { worker_id: &worker.0, dp_rank: worker.1 });
        let index = Arc::clone(index.get().index());
        Self { bypass: Arc::new(ingest::Bypass::new(index, worker, digests_kept)) }
    }

    #[pyo3(signature = (last_id, digests, before = None))]
    fn lend(&self, last_id: u64, digests: &[u8], before: Option<u64>) -> bool {
        let digests = digests.as_chunks().0.iter().map(|&digest| u64::from_ne_bytes(digest)).collect();
        self.bypass.lend(Position { last_id, digests, before })
    }

    fn take<'py>(&self, py: Python<'py>) -> Option<Taken<'py>> {
        let mut progress = self.bypass.take()?;
        let digests = progress.position.digests.make_contiguous();
        Some((
            progress.position.last_id,
            PyBytes::new(py, bytemuck::cast_slice(digests)),
            progress.applied,
            progress.applied_at.map(|at| at.elapsed().as_secs_f64()),
            progress.over_capacity,
            progress.incompatible,
        ))
    }

    fn peek(&self) -> Option<(u64, u64, Option<f64>)> {
        let (last_id, applied, at) = self.bypass.peek()?;
        Some((last_id, applied, at.map(|at| at.elapsed().as_secs_f64())))
    }

    fn offer(&self, event_id: u64, payload: &[u8]) -> &'static str {
        match self.bypass.offer(event_id, payload, &mut Batch::default()) {
            Offered::Applied => "applied",
            Offered::Stopped => "stopped",
            Offered::Declined => "declined",
            Offered::Closed => "closed",
        }
    }
}

/// The threads that read sockets; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
struct Intake {
    intake: ingest::Intake,
}

#[pymethods]
impl Intake {
    #[new]
    fn new(threads: usize) -> PyResult<Self> {
        Ok(Self { intake: ingest::Intake::start(threads)? })
    }

    fn fileno(&self) -> i32 {
        self.intake.fd()
    }

    #[pyo3(signature = (bypass, endpoint, *, bind, topic, longest_frame))]
    fn add(
        &self,
        bypass: &Bound<'_, Bypass>,
        endpoint: &str,
        bind: bool,
        topic: &str,
        longest_frame: usize,
    ) -> PyResult<Option<usize>> {
        let Some(place) = Place::parse(endpoint) else { return Ok(None) };
        let address = Address { place, bind, topic: topic.as_bytes(), longest_frame };
        Ok(Some(self.intake.add(Arc::clone(&bypass.get().bypass), address)?))
    }

    #[pyo3(signature = (bypass, endpoint, first_id, *, longest_frame, first_within, next_within))]
    fn replay(
        &self,
        bypass: &Bound<'_, Bypass>,
        endpoint: &str,
        first_id: u64,
        longest_frame: usize,
        first_within: f64,
        next_within: f64,
    ) -> PyResult<Option<usize>> {
        let Some(place) = Place::parse(endpoint) else { return Ok(None) };
        let (first_within, next_within) =
            (Duration::from_secs_f64(first_within), Duration::from_secs_f64(next_within));
        let request = ingest::Request { place, first_id, longest_frame, first_within, next_within };
        Ok(Some(self.intake.replay(Arc::clone(&bypass.get().bypass), request)?))
    }

    fn pause(&self, source: usize, paused: bool) -> PyResult<()> {
        Ok(self.intake.pause(source, paused)?)
    }

    fn hand_over(&self, source: usize, bytes: usize) -> PyResult<()> {
        Ok(self.intake.hand_over(source, bytes)?)
    }

    fn remove(&self, py: Python<'_>, source: usize) -> PyResult<()> {
        Ok(py.detach(|| self.intake.remove(source))?)
    }

    fn take<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Bound<'py, PyList>> {
        let notices = PyList::empty(py);
        for ingest::Item { source, notice } in self.intake.take(most) {
            match notice {
                Notice::Message { event_id, payload } => {
                    notices.append((source, "message", (event_id, PyBytes::new(py, &payload))))?;
                }
                Notice::Malformed(lengths) => notices.append((source, "malformed", lengths))?,
                Notice::Connected => notices.append((source, "connected", py.None()))?,
                Notice::Unconnected => notices.append((source, "unconnected", py.None()))?,
                Notice::Refused(reason) => notices.append((source, "refused", reason))?,
                Notice::Reply { event_id, payload } => {
                    notices.append((source, "reply", (event_id, PyBytes::new(py, &payload))))?;
                }
                Notice::ReplayStopped => notices.append((source, "reply stopped", py.None()))?,
                Notice::ReplayEnd => notices.append((source, "reply end", py.None()))?,
                Notice::ReplayBroken(reason) => notices.append((source, "reply broken", reason))?,
                Notice::Stopped => notices.append((source, "stopped", py.None()))?,
                Notice::Failed(reason) => notices.append((source, "failed", reason))?,
            }
        }
        Ok(notices)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.intake.close());
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Bypass>()?;
    module.add_class::<Intake>()
}
