//! A dump → its messages.

use super::{FULL_ATTENTION, Identity, OTHER_ATTENTION, VERSION};
use crate::index::{Copies, DumpedBlock, DumpedOrphan, DumpedWindowBlock, WorkerDump};
use crate::protobuf::Writer;

// What parts of a message take at most, as in the reference backend: chunks are cut at the same blocks.
const BLOCK_BYTES: usize = 8 + 8 + 5;
const RUN_BYTES: usize = 48;
const ENTRY_BYTES: usize = 64;
const HEADER_BYTES: usize = 4096;

/// A chunk that is being filled.
struct Chunk {
    runs: Writer,
    further: Writer,
    orphans: Writer,
    window_blocks: Writer,
    run: Option<Run>,
    left: usize,
}

#[derive(Default)]
struct Run {
    parent: Option<usize>,
    local_hashes: Vec<u64>,
    engine_hashes: Vec<u64>,
    copies: Vec<u64>,
    tier: u8,
    group: u32,
}

impl Chunk {
    fn new(budget: usize) -> Self {
        let (runs, further, orphans, window_blocks) = Default::default();
        Self { runs, further, orphans, window_blocks, run: None, left: budget }
    }

    fn end_run(&mut self) {
        let Some(run) = self.run.take() else { return };
        let mut message = Writer::default();
        if let Some(parent) = run.parent {
            message.present(1, parent as u64);
        }
        message.packed_fixed64(2, &run.local_hashes);
        message.packed_fixed64(3, &run.engine_hashes);
        message.packed(4, run.copies.iter().copied());
        message.varint(5, tier_to_wire(run.tier));
        message.varint(6, u64::from(run.group));
        self.runs.bytes(4, message.as_bytes());
    }

    fn add(&mut self, position: usize, block: &DumpedBlock) {
        let first = block.counts.first().copied().unwrap_or(Copies { group: 0, tier: 0, number: 0 });
        let follows = position > 0 && block.parent == Some(position - 1);
        let same_place = |run: &Run| (run.group, run.tier) == (first.group, first.tier);
        if !(follows && self.run.as_ref().is_some_and(same_place)) {
            self.end_run();
            self.run =
                Some(Run { parent: block.parent, tier: first.tier, group: first.group, ..Run::default() });
            self.left = self.left.saturating_sub(RUN_BYTES);
        }
        let run = self.run.as_mut().expect("there is one now");
        if first.number != 1 && run.copies.is_empty() {
            run.copies.resize(run.local_hashes.len(), 1);
        }
        if first.number != 1 || !run.copies.is_empty() {
            run.copies.push(u64::from(first.number));
        }
        run.local_hashes.push(block.local_hash);
        run.engine_hashes.push(block.engine_hash.unwrap_or(0));
        self.left = self.left.saturating_sub(BLOCK_BYTES);
        for copies in block.counts.iter().skip(1) {
            self.further.bytes(5, write_copies(copies, position).as_bytes());
            self.left = self.left.saturating_sub(ENTRY_BYTES);
        }
    }

    fn add_orphan(&mut self, orphan: &DumpedOrphan) {
        let mut message = Writer::default();
        message.fixed64(1, orphan.engine_hash);
        message.fixed64(2, orphan.parent_engine_hash);
        message.fixed64(3, orphan.local_hash);
        for copies in &orphan.counts {
            message.bytes(4, write_copies(copies, 0).as_bytes());
        }
        self.orphans.bytes(6, message.as_bytes());
        self.left = self.left.saturating_sub(ENTRY_BYTES * orphan.counts.len());
    }

    fn add_window_block(&mut self, block: &DumpedWindowBlock) {
        let mut message = Writer::default();
        message.fixed64(1, block.engine_hash);
        message.fixed64(2, block.sequence_hash);
        for copies in &block.counts {
            message.bytes(3, write_copies(copies, 0).as_bytes());
        }
        self.window_blocks.bytes(9, message.as_bytes());
        self.left = self.left.saturating_sub(ENTRY_BYTES * block.counts.len());
    }
}

