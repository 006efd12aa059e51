//! Python binding of `load::messages`: operations of `Lifecycle` streams, and what answers them.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::load::messages::{self, Name, Operation, Select, Selected};
use crate::python::load::Overlaps;

/// Messages above this many bytes may take longer than about 50 µs, so they release the GIL.
const DETACH_ABOVE_BYTES: usize = 128 * 1024;

/// (model, tenant, role, request id, attempt id)
type NameParts<'a> = (&'a str, &'a str, u32, &'a str, u64);

fn parts<'a>(name: &Name<'a>) -> NameParts<'a> {
    (name.model, name.tenant, name.role, name.request_id, name.attempt_id)
}

/// The numbers of the operations' fields; 0: the operation is left to the plain path.
const PLAIN: u32 = 0;
const SELECT: u32 = 2;
const SELECT_AND_RESERVE: u32 = 3;
const PREFILL_COMPLETE: u32 = 5;
const FREE: u32 = 7;

fn select_parts<'py>(
    py: Python<'py>,
    kind: u32,
    id: u64,
    select: Select<'_>,
) -> PyResult<Bound<'py, PyTuple>> {
    let overlaps = match select.overlaps {
        Some(overlaps) if overlaps.rows().len() > 0 || overlaps.others().is_some() => {
            Some(Py::new(py, Overlaps { overlaps })?)
        }
        _ => None,
    };
    let columns = (
        kind,
        id,
        parts(&select.name),
        PyBytes::new(py, select.hashes),
        select.isl_tokens,
        select.block_size,
        overlaps,
        select.priority,
        select.lease_seconds,
        select.prefill_elsewhere,
        select.traceparent,
        (
            (
                select.expected_output_tokens,
                select.max_output_tokens,
                select.output_class,
                select.estimates_prefill,
            ),
            (select.session, select.no_lineage, select.overlaps_unknown, select.parent_session),
            (
                select.caller,
                select.fairness_id,
                select.deadline_ms,
                select.ttft_target_us,
                select.itl_target_us,
            ),
        ),
    );
    columns.into_pyobject(py)
}

#[pyfunction]
fn lifecycle_operations<'py>(
    message: &Bound<'py, PyBytes>,
    caller_tenant: &str,
) -> PyResult<Option<Bound<'py, PyList>>> {
    let (py, bytes) = (message.py(), message.as_bytes());
    let run = || messages::operations(bytes, caller_tenant);
    let found = if bytes.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
    let Some(found) = found else { return Ok(None) };
    let list = PyList::empty(py);
    for operation in found {
        match operation {
            Operation::Select(id, select, books) => {
                let kind = if books { SELECT_AND_RESERVE } else { SELECT };
                list.append(select_parts(py, kind, id, *select)?)?;
            }
            Operation::PrefillComplete(id, name, age_us) => {
                list.append((PREFILL_COMPLETE, id, parts(&name), age_us))?;
            }
            Operation::Free(id, name, output_tokens, age_us) => {
                list.append((FREE, id, parts(&name), age_us, output_tokens))?;
            }
            Operation::Plain(bytes) => list.append((PLAIN, PyBytes::new(py, bytes)))?,
        }
    }
    Ok(Some(list))
}

#[pyfunction]
fn select_request<'py>(message: &Bound<'py, PyBytes>) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let py = message.py();
    messages::select(message.as_bytes())
        .map(|select| select_parts(py, SELECT_AND_RESERVE, 0, select))
        .transpose()
}

/// The fields of a decision; see `Selected`.
type Decision = (PyBackedStr, u32, PyBackedStr, u32, f64, f64, u32, u32, u64, f64);

fn selected(decision: &Decision) -> Selected<'_> {
    let (
        worker_id,
        dp_rank,
        http_endpoint,
        overlap_blocks,
        effective,
        cost,
        uncached_tokens,
        block_size,
        session,
        saved_seconds,
    ) = decision;
    Selected {
        worker_id,
        dp_rank: *dp_rank,
        http_endpoint,
        overlap_blocks: *overlap_blocks,
        effective_overlap_blocks: *effective,
        cost: *cost,
        uncached_tokens: *uncached_tokens,
        block_size: *block_size,
        session: *session,
        saved_seconds: *saved_seconds,
    }
}

#[pyfunction]
fn select_response(py: Python<'_>, decision: Decision) -> Bound<'_, PyBytes> {
    PyBytes::new(py, selected(&decision).response().as_bytes())
}

#[pyfunction]
fn select_result(py: Python<'_>, id: u64, decision: Decision) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &messages::select_result(id, &selected(&decision)))
}

#[pyfunction]
fn number_result(py: Python<'_>, id: u64, kind: u32, number: u32) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &messages::number_result(id, kind, number))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(lifecycle_operations, module)?)?;
    module.add_function(wrap_pyfunction!(select_request, module)?)?;
    module.add_function(wrap_pyfunction!(select_response, module)?)?;
    module.add_function(wrap_pyfunction!(select_result, module)?)?;
    module.add_function(wrap_pyfunction!(number_result, module)?)
}
