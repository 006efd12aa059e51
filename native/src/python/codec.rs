//! Python binding of `codec`.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyBytes;

use super::batch::Batch;
use super::errors;
use super::values::DETACH_ABOVE_BYTES;
use crate::acceptance::Rules;
use crate::codec::{self, DecodeError, Identity};
use crate::query::PoolName;

/// Worker, pool, epoch, event id, whether the source starts anew, events.
type Published = ((String, u32), PoolName, u64, Option<u64>, bool, Batch);

#[pyfunction]
fn decode_events(message: &Bound<'_, PyBytes>) -> PyResult<Published> {
    let py = message.py();
    let bytes = message.as_bytes();
    let run = || codec::decode_events(bytes);
    let published = if bytes.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
    let published = published.map_err(|error| decode_error(py, error))?;
    let Identity { worker_id, dp_rank, model, tenant, block_size, eagle } = published.identity;
    let pool = (tenant, model, block_size, eagle);
    let batch = Batch::of(published.batch, bytes.len());
    Ok(((worker_id, dp_rank), pool, published.epoch, published.event_id, published.reset, batch))
}

#[pyfunction]
fn encode_events<'py>(
    py: Python<'py>,
    batch: &Bound<'py, Batch>,
    worker: (PyBackedStr, u32),
    pool: PoolName,
    adapters: Vec<(i128, String)>,
    epoch: u64,
    event_id: Option<u64>,
) -> Bound<'py, PyBytes> {
    let (tenant, model, block_size, eagle) = pool;
    let worker_id = worker.0.to_string();
    let identity = Identity { worker_id, dp_rank: worker.1, model, tenant, block_size, eagle };
    let adapters = adapters.into_iter().collect();
    let rules = Rules { block_size: block_size as usize, eagle, adapters: &adapters };
    let (events, bytes) = batch.get().parts();
    let run = || codec::encode_events(&identity, rules, events, epoch, event_id);
    let message = if bytes > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
    PyBytes::new(py, &message)
}

pub fn decode_error(py: Python<'_>, error: DecodeError) -> PyErr {
    match error {
        DecodeError::Version(_) => errors::failed_precondition(py, error.to_string()),
        DecodeError::Invalid { field, message } => errors::invalid_argument(py, field, message),
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(decode_events, module)?)?;
    module.add_function(wrap_pyfunction!(encode_events, module)?)
}
