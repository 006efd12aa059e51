//! Heads and bodies of HTTP/1: read or refused, and bodies the same wherever their bytes were cut.

#![no_main]

use kvscout_native::http::{Decoder, read_answer, read_request};
use kvscout_native_fuzz::bounded;
use libfuzzer_sys::fuzz_target;

/// The body, how much of the bytes was its own, and whether it is whole; `None`: refused.
fn decoded(mut decoder: Decoder, bytes: &[u8], size: usize) -> Option<(Vec<u8>, usize, bool)> {
    let (mut body, mut taken) = (Vec::new(), 0);
    for piece in bytes.chunks(size) {
        let here = decoder.decode(piece, &mut body).ok()?;
        taken += here;
        if here < piece.len() {
            assert!(decoder.is_done(), "what is left over is behind the end");
            break;
        }
    }
    Some((body, taken, decoder.is_done()))
}

fuzz_target!(|input: (u8, &[u8])| {
    let (cut, bytes) = input;
    let size = usize::from(cut).max(1);
    for decoder in [Decoder::chunked(), Decoder::of_length(u64::from(cut)), Decoder::UntilEnd] {
        let whole = bounded(bytes, |bytes| decoded(decoder.clone(), bytes, usize::MAX));
        let pieces = bounded(bytes, |bytes| decoded(decoder.clone(), bytes, size));
        assert_eq!(whole, pieces);
        assert!(whole.is_none_or(|(body, taken, _)| body.len() <= taken));
    }
    if let Ok(head) = bounded(bytes, |bytes| read_request(bytes, 32)) {
        assert!(head.target.starts_with('/') && head.headers.len() <= 32);
        assert!(head.headers.iter().all(|(name, value)| {
            !name.is_empty() && !name.contains([' ', ':', '\r', '\n']) && !value.contains(['\r', '\n', '\0'])
        }));
    }
    for method in ["GET", "HEAD"] {
        if let Ok(Some(head)) = bounded(bytes, |bytes| read_answer(bytes, 32, method)) {
            assert!((200..1000).contains(&head.status));
        }
    }
});
