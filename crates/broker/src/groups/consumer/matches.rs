//! Which topics members' regular expressions match; of those, each member has only what its client
//! may know of.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kafka_protocol::error::ResponseError;

use super::state::GroupState;
use super::{Fault, bad_regex};
use crate::groups::topics_view::{Sight, TopicsView};
use crate::pattern::{self, Pattern};

/// The matches of all members, as far as they have been needed.
#[derive(Debug, Default)]
pub(super) struct Matches {
    /// Of the topics, and of who may know of which.
    version: Option<(u64, u64)>,
    /// By regular expression and viewer.
    found: HashMap<(String, String), Vec<Arc<str>>>,
    /// Of the members that have come since the start.
    sights: HashMap<Arc<str>, Sight>,
    /// The last one of these. A member that has not come yet is taken to see as much.
    latest: Sight,
    is_changed: bool,
}

impl Matches {
    fn sight(&self, id: &str) -> &Sight {
        self.sights.get(id).unwrap_or(&self.latest)
    }

    fn key(&self, id: &str, regex: &str) -> (String, String) {
        (regex.to_owned(), self.sight(id).viewer().to_owned())
    }

    /// The names that a member's expression matches. `None` as long as that has not been looked at
    /// since the start.
    pub(super) fn names(&self, id: &str, regex: &str) -> Option<&[Arc<str>]> {
        self.found.get(&self.key(id, regex)).map(Vec::as_slice)
    }

    /// A member has come, and sees this.
    pub(super) fn see(&mut self, state: &GroupState, topics: &TopicsView, id: &str, sight: &Sight) {
        let regex = state.members.get(id).and_then(|member| member.profile.regex.clone());
        let is_other = self.sight(id).viewer() != sight.viewer();
        let before = regex.as_deref().filter(|_| is_other);
        let before = before.and_then(|regex| self.names(id, regex)).map(<[_]>::to_vec);
        self.sights.insert(id.into(), sight.clone());
        self.latest = sight.clone();
        if let (Some(regex), Some(before)) = (regex, before) {
            self.update(state, topics);
            self.is_changed |= self.names(id, &regex) != Some(&before);
        }
    }

    /// Whether there may be something else than there was for [`Self::update`], or was the last
    /// time.
    pub(super) fn is_current(&self, topics: &TopicsView) -> bool {
        self.version == Some((topics.version(), self.latest.version())) && !self.is_changed
    }

    /// Match what the members have with the topics, if either, or what is seen of them, has
    /// changed.
    pub(super) fn update(&mut self, state: &GroupState, topics: &TopicsView) {
        let version = (topics.version(), self.latest.version());
        let mut old = HashMap::new();
        if self.version != Some(version) {
            self.version = Some(version);
            old = std::mem::take(&mut self.found);
        }
        for (id, member) in &state.members {
            let Some(regex) = &member.profile.regex else { continue };
            let key = self.key(id, regex);
            if self.found.contains_key(&key) {
                continue;
            }
            let sight = self.sight(id);
            let mut matched = matching(regex, topics).unwrap_or_else(|error| {
                // It was checked when it came: there were other topics then, or another version of
                // the server.
                tracing::warn!(regex, error, "a regular expression of a group matches nothing");
                Vec::new()
            });
            matched.retain(|name| sight.sees(name));
            self.is_changed |= old.get(&key).is_some_and(|old| *old != matched);
            self.found.insert(key, matched);
        }
    }

    /// Whether a member's matches are others than when this was asked the last time.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// Forget what no member has.
    pub(super) fn keep_only(&mut self, state: &GroupState) {
        self.sights.retain(|id, _| state.members.contains_key(id));
        let members = state.members.iter();
        let used = members.filter_map(|(id, member)| {
            member.profile.regex.as_deref().map(|regex| self.key(id, regex))
        });
        let used: BTreeSet<_> = used.collect();
        self.found.retain(|key, _| used.contains(key));
    }

    /// An estimate of the memory that it takes.
    pub(super) fn size_bytes(&self) -> usize {
        let found = self.found.iter();
        found.map(|((regex, viewer), names)| regex.len() + viewer.len() + names.len() * 16).sum()
    }
}

/// The names of the topics that an expression matches.
///
/// # Errors
/// Why it is none, or that it takes too long to match.
pub(super) fn matching(regex: &str, topics: &TopicsView) -> Result<Vec<Arc<str>>, String> {
    Pattern::new(regex)?.matching(topics.names()).map_err(|costly| costly.to_string())
}

/// What no group is needed for to see that it is no regular expression.
pub(in crate::groups) fn check_regex(regex: &str) -> Result<(), Fault> {
    if regex.len() > pattern::MAX_BYTES {
        let (len, most) = (regex.len(), pattern::MAX_BYTES);
        return Err(Fault::new(
            ResponseError::InvalidRegularExpression,
            format!("SubscribedTopicRegex has at most {most} bytes, this one {len}."),
        ));
    }
    Pattern::new(regex).map(drop).map_err(|error| bad_regex(regex, &error))
}
