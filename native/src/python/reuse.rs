//! Python binding of `reuse`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::hashing::hashes_from_bytes;
use crate::reuse::{self, Use};

/// Blocks of each kind.
type Counts = (u64, u64, u64, u64, u64, u64, u64, u64, u64, u64);

/// A sample of the blocks that were used; see the stub.
#[pyclass(module = "kvscout_native")]
struct ReuseSampler {
    sampler: reuse::ReuseSampler,
}

#[pymethods]
impl ReuseSampler {
    #[new]
    fn new(max_samples: usize) -> Self {
        Self { sampler: reuse::ReuseSampler::new(max_samples) }
    }

    #[getter]
    fn weight(&self) -> u64 {
        self.sampler.weight()
    }

    fn __len__(&self) -> usize {
        self.sampler.len()
    }

    fn observe(
        &mut self,
        local: &[u8],
        content: &[u8],
        blocks: usize,
        overlap: usize,
        capacity: u64,
        worker_capacity: u64,
    ) -> PyResult<Counts> {
        let whole = || PyValueError::new_err("packed hashes are whole u64s");
        let (local, content) =
            (hashes_from_bytes(local).ok_or_else(whole)?, hashes_from_bytes(content).ok_or_else(whole)?);
        if !content.is_empty() && content.len() != local.len() {
            return Err(PyValueError::new_err("each block has a content, or none has"));
        }
        let local = &local[..blocks.min(local.len())];
        Ok(self
            .sampler
            .observe(&Use { local, content: &content, overlap, capacity, worker_capacity })
            .0
            .into())
    }
}

pub(super) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ReuseSampler>()
}
