//! The clients of an `Http`: requests, the connections that they share, and where their answers go.

use std::io;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Interest, Token};

use super::client::{Client, End, Outcome, Step, Target};
use super::events::{EventRelay, Report};
use super::server::Room;
use super::wire::Wire;
use super::{Connection, Event, Http, Messages, Peer, Side};
use crate::rpc::socket::{Stream, configure};

/// Steps of one connection before the next one is driven.
const STEPS: usize = 16;

impl Http {
    /// Sends a request on a connection that is idle, or else on a new one; `None`: there is neither.
    ///
    /// # Errors
    /// There is no socket to be had, or no way to the address.
    pub fn send(
        &mut self,
        origin: &str,
        peer: Option<Peer>,
        method: &str,
        request: &[u8],
    ) -> io::Result<Option<u64>> {
        let key = match (self.take_idle(origin), peer) {
            (Some(key), _) => key,
            (None, Some(peer)) => self.connect(origin, peer)?,
            (None, None) => return Ok(None),
        };
        let answer = self.answers.insert_with(|_| key);
        if let Some(Connection { wire, side: Side::Client(client), .. }) = self.connections.get_mut(key) {
            client.ask(answer, method);
            wire.out().extend_from_slice(request);
        }
        self.mark_due(key);
        Ok(Some(answer))
    }

    fn take_idle(&mut self, origin: &str) -> Option<u64> {
        loop {
            let key = self.idle.get_mut(origin)?.pop()?;
            let Some(Connection { wire, side: Side::Client(client), .. }) = self.connections.get_mut(key)
            else {
                continue;
            };
            // What the kernel has said meanwhile may be that its peer closed it.
            let now = Instant::now();
            wire.begin_poll();
            wire.begin_slice();
            match client.step(wire, &mut self.scratch, now, 0.0) {
                Step::Waits => return Some(key),
                _ => self.close(key, ""),
            }
        }
    }

    fn connect(&mut self, origin: &str, peer: Peer) -> io::Result<u64> {
        let mut stream = TcpStream::connect(peer.address)?;
        configure(&stream, self.vanished)?;
        let registry = self.poll.registry();
        let mut registered = Ok(());
        let now = Instant::now();
        let key = self.connections.insert_with(|key| {
            let interest = Interest::READABLE | Interest::WRITABLE;
            registered = registry.register(&mut stream, Token(key as usize), interest);
            let client = Client::new(origin.to_owned(), now + peer.connect, now);
            Connection {
                wire: Wire::connecting(Stream::Tcp(stream), peer.tls),
                side: Side::Client(Box::new(client)),
                peer: peer.address.to_string(),
                ahead: 0,
                is_due: false,
            }
        });
        if let Err(error) = registered {
            self.connections.remove(key);
            return Err(error);
        }
        Ok(key)
    }

    pub(super) fn drive_client(&mut self, key: u64, messages: &mut dyn Messages) {
        for _ in 0..STEPS {
            let now = Instant::now();
            let clock = self.clock(now);
            let Some(connection) = self.connections.get_mut(key) else { return };
            let Connection { wire, side: Side::Client(client), .. } = connection else { return };
            match client.step(wire, &mut self.scratch, now, clock) {
                Step::Waits => return,
                Step::Head(head) => {
                    if let Some(answer) = client.answer {
                        self.news.push(Event::Answer(answer, head.status, head.headers));
                    }
                }
                Step::Passes(data) => self.pass(key, data, messages, now),
                Step::Ends(end) => return self.finish(key, end, now),
                Step::Free => {
                    let origin = client.origin.clone();
                    return self.idle.entry(origin).or_default().push(key);
                }
                Step::Over => return self.close(key, ""),
            }
        }
        self.mark_due(key);
    }

    /// Gives some of an answer to whom it goes to.
    fn pass(&mut self, key: u64, mut data: Vec<u8>, messages: &mut dyn Messages, now: Instant) {
        let Some(Connection { side: Side::Client(client), .. }) = self.connections.get_mut(key) else {
            return;
        };
        let Some(answer) = client.answer else { return };
        if !client.told_first && client.report().outputs > 0 {
            client.told_first = true;
            self.news.push(Event::First(answer));
        }
        let mut end = client.ending();
        if !data.is_empty() {
            if !client.first.is_empty() {
                let rest = std::mem::replace(&mut data, std::mem::take(&mut client.first));
                data.extend_from_slice(&rest);
            }
            let room = match &mut client.target {
                Some(Target::Kept(kept, most)) => {
                    kept.extend_from_slice(&data);
                    if kept.len() > *most {
                        let text = format!("an answer of over {most} bytes");
                        end = Some(End::new(Outcome::Protocol, text));
                    }
                    Room::Yes
                }
                Some(Target::Chunks) => {
                    self.news.push(Event::Chunk(answer, data));
                    Room::Full
                }
                Some(Target::Messages(server, call)) => {
                    if messages.send(*server, *call, &data) {
                        Room::Yes
                    } else {
                        self.news.push(Event::Full(answer));
                        Room::Full
                    }
                }
                Some(Target::Call(call, _)) => {
                    let call = *call;
                    self.write_from(call, &data, Some(key))
                }
                None => Room::Yes,
            };
            let clock = self.clock;
            let began = self.began;
            let Some(Connection { side: Side::Client(client), .. }) = self.connections.get_mut(key) else {
                return;
            };
            match room {
                Room::Yes => {
                    client.report_mut().listening_since = clock + now.duration_since(began).as_secs_f64();
                }
                Room::Full => {
                    client.paused = Some(now);
                    client.report_mut().listening_since = f64::INFINITY;
                }
                Room::Gone => end = Some(End::new(Outcome::SinkGone, "the client has gone")),
            }
        }
        if let Some(end) = end {
            self.finish(key, end, now);
        }
    }

