//! ListGroups, DescribeGroups, and deletion.

use std::collections::HashMap;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::describe_groups_response::{DescribedGroup, DescribedGroupMember};
use kafka_protocol::messages::list_groups_response::ListedGroup;
use kafka_protocol::messages::{
    DescribeGroupsRequest, DescribeGroupsResponse, GroupId, ListGroupsRequest, ListGroupsResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::commits::Blocked;
use super::group::{Description, State};
use super::live::LiveGroup;
use super::offset_log::{Appended, Prepared, Refused};
use super::offsets::Record;
use super::registry::Slot;
use super::{Groups, Shared};
use crate::wire::once;

impl Groups {
    /// Handles ListGroups, versions 0 to 5. Filters ignore case; an empty filter matches
    /// everything.
    pub async fn list(&self, request: ListGroupsRequest, version: i16) -> ListGroupsResponse {
        let response = ListGroupsResponse::default();
        if let Err(error) = self.shared.check_open() {
            return response.with_error_code(error.code());
        }
        let mut types = Filter::new(&request.types_filter);
        let mut states = Filter::new(&request.states_filter);
        let mut groups = Vec::new();
        for slot in self.shared.registry.all() {
            let found = self.shared.registry.peek(&slot, |group, _| {
                let protocol_type = match group {
                    LiveGroup::Classic(group) => group.protocol_type().cloned().unwrap_or_default(),
                    LiveGroup::Consumer(_) => StrBytes::from_static_str("consumer"),
                    LiveGroup::Share(_) => StrBytes::from_static_str("share"),
                };
                let found = (group.type_name(), group.state_name(), protocol_type);
                (!group.is_dead()).then_some(found)
            });
            let Some((kind, state, protocol_type)) = found else { continue };
            if !types.passes(kind) || !states.passes(state) {
                continue;
            }
            let group = ListedGroup::default()
                .with_group_id(GroupId(StrBytes::from_string(slot.name.to_string())))
                .with_protocol_type(protocol_type);
            let group = if version >= 4 {
                group.with_group_state(StrBytes::from_static_str(state))
            } else {
                group
            };
            groups.push(if version >= 5 {
                group.with_group_type(StrBytes::from_static_str(kind))
            } else {
                group
            });
        }
        response.with_groups(groups)
    }

    /// Handles DescribeGroups, versions 0 to 6. A group that does not exist has the state "Dead";
    /// since version 6 also the error GROUP_ID_NOT_FOUND.
    pub async fn describe(
        &self,
        request: DescribeGroupsRequest,
        version: i16,
    ) -> DescribeGroupsResponse {
        let groups = once(request.groups, GroupId::clone).map(|group_id| {
            let described = match self.shared.describe(&group_id) {
                Ok(Some(description)) => described_group(description),
                Ok(None) => missing_group(&group_id, version),
                Err(error) => DescribedGroup::default().with_error_code(error.code()),
            };
            described.with_group_id(group_id)
        });
        DescribeGroupsResponse::default().with_groups(groups.collect())
    }

    /// Deletes a group without members, and its offsets. Durable when it returns.
    ///
    /// # Errors
    /// GROUP_ID_NOT_FOUND, NON_EMPTY_GROUP; COORDINATOR_NOT_AVAILABLE if it could not be written.
    pub async fn delete_group(&self, group_id: &str) -> Result<(), ResponseError> {
        let shared = &self.shared;
        shared.check_open()?;
        // The group exists, so its name fits in a record.
        let slot = shared.registry.get(group_id).ok_or(ResponseError::GroupIdNotFound)?;
        let record = Prepared::from(Record::GroupDeleted { group: group_id.to_owned() });
        let delete = || {
            let appended = shared.put_deletion(&slot, &record)?;
            shared.registry.remove(&slot);
            Ok(appended)
        };
        shared.write(delete).await
    }
}

impl Shared {
    /// Appends the deletion of a group without members and kills the group. The caller removes it
    /// from the map.
    pub(super) fn put_deletion(&self, slot: &Slot, record: &Prepared) -> Result<Appended, Blocked> {
        // The record is appended before the group is dead, both under the group's lock: a commit
        // either comes before the record and is deleted by it, or finds a dead group.
        self.registry.change(slot, |group, now| {
            if group.is_dead() {
                return Err(Blocked::Group(ResponseError::GroupIdNotFound));
            }
            let is_empty = match group {
                LiveGroup::Classic(group) => group.state() == State::Empty,
                LiveGroup::Consumer(group) => group.is_empty(),
                LiveGroup::Share(group) => group.is_empty(),
            };
            if !is_empty {
                return Err(Blocked::Group(ResponseError::NonEmptyGroup));
            }
            // The persisted state of its members goes first: in between there is a group with
            // offsets and no members. So do its share partitions; a share group has no offsets.
            let forgotten = self.registry.shares.forget_group(&slot.name);
            drop(forgotten.map_err(Refused::Stream)?);
            let classic = self.registry.make_classic(slot, group, now)?;
            let appended = self.log.append(record)?;
            classic.kill();
            Ok(appended)
        })
    }

    /// Returns `None` if there is no such classic group.
    fn describe(&self, group_id: &str) -> Result<Option<Description>, ResponseError> {
        self.check_open()?;
        let Some(slot) = self.registry.get(group_id) else { return Ok(None) };
        let description = self.registry.peek(&slot, |group, _| match group {
            LiveGroup::Classic(group) => Some(group.describe()),
            LiveGroup::Consumer(_) | LiveGroup::Share(_) => None,
        });
        Ok(description.filter(|description| description.state != State::Dead))
    }
}

/// A filter of ListGroups. It may list a million names, but a group can have only a few values:
/// each of these is searched for once.
struct Filter<'a> {
    wanted: &'a [StrBytes],
    known: HashMap<&'static str, bool>,
}

impl<'a> Filter<'a> {
    fn new(wanted: &'a [StrBytes]) -> Self {
        Self { wanted, known: HashMap::new() }
    }

    fn passes(&mut self, value: &'static str) -> bool {
        let wanted = self.wanted;
        *self.known.entry(value).or_insert_with(|| {
            wanted.is_empty()
                || wanted.iter().any(|wanted| wanted.as_str().eq_ignore_ascii_case(value))
        })
    }
}

fn described_group(description: Description) -> DescribedGroup {
    let members = description.members.into_iter().map(|member| {
        DescribedGroupMember::default()
            .with_member_id(member.member_id)
            .with_group_instance_id(member.instance_id)
            .with_client_id(member.client_id)
            .with_client_host(member.client_host)
            .with_member_metadata(member.metadata)
            .with_member_assignment(member.assignment)
    });
    DescribedGroup::default()
        .with_group_state(StrBytes::from_static_str(description.state.name()))
        .with_protocol_type(description.protocol_type)
        .with_protocol_data(description.protocol)
        .with_members(members.collect())
}

fn missing_group(group_id: &GroupId, version: i16) -> DescribedGroup {
    let dead =
        DescribedGroup::default().with_group_state(StrBytes::from_static_str(State::Dead.name()));
    if version < 6 {
        return dead;
    }
    let message = format!("Group {} not found.", group_id.as_str());
    dead.with_error_code(ResponseError::GroupIdNotFound.code())
        .with_error_message(Some(StrBytes::from_string(message)))
}
