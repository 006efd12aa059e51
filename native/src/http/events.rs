//! A stream of server-sent events on its way from an engine to a client: bytes in, bytes out, and a report.
//! `event_relay.py` is the reference.

use std::sync::Arc;

use memchr::memchr;

use super::documents::{Dialect, Documents, Noticed, Usage};
use crate::protobuf::Writer;

/// A longer event is no chunk of output.
pub const MAX_EVENT: usize = 64 << 20;
/// Of a stream that has said nothing yet; more of it is passed on.
pub const MAX_WITHHELD: usize = 64 << 10;
/// Characters of an answer's name; a longer one is none.
const MAX_ID: usize = 256;
/// Characters of an engine's own word that are passed on.
const MAX_FINISH_REASON: usize = 64;

/// What an engine's body becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Bytes,
    WithoutUsage,
    Messages,
}

/// What was noticed; times are seconds of the loop's clock, 0 = not yet.
#[derive(Debug, Clone, Default, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::IntoPyObject))]
pub struct Report {
    pub events: u64,
    pub outputs: u64,
    pub tokens: u64,
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    pub output_tokens: u32,
    pub finish: String,
    pub answer_id: String,
    pub error: Vec<u8>,
    pub done: bool,
    pub overrun: bool,
    pub first_output_at: f64,
    pub last_output_at: f64,
    pub progress_at: f64,
    pub listening_since: f64,
    pub passed: u64,
}

/// What makes one message of several events.
#[derive(Debug, Default)]
struct Chunk {
    token_ids: Vec<u8>,
    text: String,
    finish: String,
    usage: Option<Usage>,
    is_there: bool,
}

/// One stream, in whatever chunks it arrives.
#[derive(Debug)]
pub struct EventRelay {
    chunks: bool,
    drops_usage: bool,
    documents: Documents,
    max_tokens: Option<u64>,
    tokens: u64,
    /// Messages of text that came without token ids.
    texts: u64,
    finished: bool,
    pub report: Report,
    /// Nothing more is to be passed on.
    pub over: bool,
    /// Why it ended before its end.
    pub failure: Option<&'static str>,
    /// A line that is not over.
    line: Vec<u8>,
    withheld: Vec<u8>,
    /// Something has come that a client waits for.
    speaking: bool,
    drops_blank: bool,
    chunk: Chunk,
}

const NO_CHUNK: &str = "an event that is not a completion chunk";
const TOO_LONG: &str = "an event of over 64 MiB";

impl EventRelay {
    pub fn new(form: Form, dialect: Arc<Dialect>, max_tokens: Option<u64>) -> Self {
        let chunks = form == Form::Messages;
        Self {
            chunks,
            drops_usage: form == Form::WithoutUsage,
            documents: Documents::new(dialect, chunks),
            max_tokens,
            tokens: 0,
            texts: 0,
            finished: false,
            report: Report::default(),
            over: false,
            failure: None,
            line: Vec::new(),
            withheld: Vec::new(),
            speaking: false,
            drops_blank: false,
            chunk: Chunk::default(),
        }
    }

    /// Takes the next bytes, the last of the body if it `ends`; what is to be passed on: bytes, or a message; nothing:
    /// nothing yet.
    pub fn feed(&mut self, data: &[u8], now: f64, ends: bool) -> Vec<u8> {
        let mut rest = data;
        while let Some(end) = memchr(b'\n', rest)
            && !self.over
        {
            let (line, behind) = rest.split_at(end + 1);
            rest = behind;
            if self.line.is_empty() {
                self.take(line, now);
            } else {
                let mut whole = std::mem::take(&mut self.line);
                whole.extend_from_slice(line);
                self.take(&whole, now);
                whole.clear();
                if whole.capacity() <= MAX_WITHHELD {
                    self.line = whole;
                }
            }
        }
        if !self.over && !rest.is_empty() {
            if self.line.len() + rest.len() > MAX_EVENT {
                self.line = Vec::new();
                self.fail(TOO_LONG);
            } else {
                self.line.extend_from_slice(rest);
            }
        }
        if ends {
            let rest = std::mem::take(&mut self.line);
            if !rest.is_empty() && !self.over {
                self.take(&rest, now);
            }
            self.speaking = self.speaking || !self.over;
            self.over = true;
        }
        self.passed_on()
    }

    fn passed_on(&mut self) -> Vec<u8> {
        let passed = if self.chunks {
            if self.chunk.is_there { std::mem::take(&mut self.chunk).message() } else { Vec::new() }
        } else if self.speaking || self.withheld.len() > MAX_WITHHELD {
            std::mem::take(&mut self.withheld)
        } else {
            Vec::new()
        };
        self.report.passed += passed.len() as u64;
        passed
    }

    fn fail(&mut self, reason: &'static str) {
        self.failure = Some(reason);
        self.over = true;
    }

    fn take(&mut self, line: &[u8], now: f64) {
        if std::mem::take(&mut self.drops_blank) && line.iter().all(|byte| matches!(byte, b'\r' | b'\n')) {
            return;
        }
        if let Some(payload) = line.strip_prefix(b"data:") {
            let payload = trimmed(payload);
            if payload == b"[DONE]" {
                self.done();
            } else if !payload.is_empty() && !self.event(payload, now) {
                return;
            }
        }
        if !self.chunks {
            self.withheld.extend_from_slice(line);
        }
    }

