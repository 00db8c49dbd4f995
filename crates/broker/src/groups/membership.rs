//! JoinGroup, SyncGroup, Heartbeat, LeaveGroup: translation between the protocol and
//! [`super::group`].

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::join_group_response::JoinGroupResponseMember;
use kafka_protocol::messages::leave_group_request::MemberIdentity;
use kafka_protocol::messages::leave_group_response::MemberResponse;
use kafka_protocol::messages::{
    HeartbeatRequest, HeartbeatResponse, JoinGroupRequest, JoinGroupResponse, LeaveGroupRequest,
    LeaveGroupResponse, SyncGroupRequest, SyncGroupResponse,
};
use kafka_protocol::protocol::StrBytes;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::commits::Blocked;
use super::consumer::{ConsumerGroup, ConsumerRules};
use super::group::{JoinEvent, MEMBER_BYTES, Refusal, SyncEvent, protocols_bytes};
use super::live::LiveGroup;
use super::registry::{JoinAnswer, SyncAnswer};
use super::topics_view::TopicsNow;
use super::{ClientInfo, Groups, MAX_GROUP_ID_BYTES, Shared};

/// Bound on a member's protocols. Clients name one or two; each costs a comparison with those of
/// every member.
const MAX_PROTOCOLS: usize = 64;

/// Bound on instance ids and on names of protocols. They are passed on to other members, whose
/// version of the protocol may have space for 32 767 bytes only, whatever the version in which they
/// arrived.
pub(super) const MAX_NAME_BYTES: usize = 1024;

/// The first version of SyncGroup with the protocol's type and name.
const FIRST_VERSION_WITH_PROTOCOL: i16 = 5;

/// How many characters of the client's own name go into a member id; the rest is a UUID.
const MEMBER_ID_PREFIX_CHARS: usize = 128;

impl Groups {
    /// Handles JoinGroup, versions 0 to 9. When this returns, the group has processed the event;
    /// the returned future waits until the rebalance is over, up to the members' rebalance timeout,
    /// and holds no part of the request.
    pub(crate) fn join(
        &self,
        client: &ClientInfo,
        request: &JoinGroupRequest,
        version: i16,
        topics: &dyn TopicsNow,
    ) -> impl Future<Output = JoinGroupResponse> + use<> {
        let started = self.shared.start_join(client, request, version, topics);
        let shared = Arc::clone(&self.shared);
        let (group_id, member_id) = (own(&request.group_id), own(&request.member_id));
        async move {
            let refuse = |error| Err(Refusal { error, member_id: member_id.clone() });
            let answer = match started {
                // A group answers all its waiters before it goes away, so a lost sender means that
                // the server is stopping.
                Ok(answer) => {
                    answer.await.unwrap_or_else(|_| refuse(ResponseError::CoordinatorNotAvailable))
                }
                Err(error) => refuse(error),
            };
            let answer = match shared.wait_state_durable(&group_id).await {
                Ok(()) => answer,
                Err(error) => refuse(error),
            };
            join_response(answer, version)
        }
    }

    /// Handles SyncGroup, versions 0 to 5. The returned future waits until the leader has sent the
    /// assignment, and holds no part of the request.
    pub fn sync(
        &self,
        request: &SyncGroupRequest,
        version: i16,
    ) -> impl Future<Output = SyncGroupResponse> + use<> {
        let names_protocol = request.protocol_type.is_some() && request.protocol_name.is_some();
        let started = match version < FIRST_VERSION_WITH_PROTOCOL || names_protocol {
            true => self.shared.start_sync(request),
            false => Err(ResponseError::InconsistentGroupProtocol),
        };
        let shared = Arc::clone(&self.shared);
        let group_id = own(&request.group_id);
        async move {
            let answer = match started {
                Ok(answer) => answer.await.unwrap_or(Err(ResponseError::CoordinatorNotAvailable)),
                Err(error) => Err(error),
            };
            let answer = shared.wait_state_durable(&group_id).await.and(answer);
            let response = SyncGroupResponse::default();
            match answer {
                Ok(synced) => response
                    .with_protocol_type(synced.protocol_type)
                    .with_protocol_name(synced.protocol)
                    .with_assignment(synced.assignment),
                Err(error) => response.with_error_code(error.code()),
            }
        }
    }

