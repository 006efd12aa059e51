//! A non-blocking socket as the protocol cores want it. What they write is collected and leaves in one chunk when they
//! flush; nothing is read or written that the kernel has not said is possible, so that a call costs one of each.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::{TcpListener, TcpStream, UnixStream};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::{client, server};

use super::poll_budget::{SHARE, SLICE, WRITE_SHARE};

/// Bytes written that wait for the kernel; with more, the writer has to.
const COLLECTED: usize = 256 * 1024;
/// Capacity kept for the next time.
const KEPT: usize = 64 * 1024;
/// Connections that wait to be accepted; the kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;
/// Silence after which the kernel asks a peer whether it is there, and how long after that it asks again.
const PROBE_AFTER: Duration = Duration::from_secs(15);
const PROBE_AGAIN: Duration = Duration::from_secs(5);

/// Listens at an address. More connections may wait to be accepted than the standard library lets: beyond these the
/// kernel drops who comes, and he tries again after a second.
///
/// # Errors
/// The address cannot be bound.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    SockRef::from(&listener).listen(BACKLOG)?;
    Ok(listener)
}

/// Has the kernel send small writes immediately, and end a connection whose peer acknowledges nothing for a time: neither
/// data nor probes.
///
/// # Errors
/// The peer has gone already.
pub fn configure(stream: &TcpStream, limit: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let (after, again) = (PROBE_AFTER.min(limit / 4), PROBE_AGAIN.min(limit / 4));
    let second = Duration::from_secs(1);
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(after.max(second)).with_interval(again.max(second)),
    )?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(limit))?;
    Ok(())
}

/// A connected socket, or one that is about to be.
#[derive(Debug)]
pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub fn source(&mut self) -> &mut dyn mio::event::Source {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
        }
    }

    /// What has become of connecting; None: nothing yet.
    pub fn connected(&self) -> Option<io::Result<()>> {
        let (error, peer) = match self {
            Self::Tcp(stream) => (stream.take_error(), stream.peer_addr().map(drop)),
            Self::Unix(stream) => (stream.take_error(), stream.peer_addr().map(drop)),
        };
        match (error, peer) {
            (Err(error) | Ok(Some(error)), _) => Some(Err(error)),
            (_, Ok(())) => Some(Ok(())),
            (_, Err(error)) if error.kind() == io::ErrorKind::NotConnected => None,
            (_, Err(error)) => Some(Err(error)),
        }
    }

    /// Connecting to a port of this machine that nobody listens at may end in a connection of a socket with itself.
    pub fn is_its_own_peer(&self) -> bool {
        match self {
            Self::Tcp(stream) => match (stream.local_addr(), stream.peer_addr()) {
                (Ok(ours), Ok(theirs)) => ours == theirs,
                _ => false,
            },
            Self::Unix(_) => false,
        }
    }

    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        }
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn shutdown(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Write),
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Write),
        }
    }
}

/// What the kernel has said of a socket; shared with whoever reads it, since a protocol core owns the socket.
#[derive(Debug)]
pub struct Readiness {
    pub readable: Cell<bool>,
    pub writable: Cell<bool>,
    /// There is an end to be read behind what is there.
    pub ended: Cell<bool>,
    /// The peer takes nothing any more: it was reset, or both directions are closed.
    pub broken: Cell<bool>,
    /// Bytes read until now.
    pub received: Cell<u64>,
    /// Bytes that may still be read in this poll, and written.
    share: Cell<usize>,
    write_share: Cell<usize>,
    /// Until when, once something was read.
    slice_ends_at: Cell<Option<Instant>>,
    /// It was said that there may be more than its share.
    waits: Cell<bool>,
}

impl Readiness {
    fn new() -> Self {
        Self {
            readable: Cell::new(true),
            writable: Cell::new(true),
            ended: Cell::new(false),
            broken: Cell::new(false),
            received: Cell::new(0),
            share: Cell::new(SHARE),
            write_share: Cell::new(WRITE_SHARE),
            slice_ends_at: Cell::new(None),
            waits: Cell::new(false),
        }
    }

    /// Notes what the kernel says, in a new poll.
    pub fn set_ready(&self, event: &Event) {
        let ended = event.is_read_closed() || event.is_error();
        self.ended.set(self.ended.get() || ended);
        self.broken.set(self.broken.get() || event.is_write_closed() || event.is_error());
        self.readable.set(self.readable.get() || event.is_readable() || ended);
        self.writable.set(self.writable.get() || event.is_writable());
        self.begin_poll();
    }

