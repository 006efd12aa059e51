//! The messages of a dump → an index → the same messages; and messages of events into an index.

#![no_main]

use kvscout_native::codec::{decode, decode_events, encode};
use kvscout_native::index::WorkerOptions;
use kvscout_native_fuzz::{bounded, check, found, index, name, prompts};
use libfuzzer_sys::fuzz_target;

/// Most bytes of one message, as the services write them.
const MAX_CHUNK_BYTES: usize = 512 * 1024;

fuzz_target!(|bytes: &[u8]| {
    // Where the bytes are cut into two messages, the first one says.
    let cut = bytes.first().map_or(0, |&first| usize::from(first) * bytes.len() / 256);
    let (one, two) = bytes.get(1..).unwrap_or_default().split_at(cut.min(bytes.len().saturating_sub(1)));
    let both = if cut == 0 { vec![two] } else { vec![one, two] };
    if let Ok(published) = bounded(bytes, |_| decode_events(two)) {
        let index = index(0);
        index.add_worker(name("w"), WorkerOptions::default());
        index.apply(name("w"), &published.batch, published.epoch, published.event_id);
        check(&index);
    }
    let Ok(dumped) = bounded(bytes, |_| decode(both.iter().copied())) else { return };
    let index = index(0);
    index.add_worker(name("w"), WorkerOptions::default());
    let loaded = index.load(name("w"), &dumped.dump);
    check(&index);
    if loaded.is_err() {
        return;
    }
    let dump = index.dump(name("w")).expect("a known worker");
    let messages = encode(&dumped.identity, &dump, dumped.history_incomplete, MAX_CHUNK_BYTES);
    let again = decode(messages.iter().map(Vec::as_slice)).expect("what was written is read");
    assert_eq!(again.dump, dump);
    assert_eq!((again.identity, again.history_incomplete), (dumped.identity, dumped.history_incomplete));
    for prompt in prompts(&dump) {
        found(&index, &prompt, 0.0);
    }
});
