//! Messages of `Lifecycle` streams: operations out of bytes, results into them.
//!
//! What is usual is read here; an operation that is not (other kinds, rare fields, columns that contradict each
//! other) comes out as its bytes, for the plain path, so that there is one place that judges and words errors.

use super::Overlaps;
use crate::protobuf::{Field, Reader, Writer};

/// Operations in one message; more are refused by the plain path.
const MAX_OPERATIONS: usize = 1024;

const DEFAULT_TENANT: &str = "default";

/// The caller that may name every tenant.
const ALL_TENANTS: &str = "*";

/// The highest number of a `Role`.
const LAST_ROLE: u64 = 3;

/// A booking's name.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Name<'a> {
    pub model: &'a str,
    /// Empty: that of the stream.
    pub tenant: &'a str,
    pub role: u32,
    pub request_id: &'a str,
    pub attempt_id: u64,
}

/// A `SelectRequest` without rare fields.
#[derive(Debug, Default)]
pub struct Select<'a> {
    pub name: Name<'a>,
    /// Packed.
    pub hashes: &'a [u8],
    pub isl_tokens: u32,
    pub block_size: u32,
    pub overlaps: Option<Overlaps>,
    pub priority: i32,
    pub expected_output_tokens: u32,
    pub lease_seconds: u32,
    pub prefill_elsewhere: bool,
    pub traceparent: &'a str,
    pub max_output_tokens: u32,
    pub output_class: &'a str,
    pub estimates_prefill: bool,
    /// 0: its caller does not know.
    pub session: u64,
    pub no_lineage: bool,
    pub overlaps_unknown: bool,
    pub fairness_id: &'a str,
    pub caller: &'a str,
    /// 0: there is none.
    pub deadline_ms: u32,
    /// 0: that of the scheduler.
    pub ttft_target_us: u32,
    pub itl_target_us: u32,
    /// 0: there is none.
    pub parent_session: u64,
}

/// One operation; `Plain` is left to the plain path.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Which is to be booked, or not.
    Select(u64, Box<Select<'a>>, bool),
    /// With the microseconds since then.
    PrefillComplete(u64, Name<'a>, u32),
    /// With the tokens that the request had, and the microseconds since then.
    Free(u64, Name<'a>, u32, u32),
    Plain(&'a [u8]),
}

/// The operations of a `LifecycleRequest`; None: the plain path must read all of it.
///
/// `caller_tenant` is what the caller's token is bound to; "*" is all.
pub fn operations<'a>(message: &'a [u8], caller_tenant: &str) -> Option<Vec<Operation<'a>>> {
    let may = |tenant: &str| caller_tenant == ALL_TENANTS || caller_tenant == tenant;
    let (mut found, mut tenant) = (Vec::new(), "");
    let mut reader = Reader::new(message);
    while let Some(field) = reader.next()? {
        match field {
            (1, Field::Bytes(value)) => tenant = std::str::from_utf8(value).ok()?,
            (3, Field::Bytes(value)) if found.len() < MAX_OPERATIONS => {
                let operation = operation(value)?;
                let named = match &operation {
                    Operation::Select(_, select, _) => select.name.tenant,
                    Operation::PrefillComplete(_, name, _) | Operation::Free(_, name, ..) => name.tenant,
                    Operation::Plain(_) => "",
                };
                if !named.is_empty() && !may(named) {
                    return None;
                }
                found.push(operation);
            }
            (1..=3, _) => return None,
            _ => {} // of a later version
        }
    }
    may(if tenant.is_empty() { DEFAULT_TENANT } else { tenant }).then_some(found)
}

/// None: the bytes are no message.
fn operation(bytes: &[u8]) -> Option<Operation<'_>> {
    let (mut id, mut body, mut output_tokens, mut age_us) = (0, None, 0, 0);
    let mut reader = Reader::new(bytes);
    while let Some(field) = reader.next()? {
        match field {
            (1, Field::Varint(value)) => id = value,
            (kind @ (2 | 3 | 5 | 7), Field::Bytes(value)) if body.is_none() => body = Some((kind, value)),
            (9, Field::Varint(value)) => output_tokens = value as u32,
            (10, Field::Varint(value)) => age_us = value as u32,
            (1..=10, _) => return Some(Operation::Plain(bytes)),
            _ => {} // of a later version
        }
    }
    let usual = match body {
        Some((kind @ (2 | 3), value)) => {
            select(value).map(|select| Operation::Select(id, Box::new(select), kind == 3))
        }
        Some((5, value)) => reference(value).map(|name| Operation::PrefillComplete(id, name, age_us)),
        Some((_, value)) => reference(value).map(|name| Operation::Free(id, name, output_tokens, age_us)),
        None => None,
    };
    Some(usual.unwrap_or(Operation::Plain(bytes)))
}

