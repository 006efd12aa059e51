//! gRPC over HTTP/2, driven by whoever owns the event loop: no runtime, no thread.
//!
//! ```text
//!             ┌─ listeners ─▶ connections ─▶ calls ─┐
//! kernel ─epoll─▶ turn() ────────────────────────────┴─▶ events ─▶ the loop's own code
//!                flush() ◀── send, finish, consumed, call ◀────────────┘
//! ```
//!
//! `turn` reads what came and drives what that concerns; calls into it only note what is to be sent, and `flush` sends
//! it, so that what one turn of the loop answers leaves in one write a connection. The protocol is crate `h2`'s; what
//! makes it gRPC is in `framing`, `metadata` and `status`.
//!
//! Bounded: connections, streams of each, messages, header lists, what a peer may send ahead of what was handled
//! (HTTP/2 windows, which open again as messages are), what waits to be sent (`send` says when to wait), and the whole
//! of what came and is not handled.

mod call;
mod connection;
mod framing;
mod keyed;
mod limits;
mod listener;
mod metadata;
mod socket;
mod status;
mod tls;
mod wake;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::Reason;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, TE};
use http::{Method, Request, Response, StatusCode};
use mio::net::{TcpStream, UnixStream};
use mio::{Events, Interest, Poll, Token};

use call::Call;
pub use call::{Kind, News};
use connection::{Connection, Incoming, Progress, Side};
use framing::{Deframer, Encoding};
use keyed::Keyed;
pub use limits::Limits;
use listener::{LISTENER, Listener};
pub use metadata::Metadata;
use socket::Stream;
pub use status::Status;
pub use tls::{acceptor, connector};
pub use tokio_rustls::{TlsAcceptor, TlsConnector};
use wake::{Bell, Due, WakeQueue};

/// Kernel events taken in one turn; the rest comes with the next.
const EVENTS: usize = 1024;
/// Rounds of one turn among connections and calls that wake one another.
const ROUNDS: usize = 64;

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
    /// More of a call.
    Call(u64, News),
    Connected(u64),
    /// A client's connection is over, and why.
    Closed(u64, String),
    /// Connections cannot be accepted: the error's number.
    AcceptFailed(i32),
}

/// What is there now, and was until now.
#[derive(Debug, Default, Clone, Copy)]
pub struct Stats {
    pub connections: usize,
    pub calls: usize,
    pub queued_bytes: usize,
    /// Connections closed because there were too many, or because they did harm.
    pub connections_refused: u64,
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
    due: Vec<Due>,
    news: Vec<Event>,
    held: usize,
    accepted: usize,
    refused_connections: u64,
    refused_calls: u64,
}

