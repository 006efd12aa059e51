//! Dynamo's router crate as a driver of the index benchmark: `ConcurrentRadixTreeCompressed` behind
//! `ThreadPoolIndexer` with one thread.

mod queue;

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use dynamo_kv_router::indexer::{KvIndexerInterface, KvRouterError};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, SyncIndexer, ThreadPoolIndexer, compute_block_hash_for_seq,
};
use kvscout_bench_driver::{BLOCK_SIZE, Block, Failure, Index, serve};

type Pool = ThreadPoolIndexer<ConcurrentRadixTreeCompressed>;

const HOP_BURSTS: usize = 101;
const HOP_EVENTS: usize = 256;

struct Dynamo {
    pool: Pool,
    /// What the queue costs an event, taken off every burst.
    hop: OnceLock<Duration>,
}

impl Dynamo {
    /// The median cost of an event that does nothing: a Removed of no blocks.
    fn hop(&self) -> Result<Duration, KvRouterError> {
        if let Some(hop) = self.hop.get() {
            return Ok(*hop);
        }
        let mut bursts = (0..HOP_BURSTS)
            .map(|_| queue::burst(&self.pool, (0..HOP_EVENTS).map(|_| self.removed(0, Vec::new())).collect()))
            .collect::<Result<Vec<_>, _>>()?;
        bursts.sort();
        Ok(*self.hop.get_or_init(|| bursts[HOP_BURSTS / 2] / HOP_EVENTS as u32))
    }
}

impl Index for Dynamo {
    const NAME: &str = "dynamo";
    const VERSION: &str = "dynamo-kv-router 1.6.1";
    type Request = Vec<LocalBlockHash>;
    type Tokens = Vec<u32>;
    type Answer = OverlapScores;
    type Event = RouterEvent;

    fn new(_workers: u64) -> Self {
        let pool = Pool::new(ConcurrentRadixTreeCompressed::new(), 1, BLOCK_SIZE);
        Self { pool, hop: OnceLock::new() }
    }

    fn local_hashes(tokens: &[u32]) -> Vec<u64> {
        compute_block_hash_for_seq(tokens, BLOCK_SIZE, BlockHashOptions::default())
            .into_iter()
            .map(|local| local.0)
            .collect()
    }

    fn fill(request: &mut Self::Request, local: &[u64]) {
        request.clear();
        request.extend(local.iter().copied().map(LocalBlockHash));
    }

    /// What `find_matches` of the pool does, which is a plain call in an async coat.
    fn find(&self, request: &Self::Request) -> OverlapScores {
        self.pool.backend().find_matches(request, false)
    }

    fn fill_tokens(request: &mut Vec<u32>, tokens: &[u32]) {
        request.clear();
        request.extend_from_slice(tokens);
    }

    /// What `find_matches_for_request` of the pool does.
    fn find_tokens(&self, tokens: &Vec<u32>) -> OverlapScores {
        self.find(&compute_block_hash_for_seq(tokens, BLOCK_SIZE, BlockHashOptions::default()))
    }

    fn overlaps(&self, answer: &OverlapScores) -> Vec<(u64, u64)> {
        answer.scores.iter().map(|(worker, overlap)| (worker.worker_id, u64::from(*overlap))).collect()
    }

    fn stored(&self, worker: u64, parent: Option<u64>, blocks: &[Block]) -> RouterEvent {
        let blocks = blocks.iter().map(|block| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(block.engine),
            tokens_hash: LocalBlockHash(block.local),
            mm_extra_info: None,
        });
        let data = KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: blocks.collect(),
        };
        event(worker, KvCacheEventData::Stored(data))
    }

    fn removed(&self, worker: u64, engine: Vec<u64>) -> RouterEvent {
        let block_hashes = engine.into_iter().map(ExternalSequenceBlockHash).collect();
        event(worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
    }

    /// The crate reads engines' msgpack elsewhere, into the events of `stored`.
    fn payload(&self, _worker: u64, _bytes: Vec<u8>) -> Option<RouterEvent> {
        None
    }

    fn apply(&self, event: RouterEvent) -> Result<(), Failure> {
        Ok(self.pool.enqueue_event(event)?)
    }

    fn settle(&self) -> Result<(), Failure> {
        Ok(queue::block_on(self.pool.flush_and_wait())?)
    }

    fn burst(&self, events: Vec<RouterEvent>) -> Result<Duration, Failure> {
        let hops = self.hop()? * events.len() as u32;
        Ok(queue::burst(&self.pool, events)?.saturating_sub(hops))
    }

    /// Empty nodes go now instead of every five minutes.
    fn tidy(&self) {
        self.pool.backend().run_cleanup_task();
    }

    fn remove_worker(&self, worker: u64) -> Result<(), Failure> {
        queue::block_on(self.pool.remove_worker(worker));
        Ok(())
    }
}

fn event(worker: u64, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(worker, KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

fn main() -> io::Result<()> {
    serve::<Dynamo>()
}
