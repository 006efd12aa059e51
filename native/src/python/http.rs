//! Python binding of `http`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::budget::ByteCharge;
use super::rpc::{ClientTls, RpcLoop, ServerTls, address};
use crate::http::{
    self, Dialect, Event, EventRelay, Form, Headers, Http, Meaning, Messages, Outcome, Peer, Report, Room,
    ServerLimits,
};

// The stub says what else each has.
kinds! {
    REQUEST BODY BODY_FAILED GONE WRITABLE ANSWER FIRST CHUNK FULL ENDED ACCEPT_FAILED RPC_DUE AGAIN
    CROWDED
}

/// HTTP driven by an event loop; see the stub.
#[pyclass(unsendable, module = "kvscout_native", name = "Http")]
struct HttpLoop {
    http: Http,
    servers: Servers,
    /// Of answers that go to calls of gRPC servers: which server.
    passed_to: HashMap<u64, usize>,
}

/// gRPC servers that answers go to.
#[derive(Default)]
struct Servers {
    /// Each with how many answers go to it now.
    slots: Vec<Option<(Py<RpcLoop>, usize)>>,
    touched: Vec<usize>,
}

impl Servers {
    fn add(&mut self, server: Py<RpcLoop>) -> usize {
        let same =
            |slot: &Option<(Py<RpcLoop>, usize)>| slot.as_ref().is_some_and(|(other, _)| other.is(&server));
        if let Some(at) = self.slots.iter().position(same) {
            self.slots[at].as_mut().expect("matched").1 += 1;
            return at;
        }
        let at = self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[at] = Some((server, 1));
        at
    }

    fn release(&mut self, at: usize) {
        if let Some((_, uses)) = &mut self.slots[at] {
            *uses -= 1;
            if *uses == 0 {
                self.slots[at] = None;
            }
        }
    }
}

struct Sending<'a, 'py> {
    py: Python<'py>,
    servers: &'a mut Servers,
}

impl Messages for Sending<'_, '_> {
    fn send(&mut self, server: usize, call: u64, message: &[u8]) -> bool {
        let Some((rpc, _)) = &self.servers.slots[server] else { return true };
        if !self.servers.touched.contains(&server) {
            self.servers.touched.push(server);
        }
        rpc.borrow_mut(self.py).rpc.send(call, message)
    }
}

impl HttpLoop {
    /// Events of a poll, as Python gets them.
    fn events_of<'py>(
        &mut self,
        py: Python<'py>,
        poll: impl FnOnce(&mut Http, &mut dyn Messages) -> io::Result<(Vec<Event>, bool)>,
    ) -> PyResult<Bound<'py, PyList>> {
        let (events, again) = poll(&mut self.http, &mut Sending { py, servers: &mut self.servers })?;
        let list = PyList::empty(py);
        for event in events {
            if let Event::Ended(answer, ..) = &event
                && let Some(at) = self.passed_to.remove(answer)
            {
                // Before it is released: what was sent last has to leave.
                self.flush_touched(py, &list)?;
                self.servers.release(at);
            }
            list.append(event_tuple(py, event)?)?;
        }
        self.flush_touched(py, &list)?;
        if again {
            list.append((AGAIN,))?;
        }
        Ok(list)
    }

    fn flush_touched(&mut self, py: Python<'_>, list: &Bound<'_, PyList>) -> PyResult<()> {
        for at in std::mem::take(&mut self.servers.touched) {
            if let Some((rpc, _)) = &self.servers.slots[at]
                && rpc.borrow_mut(py).rpc.flush()
            {
                list.append((RPC_DUE, rpc.clone_ref(py)))?;
            }
        }
        Ok(())
    }
}

#[pymethods]
impl HttpLoop {
    #[new]
    #[pyo3(signature = (clock, *, vanished_seconds=60.0))]
    fn new(clock: f64, vanished_seconds: f64) -> PyResult<Self> {
        let http = Http::new(clock, seconds(vanished_seconds))?;
        Ok(Self { http, servers: Servers::default(), passed_to: HashMap::new() })
    }

    fn fileno(&self) -> i32 {
        self.http.fd()
    }

