//! What one thread leaves to an event loop: a queue with a descriptor that is readable while it has something.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// A queue, filled by one thread and emptied by another one.
pub struct Mailbox<T> {
    queue: Mutex<VecDeque<T>>,
    /// The descriptor is readable, or is about to be.
    notified: AtomicBool,
    notifier: UnixStream,
    listener: UnixStream,
}

impl<T> Mailbox<T> {
    pub fn new() -> io::Result<Self> {
        let (notifier, listener) = UnixStream::pair()?;
        notifier.set_nonblocking(true)?;
        listener.set_nonblocking(true)?;
        Ok(Self { queue: Mutex::default(), notified: AtomicBool::new(false), notifier, listener })
    }

    /// Readable while there is something to take.
    pub fn fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }

    /// Leaves something; `notify` when that was all for now.
    pub fn push(&self, item: T) {
        self.queue.lock().push_back(item);
    }

    /// Makes the descriptor readable.
    pub fn notify(&self) {
        if !self.notified.swap(true, Ordering::AcqRel) {
            // Never full: a byte or two are in it.
            let _ = (&self.notifier).write(&[1]);
        }
    }

    /// The oldest, up to a limit.
    pub fn take(&self, most: usize) -> Vec<T> {
        // In this order. Who notifies before the flag falls has pushed before the queue is drained; who notifies later
        // writes another byte, which is still there afterwards. Were the flag to fall first, that byte could be
        // read with the one before it, and nobody would notify again.
        let _ = (&self.listener).read(&mut [0; 8]);
        self.notified.swap(false, Ordering::AcqRel);
        let mut queue = self.queue.lock();
        let count = most.min(queue.len());
        let items = queue.drain(..count).collect();
        if !queue.is_empty() {
            self.notify();
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mio::unix::SourceFd;
    use mio::{Events, Interest, Poll, Token};

    use super::*;

    #[test]
    fn every_notification_wakes_the_reader() {
        const ITEMS: usize = 200_000;
        let mailbox = Mailbox::new().expect("a mailbox");
        let mut poll = Poll::new().expect("a poll");
        poll.registry()
            .register(&mut SourceFd(&mailbox.fd()), Token(0), Interest::READABLE)
            .expect("a descriptor that can be watched");
        let mut events = Events::with_capacity(1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for item in 0..ITEMS {
                    mailbox.push(item);
                    mailbox.notify();
                }
            });
            let mut taken = 0;
            while taken < ITEMS {
                poll.poll(&mut events, Some(Duration::from_secs(5))).expect("a poll that polls");
                assert!(!events.is_empty(), "no notification for {} items", ITEMS - taken);
                let items = mailbox.take(7);
                assert!(items.iter().copied().eq(taken..taken + items.len()));
                taken += items.len();
            }
        });
    }
}
