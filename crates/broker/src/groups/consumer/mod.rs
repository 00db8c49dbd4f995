//! One consumer group of KIP-848, decided purely: the server assigns, and each member follows in
//! its own time.
//!
//! Nothing here reads a clock, locks, waits or writes. An event takes the time and the topics as
//! arguments and changes the state by [`Change`]s alone ([`state`]), which pile up in
//! [`ConsumerGroup::unwritten`] until they are in line for the disk. The registry sees to it that
//! nobody is told of a change that is not durable.
//!
//! ```text
//!   a member comes, goes or          all members'                 this member's
//!   subscribes, a topic changes      targets                      epoch and partitions
//!   -------------------------->      -------->                    ------------------->
//!          group epoch + 1           target epoch = group epoch   reconcile::next
//! ```
//!
//! A partition is given to a member only when nobody else has it or may still have it
//! (`GroupState::owners`), so two members never have it at once, whatever became of the answers.

mod assignor;
mod classic;
mod format;
mod matches;
mod reconcile;
mod state;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kafka_protocol::error::ResponseError;
use uuid::Uuid;

use super::topics_view::{Sight, TopicsView};
pub(super) use assignor::Assignor;
use assignor::Subscriber;
use classic::Classic;
pub(crate) use format::GroupStates;
pub(super) use format::{encode_changes, encode_deletion};
pub(super) use matches::check_regex;
use matches::{Matches, matching};
pub(super) use state::{
    Assignment, GroupState, LEFT_FOR_A_WHILE, MEMBER_BYTES, Member, assigned_bytes,
    assignment_bytes, owned_bytes,
};
use state::{Change, Current, Profile, Progress};

/// Bound on the different ones in a group: each is matched with all topics when one of these
/// changes.
const MAX_REGEXES: usize = 64;

/// How long changes that the disk has no room for wait for the next attempt, if nobody comes
/// before.
const RETRY_WRITE: Duration = Duration::from_secs(1);

/// What the configuration says about one group.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConsumerRules {
    pub(super) session_timeout: Duration,
    pub(super) max_members: usize,
}

/// A heartbeat. What is `None` has not changed.
#[derive(Clone, Debug, Default)]
pub(super) struct Beat {
    /// The client's, or one that was made for it; not empty.
    pub(super) member_id: String,
    /// 0 to join, not negative.
    pub(super) epoch: i32,
    pub(super) instance_id: Option<String>,
    pub(super) rack_id: Option<String>,
    pub(super) rebalance_timeout_ms: Option<i32>,
    pub(super) topics: Option<BTreeSet<String>>,
    /// Empty: none.
    pub(super) regex: Option<String>,
    pub(super) assignor: Option<String>,
    /// What the member has.
    pub(super) owned: Option<Assignment>,
    pub(super) client_id: String,
    pub(super) client_host: String,
    /// The topics that the client may know of.
    pub(super) sight: Sight,
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) member_id: String,
    pub(super) epoch: i32,
    /// All that the member has now, if it may not know.
    pub(super) assignment: Option<Assignment>,
}

/// Why a request was refused; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) error: ResponseError,
    pub(crate) message: String,
}

impl Fault {
    pub(super) fn new(error: ResponseError, message: impl Into<String>) -> Self {
        Self { error, message: message.into() }
    }
}

/// The state of a group, as Kafka names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Empty,
    Assigning,
    Reconciling,
    Stable,
}

impl Phase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Empty => "Empty",
            Self::Assigning => "Assigning",
            Self::Reconciling => "Reconciling",
            Self::Stable => "Stable",
        }
    }
}

/// When a member is given up.
#[derive(Clone, Copy, Debug)]
struct Deadlines {
    /// It has sent no heartbeat.
    session: Instant,
    /// It has not given up what it was told to.
    revocation: Option<Instant>,
}

