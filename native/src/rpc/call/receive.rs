//! What comes on a call: headers, messages, its end; and when the peer may send more.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use h2::RecvStream;
use http::header::HeaderValue;
use http::{Response, StatusCode};

use super::super::framing::{Encoding, PREFIX};
use super::super::limits::Limits;
use super::super::metadata;
use super::super::status::{self, INTERNAL, Status, UNKNOWN};
use super::{Call, Kind, News, Role};
use crate::budget::Charge;

/// Messages of one call that are emitted before others are driven.
const MESSAGES: usize = 32;
/// Messages of one call that wait for their handler; further ones wait in its window.
const UNHANDLED: usize = 1024;
/// Bytes that a message takes beside its own, until it is handled.
pub(super) const MESSAGE_BYTES: usize = 256;

impl Call {
    pub(super) fn receive_all(&mut self, context: &mut Context<'_>, emit: &mut dyn FnMut(News)) {
        if let Role::Client { response: pending @ Some(_) } = &mut self.role {
            let Poll::Ready(result) = Pin::new(pending.as_mut().expect("matched")).poll(context) else {
                return;
            };
            *pending = None;
            match result {
                Err(error) => return self.broke(&error, emit),
                Ok(response) => {
                    if !self.headers_came(response, emit) {
                        return;
                    }
                }
            }
        }
        let mut emitted = 0;
        loop {
            if !self.emit_messages(&mut emitted, emit) {
                return;
            }
            let Some(receive) = &mut self.receive else { return };
            match receive.poll_data(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(bytes))) => {
                    self.shut += bytes.len();
                    self.came += bytes.len();
                    self.deframer.push(bytes);
                }
                Poll::Ready(Some(Err(error))) => return self.broke(&error, emit),
                Poll::Ready(None) => return self.received_all(context, emit),
            }
        }
    }

    /// False if the call is over with that.
    fn headers_came(&mut self, response: Response<RecvStream>, emit: &mut dyn FnMut(News)) -> bool {
        let (head, receive) = response.into_parts();
        if head.status != StatusCode::OK {
            self.end(status::of_http(head.status), metadata::visible(&head.headers), emit);
            return false;
        }
        if let Some(status) = metadata::status_of(&head.headers)
            && receive.is_end_stream()
        {
            emit(News::Headers(Vec::new()));
            self.end(status, metadata::visible(&head.headers), emit);
            return false;
        }
        self.deframer
            .set_encoding(Encoding::named(head.headers.get("grpc-encoding").map(HeaderValue::as_bytes)));
        emit(News::Headers(metadata::visible(&head.headers)));
        self.receive = Some(receive);
        true
    }

    /// Emits the complete messages that came; false: not all, or the call is over.
    fn emit_messages(&mut self, emitted: &mut usize, emit: &mut dyn FnMut(News)) -> bool {
        loop {
            if self.unhandled >= UNHANDLED && !self.drains {
                // `consumed` goes on with it; until then the peer's window shuts.
                self.held_back = true;
                return false;
            }
            if *emitted >= MESSAGES && !self.drains {
                self.notifier.notify();
                return false;
            }
            let message = match self.deframer.next_message() {
                Ok(Some(message)) => message,
                Ok(None) => {
                    self.open_for_one();
                    return true;
                }
                Err(status) => {
                    self.fail(status, emit);
                    return false;
                }
            };
            *emitted += 1;
            self.arriving = None;
            self.unhandled += 1;
            self.unhandled_bytes += message.len();
            match &mut self.role {
                Role::Server { kind: Kind { request_streaming: false, .. }, begun: true, .. } => {
                    let text = "more than one message came where one is expected";
                    self.fail(Status::new(INTERNAL, text), emit);
                    return false;
                }
                Role::Server { kind: Kind { request_streaming: false, .. }, begun, .. } => {
                    *begun = true;
                    self.head_bytes = 0;
                    emit(News::Begins(Some(message)));
                }
                _ => emit(News::Message(message)),
            }
        }
    }

    fn received_all(&mut self, context: &mut Context<'_>, emit: &mut dyn FnMut(News)) {
        let cut = self.deframer.is_partial();
        match &mut self.role {
            Role::Server { kind, begun, .. } => {
                let missing = !kind.request_streaming && !*begun;
                if cut || missing {
                    let what = if cut {
                        "the last message is cut off"
                    } else {
                        "no message came where one is expected"
                    };
                    return self.fail(Status::new(INTERNAL, what), emit);
                }
                if kind.request_streaming {
                    emit(News::HalfClosed);
                }
                // What is not handled yet keeps the connection's window shut, and is let go of when it is.
                self.received = self.receive.take().map(|mut receive| receive.flow_control().clone());
            }
            Role::Client { .. } => {
                let Some(receive) = &mut self.receive else { return };
                match receive.poll_trailers(context) {
                    Poll::Pending => {}
                    Poll::Ready(Err(error)) => self.broke(&error, emit),
                    Poll::Ready(Ok(trailers)) => {
                        let trailers = trailers.unwrap_or_default();
                        let missing = || Status::new(UNKNOWN, "the peer sent no status");
                        let status = metadata::status_of(&trailers).unwrap_or_else(missing);
                        self.end(status, metadata::visible(&trailers), emit);
                    }
                }
            }
        }
    }

    /// Lets a message that is larger than the window come, if it is the only one that is here and there is room for it.
    pub fn open_for_one(&mut self) {
        if self.admitted && self.may_grow && self.unhandled == 0 && self.shut >= self.shut_limit {
            self.release(self.shut);
        }
    }

    /// Its caller is known and may make it: larger messages may come, charged to the caller's tenant.
    pub fn admit(&mut self, charge: Charge) {
        self.admitted = true;
        self.charge = charge;
        self.open_for_one();
    }

    /// The call came, and of the one message that it begins with not all is here.
    pub fn awaits_request(&self) -> bool {
        matches!(&self.role, Role::Server { kind, begun: false, .. } if !kind.request_streaming)
            && self.receive.is_some()
    }

    /// A message came in part.
    pub fn is_partial(&self) -> bool {
        self.is_server() && self.receive.is_some() && self.deframer.is_partial()
    }

    /// Messages came whole that are not handled.
    pub fn is_backed_up(&self) -> bool {
        self.unhandled > 0
    }

    /// Whether a message that is awaited takes too long; to be asked again and again. What comes on a connection that
    /// is held up by this side is not judged.
    pub fn is_late(&mut self, now: Instant, held_up: bool, limits: &Limits) -> bool {
        if held_up || !(self.is_partial() || self.awaits_request()) {
            self.arriving = None;
            return false;
        }
        let (began, window, before) = *self.arriving.get_or_insert((now, now, self.came));
        if now.duration_since(window) <= limits.message_window {
            return false;
        }
        self.arriving = Some((began, now, self.came));
        self.came - before < limits.message_window_bytes || now.duration_since(began) > limits.message
    }

    fn release(&mut self, length: usize) {
        self.shut -= length;
        let flow = match &mut self.receive {
            Some(receive) => Some(receive.flow_control()),
            None => self.received.as_mut(),
        };
        if let Some(flow) = flow
            && let Err(error) = flow.release_capacity(length)
        {
            debug_assert!(false, "released more than came: {error}");
        }
    }

    /// A message of this size was handled: the peer may send more.
    pub fn consumed(&mut self, bytes: usize) {
        let bytes = bytes.min(self.unhandled_bytes);
        self.unhandled = self.unhandled.saturating_sub(1);
        self.unhandled_bytes -= bytes;
        if self.held_back && self.unhandled <= UNHANDLED / 2 {
            self.held_back = false;
            self.notifier.notify();
        }
        self.release((bytes + PREFIX).min(self.shut));
        self.open_for_one();
    }
}
