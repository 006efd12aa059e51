//! How one waits for a lock that others have for less than a microsecond: on the core.
//!
//! The lock's own way is to offer the core to others almost at once. Where others want it, they have it for
//! milliseconds, and whoever wanted the lock for a moment waits as long. And a writer that waits keeps readers out: if it
//! then loses its core, they wait for that. So readers spin before they sleep, and a writer tries again and again while
//! readers come and go, and keeps them out only if it never succeeds.

use std::hint::spin_loop;
use std::thread::yield_now;

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockUpgradableReadGuard, RwLockWriteGuard};

/// Attempts on the core: some ten to a hundred microseconds.
const SPINS: usize = 1_000;

/// Attempts of a writer between which others may have its core.
const YIELDS: usize = 1_000;

/// Reads what is changed for a moment at a time.
#[inline]
pub fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.try_read().unwrap_or_else(|| {
        for _ in 0..SPINS {
            spin_loop();
            if let Some(guard) = lock.try_read() {
                return guard;
            }
        }
        lock.read()
    })
}

/// Changes what others change for a moment at a time.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    for _ in 0..SPINS {
        // Looked at first: whoever tries takes the line from the one that has the lock.
        if !mutex.is_locked()
            && let Some(guard) = mutex.try_lock()
        {
            return guard;
        }
        spin_loop();
    }
    mutex.lock()
}

/// Changes what is read for a moment at a time.
pub fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    for attempt in 0..SPINS + YIELDS {
        if let Some(guard) = lock.try_write() {
            return guard;
        }
        pause(attempt);
    }
    lock.write()
}

/// Changes what was read, which nobody changed in between.
pub fn upgrade<T>(mut held: RwLockUpgradableReadGuard<'_, T>) -> RwLockWriteGuard<'_, T> {
    for attempt in 0..SPINS + YIELDS {
        match RwLockUpgradableReadGuard::try_upgrade(held) {
            Ok(guard) => return guard,
            Err(refused) => held = refused,
        }
        pause(attempt);
    }
    RwLockUpgradableReadGuard::upgrade(held)
}

fn pause(attempt: usize) {
    if attempt < SPINS { spin_loop() } else { yield_now() }
}
