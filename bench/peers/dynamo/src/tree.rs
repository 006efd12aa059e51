//! The peer's index, driven so that finds are plain calls and writes can be timed without their queue.
//!
//! A writer's state is private to the thread of the pool, which takes events from a queue. To time what it does with
//! them alone, a *gate* stops it: `flush_and_wait` wakes its caller on that very thread, so a waker that blocks
//! stalls it until the burst is queued, and one that reads the clock after the burst ends the measurement.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use dynamo_kv_router::indexer::{KvIndexerInterface, KvRouterError};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, SyncIndexer, ThreadPoolIndexer};

use crate::fixture::BLOCK_SIZE;

pub struct Tree {
    pool: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
}

impl Tree {
    pub fn new() -> Self {
        Self { pool: ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_SIZE) }
    }

    /// What `find_matches` of the pool does, which is a plain call in an async coat.
    pub fn find(&self, local: &[LocalBlockHash]) -> OverlapScores {
        self.pool.backend().find_matches(local, false)
    }

    /// Queues an event.
    pub fn send(&self, event: RouterEvent) -> Result<(), KvRouterError> {
        self.pool.enqueue_event(event)
    }

    /// Waits until everything queued is applied.
    pub fn flush(&self) -> Result<(), KvRouterError> {
        block_on(self.pool.flush_and_wait())
    }

    /// Drops empty nodes now instead of every five minutes; the queue must be empty.
    pub fn tidy(&self) {
        self.pool.backend().run_cleanup_task();
    }

    /// Applies events and says how long their thread took.
    pub fn burst(&self, events: Vec<RouterEvent>) -> Result<Duration, KvRouterError> {
        let gate = Arc::new(Gate::default());
        let gate_waker = Waker::from(Arc::clone(&gate));
        let mut stop = Box::pin(self.pool.flush_and_wait());
        // Ready: the thread was done before the waker was set, and is not stopped.
        while stop.as_mut().poll(&mut Context::from_waker(&gate_waker)).is_ready() {
            stop = Box::pin(self.pool.flush_and_wait());
        }
        gate.reached.wait();
        let queued = events.into_iter().try_for_each(|event| self.pool.enqueue_event(event));
        let stamp = Arc::new(Stamp::default());
        let stamp_waker = Waker::from(Arc::clone(&stamp));
        let mut end = pin!(self.pool.flush_and_wait());
        let passed = end.as_mut().poll(&mut Context::from_waker(&stamp_waker)).is_ready();
        gate.open();
        queued?;
        assert!(!passed, "the writer passed a closed gate");
        let ended = stamp.wait();
        Ok(ended.duration_since(gate.passed.wait()))
    }

    /// Removes a worker while `meanwhile` is called again and again; says how long it took.
    pub fn remove_worker(&self, worker: u64, mut meanwhile: impl FnMut()) -> Duration {
        let started = Instant::now();
        let mut removal = self.pool.remove_worker(worker);
        let mut context = Context::from_waker(Waker::noop());
        while removal.as_mut().poll(&mut context).is_pending() {
            meanwhile();
        }
        started.elapsed()
    }
}

/// A Stored event.
pub fn stored(
    worker: u64,
    parent: Option<u64>,
    blocks: impl Iterator<Item = (LocalBlockHash, u64)>,
) -> RouterEvent {
    let blocks = blocks
        .map(|(tokens_hash, engine)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(engine),
            tokens_hash,
            mm_extra_info: None,
        })
        .collect();
    let parent_hash = parent.map(ExternalSequenceBlockHash);
    event(worker, KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks }))
}

/// A Removed event of a Stored one's blocks, deepest first.
pub fn undone(stored: &RouterEvent) -> RouterEvent {
    let block_hashes = match &stored.event.data {
        KvCacheEventData::Stored(data) => data.blocks.iter().rev().map(|block| block.block_hash).collect(),
        KvCacheEventData::Removed(_) | KvCacheEventData::Cleared => Vec::new(),
    };
    event(stored.worker_id, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
}

/// A Removed event of no blocks.
pub fn nothing(worker: u64) -> RouterEvent {
    event(worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes: Vec::new() }))
}

fn event(worker: u64, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker, KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

/// Stops the thread that wakes it until it is opened; notes when that thread came and when it went on.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
    reached: Stamp,
    passed: Stamp,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

impl Wake for Gate {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.reached.set();
        let is_open = self.is_open.lock().unwrap();
        drop(self.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
        self.passed.set();
    }
}

/// Notes when it is woken.
#[derive(Default)]
struct Stamp {
    at: Mutex<Option<Instant>>,
    is_set: Condvar,
}

impl Stamp {
    fn set(&self) {
        let mut at = self.at.lock().unwrap();
        *at = Some(Instant::now());
        self.is_set.notify_all();
    }

    fn wait(&self) -> Instant {
        let mut at = self.at.lock().unwrap();
        loop {
            match *at {
                Some(at) => return at,
                None => at = self.is_set.wait(at).unwrap(),
            }
        }
    }
}

impl Wake for Stamp {
    fn wake(self: Arc<Self>) {
        self.set();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.set();
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}