/// One group.
#[derive(Debug)]
pub(super) struct ConsumerGroup {
    state: GroupState,
    /// Changes of the state that are not in line for the disk yet, in order.
    unwritten: Vec<Change>,
    /// While there are some: when to try again.
    retry_at: Instant,
    deadlines: BTreeMap<Arc<str>, Deadlines>,
    /// The members that speak the classic protocol.
    classic: BTreeMap<Arc<str>, Classic>,
    /// Members of before a restart that have not said since what they are able to do. One that has
    /// sent a heartbeat of the classic protocol has to join again until then.
    unheard: BTreeMap<Arc<str>, Option<Instant>>,
    /// Of members of which nothing else is known.
    session_timeout: Duration,
    empty_since: Instant,
    /// The state was compared with the topics of the version that is matched.
    is_compared: bool,
    matches: Matches,
}

impl ConsumerGroup {
    /// A group without members, or one as it was before a restart: its members have a whole session
    /// to come again.
    pub(super) fn new(state: GroupState, rules: ConsumerRules, now: Instant) -> Self {
        let deadlines = |(id, member): (&Arc<str>, &Member)| {
            let revocation = revocation_deadline(member, now);
            (Arc::clone(id), Deadlines { session: now + rules.session_timeout, revocation })
        };
        Self {
            deadlines: state.members.iter().map(deadlines).collect(),
            classic: BTreeMap::new(),
            unheard: state.members.keys().map(|id| (Arc::clone(id), None)).collect(),
            session_timeout: rules.session_timeout,
            state,
            unwritten: Vec::new(),
            retry_at: now,
            empty_since: now,
            is_compared: false,
            matches: Matches::default(),
        }
    }

    // ---- what it is ----

    pub(super) fn state(&self) -> &GroupState {
        &self.state
    }

    pub(super) fn is_empty(&self) -> bool {
        self.state.members.is_empty()
    }

    /// Since when it has no members, if it has none.
    pub(super) fn vacant_since(&self) -> Option<Instant> {
        self.is_empty().then_some(self.empty_since)
    }

    pub(super) fn phase(&self) -> Phase {
        let state = &self.state;
        if self.is_empty() {
            Phase::Empty
        } else if state.epoch > state.target_epoch {
            Phase::Assigning
        } else if state
            .members
            .values()
            .all(|member| is_settled(&member.current, state.target_epoch))
        {
            Phase::Stable
        } else {
            Phase::Reconciling
        }
    }

    /// What one of its members takes in memory, about.
    pub(super) fn member_bytes(&self, id: &str, instance_id: Option<&str>) -> Option<usize> {
        let id = instance_id.and_then(|id| self.state.static_members.get(id)).map_or(id, |id| id);
        let member = self.state.members.get(id)?;
        Some(member.size_bytes(id) + self.classic.get(id).map_or(0, Classic::size_bytes))
    }

    /// Whether it is a member that has subscribed to just these topics, and to this expression if
    /// it says one.
    pub(super) fn subscribes_to(
        &self,
        id: &str,
        topics: Option<&BTreeSet<String>>,
        regex: Option<&str>,
    ) -> bool {
        self.state.members.get(id).is_some_and(|member| {
            let Profile { topics: known, regex: known_regex, .. } = &member.profile;
            topics.is_none_or(|topics| topics == known)
                && regex.is_none_or(|regex| regex == known_regex.as_deref().unwrap_or_default())
        })
    }

    /// An estimate of the memory that the members take.
    pub(super) fn size_bytes(&self) -> usize {
        let classic: usize = self.classic.values().map(Classic::size_bytes).sum();
        self.state.size_bytes + self.matches.size_bytes() + classic
    }

