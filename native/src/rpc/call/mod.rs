//! One call: a stream of HTTP/2 whose frames are gRPC messages, on either side of it.
//!
//! What comes is made into messages, whose window opens again when they were handled (`consumed`). What is sent waits in
//! a queue until the peer's windows take it, so that the protocol core never buffers more than it can send.

mod receive;
mod send;

use std::collections::VecDeque;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{FlowControl, Reason, RecvStream, SendStream};
use http::Request;
use http::header::{HeaderMap, HeaderValue};

use super::framing::Deframer;
use super::limits::Limits;
use super::metadata::Metadata;
use super::status::{self, Seen, Status};
use super::wake::Notifier;
use crate::budget::Charge;

pub const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// How many messages each side sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    pub request_streaming: bool,
    pub response_streaming: bool,
}

/// What a call reports.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// The caller's one message, or that a stream of messages begins.
    Begins(Option<Bytes>),
    Message(Bytes),
    /// The caller sends no more.
    HalfClosed,
    Headers(Metadata),
    /// How the call ended, for the caller; whether the peer may have looked at it.
    Ended(Status, Metadata, Seen),
    /// All that there is to a call of one answer, together.
    Answered(Box<Answer>),
    /// The caller has gone.
    Reset,
    /// There is room again for what is to be sent.
    Writable,
}

/// See `News::Answered`.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub headers: Metadata,
    pub message: Bytes,
    pub status: Status,
    pub trailers: Metadata,
}

impl News {
    /// What a call reported in one go, in as few parts as say the same.
    pub fn joined(mut emitted: Vec<Self>) -> Vec<Self> {
        if let [Self::Headers(headers), Self::Message(message), Self::Ended(status, trailers, _)] =
            &mut emitted[..]
        {
            let answer = Answer {
                headers: std::mem::take(headers),
                message: std::mem::take(message),
                status: Status { code: status.code, message: std::mem::take(&mut status.message) },
                trailers: std::mem::take(trailers),
            };
            emitted = vec![Self::Answered(Box::new(answer))];
        }
        emitted
    }
}

enum Role {
    Server {
        kind: Kind,
        /// Until headers were sent.
        respond: Option<SendResponse<Bytes>>,
        /// Its beginning was reported.
        begun: bool,
    },
    Client {
        response: Option<ResponseFuture>,
    },
}

/// What ends the sending side behind the queue.
enum Ending {
    Trailers(HeaderMap),
    /// The caller's half-close.
    Close,
}

/// What is reported with the beginning of a call that came.
#[derive(Clone)]
pub struct Meta {
    pub listener: u64,
    pub method: u32,
    pub metadata: Metadata,
    pub timeout_us: Option<u64>,
}

pub struct Call {
    pub connection: u64,
    pub notifier: Notifier,
    /// Until its beginning was reported.
    pub meta: Option<Meta>,
    /// What opens the stream of a call that waits.
    pub request: Option<Request<()>>,
    role: Role,
    receive: Option<RecvStream>,
    /// Of a server's call whose caller has sent all: to open the windows of what is not handled yet.
    received: Option<FlowControl>,
    send: Option<SendStream<Bytes>>,
    deframer: Deframer,
    /// Complete messages that were reported and are not handled: how many, and their bytes.
    unhandled: usize,
    unhandled_bytes: usize,
    /// No more are reported before some of them are handled.
    held_back: bool,
    /// Its connection is over: nothing that came is held back.
    drains: bool,
    /// Bytes of its metadata, until it begins.
    pub head_bytes: usize,
    /// What is charged for what it holds.
    pub charge: Charge,
    /// It may be sent a message larger than its first window.
    admitted: bool,
    /// All bytes of messages that came.
    came: usize,
    /// Of a message that is coming: since when, when the last window of its rate began, and `came` then.
    arriving: Option<(Instant, Instant, usize)>,
    /// Bytes that came and whose window is shut.
    shut: usize,
    /// With more shut by a message that is still coming, its window opens: it could not come through otherwise.
    shut_limit: usize,
    queue: VecDeque<Bytes>,
    queued: usize,
    ending: Option<Ending>,
    sent_all: bool,
    /// Somebody waits for room in the queue.
    full: bool,
    send_limit: usize,
    /// There is room for messages larger than the window.
    may_grow: bool,
    /// Somebody handles it.
    pub handled: bool,
    /// The caller gave it up.
    pub was_reset: bool,
    /// Whether the peer may have looked at it, if it ended now.
    seen: Seen,
    /// Nothing is to be reported any more, and nothing is left to do.
    pub over: bool,
}

impl Call {
    pub fn accepted(
        connection: u64,
        notifier: Notifier,
        kind: Kind,
        receive: RecvStream,
        respond: SendResponse<Bytes>,
        deframer: Deframer,
        limits: &Limits,
    ) -> Self {
        let role = Role::Server { kind, respond: Some(respond), begun: false };
        Self::new(connection, notifier, role, Some(receive), deframer, limits)
    }

    /// A call that waits until it is `opened`.
    pub fn waiting(
        connection: u64,
        notifier: Notifier,
        request: Request<()>,
        deframer: Deframer,
        limits: &Limits,
    ) -> Self {
        let role = Role::Client { response: None };
        let call = Self::new(connection, notifier, role, None, deframer, limits);
        Self { request: Some(request), admitted: true, ..call }
    }

