//! The Python module `kvscout_native._core`; `kvscout_native/__init__.pyi` documents it.

/// Declares the kinds of events, which are the first item of each: numbers in this order, which Python gets by name.
macro_rules! kinds {
    ($($kind:ident)*) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum EventKind { $($kind),* }
        $(const $kind: u8 = EventKind::$kind as u8;)*
        const KINDS: [(&str, u8); [$(stringify!($kind)),*].len()] = [$((stringify!($kind), $kind)),*];
    };
}

mod answers;
mod batch;
mod budget;
mod codec;
mod errors;
mod hashing;
mod http;
mod index;
mod ingest;
mod json_scan;
mod lifecycle;
mod load;
mod queries;
mod reuse;
mod rpc;
mod slices;
mod token_json;
mod values;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    answers::register(module)?;
    hashing::register(module)?;
    http::register(module)?;
    batch::register(module)?;
    budget::register(module)?;
    codec::register(module)?;
    index::register(module)?;
    ingest::register(module)?;
    json_scan::register(module)?;
    lifecycle::register(module)?;
    load::register(module)?;
    queries::register(module)?;
    reuse::register(module)?;
    rpc::register(module)?;
    slices::register(module)?;
    token_json::register(module)
}
