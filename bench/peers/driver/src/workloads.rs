//! The workloads of `bench/README.md`.

use std::collections::HashMap;
use std::hint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::fixture::{Fixture, Stream, block_tokens};
use crate::loading::{fill, local_hashes, resident_bytes};
use crate::measure::{Clock, Slice, Slices, Times, involuntary_switches};
use crate::other_thread::OtherThread;
use crate::payload::stored_payload;
use crate::{Block, Failure, Index};

const CHECKED_QUERIES: u64 = 256;
const FRESH_EVENTS: u64 = 8;
const FRESH_BLOCKS: u64 = 1024;
const CONTINUED_EVENTS: u64 = 256;
const CONTINUED_BLOCKS: u64 = 4;
/// Removed blocks of a worker that an index may remember.
const REMEMBERED: u64 = 65_536;
const REMOVED_PROMPTS: u64 = 1024;
const REMOVED_BLOCKS: u64 = 1024;
/// Long enough for thousands of finds, short enough that most are not interrupted by other processes.
const SLICE: Duration = Duration::from_millis(4);
/// A find that took longer may have been interrupted by another process, which is looked into.
const SLOW_NS: f64 = 100_000.0;

/// A loaded index, and how far its random streams are used.
pub struct Bench<I: Index> {
    fixture: Fixture,
    index: Arc<I>,
    clock: Clock,
    queries: OnceLock<Vec<Vec<u64>>>,
    next_query: u64,
    next_fresh: u64,
    next_continued: u64,
    /// What workers removed last, and may be remembered, were continuations.
    is_steady: bool,
    second: OtherThread,
    third: OtherThread,
}

/// What `load` answers.
pub struct Loaded<I: Index> {
    pub bench: Bench<I>,
    pub memberships: u64,
    pub seconds: f64,
    pub rss_before: u64,
    pub rss_after: u64,
}

impl<I: Index> Bench<I> {
    pub fn load(fixture: Fixture) -> Result<Loaded<I>, Failure> {
        let index = Arc::new(I::new(fixture.workers + 1));
        // Before anything is loaded, after which threads are assigned their cores.
        let (second, third) = (OtherThread::new(), OtherThread::new());
        let rss_before = resident_bytes()?;
        let started = Instant::now();
        let memberships = fill(&fixture, &*index)?;
        let seconds = started.elapsed().as_secs_f64();
        let rss_after = resident_bytes()?;
        let bench = Self {
            fixture,
            index,
            clock: Clock::new(),
            queries: OnceLock::new(),
            next_query: 0,
            next_fresh: 0,
            next_continued: 0,
            is_steady: false,
            second,
            third,
        };
        Ok(Loaded { bench, memberships, seconds, rss_before, rss_after })
    }

    /// The number made of the first answers; none: not a workload that has one.
    pub fn check(&self, workload: &str) -> Option<u64> {
        let (mut request, mut token_request) = (I::Request::default(), I::Tokens::default());
        let mut sum = 0u64;
        for query in 0..CHECKED_QUERIES {
            let answer = match workload {
                "find_hashes" => {
                    I::fill(&mut request, self.query(query));
                    self.index.find(&request)
                }
                "find_tokens" | "find_miss" => {
                    self.fill_tokens(query, workload == "find_miss", &mut token_request);
                    self.index.find_tokens(&token_request)
                }
                _ => return None,
            };
            for (worker, overlap) in self.index.overlaps(&answer) {
                sum = sum.wrapping_add((worker + 1).wrapping_mul(overlap).wrapping_mul(query + 1));
            }
        }
        Some(sum)
    }

    /// The answer to `run`; none: a workload that this driver does not have.
    pub fn run(&mut self, workload: &str, length: Duration) -> Result<Option<Value>, Failure> {
        Ok(Some(match workload {
            "find_hashes" => self.find_hashes(length).report(workload, &[]),
            "find_tokens" => self.find_tokens(length, false).report(workload, &[]),
            "find_miss" => self.find_tokens(length, true).report(workload, &[]),
            "store_prompt" => self.store_prompts(length)?.report(workload, &[]),
            "store_msgpack" => match self.store_payloads(length)? {
                Some(times) => times.report(workload, &[]),
                None => return Ok(None),
            },
            "store_4" => self.continue_prompts(length)?.0.report(workload, &[]),
            "remove_4" => self.continue_prompts(length)?.1.report(workload, &[]),
            "find_busy" => self.find_busy(workload, length)?,
            "find_crowded" => self.find_crowded(workload, length)?,
            "remove_worker" => {
                let (times, removal) = self.remove_worker()?;
                times.report(workload, &[("removal_ns", removal.as_nanos() as f64)])
            }
            _ => return Ok(None),
        }))
    }

