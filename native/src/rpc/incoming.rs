//! Listeners, and calls that come to them.

use std::io;
use std::net::SocketAddr;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Response, StatusCode};
use mio::{Interest, Token};
use tokio_rustls::TlsAcceptor;

use super::call::{self, Call, Kind};
use super::connection::{Incoming, Side};
use super::framing::{Deframer, Encoding};
use super::listener::{LISTENER, Listener};
use super::metadata::{self, Metadata};
use super::status::{self, Status};
use super::wake::{Due, Notifier};
use super::{Event, Rpc};
use crate::budget::Charge;

impl Rpc {
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
        let (mut listener, port) = Listener::bind(address, methods, tls)?;
        let registry = self.poll.registry();
        let mut registered = Ok(());
        let key = self.listeners.insert_with(|key| {
            if let Some(socket) = &mut listener.socket {
                registered = registry.register(socket, Token(key as usize | LISTENER), Interest::READABLE);
            }
            listener
        });
        registered.map(|()| (key, port))
    }

    /// New connections use other certificates.
    pub fn set_tls(&mut self, listener: u64, tls: Option<TlsAcceptor>) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.tls = tls;
        }
    }

    /// Takes no new connections any more; calls on those there are are served.
    pub fn stop_listening(&mut self, listener: u64) {
        if let Some(listener) = self.listeners.get_mut(listener) {
            listener.socket = None;
        }
    }

    /// Asks the peers of a listener to open no more calls on the connections they have.
    pub fn leave(&mut self, listener: u64) {
        for key in self.connections_of(listener) {
            self.connections.get_mut(key).expect("a key in use").leave();
        }
    }

    /// Closes a listener and its connections immediately.
    pub fn close_connections(&mut self, listener: u64) {
        self.listeners.remove(listener);
        for key in self.connections_of(listener) {
            self.end_connection(key, "the server closes it");
        }
    }

    fn connections_of(&self, listener: u64) -> Vec<u64> {
        let of = |key: &u64| {
            let connection = self.connections.get(*key);
            connection.is_some_and(|connection| matches!(connection.side, Side::Server(by) if by == listener))
        };
        self.connections.keys().into_iter().filter(of).collect()
    }

    /// Answers or begins a call that came.
    pub(super) fn begin(&mut self, connection: u64, (request, mut respond): Incoming) {
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
        let refused = if self.limits.budget.room() == 0 {
            self.refused_calls += 1;
            Some(Status::new(status::RESOURCE_EXHAUSTED, status::FULL))
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
        let (queue, limits) = (&self.queue, &self.limits);
        let key = self.calls.insert_with(|key| {
            let notifier = Notifier::new(queue, Due::Stream(key));
            Call::accepted(connection, notifier, kind, receive, respond, deframer, limits)
        });
        from.streams.insert(key);
        let call = self.calls.get_mut(key).expect("just stored");
        if let Some(status) = refused {
            call.finish(&status, HeaderMap::new());
        } else if let Some((place, _)) = method {
            let metadata = metadata::visible(&head.headers);
            call.head_bytes = metadata.iter().map(|(name, value)| name.len() + value.len()).sum();
            self.held += call.head_bytes;
            call.meta = Some(call::Meta {
                listener: by,
                method: place,
                metadata,
                timeout_us: head
                    .headers
                    .get("grpc-timeout")
                    .and_then(|value| metadata::timeout_us(value.as_bytes())),
            });
            if kind.request_streaming {
                self.with_call(key, |call, emit| call.begin(emit));
            }
        }
        self.with_call(key, Call::drive);
        if let Some(call) = self.calls.get(key)
            && call.awaits_request()
            && let Some(call::Meta { listener, method, metadata, .. }) = call.meta.clone()
        {
            self.news.push(Event::Head { call: key, listener, method, metadata });
        }
    }

    /// The caller of a call that came is known and may make it: messages larger than the first window may come, charged
    /// to the tenant.
    pub fn admit(&mut self, call: u64, tenant: Option<&str>) {
        let Some(admitted) = self.calls.get(call) else { return };
        if let Some(connection) = self.connections.get_mut(admitted.connection) {
            connection.admit();
        }
        let charge = Charge::new(&self.limits.budget, tenant, 1);
        self.with_call(call, |call, _| call.admit(charge));
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

    /// Ends a call that came.
    ///
    /// # Errors
    /// The metadata's name that cannot be sent.
    pub fn finish(&mut self, call: u64, status: &Status, metadata: &Metadata) -> Result<(), String> {
        let mut trailers = HeaderMap::new();
        metadata::add(&mut trailers, metadata)?;
        self.with_call(call, |call, _| call.finish(status, trailers));
        Ok(())
    }
}

fn is_grpc(method: &Method, headers: &HeaderMap) -> bool {
    let content = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    method == Method::POST && content.is_some_and(|content| content.starts_with(b"application/grpc"))
}
