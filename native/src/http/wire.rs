//! One connection's bytes: TCP or TLS, what came and is not taken, what is to be sent.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use mio::event::Event;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, ServerConfig};
use tokio_rustls::{Accept, Connect, TlsAcceptor, TlsConnector};

use crate::rpc::socket::{Io, Readiness, Socket, Stream};
use crate::rpc::tls;

/// Capacity kept for the next time: streams last long, and what they are made of is short.
const KEPT: usize = 2 << 10;

/// So much is taken before the rest moves to the front.
const MOVED: usize = 16 << 10;

/// The server that a client wants to see proven.
pub type Tls = (TlsConnector, ServerName<'static>);

const ALPN: &[u8] = b"http/1.1";

/// A server's certificates, for this protocol.
pub fn acceptor(certificates: &TlsAcceptor) -> TlsAcceptor {
    let mut config = ServerConfig::clone(certificates.config());
    config.alpn_protocols = vec![ALPN.to_vec()];
    TlsAcceptor::from(Arc::new(config))
}

/// A client's certificates, for this protocol, and the name that the server's has to have.
///
/// # Errors
/// It is no name and no address.
pub fn connector(certificates: &TlsConnector, name: &str) -> Result<Tls, String> {
    let mut config = ClientConfig::clone(certificates.config());
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok((TlsConnector::from(Arc::new(config)), tls::server_name(name)?))
}

enum Stage {
    Connecting(Stream, Option<Box<Tls>>),
    Accepting(Box<Accept<Socket>>),
    Greeting(Box<Connect<Socket>>),
    Open(Io),
    Over,
}

/// What reading brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Filled {
    /// Something came.
    More,
    /// Nothing is there now.
    Nothing,
    /// The peer sends no more.
    Ended,
}

/// See the module. Driven again whenever the kernel says something, so that nobody need be woken.
pub struct Wire {
    stage: Stage,
    ready: Option<Rc<Readiness>>,
    inbound: Vec<u8>,
    taken: usize,
    out: Vec<u8>,
    sent: usize,
}

impl Wire {
    pub fn accepted(stream: Stream, tls: Option<&TlsAcceptor>) -> Self {
        let socket = Socket::new(stream);
        let ready = Some(socket.readiness());
        let stage = match tls {
            Some(acceptor) => Stage::Accepting(Box::new(acceptor.accept(socket))),
            None => Stage::Open(Io::Plain(socket)),
        };
        Self::new(stage, ready)
    }

    pub fn connecting(stream: Stream, tls: Option<Tls>) -> Self {
        Self::new(Stage::Connecting(stream, tls.map(Box::new)), None)
    }

    fn new(stage: Stage, ready: Option<Rc<Readiness>>) -> Self {
        Self { stage, ready, inbound: Vec::new(), taken: 0, out: Vec::new(), sent: 0 }
    }

    /// Notes what the kernel says, in a new poll.
    pub fn set_ready(&self, event: &Event) {
        if let Some(ready) = &self.ready {
            ready.set_ready(event);
        }
    }

    /// The peer takes nothing any more.
    pub fn is_broken(&self) -> bool {
        self.ready.as_ref().is_some_and(|ready| ready.broken.get())
    }

    /// The peer sends no more than what is there.
    pub fn has_ended(&self) -> bool {
        self.ready.as_ref().is_some_and(|ready| ready.ended.get())
    }

    /// Gives it its share of a new poll.
    pub fn begin_poll(&self) {
        if let Some(ready) = &self.ready {
            ready.begin_poll();
        }
    }

    /// It is driven from now on.
    pub fn begin_slice(&self) {
        if let Some(ready) = &self.ready {
            ready.begin_slice();
        }
    }

    /// See `Readiness::has_to_wait`.
    pub fn has_to_wait(&self) -> bool {
        self.ready.as_ref().is_some_and(|ready| ready.has_to_wait())
    }

