//! ZMTP 3.0 and 3.1 as a subscriber without security speaks it, and who asks for a replay, apart from any socket: bytes
//! in; messages, and what is to be answered, out. <https://rfc.zeromq.org/spec/37/>
//!
//! ```text
//! us      greeting · READY(SUB) · SUBSCRIBE(topic) · PING ······ PONG ·····
//! engine  greeting · READY(PUB) ················· PONG · message · PING · message ···
//!
//! us      greeting · READY(DEALER) · request ································
//! engine  greeting · READY(ROUTER) ··········· reply · reply · end of the replay
//! ```
//!
//! PING came with 3.1: a peer that greets as 3.0 is sent none, and whether it is still there is left to TCP.

/// Frames of a malformed message whose lengths are reported.
const SHOWN: usize = 8;
/// Frames of a message, at most.
const MOST_FRAMES: usize = 64;
/// Bytes of a message beside its longest frame, with the commands between its frames; and of a command.
const BESIDE: usize = 64 * 1024;
/// Bytes of answers that wait for the peer to read them.
const UNSENT: usize = 64 * 1024;
/// Bytes of a PING that are sent back.
const CONTEXT: usize = 16;

const GREETING: usize = 64;
const SIGNATURE: [u8; 10] = [0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f];
const MAJOR: usize = 10;
const MINOR: usize = 11;
const MECHANISM: std::ops::Range<usize> = 12..32;
const NULL: &[u8] = b"NULL";

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection is not read any further.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal(pub String);

/// What was published.
#[derive(Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// In three frames, the second of 8 bytes.
    Batch { seq: u64, payload: &'a [u8] },
    /// In others; the lengths of the first ones.
    Malformed(Vec<usize>),
    /// All replies to a request for a replay came.
    End,
}

/// What comes next in a connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The peer knows what we subscribed to: no message passes us by from here on.
    Opened,
    Message(Message<'a>),
    /// Nothing before this number of further bytes.
    Wants(usize),
}

/// What we are to the peer.
#[derive(Debug)]
enum Role {
    /// Of what begins with a topic.
    Subscriber { topic: Box<[u8]> },
    /// Asks for all batches from this one on.
    Requester { first_id: u64 },
}

impl Role {
    fn ready(&self) -> &'static [u8] {
        match self {
            Self::Subscriber { .. } => b"\x0bSocket-Type\0\0\0\x03SUB",
            Self::Requester { .. } => b"\x0bSocket-Type\0\0\0\x06DEALER",
        }
    }

    /// Types of sockets that the peer may have, of which ZMQ connects others as well.
    fn peers(&self) -> [&'static str; 2] {
        match self {
            Self::Subscriber { .. } => ["PUB", "XPUB"],
            Self::Requester { .. } => ["ROUTER", "REP"],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Greeting,
    Handshake,
    /// Until an answer to the PING behind the subscription shows that this came.
    Subscribing,
    Open,
}

/// One connection's protocol.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    role: Role,
    longest_frame: usize,
    /// The peer takes subscriptions as commands (3.1), not as messages (3.0).
    by_command: bool,
    /// The peer knows PING: it greets as 3.1, or has sent one. Others answer none, or end the connection at one.
    knows_ping: bool,
    /// Of the message that is not complete: bytes that were looked at, frames in them, where the first ones are.
    scanned: usize,
    frames: usize,
    spans: [(usize, usize); SHOWN],
    /// To be sent.
    pub out: Vec<u8>,
}

impl Session {
    /// To whoever publishes what begins with a topic.
    pub fn new(topic: &[u8], longest_frame: usize) -> Self {
        Self::of(Role::Subscriber { topic: topic.into() }, longest_frame)
    }

    /// To whoever replays, with a request for all batches from one on.
    pub fn requesting(first_id: u64, longest_frame: usize) -> Self {
        Self::of(Role::Requester { first_id }, longest_frame)
    }

