//! What the documents in an engine's events say: output, finish, usage, errors. `chunk_documents.py` is the reference.

use std::borrow::Cow;

use super::json::{Cursor, Field, is_true};

/// Longer ones are not read: the event loop has a few milliseconds for each.
pub const MAX_DOCUMENT: usize = 4 << 20;

/// Whose documents they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Chunks of completions and of chat completions.
    OpenAi,
    /// What SGLang's `/generate` streams.
    Sglang,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// None: the engine does not say.
    pub cached_tokens: Option<u32>,
}

/// Content of one document; the fields are explained in the reference.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Noticed<'a> {
    pub wrong: bool,
    pub error: Option<&'a str>,
    pub token_ids: Vec<u32>,
    pub text: String,
    pub other_output: bool,
    pub finish: String,
    pub account: Option<&'a str>,
    pub usage: Option<Usage>,
    pub empty: bool,
    pub only_usage: bool,
}

impl Noticed<'_> {
    pub fn has_output(&self) -> bool {
        !self.token_ids.is_empty() || !self.text.is_empty() || self.other_output
    }
}

/// Reads the documents of one stream.
#[derive(Debug)]
pub struct Documents {
    dialect: Dialect,
    /// Only the first choice is looked at.
    one_choice: bool,
    /// Of a cumulative stream, what was told.
    tokens: usize,
    characters: usize,
}

#[derive(Default)]
struct Choice<'a> {
    wrong: bool,
    token_ids: Field<Vec<u32>>,
    text: Field<Cow<'a, str>>,
    finish: Field<Cow<'a, str>>,
    has_delta: Field<()>,
    content: Field<Cow<'a, str>>,
    others: [bool; 3],
    calls_tools: bool,
}

impl Documents {
    pub fn new(dialect: Dialect, one_choice: bool) -> Self {
        Self { dialect, one_choice, tokens: 0, characters: 0 }
    }

    /// What is new in a document; `None`: it is none.
    pub fn read<'a>(&mut self, payload: &'a [u8]) -> Option<Noticed<'a>> {
        if payload.len() > MAX_DOCUMENT {
            return None;
        }
        let text = std::str::from_utf8(payload).ok()?;
        match self.dialect {
            Dialect::OpenAi => self.read_openai(text),
            Dialect::Sglang => self.read_sglang(text),
        }
    }

    fn read_openai<'a>(&self, text: &'a str) -> Option<Noticed<'a>> {
        let mut error = Errors::default();
        let (mut choices, mut has_choices) = (Vec::new(), Field::Absent);
        let (mut usage, mut account) = (UsageFields::default(), Field::Absent);
        whole_object(text, |cursor, key| {
            match key {
                "choices" => {
                    choices.clear();
                    has_choices = cursor.array_field(|cursor| {
                        choices.push(choice(cursor)?);
                        Some(())
                    })?;
                }
                "usage" => {
                    usage = UsageFields::default();
                    account = cursor.object_field(|cursor, key| usage.field(cursor, key))?;
                }
                _ => error.field(cursor, key)?,
            }
            Some(())
        })?;
        let mut found = Noticed { error: error.of(text), ..Noticed::default() };
        let has_choices = has_choices.get(&mut found.wrong).is_some();
        let any_choice = has_choices && !choices.is_empty();
        let looked_at = if self.one_choice { 1 } else { usize::MAX };
        if has_choices {
            choices.into_iter().take(looked_at).for_each(|choice| choice.add_to(&mut found));
        }
        found.account = account.get(&mut found.wrong);
        if found.account.is_some() {
            found.usage = usage.of(&mut found.wrong);
        }
        let has_usage = found.account.is_some();
        found.empty =
            any_choice && !(found.has_output() || !found.finish.is_empty() || has_usage || found.wrong);
        found.only_usage = has_choices && !any_choice && has_usage;
        Some(found)
    }

    fn read_sglang<'a>(&mut self, text: &'a str) -> Option<Noticed<'a>> {
        let mut error = Errors::default();
        let (mut output, mut ids) = (Field::Absent, Field::Absent);
        let (mut meta, mut account) = (Meta::default(), Field::Absent);
        whole_object(text, |cursor, key| {
            match key {
                "text" => output = cursor.text_field()?,
                "output_ids" => ids = cursor.tokens_field()?,
                "meta_info" => {
                    meta = Meta::default();
                    account = cursor.object_field(|cursor, key| meta.field(cursor, key))?;
                }
                _ => error.field(cursor, key)?,
            }
            Some(())
        })?;
        let mut found = Noticed { error: error.of(text), ..Noticed::default() };
        let output = output.get(&mut found.wrong).unwrap_or_default();
        let has_ids = ids != Field::Absent;
        let mut ids = ids.get(&mut found.wrong).unwrap_or_default();
        let meta = account.get(&mut found.wrong).map(|account| (account, meta));
        let total = match &meta {
            Some((_, Meta { completion_tokens: Field::Is(total), .. })) => *total as usize,
            _ if has_ids => ids.len(),
            _ => self.tokens,
        };
        let new = total.saturating_sub(self.tokens);
        let incremental = self.tokens > 0 && has_ids && ids.len() == new;
        let characters = output.chars().count();
        found.token_ids = ids.split_off(ids.len().saturating_sub(new));
        if incremental {
            found.text = output.into_owned();
            self.characters += characters;
        } else {
            found.text = output.chars().skip(self.characters).collect();
            self.characters = self.characters.max(characters);
        }
        self.tokens = self.tokens.max(total);
        let has_meta = meta.is_some();
        if let Some((account, meta)) = meta {
            found.account = Some(account);
            meta.end(&mut found, total);
        }
        let says = found.has_output() || !found.finish.is_empty() || found.wrong;
        found.empty = !says && (has_ids || has_meta);
        Some(found)
    }
}

