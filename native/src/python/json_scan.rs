//! Python binding of `json_scan`.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString};

use super::values::DETACH_ABOVE_BYTES;
use crate::json_scan::{Bounds, MAX_DEPTH, Refused, scan};
use crate::json_value::{self, Node};

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

/// Values that are made before other threads may run.
const MADE_AT_ONCE: usize = 2_000;
/// Long enough for a thread that waits to be woken.
const PAUSE: Duration = Duration::from_micros(50);

#[pyfunction]
fn load_value<'py>(py: Python<'py>, data: &[u8], begin: usize, end: usize) -> PyResult<Bound<'py, PyAny>> {
    let none = || PyValueError::new_err("is not scanned JSON");
    let text = data.get(begin..end).ok_or_else(none)?;
    let read = || std::str::from_utf8(text).ok().and_then(json_value::read);
    let nodes = if text.len() > DETACH_ABOVE_BYTES { py.detach(read) } else { read() }.ok_or_else(none)?;
    Maker { py, nodes: nodes.into_iter(), made: 0 }.value()
}

/// Makes objects of values; see `load_value`.
struct Maker<'py, 'a> {
    py: Python<'py>,
    nodes: std::vec::IntoIter<Node<'a>>,
    made: usize,
}

impl<'py> Maker<'py, '_> {
    fn value(&mut self) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py;
        self.made += 1;
        if self.made.is_multiple_of(MADE_AT_ONCE) {
            py.detach(|| std::thread::sleep(PAUSE));
        }
        Ok(match self.nodes.next().expect("containers know their lengths") {
            Node::Null => py.None().into_bound(py),
            Node::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
            Node::Integer(value) => value.into_pyobject(py)?.into_any(),
            Node::Long(digits) => py.get_type::<PyInt>().call1((digits,))?,
            Node::Float(value) => PyFloat::new(py, value).into_any(),
            Node::Plain(text) => PyString::new(py, text).into_any(),
            Node::Text(text) => {
                let bytes = PyBytes::new(py, &text);
                PyString::from_encoded_object(&bytes, Some(c"utf-8"), Some(c"surrogatepass"))?.into_any()
            }
            Node::List(length) => {
                let list = PyList::empty(py);
                for _ in 0..length {
                    list.append(self.value()?)?;
                }
                list.into_any()
            }
            Node::Object(length) => {
                let object = PyDict::new(py);
                for _ in 0..length {
                    let name = self.value()?;
                    object.set_item(name, self.value()?)?;
                }
                object.into_any()
            }
        })
    }
}

fn reason(refused: &Refused) -> String {
    match refused {
        Refused::NotUtf8 => "is not a JSON object: it is not UTF-8".into(),
        Refused::Syntax(at) => format!("is not a JSON object: something else is expected at byte {at}"),
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
    module.add_function(wrap_pyfunction!(scan_object, module)?)?;
    module.add_function(wrap_pyfunction!(load_value, module)?)
}