    fn of(role: Role, longest_frame: usize) -> Self {
        let mut greeting = [0; GREETING];
        greeting[..SIGNATURE.len()].copy_from_slice(&SIGNATURE);
        (greeting[MAJOR], greeting[MINOR]) = (3, 1);
        greeting[MECHANISM][..NULL.len()].copy_from_slice(NULL);
        Self {
            phase: Phase::Greeting,
            role,
            longest_frame,
            by_command: false,
            knows_ping: false,
            scanned: 0,
            frames: 0,
            spans: [(0, 0); SHOWN],
            out: greeting.to_vec(),
        }
    }

    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Whether the peer answers PINGs, so that its silence means that it is gone.
    pub fn knows_ping(&self) -> bool {
        self.knows_ping
    }

    /// Takes it for granted that a subscription came, after a while: not every peer answers PINGs. Whether there was one.
    pub fn assume_open(&mut self) -> bool {
        let subscribing = self.phase == Phase::Subscribing;
        if subscribing {
            self.phase = Phase::Open;
        }
        subscribing
    }

    /// Asks for a sign of life, and to be forgotten if none of ours comes for so long; 0: not.
    pub fn ping(&mut self, ttl_seconds: u16) {
        let ttl = ttl_seconds.saturating_mul(10).to_be_bytes();
        self.command(b"PING", &[&ttl]);
    }