/// A document is an object and nothing else.
fn whole_object<'a>(text: &'a str, each: impl FnMut(&mut Cursor<'a>, &str) -> Option<()>) -> Option<()> {
    let mut cursor = Cursor::new(text);
    cursor.object(each)?;
    cursor.at_end().then_some(())
}

/// One choice; `wrong` alone: it is no object.
fn choice<'a>(cursor: &mut Cursor<'a>) -> Option<Choice<'a>> {
    let mut choice = Choice::default();
    if cursor.peek()? != b'{' {
        cursor.skip()?;
        choice.wrong = true;
        return Some(choice);
    }
    cursor.object(|cursor, key| {
        match key {
            "token_ids" => choice.token_ids = cursor.tokens_field()?,
            "text" => choice.text = cursor.text_field()?,
            "finish_reason" => choice.finish = cursor.text_field()?,
            "delta" => {
                (choice.content, choice.others, choice.calls_tools) = (Field::Absent, [false; 3], false);
                let (content, others, calls) =
                    (&mut choice.content, &mut choice.others, &mut choice.calls_tools);
                let delta = cursor.object_field(|cursor, key| {
                    match key {
                        "content" => *content = cursor.text_field()?,
                        "reasoning" => others[0] = says(cursor)?,
                        "reasoning_content" => others[1] = says(cursor)?,
                        "refusal" => others[2] = says(cursor)?,
                        "tool_calls" => {
                            let value = cursor.skip()?;
                            *calls = value.starts_with('[') && is_true(value);
                        }
                        _ => drop(cursor.skip()?),
                    }
                    Some(())
                })?;
                choice.has_delta = match delta {
                    Field::Is(_) => Field::Is(()),
                    Field::Absent => Field::Absent,
                    Field::Wrong => Field::Wrong,
                };
            }
            _ => drop(cursor.skip()?),
        }
        Some(())
    })?;
    Some(choice)
}

/// Passes over a value; whether it is a string with something in it.
fn says(cursor: &mut Cursor<'_>) -> Option<bool> {
    let value = cursor.skip()?;
    Some(value.starts_with('"') && value.len() > 2)
}

impl Choice<'_> {
    fn add_to(self, found: &mut Noticed<'_>) {
        found.wrong |= self.wrong;
        found.token_ids.extend(self.token_ids.get(&mut found.wrong).unwrap_or_default());
        found.text.push_str(&self.text.get(&mut found.wrong).unwrap_or_default());
        if let Some(finish) = self.finish.get(&mut found.wrong)
            && !finish.is_empty()
        {
            found.finish = finish.into_owned();
        }
        if self.has_delta.get(&mut found.wrong).is_some() {
            found.text.push_str(&self.content.get(&mut found.wrong).unwrap_or_default());
            found.other_output |= self.calls_tools || self.others.contains(&true);
        }
    }
}

/// What may say that a stream has failed.
#[derive(Default)]
struct Errors<'a> {
    error: Option<&'a str>,
    is_one: bool,
}

impl<'a> Errors<'a> {
    fn field(&mut self, cursor: &mut Cursor<'a>, key: &str) -> Option<()> {
        match key {
            "error" => self.error = Some(cursor.skip()?).filter(|value| is_true(value)),
            "object" => self.is_one = matches!(cursor.text_field()?, Field::Is(kind) if kind == "error"),
            _ => drop(cursor.skip()?),
        }
        Some(())
    }