    /// Gives it its share of a new poll.
    pub fn begin_poll(&self) {
        self.share.set(SHARE);
        self.write_share.set(WRITE_SHARE);
        self.waits.set(false);
    }

    /// It is driven from now on.
    pub fn begin_slice(&self) {
        self.slice_ends_at.set(None);
    }

    /// Whether something may be read in this poll.
    fn has_share(&self) -> bool {
        if self.share.get() > 0 {
            let now = Instant::now();
            match self.slice_ends_at.get() {
                None => self.slice_ends_at.set(Some(now + SLICE)),
                Some(ends_at) if now >= ends_at => self.share.set(0),
                Some(_) => {}
            }
        }
        self.share.get() > 0
    }

    /// Whether it has used a share up, and is to be driven again in the next poll; true once a poll.
    pub fn has_to_wait(&self) -> bool {
        let reads = self.readable.get() && self.share.get() == 0;
        let writes = self.writable.get() && self.write_share.get() == 0;
        (reads || writes) && !self.waits.replace(true)
    }
}

/// See the module. Whoever drives it again when the kernel says more need not be woken.
#[derive(Debug)]
pub struct Socket {
    stream: Stream,
    ready: Rc<Readiness>,
    out: Vec<u8>,
    written: usize,
}

impl Socket {
    pub fn new(stream: Stream) -> Self {
        Self { stream, ready: Rc::new(Readiness::new()), out: Vec::new(), written: 0 }
    }

    pub fn readiness(&self) -> Rc<Readiness> {
        Rc::clone(&self.ready)
    }

    /// Writes what the kernel takes now, and the connection's share of the poll lets it.
    pub fn write_through(&mut self, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let ready = &self.ready;
        while ready.writable.get() && ready.write_share.get() > 0 {
            match self.stream.write(&bytes[..bytes.len().min(ready.write_share.get())]) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    ready.write_share.set(ready.write_share.get() - count);
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.writable.set(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Pending
    }

    fn drain(&mut self) -> Poll<io::Result<()>> {
        let mut out = std::mem::take(&mut self.out);
        let drained = loop {
            if self.written == out.len() {
                out.clear();
                self.written = 0;
                out.shrink_to(KEPT);
                break Poll::Ready(Ok(()));
            }
            match self.write_through(&out[self.written..]) {
                Poll::Ready(Ok(count)) => self.written += count,
                Poll::Ready(Err(error)) => break Poll::Ready(Err(error)),
                Poll::Pending => break Poll::Pending,
            }
        };
        self.out = out;
        drained
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Without a share left it waits for the next poll: whoever drives it asks `has_to_wait`.
        while self.ready.readable.get() && self.ready.has_share() {
            let wanted = buffer.remaining().min(self.ready.share.get());
            match self.stream.read(buffer.initialize_unfilled_to(wanted)) {
                Ok(count) => {
                    buffer.advance(count);
                    self.ready.share.set(self.ready.share.get() - count);
                    self.ready.received.set(self.ready.received.get() + count as u64);
                    // Less than asked for is all there is; the kernel reports when more comes, but an end only once.
                    if count > 0 && count < wanted && !self.ready.ended.get() {
                        self.ready.readable.set(false);
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.readable.set(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Pending
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.out.len() - self.written >= COLLECTED
            && let Poll::Ready(Err(error)) = self.drain()
        {
            return Poll::Ready(Err(error));
        }
        let room = COLLECTED.saturating_sub(self.out.len() - self.written);
        if room == 0 {
            return Poll::Pending;
        }
        let count = bytes.len().min(room);
        self.out.extend_from_slice(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.drain()
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.drain() {
            Poll::Ready(Ok(())) => Poll::Ready(self.stream.shutdown()),
            other => other,
        }
    }
}

/// A socket, with or without TLS around it.
#[derive(Debug)]
pub enum Io {
    Plain(Socket),
    Server(Box<server::TlsStream<Socket>>),
    Client(Box<client::TlsStream<Socket>>),
}

impl AsyncRead for Io {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(context, buffer),
            Self::Server(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Client(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(context, bytes),
            Self::Server(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Client(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(context),
            Self::Server(stream) => Pin::new(stream).poll_flush(context),
            Self::Client(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(context),
            Self::Server(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Client(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