    /// Reads on: how many of the bytes are done with, and what they held.
    ///
    /// The bytes begin where those before them were done with; a message that is not complete is not.
    ///
    /// # Errors
    /// The peer breaks the protocol, or a bound.
    pub fn step<'a>(&mut self, bytes: &'a [u8]) -> Result<(usize, Step<'a>), Refusal> {
        let mut done = 0;
        if self.phase == Phase::Greeting {
            if let Some(missing) = self.greet(bytes)? {
                return Ok((0, Step::Wants(missing)));
            }
            done = GREETING;
        }
        loop {
            let rest = &bytes[done..];
            let (flags, start, length) = match header(&rest[self.scanned..]) {
                Ok(header) => header,
                Err(missing) => return Ok((done, Step::Wants(missing))),
            };
            if flags & COMMAND == 0 && self.assume_open() {
                return Ok((done, Step::Opened));
            }
            let end = self.end_of_frame(flags, start, length)?;
            let Some(body) = rest.get(self.scanned + start..end) else {
                return Ok((done, Step::Wants(end - rest.len())));
            };
            let begins = self.scanned + start;
            self.scanned = end;
            if flags & COMMAND != 0 {
                let opened = self.obey(body)?;
                if self.frames == 0 {
                    (done, self.scanned) = (done + end, 0);
                }
                if opened {
                    return Ok((done, Step::Opened));
                }
                continue;
            }
            if self.phase != Phase::Open {
                return Err(Refusal("a message before the handshake was done".into()));
            }
            if let Some(span) = self.spans.get_mut(self.frames) {
                *span = (begins, end);
            }
            self.frames += 1;
            if flags & MORE != 0 {
                continue;
            }
            (done, self.scanned) = (done + end, 0);
            let frames = std::mem::take(&mut self.frames);
            let spans = &self.spans[..frames.min(SHOWN)];
            // Who publishes leaves out what was not asked for; who does not know how to is no publisher of ours.
            let message = match &self.role {
                Role::Subscriber { topic } if !rest[spans[0].0..spans[0].1].starts_with(topic) => continue,
                Role::Subscriber { .. } => message(rest, spans),
                Role::Requester { .. } => reply(rest, spans),
            };
            return Ok((done, Step::Message(message)));
        }
    }

    /// Judges as much of the greeting as is there; how many bytes of it are missing.
    fn greet(&mut self, bytes: &[u8]) -> Result<Option<usize>, Refusal> {
        // Eight bytes are padding. Who speaks ZMTP 1 says nothing that could be taken for the tenth.
        let starts = bytes.first().is_none_or(|&byte| byte == 0xff);
        if !starts || bytes.get(9).is_some_and(|&byte| byte & 1 == 0) {
            return Err(Refusal("what is not ZMQ's".into()));
        }
        if let Some(&major) = bytes.get(MAJOR)
            && major < 3
        {
            return Err(Refusal(format!("a greeting of ZMTP {major}, which is older than 3.0")));
        }
        let Some(greeting) = bytes.get(..GREETING) else { return Ok(Some(GREETING - bytes.len())) };
        let mechanism = greeting[MECHANISM].split(|&byte| byte == 0).next().unwrap_or_default();
        if mechanism != NULL {
            let mechanism = mechanism.escape_ascii();
            return Err(Refusal(format!("a greeting that wants the security mechanism {mechanism}")));
        }
        self.by_command = greeting[MAJOR] > 3 || greeting[MINOR] >= 1;
        self.knows_ping = self.by_command;
        self.phase = Phase::Handshake;
        self.command(b"READY", &[self.role.ready()]);
        Ok(None)
    }

    /// Where a frame ends; its header was read, its body may not be there.
    fn end_of_frame(&self, flags: u8, start: usize, length: u64) -> Result<usize, Refusal> {
        let command = flags & COMMAND != 0;
        if flags & !(MORE | LONG | COMMAND) != 0 || (command && flags & MORE != 0) {
            return Err(Refusal(format!("a frame with flags {flags:#04x}, which is not ZMQ's")));
        }
        let longest = if command { BESIDE } else { self.longest_frame };
        let length = match usize::try_from(length) {
            Ok(length) if length <= longest => length,
            _ => return Err(Refusal(format!("a frame above {longest} bytes"))),
        };
        if !command && self.frames == MOST_FRAMES {
            return Err(Refusal(format!("a message of more than {MOST_FRAMES} frames")));
        }
        let end = self.scanned + start + length;
        let most = self.longest_frame + BESIDE;
        if end > most { Err(Refusal(format!("a message above {most} bytes"))) } else { Ok(end) }
    }

    /// Does what a command says; whether that was the end of the handshake.
    fn obey(&mut self, command: &[u8]) -> Result<bool, Refusal> {
        let named = command.split_first().and_then(|(&length, rest)| rest.split_at_checked(length.into()));
        let Some((name, data)) = named else { return Err(Refusal("a command without a name".into())) };
        match (self.phase, name) {
            (Phase::Handshake, b"READY") => {
                let kind = socket_type(data).unwrap_or_default();
                let [usual, other] = self.role.peers();
                if kind != usual.as_bytes() && kind != other.as_bytes() {
                    let kind = kind.escape_ascii();
                    return Err(Refusal(format!("a socket of type \"{kind}\", and not {usual} or {other}")));
                }
                let first_id = match &self.role {
                    Role::Requester { first_id } => first_id.to_be_bytes(),
                    Role::Subscriber { topic } => {
                        let topic = topic.clone();
                        self.subscribe(&topic);
                        return Ok(false);
                    }
                };
                self.phase = Phase::Open;
                self.frame(MORE, &[]);
                self.frame(0, &[&first_id]);
                Ok(true)
            }
            (Phase::Subscribing, b"PONG") => {
                self.phase = Phase::Open;
                Ok(true)
            }
            (Phase::Handshake, b"ERROR") => {
                let reason = data.get(1..).unwrap_or_default();
                let reason = reason[..reason.len().min(255)].escape_ascii();
                Err(Refusal(format!("an error instead of a handshake ({reason})")))
            }
            (Phase::Subscribing | Phase::Open, b"PING") => {
                if self.out.len() > UNSENT {
                    return Err(Refusal("more PINGs than it reads answers".into()));
                }
                self.knows_ping = true;
                let context = data.get(2..).unwrap_or_default();
                self.command(b"PONG", &[&context[..context.len().min(CONTEXT)]]);
                Ok(false)
            }
            // Others are of no concern to a subscriber.
            (Phase::Subscribing | Phase::Open, _) => Ok(false),
            (_, name) => {
                Err(Refusal(format!("a command {} before the handshake was done", name.escape_ascii())))
            }
        }
    }

    fn subscribe(&mut self, topic: &[u8]) {
        self.phase = Phase::Subscribing;
        if self.by_command {
            self.command(b"SUBSCRIBE", &[topic]);
        } else {
            self.frame(0, &[&[1], topic]);
        }
        if self.knows_ping {
            self.ping(0);
        }
    }

    fn command(&mut self, name: &[u8], data: &[&[u8]]) {
        let length = [u8::try_from(name.len()).expect("a short name")];
        let parts: Vec<&[u8]> = [&length, name].into_iter().chain(data.iter().copied()).collect();
        self.frame(COMMAND, &parts);
    }

    fn frame(&mut self, flags: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        if let Ok(short) = u8::try_from(length) {
            self.out.extend([flags, short]);
        } else {
            self.out.push(flags | LONG);
            self.out.extend((length as u64).to_be_bytes());
        }
        parts.iter().for_each(|part| self.out.extend(*part));
    }
}

