//! An engine's bytes → events → a bounded index.

#![no_main]

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
});
