//! What requests wait for, so that operators learn of it: [`Output::Stuck`] and [`Output::Full`].

use std::time::Duration;

use super::{Phase, Session};
use crate::gateway::group::{Group, Refusal, Region};
use crate::gateway::piece::{Piece, Work};
use crate::gateway::types::Output;
use crate::registry::REPLICAS;
use crate::request::ErrorCode;
use crate::types::ServerId;

/// A request that waits for longer is stuck, if its group has completed nothing like it in this
/// time. A leader that hangs is replaced within 3 s, or within 4 s if only the device of its log
/// hangs.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// A request that timed out, or that failed for lack of space, counts for this time. So a server
/// that fails some of the requests causes at most two reports in it.
const FAILURE_COUNTS: Duration = Duration::from_secs(10);

/// A server that was asked again this long ago, and has not answered since, is reported as silent,
/// whatever it has answered before.
const SILENT_AFTER: Duration = Duration::from_secs(1);

/// Pause between two observations while something is reported.
const OBSERVE_AGAIN: Duration = Duration::from_secs(1);

/// What was observed of requests that do not progress.
#[derive(Debug, Default)]
pub(super) struct Observed {
    /// The next observation. There is one whenever a request is on its way.
    pub(super) due: Option<Duration>,
    /// The last report of stuck requests, unless they are over.
    stuck: Option<String>,
    /// When a request has timed out last.
    timed_out: Option<Duration>,
    /// When a write has failed last for lack of space.
    full: Option<Duration>,
}

impl Session {
    /// Observes a piece that was made now once it may be stuck.
    pub(super) fn observe_later(&mut self) {
        self.observed.due.get_or_insert(self.now + STUCK_AFTER);
    }

    /// Notes that a request has timed out, and what it has waited for.
    pub(super) fn timed_out(&mut self, wait: &str) {
        self.observed.timed_out = Some(self.now);
        if self.observed.stuck.is_none() {
            self.report_stuck(Some(format!("{wait}; it has timed out")));
        }
        self.observe_soon();
    }

    /// Notes that a server has refused a write for lack of space.
    pub(super) fn no_space(&mut self, text: &str) {
        if self.observed.full.replace(self.now).is_none() {
            self.outputs.push_back(Output::Full(Some(text.to_owned())));
        }
        self.observe_soon();
    }

    fn observe_soon(&mut self) {
        let at = self.now + OBSERVE_AGAIN;
        self.observed.due = Some(self.observed.due.map_or(at, |due| due.min(at)));
    }

    /// Looks for requests that are stuck, if that is due.
    pub(super) fn observe(&mut self) {
        if matches!(self.phase, Phase::Ended(_)) || self.observed.due.is_none_or(|at| at > self.now)
        {
            return;
        }
        let has_passed =
            |at: Option<Duration>| at.is_some_and(|at| self.now >= at + FAILURE_COUNTS);
        if has_passed(self.observed.full) {
            self.observed.full = None;
            self.outputs.push_back(Output::Full(None));
        }
        if has_passed(self.observed.timed_out) {
            self.observed.timed_out = None;
        }
        let next = self
            .pieces
            .iter()
            .map(|(id, piece)| (self.stuck_at(piece), *id, piece))
            .min_by_key(|(at, id, _)| (*at, *id));
        let next_at = next.map(|(at, ..)| at);
        match next.filter(|(at, ..)| *at <= self.now) {
            Some((_, id, piece)) => {
                let seconds = (self.now - piece.begun).as_secs();
                let wait = self.wait_of(id);
                self.report_stuck(Some(format!("{wait}; it has waited for {seconds} s")));
            }
            None if self.observed.timed_out.is_none() && self.observed.stuck.is_some() => {
                self.report_stuck(None);
            }
            None => {}
        }
        let Observed { stuck, full, .. } = &self.observed;
        self.observed.due = match stuck.is_some() || full.is_some() {
            true => Some(self.now + OBSERVE_AGAIN),
            false => next_at.map(|at| at.max(self.now + OBSERVE_AGAIN)),
        };
    }

