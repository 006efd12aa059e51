//! What an engine says over ZMTP: the same wherever its bytes were cut, in bounded memory.

#![no_main]

use kvscout_native::ingest::{Message, Session, Step};
use kvscout_native_fuzz::bounded;
use libfuzzer_sys::fuzz_target;

const LONGEST: usize = 1000;

/// What was published, what is answered, and why no more is read.
type Read = (Vec<(u64, Vec<u8>)>, Vec<Vec<usize>>, Vec<u8>, Option<String>);

fn read(bytes: &[u8], size: usize) -> Read {
    let mut session = Session::new(b"t", LONGEST);
    let (mut batches, mut malformed, mut refused) = (Vec::new(), Vec::new(), None);
    // From where on the bytes are not done with, and how many of them have come.
    let (mut done, mut come) = (0, 0);
    'bytes: while come < bytes.len() {
        come = bytes.len().min(come.saturating_add(size));
        loop {
            match session.step(&bytes[done..come]) {
                Err(refusal) => {
                    refused = Some(refusal.0);
                    break 'bytes;
                }
                Ok((count, step)) => {
                    done += count;
                    match step {
                        Step::Opened => {}
                        Step::Message(Message::Batch { seq, payload }) => {
                            batches.push((seq, payload.to_vec()))
                        }
                        Step::Message(Message::Malformed(lengths)) => malformed.push(lengths),
                        Step::Message(Message::End) => unreachable!("a subscriber requests no replay"),
                        Step::Wants(count) => {
                            assert!(count > 0 && count <= LONGEST + 128 * 1024);
                            break;
                        }
                    }
                }
            }
        }
    }
    (batches, malformed, session.out, refused)
}

fuzz_target!(|input: (u8, &[u8])| {
    let (cut, bytes) = input;
    let whole = bounded(bytes, |bytes| read(bytes, usize::MAX));
    let pieces = bounded(bytes, |bytes| read(bytes, usize::from(cut).max(1)));
    assert_eq!(whole, pieces);
    assert!(whole.0.iter().all(|(_, payload)| payload.len() <= LONGEST));
    assert!(whole.1.iter().all(|lengths| !lengths.is_empty() && lengths.len() <= 8));
    assert!(whole.2.len() <= 128 * 1024);
});
