//! Sockets that connections come to.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use mio::net::TcpListener;
use mio::{Interest, Token};
use tokio_rustls::TlsAcceptor;

use super::call::Kind;
use super::connection::Connection;
use super::socket::Stream;
use super::wake::{Bell, Due};
use super::{Event, Rpc};

/// In the token of a listener, to tell it from a connection's.
pub const LISTENER: usize = 1 << 63;

pub struct Listener {
    pub socket: TcpListener,
    methods: HashMap<String, (u32, Kind)>,
    pub tls: Option<TlsAcceptor>,
}

impl Listener {
    pub fn bind(
        address: SocketAddr,
        methods: Vec<(String, Kind)>,
        tls: Option<TlsAcceptor>,
    ) -> io::Result<(Self, u16)> {
        let socket = TcpListener::bind(address)?;
        let port = socket.local_addr()?.port();
        let places =
            methods.into_iter().zip(0u32..).map(|((name, kind), place)| (name, (place, kind))).collect();
        Ok((Self { socket, methods: places, tls }, port))
    }

    /// Place and kind of a method.
    pub fn method(&self, path: &str) -> Option<(u32, Kind)> {
        self.methods.get(path).copied()
    }
}

impl Rpc {
    /// Accepts what is there. Out of descriptors it stops; `tick` tries again.
    pub(super) fn accept(&mut self, key: u64) {
        loop {
            let Some(listener) = self.listeners.get_mut(key) else { return };
            let (mut stream, peer) = match listener.socket.accept() {
                Ok(accepted) => accepted,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        self.news.push(Event::AcceptFailed(error.raw_os_error().unwrap_or(0)));
                        return;
                    }
                },
            };
            let tls = listener.tls.clone();
            if self.accepted >= self.limits.max_connections {
                self.refused_connections += 1;
                continue;
            }
            // A peer that has gone already is noticed by the first read.
            let _ = stream.set_nodelay(true);
            let (limits, queue) = (Rc::clone(&self.limits), Arc::clone(&self.queue));
            let registry = self.poll.registry();
            let mut registered = Ok(());
            let connection = self.connections.insert_with(|connection| {
                let interest = Interest::READABLE | Interest::WRITABLE;
                registered = registry.register(&mut stream, Token(connection as usize), interest);
                let bell = Bell::new(&queue, Due::Connection(connection));
                bell.ring();
                let stream = Stream::Tcp(stream);
                Connection::accepted(
                    stream,
                    key,
                    tls.as_ref(),
                    peer.to_string(),
                    bell,
                    limits,
                    Instant::now(),
                )
            });
            if let Err(error) = registered {
                self.connections.remove(connection);
                self.news.push(Event::AcceptFailed(error.raw_os_error().unwrap_or(0)));
                return;
            }
            self.accepted += 1;
        }
    }
}
