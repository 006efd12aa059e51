//! Python binding of `hashing`.

use std::borrow::Cow;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyMemoryView};

use super::errors::invalid_argument;
use crate::hashing::{self, BlockHasher, MmSpan, TOKEN_BYTES};

/// Inputs above this many bytes hash for longer than about 50 µs, so they release the GIL.
const DETACH_ABOVE_BYTES: usize = 1 << 20;

/// Token ids as little-endian bytes: borrowed where Python cannot change them, else copied once.
enum Tokens<'py> {
    Borrowed(Bound<'py, PyBytes>),
    Owned(Vec<u8>),
}

impl Tokens<'_> {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes.as_bytes(),
            Self::Owned(bytes) => bytes,
        }
    }
}

fn is_buffer(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyByteArray>() || value.is_instance_of::<PyMemoryView>()
}

/// The bytes of a bytearray or memoryview, whatever the items of the view are.
fn copy_buffer(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    let bytes = PyMemoryView::from(value)?.call_method1("cast", ("B",))?;
    PyBuffer::<u8>::get(&bytes)?.to_vec(value.py())
}

fn tokens<'py>(value: &Bound<'py, PyAny>) -> PyResult<Tokens<'py>> {
    let py = value.py();
    let tokens = if let Ok(bytes) = value.cast::<PyBytes>() {
        Tokens::Borrowed(bytes.clone())
    } else if is_buffer(value) {
        Tokens::Owned(copy_buffer(value)?)
    } else {
        let ids: Vec<u32> = value.extract().map_err(|error: PyErr| {
            if error.is_instance_of::<PyOverflowError>(py) {
                invalid_argument(py, "token_ids", "a token id is not in 0 .. 2^32-1")
            } else if error.is_instance_of::<PyTypeError>(py) {
                invalid_argument(py, "token_ids", "must be integers or the bytes of u32s")
            } else {
                error
            }
        })?;
        Tokens::Owned(hashing::token_bytes(&ids).into_owned())
    };
    if !tokens.as_bytes().len().is_multiple_of(TOKEN_BYTES) {
        return Err(invalid_argument(py, "token_ids", "the bytes are not whole u32s"));
    }
    Ok(tokens)
}

fn mm_spans(py: Python<'_>, items: Vec<(String, i64, i64)>) -> PyResult<Vec<MmSpan>> {
    items
        .into_iter()
        .map(|(id, offset, length)| match (usize::try_from(offset), usize::try_from(length)) {
            (Ok(offset), Ok(length)) if length > 0 => {
                Ok(MmSpan { hash: hashing::mm_hash(&id), offset, length })
            }
            _ => Err(invalid_argument(
                py,
                "mm_items",
                "an item needs an offset of at least 0 and a length of at least 1",
            )),
        })
        .collect()
}

#[allow(clippy::too_many_arguments)] // the Python signature
fn compute(
    token_ids: &Bound<'_, PyAny>,
    block_size: i64,
    lora_name: &str,
    cache_salt: &str,
    mm_items: Vec<(String, i64, i64)>,
    eagle: bool,
) -> PyResult<Vec<u64>> {
    let py = token_ids.py();
    let spans = mm_spans(py, mm_items)?;
    let hasher = usize::try_from(block_size)
        .map_err(|_| hashing::ZeroBlockSize)
        .and_then(|size| BlockHasher::new(size, lora_name, cache_salt, &spans, eagle))
        .map_err(|error| invalid_argument(py, "block_size", error.to_string()))?;
    let tokens = tokens(token_ids)?;
    let bytes = tokens.as_bytes();
    let run = || hasher.local_hashes(bytes);
    Ok(if bytes.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() })
}

#[pyfunction]
#[pyo3(signature = (token_ids, block_size, *, lora_name = "", cache_salt = "", mm_items = vec![], eagle = false))]
fn block_hashes<'py>(
    token_ids: &Bound<'py, PyAny>,
    block_size: i64,
    lora_name: &str,
    cache_salt: &str,
    mm_items: Vec<(String, i64, i64)>,
    eagle: bool,
) -> PyResult<Bound<'py, PyList>> {
    let hashes = compute(token_ids, block_size, lora_name, cache_salt, mm_items, eagle)?;
    PyList::new(token_ids.py(), hashes)
}

