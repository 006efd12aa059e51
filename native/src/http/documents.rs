//! Content of the documents in an engine's events: output, finish, usage, errors, where the paths of a dialect find
//! them. `chunk_documents.py` is the reference.

use std::borrow::Cow;
use std::sync::Arc;

use super::json::{Cursor, is_true};

/// Longer ones are not read: the event loop has a few milliseconds for each.
pub const MAX_DOCUMENT: usize = 4 << 20;

/// What a field stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    Error,
    ErrorMark,
    Text,
    TokenIds,
    OtherOutput,
    Finish,
    AnswerId,
    /// Tokens of the prompt, cached ones of these, tokens of the output: 0, 1, 2.
    Count(usize),
    Chunk,
    End,
}

impl Meaning {
    /// The meaning by its name in `dialect.py`.
    pub fn of(name: &str) -> Option<Self> {
        Some(match name {
            "errors" => Self::Error,
            "error_marks" => Self::ErrorMark,
            "text" => Self::Text,
            "token_ids" => Self::TokenIds,
            "other_output" => Self::OtherOutput,
            "finish" => Self::Finish,
            "prompt_tokens" => Self::Count(PROMPT),
            "cached_tokens" => Self::Count(CACHED),
            "output_tokens" => Self::Count(OUTPUT),
            "answer_ids" => Self::AnswerId,
            "chunks" => Self::Chunk,
            "ends" => Self::End,
            _ => return None,
        })
    }

    /// Whether only values of one type can have it.
    fn is_typed(self) -> bool {
        matches!(self, Self::Text | Self::TokenIds | Self::Finish | Self::Count(_))
    }
}

const PROMPT: usize = 0;
const CACHED: usize = 1;
const OUTPUT: usize = 2;

/// Tokens by meaning, where they are reported.
type Counts = [Option<u32>; 3];

/// A field of a dialect, with the fields below it.
#[derive(Debug, Default)]
struct Node {
    name: String,
    /// Each with the text that the value must have, if one.
    meanings: Vec<(Meaning, Option<String>)>,
    fields: Vec<Node>,
    items: Option<Box<Node>>,
    /// Its number, and that behind the last one below it.
    number: u16,
    end: u16,
}

impl Node {
    fn add(&mut self, meaning: Meaning, mark: &str) {
        let (path, text) = mark.split_once('=').map_or((mark, None), |(path, text)| (path, Some(text)));
        let mut node = self;
        for name in path.split('.') {
            let (name, is_list) = name.strip_suffix("[]").map_or((name, false), |name| (name, true));
            let at = node.fields.iter().position(|field| field.name == name).unwrap_or_else(|| {
                node.fields.push(Self { name: name.into(), ..Self::default() });
                node.fields.len() - 1
            });
            node = &mut node.fields[at];
            if is_list {
                node = node.items.get_or_insert_default();
            }
        }
        node.meanings.push((meaning, text.map(Into::into)));
    }

    /// Whether a value can have the wrong type.
    fn is_typed(&self) -> bool {
        let typed = self.meanings.iter().any(|(meaning, _)| meaning.is_typed());
        typed || !self.fields.is_empty() || self.items.is_some()
    }

    /// Whether a node is this one, or below it.
    fn has(&self, number: u16) -> bool {
        (self.number..self.end).contains(&number)
    }

    fn enumerate(&mut self, number: u16) -> u16 {
        self.number = number;
        self.end = number + 1;
        for below in self.fields.iter_mut().chain(self.items.as_deref_mut()) {
            self.end = below.enumerate(self.end);
        }
        self.end
    }
}

/// Where the fields stand in the documents of one API.
#[derive(Debug)]
pub struct Dialect {
    fields: Node,
    cumulative: bool,
}

impl Dialect {
    pub fn new<'a>(marks: impl IntoIterator<Item = (Meaning, &'a str)>, cumulative: bool) -> Self {
        let mut fields = Node::default();
        marks.into_iter().for_each(|(meaning, mark)| fields.add(meaning, mark));
        fields.enumerate(0);
        Self { fields, cumulative }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    /// None: the engine does not say.
    pub cached_tokens: Option<u32>,
    pub output_tokens: u32,
}

