//! No decoder takes memory out of proportion to the bytes that it reads, whatever lengths they claim.

mod counting_allocator;

use std::sync::Arc;

use counting_allocator::{Counting, MOST_BYTES_A_BYTE, MOST_BYTES_AT_ALL, peak_of};
use kvscout_native::index::{Bounds, Index, WorkerName, WorkerOptions};
use kvscout_native::protobuf::Writer;
use kvscout_native::query::Queries;
use kvscout_native::{codec, wire};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SIZE: usize = 300_000;

fn assert_bounded<R>(name: &str, bytes: &[u8], decode: impl FnOnce(&[u8]) -> R) -> R {
    let (result, peak) = peak_of(|| decode(bytes));
    assert!(
        peak <= MOST_BYTES_AT_ALL + MOST_BYTES_A_BYTE * bytes.len(),
        "{name}: {peak} for {}",
        bytes.len()
    );
    result
}

/// The head of an array or string of any length, of the longest form.
fn head(kind: u8, length: usize) -> Vec<u8> {
    [&[kind][..], &(length as u32).to_be_bytes()].concat()
}

fn string(text: &[u8]) -> Vec<u8> {
    [&[0xa0 | text.len() as u8][..], text].concat()
}

/// A payload full of one event.
fn events(event: &[u8]) -> Vec<u8> {
    let number = SIZE / event.len();
    [&[0x92, 0][..], &head(0xdd, number), &event.repeat(number)].concat()
}

#[test]
fn payloads_full_of_the_smallest_events_take_memory_in_proportion() {
    let array = |length: u8, parts: &[&[u8]]| [&[0x90 | length][..], &parts.concat()].concat();
    let (stored, removed) = (string(b"BlockStored"), string(b"BlockRemoved"));
    let keys = [&head(0xdd, SIZE)[..], &vec![0xc0; SIZE - 1], &[0x91, 0x92, 0xa1, b'x', 0]].concat();
    let ones: &[u8] = &[1; SIZE];
    for (name, payload) in [
        ("stored", events(&array(5, &[&stored, &[0x90, 0xc0, 0x90, 4]]))),
        ("removed", events(&array(2, &[&removed, &[0x90]]))),
        ("removed one", events(&array(2, &[&removed, &[0x91, 1]]))),
        ("cleared", events(&array(1, &[&string(b"AllBlocksCleared")]))),
        ("hashes", [&[0x92, 0, 0x91][..], &array(2, &[&removed, &head(0xdd, SIZE), ones])].concat()),
        (
            "extra keys",
            [&[0x92, 0, 0x91][..], &array(9, &[&stored, &[0x90, 0xc0, 0x90, 4, 0xc0, 0xc0, 0xc0], &keys])]
                .concat(),
        ),
    ] {
        let batch = assert_bounded(name, &payload, wire::decode_batch)
            .unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert!(!batch.events.is_empty(), "{name}: read to its end");
    }
}

#[test]
fn payloads_full_of_what_is_no_event_are_given_up_before_they_take_memory() {
    let array = |length: u8, parts: &[&[u8]]| [&[0x90 | length][..], &parts.concat()].concat();
    for (name, payload) in [
        ("nil", events(&[0xc0])),
        ("empty", events(&[0x90])),
        ("unknown tag", events(&array(1, &[&string(b"x")]))),
        ("tag of no UTF-8", events(&array(1, &[&string(&[0xff; 31])]))),
        ("stored without its fields", events(&array(2, &[&string(b"BlockStored"), &[0x90]]))),
    ] {
        let read = assert_bounded(name, &payload, wire::decode_batch);
        assert!(read.is_err_and(|error| error.field == "events"), "{name}");
    }
}

