//! One HTTP/2 connection, from its socket to its end, on either side of it.
//!
//! ```text
//! connecting ──▶ TLS ──▶ HTTP/2 preface ──▶ open ──▶ over, with the reason
//!  (client)     (if any)
//! ```

use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::BuildHasher;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Ping, PingPong, Reason, RecvStream};
use hashbrown::HashSet;
use http::Request;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{Accept, Connect, TlsAcceptor, TlsConnector};

use super::limits::Limits;
use super::poll_budget::BEGUN;
use super::socket::{Io, Readiness, Socket, Stream};
use super::wake::Notifier;

/// A request as it comes in, with what answers it.
pub type Incoming = (Request<RecvStream>, SendResponse<Bytes>);
type ClientHandshake = Pin<Box<dyn Future<Output = Result<ClientParts, h2::Error>>>>;
type ClientParts = (SendRequest<Bytes>, h2::client::Connection<Io, Bytes>);

enum Stage {
    Connecting(Stream, Option<(TlsConnector, ServerName<'static>)>),
    AcceptingTls(Box<Accept<Socket>>),
    ConnectingTls(Box<Connect<Socket>>),
    Greeting(Box<h2::server::Handshake<Io, Bytes>>),
    GreetingServer(ClientHandshake),
    Server(Box<h2::server::Connection<Io, Bytes>>),
    Client(Box<h2::client::Connection<Io, Bytes>>),
    Over,
}

/// What driving a connection has brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing more for now.
    Waits,
    /// The client's connection can be used.
    Opened,
    /// It is over, why, and whether because the peer did harm.
    Over(String, bool),
}

/// Why a connection is over.
struct End {
    text: String,
    harmful: bool,
}

impl End {
    fn of(reason: impl ToString) -> Self {
        Self { text: reason.to_string(), harmful: false }
    }
}

impl From<h2::Error> for End {
    fn from(error: h2::Error) -> Self {
        // Ours, not the peer's word: it opened and reset streams, or sent tiny frames, without end.
        let harmful = error.is_library() && error.reason() == Some(Reason::ENHANCE_YOUR_CALM);
        Self { text: error.to_string(), harmful }
    }
}

/// Of one side: who accepted it, or what opens streams.
pub enum Side {
    /// Key of the listener.
    Server(u64),
    /// What opens streams, once it is open, and streams that wait for it.
    Client { sender: Option<SendRequest<Bytes>>, authority: String, waiting: Vec<u64> },
}

pub struct Connection {
    stage: Stage,
    pub side: Side,
    pub notifier: Notifier,
    /// What the kernel says of its socket; None while it is not connected.
    pub ready: Option<Rc<Readiness>>,
    pub streams: HashSet<u64>,
    /// Calls of it that somebody handles, and since when there is none.
    pub handled: usize,
    pub idle_since: Instant,
    /// There was one.
    pub requested: bool,
    /// The caller is a known one: its connection is not closed to make room.
    pub trusted: bool,
    pub peer: String,
    opened_at: Instant,
    heard_at: Instant,
    heard_bytes: u64,
    pings: Option<PingPong>,
    pinged_at: Option<Instant>,
    /// Streams that the peer has reset in the second that began then.
    resets: (Instant, u32),
    /// When it is to take no new streams any more.
    ages_at: Option<Instant>,
    /// It takes no new streams any more.
    pub leaving: bool,
    /// A call was admitted: the peer has the window of one that is known.
    known: bool,
    limits: Rc<Limits>,
}

impl Connection {
    pub fn accepted(
        stream: Stream,
        listener: u64,
        tls: Option<&TlsAcceptor>,
        peer: String,
        notifier: Notifier,
        limits: Rc<Limits>,
        now: Instant,
    ) -> Self {
        let socket = Socket::new(stream);
        let ready = Some(socket.readiness());
        let stage = match tls {
            Some(acceptor) => Stage::AcceptingTls(Box::new(acceptor.accept(socket))),
            None => Stage::Greeting(Box::new(limits.server().handshake(Io::Plain(socket)))),
        };
        let ages_at = limits.max_age.map(|age| now + age.mul_f64(spread()));
        let accepted = Self::new(stage, Side::Server(listener), ready, peer, notifier, limits, now);
        Self { ages_at, ..accepted }
    }

