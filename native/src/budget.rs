//! Bytes that a process keeps of requests that others send: one limit for all of them, and one for each tenant.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;

/// Which limit refused a charge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    Process,
    Tenant,
}

impl Over {
    /// Of HTTP: too many requests of one, or of all together.
    pub fn status(self) -> u16 {
        match self {
            Self::Process => 503,
            Self::Tenant => 429,
        }
    }
}

impl fmt::Display for Over {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Process => "the server holds as many bytes of requests as it may (--request-memory-bytes)",
            Self::Tenant => {
                "the tenant holds its share of the bytes of requests (half of --request-memory-bytes)"
            }
        })
    }
}

#[derive(Debug, Default)]
struct Held {
    all: usize,
    tenants: HashMap<Arc<str>, usize>,
    refused: [u64; 2],
}

/// See the module.
#[derive(Debug)]
pub struct Budget {
    limit: usize,
    share: usize,
    held: Mutex<Held>,
}

impl Budget {
    /// `limit` and `share` are bytes: of all tenants together, and of each.
    pub fn new(limit: usize, share: usize) -> Arc<Self> {
        Arc::new(Self { limit, share, held: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        // Nothing in here panics half-way.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.lock().all
    }

    /// Bytes that can still be taken.
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(self.held())
    }

    /// Charges refused until now: by the limit of the process, by that of a tenant.
    pub fn refused(&self) -> [u64; 2] {
        self.lock().refused
    }

    fn judge(&self, held: &mut Held, tenant: Option<&Arc<str>>, bytes: usize) -> Result<(), Over> {
        let own = tenant.and_then(|name| held.tenants.get(name)).copied().unwrap_or(0);
        let over = if bytes > self.limit.saturating_sub(held.all) {
            Over::Process
        } else if tenant.is_some() && bytes > self.share.saturating_sub(own) {
            Over::Tenant
        } else {
            return Ok(());
        };
        held.refused[over as usize] += 1;
        Err(over)
    }

    fn take(&self, tenant: Option<&Arc<str>>, bytes: usize) -> Result<(), Over> {
        let mut held = self.lock();
        self.judge(&mut held, tenant, bytes)?;
        Self::add(&mut held, tenant, bytes);
        Ok(())
    }

    fn add(held: &mut Held, tenant: Option<&Arc<str>>, bytes: usize) {
        held.all += bytes;
        if let Some(name) = tenant
            && bytes > 0
        {
            *held.tenants.entry(Arc::clone(name)).or_default() += bytes;
        }
    }

    fn give_back(&self, tenant: Option<&Arc<str>>, bytes: usize) {
        let mut held = self.lock();
        held.all -= bytes;
        if let Some(name) = tenant
            && let Some(own) = held.tenants.get_mut(name)
        {
            *own -= bytes;
            if *own == 0 {
                held.tenants.remove(name);
            }
        }
    }
}

/// What one request holds of a budget, until it is dropped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    tenant: Option<Arc<str>>,
    /// Bytes charged for each byte that comes.
    copies: usize,
    bytes: AtomicUsize,
}

impl Charge {
    /// Nothing yet. Without a tenant only the limit of the process counts.
    pub fn new(budget: &Arc<Budget>, tenant: Option<&str>, copies: usize) -> Self {
        Self { budget: Arc::clone(budget), tenant: tenant.map(Arc::from), copies, bytes: AtomicUsize::new(0) }
    }

    /// Bytes charged.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Charges for bytes that came.
    ///
    /// # Errors
    /// There is no room: nothing was charged.
    pub fn grow(&self, bytes: usize) -> Result<(), Over> {
        let bytes = bytes.saturating_mul(self.copies);
        self.budget.take(self.tenant.as_ref(), bytes)?;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Whether there is room now for bytes that are to come; charges nothing.
    ///
    /// # Errors
    /// There is none.
    pub fn look(&self, bytes: u64) -> Result<(), Over> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).saturating_mul(self.copies);
        self.budget.judge(&mut self.budget.lock(), self.tenant.as_ref(), bytes)
    }

    /// Charges for bytes that are here already and stay, whatever the limits.
    pub fn force(&self, bytes: usize) {
        let bytes = bytes.saturating_mul(self.copies);
        Budget::add(&mut self.budget.lock(), self.tenant.as_ref(), bytes);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Charged bytes are held no more.
    pub fn shrink(&self, bytes: usize) {
        let bytes = bytes.saturating_mul(self.copies).min(self.bytes());
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.give_back(self.tenant.as_ref(), bytes);
    }

    /// Nothing of it is held any more.
    pub fn release(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        if bytes > 0 {
            self.budget.give_back(self.tenant.as_ref(), bytes);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_refused_at_the_limit_and_at_a_tenants_share_and_given_back_to_the_last_byte() {
        let budget = Budget::new(100, 50);
        let (one, other) = (Charge::new(&budget, Some("a"), 2), Charge::new(&budget, Some("a"), 1));
        assert_eq!(one.grow(20), Ok(()));
        assert_eq!(other.grow(11), Err(Over::Tenant));
        assert_eq!(other.grow(10), Ok(()));
        let (second, nobody) = (Charge::new(&budget, Some("b"), 1), Charge::new(&budget, None, 1));
        assert_eq!(second.look(51), Err(Over::Process));
        assert_eq!(second.grow(30), Ok(()));
        assert_eq!(nobody.grow(21), Err(Over::Process));
        assert_eq!(nobody.grow(20), Ok(()));
        assert_eq!((budget.held(), budget.room(), budget.refused()), (100, 0, [2, 1]));
        one.shrink(5);
        assert_eq!((one.bytes(), budget.held()), (30, 90));
        drop((one, other, nobody));
        assert_eq!(budget.held(), 30);
        second.release();
        assert_eq!((budget.held(), budget.lock().tenants.len()), (0, 0));
    }
}
