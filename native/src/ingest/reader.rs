//! The thread that reads every socket.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use parking_lot::Mutex;

use super::lane::{Lane, Offered};
use super::mailbox::Mailbox;
use super::zmq::{Api, FRAMES, Places, Received, Socket};

/// Messages read in one round, from all sockets.
const ROUND: usize = 256;
/// Messages and bytes read from one socket before the others get their turn.
const BURST: usize = 64;
const BURST_BYTES: usize = 1024 * 1024;
/// Pause after sockets were read empty: what comes meanwhile shares the costs of waking up.
const PAUSE: Duration = Duration::from_micros(1000);

const WAKER: Token = Token(usize::MAX);
const SEQ: usize = 1;
const PAYLOAD: usize = 2;

/// What is left to the event loop, of one source.
#[derive(Debug, PartialEq, Eq)]
pub enum Notice {
    Message {
        event_id: u64,
        payload: Vec<u8>,
    },
    /// No message of three frames with 8 bytes of seq: the lengths of its first frames.
    Malformed(Vec<usize>),
    /// The connection was made, and what came before it is read.
    Connected,
    /// There is no connection: the event of the socket monitor.
    Unconnected(u16),
    /// The lane has stopped because of what the index said of the last batch.
    Stopped,
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
        if let Self::Message { payload, .. } = self { payload.len() } else { 0 }
    }
}

/// A source's sockets and what `ZMQ_FD` says of them.
pub struct Sockets {
    pub data: Socket,
    pub data_fd: RawFd,
    pub monitor: Socket,
    pub monitor_fd: RawFd,
}

struct Source {
    lane: Arc<Lane>,
    /// None once it was removed.
    sockets: Mutex<Option<Sockets>>,
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
    ended: AtomicBool,
}

/// Reads sockets in a thread of its own.
pub struct Reader {
    api: Api,
    shared: Arc<Shared>,
    registry: Registry,
    waker: Arc<Waker>,
    sources: Mutex<HashMap<usize, Arc<Source>>>,
    next: AtomicUsize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Reader {
    /// Starts the thread.
    pub fn start(api: Api) -> io::Result<Self> {
        let poll = Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKER)?);
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            mailbox: Mailbox::new()?,
            ended: AtomicBool::new(false),
        });
        let mut thread = Thread {
            shared: Arc::clone(&shared),
            poll,
            places: Places::new(api, ROUND),
            monitored: Places::new(api, 1),
            sources: HashMap::new(),
            ready: VecDeque::new(),
            round: Vec::new(),
            connected: Vec::new(),
        };
        let run = move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| thread.run())) {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
                let notice = Notice::Failed(text.unwrap_or_else(|| "a panic".into()));
                thread.shared.mailbox.push(Item { source: usize::MAX, notice });
                thread.shared.mailbox.ring();
            }
        };
        let thread = std::thread::Builder::new().name("ingest".into()).spawn(run)?;
        Ok(Self {
            api,
            shared,
            registry,
            waker,
            sources: Mutex::default(),
            next: AtomicUsize::new(0),
            thread: Mutex::new(Some(thread)),
        })
    }

    pub fn api(&self) -> Api {
        self.api
    }

    /// Readable when `take` has something.
    pub fn fd(&self) -> RawFd {
        self.shared.mailbox.fd()
    }

    /// Reads a source's sockets from now on; its number.
    pub fn add(&self, lane: Arc<Lane>, sockets: Sockets) -> io::Result<usize> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (data_fd, monitor_fd) = (sockets.data_fd, sockets.monitor_fd);
        self.registry.register(&mut SourceFd(&data_fd), Token(2 * number), Interest::READABLE)?;
        let watched =
            self.registry.register(&mut SourceFd(&monitor_fd), Token(2 * number + 1), Interest::READABLE);
        if watched.is_err() {
            self.registry.deregister(&mut SourceFd(&data_fd))?;
        }
        watched?;
        let source = Arc::new(Source { lane, sockets: Mutex::new(Some(sockets)) });
        self.sources.lock().insert(number, Arc::clone(&source));
        // The descriptors tell of news only, so the thread looks once by itself.
        self.shared.inbox.lock().added.push((number, source));
        self.waker.wake()?;
        Ok(number)
    }

    /// Lets go of a source's sockets, and closes its lane: nothing of it is applied or told any more.
    pub fn remove(&self, number: usize) -> io::Result<()> {
        let Some(source) = self.sources.lock().remove(&number) else { return Ok(()) };
        source.lane.close();
        let sockets = source.sockets.lock().take();
        self.shared.inbox.lock().removed.push(number);
        if let Some(sockets) = sockets {
            for fd in [sockets.data_fd, sockets.monitor_fd] {
                self.registry.deregister(&mut SourceFd(&fd))?;
            }
        }
        self.waker.wake()
    }

    /// The oldest notices, at most so many; those of removed sources are left out.
    pub fn take(&self, most: usize) -> Vec<Item> {
        let items = self.shared.mailbox.take(most);
        let sources = self.sources.lock();
        let mut resumed = Vec::new();
        let known = |item: &Item| {
            let Some(source) = sources.get(&item.source) else {
                return matches!(item.notice, Notice::Failed(_));
            };
            if source.lane.hand_over(item.notice.bytes()) {
                resumed.push(item.source);
            }
            true
        };
        let items = items.into_iter().filter(known).collect();
        drop(sources);
        if !resumed.is_empty() {
            self.shared.inbox.lock().resumed.extend(resumed);
            // It fails only when the poll is gone, and then the thread is.
            let _ = self.waker.wake();
        }
        items
    }

    /// Ends the thread; it uses no socket afterwards.
    pub fn close(&self) {
        self.shared.ended.store(true, Ordering::Release);
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.lock().take() {
            // It catches its panics itself.
            let _ = thread.join();
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.close();
    }
}