/// A `SelectRequest` of the usual shape, as the unary rpc has it, too.
pub fn select(bytes: &[u8]) -> Option<Select<'_>> {
    let mut select = Select::default();
    let mut reader = Reader::new(bytes);
    while let Some(field) = reader.next()? {
        match field {
            (1..=5, _) => select.name.read(field)?,
            (6, Field::Bytes(value)) if select.hashes.is_empty() && value.len() % 8 == 0 => {
                select.hashes = value;
            }
            (7, Field::Varint(value)) => select.isl_tokens = value as u32,
            (8, Field::Varint(value)) => select.block_size = value as u32,
            (9, Field::Bytes(value)) if select.overlaps.is_none() => {
                select.overlaps = Some(Overlaps::parse(value)?);
            }
            (18, Field::Varint(value)) => select.priority = value as i32,
            (19, Field::Varint(value)) => select.expected_output_tokens = value as u32,
            (21, Field::Varint(value)) => select.lease_seconds = value as u32,
            (22, Field::Varint(value)) => select.prefill_elsewhere = value != 0,
            // As a trace context in `query`.
            (23, Field::Bytes(value)) => select.traceparent = std::str::from_utf8(value).ok()?,
            (24, Field::Varint(value)) => select.max_output_tokens = value as u32,
            // Its length is the core's to check, as what is wrong of the other fields is.
            (25, Field::Bytes(value)) => select.output_class = std::str::from_utf8(value).ok()?,
            (26, Field::Varint(value)) => select.estimates_prefill = value != 0,
            (27, Field::Fixed64(value)) => select.session = value,
            (28, Field::Varint(value)) => select.no_lineage = value != 0,
            (29, Field::Varint(value)) => select.overlaps_unknown = value != 0,
            // As that of the class.
            (30, Field::Bytes(value)) => select.fairness_id = std::str::from_utf8(value).ok()?,
            (31, Field::Bytes(value)) => select.caller = std::str::from_utf8(value).ok()?,
            (32, Field::Varint(value)) => select.deadline_ms = value as u32,
            (33, Field::Varint(value)) => select.ttft_target_us = value as u32,
            (34, Field::Varint(value)) => select.itl_target_us = value as u32,
            (35, Field::Fixed64(value)) => select.parent_session = value,
            (1..=34, _) => return None,
            _ => {} // of a later version
        }
    }
    Some(select)
}

/// A `RequestRef`.
fn reference(bytes: &[u8]) -> Option<Name<'_>> {
    let mut name = Name::default();
    let mut reader = Reader::new(bytes);
    while let Some(field) = reader.next()? {
        // Others are of a later version.
        if let (1..=5, _) = field {
            name.read(field)?;
        }
    }
    Some(name)
}

impl<'a> Name<'a> {
    /// Reads one of the fields 1 to 5, which both messages have in the same order.
    fn read(&mut self, field: (u32, Field<'a>)) -> Option<()> {
        match field {
            (1, Field::Bytes(value)) => self.model = std::str::from_utf8(value).ok()?,
            (2, Field::Bytes(value)) => self.tenant = std::str::from_utf8(value).ok()?,
            (3, Field::Varint(value @ 0..=LAST_ROLE)) => self.role = value as u32,
            (4, Field::Bytes(value)) => self.request_id = std::str::from_utf8(value).ok()?,
            (5, Field::Varint(value)) => self.attempt_id = value,
            _ => return None,
        }
        Some(())
    }
}

/// The worker that was picked, as `SelectResponse` tells of it.
#[derive(Debug, Clone, Copy)]
pub struct Selected<'a> {
    pub worker_id: &'a str,
    pub dp_rank: u32,
    pub http_endpoint: &'a str,
    pub overlap_blocks: u32,
    pub effective_overlap_blocks: f64,
    pub cost: f64,
    pub uncached_tokens: u32,
    pub block_size: u32,
    pub session: u64,
    pub saved_seconds: f64,
}

impl Selected<'_> {
    /// A `SelectResponse`.
    pub fn response(&self) -> Writer {
        let (mut worker, mut response) = (Writer::default(), Writer::default());
        worker.string(1, self.worker_id);
        worker.varint(2, u64::from(self.dp_rank));
        response.bytes(1, worker.as_bytes());
        response.string(2, self.http_endpoint);
        response.varint(3, u64::from(self.overlap_blocks));
        response.double(4, self.effective_overlap_blocks);
        response.double(5, self.cost);
        response.varint(6, u64::from(self.uncached_tokens));
        response.varint(8, u64::from(self.block_size));
        response.fixed64(9, self.session);
        response.double(11, self.saved_seconds);
        response
    }
}

