//! Events in the msgpack that vLLM writes.

use crate::fixture::BLOCK_SIZE;

/// A batch of one `BlockStored` without a parent.
///
/// `tokens`: `BLOCK_SIZE` for each of the engine's hashes.
pub fn stored_payload(engine: Vec<u64>, tokens: impl Iterator<Item = u32>) -> Vec<u8> {
    let mut payload = vec![0x93, 0xCB];
    payload.extend(1.0f64.to_be_bytes());
    payload.extend([0x91, 0x98, 0xAB]);
    payload.extend(b"BlockStored");
    let blocks = engine.len() as u16;
    array(&mut payload, blocks);
    for hash in engine {
        payload.push(0xCF);
        payload.extend(hash.to_be_bytes());
    }
    payload.push(0xC0);
    array(&mut payload, blocks * BLOCK_SIZE as u16);
    tokens.for_each(|token| unsigned(&mut payload, token));
    payload.push(BLOCK_SIZE as u8);
    payload.extend([0xC0, 0xA3]);
    payload.extend(b"GPU");
    payload.extend([0xC0, 0xC0]);
    payload
}

fn array(payload: &mut Vec<u8>, length: u16) {
    payload.push(0xDC);
    payload.extend(length.to_be_bytes());
}

fn unsigned(payload: &mut Vec<u8>, number: u32) {
    match number {
        0..=0x7F => payload.push(number as u8),
        0x80..=0xFF => payload.extend([0xCC, number as u8]),
        0x100..=0xFFFF => {
            payload.push(0xCD);
            payload.extend((number as u16).to_be_bytes());
        }
        _ => {
            payload.push(0xCE);
            payload.extend(number.to_be_bytes());
        }
    }
}
