//! One connection to an engine: a socket, what it speaks, and when it is given up.

use std::io;
use std::time::{Duration, Instant};

use super::zmtp::{Message, Refusal, Session, Step};
use crate::rpc::socket::Stream;

/// To be connected, and then for the handshake.
const STAGE: Duration = Duration::from_secs(5);
/// Between two PINGs, and how long an answer may take.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// Silence of ours after which an engine is to think that we are gone.
const TTL_SECONDS: u16 = 30;
/// For the rest of a message that has begun.
const MESSAGE: Duration = Duration::from_secs(30);
/// Bytes of messages that are not complete: what each connection may hold, and what all may beyond that.
const UNFINISHED: usize = 1024 * 1024;
pub const UNFINISHED_IN_ALL: usize = 256 * 1024 * 1024;
/// Capacity that is kept over a PING's time while nothing is held.
const KEPT: usize = 16 * 1024;

/// What a connection brings.
pub enum News<'a> {
    Opened,
    Message(Message<'a>),
}

/// How a outcome ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing is left to be done until the kernel or the clock says so.
    Idle,
    /// There may be more.
    More,
    /// Whoever takes the messages wants no more of them for now.
    Stalled,
    /// It is taken for open: nothing is wrong but that no PING was answered.
    Opened,
    /// The peer is gone, or was given up.
    Ended,
    Refused(Refusal),
}

pub struct Connection {
    stream: Stream,
    session: Session,
    connecting: bool,
    readable: bool,
    writable: bool,
    /// There is an end to be read behind what is there.
    ended: bool,
    /// Read, and not done with: from `done` on.
    left: Vec<u8>,
    done: usize,
    /// How many more bytes it takes to go on with that.
    wants: usize,
    stalled: bool,
    /// When the stage before the first message began; when what is in `left` began to be a part of a message.
    since: Instant,
    ping_at: Instant,
    /// The first PING that nothing came after.
    pinged: Option<Instant>,
}

impl Connection {
    /// Of a socket that is registered, connected or about to be.
    pub fn new(stream: Stream, session: Session, now: Instant) -> Self {
        Self {
            stream,
            session,
            connecting: true,
            readable: true,
            writable: true,
            ended: false,
            left: Vec::new(),
            done: 0,
            wants: 0,
            stalled: false,
            since: now,
            ping_at: now + PING_EVERY,
            pinged: None,
        }
    }

    pub fn is_open(&self) -> bool {
        self.session.is_open()
    }

    /// Bytes held.
    pub fn held(&self) -> usize {
        self.left.len()
    }

    /// Notes that it is left unread for now, so that silence means nothing.
    pub fn stall(&mut self) {
        self.stalled = true;
    }

    pub fn on_readiness(&mut self, readable: bool, writable: bool, ended: bool) {
        self.readable |= readable || ended;
        self.writable |= writable;
        self.ended |= ended;
    }

    /// Reads once, emits what that brings, and answers. `emit` returns whether it takes more.
    pub fn drive(
        &mut self,
        scratch: &mut [u8],
        room: usize,
        now: Instant,
        mut emit: impl FnMut(News) -> bool,
    ) -> Outcome {
        if self.connecting {
            match self.stream.connected() {
                None => return Outcome::Idle,
                Some(Err(_)) => return Outcome::Ended,
                Some(Ok(())) if self.stream.is_its_own_peer() => return Outcome::Ended,
                Some(Ok(())) => (self.connecting, self.since) = (false, now),
            }
        }
        let outcome = match self.receive(scratch, room, now, &mut emit) {
            Ok(outcome) => outcome,
            Err(refusal) => Outcome::Refused(refusal),
        };
        // An ERROR or a greeting of its own helps nobody any more.
        if matches!(outcome, Outcome::Ended | Outcome::Refused(_)) || self.send() {
            outcome
        } else {
            Outcome::Ended
        }
    }

