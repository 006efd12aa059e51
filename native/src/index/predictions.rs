//! Predictions in the order in which they end: queues, of which each is in order.
//!
//! A prediction ends a fixed time after it was made, so that one queue for each such time takes them as they come; one
//! that is made again goes to the end. No queue is ever sorted, and nothing is left of what was cancelled.

use super::types::PresenceId;
use crate::slab::Slab;

/// One prediction.
#[derive(Debug, Clone, Copy)]
pub struct Prediction {
    pub slot: u32,
    pub presence: PresenceId,
    pub depth: u32,
    expiry: f64,
    /// Those before and after it in its queue; 0: none.
    before: u32,
    after: u32,
    queue: u32,
}

/// The queue of a prediction that is in none.
const NO_QUEUE: u32 = u32::MAX;

/// The first and the last one; 0: there is none.
#[derive(Debug, Clone, Copy, Default)]
struct Queue {
    first: u32,
    last: u32,
}

/// All predictions, and when they end.
#[derive(Debug, Default)]
pub struct Predictions {
    all: Slab<Prediction>,
    queues: Vec<Queue>,
}

impl Predictions {
    /// Adds a prediction that ends right before `next`, which ends at the same time; 0: after all that end no later.
    pub fn insert(&mut self, slot: u32, presence: PresenceId, depth: u32, expiry: f64, next: u32) -> u32 {
        let queue = NO_QUEUE;
        let id = self.all.insert(Prediction { slot, presence, depth, expiry, before: 0, after: 0, queue });
        self.link(id, next);
        id
    }

    /// Lets a prediction end later, `next` as for `insert`; false, and nothing changed, if it ends later already.
    pub fn refresh(&mut self, id: u32, expiry: f64, next: u32) -> bool {
        if self.all[id].expiry > expiry {
            return false;
        }
        self.unlink(id);
        self.all[id].expiry = expiry;
        self.link(id, next);
        true
    }

    pub fn remove(&mut self, id: u32) {
        self.unlink(id);
        self.all.remove(id);
    }

    /// The prediction that ends next, and when.
    pub fn first(&self) -> Option<(u32, f64)> {
        let firsts = self.queues.iter().map(|queue| queue.first).filter(|&first| first != 0);
        firsts.map(|first| (first, self.all[first].expiry)).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Takes a prediction out of its queue: it does not end any more, until it is removed.
    pub fn unlink(&mut self, id: u32) {
        let Prediction { before, after, queue, .. } = self.all[id];
        if queue != NO_QUEUE {
            *self.after_mut(queue, before) = after;
            *self.before_mut(queue, after) = before;
            self.all[id].queue = NO_QUEUE;
        }
    }

    pub fn bytes(&self) -> usize {
        self.all.bytes()
    }

    fn link(&mut self, id: u32, next: u32) {
        let (queue, before) = match next {
            0 => self.queue_of(self.all[id].expiry),
            _ => (self.all[next].queue, self.all[next].before),
        };
        let prediction = &mut self.all[id];
        (prediction.before, prediction.after, prediction.queue) = (before, next, queue);
        *self.after_mut(queue, before) = id;
        *self.before_mut(queue, next) = id;
    }

    /// The queue whose last one ends latest, but not after `expiry`, and its last one; else an empty queue.
    fn queue_of(&mut self, expiry: f64) -> (u32, u32) {
        let ends = |queue: &Queue| self.all.get(queue.last).map_or(f64::NEG_INFINITY, |last| last.expiry);
        let fit = (self.queues.iter().zip(0..)).filter(|(queue, _)| ends(queue) <= expiry);
        let best = fit.max_by(|a, b| ends(a.0).total_cmp(&ends(b.0)));
        let (last, queue) = best.map_or((0, self.queues.len() as u32), |(queue, place)| (queue.last, place));
        if queue as usize == self.queues.len() {
            self.queues.push(Queue::default());
        }
        (queue, last)
    }

    fn after_mut(&mut self, queue: u32, id: u32) -> &mut u32 {
        if id == 0 { &mut self.queues[queue as usize].first } else { &mut self.all[id].after }
    }

    fn before_mut(&mut self, queue: u32, id: u32) -> &mut u32 {
        if id == 0 { &mut self.queues[queue as usize].last } else { &mut self.all[id].before }
    }
}

impl std::ops::Index<u32> for Predictions {
    type Output = Prediction;

    fn index(&self, id: u32) -> &Prediction {
        &self.all[id]
    }
}

impl std::ops::IndexMut<u32> for Predictions {
    fn index_mut(&mut self, id: u32) -> &mut Prediction {
        &mut self.all[id]
    }
}
