//! Messages → the dump they carry.

use std::fmt;

use smallvec::SmallVec;

use super::{Identity, OTHER_ATTENTION, VERSION};
use crate::index::{Copies, DumpedBlock, DumpedOrphan, DumpedWindowBlock, WindowGroup, WorkerDump};
use crate::protobuf::{Field, Reader};

/// Why messages are no dump: the field, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DecodeError {
    /// Another version of the message.
    Version(u64),
    Invalid {
        field: &'static str,
        message: String,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => {
                write!(f, "version {version} of KvEventBatch, this release reads {VERSION}")
            }
            Self::Invalid { field, message } => write!(f, "{field}: {message}"),
        }
    }
}

pub(super) fn invalid(field: &'static str, message: impl Into<String>) -> DecodeError {
    DecodeError::Invalid { field, message: message.into() }
}

/// A dump read from messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dumped {
    pub identity: Identity,
    pub dump: WorkerDump,
    pub history_incomplete: bool,
}

/// Reads all messages of a dump, in order.
pub fn decode<'a>(messages: impl IntoIterator<Item = &'a [u8]>) -> Result<Dumped, DecodeError> {
    let mut reading = Reading::default();
    let mut complete = false;
    for message in messages {
        if complete {
            return Err(invalid("state.last", "a message after the last one"));
        }
        complete = reading.batch(message)?;
    }
    if !complete {
        return Err(invalid("state.last", "the last message is missing"));
    }
    reading.finish()
}

#[derive(Default)]
struct Reading {
    identity: Option<(Identity, u64, Option<u64>)>,
    next_index: u64,
    groups: Vec<(u32, bool)>,
    blocks: Vec<DumpedBlock>,
    further: Vec<(u64, Copies)>,
    orphans: Vec<DumpedOrphan>,
    windows: Vec<WindowGroup>,
    window_blocks: Vec<DumpedWindowBlock>,
    history_incomplete: bool,
    incompatible: String,
}

const NO_MESSAGE: &str = "is not a message";

/// Calls `with` for each field of a message.
pub(super) fn fields<'a>(
    name: &'static str,
    message: &'a [u8],
    mut with: impl FnMut(u32, Field<'a>) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    let mut reader = Reader::new(message);
    while let Some((number, field)) = reader.next().ok_or_else(|| invalid(name, NO_MESSAGE))? {
        with(number, field)?;
    }
    Ok(())
}

pub(super) fn narrow<T: TryFrom<u64>>(name: &'static str, value: u64) -> Result<T, DecodeError> {
    T::try_from(value).map_err(|_| invalid(name, format!("{value} is out of range")))
}

pub(super) fn text(name: &'static str, bytes: &[u8]) -> Result<String, DecodeError> {
    std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| invalid(name, "is not text"))
}

impl Identity {
    /// Reads one of the fields of a message that name its source.
    pub(super) fn read(&mut self, number: u32, field: Field<'_>) -> Result<(), DecodeError> {
        match (number, field) {
            (2, Field::Bytes(value)) => self.worker_id = text("worker_id", value)?,
            (3, Field::Varint(value)) => self.dp_rank = narrow("dp_rank", value)?,
            (4, Field::Bytes(value)) => self.model = text("model", value)?,
            (5, Field::Bytes(value)) => self.tenant = text("tenant", value)?,
            (6, Field::Varint(value)) => self.block_size = narrow("block_size", value)?,
            (7, Field::Varint(value)) => self.eagle = value != 0,
            _ => {}
        }
        Ok(())
    }
}

impl Reading {
    /// Reads one message; whether it is the last one.
    fn batch(&mut self, message: &[u8]) -> Result<bool, DecodeError> {
        let (mut version, mut epoch, mut event_id) = (0, 0, None);
        let mut identity = Identity::default();
        let mut states = Vec::new();
        fields("batch", message, |number, field| {
            match (number, field) {
                (1, Field::Varint(value)) => version = value,
                (2..=7, field) => identity.read(number, field)?,
                (8, Field::Varint(value)) => epoch = value,
                (9, Field::Varint(value)) => event_id = Some(value),
                (11, Field::Bytes(value)) => states.push(value),
                _ => {}
            }
            Ok(())
        })?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let mut state = None;
        for event in &states {
            fields("events", event, |number, field| {
                match (number, field) {
                    (5, Field::Bytes(_)) if state.is_some() => {
                        return Err(invalid("events", "is a state chunk that comes in parts"));
                    }
                    (5, Field::Bytes(value)) => state = Some(value),
                    // An event is one of several; the last one counts.
                    (1..=4, Field::Bytes(_)) => state = None,
                    _ => {}
                }
                Ok(())
            })?;
        }
        let (Some(state), 1) = (state, states.len()) else {
            return Err(invalid("events", "is not one state chunk"));
        };
        let identity = (identity, epoch, event_id);
        match &self.identity {
            None => self.identity = Some(identity),
            Some(first) if *first == identity => {}
            Some(_) => return Err(invalid("state", "chunks of two dumps")),
        }
        self.chunk(state)
    }