    fn query(&self, query: u64) -> &[u64] {
        let queries = self.queries.get_or_init(|| {
            let mut tokens = Vec::new();
            (0..self.fixture.prompts)
                .map(|prompt| local_hashes::<I>(&self.fixture, prompt, &mut tokens))
                .collect()
        });
        &queries[self.fixture.queried(query) as usize]
    }

    fn fill_tokens(&self, query: u64, missing: bool, request: &mut I::Tokens) {
        let prompt = if missing { self.fixture.missed(query) } else { self.fixture.queried(query) };
        let mut tokens = Vec::new();
        self.fixture.tokens(prompt, &mut tokens);
        I::fill_tokens(request, &tokens);
    }

    fn find_hashes(&mut self, length: Duration) -> Times {
        let mut request = I::Request::default();
        let mut times = Times::new(length);
        while times.go_on() {
            I::fill(&mut request, self.query(self.next_query));
            self.next_query += 1;
            times.add(self.clock.time(|| self.index.find(&request)), 1);
        }
        times
    }

    fn find_tokens(&mut self, length: Duration, missing: bool) -> Times {
        let mut request = I::Tokens::default();
        let mut times = Times::new(length);
        while times.go_on() {
            self.fill_tokens(self.next_query, missing, &mut request);
            self.next_query += 1;
            times.add(self.clock.time(|| self.index.find_tokens(&request)), 1);
        }
        times
    }

    fn burst_ns(&self, events: Vec<I::Event>) -> Result<f64, Failure> {
        Ok(self.index.burst(events)?.as_nanos() as f64)
    }

    /// The numbers of a burst's prompts that were never seen.
    fn fresh_numbers(&mut self) -> std::ops::Range<u64> {
        let first = self.next_fresh;
        self.next_fresh += FRESH_EVENTS;
        first..self.next_fresh
    }

    fn fresh_worker(&self, e: u64) -> u64 {
        self.fixture.word(Stream::FreshWorkers, e) % self.fixture.workers
    }

    fn fresh_engine(&self, e: u64) -> impl DoubleEndedIterator<Item = u64> {
        (e * FRESH_BLOCKS..(e + 1) * FRESH_BLOCKS).map(|i| self.fixture.word(Stream::FreshEngine, i))
    }

    fn remove_fresh(&mut self, numbers: std::ops::Range<u64>) -> Result<(), Failure> {
        let removes =
            numbers.map(|e| self.index.removed(self.fresh_worker(e), self.fresh_engine(e).rev().collect()));
        self.index.burst(removes.collect())?;
        self.index.tidy();
        self.is_steady = false;
        Ok(())
    }

    fn store_prompts(&mut self, length: Duration) -> Result<Times, Failure> {
        let mut times = Times::new(length);
        while times.go_on() {
            let numbers = self.fresh_numbers();
            let stores = numbers.clone().map(|e| {
                let locals = (e * FRESH_BLOCKS..).map(|i| self.fixture.word(Stream::FreshLocal, i));
                let blocks: Vec<_> =
                    locals.zip(self.fresh_engine(e)).map(|(local, engine)| Block { local, engine }).collect();
                self.index.stored(self.fresh_worker(e), None, &blocks)
            });
            times.add(self.burst_ns(stores.collect())?, FRESH_EVENTS * FRESH_BLOCKS);
            self.remove_fresh(numbers)?;
        }
        Ok(times)
    }

    fn store_payloads(&mut self, length: Duration) -> Result<Option<Times>, Failure> {
        let mut times = Times::new(length);
        while times.go_on() {
            let numbers = self.fresh_numbers();
            let stores: Option<Vec<_>> = numbers
                .clone()
                .map(|e| self.index.payload(self.fresh_worker(e), self.fresh_payload(e)))
                .collect();
            let Some(stores) = stores else { return Ok(None) };
            times.add(self.burst_ns(stores)?, FRESH_EVENTS * FRESH_BLOCKS);
            self.remove_fresh(numbers)?;
        }
        Ok(Some(times))
    }