    /// Handles Heartbeat, versions 0 to 4.
    pub async fn heartbeat(&self, request: HeartbeatRequest) -> HeartbeatResponse {
        let code = code(self.shared.heartbeat(&request));
        HeartbeatResponse::default().with_error_code(code)
    }

    /// Handles LeaveGroup, versions 0 to 5. Since version 3 one request can name several members,
    /// each with its own answer.
    pub async fn leave(&self, request: LeaveGroupRequest, version: i16) -> LeaveGroupResponse {
        let batched = version >= 3;
        let members = if batched {
            request.members
        } else {
            vec![MemberIdentity::default().with_member_id(request.member_id)]
        };
        let response = LeaveGroupResponse::default();
        let left = self.shared.leave(&request.group_id, &members);
        match self.shared.wait_state_durable(&request.group_id).await.and(left) {
            Err(error) => response.with_error_code(error.code()),
            Ok(codes) if !batched => response.with_error_code(codes.first().copied().unwrap_or(0)),
            Ok(codes) => {
                let members = members.into_iter().zip(codes).map(|(member, code)| {
                    MemberResponse::default()
                        .with_member_id(member.member_id)
                        .with_group_instance_id(member.group_instance_id)
                        .with_error_code(code)
                });
                response.with_members(members.collect())
            }
        }
    }
}

/// Returns the group if it is a consumer group with members: these may speak the classic protocol
/// too.
fn consumer(group: &mut LiveGroup) -> Result<Option<&mut ConsumerGroup>, ResponseError> {
    match group {
        LiveGroup::Consumer(group) if !group.unwritten().is_empty() => {
            Err(ResponseError::CoordinatorNotAvailable)
        }
        LiveGroup::Consumer(group) if !group.is_empty() => Ok(Some(group)),
        _ => Ok(None),
    }
}

impl Shared {
    /// Waits until the state of a group that a response shows is durable: members of a consumer
    /// group, or a complete generation of a classic one.
    async fn wait_state_durable(&self, group_id: &str) -> Result<(), ResponseError> {
        match self.registry.get(group_id) {
            Some(slot) => self.wait_durable(&slot).await.map_err(|fault| fault.error),
            None => Ok(()),
        }
    }

    fn start_join(
        &self,
        client: &ClientInfo,
        request: &JoinGroupRequest,
        version: i16,
        topics: &dyn TopicsNow,
    ) -> Result<oneshot::Receiver<JoinAnswer>, ResponseError> {
        self.check_group_id(&request.group_id)?;
        let session_timeout =
            millis(request.session_timeout_ms).ok_or(ResponseError::InvalidSessionTimeout)?;
        if !(self.config.min_session_timeout..=self.config.max_session_timeout)
            .contains(&session_timeout)
        {
            return Err(ResponseError::InvalidSessionTimeout);
        }
        let names = request.protocols.iter().map(|protocol| &protocol.name);
        let mut names = names.chain([&request.protocol_type]).chain(&request.group_instance_id);
        if request.protocols.len() > MAX_PROTOCOLS || names.any(|name| name.len() > MAX_NAME_BYTES)
        {
            return Err(ResponseError::InvalidRequest);
        }
        let instance_id = request.group_instance_id.as_ref();
        let protocols = request.protocols.iter().map(|p| (&p.name, &p.metadata));
        let names_bytes = client.client_id.len() + client.client_host.len();
        let held_bytes =
            self.member_bytes(&request.group_id, &request.member_id, instance_id.map(|id| &**id));
        let wanted_bytes = MEMBER_BYTES + names_bytes + protocols_bytes(protocols);
        self.check_membership_memory(&request.group_id, wanted_bytes, held_bytes)?;
        let slot = if request.member_id.is_empty() {
            self.create(&request.group_id)?
        } else {
            self.registry.get(&request.group_id).ok_or(ResponseError::UnknownMemberId)?
        };
        let join = JoinEvent {
            member_id: own(&request.member_id),
            fresh_id: fresh_member_id(client, request.group_instance_id.as_ref()),
            instance_id: request.group_instance_id.as_ref().map(own),
            client_id: own(&client.client_id),
            client_host: own(&client.client_host),
            session_timeout,
            // Version 0 has no such field; the session timeout is used for both.
            rebalance_timeout: millis(request.rebalance_timeout_ms).unwrap_or(session_timeout),
            protocol_type: own(&request.protocol_type),
            protocols: request
                .protocols
                .iter()
                .map(|p| (own(&p.name), Bytes::copy_from_slice(&p.metadata)))
                .collect(),
            can_require_id: version >= 4,
            can_skip_assignment: version >= 9,
            visibility: client.visibility.clone(),
        };
        let (waiter, answer) = oneshot::channel();
        self.registry.change(&slot, |group, now| {
            if let Some(group) = consumer(group)? {
                let max_members = self.config.max_group_members;
                let rules = ConsumerRules { session_timeout, max_members };
                drop(waiter.send(group.classic_join(now, rules, &topics.view(), join)));
                return Ok(answer);
            }
            match self.registry.make_classic(&slot, group, now) {
                Ok(group) => group.join(now, join, waiter),
                Err(Blocked::Group(error)) => return Err(error),
                Err(Blocked::Log(_) | Blocked::Transaction) => {
                    return Err(ResponseError::CoordinatorNotAvailable);
                }
            }
            Ok(answer)
        })
    }

