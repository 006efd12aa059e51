//! Python binding of `ingest`.

use std::collections::VecDeque;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList};

use super::index::BlockIndex;
use crate::index::{WorkerName, WorkerRank};
use crate::ingest::{self, Api, Cursor, Notice, Offered, Socket, Sockets};

/// The usual case of one source; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
struct Lane {
    lane: Arc<ingest::Lane>,
}

/// Last id, digests, batches applied, seconds since the last one, over capacity, incompatible.
type Taken = (u64, Vec<(u64, u64)>, u64, Option<f64>, bool, String);

#[pymethods]
impl Lane {
    #[new]
    fn new(index: &Bound<'_, BlockIndex>, worker: (PyBackedStr, u32)) -> Self {
        let worker = WorkerRank::from(WorkerName { worker_id: &worker.0, dp_rank: worker.1 });
        Self { lane: Arc::new(ingest::Lane::new(Arc::clone(index.get().index()), worker)) }
    }

    fn lend(&self, last_id: u64, digests: Vec<(u64, u64)>) -> bool {
        self.lane.lend(Cursor { last_id, digests: VecDeque::from(digests) })
    }

    fn take(&self) -> Option<Taken> {
        let progress = self.lane.take()?;
        Some((
            progress.cursor.last_id,
            progress.cursor.digests.into(),
            progress.applied,
            progress.applied_at.map(|at| at.elapsed().as_secs_f64()),
            progress.over_capacity,
            progress.incompatible,
        ))
    }

    fn offer(&self, event_id: u64, payload: &[u8]) -> &'static str {
        match self.lane.offer(event_id, payload) {
            Offered::Applied => "applied",
            Offered::Stopped => "stopped",
            Offered::Declined => "declined",
            Offered::Closed => "closed",
        }
    }
}

/// The thread that reads sockets; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
struct Reader {
    reader: ingest::Reader,
}

#[pymethods]
impl Reader {
    #[new]
    fn new(zmq: [usize; 7]) -> PyResult<Self> {
        // SAFETY: the one caller asks the loader for them by name.
        let api = unsafe { Api::at(zmq) };
        Ok(Self { reader: ingest::Reader::start(api)? })
    }

    fn fileno(&self) -> i32 {
        self.reader.fd()
    }

    fn add(
        &self,
        lane: &Bound<'_, Lane>,
        socket: usize,
        fd: i32,
        monitor: usize,
        monitor_fd: i32,
    ) -> PyResult<usize> {
        // SAFETY: the caller leaves them alone until it has called `remove` or `close`.
        let (data, monitor) = unsafe { (Socket::at(socket), Socket::at(monitor)) };
        let sockets = Sockets { data, data_fd: fd, monitor, monitor_fd };
        Ok(self.reader.add(Arc::clone(&lane.get().lane), sockets)?)
    }

    fn remove(&self, py: Python<'_>, source: usize) -> PyResult<()> {
        Ok(py.detach(|| self.reader.remove(source))?)
    }

    fn take<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Bound<'py, PyList>> {
        let notices = PyList::empty(py);
        for ingest::Item { source, notice } in self.reader.take(most) {
            match notice {
                Notice::Message { event_id, payload } => {
                    notices.append((source, "message", (event_id, PyBytes::new(py, &payload))))?;
                }
                Notice::Malformed(lengths) => notices.append((source, "malformed", lengths))?,
                Notice::Connected => notices.append((source, "connected", py.None()))?,
                Notice::Unconnected(event) => notices.append((source, "unconnected", event))?,
                Notice::Stopped => notices.append((source, "stopped", py.None()))?,
                Notice::Failed(reason) => notices.append((source, "failed", reason))?,
            }
        }
        Ok(notices)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.reader.close());
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Lane>()?;
    module.add_class::<Reader>()
}
