//! One source: an engine's socket, connected to again whenever it is gone, or one that engines connect to.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mio::{Interest, Registry, Token};
use xxhash_rust::xxh3::xxh3_64;

use super::bypass::{Bypass, Offered};
use super::connection::{Connection, News, Outcome, UNFINISHED_IN_ALL};
use super::intake::Notice;
use super::place::{Listener, Place, keep_alive};
use super::zmtp::{Message, Session};
use crate::events::Batch;
use crate::rpc::socket::Stream;

/// Between two tries to connect: at first, doubled up to.
pub const RETRY: Duration = Duration::from_millis(100);
const MAX_RETRY: Duration = Duration::from_secs(2);
/// Between two tries to accept when the system would not.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);
/// Bytes of all sources that wait for the event loop; beyond it, only those are read of which nothing waits.
const WAITING_IN_ALL: usize = 256 * 1024 * 1024;
/// Bits of a token that say which of a source's sockets it is; 0 is the one that listens or connects.
const SLOT_BITS: u32 = 5;
const SLOTS: usize = 1 << SLOT_BITS;
pub const INTEREST: Interest = Interest::READABLE.add(Interest::WRITABLE);

/// Source and slot of a token.
pub fn split(token: Token) -> (usize, usize) {
    (token.0 >> SLOT_BITS, token.0 % SLOTS)
}

pub fn token(number: usize, slot: usize) -> Token {
    Token(number << SLOT_BITS | slot)
}

/// Parts of its thread that a source needs.
pub struct Context<'a> {
    pub registry: &'a Registry,
    pub scratch: &'a mut [u8],
    /// Into which messages are decoded.
    pub batch: &'a mut Batch,
    /// Bytes that all connections hold of messages that are not complete.
    pub unfinished: &'a AtomicUsize,
    /// Bytes that wait for the event loop, of all sources.
    pub waiting: &'a AtomicUsize,
    pub now: Instant,
}

impl Context<'_> {
    /// Bytes that a connection may hold which holds some already; threads that ask at once may each have them.
    pub fn room(&self, held: usize) -> usize {
        let others = self.unfinished.load(Ordering::Relaxed).saturating_sub(held);
        UNFINISHED_IN_ALL.saturating_sub(others)
    }

    /// Notes that a connection holds more or less than before.
    pub fn now_held(&self, before: usize, now: usize) {
        self.unfinished.fetch_add(now, Ordering::Relaxed);
        self.unfinished.fetch_sub(before, Ordering::Relaxed);
    }
}

/// A source's sockets.
pub struct Sockets {
    number: usize,
    place: Place,
    topic: Box<[u8]>,
    longest_frame: usize,
    listener: Option<Listener>,
    /// By slot.
    connections: Vec<(usize, Connection)>,
    /// Somebody may have connected to us.
    called: bool,
    retry_at: Option<Instant>,
    /// Tries to connect since it last was.
    tries: u32,
    /// Whether it was reported that there is no connection.
    unconnected: bool,
}

impl Sockets {
    /// Of a source that connects.
    pub fn connecting(number: usize, place: Place, topic: &[u8], longest_frame: usize) -> Self {
        Self {
            number,
            place,
            topic: topic.into(),
            longest_frame,
            listener: None,
            connections: Vec::new(),
            called: false,
            retry_at: Some(Instant::now()),
            tries: 0,
            unconnected: false,
        }
    }

    /// Of one that engines connect to.
    pub fn listening(
        number: usize,
        place: Place,
        topic: &[u8],
        longest_frame: usize,
        registry: &Registry,
    ) -> io::Result<Self> {
        let mut listener = place.bind()?;
        registry.register(listener.source(), token(number, 0), Interest::READABLE)?;
        // An engine may have connected before the listener was registered.
        Ok(Self {
            listener: Some(listener),
            called: true,
            ..Self::connecting(number, place, topic, longest_frame)
        })
    }

    /// Bytes held by its connections.
    pub fn held(&self) -> usize {
        self.connections.iter().map(|(_, connection)| connection.held()).sum()
    }

    /// When a connection is to be made, if none is there.
    pub fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    pub fn on_readiness(&mut self, slot: usize, event: &mio::event::Event) {
        if slot == 0 && self.listener.is_some() {
            self.called = true;
        }
        let ended = event.is_read_closed() || event.is_error();
        for (place, connection) in &mut self.connections {
            if *place == slot {
                connection.on_readiness(event.is_readable(), event.is_writable(), ended);
            }
        }
    }

    /// Drives every connection once; whether one may have more.
    pub fn drive(
        &mut self,
        context: &mut Context<'_>,
        bypass: &Bypass,
        leave: &mut dyn FnMut(Notice),
    ) -> bool {
        if std::mem::take(&mut self.called) {
            self.accept(context);
        }
        let mut goes_on = self.called;
        let mut index = 0;
        while let Some((_, connection)) = self.connections.get_mut(index) {
            if connection.is_open() && is_full(bypass, context.waiting) {
                connection.stall();
                index += 1;
                continue;
            }
            let (was_open, held) = (connection.is_open(), connection.held());
            let room = context.room(held);
            let outcome = connection.drive(context.scratch, room, context.now, |news| {
                take(bypass, context.batch, leave, news);
                !is_full(bypass, context.waiting)
            });
            context.now_held(held, connection.held());
            if connection.is_open() && !was_open {
                (self.tries, self.unconnected) = (0, false);
            }
            goes_on |= outcome == Outcome::More;
            if self.outlives(index, outcome, context, leave) {
                index += 1;
            }
        }
        goes_on
    }

