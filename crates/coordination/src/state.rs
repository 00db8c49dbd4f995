//! The state of a coordination service, deterministic and without I/O. An operation is planned as
//! a [`Step`], which a file stores before it is applied here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use bytes::Bytes;

use crate::history::{Changed, History, Recorded};
use crate::limits::OVERHEAD_BYTES;
use crate::{
    Change, Changes, Conflict, Entry, Error, Event, Lease, LeaseId, Limits, ListRequest,
    MAX_LEASES, MAX_PAGE_BYTES, Page, Result, Revision, Transaction, check_key, granted_ttl,
};

/// A planned change. At least one of its parts is there.
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    pub(crate) recorded: Option<Recorded>,
    pub(crate) granted: Option<Lease>,
    pub(crate) ended: Option<LeaseId>,
}

/// Where a state is, as a file stores it beside a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    pub(crate) revision: Revision,
    /// The oldest revision that can be listed and watched from.
    pub(crate) oldest: Revision,
    pub(crate) next_lease: LeaseId,
}

#[derive(Debug)]
struct Held {
    ttl: Duration,
    /// The lease has ended from this time on.
    deadline: Duration,
    keys: BTreeSet<String>,
}

#[derive(Debug)]
pub(crate) struct State {
    entries: BTreeMap<String, Entry>,
    bytes: usize,
    leases: BTreeMap<LeaseId, Held>,
    next_lease: LeaseId,
    history: History,
    limits: Limits,
}

