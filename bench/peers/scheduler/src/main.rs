//! Active load and decisions as a driver: the protocol and the workloads of `bench/README.md`.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use kvscout_bench_driver::Failure;
use kvscout_bench_driver::command::Command;
use kvscout_bench_driver::measure::{Clock, Times};
use kvscout_native::load::{ActiveLoad, Allocation, Overlaps, PoolKey, Question};
use kvscout_native::protobuf::Writer;
use kvscout_native::table::mix;
use serde_json::{Value, json};

const POOL_KEY: PoolKey = PoolKey { block_size: 16, eagle: false };
/// Number of different prompts.
const PROMPTS: u64 = 64;
/// Leading blocks that all prompts of a group share, and groups.
const SHARED_BLOCKS: u64 = 8;
const GROUPS: u64 = 4;

/// One prompt and the message that says where it is cached.
struct Request {
    hashes: Vec<u64>,
    overlaps: Vec<u8>,
}

/// A pool in which some requests are active.
struct Pool {
    load: ActiveLoad,
    requests: Vec<Request>,
    next: usize,
}

impl Pool {
    /// Makes workers, each of which holds a part of every prompt and one active request.
    fn new(workers: u32, blocks: u64, shuffled: bool) -> Self {
        let mut load = ActiveLoad::new(true);
        let names: Vec<String> = (0..workers).map(|worker| format!("worker-{worker:04}")).collect();
        load.arrange(names.iter().zip(0..).map(|(name, slot)| (&**name, 0, slot)));
        let requests: Vec<Request> =
            (0..PROMPTS).map(|prompt| Request::new(prompt, blocks, &names, shuffled)).collect();
        for slot in 0..workers {
            let hashes = &requests[slot as usize % requests.len()].hashes;
            load.add(slot, POOL_KEY, hashes, 1, i64::from(slot % 7) * 16);
        }
        Self { load, requests, next: 0 }
    }

    /// Selects, reserves and frees, from the bytes of the overlaps; the worker's slot.
    fn select_and_free(&mut self) -> u32 {
        let Request { hashes, overlaps } = &self.requests[self.next % self.requests.len()];
        self.next += 1;
        let overlaps = Overlaps::parse(overlaps).expect("a message");
        let scores = self.load.score(None, &question(hashes, &overlaps));
        let slot = self.load.costs_with(&scores, hashes).least()[0] as u32;
        let uncached = (hashes.len() as i64) * 16 - scores.effective_blocks[slot as usize] as i64 * 16;
        let mut allocation: Allocation = self.load.add(slot, POOL_KEY, hashes, 0, uncached);
        self.load.remove(&mut allocation);
        slot
    }

    /// Scores all workers.
    fn score(&self, request: &Request, overlaps: &Overlaps) -> usize {
        let scores = self.load.score(None, &question(&request.hashes, overlaps));
        self.load.costs_with(&scores, &request.hashes).least().len()
    }
}

impl Request {
    fn new(prompt: u64, blocks: u64, names: &[String], shuffled: bool) -> Self {
        let hash = |block: u64| match block {
            0..SHARED_BLOCKS => mix(prompt % GROUPS, block),
            _ => mix(prompt + GROUPS, block),
        };
        let mut rows: Vec<u64> = (0..names.len() as u64).collect();
        if shuffled {
            rows.sort_unstable_by_key(|&worker| mix(worker, !prompt));
        }
        let mut overlaps = Writer::default();
        rows.iter().for_each(|&worker| overlaps.bytes(1, names[worker as usize].as_bytes()));
        overlaps.packed(3, rows.iter().map(|&worker| 1 + mix(worker, prompt) % blocks));
        Self { hashes: (0..blocks).map(hash).collect(), overlaps: overlaps.into_bytes() }
    }
}

fn question<'a>(hashes: &[u64], overlaps: &'a Overlaps) -> Question<'a> {
    Question {
        pool_key: POOL_KEY,
        overlaps: Some(overlaps),
        isl_tokens: hashes.len() as u32 * 16,
        overlap_score_weight: 1.0,
        host_weight: 0.75,
        disk_weight: 0.25,
        charge_prefill: true,
        scale: 1.0,
    }
}

fn run(command: &Command) -> Result<Value, Failure> {
    let workload = command.text("workload")?;
    let length = Duration::try_from_secs_f64(command.number("seconds")?)?;
    let (workers, blocks) = (command.positive("workers")? as u32, command.positive("blocks")?);
    let mut pool = Pool::new(workers, blocks, command.text("rows")? == "shuffled");
    let (clock, mut times) = (Clock::new(), Times::new(length));
    match workload {
        "select_and_free" => {
            while times.go_on() {
                times.add(clock.time(|| pool.select_and_free()), 1);
            }
        }
        "score" => {
            let request = &pool.requests[0];
            let overlaps = Overlaps::parse(&request.overlaps).expect("a message");
            while times.go_on() {
                times.add(clock.time(|| pool.score(request, &overlaps)), u64::from(workers));
            }
        }
        _ => return Ok(json!({"unsupported": workload})),
    }
    Ok(times.report(workload, &[]))
}

fn answer(line: &str) -> Result<Value, Failure> {
    let command = Command::parse(line)?;
    match command.verb {
        "hello" => Ok(json!({"driver": "scheduler", "version": env!("CARGO_PKG_VERSION")})),
        "run" => run(&command),
        "quit" => Ok(json!({})),
        verb => Err(format!("{verb}: not a command").into()),
    }
}

fn main() -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        let answer = answer(&line).unwrap_or_else(|error| json!({"error": error.to_string()}));
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
        if line.trim() == "quit" {
            break;
        }
    }
    Ok(())
}
