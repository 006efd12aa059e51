//! The server's side of a connection: one request after the other, each answered before the next is looked at.

use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::body::Decoder;
use super::head::{self, Framing, Headers, Refusal, RequestHead};
use super::wire::{Filled, Wire};
use crate::budget::Charge;

/// Of what is to be sent; with more, whoever sends has to wait.
pub const SEND_LIMIT: usize = 64 << 10;
/// Of what came behind a request, or of a body that is not wanted yet.
const AHEAD: usize = 64 << 10;
/// Empty lines that may precede a request; RFC 9112 2.2 knows of one.
const EMPTY_LINES: usize = 4;
/// How long an idle connection of a server that stops is left open for the request that may be on its way.
const LAST_REQUEST: Duration = Duration::from_secs(1);
/// How long what nobody wants is read, and how many bytes of it, so that the answer is not lost with it.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 1 << 20;

/// What clients may cost.
#[derive(Debug, Clone)]
pub struct ServerLimits {
    pub connections: usize,
    pub head_bytes: usize,
    pub headers: usize,
    pub body_bytes: usize,
    pub idle: Duration,
    pub body: Duration,
    /// Bytes of a body that have to come in each `body_window`.
    pub body_window: Duration,
    pub body_window_bytes: usize,
    pub write: Duration,
}

/// What a connection reports.
pub enum News {
    Begins(RequestHead, Option<Vec<u8>>),
    Body(Vec<u8>),
    BodyFailed(u16, String),
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    Yes,
    /// Wait until there is some.
    Full,
    Gone,
}

enum Answer {
    None,
    /// Begun, and nothing of it sent.
    Noted(Vec<u8>, Framing),
    Writing(Framing),
    Ended,
}

pub struct Server {
    pub listener: u64,
    limits: Rc<ServerLimits>,
    /// A request is being handled.
    pub busy: bool,
    /// A request has come.
    requested: bool,
    /// The client is a known one: its connection is not closed to make room.
    pub trusted: bool,
    /// The server stops: each answer is the last of its connection.
    leaving: bool,
    /// The client sends no more.
    input_ended: bool,
    body: Decoder,
    collected: Vec<u8>,
    wants_body: bool,
    /// What is charged for the body that is wanted.
    charge: Option<Arc<Charge>>,
    /// When a window of the body's rate began, and the bytes that were here then.
    window: (Instant, usize),
    expects_continue: bool,
    version_11: bool,
    keep_alive: bool,
    is_head: bool,
    answer: Answer,
    /// Somebody waits for room.
    full: bool,
    lingers: bool,
    /// Empty lines that came instead of a request.
    empty_lines: usize,
    /// Bytes read that nobody wants.
    lingered: usize,
    /// Bytes in which no head's end was found.
    seen: usize,
    /// When what is waited for began.
    since: Instant,
    /// Since when the client takes nothing, and what was unsent then.
    stuck: Option<(Instant, usize)>,
}

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
const TOO_LONG: Refusal = (413, "the body is too long");

impl Server {
    pub fn new(listener: u64, limits: Rc<ServerLimits>, now: Instant) -> Self {
        Self {
            listener,
            limits,
            busy: false,
            requested: false,
            trusted: false,
            leaving: false,
            input_ended: false,
            body: Decoder::of_length(0),
            collected: Vec::new(),
            wants_body: false,
            charge: None,
            window: (now, 0),
            expects_continue: false,
            version_11: true,
            keep_alive: true,
            is_head: false,
            answer: Answer::None,
            full: false,
            lingers: false,
            empty_lines: 0,
            lingered: 0,
            seen: 0,
            since: now,
            stuck: None,
        }
    }

    /// Gets on as far as its share of the poll lets it; false: the connection is over. Unless it `reads_ahead`, what came
    /// behind a request waits in the kernel.
    pub fn drive(
        &mut self,
        wire: &mut Wire,
        scratch: &mut [u8],
        now: Instant,
        reads_ahead: bool,
        emit: &mut dyn FnMut(News),
    ) -> bool {
        match wire.open() {
            Poll::Pending => return true,
            Poll::Ready(Err(_)) => return false,
            Poll::Ready(Ok(())) => {}
        }
        if wire.is_broken() {
            self.gone(emit);
            return false;
        }
        loop {
            if !self.get_on(wire, now, emit) {
                return false;
            }
            if self.input_ended {
                return self.busy || wire.unsent() > 0;
            }
            if !self.lingers && wire.inbound().len() >= self.most_ahead(reads_ahead || wire.has_ended()) {
                return true;
            }
            match wire.fill(scratch) {
                Ok(Filled::More) => {}
                Ok(Filled::Nothing) => return true,
                Ok(Filled::Ended) if !self.lingers && self.may_be_there(wire, emit) => {
                    self.input_ended = true;
                }
                Ok(Filled::Ended) | Err(_) => {
                    self.gone(emit);
                    return false;
                }
            }
        }
    }

