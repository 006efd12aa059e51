//! The workloads of `bench/README.md` on the peer's index.

use std::collections::HashMap;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use dynamo_kv_router::compute_block_hash_for_seq;
use dynamo_kv_router::indexer::KvRouterError;
use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, OverlapScores, RouterEvent};
use serde_json::Value;

use crate::fixture::{BLOCK_SIZE, Fixture, Stream};
use crate::measure::{Clock, Times};
use crate::tree::{Tree, nothing, stored, undone};

const GROUP: u64 = 64;
const IN_FLIGHT: u64 = 64;
const CHECKED_QUERIES: u64 = 256;
const FRESH_EVENTS: u64 = 8;
const FRESH_BLOCKS: u64 = 1024;
const CONTINUED_EVENTS: u64 = 256;
const CONTINUED_BLOCKS: u64 = 4;
const REMOVED_PROMPTS: u64 = 1024;
const REMOVED_BLOCKS: u64 = 1024;
const PAGE_BYTES: u64 = 4096;

type Job = Box<dyn FnOnce() -> Result<(), KvRouterError> + Send>;

/// A loaded index and how far its random streams are used.
pub struct Bench {
    fixture: Arc<Fixture>,
    tree: Arc<Tree>,
    clock: Clock,
    queries: OnceLock<Vec<Vec<LocalBlockHash>>>,
    next_query: u64,
    next_fresh: u64,
    next_continued: u64,
    /// What the queue costs an event, taken off every burst.
    pub hop_ns: f64,
    jobs: Sender<Job>,
    done: Receiver<Result<(), KvRouterError>>,
}

/// What `load` answers.
pub struct Loaded {
    pub bench: Bench,
    pub memberships: u64,
    pub seconds: f64,
    pub rss_before: u64,
    pub rss_after: u64,
}

impl Bench {
    pub fn load(fixture: Fixture) -> Result<Loaded, String> {
        let tree = Arc::new(Tree::new());
        let (jobs, done) = second_writer();
        let rss_before = resident_bytes()?;
        let started = Instant::now();
        let memberships = fill(&fixture, &tree).map_err(|error| error.to_string())?;
        let seconds = started.elapsed().as_secs_f64();
        let rss_after = resident_bytes()?;
        let mut bench = Self {
            fixture: Arc::new(fixture),
            tree,
            clock: Clock::new(),
            queries: OnceLock::new(),
            next_query: 0,
            next_fresh: 0,
            next_continued: 0,
            hop_ns: 0.0,
            jobs,
            done,
        };
        bench.hop_ns = bench.measure_hop().map_err(|error| error.to_string())?;
        Ok(Loaded { bench, memberships, seconds, rss_before, rss_after })
    }

    /// The number made of the first answers; none: not a workload that has one.
    pub fn check(&self, workload: &str) -> Option<u64> {
        let mut find: Box<dyn FnMut(u64) -> OverlapScores> = match workload {
            "find_hashes" => Box::new(|query| self.tree.find(self.query(query))),
            "find_tokens" | "find_miss" => {
                let missing = workload == "find_miss";
                let mut tokens = Vec::new();
                Box::new(move |query| {
                    self.query_tokens(query, missing, &mut tokens);
                    self.find_tokens(&tokens)
                })
            }
            _ => return None,
        };
        let sum = (0..CHECKED_QUERIES).fold(0u64, |sum, query| {
            let answer: u64 = find(query)
                .scores
                .iter()
                .map(|(worker, overlap)| (worker.worker_id + 1) * u64::from(*overlap))
                .fold(0, u64::wrapping_add);
            sum.wrapping_add(answer.wrapping_mul(query + 1))
        });
        Some(sum)
    }

    /// The answer to `run`; none: a workload that this driver does not have.
    pub fn run(&mut self, workload: &str, length: Duration) -> Option<Result<Value, KvRouterError>> {
        Some(match workload {
            "find_hashes" => Ok(self.find_hashes_for(length).report(workload, &[])),
            "find_tokens" => Ok(self.find_tokens_for(length, false).report(workload, &[])),
            "find_miss" => Ok(self.find_tokens_for(length, true).report(workload, &[])),
            "store_prompt" => self.store_prompts(length).map(|times| times.report(workload, &[])),
            "store_4" => self.continue_prompts(length).map(|(store, _)| store.report(workload, &[])),
            "remove_4" => self.continue_prompts(length).map(|(_, remove)| remove.report(workload, &[])),
            "find_busy" => self
                .find_busy(length)
                .map(|(times, writer_rate)| times.report(workload, &[("writer_rate", writer_rate)])),
            "remove_worker" => self
                .remove_worker()
                .map(|(times, removal)| times.report(workload, &[("removal_ns", removal.as_nanos() as f64)])),
            _ => return None,
        })
    }

