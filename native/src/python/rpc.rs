//! Python binding of `rpc`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use super::answers::{AnswerTimes, Answering, Answers};
use super::budget::ByteBudget;
use crate::budget::Budget;
use crate::rpc::{self, Event, Kind, Limits, Metadata, News, Rpc, Seen, Status, TlsAcceptor, TlsConnector};

// The stub says what else each has.
kinds! {
    OPEN MESSAGE HALF_CLOSED RESET WRITABLE HEADERS END CONNECTED CLOSED ACCEPT_FAILED ANSWERED CROWDED HEAD
}

/// Of a call that ended, whether the peer may have looked at it; the stub has them.
const SEEN_MAYBE: u8 = 0;
const SEEN_REFUSED: u8 = 1;
const SEEN_NOT_SENT: u8 = 2;

/// Certificates of a server; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub(super) struct ServerTls {
    pub(super) acceptor: TlsAcceptor,
}

#[pymethods]
impl ServerTls {
    #[new]
    #[pyo3(signature = (certificate, key, client_ca=None))]
    fn new(certificate: &[u8], key: &[u8], client_ca: Option<&[u8]>) -> PyResult<Self> {
        let acceptor = rpc::acceptor(certificate, key, client_ca).map_err(PyValueError::new_err)?;
        Ok(Self { acceptor })
    }
}

/// Certificates of a client; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub(super) struct ClientTls {
    pub(super) connector: TlsConnector,
}

#[pymethods]
impl ClientTls {
    #[new]
    #[pyo3(signature = (ca, certificate=None, key=None))]
    fn new(ca: &[u8], certificate: Option<&[u8]>, key: Option<&[u8]>) -> PyResult<Self> {
        let connector = rpc::connector(ca, certificate.zip(key)).map_err(PyValueError::new_err)?;
        Ok(Self { connector })
    }
}

/// gRPC driven by an event loop; see the stub.
#[pyclass(unsendable, module = "kvscout_native", name = "Rpc")]
pub(super) struct RpcLoop {
    pub(super) rpc: Rpc,
    answering: Answering,
}

type PyMetadata = Vec<(String, MetadataValue)>;

#[derive(FromPyObject)]
enum MetadataValue {
    Text(String),
    Bytes(Vec<u8>),
}

fn metadata(given: PyMetadata) -> Metadata {
    given
        .into_iter()
        .map(|(name, value)| match value {
            MetadataValue::Text(text) => (name, text.into_bytes()),
            MetadataValue::Bytes(bytes) => (name, bytes),
        })
        .collect()
}

fn to_python<'py>(py: Python<'py>, metadata: &Metadata) -> PyResult<Bound<'py, PyTuple>> {
    let pairs = metadata.iter().map(|(name, value)| {
        let value = if name.ends_with("-bin") {
            PyBytes::new(py, value).into_any()
        } else {
            PyString::new(py, &String::from_utf8_lossy(value)).into_any()
        };
        (name.as_str(), value)
    });
    PyTuple::new(py, pairs.collect::<Vec<_>>())
}

/// The header, name by name, that cannot be sent.
fn no_metadata(name: String) -> PyErr {
    PyValueError::new_err(format!("metadata {name:?} cannot be sent"))
}