/// Flags of a frame, length of its header, and of its body; or how many bytes of the header are missing.
fn header(bytes: &[u8]) -> Result<(u8, usize, u64), usize> {
    let &flags = bytes.first().ok_or(2_usize)?;
    if flags & LONG == 0 {
        return bytes.get(1).map(|&length| (flags, 2, length.into())).ok_or(1);
    }
    let length = bytes.get(1..9).ok_or_else(|| 9 - bytes.len())?;
    Ok((flags, 9, u64::from_be_bytes(length.try_into().expect("8 bytes"))))
}

fn message<'a>(bytes: &'a [u8], spans: &[(usize, usize)]) -> Message<'a> {
    match spans {
        &[_, seq, payload] => batch_of(bytes, seq, payload),
        _ => None,
    }
    .unwrap_or_else(|| malformed(spans))
}

/// A reply of a replay, with or without a topic: `kvscout_blocks.bytes.frames.parse_replay_reply`.
fn reply<'a>(bytes: &'a [u8], spans: &[(usize, usize)]) -> Message<'a> {
    match spans {
        &[_, seq, payload] | &[_, _, seq, payload] => match batch_of(bytes, seq, payload) {
            Some(Message::Batch { seq: u64::MAX, .. }) => Some(Message::End),
            batch => batch,
        },
        _ => None,
    }
    .unwrap_or_else(|| malformed(spans))
}

fn batch_of(bytes: &[u8], seq: (usize, usize), payload: (usize, usize)) -> Option<Message<'_>> {
    let seq = bytes[seq.0..seq.1].try_into().ok()?;
    Some(Message::Batch { seq: u64::from_be_bytes(seq), payload: &bytes[payload.0..payload.1] })
}

fn malformed<'a>(spans: &[(usize, usize)]) -> Message<'a> {
    Message::Malformed(spans.iter().map(|(start, end)| end - start).collect())
}

