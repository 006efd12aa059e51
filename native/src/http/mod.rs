//! HTTP/1.1 on both sides, and what pumps from one to the other, driven by whoever owns the event loop.
//!
//! ```text
//!             ┌─ listeners ─▶ servers' connections ─▶ calls ──┐
//! kernel ─epoll─▶ poll() ────────────────────────────────────┴─▶ events ─▶ the loop's own code
//!             └─ clients' connections ─▶ answers ─┬─▶ kept, emitted chunk by chunk, or
//!                                      (events)   └─▶ passed to a call here, or to a call of `rpc`, which is not reported
//! ```
//!
//! An answer that is passed on costs its reader three events: that its head came, that output began, how it ended. What
//! a sink does not take stays with the engine: nothing is read while it is full.
//!
//! Bounded: connections, heads, bodies that are kept, events, what came ahead of what is handled, what waits to be sent,
//! and the time that each may take.

mod answers;
mod body;
mod calls;
mod client;
mod documents;
mod events;
mod head;
mod json;
mod server;
mod wire;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use mio::net::TcpListener;
use mio::{Events, Poll};
use tokio_rustls::TlsAcceptor;

pub use body::Decoder;
use calls::record;
use client::{Client, Step, Target};
pub use client::{End, Outcome};
pub use documents::{Dialect, Meaning};
pub use events::{EventRelay, Form, Report};
pub use head::{
    AnswerHead, Headers, RequestHead, answer as read_answer, request as read_request, write_request,
};
use server::Server;
pub use server::{Room, ServerLimits};
use wire::Wire;
pub use wire::{Tls, acceptor, connector};

use crate::rpc::crowds::Crowds;
use crate::rpc::keyed::Keyed;
use crate::rpc::poll_budget::PollBudget;

/// Kernel events taken in one poll; the rest comes with the next.
const EVENTS: usize = 1024;
/// Read at once.
const SCRATCH: usize = 64 << 10;
/// Of requests that nobody has asked for yet, of all connections: above, those whose head is not here are refused, and what
/// follows a request is not read.
const AHEAD_OF_ALL: usize = 64 << 20;
/// Set in the token of a listener, not in a connection's.
const LISTENER: usize = 1 << 63;

/// What happened.
#[derive(Debug, PartialEq)]
pub enum Event {
    /// A request came; its body, if that came with it.
    Request {
        call: u64,
        listener: u64,
        head: RequestHead,
        peer: String,
        body: Option<Vec<u8>>,
    },
    Body(u64, Vec<u8>),
    /// The body cannot be had: a status, and why.
    BodyFailed(u64, u16, String),
    /// The client has gone.
    Gone(u64),
    /// There is room again for what is to be sent.
    Writable(u64),
    /// The head of an answer.
    Answer(u64, u16, Headers),
    /// Output began.
    First(u64),
    /// Some of a body; the next follows when it was handled.
    Chunk(u64, Vec<u8>),
    /// The gRPC call that an answer goes to takes no more: to be resumed when it does.
    Full(u64),
    /// How an answer ended; the body, if it was kept.
    Ended(u64, End, Box<Report>, Vec<u8>),
    /// Connections cannot be accepted: the error's number.
    AcceptFailed(i32),
    /// A listener has no room: idle connections were closed, or, if there was none, new ones.
    Crowded(u64),
}

/// Calls of gRPC servers, which answers go to.
pub trait Messages {
    /// Sends a message of a call of one of them; false: that call takes no more now.
    fn send(&mut self, server: usize, call: u64, message: &[u8]) -> bool;
}

struct Listener {
    socket: TcpListener,
    tls: Option<TlsAcceptor>,
    limits: Rc<ServerLimits>,
    connections: usize,
}

enum Side {
    Server { server: Box<Server>, call: Option<u64>, feeder: Option<u64> },
    Client(Box<Client>),
}

struct Connection {
    wire: Wire,
    side: Side,
    peer: String,
    /// Bytes that it has of `Http::ahead`.
    ahead: usize,
    /// It is among those that are due.
    is_due: bool,
}

/// What there is now, and was until now.
#[derive(Debug, Default, Clone, Copy)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct Stats {
    pub connections: usize,
    pub calls: usize,
    pub answers: usize,
    /// New connections closed because there were too many, and idle ones.
    pub connections_refused: u64,
    pub connections_evicted: u64,
}

/// Where a request goes if no connection is idle.
pub struct Peer {
    pub address: SocketAddr,
    pub tls: Option<Tls>,
    pub connect: Duration,
}

/// See the module.
pub struct Http {
    poll: Poll,
    events: Events,
    listeners: Keyed<Listener>,
    connections: Keyed<Connection>,
    /// Connections of calls and answers.
    calls: Keyed<u64>,
    answers: Keyed<u64>,
    idle: HashMap<String, Vec<u64>>,
    due: VecDeque<u64>,
    /// Connections that have used their share of a poll up, and listeners.
    next_poll: Vec<u64>,
    next_accepts: Vec<u64>,
    news: Vec<Event>,
    scratch: Box<[u8]>,
    began: Instant,
    clock: f64,
    vanished: Duration,
    refused: u64,
    crowds: Crowds,
    /// Bytes of memory for what came to servers and nobody has asked for.
    ahead: usize,
}

