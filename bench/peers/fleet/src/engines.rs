//! The engines: sockets, who is connected to which, and what is sent.
//!
//! Rank k is at 127.64.0.1 + k: all of 127/8 is this host, so that one port of every address is one socket, and a
//! connection's own address says which rank it is for.
//!
//! Kinder than engines: what a peer does not read waits, where a ROUTER drops it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{SystemTime, UNIX_EPOCH};

use mio::net::{TcpListener, TcpStream};
use mio::{Interest, Registry, Token};
use socket2::{Domain, Socket, Type};

use crate::events::{Life, Shape};
use crate::zmtp::{END_OF_REPLAY, Kind, Session, Wish, message};

const FIRST: u32 = u32::from_be_bytes([127, 64, 0, 1]);
const PUBLISH: Token = Token(0);
const REPLAY: Token = Token(1);
const FIRST_CONNECTION: usize = 2;
const BACKLOG: i32 = 4096;
/// Of an answer to a replay that is made at a time.
const REPLAY_BYTES: usize = 256 * 1024;
/// That wait for a subscriber: above, it is left out of what is published as fast as it goes.
const WAITING_BYTES: usize = 64 * 1024;
/// Above, a batch is dropped, as by a PUB above its mark of 100,000 messages.
const DROPPED_ABOVE_BYTES: usize = 64 * 1024 * 1024;

#[derive(Debug)]
struct Rank {
    life: Life,
    next_seq: u64,
    alive: bool,
    subscriber: Option<usize>,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    session: Session,
    kind: Kind,
    rank: usize,
    out: Vec<u8>,
    sent: usize,
    /// The next batch of the replay that it wants, and the end of it.
    replay: Option<(u64, u64)>,
}

impl Connection {
    fn waiting(&self) -> usize {
        self.out.len() - self.sent
    }
}

/// What was done, since the start.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    pub sent: u64,
    /// Batches whose rank had no subscriber.
    pub unheard: u64,
    pub dropped: u64,
    pub replays: u64,
    pub replayed: u64,
}

/// What became of a batch.
#[derive(Debug, PartialEq, Eq)]
pub enum Published {
    Sent,
    /// Nobody reads fast enough, or the rank is dead.
    Not,
}

pub struct Fleet {
    shape: Shape,
    ranks: Vec<Rank>,
    publish: TcpListener,
    replay: TcpListener,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    scratch: Vec<u8>,
    pub counts: Counts,
}

impl Fleet {
    pub fn open(ranks: usize, shape: Shape, registry: &Registry) -> io::Result<Self> {
        let (mut publish, mut replay) = (listener()?, listener()?);
        registry.register(&mut publish, PUBLISH, Interest::READABLE)?;
        registry.register(&mut replay, REPLAY, Interest::READABLE)?;
        let rank =
            |rank| Rank { life: Life { rank, incarnation: 0 }, next_seq: 0, alive: true, subscriber: None };
        Ok(Self {
            shape,
            ranks: (0..ranks as u64).map(rank).collect(),
            publish,
            replay,
            connections: Vec::new(),
            free: Vec::new(),
            scratch: vec![0; 64 * 1024],
            counts: Counts::default(),
        })
    }

