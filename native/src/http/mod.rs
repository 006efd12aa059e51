//! HTTP/1.1 on both sides, and what pumps from one to the other, driven by whoever owns the event loop.
//!
//! ```text
//!             ┌─ listeners ─▶ servers' connections ─▶ calls ──┐
//! kernel ─epoll─▶ turn() ────────────────────────────────────┴─▶ events ─▶ the loop's own code
//!             └─ clients' connections ─▶ answers ─┬─▶ kept, told piece by piece, or
//!                                      (events)   └─▶ passed to a call here, or to a call of `rpc`, which nobody is told
//! ```
//!
//! An answer that is passed on costs its reader three events: that its head came, that output began, how it ended. What
//! a sink does not take stays with the engine: nothing is read while it is full.
//!
//! Bounded: connections, heads, bodies that are kept, events, what came ahead of what is handled, what waits to be sent,
//! and the time that each may take.

mod body;
mod client;
mod documents;
mod events;
mod head;
mod json;
mod server;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use tokio_rustls::TlsAcceptor;

pub use body::Decoder;
use client::{Client, Step, Target};
pub use client::{End, Outcome};
pub use documents::Dialect;
pub use events::{EventRelay, Form, Report};
pub use head::{
    AnswerHead, Headers, RequestHead, answer as read_answer, request as read_request, write_request,
};
use server::{News, Server};
pub use server::{Room, ServerLimits};
use wire::Wire;
pub use wire::{Tls, acceptor, connector};

use crate::rpc::keyed::Keyed;
use crate::rpc::socket::Stream;

/// Kernel events taken in one turn; the rest comes with the next.
const EVENTS: usize = 1024;
/// Rounds of one turn among connections that wake one another, and reads of one connection in a round.
const ROUNDS: usize = 64;
const READS: usize = 16;
/// Read at once.
const SCRATCH: usize = 64 << 10;
/// In the token of a listener, to tell it from a connection's.
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
    BodyFailed(u64, u16, &'static str),
    /// The client has gone.
    Gone(u64),
    /// There is room again for what is to be sent.
    Writable(u64),
    /// The head of an answer.
    Answer(u64, u16, Headers),
    /// Output began.
    First(u64),
    /// Some of a body; the next follows when it was handled.
    Piece(u64, Vec<u8>),
    /// The gRPC call that an answer goes to takes no more: to be resumed when it does.
    Full(u64),
    /// How an answer ended; the body, if it was kept.
    Ended(u64, End, Box<Report>, Vec<u8>),
    /// Connections cannot be accepted: the error's number.
    AcceptFailed(i32),
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
    Server { server: Server, call: Option<u64>, feeder: Option<u64> },
    Client(Box<Client>),
}

struct Connection {
    wire: Wire,
    side: Side,
    peer: String,
    /// It is among those that are due.
    rung: bool,
}

/// What there is now, and was until now.
#[derive(Debug, Default, Clone, Copy)]
pub struct Stats {
    pub connections: usize,
    pub calls: usize,
    pub answers: usize,
    /// Connections closed because there were too many.
    pub refused: u64,
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
    due: Vec<u64>,
    news: Vec<Event>,
    scratch: Box<[u8]>,
    began: Instant,
    clock: f64,
    refused: u64,
}

