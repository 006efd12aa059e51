//! What every driver holds and asks, made from one seed by the formulas of `bench/README.md`.

pub const BLOCK_SIZE: u32 = 16;
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const VOCABULARY: u32 = 131_072;

/// Random streams; the numbers are the protocol's.
#[derive(Clone, Copy)]
pub enum Stream {
    Tokens = 0,
    EngineHashes = 1,
    Holders = 2,
    Lengths = 3,
    Queries = 4,
    FreshWorkers = 5,
    FreshLocal = 6,
    FreshEngine = 7,
    Continued = 8,
    ContinuedLocal = 9,
    ContinuedEngine = 10,
    RemovedLocal = 11,
    RemovedEngine = 12,
}

fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Tokens of a block, from its word.
pub fn block_tokens(word: u64) -> [u32; BLOCK_SIZE as usize] {
    std::array::from_fn(|j| (word >> (32 * (j % 2))) as u32 % VOCABULARY)
}

/// How many blocks of a prompt its holders have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// All of them.
    Equal,
    /// Any number, one holder all.
    Unequal,
    /// Any number.
    Random,
}

/// The arguments of `load`.
#[derive(Clone, Debug)]
pub struct Fixture {
    pub prompts: u64,
    /// Blocks of a prompt.
    pub blocks: u64,
    pub holders: u64,
    pub lengths: Lengths,
    /// Blocks of an event, at most.
    pub event_blocks: u64,
    pub workers: u64,
    pub seed: u64,
}

impl Fixture {
    /// The i-th word of a stream.
    pub fn word(&self, stream: Stream, i: u64) -> u64 {
        let key = mix(self.seed.wrapping_add((stream as u64).wrapping_mul(GOLDEN)));
        mix(key.wrapping_add(i.wrapping_mul(GOLDEN)))
    }

    /// Overwrites `tokens` with those of a prompt.
    pub fn tokens(&self, prompt: u64, tokens: &mut Vec<u32>) {
        tokens.clear();
        for block in 0..self.blocks {
            tokens.extend(block_tokens(self.word(Stream::Tokens, prompt * self.blocks + block)));
        }
    }

    /// Engine hash of a prompt's block.
    pub fn engine_hash(&self, prompt: u64, block: u64) -> u64 {
        self.word(Stream::EngineHashes, prompt * self.blocks + block)
    }

    /// Workers that hold a prompt, and how many blocks of it.
    pub fn holders(&self, prompt: u64) -> Vec<(u64, u64)> {
        let mut workers: Vec<u64> = (0..self.workers).collect();
        let longest = self.word(Stream::Lengths, prompt * 1024 + 1023) % self.holders;
        (0..self.holders)
            .map(|holder| {
                let swapped =
                    holder + self.word(Stream::Holders, prompt * 1024 + holder) % (self.workers - holder);
                workers.swap(holder as usize, swapped as usize);
                let whole = match self.lengths {
                    Lengths::Equal => true,
                    Lengths::Unequal => holder == longest,
                    Lengths::Random => false,
                };
                let some = 1 + self.word(Stream::Lengths, prompt * 1024 + holder) % self.blocks;
                let length = if whole { self.blocks } else { some };
                (workers[holder as usize], length)
            })
            .collect()
    }

    /// The prompt that a query asks for.
    pub fn queried(&self, query: u64) -> u64 {
        self.word(Stream::Queries, query) % self.prompts
    }

    /// A prompt that is not held.
    pub fn missed(&self, query: u64) -> u64 {
        self.prompts + self.word(Stream::Queries, query) % 64
    }
}
