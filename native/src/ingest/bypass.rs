//! The usual case of one source: the next batch, in order, readable, of the right rank.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use crate::events::{Batch, Event};
use crate::index::{Index, WorkerRank};
use crate::wire;

/// What may wait to be decided about; with more, a source is to be left unread.
const PENDING: usize = 256;
const PENDING_BYTES: usize = 8 * 1024 * 1024;

/// How far a source has come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Position {
    /// The last batch applied.
    pub last_id: u64,
    /// Digests of the last batches, oldest first; the last one is that of `last_id`, and each of the id after the one before.
    pub digests: VecDeque<u64>,
    /// Batches from this one on are left to who lent it; None: none are.
    pub before: Option<u64>,
}

/// What a bypass has done with a position.
#[derive(Debug, Default)]
pub struct Progress {
    pub position: Position,
    /// Batches applied since it was lent.
    pub applied: u64,
    pub applied_at: Option<Instant>,
    /// What the index said of the last one.
    pub over_capacity: bool,
    pub incompatible: String,
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offered {
    Applied,
    /// Applied, and the index said something that is not for the bypass to judge: it has stopped.
    Stopped,
    /// Not applied: the position is not here, or no longer.
    Declined,
    /// Nobody wants it any more.
    Closed,
}

#[derive(Debug, Default)]
struct State {
    /// There while the bypass may go on.
    lent: Option<Progress>,
    /// There once it has stopped by itself.
    stopped: Option<Progress>,
    /// What came and waits to be decided about, in messages and in bytes.
    pending: usize,
    pending_bytes: usize,
    /// Left unread because too much waits, or it is paused.
    stalled: bool,
    paused: bool,
    closed: bool,
}

impl State {
    fn full(&self) -> bool {
        self.paused || self.pending >= PENDING || self.pending_bytes >= PENDING_BYTES
    }

    /// Whether it was left unread and is to be read again.
    fn resumes(&mut self) -> bool {
        let resumes = self.stalled && !self.full();
        self.stalled &= !resumes;
        resumes
    }

    fn stop(&mut self) {
        if let Some(progress) = self.lent.take() {
            self.stopped = Some(progress);
        }
    }
}

/// One source's bypass. Between `lend` and `take` it alone has the position.
#[derive(Debug)]
pub struct Bypass {
    index: Arc<Index>,
    worker: WorkerRank,
    /// Digests in a position, at most.
    digests_kept: usize,
    state: Mutex<State>,
}

impl Bypass {
    pub fn new(index: Arc<Index>, worker: WorkerRank, digests_kept: usize) -> Self {
        Self { index, worker, digests_kept, state: Mutex::default() }
    }

    /// Lets the bypass go on from a position; false if something waits that comes first.
    pub fn lend(&self, position: Position) -> bool {
        let mut state = self.state.lock();
        let free = state.pending == 0 && !state.closed;
        if free {
            state.lent = Some(Progress { position, ..Progress::default() });
            state.stopped = None;
        }
        free
    }

    /// The position, if it was lent: the bypass has stopped.
    pub fn take(&self) -> Option<Progress> {
        let mut state = self.state.lock();
        state.lent.take().or_else(|| state.stopped.take())
    }

    /// Last batch, batches applied and when, of the position that was lent, which stays lent.
    pub fn peek(&self) -> Option<(u64, u64, Option<Instant>)> {
        let state = self.state.lock();
        let progress = state.lent.as_ref().or(state.stopped.as_ref())?;
        Some((progress.position.last_id, progress.applied, progress.applied_at))
    }

    /// Stops permanently: whatever is offered from now on is not applied.
    pub fn close(&self) {
        self.state.lock().closed = true;
    }

    /// Whether so much waits that the source is to be left unread, until `hand_over` or `pause` says otherwise.
    ///
    /// `crowded`: so much waits of all sources that more is read only where nothing waits.
    pub fn stall_if_full(&self, crowded: bool) -> bool {
        let mut state = self.state.lock();
        state.stalled = state.full() || (crowded && state.pending > 0);
        state.stalled
    }

    /// Has the source left unread, or read again; whether it is to be read again now.
    pub fn pause(&self, paused: bool) -> bool {
        let mut state = self.state.lock();
        state.paused = paused;
        state.resumes()
    }

    /// Notes that the event loop will decide about something: until then the bypass does nothing.
    pub fn defer(&self, bytes: usize) {
        let mut state = self.state.lock();
        state.pending += 1;
        state.pending_bytes += bytes;
        state.stop();
    }

    /// It was handed over to who decides; whether the source, left unread until now, is to be read again.
    pub fn hand_over(&self, bytes: usize) -> bool {
        let mut state = self.state.lock();
        state.pending -= 1;
        state.pending_bytes -= bytes;
        state.resumes()
    }

    /// Applies a batch if it is the usual case; it is read into `batch`, whatever that contains. One that is declined
    /// belongs after all that waits already.
    pub fn offer(&self, event_id: u64, payload: &[u8], batch: &mut Batch) -> Offered {
        let mut state = self.state.lock();
        if state.closed {
            return Offered::Closed;
        }
        if state.pending > 0 {
            return Offered::Declined;
        }
        let Some(progress) = &mut state.lent else { return Offered::Declined };
        let position = &progress.position;
        if position.last_id.checked_add(1) != Some(event_id)
            || position.before.is_some_and(|id| id <= event_id)
        {
            state.stop();
            return Offered::Declined;
        }
        let usual = wire::decode_into(batch, payload).is_ok()
            && batch.faults.is_empty()
            && batch.dp_rank.is_none_or(|rank| rank == self.worker.dp_rank)
            && !batch.events.contains(&Event::Cleared);
        if !usual {
            state.stop();
            return Offered::Declined;
        }
        let applied = self.index.apply(self.worker.name(), batch, 0, Some(event_id));
        progress.position.last_id = event_id;
        let digests = &mut progress.position.digests;
        digests.push_back(xxh3_64(payload));
        let excess = digests.len().saturating_sub(self.digests_kept);
        digests.drain(..excess);
        if excess > self.digests_kept {
            digests.shrink_to(2 * self.digests_kept);
        }
        progress.applied += 1;
        progress.applied_at = Some(Instant::now());
        if !applied.over_capacity && applied.incompatible.is_empty() {
            return Offered::Applied;
        }
        (progress.over_capacity, progress.incompatible) = (applied.over_capacity, applied.incompatible);
        state.stop();
        Offered::Stopped
    }
}
