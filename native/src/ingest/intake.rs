//! The thread that reads every engine's socket.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::{Events, Poll, Registry, Token, Waker};
use parking_lot::Mutex;

use super::bypass::Bypass;
use super::mailbox::Mailbox;
use super::place::Place;
use super::reader::Reader;
use super::replay::{Replay, Request};
use super::source::{Context, Sockets, split};
use crate::events::Batch;

/// Bytes read from one socket before the others are read.
const SCRATCH: usize = 256 * 1024;
/// Pause after sockets were read empty: what comes meanwhile shares the costs of waking up.
const PAUSE: Duration = Duration::from_micros(1000);
/// Between two looks at what is due: at least, and at most.
const TICK: Duration = Duration::from_millis(20);
const MAX_TICK: Duration = Duration::from_secs(5);

const WAKER: Token = Token(usize::MAX);

/// What is left to the event loop, of one source.
#[derive(Debug, PartialEq, Eq)]
pub enum Notice {
    Message {
        event_id: u64,
        payload: Vec<u8>,
    },
    /// No message of three frames with 8 bytes of seq: the lengths of its first frames.
    Malformed(Vec<usize>),
    /// A connection was made, and what came before it is reported or applied.
    Connected,
    /// There is no connection, or none any more; another one is made when that is possible.
    Unconnected,
    /// A connection was ended because of what came, and why. Where we connect, no other one is made.
    Refused(String),
    /// The bypass has stopped because of what the index said of the last batch.
    Stopped,
    /// The same of a replay's bypass. Notices of a replay stay pending until `hand_over`.
    ReplayStopped,
    /// A reply that the bypass declined.
    Reply {
        event_id: u64,
        payload: Vec<u8>,
    },
    /// The replay came to its end.
    ReplayEnd,
    /// The replay broke off, and why.
    ReplayBroken(String),
    /// The thread has ended by a defect.
    Failed(String),
}

/// A notice and whose it is.
#[derive(Debug, PartialEq, Eq)]
pub struct Item {
    pub source: usize,
    pub notice: Notice,
}

impl Notice {
    fn bytes(&self) -> usize {
        match self {
            Self::Message { payload, .. } | Self::Reply { payload, .. } => payload.len(),
            _ => 0,
        }
    }
}

/// Where a source publishes, and what is read of it.
#[derive(Debug)]
pub struct Address<'a> {
    pub place: Place,
    /// Engines connect to us.
    pub bind: bool,
    pub topic: &'a [u8],
    pub longest_frame: usize,
}

struct Source {
    bypass: Arc<Bypass>,
    /// None once it was removed.
    reader: Mutex<Option<Reader>>,
}

#[derive(Default)]
struct Inbox {
    added: Vec<(usize, Arc<Source>)>,
    removed: Vec<usize>,
    /// Sources whose sockets were left unread and can be read again.
    resumed: Vec<usize>,
}

/// What the thread shares with those who call.
struct Shared {
    inbox: Mutex<Inbox>,
    mailbox: Mailbox<Item>,
    /// Bytes in the mailbox.
    waiting: AtomicUsize,
    ended: AtomicBool,
}

