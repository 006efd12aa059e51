//! `FindMatches` and `StreamFindMatches` from bytes to bytes; an answer is a message again.

#![no_main]

use std::sync::{Arc, LazyLock};

use kvscout_native::events::{Batch, Event, Stored};
use kvscout_native::hashing::BlockHasher;
use kvscout_native::index::WorkerOptions;
use kvscout_native::protobuf::Reader;
use kvscout_native::query::Queries;
use kvscout_native_fuzz::{bounded, index, name};
use libfuzzer_sys::fuzz_target;

static QUERIES: LazyLock<Queries> = LazyLock::new(|| {
    let index = index(0);
    let tokens: Vec<u8> = (0..40u32).flat_map(u32::to_le_bytes).collect();
    let local = BlockHasher::new(4, "", "", &[], false).expect("a block size").local_hashes(&tokens);
    for (worker, blocks) in [("a", 10), ("b", 4), ("c", 1)] {
        index.add_worker(name(worker), WorkerOptions::default());
        let mut batch = Batch::default();
        let hashes = batch.add_hashes(&local[..blocks]);
        batch.events.push(Event::Stored(Stored {
            engine_hashes: hashes,
            local_hashes: hashes,
            full_attention: true,
            ..Stored::default()
        }));
        index.apply(name(worker), &batch, 0, None);
    }
    let queries = Queries::default();
    queries.set_pool(("default".into(), "m".into(), 4, false), Arc::new(index));
    queries
});

fuzz_target!(|request: &[u8]| {
    let queries = &*QUERIES;
    let answers = [
        bounded(request, |bytes| queries.answer(bytes, 0.0, "*")),
        bounded(request, |bytes| queries.answer_stream(bytes, 0.0, "*")),
    ];
    for answer in answers.into_iter().flatten() {
        let mut reader = Reader::new(&answer);
        while reader.next().expect("an answer is a message").is_some() {}
    }
});