    pub fn connecting(
        stream: Stream,
        tls: Option<(TlsConnector, ServerName<'static>)>,
        authority: String,
        peer: String,
        notifier: Notifier,
        limits: Rc<Limits>,
        now: Instant,
    ) -> Self {
        let side = Side::Client { sender: None, authority, waiting: Vec::new() };
        Self::new(Stage::Connecting(stream, tls), side, None, peer, notifier, limits, now)
    }

    fn new(
        stage: Stage,
        side: Side,
        ready: Option<Rc<Readiness>>,
        peer: String,
        notifier: Notifier,
        limits: Rc<Limits>,
        now: Instant,
    ) -> Self {
        Self {
            stage,
            side,
            notifier,
            ready,
            streams: HashSet::new(),
            handled: 0,
            idle_since: now,
            requested: false,
            trusted: false,
            peer,
            opened_at: now,
            heard_at: now,
            heard_bytes: 0,
            pings: None,
            pinged_at: None,
            resets: (now, 0),
            ages_at: None,
            leaving: false,
            known: false,
            limits,
        }
    }

    /// Whether calls can be made on it, or answered.
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Server(_) | Stage::Client(_))
    }

    /// Notes what the kernel says, in a new poll.
    pub fn set_ready(&self, event: &mio::event::Event) {
        if let Some(ready) = &self.ready {
            ready.set_ready(event);
        }
    }

    /// Gives it its share of a new poll.
    pub fn begin_poll(&self) {
        if let Some(ready) = &self.ready {
            ready.begin_poll();
        }
    }

    /// See `Readiness::has_to_wait`.
    pub fn has_to_wait(&self) -> bool {
        self.ready.as_ref().is_some_and(|ready| ready.has_to_wait())
    }

    /// Reads, writes and gets on as far as its share of the poll lets it; requests that came are handed on.
    pub fn drive(&mut self, mut incoming: impl FnMut(Incoming)) -> Progress {
        self.notifier.taken();
        if let Some(ready) = &self.ready {
            ready.begin_slice();
        }
        let waker = self.notifier.waker().clone();
        let mut context = Context::from_waker(&waker);
        let (mut opened, mut begun) = (false, 0);
        let reason = loop {
            if begun == BEGUN {
                // It is driven again, behind all others that are due.
                self.notifier.notify();
                return Progress::Waits;
            }
            let mut incoming = |request| {
                begun += 1;
                incoming(request);
            };
            match self.step(&mut context, &mut incoming) {
                Poll::Pending if opened => return Progress::Opened,
                Poll::Pending => return Progress::Waits,
                Poll::Ready(Err(reason)) => break reason,
                Poll::Ready(Ok(())) => opened = opened || matches!(self.stage, Stage::Client(_)),
            }
        };
        self.stage = Stage::Over;
        Progress::Over(reason.text, reason.harmful)
    }

