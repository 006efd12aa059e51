//! A process full of engines: PUB and replay sockets of thousands of ranks, at one port each of as many addresses.
//!
//! Commands on its standard input, and their answers, as `bench/README.md` has them:
//!
//! ```text
//! open ranks=16000 dp=8 blocks=4 system=64 capacity=4096   {"port": p, "replay_port": q}   first, once
//! advance batches=N                             {}         every rank has published N more, before anybody came
//! publish first=K count=N messages=M rate=R burst=B
//!                                               {"sent": n, "unheard": n, "dropped": n, "seconds": s, "late_p99_ms": ms}
//! kill first=K count=N                          {}         ranks end
//! revive first=K count=N                        {}         and start again, empty
//! status                                        {"subscribed": n, "sent": n, "replays": n, "replayed": n}
//! quit                                          {}
//! ```

mod engines;
mod events;
mod zmtp;

use std::collections::HashMap;
use std::io::{self, BufRead, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use engines::{Counts, Fleet, Published};
use events::{PROMPT_BLOCKS, Shape};
use mio::{Events, Poll, Token, Waker};

const WAKE: Token = Token(usize::MAX);
/// Ranks that are asked for a batch between two looks at the sockets.
const TURN: usize = 256;

/// What is being published.
struct Publication {
    left: u64,
    /// Of which ranks, which take turns.
    first: u64,
    count: u64,
    turn: u64,
    /// Batches a second; 0: as fast as they are read.
    rate: f64,
    /// Batches of a turn.
    burst: u64,
    started: Instant,
    /// Batches so far.
    number: u64,
    late: Vec<f32>,
    before: Counts,
}

fn main() -> io::Result<()> {
    let mut poll = Poll::new()?;
    let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
    let (sender, commands) = channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() || waker.wake().is_err() {
                return;
            }
        }
        drop(sender);
        let _ = waker.wake(); // the end of the input is the end of the process
    });
    let mut process = Process { fleet: None, publication: None };
    let mut events = Events::with_capacity(4096);
    loop {
        let wait = process.publish();
        match poll.poll(&mut events, wait) {
            // The process was stopped and goes on.
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            other => other?,
        }
        for event in events.iter().filter(|event| event.token() != WAKE) {
            if let Some(fleet) = &mut process.fleet {
                fleet.ready(event.token(), poll.registry())?;
            }
        }
        if !process.obey(&commands, &poll) {
            return Ok(());
        }
    }
}

struct Process {
    fleet: Option<Fleet>,
    publication: Option<Publication>,
}

impl Process {
    /// Carries out what was said; whether more may come.
    fn obey(&mut self, commands: &Receiver<String>, poll: &Poll) -> bool {
        loop {
            // Who sends commands waits for their answers: what there is to read now is the end of the input.
            let line = match commands.try_recv() {
                Ok(line) => line,
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            };
            let mut words = line.split_whitespace();
            let verb = words.next().unwrap_or_default();
            let arguments = words.filter_map(|word| word.split_once('=')).collect();
            match self.command(verb, &Arguments(arguments), poll) {
                Ok(Some(answer)) => println!("{answer}"),
                Ok(None) => {} // answered when it is done
                Err(error) => println!("{{\"error\": {error:?}}}"),
            }
            if verb == "quit" {
                return false;
            }
        }
    }