    /// Does what is due; when to come again.
    pub fn tick(&mut self, context: &mut Context<'_>, leave: &mut dyn FnMut(Notice)) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut index = 0;
        while let Some((_, connection)) = self.connections.get_mut(index) {
            let (outcome, at) = connection.tick(context.now);
            if outcome == Outcome::Opened {
                (self.tries, self.unconnected) = (0, false);
                leave(Notice::Connected);
            }
            if self.outlives(index, outcome, context, leave) {
                next = Some(next.map_or(at, |next| next.min(at)));
                index += 1;
            }
        }
        if self.retry_at.is_some_and(|at| at <= context.now) {
            self.retry_at = None;
            if self.listener.is_some() {
                self.accept(context);
            } else {
                self.connect(context, leave);
            }
        }
        [next, self.retry_at].into_iter().flatten().min()
    }

    /// Whether a connection is still there after what it came to.
    fn outlives(
        &mut self,
        index: usize,
        outcome: Outcome,
        context: &mut Context<'_>,
        leave: &mut dyn FnMut(Notice),
    ) -> bool {
        let refusal = match outcome {
            Outcome::Idle | Outcome::More | Outcome::Stalled | Outcome::Opened => return true,
            Outcome::Ended => None,
            Outcome::Refused(refusal) => Some(refusal.0),
        };
        let (_, ended) = self.connections.swap_remove(index);
        context.now_held(ended.held(), 0);
        if self.listener.is_none() {
            match refusal {
                // Whether to try again is decided by who gets the notice.
                Some(reason) => leave(Notice::Refused(reason)),
                None => self.lost(context.now, leave),
            }
        } else if ended.is_open() {
            // What does not even say that it is an engine is of no concern.
            if let Some(reason) = refusal {
                leave(Notice::Refused(reason));
            }
            if !self.connections.iter().any(|(_, connection)| connection.is_open()) {
                leave(Notice::Unconnected);
            }
        }
        false
    }

    /// There is no connection; another one is tried after a while.
    fn lost(&mut self, now: Instant, leave: &mut dyn FnMut(Notice)) {
        if !std::mem::replace(&mut self.unconnected, true) {
            leave(Notice::Unconnected);
        }
        let pause = RETRY.saturating_mul(1 << self.tries.min(10)).min(MAX_RETRY);
        self.tries += 1;
        // Up to a quarter less, so that those of one engine's death do not all come back at once.
        let seed = [self.number, self.tries as usize, std::process::id() as usize];
        let jitter = xxh3_64(bytemuck::cast_slice(&seed)) % 256;
        self.retry_at = Some(now + pause - pause.mul_f64(jitter as f64 / 1024.0));
    }

    fn connect(&mut self, context: &mut Context<'_>, leave: &mut dyn FnMut(Notice)) {
        let connected = self.place.connect();
        if connected.and_then(|stream| self.watch(0, stream, context)).is_err() {
            self.lost(context.now, leave);
        }
    }

    /// Accepts what is there, up to a bound.
    fn accept(&mut self, context: &mut Context<'_>) {
        for _ in 0..SLOTS {
            let Some(listener) = &self.listener else { return };
            let stream = match listener.accept() {
                Ok(stream) => stream,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        self.retry_at = Some(context.now + ACCEPT_AGAIN);
                        return;
                    }
                },
            };
            let free = (1..SLOTS).find(|&slot| self.connections.iter().all(|(other, _)| *other != slot));
            if let Some(slot) = free {
                // One that cannot be watched is closed; the engine comes again.
                let _ = self.watch(slot, stream, context);
            }
        }
        self.called = true;
    }

    fn watch(&mut self, slot: usize, mut stream: Stream, context: &mut Context<'_>) -> io::Result<()> {
        keep_alive(&stream)?;
        context.registry.register(stream.source(), token(self.number, slot), INTEREST)?;
        let session = Session::new(&self.topic, self.longest_frame);
        let connection = Connection::new(stream, session, context.now);
        self.connections.push((slot, connection));
        Ok(())
    }
}

/// Whether a source is to be left unread for now.
fn is_full(bypass: &Bypass, waiting: &AtomicUsize) -> bool {
    bypass.stall_if_full(waiting.load(Ordering::Relaxed) >= WAITING_IN_ALL)
}

/// Applies what came, or leaves it to the event loop.
fn take(bypass: &Bypass, batch: &mut Batch, leave: &mut dyn FnMut(Notice), news: News<'_>) {
    let notice = match news {
        News::Opened => Notice::Connected,
        News::Message(Message::Malformed(lengths)) => Notice::Malformed(lengths),
        // What a subscriber is never sent.
        News::Message(Message::End) => return,
        News::Message(Message::Batch { seq, payload }) => match bypass.offer(seq, payload, batch) {
            Offered::Applied | Offered::Closed => return,
            Offered::Stopped => Notice::Stopped,
            Offered::Declined => Notice::Message { event_id: seq, payload: payload.to_vec() },
        },
    };
    leave(notice);
}
