//! Python binding of `index` and `wire`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use super::errors::{self, invalid_argument};
use super::hashing::local_hashes;
use super::values::{DETACH_ABOVE_BYTES, applied, fault_name};
use crate::events::{Event, Removed};
use crate::hashing::hashes_from_bytes;
use crate::index::{
    self, Bounds, Copies, DumpedBlock, DumpedOrphan, DumpedWindowBlock, HashedPrompt, IndexStats, LEVELS,
    LoadError, Row, SharedCacheStats, SharedOptions, WindowGroup, WorkerDump, WorkerName, WorkerOptions,
    WorkerStats,
};
use crate::wire;

/// (worker_id, dp_rank): a `WorkerRank`.
#[derive(FromPyObject)]
pub struct Name(PyBackedStr, u32);

impl Name {
    pub fn get(&self) -> WorkerName<'_> {
        WorkerName { worker_id: &self.0, dp_rank: self.1 }
    }
}

/// (group, tier, number) of one engine hash.
type CopiesTuple = (u32, u8, u32);

/// Engine hash, parent, local hash, copies.
type Blocks = Vec<(Option<u64>, i64, u64, Vec<CopiesTuple>)>;

/// Engine hash, that of the parent, local hash, copies.
type Orphans = Vec<(u64, u64, u64, Vec<CopiesTuple>)>;

pub fn counts_to_python(counts: &[Copies]) -> Vec<CopiesTuple> {
    counts.iter().map(|copies| (copies.group, copies.tier, copies.number)).collect()
}

fn counts_from_python(counts: Vec<CopiesTuple>) -> smallvec::SmallVec<[Copies; 2]> {
    let mut counts: smallvec::SmallVec<[Copies; 2]> =
        counts.into_iter().map(|(group, tier, number)| Copies { group, tier, number }).collect();
    counts.sort_unstable();
    counts
}

/// The block index; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub struct BlockIndex {
    index: Arc<index::Index>,
    /// The objects that stand for workers in answers, by handle.
    workers: std::sync::Mutex<Vec<Option<Py<PyAny>>>>,
}

#[pymethods]
impl BlockIndex {
    #[new]
    fn new(
        block_size: usize,
        eagle: bool,
        max_blocks: usize,
        max_predictions: usize,
        prune_ratio: f64,
    ) -> Self {
        let bounds = Bounds { max_blocks, max_predictions, prune_ratio };
        Self {
            index: Arc::new(index::Index::new(block_size, eagle, bounds)),
            workers: std::sync::Mutex::default(),
        }
    }

    fn add_worker(
        &self,
        worker: &Bound<'_, PyAny>,
        set_copies: bool,
        adapters: &Bound<'_, PyDict>,
        total_kv_blocks: u64,
        shared: (String, Option<u8>, u64),
    ) -> PyResult<()> {
        let adapters = adapters
            .iter()
            .map(|(number, name)| Ok((number.extract::<i128>()?, name.extract()?)))
            .collect::<PyResult<_>>()?;
        let (name, tier, blocks) = shared;
        let shared = SharedOptions { name, tier, blocks };
        let options = WorkerOptions { set_copies, adapters, total_kv_blocks, shared };
        let handle = self.index.add_worker(worker.extract::<Name>()?.get(), options) as usize;
        let mut workers = self.workers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if workers.len() <= handle {
            workers.resize_with(handle + 1, || None);
        }
        workers[handle] = Some(worker.clone().unbind());
        Ok(())
    }

    fn remove_rank(&self, worker: Name) -> bool {
        self.index.remove_rank(worker.get())
    }

    fn reset(&self, worker: Name) {
        self.index.reset(worker.get());
    }

    fn begin_demotion(&self, worker: Name, ttl_seconds: f64, now: f64) {
        self.index.begin_demotion(worker.get(), ttl_seconds, now);
    }

    fn go_on_demoting(&self, py: Python<'_>, worker: Name) -> Option<u64> {
        py.detach(|| self.index.go_on_demoting(worker.get()))
    }

