//! Finds the fields of a JSON object, and checks every byte of it, without making anything of their values.
//!
//! Native backend of `kvscout_common.http.json_scan_reference`, which says what is allowed.

use std::collections::HashSet;

use crate::json_text::{self, characters, decoded};
use crate::token_json;

/// Arrays and objects within one another.
pub const MAX_DEPTH: usize = 128;
/// Of one number: Python makes no integer of more.
const MAX_NUMBER_BYTES: usize = 4300;
/// A shorter number without an exponent is finite.
const MAX_FINITE_BYTES: usize = 300;
/// Arrays and objects within one another that are looked into for text.
const TEXT_DEPTH: usize = 8;
/// Characters of a token, about, for which a number stands.
const CHARACTERS_A_NUMBER: usize = 4;

/// What an object may have, and be.
#[derive(Debug, Clone, Copy)]
pub struct Bounds<'a> {
    /// Fields of the object itself.
    pub fields: usize,
    /// Values in it, at any depth; token ids that are packed are none.
    pub values: usize,
    /// Neither NaN nor infinity.
    pub strict: bool,
    /// The field whose token ids are packed.
    pub packed: &'a str,
    /// Fields whose text is counted, and the keys of the text in their objects.
    pub text_fields: &'a [String],
    pub text_keys: &'a [String],
}

/// A field: byte offsets from the quotation mark of its name to the end of its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub name: String,
    pub begin: usize,
    pub value: usize,
    pub end: usize,
    /// Values in it, at any depth, itself included.
    pub values: usize,
    /// Characters of text in it, where that is counted.
    pub characters: usize,
}

/// What is known of the field whose token ids are packed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Packed {
    /// Little-endian u32: of the value, or of the first of several lists.
    pub token_ids: Option<Vec<u8>>,
    /// Where the first of several texts or lists stands; `None`: the value is no list of such.
    pub first: Option<(usize, usize)>,
    /// How many of such there are, other values counted as well.
    pub count: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub fields: Vec<Place>,
    pub packed: Packed,
}

/// Why a text is no object that is read here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    NotUtf8,
    /// At this byte something else is expected.
    Syntax(usize),
    Number(usize),
    Depth,
    Values(usize),
    Fields(usize),
    Twice(String),
}

type Scanned<T> = Result<T, Refused>;

/// The fields of an object, in their order.
pub fn scan(text: &[u8], bounds: Bounds<'_>) -> Scanned<Object> {
    let text = std::str::from_utf8(text).map_err(|_| Refused::NotUtf8)?;
    Scanner { text, at: 0, bounds, values: 0 }.object()
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
    bounds: Bounds<'a>,
    values: usize,
}

impl<'a> Scanner<'a> {
    fn object(mut self) -> Scanned<Object> {
        let (mut fields, mut packed) = (Vec::<Place>::new(), Packed::default());
        let mut names = HashSet::new();
        self.space();
        self.mark(b'{')?;
        self.space();
        if self.peek() == Some(b'}') {
            self.at += 1;
        } else {
            loop {
                let begin = self.at;
                let name = self.name()?;
                let (value, before) = (self.at, self.values);
                let counted = if self.bounds.text_fields.contains(&name) { TEXT_DEPTH + 1 } else { 0 };
                let characters = if name == self.bounds.packed {
                    self.packed(&mut packed, counted)?
                } else {
                    self.value(1, counted)?
                };
                if !names.insert(name.clone()) {
                    return Err(Refused::Twice(name));
                }
                let values = self.values - before;
                fields.push(Place { name, begin, value, end: self.at, values, characters });
                if fields.len() > self.bounds.fields {
                    return Err(Refused::Fields(self.bounds.fields));
                }
                self.space();
                if self.peek() != Some(b',') {
                    break;
                }
                self.at += 1;
                self.space();
            }
            self.mark(b'}')?;
        }
        self.space();
        if self.at == self.text.len() { Ok(Object { fields, packed }) } else { Err(self.syntax()) }
    }

    /// The value of the field whose token ids are packed.
    fn packed(&mut self, packed: &mut Packed, counted: usize) -> Scanned<usize> {
        let begin = self.at;
        if let Some(token_ids) = self.token_ids() {
            let characters = if counted > 0 { token_ids.len() } else { 0 };
            packed.token_ids = Some(token_ids);
            return Ok(characters);
        }
        if self.peek() == Some(b'[') {
            let first = json_text::space(self.bytes(), begin + 1);
            self.at = first;
            if matches!(self.peek(), Some(b'[' | b'"')) {
                let values = self.values;
                packed.token_ids = self.token_ids();
                if packed.token_ids.is_none() {
                    self.value(2, 0)?;
                }
                // What is counted is counted now, with all the rest.
                self.values = values;
                packed.first = Some((first, self.at));
                self.at = begin;
                self.count()?;
                return self.within(b']', 1, |scanner| {
                    packed.count += 1;
                    scanner.value(2, counted.saturating_sub(1))
                });
            }
            self.at = begin;
        }
        self.value(1, counted)
    }

