//! The threads that read engines' sockets, each those of its own sources.

use std::collections::{BTreeSet, HashMap, VecDeque};
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
/// Sources are looked at together at such intervals, each after so much longer at most.
const TICK: Duration = Duration::from_millis(20);
const MAX_TICK: Duration = Duration::from_secs(5);
/// Sources of which what is due is done before sockets are read again.
const TICKED: usize = 256;

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
    /// Which of the threads reads it.
    thread: usize,
    kind: Kind,
    bypass: Arc<Bypass>,
    /// None once it was removed.
    reader: Mutex<Option<Reader>>,
}

/// Sources of which each thread has as many as the others, since one of each may belong to the same engine.
#[derive(Clone, Copy)]
enum Kind {
    Live,
    Replay,
}

#[derive(Default)]
struct Inbox {
    added: Vec<(usize, Arc<Source>)>,
    removed: Vec<usize>,
    /// Sources whose sockets were left unread and can be read again.
    resumed: Vec<usize>,
}

/// What the threads share with those who call, and with one another.
struct Shared {
    mailbox: Mailbox<Item>,
    /// Bytes in the mailbox.
    waiting: AtomicUsize,
    /// Bytes held of messages that are not complete.
    unfinished: AtomicUsize,
    ended: AtomicBool,
}

/// A thread, for those who call.
struct Reading {
    inbox: Arc<Mutex<Inbox>>,
    registry: Registry,
    waker: Waker,
    /// Sources that it reads, by kind.
    sources: [AtomicUsize; 2],
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Reads sockets in threads of its own.
pub struct Intake {
    shared: Arc<Shared>,
    threads: Vec<Reading>,
    sources: Mutex<HashMap<usize, Arc<Source>>>,
    next: AtomicUsize,
}

impl Intake {
    /// Starts so many threads, one at least.
    pub fn start(threads: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            mailbox: Mailbox::new()?,
            waiting: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        });
        // Whoever is dropped because the next one cannot be started ends those before it.
        let mut intake =
            Self { shared, threads: Vec::new(), sources: Mutex::default(), next: AtomicUsize::new(0) };
        for _ in 0..threads.max(1) {
            let reading = Reading::start(Arc::clone(&intake.shared))?;
            intake.threads.push(reading);
        }
        Ok(intake)
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
        let thread = self.least_used(Kind::Live);
        let Address { place, bind, topic, longest_frame } = address;
        let sockets = if bind {
            Sockets::listening(number, place, topic, longest_frame, &self.threads[thread].registry)?
        } else {
            Sockets::connecting(number, place, topic, longest_frame)
        };
        let reader = Mutex::new(Some(Reader::Live(Box::new(sockets))));
        self.watch(number, Source { thread, kind: Kind::Live, bypass, reader })
    }

    /// Requests a replay, whose usual replies are applied by a bypass of its own; its number, as of a source.
    pub fn replay(&self, bypass: Arc<Bypass>, request: Request) -> io::Result<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let thread = self.least_used(Kind::Replay);
        let reader = Mutex::new(Some(Reader::Replay(Box::new(Replay::new(number, request)))));
        self.watch(number, Source { thread, kind: Kind::Replay, bypass, reader })
    }

    /// The thread that reads the fewest sources of a kind.
    fn least_used(&self, kind: Kind) -> usize {
        let used = |reading: &Reading| reading.sources[kind as usize].load(Ordering::Relaxed);
        (0..self.threads.len()).min_by_key(|&thread| used(&self.threads[thread])).unwrap_or(0)
    }

    fn watch(&self, number: usize, source: Source) -> io::Result<usize> {
        let (reading, kind) = (&self.threads[source.thread], source.kind);
        let source = Arc::new(source);
        self.sources.lock().insert(number, Arc::clone(&source));
        reading.sources[kind as usize].fetch_add(1, Ordering::Relaxed);
        reading.inbox.lock().added.push((number, source));
        reading.waker.wake()?;
        Ok(number)
    }

    /// Leaves a source unread once it is connected, or has it read again.
    pub fn pause(&self, number: usize, paused: bool) -> io::Result<()> {
        let source = self.sources.lock().get(&number).cloned();
        self.resume(number, source.filter(|source| source.bypass.pause(paused)))
    }

    /// Notes that a notice of a replay was dealt with; bytes as of its payload.
    pub fn hand_over(&self, number: usize, bytes: usize) -> io::Result<()> {
        let source = self.sources.lock().get(&number).cloned();
        self.resume(number, source.filter(|source| source.bypass.hand_over(bytes)))
    }

    fn resume(&self, number: usize, source: Option<Arc<Source>>) -> io::Result<()> {
        let Some(source) = source else { return Ok(()) };
        let reading = &self.threads[source.thread];
        reading.inbox.lock().resumed.push(number);
        reading.waker.wake()
    }

    /// Closes a source's sockets and its bypass: nothing of it is applied or reported any more.
    pub fn remove(&self, number: usize) -> io::Result<()> {
        let Some(source) = self.sources.lock().remove(&number) else { return Ok(()) };
        source.bypass.close();
        // Here and not in the thread, so that an address that was bound is free at once.
        let reader = source.reader.lock().take();
        self.shared.unfinished.fetch_sub(reader.as_ref().map_or(0, Reader::held), Ordering::Relaxed);
        drop(reader);
        let reading = &self.threads[source.thread];
        reading.sources[source.kind as usize].fetch_sub(1, Ordering::Relaxed);
        reading.inbox.lock().removed.push(number);
        reading.waker.wake()
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
                resumed.push((item.source, Arc::clone(source)));
            }
            true
        };
        let items = items.into_iter().filter(known).collect();
        drop(sources);
        for (number, source) in resumed {
            // It fails only when the poll is gone, and then the thread is.
            let _ = self.resume(number, Some(source));
        }
        items
    }

    /// Ends the threads; and closes every socket.
    pub fn close(&self) {
        self.shared.ended.store(true, Ordering::Release);
        for reading in &self.threads {
            let _ = reading.waker.wake();
        }
        for reading in &self.threads {
            if let Some(thread) = reading.thread.lock().take() {
                // It catches its panics itself.
                let _ = thread.join();
            }
        }
        self.sources.lock().clear();
    }
}