    /// Whether a client that sends no more may wait for its answer all the same. One that has gone looks alike, until
    /// something is sent to it: its kernel answers an interim answer with a reset. HTTP/1.0 has none, so that such a client
    /// counts as gone, and gets an answer that says so; and so does one that hangs up in the middle of an answer.
    fn may_be_there(&mut self, wire: &mut Wire, emit: &mut dyn FnMut(News)) -> bool {
        match self.answer {
            Answer::Writing(_) => return false,
            Answer::None | Answer::Noted(..) if self.busy && self.version_11 => {
                wire.out().extend_from_slice(CONTINUE);
            }
            Answer::None | Answer::Noted(..) if self.busy => {
                self.gone(emit);
                self.refuse(wire, (400, "over HTTP/1.0 a client that closes its side counts as gone"));
            }
            _ => {}
        }
        true
    }

    fn most_ahead(&self, reads_ahead: bool) -> usize {
        match self.busy {
            true if reads_ahead || self.wants_body => AHEAD,
            true => 0,
            false => self.limits.head_bytes + AHEAD,
        }
    }

    /// The client has gone.
    pub fn gone(&mut self, emit: &mut dyn FnMut(News)) {
        if self.busy && !matches!(self.answer, Answer::Ended) {
            emit(News::Gone);
        }
    }

    fn get_on(&mut self, wire: &mut Wire, now: Instant, emit: &mut dyn FnMut(News)) -> bool {
        loop {
            let Ok(sent_all) = wire.flush() else {
                self.gone(emit);
                return false;
            };
            self.note_progress(wire.unsent(), now);
            if self.lingers {
                self.lingered += wire.inbound().len();
                wire.take(wire.inbound().len());
                return self.lingered <= LINGER_BYTES;
            }
            if matches!(self.answer, Answer::Ended) {
                if !sent_all {
                    return true;
                }
                self.busy = false;
                self.since = now;
                if self.input_ended && (!self.keep_alive || !self.body.is_done()) {
                    return false;
                }
                if !self.keep_alive || !self.body.is_done() {
                    wire.shut();
                    self.collected = Vec::new();
                    self.lingers = true;
                    continue;
                }
                self.answer = Answer::None;
            }
            if self.busy {
                self.read_body(wire, emit);
                return true;
            }
            if !self.read_head(wire, now, emit) {
                return true;
            }
        }
    }

    fn note_progress(&mut self, unsent: usize, now: Instant) {
        self.stuck = match self.stuck {
            _ if unsent == 0 => None,
            Some((since, before)) if unsent >= before => Some((since, before)),
            _ => Some((now, unsent)),
        };
    }

    /// Whether there is one.
    fn read_head(&mut self, wire: &mut Wire, now: Instant, emit: &mut dyn FnMut(News)) -> bool {
        while wire.inbound().starts_with(b"\r\n") {
            if self.empty_lines == EMPTY_LINES {
                self.refuse(wire, (400, "empty lines instead of a request"));
                return true;
            }
            self.empty_lines += 1;
            wire.take(2);
            self.seen = 0;
        }
        let inbound = wire.inbound();
        let Some(length) = head::length(inbound, self.seen) else {
            self.seen = inbound.len();
            if inbound.len() > self.limits.head_bytes {
                self.refuse(wire, (431, "the head is too long"));
                return true;
            }
            return false;
        };
        self.seen = 0;
        if length > self.limits.head_bytes {
            self.refuse(wire, (431, "the head is too long"));
            return true;
        }
        let head = match head::request(&inbound[..length], self.limits.headers) {
            Ok(head) => head,
            Err(refusal) => {
                self.refuse(wire, refusal);
                return true;
            }
        };
        wire.take(length);
        self.empty_lines = 0;
        self.busy = true;
        self.requested = true;
        self.since = now;
        self.body = head.body.clone();
        self.wants_body = false;
        self.expects_continue = head.expects_continue;
        self.version_11 = head.version_11;
        self.keep_alive = head.keep_alive && !self.leaving;
        self.is_head = head.method == "HEAD";
        self.collected = Vec::new();
        let decoded = if self.too_long() { Ok(()) } else { self.decode(wire) };
        if let Err(text) = decoded {
            self.refuse(wire, (400, text));
            return true;
        }
        let whole = self.body.is_done() && !self.too_long();
        let body = whole.then(|| std::mem::take(&mut self.collected));
        emit(News::Begins(head, body));
        true
    }

    fn too_long(&self) -> bool {
        let to_come = if let Decoder::Length(left) = self.body { left } else { 0 };
        self.collected.len() as u64 + to_come > self.limits.body_bytes as u64
    }