    /// Connects and greets as far as is possible now.
    pub fn open(&mut self) -> Poll<io::Result<()>> {
        let mut context = Context::from_waker(Waker::noop());
        loop {
            self.stage = match &mut self.stage {
                Stage::Open(_) => return Poll::Ready(Ok(())),
                Stage::Over => return Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
                Stage::Connecting(stream, _) => match stream.connected() {
                    None => return Poll::Pending,
                    Some(Err(error)) => return Poll::Ready(Err(error)),
                    Some(Ok(())) => self.connected(),
                },
                Stage::Accepting(accept) => match Pin::new(accept).poll(&mut context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Ready(Ok(stream)) => Stage::Open(Io::Server(Box::new(stream))),
                },
                Stage::Greeting(connect) => match Pin::new(connect).poll(&mut context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Ready(Ok(stream)) => Stage::Open(Io::Client(Box::new(stream))),
                },
            };
        }
    }

    fn connected(&mut self) -> Stage {
        let Stage::Connecting(stream, tls) = std::mem::replace(&mut self.stage, Stage::Over) else {
            unreachable!("called while connecting")
        };
        let socket = Socket::new(stream);
        self.ready = Some(socket.readiness());
        match tls {
            Some(tls) => Stage::Greeting(Box::new(tls.0.connect(tls.1, socket))),
            None => Stage::Open(Io::Plain(socket)),
        }
    }

    /// Reads once, as much as the scratch takes.
    ///
    /// # Errors
    /// The connection broke.
    pub fn fill(&mut self, scratch: &mut [u8]) -> io::Result<Filled> {
        let Stage::Open(io) = &mut self.stage else { return Ok(Filled::Nothing) };
        let mut buffer = ReadBuf::new(scratch);
        match Pin::new(io).poll_read(&mut Context::from_waker(Waker::noop()), &mut buffer) {
            Poll::Pending => Ok(Filled::Nothing),
            // A peer of TLS that just closes has said all the same that it sends no more: bodies say where they end.
            Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Filled::Ended),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Ready(Ok(())) if buffer.filled().is_empty() => Ok(Filled::Ended),
            Poll::Ready(Ok(())) => {
                self.inbound.extend_from_slice(buffer.filled());
                Ok(Filled::More)
            }
        }
    }

    /// What came and is not taken.
    pub fn inbound(&self) -> &[u8] {
        &self.inbound[self.taken..]
    }

    /// Bytes of memory for what came.
    pub fn inbound_capacity(&self) -> usize {
        self.inbound.capacity()
    }

    /// This number of its bytes was taken.
    pub fn take(&mut self, count: usize) {
        self.taken += count;
        if self.taken == self.inbound.len() {
            self.inbound.clear();
            self.taken = 0;
            self.inbound.shrink_to(KEPT);
        } else if self.taken >= MOVED {
            self.inbound.drain(..self.taken);
            self.taken = 0;
        }
    }

    /// Where to write what is to be sent.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// What the kernel has not taken.
    pub fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Sends as much as the kernel takes; true: all of it.
    ///
    /// # Errors
    /// The connection broke.
    pub fn flush(&mut self) -> io::Result<bool> {
        let Stage::Open(io) = &mut self.stage else { return Ok(self.unsent() == 0) };
        let mut context = Context::from_waker(Waker::noop());
        while self.sent < self.out.len() {
            let rest = &self.out[self.sent..];
            let written = match &mut *io {
                Io::Plain(socket) => socket.write_through(rest),
                secured => Pin::new(secured).poll_write(&mut context, rest),
            };
            match written {
                Poll::Ready(Ok(count)) => self.sent += count,
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.out.shrink_to(KEPT);
            self.sent = 0;
        } else if self.sent >= MOVED.max(self.out.len() / 2) {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        let flushed = Pin::new(io).poll_flush(&mut context);
        match flushed {
            Poll::Ready(Ok(())) => Ok(self.out.is_empty()),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => Ok(false),
        }
    }

    /// Informs the peer that nothing more is sent.
    pub fn shut(&mut self) {
        if let Stage::Open(io) = &mut self.stage {
            // It is closed soon, whatever becomes of this.
            let _ = Pin::new(io).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
    }
}
