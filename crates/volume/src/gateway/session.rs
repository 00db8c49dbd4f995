//! The session of an attachment: what a gateway does, without I/O, clock and runtime.
//!
//! Inputs are requests of the user, answers of servers, groups from the registry, and the time as a
//! duration since any fixed moment. Outputs are taken with [`Session::next_output`] after each
//! input; [`Session::wakes_at`] is when [`Session::advance`] is needed if no input arrives before.

mod pieces;
mod stuck;
mod users;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::sim::Random;

use super::counters::{Counters, KindCounters};
use super::group::{Group, Region};
use super::map::RegionIndex;
use super::piece::{Kind, Piece, Wake, Work};
use super::range_lock::RangeLocks;
use super::types::{
    Attachment, Closed, Failure, GroupError, GroupReplicas, Output, SendId, SessionConfig, UserId,
};
use crate::request::{Answer, RequestError};
use crate::rules::{Broken, Rule};
use stuck::Observed;
use users::User;

/// The lowest delay between retries, which doubles up to [`GREATEST_DELAY`].
const LOWEST_DELAY: Duration = Duration::from_millis(10);
/// After a leader's process has ended there is another leader within a few 100 ms.
const GREATEST_DELAY: Duration = Duration::from_millis(250);

/// The session of an attachment.
#[derive(Debug)]
pub struct Session {
    attachment: Attachment,
    io_timeout: Option<Duration>,
    broken: Broken,
    random: Random,
    counters: Arc<Counters>,
    now: Duration,
    phase: Phase,
    regions: BTreeMap<RegionIndex, Region>,
    locks: RangeLocks,
    users: HashMap<UserId, User>,
    last_user: u64,
    /// Requests to servers, in the order in which they were made.
    pieces: BTreeMap<u64, Piece>,
    last_piece: u64,
    /// When something is due: for each piece, region and user at most one time.
    wakes: BTreeSet<(Duration, Timer)>,
    /// Requests that hold their lock and may have something to send or to report.
    runnable: VecDeque<UserId>,
    outputs: VecDeque<Output>,
    observed: Observed,
}

#[derive(Debug)]
enum Phase {
    /// Groups that have not answered the first `Attach`.
    Attaching(usize),
    Serving,
    Ended(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// A copy or a retry of a piece.
    Piece(u64),
    /// The creation of a group is requested again.
    Region(RegionIndex),
    /// A request has taken longer than the I/O timeout.
    User(UserId),
    /// The attachment has taken longer than the I/O timeout.
    Attaching,
}

impl Session {
    /// Begins the attachment in all its groups. Requests may be submitted after
    /// [`Output::Attached`].
    ///
    /// # Panics
    /// The size is not a multiple of 4 KiB.
    pub fn new(attachment: Attachment, config: SessionConfig, counters: Arc<Counters>) -> Self {
        let is_whole = attachment.size_bytes.is_multiple_of(crate::op::BLOCK_BYTES as u64);
        assert!(is_whole, "a volume has whole blocks");
        let groups = attachment.groups.clone();
        let mut session = Self {
            attachment,
            io_timeout: config.io_timeout,
            broken: config.broken,
            random: Random::new(config.seed),
            counters,
            now: Duration::ZERO,
            phase: Phase::Attaching(groups.len()),
            regions: BTreeMap::new(),
            locks: RangeLocks::default(),
            users: HashMap::new(),
            last_user: 0,
            pieces: BTreeMap::new(),
            last_piece: 0,
            wakes: BTreeSet::new(),
            runnable: VecDeque::new(),
            outputs: VecDeque::new(),
            observed: Observed::default(),
        };
        match session.io_timeout {
            _ if groups.is_empty() => session.serve(),
            Some(timeout) => drop(session.wakes.insert((timeout, Timer::Attaching))),
            None => {}
        }
        for (region, view) in groups {
            session.regions.insert(region, Region::Group(Box::new(Group::new(view))));
            session.attach(region, None);
        }
        session
    }

    /// What is to be done next.
    pub fn next_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// The time at which [`Session::advance`] is to be called.
    pub fn wakes_at(&self) -> Option<Duration> {
        let due = self.wakes.first().map(|(at, _)| *at);
        due.into_iter().chain(self.observed.due).min()
    }

    /// Does what is due at the time.
    pub fn advance(&mut self, now: Duration) {
        self.set_time(now);
        while let Some(&(at, timer)) = self.wakes.first()
            && at <= self.now
        {
            self.wakes.pop_first();
            match timer {
                Timer::Attaching => self.end(Failure::TimedOut(self.oldest_wait())),
                Timer::Piece(piece) => self.piece_due(piece),
                Timer::Region(region) => self.request_group(region),
                Timer::User(user) => self.time_out(user),
            }
        }
        self.run_users();
        self.observe();
    }

    /// Takes the outcome of a sending.
    pub fn answer(
        &mut self,
        now: Duration,
        id: SendId,
        outcome: Result<Result<Answer, RequestError>, Closed>,
    ) {
        self.set_time(now);
        self.take_outcome(id, outcome);
        self.run_users();
    }

