//! Python binding of `token_json`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::token_json;

#[pyfunction]
fn write_tokens<'py>(py: Python<'py>, token_ids: &[u8]) -> Bound<'py, PyBytes> {
    let mut text = Vec::with_capacity(token_ids.len() * 2);
    token_json::write(token_ids, &mut text);
    PyBytes::new(py, &text)
}

#[pyfunction]
fn read_tokens<'py>(py: Python<'py>, text: &str, at: usize) -> Option<(Bound<'py, PyBytes>, usize)> {
    let (packed, taken) = token_json::read(text.as_bytes().get(at..)?)?;
    Some((PyBytes::new(py, &packed), at + taken))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(write_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(read_tokens, module)?)
}
