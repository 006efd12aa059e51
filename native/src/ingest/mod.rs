//! Engines' sockets, read and applied without Python, as long as nothing is unusual.
//!
//! ```text
//! libzmq ──▶ Reader, one thread ──▶ Lane: the next batch in order? ── yes ──▶ index
//!                                      │ no: anything else, and all that follows
//!                                      ▼
//!                                 queue ──▶ the Python event loop: `kvscout_blocks.source.lanes`
//! ```
//!
//! What to do about gaps, repetitions, restarts and what cannot be read is decided by one state machine only,
//! `kvscout_blocks.source.sequence`. It lends its cursor to a lane while it has nothing to decide, and takes it back.

mod lane;
mod mailbox;
mod reader;
mod zmq;

pub use lane::{Cursor, Lane, Offered, Progress};
pub use reader::{Item, Notice, Reader, Sockets};
pub use zmq::{Api, Socket};
