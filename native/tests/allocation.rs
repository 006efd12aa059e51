//! No decoder takes memory out of proportion to the bytes that it reads, whatever lengths they claim.

mod counting_allocator;

use counting_allocator::{Counting, peak_of};
use kvscout_native::codec;
use kvscout_native::protobuf::Writer;
use kvscout_native::wire;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: usize = 300_000;

#[test]
fn measure() {
    let events = |event: &[u8]| {
        let number = SIZE / event.len();
        let mut payload = vec![0x92, 0, 0xdd];
        payload.extend((number as u32).to_be_bytes());
        payload.extend(event.repeat(number));
        payload
    };
    let tag = |tag: &str| [&[0xa0 | tag.len() as u8][..], tag.as_bytes()].concat();
    let stored_head = [&[0x95][..], &tag("BlockStored")].concat();
    let mut extra = vec![0x92, 0, 0x91];
    extra.extend([&[0x99][..], &tag("BlockStored"), &[0x90, 0xc0, 0x90, 4, 0xc0, 0xc0, 0xc0, 0xdd]].concat());
    extra.extend((SIZE as u32).to_be_bytes());
    extra.extend(vec![0xc0; SIZE - 1]);
    extra.extend([0x91, 0x92, 0xa1, b'x', 0]);
    for (name, payload) in [
        ("nil events", events(&[0xc0])),
        ("empty events", events(&[0x90])),
        ("one char tag", events(&[0x91, 0xa1, b'x'])),
        ("bad utf8 tag", events(&[0x91, 0xa3, 0xff, 0xff, 0xff])),
        ("bad utf8 tag 31", events(&[&[0x91, 0xbf][..], &[0xff; 31]].concat())),
        ("stored", events(&[&stored_head[..], &[0x90, 0xc0, 0x90, 4]].concat())),
        ("bad stored", events(&[&[0x92][..], &tag("BlockStored"), &[0x90]].concat())),
        ("removed", events(&[&[0x92][..], &tag("BlockRemoved"), &[0x90]].concat())),
        ("cleared", events(&[&[0x91][..], &tag("AllBlocksCleared")].concat())),
        ("removed tiny", events(&[&[0x92][..], &tag("BlockRemoved"), &[0x91, 0]].concat())),
        ("extra keys", extra),
    ] {
        let (batch, peak) = peak_of(|| wire::decode_batch(&payload));
        println!("{name}: {} {:.1} {}", payload.len(), peak as f64 / payload.len() as f64, batch.is_ok());
    }
    let message = |field: u32, part: &[u8]| {
        let mut state = Writer::default();
        state.varint(2, 1);
        for _ in 0..SIZE / (part.len() + 2) {
            state.bytes(field, part);
        }
        let mut event = Writer::default();
        event.bytes(5, state.as_bytes());
        let mut batch = Writer::default();
        batch.varint(1, 1);
        batch.bytes(11, event.as_bytes());
        batch.into_bytes()
    };
    let run = {
        let mut run = Writer::default();
        run.packed_fixed64(2, &[1]);
        run.packed_fixed64(3, &[1]);
        run.into_bytes()
    };
    let long = {
        let mut run = Writer::default();
        run.packed_fixed64(2, &[1; SIZE / 16]);
        run.packed_fixed64(3, &[1; SIZE / 16]);
        run.into_bytes()
    };
    for (name, message) in [
        ("groups", message(3, &[])),
        ("run", message(4, &run)),
        ("long run", message(4, &long)),
        ("empty run", message(4, &[])),
        ("copies", message(5, &[0x20, 1])),
        ("orphans", message(6, &[])),
        ("orphan copies", message(6, &[0x22, 2, 0x20, 1])),
        ("orphan copies many", message(6, &[0x22, 2, 0x20, 1].repeat(60_000))),
    ] {
        let (result, peak) = peak_of(|| codec::decode([&message[..]]));
        println!("{name}: {} {:.1} {}", message.len(), peak as f64 / message.len() as f64, result.is_ok());
    }
}