/// A source, as the thread knows it.
struct Watched {
    source: Arc<Source>,
    /// In `ready`.
    ready: bool,
    /// Its socket was not read empty yet.
    backlog: bool,
    /// A handshake is still to be told.
    connected: bool,
    /// What the monitor told after it.
    then: Option<u16>,
    /// What was told last of a connection that is not there.
    unconnected: Option<u16>,
}

impl Watched {
    /// What is to be told of the connection, once what came before is read.
    fn told(&mut self) -> impl Iterator<Item = Notice> + use<> {
        let connected = std::mem::take(&mut self.connected).then_some(Notice::Connected);
        self.unconnected = if connected.is_some() { self.then } else { self.unconnected };
        connected.into_iter().chain(self.then.take().map(Notice::Unconnected))
    }
}

/// What was read from one socket in one round: places first .. first + messages, and what has none.
struct Burst {
    number: usize,
    messages: Vec<Result<usize, Vec<usize>>>,
    emptied: bool,
}

struct Thread {
    shared: Arc<Shared>,
    poll: Poll,
    places: Places,
    /// The place of what monitors tell.
    monitored: Places,
    sources: HashMap<usize, Watched>,
    /// Sockets that may have something.
    ready: VecDeque<usize>,
    round: Vec<Burst>,
    /// Sources with a handshake that was noticed in this round.
    connected: Vec<usize>,
}

impl Thread {
    fn run(&mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.shared.ended.load(Ordering::Acquire) {
            self.wait(&mut events, (!self.ready.is_empty()).then_some(Duration::ZERO));
            self.read();
            // A handshake is told by the monitor before its connection's first message comes. So what was read is
            // of the connection before, unless the monitor knows of another one now.
            self.wait(&mut events, Some(Duration::ZERO));
            self.judge();
            if self.ready.is_empty() {
                sleep(PAUSE);
            }
        }
    }

    /// Notes which sockets have news.
    fn wait(&mut self, events: &mut Events, timeout: Option<Duration>) {
        if let Err(error) = self.poll.poll(events, timeout) {
            assert!(error.kind() == io::ErrorKind::Interrupted, "sockets cannot be watched: {error}");
        }
        for event in &*events {
            match event.token() {
                WAKER => self.empty_inbox(),
                Token(token) if token % 2 == 0 => self.make_ready(token / 2),
                Token(token) => self.hear(token / 2),
            }
        }
    }

    fn empty_inbox(&mut self) {
        let inbox = std::mem::take(&mut *self.shared.inbox.lock());
        for (number, source) in inbox.added {
            let watched = Watched {
                source,
                ready: false,
                backlog: false,
                connected: false,
                then: None,
                unconnected: None,
            };
            self.sources.insert(number, watched);
            self.hear(number);
            self.make_ready(number);
        }
        for number in inbox.removed {
            self.sources.remove(&number);
        }
        for number in inbox.resumed {
            self.make_ready(number);
        }
    }