    fn command(&mut self, verb: &str, arguments: &Arguments, poll: &Poll) -> Result<Option<String>, String> {
        if verb == "quit" {
            return Ok(Some("{}".into()));
        }
        let Some(fleet) = &mut self.fleet else {
            return if verb == "open" {
                self.open(arguments, poll).map(Some)
            } else {
                Err("open comes first".into())
            };
        };
        match verb {
            "advance" => fleet.advance(arguments.number("batches")?),
            "kill" => fleet.kill(arguments.number("first")? as usize, arguments.number("count")? as usize),
            "revive" => {
                fleet.revive(arguments.number("first")? as usize, arguments.number("count")? as usize)
            }
            "publish" => {
                let (first, count) = (arguments.number("first")?, arguments.number("count")?);
                if count == 0 || first + count > fleet.ranks() as u64 {
                    return Err(format!("there are {} ranks", fleet.ranks()));
                }
                self.publication = Some(Publication {
                    first,
                    count,
                    turn: 0,
                    left: arguments.number("messages")?,
                    rate: arguments.number("rate")? as f64,
                    burst: arguments.number("burst")?.max(1),
                    started: Instant::now(),
                    number: 0,
                    late: Vec::new(),
                    before: fleet.counts,
                });
                return Ok(None);
            }
            "status" => {
                let Counts { sent, replays, replayed, .. } = fleet.counts;
                return Ok(Some(format!(
                    "{{\"subscribed\": {}, \"sent\": {sent}, \"replays\": {replays}, \"replayed\": {replayed}}}",
                    fleet.subscribed()
                )));
            }
            _ => return Err(format!("{verb} is not a command")),
        }
        Ok(Some("{}".into()))
    }

    fn open(&mut self, arguments: &Arguments, poll: &Poll) -> Result<String, String> {
        let shape = Shape {
            blocks: arguments.number("blocks")?,
            system: arguments.number("system")?,
            capacity: arguments.number("capacity")?,
            dp_size: arguments.number("dp")?.max(1),
        };
        if shape.blocks == 0
            || !PROMPT_BLOCKS.is_multiple_of(shape.blocks)
            || !shape.capacity.is_multiple_of(PROMPT_BLOCKS)
        {
            return Err(format!("blocks must divide {PROMPT_BLOCKS}, and {PROMPT_BLOCKS} the capacity"));
        }
        let ranks = arguments.number("ranks")? as usize;
        let fleet = Fleet::open(ranks, shape, poll.registry()).map_err(|error| error.to_string())?;
        let (port, replay_port) = fleet.ports().map_err(|error| error.to_string())?;
        self.fleet = Some(fleet);
        Ok(format!("{{\"port\": {port}, \"replay_port\": {replay_port}}}"))
    }

    /// Publishes what is due; how long to wait for the sockets.
    fn publish(&mut self) -> Option<Duration> {
        let (Some(fleet), Some(publication)) = (&mut self.fleet, &mut self.publication) else { return None };
        for _ in 0..TURN {
            if publication.left == 0 {
                break;
            }
            if publication.rate > 0.0 {
                let due = publication.number as f64 / publication.rate;
                let late = publication.started.elapsed().as_secs_f64() - due;
                if late < 0.0 {
                    return Some(Duration::from_secs_f64(-late));
                }
                publication.late.push(late as f32);
            }
            let rank = (publication.first + publication.turn * stride(publication.count) % publication.count)
                as usize;
            publication.turn += 1;
            for _ in 0..publication.burst.min(publication.left) {
                if fleet.publish(rank, publication.rate == 0.0) == Published::Not {
                    break;
                }
                publication.left -= 1;
                publication.number += 1;
            }
            fleet.flush(rank);
        }
        if publication.left > 0 {
            return Some(Duration::ZERO);
        }
        let (now, before) = (fleet.counts, publication.before);
        let late = &mut publication.late;
        late.sort_unstable_by(f32::total_cmp);
        println!(
            "{{\"sent\": {}, \"unheard\": {}, \"dropped\": {}, \"seconds\": {}, \"late_p99_ms\": {}}}",
            now.sent - before.sent,
            now.unheard - before.unheard,
            now.dropped - before.dropped,
            publication.started.elapsed().as_secs_f64(),
            late.get(late.len() * 99 / 100).map_or(0.0, |late| late * 1e3),
        );
        self.publication = None;
        Some(Duration::ZERO)
    }
}

/// Between two ranks that publish one after the other, so that all have their turn before any has another.
fn stride(count: u64) -> u64 {
    let common = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (count * 5 / 8..count).find(|&stride| common(stride, count) == 1).unwrap_or(1)
}

/// Words of a command.
struct Arguments<'a>(HashMap<&'a str, &'a str>);

impl Arguments<'_> {
    fn number(&self, name: &str) -> Result<u64, String> {
        let word = self.0.get(name).ok_or(format!("{name} is missing"))?;
        word.parse().map_err(|_| format!("{name}={word} is no number"))
    }
}
