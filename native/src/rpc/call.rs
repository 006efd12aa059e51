//! One call: a stream of HTTP/2 whose frames are gRPC messages, on either side of it.
//!
//! What comes is made into messages, whose window opens again when they were handled (`consumed`). What is sent waits in
//! a queue until the peer's windows take it, so that the protocol core never buffers more than it can send.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Request, Response, StatusCode};

use super::framing::{Deframer, Encoding, PREFIX, framed};
use super::metadata::{self, Metadata};
use super::status::{self, INTERNAL, Status, UNKNOWN};
use super::wake::Bell;

pub const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// How many messages each side sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    pub request_streaming: bool,
    pub response_streaming: bool,
}

/// What a call has to tell.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// The caller's one message, or that a stream of messages begins.
    Begins(Option<Bytes>),
    Message(Bytes),
    /// The caller sends no more.
    HalfClosed,
    Headers(Metadata),
    /// How the call ended, for the caller.
    Ended(Status, Metadata),
    /// The caller has gone.
    Reset,
    /// There is room again for what is to be sent.
    Writable,
}

enum Role {
    Server {
        kind: Kind,
        /// Until headers were sent.
        respond: Option<SendResponse<Bytes>>,
        /// It was told that it begins.
        begun: bool,
        /// The caller's one message, until it is told.
        request: Option<Bytes>,
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

/// What is told with the beginning of a call that came.
pub struct Meta {
    pub listener: u64,
    pub method: u32,
    pub metadata: Metadata,
    pub timeout_us: Option<u64>,
}

pub struct Call {
    pub connection: u64,
    pub bell: Bell,
    /// Until that it begins was told.
    pub meta: Option<Meta>,
    /// What opens the stream of a call that waits.
    pub request: Option<Request<()>>,
    role: Role,
    receive: Option<RecvStream>,
    send: Option<SendStream<Bytes>>,
    deframer: Deframer,
    /// Complete messages that were told and are not handled: how many, and their bytes.
    unhandled: usize,
    unhandled_bytes: usize,
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
    pub may_grow: bool,
    /// Nothing is to be told any more, and nothing is left to do.
    pub over: bool,
}

impl Call {
    pub fn accepted(
        connection: u64,
        bell: Bell,
        kind: Kind,
        receive: RecvStream,
        respond: SendResponse<Bytes>,
        deframer: Deframer,
        windows: (usize, usize),
    ) -> Self {
        let role = Role::Server { kind, respond: Some(respond), begun: false, request: None };
        Self::new(connection, bell, role, Some(receive), deframer, windows)
    }

    /// A call that waits until it is `opened`.
    pub fn waiting(
        connection: u64,
        bell: Bell,
        request: Request<()>,
        deframer: Deframer,
        windows: (usize, usize),
    ) -> Self {
        let call = Self::new(connection, bell, Role::Client { response: None }, None, deframer, windows);
        Self { request: Some(request), ..call }
    }

    fn new(
        connection: u64,
        bell: Bell,
        role: Role,
        receive: Option<RecvStream>,
        deframer: Deframer,
        windows: (usize, usize),
    ) -> Self {
        Self {
            connection,
            bell,
            meta: None,
            request: None,
            role,
            receive,
            send: None,
            deframer,
            unhandled: 0,
            unhandled_bytes: 0,
            shut: 0,
            shut_limit: windows.0,
            queue: VecDeque::new(),
            queued: 0,
            ending: None,
            sent_all: false,
            full: false,
            send_limit: windows.1,
            may_grow: true,
            over: false,
        }
    }

    /// The client's stream is open.
    pub fn opened(&mut self, response: ResponseFuture, send: SendStream<Bytes>) {
        self.role = Role::Client { response: Some(response) };
        self.send = Some(send);
        self.bell.ring();
    }

    pub fn is_server(&self) -> bool {
        matches!(self.role, Role::Server { .. })
    }

    /// Bytes that came and are not handled.
    pub fn held(&self) -> usize {
        self.unhandled_bytes + self.deframer.waiting()
    }

    /// Gets on as far as is possible now.
    pub fn drive(&mut self, tell: &mut dyn FnMut(News)) {
        self.bell.taken();
        let waker = self.bell.waker().clone();
        let mut context = Context::from_waker(&waker);
        if !self.over {
            self.receive_all(&mut context, tell);
        }
        if !self.over {
            self.send_all(&mut context, tell);
        }
        if !self.over {
            self.look_for_reset(&mut context, tell);
        }
    }

    fn receive_all(&mut self, context: &mut Context<'_>, tell: &mut dyn FnMut(News)) {
        if let Role::Client { response: pending @ Some(_) } = &mut self.role {
            let Poll::Ready(result) = Pin::new(pending.as_mut().expect("matched")).poll(context) else {
                return;
            };
            *pending = None;
            match result {
                Err(error) => return self.end(status::of_error(&error), Vec::new(), tell),
                Ok(response) => {
                    if !self.headers_came(response, tell) {
                        return;
                    }
                }
            }
        }
        loop {
            let Some(receive) = &mut self.receive else { return };
            match receive.poll_data(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(bytes))) => {
                    if !self.take(bytes, tell) {
                        return;
                    }
                }
                Poll::Ready(Some(Err(error))) => return self.broke(&error, tell),
                Poll::Ready(None) => return self.received_all(context, tell),
            }
        }
    }

