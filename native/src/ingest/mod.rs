//! Engines' sockets, read and applied without Python, as long as nothing is unusual.
//!
//! ```text
//! engine ═ZMTP═▶ Intake, a thread ───▶ Bypass: the next batch in order? ── yes ──▶ index
//!                                          │ no: anything else, and all that follows
//!                                          ▼
//!                                       queue ──▶ the Python event loop: `kvscout_blocks.source.intake`
//! ```
//!
//! What to do about gaps, repetitions, restarts and what cannot be read is decided by one state machine only,
//! `kvscout_blocks.source.sequence`. It lends its position to a bypass while it has nothing to decide, and takes it back.
//!
//! There may be several threads. A source belongs to one of them, so that what comes of it stays in order; what waits
//! for the event loop, and what connections may hold, is bounded over all threads.
//!
//! Of a source its thread keeps a connection (`connection`) for as long as it lasts, which speaks ZMTP (`zmtp`), and
//! makes it again (`source`). A replay has a connection of its own and another bypass (`replay`): its replies are applied
//! in the same way, while what comes live waits in its socket. Messages are applied where they were read, in the one
//! buffer of the thread; what a connection holds is the part of a message whose rest has not come.

mod bypass;
mod connection;
mod intake;
mod mailbox;
mod place;
mod reader;
mod replay;
mod source;
mod zmtp;

pub use bypass::{Bypass, Offered, Position, Progress};
pub use intake::{Address, Intake, Item, Notice};
pub use place::Place;
pub use replay::Request;
pub use zmtp::{Message, Refusal, Session, Step};