fn write_copies(copies: &Copies, position: usize) -> Writer {
    let mut message = Writer::default();
    message.varint(1, position as u64);
    message.varint(2, tier_to_wire(copies.tier));
    message.varint(3, u64::from(copies.group));
    message.varint(4, u64::from(copies.number));
    message
}

/// Unset is the device, so that the common case costs no byte.
pub(super) fn tier_to_wire(tier: u8) -> u64 {
    if tier == 0 { 0 } else { u64::from(tier) + 1 }
}

/// The messages of a dump, in order; at least one.
pub fn encode(
    identity: &Identity,
    dump: &WorkerDump,
    history_incomplete: bool,
    max_chunk_bytes: usize,
) -> Vec<Vec<u8>> {
    let budget = max_chunk_bytes.saturating_sub(HEADER_BYTES);
    let mut chunks = Vec::new();
    let mut chunk = Chunk::new(budget);
    for (position, block) in dump.blocks.iter().enumerate() {
        let needed = BLOCK_BYTES + RUN_BYTES + ENTRY_BYTES * block.counts.len().saturating_sub(1);
        if needed > chunk.left {
            chunks.push(std::mem::replace(&mut chunk, Chunk::new(budget)));
        }
        chunk.add(position, block);
    }
    for orphan in &dump.orphans {
        if ENTRY_BYTES * orphan.counts.len() > chunk.left {
            chunks.push(std::mem::replace(&mut chunk, Chunk::new(budget)));
        }
        chunk.add_orphan(orphan);
    }
    for block in &dump.window_blocks {
        if ENTRY_BYTES * block.counts.len() > chunk.left {
            chunks.push(std::mem::replace(&mut chunk, Chunk::new(budget)));
        }
        chunk.add_window_block(block);
    }
    chunks.push(chunk);
    let last = chunks.len() - 1;
    let messages = chunks.into_iter().enumerate();
    messages
        .map(|(index, chunk)| message(identity, dump, chunk, index, index == last, history_incomplete))
        .collect()
}

fn message(
    identity: &Identity,
    dump: &WorkerDump,
    mut chunk: Chunk,
    index: usize,
    last: bool,
    history_incomplete: bool,
) -> Vec<u8> {
    chunk.end_run();
    let mut state = Writer::default();
    state.varint(1, index as u64);
    state.varint(2, u64::from(last));
    if index == 0 {
        for &(group, full) in &dump.groups {
            let mut message = Writer::default();
            message.varint(1, u64::from(group));
            message.varint(2, if full { FULL_ATTENTION } else { OTHER_ATTENTION });
            if let Some(window) = dump.windows.iter().find(|window| window.number == group) {
                message.varint(3, u64::from(window.window));
                message.varint(4, u64::from(window.block_size));
            }
            state.bytes(3, message.as_bytes());
        }
    }
    for part in [chunk.runs, chunk.further, chunk.orphans] {
        state.append(&part);
    }
    state.varint(7, u64::from(history_incomplete || dump.incomplete));
    if index == 0 {
        state.string(8, &dump.incompatible);
    }
    state.append(&chunk.window_blocks);
    let mut event = Writer::default();
    event.bytes(5, state.as_bytes());
    let mut batch = Writer::default();
    write_header(&mut batch, identity, dump.epoch, dump.last_event_id);
    batch.bytes(11, event.as_bytes());
    batch.into_bytes()
}

/// Whose message it is, and its place in the sequence.
pub(super) fn write_header(batch: &mut Writer, identity: &Identity, epoch: u64, event_id: Option<u64>) {
    batch.varint(1, VERSION);
    batch.string(2, &identity.worker_id);
    batch.varint(3, u64::from(identity.dp_rank));
    batch.string(4, &identity.model);
    batch.string(5, &identity.tenant);
    batch.varint(6, u64::from(identity.block_size));
    batch.varint(7, u64::from(identity.eagle));
    batch.varint(8, epoch);
    if let Some(event_id) = event_id {
        batch.present(9, event_id);
    }
}
