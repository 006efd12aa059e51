//! One replay: a socket that asks an engine for its past batches and reads the replies, until they end or stay away.

use std::io;
use std::time::{Duration, Instant};

use mio::event::Event;

use super::bypass::{Bypass, Offered};
use super::connection::{Connection, News, Outcome};
use super::intake::Notice;
use super::place::{Place, keep_alive};
use super::source::{Context, INTEREST, RETRY, token};
use super::zmtp::{Message, Session};
use crate::events::Batch;

/// Replies left to the event loop at a time, at most.
const WIDEST: usize = 128;

/// What is requested, and for how long it is waited for.
#[derive(Debug, Clone)]
pub struct Request {
    pub place: Place,
    pub first_id: u64,
    pub longest_frame: usize,
    /// Until the first reply comes.
    pub first_within: Duration,
    /// Until the next one does.
    pub next_within: Duration,
}

/// Reads one replay.
pub struct Replay {
    number: usize,
    request: Request,
    connection: Option<Connection>,
    /// When to connect; None: it is, or is being, connected.
    connect_at: Option<Instant>,
    answered: bool,
    /// Replies that may be left to the event loop before they were dealt with: one, so that a position can be lent behind
    /// it, and more where none is.
    window: usize,
    /// Replies of it that were left.
    left: usize,
    /// Left unread for now, so that silence means nothing.
    stalled: bool,
    /// When it is over for want of a reply.
    silent_at: Instant,
    /// Its end was reported.
    over: bool,
}

impl Replay {
    pub fn new(number: usize, request: Request) -> Self {
        let now = Instant::now();
        Self {
            number,
            silent_at: now + request.first_within,
            request,
            connection: None,
            connect_at: Some(now),
            answered: false,
            window: 1,
            left: 0,
            stalled: false,
            over: false,
        }
    }

    pub fn held(&self) -> usize {
        self.connection.as_ref().map_or(0, Connection::held)
    }

    pub fn due_at(&self) -> Option<Instant> {
        (!self.over && !self.stalled)
            .then(|| self.connect_at.map_or(self.silent_at, |at| at.min(self.silent_at)))
    }

    pub fn on_readiness(&mut self, event: &Event) {
        if let Some(connection) = &mut self.connection {
            let ended = event.is_read_closed() || event.is_error();
            connection.on_readiness(event.is_readable(), event.is_writable(), ended);
        }
    }

    /// Reads once; whether there may be more.
    pub fn drive(
        &mut self,
        context: &mut Context<'_>,
        bypass: &Bypass,
        leave: &mut dyn FnMut(Notice),
    ) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        if bypass.stall_if_full(false) {
            self.stalled = true;
            connection.stall();
            return false;
        }
        let mut heard = std::mem::take(&mut self.stalled);
        if heard {
            self.left = 0;
        }
        let (window, left) = (&mut self.window, &mut self.left);
        let held = connection.held();
        let room = context.room(held);
        let mut end = None;
        let outcome = connection.drive(context.scratch, room, context.now, |news| {
            if let News::Message(message) = news {
                heard = true;
                let mut leave = |notice: Notice| {
                    *left += 1;
                    if *left >= *window {
                        *window = (2 * *window).min(WIDEST);
                        bypass.pause(true);
                    }
                    leave(notice);
                };
                end = take(bypass, context.batch, &mut leave, message);
                if *left == 0 {
                    *window = 1;
                }
            }
            end.is_none() && !bypass.stall_if_full(false)
        });
        context.now_held(held, connection.held());
        self.answered |= heard;
        if heard {
            self.silent_at = context.now + self.request.next_within;
        }
        match (end, outcome) {
            (Some(notice), _) => self.end(notice, context, leave),
            (None, Outcome::More) => return true,
            (None, Outcome::Stalled) => self.stalled = true,
            (None, outcome) => self.outlive(outcome, context, leave),
        }
        false
    }

    /// Does what is due; when to come again.
    pub fn tick(&mut self, context: &mut Context<'_>, leave: &mut dyn FnMut(Notice)) -> Option<Instant> {
        if self.over || self.stalled {
            return None;
        }
        if self.silent_at <= context.now {
            let waited = if self.answered { self.request.next_within } else { self.request.first_within };
            let reason = format!("silent for {} s", waited.as_secs_f64());
            self.end(Notice::ReplayBroken(reason), context, leave);
        } else if self.connect_at.is_some_and(|at| at <= context.now) {
            self.connect_at = None;
            if self.connect(context).is_err() {
                self.connect_at = Some(context.now + RETRY);
            }
        } else if let Some(connection) = &mut self.connection {
            let (outcome, at) = connection.tick(context.now);
            self.outlive(outcome, context, leave);
            return self.due_at().map(|due| due.min(at));
        }
        self.due_at()
    }

    /// Connects again where nothing was answered yet, as whoever is restarted may be there in a moment.
    fn outlive(&mut self, outcome: Outcome, context: &mut Context<'_>, leave: &mut dyn FnMut(Notice)) {
        match outcome {
            Outcome::Idle | Outcome::More | Outcome::Stalled | Outcome::Opened => {}
            Outcome::Ended if !self.answered => {
                self.disconnect(context);
                self.connect_at = Some(context.now + RETRY);
            }
            Outcome::Ended => {
                self.end(Notice::ReplayBroken("the connection ended".into()), context, leave);
            }
            Outcome::Refused(refusal) => {
                self.end(Notice::ReplayBroken(refusal.0), context, leave);
            }
        }
    }

    fn end(&mut self, notice: Notice, context: &mut Context<'_>, leave: &mut dyn FnMut(Notice)) {
        self.over = true;
        self.connect_at = None;
        self.disconnect(context);
        leave(notice);
    }

    fn disconnect(&mut self, context: &mut Context<'_>) {
        context.now_held(self.connection.take().as_ref().map_or(0, Connection::held), 0);
    }

    fn connect(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let mut stream = self.request.place.connect()?;
        keep_alive(&stream)?;
        context.registry.register(stream.source(), token(self.number, 0), INTEREST)?;
        let session = Session::requesting(self.request.first_id, self.request.longest_frame);
        self.connection = Some(Connection::new(stream, session, context.now));
        Ok(())
    }
}

/// Applies a reply, or leaves it to the event loop; what there is to report if it was the last one.
fn take(
    bypass: &Bypass,
    batch: &mut Batch,
    leave: &mut dyn FnMut(Notice),
    message: Message<'_>,
) -> Option<Notice> {
    match message {
        Message::End => return Some(Notice::ReplayEnd),
        Message::Malformed(lengths) => {
            return Some(Notice::ReplayBroken(format!(
                "want seq and payload at the end; got frames of {lengths:?} bytes"
            )));
        }
        Message::Batch { seq, payload } => match bypass.offer(seq, payload, batch) {
            Offered::Applied | Offered::Closed => {}
            Offered::Stopped => leave(Notice::ReplayStopped),
            Offered::Declined => leave(Notice::Reply { event_id: seq, payload: payload.to_vec() }),
        },
    }
    None
}