#[test]
fn lengths_that_are_only_claimed_take_no_memory() {
    let stored = string(b"BlockStored");
    for kind in [0xc6, 0xdb, 0xdd, 0xdf] {
        for claimed in [1 << 16, 1 << 22, u32::MAX as usize] {
            let claim = head(kind, claimed);
            for before in
                [&[][..], &[0x92, 0], &[0x92, 0, 0x91], &[&[0x92, 0, 0x91, 0x95][..], &stored].concat()]
            {
                let payload = [before, &claim, &[0; 100]].concat();
                assert!(assert_bounded("claim", &payload, wire::decode_batch).is_err());
            }
        }
    }
}

/// A message of a dump whose chunk is full of one part.
fn state_of(field: u32, part: &[u8]) -> Vec<u8> {
    let mut state = Writer::default();
    state.varint(2, 1);
    for _ in 0..(SIZE / (part.len() + 2)).max(1) {
        state.bytes(field, part);
    }
    let (mut event, mut batch) = (Writer::default(), Writer::default());
    event.bytes(5, state.as_bytes());
    batch.varint(1, codec::VERSION);
    batch.bytes(11, event.as_bytes());
    batch.into_bytes()
}

#[test]
fn dumps_full_of_the_smallest_parts_take_memory_in_proportion() {
    let run = |blocks: usize| {
        let mut run = Writer::default();
        run.packed_fixed64(2, &vec![1; blocks]);
        run.packed_fixed64(3, &vec![1; blocks]);
        run.into_bytes()
    };
    let copies: &[u8] = &[0x22, 2, 0x20, 1];
    let index = Index::new(4, false, Bounds { max_blocks: 0, max_predictions: 1, prune_ratio: 1.0 });
    let name = WorkerName { worker_id: "", dp_rank: 0 };
    index.add_worker(name, WorkerOptions::default());
    for (part, message) in [
        ("groups", state_of(3, &[])),
        ("empty runs", state_of(4, &[])),
        ("runs of one", state_of(4, &run(1))),
        ("one run", state_of(4, &run(SIZE / 16))),
        ("further copies", state_of(5, &[0x20, 1])),
        ("orphans without copies", state_of(6, &[])),
        ("orphans with a copy", state_of(6, copies)),
        ("an orphan of many copies", state_of(6, &copies.repeat(SIZE / 4))),
        ("a claim", [&[0x5a][..], &[0xff; 9], &[1], &[0; 20]].concat()),
    ] {
        let dumped = assert_bounded(part, &message, |bytes| codec::decode([bytes]));
        // What contradicts itself is refused by the index at the latest.
        let _ = dumped.map(|dumped| index.load(name, &dumped.dump));
        index.check_invariants().unwrap_or_else(|what| panic!("{part}: {what}"));
    }
}

#[test]
fn requests_take_memory_in_proportion() {
    let index = Index::new(4, false, Bounds { max_blocks: 0, max_predictions: 1, prune_ratio: 1.0 });
    let queries = Queries::default();
    queries.set_pool(("default".into(), "m".into(), 4, false), Arc::new(index));
    let request = |field: u32, bytes: usize| {
        let mut request = Writer::default();
        request.string(1, "m");
        request.bytes(field, &vec![1; bytes]);
        request.into_bytes()
    };
    for (name, request) in
        [("tokens", request(4, SIZE)), ("hashes", request(5, SIZE)), ("later", request(99, SIZE))]
    {
        let answer = assert_bounded(name, &request, |bytes| queries.answer(bytes, 0.0, "*"));
        assert!(answer.is_some(), "{name}");
        // Shifted by one, the numbers lie where they cannot be read in place.
        let shifted = [&[0x58, 1][..], &request].concat();
        assert!(assert_bounded(name, &shifted, |bytes| queries.answer(bytes, 0.0, "*")).is_some(), "{name}");
    }
    let smallest = [0x0a, 3, 0x0a, 1, b'm'];
    let stream = smallest.repeat(1024);
    assert!(assert_bounded("stream", &stream, |bytes| queries.answer_stream(bytes, 0.0, "*")).is_some());
    let stream = smallest.repeat(SIZE / 5);
    assert!(assert_bounded("stream", &stream, |bytes| queries.answer_stream(bytes, 0.0, "*")).is_none());
}