    fn poll<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.events_of(py, Http::poll)
    }

    fn flush<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.events_of(py, |http, messages| Ok(http.flush(messages)))
    }

    fn tick(&mut self) -> bool {
        self.http.tick()
    }

    fn stats(&self) -> http::Stats {
        self.http.stats()
    }

    #[pyo3(signature = (
        host, port, *, connections, head_bytes, headers, body_bytes, idle_seconds, body_seconds,
        body_window_seconds=10.0, body_window_bytes=10 << 10, write_seconds, tls=None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn listen(
        &mut self,
        host: &str,
        port: u16,
        connections: usize,
        head_bytes: usize,
        headers: usize,
        body_bytes: usize,
        idle_seconds: f64,
        body_seconds: f64,
        body_window_seconds: f64,
        body_window_bytes: usize,
        write_seconds: f64,
        tls: Option<&ServerTls>,
    ) -> PyResult<(u64, u16)> {
        let limits = ServerLimits {
            connections,
            head_bytes,
            headers,
            body_bytes,
            idle: seconds(idle_seconds),
            body: seconds(body_seconds),
            body_window: seconds(body_window_seconds),
            body_window_bytes,
            write: seconds(write_seconds),
        };
        Ok(self.http.listen(address(host, port)?, limits, tls.map(|tls| http::acceptor(&tls.acceptor)))?)
    }

    fn set_tls(&mut self, listener: u64, tls: &ServerTls) {
        self.http.set_tls(listener, Some(http::acceptor(&tls.acceptor)));
    }

    fn stop_listening(&mut self, listener: u64) {
        self.http.stop_listening(listener);
    }

    fn close_connections(&mut self, listener: u64) {
        self.http.close_connections(listener);
    }

    fn trust(&mut self, call: u64) {
        self.http.trust(call);
    }

    fn open_connections(&self, listener: u64) -> usize {
        self.http.connections_of(listener).len()
    }

    #[pyo3(signature = (call, charge=None))]
    fn want_body(&mut self, call: u64, charge: Option<&ByteCharge>) {
        self.http.want_body(call, charge.map(|held| Arc::clone(&held.charge)));
    }

    fn start(&mut self, call: u64, status: u16, headers: Headers) -> PyResult<()> {
        self.http.start(call, status, &headers, None).map_err(PyValueError::new_err)
    }

    fn respond(&mut self, call: u64, status: u16, headers: Headers, body: &[u8]) -> PyResult<()> {
        let length = Some(body.len() as u64);
        self.http.start(call, status, &headers, length).map_err(PyValueError::new_err)?;
        self.http.write(call, body);
        self.http.end(call);
        Ok(())
    }

    fn write(&mut self, call: u64, data: &[u8]) -> Option<bool> {
        match self.http.write(call, data) {
            Room::Yes => Some(true),
            Room::Full => Some(false),
            Room::Gone => None,
        }
    }

    fn end(&mut self, call: u64) {
        self.http.end(call);
    }

    fn handled(&mut self, call: u64) {
        self.http.handled(call);
    }

    #[pyo3(signature = (
        origin, peer, connect_seconds, method, target, host, headers, body, tls=None, server_name=""
    ))]
    #[allow(clippy::too_many_arguments)]
    fn send(
        &mut self,
        origin: &str,
        peer: Option<(String, u16)>,
        connect_seconds: f64,
        method: &str,
        target: &str,
        host: &str,
        headers: Headers,
        body: &[u8],
        tls: Option<&ClientTls>,
        server_name: &str,
    ) -> PyResult<Option<u64>> {
        let request =
            http::write_request(method, target, host, &headers, body).map_err(PyValueError::new_err)?;
        let peer = match peer {
            None => None,
            Some((host, port)) => {
                let tls = match tls {
                    None => None,
                    Some(tls) => {
                        Some(http::connector(&tls.connector, server_name).map_err(PyValueError::new_err)?)
                    }
                };
                Some(Peer { address: address(&host, port)?, tls, connect: seconds(connect_seconds) })
            }
        };
        self.http.send(origin, peer, method, &request).map_err(|error| match error.raw_os_error() {
            Some(number) => PyOSError::new_err((number, error.to_string())),
            None => PyOSError::new_err(error.to_string()),
        })
    }

    fn keep(&mut self, answer: u64, most: usize) {
        self.http.keep(answer, most);
    }

    #[pyo3(signature = (answer, events=None))]
    fn stream(&mut self, answer: u64, events: Option<Events<'_>>) -> PyResult<()> {
        let events = events.map(relay).transpose()?;
        self.http.stream(answer, events);
        Ok(())
    }

    fn pass_to_call(
        &mut self,
        answer: u64,
        call: u64,
        ends: bool,
        write_seconds: f64,
        first: &[u8],
        events: Option<Events<'_>>,
    ) -> PyResult<()> {
        let events = events.map(relay).transpose()?;
        self.http.pass_to_call(answer, (call, ends), events, seconds(write_seconds), first.to_vec());
        Ok(())
    }

    fn pass_to_messages(
        &mut self,
        answer: u64,
        server: Py<RpcLoop>,
        call: u64,
        write_seconds: f64,
        first: &[u8],
        events: Events<'_>,
    ) -> PyResult<()> {
        let events = relay(events)?;
        let at = self.servers.add(server);
        if let Some(before) = self.passed_to.insert(answer, at) {
            self.servers.release(before);
        }
        let write = seconds(write_seconds);
        self.http.pass_to_messages(answer, (at, call), events, write, first.to_vec());
        Ok(())
    }

    fn resume(&mut self, answer: u64) {
        self.http.resume(answer);
    }

    fn report(&mut self, answer: u64) -> Option<Report> {
        self.http.report(answer).cloned()
    }

    fn abort(&mut self, answer: u64) {
        self.http.abort(answer);
    }

    fn close_idle(&mut self, origins: &str) {
        self.http.close_idle(origins);
    }
}

