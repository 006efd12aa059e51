//! The exceptions of `kvscout_common.errors`, raised from native code.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

static INVALID_ARGUMENT: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// An `InvalidArgument` that names the field at fault; the import error if the tree cannot be imported.
pub fn invalid_argument(py: Python<'_>, field: &str, message: impl Into<String>) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let kind = INVALID_ARGUMENT.import(py, "kvscout_common.errors", "InvalidArgument")?;
        let kwargs = PyDict::new(py);
        kwargs.set_item("field", field)?;
        let error = kind.call((message.into(),), Some(&kwargs))?;
        Ok(PyErr::from_value(error))
    };
    make().unwrap_or_else(|error| error)
}