    fn chunk(&mut self, chunk: &[u8]) -> Result<bool, DecodeError> {
        let (mut index, mut last, mut incomplete) = (0, false, false);
        let mut incompatible = String::new();
        // The number comes first on the wire of any writer we know, but need not.
        fields("state", chunk, |number, field| {
            match (number, field) {
                (1, Field::Varint(value)) => index = value,
                (2, Field::Varint(value)) => last = value != 0,
                (7, Field::Varint(value)) => incomplete = value != 0,
                (8, Field::Bytes(value)) => incompatible = text("state.incompatible", value)?,
                _ => {}
            }
            Ok(())
        })?;
        if index != self.next_index {
            return Err(invalid(
                "state.index",
                format!("chunk {index} where {} comes next", self.next_index),
            ));
        }
        self.next_index += 1;
        self.history_incomplete |= incomplete;
        if index == 0 {
            self.incompatible = incompatible;
        }
        fields("state", chunk, |number, field| match (number, field) {
            (3, Field::Bytes(value)) if index == 0 => self.group(value),
            (4, Field::Bytes(value)) => self.run(value),
            (5, Field::Bytes(value)) => {
                let copies = read_copies(value)?;
                self.further.push(copies);
                Ok(())
            }
            (6, Field::Bytes(value)) => self.orphan(value),
            (9, Field::Bytes(value)) => self.window_block(value),
            _ => Ok(()),
        })?;
        Ok(last)
    }

    fn group(&mut self, message: &[u8]) -> Result<(), DecodeError> {
        let (mut group, mut kind, mut window, mut block_size) = (0, 0, 0, 0);
        fields("state.groups", message, |number, field| {
            match (number, field) {
                (1, Field::Varint(value)) => group = narrow("state.groups.group", value)?,
                (2, Field::Varint(value)) => kind = value,
                (3, Field::Varint(value)) => window = narrow("state.groups.sliding_window", value)?,
                (4, Field::Varint(value)) => block_size = narrow("state.groups.block_size", value)?,
                _ => {}
            }
            Ok(())
        })?;
        self.groups.push((group, kind != OTHER_ATTENTION));
        if window > 0 {
            self.windows.push(WindowGroup { number: group, window, block_size });
        }
        Ok(())
    }

