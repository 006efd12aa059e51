//! The servers of an `Http`: listeners, their connections, and the calls on them.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use mio::{Interest, Token};
use tokio_rustls::TlsAcceptor;

use super::head::Headers;
use super::server::{News, Room, Server, ServerLimits};
use super::wire::Wire;
use super::{AHEAD_OF_ALL, Connection, Event, Http, LISTENER, Listener, Side};
use crate::budget::Charge;
use crate::rpc::crowds::{self, Accepted};
use crate::rpc::keyed::Keyed;
use crate::rpc::poll_budget::ACCEPTED;
use crate::rpc::socket::{Stream, listen};

impl Http {
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
        let mut socket = listen(address)?;
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

    /// Takes no new connections any more; those there are end behind their next answer, or soon without a request.
    pub fn stop_listening(&mut self, listener: u64) {
        self.listeners.remove(listener);
        let now = Instant::now();
        for key in self.connections_of(listener) {
            if let Some(Connection { side: Side::Server { server, .. }, .. }) = self.connections.get_mut(key)
            {
                server.leave(now);
            }
        }
    }

    /// Closes the connections of a listener immediately.
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

    /// Accepts what is there, a limited number in a poll. Out of descriptors it stops; `tick` tries again.
    pub(super) fn accept(&mut self, key: u64) {
        for _ in 0..ACCEPTED {
            let Some(listener) = self.listeners.get_mut(key) else { return };
            let (mut stream, peer) =
                match crowds::accept(&listener.socket, self.vanished.max(listener.limits.write)) {
                    Accepted::Connection(stream, peer) => (stream, peer),
                    Accepted::Aborted => continue,
                    Accepted::Drained => return,
                    Accepted::NoDescriptors(_) if self.make_room(key, false) => continue,
                    Accepted::NoDescriptors(errno) | Accepted::Failed(errno) => {
                        return self.news.push(Event::AcceptFailed(errno));
                    }
                };
            let full = listener.connections >= listener.limits.connections;
            if full && !self.make_room(key, true) {
                self.refused += 1;
                continue;
            }
            let Some(listener) = self.listeners.get_mut(key) else { return };
            let (tls, limits) = (listener.tls.clone(), Rc::clone(&listener.limits));
            listener.connections += 1;
            let registry = self.poll.registry();
            let mut registered = Ok(());
            let connection = self.connections.insert_with(|connection| {
                let interest = Interest::READABLE | Interest::WRITABLE;
                registered = registry.register(&mut stream, Token(connection as usize), interest);
                let server = Box::new(Server::new(key, limits, Instant::now()));
                Connection {
                    wire: Wire::accepted(Stream::Tcp(stream), tls.as_ref()),
                    side: Side::Server { server, call: None, feeder: None },
                    peer: peer.to_string(),
                    ahead: 0,
                    is_due: false,
                }
            });
            match registered {
                Ok(()) => self.mark_due(connection),
                Err(error) => {
                    self.close(connection, "it cannot be watched");
                    return self.news.push(Event::AcceptFailed(error.raw_os_error().unwrap_or(0)));
                }
            }
        }
        if !self.next_accepts.contains(&key) {
            self.next_accepts.push(key);
        }
    }

    /// Closes idle connections whose clients are none that is known, the longest idle of those first that have requested
    /// nothing; whether there were any.
    fn make_room(&mut self, listener: u64, even_if_requested: bool) -> bool {
        let now = Instant::now();
        if !self.crowds.look(now) {
            return false;
        }
        let mut idle = Vec::new();
        for key in self.connections_of(listener) {
            if let Some(Connection { side: Side::Server { server, .. }, .. }) = self.connections.get(key)
                && let Some((requested, since)) = server.worth()
                && (even_if_requested || !requested)
            {
                idle.push((requested, since, key));
            }
        }
        let evicted = self.crowds.choose(&mut idle, now);
        for (.., key) in &evicted {
            self.close(*key, "there are too many connections");
        }
        if even_if_requested || !evicted.is_empty() {
            self.news.push(Event::Crowded(listener));
        }
        !evicted.is_empty()
    }

    /// The client of a call is a known one: its connection is not closed to make room for others.
    pub fn trust(&mut self, call: u64) {
        if let Some((_, Connection { side: Side::Server { server, .. }, .. })) = self.call(call) {
            server.trusted = true;
        }
    }

    pub(super) fn drive_server(&mut self, key: u64) {
        let Some(connection) = self.connections.get_mut(key) else { return };
        let Connection { wire, side: Side::Server { server, call, feeder }, peer, ahead, .. } = connection
        else {
            return;
        };
        let (calls, news) = (&mut self.calls, &mut self.news);
        let now = Instant::now();
        let listener = server.listener;
        let reads_ahead = self.ahead <= AHEAD_OF_ALL;
        let open = server.drive(wire, &mut self.scratch, now, reads_ahead, &mut |said| {
            record(said, key, listener, peer, call, calls, news);
        });
        if !server.busy
            && let Some(over) = call.take()
        {
            calls.remove(over);
        }
        let before = std::mem::replace(ahead, server.ahead(wire));
        self.ahead = self.ahead + *ahead - before;
        let crowded = self.ahead > AHEAD_OF_ALL && *ahead > before && server.refuse_head(wire, now);
        if server.has_room_again(wire.unsent()) {
            match (*feeder, *call) {
                (Some(feeder), _) => {
                    if let Some(Connection { side: Side::Client(client), .. }) =
                        self.connections.get_mut(feeder)
                    {
                        client.paused = None;
                        client.report_mut().listening_since =
                            self.clock + now.duration_since(self.began).as_secs_f64();
                        self.mark_due(feeder);
                    }
                }
                (None, Some(call)) => news.push(Event::Writable(call)),
                (None, None) => {}
            }
        }
        if crowded {
            self.refused += 1;
            self.mark_due(key);
        }
        if !open {
            self.close(key, "the client has gone");
        }
    }

    /// The connection of a call.
    pub(super) fn call(&mut self, call: u64) -> Option<(u64, &mut Connection)> {
        let key = *self.calls.get(call)?;
        Some((key, self.connections.get_mut(key)?))
    }

    /// The body of a request is wanted that did not come with its head, and charged.
    pub fn want_body(&mut self, call: u64, charge: Option<Arc<Charge>>) {
        let Some(&key) = self.calls.get(call) else { return };
        let Some(Connection { wire, side: Side::Server { server, call: of, .. }, peer, .. }) =
            self.connections.get_mut(key)
        else {
            return;
        };
        let (calls, news) = (&mut self.calls, &mut self.news);
        let listener = server.listener;
        server.want_body(wire, charge, Instant::now(), &mut |said| {
            record(said, key, listener, peer, of, calls, news);
        });
        self.mark_due(key);
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

    pub(super) fn write_from(&mut self, call: u64, data: &[u8], from: Option<u64>) -> Room {
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
            self.mark_due(key);
        }
        room
    }

    /// Ends an answer.
    pub fn end(&mut self, call: u64) {
        let Some((key, Connection { wire, side: Side::Server { server, .. }, .. })) = self.call(call) else {
            return;
        };
        if server.end(wire) {
            self.mark_due(key);
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
}

/// What a server's connection says, as an event.
pub fn record(
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
        News::BodyFailed(status, text) => Event::BodyFailed(call, status, text),
        News::Gone | News::Begins(..) => {
            calls.remove(call);
            Event::Gone(call)
        }
    });
}