    /// A list of token ids; `None`: there is none here.
    fn token_ids(&mut self) -> Option<Vec<u8>> {
        let (token_ids, taken) = token_json::read(&self.bytes()[self.at..])?;
        self.at += taken;
        self.values += 1;
        Some(token_ids)
    }

    /// Passes over a value; the characters of text in it, if any are counted so deep.
    fn value(&mut self, depth: usize, counted: usize) -> Scanned<usize> {
        self.count()?;
        match self.peek() {
            Some(b'{') => self.within(b'}', depth, |scanner| {
                let name = scanner.string()?;
                let is_text = counted > 1 && scanner.is_text(name);
                scanner.colon()?;
                scanner.value(depth + 1, if is_text { counted - 1 } else { 0 })
            }),
            Some(b'[') => {
                self.within(b']', depth, |scanner| scanner.value(depth + 1, counted.saturating_sub(1)))
            }
            Some(b'"') => {
                let raw = self.string()?;
                Ok(if counted > 0 { characters(raw.as_bytes()) } else { 0 })
            }
            Some(b'-' | b'0'..=b'9') => {
                let is_integer = self.number()?;
                Ok(if counted > 0 && is_integer { CHARACTERS_A_NUMBER } else { 0 })
            }
            Some(first) => {
                self.word()?;
                // Python's truth values are integers.
                Ok(if counted > 0 && matches!(first, b't' | b'f') { CHARACTERS_A_NUMBER } else { 0 })
            }
            None => Err(self.syntax()),
        }
    }

    fn count(&mut self) -> Scanned<()> {
        self.values += 1;
        if self.values > self.bounds.values {
            return Err(Refused::Values(self.bounds.values));
        }
        Ok(())
    }

    fn within(
        &mut self,
        close: u8,
        depth: usize,
        mut each: impl FnMut(&mut Self) -> Scanned<usize>,
    ) -> Scanned<usize> {
        if depth >= MAX_DEPTH {
            return Err(Refused::Depth);
        }
        self.at += 1;
        self.space();
        let mut characters = 0;
        if self.peek() != Some(close) {
            loop {
                characters += each(self)?;
                self.space();
                if self.peek() != Some(b',') {
                    break;
                }
                self.at += 1;
                self.space();
            }
        }
        self.mark(close)?;
        Ok(characters)
    }

    /// The name of a field and what separates it from its value.
    fn name(&mut self) -> Scanned<String> {
        let name = decoded(self.string()?).into_owned();
        self.colon()?;
        Ok(name)
    }

    fn colon(&mut self) -> Scanned<()> {
        self.space();
        self.mark(b':')?;
        self.space();
        Ok(())
    }

