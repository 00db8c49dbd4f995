//! What the server counts. The program turns it into metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::Command;

/// Counters of a server, since its start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Open connections.
    pub open_connections: AtomicU64,
    /// Connections closed at once because there were too many.
    pub refused_connections: AtomicU64,
    /// Handshakes that did not end in a transmission or by the client's wish: invalid, too slow,
    /// or for an export that does not exist.
    pub failed_handshakes: AtomicU64,
    /// Connections closed because the client violated the protocol after the handshake.
    pub violations: AtomicU64,
    /// Connections closed because the client stopped sending a request or receiving replies.
    pub stalled_connections: AtomicU64,
    /// Requests with an unknown command.
    pub unknown_requests: AtomicU64,
    /// Requests in progress.
    pub requests_in_flight: AtomicU64,
    /// Bytes in flight, as the bounds of the server count them.
    pub bytes_in_flight: AtomicU64,
    commands: [CommandCounters; Command::ALL.len()],
}

/// Counters of one command.
#[derive(Debug, Default)]
pub struct CommandCounters {
    /// Requests received.
    pub requests: AtomicU64,
    /// Sum of their lengths in bytes, if they were valid.
    pub bytes: AtomicU64,
    /// Requests answered with an error.
    pub errors: AtomicU64,
}

impl Counters {
    /// The counters of a command.
    pub fn command(&self, command: Command) -> &CommandCounters {
        &self.commands[command as usize]
    }
}

pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

pub(crate) fn subtract(counter: &AtomicU64, amount: u64) {
    counter.fetch_sub(amount, Ordering::Relaxed);
}

/// Counts one more for as long as it exists.
pub(crate) struct Gauge<'a>(&'a AtomicU64);

impl<'a> Gauge<'a> {
    pub(crate) fn enter(counter: &'a AtomicU64) -> Self {
        add(counter, 1);
        Self(counter)
    }
}

impl Drop for Gauge<'_> {
    fn drop(&mut self) {
        subtract(self.0, 1);
    }
}