    pub fn ports(&self) -> io::Result<(u16, u16)> {
        Ok((self.publish.local_addr()?.port(), self.replay.local_addr()?.port()))
    }

    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    pub fn subscribed(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.subscriber.is_some()).count()
    }

    /// Lets every rank have published so many batches more, which nobody was sent.
    pub fn advance(&mut self, batches: u64) {
        self.ranks.iter_mut().for_each(|rank| rank.next_seq += batches);
    }

    /// Ends ranks, as kill -9 does.
    pub fn kill(&mut self, first: usize, count: usize) {
        self.ranks.iter_mut().skip(first).take(count).for_each(|rank| rank.alive = false);
        for slot in 0..self.connections.len() {
            if self.connections[slot].as_ref().is_some_and(|connection| !self.ranks[connection.rank].alive) {
                self.close(slot);
            }
        }
    }

    /// Starts ranks that were ended: empty caches, new blocks, numbers from 0.
    pub fn revive(&mut self, first: usize, count: usize) {
        for rank in self.ranks.iter_mut().skip(first).take(count).filter(|rank| !rank.alive) {
            (rank.alive, rank.next_seq) = (true, 0);
            rank.life.incarnation += 1;
        }
    }

    /// Publishes the next batch of a rank; `waits`: unless its subscriber is behind.
    pub fn publish(&mut self, rank: usize, waits: bool) -> Published {
        let Rank { life, next_seq: seq, alive, subscriber } = self.ranks[rank];
        if !alive {
            return Published::Not;
        }
        match subscriber.and_then(|slot| self.connections[slot].as_mut()) {
            None => self.counts.unheard += 1,
            Some(connection) if waits && connection.waiting() > WAITING_BYTES => return Published::Not,
            Some(connection) if connection.waiting() > DROPPED_ABOVE_BYTES => self.counts.dropped += 1,
            Some(connection) => {
                let shape = self.shape;
                message(
                    Kind::Publish,
                    seq.to_be_bytes(),
                    |out| shape.batch(life, seq, now(), out),
                    &mut connection.out,
                );
                self.counts.sent += 1;
            }
        }
        self.ranks[rank].next_seq += 1;
        Published::Sent
    }

    /// Sends what a rank has published.
    pub fn flush(&mut self, rank: usize) {
        if let Some(slot) = self.ranks[rank].subscriber {
            self.write(slot);
        }
    }

    /// Does what a token's readiness allows.
    pub fn ready(&mut self, token: Token, registry: &Registry) -> io::Result<()> {
        match token {
            PUBLISH => self.accept(Kind::Publish, registry),
            REPLAY => self.accept(Kind::Replay, registry),
            Token(number) => {
                self.read(number - FIRST_CONNECTION);
                self.write(number - FIRST_CONNECTION);
                Ok(())
            }
        }
    }

    fn accept(&mut self, kind: Kind, registry: &Registry) -> io::Result<()> {
        loop {
            let listener = if kind == Kind::Publish { &self.publish } else { &self.replay };
            let mut stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // A peer that was gone before it was taken.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            let Some(rank) = self.rank_at(&stream) else { continue };
            stream.set_nodelay(true)?;
            let slot = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            let both = Interest::READABLE | Interest::WRITABLE;
            registry.register(&mut stream, Token(slot + FIRST_CONNECTION), both)?;
            let (session, out) = Session::new(kind);
            self.connections[slot] =
                Some(Connection { stream, session, kind, rank, out, sent: 0, replay: None });
            self.write(slot);
        }
    }

    /// None: there is none, or it is dead; whoever connects is hung up on.
    fn rank_at(&self, stream: &TcpStream) -> Option<usize> {
        let SocketAddr::V4(address) = stream.local_addr().ok()? else { return None };
        let rank = u32::from(*address.ip()).checked_sub(FIRST)? as usize;
        self.ranks.get(rank).filter(|rank| rank.alive).map(|_| rank)
    }

    fn read(&mut self, slot: usize) {
        while let Some(connection) = self.connections.get_mut(slot).and_then(Option::as_mut) {
            let length = match connection.stream.read(&mut self.scratch) {
                Ok(length) if length > 0 => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                _ => return self.close(slot),
            };
            let Some(wishes) = connection.session.read(&self.scratch[..length], &mut connection.out) else {
                return self.close(slot);
            };
            for wish in wishes {
                let rank = &mut self.ranks[connection.rank];
                match wish {
                    Wish::Subscribe => rank.subscriber = Some(slot),
                    Wish::ReplayFrom(first) => {
                        self.counts.replays += 1;
                        connection.replay = Some((first, rank.next_seq));
                    }
                }
            }
        }
    }

    /// Sends what waits, and what there is of a replay, as long as the peer takes it.
    fn write(&mut self, slot: usize) {
        while let Some(connection) = self.connections.get_mut(slot).and_then(Option::as_mut) {
            if connection.waiting() == 0 {
                connection.out.clear();
                connection.sent = 0;
                let Some((next, end)) = connection.replay else { return };
                let (life, shape, seconds) = (self.ranks[connection.rank].life, self.shape, now());
                let mut seq = next;
                while seq < end && connection.out.len() < REPLAY_BYTES {
                    let write = |out: &mut Vec<u8>| shape.batch(life, seq, seconds, out);
                    message(connection.kind, seq.to_be_bytes(), write, &mut connection.out);
                    seq += 1;
                }
                self.counts.replayed += seq - next;
                connection.replay = Some((seq, end));
                if seq >= end {
                    message(connection.kind, END_OF_REPLAY, |_| (), &mut connection.out);
                    connection.replay = None;
                }
            }
            match connection.stream.write(&connection.out[connection.sent..]) {
                Ok(length) => connection.sent += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.close(slot),
            }
        }
    }

    fn close(&mut self, slot: usize) {
        if let Some(connection) = self.connections[slot].take() {
            let rank = &mut self.ranks[connection.rank];
            if rank.subscriber == Some(slot) {
                rank.subscriber = None;
            }
            self.free.push(slot);
        }
    }
}

fn listener() -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0).into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(TcpListener::from_std(socket.into()))
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
