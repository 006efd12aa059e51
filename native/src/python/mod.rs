//! The Python module `kvscout_native._core`; `kvscout_native/__init__.pyi` documents it.

mod batch;
mod codec;
mod errors;
mod hashing;
mod index;
mod queries;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    hashing::register(module)?;
    batch::register(module)?;
    codec::register(module)?;
    index::register(module)?;
    queries::register(module)
}