    fn start_sync(
        &self,
        request: &SyncGroupRequest,
    ) -> Result<oneshot::Receiver<SyncAnswer>, ResponseError> {
        self.check_group_id(&request.group_id)?;
        if request.assignments.len() > self.config.max_group_members {
            return Err(ResponseError::InvalidRequest);
        }
        let assigned_bytes: usize =
            request.assignments.iter().map(|assignment| assignment.assignment.len()).sum();
        let slot = self.registry.get(&request.group_id).ok_or(ResponseError::UnknownMemberId)?;
        let held_bytes = self.registry.peek(&slot, |group, _| match group {
            LiveGroup::Classic(group) => group.assigned_bytes(),
            LiveGroup::Consumer(_) | LiveGroup::Share(_) => 0,
        });
        self.check_membership_memory(&request.group_id, assigned_bytes, Some(held_bytes))?;
        let assignments = request.assignments.iter();
        let sync = SyncEvent {
            member_id: own(&request.member_id),
            instance_id: request.group_instance_id.as_ref().map(own),
            generation: request.generation_id,
            protocol_type: request.protocol_type.clone(),
            protocol: request.protocol_name.clone(),
            assignments: assignments
                .map(|a| (own(&a.member_id), Bytes::copy_from_slice(&a.assignment)))
                .collect(),
        };
        let (waiter, answer) = oneshot::channel();
        self.registry.change(&slot, |group, now| {
            match consumer(group)? {
                Some(group) => drop(waiter.send(group.classic_sync(now, &sync))),
                None => group.classic()?.sync(now, sync, waiter),
            }
            Ok(answer)
        })
    }

    fn heartbeat(&self, request: &HeartbeatRequest) -> Result<(), ResponseError> {
        self.check_group_id(&request.group_id)?;
        let slot = self.registry.get(&request.group_id).ok_or(ResponseError::UnknownMemberId)?;
        let instance_id = request.group_instance_id.as_ref();
        let (member_id, generation) = (&request.member_id, request.generation_id);
        let beat = |group: &mut LiveGroup, now| match consumer(group)? {
            Some(group) => group.classic_heartbeat(now, member_id, instance_id, generation),
            None => group.classic()?.heartbeat(now, member_id, instance_id, generation),
        };
        // In a classic group it can only move a deadline to later.
        match self.registry.peek(&slot, |group, _| matches!(group, LiveGroup::Classic(_))) {
            true => self.registry.peek(&slot, beat),
            false => self.registry.change(&slot, beat),
        }
    }

    /// Returns an error code for each member.
    fn leave(&self, group_id: &str, members: &[MemberIdentity]) -> Result<Vec<i16>, ResponseError> {
        self.check_group_id(group_id)?;
        let Some(slot) = self.registry.get(group_id) else {
            return Ok(vec![ResponseError::UnknownMemberId.code(); members.len()]);
        };
        self.registry.change(&slot, |group, now| {
            let _ = consumer(group)?;
            if matches!(group, LiveGroup::Classic(group) if group.is_unwritten()) {
                return Err(ResponseError::CoordinatorNotAvailable);
            }
            let mut leave = |member: &MemberIdentity| {
                let (member_id, instance_id) =
                    (&member.member_id, member.group_instance_id.as_ref());
                code(match group {
                    LiveGroup::Classic(group) => group.leave(now, member_id, instance_id),
                    LiveGroup::Consumer(group) => group.classic_leave(now, member_id, instance_id),
                    LiveGroup::Share(_) => Err(ResponseError::UnknownMemberId),
                })
            };
            Ok(members.iter().map(&mut leave).collect())
        })
    }