    /// False if the call is over with that.
    fn headers_came(&mut self, response: Response<RecvStream>, tell: &mut dyn FnMut(News)) -> bool {
        let (head, receive) = response.into_parts();
        if head.status != StatusCode::OK {
            self.end(status::of_http(head.status), metadata::visible(&head.headers), tell);
            return false;
        }
        if let Some(status) = metadata::status_of(&head.headers)
            && receive.is_end_stream()
        {
            tell(News::Headers(Vec::new()));
            self.end(status, metadata::visible(&head.headers), tell);
            return false;
        }
        self.deframer
            .set_encoding(Encoding::named(head.headers.get("grpc-encoding").map(HeaderValue::as_bytes)));
        tell(News::Headers(metadata::visible(&head.headers)));
        self.receive = Some(receive);
        true
    }

    /// False if the call is over with that.
    fn take(&mut self, bytes: Bytes, tell: &mut dyn FnMut(News)) -> bool {
        self.shut += bytes.len();
        let role = &mut self.role;
        let (mut completed, mut completed_bytes, mut one_too_many) = (0, 0, false);
        let taken = self.deframer.take(bytes, |message| {
            completed += 1;
            completed_bytes += message.len();
            match role {
                Role::Server { kind: Kind { request_streaming: false, .. }, request, .. } => {
                    one_too_many = request.replace(message).is_some() || one_too_many;
                }
                _ => tell(News::Message(message)),
            }
        });
        self.unhandled += completed;
        self.unhandled_bytes += completed_bytes;
        self.open_for_one();
        if let Err(status) = taken {
            self.fail(status, tell);
            return false;
        }
        if let Role::Server { kind, begun, request, .. } = &mut self.role
            && !kind.request_streaming
        {
            if one_too_many || (*begun && completed > 0) {
                self.fail(Status::new(INTERNAL, "more than one message came where one is expected"), tell);
                return false;
            }
            if let Some(message) = request.take() {
                *begun = true;
                tell(News::Begins(Some(message)));
            }
        }
        true
    }

    fn received_all(&mut self, context: &mut Context<'_>, tell: &mut dyn FnMut(News)) {
        let cut = self.deframer.waiting() > 0;
        match &mut self.role {
            Role::Server { kind, begun, .. } => {
                let missing = !kind.request_streaming && !*begun;
                if cut || missing {
                    let what = if cut {
                        "the last message is cut off"
                    } else {
                        "no message came where one is expected"
                    };
                    return self.fail(Status::new(INTERNAL, what), tell);
                }
                if kind.request_streaming {
                    tell(News::HalfClosed);
                }
                self.receive = None;
            }
            Role::Client { .. } => {
                let Some(receive) = &mut self.receive else { return };
                match receive.poll_trailers(context) {
                    Poll::Pending => {}
                    Poll::Ready(Err(error)) => self.broke(&error, tell),
                    Poll::Ready(Ok(trailers)) => {
                        let trailers = trailers.unwrap_or_default();
                        let missing = || Status::new(UNKNOWN, "the peer sent no status");
                        let status = metadata::status_of(&trailers).unwrap_or_else(missing);
                        self.end(status, metadata::visible(&trailers), tell);
                    }
                }
            }
        }
    }

    /// The stream broke.
    pub fn broke(&mut self, error: &h2::Error, tell: &mut dyn FnMut(News)) {
        if self.is_server() { self.gone(tell) } else { self.end(status::of_error(error), Vec::new(), tell) }
    }

    /// It ends for the caller.
    pub fn end(&mut self, status: Status, metadata: Metadata, tell: &mut dyn FnMut(News)) {
        self.over = true;
        tell(News::Ended(status, metadata));
    }

    /// The caller has gone.
    pub fn gone(&mut self, tell: &mut dyn FnMut(News)) {
        self.over = true;
        if let Role::Server { begun: true, .. } = self.role
            && !self.sent_all
        {
            tell(News::Reset);
        }
    }

    /// What the peer sends makes no sense: who began a call is told, whoever answers it is told that the caller has gone.
    fn fail(&mut self, status: Status, tell: &mut dyn FnMut(News)) {
        if !self.is_server() {
            self.reset(Reason::CANCEL);
            return self.end(status, Vec::new(), tell);
        }
        self.gone(tell);
        self.over = false;
        self.queue.clear();
        self.queued = 0;
        self.finish(&status, HeaderMap::new());
        self.receive = None;
        if let Role::Server { begun, .. } = &mut self.role {
            *begun = false;
        }
    }

    /// Tells that a stream of messages begins, before any of them came.
    pub fn begin(&mut self, tell: &mut dyn FnMut(News)) {
        if let Role::Server { begun, .. } = &mut self.role {
            *begun = true;
            tell(News::Begins(None));
        }
    }

