//! The native half of kvscout.
use pyo3::prelude::*;

#[pymodule]
fn kvscout_native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))
}
