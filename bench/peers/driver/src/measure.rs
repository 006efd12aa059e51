//! Times of operations, and what is said of them.

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
    pub fn report(mut self, workload: &str, more: &[(&str, f64)]) -> Value {
        self.per_operation_ns.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = self.per_operation_ns.len().saturating_sub(1);
            self.per_operation_ns.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
        };
        let rate = if self.total_ns > 0.0 { self.operations as f64 * 1e9 / self.total_ns } else { 0.0 };
        let mut answer = json!({
            "workload": workload,
            "operations": self.operations,
            "median_ns": at(0.5),
            "p99_ns": at(0.99),
            "max_ns": at(1.0),
            "rate": rate,
        });
        for (name, value) in more {
            answer[*name] = json!(value);
        }
        answer
    }
}
