//! Python binding of `json_scan`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::values::DETACH_ABOVE_BYTES;
use crate::json_scan::{Bounds, MAX_DEPTH, Refused, scan};

/// Of a name, in an error.
const NAME_CHARACTERS: usize = 100;

type Packed<'py> = (Option<Bound<'py, PyBytes>>, Option<(usize, usize)>, usize);

#[pyfunction]
#[pyo3(signature = (data, *, max_fields, max_values, strict, packed, text_fields, text_keys))]
#[allow(clippy::too_many_arguments)]
fn scan_object<'py>(
    py: Python<'py>,
    data: &[u8],
    max_fields: usize,
    max_values: usize,
    strict: bool,
    packed: &str,
    text_fields: Vec<String>,
    text_keys: Vec<String>,
) -> PyResult<(Bound<'py, PyList>, Packed<'py>)> {
    let (text_fields, text_keys) = (&*text_fields, &*text_keys);
    let bounds = Bounds { fields: max_fields, values: max_values, strict, packed, text_fields, text_keys };
    let run = || scan(data, bounds);
    let found = if data.len() > DETACH_ABOVE_BYTES { py.detach(run) } else { run() };
    let object = found.map_err(|refused| PyValueError::new_err(reason(&refused)))?;
    let fields = object
        .fields
        .iter()
        .map(|one| (&one.name, one.begin, one.value, one.end, one.values, one.characters));
    let token_ids = object.packed.token_ids.map(|token_ids| PyBytes::new(py, &token_ids));
    Ok((PyList::new(py, fields.collect::<Vec<_>>())?, (token_ids, object.packed.first, object.packed.count)))
}

fn reason(refused: &Refused) -> String {
    match refused {
        Refused::NotUtf8 => "is no JSON object: it is no UTF-8".into(),
        Refused::Syntax(at) => format!("is no JSON object: something else is expected at byte {at}"),
        Refused::Number(at) => format!("has a number that is out of range at byte {at}"),
        Refused::Depth => format!("has more than {MAX_DEPTH} lists and objects within one another"),
        Refused::Values(limit) => format!("has more than {limit} values"),
        Refused::Fields(limit) => format!("has more than {limit} fields"),
        Refused::Twice(name) => {
            format!("has the field '{}' twice", name.chars().take(NAME_CHARACTERS).collect::<String>())
        }
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(scan_object, module)?)
}
