//! The client's side of a connection: a request, its answer, then the next request.

use std::io;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::body::Decoder;
use super::events::{EventRelay, Report};
use super::head::{self, AnswerHead};
use super::wire::{Filled, Wire};

/// Longest wait for the end of a body whose last event came; after it the connection can be used again.
const TRAILER: Duration = Duration::from_secs(1);
/// Idle connections are kept this long: see `http.py`.
const IDLE: Duration = Duration::from_secs(4);
const HEAD_BYTES: usize = 32 << 10;
const HEADERS: usize = 128;
/// Interim answers (1xx) that may precede an answer.
const INTERIM_ANSWERS: usize = 100;

/// What went wrong, or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Whole,
    Unreachable,
    Broken,
    Protocol,
    Resources,
    SinkGone,
    SinkStalled,
}

/// How something ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub outcome: Outcome,
    pub text: String,
}

impl End {
    pub fn new(outcome: Outcome, text: impl Into<String>) -> Self {
        Self { outcome, text: text.into() }
    }
}

/// Where a body goes.
#[derive(Debug)]
pub enum Target {
    /// Kept until it is whole, up to a number of bytes.
    Kept(Vec<u8>, usize),
    /// Emitted chunk by chunk.
    Chunks,
    /// A request that came to a server of ours, and whether its answer ends with a stream that is done.
    Call(u64, bool),
    /// A call of a gRPC server: which server, which call.
    Messages(usize, u64),
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Idle,
    Head {
        /// Bytes in which no end of it was found.
        seen: usize,
        interim: usize,
    },
    Body,
    /// Everything was emitted; the rest is read so that the connection can be used again.
    Ending,
}

/// What one step has brought.
#[derive(Debug)]
pub enum Step {
    Waits,
    Head(AnswerHead),
    /// Bytes for the target.
    Passes(Vec<u8>),
    Ends(End),
    /// The connection can be used again.
    Free,
    /// It is over, and nobody need know.
    Over,
}

pub struct Client {
    pub origin: String,
    /// Key of what it is used for.
    pub answer: Option<u64>,
    method: String,
    state: State,
    body: Decoder,
    keep_alive: bool,
    pub target: Option<Target>,
    pub events: Option<EventRelay>,
    /// Of a body without events.
    pub report: Report,
    /// The target takes nothing now.
    pub paused: Option<Instant>,
    pub write_limit: Duration,
    /// Goes out before the first bytes of the body, and with them.
    pub first: Vec<u8>,
    pub told_first: bool,
    since: Instant,
    connects_by: Option<Instant>,
    done_at: Option<Instant>,
    /// The request could not be written to its end.
    write_failed: bool,
    /// What is wrong with the body behind what was passed.
    nonsense: Option<&'static str>,
}

impl Client {
    pub fn new(origin: String, connects_by: Instant, now: Instant) -> Self {
        Self {
            origin,
            answer: None,
            method: String::new(),
            state: State::Idle,
            body: Decoder::of_length(0),
            keep_alive: true,
            target: None,
            events: None,
            report: Report::default(),
            paused: None,
            write_limit: Duration::MAX,
            first: Vec::new(),
            told_first: false,
            since: now,
            connects_by: Some(connects_by),
            done_at: None,
            write_failed: false,
            nonsense: None,
        }
    }

    /// Begins an exchange.
    pub fn ask(&mut self, answer: u64, method: &str) {
        self.answer = Some(answer);
        method.clone_into(&mut self.method);
        self.state = State::Head { seen: 0, interim: 0 };
        self.target = None;
        self.events = None;
        self.report = Report::default();
        self.paused = None;
        self.told_first = false;
        self.done_at = None;
    }

    /// What was noticed until now.
    pub fn report(&self) -> &Report {
        self.events.as_ref().map_or(&self.report, |events| &events.report)
    }

    pub fn report_mut(&mut self) -> &mut Report {
        self.events.as_mut().map_or(&mut self.report, |events| &mut events.report)
    }

    /// One step; `clock` is the loop's.
    pub fn step(&mut self, wire: &mut Wire, scratch: &mut [u8], now: Instant, clock: f64) -> Step {
        match wire.open() {
            Poll::Pending => return Step::Waits,
            Poll::Ready(Err(error)) => return Step::Ends(unreachable(&error)),
            Poll::Ready(Ok(())) => self.connects_by = None,
        }
        if !self.write_failed && wire.flush().is_err() {
            // What it has answered may still be there to be read.
            self.write_failed = true;
        }
        loop {
            let step = match self.state {
                State::Idle => None,
                State::Head { seen, interim } => self.read_head(wire, seen, interim),
                State::Body if self.target.is_none() || self.paused.is_some() => return Step::Waits,
                State::Body => self.read_body(wire, now, clock),
                State::Ending => self.read_end(wire, now),
            };
            if let Some(step) = step {
                return step;
            }
            match wire.fill(scratch) {
                Ok(Filled::Nothing) => return Step::Waits,
                Ok(Filled::More) if self.state != State::Idle => {}
                ended => return self.lost(ended.err(), clock),
            }
        }
    }

    /// The connection has ended.
    fn lost(&mut self, error: Option<io::Error>, clock: f64) -> Step {
        match self.state {
            State::Idle | State::Ending => Step::Over,
            State::Body if error.is_none() && self.body.ends_with_connection() => {
                self.body = Decoder::of_length(0);
                self.keep_alive = false;
                self.pass(Vec::new(), clock)
            }
            _ => {
                let text = error.map_or_else(
                    || "the connection was closed before the answer was whole".to_owned(),
                    |error| error.to_string(),
                );
                Step::Ends(End::new(Outcome::Broken, text))
            }
        }
    }