/// A stream of events, for tests to compare with the reference.
#[pyclass(unsendable, module = "kvscout_native", name = "EventRelay")]
struct PyEventRelay {
    relay: EventRelay,
}

#[pymethods]
impl PyEventRelay {
    #[new]
    #[pyo3(signature = (form, dialect, max_tokens=None))]
    fn new(form: &str, dialect: PyRef<'_, PyDialect>, max_tokens: Option<u64>) -> PyResult<Self> {
        Ok(Self { relay: relay((form, dialect, max_tokens))? })
    }

    #[pyo3(signature = (data, now, ends=false))]
    fn feed<'py>(&mut self, py: Python<'py>, data: &[u8], now: f64, ends: bool) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.relay.feed(data, now, ends))
    }

    #[getter]
    fn over(&self) -> bool {
        self.relay.over
    }

    #[getter]
    fn failure(&self) -> &str {
        self.relay.failure.unwrap_or_default()
    }

    #[getter]
    fn report(&self) -> Report {
        self.relay.report.clone()
    }
}

/// Form and dialect of a stream of events, and the length at which its output ends.
type Events<'a> = (&'a str, PyRef<'a, PyDialect>, Option<u64>);

fn relay((form, dialect, max_tokens): Events<'_>) -> PyResult<EventRelay> {
    let form = match form {
        "bytes" => Form::Bytes,
        "without usage" => Form::WithoutUsage,
        "messages" => Form::Messages,
        _ => return Err(PyValueError::new_err(format!("there is no form {form:?}"))),
    };
    Ok(EventRelay::new(form, dialect.dialect.clone(), max_tokens))
}

/// Where the fields stand in the documents of one API; see the stub.
#[pyclass(frozen, module = "kvscout_native", name = "Dialect")]
struct PyDialect {
    dialect: Arc<Dialect>,
}

#[pymethods]
impl PyDialect {
    #[new]
    #[pyo3(signature = (marks, *, cumulative))]
    fn new(marks: Vec<(String, Vec<String>)>, cumulative: bool) -> PyResult<Self> {
        let mut flat = Vec::new();
        for (name, marks) in &marks {
            let meaning = Meaning::of(name)
                .ok_or_else(|| PyValueError::new_err(format!("no field of a document is {name:?}")))?;
            flat.extend(marks.iter().map(|mark| (meaning, &**mark)));
        }
        Ok(Self { dialect: Arc::new(Dialect::new(flat, cumulative)) })
    }
}

/// A time that may be longer than can be represented.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX / 4)
}

fn event_tuple<'py>(py: Python<'py>, event: Event) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        Event::Request { call, listener, head, peer, body } => {
            let body = body.map(|body| PyBytes::new(py, &body));
            (REQUEST, call, listener, head.method, head.target, head.headers, peer, body).into_pyobject(py)
        }
        Event::Body(call, body) => (BODY, call, PyBytes::new(py, &body)).into_pyobject(py),
        Event::BodyFailed(call, status, text) => (BODY_FAILED, call, status, text).into_pyobject(py),
        Event::Gone(call) => (GONE, call).into_pyobject(py),
        Event::Writable(call) => (WRITABLE, call).into_pyobject(py),
        Event::Answer(answer, status, headers) => (ANSWER, answer, status, headers).into_pyobject(py),
        Event::First(answer) => (FIRST, answer).into_pyobject(py),
        Event::Chunk(answer, data) => (CHUNK, answer, PyBytes::new(py, &data)).into_pyobject(py),
        Event::Full(answer) => (FULL, answer).into_pyobject(py),
        Event::Ended(answer, end, report, body) => {
            (ENDED, answer, outcome(end.outcome), end.text, *report, PyBytes::new(py, &body))
                .into_pyobject(py)
        }
        Event::AcceptFailed(number) => {
            let text = io::Error::from_raw_os_error(number).to_string();
            (ACCEPT_FAILED, number, text).into_pyobject(py)
        }
        Event::Crowded(listener) => (CROWDED, listener).into_pyobject(py),
    }
}

/// What Python calls it; "" = all is well.
fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Whole => "",
        Outcome::Unreachable => "unreachable",
        Outcome::Broken => "broken",
        Outcome::Protocol => "protocol",
        Outcome::Resources => "resources",
        Outcome::SinkGone => "sink gone",
        Outcome::SinkStalled => "sink stalled",
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("HTTP_EVENTS", std::collections::HashMap::from(KINDS))?;
    module.add_class::<PyDialect>()?;
    module.add_class::<PyEventRelay>()?;
    module.add_class::<HttpLoop>()
}