    fn decode(&mut self, wire: &mut Wire) -> Result<(), &'static str> {
        let taken = self.body.decode(wire.inbound(), &mut self.collected)?;
        wire.take(taken);
        Ok(())
    }

    fn read_body(&mut self, wire: &mut Wire, emit: &mut dyn FnMut(News)) {
        if !self.wants_body {
            return;
        }
        let before = self.collected.len();
        if let Err(text) = self.decode(wire) {
            return self.fail_body(400, text, emit);
        }
        if self.too_long() {
            return self.fail_body(TOO_LONG.0, TOO_LONG.1, emit);
        }
        let charge = self.charge.as_ref();
        if let Some(Err(over)) = charge.map(|charge| charge.grow(self.collected.len() - before)) {
            return self.fail_body(over.status(), &over.to_string(), emit);
        }
        if self.body.is_done() {
            self.wants_body = false;
            self.charge = None;
            emit(News::Body(std::mem::take(&mut self.collected)));
            return;
        }
        if self.input_ended {
            self.fail_body(400, "the body ends too early", emit);
        }
    }

    fn fail_body(&mut self, status: u16, text: &str, emit: &mut dyn FnMut(News)) {
        self.wants_body = false;
        self.keep_alive = false;
        self.collected = Vec::new();
        if let Some(charge) = self.charge.take() {
            charge.release();
        }
        emit(News::BodyFailed(status, text.to_owned()));
    }

    /// The handler wants the body that did not come with the head, and says what it is charged to.
    pub fn want_body(
        &mut self,
        wire: &mut Wire,
        charge: Option<Arc<Charge>>,
        now: Instant,
        emit: &mut dyn FnMut(News),
    ) {
        if self.too_long() {
            return self.fail_body(TOO_LONG.0, TOO_LONG.1, emit);
        }
        if let Some(charge) = &charge {
            let to_come = if let Decoder::Length(left) = self.body { left } else { 0 };
            let here = self.collected.len();
            let taken = charge.look(here as u64 + to_come).and_then(|()| charge.grow(here));
            if let Err(over) = taken {
                return self.fail_body(over.status(), &over.to_string(), emit);
            }
        }
        self.wants_body = true;
        self.charge = charge;
        self.since = now;
        self.window = (now, self.collected.len());
        if self.expects_continue && self.collected.is_empty() && wire.inbound().is_empty() {
            wire.out().extend_from_slice(CONTINUE);
        }
    }

    /// Whether the last window brought too little of a body that is wanted.
    fn is_slow(&mut self, now: Instant) -> bool {
        let (began, before) = self.window;
        if now.duration_since(began) <= self.limits.body_window {
            return false;
        }
        let came = self.collected.len() - before;
        self.window = (now, self.collected.len());
        came < self.limits.body_window_bytes
    }

    /// Answers what is no request; the connection ends with it.
    fn refuse(&mut self, wire: &mut Wire, (status, text): Refusal) {
        let reason = head::reason(status);
        let length = text.len() + 1;
        let answer = format!(
            "HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n{text}\n"
        );
        wire.out().extend_from_slice(answer.as_bytes());
        self.answer = Answer::Ended;
        self.keep_alive = false;
    }

    /// Begins an answer.
    ///
    /// # Errors
    /// The header that cannot be sent.
    pub fn start(&mut self, status: u16, headers: &Headers, length: Option<u64>) -> Result<(), String> {
        if !matches!(self.answer, Answer::None | Answer::Noted(..)) {
            return Ok(());
        }
        let length = length.or_else(|| head::told_length(headers));
        let framing = match length {
            _ if status == 204 || status == 304 || (100..200).contains(&status) => Framing::None,
            Some(length) => Framing::Length(length),
            None if self.version_11 => Framing::Chunks,
            None => Framing::Close,
        };
        // What is still to come of the request is not waited for.
        self.keep_alive &= self.body.is_done() && framing != Framing::Close;
        let mut out = format!("HTTP/1.1 {status} {}\r\n", head::reason(status)).into_bytes();
        head::write(&mut out, headers, framing, !self.keep_alive || !self.version_11)?;
        self.keep_alive &= self.version_11;
        let framing = if self.is_head { Framing::None } else { framing };
        self.answer = Answer::Noted(out, framing);
        Ok(())
    }

    /// Writes some of an answer's body.
    pub fn write(&mut self, wire: &mut Wire, data: &[u8]) -> Room {
        if data.is_empty() {
            return Room::Yes;
        }
        if let Answer::Noted(head, framing) = &mut self.answer {
            wire.out().append(head);
            self.answer = Answer::Writing(*framing);
        }
        let Answer::Writing(framing) = &mut self.answer else { return Room::Gone };
        match framing {
            Framing::None => return Room::Yes,
            Framing::Close => wire.out().extend_from_slice(data),
            Framing::Length(left) => {
                let Some(rest) = left.checked_sub(data.len() as u64) else { return Room::Gone };
                *left = rest;
                wire.out().extend_from_slice(data);
            }
            Framing::Chunks => {
                let out = wire.out();
                out.reserve(data.len() + 24);
                chunk_size(out, data.len());
                out.extend_from_slice(data);
                out.extend_from_slice(b"\r\n");
            }
        }
        self.full = wire.unsent() > SEND_LIMIT;
        if self.full { Room::Full } else { Room::Yes }
    }

    /// Ends an answer; false: less came than was said, so that the connection has to end.
    pub fn end(&mut self, wire: &mut Wire) -> bool {
        if let Answer::Noted(head, framing) = &mut self.answer {
            wire.out().append(head);
            self.answer = Answer::Writing(*framing);
        }
        let Answer::Writing(framing) = self.answer else { return true };
        self.answer = Answer::Ended;
        match framing {
            Framing::Chunks => wire.out().extend_from_slice(b"0\r\n\r\n"),
            Framing::Length(1..) => return false,
            _ => {}
        }
        true
    }

    /// The handler is through with it; whether it has answered.
    pub fn is_answered(&self) -> bool {
        matches!(self.answer, Answer::Ended)
    }

    /// There is room again for who waited for it.
    pub fn has_room_again(&mut self, unsent: usize) -> bool {
        let again = self.full && unsent <= SEND_LIMIT / 2;
        self.full &= !again;
        again
    }

    /// What has to be done because time went by; false: the connection is over.
    pub fn tick(&mut self, wire: &mut Wire, now: Instant, emit: &mut dyn FnMut(News)) -> bool {
        let waited = now.duration_since(self.since);
        if let Some((since, _)) = self.stuck
            && now.duration_since(since) > self.limits.write
            && matches!(self.answer, Answer::Ended)
        {
            return false;
        }
        if self.lingers {
            return waited <= LINGER;
        }
        if self.leaving && self.is_idle() && waited > LAST_REQUEST {
            return false;
        }
        if self.wants_body && waited > self.limits.body {
            self.fail_body(408, "the body takes too long", emit);
        } else if self.wants_body && self.is_slow(now) {
            self.fail_body(408, "the body comes too slowly", emit);
        }
        if !self.busy && !matches!(self.answer, Answer::Ended) && waited > self.limits.idle {
            if wire.inbound().is_empty() {
                return false;
            }
            self.refuse(wire, (408, "the head takes too long"));
        }
        true
    }

    /// A head has begun to come, and there is no memory for more of it.
    pub fn refuse_head(&mut self, wire: &mut Wire, now: Instant) -> bool {
        let partial = !self.busy && matches!(self.answer, Answer::None) && !wire.inbound().is_empty();
        if partial {
            self.since = now;
            self.refuse(wire, (503, "too many requests are coming"));
        }
        partial
    }

    /// Bytes of memory for what came of requests and is not wanted yet.
    pub fn ahead(&self, wire: &Wire) -> usize {
        wire.inbound_capacity() + if self.wants_body { 0 } else { self.collected.capacity() }
    }

    /// Nothing is due soon: it waits for a request.
    pub fn rests(&self) -> bool {
        self.is_idle() && !self.leaving && !self.lingers && self.stuck.is_none()
    }

    /// No request is handled.
    fn is_idle(&self) -> bool {
        !self.busy && matches!(self.answer, Answer::None)
    }

    /// Since when it is idle, unless it is not or its client is a known one; before that, whether it has requested anything.
    /// What is least is closed first where there is no room.
    pub fn worth(&self) -> Option<(bool, Instant)> {
        (self.is_idle() && !self.trusted).then_some((self.requested, self.since))
    }

    /// The connection ends behind the answer that runs, or behind that to a request that comes soon.
    pub fn leave(&mut self, now: Instant) {
        self.leaving = true;
        self.keep_alive = false;
        if self.is_idle() {
            self.since = now;
        }
    }
}

fn chunk_size(out: &mut Vec<u8>, size: usize) {
    let mut digits = [0; 18];
    let mut at = digits.len() - 2;
    digits[at..].copy_from_slice(b"\r\n");
    let mut rest = size;
    while rest > 0 || at == digits.len() - 2 {
        at -= 1;
        digits[at] = b"0123456789abcdef"[rest & 15];
        rest >>= 4;
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_chunks_are_hexadecimal() {
        for size in [1, 9, 10, 15, 16, 255, 4096, usize::MAX] {
            let mut out = Vec::new();
            chunk_size(&mut out, size);
            assert_eq!(out, format!("{size:x}\r\n").into_bytes());
        }
    }
}