    /// An answer is over: reports it, and keeps its connection for the next if it can be used again.
    pub(super) fn finish(&mut self, key: u64, end: End, now: Instant) {
        let Some(Connection { wire, side: Side::Client(client), .. }) = self.connections.get_mut(key) else {
            return;
        };
        let (answer, target) = (client.answer, client.target.take());
        let report = client.report().clone();
        let kept = client.finish(wire, &end, now);
        let (is_idle, origin) = (client.is_idle(), client.origin.clone());
        if let Some(answer) = answer {
            self.answers.remove(answer);
            let body = match target {
                Some(Target::Kept(body, _)) if end.outcome == Outcome::Whole => body,
                Some(Target::Call(call, ends)) => {
                    self.release(call);
                    if ends && end.outcome == Outcome::Whole && report.done && report.error.is_empty() {
                        self.end(call);
                    }
                    Vec::new()
                }
                _ => Vec::new(),
            };
            self.news.push(Event::Ended(answer, end, Box::new(report), body));
        }
        if !kept {
            self.close(key, "");
        } else if is_idle {
            self.idle.entry(origin).or_default().push(key);
        } else {
            self.mark_due(key);
        }
    }

    /// Nothing is pumped into a call any more.
    pub(super) fn release(&mut self, call: u64) {
        if let Some((_, Connection { side: Side::Server { feeder, .. }, .. })) = self.call(call) {
            *feeder = None;
        }
    }

    fn answer(&mut self, answer: u64) -> Option<(u64, &mut Client)> {
        let key = *self.answers.get(answer)?;
        match self.connections.get_mut(key) {
            Some(Connection { side: Side::Client(client), .. }) => Some((key, client)),
            _ => None,
        }
    }

    /// Keeps the body of an answer until it is whole, up to a number of bytes.
    pub fn keep(&mut self, answer: u64, most: usize) {
        self.aim(answer, Target::Kept(Vec::new(), most), None, Duration::MAX, Vec::new());
    }

    /// Emits the body of an answer chunk by chunk, as it is or through a relay; `resume` follows each.
    pub fn stream(&mut self, answer: u64, events: Option<EventRelay>) {
        self.aim(answer, Target::Chunks, events, Duration::MAX, Vec::new());
    }

    /// Passes the body of an answer to a call here; `first` goes out before the first bytes of it, and with them.
    ///
    /// `ends`: the call is answered where the stream is done and has reported no error.
    pub fn pass_to_call(
        &mut self,
        answer: u64,
        (call, ends): (u64, bool),
        events: Option<EventRelay>,
        write: Duration,
        first: Vec<u8>,
    ) {
        self.aim(answer, Target::Call(call, ends), events, write, first);
    }

    /// Passes the body of an answer to a call of a gRPC server; as `pass_to_call`.
    pub fn pass_to_messages(
        &mut self,
        answer: u64,
        (server, call): (usize, u64),
        events: EventRelay,
        write: Duration,
        first: Vec<u8>,
    ) {
        self.aim(answer, Target::Messages(server, call), Some(events), write, first);
    }

    fn aim(
        &mut self,
        answer: u64,
        target: Target,
        events: Option<EventRelay>,
        write: Duration,
        first: Vec<u8>,
    ) {
        let clock = self.clock(Instant::now());
        let Some((key, client)) = self.answer(answer) else { return };
        client.target = Some(target);
        client.events = events;
        client.write_limit = write;
        client.first = first;
        client.report_mut().listening_since = clock;
        self.mark_due(key);
    }

    /// The target of an answer takes more.
    pub fn resume(&mut self, answer: u64) {
        let clock = self.clock(Instant::now());
        let Some((key, client)) = self.answer(answer) else { return };
        client.paused = None;
        client.report_mut().listening_since = clock;
        self.mark_due(key);
    }

    /// What was noticed of an answer until now.
    pub fn report(&mut self, answer: u64) -> Option<&Report> {
        self.answer(answer).map(|(_, client)| client.report())
    }

    /// Closes the connection of an answer, unless that is over.
    pub fn abort(&mut self, answer: u64) {
        if let Some((key, _)) = self.answer(answer) {
            self.close(key, "it was aborted");
        }
    }

    /// Closes the connections of clients to these origins that nobody uses.
    pub fn close_idle(&mut self, begins: &str) {
        for key in self.connections.keys() {
            let of = match self.connections.get(key).map(|connection| &connection.side) {
                Some(Side::Client(client)) => client.answer.is_none() && client.origin.starts_with(begins),
                _ => false,
            };
            if of {
                self.close(key, "");
            }
        }
    }
}
