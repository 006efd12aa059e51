//! An engine's bytes → events → a bounded index, at once and by way of a publisher's message.

#![no_main]

use kvscout_native::acceptance::Rules;
use kvscout_native::codec::{Identity, decode_events, encode_events};
use kvscout_native::events::Batch;
use kvscout_native::index::WorkerOptions;
use kvscout_native::wire::decode_batch;
use kvscout_native_fuzz::{bounded, check, found, index, name, prompts};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    let Ok(batch) = bounded(payload, decode_batch) else { return };
    let index = index(16);
    index.add_worker(name("w"), WorkerOptions::default());
    // The second time everything is there, or was: other paths than the first.
    for event_id in 0..2 {
        let applied = index.apply(name("w"), &batch, 1, Some(event_id));
        assert_eq!((applied.events, applied.faults), (batch.events.len(), batch.faults.len()));
        check(&index);
    }
    let dump = index.dump(name("w")).expect("a known worker");
    assert!(
        dump.blocks.iter().filter(|block| block.engine_hash.is_some()).count() + dump.orphans.len() <= 16
    );
    for prompt in prompts(&dump) {
        let blocks = found(&index, &prompt, 0.0);
        assert!(
            blocks.iter().all(|(_, levels)| levels.iter().all(|&blocks| blocks as usize <= prompt.len()))
        );
    }
    published_alike(&batch);
});

/// What a publisher sends does to an index what the engine's own bytes do.
fn published_alike(batch: &Batch) {
    let (adapters, (direct, behind)) = (Default::default(), (index(0), index(0)));
    let rules = Rules { block_size: 4, eagle: false, adapters: &adapters };
    let identity = Identity { worker_id: "w".to_owned(), block_size: 4, ..Identity::default() };
    let message = encode_events(&identity, rules, batch, 1, Some(0));
    let published = decode_events(&message).expect("a message of our own").batch;
    assert!(published.faults.is_empty());
    for (index, batch) in [(&direct, batch), (&behind, &published)] {
        index.add_worker(name("w"), WorkerOptions::default());
        for event_id in 0..2 {
            index.apply(name("w"), batch, 1, Some(event_id));
        }
    }
    assert_eq!(direct.dump(name("w")), behind.dump(name("w")));
}