/// Reads sockets in a thread of its own.
pub struct Intake {
    shared: Arc<Shared>,
    registry: Registry,
    waker: Arc<Waker>,
    sources: Mutex<HashMap<usize, Arc<Source>>>,
    next: AtomicUsize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Intake {
    /// Starts the thread.
    pub fn start() -> io::Result<Self> {
        let poll = Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            mailbox: Mailbox::new()?,
            waiting: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        });
        let mut thread = Thread {
            shared: Arc::clone(&shared),
            registry: poll.registry().try_clone()?,
            poll,
            scratch: vec![0; SCRATCH],
            batch: Batch::default(),
            unfinished: 0,
            sources: HashMap::new(),
            ready: VecDeque::new(),
            tick_at: None,
        };
        let run = move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| thread.run())) {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                let notice = Notice::Failed(text.unwrap_or_else(|| "a panic".into()));
                thread.shared.mailbox.push(Item { source: usize::MAX, notice });
                thread.shared.mailbox.notify();
            }
        };
        let thread = std::thread::Builder::new().name("ingest".into()).spawn(run)?;
        Ok(Self {
            shared,
            registry,
            waker,
            sources: Mutex::default(),
            next: AtomicUsize::new(0),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Readable when `take` has something.
    pub fn fd(&self) -> RawFd {
        self.shared.mailbox.fd()
    }

    /// Reads a source from now on; its number.
    ///
    /// # Errors
    /// An address cannot be bound, or the system watches no more.
    pub fn add(&self, bypass: Arc<Bypass>, address: Address<'_>) -> io::Result<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let Address { place, bind, topic, longest_frame } = address;
        let sockets = if bind {
            Sockets::listening(number, place, topic, longest_frame, &self.registry)?
        } else {
            Sockets::connecting(number, place, topic, longest_frame)
        };
        self.watch(number, bypass, Reader::Live(Box::new(sockets)))
    }

    /// Requests a replay, whose usual replies are applied by a bypass of its own; its number, as of a source.
    pub fn replay(&self, bypass: Arc<Bypass>, request: Request) -> io::Result<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.watch(number, bypass, Reader::Replay(Box::new(Replay::new(number, request))))
    }

    fn watch(&self, number: usize, bypass: Arc<Bypass>, reader: Reader) -> io::Result<usize> {
        let source = Arc::new(Source { bypass, reader: Mutex::new(Some(reader)) });
        self.sources.lock().insert(number, Arc::clone(&source));
        self.shared.inbox.lock().added.push((number, source));
        self.waker.wake()?;
        Ok(number)
    }

    /// Leaves a source unread once it is connected, or has it read again.
    pub fn pause(&self, number: usize, paused: bool) -> io::Result<()> {
        let resumed = self.sources.lock().get(&number).is_some_and(|source| source.bypass.pause(paused));
        self.resume(if resumed { vec![number] } else { Vec::new() })
    }

    /// Notes that a notice of a replay was dealt with; bytes as of its payload.
    pub fn hand_over(&self, number: usize, bytes: usize) -> io::Result<()> {
        let resumed = self.sources.lock().get(&number).is_some_and(|source| source.bypass.hand_over(bytes));
        self.resume(if resumed { vec![number] } else { Vec::new() })
    }

    fn resume(&self, numbers: Vec<usize>) -> io::Result<()> {
        if numbers.is_empty() {
            return Ok(());
        }
        self.shared.inbox.lock().resumed.extend(numbers);
        self.waker.wake()
    }

    /// Closes a source's sockets and its bypass: nothing of it is applied or reported any more.
    pub fn remove(&self, number: usize) -> io::Result<()> {
        let Some(source) = self.sources.lock().remove(&number) else { return Ok(()) };
        source.bypass.close();
        // Here and not in the thread, so that an address that was bound is free at once.
        drop(source.reader.lock().take());
        self.shared.inbox.lock().removed.push(number);
        self.waker.wake()
    }

    /// The oldest notices, up to a limit; those of removed sources are left out.
    pub fn take(&self, most: usize) -> Vec<Item> {
        let items = self.shared.mailbox.take(most);
        let sources = self.sources.lock();
        let mut resumed = Vec::new();
        let known = |item: &Item| {
            let bytes = item.notice.bytes();
            self.shared.waiting.fetch_sub(bytes, Ordering::Relaxed);
            let Some(source) = sources.get(&item.source) else {
                return matches!(item.notice, Notice::Failed(_));
            };
            let of_replay = matches!(
                item.notice,
                Notice::Reply { .. } | Notice::ReplayEnd | Notice::ReplayBroken(_) | Notice::ReplayStopped
            );
            if !of_replay && source.bypass.hand_over(bytes) {
                resumed.push(item.source);
            }
            true
        };
        let items = items.into_iter().filter(known).collect();
        drop(sources);
        // It fails only when the poll is gone, and then the thread is.
        let _ = self.resume(resumed);
        items
    }

    /// Ends the thread; and closes every socket.
    pub fn close(&self) {
        self.shared.ended.store(true, Ordering::Release);
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.lock().take() {
            // It catches its panics itself.
            let _ = thread.join();
        }
        self.sources.lock().clear();
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.close();
    }
}

/// A source, as the thread knows it.
struct Watched {
    source: Arc<Source>,
    /// In `ready`.
    ready: bool,
}

struct Thread {
    shared: Arc<Shared>,
    poll: Poll,
    registry: Registry,
    /// What is read, one after the other.
    scratch: Vec<u8>,
    batch: Batch,
    /// Bytes held of messages that are not complete.
    unfinished: usize,
    sources: HashMap<usize, Watched>,
    /// Sources that may have something.
    ready: VecDeque<usize>,
    /// None: nothing is due, ever.
    tick_at: Option<Instant>,
}

