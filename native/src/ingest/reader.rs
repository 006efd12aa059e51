//! What a source is read by: its live sockets, or the socket of a replay.

use std::time::Instant;

use mio::event::Event;

use super::bypass::Bypass;
use super::intake::Notice;
use super::replay::Replay;
use super::source::{Context, Sockets};

pub enum Reader {
    Live(Box<Sockets>),
    Replay(Box<Replay>),
}

impl Reader {
    /// Bytes held of messages that are not complete.
    pub fn held(&self) -> usize {
        match self {
            Self::Live(sockets) => sockets.held(),
            Self::Replay(replay) => replay.held(),
        }
    }

    pub fn on_readiness(&mut self, slot: usize, event: &Event) {
        match self {
            Self::Live(sockets) => sockets.on_readiness(slot, event),
            Self::Replay(replay) => replay.on_readiness(event),
        }
    }

    /// Reads each socket once; whether one may have more.
    pub fn drive(
        &mut self,
        context: &mut Context<'_>,
        bypass: &Bypass,
        leave: &mut dyn FnMut(Notice),
    ) -> bool {
        match self {
            Self::Live(sockets) => sockets.drive(context, bypass, leave),
            Self::Replay(replay) => replay.drive(context, bypass, leave),
        }
    }

    /// When `tick` is due at the latest, after `drive`; None: as it was.
    pub fn due_at(&self) -> Option<Instant> {
        match self {
            Self::Live(sockets) => sockets.retry_at(),
            Self::Replay(replay) => replay.due_at(),
        }
    }

    /// Does what is due; when to come again.
    pub fn tick(&mut self, context: &mut Context<'_>, leave: &mut dyn FnMut(Notice)) -> Option<Instant> {
        match self {
            Self::Live(sockets) => sockets.tick(context, leave),
            Self::Replay(replay) => replay.tick(context, leave),
        }
    }
}
