//! What several bindings need of numbers and names.

use crate::events::FaultKind;
use crate::index::Applied;

/// Payloads above this many bytes take longer than about 50 µs, so they release the GIL.
pub const DETACH_ABOVE_BYTES: usize = 16 * 1024;

/// The fields of `Applied`.
pub fn applied(applied: Applied) -> (usize, usize, bool, String) {
    (applied.events, applied.faults, applied.over_capacity, applied.incompatible)
}

/// The name that Python has for a kind of fault.
pub fn fault_name(kind: FaultKind) -> &'static str {
    match kind {
        FaultKind::UnknownTag => "unknown_tag",
        FaultKind::BadEvent => "bad_event",
    }
}
