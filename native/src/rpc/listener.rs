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
use super::crowds::{self, Accepted};
use super::poll_budget::ACCEPTED;
use super::socket::{Stream, listen};
use super::wake::{Due, Notifier};
use super::{Event, Rpc};

/// Set in the token of a listener, not in a connection's.
pub const LISTENER: usize = 1 << 63;

pub struct Listener {
    /// None once it takes no new connections; calls that come on those there are find their methods all the same.
    pub socket: Option<TcpListener>,
    methods: HashMap<String, (u32, Kind)>,
    pub tls: Option<TlsAcceptor>,
}

impl Listener {
    pub fn bind(
        address: SocketAddr,
        methods: Vec<(String, Kind)>,
        tls: Option<TlsAcceptor>,
    ) -> io::Result<(Self, u16)> {
        let socket = listen(address)?;
        let port = socket.local_addr()?.port();
        let places =
            methods.into_iter().zip(0u32..).map(|((name, kind), place)| (name, (place, kind))).collect();
        Ok((Self { socket: Some(socket), methods: places, tls }, port))
    }

    /// Place and kind of a method.
    pub fn method(&self, path: &str) -> Option<(u32, Kind)> {
        self.methods.get(path).copied()
    }
}

impl Rpc {
    /// Accepts what is there, a limited number in a poll. Out of descriptors it stops; `tick` tries again.
    pub(super) fn accept(&mut self, key: u64) {
        for _ in 0..ACCEPTED {
            let Some(listener) = self.listeners.get_mut(key) else { return };
            let Some(socket) = &listener.socket else { return };
            let (mut stream, peer) = match crowds::accept(socket, self.limits.vanished) {
                Accepted::Connection(stream, peer) => (stream, peer),
                Accepted::Aborted => continue,
                Accepted::Drained => return,
                Accepted::NoDescriptors(_) if self.make_room(key, false) => continue,
                Accepted::NoDescriptors(errno) | Accepted::Failed(errno) => {
                    return self.news.push(Event::AcceptFailed(errno));
                }
            };
            let tls = listener.tls.clone();
            if self.accepted >= self.limits.max_connections && !self.make_room(key, true) {
                self.refused_connections += 1;
                continue;
            }
            let (limits, queue) = (Rc::clone(&self.limits), Arc::clone(&self.queue));
            let registry = self.poll.registry();
            let mut registered = Ok(());
            let connection = self.connections.insert_with(|connection| {
                let interest = Interest::READABLE | Interest::WRITABLE;
                registered = registry.register(&mut stream, Token(connection as usize), interest);
                let notifier = Notifier::new(&queue, Due::Connection(connection));
                notifier.notify();
                let stream = Stream::Tcp(stream);
                Connection::accepted(
                    stream,
                    key,
                    tls.as_ref(),
                    peer.to_string(),
                    notifier,
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
        if !self.next_accepts.contains(&key) {
            self.next_accepts.push(key);
        }
    }

    /// Closes idle connections whose callers are none that is known, the longest idle of those first that have requested
    /// nothing; whether there were any.
    fn make_room(&mut self, listener: u64, even_if_requested: bool) -> bool {
        let now = Instant::now();
        if !self.crowds.look(now) {
            return false;
        }
        let mut idle = Vec::new();
        for key in self.connections.keys() {
            if let Some((requested, since)) = self.connections.get(key).and_then(Connection::worth)
                && (even_if_requested || !requested)
            {
                idle.push((requested, since, key));
            }
        }
        let evicted = self.crowds.choose(&mut idle, now);
        for (.., key) in &evicted {
            if let Some(connection) = self.connections.get_mut(*key) {
                connection.refuse();
            }
            self.end_connection(*key, "there are too many connections");
        }
        if even_if_requested || !evicted.is_empty() {
            self.news.push(Event::Crowded(listener));
        }
        !evicted.is_empty()
    }

    /// The caller of a call is a known one: its connection is not closed to make room for others.
    pub fn trust(&mut self, call: u64) {
        if let Some(call) = self.calls.get(call)
            && let Some(connection) = self.connections.get_mut(call.connection)
        {
            connection.trusted = true;
        }
    }
}
