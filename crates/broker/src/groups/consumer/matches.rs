//! The topics that members' regular expressions match. Each member gets only those that its client
//! may describe.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kafka_protocol::error::ResponseError;

use super::state::GroupState;
use super::{Fault, bad_regex};
use crate::groups::topics_view::{TopicVisibility, TopicsView};
use crate::pattern::{self, Pattern};

/// The matches of all members, as far as they have been needed.
#[derive(Debug, Default)]
pub(super) struct Matches {
    /// Versions of the topics, and of their visibility.
    version: Option<(u64, u64)>,
    /// By regular expression and viewer.
    found: HashMap<(String, String), Vec<Arc<str>>>,
    /// Visibility for the members that have sent a heartbeat since the start.
    visibilities: HashMap<Arc<str>, TopicVisibility>,
    /// The latest of these. Used for members that have not sent a heartbeat yet.
    latest: TopicVisibility,
    is_changed: bool,
}

impl Matches {
    fn visibility(&self, id: &str) -> &TopicVisibility {
        self.visibilities.get(id).unwrap_or(&self.latest)
    }

    fn key(&self, id: &str, regex: &str) -> (String, String) {
        (regex.to_owned(), self.visibility(id).viewer().to_owned())
    }

    /// The names that a member's expression matches. `None` if it has not been matched since the
    /// start.
    pub(super) fn names(&self, id: &str, regex: &str) -> Option<&[Arc<str>]> {
        self.found.get(&self.key(id, regex)).map(Vec::as_slice)
    }

    /// Records the topic visibility of a member that has sent a heartbeat.
    pub(super) fn set_visibility(
        &mut self,
        state: &GroupState,
        topics: &TopicsView,
        id: &str,
        visibility: &TopicVisibility,
    ) {
        let regex = state.members.get(id).and_then(|member| member.profile.regex.clone());
        let is_other = self.visibility(id).viewer() != visibility.viewer();
        let before = regex.as_deref().filter(|_| is_other);
        let before = before.and_then(|regex| self.names(id, regex)).map(<[_]>::to_vec);
        self.visibilities.insert(id.into(), visibility.clone());
        self.latest = visibility.clone();
        if let (Some(regex), Some(before)) = (regex, before) {
            self.update(state, topics);
            self.is_changed |= self.names(id, &regex) != Some(&before);
        }
    }

    /// Whether topics and visibility are those of the last [`Self::update`], and all changes of
    /// matches were taken ([`Self::take_changed`]).
    pub(super) fn is_current(&self, topics: &TopicsView) -> bool {
        self.version == Some((topics.version(), self.latest.version())) && !self.is_changed
    }

    /// Matches the members' expressions with the topics, if expressions, topics or visibility have
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
            let visibility = self.visibility(id);
            let mut matched = matching(regex, topics).unwrap_or_else(|error| {
                // It was checked when the member sent it, with other topics or by another version
                // of the server.
                tracing::warn!(
                    regex,
                    error,
                    "regular expression of a group failed, it matches nothing"
                );
                Vec::new()
            });
            matched.retain(|name| visibility.is_visible(name));
            self.is_changed |= old.get(&key).is_some_and(|old| *old != matched);
            self.found.insert(key, matched);
        }
    }

    /// Whether matches of any member have changed since the last call.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.is_changed)
    }

    /// Removes entries that no member uses.
    pub(super) fn keep_only(&mut self, state: &GroupState) {
        self.visibilities.retain(|id, _| state.members.contains_key(id));
        let members = state.members.iter();
        let used = members.filter_map(|(id, member)| {
            member.profile.regex.as_deref().map(|regex| self.key(id, regex))
        });
        let used: BTreeSet<_> = used.collect();
        self.found.retain(|key, _| used.contains(key));
    }

    /// Estimated memory.
    pub(super) fn size_bytes(&self) -> usize {
        let found = self.found.iter();
        found.map(|((regex, viewer), names)| regex.len() + viewer.len() + names.len() * 16).sum()
    }
}

/// Returns the names of the topics that an expression matches.
///
/// # Errors
/// Why it is invalid, or that it takes too long to match.
pub(super) fn matching(regex: &str, topics: &TopicsView) -> Result<Vec<Arc<str>>, String> {
    Pattern::new(regex)?.matching(topics.names()).map_err(|costly| costly.to_string())
}

/// Checks a regular expression as far as no group is needed.
pub(in crate::groups) fn check_regex(regex: &str) -> Result<(), Fault> {
    if regex.len() > pattern::MAX_BYTES {
        let (len, most) = (regex.len(), pattern::MAX_BYTES);
        return Err(Fault::new(
            ResponseError::InvalidRegularExpression,
            format!("SubscribedTopicRegex must have at most {most} bytes, but has {len}."),
        ));
    }
    Pattern::new(regex).map(drop).map_err(|error| bad_regex(regex, &error))
}
