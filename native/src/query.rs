//! `FindMatches` and `StreamFindMatches` from bytes to bytes.
//!
//! ```text
//! request bytes ──parse──▶ pool ──▶ index.find ──▶ answer bytes
//!                   │        └ unknown, ambiguous ─┐
//!                   └ not of the usual shape ──────┴──▶ None: the plain path answers, and words the error
//! ```
//!
//! What is answered here is byte for byte what the plain path answers; whatever is unusual (errors, multimodal
//! items, fields sent in chunks) is left to it, so that there is one place that judges.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};
use parking_lot::RwLock;

use crate::hashing::{BlockHasher, hashes_from_bytes};
use crate::index::{Common, HashedPrompt, Index, LEVELS, Prompt, Row, TokenPrompt, WorkerRank, top_k};
use crate::protobuf::{Field, Reader, Writer};

/// Requests in one message of the stream; more are refused by the plain path.
const MAX_REQUESTS: usize = 1024;

const DEFAULT_TENANT: &str = "default";

/// What is asked for.
#[derive(Debug, Default)]
struct Request<'a> {
    model: &'a str,
    tenant: &'a str,
    block_size: Option<u32>,
    token_ids: &'a [u8],
    block_hashes: &'a [u8],
    lora_name: &'a str,
    cache_salt: &'a str,
    eagle: Option<bool>,
    early_exit: bool,
    id: u64,
    prompt_tokens: u32,
    top_k: usize,
}

/// Whether a caller whose token is bound to a tenant ("*": to none) may name another.
fn may_name(caller_tenant: &str, tenant: &str) -> bool {
    caller_tenant == "*" || caller_tenant == tenant
}

/// A request of the usual shape.
fn parse(bytes: &[u8]) -> Option<Request<'_>> {
    let mut request = Request::default();
    let mut reader = Reader::new(bytes);
    while let Some(field) = reader.next()? {
        match field {
            (1, Field::Bytes(value)) => request.model = std::str::from_utf8(value).ok()?,
            (2, Field::Bytes(value)) => request.tenant = std::str::from_utf8(value).ok()?,
            (3, Field::Varint(value)) => request.block_size = Some(value as u32),
            (4, Field::Bytes(value)) if request.token_ids.is_empty() && value.len() % 4 == 0 => {
                request.token_ids = value;
            }
            (5, Field::Bytes(value)) if request.block_hashes.is_empty() && value.len() % 8 == 0 => {
                request.block_hashes = value;
            }
            (6, Field::Bytes(value)) => request.lora_name = std::str::from_utf8(value).ok()?,
            (7, Field::Bytes(value)) => request.cache_salt = std::str::from_utf8(value).ok()?,
            (9, Field::Varint(value)) => request.eagle = Some(value != 0),
            (10, Field::Varint(value)) => request.early_exit = value != 0,
            (11, Field::Varint(value)) => request.id = value,
            // A trace context, which Python follows; but a message is read by both, or by neither.
            (12, Field::Bytes(value)) => drop(std::str::from_utf8(value).ok()?),
            (13, Field::Varint(value)) => request.prompt_tokens = value as u32,
            (14, Field::Varint(value)) => request.top_k = value as u32 as usize,
            (1..=14, _) => return None,
            _ => {} // of a later version
        }
    }
    // Hashes carry adapter and salt already, and stand for the tokens: who sends both gets an error that says so.
    let tokens_only = [request.token_ids, request.lora_name.as_bytes(), request.cache_salt.as_bytes()];
    let contradicts = !request.block_hashes.is_empty() && tokens_only.iter().any(|field| !field.is_empty())
        || request.prompt_tokens > 0 && !request.token_ids.is_empty();
    (!contradicts).then_some(request)
}

/// An index and the ranks whose history is incomplete.
#[derive(Debug)]
struct Pool {
    block_size: u32,
    eagle: bool,
    index: Arc<Index>,
    incomplete: HashSet<WorkerRank>,
}

/// The pools of one model.
type Pools = Vec<Pool>;

/// The indexes that queries can reach, by tenant and model.
#[derive(Debug, Default)]
pub struct Queries {
    tenants: RwLock<HashMap<String, HashMap<String, Pools>>>,
}

/// Tenant, model, block size, EAGLE.
pub type PoolName = (String, String, u32, bool);

impl Queries {
    /// Makes an index reachable, instead of the one of the same pool.
    pub fn set_pool(&self, (tenant, model, block_size, eagle): PoolName, index: Arc<Index>) {
        let mut tenants = self.tenants.write();
        let pools = tenants.entry(tenant).or_default().entry(model).or_default();
        pools.retain(|pool| (pool.block_size, pool.eagle) != (block_size, eagle));
        pools.push(Pool { block_size, eagle, index, incomplete: HashSet::new() });
    }