    fn receive(
        &mut self,
        scratch: &mut [u8],
        room: usize,
        now: Instant,
        emit: &mut impl FnMut(News) -> bool,
    ) -> Result<Outcome, Refusal> {
        if self.stalled {
            // What was not read meanwhile is nobody's fault.
            (self.stalled, self.since, self.pinged) = (false, now, None);
            if !self.take_left(now, emit)? {
                return Ok(Outcome::Stalled);
            }
        }
        if !self.readable {
            return Ok(Outcome::Idle);
        }
        let count = match self.stream.read(scratch) {
            Ok(0) => return Ok(Outcome::Ended),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(Outcome::More),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                return Ok(Outcome::Idle);
            }
            Err(_) => return Ok(Outcome::Ended),
        };
        // Less than asked for is all there is; the kernel reports when more comes, but an end only once.
        self.readable = count == scratch.len() || self.ended;
        self.pinged = None;
        if !self.take(&scratch[..count], room, now, emit)? {
            return Ok(Outcome::Stalled);
        }
        Ok(if self.readable { Outcome::More } else { Outcome::Idle })
    }

    /// Takes what was read: where it completes what was left over before, and then as it is. Whether `emit` takes more.
    fn take(
        &mut self,
        mut bytes: &[u8],
        room: usize,
        now: Instant,
        emit: &mut impl FnMut(News) -> bool,
    ) -> Result<bool, Refusal> {
        while !bytes.is_empty() && !self.left.is_empty() {
            let (missing, rest) = bytes.split_at(self.wants.min(bytes.len()));
            self.keep(missing, room)?;
            bytes = rest;
            if !self.take_left(now, emit)? {
                self.keep(bytes, room)?;
                return Ok(false);
            }
        }
        if bytes.is_empty() {
            return Ok(true);
        }
        let (done, goes_on) = self.take_from(bytes, emit)?;
        if done < bytes.len() {
            self.begins(now);
            self.keep(&bytes[done..], room)?;
        }
        Ok(goes_on)
    }

    /// Takes what was left over, as far as it goes; whether `emit` takes more.
    fn take_left(&mut self, now: Instant, emit: &mut impl FnMut(News) -> bool) -> Result<bool, Refusal> {
        let left = std::mem::take(&mut self.left);
        let taken = self.take_from(&left[self.done..], emit);
        self.left = left;
        let (done, goes_on) = taken?;
        self.done += done;
        if self.done == self.left.len() {
            self.left.clear();
            // Not at once to nothing: fetching memory again, page by page, costs more than all the rest.
            self.left.shrink_to(UNFINISHED);
            self.done = 0;
        } else if done > 0 {
            self.begins(now);
            if goes_on {
                // All but a part of a message is gone.
                self.left.drain(..self.done);
                self.done = 0;
            }
        }
        Ok(goes_on)
    }

    /// Takes messages off some bytes; how many bytes they had, and whether `emit` takes more.
    fn take_from(
        &mut self,
        bytes: &[u8],
        emit: &mut impl FnMut(News) -> bool,
    ) -> Result<(usize, bool), Refusal> {
        let mut done = 0;
        loop {
            let (count, step) = self.session.step(&bytes[done..])?;
            done += count;
            let goes_on = match step {
                Step::Wants(count) => {
                    self.wants = count;
                    return Ok((done, true));
                }
                Step::Opened => emit(News::Opened),
                Step::Message(message) => emit(News::Message(message)),
            };
            if !goes_on {
                self.stalled = true;
                return Ok((done, false));
            }
        }
    }

    /// What is left over is another message's part than before.
    fn begins(&mut self, now: Instant) {
        if self.is_open() {
            self.since = now;
        }
    }

    fn keep(&mut self, bytes: &[u8], room: usize) -> Result<(), Refusal> {
        let held = self.left.len() + bytes.len();
        if held > UNFINISHED && held > room {
            return Err(Refusal(format!("one of too many unfinished messages ({held} bytes of it)")));
        }
        self.left.extend_from_slice(bytes);
        Ok(())
    }

    /// Sends what is to be sent, as far as the kernel takes it; false: it takes nothing any more.
    fn send(&mut self) -> bool {
        let out = &mut self.session.out;
        while self.writable && !out.is_empty() {
            match self.stream.write(out) {
                Ok(0) => return false,
                Ok(count) => drop(out.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Does what is due; how that ended, and when to come again.
    pub fn tick(&mut self, now: Instant) -> (Outcome, Instant) {
        if !self.is_open() {
            let until = self.since + STAGE;
            if until > now {
                return (Outcome::Idle, until);
            }
            return if self.session.assume_open() {
                (Outcome::Opened, self.ping_at)
            } else {
                (Outcome::Ended, until)
            };
        }
        if self.ping_at <= now {
            self.ping_at = now + PING_EVERY;
            if self.left.is_empty() {
                self.left.shrink_to(KEPT);
            }
            if self.session.knows_ping() {
                // Who does not read them does not answer either.
                if self.session.out.is_empty() {
                    self.session.ping(TTL_SECONDS);
                }
                self.pinged = self.pinged.or(Some(now));
            }
            if !self.send() {
                return (Outcome::Ended, now);
            }
        }
        let mut next = self.ping_at;
        if !self.stalled {
            let silent = self.pinged.map(|at| at + PING_TIMEOUT);
            let begun = (!self.left.is_empty()).then(|| self.since + MESSAGE);
            if silent.is_some_and(|until| until <= now) {
                return (Outcome::Ended, now);
            }
            if begun.is_some_and(|until| until <= now) {
                let reason = format!("a message that does not end within {} s", MESSAGE.as_secs());
                return (Outcome::Refused(Refusal(reason)), now);
            }
            next = [silent, begun].into_iter().flatten().fold(next, Instant::min);
        }
        (Outcome::Idle, next)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    const LONGEST: usize = 4 * UNFINISHED;
    /// A greeting of ZMTP 3.1, READY of a PUB, and the answer to a PING.
    const HANDSHAKE: &[u8] = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
        \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
        \x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB\x04\x05\x04PONG";

    /// A connection, its engine's end, and what it emitted.
    struct World {
        connection: Connection,
        engine: UnixStream,
        start: Instant,
        emitted: Vec<String>,
        /// Messages that are taken before no more are wanted.
        takes: usize,
    }

    impl World {
        fn new() -> Self {
            let (ours, engine) = UnixStream::pair().expect("sockets");
            ours.set_nonblocking(true).expect("a socket");
            engine.set_nonblocking(true).expect("a socket");
            let start = Instant::now();
            let stream = Stream::Unix(mio::net::UnixStream::from_std(ours));
            let connection = Connection::new(stream, Session::new(b"", LONGEST), start);
            Self { connection, engine, start, emitted: Vec::new(), takes: usize::MAX }
        }

        fn open() -> Self {
            let mut world = Self::new();
            assert_eq!(world.say(HANDSHAKE, 0.0), Outcome::Idle);
            assert_eq!(world.emitted, ["opened"]);
            world.received();
            world
        }

        fn at(&self, seconds: f64) -> Instant {
            self.start + Duration::from_secs_f64(seconds)
        }

        fn say(&mut self, bytes: &[u8], seconds: f64) -> Outcome {
            self.engine.write_all(bytes).expect("a connection");
            self.connection.on_readiness(true, true, false);
            self.drive(seconds, UNFINISHED_IN_ALL)
        }

        fn drive(&mut self, seconds: f64, room: usize) -> Outcome {
            let now = self.at(seconds);
            let mut scratch = vec![0; 128 * 1024];
            let mut outcome = Outcome::More;
            while outcome == Outcome::More {
                let (emitted, takes) = (&mut self.emitted, &mut self.takes);
                outcome = self.connection.drive(&mut scratch, room, now, |news| {
                    *takes -= 1;
                    emitted.push(match news {
                        News::Opened => "opened".into(),
                        News::Message(Message::Batch { seq, payload }) => format!("{seq}: {}", payload.len()),
                        News::Message(Message::Malformed(lengths)) => format!("{lengths:?}"),
                        News::Message(Message::End) => "end".into(),
                    });
                    *takes > 0
                });
            }
            outcome
        }

        fn tick(&mut self, seconds: f64) -> Outcome {
            let now = self.at(seconds);
            self.connection.tick(now).0
        }

        fn received(&mut self) -> Vec<u8> {
            let mut bytes = vec![0; 4096];
            let count = self.engine.read(&mut bytes).unwrap_or(0);
            bytes.truncate(count);
            bytes
        }
    }

    fn batch(seq: u64, length: usize) -> Vec<u8> {
        let mut bytes = [&b"\x01\x00\x01\x08"[..], &seq.to_be_bytes(), b"\x02"].concat();
        bytes.extend((length as u64).to_be_bytes());
        bytes.resize(bytes.len() + length, 0);
        bytes
    }

    #[test]
    fn an_engine_that_answers_no_ping_is_taken_for_open_after_a_while() {
        let mut world = World::new();
        assert_eq!(world.say(&HANDSHAKE[..HANDSHAKE.len() - 7], 0.0), Outcome::Idle);
        assert_eq!(world.tick(4.9), Outcome::Idle);
        assert!(!world.connection.is_open());
        assert_eq!(world.tick(5.0), Outcome::Opened);
        assert!(world.connection.is_open());
    }

    #[test]
    fn an_engine_that_accepts_and_does_not_end_its_greeting_is_given_up() {
        let mut world = World::new();
        for (count, byte) in HANDSHAKE[..40].iter().enumerate() {
            assert_eq!(world.say(&[*byte], 0.1 * count as f64), Outcome::Idle);
        }
        assert_eq!(world.tick(4.9), Outcome::Idle);
        assert_eq!(world.tick(5.0), Outcome::Ended);
    }

    #[test]
    fn a_silent_engine_is_pinged_and_given_up_when_nothing_comes() {
        let mut world = World::open();
        let ping = b"\x04\x07\x04PING\x01\x2c";
        assert_eq!(world.tick(4.9), Outcome::Idle);
        assert_eq!(world.received(), b"");
        assert_eq!(world.tick(5.0), Outcome::Idle);
        assert_eq!(world.received(), ping);
        assert_eq!(world.say(b"\x04\x05\x04PONG", 6.0), Outcome::Idle);
        for seconds in [10.0, 15.0, 20.0] {
            assert_eq!(world.tick(seconds), Outcome::Idle);
            assert_eq!(world.received(), ping);
        }
        assert_eq!(world.tick(24.9), Outcome::Idle);
        assert_eq!(world.tick(25.0), Outcome::Ended);
    }

    #[test]
    fn a_silent_engine_of_zmtp_3_0_is_neither_pinged_nor_given_up() {
        let mut world = World::new();
        let mut handshake = HANDSHAKE[..HANDSHAKE.len() - 7].to_vec();
        handshake[11] = 0;
        assert_eq!(world.say(&handshake, 0.0), Outcome::Idle);
        assert!(world.received().ends_with(b"\x00\x01\x01"), "a subscription is the last that it hears");
        assert_eq!(world.tick(5.0), Outcome::Opened);
        for seconds in [10.0, 20.0, 100.0, 1000.0] {
            assert_eq!(world.tick(seconds), Outcome::Idle);
            assert_eq!(world.received(), b"");
        }
        assert_eq!(world.say(&batch(1, 3), 1001.0), Outcome::Idle);
        assert_eq!(world.emitted, ["1: 3"]);
        // One that sends PINGs knows them, whatever it greets as.
        assert_eq!(world.say(b"\x04\x07\x04PING\x00\x00", 1002.0), Outcome::Idle);
        assert_eq!(world.received(), b"\x04\x05\x04PONG");
        assert_eq!(world.tick(1010.0), Outcome::Idle);
        assert_eq!(world.received(), b"\x04\x07\x04PING\x01\x2c");
        assert_eq!(world.tick(1025.0), Outcome::Ended);
    }

    #[test]
    fn an_engine_is_not_silent_while_it_is_left_unread() {
        let mut world = World::open();
        world.takes = 1;
        assert_eq!(world.say(&[batch(1, 9), batch(2, 9)].concat(), 1.0), Outcome::Stalled);
        for seconds in [6.0, 12.0, 40.0, 80.0] {
            assert_eq!(world.tick(seconds), Outcome::Idle);
        }
        world.takes = usize::MAX;
        assert_eq!(world.drive(81.0, UNFINISHED_IN_ALL), Outcome::Idle);
        assert_eq!(world.tick(81.1), Outcome::Idle);
        assert_eq!(world.emitted, ["opened", "1: 9", "2: 9"]);
    }

    #[test]
    fn messages_are_told_in_order_whoever_stops_and_goes_on() {
        let mut world = World::open();
        let bytes: Vec<u8> = (0..60).flat_map(|seq| batch(seq, seq as usize * 7)).collect();
        let mut seconds = 0.0;
        for (count, chunk) in bytes.chunks(101).enumerate() {
            world.takes = 1 + count % 3;
            let mut outcome = world.say(chunk, seconds);
            while outcome == Outcome::Stalled {
                world.takes = 2;
                outcome = world.drive(seconds, UNFINISHED_IN_ALL);
            }
            assert_eq!(outcome, Outcome::Idle);
            seconds += 0.001;
        }
        let wanted: Vec<String> = (0..60).map(|seq| format!("{seq}: {}", seq * 7)).collect();
        assert_eq!(world.emitted[1..], wanted);
        assert_eq!(world.connection.held(), 0);
    }

    #[test]
    fn a_message_that_does_not_end_is_refused_however_busy_its_engine_is() {
        let mut world = World::open();
        let bytes = batch(1, 1000);
        for count in 0_u8..30 {
            assert_eq!(world.say(&bytes[usize::from(count)..][..1], f64::from(count)), Outcome::Idle);
            assert_eq!(world.tick(f64::from(count)), Outcome::Idle);
        }
        let reason = "a message that does not end within 30 s";
        assert_eq!(world.tick(30.0), Outcome::Refused(Refusal(reason.into())));
    }

    #[test]
    fn what_is_announced_takes_no_memory_until_it_comes_and_no_more_than_there_is() {
        let mut world = World::open();
        let bytes = batch(1, LONGEST);
        assert_eq!(world.say(&bytes[..100], 1.0), Outcome::Idle);
        assert_eq!(world.connection.held(), 100);
        assert!(world.connection.left.capacity() < 4096);
        let mut outcome = Outcome::Idle;
        let mut sent = 100;
        while outcome == Outcome::Idle && sent < bytes.len() {
            sent += world.engine.write(&bytes[sent..]).expect("a connection");
            world.connection.on_readiness(true, true, false);
            outcome = world.drive(1.0, 2 * UNFINISHED);
        }
        assert!(
            matches!(outcome, Outcome::Refused(Refusal(reason)) if reason.starts_with("one of too many"))
        );
        assert!(world.connection.held() <= 2 * UNFINISHED);
    }

    #[test]
    fn an_end_behind_messages_is_seen_after_them() {
        let mut world = World::open();
        world.engine.write_all(&batch(1, 3)).expect("a connection");
        drop(std::mem::replace(&mut world.engine, UnixStream::pair().expect("sockets").0));
        world.connection.on_readiness(true, true, true);
        assert_eq!(world.drive(1.0, UNFINISHED_IN_ALL), Outcome::Ended);
        assert_eq!(world.emitted, ["opened", "1: 3"]);
    }
}
