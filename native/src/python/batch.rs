//! A decoded batch that stays native between the sequence and the index.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;

use super::errors;
use super::index::BlockIndex;
use super::values::{DETACH_ABOVE_BYTES, applied, fault_name};
use crate::events::{self, Event, FaultKind, Removed, Stored};
use crate::index::WorkerName;
use crate::wire;

/// Decoded events of one message; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub struct Batch {
    batch: events::Batch,
    bytes: usize,
}

impl Batch {
    /// A batch, and the number of bytes that it was decoded from.
    pub fn of(batch: events::Batch, bytes: usize) -> Self {
        Self { batch, bytes }
    }

    /// Its events, and how many bytes they were decoded from.
    pub fn parts(&self) -> (&events::Batch, usize) {
        (&self.batch, self.bytes)
    }
}

#[pymethods]
impl Batch {
    #[new]
    fn new(py: Python<'_>, payload: &Bound<'_, PyBytes>) -> PyResult<Self> {
        let payload = payload.as_bytes();
        let run = || wire::decode_batch(payload);
        let batch = if payload.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
        let batch = batch.map_err(|error| errors::malformed(py, error.field, error.message))?;
        Ok(Self { batch, bytes: payload.len() })
    }

    /// The events of an `EventBatch`, and how many further ones could not be read.
    #[staticmethod]
    fn of_events(
        events: &Bound<'_, PyAny>,
        faults: usize,
        timestamp: f64,
        dp_rank: Option<u32>,
    ) -> PyResult<Self> {
        let faults = vec![(FaultKind::BadEvent, String::new()); faults];
        let mut batch = events::Batch { faults, timestamp, dp_rank, ..events::Batch::default() };
        for event in events.try_iter()? {
            let event = read_event(&event?, &mut batch)?;
            batch.events.push(event);
        }
        let bytes = 8 * batch.hashes.len() + 4 * batch.tokens.len();
        Ok(Self { batch, bytes })
    }

    #[getter]
    fn dp_rank(&self) -> Option<u32> {
        self.batch.dp_rank
    }

    #[getter]
    fn cleared(&self) -> bool {
        self.batch.events.contains(&Event::Cleared)
    }

    #[getter]
    fn faults(&self) -> Vec<(&'static str, &str)> {
        self.batch.faults.iter().map(|(kind, reason)| (fault_name(*kind), reason.as_str())).collect()
    }
}

/// An event of `kvscout_blocks.bytes.events`.
fn read_event(event: &Bound<'_, PyAny>, batch: &mut events::Batch) -> PyResult<Event> {
    let get = |name: &str| event.getattr(name);
    let hashes = |name: &str| get(name)?.extract::<Vec<u64>>();
    match event.get_type().name()?.to_str()? {
        "Cleared" => Ok(Event::Cleared),
        "Removed" => Ok(Event::Removed(Removed {
            engine_hashes: batch.add_hashes(&hashes("engine_hashes")?),
            tier: get("tier")?.extract()?,
            group: get("group")?.extract()?,
        })),
        _ => Ok(Event::Stored(Stored {
            engine_hashes: batch.add_hashes(&hashes("engine_hashes")?),
            parent: get("parent")?.extract()?,
            tokens: batch.add_tokens(&get("tokens")?.extract::<Vec<u32>>()?),
            block_size: get("block_size")?.extract()?,
            tier: get("tier")?.extract()?,
            group: get("group")?.extract()?,
            full_attention: get("full_attention")?.extract()?,
            window: get("window")?.extract()?,
            lora_id: get("lora_id")?.extract()?,
            lora_name: batch.add_text(&get("lora_name")?.extract::<String>()?),
            cache_salt: batch.add_text(&get("cache_salt")?.extract::<String>()?),
            mm_items: batch.add_mm_items(get("mm_items")?.extract::<Vec<Vec<String>>>()?),
            pairs: get("pairs")?.extract()?,
            lookahead: get("lookahead")?.extract()?,
            local_hashes: batch.add_hashes(&hashes("local_hashes")?),
            foreign: get("foreign")?.extract()?,
        })),
    }
}

/// Applies a decoded batch and moves the worker's cursor.
#[pyfunction]
fn apply_batch(
    py: Python<'_>,
    index: &Bound<'_, BlockIndex>,
    worker: (PyBackedStr, u32),
    batch: &Bound<'_, Batch>,
    epoch: u64,
    event_id: Option<u64>,
) -> (usize, usize, bool, String) {
    let (core, batch) = (index.get().index(), batch.get());
    let name = WorkerName { worker_id: &worker.0, dp_rank: worker.1 };
    let run = || core.apply(name, &batch.batch, epoch, event_id);
    applied(if batch.bytes > DETACH_ABOVE_BYTES { py.detach(run) } else { run() })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Batch>()?;
    module.add_function(wrap_pyfunction!(apply_batch, module)?)
}