    /// Makes an index unreachable.
    pub fn remove_pool(&self, (tenant, model, block_size, eagle): PoolName) {
        let mut tenants = self.tenants.write();
        let Some(models) = tenants.get_mut(&tenant) else { return };
        if let Some(pools) = models.get_mut(&model) {
            pools.retain(|pool| (pool.block_size, pool.eagle) != (block_size, eagle));
            if pools.is_empty() {
                models.remove(&model);
            }
        }
        if models.is_empty() {
            tenants.remove(&tenant);
        }
    }

    /// Says whether a rank of a pool has an incomplete history.
    pub fn set_incomplete(
        &self,
        (tenant, model, block_size, eagle): PoolName,
        rank: WorkerRank,
        incomplete: bool,
    ) {
        let mut tenants = self.tenants.write();
        let pools = tenants.get_mut(&tenant).and_then(|models| models.get_mut(&model));
        let same = |pool: &&mut Pool| (pool.block_size, pool.eagle) == (block_size, eagle);
        if let Some(pool) = pools.and_then(|pools| pools.iter_mut().find(same)) {
            if incomplete {
                pool.incomplete.insert(rank);
            } else {
                pool.incomplete.remove(&rank);
            }
        }
    }

    /// Answers a `FindMatchesRequest`; None: the plain path must.
    ///
    /// `caller_tenant` is what the caller's token is bound to; "*" is all.
    pub fn answer(&self, request: &[u8], now: f64, caller_tenant: &str) -> Option<Vec<u8>> {
        let request = parse(request)?;
        let mut answer = Writer::default();
        self.find(&request, "", now, caller_tenant, &mut answer)?;
        Some(answer.into_bytes())
    }

    /// Answers a `StreamFindMatchesRequest`; None: the plain path must answer all of it.
    pub fn answer_stream(&self, message: &[u8], now: f64, caller_tenant: &str) -> Option<Vec<u8>> {
        let (mut requests, mut tenant) = (Vec::new(), "");
        let mut reader = Reader::new(message);
        while let Some(field) = reader.next()? {
            match field {
                (1, Field::Bytes(value)) if requests.len() < MAX_REQUESTS => requests.push(value),
                (2, Field::Bytes(value)) => tenant = std::str::from_utf8(value).ok()?,
                (1 | 2, _) => return None,
                _ => {} // of a later version
            }
        }
        // Also where no request is that tenant's: whoever names one must be allowed to.
        if !may_name(caller_tenant, if tenant.is_empty() { DEFAULT_TENANT } else { tenant }) {
            return None;
        }
        let mut answers = Writer::default();
        for bytes in requests {
            let request = parse(bytes)?;
            let mut response = Writer::default();
            self.find(&request, tenant, now, caller_tenant, &mut response)?;
            let mut result = Writer::default();
            result.varint(1, request.id);
            result.bytes(4, response.as_bytes());
            answers.bytes(1, result.as_bytes());
        }
        Some(answers.into_bytes())
    }