impl Thread {
    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.shared.ended.load(Ordering::Acquire) {
            self.wait(&mut events);
            let now = Instant::now();
            for _ in 0..self.ready.len() {
                if let Some(number) = self.ready.pop_front() {
                    self.drive(number, now);
                }
            }
            // Who has something to say has said it: silence is judged afterwards.
            if self.tick_at.is_some_and(|at| at <= now) {
                self.tick(now);
            }
            if self.ready.is_empty() {
                sleep(PAUSE);
            }
        }
        self.sources.clear();
    }

    /// Notes which sockets have news.
    fn wait(&mut self, events: &mut Events) {
        let until = self.tick_at.map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = if self.ready.is_empty() { until } else { Some(Duration::ZERO) };
        if let Err(error) = self.poll.poll(events, timeout) {
            assert!(error.kind() == io::ErrorKind::Interrupted, "sockets cannot be watched: {error}");
        }
        for event in &*events {
            if event.token() == WAKER {
                self.empty_inbox();
            } else {
                self.note_readiness(event);
            }
        }
    }

    fn empty_inbox(&mut self) {
        let inbox = std::mem::take(&mut *self.shared.inbox.lock());
        for (number, source) in inbox.added {
            self.sources.insert(number, Watched { source, ready: false });
            self.tick_at = Some(Instant::now());
            self.make_ready(number);
        }
        if !inbox.removed.is_empty() {
            for number in inbox.removed {
                self.sources.remove(&number);
            }
            let held = |watched: &Watched| watched.source.reader.lock().as_ref().map_or(0, Reader::held);
            self.unfinished = self.sources.values().map(held).sum();
        }
        for number in inbox.resumed {
            self.make_ready(number);
        }
    }

    fn note_readiness(&mut self, event: &Event) {
        let (number, slot) = split(event.token());
        if let Some(watched) = self.sources.get(&number) {
            if let Some(reader) = &mut *watched.source.reader.lock() {
                reader.on_readiness(slot, event);
            }
            self.make_ready(number);
        }
    }

    fn make_ready(&mut self, number: usize) {
        if let Some(watched) = self.sources.get_mut(&number)
            && !std::mem::replace(&mut watched.ready, true)
        {
            self.ready.push_back(number);
        }
    }

    /// Reads a source.
    fn drive(&mut self, number: usize, now: Instant) {
        let Some(watched) = self.sources.get_mut(&number) else { return };
        watched.ready = false;
        let source = Arc::clone(&watched.source);
        let goes_on = self.with(number, &source, now, |reader, context, leave| {
            let goes_on = reader.drive(context, &source.bypass, leave);
            (goes_on, reader.due_at())
        });
        let Some((goes_on, due_at)) = goes_on else { return };
        self.tick_at = self.tick_at.into_iter().chain(due_at).min();
        if goes_on {
            self.make_ready(number);
        }
    }

    /// Does what is due, of every source.
    fn tick(&mut self, now: Instant) {
        self.tick_at = None;
        let sources: Vec<_> =
            self.sources.iter().map(|(&number, watched)| (number, Arc::clone(&watched.source))).collect();
        for (number, source) in sources {
            let next = self.with(number, &source, now, Reader::tick).flatten();
            let next = next.map_or(now + MAX_TICK, |next| next.clamp(now + TICK, now + MAX_TICK));
            self.tick_at = Some(self.tick_at.map_or(next, |at| at.min(next)));
        }
    }

    /// Has a source do something, and leaves what it emits to the event loop; None: it was removed.
    fn with<R>(
        &mut self,
        number: usize,
        source: &Source,
        now: Instant,
        act: impl FnOnce(&mut Reader, &mut Context<'_>, &mut dyn FnMut(Notice)) -> R,
    ) -> Option<R> {
        let mut reader = source.reader.lock();
        let mut left = false;
        let mut leave = |notice: Notice| {
            source.bypass.defer(notice.bytes());
            self.shared.waiting.fetch_add(notice.bytes(), Ordering::Relaxed);
            self.shared.mailbox.push(Item { source: number, notice });
            left = true;
        };
        let mut context = Context {
            registry: &self.registry,
            scratch: &mut self.scratch,
            batch: &mut self.batch,
            unfinished: &mut self.unfinished,
            waiting: &self.shared.waiting,
            now,
        };
        let result = act(reader.as_mut()?, &mut context, &mut leave);
        if left {
            self.shared.mailbox.notify();
        }
        Some(result)
    }
}
