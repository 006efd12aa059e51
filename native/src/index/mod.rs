//! The block index: which worker rank holds which leading blocks of a prompt.
//!
//! ```text
//! query ──▶ directory (bit → worker) ──▶ trie (runs of blocks, bits and their reach)     any number at once
//! event ──▶ ledger (engine hashes, counts, ghosts, orphans) ──▶ one node of the trie at a time     one at once
//! ```
//!
//! What is held, rooted and hidden, and how events are judged, is said by the Python interface
//! `kvscout_blocks.index.block_index`; its reference backend gives the same answers. One writer at a time holds `state`; queries hold the
//! directory and one shard of the trie for reading. Between the steps of a write, a query may see what was
//! before and what comes after mixed, but never a worker with more than it held at one of these times.

mod apply;
mod bindings;
mod bit_set;
mod bound;
mod chain;
mod copies;
mod cut;
mod cutting;
mod demoted;
mod directory;
mod dump;
mod extent;
mod ghosts;
mod hanging;
mod idle;
mod ledger;
mod load;
mod nodes;
mod orphans;
mod parts;
mod predict;
mod predictions;
mod presence;
mod prompt;
mod reach;
mod remove;
mod repeated;
mod run;
mod shared;
mod state;
mod stats;
mod store;
mod top_k;
mod totals;
mod trie;
pub mod types;
mod unrooted;
mod waiting;
mod window;
mod worker;

pub use apply::Applied;
pub use copies::{Copies, MAX_COPIES};
pub use cutting::Cutting;
pub use directory::{Directory, Handle, Row, WorkerName, WorkerRank};
pub use dump::{DumpedBlock, DumpedOrphan, LoadError, WorkerDump};
pub use ghosts::GHOST_LIMIT;
pub use load::Loading;
pub use orphans::ORPHAN_LIMIT;
pub use prompt::{HashedPrompt, Prompt, TokenPrompt};
pub use shared::{SharedCacheStats, SharedOptions};
pub use state::{Bounds, Index, WorkerOptions};
pub use stats::{IndexStats, WorkerStats};
pub use top_k::{Common, top_k};
pub use types::{IGNORED, Ignored, LEVELS, SLICE, TIERS};
pub use window::{DumpedWindowBlock, WindowGroup};