#[pymethods]
impl RpcLoop {
    #[new]
    #[pyo3(signature = (
        *, max_message_bytes=64 << 20, max_streams=1_000, max_connections=10_000, keepalive_seconds=5.0,
        keepalive_timeout_seconds=4.0, handshake_seconds=10.0, queue_bytes=256 << 20,
        budget=None, message_seconds=60.0, message_window_seconds=10.0, max_age_seconds=None, clock=0.0
    ))]
    #[allow(clippy::too_many_arguments)] // the Python signature
    fn new(
        max_message_bytes: usize,
        max_streams: u32,
        max_connections: usize,
        keepalive_seconds: f64,
        keepalive_timeout_seconds: f64,
        handshake_seconds: f64,
        queue_bytes: usize,
        budget: Option<&ByteBudget>,
        message_seconds: f64,
        message_window_seconds: f64,
        max_age_seconds: Option<f64>,
        clock: f64,
    ) -> PyResult<Self> {
        let limits = Limits {
            max_message: max_message_bytes,
            max_streams,
            max_connections,
            budget: match budget {
                Some(shared) => Arc::clone(&shared.budget),
                None => Budget::new(queue_bytes, queue_bytes),
            },
            message: Duration::from_secs_f64(message_seconds),
            message_window: Duration::from_secs_f64(message_window_seconds),
            handshake: Duration::from_secs_f64(handshake_seconds),
            keepalive: Duration::from_secs_f64(keepalive_seconds),
            keepalive_timeout: Duration::from_secs_f64(keepalive_timeout_seconds),
            max_age: max_age_seconds.map(Duration::from_secs_f64),
            ..Limits::default()
        };
        Ok(Self { rpc: Rpc::new(limits)?, answering: Answering::new(clock) })
    }

    fn fileno(&self) -> i32 {
        self.rpc.fd()
    }

    fn poll<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = self.rpc.poll()?;
        let list = PyList::empty(py);
        for event in events {
            if !self.answering.take(&mut self.rpc, &event) {
                list.append(event_tuple(py, event)?)?;
            }
        }
        Ok(list)
    }

    fn flush(&mut self) -> bool {
        self.rpc.flush()
    }

    fn tick(&mut self) {
        self.rpc.tick();
    }

    fn stats(&self) -> rpc::Stats {
        self.rpc.stats()
    }

    #[pyo3(signature = (host, port, methods, tls=None))]
    fn listen(
        &mut self,
        host: &str,
        port: u16,
        methods: Vec<(String, bool, bool)>,
        tls: Option<&ServerTls>,
    ) -> PyResult<(u64, u16)> {
        let address = address(host, port)?;
        let kind = |(name, request_streaming, response_streaming)| {
            (name, Kind { request_streaming, response_streaming })
        };
        let methods = methods.into_iter().map(kind).collect();
        Ok(self.rpc.listen(address, methods, tls.map(|tls| tls.acceptor.clone()))?)
    }

    fn answer_method(
        &mut self,
        listener: u64,
        place: u32,
        answers: Py<Answers>,
        tenant: String,
        times: Py<AnswerTimes>,
    ) {
        self.answering.add_method((listener, place), answers, tenant, times);
    }

    fn answer_stream(&mut self, call: u64, answers: Py<Answers>, tenant: String) {
        self.answering.add_stream(call, answers, tenant);
    }

    #[pyo3(signature = (listener, tls=None))]
    fn set_tls(&mut self, listener: u64, tls: Option<&ServerTls>) {
        self.rpc.set_tls(listener, tls.map(|tls| tls.acceptor.clone()));
    }

    fn stop_listening(&mut self, listener: u64) {
        self.rpc.stop_listening(listener);
    }

    fn leave(&mut self, listener: u64) {
        self.rpc.leave(listener);
    }

    fn close_connections(&mut self, listener: u64) {
        self.rpc.close_connections(listener);
    }

    #[pyo3(signature = (host, port, authority, tls=None, server_name=""))]
    fn connect(
        &mut self,
        host: &str,
        port: u16,
        authority: String,
        tls: Option<&ClientTls>,
        server_name: &str,
    ) -> PyResult<u64> {
        let tls = tls.map(|tls| (tls.connector.clone(), server_name));
        self.rpc.connect(address(host, port)?, authority, tls).map_err(PyOSError::new_err)
    }

    fn close(&mut self, connection: u64) {
        self.rpc.close(connection);
    }

    #[pyo3(signature = (connection, method, metadata_pairs, timeout_us=None, message=None, end=false))]
    fn call(
        &mut self,
        connection: u64,
        method: &str,
        metadata_pairs: PyMetadata,
        timeout_us: Option<u64>,
        message: Option<&[u8]>,
        end: bool,
    ) -> PyResult<Option<u64>> {
        let call =
            self.rpc.call(connection, method, &metadata(metadata_pairs), timeout_us).map_err(no_metadata)?;
        if let Some(call) = call {
            if let Some(message) = message {
                self.rpc.send(call, message);
            }
            if end {
                self.rpc.half_close(call);
            }
        }
        Ok(call)
    }

    #[pyo3(signature = (call, message, metadata_pairs=None))]
    fn answer(&mut self, call: u64, message: &[u8], metadata_pairs: Option<PyMetadata>) -> PyResult<()> {
        self.rpc.send(call, message);
        let trailers = metadata_pairs.map(metadata).unwrap_or_default();
        self.rpc.finish(call, &Status::new(0, ""), &trailers).map_err(no_metadata)
    }

    fn headers(&mut self, call: u64, metadata_pairs: PyMetadata) -> PyResult<()> {
        self.rpc.headers(call, &metadata(metadata_pairs)).map_err(no_metadata)
    }

    fn send(&mut self, call: u64, message: &[u8]) -> bool {
        self.rpc.send(call, message)
    }

    fn half_close(&mut self, call: u64) {
        self.rpc.half_close(call);
    }

    fn finish(&mut self, call: u64, code: u8, details: String, metadata_pairs: PyMetadata) -> PyResult<()> {
        self.answering.forget(call);
        let status = Status { code, message: details };
        self.rpc.finish(call, &status, &metadata(metadata_pairs)).map_err(no_metadata)
    }

    fn reset(&mut self, call: u64) {
        self.rpc.reset(call);
    }

    #[pyo3(signature = (call, tenant=None))]
    fn admit(&mut self, call: u64, tenant: Option<&str>) {
        self.rpc.admit(call, tenant);
    }

    fn consumed(&mut self, call: u64, message_bytes: usize) {
        self.rpc.consumed(call, message_bytes);
    }

    fn trust(&mut self, call: u64) {
        self.rpc.trust(call);
    }

    fn peer(&self, call: u64) -> Option<&str> {
        self.rpc.peer(call)
    }
}