impl State {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            entries: BTreeMap::new(),
            bytes: 0,
            leases: BTreeMap::new(),
            next_lease: LeaseId(1),
            history: History::new(Revision(0)),
            limits,
        }
    }

    /// Returns the state that a file held. Its leases live for their whole time from `now` on.
    ///
    /// # Errors
    /// What the parts contradict each other in.
    pub(crate) fn restore(
        limits: Limits,
        entries: Vec<Entry>,
        leases: &[Lease],
        next_lease: LeaseId,
        history: History,
        now: Duration,
    ) -> std::result::Result<Self, String> {
        let mut state = Self { next_lease, history, ..Self::new(limits) };
        state.history.compact(&state.limits);
        for lease in leases {
            if lease.id >= next_lease {
                return Err(format!("lease {} is not below the next one", lease.id));
            }
            state.hold(*lease, now);
        }
        for entry in entries {
            if entry.created > entry.modified || entry.modified > state.revision() {
                return Err(format!("key {} is of a later revision", entry.key));
            }
            if entry.lease.is_some_and(|lease| !state.leases.contains_key(&lease)) {
                return Err(format!("the lease of key {} does not exist", entry.key));
            }
            state.set(&Changed { key: entry.key.clone(), previous: None, entry: Some(entry) });
        }
        Ok(state)
    }

    pub(crate) fn revision(&self) -> Revision {
        self.history.current()
    }

    pub(crate) fn position(&self) -> Position {
        let (oldest, next_lease) = (self.history.oldest(), self.next_lease);
        Position { revision: self.revision(), oldest, next_lease }
    }

    pub(crate) fn get(&self, key: &str) -> Result<Option<Entry>> {
        check_key(key)?;
        Ok(self.entries.get(key).cloned())
    }

    pub(crate) fn list(&self, request: &ListRequest) -> Result<Page> {
        request.check()?;
        let revision = request.at.unwrap_or_else(|| self.revision());
        let was = self.history.undo(revision)?;
        let from = match request.after.as_deref() {
            Some(after) if after >= request.prefix.as_str() => Bound::Excluded(after),
            _ => Bound::Included(request.prefix.as_str()),
        };
        let range = (from, Bound::Unbounded);
        let in_prefix = |key: &str| key.starts_with(&request.prefix);
        let mut now = self
            .entries
            .range::<str, _>(range)
            .take_while(|(key, _)| in_prefix(key))
            .map(|(key, entry)| (key.as_str(), entry))
            .filter(|(key, _)| !was.contains_key(key))
            .peekable();
        let mut then = was
            .range::<str, _>(range)
            .take_while(|(key, _)| in_prefix(key))
            .filter_map(|(key, entry)| entry.map(|entry| (*key, entry)))
            .peekable();
        let mut page = Page { entries: Vec::new(), revision, more: false };
        let mut bytes = 0;
        loop {
            let from_then = match (now.peek(), then.peek()) {
                (None, None) => break,
                (Some((current, _)), Some((old, _))) => old < current,
                (current, _) => current.is_none(),
            };
            if page.entries.len() == request.limit || bytes >= MAX_PAGE_BYTES {
                page.more = true;
                break;
            }
            let next = if from_then { then.next() } else { now.next() };
            let mut entry = next.expect("peeked above").1.clone();
            if request.keys_only {
                entry.value = Bytes::new();
            }
            bytes += entry.key.len() + entry.value.len();
            page.entries.push(entry);
        }
        Ok(page)
    }

    /// Returns the first revision above `after` that changes a key with the prefix, or the current
    /// revision if none does.
    pub(crate) fn changes(
        &self,
        prefix: &str,
        after: Revision,
    ) -> Result<std::result::Result<Changes, Revision>> {
        for recorded in self.history.after(after)? {
            let events: Vec<Event> = recorded
                .changed
                .iter()
                .filter(|one| one.key.starts_with(prefix))
                .map(|one| Event { key: one.key.clone(), entry: one.entry.clone() })
                .collect();
            if !events.is_empty() {
                return Ok(Ok(Changes { revision: recorded.revision, events }));
            }
        }
        Ok(Err(self.revision()))
    }

    /// Plans a transaction, with its answer. There is no step if it changes nothing.
    pub(crate) fn plan_commit(
        &self,
        transaction: &Transaction,
    ) -> Result<(Option<Step>, std::result::Result<Revision, Conflict>)> {
        Ok(match self.plan(transaction)? {
            Err(conflict) => (None, Err(conflict)),
            Ok(None) => (None, Ok(self.revision())),
            Ok(Some(step)) => (Some(step), Ok(self.revision().next())),
        })
    }

    fn plan(
        &self,
        transaction: &Transaction,
    ) -> Result<std::result::Result<Option<Step>, Conflict>> {
        transaction.check()?;
        for guard in &transaction.guards {
            let found = self.entries.get(guard.key());
            if !guard.holds(found) {
                return Ok(Err(Conflict {
                    key: guard.key().to_owned(),
                    found: found.cloned(),
                    revision: self.revision(),
                }));
            }
        }
        let revision = self.revision().next();
        let mut changed = Vec::with_capacity(transaction.changes.len());
        let (mut added, mut removed) = (0, 0);
        for change in &transaction.changes {
            let previous = self.entries.get(change.key()).cloned();
            let entry = match change {
                Change::Put { key, value, lease } => {
                    if let Some(lease) = lease.filter(|lease| !self.leases.contains_key(lease)) {
                        return Err(Error::LeaseNotFound(lease));
                    }
                    let created = previous.as_ref().map_or(revision, |entry| entry.created);
                    let (key, value) = (key.clone(), value.clone());
                    Some(Entry { key, value, created, modified: revision, lease: *lease })
                }
                Change::Delete(_) => None,
            };
            added += entry.as_ref().map_or(0, size);
            removed += previous.as_ref().map_or(0, size);
            if previous.is_some() || entry.is_some() {
                changed.push(Changed { key: change.key().to_owned(), previous, entry });
            }
        }
        // What shrinks the state is allowed even if it is above a bound that was lowered.
        if added > removed && self.bytes - removed + added > self.limits.state_bytes {
            return Err(Error::Full(format!(
                "its keys and values take {} of {} bytes",
                self.bytes, self.limits.state_bytes
            )));
        }
        if changed.is_empty() {
            return Ok(Ok(None));
        }
        let recorded = Recorded { revision, changed: changed.into() };
        Ok(Ok(Some(Step { recorded: Some(recorded), ..Step::default() })))
    }

    pub(crate) fn plan_grant(&self, ttl: Duration) -> Result<(Option<Step>, Lease)> {
        let lease = Lease { id: self.next_lease, ttl: granted_ttl(ttl)? };
        if self.leases.len() >= MAX_LEASES {
            return Err(Error::Full(format!("it has {MAX_LEASES} leases")));
        }
        Ok((Some(Step { granted: Some(lease), ..Step::default() }), lease))
    }

    /// Plans the end of the lease whose time was over first at `now`, if there is one.
    pub(crate) fn plan_expiry(&self, now: Duration) -> Option<Step> {
        let over = self.leases.iter().filter(|(_, held)| held.deadline <= now);
        let (id, _) = over.min_by_key(|(id, held)| (held.deadline, **id))?;
        Some(self.end(*id))
    }

    pub(crate) fn plan_revoke(&self, lease: LeaseId) -> Result<(Option<Step>, ())> {
        if !self.leases.contains_key(&lease) {
            return Err(Error::LeaseNotFound(lease));
        }
        Ok((Some(self.end(lease)), ()))
    }

    fn end(&self, lease: LeaseId) -> Step {
        let changed: Vec<Changed> = self.leases[&lease]
            .keys
            .iter()
            .map(|key| Changed {
                key: key.clone(),
                previous: self.entries.get(key).cloned(),
                entry: None,
            })
            .collect();
        let recorded = (!changed.is_empty())
            .then(|| Recorded { revision: self.revision().next(), changed: changed.into() });
        Step { recorded, ended: Some(lease), ..Step::default() }
    }

    /// Renews a lease. One whose time is over has ended, even if its keys are still there.
    pub(crate) fn keep_alive(&mut self, lease: LeaseId, now: Duration) -> Result<()> {
        match self.leases.get_mut(&lease) {
            Some(held) if now < held.deadline => {
                held.deadline = now + held.ttl;
                Ok(())
            }
            _ => Err(Error::LeaseNotFound(lease)),
        }
    }

    /// Returns the time at which the next lease ends if it is not renewed.
    pub(crate) fn next_expiry(&self) -> Option<Duration> {
        self.leases.values().map(|held| held.deadline).min()
    }

    /// Applies a step that was planned for this state.
    pub(crate) fn apply(&mut self, step: Step, now: Duration) {
        if let Some(recorded) = step.recorded {
            for one in recorded.changed.iter() {
                self.set(one);
            }
            self.history.push(recorded);
            self.history.compact(&self.limits);
        }
        if let Some(lease) = step.granted {
            self.next_lease = LeaseId(lease.id.0.checked_add(1).expect("lease ids are used up"));
            self.hold(lease, now);
        }
        if let Some(lease) = step.ended {
            let held = self.leases.remove(&lease).expect("planned for this state");
            assert!(held.keys.is_empty(), "the keys of an ended lease are gone");
        }
    }

    fn hold(&mut self, lease: Lease, now: Duration) {
        let deadline = now + lease.ttl;
        let held = Held { ttl: lease.ttl, deadline, keys: BTreeSet::new() };
        self.leases.insert(lease.id, held);
    }

    fn set(&mut self, changed: &Changed) {
        let previous = match &changed.entry {
            Some(entry) => self.entries.insert(changed.key.clone(), entry.clone()),
            None => self.entries.remove(&changed.key),
        };
        assert_eq!(previous, changed.previous, "planned for this state");
        if let Some(previous) = previous {
            self.bytes -= size(&previous);
            if let Some(lease) = previous.lease {
                let held = self.leases.get_mut(&lease).expect("a key's lease exists");
                held.keys.remove(&changed.key);
            }
        }
        if let Some(entry) = &changed.entry {
            self.bytes += size(entry);
            if let Some(lease) = entry.lease {
                let held = self.leases.get_mut(&lease).expect("a key's lease exists");
                held.keys.insert(changed.key.clone());
            }
        }
    }
}

fn size(entry: &Entry) -> usize {
    entry.key.len() + entry.value.len() + OVERHEAD_BYTES
}
