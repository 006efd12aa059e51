//! A non-blocking socket as the protocol cores want it. What they write is collected and leaves in one piece when they
//! flush; nothing is read or written that the kernel has not said is possible, so that a call costs one of each.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use mio::net::{TcpStream, UnixStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::{client, server};

/// Bytes written that wait for the kernel; with more, the writer has to.
const COLLECTED: usize = 256 * 1024;
/// Capacity kept for the next time.
const KEPT: usize = 64 * 1024;

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

/// What the kernel has said of a socket; shared with whoever hears it, since a protocol core owns the socket.
#[derive(Debug)]
pub struct Readiness {
    pub readable: Cell<bool>,
    pub writable: Cell<bool>,
    /// There is an end to be read behind what is there.
    pub ended: Cell<bool>,
    /// Bytes read until now.
    pub received: Cell<u64>,
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
        let ready = Readiness {
            readable: Cell::new(true),
            writable: Cell::new(true),
            ended: Cell::new(false),
            received: Cell::new(0),
        };
        Self { stream, ready: Rc::new(ready), out: Vec::new(), written: 0 }
    }

    pub fn readiness(&self) -> Rc<Readiness> {
        Rc::clone(&self.ready)
    }

    /// Writes for somebody who has collected it already: what the kernel takes now.
    pub fn write_through(&mut self, bytes: &[u8]) -> Poll<io::Result<usize>> {
        while self.ready.writable.get() {
            match self.stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.writable.set(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return Poll::Ready(other),
            }
        }
        Poll::Pending
    }

    fn drain(&mut self) -> Poll<io::Result<()>> {
        while self.written < self.out.len() {
            if !self.ready.writable.get() {
                return Poll::Pending;
            }
            match self.stream.write(&self.out[self.written..]) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready.writable.set(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        self.out.clear();
        self.written = 0;
        if self.out.capacity() > KEPT {
            self.out.shrink_to(KEPT);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.ready.readable.get() {
            let wanted = buffer.remaining();
            match self.stream.read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    self.ready.received.set(self.ready.received.get() + count as u64);
                    // Less than asked for is all there is; the kernel tells when more comes, but not of an end twice.
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