    /// One Stored event as engines publish it.
    fn fresh_payload(&self, e: u64) -> Vec<u8> {
        let locals =
            (e * FRESH_BLOCKS..(e + 1) * FRESH_BLOCKS).map(|i| self.fixture.word(Stream::FreshLocal, i));
        stored_payload(self.fresh_engine(e).collect(), locals.flat_map(block_tokens))
    }

    fn continue_prompts(&mut self, length: Duration) -> Result<(Times, Times), Failure> {
        self.continue_until_steady()?;
        let (mut store, mut remove) = (Times::new(length), Times::new(length));
        while store.go_on() {
            let (stores, removes) = self.continuations();
            store.add(self.burst_ns(stores)?, CONTINUED_EVENTS);
            remove.add(self.burst_ns(removes)?, CONTINUED_EVENTS);
            self.index.tidy();
        }
        Ok((store, remove))
    }

    /// Continues prompts and takes that back until every holder has removed as many blocks as are remembered.
    fn continue_until_steady(&mut self) -> Result<(), Failure> {
        if self.is_steady {
            return Ok(());
        }
        let holders = (0..self.fixture.prompts).flat_map(|prompt| self.fixture.holders(prompt));
        let mut missing: HashMap<u64, u64> = holders.map(|(worker, _)| (worker, REMEMBERED)).collect();
        while !missing.is_empty() {
            for e in self.next_continued..self.next_continued + CONTINUED_EVENTS {
                let worker = self.continued(e).1;
                if let Some(blocks) = missing.get_mut(&worker) {
                    *blocks = blocks.saturating_sub(CONTINUED_BLOCKS);
                    if *blocks == 0 {
                        missing.remove(&worker);
                    }
                }
            }
            let (stores, removes) = self.continuations();
            self.index.burst(stores)?;
            self.index.burst(removes)?;
            self.index.tidy();
        }
        self.is_steady = true;
        Ok(())
    }

    /// The prompt that an event continues, for whom, and how many blocks that worker has of it.
    fn continued(&self, e: u64) -> (u64, u64, u64) {
        let fixture = &self.fixture;
        let prompt = fixture.word(Stream::Continued, 2 * e) % fixture.prompts;
        let holder = fixture.word(Stream::Continued, 2 * e + 1) % fixture.holders;
        let (worker, length) = fixture.holders(prompt)[holder as usize];
        (prompt, worker, length)
    }

    /// Events that continue prompts by a few blocks each, and those that take them back.
    fn continuations(&mut self) -> (Vec<I::Event>, Vec<I::Event>) {
        let fixture = &self.fixture;
        let mut tails: HashMap<(u64, u64), u64> = HashMap::new();
        let (mut stores, mut removes) = (Vec::new(), Vec::new());
        for e in self.next_continued..self.next_continued + CONTINUED_EVENTS {
            let (prompt, worker, length) = self.continued(e);
            let tail =
                tails.entry((prompt, worker)).or_insert_with(|| fixture.engine_hash(prompt, length - 1));
            let numbers = e * CONTINUED_BLOCKS..(e + 1) * CONTINUED_BLOCKS;
            let blocks: Vec<_> = numbers
                .map(|i| Block {
                    local: fixture.word(Stream::ContinuedLocal, i),
                    engine: fixture.word(Stream::ContinuedEngine, i),
                })
                .collect();
            stores.push(self.index.stored(worker, Some(*tail), &blocks));
            removes.push(self.index.removed(worker, blocks.iter().rev().map(|block| block.engine).collect()));
            *tail = blocks[blocks.len() - 1].engine;
        }
        self.next_continued += CONTINUED_EVENTS;
        removes.reverse();
        (stores, removes)
    }

