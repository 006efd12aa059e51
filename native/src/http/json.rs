//! Reads JSON as Python's `json` does (`NaN` and the like included), in one pass, keeping what is requested.
//!
//! Every byte is checked, also of what is passed over: a document is valid or it is none.

use std::borrow::Cow;

use crate::json_text;

/// Arrays and objects within one another.
pub const MAX_DEPTH: usize = 200;
/// Python refuses to make a number of more digits.
const MAX_DIGITS: usize = 4300;

/// A place in a text. Everything returns `None` where the text is no JSON.
#[derive(Debug)]
pub struct Cursor<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(text: &'a str) -> Self {
        let mut cursor = Self { text, at: 0, depth: 0 };
        cursor.space();
        cursor
    }

    /// Whether nothing but space is left.
    pub fn at_end(&mut self) -> bool {
        self.space();
        self.at == self.text.len()
    }

    /// The place itself, for `since`.
    pub fn place(&self) -> usize {
        self.at
    }

    /// The text from a place to this one.
    pub fn since(&self, start: usize) -> &'a str {
        &self.text[start..self.at]
    }

    fn bytes(&self) -> &'a [u8] {
        self.text.as_bytes()
    }

    pub fn peek(&self) -> Option<u8> {
        self.bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        self.at = json_text::space(self.bytes(), self.at);
    }

    fn eat(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// An object; `each` consumes the value of every key.
    pub fn object(&mut self, mut each: impl FnMut(&mut Self, &str) -> Option<()>) -> Option<()> {
        self.within(b'{', b'}', |cursor| {
            let key = cursor.string()?;
            cursor.space();
            cursor.eat(b':')?;
            cursor.space();
            each(cursor, &key)
        })
    }

    /// An array; `each` consumes every value.
    pub fn array(&mut self, each: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.within(b'[', b']', each)
    }

    fn within(&mut self, open: u8, close: u8, mut each: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        self.eat(open)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        self.space();
        if self.peek()? != close {
            loop {
                each(self)?;
                self.space();
                if self.eat(b',').is_none() {
                    break;
                }
                self.space();
            }
        }
        self.eat(close)?;
        self.depth -= 1;
        Some(())
    }

    /// Passes over a value; returns its text.
    pub fn skip(&mut self) -> Option<&'a str> {
        let start = self.at;
        match self.peek()? {
            b'{' => self.object(|cursor, _| cursor.skip().map(drop))?,
            b'[' => self.array(|cursor| cursor.skip().map(drop))?,
            b'"' => self.string().map(drop)?,
            b'-' | b'0'..=b'9' => self.number().map(drop)?,
            _ => self.word()?,
        }
        Some(&self.text[start..self.at])
    }

    fn word(&mut self) -> Option<()> {
        let rest = &self.bytes()[self.at..];
        let words = ["null", "true", "false", "NaN", "Infinity", "-Infinity"];
        let word = words.into_iter().find(|word| rest.starts_with(word.as_bytes()))?;
        self.at += word.len();
        Some(())
    }

    /// A number that is not negative and has neither fraction nor exponent; Some(None): another one.
    pub fn number(&mut self) -> Option<Option<u64>> {
        let begin = self.at;
        if self.bytes()[begin..].starts_with(b"-I") {
            return self.word().map(|()| None);
        }
        let (end, whole) = json_text::number(self.bytes(), begin).ok()?;
        self.at = end;
        let literal = &self.text[begin..end];
        let digits = literal.trim_start_matches('-');
        if whole && digits.len() > MAX_DIGITS {
            return None;
        }
        Some(digits.parse().ok().filter(|value| whole && (digits.len() == literal.len() || *value == 0)))
    }

    /// A string; a lone surrogate in it becomes a question mark.
    pub fn string(&mut self) -> Option<Cow<'a, str>> {
        let begin = self.at + 1;
        self.at = json_text::string(self.bytes(), self.at).ok()?;
        Some(json_text::decoded(&self.text[begin..self.at - 1]))
    }

    /// A list of token ids; Some(None): another one.
    pub fn tokens(&mut self) -> Option<Option<Vec<u32>>> {
        let (mut tokens, mut right) = (Vec::new(), true);
        self.array(|cursor| {
            let number = matches!(cursor.peek()?, b'-' | b'0'..=b'9');
            let token = if number { cursor.number()? } else { cursor.skip().map(|_| None)? };
            match token.and_then(|token| u32::try_from(token).ok()) {
                Some(token) => tokens.push(token),
                None => right = false,
            }
            Some(())
        })?;
        Some(right.then_some(tokens))
    }
}

/// Whether Python takes a value for true.
pub fn is_true(value: &str) -> bool {
    let inside = |value: &str| !value[1..value.len() - 1].trim_ascii().is_empty();
    match value.as_bytes() {
        b"null" | b"false" => false,
        [b'"' | b'[' | b'{', ..] => inside(value) || value.len() > 2 && value.starts_with('"'),
        [b'-' | b'0'..=b'9', ..] => value.parse::<f64>() != Ok(0.0),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid(text: &str) -> bool {
        let mut cursor = Cursor::new(text);
        cursor.skip().is_some() && cursor.at_end()
    }

    #[test]
    fn what_python_reads_is_valid_and_nothing_else() {
        for text in [
            " {\"a\" : [1, -0, 1.5e-7, 1E5, null, true, false, NaN, -Infinity, Infinity, \"\\u00e9\\n\"] } ",
            "0",
            "[]",
            "{}",
            "\"\\ud83d\\ude00 \\ud800\"",
        ] {
            assert!(valid(text), "{text}");
        }
        for text in [
            "",
            "{",
            "[1,]",
            "{\"a\":1,}",
            "01",
            "1.",
            ".5",
            "+1",
            "1e",
            "-",
            "nul",
            "\"\u{1}\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"\\ud800\\u12\"",
            "[1 2]",
            "{1: 2}",
            "{\"a\" 1}",
            "1 2",
            "'a'",
            "--1",
        ] {
            assert!(!valid(text), "{text}");
        }
        assert!(valid(&("[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH))));
        assert!(!valid(&("[".repeat(MAX_DEPTH + 1) + &"]".repeat(MAX_DEPTH + 1))));
        assert!(valid(&"9".repeat(MAX_DIGITS)));
        assert!(!valid(&"9".repeat(MAX_DIGITS + 1)));
    }

    #[test]
    fn strings_are_decoded() {
        let text = r#""a\u00e9\ud83d\ude00\ud800b\udc00\ud800\u0041\/""#;
        assert_eq!(Cursor::new(text).string().as_deref(), Some("aé😀?b??A/"));
    }

    #[test]
    fn truth_is_pythons() {
        for value in ["null", "false", "0", "-0.0", "0e7", "\"\"", "[ ]", "{}"] {
            assert!(!is_true(value), "{value}");
        }
        for value in ["true", "1", "1e-9", "\" \"", "[0]", "{\"a\":0}", "NaN", "-Infinity"] {
            assert!(is_true(value), "{value}");
        }
    }
}
