//! Times of operations, and what is said of them.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Reads the clock around one operation, and knows what that costs.
pub struct Clock {
    empty_ns: f64,
}

impl Clock {
    pub fn new() -> Self {
        let empty = Self { empty_ns: 0.0 };
        let mut times: Vec<f64> = (0..10_001).map(|_| empty.time(|| ())).collect();
        times.sort_by(f64::total_cmp);
        Self { empty_ns: times[times.len() / 2] }
    }

    /// Nanoseconds of a call, the release of its result included.
    pub fn time<R>(&self, operation: impl FnOnce() -> R) -> f64 {
        let started = Instant::now();
        drop(black_box(operation()));
        let elapsed = started.elapsed();
        (elapsed.as_nanos() as f64 - self.empty_ns).max(0.0)
    }
}

/// The recorded times of a run.
pub struct Times {
    started: Instant,
    length: Duration,
    per_operation_ns: Vec<f64>,
    operations: u64,
    total_ns: f64,
}

impl Times {
    pub fn new(length: Duration) -> Self {
        Self { started: Instant::now(), length, per_operation_ns: Vec::new(), operations: 0, total_ns: 0.0 }
    }

    /// Whether the run goes on: it is not over, or nothing has been recorded yet.
    pub fn go_on(&self) -> bool {
        self.operations == 0 || self.started.elapsed() < self.length
    }

    /// Records a measurement of some operations, unless the run is still warming up.
    pub fn add(&mut self, ns: f64, operations: u64) {
        if self.started.elapsed() * 10 < self.length {
            return;
        }
        self.per_operation_ns.push(ns / operations as f64);
        self.operations += operations;
        self.total_ns += ns;
    }

    /// The answer of `run`, with more fields.
    pub fn report(self, workload: &str, more: &[(&str, f64)]) -> Value {
        let rate = if self.total_ns > 0.0 { self.operations as f64 * 1e9 / self.total_ns } else { 0.0 };
        report(workload, self.per_operation_ns, self.operations, rate, more)
    }
}

/// A few milliseconds of single operations.
pub struct Slice {
    pub times: Vec<f64>,
    /// Another process was given this thread's core meanwhile.
    pub disturbed: bool,
}

/// Slices of one kind; disturbed ones do not count.
#[derive(Default)]
pub struct Slices {
    times: Vec<f64>,
    rates: Vec<f64>,
}

impl Slices {
    pub fn add(&mut self, slice: Slice) {
        if !slice.disturbed {
            self.rates.push(slice.times.len() as f64 * 1e9 / slice.times.iter().sum::<f64>().max(1.0));
            self.times.extend(slice.times);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// The median of the slices' rates.
    pub fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        at(&rates, 0.5)
    }

    /// The answer of `run`, with more fields.
    pub fn report(self, workload: &str, more: &[(&str, f64)]) -> Value {
        let (rate, operations) = (self.rate(), self.times.len() as u64);
        report(workload, self.times, operations, rate, more)
    }
}

fn report(workload: &str, mut times: Vec<f64>, operations: u64, rate: f64, more: &[(&str, f64)]) -> Value {
    times.sort_by(f64::total_cmp);
    let mut answer = json!({
        "workload": workload,
        "operations": operations,
        "median_ns": at(&times, 0.5),
        "p99_ns": at(&times, 0.99),
        "max_ns": at(&times, 1.0),
        "rate": rate,
    });
    for (name, value) in more {
        answer[*name] = json!(value);
    }
    answer
}

/// The value that a share of ascending ones does not exceed; 0 of none.
fn at(ordered: &[f64], share: f64) -> f64 {
    let last = ordered.len().saturating_sub(1);
    ordered.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
}

/// How often this thread lost its core to another one, not counting waits of its own; 0 where that is unknown.
pub fn involuntary_switches() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}
