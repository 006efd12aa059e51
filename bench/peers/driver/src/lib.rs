//! Drivers of the index benchmark: fixture, workloads and protocol of `bench/README.md`, the same for every index.
//!
//! A driver is a program whose `main` calls `serve` with an `Index`.

pub mod command;
mod fixture;
mod loading;
pub mod measure;
mod other_thread;
mod payload;
mod workloads;

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde_json::{Value, json};

use command::Command;
pub use fixture::{BLOCK_SIZE, Fixture, Lengths};
use workloads::{Bench, Loaded};

/// Why an index could not do what the benchmark asks.
pub type Failure = Box<dyn Error + Send + Sync>;

/// A block as events name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub local: u64,
    pub engine: u64,
}

/// What is measured. Workers are numbers here; an index that names them otherwise translates.
pub trait Index: Send + Sync + 'static {
    /// Name and version of what is measured.
    const NAME: &str;
    const VERSION: &str;
    /// Block hashes in the form that `find` takes.
    type Request: Default;
    /// Tokens in the form that `find_tokens` takes.
    type Tokens: Default;
    /// What a find returns.
    type Answer;
    /// An event, ready to be applied.
    type Event: Clone + Send + Sync + 'static;

    /// An empty index that workers 0 .. `workers` may use.
    fn new(workers: u64) -> Self;

    /// Local hashes of a prompt.
    fn local_hashes(tokens: &[u32]) -> Vec<u64>;

    /// Overwrites a request.
    fn fill(request: &mut Self::Request, local: &[u64]);

    /// Block hashes → overlaps.
    fn find(&self, request: &Self::Request) -> Self::Answer;

    /// Overwrites a request's tokens.
    fn fill_tokens(request: &mut Self::Tokens, tokens: &[u32]);

    /// Tokens → overlaps.
    fn find_tokens(&self, tokens: &Self::Tokens) -> Self::Answer;

    /// (worker, blocks) of an answer.
    fn overlaps(&self, answer: &Self::Answer) -> Vec<(u64, u64)>;

    /// A Stored event.
    fn stored(&self, worker: u64, parent: Option<u64>, blocks: &[Block]) -> Self::Event;

    /// A Removed event.
    fn removed(&self, worker: u64, engine: Vec<u64>) -> Self::Event;

    /// An event that is still the engine's msgpack; none: it is not read from bytes.
    fn payload(&self, worker: u64, bytes: Vec<u8>) -> Option<Self::Event>;

    /// Applies an event, or queues it for the thread that does.
    fn apply(&self, event: Self::Event) -> Result<(), Failure>;

    /// Waits until everything queued is applied.
    fn settle(&self) -> Result<(), Failure>;

    /// Applies events and says how long that took, without what a queue adds.
    fn burst(&self, events: Vec<Self::Event>) -> Result<Duration, Failure>;

    /// Frees what can be freed while nothing is queued; not timed.
    fn tidy(&self);

    /// Removes a worker, and returns when it is done.
    fn remove_worker(&self, worker: u64) -> Result<(), Failure>;
}

/// Answers commands on standard input until it ends.
pub fn serve<I: Index>() -> io::Result<()> {
    let mut bench: Option<Bench<I>> = None;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let answer = answer(&line, &mut bench).unwrap_or_else(|error| json!({"error": error.to_string()}));
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
        if line.trim() == "quit" {
            break;
        }
    }
    Ok(())
}

fn answer<I: Index>(line: &str, bench: &mut Option<Bench<I>>) -> Result<Value, Failure> {
    let command = Command::parse(line)?;
    match (command.verb, bench) {
        ("hello", _) => Ok(json!({"driver": I::NAME, "version": I::VERSION})),
        ("quit", _) => Ok(json!({})),
        ("load", bench @ None) => {
            let Loaded { bench: loaded, memberships, seconds, rss_before, rss_after } =
                Bench::load(fixture(&command)?)?;
            *bench = Some(loaded);
            Ok(json!({
                "memberships": memberships,
                "seconds": seconds,
                "rss_before": rss_before,
                "rss_after": rss_after,
            }))
        }
        ("load", Some(_)) => Err("load: once a process".into()),
        ("check", Some(bench)) => {
            let workload = command.text("workload")?;
            Ok(bench.check(workload).map_or_else(|| unsupported(workload), |sum| json!({"answers": sum})))
        }
        ("run", Some(bench)) => {
            let workload = command.text("workload")?;
            let seconds = command.number("seconds")?;
            let length = Duration::try_from_secs_f64(seconds)
                .map_err(|error| format!("seconds={seconds}: {error}"))?;
            Ok(bench.run(workload, length)?.unwrap_or_else(|| unsupported(workload)))
        }
        ("check" | "run", None) => Err(format!("{}: nothing is loaded", command.verb).into()),
        (verb, _) => Err(format!("{verb}: not a command").into()),
    }
}

fn unsupported(workload: &str) -> Value {
    json!({"unsupported": workload})
}

fn fixture(command: &Command) -> Result<Fixture, String> {
    let fixture = Fixture {
        prompts: command.positive("prompts")?,
        blocks: command.positive("blocks")?,
        holders: command.positive("holders")?,
        lengths: match command.text("lengths")? {
            "equal" => Lengths::Equal,
            "unequal" => Lengths::Unequal,
            "random" => Lengths::Random,
            other => return Err(format!("lengths={other}: none of equal, unequal, random")),
        },
        event_blocks: command.positive("event_blocks")?,
        workers: command.positive("workers")?,
        seed: command.number("seed")?,
    };
    if fixture.holders > fixture.workers || fixture.workers > 1024 {
        return Err("holders ≤ workers ≤ 1024 is required".to_owned());
    }
    Ok(fixture)
}