    fn query(&self, query: u64) -> &[LocalBlockHash] {
        let queries = self
            .queries
            .get_or_init(|| (0..self.fixture.prompts).map(|p| self.fixture.local_hashes(p)).collect());
        &queries[self.fixture.queried(query) as usize]
    }

    fn query_tokens(&self, query: u64, missing: bool, tokens: &mut Vec<u32>) {
        let prompt = if missing { self.fixture.missed(query) } else { self.fixture.queried(query) };
        self.fixture.tokens(prompt, tokens);
    }

    /// What `find_matches_for_request` of the pool does.
    fn find_tokens(&self, tokens: &[u32]) -> OverlapScores {
        self.tree.find(&compute_block_hash_for_seq(tokens, BLOCK_SIZE, BlockHashOptions::default()))
    }

    fn find_hashes_for(&mut self, length: Duration) -> Times {
        let mut request = self.query(0).to_vec();
        let mut times = Times::new(length);
        while times.go_on() {
            request.copy_from_slice(self.query(self.next_query));
            self.next_query += 1;
            times.add(self.clock.time(|| self.tree.find(&request)), 1);
        }
        times
    }

    fn find_tokens_for(&mut self, length: Duration, missing: bool) -> Times {
        let mut tokens = Vec::new();
        let mut times = Times::new(length);
        while times.go_on() {
            self.query_tokens(self.next_query, missing, &mut tokens);
            self.next_query += 1;
            times.add(self.clock.time(|| self.find_tokens(&tokens)), 1);
        }
        times
    }

    /// Nanoseconds of a burst of events without the queue.
    fn burst(&self, events: Vec<RouterEvent>) -> Result<f64, KvRouterError> {
        let hops_ns = self.hop_ns * events.len() as f64;
        let elapsed = self.tree.burst(events)?;
        Ok((elapsed.as_nanos() as f64 - hops_ns).max(0.0))
    }

