//! What has to be driven: a waker puts its key into a queue, once until it is taken out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use parking_lot::Mutex;

/// Whose work is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    Connection(u64),
    Stream(u64),
}

/// What was woken and not driven yet, oldest first.
#[derive(Debug, Default)]
pub struct WakeQueue {
    due: Mutex<Vec<Due>>,
}

impl WakeQueue {
    /// Moves what is due behind what was already.
    pub fn take(&self, calls: &mut VecDeque<u64>, connections: &mut VecDeque<u64>) {
        for due in self.due.lock().drain(..) {
            match due {
                Due::Stream(key) => calls.push_back(key),
                Due::Connection(key) => connections.push_back(key),
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.due.lock().is_empty()
    }
}

#[derive(Debug)]
struct Alarm {
    queue: Arc<WakeQueue>,
    due: Due,
    notified: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.notified.swap(true, Ordering::AcqRel) {
            self.queue.due.lock().push(self.due);
        }
    }
}

/// The waker of one connection or stream.
#[derive(Debug)]
pub struct Notifier {
    alarm: Arc<Alarm>,
    waker: Waker,
}

impl Notifier {
    pub fn new(queue: &Arc<WakeQueue>, due: Due) -> Self {
        let alarm = Arc::new(Alarm { queue: Arc::clone(queue), due, notified: AtomicBool::new(false) });
        Self { waker: Waker::from(Arc::clone(&alarm)), alarm }
    }

    /// To be called before it is driven: whoever wakes it from here on puts it into the queue again.
    pub fn taken(&self) {
        self.alarm.notified.store(false, Ordering::Release);
    }

    /// Puts it into the queue.
    pub fn notify(&self) {
        self.alarm.wake_by_ref();
    }

    pub fn waker(&self) -> &Waker {
        &self.waker
    }
}
