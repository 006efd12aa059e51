//! gRPC over HTTP/2, driven by whoever owns the event loop: no runtime, no thread.
//!
//! ```text
//!             ┌─ listeners ─▶ connections ─▶ calls ─┐
//! kernel ─epoll─▶ poll() ────────────────────────────┴─▶ events ─▶ the loop's own code
//!                flush() ◀── send, finish, consumed, call ◀────────────┘
//! ```
//!
//! `poll` reads what came and drives what that concerns; calls into it only note what is to be sent, and `flush` sends
//! it, so that what one turn of the event loop answers leaves in one write a connection. The protocol is crate `h2`'s; what
//! makes it gRPC is in `framing`, `metadata` and `status`.
//!
//! Bounded: connections, streams of each, messages, header lists, what a peer may send ahead of what was handled
//! (HTTP/2 windows, which open again as messages are), what waits to be sent (`send` says when to wait), and the whole
//! of what came and is not handled.

mod call;
mod connection;
pub(crate) mod crowds;
mod framing;
mod incoming;
pub(crate) mod keyed;
mod limits;
mod listener;
mod metadata;
mod outgoing;
pub(crate) mod poll_budget;
pub(crate) mod socket;
mod status;
pub(crate) mod tls;
mod wake;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::Reason;
use hashbrown::HashSet;
use mio::{Events, Poll};

use call::Call;
pub use call::{Kind, News};
use connection::{Connection, Progress, Side};
use crowds::Crowds;
pub use framing::{Deframer, Encoding};
use keyed::Keyed;
pub use limits::Limits;
use listener::{LISTENER, Listener};
pub use metadata::Metadata;
use poll_budget::PollBudget;
pub use status::{Seen, Status};
pub use tls::{acceptor, connector};
pub use tokio_rustls::{TlsAcceptor, TlsConnector};
use wake::WakeQueue;

/// Kernel events taken in one poll; the rest comes with the next.
const EVENTS: usize = 1024;

/// What happened.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A call came; `method` is a place in the listener's list.
    Open {
        call: u64,
        listener: u64,
        method: u32,
        metadata: Metadata,
        timeout_us: Option<u64>,
        message: Option<Bytes>,
    },
    /// The headers of a call came, and not all of the one message that it begins with: it waits to be admitted, or
    /// finished.
    Head {
        call: u64,
        listener: u64,
        method: u32,
        metadata: Metadata,
    },
    /// More of a call.
    Call(u64, News),
    Connected(u64),
    /// A client's connection is over, and why.
    Closed(u64, String),
    /// Connections cannot be accepted: the error's number.
    AcceptFailed(i32),
    /// A listener has no room: idle connections were closed, or, if there was none, new ones.
    Crowded(u64),
}

/// What is there now, and was until now.
#[derive(Debug, Default, Clone, Copy)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct Stats {
    pub connections: usize,
    pub calls: usize,
    pub queued_bytes: usize,
    /// New connections closed because there were too many, others because they did harm.
    pub connections_refused: u64,
    /// Idle connections closed because there were too many.
    pub connections_evicted: u64,
    /// Calls refused because too much waited to be handled.
    pub calls_refused: u64,
}

/// See the module.
pub struct Rpc {
    poll: Poll,
    events: Events,
    limits: Rc<Limits>,
    queue: Arc<WakeQueue>,
    listeners: Keyed<Listener>,
    connections: Keyed<Connection>,
    calls: Keyed<Call>,
    /// Taken out of the queue: calls, connections, oldest first.
    due_calls: VecDeque<u64>,
    due_connections: VecDeque<u64>,
    /// Connections that have used their share of a poll up, and listeners.
    next_poll: Vec<u64>,
    next_accepts: Vec<u64>,
    news: Vec<Event>,
    held: usize,
    accepted: usize,
    refused_connections: u64,
    refused_calls: u64,
    crowds: Crowds,
}

