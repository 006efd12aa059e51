//! The exceptions of kvscout, raised from native code.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

static INVALID_ARGUMENT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static FAILED_PRECONDITION: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static NOT_FOUND: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static MALFORMED_BATCH: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// An `InvalidArgument` that names the field at fault.
pub fn invalid_argument(py: Python<'_>, field: &str, message: impl Into<String>) -> PyErr {
    raised(py, &INVALID_ARGUMENT, ("kvscout_common.errors", "InvalidArgument"), Some(field), message.into())
}

/// A `FailedPrecondition`.
pub fn failed_precondition(py: Python<'_>, message: impl Into<String>) -> PyErr {
    let class = ("kvscout_common.errors", "FailedPrecondition");
    raised(py, &FAILED_PRECONDITION, class, None, message.into())
}

/// A `NotFound`.
pub fn not_found(py: Python<'_>, message: impl Into<String>) -> PyErr {
    raised(py, &NOT_FOUND, ("kvscout_common.errors", "NotFound"), None, message.into())
}

/// A `MalformedBatch` that names the part at fault.
pub fn malformed(py: Python<'_>, field: &str, message: impl Into<String>) -> PyErr {
    raised(
        py,
        &MALFORMED_BATCH,
        ("kvscout_blocks.bytes.frames", "MalformedBatch"),
        Some(field),
        message.into(),
    )
}

/// An instance of a class of the exception tree; the import error if the class cannot be imported.
fn raised(
    py: Python<'_>,
    class: &'static PyOnceLock<Py<PyType>>,
    (module, name): (&str, &str),
    field: Option<&str>,
    message: String,
) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let kind = class.import(py, module, name)?;
        let kwargs = PyDict::new(py);
        kwargs.set_item("field", field)?;
        Ok(PyErr::from_value(kind.call((message,), Some(&kwargs))?))
    };
    make().unwrap_or_else(|error| error)
}
