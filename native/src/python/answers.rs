//! What a server answers without asking Python, where all that it takes is here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::rpc::{Event, Metadata, News, Rpc, Status};

/// Messages above this many bytes may take longer than about 50 µs: Python has them answered without the GIL.
pub(super) const DETACH_ABOVE_BYTES: usize = 256 * 1024;

/// Bytes of a message, the caller's clock and tenant; None: Python is to answer.
type Answer = dyn Fn(&[u8], f64, &str) -> Option<Vec<u8>> + Send + Sync;

/// Makes answers of messages; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub(super) struct Answers {
    answer: Box<Answer>,
}

impl Answers {
    pub(super) fn new(answer: impl Fn(&[u8], f64, &str) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self { answer: Box::new(answer) }
    }
}

/// How long answers took, counted in buckets; see the stub.
#[pyclass(frozen, module = "kvscout_native")]
pub(super) struct AnswerTimes {
    bounds: Vec<Duration>,
    counts: Vec<AtomicU64>,
    nanoseconds: AtomicU64,
}

#[pymethods]
impl AnswerTimes {
    #[new]
    fn new(bounds: Vec<f64>) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        let bounds = bounds.into_iter().map(Duration::from_secs_f64).collect();
        Self { bounds, counts, nanoseconds: AtomicU64::new(0) }
    }

    fn read(&self) -> (Vec<u64>, f64) {
        let counts = self.counts.iter().map(|count| count.load(Relaxed)).collect();
        (counts, self.nanoseconds.load(Relaxed) as f64 / 1e9)
    }
}

impl AnswerTimes {
    fn observe(&self, took: Duration) {
        let bucket = self.bounds.partition_point(|bound| *bound < took);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(took.as_nanos() as u64, Relaxed);
    }
}

/// Who answers for whom.
struct Answerer {
    answers: Py<Answers>,
    tenant: String,
}

impl Answerer {
    fn answer(&self, message: &[u8], now: f64) -> Option<Vec<u8>> {
        if message.len() > DETACH_ABOVE_BYTES {
            return None;
        }
        (self.answers.get().answer)(message, now, &self.tenant)
    }
}

/// The calls and streams of an `Rpc` that are answered here.
pub(super) struct Answering {
    began: Instant,
    /// What the caller's clock said then.
    clock: f64,
    /// By listener and place among its methods.
    calls: HashMap<(u64, u32), (Answerer, Py<AnswerTimes>)>,
    /// By call.
    streams: HashMap<u64, Answerer>,
}

impl Answering {
    pub(super) fn new(clock: f64) -> Self {
        Self { began: Instant::now(), clock, calls: HashMap::new(), streams: HashMap::new() }
    }

    /// Answers calls of a method that have one message and one answer.
    pub(super) fn add_method(
        &mut self,
        (listener, method): (u64, u32),
        answers: Py<Answers>,
        tenant: String,
        times: Py<AnswerTimes>,
    ) {
        self.calls.insert((listener, method), (Answerer { answers, tenant }, times));
    }

    /// Answers the messages of a call one by one, until one is declined or there is no room for its answer.
    pub(super) fn add_stream(&mut self, call: u64, answers: Py<Answers>, tenant: String) {
        self.streams.insert(call, Answerer { answers, tenant });
    }

    /// A call is over.
    pub(super) fn forget(&mut self, call: u64) {
        self.streams.remove(&call);
    }

    /// Answers what came, if it can; whether it did.
    pub(super) fn take(&mut self, rpc: &mut Rpc, event: &Event) -> bool {
        match event {
            Event::Open { call, listener, method, message: Some(message), .. } => {
                let Some((answerer, times)) = self.calls.get(&(*listener, *method)) else { return false };
                let came = Instant::now();
                let Some(answer) = answerer.answer(message, self.now(came)) else { return false };
                rpc.send(*call, &answer);
                rpc.finish(*call, &Status::new(0, ""), &Metadata::new()).expect("there is none");
                times.get().observe(came.elapsed());
                true
            }
            Event::Call(call, News::Message(message)) => {
                let Some(answerer) = self.streams.get(call) else { return false };
                let Some(answer) = answerer.answer(message, self.now(Instant::now())) else {
                    // What comes behind it is not to overtake it.
                    self.forget(*call);
                    return false;
                };
                rpc.consumed(*call, message.len());
                if !rpc.send(*call, &answer) {
                    self.forget(*call);
                }
                true
            }
            Event::Call(call, News::Reset) => {
                self.forget(*call);
                false
            }
            _ => false,
        }
    }

    fn now(&self, instant: Instant) -> f64 {
        self.clock + instant.duration_since(self.began).as_secs_f64()
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Answers>()?;
    module.add_class::<AnswerTimes>()
}