    fn apply_payload(
        &self,
        py: Python<'_>,
        worker: Name,
        payload: &Bound<'_, PyBytes>,
        epoch: u64,
        event_id: Option<u64>,
    ) -> PyResult<(usize, usize, bool, String)> {
        let payload = payload.as_bytes();
        let run = || {
            let batch = wire::decode_batch(payload)
                .inspect_err(|_| self.index.move_cursor(worker.get(), epoch, event_id))?;
            Ok(self.index.apply(worker.get(), &batch, epoch, event_id))
        };
        let result = if payload.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
        result
            .map(applied)
            .map_err(|error: wire::Malformed| errors::malformed(py, error.field, error.message))
    }

    fn predict(
        &self,
        worker: Name,
        block_hashes: &Bound<'_, PyAny>,
        ttl_seconds: f64,
        now: f64,
    ) -> PyResult<u64> {
        Ok(self.index.predict(worker.get(), &local_hashes(block_hashes)?, ttl_seconds, now))
    }

    fn repeated(&self, worker: Name, block_hashes: &Bound<'_, PyAny>, first: usize) -> PyResult<u64> {
        Ok(self.index.repeated(worker.get(), &local_hashes(block_hashes)?, first))
    }

    fn find_matches<'py>(
        &self,
        block_hashes: &Bound<'py, PyAny>,
        now: f64,
        early_exit: bool,
        usable: Option<usize>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let py = block_hashes.py();
        let find = |hashes: &[u64]| {
            let mut prompt = HashedPrompt { hashes, usable: usable.unwrap_or(hashes.len()) };
            self.index.find(&mut prompt, now, early_exit, |rows, _| self.columns(py, rows))
        };
        match block_hashes.cast::<PyBytes>() {
            Ok(bytes) => match hashes_from_bytes(bytes.as_bytes()) {
                Some(hashes) => find(&hashes),
                None => Err(invalid_argument(py, "block_hashes", "the bytes are not whole u64s")),
            },
            Err(_) => find(&local_hashes(block_hashes)?),
        }
    }

    fn maintain(&self, py: Python<'_>, now: f64, budget: usize) -> bool {
        py.detach(|| self.index.maintain(now, budget))
    }

    fn workers(&self) -> Vec<(String, u32)> {
        self.index.workers().into_iter().map(|name| (name.worker_id.to_string(), name.dp_rank)).collect()
    }

    fn cursor(&self, worker: Name) -> Option<(u64, Option<u64>)> {
        self.index.cursor(worker.get())
    }

    fn worker_stats(&self, worker: Name) -> Option<WorkerStats> {
        self.index.worker_stats(worker.get())
    }

    fn incomplete(&self) -> Vec<(String, u32)> {
        let names = self.index.incomplete().into_iter();
        names.map(|name| (name.worker_id.to_string(), name.dp_rank)).collect()
    }

    fn shared_caches(&self) -> Vec<SharedCacheStats> {
        self.index.shared_caches()
    }

    fn stats(&self, py: Python<'_>) -> IndexStats {
        py.detach(|| self.index.stats())
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.index.check_invariants()).map_err(pyo3::exceptions::PyAssertionError::new_err)
    }
}

impl BlockIndex {
    /// The index itself.
    pub fn index(&self) -> &Arc<index::Index> {
        &self.index
    }

    /// Worker objects and one column a level.
    fn columns<'py>(&self, py: Python<'py>, rows: &[Row]) -> PyResult<Bound<'py, PyTuple>> {
        let workers = self.workers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let object = |row: &Row| {
            workers.get(row.worker as usize).and_then(Option::as_ref).map(|name| name.clone_ref(py))
        };
        let names = PyTuple::new(py, rows.iter().filter_map(object).collect::<Vec<_>>())?;
        let column =
            |level: usize| PyTuple::new(py, rows.iter().map(|row| row.blocks[level]).collect::<Vec<_>>());
        let first = column(0)?;
        let mut columns = vec![names.into_any(), first.clone().into_any()];
        for level in 1..LEVELS {
            let same = rows.iter().all(|row| row.blocks[level] == row.blocks[0]);
            columns.push(if same { first.clone().into_any() } else { column(level)?.into_any() });
        }
        PyTuple::new(py, columns)
    }
}

/// Engine hash, sequence hash, copies.
type WindowBlocks = Vec<(u64, u64, Vec<CopiesTuple>)>;

/// Group, tokens of its window, tokens a block.
type Windows = Vec<(u32, u32, u32)>;