    fn run(&mut self, message: &[u8]) -> Result<(), DecodeError> {
        let mut parent = None;
        let (mut local, mut engine, mut copies) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tier, mut group) = (0, 0);
        fields("state.runs", message, |number, field| {
            match (number, field) {
                (1, Field::Varint(value)) => {
                    parent = Some(narrow::<usize>("state.runs.parent_position", value)?)
                }
                (2, Field::Bytes(value)) => read_fixed64("state.runs.local_hashes", value, &mut local)?,
                (2, Field::Fixed64(value)) => local.push(value),
                (3, Field::Bytes(value)) => read_fixed64("state.runs.engine_hashes", value, &mut engine)?,
                (3, Field::Fixed64(value)) => engine.push(value),
                (4, Field::Bytes(value)) => read_varints("state.runs.copies", value, &mut copies)?,
                (4, Field::Varint(value)) => copies.push(value),
                (5, Field::Varint(value)) => tier = tier_from_wire(value)?,
                (6, Field::Varint(value)) => group = narrow("state.runs.group", value)?,
                _ => {}
            }
            Ok(())
        })?;
        if engine.len() != local.len() || !(copies.is_empty() || copies.len() == local.len()) {
            return Err(invalid("state.runs", "columns of different lengths"));
        }
        if let Some(parent) = parent.filter(|&parent| parent >= self.blocks.len()) {
            return Err(invalid("state.runs.parent_position", format!("position {parent} comes later")));
        }
        for (place, (local_hash, engine_hash)) in local.into_iter().zip(engine).enumerate() {
            let number =
                copies.get(place).copied().map_or(Ok(1), |number| narrow("state.runs.copies", number))?;
            let counts: SmallVec<[Copies; 2]> =
                (number > 0).then_some(Copies { group, tier, number }).into_iter().collect();
            self.blocks.push(DumpedBlock {
                engine_hash: (number > 0).then_some(engine_hash),
                parent,
                local_hash,
                counts,
            });
            parent = Some(self.blocks.len() - 1);
        }
        Ok(())
    }

    fn orphan(&mut self, message: &[u8]) -> Result<(), DecodeError> {
        let mut orphan =
            DumpedOrphan { engine_hash: 0, parent_engine_hash: 0, local_hash: 0, counts: SmallVec::new() };
        fields("state.orphans", message, |number, field| {
            match (number, field) {
                (1, Field::Fixed64(value)) => orphan.engine_hash = value,
                (2, Field::Fixed64(value)) => orphan.parent_engine_hash = value,
                (3, Field::Fixed64(value)) => orphan.local_hash = value,
                (4, Field::Bytes(value)) => orphan.counts.push(read_copies(value)?.1),
                _ => {}
            }
            Ok(())
        })?;
        self.orphans.push(orphan);
        Ok(())
    }

    fn window_block(&mut self, message: &[u8]) -> Result<(), DecodeError> {
        let mut block = DumpedWindowBlock { engine_hash: 0, sequence_hash: 0, counts: SmallVec::new() };
        fields("state.window_blocks", message, |number, field| {
            match (number, field) {
                (1, Field::Fixed64(value)) => block.engine_hash = value,
                (2, Field::Fixed64(value)) => block.sequence_hash = value,
                (3, Field::Bytes(value)) => block.counts.push(read_copies(value)?.1),
                _ => {}
            }
            Ok(())
        })?;
        block.counts.sort_unstable();
        self.window_blocks.push(block);
        Ok(())
    }

    fn finish(mut self) -> Result<Dumped, DecodeError> {
        for &(position, copies) in &self.further {
            let block = usize::try_from(position).ok().and_then(|position| self.blocks.get_mut(position));
            let Some(block) = block.filter(|block| !block.counts.is_empty()) else {
                return Err(invalid("state.further_copies", format!("no block at position {position}")));
            };
            block.counts.push(copies);
        }
        for &(position, _) in &self.further {
            self.blocks[position as usize].counts.sort_unstable();
        }
        let (identity, epoch, last_event_id) = self.identity.unwrap_or_default();
        let (groups, blocks, orphans) = (self.groups, self.blocks, self.orphans);
        let (windows, window_blocks, incompatible) = (self.windows, self.window_blocks, self.incompatible);
        let dump = WorkerDump {
            epoch,
            last_event_id,
            groups,
            blocks,
            orphans,
            windows,
            window_blocks,
            incompatible,
            // `history_incomplete` says so to whoever loads it.
            incomplete: false,
        };
        Ok(Dumped { identity, dump, history_incomplete: self.history_incomplete })
    }
}

fn read_copies(message: &[u8]) -> Result<(u64, Copies), DecodeError> {
    let mut position = 0;
    let mut copies = Copies { group: 0, tier: 0, number: 0 };
    fields("state.copies", message, |number, field| {
        match (number, field) {
            (1, Field::Varint(value)) => position = value,
            (2, Field::Varint(value)) => copies.tier = tier_from_wire(value)?,
            (3, Field::Varint(value)) => copies.group = narrow("state.copies.group", value)?,
            (4, Field::Varint(value)) => copies.number = narrow("state.copies.copies", value)?,
            _ => {}
        }
        Ok(())
    })?;
    if copies.number == 0 {
        return Err(invalid("state.copies", "must be at least 1"));
    }
    Ok((position, copies))
}

pub(super) fn tier_from_wire(tier: u64) -> Result<u8, DecodeError> {
    if tier > 4 {
        return Err(invalid("tier", format!("unknown tier {tier}")));
    }
    Ok(tier.saturating_sub(1) as u8)
}

pub(super) fn read_fixed64(name: &'static str, bytes: &[u8], into: &mut Vec<u64>) -> Result<(), DecodeError> {
    let (words, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(invalid(name, "the bytes are not whole u64s"));
    }
    into.extend(words.iter().map(|word| u64::from_le_bytes(*word)));
    Ok(())
}

fn read_varints(name: &'static str, bytes: &[u8], into: &mut Vec<u64>) -> Result<(), DecodeError> {
    let mut reader = Reader::new(bytes);
    while !reader.is_empty() {
        into.push(reader.varint().ok_or_else(|| invalid(name, NO_MESSAGE))?);
    }
    Ok(())
}