/// A `LifecycleResponse` of one result; several in a row are one message.
fn result(id: u64, number: u32, answer: &Writer) -> Vec<u8> {
    let (mut result, mut response) = (Writer::default(), Writer::default());
    result.varint(1, id);
    result.bytes(number, answer.as_bytes());
    response.bytes(1, result.as_bytes());
    response.into_bytes()
}

/// The result of a select_and_reserve.
pub fn select_result(id: u64, selected: &Selected<'_>) -> Vec<u8> {
    result(id, 4, &selected.response())
}

/// The result of an operation whose answer, field `kind` of the result, is one number.
pub fn number_result(id: u64, kind: u32, number: u32) -> Vec<u8> {
    let mut answer = Writer::default();
    answer.varint(1, u64::from(number));
    result(id, kind, &answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message with these (field, content) pairs.
    fn message(fields: &[(u32, &[u8])]) -> Vec<u8> {
        let mut made = Writer::default();
        fields.iter().for_each(|(number, value)| made.bytes(*number, value));
        made.into_bytes()
    }

    fn reference_of(tenant: &str) -> Vec<u8> {
        message(&[(1, b"m"), (2, tenant.as_bytes()), (4, b"r")])
    }

    #[test]
    fn usual_operations_are_read_and_others_are_handed_back() {
        let mut free = Writer::default();
        free.varint(1, 7);
        free.bytes(7, &reference_of(""));
        free.varint(9, 12);
        free.varint(10, 34);
        let select = message(&[(1, b"m"), (4, b"r"), (6, &[1; 16]), (9, b""), (25, b"chat")]);
        let pinned = message(&[(1, b"m"), (12, b"worker")]);
        let (booked, rare) = (message(&[(3, &select)]), message(&[(3, &pinned)]));
        let renew = message(&[(8, b"")]);
        let all = message(&[(3, free.as_bytes()), (3, &booked), (3, &rare), (3, &renew), (3, b"")]);
        let read = operations(&all, "*").unwrap();
        let Operation::Free(7, name, 12, 34) = &read[0] else { panic!("{:?}", read[0]) };
        assert_eq!((name.model, name.request_id, name.attempt_id), ("m", "r", 0));
        let Operation::Select(0, select, true) = &read[1] else { panic!("{:?}", read[1]) };
        assert_eq!((select.hashes.len(), select.name.request_id), (16, "r"));
        assert!(select.overlaps.is_some());
        assert_eq!(select.output_class, "chat");
        for (operation, bytes) in read[2..].iter().zip([&*rare, &*renew, b""]) {
            let Operation::Plain(handed_back) = operation else { panic!("{operation:?}") };
            assert_eq!(*handed_back, bytes);
        }
    }

    #[test]
    fn a_message_with_a_hello_or_none_at_all_is_left_alone() {
        assert!(operations(&message(&[(2, b"")]), "*").is_none());
        assert!(operations(&[0x1a, 9, 1], "*").is_none());
        assert!(operations(&message(&[(3, &[0x0b])]), "*").is_none());
        let many = vec![(3, &b""[..]); MAX_OPERATIONS + 1];
        assert!(operations(&message(&many), "*").is_none());
        assert_eq!(operations(&message(&many[1..]), "*").unwrap().len(), MAX_OPERATIONS);
    }

    #[test]
    fn whatever_comes_is_read_or_left_alone() {
        let overlaps = message(&[(1, b"worker"), (1, "wörker".as_bytes()), (3, &[1, 2]), (7, &[2, 2])]);
        let select = message(&[(1, b"m"), (4, b"r"), (6, &[1; 16]), (9, &overlaps)]);
        let usual = message(&[(3, &message(&[(3, &select)])), (3, &message(&[(7, &reference_of("t"))]))]);
        let mut state = 1_u64;
        for _ in 0..200_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let mut changed = usual.clone();
            let place = (state >> 33) as usize % changed.len();
            changed[place] = (state >> 25) as u8;
            changed.truncate(if state >> 63 == 0 {
                changed.len()
            } else {
                (state >> 41) as usize % changed.len()
            });
            if let Some(read) = operations(&changed, "*") {
                assert!(read.len() <= changed.len());
            }
        }
    }

    #[test]
    fn a_tenant_that_is_not_the_callers_is_left_to_the_plain_path() {
        let of = |tenant: &str| message(&[(5, &reference_of(tenant))]);
        let mine = message(&[(1, b"mine"), (3, &of("")), (3, &of("mine"))]);
        assert_eq!(operations(&mine, "mine").unwrap().len(), 2);
        assert!(operations(&mine, "other").is_none());
        assert!(operations(&message(&[(1, b"mine"), (3, &of("other"))]), "mine").is_none());
        assert!(operations(&message(&[(3, &of("mine"))]), "mine").is_none(), "unset is \"default\"");
        assert_eq!(operations(&mine, "*").unwrap().len(), 2);
    }
}
