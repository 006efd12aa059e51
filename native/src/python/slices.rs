//! Python binding of the work on a whole rank that is done in slices: cuts and loads.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::codec::decode_error;
use super::index::{BlockIndex, Name, PyDump, counts_to_python, load_error};
use crate::codec::{self, Identity};
use crate::index::{self, WorkerDump, WorkerName, WorkerRank};
use crate::query::PoolName;

/// Slices of one call: the lock is given back after each, the GIL is taken after all.
const SLICES_A_CALL: usize = 8;

/// A cut under way; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub struct Cut {
    index: Arc<index::Index>,
    worker: WorkerRank,
    cutting: Mutex<Option<index::Cutting>>,
    messages: Mutex<VecDeque<Vec<u8>>>,
}

#[pymethods]
impl Cut {
    #[staticmethod]
    fn begin(index: &Bound<'_, BlockIndex>, worker: Name) -> Option<Self> {
        let index = Arc::clone(index.get().index());
        let cutting = Mutex::new(Some(index.begin_cut(worker.get())?));
        Some(Self { index, worker: worker.get().into(), cutting, messages: Mutex::default() })
    }

    fn step(&self, py: Python<'_>) -> bool {
        py.detach(|| {
            let cutting = locked(&self.cutting);
            let Some(cutting) = &*cutting else { return false };
            (0..SLICES_A_CALL).all(|_| self.index.copy_slice(cutting))
        })
    }

    fn dump<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(dump) = py.detach(|| self.take()) else { return Ok(None) };
        let blocks = dump.blocks.iter().map(|block| {
            let parent = block.parent.map_or(-1, |parent| parent as i64);
            (block.engine_hash, parent, block.local_hash, counts_to_python(&block.counts))
        });
        let orphans = dump.orphans.iter().map(|orphan| {
            let counts = counts_to_python(&orphan.counts);
            (orphan.engine_hash, orphan.parent_engine_hash, orphan.local_hash, counts)
        });
        let windows = dump.windows.iter().map(|group| (group.number, group.window, group.block_size));
        let window_blocks = dump.window_blocks.iter();
        let window_blocks = window_blocks
            .map(|block| (block.engine_hash, block.sequence_hash, counts_to_python(&block.counts)));
        let columns = (
            dump.epoch,
            dump.last_event_id,
            dump.groups.clone(),
            blocks.collect::<Vec<_>>(),
            orphans.collect::<Vec<_>>(),
            dump.incompatible.clone(),
            windows.collect::<Vec<_>>(),
            window_blocks.collect::<Vec<_>>(),
            dump.incomplete,
        );
        columns.into_pyobject(py).map(Some)
    }

    #[pyo3(signature = (pool, history_incomplete, max_chunk_bytes, epoch=None))]
    fn encode(
        &self,
        py: Python<'_>,
        pool: PoolName,
        history_incomplete: bool,
        max_chunk_bytes: usize,
        epoch: Option<u64>,
    ) -> bool {
        py.detach(|| {
            let Some(mut dump) = self.take() else { return false };
            dump.epoch = epoch.unwrap_or(dump.epoch);
            let (tenant, model, block_size, eagle) = pool;
            let WorkerRank { worker_id, dp_rank } = &self.worker;
            let worker_id = worker_id.to_string();
            let identity = Identity { worker_id, dp_rank: *dp_rank, model, tenant, block_size, eagle };
            *locked(&self.messages) =
                codec::encode(&identity, &dump, history_incomplete, max_chunk_bytes).into();
            true
        })
    }

    fn next_message<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        locked(&self.messages).pop_front().map(|message| PyBytes::new(py, &message))
    }
}

impl Cut {
    /// The dump, once; what is left of it is copied first.
    fn take(&self) -> Option<WorkerDump> {
        let cutting = locked(&self.cutting).take()?;
        while self.index.copy_slice(&cutting) {}
        cutting.dump()
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        if let Some(cutting) = locked(&self.cutting).take() {
            self.index.end_cut(&cutting);
        }
    }
}

/// A load under way; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub struct Loading {
    index: Arc<index::Index>,
    worker: (String, u32),
    loading: Mutex<Option<index::Loading>>,
}

#[pymethods]
impl Loading {
    #[staticmethod]
    fn of_dump(py: Python<'_>, index: &Bound<'_, BlockIndex>, mut dump: PyDump) -> PyResult<Self> {
        let worker = std::mem::take(&mut dump.worker);
        Self::begin(py, index, worker, dump.into())
    }

    #[staticmethod]
    fn of_messages(
        py: Python<'_>,
        index: &Bound<'_, BlockIndex>,
        messages: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<Self> {
        let bytes: Vec<&[u8]> = messages.iter().map(|message| message.as_bytes()).collect();
        let dumped = py.detach(|| codec::decode(bytes)).map_err(|error| decode_error(py, error))?;
        let Identity { worker_id, dp_rank, .. } = dumped.identity;
        Self::begin(py, index, (worker_id, dp_rank), dumped.dump)
    }

    fn step(&self, py: Python<'_>) -> PyResult<bool> {
        let result = py.detach(|| {
            let mut guard = locked(&self.loading);
            for _ in 0..SLICES_A_CALL {
                let Some(loading) = &mut *guard else { return Ok(false) };
                match self.index.load_slice(loading) {
                    Ok(true) => {}
                    Ok(false) => return Ok(false),
                    Err(error) => {
                        if let Some(loading) = guard.take() {
                            self.index.end_load(loading);
                        }
                        return Err(error);
                    }
                }
            }
            Ok(true)
        });
        result.map_err(|error| load_error(py, self.name(), error))
    }

    fn commit(&self, py: Python<'_>) -> bool {
        // What is taken apart with a load takes long; it is nobody's by then.
        py.detach(|| locked(&self.loading).take().is_some_and(|loading| self.index.commit(loading)))
    }
}

impl Loading {
    fn begin(
        py: Python<'_>,
        index: &Bound<'_, BlockIndex>,
        worker: (String, u32),
        dump: WorkerDump,
    ) -> PyResult<Self> {
        let index = Arc::clone(index.get().index());
        let name = WorkerName { worker_id: &worker.0, dp_rank: worker.1 };
        let loading =
            py.detach(|| index.begin_load(name, dump)).map_err(|error| load_error(py, name, error))?;
        Ok(Self { index, worker, loading: Mutex::new(Some(loading)) })
    }

    fn name(&self) -> WorkerName<'_> {
        WorkerName { worker_id: &self.worker.0, dp_rank: self.worker.1 }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(loading) = locked(&self.loading).take() {
            self.index.end_load(loading);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Cut>()?;
    module.add_class::<Loading>()
}
