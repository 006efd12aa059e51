//! Python binding of `budget`.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::budget::{Budget, Charge};

/// See the stub.
#[pyclass(frozen, module = "kvscout_native", name = "ByteBudget")]
pub(super) struct ByteBudget {
    pub(super) budget: Arc<Budget>,
}

#[pymethods]
impl ByteBudget {
    #[new]
    fn new(limit: usize, share: usize) -> Self {
        Self { budget: Budget::new(limit, share) }
    }

    #[getter]
    fn limit(&self) -> usize {
        self.budget.limit()
    }

    #[getter]
    fn held(&self) -> usize {
        self.budget.held()
    }

    #[getter]
    fn refused(&self) -> (u64, u64) {
        let [process, tenant] = self.budget.refused();
        (process, tenant)
    }

    #[pyo3(signature = (tenant=None, copies=1))]
    fn charge(&self, tenant: Option<&str>, copies: usize) -> ByteCharge {
        ByteCharge { charge: Arc::new(Charge::new(&self.budget, tenant, copies)) }
    }
}

/// See the stub.
#[pyclass(frozen, module = "kvscout_native", name = "ByteCharge")]
pub(super) struct ByteCharge {
    pub(super) charge: Arc<Charge>,
}

#[pymethods]
impl ByteCharge {
    #[getter]
    fn bytes(&self) -> usize {
        self.charge.bytes()
    }

    fn grow(&self, bytes: usize) -> Option<(u16, String)> {
        self.charge.grow(bytes).err().map(|over| (over.status(), over.to_string()))
    }

    fn look(&self, bytes: u64) -> Option<(u16, String)> {
        self.charge.look(bytes).err().map(|over| (over.status(), over.to_string()))
    }

    fn release(&self) {
        self.charge.release();
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ByteBudget>()?;
    module.add_class::<ByteCharge>()
}
