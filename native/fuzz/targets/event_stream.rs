//! Streams of server-sent events: the same, in every form and dialect, wherever their bytes were cut.

#![no_main]

use std::sync::Arc;

use kvscout_native::http::{Dialect, EventRelay, Form, Meaning, Report};
use kvscout_native::protobuf::Reader;
use kvscout_native_fuzz::bounded;
use libfuzzer_sys::fuzz_target;

/// Two dialects: documents with what is new, and such as may repeat what was before.
fn dialects() -> [Arc<Dialect>; 2] {
    let marks = |marks: [(&str, &'static str); 8]| {
        marks.map(|(name, mark)| (Meaning::of(name).expect("it is a meaning"), mark))
    };
    let completions = marks([
        ("errors", "error"),
        ("error_marks", "object=error"),
        ("text", "choices[].text"),
        ("text", "choices[].delta.content"),
        ("token_ids", "choices[].token_ids"),
        ("finish", "choices[].finish_reason"),
        ("prompt_tokens", "usage.prompt_tokens"),
        ("chunks", "choices[]"),
    ]);
    let cumulative = marks([
        ("errors", "error"),
        ("error_marks", "meta_info.finish_reason.status_code"),
        ("text", "text"),
        ("token_ids", "output_ids"),
        ("finish", "meta_info.finish_reason.type"),
        ("prompt_tokens", "meta_info.prompt_tokens"),
        ("output_tokens", "meta_info.completion_tokens"),
        ("chunks", "meta_info"),
    ]);
    [Arc::new(Dialect::new(completions, false)), Arc::new(Dialect::new(cumulative, true))]
}

/// What is passed on, what was noticed, and whether it failed.
fn relayed(mut relay: EventRelay, bytes: &[u8], size: usize) -> (Vec<u8>, Report, bool) {
    let mut passed = Vec::new();
    for piece in bytes.chunks(size) {
        if relay.over {
            break;
        }
        passed.extend(relay.feed(piece, 1.0, false));
    }
    passed.extend(relay.feed(&[], 1.0, true));
    (passed, relay.report, relay.failure.is_some())
}

fuzz_target!(|input: (u8, Option<u8>, &[u8])| {
    let (cut, max_tokens, bytes) = input;
    let (size, max_tokens) = (usize::from(cut).max(1), max_tokens.map(u64::from));
    for dialect in dialects() {
        for form in [Form::Bytes, Form::WithoutUsage, Form::Messages] {
            let relay = || EventRelay::new(form, dialect.clone(), max_tokens);
            let whole = bounded(bytes, |bytes| relayed(relay(), bytes, usize::MAX));
            let pieces = bounded(bytes, |bytes| relayed(relay(), bytes, size));
            if form == Form::Messages {
                // Cut elsewhere, they are other messages of the same.
                let mut reader = Reader::new(&pieces.0);
                while reader.next().expect("messages in a row are one").is_some() {}
                assert_eq!(whole.1.tokens, pieces.1.tokens);
            } else {
                assert_eq!(whole.0, pieces.0);
                assert_eq!(whole.1.passed, whole.0.len() as u64);
            }
            assert_eq!((whole.1.events, whole.2), (pieces.1.events, pieces.2));
        }
    }
});