    /// Finds the overlaps of a prompt; None: the plain path must, and words the error.
    ///
    /// `prompt_tokens`: its length; 0 = unknown. `top_k`: most rows; 0 = all. `found` is called with ranks and rows, the ranks whose history is
    /// incomplete among them, and whether there may be more than is said.
    pub fn find_hashes<T>(
        &self,
        (tenant, model, block_size, eagle): (&str, &str, u32, bool),
        hashes: &[u64],
        prompt_tokens: usize,
        top_k: usize,
        now: f64,
        found: impl FnOnce(&Found<'_>) -> T,
    ) -> Option<T> {
        let tenants = self.tenants.read();
        let pools = tenants.get(tenant)?.get(model)?;
        let pool = pools.iter().find(|pool| (pool.block_size, pool.eagle) == (block_size, eagle))?;
        let usable = usable(hashes.len(), prompt_tokens, block_size)?;
        let limits = Limits { top_k, ..Limits::default() };
        Some(search(pool, &mut HashedPrompt { hashes, usable }, limits, now, found))
    }

    fn find(
        &self,
        request: &Request<'_>,
        outer_tenant: &str,
        now: f64,
        caller_tenant: &str,
        answer: &mut Writer,
    ) -> Option<()> {
        let tenant =
            [request.tenant, outer_tenant, DEFAULT_TENANT].into_iter().find(|name| !name.is_empty())?;
        if !may_name(caller_tenant, tenant) {
            return None;
        }
        let tenants = self.tenants.read();
        let pools = tenants.get(tenant)?.get(request.model)?;
        let wanted = |pool: &&Pool| {
            request.block_size.is_none_or(|size| size == pool.block_size)
                && request.eagle.is_none_or(|eagle| eagle == pool.eagle)
        };
        let mut fitting = pools.iter().filter(wanted);
        let (pool, None) = (fitting.next()?, fitting.next()) else { return None };
        let limits = Limits { early_exit: request.early_exit, top_k: request.top_k };
        if request.token_ids.is_empty() {
            let hashes = hashes_from_bytes(request.block_hashes)?;
            let usable = usable(hashes.len(), request.prompt_tokens as usize, pool.block_size)?;
            let mut prompt = HashedPrompt { hashes: &hashes, usable };
            search(pool, &mut prompt, limits, now, |found| write(found, pool.block_size, answer));
        } else {
            let size = pool.block_size as usize;
            let hasher =
                BlockHasher::new(size, request.lora_name, request.cache_salt, &[], pool.eagle).ok()?;
            let mut prompt = TokenPrompt::new(hasher, request.token_ids);
            search(pool, &mut prompt, limits, now, |found| write(found, pool.block_size, answer));
        }
        Some(())
    }
}

/// The most blocks of a prompt that an engine takes from its cache; None: it is shorter than its blocks.
fn usable(blocks: usize, prompt_tokens: usize, block_size: u32) -> Option<usize> {
    match prompt_tokens {
        0 => Some(blocks),
        tokens if tokens < blocks * block_size as usize => None,
        tokens => Some((tokens - 1) / block_size as usize),
    }
}

/// What a search finds.
#[derive(Debug)]
pub struct Found<'a> {
    pub rows: Vec<(WorkerRank, &'a Row)>,
    /// Blocks of the prompt.
    pub blocks: usize,
    /// Workers may have more than is said.
    pub lower_bound: bool,
    /// The rows whose history is incomplete.
    pub incomplete: Vec<u32>,
    /// What the ranks without a row have, where rows are limited.
    pub others: Option<Common>,
    /// How many worker ranks there are, and the digest of them.
    pub ranks: (usize, u64),
}

/// Where a search may stop.
#[derive(Debug, Clone, Copy, Default)]
struct Limits {
    early_exit: bool,
    /// Most rows; 0: all.
    top_k: usize,
}

fn search<T>(
    pool: &Pool,
    prompt: &mut impl Prompt,
    Limits { early_exit, top_k: most }: Limits,
    now: f64,
    found: impl FnOnce(&Found<'_>) -> T,
) -> T {
    let blocks = prompt.len();
    pool.index.find(prompt, now, early_exit, |all, directory| {
        let mut incomplete = directory.incomplete().clone();
        incomplete.extend(pool.incomplete.iter().filter_map(|rank| directory.handle(rank)));
        let limited = (most > 0).then(|| top_k(all, most, directory, &incomplete));
        let (rows, others) =
            limited.as_ref().map_or((all, None), |(rows, others)| (&rows[..], Some(*others)));
        let rows: Vec<(WorkerRank, &Row)> = rows
            .iter()
            .filter_map(|row| directory.name(row.worker).cloned().map(|rank| (rank, row)))
            .collect();
        let all_complete = pool.incomplete.is_empty() && incomplete.is_empty();
        let places = rows.iter().enumerate().filter(|(_, (_, row))| incomplete.contains(&row.worker));
        let incomplete =
            if all_complete { Vec::new() } else { places.map(|(place, _)| place as u32).collect() };
        let lower_bound = early_exit || !all_complete;
        let ranks = (directory.ranks(), directory.digest());
        found(&Found { rows, blocks, lower_bound, incomplete, others, ranks })
    })
}

/// A `FindMatchesResponse`.
fn write(found: &Found<'_>, block_size: u32, answer: &mut Writer) {
    let mut rows = overlaps(&found.rows);
    if let Some(others) = found.others {
        let mut common = Writer::default();
        common.varint(1, others.ranks as u64);
        common.varint(2, u64::from(others.exact));
        (3..).zip(others.blocks).for_each(|(field, blocks)| common.varint(field, u64::from(blocks)));
        common.fixed64(8, others.digest);
        rows.bytes(8, common.as_bytes());
    }
    answer.bytes(1, rows.as_bytes());
    answer.varint(2, found.blocks as u64);
    answer.varint(3, u64::from(block_size));
    answer.varint(4, u64::from(found.lower_bound));
    if !found.incomplete.is_empty() {
        answer.packed(5, found.incomplete.iter().map(|place| u64::from(*place)));
    }
}

/// `Overlaps`: columns that say nothing new are left out.
fn overlaps(rows: &[(WorkerRank, &Row)]) -> Writer {
    let mut message = Writer::default();
    let (mut ranks, mut slower, mut predicted) = (false, false, false);
    for (rank, row) in rows {
        message.bytes(1, rank.worker_id.as_bytes());
        ranks |= rank.dp_rank != 0;
        slower |= row.blocks[1..LEVELS - 1].iter().any(|&blocks| blocks != row.blocks[0]);
        predicted |= row.blocks[LEVELS - 1] != row.blocks[0];
    }
    if ranks {
        message.packed(2, rows.iter().map(|(rank, _)| u64::from(rank.dp_rank)));
    }
    for level in 0..LEVELS {
        let included = match level {
            0 => true,
            _ if level < LEVELS - 1 => slower,
            _ => predicted,
        };
        if included {
            message.packed(3 + level as u32, rows.iter().map(|(_, row)| u64::from(row.blocks[level])));
        }
    }
    message
}