/// A `WorkerDump` of Python.
#[derive(FromPyObject)]
pub struct PyDump {
    pub worker: (String, u32),
    epoch: u64,
    last_event_id: Option<u64>,
    groups: Vec<(u32, bool)>,
    blocks: Blocks,
    orphans: Orphans,
    incompatible: String,
    windows: Windows,
    window_blocks: WindowBlocks,
    incomplete: bool,
}

impl From<PyDump> for WorkerDump {
    fn from(dump: PyDump) -> Self {
        let blocks = dump.blocks.into_iter().map(|(engine_hash, parent, local_hash, counts)| DumpedBlock {
            engine_hash,
            // Anything below -1 comes out as a position that is too high, which is refused.
            parent: (parent != -1).then_some(parent as usize),
            local_hash,
            counts: counts_from_python(counts),
        });
        let orphans =
            dump.orphans.into_iter().map(|(engine_hash, parent_engine_hash, local_hash, counts)| {
                DumpedOrphan {
                    engine_hash,
                    parent_engine_hash,
                    local_hash,
                    counts: counts_from_python(counts),
                }
            });
        let windows = (dump.windows.into_iter()).map(|(number, window, block_size)| WindowGroup {
            number,
            window,
            block_size,
        });
        let window_blocks = dump.window_blocks.into_iter().map(|(engine_hash, sequence_hash, counts)| {
            DumpedWindowBlock { engine_hash, sequence_hash, counts: counts_from_python(counts) }
        });
        Self {
            epoch: dump.epoch,
            last_event_id: dump.last_event_id,
            groups: dump.groups,
            blocks: blocks.collect(),
            orphans: orphans.collect(),
            windows: windows.collect(),
            window_blocks: window_blocks.collect(),
            incompatible: dump.incompatible,
            incomplete: dump.incomplete,
        }
    }
}

/// Why a dump was not loaded, as a Python exception.
pub fn load_error(py: Python<'_>, worker: WorkerName<'_>, error: LoadError) -> PyErr {
    match error {
        LoadError::UnknownWorker => {
            errors::not_found(py, format!("worker {} rank {} is not known", worker.worker_id, worker.dp_rank))
        }
        LoadError::Full | LoadError::Superseded => errors::failed_precondition(py, error.to_string()),
        LoadError::Contradiction { field, message } => invalid_argument(py, &field, message),
    }
}

/// A payload as the arguments of `EventBatch`; for the tests of the decoder.
#[pyfunction]
fn decode_batch<'py>(payload: &Bound<'py, PyBytes>) -> PyResult<Bound<'py, PyTuple>> {
    let py = payload.py();
    let batch = wire::decode_batch(payload.as_bytes())
        .map_err(|error| errors::malformed(py, error.field, error.message))?;
    let events = PyList::empty(py);
    for event in &batch.events {
        match event {
            Event::Cleared => events.append(("cleared",))?,
            Event::Removed(Removed { engine_hashes, tier, group }) => {
                events.append(("removed", batch.hashes(*engine_hashes), tier, group))?;
            }
            Event::Stored(stored) => {
                let fields = PyDict::new(py);
                fields.set_item("engine_hashes", batch.hashes(stored.engine_hashes))?;
                fields.set_item("parent", stored.parent)?;
                fields.set_item("tokens", batch.tokens(stored.tokens))?;
                fields.set_item("block_size", stored.block_size)?;
                fields.set_item("tier", stored.tier)?;
                fields.set_item("group", stored.group)?;
                fields.set_item("full_attention", stored.full_attention)?;
                fields.set_item("window", stored.window)?;
                fields.set_item("lora_id", stored.lora_id)?;
                fields.set_item("lora_name", batch.text(stored.lora_name))?;
                fields.set_item("cache_salt", batch.text(stored.cache_salt))?;
                fields.set_item("mm_items", batch.mm_items(stored.mm_items))?;
                fields.set_item("pairs", stored.pairs)?;
                fields.set_item("lookahead", stored.lookahead)?;
                events.append(("stored", fields))?;
            }
        }
    }
    let faults: Vec<(&str, String)> =
        batch.faults.into_iter().map(|(kind, reason)| (fault_name(kind), reason)).collect();
    (events, batch.timestamp, batch.dp_rank, faults).into_pyobject(py)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BlockIndex>()?;
    module.add_function(wrap_pyfunction!(decode_batch, module)?)
}
