//! The native half of kvscout.
//!
//! The modules know no Python and are tested by `cargo test --no-default-features`; `python` binds them.

#![forbid(unsafe_code)]

pub mod acceptance;
pub mod budget;
pub mod codec;
pub mod events;
pub mod hashing;
pub mod http;
pub mod index;
pub mod ingest;
pub mod json_scan;
mod json_text;
pub mod json_value;
pub mod load;
pub mod protobuf;
#[cfg(feature = "python")]
mod python;
pub mod query;
pub mod reuse;
pub mod rpc;
pub mod slab;
pub mod table;
pub mod token_json;
pub mod wire;