impl Http {
    /// `clock` is what the loop's clock says now; a peer that acknowledges nothing for as long as `vanished` is gone.
    ///
    /// # Errors
    /// There is no epoll to be had.
    pub fn new(clock: f64, vanished: Duration) -> io::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(EVENTS),
            listeners: Keyed::default(),
            connections: Keyed::default(),
            calls: Keyed::default(),
            answers: Keyed::default(),
            idle: HashMap::new(),
            due: VecDeque::new(),
            next_poll: Vec::new(),
            next_accepts: Vec::new(),
            news: Vec::new(),
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            began: Instant::now(),
            clock,
            vanished,
            refused: 0,
            crowds: Crowds::default(),
            ahead: 0,
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
            answers: self.answers.len(),
            connections_refused: self.refused,
            connections_evicted: self.crowds.evicted(),
        }
    }

    fn clock(&self, now: Instant) -> f64 {
        self.clock + now.duration_since(self.began).as_secs_f64()
    }

    /// Polls the sockets and drives what is ready; what happened since the last time, and whether there is more to do, by
    /// another `poll`. Never blocks, and does so much work at most as `poll` says.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn poll(&mut self, messages: &mut dyn Messages) -> io::Result<(Vec<Event>, bool)> {
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
            } else if let Some(connection) = self.connections.get(key as u64) {
                connection.wire.set_ready(event);
                self.mark_due(key as u64);
            }
        }
        self.events = events;
        for key in std::mem::take(&mut self.next_accepts) {
            self.accept(key);
        }
        for key in std::mem::take(&mut self.next_poll) {
            if let Some(connection) = self.connections.get_mut(key) {
                connection.wire.begin_poll();
                self.mark_due(key);
            }
        }
        Ok(self.flush(messages))
    }

    /// Sends what is to be sent; as `poll`.
    pub fn flush(&mut self, messages: &mut dyn Messages) -> (Vec<Event>, bool) {
        let budget = PollBudget::begin();
        while let Some(key) = self.due.pop_front() {
            let Some(connection) = self.connections.get_mut(key) else { continue };
            connection.is_due = false;
            connection.wire.begin_slice();
            match connection.side {
                Side::Server { .. } => self.drive_server(key),
                Side::Client(_) => self.drive_client(key, messages),
            }
            if let Some(connection) = self.connections.get(key)
                && connection.wire.has_to_wait()
            {
                self.next_poll.push(key);
            }
            if budget.is_over(self.news.len()) {
                break;
            }
        }
        let more = !(self.due.is_empty() && self.next_poll.is_empty() && self.next_accepts.is_empty());
        (std::mem::take(&mut self.news), more)
    }

    fn mark_due(&mut self, key: u64) {
        if let Some(connection) = self.connections.get_mut(key)
            && !connection.is_due
        {
            connection.is_due = true;
            self.due.push_back(key);
        }
    }

    fn close(&mut self, key: u64, reason: &str) {
        let Some(connection) = self.connections.remove(key) else { return };
        self.ahead -= connection.ahead;
        match connection.side {
            Side::Server { mut server, call, feeder } => {
                if let Some(listener) = self.listeners.get_mut(server.listener) {
                    listener.connections -= 1;
                }
                if let Some(call) = call {
                    let (calls, news) = (&mut self.calls, &mut self.news);
                    // Whoever answers it has learnt that already, unless it is the server that closes.
                    if calls.remove(call).is_some() {
                        server.gone(&mut |_| news.push(Event::Gone(call)));
                    }
                }
                if let Some(feeder) = feeder {
                    self.finish(feeder, End::new(Outcome::SinkGone, reason), Instant::now());
                }
            }
            Side::Client(client) => {
                if let Some(idle) = self.idle.get_mut(&client.origin) {
                    idle.retain(|other| *other != key);
                    if idle.is_empty() {
                        self.idle.remove(&client.origin);
                    }
                }
                if let Some(answer) = client.answer
                    && self.answers.remove(answer).is_some()
                {
                    if let Some(Target::Call(call, _)) = client.target {
                        self.release(call);
                    }
                    let report = Box::new(client.report().clone());
                    self.news.push(Event::Ended(
                        answer,
                        End::new(Outcome::Broken, reason),
                        report,
                        Vec::new(),
                    ));
                }
            }
        }
    }

    /// What has to be done because time went by; to be called a few times a second while it returns true: something is
    /// under way on a connection. Else once a second will do.
    pub fn tick(&mut self) -> bool {
        let now = Instant::now();
        let mut under_way = false;
        for key in self.connections.keys() {
            let Some(Connection { wire, side, peer, .. }) = self.connections.get_mut(key) else { continue };
            match side {
                Side::Server { server, call, .. } => {
                    let (calls, news) = (&mut self.calls, &mut self.news);
                    let listener = server.listener;
                    let open = server.tick(wire, now, &mut |said| {
                        record(said, key, listener, peer, call, calls, news);
                    });
                    if !open {
                        self.close(key, "the client takes too long");
                        continue;
                    }
                    under_way |= !server.rests();
                    if wire.unsent() > 0 {
                        self.mark_due(key);
                    }
                }
                Side::Client(client) => match client.tick(now) {
                    Step::Ends(end) => self.finish(key, end, now),
                    Step::Over => self.close(key, ""),
                    _ => under_way |= !client.is_idle(),
                },
            }
        }
        for key in self.listeners.keys() {
            self.accept(key);
        }
        under_way
    }
}