/// Where a client connects to.
#[derive(Debug, Clone)]
pub enum Address {
    Tcp(SocketAddr),
    Unix(String),
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
            due: Vec::new(),
            news: Vec::new(),
            held: 0,
            accepted: 0,
            refused_connections: 0,
            refused_calls: 0,
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
            queued_bytes: self.held,
            connections_refused: self.refused_connections,
            calls_refused: self.refused_calls,
        }
    }

    /// Listens; returns the listener and the port.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn listen(
        &mut self,
        address: SocketAddr,
        methods: Vec<(String, Kind)>,
        tls: Option<TlsAcceptor>,
    ) -> io::Result<(u64, u16)> {
        let (listener, port) = Listener::bind(address, methods, tls)?;
        let key = self.listeners.insert_with(|_| listener);
        let listener = self.listeners.get_mut(key).expect("just stored");
        self.poll.registry().register(
            &mut listener.socket,
            Token(key as usize | LISTENER),
            Interest::READABLE,
        )?;
        Ok((key, port))
    }

    /// New connections use other certificates.
    pub fn set_tls(&mut self, listener: u64, tls: Option<TlsAcceptor>) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.tls = tls;
        }
    }

    /// Takes no new connections any more.
    pub fn stop_listening(&mut self, listener: u64) {
        self.listeners.remove(listener);
    }

    /// Tells the peers of a listener to open no more calls on the connections they have.
    pub fn leave(&mut self, listener: u64) {
        for key in self.connections_of(listener) {
            self.connections.get_mut(key).expect("a key in use").leave();
        }
    }

    /// Closes the connections of a listener at once.
    pub fn close_connections(&mut self, listener: u64) {
        for key in self.connections_of(listener) {
            self.end_connection(key, "the server closes it");
        }
    }

    /// Calls that came to a listener and are not over.
    pub fn open_calls(&self, listener: u64) -> usize {
        let calls = |key| self.connections.get(key).map_or(0, |connection| connection.streams.len());
        self.connections_of(listener).into_iter().map(calls).sum()
    }

    fn connections_of(&self, listener: u64) -> Vec<u64> {
        let of = |key: &u64| {
            let connection = self.connections.get(*key);
            connection.is_some_and(|connection| matches!(connection.side, Side::Server(by) if by == listener))
        };
        self.connections.keys().into_iter().filter(of).collect()
    }

    /// Begins to connect; `Connected` or `Closed` follows.
    ///
    /// # Errors
    /// There is no socket to be had, or no way to the address.
    pub fn connect(
        &mut self,
        address: &Address,
        authority: String,
        tls: Option<(TlsConnector, &str)>,
    ) -> Result<u64, String> {
        let name =
            tls.map(|(connector, name)| tls::server_name(name).map(|name| (connector, name))).transpose()?;
        let (stream, peer) = match address {
            Address::Tcp(address) => (TcpStream::connect(*address).map(Stream::Tcp), format!("{address}")),
            Address::Unix(path) => (UnixStream::connect(path).map(Stream::Unix), format!("unix:{path}")),
        };
        let mut stream = stream.map_err(|error| error.to_string())?;
        if let Stream::Tcp(stream) = &stream {
            stream.set_nodelay(true).map_err(|error| error.to_string())?;
        }
        let queue = Arc::clone(&self.queue);
        let (limits, registry) = (Rc::clone(&self.limits), self.poll.registry());
        let mut registered = Ok(());
        let key = self.connections.insert_with(|key| {
            let interest = Interest::READABLE | Interest::WRITABLE;
            registered = registry.register(stream.source(), Token(key as usize), interest);
            let bell = Bell::new(&queue, Due::Connection(key));
            Connection::connecting(stream, name, authority, peer, bell, limits, Instant::now())
        });
        if let Err(error) = registered {
            self.connections.remove(key);
            return Err(error.to_string());
        }
        Ok(key)
    }

    /// Closes a client's connection; its calls end.
    pub fn close(&mut self, connection: u64) {
        self.end_connection(connection, "closed");
    }

    /// Calls a method; `None` if the connection is over.
    ///
    /// # Errors
    /// The metadata's name that cannot be sent.
    pub fn call(
        &mut self,
        connection: u64,
        method: &str,
        metadata: &Metadata,
        timeout_us: Option<u64>,
    ) -> Result<Option<u64>, String> {
        let Some(on) = self.connections.get_mut(connection) else { return Ok(None) };
        let Side::Client { authority, .. } = &on.side else { return Ok(None) };
        let request = request(authority, method, metadata, timeout_us)?;
        let deframer = Deframer::new(self.limits.max_message, Encoding::Identity);
        let (queue, windows) = (&self.queue, self.limits.windows());
        let key = self.calls.insert_with(|key| {
            Call::waiting(connection, Bell::new(queue, Due::Stream(key)), request, deframer, windows)
        });
        on.streams.insert(key);
        if let Side::Client { waiting, .. } = &mut on.side {
            waiting.push(key);
        }
        self.open_waiting(connection);
        Ok(Some(key))
    }

    /// Opens the streams that wait, as far as the peer takes them.
    fn open_waiting(&mut self, connection: u64) {
        let Some(on) = self.connections.get_mut(connection) else { return };
        if !on.is_open() {
            return;
        }
        let waker = on.bell.waker().clone();
        let mut context = std::task::Context::from_waker(&waker);
        let Side::Client { sender: Some(sender), waiting, .. } = &mut on.side else { return };
        let mut opened = 0;
        let mut failed = Vec::new();
        for key in &*waiting {
            let Some(call) = self.calls.get_mut(*key) else {
                opened += 1;
                continue;
            };
            match sender.poll_ready(&mut context) {
                std::task::Poll::Pending => break,
                std::task::Poll::Ready(Err(error)) => failed.push((*key, error)),
                std::task::Poll::Ready(Ok(())) => {
                    let Some(request) = call.request.take() else { continue };
                    match sender.send_request(request, false) {
                        Ok((response, send)) => call.opened(response, send),
                        Err(error) => failed.push((*key, error)),
                    }
                }
            }
            opened += 1;
        }
        waiting.drain(..opened);
        for (key, error) in failed {
            self.tell(key, |call, tell| call.broke(&error, tell));
        }
    }

    /// Polls the sockets and drives what is ready; what happened since the last time. Never blocks.
    ///
    /// # Errors
    /// The kernel refuses to poll.
    pub fn turn(&mut self) -> io::Result<Vec<Event>> {
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
                let ended = event.is_read_closed() || event.is_error();
                connection.kernel_says(event.is_readable(), event.is_writable(), ended);
                connection.bell.ring();
            }
        }
        self.events = events;
        self.drive();
        Ok(std::mem::take(&mut self.news))
    }

    /// Sends what is to be sent. What happens meanwhile is told by the next `turn`; true if there is something.
    pub fn flush(&mut self) -> bool {
        self.drive();
        !self.news.is_empty() || !self.queue.is_empty()
    }

    /// Drives what is due, and what that wakes, until nothing is or everybody had a fair share.
    fn drive(&mut self) {
        for _ in 0..ROUNDS {
            let mut due = std::mem::take(&mut self.due);
            self.queue.swap(&mut due);
            // Calls first: what they give to their connections goes out with one write.
            for due in &due {
                if let Due::Stream(key) = due {
                    self.tell(*key, Call::drive);
                }
            }
            for due in &due {
                if let Due::Connection(key) = due {
                    self.drive_connection(*key);
                }
            }
            let done = due.is_empty();
            due.clear();
            self.due = due;
            if done {
                return;
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

    /// Answers or begins a call that came.
    fn begin(&mut self, connection: u64, (request, mut respond): Incoming) {
        let Some(from) = self.connections.get_mut(connection) else { return };
        let Side::Server(by) = from.side else { return };
        let (head, receive) = request.into_parts();
        if !is_grpc(&head.method, &head.headers) {
            let mut response = Response::new(());
            *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            // An error says that the caller has gone.
            let _ = respond.send_response(response, true);
            return;
        }
        let method = self.listeners.get(by).and_then(|listener| listener.method(head.uri.path()));
        let encoding = Encoding::named(head.headers.get("grpc-encoding").map(HeaderValue::as_bytes));
        let refused = if self.held > self.limits.queue {
            self.refused_calls += 1;
            Some(Status::new(status::RESOURCE_EXHAUSTED, "too many requests wait to be handled"))
        } else if encoding == Encoding::Unknown {
            Some(Status::new(status::UNIMPLEMENTED, "gzip is the only compression here"))
        } else if method.is_none() {
            Some(Status::new(status::UNIMPLEMENTED, format!("there is no method {}", head.uri.path())))
        } else {
            None
        };
        let kind =
            method.map_or(Kind { request_streaming: true, response_streaming: true }, |(_, kind)| kind);
        let deframer = Deframer::new(self.limits.max_message, encoding);
        let (queue, windows) = (&self.queue, self.limits.windows());
        let key = self.calls.insert_with(|key| {
            let bell = Bell::new(queue, Due::Stream(key));
            Call::accepted(connection, bell, kind, receive, respond, deframer, windows)
        });
        from.streams.insert(key);
        let call = self.calls.get_mut(key).expect("just stored");
        if let Some(status) = refused {
            call.finish(&status, HeaderMap::new());
        } else if let Some((place, _)) = method {
            call.meta = Some(call::Meta {
                listener: by,
                method: place,
                metadata: metadata::visible(&head.headers),
                timeout_us: head
                    .headers
                    .get("grpc-timeout")
                    .and_then(|value| metadata::timeout_us(value.as_bytes())),
            });
            if kind.request_streaming {
                self.tell(key, |call, tell| call.begin(tell));
            }
        }
        self.tell(key, Call::drive);
    }

    /// Has a call do something that may tell of it.
    fn tell<R>(&mut self, key: u64, act: impl FnOnce(&mut Call, &mut dyn FnMut(News)) -> R) -> Option<R> {
        let call = self.calls.get_mut(key)?;
        let held = call.held();
        call.may_grow = self.held <= self.limits.queue;
        let (mut told, mut reset) = (Vec::new(), false);
        let result = act(call, &mut |news| {
            reset = reset || news == News::Reset;
            told.push(news);
        });
        self.held = self.held + call.held() - held;
        let meta = call.meta.take();
        let over = call.over;
        let mut meta = if over { None } else { meta };
        for news in told {
            match news {
                News::Begins(message) => {
                    if let Some(call::Meta { listener, method, metadata, timeout_us }) = meta.take() {
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
            self.forget(key, reset);
        } else if let Some(call) = self.calls.get_mut(key) {
            call.meta = meta;
        }
        Some(result)
    }

    fn forget(&mut self, key: u64, reset: bool) {
        let Some(call) = self.calls.remove(key) else { return };
        self.held -= call.held();
        let Some(connection) = self.connections.get_mut(call.connection) else { return };
        connection.streams.remove(&key);
        // What dropping its handles leaves to be sent.
        connection.bell.ring();
        if reset && connection.stream_reset(Instant::now()) {
            self.refused_connections += 1;
        }
    }

    fn end_connection(&mut self, key: u64, reason: &str) {
        let Some(connection) = self.connections.remove(key) else { return };
        for call in &connection.streams {
            let status = Status::new(status::UNAVAILABLE, format!("{}: {reason}", connection.peer));
            self.tell(*call, |call, tell| {
                // Its last words may have come with the end of the connection.
                call.drive(tell);
                match (call.over, call.is_server()) {
                    (true, _) => {}
                    (false, true) => call.gone(tell),
                    (false, false) => call.end(status, Vec::new(), tell),
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
        for key in self.calls.keys() {
            self.tell(key, |call, _| call.open_for_one());
        }
        self.drive();
    }

    /// Sends headers, unless they are sent.
    ///
    /// # Errors
    /// The metadata's name that cannot be sent.
    pub fn headers(&mut self, call: u64, metadata: &Metadata) -> Result<(), String> {
        let mut headers = HeaderMap::new();
        metadata::add(&mut headers, metadata)?;
        if let Some(call) = self.calls.get_mut(call) {
            call.send_headers(headers);
        }
        Ok(())
    }

    /// Sends a message; false: wait for `Writable` before the next.
    pub fn send(&mut self, call: u64, message: &[u8]) -> bool {
        self.calls.get_mut(call).is_none_or(|call| call.send(message))
    }

    /// Sends no more messages of a call that was made here.
    pub fn half_close(&mut self, call: u64) {
        if let Some(call) = self.calls.get_mut(call) {
            call.close();
        }
    }

    /// Ends a call that came.
    ///
    /// # Errors
    /// The metadata's name that cannot be sent.
    pub fn finish(&mut self, call: u64, status: &Status, metadata: &Metadata) -> Result<(), String> {
        let mut trailers = HeaderMap::new();
        metadata::add(&mut trailers, metadata)?;
        self.tell(call, |call, _| call.finish(status, trailers));
        Ok(())
    }

    /// Breaks a call off; nothing more is told of it.
    pub fn reset(&mut self, call: u64) {
        self.tell(call, |call, _| call.reset(Reason::CANCEL));
    }

    /// A message of so many bytes was handled.
    pub fn consumed(&mut self, call: u64, bytes: usize) {
        if let Some(call) = self.calls.get_mut(call) {
            self.held -= call.consumed(bytes);
        }
    }

    /// Who makes a call, or takes it.
    pub fn peer(&self, call: u64) -> Option<&str> {
        let connection = self.connections.get(self.calls.get(call)?.connection)?;
        Some(&connection.peer)
    }
}

fn is_grpc(method: &Method, headers: &HeaderMap) -> bool {
    let content = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    method == Method::POST && content.is_some_and(|content| content.starts_with(b"application/grpc"))
}

fn request(
    authority: &str,
    method: &str,
    metadata: &Metadata,
    timeout_us: Option<u64>,
) -> Result<Request<()>, String> {
    let uri = format!("http://{authority}{method}");
    let mut request = Request::post(uri).body(()).map_err(|error| format!("{authority}{method}: {error}"))?;
    let headers = request.headers_mut();
    headers.insert(TE, HeaderValue::from_static("trailers"));
    headers.insert(CONTENT_TYPE, call::GRPC);
    if let Some(us) = timeout_us {
        headers.insert("grpc-timeout", metadata::timeout_value(us));
    }
    metadata::add(headers, metadata)?;
    Ok(request)
}
