//! What an engine publishes: the bytes of its n-th batch, which follow from its rank, its incarnation and n alone.
//!
//! ```text
//! batch 0        the system prompt, which all ranks have alike
//! batch n        the next blocks of a prompt of 64 behind it; and, from when the cache is full on, as many of the oldest
//!                prompt removed, its last ones first
//! ```
//!
//! So a history of any length takes no memory. Bytes as of vLLM from 0.24 on.

pub const BLOCK_SIZE: usize = 16;
/// Blocks of a prompt behind the system prompt.
pub const PROMPT_BLOCKS: u64 = 64;
const VOCABULARY_BITS: u32 = 17;

#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Of a batch; divides `PROMPT_BLOCKS`.
    pub blocks: u64,
    /// Of the system prompt.
    pub system: u64,
    /// Of a rank's cache, without the system prompt.
    pub capacity: u64,
    /// Data-parallel ranks of a worker.
    pub dp_size: u64,
}

/// One life of a rank.
#[derive(Debug, Clone, Copy)]
pub struct Life {
    pub rank: u64,
    pub incarnation: u64,
}

/// A bijection of 64-bit numbers that looks random.
pub fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl Life {
    /// What names a block, and is what its tokens are made of: bit 63 for blocks behind the system prompt.
    fn name(self, number: u64) -> u64 {
        1 << 63 | self.incarnation << 56 | self.rank << 36 | number
    }
}

impl Shape {
    /// Appends the payload of a batch.
    pub fn batch(&self, life: Life, seq: u64, seconds: f64, out: &mut Vec<u8>) {
        out.extend([0x93, 0xcb]);
        out.extend(seconds.to_be_bytes());
        if seq == 0 {
            out.push(0x91);
            stored(life, (0..self.system).map(name_of_system), self.system, None, out);
        } else {
            let first = (seq - 1) * self.blocks;
            let removes = first >= self.capacity;
            out.push(if removes { 0x92 } else { 0x91 });
            let before = match first % PROMPT_BLOCKS {
                0 => self.system.checked_sub(1).map(name_of_system),
                _ => Some(life.name(first - 1)),
            };
            let names = (first..first + self.blocks).map(|number| life.name(number));
            stored(life, names, self.blocks, before, out);
            if removes {
                let oldest = first - self.capacity;
                let begins = oldest / PROMPT_BLOCKS * PROMPT_BLOCKS;
                let last = begins + PROMPT_BLOCKS - oldest % PROMPT_BLOCKS;
                let gone = (last - self.blocks..last).rev();
                removed(life, gone.map(|number| life.name(number)), self.blocks, out);
            }
        }
        unsigned(life.rank % self.dp_size, out);
    }
}

fn name_of_system(number: u64) -> u64 {
    number
}

/// An engine's own name of a block.
fn hash(name: u64, life: Life) -> u64 {
    mix(name ^ mix(life.rank << 8 | life.incarnation))
}

fn stored(
    life: Life,
    names: impl Iterator<Item = u64> + Clone,
    blocks: u64,
    parent: Option<u64>,
    out: &mut Vec<u8>,
) {
    out.push(0x8c);
    string("type", out);
    string("BlockStored", out);
    string("block_hashes", out);
    array(blocks, out);
    names.clone().for_each(|name| wide(hash(name, life), out));
    string("parent_block_hash", out);
    match parent {
        Some(parent) => wide(hash(parent, life), out),
        None => out.push(0xc0),
    }
    string("token_ids", out);
    array(blocks * BLOCK_SIZE as u64, out);
    for name in names {
        for token in tokens(name) {
            unsigned(token, out);
        }
    }
    string("block_size", out);
    unsigned(BLOCK_SIZE as u64, out);
    string("lora_id", out);
    out.push(0xc0);
    string("medium", out);
    string("GPU", out);
    string("lora_name", out);
    out.push(0xc0);
    string("extra_keys", out);
    out.push(0xc0);
    string("group_idx", out);
    out.push(0);
    string("kv_cache_spec_kind", out);
    string("full_attention", out);
    string("kv_cache_spec_sliding_window", out);
    out.push(0xc0);
}

fn removed(life: Life, names: impl Iterator<Item = u64>, blocks: u64, out: &mut Vec<u8>) {
    out.push(0x84);
    string("type", out);
    string("BlockRemoved", out);
    string("block_hashes", out);
    array(blocks, out);
    names.for_each(|name| wide(hash(name, life), out));
    string("medium", out);
    string("GPU", out);
    string("group_idx", out);
    out.push(0);
}

/// Three of each 64 random bits; `fleet_process.py` makes the same ones.
fn tokens(name: u64) -> impl Iterator<Item = u64> {
    (0..BLOCK_SIZE as u64).map(move |place| {
        mix(name ^ mix(place / 3)) >> (place % 3 * u64::from(VOCABULARY_BITS)) & ((1 << VOCABULARY_BITS) - 1)
    })
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.push(0xa0 | text.len() as u8); // all are shorter than 32
    out.extend(text.as_bytes());
}

fn array(length: u64, out: &mut Vec<u8>) {
    out.push(0xdd);
    out.extend((length as u32).to_be_bytes());
}

fn wide(number: u64, out: &mut Vec<u8>) {
    out.push(0xcf);
    out.extend(number.to_be_bytes());
}

fn unsigned(number: u64, out: &mut Vec<u8>) {
    match number {
        0..0x80 => out.push(number as u8),
        0x80..0x100 => out.extend([0xcc, number as u8]),
        0x100..0x1_0000 => {
            out.push(0xcd);
            out.extend((number as u16).to_be_bytes());
        }
        _ => {
            out.push(0xce);
            out.extend((number as u32).to_be_bytes());
        }
    }
}