    fn report_stuck(&mut self, report: Option<String>) {
        self.observed.stuck.clone_from(&report);
        self.outputs.push_back(Output::Stuck(report));
    }

    /// When a piece is stuck if its group completes nothing like it until then. With a deep queue
    /// and slow servers each piece waits for long, while all of them progress. Reads need no
    /// majority, so they do not count for changes.
    fn stuck_at(&self, piece: &Piece) -> Duration {
        let progressed = match self.regions.get(&piece.region) {
            Some(Region::Group(group)) => group.progressed[usize::from(piece.is_read())],
            Some(Region::Creating { .. }) | None => Duration::ZERO,
        };
        piece.begun.max(progressed) + STUCK_AFTER
    }

    /// Notes that a group has completed a piece.
    pub(super) fn progressed(&mut self, piece: &Piece) {
        let now = self.now;
        if let Some(group) = self.group(piece.region) {
            group.progressed[usize::from(piece.is_read())] = now;
        }
    }

    /// What the piece waits for that was made first. All that waits without a piece waits for one.
    pub(super) fn oldest_wait(&self) -> String {
        let oldest = self.pieces.keys().next().map(|id| self.wait_of(*id));
        oldest.unwrap_or_else(|| "an earlier request of the same blocks".to_owned())
    }

    /// What a piece waits for: what is known of each replica.
    pub(super) fn wait_of(&self, id: u64) -> String {
        let Some(piece) = self.pieces.get(&id) else { return String::new() };
        let (kind, region) = (piece.kind.name(), piece.region.0);
        let group = match self.regions.get(&piece.region) {
            Some(Region::Group(group)) => group,
            Some(Region::Creating { error: Some(error), .. }) => {
                return format!("{kind} in region {region}, which has no group yet: {error}");
            }
            Some(Region::Creating { error: None, .. }) | None => {
                return format!(
                    "{kind} in region {region}, which has no group yet: the coordination service \
                     does not answer"
                );
            }
        };
        // A parked piece waits for the answer to an attach.
        let sent = group.attach.filter(|_| piece.is_parked);
        let mut sent = sent.and_then(|attach| self.pieces.get(&attach)).unwrap_or(piece);
        let mut waits = "";
        // A piece waits for a number until one that has a number is answered.
        if matches!(piece.work, Work::Change { number: None, .. }) && !piece.is_parked {
            waits = ", which waits for a number of the window";
            let has_number = |other: &&Piece| {
                other.region == piece.region
                    && matches!(other.work, Work::Change { number: Some(_), .. })
            };
            sent = self.pieces.values().find(has_number).unwrap_or(piece);
        }
        let replicas = group.view.replicas.iter();
        let mut servers: Vec<_> =
            replicas.map(|server| self.state_of(*server, group, sent)).collect();
        let known = servers.len();
        if known < REPLICAS {
            servers.push(format!("{} of {REPLICAS} replicas are lost", REPLICAS - known));
        }
        let group = group.view.group;
        format!("{kind} in region {region} (group {group}){waits}: {}", servers.join(", "))
    }

    /// What is known of a server that has not served a piece.
    fn state_of(&self, server: ServerId, group: &Group, piece: &Piece) -> String {
        let copy = piece.copies.iter().find(|copy| copy.server == server);
        let is_silent = copy.is_some_and(|copy| self.now >= copy.sent + SILENT_AFTER);
        match group.refusal(server).filter(|_| !is_silent) {
            None if copy.is_none() => format!("server {server} was not asked"),
            None => format!("server {server} has not answered"),
            Some(Refusal::NotConnected) => format!("server {server} is not connected"),
            Some(Refusal::BadAnswer) => format!("server {server} answers with damaged data"),
            Some(Refusal::Error(error)) => match (error.code, error.leader) {
                (ErrorCode::NotLeader, None) => format!("server {server} knows no leader"),
                (ErrorCode::NotLeader, Some(leader)) => {
                    format!("server {server} takes server {leader} for the leader")
                }
                _ => format!("server {server} answers {error}"),
            },
        }
    }
}