    /// Lets a message that is larger than the window come, if it is the only one that is here and there is room for it.
    pub fn open_for_one(&mut self) {
        if self.may_grow && self.unhandled == 0 && self.shut >= self.shut_limit {
            self.release(self.shut);
        }
    }

    fn release(&mut self, length: usize) {
        self.shut -= length;
        if let Some(receive) = &mut self.receive
            && let Err(error) = receive.flow_control().release_capacity(length)
        {
            debug_assert!(false, "released more than came: {error}");
        }
    }

    /// A message of so many bytes was handled: the peer may send more. Returns what is no longer held.
    pub fn consumed(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.unhandled_bytes);
        self.unhandled = self.unhandled.saturating_sub(1);
        self.unhandled_bytes -= bytes;
        self.release((bytes + PREFIX).min(self.shut));
        self.open_for_one();
        bytes
    }

    /// Sends headers, unless they are sent.
    pub fn send_headers(&mut self, mut headers: HeaderMap) {
        let Role::Server { respond, .. } = &mut self.role else { return };
        let Some(mut responding) = respond.take() else { return };
        headers.insert(CONTENT_TYPE, GRPC);
        let mut response = Response::new(());
        *response.headers_mut() = headers;
        match responding.send_response(response, false) {
            Ok(send) => self.send = Some(send),
            // It was reset; look_for_reset tells.
            Err(_) => self.bell.ring(),
        }
    }

    /// Puts a message into the queue; false if more is queued now than should be.
    pub fn send(&mut self, message: &[u8]) -> bool {
        if self.over || self.ending.is_some() {
            return true;
        }
        let frame = framed(message);
        self.queued += frame.len();
        self.queue.push_back(frame);
        self.bell.ring();
        self.full = self.queued > self.send_limit;
        !self.full
    }

    /// The caller sends no more.
    pub fn close(&mut self) {
        if self.ending.is_none() {
            self.ending = Some(Ending::Close);
            self.bell.ring();
        }
    }

    /// The call ends behind what is queued.
    pub fn finish(&mut self, status: &Status, mut trailers: HeaderMap) {
        if self.ending.is_some() || self.over {
            return;
        }
        metadata::add_status(&mut trailers, status);
        if self.queue.is_empty()
            && let Role::Server { respond, .. } = &mut self.role
            && let Some(mut responding) = respond.take()
        {
            trailers.insert(CONTENT_TYPE, GRPC);
            let mut response = Response::new(());
            *response.headers_mut() = trailers;
            // An error says that it was reset, and then nobody wants to know.
            let _ = responding.send_response(response, true);
            self.sent_all = true;
            self.over = true;
            return;
        }
        self.send_headers(HeaderMap::new());
        self.ending = Some(Ending::Trailers(trailers));
        self.bell.ring();
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

    fn send_all(&mut self, context: &mut Context<'_>, tell: &mut dyn FnMut(News)) {
        if self.sent_all || (self.send.is_none() && self.queue.is_empty()) {
            return;
        }
        if self.is_server() {
            self.send_headers(HeaderMap::new());
        }
        let Some(send) = &mut self.send else { return };
        let failed = loop {
            let Some(frame) = self.queue.front_mut() else { break None };
            let wanted = frame.len();
            let mut room = send.capacity();
            if room < wanted {
                send.reserve_capacity(wanted);
                room = send.capacity();
            }
            if room == 0 {
                match send.poll_capacity(context) {
                    Poll::Pending => break None,
                    Poll::Ready(Some(Ok(more))) => room = more,
                    Poll::Ready(Some(Err(error))) => break Some(error),
                    // It is closed; look_for_reset tells.
                    Poll::Ready(None) => break None,
                }
                if room == 0 {
                    continue;
                }
            }
            let piece = frame.split_to(room.min(wanted));
            self.queued -= piece.len();
            let last = frame.is_empty();
            if last {
                self.queue.pop_front();
            }
            let closes = self.queue.is_empty() && matches!(self.ending, Some(Ending::Close));
            if let Err(error) = send.send_data(piece, closes) {
                break Some(error);
            }
            if closes {
                self.ending = None;
                self.sent_all = true;
            }
        };
        if let Some(error) = failed {
            return self.broke(&error, tell);
        }
        if self.full && self.queued <= self.send_limit / 2 {
            self.full = false;
            tell(News::Writable);
        }
        if !self.queue.is_empty() {
            return;
        }
        let failed = match self.ending.take() {
            None => return,
            Some(Ending::Close) => send.send_data(Bytes::new(), true),
            Some(Ending::Trailers(trailers)) => {
                self.over = true;
                send.send_trailers(trailers)
            }
        };
        self.sent_all = true;
        if let Err(error) = failed
            && !self.over
        {
            self.broke(&error, tell);
        }
    }

    fn look_for_reset(&mut self, context: &mut Context<'_>, tell: &mut dyn FnMut(News)) {
        let Role::Server { respond, .. } = &mut self.role else { return };
        let reset = match (respond, &mut self.send) {
            (Some(respond), _) => respond.poll_reset(context),
            (None, Some(send)) => send.poll_reset(context),
            (None, None) => Poll::Pending,
        };
        if reset.is_ready() {
            self.gone(tell);
        }
    }
}