    /// What stands between the quotation marks.
    fn string(&mut self) -> Scanned<&'a str> {
        let begin = self.at + 1;
        self.at = json_text::string(self.bytes(), self.at).map_err(Refused::Syntax)?;
        Ok(&self.text[begin..self.at - 1])
    }

    /// Whether it is an integer.
    fn number(&mut self) -> Scanned<bool> {
        let begin = self.at;
        if self.bytes()[begin..].starts_with(b"-I") {
            return self.word().map(|()| false);
        }
        let (end, whole) = json_text::number(self.bytes(), begin).map_err(Refused::Syntax)?;
        self.at = end;
        let literal = &self.text[begin..end];
        let looked_at = !whole && (literal.len() > MAX_FINITE_BYTES || literal.contains(['e', 'E']));
        let is_finite = || literal.parse().is_ok_and(f64::is_finite);
        if literal.len() > MAX_NUMBER_BYTES || looked_at && self.bounds.strict && !is_finite() {
            return Err(Refused::Number(begin));
        }
        Ok(whole)
    }

    fn word(&mut self) -> Scanned<()> {
        let words: &[&[u8]] = if self.bounds.strict {
            &[b"null", b"true", b"false"]
        } else {
            &[b"null", b"true", b"false", b"NaN", b"Infinity", b"-Infinity"]
        };
        let rest = &self.bytes()[self.at..];
        let word = words.iter().find(|word| rest.starts_with(word)).ok_or_else(|| self.syntax())?;
        self.at += word.len();
        Ok(())
    }

    /// Whether what stands in an object under this name is text.
    fn is_text(&self, name: &str) -> bool {
        let name = decoded(name);
        self.bounds.text_keys.iter().any(|key| *key == name)
    }

    fn peek(&self) -> Option<u8> {
        self.bytes().get(self.at).copied()
    }

    fn bytes(&self) -> &'a [u8] {
        self.text.as_bytes()
    }

    fn space(&mut self) {
        self.at = json_text::space(self.bytes(), self.at);
    }

    fn mark(&mut self, mark: u8) -> Scanned<()> {
        if self.peek() != Some(mark) {
            return Err(self.syntax());
        }
        self.at += 1;
        Ok(())
    }

    fn syntax(&self) -> Refused {
        Refused::Syntax(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds<'_> =
        Bounds { fields: 10, values: 1000, strict: true, packed: "prompt", text_fields: &[], text_keys: &[] };

    fn scanned(text: &str) -> Scanned<Object> {
        let (fields, keys) = (["messages".into()], ["content".into(), "text".into()]);
        scan(text.as_bytes(), Bounds { text_fields: &fields, text_keys: &keys, ..BOUNDS })
    }

    fn packed(tokens: &[u32]) -> Option<Vec<u8>> {
        Some(tokens.iter().flat_map(|token| token.to_le_bytes()).collect())
    }

    #[test]
    fn fields_are_where_they_stand() {
        let text = r#" { "a" :1.0e2,"\u0062\ud83d\ude00": [1, {"c":[]}] } "#;
        let fields = scanned(text).expect("it is an object").fields;
        let found: Vec<_> = fields
            .iter()
            .map(|place| {
                (&*place.name, &text[place.begin..place.end], &text[place.value..place.end], place.values)
            })
            .collect();
        assert_eq!(
            found,
            [
                ("a", r#""a" :1.0e2"#, "1.0e2", 1),
                ("b😀", r#""\u0062\ud83d\ude00": [1, {"c":[]}]"#, r#"[1, {"c":[]}]"#, 4),
            ]
        );
    }

    #[test]
    fn token_ids_are_packed_alone_or_as_the_first_of_several() {
        let of = |value: &str| scanned(&format!(r#"{{"prompt":{value}}}"#)).expect("it is an object").packed;
        assert_eq!(of("[1, 2]"), Packed { token_ids: packed(&[1, 2]), first: None, count: 0 });
        assert_eq!(of("[[1],[2]]"), Packed { token_ids: packed(&[1]), first: Some((11, 14)), count: 2 });
        assert_eq!(of(r#"[ "a" ]"#), Packed { token_ids: None, first: Some((12, 15)), count: 1 });
        for other in ["1", "[1.5]", "[null]", "{}", "\"a\""] {
            assert_eq!(of(other), Packed::default(), "{other}");
        }
    }

    #[test]
    fn what_is_beyond_a_bound_is_refused_by_its_name() {
        let deep = |depth: usize| format!(r#"{{"a":{}{}}}"#, "[".repeat(depth - 1), "]".repeat(depth - 1));
        assert!(scanned(&deep(MAX_DEPTH)).is_ok());
        assert_eq!(scanned(&deep(MAX_DEPTH + 1)), Err(Refused::Depth));
        assert_eq!(scanned(&format!(r#"{{"a":[{}0]}}"#, "[],".repeat(1000))), Err(Refused::Values(1000)));
        assert_eq!(scanned(r#"{"a":1,"\u0061":2}"#), Err(Refused::Twice("a".into())));
        assert_eq!(scanned(r#"{"a":1e999}"#), Err(Refused::Number(5)));
        assert_eq!(scanned(&format!(r#"{{"a":{}}}"#, "9".repeat(4301))), Err(Refused::Number(5)));
        assert_eq!(scan(b"{\"a\":\"\xff\"}", BOUNDS), Err(Refused::NotUtf8));
        let many: Vec<_> = (0..11).map(|number| format!("\"{number}\":0")).collect();
        assert_eq!(scanned(&format!("{{{}}}", many.join(","))), Err(Refused::Fields(10)));
    }

    #[test]
    fn what_engines_write_beyond_json_is_read_where_it_is_allowed() {
        let text = r#"{"a":[NaN,-Infinity,Infinity,1e999]}"#;
        assert!(scanned(text).is_err());
        assert!(scan(text.as_bytes(), Bounds { strict: false, ..BOUNDS }).is_ok());
    }

    #[test]
    fn text_is_counted_in_characters_where_models_read_it() {
        let of = |value: &str| {
            let found = scanned(&format!(r#"{{"messages":{value}}}"#)).expect("it is an object");
            found.fields[0].characters
        };
        assert_eq!(of(r#""aé\n\u00e9\ud83d\ude00""#), 5);
        assert_eq!(of(r#"[{"content":"abc","role":"user","name":{"text":"no"}}]"#), 3);
        assert_eq!(of(r#"[{"cont\u0065nt":[{"text":"abc"},{"image_url":"data:"},12,true,1.5]}]"#), 11);
    }
}