    /// The next moment at which [`Self::tick`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if !self.unwritten.is_empty() {
            return Some(self.retry_at);
        }
        let deadlines = self.deadlines.values();
        let deadlines = deadlines.flat_map(|at| [Some(at.session), at.revocation]);
        let joins = self.classic.values().map(|classic| classic.due);
        deadlines.chain(joins).chain(self.unheard.values().copied()).flatten().min()
    }

    /// The assignor that most members vote for.
    pub(super) fn assignor(&self) -> Assignor {
        let mut votes = [0_usize; Assignor::ALL.len()];
        for member in self.state.members.values() {
            let voted = member.profile.assignor.as_deref().and_then(Assignor::by_name);
            if let Some(at) = Assignor::ALL.into_iter().position(|one| Some(one) == voted) {
                votes[at] += 1;
            }
        }
        // `max_by_key` takes the last of equals, so look from the end.
        let most = votes.into_iter().enumerate().rev().max_by_key(|(_, votes)| *votes);
        most.map_or(Assignor::Uniform, |(at, _)| Assignor::ALL[at])
    }

    /// The names of the topics that members have subscribed to. `None` as long as a regular
    /// expression has not been matched since the start.
    pub(super) fn subscribed_names(&self) -> Option<HashSet<String>> {
        let members = || self.state.members.iter();
        let mut patterns =
            members().filter_map(|(id, member)| Some((id, member.profile.regex.as_deref()?)));
        let are_matched = patterns.all(|(id, regex)| self.matches.names(id, regex).is_some());
        are_matched.then(|| {
            members()
                .flat_map(|(id, member)| self.names_of(id, member))
                .map(str::to_owned)
                .collect()
        })
    }

    // ---- the way to the disk ----

    /// What is to be written, in order.
    pub(super) fn unwritten(&self) -> &[Change] {
        &self.unwritten
    }

    /// The first of them are in line.
    pub(super) fn written(&mut self, changes: usize) {
        self.unwritten.drain(..changes);
    }

    /// There was no room for them.
    pub(super) fn not_written(&mut self, now: Instant) {
        self.retry_at = now + RETRY_WRITE;
    }

    // ---- events ----

    /// A heartbeat that joins, goes on, or changes the subscription.
    pub(super) fn heartbeat(
        &mut self,
        now: Instant,
        rules: ConsumerRules,
        topics: &TopicsView,
        beat: &Beat,
    ) -> Result<Answer, Fault> {
        let found = self.find(beat)?;
        if found.is_none() && self.state.members.len() >= rules.max_members {
            return Err(Fault::new(
                ResponseError::GroupMaxSizeReached,
                format!(
                    "The consumer group has reached its maximum capacity of {} members.",
                    rules.max_members
                ),
            ));
        }
        if let Some(regex) = beat.regex.as_deref().filter(|regex| !regex.is_empty()) {
            self.check_regexes(regex, topics)?;
        }
        // From here on nothing fails.
        let id = beat.member_id.as_str();
        let is_joining = beat.epoch == 0;
        match found {
            Some(other) if *other != *id => self.rename(&other, id),
            Some(_) if is_joining => self.begin_again(id),
            _ => {}
        }
        self.classic.remove(id);
        self.unheard.remove(id);
        let before = self.state.members.get(id).map(|member| member.current.clone());
        self.matches.see(&self.state, topics, id, &beat.sight);
        self.go_towards_epoch(beat, topics);
        self.reconcile(now, rules, id, beat.owned.as_ref());
        let Some(member) = self.state.members.get(id) else {
            unreachable!("the heartbeat's member was found or has joined");
        };
        let is_full = beat.rebalance_timeout_ms.is_some()
            && (beat.topics.is_some() || beat.regex.is_some())
            && beat.owned.is_some();
        let is_told = is_joining
            || is_full
            || before.is_none_or(|before| {
                // With the former epoch the last answer was lost.
                before.epoch != beat.epoch || before.assigned != member.current.assigned
            });
        Ok(Answer {
            member_id: id.to_owned(),
            epoch: member.current.epoch,
            assignment: is_told.then(|| member.current.assigned.clone()),
        })
    }

    /// A member leaves, for a while if it is a static one that says so.
    pub(super) fn leave(
        &mut self,
        now: Instant,
        id: &str,
        instance_id: Option<&str>,
        is_for_a_while: bool,
    ) -> Result<(), Fault> {
        if let Some(instance_id) = instance_id {
            self.check_instance(id, instance_id)?;
        }
        let member = self.state.members.get(id).ok_or_else(|| unknown_member(id))?;
        if is_for_a_while {
            let current = Current {
                epoch: LEFT_FOR_A_WHILE,
                progress: Progress::Stable,
                revoking: Assignment::new(),
                ..member.current.clone()
            };
            self.change(Change::Current { id: id.to_owned(), current });
            if let Some(deadlines) = self.deadlines.get_mut(id) {
                deadlines.revocation = None;
            }
        } else {
            self.remove(now, id);
        }
        Ok(())
    }

    /// Time has passed: give up who is due. The ids of those, and why.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<(Arc<str>, &'static str)> {
        if !self.unwritten.is_empty() {
            return Vec::new();
        }
        let due = self.deadlines.iter().filter_map(|(id, deadlines)| {
            if deadlines.session <= now {
                Some((Arc::clone(id), "its session timed out"))
            } else if deadlines.revocation.is_some_and(|at| at <= now) {
                Some((Arc::clone(id), "it did not give up partitions within the rebalance timeout"))
            } else if self.join_deadline(id).is_some_and(|at| at <= now) {
                Some((Arc::clone(id), "it did not rejoin, or sync, within the rebalance timeout"))
            } else {
                None
            }
        });
        let due: Vec<_> = due.collect();
        for (id, _) in &due {
            self.remove(now, id);
        }
        due
    }

    /// When a member is given up that has been told to join again, or has joined and is to send a
    /// SyncGroup.
    fn join_deadline(&self, id: &str) -> Option<Instant> {
        self.classic.get(id).map_or_else(|| *self.unheard.get(id)?, |classic| classic.due)
    }

    /// May a member commit offsets of these partitions with this epoch? With its present one of
    /// any; with an older one of those that it has had since then, or may still have (KIP-1251):
    /// nobody else can have committed for them meanwhile, and the answer that told of the newer
    /// epoch may not have come yet.
    ///
    /// # Errors
    /// As [`Self::check_epoch`].
    pub(super) fn check_commit(
        &self,
        id: &str,
        epoch: i32,
        mut partitions: impl Iterator<Item = Option<(Uuid, i32)>>,
    ) -> Result<(), ResponseError> {
        let checked = self.check_epoch(id, epoch);
        let is_older = || {
            let member = self.state.members.get(id);
            member.is_some_and(|member| (1..member.current.epoch).contains(&epoch))
        };
        let has_had = |partition: Option<(Uuid, i32)>| {
            let since = partition.and_then(|partition| self.state.since(id, partition));
            since.is_some_and(|since_epoch| since_epoch <= epoch)
        };
        match checked {
            Err(ResponseError::StaleMemberEpoch) if is_older() && partitions.all(has_had) => Ok(()),
            checked => checked,
        }
    }

    /// May a member fetch offsets with this epoch, or commit those of any partition?
    ///
    /// # Errors
    /// UNKNOWN_MEMBER_ID; STALE_MEMBER_EPOCH, or ILLEGAL_GENERATION for one that speaks the classic
    /// protocol.
    pub(super) fn check_epoch(&self, id: &str, epoch: i32) -> Result<(), ResponseError> {
        let member = self.state.members.get(id).ok_or(ResponseError::UnknownMemberId)?;
        match member.current.epoch == epoch {
            true => Ok(()),
            false if self.is_classic(id) => Err(ResponseError::IllegalGeneration),
            false => Err(ResponseError::StaleMemberEpoch),
        }
    }

    // ---- checks ----

    /// The member that a heartbeat is about, under the id that it has in the state; `None` if it is
    /// a new one.
    fn find(&self, beat: &Beat) -> Result<Option<Arc<str>>, Fault> {
        let id = beat.member_id.as_str();
        let known = self.state.members.get_key_value(id);
        if beat.epoch > 0 {
            if let Some(instance_id) = &beat.instance_id {
                self.check_instance(id, instance_id)?;
            }
            let (key, member) = known.ok_or_else(|| unknown_member(id))?;
            check_member_epoch(member, beat)?;
            return Ok(Some(Arc::clone(key)));
        }
        let holder = beat.instance_id.as_ref().and_then(|id| self.state.static_members.get(id));
        if let Some(holder) = holder
            && **holder != *id
        {
            let has_left = self
                .state
                .members
                .get(holder)
                .is_some_and(|member| member.current.epoch == LEFT_FOR_A_WHILE);
            // A static member of the classic protocol says nothing when it is stopped: whoever
            // comes is the one that was restarted. After a restart of the server it is known by its
            // heartbeat.
            let heard = self.unheard.get(holder);
            let is_classic = self.is_classic(holder) || matches!(heard, Some(Some(_)));
            if !has_left && !is_classic {
                let instance_id = beat.instance_id.as_deref().unwrap_or_default();
                // Clients give up on the error for what is owned, and may come again after the
                // other.
                let error = match heard {
                    Some(_) => ResponseError::CoordinatorLoadInProgress,
                    None => ResponseError::UnreleasedInstanceId,
                };
                return Err(Fault::new(
                    error,
                    format!(
                        "Static member {id} with instance id {instance_id} cannot join the group because the instance id is owned by {holder} member."
                    ),
                ));
            }
            return Ok(Some(Arc::clone(holder)));
        }
        Ok(known.map(|(key, _)| Arc::clone(key)))
    }

    fn check_instance(&self, id: &str, instance_id: &str) -> Result<(), Fault> {
        match self.state.static_members.get(instance_id) {
            None => Err(Fault::new(
                ResponseError::UnknownMemberId,
                format!("Instance id {instance_id} is unknown."),
            )),
            Some(holder) if **holder != *id => Err(Fault::new(
                ResponseError::FencedInstanceId,
                format!(
                    "Static member {id} with instance id {instance_id} was fenced by member {holder}."
                ),
            )),
            Some(_) => Ok(()),
        }
    }

    fn check_regexes(&self, more: &str, topics: &TopicsView) -> Result<(), Fault> {
        let used: BTreeSet<&str> =
            self.state.members.values().filter_map(|m| m.profile.regex.as_deref()).collect();
        if used.contains(more) {
            return Ok(());
        }
        if used.len() < MAX_REGEXES {
            return matching(more, topics).map(drop).map_err(|error| bad_regex(more, &error));
        }
        Err(bad_regex(
            more,
            &format!("the members of a group have at most {MAX_REGEXES} different ones"),
        ))
    }

    // ---- steps ----

    /// Take over what a heartbeat says of its member, and compute the targets anew if that, or
    /// something else, made a new group epoch.
    fn go_towards_epoch(&mut self, beat: &Beat, topics: &TopicsView) {
        // A member that is gone has made an epoch, too.
        let subscribes = self.update_profile(&beat.member_id, beat);
        let mut is_new_epoch = subscribes || self.state.epoch > self.state.target_epoch;
        is_new_epoch |= self.compare_topics(topics, is_new_epoch);
        if self.state.epoch > self.state.target_epoch {
            self.assign(topics);
        }
        if is_new_epoch {
            self.matches.keep_only(&self.state);
        }
    }

    /// The one way by which the state changes.
    fn change(&mut self, change: Change) {
        self.state.apply(&change);
        self.unwritten.push(change);
    }

    fn next_epoch(&self) -> i32 {
        self.state.epoch.saturating_add(1)
    }

    fn rename(&mut self, from: &str, to: &str) {
        if self.state.members.contains_key(to) {
            // It was a member of its own, under the id that it now has in another's place.
            self.change(Change::Removed { group_epoch: self.next_epoch(), id: to.to_owned() });
        }
        self.change(Change::Renamed { from: from.to_owned(), to: to.to_owned() });
        self.deadlines.remove(from);
        self.classic.remove(from);
        self.unheard.remove(from);
    }

    /// A member that joins has nothing, whatever it had. Kafka fences it as long as its former self
    /// lives; but that has no other client.
    fn begin_again(&mut self, id: &str) {
        let Some(member) = self.state.members.get(id) else { return };
        if member.current != Current::default() {
            self.change(Change::Current { id: id.to_owned(), current: Current::default() });
        }
    }

    /// Take over what the heartbeat says of the member; whether that made a new group epoch.
    fn update_profile(&mut self, id: &str, beat: &Beat) -> bool {
        let before = self.state.members.get(id).map(|member| &member.profile);
        let old = before.cloned().unwrap_or_default();
        let regex = beat.regex.clone().map(|regex| (!regex.is_empty()).then_some(regex));
        let new = Profile {
            instance_id: beat.instance_id.clone().or(old.instance_id.clone()),
            rack_id: beat.rack_id.clone().or(old.rack_id.clone()),
            client_id: beat.client_id.clone(),
            client_host: beat.client_host.clone(),
            rebalance_timeout_ms: beat.rebalance_timeout_ms.unwrap_or(old.rebalance_timeout_ms),
            topics: beat.topics.clone().unwrap_or_else(|| old.topics.clone()),
            regex: regex.unwrap_or_else(|| old.regex.clone()),
            assignor: beat.assignor.clone().or(old.assignor.clone()),
        };
        let subscribes = before.is_none() || new.topics != old.topics || new.regex != old.regex;
        if before.is_none() || new != old {
            let group_epoch = if subscribes { self.next_epoch() } else { self.state.epoch };
            self.change(Change::Joined { group_epoch, id: id.to_owned(), profile: new });
        }
        subscribes
    }

    /// Look whether the topics that the members have subscribed to are what they were; whether that
    /// made a new group epoch.
    fn compare_topics(&mut self, topics: &TopicsView, is_new_epoch: bool) -> bool {
        if !is_new_epoch && self.is_compared && self.matches.is_current(topics) {
            return false;
        }
        self.is_compared = true;
        self.matches.update(&self.state, topics);
        let hash = hash(&self.subscribed(topics));
        if !self.matches.take_changed() && hash == self.state.topics_hash {
            return false;
        }
        let group_epoch = if is_new_epoch { self.state.epoch } else { self.next_epoch() };
        self.change(Change::Topics { group_epoch, hash });
        true
    }

    /// The topics that exist of those that any member has subscribed to, in order.
    fn subscribed(&self, topics: &TopicsView) -> Vec<(Uuid, u32)> {
        let names = self.state.members.iter().flat_map(|(id, member)| self.names_of(id, member));
        let names: BTreeSet<&str> = names.collect();
        names.into_iter().filter_map(|name| topics.get(name)).collect()
    }

    fn names_of<'a>(&'a self, id: &str, member: &'a Member) -> impl Iterator<Item = &'a str> {
        let Profile { topics, regex, .. } = &member.profile;
        let matched = regex.as_ref().and_then(|regex| self.matches.names(id, regex));
        let matched = matched.into_iter().flatten().map(|name| &**name);
        topics.iter().map(String::as_str).chain(matched)
    }

    /// Compute the targets of the group's epoch.
    fn assign(&mut self, topics: &TopicsView) {
        self.matches.update(&self.state, topics);
        let table = self.subscribed(topics);
        let index: HashMap<Uuid, usize> =
            table.iter().enumerate().map(|(at, (id, _))| (*id, at)).collect();
        let subscriptions = self.state.members.iter().map(|(id, member)| {
            let names = self.names_of(id, member);
            let found = names.filter_map(|name| index.get(&topics.get(name)?.0).copied());
            found.collect::<BTreeSet<usize>>().into_iter().collect::<Vec<usize>>()
        });
        let subscriptions: Vec<Vec<usize>> = subscriptions.collect();
        let members: Vec<Subscriber<'_>> = self
            .state
            .members
            .iter()
            .zip(&subscriptions)
            .map(|((id, member), topics)| Subscriber {
                id,
                instance_id: member.profile.instance_id.as_deref(),
                topics,
                previous: &member.target,
            })
            .collect();
        let targets = self.assignor().assign(&table, &members);
        let old = self.state.members.iter();
        let changed = old.zip(targets).filter(|((_, member), target)| member.target != *target);
        let changes: Vec<Change> = changed
            .map(|((id, _), target)| Change::Target { id: id.to_string(), target })
            .collect();
        for change in changes {
            self.change(change);
        }
        self.change(Change::Targeted { epoch: self.state.epoch });
    }

    /// Move a member on towards its target, and begin its times anew.
    fn reconcile(
        &mut self,
        now: Instant,
        rules: ConsumerRules,
        id: &str,
        owned: Option<&Assignment>,
    ) {
        let state = &self.state;
        let Some((key, member)) = state.members.get_key_value(id) else { return };
        let key = Arc::clone(key);
        if !is_settled(&member.current, state.target_epoch) {
            let is_free = |topic, partition| {
                state.owners.get(&(topic, partition)).is_none_or(|owner| owner.id == key)
            };
            let next = reconcile::next(
                &member.current,
                &member.target,
                state.target_epoch,
                owned,
                is_free,
            );
            if next != member.current {
                self.change(Change::Current { id: id.to_owned(), current: next });
                self.deadlines.remove(id);
            }
        }
        let Some(member) = self.state.members.get(id) else { return };
        let kept = self.deadlines.get(id).and_then(|deadlines| deadlines.revocation);
        let revocation = kept.or_else(|| revocation_deadline(member, now));
        self.deadlines.insert(key, Deadlines { session: now + rules.session_timeout, revocation });
    }

    fn remove(&mut self, now: Instant, id: &str) {
        self.change(Change::Removed { group_epoch: self.next_epoch(), id: id.to_owned() });
        self.deadlines.remove(id);
        self.classic.remove(id);
        self.unheard.remove(id);
        if self.is_empty() {
            self.empty_since = now;
            self.matches = Matches::default();
        }
    }
}