    fn read_head(&mut self, wire: &mut Wire, mut seen: usize, mut interim: usize) -> Option<Step> {
        let nonsense = |text: &str| Some(Step::Ends(End::new(Outcome::Protocol, text)));
        loop {
            let inbound = wire.inbound();
            let begins = &b"HTTP/1."[..inbound.len().min(7)];
            if !inbound.starts_with(begins) {
                return nonsense("the response is not HTTP/1.1");
            }
            let Some(length) = head::length(inbound, seen) else {
                self.state = State::Head { seen: inbound.len(), interim };
                return if inbound.len() > HEAD_BYTES { nonsense("the head is too long") } else { None };
            };
            if length > HEAD_BYTES {
                return nonsense("the head is too long");
            }
            let head = head::answer(&inbound[..length], HEADERS, &self.method);
            wire.take(length);
            match head {
                Err(text) => return nonsense(text),
                Ok(None) if interim == INTERIM_ANSWERS => return nonsense("interim answers without end"),
                Ok(None) => (seen, interim) = (0, interim + 1),
                Ok(Some(head)) => {
                    self.state = State::Body;
                    self.body = head.body.clone();
                    self.keep_alive = head.keep_alive;
                    return Some(Step::Head(head));
                }
            }
        }
    }

    fn read_body(&mut self, wire: &mut Wire, now: Instant, clock: f64) -> Option<Step> {
        if wire.inbound().is_empty() && !self.body.is_done() {
            return None;
        }
        if let Some(nonsense) = self.nonsense {
            return Some(Step::Ends(End::new(Outcome::Protocol, nonsense)));
        }
        let mut data = Vec::new();
        match self.body.decode(wire.inbound(), &mut data) {
            // What came before it comes first.
            Err(text) => {
                self.nonsense = Some(text);
                self.keep_alive = false;
            }
            Ok(taken) => wire.take(taken),
        }
        let step = self.pass(data, clock);
        if self.report().done && self.done_at.is_none() {
            self.done_at = Some(now);
        }
        Some(step)
    }

    /// What becomes of some of the body; `ending` says whether that was all.
    fn pass(&mut self, data: Vec<u8>, clock: f64) -> Step {
        let done = self.body.is_done();
        let Some(events) = &mut self.events else {
            self.report.passed += data.len() as u64;
            self.report.done = done;
            return Step::Passes(data);
        };
        let passed = events.feed(&data, clock, done);
        Step::Passes(passed)
    }

    /// Whether everything has passed, and how it went.
    pub fn ending(&self) -> Option<End> {
        let whole = End::new(Outcome::Whole, "");
        match &self.events {
            Some(EventRelay { failure: Some(failure), .. }) => {
                Some(End::new(Outcome::Protocol, format!("the engine sent {failure}")))
            }
            Some(events) if events.over => Some(whole),
            _ if self.state == State::Body && self.body.is_done() => Some(whole),
            _ => None,
        }
    }

    /// The exchange is over; whether the connection need not be.
    pub fn finish(&mut self, wire: &Wire, end: &End, now: Instant) -> bool {
        self.answer = None;
        self.target = None;
        self.since = now;
        let report = self.report();
        let ends_soon = report.done && !report.overrun && report.error.is_empty();
        if end.outcome != Outcome::Whole || !self.keep_alive || self.write_failed || wire.unsent() > 0 {
            return false;
        }
        let read_all = self.body.is_done();
        if read_all {
            self.state = State::Idle;
            return wire.inbound().is_empty();
        }
        self.state = State::Ending;
        ends_soon
    }

    pub fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    fn read_end(&mut self, wire: &mut Wire, now: Instant) -> Option<Step> {
        let mut rest = Vec::new();
        match self.body.decode(wire.inbound(), &mut rest) {
            Err(_) => return Some(Step::Over),
            Ok(taken) => wire.take(taken),
        }
        if !self.body.is_done() {
            return None;
        }
        self.state = State::Idle;
        self.since = now;
        Some(if wire.inbound().is_empty() { Step::Free } else { Step::Over })
    }

    /// What has to be done because time went by.
    pub fn tick(&self, now: Instant) -> Step {
        if self.connects_by.is_some_and(|by| now > by) {
            return Step::Ends(End::new(Outcome::Unreachable, "there was no connection in time"));
        }
        if self.paused.is_some_and(|since| now.duration_since(since) > self.write_limit)
            && matches!(self.target, Some(Target::Call(..) | Target::Messages(..)))
        {
            let seconds = self.write_limit.as_secs_f64();
            return Step::Ends(End::new(
                Outcome::SinkStalled,
                format!("nothing was read for {seconds:.3} s"),
            ));
        }
        let waited = now.duration_since(self.since);
        match self.state {
            State::Idle if waited > IDLE => Step::Over,
            State::Ending if waited > TRAILER => Step::Over,
            State::Body if self.done_at.is_some_and(|at| now.duration_since(at) > TRAILER) => {
                Step::Ends(End::new(Outcome::Whole, ""))
            }
            _ => Step::Waits,
        }
    }
}

/// Nothing could be connected to.
pub fn unreachable(error: &io::Error) -> End {
    End::new(outcome_of(error, Outcome::Unreachable), error.to_string())
}

/// Whether an error is one of our own resources. Ports are not among them: they run out for one address at a time.
fn outcome_of(error: &io::Error, otherwise: Outcome) -> Outcome {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOMEM: i32 = 12;
    const ENOBUFS: i32 = 105;
    match error.raw_os_error() {
        Some(ENFILE | EMFILE | ENOMEM | ENOBUFS) => Outcome::Resources,
        _ => otherwise,
    }
}