    /// Takes the group of a region from the registry, after [`Output::CreateGroup`] or
    /// [`Output::ReadGroup`], or because it has changed.
    pub fn group_known(
        &mut self,
        now: Duration,
        region: RegionIndex,
        view: Result<GroupReplicas, GroupError>,
    ) {
        self.set_time(now);
        match (view, self.regions.get_mut(&region)) {
            (Err(GroupError::Fenced), _) => self.end(Failure::Fenced),
            (Err(GroupError::Dropped), _) => self.end(Failure::Dropped),
            (Ok(view), Some(Region::Group(group))) => {
                group.is_read = false;
                if group.view.group == view.group {
                    group.view = view;
                }
            }
            (Err(GroupError::Unavailable(_)), Some(Region::Group(group))) => group.is_read = false,
            (Ok(view), Some(Region::Creating { waiting, wake, .. })) => {
                let waiting = std::mem::take(waiting);
                if let Some(at) = wake.take() {
                    self.wakes.remove(&(at, Timer::Region(region)));
                }
                self.regions.insert(region, Region::Group(Box::new(Group::new(view))));
                waiting.into_iter().for_each(|piece| self.start(piece));
            }
            (
                Err(GroupError::Unavailable(text)),
                Some(Region::Creating { failures, error, wake: wake @ None, .. }),
            ) => {
                *failures += 1;
                *error = Some(text);
                let at = self.now + back_off(*failures, &mut self.random);
                *wake = Some(at);
                self.wakes.insert((at, Timer::Region(region)));
            }
            // The answer to a request that was repeated, or a region that was never written here.
            (_, Some(Region::Creating { .. }) | None) => {}
        }
    }

    /// Ends the attachment. All requests complete with the failure.
    pub fn end(&mut self, failure: Failure) {
        if matches!(self.phase, Phase::Ended(_)) {
            return;
        }
        self.phase = Phase::Ended(failure.clone());
        self.observed = Observed::default();
        self.pieces.clear();
        self.regions.clear();
        self.wakes.clear();
        self.runnable.clear();
        self.locks = RangeLocks::default();
        let mut users: Vec<_> = self.users.drain().filter(|(_, user)| !user.is_reported).collect();
        users.sort_by_key(|(id, _)| *id);
        for (id, user) in users {
            self.count(user.kind).failures.add(1);
            self.outputs.push_back(Output::Complete { id, result: Err(failure.clone()) });
        }
        self.outputs.push_back(Output::Ended(failure));
    }

    /// The attachment.
    pub fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    fn set_time(&mut self, now: Duration) {
        self.now = self.now.max(now);
    }

    fn serve(&mut self) {
        self.phase = Phase::Serving;
        if let Some(timeout) = self.io_timeout {
            self.wakes.remove(&(timeout, Timer::Attaching));
        }
        self.outputs.push_back(Output::Attached);
    }

    fn count(&self, kind: Kind) -> &KindCounters {
        match kind {
            Kind::Attach => &self.counters.attach,
            Kind::Write => &self.counters.write,
            Kind::Zero => &self.counters.zero,
            Kind::Discard => &self.counters.discard,
            Kind::Read => &self.counters.read,
            Kind::Status => &self.counters.status,
        }
    }

    fn group(&mut self, region: RegionIndex) -> Option<&mut Group> {
        match self.regions.get_mut(&region) {
            Some(Region::Group(group)) => Some(group),
            _ => None,
        }
    }

    /// Requests the creation of a region's group.
    fn request_group(&mut self, region: RegionIndex) {
        if let Some(Region::Creating { wake, .. }) = self.regions.get_mut(&region) {
            *wake = None;
            self.outputs.push_back(Output::CreateGroup { region });
        }
    }

    /// Sends `Attach` to a group, unless one is on its way.
    fn attach(&mut self, region: RegionIndex, after_failures: Option<u32>) {
        let id = self.last_piece + 1;
        match self.group(region) {
            Some(group) if group.attach.is_none() => group.attach = Some(id),
            _ => return,
        }
        self.last_piece = id;
        self.pieces.insert(id, Piece::new(None, Kind::Attach, region, Work::Attach, self.now));
        self.observe_later();
        match after_failures {
            None => self.start(id),
            Some(failures) => {
                let at = self.now + back_off(failures, &mut self.random);
                self.set_wake(id, at, Wake::Copy);
            }
        }
    }

    fn breaks(&self, rule: Rule) -> bool {
        self.broken.is(rule)
    }
}

/// The delay before a retry: doubled with each failure, plus or minus up to a quarter.
fn back_off(failures: u32, random: &mut Random) -> Duration {
    let doubled = LOWEST_DELAY * (1 << failures.saturating_sub(1).min(10));
    doubled.min(GREATEST_DELAY).mul_f64(0.75 + random.below(501) as f64 / 1000.0)
}

#[cfg(test)]
impl Session {
    /// The request that a sending belongs to.
    pub(super) fn owner(&self, id: SendId) -> Option<UserId> {
        self.pieces.get(&id.piece).and_then(|piece| piece.owner)
    }

    /// The things that it keeps: requests, pieces, locks, times, numbers, and waiting pieces.
    pub(super) fn sizes(&self) -> [usize; 6] {
        let mut numbers = 0;
        let mut waiting = 0;
        for region in self.regions.values() {
            match region {
                Region::Creating { waiting: pieces, .. } => waiting += pieces.len(),
                Region::Group(group) => {
                    numbers += group.numbers.len();
                    waiting += group.waiting.len() + group.parked.len();
                }
            }
        }
        let (users, pieces) = (self.users.len(), self.pieces.len());
        [users, pieces, self.locks.len(), self.wakes.len(), numbers, waiting]
    }

    /// The most servers that a piece keeps of one kind.
    pub(super) fn most_servers_of_a_piece(&self) -> usize {
        let counts = self
            .pieces
            .values()
            .flat_map(|piece| [piece.copies.len(), piece.tried.len(), piece.damaged.len()]);
        counts.max().unwrap_or_default()
    }
}