#[pyfunction]
#[pyo3(signature = (token_ids, block_size, *, lora_name = "", cache_salt = "", mm_items = vec![], eagle = false))]
fn block_hashes_packed<'py>(
    token_ids: &Bound<'py, PyAny>,
    block_size: i64,
    lora_name: &str,
    cache_salt: &str,
    mm_items: Vec<(String, i64, i64)>,
    eagle: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let hashes = compute(token_ids, block_size, lora_name, cache_salt, mm_items, eagle)?;
    PyBytes::new_with(token_ids.py(), hashes.len() * 8, |out| {
        for (slot, hash) in out.chunks_exact_mut(8).zip(hashes) {
            slot.copy_from_slice(&hash.to_le_bytes());
        }
        Ok(())
    })
}

/// Local hashes from integers or from the bytes of little-endian u64s.
pub fn local_hashes(value: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let py = value.py();
    let unpack = |bytes: &[u8]| {
        hashing::hashes_from_bytes(bytes)
            .map(Cow::into_owned)
            .ok_or_else(|| invalid_argument(py, "block_hashes", "the bytes are not whole u64s"))
    };
    if let Ok(bytes) = value.cast::<PyBytes>() {
        unpack(bytes.as_bytes())
    } else if is_buffer(value) {
        unpack(&copy_buffer(value)?)
    } else {
        value.extract().map_err(|error: PyErr| {
            if error.is_instance_of::<PyOverflowError>(py) || error.is_instance_of::<PyTypeError>(py) {
                invalid_argument(py, "block_hashes", "a block hash is not an integer in 0 .. 2^64-1")
            } else {
                error
            }
        })
    }
}

#[pyfunction]
fn sequence_hashes(local: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    Ok(hashing::sequence_hashes(local_hashes(local)?))
}

#[pyfunction]
fn keyed_sequence_hashes<'py>(
    local: &Bound<'py, PyAny>,
    stride: usize,
    key: [u8; 16],
) -> PyResult<Bound<'py, PyBytes>> {
    let py = local.py();
    if stride < 1 {
        return Err(invalid_argument(py, "stride", "must be at least 1 block"));
    }
    let keyed = hashing::keyed_sequence_hashes(&local_hashes(local)?, stride, &key);
    let packed: Vec<u8> = keyed.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &packed))
}

#[pyfunction]
fn extend_sequence(parent_sequence_hash: Option<u64>, local: u64) -> u64 {
    hashing::extend_sequence(parent_sequence_hash, local)
}

#[pyfunction]
fn mm_hash(item_id: &str) -> u64 {
    hashing::mm_hash(item_id)
}

#[pyfunction]
fn block_seed(lora_name: &str, cache_salt: &str, first: bool) -> u64 {
    hashing::block_seed(lora_name, cache_salt, first)
}

#[pyfunction]
fn engine_hash(value: &Bound<'_, PyAny>) -> PyResult<u64> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return match bytes.as_bytes() {
            [] => Err(invalid_argument(value.py(), "block_hashes", "an engine hash has no bytes")),
            digest => Ok(hashing::engine_hash_of_bytes(digest)),
        };
    }
    if let Ok(unsigned) = value.extract::<u64>() {
        return Ok(unsigned);
    }
    value.extract::<i64>().map(|signed| signed as u64).map_err(|_| {
        invalid_argument(value.py(), "block_hashes", "an engine hash is neither 64-bit integer nor bytes")
    })
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(block_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(block_hashes_packed, module)?)?;
    module.add_function(wrap_pyfunction!(sequence_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(keyed_sequence_hashes, module)?)?;
    module.add_function(wrap_pyfunction!(extend_sequence, module)?)?;
    module.add_function(wrap_pyfunction!(mm_hash, module)?)?;
    module.add_function(wrap_pyfunction!(block_seed, module)?)?;
    module.add_function(wrap_pyfunction!(engine_hash, module)?)
}