    /// One stage, or one request of the last.
    fn step(
        &mut self,
        context: &mut Context<'_>,
        incoming: &mut impl FnMut(Incoming),
    ) -> Poll<Result<(), End>> {
        self.stage = match &mut self.stage {
            Stage::Connecting(stream, _) => match stream.connected() {
                None => return Poll::Pending,
                Some(Err(error)) => return Poll::Ready(Err(End::of(error))),
                Some(Ok(())) => self.connected(),
            },
            Stage::AcceptingTls(accept) => match Pin::new(accept).poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::of(format!("TLS: {error}")))),
                Poll::Ready(Ok(stream)) => {
                    Stage::Greeting(Box::new(self.limits.server().handshake(Io::Server(Box::new(stream)))))
                }
            },
            Stage::ConnectingTls(connect) => match Pin::new(connect).poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::of(format!("TLS: {error}")))),
                Poll::Ready(Ok(stream)) => greeting_server(&self.limits, Io::Client(Box::new(stream))),
            },
            Stage::Greeting(handshake) => match Pin::new(handshake).poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::from(error))),
                Poll::Ready(Ok(mut connection)) => {
                    self.pings = connection.ping_pong();
                    if self.leaving {
                        connection.graceful_shutdown();
                    }
                    Stage::Server(Box::new(connection))
                }
            },
            Stage::GreetingServer(handshake) => match handshake.as_mut().poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::from(error))),
                Poll::Ready(Ok((opens, mut connection))) => {
                    self.pings = connection.ping_pong();
                    if let Side::Client { sender, .. } = &mut self.side {
                        *sender = Some(opens);
                    }
                    Stage::Client(Box::new(connection))
                }
            },
            Stage::Server(connection) => {
                match connection.poll_accept(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(None) => return Poll::Ready(Err(End::of("closed"))),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(End::from(error))),
                    Poll::Ready(Some(Ok(request))) => incoming(request),
                }
                return Poll::Ready(Ok(()));
            }
            Stage::Client(connection) => match Pin::new(connection).poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(End::from(error))),
                Poll::Ready(Ok(())) => return Poll::Ready(Err(End::of("closed by the peer"))),
            },
            Stage::Over => return Poll::Ready(Err(End::of("closed"))),
        };
        Poll::Ready(Ok(()))
    }

    fn connected(&mut self) -> Stage {
        let Stage::Connecting(stream, tls) = std::mem::replace(&mut self.stage, Stage::Over) else {
            unreachable!("called while connecting")
        };
        let socket = Socket::new(stream);
        self.ready = Some(socket.readiness());
        match tls {
            Some((connector, name)) => Stage::ConnectingTls(Box::new(connector.connect(name, socket))),
            None => greeting_server(&self.limits, Io::Plain(socket)),
        }
    }

    /// Since when it is idle, unless it is not or its caller is a known one; before that, whether it has requested anything.
    /// What is least is closed first where there is no room.
    pub fn worth(&self) -> Option<(bool, Instant)> {
        let accepted = matches!(self.side, Side::Server(_));
        (accepted && self.handled == 0 && !self.trusted).then_some((self.requested, self.idle_since))
    }

    /// Informs the peer, as far as it reads, that what it opens from now on is not looked at.
    pub fn refuse(&mut self) {
        if let Stage::Server(connection) = &mut self.stage {
            connection.abrupt_shutdown(Reason::NO_ERROR);
            self.drive(|_| {});
        }
    }

    /// Asks the peer to open no more streams; those that are open go on.
    pub fn leave(&mut self) {
        self.leaving = true;
        if let Stage::Server(connection) = &mut self.stage {
            connection.graceful_shutdown();
            self.notifier.notify();
        }
    }

    /// Opens the window of a peer of which a call was admitted.
    pub fn admit(&mut self) {
        if !self.known
            && let Stage::Server(connection) = &mut self.stage
        {
            self.known = true;
            connection.set_target_window_size(self.limits.connection_window);
            self.notifier.notify();
        }
    }

    /// Notes that the peer reset a stream; a peer that does so by the hundred is sent away, and true returned.
    pub fn stream_reset(&mut self, now: Instant) -> bool {
        if now.duration_since(self.resets.0) >= Duration::from_secs(1) {
            self.resets = (now, 0);
        }
        self.resets.1 += 1;
        if self.resets.1 <= self.limits.resets() {
            return false;
        }
        if let Stage::Server(connection) = &mut self.stage {
            connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
            self.notifier.notify();
        }
        true
    }

    /// What has to be done because time went by; the reason if it must end.
    pub fn tick(&mut self, now: Instant) -> Option<String> {
        let received = self.ready.as_ref().map_or(0, |ready| ready.received.get());
        if received != self.heard_bytes {
            (self.heard_bytes, self.heard_at) = (received, now);
        }
        if !self.is_open() {
            let slow = now.duration_since(self.opened_at) > self.limits.handshake;
            return slow.then(|| "the handshake takes too long".to_owned());
        }
        if self.ages_at.is_some_and(|at| at <= now) {
            self.ages_at = None;
            self.leave();
        }
        let pings = self.pings.as_mut()?;
        if let Some(pinged_at) = self.pinged_at {
            let mut context = Context::from_waker(self.notifier.waker());
            match pings.poll_pong(&mut context) {
                Poll::Ready(_) => self.pinged_at = None,
                // Whatever comes is a sign of life.
                Poll::Pending if self.heard_at > pinged_at => {}
                Poll::Pending if now.duration_since(pinged_at) > self.limits.keepalive_timeout => {
                    return Some("the peer does not answer".to_owned());
                }
                Poll::Pending => {}
            }
        } else if now.duration_since(self.heard_at) >= self.limits.keepalive
            && pings.send_ping(Ping::opaque()).is_ok()
        {
            self.pinged_at = Some(now);
            self.notifier.notify();
        }
        None
    }
}

/// A factor near 1, another one each time: connections that came together are not to leave together.
fn spread() -> f64 {
    let random = RandomState::new().hash_one(()) as u32;
    0.9 + 0.2 * f64::from(random) / f64::from(u32::MAX)
}

fn greeting_server(limits: &Limits, io: Io) -> Stage {
    let client = limits.client();
    Stage::GreetingServer(Box::pin(async move { client.handshake(io).await }))
}
