//! What is sent on a call: it waits in the queue until the peer's windows take it.

use std::task::{Context, Poll};

use bytes::Bytes;
use http::Response;
use http::header::{CONTENT_TYPE, HeaderMap};

use super::super::framing::framed;
use super::super::metadata;
use super::super::status::Status;
use super::{Call, Ending, GRPC, News, Role};

impl Call {
    /// Sends headers, unless they are sent.
    pub fn send_headers(&mut self, mut headers: HeaderMap) {
        let Role::Server { respond, .. } = &mut self.role else { return };
        let Some(mut responding) = respond.take() else { return };
        headers.insert(CONTENT_TYPE, GRPC);
        let mut response = Response::new(());
        *response.headers_mut() = headers;
        match responding.send_response(response, false) {
            Ok(send) => self.send = Some(send),
            // It was reset; look_for_reset reports it.
            Err(_) => self.notifier.notify(),
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
        self.notifier.notify();
        self.full = self.queued > self.send_limit;
        !self.full
    }

    /// The caller sends no more.
    pub fn close(&mut self) {
        if self.ending.is_none() {
            self.ending = Some(Ending::Close);
            self.notifier.notify();
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
        self.notifier.notify();
    }

    pub(super) fn send_all(&mut self, context: &mut Context<'_>, emit: &mut dyn FnMut(News)) {
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
                    // It is closed; look_for_reset reports it.
                    Poll::Ready(None) => break None,
                }
                if room == 0 {
                    continue;
                }
            }
            let chunk = frame.split_to(room.min(wanted));
            self.queued -= chunk.len();
            let last = frame.is_empty();
            if last {
                self.queue.pop_front();
            }
            let closes = self.queue.is_empty() && matches!(self.ending, Some(Ending::Close));
            if let Err(error) = send.send_data(chunk, closes) {
                break Some(error);
            }
            if closes {
                self.ending = None;
                self.sent_all = true;
            }
        };
        if let Some(error) = failed {
            return self.broke(&error, emit);
        }
        if self.full && self.queued <= self.send_limit / 2 {
            self.full = false;
            emit(News::Writable);
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
            self.broke(&error, emit);
        }
    }
}