/// What the metadata of READY call the type of the peer's socket.
fn socket_type(mut data: &[u8]) -> Option<&[u8]> {
    loop {
        let (&length, rest) = data.split_first()?;
        let (name, rest) = rest.split_at_checked(length.into())?;
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length).try_into().ok()?)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        data = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The greeting of libzmq 4.2, which speaks 3.0, and of 4.3.5, which speaks 3.1.
    pub fn greeting(minor: u8) -> Vec<u8> {
        let mut bytes = Session::new(b"", 1).out;
        bytes[MINOR] = minor;
        bytes
    }

    fn frame(flags: u8, body: &[u8]) -> Vec<u8> {
        let mut session = Session::new(b"", 1);
        session.out.clear();
        session.frame(flags, &[body]);
        session.out
    }

    fn ready(kind: &str) -> Vec<u8> {
        let mut body = b"\x05READY\x08Identity\0\0\0\0\x0bsocket-type\0\0\0".to_vec();
        body.push(kind.len() as u8);
        body.extend(kind.as_bytes());
        frame(COMMAND, &body)
    }

    fn batch(seq: u64, payload: &[u8]) -> Vec<u8> {
        [frame(MORE, b"topic"), frame(MORE, &seq.to_be_bytes()), frame(0, payload)].concat()
    }

    /// All that some bytes hold, cut into chunks of a size; the answers.
    fn read(topic: &str, bytes: &[u8], chunk: usize) -> Result<(Vec<String>, Vec<u8>), Refusal> {
        let mut session = Session::new(topic.as_bytes(), 1000);
        session.out.clear();
        let (mut steps, mut held) = (Vec::new(), Vec::new());
        for chunk in bytes.chunks(chunk) {
            held.extend_from_slice(chunk);
            loop {
                let (done, step) = session.step(&held)?;
                let wants = matches!(step, Step::Wants(_));
                if !wants {
                    steps.push(format!("{step:?}"));
                }
                held.drain(..done);
                if wants {
                    break;
                }
            }
        }
        Ok((steps, session.out))
    }

    #[test]
    fn messages_are_the_same_wherever_their_bytes_were_cut() {
        let ping = frame(COMMAND, b"\x04PING\0\x0acontext");
        let bytes = [
            greeting(1),
            ready("XPUB"),
            ping.clone(),
            frame(COMMAND, b"\x04PONG"),
            batch(7, &[b'x'; 300]),
            frame(MORE, b"topic"),
            ping,
            frame(MORE, &8_u64.to_be_bytes()),
            frame(0, b""),
            frame(0, b"topic alone"),
            frame(COMMAND, b"\x07UNKNOWN"),
            batch(9, b"y"),
        ]
        .concat();
        let whole = read("top", &bytes, usize::MAX).expect("nothing is wrong with it");
        let payload: &[u8] = &[b'x'; 300];
        let seen = [
            Step::Opened,
            Step::Message(Message::Batch { seq: 7, payload }),
            Step::Message(Message::Batch { seq: 8, payload: b"" }),
            Step::Message(Message::Malformed(vec![11])),
            Step::Message(Message::Batch { seq: 9, payload: b"y" }),
        ];
        assert_eq!(whole.0, seen.map(|step| format!("{step:?}")));
        for chunk in 1..80 {
            assert_eq!(read("top", &bytes, chunk).expect("nothing is wrong with it"), whole);
        }
        let pong = frame(COMMAND, b"\x04PONGcontext");
        assert!(whole.1.ends_with(&[pong.clone(), pong].concat()));
    }

    #[test]
    fn a_subscription_is_a_message_to_3_0_and_a_command_with_a_ping_behind_it_to_3_1() {
        let by_command = [frame(COMMAND, b"\x09SUBSCRIBEtopic"), frame(COMMAND, b"\x04PING\0\0")].concat();
        for (minor, subscription) in [(0, frame(0, b"\x01topic")), (1, by_command)] {
            let (_, out) = read("topic", &[greeting(minor), ready("PUB")].concat(), 9).expect("a handshake");
            assert_eq!(
                out,
                [frame(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x03SUB"), subscription].concat()
            );
        }
    }

    #[test]
    fn it_is_open_once_the_subscription_came_which_a_pong_or_a_message_shows() {
        let shaken = [greeting(1), ready("PUB")].concat();
        let after = |bytes: &[u8]| read("", &[&shaken, bytes].concat(), 7).expect("a handshake").0;
        assert!(after(b"").is_empty());
        assert!(after(&frame(COMMAND, b"\x04PING\0\0")).is_empty());
        assert_eq!(after(&frame(COMMAND, b"\x04PONG").repeat(2)), ["Opened"]);
        assert_eq!(after(&batch(3, b"x"))[0], "Opened");
        assert_eq!(after(&batch(3, b"x")).len(), 2);
    }

    #[test]
    fn a_request_follows_the_handshake_and_its_replies_come_with_or_without_a_topic_until_their_end() {
        let reply = |topic: &[u8], seq: u64, payload: &[u8]| {
            let topic = if topic.is_empty() { Vec::new() } else { frame(MORE, topic) };
            [frame(MORE, b""), topic, frame(MORE, &seq.to_be_bytes()), frame(0, payload)].concat()
        };
        let bytes = [
            greeting(1),
            ready("ROUTER"),
            reply(b"topic", 7, b"x"),
            reply(b"", 8, b"y"),
            frame(0, b"z"),
            reply(b"", u64::MAX, b""),
        ]
        .concat();
        let mut session = Session::requesting(7, 1000);
        session.out.clear();
        let (mut steps, mut done) = (Vec::new(), 0);
        loop {
            let (count, step) = session.step(&bytes[done..]).expect("nothing is wrong with it");
            done += count;
            if let Step::Wants(_) = step {
                break;
            }
            steps.push(format!("{step:?}"));
        }
        let batch = |seq, payload| Step::Message(Message::Batch { seq, payload });
        let malformed = Step::Message(Message::Malformed(vec![1]));
        let seen = [Step::Opened, batch(7, b"x"), batch(8, b"y"), malformed, Step::Message(Message::End)];
        assert_eq!(steps, seen.map(|step| format!("{step:?}")));
        let request = [frame(MORE, b""), frame(0, &7_u64.to_be_bytes())].concat();
        let ready = frame(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
        assert_eq!(session.out, [ready, request].concat());
        let mut session = Session::requesting(7, 1000);
        let wrong = [greeting(1), super::tests::ready("PUB")].concat();
        let refused = session.step(&wrong).and_then(|(done, _)| session.step(&wrong[done..]));
        assert_eq!(refused, Err(Refusal("a socket of type \"PUB\", and not ROUTER or REP".into())));
    }

    #[test]
    fn a_topic_that_was_not_asked_for_is_left_out() {
        let bytes = [greeting(1), ready("PUB"), batch(1, b"x"), frame(0, b"")].concat();
        assert_eq!(read("other", &bytes, 5).expect("a handshake").0, ["Opened"]);
    }

    #[test]
    fn what_breaks_the_protocol_or_a_bound_is_refused_with_its_reason() {
        let open = [greeting(1), ready("PUB")].concat();
        let after = |bytes: &[u8]| [&open, bytes].concat();
        let mut plain = greeting(1);
        plain[MECHANISM][..5].copy_from_slice(b"PLAIN");
        let mut old = greeting(1);
        old[MAJOR] = 2;
        let mut huge = vec![LONG];
        huge.extend(u64::MAX.to_be_bytes());
        let cases = [
            (b"HTTP/1.1 400 Bad Request".to_vec(), "what is not ZMQ's"),
            (b"\xff\0\0\0\0\0\0\0\x01\0".to_vec(), "what is not ZMQ's"),
            (old, "a greeting of ZMTP 2, which is older than 3.0"),
            (plain, "a greeting that wants the security mechanism PLAIN"),
            ([greeting(1), ready("REP")].concat(), "a socket of type \"REP\", and not PUB or XPUB"),
            (
                [greeting(1), frame(COMMAND, b"\x05READY\xff")].concat(),
                "a socket of type \"\", and not PUB or XPUB",
            ),
            (
                [greeting(1), frame(COMMAND, b"\x05ERROR\x04away")].concat(),
                "an error instead of a handshake (away)",
            ),
            ([greeting(1), frame(0, b"x")].concat(), "a message before the handshake was done"),
            (
                [greeting(1), frame(COMMAND, b"\x04PING\0\0")].concat(),
                "a command PING before the handshake was done",
            ),
            (after(&[8, 0]), "a frame with flags 0x08, which is not ZMQ's"),
            (after(&[COMMAND | MORE, 0]), "a frame with flags 0x05, which is not ZMQ's"),
            (after(&frame(COMMAND, b"")), "a command without a name"),
            (after(&frame(COMMAND, b"\x09PING")), "a command without a name"),
            (after(&huge), "a frame above 1000 bytes"),
            (
                after(&[&[COMMAND | LONG, 0, 0, 0, 0][..], &[0, 1, 0, 1]].concat()),
                "a frame above 65536 bytes",
            ),
            (after(&frame(MORE, b"").repeat(65)), "a message of more than 64 frames"),
            (
                after(&[frame(MORE, b"topic"), frame(COMMAND, b"\x01x").repeat(20_000)].concat()),
                "a message above 66536 bytes",
            ),
            (after(&frame(COMMAND, b"\x04PING\0\0").repeat(20_000)), "more PINGs than it reads answers"),
        ];
        for (bytes, reason) in cases {
            for chunk in [1, 7, usize::MAX] {
                assert_eq!(read("", &bytes, chunk), Err(Refusal(reason.into())));
            }
        }
    }
}
