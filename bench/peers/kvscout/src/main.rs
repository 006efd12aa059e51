//! kvscout's index as a driver of the index benchmark.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use kvscout_bench_driver::{BLOCK_SIZE, Block, Failure, Index, serve};
use kvscout_native::events::{Batch, Event, Removed, Stored};
use kvscout_native::hashing::BlockHasher;
use kvscout_native::index::{self, Bounds, Handle, Row, TokenPrompt, WorkerName, WorkerOptions};
use kvscout_native::wire::decode_batch;

/// No bound, and the defaults of the indexer besides.
const BOUNDS: Bounds = Bounds { max_blocks: 0, max_predictions: 1 << 20, prune_ratio: 0.8 };

/// Blocks that one step of freeing takes, as the indexer does it.
const FREED_AT_ONCE: usize = 4096;

/// No prediction ends: there is none.
const NOW: f64 = 0.0;

struct Kvscout {
    index: index::Index,
    /// Names of the workers by number.
    names: Vec<String>,
    numbers: Mutex<HashMap<Handle, u64>>,
}

#[derive(Clone)]
struct Input {
    worker: u64,
    content: Content,
}

#[derive(Clone)]
enum Content {
    Batch(Batch),
    Payload(Vec<u8>),
}

impl Kvscout {
    fn name(&self, worker: u64) -> WorkerName<'_> {
        WorkerName { worker_id: &self.names[worker as usize], dp_rank: 0 }
    }

    fn add(&self, worker: u64) {
        let handle = self.index.add_worker(self.name(worker), WorkerOptions::default());
        self.numbers.lock().unwrap().insert(handle, worker);
    }

    fn apply_one(&self, input: &Input) -> Result<(), Failure> {
        let name = self.name(input.worker);
        match &input.content {
            Content::Batch(batch) => self.index.apply(name, batch, 0, None),
            Content::Payload(bytes) => {
                let batch = decode_batch(bytes).map_err(|malformed| format!("{malformed:?}"))?;
                self.index.apply(name, &batch, 0, None)
            }
        };
        Ok(())
    }
}

impl Index for Kvscout {
    const NAME: &str = "kvscout";
    const VERSION: &str = concat!("kvscout ", env!("CARGO_PKG_VERSION"));
    type Request = Vec<u64>;
    type Tokens = Vec<u8>;
    type Answer = Vec<Row>;
    type Event = Input;

    fn new(workers: u64) -> Self {
        let kvscout = Self {
            index: index::Index::new(BLOCK_SIZE as usize, false, BOUNDS),
            names: (0..workers).map(|worker| format!("worker-{worker}")).collect(),
            numbers: Mutex::default(),
        };
        (0..workers).for_each(|worker| kvscout.add(worker));
        kvscout
    }

    fn local_hashes(tokens: &[u32]) -> Vec<u64> {
        let mut bytes = Vec::new();
        Self::fill_tokens(&mut bytes, tokens);
        hasher().local_hashes(&bytes)
    }

    fn fill(request: &mut Vec<u64>, local: &[u64]) {
        request.clear();
        request.extend_from_slice(local);
    }

    fn find(&self, request: &Vec<u64>) -> Vec<Row> {
        self.index.find(&mut request.as_slice(), NOW, false, |rows, _| rows.to_vec())
    }

    fn fill_tokens(request: &mut Vec<u8>, tokens: &[u32]) {
        request.clear();
        request.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    }

    fn find_tokens(&self, tokens: &Vec<u8>) -> Vec<Row> {
        self.index.find(&mut TokenPrompt::new(hasher(), tokens), NOW, false, |rows, _| rows.to_vec())
    }

    fn overlaps(&self, answer: &Vec<Row>) -> Vec<(u64, u64)> {
        let numbers = self.numbers.lock().unwrap();
        answer.iter().map(|row| (numbers[&row.worker], u64::from(row.blocks[0]))).collect()
    }

    fn stored(&self, worker: u64, parent: Option<u64>, blocks: &[Block]) -> Input {
        let (engine, local): (Vec<u64>, Vec<u64>) =
            blocks.iter().map(|block| (block.engine, block.local)).unzip();
        let mut batch = Batch::with_hashes(2 * blocks.len());
        let stored = Stored {
            engine_hashes: batch.add_hashes(&engine),
            local_hashes: batch.add_hashes(&local),
            parent,
            block_size: BLOCK_SIZE,
            full_attention: true,
            ..Stored::default()
        };
        batch.events.push(Event::Stored(stored));
        Input { worker, content: Content::Batch(batch) }
    }

    fn removed(&self, worker: u64, engine: Vec<u64>) -> Input {
        let mut batch = Batch::with_hashes(engine.len());
        let engine_hashes = batch.add_hashes(&engine);
        batch.events.push(Event::Removed(Removed { engine_hashes, ..Removed::default() }));
        Input { worker, content: Content::Batch(batch) }
    }

    fn payload(&self, worker: u64, bytes: Vec<u8>) -> Option<Input> {
        Some(Input { worker, content: Content::Payload(bytes) })
    }

    fn apply(&self, event: Input) -> Result<(), Failure> {
        self.apply_one(&event)
    }

    fn settle(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn burst(&self, events: Vec<Input>) -> Result<Duration, Failure> {
        let mut events = events.into_iter();
        let started = Instant::now();
        // Events are released as they are applied, what held them all is not.
        events.by_ref().try_for_each(|event| self.apply_one(&event))?;
        Ok(started.elapsed())
    }

    fn tidy(&self) {
        while self.index.maintain(NOW, FREED_AT_ONCE) {}
    }

    fn remove_worker(&self, worker: u64) -> Result<(), Failure> {
        if !self.index.remove_rank(self.name(worker)) {
            return Err(format!("worker {worker} is not known").into());
        }
        self.tidy();
        self.add(worker);
        Ok(())
    }
}

fn hasher() -> BlockHasher<'static> {
    BlockHasher::new(BLOCK_SIZE as usize, "", "", &[], false).expect("a block has tokens")
}

fn main() -> io::Result<()> {
    serve::<Kvscout>()
}