    pub(super) fn check_group_id(&self, group_id: &str) -> Result<(), ResponseError> {
        self.check_open()?;
        if group_id.is_empty() || group_id.len() > MAX_GROUP_ID_BYTES {
            return Err(ResponseError::InvalidGroupId);
        }
        Ok(())
    }

    /// Estimated memory of a member; `None` if there is no such member.
    pub(super) fn member_bytes(
        &self,
        group_id: &str,
        member_id: &str,
        instance_id: Option<&str>,
    ) -> Option<usize> {
        let slot = self.registry.get(group_id)?;
        self.registry.peek(&slot, |group, _| group.member_bytes(member_id, instance_id))
    }

    /// Checks whether there is memory for `wanted_bytes` of a member or a group, in place of the
    /// `held_bytes` that it has; `None` if it is new.
    ///
    /// Existing members may use a quarter more than new ones. A member's state also grows by what
    /// others give up, and a group falls apart if one of its members is refused the replacement of
    /// its state. This check is not used for requests that only keep a member or give something
    /// back.
    pub(super) fn check_membership_memory(
        &self,
        group_id: &str,
        wanted_bytes: usize,
        held_bytes: Option<usize>,
    ) -> Result<(), ResponseError> {
        let max_bytes = self.config.max_membership_bytes;
        let (more_bytes, max_bytes) = match held_bytes {
            None => (wanted_bytes, max_bytes),
            Some(held_bytes) if wanted_bytes <= held_bytes => return Ok(()),
            Some(held_bytes) => (wanted_bytes - held_bytes, max_bytes + max_bytes / 4),
        };
        if self.registry.size_bytes().saturating_add(more_bytes) <= max_bytes {
            return Ok(());
        }
        tracing::warn!(
            group = group_id,
            more_bytes,
            max_bytes,
            "member refused: memory limit reached"
        );
        // Memory that others free is enough, unless the request exceeds the bound by itself.
        match more_bytes > max_bytes {
            true => Err(ResponseError::PolicyViolation),
            false => Err(ResponseError::CoordinatorNotAvailable),
        }
    }
}

/// `<instance id or client id>-<UUID>`, as Kafka's: operators search for their client's name in it.
fn fresh_member_id(client: &ClientInfo, instance_id: Option<&StrBytes>) -> StrBytes {
    let name = instance_id.unwrap_or(&client.client_id);
    let prefix: String = name.chars().take(MEMBER_ID_PREFIX_CHARS).collect();
    StrBytes::from_string(format!("{prefix}-{}", Uuid::new_v4()))
}

/// Copies a string: strings of a request are slices of its frame.
fn own(text: &StrBytes) -> StrBytes {
    StrBytes::from_string(text.as_str().to_owned())
}

/// Converts milliseconds; `None` for negative numbers.
fn millis(value: i32) -> Option<Duration> {
    u64::try_from(value).ok().map(Duration::from_millis)
}

fn code(result: Result<(), ResponseError>) -> i16 {
    result.map_or_else(|error| error.code(), |()| 0)
}

fn join_response(answer: JoinAnswer, version: i16) -> JoinGroupResponse {
    let response = JoinGroupResponse::default();
    match answer {
        Ok(joined) => {
            let members = joined.members.into_iter().map(|member| {
                JoinGroupResponseMember::default()
                    .with_member_id(member.member_id)
                    .with_group_instance_id(member.instance_id)
                    .with_metadata(member.metadata)
            });
            response
                .with_generation_id(joined.generation)
                .with_protocol_type(Some(joined.protocol_type))
                .with_protocol_name(Some(joined.protocol))
                .with_leader(joined.leader)
                .with_skip_assignment(joined.skip_assignment)
                .with_member_id(joined.member_id)
                .with_members(members.collect())
        }
        // The protocol's name can be null since version 7.
        Err(Refusal { error, member_id }) => response
            .with_error_code(error.code())
            .with_member_id(member_id)
            .with_protocol_name((version < 7).then(StrBytes::new)),
    }
}
