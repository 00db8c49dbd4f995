//! The client's rights in a request: each handler calls [`Context::authorize`] where Kafka's table
//! of operations and resources requires it.

use std::collections::HashMap;
use std::sync::Arc;

use kafka_protocol::messages::{GroupId, TopicName};
use uuid::Uuid;

use super::Context;
use crate::errors::ApiError;
use crate::groups::{TopicAccess, TopicVisibility};
use crate::security::{Authorizer, Operation, Principal, Requester, Resource, ResourceType};
use crate::topics::{Topic, TopicRef};

impl Context {
    /// Checks that the client may do this with the resource.
    ///
    /// # Errors
    /// [`ApiError::Unauthorized`]
    pub(crate) fn authorize(
        &self,
        operation: Operation,
        resource: Resource<'_>,
    ) -> Result<(), ApiError> {
        let allowed =
            self.ask(|authorizer, requester| authorizer.allows(requester, operation, resource));
        if allowed { Ok(()) } else { Err(ApiError::Unauthorized(resource.kind())) }
    }

    pub(crate) fn may(&self, operation: Operation, resource: Resource<'_>) -> bool {
        self.authorize(operation, resource).is_ok()
    }

    /// Whether the client may do this with any resource of the type.
    pub(crate) fn may_with_some(&self, operation: Operation, kind: ResourceType) -> bool {
        self.ask(|authorizer, requester| authorizer.allows_some(requester, operation, kind))
    }

    /// Asks the authorizer; without one, everything is allowed.
    fn ask(&self, question: impl FnOnce(&Authorizer, &Requester<'_>) -> bool) -> bool {
        let Some(authorizer) = &self.server.authorizer else { return true };
        // Requests of unauthenticated clients are refused earlier, and have no rights here.
        let Some(principal) = self.peer.principal() else { return false };
        let host = self.peer.host.trim_start_matches('/');
        question(authorizer, &Requester { principal: principal.as_str(), host })
    }

    /// The topics that the client may see, for checks during and after this request.
    pub(super) fn visibility(&self) -> TopicVisibility {
        let see = |authorizer: &Arc<Authorizer>| {
            let principal = self.peer.principal().unwrap_or_else(Principal::anonymous);
            let principal = principal.as_str().to_owned();
            let host = self.peer.host.trim_start_matches('/').to_owned();
            let name = match authorizer.names_hosts() {
                true => format!("{host} {principal}"),
                false => principal.clone(),
            };
            let viewer: Arc<dyn TopicAccess> =
                Arc::new(Viewer { authorizer: authorizer.clone(), principal, host, name });
            viewer
        };
        TopicVisibility(self.server.authorizer.as_ref().map(see))
    }

    /// The operations that the client may do with the resource: one bit for each of Kafka's
    /// operation codes.
    pub(crate) fn authorized_operations(&self, resource: Resource<'_>) -> i32 {
        let operations = resource.kind().operations().iter();
        let allowed = operations.filter(|operation| self.may(**operation, resource));
        allowed.fold(0, |bits, operation| bits | 1 << *operation as i32)
    }

    /// The topic, if the client may do this with it. For a name without rights the client does not
    /// learn whether the topic exists.
    pub(crate) fn topic(
        &self,
        operation: Operation,
        wanted: &TopicRef,
    ) -> Result<Arc<Topic>, ApiError> {
        if let TopicRef::Name(name) = wanted {
            self.authorize(operation, Resource::Topic(name))?;
        }
        let topic = self.server.topics.find(wanted)?;
        if let TopicRef::Id(_) = wanted {
            self.authorize(operation, Resource::Topic(&topic.name))?;
        }
        Ok(topic)
    }

    /// Whether a topic with one of these names has this partition and the client may read it. The
    /// result refers to the topic that has the name now, if it `is_meant`, and not to a later topic
    /// of that name.
    pub(super) fn readable_partitions(
        &self,
        names: Vec<TopicName>,
        is_meant: impl Fn(&Topic) -> bool,
    ) -> impl Fn(&str, i32) -> bool {
        let readable = names.into_iter().filter_map(|name| {
            let topic = self.topic(Operation::Read, &TopicRef::Name(Arc::from(&**name))).ok()?;
            is_meant(&topic).then(|| (topic.name.clone(), topic.id))
        });
        let ids: HashMap<Arc<str>, Uuid> = readable.collect();
        move |name, index| {
            let topic = ids.get(name).and_then(|id| self.server.topics.by_id(*id).ok());
            topic.is_some_and(|topic| topic.partition(index).is_some())
        }
    }

    /// The error code for a client that wants to be a member of the group and subscribe to these
    /// topics; 0 if it may.
    pub(super) fn member_code<'a>(
        &self,
        group: &str,
        mut topics: impl Iterator<Item = &'a TopicName>,
    ) -> i16 {
        let may = |topic: &TopicName| self.authorize(Operation::Describe, Resource::Topic(topic));
        let checked = self.authorize(Operation::Read, Resource::Group(group));
        let checked = checked.and_then(|()| topics.try_for_each(may));
        checked.map_or_else(|error| error.code(), |()| 0)
    }

    /// The error code for this operation with the group; 0 if the client may do it.
    pub(super) fn group_code(&self, operation: Operation, group: &str) -> i16 {
        self.authorize(operation, Resource::Group(group)).map_or_else(|error| error.code(), |()| 0)
    }

    /// Removes from `groups` those with which the client may not do this, and returns each with its
    /// error code.
    pub(super) fn remove_refused(
        &self,
        operation: Operation,
        groups: &mut Vec<GroupId>,
    ) -> Vec<(GroupId, i16)> {
        let mut refused = Vec::new();
        groups.retain(|group| match self.group_code(operation, group) {
            0 => true,
            code => {
                refused.push((group.clone(), code));
                false
            }
        });
        refused
    }
}

/// A client whose rights are checked after its request.
struct Viewer {
    authorizer: Arc<Authorizer>,
    principal: String,
    host: String,
    /// The principal, with the host only if ACLs distinguish hosts.
    name: String,
}

impl TopicAccess for Viewer {
    fn viewer(&self) -> &str {
        &self.name
    }

    fn version(&self) -> u64 {
        self.authorizer.version()
    }

    fn is_visible(&self, topic: &str) -> bool {
        let requester = Requester { principal: &self.principal, host: &self.host };
        self.authorizer.allows(&requester, Operation::Describe, Resource::Topic(topic))
    }
}