impl Drop for Intake {
    fn drop(&mut self) {
        self.close();
    }
}

impl Reading {
    fn start(shared: Arc<Shared>) -> io::Result<Self> {
        let poll = Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let inbox = Arc::new(Mutex::default());
        let mut thread = Thread {
            shared,
            inbox: Arc::clone(&inbox),
            registry: poll.registry().try_clone()?,
            poll,
            scratch: vec![0; SCRATCH],
            batch: Batch::default(),
            sources: HashMap::new(),
            ready: VecDeque::new(),
            due: BTreeSet::new(),
            started: Instant::now(),
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
        Ok(Self { inbox, registry, waker, sources: Default::default(), thread: Mutex::new(Some(thread)) })
    }
}

/// A source, as its thread knows it.
struct Watched {
    source: Arc<Source>,
    /// In `ready`.
    ready: bool,
    /// When it is looked at; None: it is not in `due`.
    due: Option<Instant>,
}

struct Thread {
    shared: Arc<Shared>,
    inbox: Arc<Mutex<Inbox>>,
    poll: Poll,
    registry: Registry,
    /// What is read, one after the other.
    scratch: Vec<u8>,
    batch: Batch,
    sources: HashMap<usize, Watched>,
    /// Sources that may have something.
    ready: VecDeque<usize>,
    /// Sources by when they are looked at.
    due: BTreeSet<(Instant, usize)>,
    started: Instant,
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
            if self.tick_at().is_some_and(|at| at <= now) {
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
        let until = self.tick_at().map(|at| at.saturating_duration_since(Instant::now()));
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
        let inbox = std::mem::take(&mut *self.inbox.lock());
        let now = Instant::now();
        for (number, source) in inbox.added {
            self.sources.insert(number, Watched { source, ready: false, due: None });
            self.look_by(number, now);
            self.make_ready(number);
        }
        for number in inbox.removed {
            if let Some(at) = self.sources.remove(&number).and_then(|watched| watched.due) {
                self.due.remove(&(at, number));
            }
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
        if let Some(at) = due_at {
            self.look_by(number, at);
        }
        if goes_on {
            self.make_ready(number);
        }
    }

    /// Has a source looked at by then at the latest.
    fn look_by(&mut self, number: usize, at: Instant) {
        let Some(watched) = self.sources.get_mut(&number) else { return };
        if watched.due.is_none_or(|due| at < due) {
            if let Some(due) = watched.due.replace(at) {
                self.due.remove(&(due, number));
            }
            self.due.insert((at, number));
        }
    }

    /// When something is due; None: never.
    fn tick_at(&self) -> Option<Instant> {
        self.due.first().map(|&(at, _)| at)
    }

    /// A time at which others are looked at as well, soon after one.
    fn together(&self, at: Instant) -> Instant {
        let ticks = at.saturating_duration_since(self.started).as_millis() / TICK.as_millis() + 1;
        self.started + TICK * u32::try_from(ticks).unwrap_or(u32::MAX)
    }

    /// Does what is due, of some sources; if more are left, it goes on after sockets were read.
    fn tick(&mut self, now: Instant) {
        for _ in 0..TICKED {
            let Some(&(at, number)) = self.due.first() else { break };
            if at > now {
                break;
            }
            self.due.pop_first();
            let Some(watched) = self.sources.get_mut(&number) else { continue };
            watched.due = None;
            let source = Arc::clone(&watched.source);
            let next = self.with(number, &source, now, Reader::tick).flatten();
            let next = next.map_or(now + MAX_TICK, |next| next.clamp(now, now + MAX_TICK));
            self.look_by(number, self.together(next));
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
            unfinished: &self.shared.unfinished,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Bounds, Index, WorkerName, WorkerRank};

    #[test]
    fn each_thread_has_as_many_sources_and_as_many_replays_as_the_others() {
        let intake = Intake::start(3).expect("threads");
        let bounds = Bounds { max_blocks: 0, max_predictions: 1, prune_ratio: 0.8 };
        let index = Arc::new(Index::new(16, false, bounds));
        let bypass = || {
            let worker = WorkerRank::from(WorkerName { worker_id: "w", dp_rank: 0 });
            Arc::new(Bypass::new(Arc::clone(&index), worker, 1))
        };
        // Nobody listens there, and nobody has to.
        let place = || Place::parse("ipc:///nowhere/at/all").expect("a place");
        let counts = || -> Vec<[usize; 2]> {
            let of =
                |reading: &Reading| reading.sources.each_ref().map(|count| count.load(Ordering::Relaxed));
            intake.threads.iter().map(of).collect()
        };
        let mut numbers = Vec::new();
        for _ in 0..6 {
            let address = Address { place: place(), bind: false, topic: b"", longest_frame: 1024 };
            numbers.push(intake.add(bypass(), address).expect("a source"));
            let within = Duration::from_secs(60);
            let request = Request {
                place: place(),
                first_id: 0,
                longest_frame: 1024,
                first_within: within,
                next_within: within,
            };
            numbers.push(intake.replay(bypass(), request).expect("a replay"));
        }
        assert_eq!(counts(), [[2, 2]; 3]);
        for number in numbers {
            intake.remove(number).expect("a thread that runs");
        }
        assert_eq!(counts(), [[0, 0]; 3]);
        assert_eq!(intake.shared.unfinished.load(Ordering::Relaxed), 0);
        intake.close();
    }
}