    fn make_ready(&mut self, number: usize) {
        if let Some(watched) = self.sources.get_mut(&number)
            && !watched.ready
        {
            watched.ready = true;
            self.ready.push_back(number);
        }
    }

    /// Reads a monitor.
    fn hear(&mut self, number: usize) {
        let Some(watched) = self.sources.get_mut(&number) else { return };
        let heard = match &*watched.source.sockets.lock() {
            Some(sockets) => self.monitored.hear(&sockets.monitor),
            None => return,
        };
        if watched.connected {
            watched.then = heard.before.or(watched.then);
        } else if let Some(event) = heard.before
            && watched.unconnected != heard.before
        {
            // Tries that fail one after the other are told of once.
            watched.unconnected = heard.before;
            watched.source.lane.defer(0);
            self.shared.mailbox.push(Item { source: number, notice: Notice::Unconnected(event) });
            self.shared.mailbox.ring();
        }
        if heard.handshake {
            (watched.connected, watched.then) = (true, heard.after);
            self.connected.push(number);
        }
    }

    /// Reads what is there, up to the bounds of a round.
    fn read(&mut self) {
        let mut place = 0;
        for _ in 0..self.ready.len() {
            if place == ROUND {
                return;
            }
            let Some(number) = self.ready.pop_front() else { return };
            let Some(watched) = self.sources.get_mut(&number) else { continue };
            watched.ready = false;
            if watched.source.lane.stall_if_full() {
                watched.backlog = true;
                continue;
            }
            let sockets = watched.source.sockets.lock();
            let Some(sockets) = &*sockets else { continue };
            let mut burst = Burst { number, messages: Vec::new(), emptied: false };
            let mut bytes = 0;
            while burst.messages.len() < BURST && bytes < BURST_BYTES && place < ROUND {
                match self.places.receive(&sockets.data, place) {
                    Received::Message => {
                        bytes += self.places.frame(place, PAYLOAD).len();
                        burst.messages.push(Ok(place));
                        place += 1;
                    }
                    Received::Malformed(lengths) => burst.messages.push(Err(lengths)),
                    Received::Nothing => {
                        burst.emptied = true;
                        break;
                    }
                }
            }
            if !burst.emptied {
                watched.ready = true;
                self.ready.push_back(number);
            }
            self.round.push(burst);
        }
    }

    /// Applies what was read, or leaves it to the event loop, in order.
    fn judge(&mut self) {
        let mut left = false;
        for burst in std::mem::take(&mut self.round) {
            let watched = self.sources.get_mut(&burst.number);
            let Some(watched) = watched else {
                burst.messages.iter().flatten().for_each(|&place| self.places.release(place));
                continue;
            };
            let lane = Arc::clone(&watched.source.lane);
            let mut leave = |notice: Notice| {
                lane.defer(notice.bytes());
                self.shared.mailbox.push(Item { source: burst.number, notice });
                left = true;
            };
            if !watched.backlog {
                watched.told().for_each(&mut leave);
            }
            for message in burst.messages {
                match message {
                    Ok(place) => {
                        if let Some(notice) = offer(&lane, &self.places, place) {
                            leave(notice);
                        }
                        self.places.release(place);
                    }
                    Err(lengths) => leave(Notice::Malformed(lengths)),
                }
            }
            watched.backlog = !burst.emptied;
            if burst.emptied {
                watched.told().for_each(&mut leave);
            }
        }
        for number in std::mem::take(&mut self.connected) {
            if let Some(watched) = self.sources.get_mut(&number)
                && !watched.backlog
            {
                for notice in watched.told() {
                    watched.source.lane.defer(0);
                    self.shared.mailbox.push(Item { source: number, notice });
                    left = true;
                }
            }
        }
        if left {
            self.shared.mailbox.ring();
        }
    }
}

/// Offers a received message to its lane; what has to be left to the event loop.
fn offer(lane: &Lane, places: &Places, place: usize) -> Option<Notice> {
    let payload = places.frame(place, PAYLOAD);
    let Ok(seq) = places.frame(place, SEQ).try_into() else {
        return Some(Notice::Malformed((0..FRAMES).map(|frame| places.frame(place, frame).len()).collect()));
    };
    let event_id = u64::from_be_bytes(seq);
    match lane.offer(event_id, payload) {
        Offered::Applied | Offered::Closed => None,
        Offered::Stopped => Some(Notice::Stopped),
        Offered::Declined => Some(Notice::Message { event_id, payload: payload.to_vec() }),
    }
}