fn bad_regex(regex: &str, why: &dyn std::fmt::Display) -> Fault {
    Fault::new(
        ResponseError::InvalidRegularExpression,
        format!("SubscribedTopicRegex `{regex}` is not a valid regular expression: {why}."),
    )
}

/// FNV-1a. It is stored, so it must not depend on the version of a library.
fn hash(topics: &[(Uuid, u32)]) -> u64 {
    let bytes = topics
        .iter()
        .flat_map(|(id, partitions)| id.into_bytes().into_iter().chain(partitions.to_le_bytes()));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn is_settled(current: &Current, target_epoch: i32) -> bool {
    current.progress == Progress::Stable && current.epoch == target_epoch
}

fn revocation_deadline(member: &Member, now: Instant) -> Option<Instant> {
    let is_revoking = member.current.progress == Progress::Revoking;
    is_revoking.then(|| now + rebalance_timeout(member))
}

fn rebalance_timeout(member: &Member) -> Duration {
    Duration::from_millis(u64::try_from(member.profile.rebalance_timeout_ms).unwrap_or(0))
}

fn check_member_epoch(member: &Member, beat: &Beat) -> Result<(), Fault> {
    let known = member.current.epoch;
    let comparison = match beat.epoch.cmp(&known) {
        std::cmp::Ordering::Equal => return Ok(()),
        std::cmp::Ordering::Greater => "greater",
        // The answer with the newer epoch may have been lost.
        std::cmp::Ordering::Less
            if beat.epoch == member.current.previous_epoch
                && is_subset(beat.owned.as_ref(), &member.current.assigned) =>
        {
            return Ok(());
        }
        std::cmp::Ordering::Less => "smaller",
    };
    Err(Fault::new(
        ResponseError::FencedMemberEpoch,
        format!(
            "The consumer group member has a {comparison} member epoch ({}) than the one known by the group coordinator ({known}). \
             The member must abandon all its partitions and rejoin.",
            beat.epoch
        ),
    ))
}

fn is_subset(owned: Option<&Assignment>, assigned: &Assignment) -> bool {
    owned.is_some_and(|owned| {
        owned.iter().all(|(topic, partitions)| {
            partitions.is_empty()
                || assigned.get(topic).is_some_and(|has| partitions.is_subset(has))
        })
    })
}

fn unknown_member(id: &str) -> Fault {
    Fault::new(ResponseError::UnknownMemberId, format!("Member {id} is not a member of the group."))
}

#[cfg(test)]
mod tests;
