//! ZMTP 3.1 as an engine's sockets speak it, apart from any socket: PUB and ROUTER without security.

const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
pub const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// Which of an engine's two sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Publish,
    Replay,
}

/// What a peer wants.
#[derive(Debug, PartialEq, Eq)]
pub enum Wish {
    Subscribe,
    /// All batches from this one on.
    ReplayFrom(u64),
}

#[derive(Debug)]
pub struct Session {
    kind: Kind,
    greeted: bool,
    /// Read, and not understood yet.
    left: Vec<u8>,
    /// Last frame of the message that is being read.
    frame: Vec<u8>,
}

impl Session {
    /// And what is sent first.
    pub fn new(kind: Kind) -> (Self, Vec<u8>) {
        let mut greeting = vec![0; GREETING];
        (greeting[0], greeting[8], greeting[9]) = (0xff, 1, 0x7f);
        (greeting[10], greeting[11]) = (3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        (Self { kind, greeted: false, left: Vec::new(), frame: Vec::new() }, greeting)
    }

    /// Reads on; None: the peer breaks the protocol.
    pub fn read(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Option<Vec<Wish>> {
        self.left.extend(bytes);
        let mut done = 0;
        if !self.greeted {
            if self.left.len() < GREETING {
                return Some(Vec::new());
            }
            (done, self.greeted) = (GREETING, true);
            let ready = match self.kind {
                Kind::Publish => &b"\x05READY\x0bSocket-Type\0\0\0\x03PUB"[..],
                Kind::Replay => &b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0"[..],
            };
            frame(COMMAND, ready, out);
        }
        let mut wishes = Vec::new();
        while let Some((flags, body)) = next(&self.left[done..]) {
            let body = done + body.start..done + body.end;
            done = body.end;
            let body = &self.left[body];
            if flags & COMMAND != 0 {
                let (&length, rest) = body.split_first()?;
                let (name, data) = rest.split_at_checked(length.into())?;
                match name {
                    b"SUBSCRIBE" => wishes.push(Wish::Subscribe),
                    b"PING" => {
                        let context = data.get(2..)?;
                        frame(COMMAND, &[b"\x04PONG", context].concat(), out);
                    }
                    _ => {} // READY, CANCEL, PONG
                }
                continue;
            }
            self.frame = body.to_vec();
            if flags & MORE == 0 {
                match self.kind {
                    // As subscribers before 3.1 say it.
                    Kind::Publish if self.frame.first() == Some(&1) => wishes.push(Wish::Subscribe),
                    Kind::Publish => {}
                    Kind::Replay => {
                        let first = u64::from_be_bytes(self.frame[..].try_into().ok()?);
                        wishes.push(Wish::ReplayFrom(first));
                    }
                }
            }
        }
        self.left.drain(..done);
        Some(wishes)
    }
}

/// Appends a batch: topic, seq and payload, which `write` appends.
pub fn message(kind: Kind, seq: [u8; 8], write: impl FnOnce(&mut Vec<u8>), out: &mut Vec<u8>) {
    if kind == Kind::Replay {
        frame(MORE, b"", out);
    }
    frame(MORE, b"", out);
    frame(MORE, &seq, out);
    let header = out.len();
    out.extend([LONG, 0, 0, 0, 0, 0, 0, 0, 0]);
    write(out);
    let length = (out.len() - header - 9) as u64;
    out[header + 1..header + 9].copy_from_slice(&length.to_be_bytes());
}

fn frame(flags: u8, body: &[u8], out: &mut Vec<u8>) {
    match u8::try_from(body.len()) {
        Ok(short) => out.extend([flags, short]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((body.len() as u64).to_be_bytes());
        }
    }
    out.extend(body);
}

/// Flags of a frame that is there in full, and where its body is.
fn next(bytes: &[u8]) -> Option<(u8, std::ops::Range<usize>)> {
    let &flags = bytes.first()?;
    let (start, length): (usize, usize) = if flags & LONG == 0 {
        (2, usize::from(*bytes.get(1)?))
    } else {
        (9, u64::from_be_bytes(bytes.get(1..9)?.try_into().ok()?) as usize)
    };
    let end = start.checked_add(length)?;
    (end <= bytes.len()).then_some((flags, start..end))
}
