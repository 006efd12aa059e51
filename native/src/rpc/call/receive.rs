//! What comes on a call: headers, messages, its end; and when the peer may send more.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use h2::RecvStream;
use http::header::HeaderValue;
use http::{Response, StatusCode};

use super::super::framing::{Encoding, PREFIX};
use super::super::limits::Limits;
use super::super::metadata;
use super::super::status::{self, INTERNAL, Status, UNKNOWN};
use super::{Call, Kind, News, Role};
use crate::budget::Charge;

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
        loop {
            let Some(receive) = &mut self.receive else { return };
            match receive.poll_data(context) {
                Poll::Pending => return,
                Poll::Ready(Some(Ok(bytes))) => {
                    if !self.take(bytes, emit) {
                        return;
                    }
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

    /// False if the call is over with that.
    fn take(&mut self, bytes: Bytes, emit: &mut dyn FnMut(News)) -> bool {
        self.shut += bytes.len();
        self.came += bytes.len();
        let role = &mut self.role;
        let (mut completed, mut completed_bytes, mut one_too_many) = (0, 0, false);
        let taken = self.deframer.take(bytes, |message| {
            completed += 1;
            completed_bytes += message.len();
            match role {
                Role::Server { kind: Kind { request_streaming: false, .. }, request, .. } => {
                    one_too_many = request.replace(message).is_some() || one_too_many;
                }
                _ => emit(News::Message(message)),
            }
        });
        if completed > 0 {
            self.arriving = None;
        }
        self.unhandled += completed;
        self.unhandled_bytes += completed_bytes;
        self.open_for_one();
        if let Err(status) = taken {
            self.fail(status, emit);
            return false;
        }
        if let Role::Server { kind, begun, request, .. } = &mut self.role
            && !kind.request_streaming
        {
            if one_too_many || (*begun && completed > 0) {
                self.fail(Status::new(INTERNAL, "more than one message came where one is expected"), emit);
                return false;
            }
            if let Some(message) = request.take() {
                *begun = true;
                emit(News::Begins(Some(message)));
            }
        }
        true
    }

    fn received_all(&mut self, context: &mut Context<'_>, emit: &mut dyn FnMut(News)) {
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
        self.is_server() && self.receive.is_some() && self.deframer.waiting() > 0
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

    /// A message of so many bytes was handled: the peer may send more. Returns what is no longer held.
    pub fn consumed(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.unhandled_bytes);
        self.unhandled = self.unhandled.saturating_sub(1);
        self.unhandled_bytes -= bytes;
        self.release((bytes + PREFIX).min(self.shut));
        self.open_for_one();
        bytes
    }
}