    /// `find_busy`, with a third thread that never rests, on the writer's core.
    fn find_crowded(&mut self, workload: &str, length: Duration) -> Result<Value, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        self.third.start(Box::new(move || {
            while !stopped.load(Ordering::Relaxed) {
                hint::spin_loop();
            }
            Ok(())
        }));
        let answer = self.find_busy(workload, length);
        stop.store(true, Ordering::Relaxed);
        self.third.wait()?;
        answer
    }

    fn find_busy(&mut self, workload: &str, length: Duration) -> Result<Value, Failure> {
        let (mut cycle, removes) = self.continuations();
        cycle.extend(removes);
        let cycle = Arc::new(cycle);
        let (mut idle, mut busy) = (Slices::default(), Slices::default());
        let (mut events, mut busy_seconds) = (0, 0.0);
        let started = Instant::now();
        while started.elapsed() < length || idle.is_empty() || busy.is_empty() {
            idle.add(self.find_slice());
            let (stop, applied) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
            let begun = Instant::now();
            self.second.start({
                let (index, cycle) = (Arc::clone(&self.index), Arc::clone(&cycle));
                let (stop, applied) = (Arc::clone(&stop), Arc::clone(&applied));
                Box::new(move || {
                    while !stop.load(Ordering::Relaxed) {
                        cycle.iter().try_for_each(|event| index.apply(event.clone()))?;
                        index.settle()?;
                        applied.fetch_add(cycle.len() as u64, Ordering::Relaxed);
                    }
                    Ok(())
                })
            });
            while applied.load(Ordering::Relaxed) == 0 && !self.second.is_finished() {
                thread::yield_now();
            }
            busy.add(self.find_slice());
            stop.store(true, Ordering::Relaxed);
            self.second.wait()?;
            busy_seconds += begun.elapsed().as_secs_f64();
            events += applied.load(Ordering::Relaxed);
        }
        self.index.tidy();
        let more = [("idle_rate", idle.rate()), ("writer_rate", events as f64 / busy_seconds)];
        Ok(busy.report(workload, &more))
    }

    /// Finds for a few milliseconds.
    fn find_slice(&mut self) -> Slice {
        let mut request = I::Request::default();
        let switches = involuntary_switches();
        let mut times = Vec::new();
        let started = Instant::now();
        while started.elapsed() < SLICE {
            I::fill(&mut request, self.query(self.next_query));
            self.next_query += 1;
            times.push(self.clock.time(|| self.index.find(&request)));
        }
        Slice { times, disturbed: involuntary_switches() != switches }
    }

    fn remove_worker(&mut self) -> Result<(Times, Duration), Failure> {
        let worker = self.fixture.workers;
        let local = |i| self.fixture.word(Stream::RemovedLocal, i);
        let prompts: Vec<Vec<u64>> = (0..REMOVED_PROMPTS)
            .map(|p| (p * REMOVED_BLOCKS..(p + 1) * REMOVED_BLOCKS).map(local).collect())
            .collect();
        for (p, prompt) in (0..).zip(&prompts) {
            let engine = (p * REMOVED_BLOCKS..).map(|i| self.fixture.word(Stream::RemovedEngine, i));
            let blocks: Vec<_> =
                prompt.iter().zip(engine).map(|(&local, engine)| Block { local, engine }).collect();
            self.index.apply(self.index.stored(worker, None, &blocks))?;
        }
        self.index.settle()?;
        let done = Arc::new(AtomicU64::new(0));
        let (index, finished) = (Arc::clone(&self.index), Arc::clone(&done));
        let mut times = Times::new(Duration::ZERO);
        let mut request = I::Request::default();
        let mut switches = involuntary_switches();
        self.second.start(Box::new(move || {
            let started = Instant::now();
            let removed = index.remove_worker(worker);
            finished.store(started.elapsed().as_nanos() as u64, Ordering::Release);
            removed
        }));
        loop {
            let query = self.next_query;
            self.next_query += 1;
            let local = if query.is_multiple_of(2) {
                self.query(query)
            } else {
                &prompts[(self.fixture.word(Stream::Queries, query) % REMOVED_PROMPTS) as usize]
            };
            I::fill(&mut request, local);
            let ns = self.clock.time(|| self.index.find(&request));
            if ns < SLOW_NS {
                times.add(ns, 1);
            } else {
                let now = involuntary_switches();
                if now == switches {
                    times.add(ns, 1);
                }
                switches = now;
            }
            if self.second.is_finished() {
                break;
            }
        }
        self.second.wait()?;
        self.index.tidy();
        Ok((times, Duration::from_nanos(done.load(Ordering::Acquire))))
    }
}
