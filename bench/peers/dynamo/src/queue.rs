//! Times what the pool's thread does with events, without the queue before it.
//!
//! A writer's state is private to the thread of the pool, which takes events from a queue. A *gate* stops it:
//! `flush_and_wait` wakes its caller on that very thread, so a waker that blocks stalls it until the burst is
//! queued, and one that reads the clock after the burst ends the measurement.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use dynamo_kv_router::indexer::KvRouterError;
use dynamo_kv_router::protocols::RouterEvent;
use dynamo_kv_router::{SyncIndexer, ThreadPoolIndexer};

/// Applies events and says how long their thread took.
pub fn burst<T: SyncIndexer>(
    pool: &ThreadPoolIndexer<T>,
    events: Vec<RouterEvent>,
) -> Result<Duration, KvRouterError> {
    let gate = Arc::new(Gate::default());
    let gate_waker = Waker::from(Arc::clone(&gate));
    let mut stop = Box::pin(pool.flush_and_wait());
    // Ready: the thread was done before the waker was set, and is not stopped.
    while stop.as_mut().poll(&mut Context::from_waker(&gate_waker)).is_ready() {
        stop = Box::pin(pool.flush_and_wait());
    }
    gate.reached.wait();
    let queued = events.into_iter().try_for_each(|event| pool.enqueue_event(event));
    let stamp = Arc::new(Stamp::default());
    let stamp_waker = Waker::from(Arc::clone(&stamp));
    let mut end = pin!(pool.flush_and_wait());
    let passed = end.as_mut().poll(&mut Context::from_waker(&stamp_waker)).is_ready();
    gate.open();
    queued?;
    assert!(!passed, "the writer passed a closed gate");
    let ended = stamp.wait();
    Ok(ended.duration_since(gate.passed.wait()))
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

/// Waits for a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
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
