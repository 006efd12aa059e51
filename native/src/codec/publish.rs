//! The batch of an engine → the message that leaves the process: local hashes instead of tokens.

use super::encode::{tier_to_wire, write_header};
use super::{FULL_ATTENTION, Identity, OTHER_ATTENTION};
use crate::acceptance::Rules;
use crate::events::{Batch, Event, Removed, Stored};
use crate::index::types::Ignored;
use crate::protobuf::Writer;

/// One message of events. A reader's index does with it what it would have done with the engine's own bytes.
pub fn encode_events(
    identity: &Identity,
    rules: Rules<'_>,
    batch: &Batch,
    epoch: u64,
    event_id: Option<u64>,
) -> Vec<u8> {
    let mut message = Writer::default();
    write_header(&mut message, identity, epoch, event_id);
    message.double(10, batch.timestamp);
    for event in &batch.events {
        let mut kind = Writer::default();
        match event {
            Event::Stored(event) => kind.bytes(1, stored(rules, batch, event).as_bytes()),
            Event::Removed(event) => kind.bytes(2, removed(batch, event).as_bytes()),
            Event::Cleared => kind.bytes(3, b""),
        }
        message.bytes(11, kind.as_bytes());
    }
    message.into_bytes()
}

/// What cannot be indexed is sent without its hashes: it still teaches the kind of its group. A group with a window
/// keeps them: their prefixes most often follow from other groups.
fn stored(rules: Rules<'_>, batch: &Batch, event: &Stored) -> Writer {
    let mut message = Writer::default();
    let moved = !event.has_content();
    let verdict = if moved { None } else { rules.judge_content(event) };
    let content = !moved && verdict.is_none();
    // Blocks that move often come without their size: then they do not say what there is to know of their group.
    let window = if moved && event.block_size == 0 { 0 } else { event.window };
    if verdict.is_none() || window > 0 {
        message.packed_fixed64(1, batch.hashes(event.engine_hashes));
        if content {
            if let Some(parent) = event.parent {
                message.present_fixed64(2, parent);
            }
            message.packed_fixed64(3, &rules.local_hashes(batch, event));
        }
        message.varint(4, tier_to_wire(event.tier));
    }
    message.varint(5, u64::from(event.group));
    // Readers take group 0, and no other, for full attention where nothing says so.
    if event.full_attention != (event.group == 0) {
        message.varint(6, if event.full_attention { FULL_ATTENTION } else { OTHER_ATTENTION });
    }
    let other_size = window > 0 && event.block_size as usize != rules.block_size;
    if other_size || verdict == Some(Ignored::BlockSize) {
        message.varint(7, u64::from(event.block_size));
    }
    message.varint(8, u64::from(window));
    message
}

fn removed(batch: &Batch, event: &Removed) -> Writer {
    let mut message = Writer::default();
    message.packed_fixed64(1, batch.hashes(event.engine_hashes));
    message.varint(2, tier_to_wire(event.tier));
    message.varint(3, u64::from(event.group));
    message
}
