//! Connections that are accepted, and those that are closed where there is no room for more.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};

use super::socket::configure;

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

/// Result of accepting at a listener; failures have the error's number.
pub enum Accepted {
    Connection(TcpStream, SocketAddr),
    /// One that ended before it was accepted, or the call was interrupted.
    Aborted,
    /// No connection waits.
    Drained,
    /// The process, or the machine, has no descriptors left.
    NoDescriptors(i32),
    Failed(i32),
}

/// Accepts one connection; `limit` as `socket::configure` has it.
pub fn accept(listener: &TcpListener, limit: Duration) -> Accepted {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    match listener.accept() {
        Ok((stream, peer)) => {
            // A peer that has gone already is noticed by the first read.
            let _ = configure(&stream, limit);
            Accepted::Connection(stream, peer)
        }
        Err(error) => match (error.kind(), error.raw_os_error().unwrap_or(0)) {
            (io::ErrorKind::WouldBlock, _) => Accepted::Drained,
            (io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted, _) => Accepted::Aborted,
            (_, errno @ (ENFILE | EMFILE)) => Accepted::NoDescriptors(errno),
            (_, errno) => Accepted::Failed(errno),
        },
    }
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
