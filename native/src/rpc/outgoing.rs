//! Connections and calls that are made here.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::Request;
use http::header::{CONTENT_TYPE, HeaderValue, TE};
use mio::net::TcpStream;
use mio::{Interest, Token};
use tokio_rustls::TlsConnector;

use super::call::{self, Call};
use super::connection::{Connection, Side};
use super::framing::{Deframer, Encoding};
use super::metadata::{self, Metadata};
use super::socket::{Stream, configure};
use super::wake::{Due, Notifier};
use super::{Rpc, tls};

impl Rpc {
    /// Begins to connect; `Connected` or `Closed` follows.
    ///
    /// # Errors
    /// There is no socket to be had, or no way to the address.
    pub fn connect(
        &mut self,
        address: SocketAddr,
        authority: String,
        tls: Option<(TlsConnector, &str)>,
    ) -> Result<u64, String> {
        let name =
            tls.map(|(connector, name)| tls::server_name(name).map(|name| (connector, name))).transpose()?;
        let stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
        configure(&stream, self.limits.vanished).map_err(|error| error.to_string())?;
        let (mut stream, peer) = (Stream::Tcp(stream), address.to_string());
        let queue = Arc::clone(&self.queue);
        let (limits, registry) = (Rc::clone(&self.limits), self.poll.registry());
        let mut registered = Ok(());
        let key = self.connections.insert_with(|key| {
            let interest = Interest::READABLE | Interest::WRITABLE;
            registered = registry.register(stream.source(), Token(key as usize), interest);
            let notifier = Notifier::new(&queue, Due::Connection(key));
            Connection::connecting(stream, name, authority, peer, notifier, limits, Instant::now())
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
        let (queue, limits) = (&self.queue, &self.limits);
        let key = self.calls.insert_with(|key| {
            let notifier = Notifier::new(queue, Due::Stream(key));
            Call::waiting(connection, notifier, request, deframer, limits)
        });
        on.streams.insert(key);
        if let Side::Client { waiting, .. } = &mut on.side {
            waiting.push(key);
        }
        self.open_waiting(connection);
        Ok(Some(key))
    }

    /// Opens the streams that wait, as far as the peer takes them.
    pub(super) fn open_waiting(&mut self, connection: u64) {
        let Some(on) = self.connections.get_mut(connection) else { return };
        if !on.is_open() {
            return;
        }
        let waker = on.notifier.waker().clone();
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
            self.with_call(key, |call, emit| call.broke(&error, emit));
        }
    }

    /// Sends no more messages of a call that was made here.
    pub fn half_close(&mut self, call: u64) {
        if let Some(call) = self.calls.get_mut(call) {
            call.close();
        }
    }
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
