//! Python binding of `codec`.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList};

use super::errors;
use super::index::{BlockIndex, load_error};
use crate::codec::{self, DecodeError, Identity};
use crate::index::WorkerName;

/// Tenant, model, block size, EAGLE.
type Pool = (String, String, u32, bool);

#[pyfunction]
fn dump_messages<'py>(
    py: Python<'py>,
    index: &Bound<'py, BlockIndex>,
    worker: (PyBackedStr, u32),
    pool: Pool,
    history_incomplete: bool,
    max_chunk_bytes: usize,
) -> PyResult<Option<Bound<'py, PyList>>> {
    let core = index.get().index();
    let messages = py.detach(|| {
        let name = WorkerName { worker_id: &worker.0, dp_rank: worker.1 };
        let dump = core.dump(name)?;
        let (tenant, model, block_size, eagle) = pool;
        let identity =
            Identity { worker_id: worker.0.to_string(), dp_rank: worker.1, model, tenant, block_size, eagle };
        Some(codec::encode(&identity, &dump, history_incomplete, max_chunk_bytes))
    });
    messages
        .map(|messages| PyList::new(py, messages.iter().map(|message| PyBytes::new(py, message))))
        .transpose()
}

#[pyfunction]
fn load_messages(
    py: Python<'_>,
    index: &Bound<'_, BlockIndex>,
    messages: Vec<Bound<'_, PyBytes>>,
) -> PyResult<((String, u32), Pool, bool)> {
    let bytes: Vec<&[u8]> = messages.iter().map(|message| message.as_bytes()).collect();
    let core = index.get().index();
    let dumped = py.detach(|| codec::decode(bytes)).map_err(|error| match error {
        DecodeError::Version(version) => errors::failed_precondition(
            py,
            format!("version {version} of KvEventBatch, this release reads {}", codec::VERSION),
        ),
        DecodeError::Invalid { field, message } => errors::invalid_argument(py, field, message),
    })?;
    let Identity { worker_id, dp_rank, model, tenant, block_size, eagle } = dumped.identity;
    let name = WorkerName { worker_id: &worker_id, dp_rank };
    py.detach(|| core.load(name, &dumped.dump)).map_err(|error| load_error(py, name, error))?;
    Ok(((worker_id, dp_rank), (tenant, model, block_size, eagle), dumped.history_incomplete))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(dump_messages, module)?)?;
    module.add_function(wrap_pyfunction!(load_messages, module)?)
}