    fn measure_hop(&self) -> Result<f64, KvRouterError> {
        let worker = self.fixture.holders(0)[0].0;
        let mut times = Vec::new();
        for _ in 0..101 {
            let events = (0..CONTINUED_EVENTS).map(|_| nothing(worker)).collect();
            times.push(self.burst(events)? / CONTINUED_EVENTS as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn store_prompts(&mut self, length: Duration) -> Result<Times, KvRouterError> {
        let mut times = Times::new(length);
        while times.go_on() {
            let numbers = self.next_fresh..self.next_fresh + FRESH_EVENTS;
            self.next_fresh = numbers.end;
            let stores: Vec<_> = numbers
                .map(|e| {
                    let worker = self.fixture.word(Stream::FreshWorkers, e) % self.fixture.workers;
                    stored(worker, None, (0..FRESH_BLOCKS).map(|b| self.fresh(e * FRESH_BLOCKS + b)))
                })
                .collect();
            let removes: Vec<_> = stores.iter().map(undone).collect();
            times.add(self.burst(stores)?, FRESH_EVENTS * FRESH_BLOCKS);
            self.burst(removes)?;
            self.tree.tidy();
        }
        Ok(times)
    }

    fn fresh(&self, i: u64) -> (LocalBlockHash, u64) {
        (LocalBlockHash(self.fixture.word(Stream::FreshLocal, i)), self.fixture.word(Stream::FreshEngine, i))
    }

    fn continue_prompts(&mut self, length: Duration) -> Result<(Times, Times), KvRouterError> {
        let (mut store, mut remove) = (Times::new(length), Times::new(length));
        while store.go_on() {
            let (stores, removes) = self.continuations();
            store.add(self.burst(stores)?, CONTINUED_EVENTS);
            remove.add(self.burst(removes)?, CONTINUED_EVENTS);
            self.tree.tidy();
        }
        Ok((store, remove))
    }

    /// Events that continue prompts by a few blocks each, and those that take them back.
    fn continuations(&mut self) -> (Vec<RouterEvent>, Vec<RouterEvent>) {
        let fixture = &self.fixture;
        let mut tails: HashMap<(u64, u64), u64> = HashMap::new();
        let numbers = self.next_continued..self.next_continued + CONTINUED_EVENTS;
        self.next_continued = numbers.end;
        let stores: Vec<_> = numbers
            .map(|e| {
                let prompt = fixture.word(Stream::Continued, 2 * e) % fixture.prompts;
                let holder = fixture.word(Stream::Continued, 2 * e + 1) % fixture.holders;
                let (worker, length) = fixture.holders(prompt)[holder as usize];
                let tail =
                    tails.entry((prompt, worker)).or_insert_with(|| fixture.engine_hash(prompt, length - 1));
                let parent = *tail;
                let blocks = (0..CONTINUED_BLOCKS).map(|b| {
                    let i = e * CONTINUED_BLOCKS + b;
                    *tail = fixture.word(Stream::ContinuedEngine, i);
                    (LocalBlockHash(fixture.word(Stream::ContinuedLocal, i)), *tail)
                });
                stored(worker, Some(parent), blocks)
            })
            .collect();
        let removes = stores.iter().rev().map(undone).collect();
        (stores, removes)
    }

    fn find_busy(&mut self, length: Duration) -> Result<(Times, f64), KvRouterError> {
        let (mut cycle, removes) = self.continuations();
        cycle.extend(removes);
        let stop = Arc::new(AtomicBool::new(false));
        let applied = Arc::new(AtomicU64::new(0));
        let (tree, stopped, count) = (Arc::clone(&self.tree), Arc::clone(&stop), Arc::clone(&applied));
        let started = Instant::now();
        self.start(Box::new(move || {
            while !stopped.load(Ordering::Relaxed) {
                cycle.iter().try_for_each(|event| tree.send(event.clone()))?;
                tree.flush()?;
                count.fetch_add(cycle.len() as u64, Ordering::Relaxed);
            }
            Ok(())
        }));
        let times = self.find_hashes_for(length);
        let writer_rate = applied.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        self.finish()?;
        self.tree.tidy();
        Ok((times, writer_rate))
    }

    fn remove_worker(&mut self) -> Result<(Times, Duration), KvRouterError> {
        let (fixture, worker) = (Arc::clone(&self.fixture), self.fixture.workers);
        let local = |i| LocalBlockHash(fixture.word(Stream::RemovedLocal, i));
        let prompts: Vec<Vec<LocalBlockHash>> = (0..REMOVED_PROMPTS)
            .map(|p| (p * REMOVED_BLOCKS..(p + 1) * REMOVED_BLOCKS).map(local).collect())
            .collect();
        for (p, prompt) in (0..).zip(&prompts) {
            let blocks = (0..)
                .zip(prompt)
                .map(|(b, &local)| (local, fixture.word(Stream::RemovedEngine, p * REMOVED_BLOCKS + b)));
            self.tree.send(stored(worker, None, blocks))?;
        }
        self.tree.flush()?;
        let mut times = Times::new(Duration::ZERO);
        let mut request = Vec::new();
        let mut query = self.next_query;
        let removal = self.tree.remove_worker(worker, || {
            query += 1;
            request.clear();
            request.extend_from_slice(if query.is_multiple_of(2) {
                self.query(query)
            } else {
                &prompts[(fixture.word(Stream::Queries, query) % REMOVED_PROMPTS) as usize]
            });
            times.add(self.clock.time(|| self.tree.find(&request)), 1);
        });
        self.next_query = query;
        self.tree.tidy();
        Ok((times, removal))
    }

    fn start(&self, job: Job) {
        self.jobs.send(job).expect("the thread lives as long as the sender");
    }

    fn finish(&self) -> Result<(), KvRouterError> {
        self.done.recv().expect("the thread answers each job")
    }
}

/// A thread for jobs, which exists before any of them.
fn second_writer() -> (Sender<Job>, Receiver<Result<(), KvRouterError>>) {
    let (jobs, queue) = channel::<Job>();
    let (answers, done) = channel();
    thread::spawn(move || queue.into_iter().map(|job| job()).try_for_each(|result| answers.send(result)));
    (jobs, done)
}

/// Stores the fixture; says how many memberships it has.
fn fill(fixture: &Fixture, tree: &Tree) -> Result<u64, KvRouterError> {
    let (mut memberships, mut in_flight) = (0, 0);
    for first in (0..fixture.prompts).step_by(GROUP as usize) {
        let group: Vec<_> = (first..fixture.prompts.min(first + GROUP))
            .map(|prompt| (prompt, fixture.local_hashes(prompt), fixture.holders(prompt)))
            .collect();
        for start in (0..fixture.blocks).step_by(fixture.event_blocks as usize) {
            for (prompt, local, holders) in &group {
                for &(worker, length) in holders.iter().filter(|(_, length)| *length > start) {
                    let end = length.min(start + fixture.event_blocks);
                    let parent = start.checked_sub(1).map(|last| fixture.engine_hash(*prompt, last));
                    let blocks = (start..end).map(|b| (local[b as usize], fixture.engine_hash(*prompt, b)));
                    tree.send(stored(worker, parent, blocks))?;
                    memberships += end - start;
                    in_flight += 1;
                    if in_flight == IN_FLIGHT {
                        tree.flush()?;
                        in_flight = 0;
                    }
                }
            }
        }
    }
    tree.flush()?;
    Ok(memberships)
}

fn resident_bytes() -> Result<u64, String> {
    let statm =
        fs::read_to_string("/proc/self/statm").map_err(|error| format!("/proc/self/statm: {error}"))?;
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.ok_or("/proc/self/statm: no resident pages")? * PAGE_BYTES)
}