impl Rpc {
    pub fn new(limits: Limits) -> io::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(EVENTS),
            limits: Rc::new(limits),
            queue: Arc::default(),
            listeners: Keyed::default(),
            connections: Keyed::default(),
            calls: Keyed::default(),
            due_calls: VecDeque::new(),
            due_connections: VecDeque::new(),
            next_poll: Vec::new(),
            next_accepts: Vec::new(),
            news: Vec::new(),
            held: 0,
            accepted: 0,
            refused_connections: 0,
            refused_calls: 0,
            crowds: Crowds::default(),
        })
    }

    /// Readable when `poll` has something to do.
    pub fn fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }

    pub fn stats(&self) -> Stats {
        Stats {
            connections: self.connections.len(),
            calls: self.calls.len(),
            queued_bytes: self.held,
            connections_refused: self.refused_connections,
            connections_evicted: self.crowds.evicted(),
            calls_refused: self.refused_calls,
        }
    }

    /// Polls the sockets and drives what is ready; what happened since the last time. Never blocks, and does so much work
    /// at most as `poll` says: `flush` returns whether there is more.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn poll(&mut self) -> io::Result<Vec<Event>> {
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        let polled = self.poll.poll(&mut events, Some(Duration::ZERO));
        if let Err(error) = polled
            && error.kind() != io::ErrorKind::Interrupted
        {
            self.events = events;
            return Err(error);
        }
        for event in &events {
            let key = event.token().0;
            if key & LISTENER != 0 {
                self.accept((key & !LISTENER) as u64);
            } else if let Some(connection) = self.connections.get_mut(key as u64) {
                connection.set_ready(event);
                connection.notifier.notify();
            }
        }
        self.events = events;
        for key in std::mem::take(&mut self.next_accepts) {
            self.accept(key);
        }
        for key in std::mem::take(&mut self.next_poll) {
            if let Some(connection) = self.connections.get_mut(key) {
                connection.begin_poll();
                connection.notifier.notify();
            }
        }
        self.drive();
        Ok(std::mem::take(&mut self.news))
    }

    /// Sends what is to be sent. What happens meanwhile is reported by the next `poll`; true if there is something, or more
    /// to do.
    pub fn flush(&mut self) -> bool {
        self.drive();
        !(self.news.is_empty()
            && self.queue.is_empty()
            && self.due_calls.is_empty()
            && self.due_connections.is_empty()
            && self.next_poll.is_empty()
            && self.next_accepts.is_empty())
    }

    /// Drives what is due, and what that wakes, until nothing is or the poll is over.
    fn drive(&mut self) {
        let budget = PollBudget::begin();
        loop {
            self.queue.take(&mut self.due_calls, &mut self.due_connections);
            if self.due_calls.is_empty() && self.due_connections.is_empty() {
                return;
            }
            // Calls first: what they give to their connections goes out with one write.
            while let Some(key) = self.due_calls.pop_front() {
                self.with_call(key, Call::drive);
                if budget.is_over(self.news.len()) {
                    return;
                }
            }
            for _ in 0..self.due_connections.len() {
                let Some(key) = self.due_connections.pop_front() else { break };
                self.drive_connection(key);
                if budget.is_over(self.news.len()) {
                    return;
                }
            }
        }
    }

    fn drive_connection(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let mut incoming = Vec::new();
        let progress = connection.drive(|request| incoming.push(request));
        for request in incoming {
            self.begin(key, request);
        }
        if let Some(connection) = self.connections.get(key)
            && connection.has_to_wait()
        {
            self.next_poll.push(key);
        }
        match progress {
            Progress::Waits => self.open_waiting(key),
            Progress::Opened => {
                self.news.push(Event::Connected(key));
                self.open_waiting(key);
            }
            Progress::Over(reason, harmful) => {
                self.refused_connections += u64::from(harmful);
                self.end_connection(key, &reason);
            }
        }
    }

    /// Has a call do something that may emit events.
    fn with_call<R>(
        &mut self,
        key: u64,
        act: impl FnOnce(&mut Call, &mut dyn FnMut(News)) -> R,
    ) -> Option<R> {
        let call = self.calls.get_mut(key)?;
        let held = call.held();
        call.set_room(self.limits.budget.room());
        let mut emitted = Vec::new();
        let result = act(call, &mut |news| emitted.push(news));
        self.refused_calls += u64::from(!call.settle(&mut |news| emitted.push(news)));
        self.held = self.held + call.held() - held;
        let meta = call.meta.take();
        let over = call.over;
        let mut meta = if over { None } else { meta };
        let on = call.connection;
        for news in News::joined(emitted) {
            match news {
                News::Begins(message) => {
                    if let Some(call::Meta { listener, method, metadata, timeout_us }) = meta.take() {
                        if let Some(call) = self.calls.get_mut(key) {
                            call.handled = true;
                        }
                        if let Some(connection) = self.connections.get_mut(on) {
                            connection.handled += 1;
                            connection.requested = true;
                        }
                        self.news.push(Event::Open {
                            call: key,
                            listener,
                            method,
                            metadata,
                            timeout_us,
                            message,
                        });
                    }
                }
                news => self.news.push(Event::Call(key, news)),
            }
        }
        if over {
            self.forget(key);
        } else if let Some(call) = self.calls.get_mut(key) {
            call.meta = meta;
        }
        Some(result)
    }

    fn forget(&mut self, key: u64) {
        let Some(call) = self.calls.remove(key) else { return };
        self.held -= call.held();
        let Some(connection) = self.connections.get_mut(call.connection) else { return };
        connection.streams.remove(&key);
        if call.handled {
            connection.handled -= 1;
            connection.idle_since = Instant::now();
        }
        // What dropping its handles leaves to be sent.
        connection.notifier.notify();
        if call.was_reset && connection.stream_reset(Instant::now()) {
            self.refused_connections += 1;
        }
    }

    fn end_connection(&mut self, key: u64, reason: &str) {
        let Some(connection) = self.connections.remove(key) else { return };
        for call in &connection.streams {
            let status = Status::new(status::UNAVAILABLE, format!("{}: {reason}", connection.peer));
            self.with_call(*call, |call, emit| {
                // Its last words may have come with the end of the connection.
                call.drain(emit);
                match (call.over, call.is_server()) {
                    (true, _) => {}
                    (false, true) => call.gone(emit),
                    (false, false) => call.end(status, Vec::new(), emit),
                }
            });
        }
        match connection.side {
            Side::Server(_) => self.accepted -= 1,
            Side::Client { .. } => self.news.push(Event::Closed(key, reason.to_owned())),
        }
    }

    /// What has to be done because time went by; to be called once a second.
    pub fn tick(&mut self) {
        let now = Instant::now();
        for key in self.connections.keys() {
            if let Some(connection) = self.connections.get_mut(key)
                && let Some(reason) = connection.tick(now)
            {
                self.end_connection(key, &reason);
            }
        }
        for key in self.listeners.keys() {
            self.accept(key);
        }
        self.look_at_calls(now);
        self.drive();
    }

    /// Lets the next messages come, and ends calls whose message takes too long.
    fn look_at_calls(&mut self, now: Instant) {
        let keys = self.calls.keys();
        let mut held_up = HashSet::new();
        for key in &keys {
            if let Some(call) = self.calls.get(*key)
                && call.is_backed_up()
            {
                held_up.insert(call.connection);
            }
        }
        let limits = Rc::clone(&self.limits);
        for key in keys {
            let late = self.with_call(key, |call, emit| {
                call.open_for_one();
                let late = call.is_late(now, held_up.contains(&call.connection), &limits);
                if late {
                    call.fail(Status::new(status::DEADLINE_EXCEEDED, "the message comes too slowly"), emit);
                }
                late
            });
            self.refused_calls += u64::from(late == Some(true));
        }
    }

    /// Sends a message; false: wait for `Writable` before the next.
    pub fn send(&mut self, call: u64, message: &[u8]) -> bool {
        self.calls.get_mut(call).is_none_or(|call| call.send(message))
    }

    /// Breaks a call off; nothing more is reported of it.
    pub fn reset(&mut self, call: u64) {
        self.with_call(call, |call, _| call.reset(Reason::CANCEL));
    }

    /// A message of this size was handled.
    pub fn consumed(&mut self, call: u64, bytes: usize) {
        if let Some(call) = self.calls.get_mut(call) {
            let before = call.held();
            call.consumed(bytes);
            let released = before - call.held();
            call.charge.shrink(released);
            self.held -= released;
        }
    }

    /// Who makes a call, or takes it.
    pub fn peer(&self, call: u64) -> Option<&str> {
        let connection = self.connections.get(self.calls.get(call)?.connection)?;
        Some(&connection.peer)
    }
}