pub(super) fn address(host: &str, port: u16) -> PyResult<SocketAddr> {
    let ip = host.parse().map_err(|_| PyValueError::new_err(format!("{host:?} is not an IP address")))?;
    Ok(SocketAddr::new(ip, port))
}

fn event_tuple<'py>(py: Python<'py>, event: Event) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        Event::Open { call, listener, method, metadata, timeout_us, message } => {
            let message = message.map(|message| PyBytes::new(py, &message));
            (OPEN, call, listener, method, to_python(py, &metadata)?, timeout_us, message).into_pyobject(py)
        }
        Event::Head { call, listener, method, metadata } => {
            (HEAD, call, listener, method, to_python(py, &metadata)?).into_pyobject(py)
        }
        Event::Call(call, news) => match news {
            News::Message(message) => (MESSAGE, call, PyBytes::new(py, &message)).into_pyobject(py),
            News::HalfClosed => (HALF_CLOSED, call).into_pyobject(py),
            News::Headers(metadata) => (HEADERS, call, to_python(py, &metadata)?).into_pyobject(py),
            News::Ended(status, metadata, seen) => {
                let seen = match seen {
                    Seen::Maybe => SEEN_MAYBE,
                    Seen::Refused => SEEN_REFUSED,
                    Seen::NotSent => SEEN_NOT_SENT,
                };
                (END, call, status.code, status.message, to_python(py, &metadata)?, seen).into_pyobject(py)
            }
            News::Answered(answer) => {
                let (headers, trailers) = (to_python(py, &answer.headers)?, to_python(py, &answer.trailers)?);
                let message = PyBytes::new(py, &answer.message);
                let Status { code, message: details } = answer.status;
                (ANSWERED, call, headers, message, code, details, trailers).into_pyobject(py)
            }
            News::Reset => (RESET, call).into_pyobject(py),
            News::Writable => (WRITABLE, call).into_pyobject(py),
            News::Begins(_) => unreachable!("reported as Open"),
        },
        Event::Connected(connection) => (CONNECTED, connection).into_pyobject(py),
        Event::Closed(connection, reason) => (CLOSED, connection, reason).into_pyobject(py),
        Event::AcceptFailed(number) => {
            let text = io::Error::from_raw_os_error(number).to_string();
            (ACCEPT_FAILED, number, text).into_pyobject(py)
        }
        Event::Crowded(listener) => (CROWDED, listener).into_pyobject(py),
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("RPC_EVENTS", std::collections::HashMap::from(KINDS))?;
    module.add_class::<ServerTls>()?;
    module.add_class::<ClientTls>()?;
    module.add_class::<RpcLoop>()
}
