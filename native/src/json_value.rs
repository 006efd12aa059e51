//! The values of a JSON text that has been scanned, in the order in which they stand: what makes objects of them need not
//! look at the text again.

use crate::json_text;

/// A value, or the name of a field in front of its value. Of a list and an object, what is in it follows.
#[derive(Debug, Clone, PartialEq)]
pub enum Node<'a> {
    Null,
    Bool(bool),
    Integer(i64),
    /// An integer of more than 64 bits, as it stands.
    Long(&'a str),
    Float(f64),
    /// UTF-8, in which half of a surrogate pair has its three bytes.
    Text(Vec<u8>),
    /// Text without an escape.
    Plain(&'a str),
    List(usize),
    Object(usize),
}

/// Reads a value that `json_scan` has found; `None`: it is none.
pub fn read(text: &str) -> Option<Vec<Node<'_>>> {
    let mut reader = Reader { text, at: 0, nodes: Vec::new() };
    reader.value()?;
    Some(reader.nodes)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    nodes: Vec<Node<'a>>,
}

impl<'a> Reader<'a> {
    fn value(&mut self) -> Option<()> {
        self.at = json_text::space(self.text.as_bytes(), self.at);
        match *self.text.as_bytes().get(self.at)? {
            b'"' => self.string(),
            b'[' => self.within(b']', Self::value, Node::List),
            b'{' => self.within(b'}', Self::field, Node::Object),
            b'-' if self.text[self.at..].starts_with("-I") => self.word(),
            b'-' | b'0'..=b'9' => self.number(),
            _ => self.word(),
        }
    }

    fn field(&mut self) -> Option<()> {
        self.at = json_text::space(self.text.as_bytes(), self.at);
        self.string()?;
        self.at = json_text::space(self.text.as_bytes(), self.at);
        self.at += usize::from(self.text.as_bytes().get(self.at) == Some(&b':'));
        self.value()
    }

    fn within(
        &mut self,
        close: u8,
        each: impl Fn(&mut Self) -> Option<()>,
        node: impl Fn(usize) -> Node<'a>,
    ) -> Option<()> {
        let (place, mut count) = (self.nodes.len(), 0);
        self.nodes.push(node(0));
        loop {
            self.at = json_text::space(self.text.as_bytes(), self.at + 1);
            if count == 0 && self.text.as_bytes().get(self.at) == Some(&close) {
                break;
            }
            each(self)?;
            count += 1;
            self.at = json_text::space(self.text.as_bytes(), self.at);
            match self.text.as_bytes().get(self.at)? {
                b',' => {}
                end if *end == close => break,
                _ => return None,
            }
        }
        self.at += 1;
        self.nodes[place] = node(count);
        Some(())
    }

    fn string(&mut self) -> Option<()> {
        let begin = self.at + 1;
        self.at = json_text::string(self.text.as_bytes(), self.at).ok()?;
        let raw = &self.text[begin..self.at - 1];
        self.nodes.push(json_text::decoded_bytes(raw).map_or(Node::Plain(raw), Node::Text));
        Some(())
    }

    fn number(&mut self) -> Option<()> {
        let begin = self.at;
        let (end, whole) = json_text::number(self.text.as_bytes(), begin).ok()?;
        let digits = &self.text[begin..end];
        self.at = end;
        self.nodes.push(match digits.parse() {
            Ok(integer) if whole => Node::Integer(integer),
            _ if whole => Node::Long(digits),
            _ => Node::Float(digits.parse().ok()?),
        });
        Some(())
    }

    fn word(&mut self) -> Option<()> {
        let words = [
            ("null", Node::Null),
            ("true", Node::Bool(true)),
            ("false", Node::Bool(false)),
            ("NaN", Node::Float(f64::NAN)),
            ("Infinity", Node::Float(f64::INFINITY)),
            ("-Infinity", Node::Float(f64::NEG_INFINITY)),
        ];
        let rest = &self.text[self.at..];
        let (word, node) = words.into_iter().find(|(word, _)| rest.starts_with(word))?;
        self.at += word.len();
        self.nodes.push(node);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stand_in_order_and_lists_know_their_length() {
        let text = r#" {"a" : [1, -2.5, {}], "b\n":[ ] , "c": "\ud800", "d": 12345678901234567890} "#;
        let expected = vec![
            Node::Object(4),
            Node::Plain("a"),
            Node::List(3),
            Node::Integer(1),
            Node::Float(-2.5),
            Node::Object(0),
            Node::Text(b"b\n".to_vec()),
            Node::List(0),
            Node::Plain("c"),
            Node::Text(vec![0xed, 0xa0, 0x80]),
            Node::Plain("d"),
            Node::Long("12345678901234567890"),
        ];
        assert_eq!(read(text), Some(expected));
        assert_eq!(read("[1 2]"), None);
    }
}
