//! A second pair of hands: what changes the index while it is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use crate::Failure;

/// What a thread is given to do.
pub type Job = Box<dyn FnOnce() -> Result<(), Failure> + Send>;

/// A thread for jobs, one at a time, which exists before any of them.
pub struct OtherThread {
    jobs: Sender<Job>,
    done: Receiver<Result<(), Failure>>,
    finished: Arc<AtomicBool>,
}

impl OtherThread {
    pub fn new() -> Self {
        let (jobs, queue) = channel::<Job>();
        let (answers, done) = channel();
        let finished = Arc::new(AtomicBool::new(true));
        let finishes = Arc::clone(&finished);
        thread::spawn(move || {
            queue.into_iter().try_for_each(|job| {
                let result = job();
                finishes.store(true, Ordering::Release);
                answers.send(result)
            })
        });
        Self { jobs, done, finished }
    }

    pub fn start(&self, job: Job) {
        self.finished.store(false, Ordering::Release);
        self.jobs.send(job).expect("the thread lives as long as the sender");
    }

    pub fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }

    pub fn wait(&self) -> Result<(), Failure> {
        self.done.recv().expect("the thread answers each job")
    }
}