/// Content of one document; the fields are explained in the reference.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Noticed<'a> {
    pub wrong: bool,
    pub error: Option<&'a str>,
    pub token_ids: Vec<u32>,
    has_ids: bool,
    pub text: String,
    pub other_output: bool,
    pub finish: String,
    pub answer_id: String,
    counts: Counts,
    pub usage: Option<Usage>,
    is_chunk: bool,
    pub is_end: bool,
}

impl Noticed<'_> {
    pub fn has_output(&self) -> bool {
        !self.token_ids.is_empty() || !self.text.is_empty() || self.other_output
    }

    pub fn empty(&self) -> bool {
        let says = self.has_output() || !self.finish.is_empty() || self.usage.is_some() || self.wrong;
        self.is_chunk && !says
    }

    pub fn only_usage(&self) -> bool {
        self.usage.is_some() && !self.is_chunk
    }
}

/// A value that was found.
#[derive(Debug)]
enum Value<'a> {
    Wrong,
    Text(Cow<'a, str>),
    Finish(Cow<'a, str>),
    AnswerId(Cow<'a, str>),
    TokenIds(Vec<u32>),
    Count(usize, u32),
    OtherOutput,
    Error(&'a str),
    /// The object that it stands in is an error.
    ErrorMark,
    Chunk,
    End,
}

/// Values with the numbers of their nodes, in the order of the document.
type Found<'a> = Vec<(u16, Value<'a>)>;

/// Reads the documents of one stream.
#[derive(Debug)]
pub struct Documents {
    dialect: Arc<Dialect>,
    /// Only the first item of each list is read.
    one_choice: bool,
    /// Of a cumulative stream: output until now.
    tokens: usize,
    characters: usize,
    counts: Counts,
}

impl Documents {
    pub fn new(dialect: Arc<Dialect>, one_choice: bool) -> Self {
        Self { dialect, one_choice, tokens: 0, characters: 0, counts: Counts::default() }
    }

    /// Usage reported until now.
    pub fn usage(&self) -> Option<Usage> {
        let [prompt_tokens, cached_tokens, output_tokens] = self.counts;
        let output_tokens = output_tokens.unwrap_or(0);
        Some(Usage { prompt_tokens: prompt_tokens?, cached_tokens, output_tokens })
    }

    /// What is new in a document; `None`: it is none.
    pub fn read<'a>(&mut self, payload: &'a [u8]) -> Option<Noticed<'a>> {
        if payload.len() > MAX_DOCUMENT {
            return None;
        }
        let mut cursor = Cursor::new(std::str::from_utf8(payload).ok()?);
        if cursor.peek()? != b'{' {
            return None;
        }
        let mut values = Found::with_capacity(8);
        self.value(&self.dialect.fields, &mut cursor, &mut values)?;
        if !cursor.at_end() {
            return None;
        }
        // In the order of the dialect, as the reference meets them.
        values.sort_by_key(|(number, _)| *number);
        let mut found = Noticed::default();
        values.into_iter().for_each(|(_, value)| found.take(value));
        if self.dialect.cumulative {
            self.drop_repeated(&mut found);
        }
        for (known, count) in self.counts.iter_mut().zip(found.counts) {
            *known = count.or(*known);
        }
        let ends = !found.finish.is_empty() || found.is_end || !found.is_chunk;
        if ends && found.counts != Counts::default() {
            found.usage = self.usage();
            found.wrong |= found.usage.is_none() && !found.is_chunk;
        }
        Some(found)
    }

    /// Reads a value, and what is below it.
    fn value<'a>(&self, node: &Node, cursor: &mut Cursor<'a>, found: &mut Found<'a>) -> Option<()> {
        let (start, before) = (cursor.place(), found.len());
        let means = |wanted| node.meanings.iter().any(|(meaning, _)| *meaning == wanted);
        let (mut text, mut ids, mut count, mut fits) = (None, None, None, false);
        match cursor.peek()? {
            b'{' if !node.fields.is_empty() => {
                fits = true;
                // The last value of a key counts: where those begin that stand twice.
                let (mut seen, mut latest) = (0_u64, Vec::<(&Node, usize)>::new());
                cursor.object(|cursor, key| {
                    let Some(at) = node.fields.iter().position(|field| field.name == key) else {
                        return cursor.skip().map(drop);
                    };
                    let field = &node.fields[at];
                    if seen & 1 << (at % 64) != 0 {
                        latest.retain(|(other, _)| other.number != field.number);
                        latest.push((field, found.len()));
                    }
                    seen |= 1 << (at % 64);
                    self.value(field, cursor, found)
                })?;
                if !latest.is_empty() {
                    let mut places = 0..;
                    found.retain(|(number, _)| {
                        let place = places.next().expect("they do not end");
                        place < before
                            || !latest.iter().any(|(field, start)| field.has(*number) && place < *start)
                    });
                }
            }
            b'[' if let Some(items) = &node.items => {
                fits = true;
                let mut rest = if self.one_choice { 1 } else { usize::MAX };
                cursor.array(|cursor| {
                    if rest == 0 {
                        return cursor.skip().map(drop);
                    }
                    rest -= 1;
                    self.value(items, cursor, found)
                })?;
            }
            b'[' if means(Meaning::TokenIds) => ids = cursor.tokens()?,
            b'"' => text = Some(cursor.string()?),
            b'-' | b'0'..=b'9' => count = cursor.number()?.and_then(|count| u32::try_from(count).ok()),
            _ => drop(cursor.skip()?),
        }
        let raw = cursor.since(start);
        for (_, value) in &mut found[before..] {
            if matches!(value, Value::ErrorMark) {
                *value = Value::Error(raw);
            }
        }
        if raw == "null" {
            return Some(());
        }
        for (meaning, wanted) in &node.meanings {
            let matches = wanted.is_none() || wanted.as_deref() == text.as_deref();
            let value = match meaning {
                Meaning::Text => text.clone().map(Value::Text),
                Meaning::Finish => text.clone().map(Value::Finish),
                Meaning::AnswerId => text.clone().map(Value::AnswerId),
                Meaning::TokenIds => ids.take().map(Value::TokenIds),
                Meaning::Count(which) => count.map(|count| Value::Count(*which, count)),
                Meaning::Error => is_true(raw).then_some(Value::Error(raw)),
                Meaning::ErrorMark => matches.then_some(Value::ErrorMark),
                Meaning::OtherOutput => {
                    (raw.starts_with(['"', '[']) && is_true(raw)).then_some(Value::OtherOutput)
                }
                Meaning::Chunk => Some(Value::Chunk),
                Meaning::End => matches.then_some(Value::End),
            };
            fits |= meaning.is_typed() && value.is_some();
            found.extend(value.map(|value| (node.number, value)));
        }
        if !fits && node.is_typed() {
            found.push((node.number, Value::Wrong));
        }
        Some(())
    }

    /// Leaves what is new in a document that may repeat the output before it.
    fn drop_repeated(&mut self, found: &mut Noticed<'_>) {
        let ids = &mut found.token_ids;
        let total = match found.counts[OUTPUT] {
            Some(total) => total as usize,
            None if found.has_ids => ids.len(),
            None => self.tokens,
        };
        let new = total.saturating_sub(self.tokens);
        let incremental = self.tokens > 0 && found.has_ids && ids.len() == new;
        let characters = found.text.chars().count();
        ids.drain(..ids.len().saturating_sub(new));
        if incremental {
            self.characters += characters;
        } else {
            found.text = found.text.chars().skip(self.characters).collect();
            self.characters = self.characters.max(characters);
        }
        self.tokens = self.tokens.max(total);
        if found.counts != Counts::default() {
            found.counts[OUTPUT] = Some(u32::try_from(total).unwrap_or(u32::MAX));
        }
    }
}

impl<'a> Noticed<'a> {
    fn take(&mut self, value: Value<'a>) {
        match value {
            Value::Wrong => self.wrong = true,
            Value::Text(text) => self.text.push_str(&text),
            Value::Finish(finish) if finish.is_empty() => {}
            Value::Finish(finish) => self.finish = finish.into_owned(),
            Value::AnswerId(id) if self.answer_id.is_empty() => self.answer_id = id.into_owned(),
            Value::AnswerId(_) => {}
            Value::TokenIds(ids) => {
                self.has_ids = true;
                self.token_ids.extend(ids);
            }
            Value::Count(which, count) => {
                self.counts[which] = Some(self.counts[which].unwrap_or(0).saturating_add(count));
            }
            Value::OtherOutput => self.other_output = true,
            Value::Error(error) => self.error = self.error.or(Some(error)),
            Value::ErrorMark => unreachable!("it stands in an object"),
            Value::Chunk => self.is_chunk = true,
            Value::End => self.is_end = true,
        }
    }
}