impl Http {
    /// `clock` is what the loop's clock says now.
    ///
    /// # Errors
    /// There is no epoll to be had.
    pub fn new(clock: f64) -> io::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(EVENTS),
            listeners: Keyed::default(),
            connections: Keyed::default(),
            calls: Keyed::default(),
            answers: Keyed::default(),
            idle: HashMap::new(),
            due: Vec::new(),
            news: Vec::new(),
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            began: Instant::now(),
            clock,
            refused: 0,
        })
    }

    /// Readable when `turn` has something to do.
    pub fn fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }

    pub fn stats(&self) -> Stats {
        Stats {
            connections: self.connections.len(),
            calls: self.calls.len(),
            answers: self.answers.len(),
            refused: self.refused,
        }
    }

    fn clock(&self, now: Instant) -> f64 {
        self.clock + now.duration_since(self.began).as_secs_f64()
    }

    /// Listens; returns the listener and the port.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn listen(
        &mut self,
        address: SocketAddr,
        limits: ServerLimits,
        tls: Option<TlsAcceptor>,
    ) -> io::Result<(u64, u16)> {
        let mut socket = TcpListener::bind(address)?;
        let port = socket.local_addr()?.port();
        let registry = self.poll.registry();
        let mut registered = Ok(());
        let key = self.listeners.insert_with(|key| {
            registered = registry.register(&mut socket, Token(key as usize | LISTENER), Interest::READABLE);
            Listener { socket, tls, limits: Rc::new(limits), connections: 0 }
        });
        registered.map(|()| (key, port))
    }

    /// New connections use other certificates.
    pub fn set_tls(&mut self, listener: u64, tls: Option<TlsAcceptor>) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.tls = tls;
        }
    }

    /// Takes no new connections any more, and no new requests on those there are.
    pub fn stop_listening(&mut self, listener: u64) {
        self.listeners.remove(listener);
        for key in self.connections_of(listener) {
            let Some(Connection { side: Side::Server { server, .. }, .. }) = self.connections.get_mut(key)
            else {
                continue;
            };
            server.leave();
            if server.is_idle() {
                self.close(key, "the server stops");
            }
        }
    }

    /// Closes the connections of a listener at once.
    pub fn close_connections(&mut self, listener: u64) {
        for key in self.connections_of(listener) {
            self.close(key, "the server stops");
        }
    }

    /// Connections that came to a listener and are open.
    pub fn connections_of(&self, listener: u64) -> Vec<u64> {
        let of = |key: &u64| {
            let side = self.connections.get(*key).map(|connection| &connection.side);
            matches!(side, Some(Side::Server { server, .. }) if server.listener == listener)
        };
        self.connections.keys().into_iter().filter(of).collect()
    }

    /// Polls the sockets and drives what is ready; what happened since the last time, and whether there is more to do at
    /// once. Never blocks.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn turn(&mut self, messages: &mut dyn Messages) -> io::Result<(Vec<Event>, bool)> {
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
                let ended = event.is_read_closed() || event.is_error();
                connection.wire.kernel_says(event.is_readable(), event.is_writable(), ended);
                self.ring(key as u64);
            }
        }
        self.events = events;
        Ok(self.flush(messages))
    }

    /// Sends what is to be sent; as `turn`.
    pub fn flush(&mut self, messages: &mut dyn Messages) -> (Vec<Event>, bool) {
        for _ in 0..ROUNDS {
            if self.due.is_empty() {
                break;
            }
            for key in std::mem::take(&mut self.due) {
                if let Some(connection) = self.connections.get_mut(key) {
                    connection.rung = false;
                    match connection.side {
                        Side::Server { .. } => self.drive_server(key),
                        Side::Client(_) => self.drive_client(key, messages),
                    }
                }
            }
        }
        (std::mem::take(&mut self.news), !self.due.is_empty())
    }

    fn ring(&mut self, key: u64) {
        if let Some(connection) = self.connections.get_mut(key)
            && !connection.rung
        {
            connection.rung = true;
            self.due.push(key);
        }
    }

    /// Accepts what is there. Out of descriptors it stops; `tick` tries again.
    fn accept(&mut self, key: u64) {
        loop {
            let Some(listener) = self.listeners.get_mut(key) else { return };
            let (mut stream, peer) = match listener.socket.accept() {
                Ok(accepted) => accepted,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => return self.news.push(Event::AcceptFailed(error.raw_os_error().unwrap_or(0))),
                },
            };
            if listener.connections >= listener.limits.connections {
                self.refused += 1;
                continue;
            }
            // A peer that has gone already is noticed by the first read.
            let _ = stream.set_nodelay(true);
            let (tls, limits) = (listener.tls.clone(), Rc::clone(&listener.limits));
            listener.connections += 1;
            let registry = self.poll.registry();
            let mut registered = Ok(());
            let connection = self.connections.insert_with(|connection| {
                let interest = Interest::READABLE | Interest::WRITABLE;
                registered = registry.register(&mut stream, Token(connection as usize), interest);
                let server = Server::new(key, limits, Instant::now());
                Connection {
                    wire: Wire::accepted(Stream::Tcp(stream), tls.as_ref()),
                    side: Side::Server { server, call: None, feeder: None },
                    peer: peer.to_string(),
                    rung: false,
                }
            });
            match registered {
                Ok(()) => self.ring(connection),
                Err(error) => {
                    self.close(connection, "it cannot be watched");
                    return self.news.push(Event::AcceptFailed(error.raw_os_error().unwrap_or(0)));
                }
            }
        }
    }

    fn drive_server(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Connection { wire, side: Side::Server { server, call, feeder }, peer, .. } = connection else {
            return;
        };
        let (calls, news) = (&mut self.calls, &mut self.news);
        let now = Instant::now();
        let listener = server.listener;
        let open = server.drive(wire, &mut self.scratch, now, &mut |said| {
            told(said, key, listener, peer, call, calls, news);
        });
        if !server.busy
            && let Some(over) = call.take()
        {
            calls.remove(over);
        }
        if server.has_room_again(wire.unsent()) {
            match (*feeder, *call) {
                (Some(feeder), _) => {
                    if let Some(Connection { side: Side::Client(client), .. }) =
                        self.connections.get_mut(feeder)
                    {
                        client.paused = None;
                        client.report_mut().listening_since =
                            self.clock + now.duration_since(self.began).as_secs_f64();
                        self.ring(feeder);
                    }
                }
                (None, Some(call)) => news.push(Event::Writable(call)),
                (None, None) => {}
            }
        }
        if !open {
            self.close(key, "the client has gone");
        }
    }

    fn drive_client(&mut self, key: u64, messages: &mut dyn Messages) {
        for _ in 0..READS {
            let now = Instant::now();
            let clock = self.clock(now);
            let Some(connection) = self.connections.get_mut(key) else { return };
            let Connection { wire, side: Side::Client(client), .. } = connection else { return };
            match client.step(wire, &mut self.scratch, now, clock) {
                Step::Waits => return,
                Step::Head(head) => {
                    if let Some(answer) = client.answer {
                        self.news.push(Event::Answer(answer, head.status, head.headers));
                    }
                }
                Step::Passes(data) => self.pass(key, data, messages, now),
                Step::Ends(end) => return self.finish(key, end, now),
                Step::Free => {
                    let origin = client.origin.clone();
                    return self.idle.entry(origin).or_default().push(key);
                }
                Step::Over => return self.close(key, ""),
            }
        }
        self.ring(key);
    }

    /// Gives some of an answer to whom it goes to.
    fn pass(&mut self, key: u64, mut data: Vec<u8>, messages: &mut dyn Messages, now: Instant) {
        let Some(Connection { side: Side::Client(client), .. }) = self.connections.get_mut(key) else {
            return;
        };
        let Some(answer) = client.answer else { return };
        if !client.told_first && client.report().outputs > 0 {
            client.told_first = true;
            self.news.push(Event::First(answer));
        }
        let mut end = client.ending();
        if !data.is_empty() {
            if !client.first.is_empty() {
                let rest = std::mem::replace(&mut data, std::mem::take(&mut client.first));
                data.extend_from_slice(&rest);
            }
            let room = match &mut client.target {
                Some(Target::Kept(kept, most)) => {
                    kept.extend_from_slice(&data);
                    if kept.len() > *most {
                        let text = format!("an answer of over {most} bytes");
                        end = Some(End::new(Outcome::Protocol, text));
                    }
                    Room::Yes
                }
                Some(Target::Told) => {
                    self.news.push(Event::Piece(answer, data));
                    Room::Full
                }
                Some(Target::Messages(server, call)) => {
                    if messages.send(*server, *call, &data) {
                        Room::Yes
                    } else {
                        self.news.push(Event::Full(answer));
                        Room::Full
                    }
                }
                Some(Target::Call(call)) => {
                    let call = *call;
                    self.write_from(call, &data, Some(key))
                }
                None => Room::Yes,
            };
            let clock = self.clock;
            let began = self.began;
            let Some(Connection { side: Side::Client(client), .. }) = self.connections.get_mut(key) else {
                return;
            };
            match room {
                Room::Yes => {
                    client.report_mut().listening_since = clock + now.duration_since(began).as_secs_f64();
                }
                Room::Full => {
                    client.paused = Some(now);
                    client.report_mut().listening_since = f64::INFINITY;
                }
                Room::Gone => end = Some(End::new(Outcome::SinkGone, "the client has gone")),
            }
        }
        if let Some(end) = end {
            self.finish(key, end, now);
        }
    }

    /// An answer is over: tells so, and keeps its connection for the next if it can be used again.
    fn finish(&mut self, key: u64, end: End, now: Instant) {
        let Some(Connection { wire, side: Side::Client(client), .. }) = self.connections.get_mut(key) else {
            return;
        };
        let (answer, target) = (client.answer, client.target.take());
        let report = client.report().clone();
        let kept = client.finish(wire, &end, now);
        let (is_idle, origin) = (client.is_idle(), client.origin.clone());
        if let Some(answer) = answer {
            self.answers.remove(answer);
            let body = match target {
                Some(Target::Kept(body, _)) if end.outcome == Outcome::Whole => body,
                Some(Target::Call(call)) => {
                    self.release(call);
                    Vec::new()
                }
                _ => Vec::new(),
            };
            self.news.push(Event::Ended(answer, end, Box::new(report), body));
        }
        if !kept {
            self.close(key, "");
        } else if is_idle {
            self.idle.entry(origin).or_default().push(key);
        } else {
            self.ring(key);
        }
    }

    /// Nothing is pumped into a call any more.
    fn release(&mut self, call: u64) {
        if let Some((_, Connection { side: Side::Server { feeder, .. }, .. })) = self.call(call) {
            *feeder = None;
        }
    }

    fn close(&mut self, key: u64, reason: &str) {
        let Some(connection) = self.connections.remove(key) else { return };
        match connection.side {
            Side::Server { mut server, call, feeder } => {
                if let Some(listener) = self.listeners.get_mut(server.listener) {
                    listener.connections -= 1;
                }
                if let Some(call) = call {
                    let (calls, news) = (&mut self.calls, &mut self.news);
                    // Whoever answers it was told already, unless it is the server that closes.
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
                    if let Some(Target::Call(call)) = client.target {
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

    /// What has to be done because time went by; to be called a few times a second.
    pub fn tick(&mut self) {
        let now = Instant::now();
        for key in self.connections.keys() {
            let Some(Connection { wire, side, peer, .. }) = self.connections.get_mut(key) else { continue };
            match side {
                Side::Server { server, call, .. } => {
                    let (calls, news) = (&mut self.calls, &mut self.news);
                    let listener = server.listener;
                    let open = server.tick(wire, now, &mut |said| {
                        told(said, key, listener, peer, call, calls, news);
                    });
                    if !open {
                        self.close(key, "the client takes too long");
                    } else if wire.unsent() > 0 {
                        self.ring(key);
                    }
                }
                Side::Client(client) => match client.tick(now) {
                    Step::Ends(end) => self.finish(key, end, now),
                    Step::Over => self.close(key, ""),
                    _ => {}
                },
            }
        }
        for key in self.listeners.keys() {
            self.accept(key);
        }
    }

    /// The connection of a call.
    fn call(&mut self, call: u64) -> Option<(u64, &mut Connection)> {
        let key = *self.calls.get(call)?;
        Some((key, self.connections.get_mut(key)?))
    }

    /// The body of a request is wanted that did not come with its head.
    pub fn want_body(&mut self, call: u64) {
        let Some(&key) = self.calls.get(call) else { return };
        let Some(Connection { wire, side: Side::Server { server, call: of, .. }, peer, .. }) =
            self.connections.get_mut(key)
        else {
            return;
        };
        let (calls, news) = (&mut self.calls, &mut self.news);
        let listener = server.listener;
        server.want_body(wire, Instant::now(), &mut |said| {
            told(said, key, listener, peer, of, calls, news);
        });
        self.ring(key);
    }

    /// Begins an answer; nothing is sent before some of its body, or its end.
    ///
    /// # Errors
    /// The header that cannot be sent.
    pub fn start(
        &mut self,
        call: u64,
        status: u16,
        headers: &Headers,
        length: Option<u64>,
    ) -> Result<(), String> {
        match self.call(call) {
            Some((_, Connection { side: Side::Server { server, .. }, .. })) => {
                server.start(status, headers, length)
            }
            _ => Ok(()),
        }
    }

    /// Writes some of an answer's body.
    pub fn write(&mut self, call: u64, data: &[u8]) -> Room {
        self.write_from(call, data, None)
    }

    fn write_from(&mut self, call: u64, data: &[u8], from: Option<u64>) -> Room {
        let Some((key, Connection { wire, side: Side::Server { server, feeder, .. }, .. })) = self.call(call)
        else {
            return Room::Gone;
        };
        *feeder = from;
        let room = server.write(wire, data);
        if room == Room::Gone {
            // It said how long its body is, and that was not true: only the end of the connection can say so.
            *feeder = None;
            self.close(key, "an answer was longer than it said");
        } else {
            self.ring(key);
        }
        room
    }

    /// Ends an answer.
    pub fn end(&mut self, call: u64) {
        let Some((key, Connection { wire, side: Side::Server { server, .. }, .. })) = self.call(call) else {
            return;
        };
        if server.end(wire) {
            self.ring(key);
        } else {
            self.close(key, "an answer was shorter than it said");
        }
    }

    /// A handler is through with a call; unless it has answered, the connection ends.
    pub fn handled(&mut self, call: u64) {
        if let Some((key, Connection { side: Side::Server { server, .. }, .. })) = self.call(call)
            && !server.is_answered()
        {
            self.close(key, "an answer was not ended");
        }
    }

    /// Sends a request on a connection that is idle, or else on a new one; `None`: there is neither.
    ///
    /// # Errors
    /// There is no socket to be had, or no way to the address.
    pub fn send(
        &mut self,
        origin: &str,
        peer: Option<Peer>,
        method: &str,
        request: &[u8],
    ) -> io::Result<Option<u64>> {
        let key = match (self.take_idle(origin), peer) {
            (Some(key), _) => key,
            (None, Some(peer)) => self.connect(origin, peer)?,
            (None, None) => return Ok(None),
        };
        let answer = self.answers.insert_with(|_| key);
        if let Some(Connection { wire, side: Side::Client(client), .. }) = self.connections.get_mut(key) {
            client.ask(answer, method);
            wire.out().extend_from_slice(request);
        }
        self.ring(key);
        Ok(Some(answer))
    }

    fn take_idle(&mut self, origin: &str) -> Option<u64> {
        loop {
            let key = self.idle.get_mut(origin)?.pop()?;
            let Some(Connection { wire, side: Side::Client(client), .. }) = self.connections.get_mut(key)
            else {
                continue;
            };
            // What the kernel has said meanwhile may be that its peer closed it.
            let now = Instant::now();
            match client.step(wire, &mut self.scratch, now, 0.0) {
                Step::Waits => return Some(key),
                _ => self.close(key, ""),
            }
        }
    }

    fn connect(&mut self, origin: &str, peer: Peer) -> io::Result<u64> {
        let mut stream = TcpStream::connect(peer.address)?;
        stream.set_nodelay(true)?;
        let registry = self.poll.registry();
        let mut registered = Ok(());
        let now = Instant::now();
        let key = self.connections.insert_with(|key| {
            let interest = Interest::READABLE | Interest::WRITABLE;
            registered = registry.register(&mut stream, Token(key as usize), interest);
            let client = Client::new(origin.to_owned(), now + peer.connect, now);
            Connection {
                wire: Wire::connecting(Stream::Tcp(stream), peer.tls),
                side: Side::Client(Box::new(client)),
                peer: peer.address.to_string(),
                rung: false,
            }
        });
        if let Err(error) = registered {
            self.connections.remove(key);
            return Err(error);
        }
        Ok(key)
    }

    fn answer(&mut self, answer: u64) -> Option<(u64, &mut Client)> {
        let key = *self.answers.get(answer)?;
        match self.connections.get_mut(key) {
            Some(Connection { side: Side::Client(client), .. }) => Some((key, client)),
            _ => None,
        }
    }

    /// Keeps the body of an answer until it is whole, up to so many bytes.
    pub fn keep(&mut self, answer: u64, most: usize) {
        self.aim(answer, Target::Kept(Vec::new(), most), None, Duration::MAX, Vec::new());
    }

    /// Tells the body of an answer piece by piece, as it is or through a relay; `resume` follows each.
    pub fn tell(&mut self, answer: u64, events: Option<EventRelay>) {
        self.aim(answer, Target::Told, events, Duration::MAX, Vec::new());
    }

    /// Passes the body of an answer to a call here; `first` goes out before the first bytes of it, and with them.
    pub fn pass_to_call(
        &mut self,
        answer: u64,
        call: u64,
        events: Option<EventRelay>,
        write: Duration,
        first: Vec<u8>,
    ) {
        self.aim(answer, Target::Call(call), events, write, first);
    }

    /// Passes the body of an answer to a call of a gRPC server; as `pass_to_call`.
    pub fn pass_to_messages(
        &mut self,
        answer: u64,
        (server, call): (usize, u64),
        events: EventRelay,
        write: Duration,
        first: Vec<u8>,
    ) {
        self.aim(answer, Target::Messages(server, call), Some(events), write, first);
    }

    fn aim(
        &mut self,
        answer: u64,
        target: Target,
        events: Option<EventRelay>,
        write: Duration,
        first: Vec<u8>,
    ) {
        let clock = self.clock(Instant::now());
        let Some((key, client)) = self.answer(answer) else { return };
        client.target = Some(target);
        client.events = events;
        client.write_limit = write;
        client.first = first;
        client.report_mut().listening_since = clock;
        self.ring(key);
    }

    /// The target of an answer takes more.
    pub fn resume(&mut self, answer: u64) {
        let clock = self.clock(Instant::now());
        let Some((key, client)) = self.answer(answer) else { return };
        client.paused = None;
        client.report_mut().listening_since = clock;
        self.ring(key);
    }

    /// What was noticed of an answer until now.
    pub fn report(&mut self, answer: u64) -> Option<&Report> {
        self.answer(answer).map(|(_, client)| client.report())
    }

    /// Closes the connection of an answer, unless that is over.
    pub fn abort(&mut self, answer: u64) {
        if let Some((key, _)) = self.answer(answer) {
            self.close(key, "it was aborted");
        }
    }

    /// Closes the connections of clients to these origins that nobody uses.
    pub fn close_idle(&mut self, begins: &str) {
        for key in self.connections.keys() {
            let of = match self.connections.get(key).map(|connection| &connection.side) {
                Some(Side::Client(client)) => client.answer.is_none() && client.origin.starts_with(begins),
                _ => false,
            };
            if of {
                self.close(key, "");
            }
        }
    }
}

/// What a server's connection says, as an event.
fn told(
    said: News,
    key: u64,
    listener: u64,
    peer: &str,
    call: &mut Option<u64>,
    calls: &mut Keyed<u64>,
    news: &mut Vec<Event>,
) {
    if let News::Begins(head, body) = said {
        if let Some(before) = call.take() {
            calls.remove(before);
        }
        let begun = calls.insert_with(|_| key);
        *call = Some(begun);
        news.push(Event::Request { call: begun, listener, head, peer: peer.to_owned(), body });
        return;
    }
    let Some(call) = *call else { return };
    news.push(match said {
        News::Body(body) => Event::Body(call, body),
        News::BodyFailed((status, text)) => Event::BodyFailed(call, status, text),
        News::Gone | News::Begins(..) => {
            calls.remove(call);
            Event::Gone(call)
        }
    });
}
