//! Which connections are closed where there is no room for more.

use std::io;
use std::time::{Duration, Instant};

/// Closed at once, so that looking for them is worth it: a hundredth of those there are, and at least one.
const PART: usize = 100;
/// Rest after nobody was found: it costs a look at each connection.
const REST: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug, Default)]
pub struct Crowds {
    rests_until: Option<Instant>,
    evicted: u64,
}

impl Crowds {
    /// Whether it makes sense to look.
    pub fn look(&self, now: Instant) -> bool {
        self.rests_until.is_none_or(|until| now >= until)
    }

    /// Those that are closed, of all that may be: the least of them.
    pub fn choose<T: Ord + Copy>(&mut self, idle: &mut [T], now: Instant) -> Vec<T> {
        self.rests_until = idle.is_empty().then(|| now + REST);
        let count = (idle.len() / PART).max(1).min(idle.len());
        if count < idle.len() {
            idle.select_nth_unstable(count);
        }
        self.evicted += count as u64;
        idle[..count].to_vec()
    }

    /// How many there were until now.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }
}

/// Whether an error says that the process, or the machine, has no descriptors left.
pub fn out_of_descriptors(error: &io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(error.raw_os_error(), Some(ENFILE | EMFILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_are_chosen_a_hundredth_at_once() {
        let now = Instant::now();
        let mut crowds = Crowds::default();
        let mut idle: Vec<u32> = (0..1000).rev().collect();
        let mut chosen = crowds.choose(&mut idle, now);
        chosen.sort_unstable();
        assert_eq!(chosen, (0..10).collect::<Vec<_>>());
        assert_eq!(crowds.choose(&mut [7, 5], now), vec![5]);
        assert_eq!(crowds.evicted(), 11);
        assert!(crowds.look(now));
    }

    #[test]
    fn who_found_nobody_rests() {
        let now = Instant::now();
        let mut crowds = Crowds::default();
        assert!(crowds.choose::<u32>(&mut [], now).is_empty());
        assert!(!crowds.look(now));
        assert!(crowds.look(now + REST));
    }
}