    fn done(&mut self) {
        self.speaking = true;
        self.report.done = true;
        self.over = self.chunks;
    }

    /// False: the line is not passed on.
    fn event(&mut self, payload: &[u8], now: f64) -> bool {
        self.report.events += 1;
        let Some(mut found) = self.documents.read(payload) else {
            if self.chunks {
                self.fail(NO_CHUNK);
            }
            self.speaking = true;
            return true;
        };
        if let Some(error) = found.error {
            self.report.error = error.as_bytes().to_vec();
            if self.chunks || !(self.speaking || self.report.passed > 0) {
                self.over = true;
                return false;
            }
            return true;
        }
        if found.wrong && self.chunks {
            self.fail(NO_CHUNK);
            return false;
        }
        let beyond = self.beyond(&found);
        if beyond > 0 {
            self.report.overrun = true;
            self.report.done = true;
            self.over = true;
            if !self.chunks || self.finished {
                return false;
            }
            let kept = (found.token_ids.len() as u64).saturating_sub(beyond);
            found.token_ids.truncate(kept as usize);
            found.text.clear();
            found.other_output = false;
            "length".clone_into(&mut found.finish);
        }
        self.account(&found, now);
        self.speaking = self.speaking || !found.empty();
        if found.is_end {
            self.done();
        }
        let dropped = self.drops_usage && found.only_usage();
        if self.chunks {
            self.chunk.add(found);
        }
        self.drops_blank = dropped;
        !dropped
    }

    /// Of a document's tokens, those past the end.
    fn beyond(&mut self, found: &Noticed<'_>) -> u64 {
        self.tokens += found.token_ids.len() as u64;
        let says = !found.text.is_empty() || found.other_output;
        // Each stands for a token at least, but for what was held back and comes with the end.
        self.texts += u64::from(says && found.token_ids.is_empty() && found.finish.is_empty());
        if self.finished && self.chunks && !(found.token_ids.is_empty() && found.text.is_empty()) {
            return (found.token_ids.len() as u64).max(1);
        }
        match self.max_tokens {
            Some(most) if found.has_output() => self.tokens.max(self.texts).saturating_sub(most),
            _ => 0,
        }
    }

    fn account(&mut self, found: &Noticed<'_>, now: f64) {
        let report = &mut self.report;
        let has_output = found.has_output();
        if report.answer_id.is_empty() && found.answer_id.chars().count() <= MAX_ID {
            report.answer_id.clone_from(&found.answer_id);
        }
        if has_output {
            report.outputs += 1;
            report.tokens += (found.token_ids.len() as u64).max(1);
            if report.first_output_at == 0.0 {
                report.first_output_at = now;
            }
            report.last_output_at = now;
        }
        if let Some(usage) = self.documents.usage() {
            report.prompt_tokens = Some(usage.prompt_tokens);
            report.cached_tokens = usage.cached_tokens;
            report.output_tokens = usage.output_tokens;
        }
        if !found.finish.is_empty() {
            self.finished = true;
            report.finish.clone_from(&found.finish);
        }
        if has_output || !found.finish.is_empty() || found.usage.is_some() {
            report.progress_at = now;
        }
    }
}

impl Chunk {
    fn add(&mut self, found: Noticed<'_>) {
        let Noticed { token_ids, text, finish, usage, .. } = found;
        if token_ids.is_empty() && text.is_empty() && finish.is_empty() && usage.is_none() {
            return;
        }
        self.is_there = true;
        self.token_ids.extend(token_ids.into_iter().flat_map(u32::to_le_bytes));
        self.text.push_str(&text);
        if !finish.is_empty() {
            self.finish = finish;
        }
        self.usage = usage.or(self.usage);
    }

    /// A serialised `GenerateResponse`.
    fn message(self) -> Vec<u8> {
        let mut writer = Writer::default();
        if !self.token_ids.is_empty() {
            writer.bytes(1, &self.token_ids);
        }
        writer.string(2, &self.text);
        let finish = match self.finish.as_str() {
            "" => 0,
            "stop" => 1,
            "length" => 2,
            "abort" => 3,
            _ => 4,
        };
        writer.varint(3, finish);
        if let Some(usage) = self.usage {
            let mut inner = Writer::default();
            inner.varint(1, u64::from(usage.prompt_tokens));
            inner.varint(2, u64::from(usage.output_tokens));
            if let Some(cached) = usage.cached_tokens {
                inner.present(3, u64::from(cached));
            }
            writer.bytes(5, inner.as_bytes());
        }
        let word: String = self.finish.chars().take(MAX_FINISH_REASON).collect();
        writer.string(7, &word);
        writer.into_bytes()
    }
}

fn trimmed(payload: &[u8]) -> &[u8] {
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
    let Some(start) = payload.iter().position(|byte| !blank(byte)) else { return &[] };
    let end = payload.iter().rposition(|byte| !blank(byte)).expect("there is one at the start");
    &payload[start..=end]
}