    fn of(self, document: &'a str) -> Option<&'a str> {
        self.error.or(self.is_one.then_some(document))
    }
}

#[derive(Default)]
struct UsageFields {
    prompt_tokens: Field<u32>,
    completion_tokens: Field<u32>,
    has_details: Field<()>,
    cached_tokens: Field<u32>,
}

impl UsageFields {
    fn field(&mut self, cursor: &mut Cursor<'_>, key: &str) -> Option<()> {
        match key {
            "prompt_tokens" => self.prompt_tokens = cursor.count_field()?,
            "completion_tokens" => self.completion_tokens = cursor.count_field()?,
            "prompt_tokens_details" => {
                self.cached_tokens = Field::Absent;
                let cached = &mut self.cached_tokens;
                let details = cursor.object_field(|cursor, key| {
                    match key {
                        "cached_tokens" => *cached = cursor.count_field()?,
                        _ => drop(cursor.skip()?),
                    }
                    Some(())
                })?;
                self.has_details = match details {
                    Field::Is(_) => Field::Is(()),
                    Field::Absent => Field::Absent,
                    Field::Wrong => Field::Wrong,
                };
            }
            _ => drop(cursor.skip()?),
        }
        Some(())
    }

    fn of(self, wrong: &mut bool) -> Option<Usage> {
        let has_details = self.has_details.get(wrong).is_some();
        let prompt_tokens = self.prompt_tokens.get(wrong);
        let completion_tokens = self.completion_tokens.get(wrong).unwrap_or(0);
        let cached_tokens = if has_details { self.cached_tokens.get(wrong) } else { None };
        *wrong |= prompt_tokens.is_none();
        Some(Usage { prompt_tokens: prompt_tokens?, completion_tokens, cached_tokens })
    }
}

/// SGLang's `meta_info`.
#[derive(Default)]
struct Meta<'a> {
    completion_tokens: Field<u32>,
    prompt_tokens: Field<u32>,
    cached_tokens: Field<u32>,
    reason: Field<Reason<'a>>,
}

#[derive(Default)]
struct Reason<'a> {
    kind: Field<Cow<'a, str>>,
    /// The reason, if it is an error.
    error: Option<&'a str>,
}

impl<'a> Meta<'a> {
    fn field(&mut self, cursor: &mut Cursor<'a>, key: &str) -> Option<()> {
        match key {
            "completion_tokens" => self.completion_tokens = cursor.count_field()?,
            "prompt_tokens" => self.prompt_tokens = cursor.count_field()?,
            "cached_tokens" => self.cached_tokens = cursor.count_field()?,
            "finish_reason" => self.reason = reason(cursor)?,
            _ => drop(cursor.skip()?),
        }
        Some(())
    }

    fn end(self, found: &mut Noticed<'a>, total: usize) {
        if let Field::Wrong = self.completion_tokens {
            found.wrong = true;
        }
        if let Some(reason) = self.reason.get(&mut found.wrong) {
            found.error = found.error.or(reason.error);
            found.finish = reason.kind.get(&mut found.wrong).unwrap_or_default().into_owned();
        }
        let prompt = self.prompt_tokens.get(&mut found.wrong);
        let cached_tokens = self.cached_tokens.get(&mut found.wrong);
        if let Some(prompt_tokens) = prompt
            && !found.finish.is_empty()
        {
            let completion_tokens = u32::try_from(total).unwrap_or(u32::MAX);
            found.usage = Some(Usage { prompt_tokens, completion_tokens, cached_tokens });
        }
    }
}

fn reason<'a>(cursor: &mut Cursor<'a>) -> Option<Field<Reason<'a>>> {
    if cursor.peek()? == b'"' {
        let kind = Field::Is(cursor.string()?);
        return Some(Field::Is(Reason { kind, error: None }));
    }
    let (mut kind, mut has_status) = (Field::Absent, false);
    let raw = cursor.object_field(|cursor, key| {
        match key {
            "type" => kind = cursor.text_field()?,
            "status_code" => has_status = cursor.skip()? != "null",
            _ => drop(cursor.skip()?),
        }
        Some(())
    })?;
    Some(match raw {
        Field::Is(raw) => Field::Is(Reason { kind, error: has_status.then_some(raw) }),
        Field::Absent => Field::Absent,
        Field::Wrong => Field::Wrong,
    })
}