    fn new(
        connection: u64,
        notifier: Notifier,
        role: Role,
        receive: Option<RecvStream>,
        deframer: Deframer,
        limits: &Limits,
    ) -> Self {
        Self {
            connection,
            notifier,
            meta: None,
            request: None,
            role,
            receive,
            received: None,
            send: None,
            deframer,
            unhandled: 0,
            unhandled_bytes: 0,
            held_back: false,
            drains: false,
            head_bytes: 0,
            charge: Charge::new(&limits.budget, None, 1),
            admitted: false,
            came: 0,
            arriving: None,
            shut: 0,
            shut_limit: limits.windows().0,
            queue: VecDeque::new(),
            queued: 0,
            ending: None,
            sent_all: false,
            full: false,
            send_limit: limits.windows().1,
            may_grow: true,
            handled: false,
            was_reset: false,
            seen: Seen::Maybe,
            over: false,
        }
    }

    /// The client's stream is open.
    pub fn opened(&mut self, response: ResponseFuture, send: SendStream<Bytes>) {
        self.role = Role::Client { response: Some(response) };
        self.send = Some(send);
        self.notifier.notify();
    }

    pub fn is_server(&self) -> bool {
        matches!(self.role, Role::Server { .. })
    }

    /// Bytes that came and are not handled.
    pub fn held(&self) -> usize {
        self.head_bytes
            + self.unhandled_bytes
            + self.unhandled * receive::MESSAGE_BYTES
            + self.deframer.held()
    }

    /// Has what it holds charged. A call whose message is still coming ends if there is no room for it, and false is
    /// returned.
    pub fn settle(&mut self, emit: &mut dyn FnMut(News)) -> bool {
        let (held, charged) = (self.held(), self.charge.bytes());
        if held <= charged {
            if held < charged {
                self.charge.shrink(charged - held);
            }
            return true;
        }
        let Err(over) = self.charge.grow(held - charged) else { return true };
        if !self.is_partial() {
            self.charge.force(held - charged);
            return true;
        }
        self.fail(Status::new(status::RESOURCE_EXHAUSTED, over.to_string()), emit);
        self.charge.shrink(charged.saturating_sub(self.held()));
        false
    }

    /// Says how many bytes there is room for, of all calls.
    pub fn set_room(&mut self, bytes: usize) {
        self.may_grow = bytes > 0;
        self.deframer.room = bytes;
    }

    /// Gets on as far as is possible now.
    pub fn drive(&mut self, emit: &mut dyn FnMut(News)) {
        self.notifier.taken();
        let waker = self.notifier.waker().clone();
        let mut context = Context::from_waker(&waker);
        if !self.over {
            self.receive_all(&mut context, emit);
        }
        if !self.over {
            self.send_all(&mut context, emit);
        }
        if !self.over {
            self.look_for_reset(&mut context, emit);
        }
    }

    /// Gets on to its end, since its connection is over.
    pub fn drain(&mut self, emit: &mut dyn FnMut(News)) {
        self.drains = true;
        self.drive(emit);
    }

    /// The stream broke.
    pub fn broke(&mut self, error: &h2::Error, emit: &mut dyn FnMut(News)) {
        if self.is_server() {
            self.was_reset = error.is_reset() && !self.sent_all;
            return self.gone(emit);
        }
        self.seen = Seen::at_end(error);
        self.end(status::of_error(error), Vec::new(), emit);
    }

    /// It ends for the caller.
    pub fn end(&mut self, status: Status, metadata: Metadata, emit: &mut dyn FnMut(News)) {
        self.over = true;
        let seen = if self.request.is_some() { Seen::NotSent } else { self.seen };
        emit(News::Ended(status, metadata, seen));
    }

    /// The caller has gone.
    pub fn gone(&mut self, emit: &mut dyn FnMut(News)) {
        self.over = true;
        if let Role::Server { begun: true, .. } = self.role
            && !self.sent_all
        {
            emit(News::Reset);
        }
    }

    /// What the peer sends makes no sense: who began a call gets the error, who answers it learns that the caller has gone.
    pub fn fail(&mut self, status: Status, emit: &mut dyn FnMut(News)) {
        if !self.is_server() {
            self.reset(Reason::CANCEL);
            return self.end(status, Vec::new(), emit);
        }
        self.gone(emit);
        self.over = false;
        self.deframer.clear();
        self.head_bytes = 0;
        self.queue.clear();
        self.queued = 0;
        self.finish(&status, HeaderMap::new());
        self.receive = None;
        self.received = None;
        if let Role::Server { begun, .. } = &mut self.role {
            *begun = false;
        }
    }

    /// Reports that a stream of messages begins, before any of them came.
    pub fn begin(&mut self, emit: &mut dyn FnMut(News)) {
        if let Role::Server { begun, .. } = &mut self.role {
            *begun = true;
            self.head_bytes = 0;
            emit(News::Begins(None));
        }
    }

    /// Breaks it off.
    pub fn reset(&mut self, reason: Reason) {
        if let Role::Server { respond: Some(respond), .. } = &mut self.role {
            respond.send_reset(reason);
        }
        if let Some(send) = &mut self.send {
            send.send_reset(reason);
        }
        self.over = true;
    }

    fn look_for_reset(&mut self, context: &mut Context<'_>, emit: &mut dyn FnMut(News)) {
        let Role::Server { respond, .. } = &mut self.role else { return };
        let reset = match (respond, &mut self.send) {
            (Some(respond), _) => respond.poll_reset(context),
            (None, Some(send)) => send.poll_reset(context),
            (None, None) => Poll::Pending,
        };
        if let Poll::Ready(reset) = reset {
            self.was_reset = reset.is_ok() && !self.sent_all;
            self.gone(emit);
        }
    }
}
