//! The native half of kvscout.
//!
//! The modules know no Python and are tested by `cargo test --no-default-features`; `python` binds them.

pub mod hashing;
#[cfg(feature = "python")]
mod python;
