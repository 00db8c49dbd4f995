//! Authorization by ACLs, over TCP.

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use uuid::Uuid;

use super::every_api::error_codes;
use super::examples::{self, World};
use super::harness::{Client, TestServer, text};
use super::secured::sasl;
use super::topic_ids::{codes, commit_by_id, fetch_by_id};
use crate::security::{ALLOW, DENY, LITERAL, Operation, PREFIXED, ResourceType};
use crate::{AuthorizationConfig, Mechanism};

const TOPIC: i16 = ResponseError::TopicAuthorizationFailed.code();
const UNKNOWN_TOPIC: i16 = ResponseError::UnknownTopicOrPartition.code();
const GROUP: i16 = ResponseError::GroupAuthorizationFailed.code();
const CLUSTER: i16 = ResponseError::ClusterAuthorizationFailed.code();
const TRANSACTIONAL_ID: i16 = ResponseError::TransactionalIdAuthorizationFailed.code();

struct Guarded {
    server: TestServer,
    topic_id: Uuid,
}

/// A server on which `admin` may do everything, and `alice` nothing; with a topic `topic` of three
/// partitions.
async fn guarded(allow_everyone_if_no_acl_found: bool) -> Guarded {
    let server = TestServer::with(64 << 20, |config| {
        config.listeners.push(sasl("sasl", &[Mechanism::Plain]));
        config.security.authorization = Some(AuthorizationConfig {
            super_users: vec!["User:admin".into()],
            allow_everyone_if_no_acl_found,
        });
    })
    .await;
    for user in ["admin", "alice"] {
        server.server().authentication.users.set_password(user, user).await.unwrap();
    }
    let topic = server.server().create_topic("topic", 3, Default::default(), false).await.unwrap();
    Guarded { server, topic_id: topic.id }
}

impl Guarded {
    async fn client(&self, user: &str) -> Client {
        let mut client = Client::connect(self.server.addr_of("sasl")).await;
        assert_eq!(client.plain(user, user).await.0, 0);
        client
    }

    async fn acl(&self, acl: Acl<'_>) {
        assert_eq!(self.client("admin").await.create_acl(acl).await, 0, "{acl:?}");
    }
}

/// Type and name of a resource, its pattern; operation and permission of User:alice.
type Acl<'a> = (ResourceType, &'a str, i8, Operation, i8);

/// A filter for resources with this name, or for all.
fn any_acl(name: Option<&str>) -> delete_acls_request::DeleteAclsFilter {
    delete_acls_request::DeleteAclsFilter::default()
        .with_resource_type_filter(1)
        .with_resource_name_filter(name.map(text))
        .with_pattern_type_filter(1)
        .with_principal_filter(None)
        .with_host_filter(None)
        .with_operation(1)
        .with_permission_type(1)
}

impl Client {
    async fn create_acl(&mut self, (kind, name, pattern, operation, permission): Acl<'_>) -> i16 {
        let acl = create_acls_request::AclCreation::default()
            .with_resource_type(kind as i8)
            .with_resource_name(text(name))
            .with_resource_pattern_type(pattern)
            .with_principal(text("User:alice"))
            .with_host(text("*"))
            .with_operation(operation as i8)
            .with_permission_type(permission);
        let request = CreateAclsRequest::default().with_creations(vec![acl]);
        self.call(3, &request).await.results[0].error_code
    }

    async fn delete_acls(&mut self, name: Option<&str>) -> (i16, usize) {
        let request = DeleteAclsRequest::default().with_filters(vec![any_acl(name)]);
        let result = self.call(3, &request).await.filter_results.remove(0);
        (result.error_code, result.matching_acls.len())
    }

    async fn describe_acls(&mut self) -> (i16, usize) {
        let request = DescribeAclsRequest::default()
            .with_resource_type_filter(1)
            .with_resource_name_filter(None)
            .with_pattern_type_filter(1)
            .with_principal_filter(None)
            .with_host_filter(None)
            .with_operation(1)
            .with_permission_type(1);
        let response = self.call(3, &request).await;
        (response.error_code, response.resources.iter().map(|resource| resource.acls.len()).sum())
    }

    async fn topics(&mut self) -> Vec<String> {
        let all = MetadataRequest::default().with_topics(None);
        let topics = self.call(12, &all).await.topics;
        topics.into_iter().map(|topic| topic.name.unwrap().to_string()).collect()
    }
}

/// Covers APIs that are added later, too: one that does not call `authorize` gives another answer.
#[tokio::test(flavor = "multi_thread")]
async fn every_api_refuses_a_client_without_permissions() {
    let guarded = guarded(false).await;
    for api in crate::api::APIS {
        for version in api.min..=api.max {
            let world = World { topic_id: guarded.topic_id, ..World::imaginary() };
            let mut client = guarded.client("alice").await;
            let request = examples::request(api.key, version, 7, &world);
            client.send_frame(&request).await;
            let name = format!("{} v{version}", api.name);
            let response = client.receive_frame().await.unwrap_or_else(|| panic!("{name}: closed"));
            let response = examples::decode_response(api.key, version, 7, response);
            let codes = error_codes(&response);
            match api.key {
                // Open to all clients, or concerned with connections.
                ApiKey::ApiVersions
                | ApiKey::DescribeCluster
                | ApiKey::SaslHandshake
                | ApiKey::SaslAuthenticate => {}
                // These leave out what the client may not describe.
                ApiKey::ListGroups | ApiKey::ListTransactions => {}
                // An id that the client may not describe does not exist for it.
                ApiKey::Metadata | ApiKey::DeleteTopics => {
                    assert!(
                        codes.contains(&TOPIC)
                            || codes.contains(&ResponseError::UnknownTopicId.code()),
                        "{name}: {response}"
                    );
                }
                _ => {
                    let refused =
                        |code: &i16| [TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID].contains(code);
                    assert!(codes.iter().any(refused), "{name}: {response}");
                    let others = codes.iter().filter(|code| **code != 0 && !refused(code));
                    assert_eq!(others.count(), 0, "{name}: {response}");
                }
            }
        }
    }
    // Nothing has changed.
    assert_eq!(guarded.client("admin").await.topics().await, ["topic"]);
    assert_eq!(guarded.client("admin").await.describe_acls().await, (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn acls_allow_and_deny_after_a_restart() {
    let mut guarded = guarded(false).await;
    let batch = crate::batch::tests::plain(&[1]);
    let mut alice = guarded.client("alice").await;
    assert_eq!(alice.topics().await, Vec::<String>::new());
    assert_eq!(alice.produce("topic", 0, &batch).await.0, TOPIC);
    assert_eq!(alice.fetch("topic", 0, 0).await.0, TOPIC);
    // The error for a topic that does not exist is the same.
    assert_eq!(alice.produce("missing", 0, &batch).await.0, TOPIC);

    guarded.acl((ResourceType::Topic, "to", PREFIXED, Operation::Write, ALLOW)).await;
    assert_eq!(alice.topics().await, ["topic"]);
    assert_eq!(alice.produce("topic", 0, &batch).await.0, 0);
    assert_eq!(
        alice.produce("tomorrow", 0, &batch).await.0,
        ResponseError::UnknownTopicOrPartition.code()
    );
    assert_eq!(alice.fetch("topic", 0, 0).await.0, TOPIC);
    let init = InitProducerIdRequest::default().with_transactional_id(None);
    assert_eq!(alice.call(4, &init).await.error_code, 0);

    guarded.acl((ResourceType::Topic, "*", LITERAL, Operation::Read, ALLOW)).await;
    assert_eq!(alice.fetch("topic", 0, 0).await.0, 0);
    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Read, DENY)).await;
    assert_eq!(alice.fetch("topic", 0, 0).await.0, TOPIC);
    assert_eq!(alice.produce("topic", 0, &batch).await.0, 0);

    // ACLs survive a restart, and a repeated ACL is not added twice.
    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Read, DENY)).await;
    guarded.server.restart().await;
    let mut alice = guarded.client("alice").await;
    assert_eq!(alice.fetch("topic", 0, 0).await.0, TOPIC);
    assert_eq!(alice.produce("topic", 0, &batch).await.0, 0);
    let mut admin = guarded.client("admin").await;
    assert_eq!(admin.describe_acls().await, (0, 3));
    assert_eq!(alice.describe_acls().await, (CLUSTER, 0));
    assert_eq!(alice.delete_acls(None).await, (CLUSTER, 0));
    let own = (ResourceType::Topic, "topic", LITERAL, Operation::Read, ALLOW);
    assert_eq!(alice.create_acl(own).await, CLUSTER);
    assert_eq!(admin.delete_acls(Some("topic")).await, (0, 1));
    assert_eq!(alice.fetch("topic", 0, 0).await.0, 0);
    assert_eq!(admin.delete_acls(None).await, (0, 2));
    guarded.server.restart().await;
    let mut alice = guarded.client("alice").await;
    assert_eq!(alice.produce("topic", 0, &batch).await.0, TOPIC);
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_need_the_create_permission_and_operations_are_described() {
    let guarded = guarded(false).await;
    let mut alice = guarded.client("alice").await;
    let named = |name: &str| {
        let topic = metadata_request::MetadataRequestTopic::default();
        MetadataRequest::default()
            .with_allow_auto_topic_creation(true)
            .with_include_topic_authorized_operations(true)
            .with_topics(Some(vec![topic.with_name(Some(TopicName(text(name))))]))
    };
    guarded.acl((ResourceType::Topic, "own-", PREFIXED, Operation::Describe, ALLOW)).await;
    let refused = alice.call(12, &named("own-1")).await.topics.remove(0);
    assert_eq!((refused.error_code, refused.topic_authorized_operations), (TOPIC, i32::MIN));
    let unknown = alice.call(12, &named("own-1").with_allow_auto_topic_creation(false)).await;
    let unknown = (unknown.topics[0].error_code, unknown.topics[0].topic_authorized_operations);
    assert_eq!(unknown, (UNKNOWN_TOPIC, 1 << 8));
    guarded.acl((ResourceType::Topic, "own-", PREFIXED, Operation::Create, ALLOW)).await;
    let created = alice.call(12, &named("own-1")).await.topics.remove(0);
    assert_eq!(created.error_code, 0);
    assert_eq!(created.topic_authorized_operations, 1 << 5 | 1 << 8);
    let admins = guarded.client("admin").await.call(12, &named("own-1")).await.topics.remove(0);
    assert_eq!(admins.topic_authorized_operations, 0b1101_1111_1000);
    let cluster = DescribeClusterRequest::default()
        .with_endpoint_type(1)
        .with_include_cluster_authorized_operations(true);
    assert_eq!(alice.call(1, &cluster).await.cluster_authorized_operations, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_may_access_resources_without_acls_if_configured() {
    let guarded = guarded(true).await;
    let mut alice = guarded.client("alice").await;
    assert_eq!(alice.topics().await, ["topic"]);
    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Read, DENY)).await;
    assert_eq!(alice.fetch("topic", 0, 0).await.0, TOPIC);
    // An anonymous client is a principal too, and there is an ACL now.
    let mut anonymous = guarded.server.client().await;
    assert_eq!(anonymous.topics().await, Vec::<String>::new());
}

/// For an id that the client may not describe, Kafka answers that it is unauthorized, and for an
/// unknown one that it does not exist. Names of topics are shown only to clients that may describe
/// them.
#[tokio::test(flavor = "multi_thread")]
async fn committed_offsets_are_shown_by_id_as_by_name() {
    const NO_TOPIC: Uuid = Uuid::from_u128(7);
    let guarded = guarded(false).await;
    let id = guarded.topic_id;
    let offsets: &[(Uuid, &[(i32, i64)])] = &[(NO_TOPIC, &[(0, 5)]), (id, &[(0, 5)])];
    let commit = commit_by_id("g", ("", -1), offsets);
    let some = fetch_by_id(&[("g", ("", -1), Some(&[(id, &[0]), (NO_TOPIC, &[0])]))], true);
    let all = fetch_by_id(&[("g", ("", -1), None)], true);
    let expect =
        async |committed: (i16, i16), group: i16, found: Option<(i16, i64)>, reported: bool| {
            let mut alice = guarded.client("alice").await;
            let (unknown, known) = committed;
            let expected = [(NO_TOPIC, vec![(0, unknown)]), (id, vec![(0, known)])];
            assert_eq!(codes(&alice.call(10, &commit).await), expected);
            let topics = found.map(|(code, offset)| {
                vec![
                    (id, vec![(0, code, offset)]),
                    (NO_TOPIC, vec![(0, ResponseError::UnknownTopicId.code(), -1)]),
                ]
            });
            let expected = (group, topics.unwrap_or_default());
            assert_eq!(super::topic_ids::offsets(&alice.call(10, &some).await), [expected]);
            let topics = if reported { vec![(id, vec![(0, 0, 5)])] } else { vec![] };
            let found = super::topic_ids::offsets(&alice.call(10, &all).await);
            assert_eq!(found, [(group, topics)]);
        };
    let mut admin = guarded.client("admin").await;
    assert_eq!(codes(&admin.call(10, &commit).await)[1], (id, vec![(0, 0)]));

    expect((GROUP, GROUP), GROUP, None, false).await;
    guarded.acl((ResourceType::Group, "g", LITERAL, Operation::Read, ALLOW)).await;
    expect((100, TOPIC), 0, Some((TOPIC, -1)), false).await;
    // A group that is requested twice is answered once, for its first occurrence, and without
    // names.
    let wanted = |topics: Option<Vec<_>>| {
        offset_fetch_request::OffsetFetchRequestGroup::default()
            .with_group_id(GroupId(text("g")))
            .with_topics(topics)
    };
    let twice = OffsetFetchRequest::default().with_groups(vec![wanted(None), wanted(Some(vec![]))]);
    let groups = guarded.client("alice").await.call(9, &twice).await.groups;
    assert_eq!((groups.len(), groups[0].error_code, groups[0].topics.len()), (1, 0, 0));

    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Describe, ALLOW)).await;
    expect((100, TOPIC), 0, Some((0, 5)), true).await;
    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Read, ALLOW)).await;
    expect((100, 0), 0, Some((0, 5)), true).await;
    // Even a client that may read all topics gets no topic without a name.
    guarded.acl((ResourceType::Topic, "*", LITERAL, Operation::Read, ALLOW)).await;
    expect((100, 0), 0, Some((0, 5)), true).await;
}

/// A regular expression must not reveal which topics exist.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_sees_no_topics_that_it_may_not_describe() {
    let guarded = guarded(false).await;
    let server = guarded.server.server();
    let seen = server.create_topic("seen", 2, Default::default(), false).await.unwrap().id;
    for (kind, name) in [(ResourceType::Topic, "seen"), (ResourceType::Group, "g")] {
        guarded.acl((kind, name, LITERAL, Operation::Read, ALLOW)).await;
    }
    let join = |user: &str| {
        ConsumerGroupHeartbeatRequest::default()
            .with_group_id(GroupId(text("g")))
            .with_member_id(text(user))
            .with_rebalance_timeout_ms(60_000)
            .with_subscribed_topic_names(None)
            .with_subscribed_topic_regex(Some(text(".*")))
            .with_topic_partitions(Some(vec![]))
    };
    let mut reported = Vec::new();
    for (user, of_user) in [("alice", 1), ("admin", 2)] {
        let mut client = guarded.client(user).await;
        let response = client.call(1, &join(user)).await;
        assert_eq!(response.error_code, 0, "{:?}", response.error_message);
        let topics = response.assignment.unwrap().topic_partitions;
        reported.extend(topics.iter().map(|topic| (user, topic.topic_id)));
        let describe =
            ConsumerGroupDescribeRequest::default().with_group_ids(vec![GroupId(text("g"))]);
        let group = client.call(1, &describe).await.groups.remove(0);
        let all = |member: &consumer_group_describe_response::Member| {
            let assignments = [&member.assignment, &member.target_assignment];
            let topics = assignments.map(|assignment| &assignment.topic_partitions);
            topics.map(|topics| topics.iter().map(|t| t.topic_name.to_string()).collect::<Vec<_>>())
        };
        let mut names: Vec<_> = group.members.iter().flat_map(all).flatten().collect();
        names.sort();
        names.dedup();
        assert_eq!(names, &["seen", "topic"][..of_user]);
    }
    // A client that may not describe all topics of the members sees none of them.
    let describe = ConsumerGroupDescribeRequest::default().with_group_ids(vec![GroupId(text("g"))]);
    let group = guarded.client("alice").await.call(1, &describe).await.groups.remove(0);
    assert_eq!((group.error_code, group.members.len()), (TOPIC, 0));
    assert_eq!(
        reported.iter().filter(|(user, _)| *user == "alice").collect::<Vec<_>>(),
        [&("alice", seen)]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn describing_a_share_group_needs_permission_for_its_topics() {
    let guarded = guarded(false).await;
    guarded.server.server().create_topic("seen", 1, Default::default(), false).await.unwrap();
    for (kind, name) in [(ResourceType::Topic, "seen"), (ResourceType::Group, "g")] {
        guarded.acl((kind, name, LITERAL, Operation::Read, ALLOW)).await;
    }
    let mut admin = guarded.client("admin").await;
    let join = ShareGroupHeartbeatRequest::default()
        .with_group_id(GroupId(text("g")))
        .with_member_id(text("m"))
        .with_subscribed_topic_names(Some(vec![TopicName(text("seen")), TopicName(text("topic"))]));
    let joined = admin.call(1, &join).await;
    assert_eq!(joined.error_code, 0, "{:?}", joined.error_message);
    let describe = ShareGroupDescribeRequest::default().with_group_ids(vec![GroupId(text("g"))]);
    let group = guarded.client("alice").await.call(1, &describe).await.groups.remove(0);
    assert_eq!((group.error_code, group.members.len()), (TOPIC, 0));
    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Describe, ALLOW)).await;
    for user in ["alice", "admin"] {
        let mut client = guarded.client(user).await;
        let group = client.call(1, &describe).await.groups.remove(0);
        let [member] = &group.members[..] else { panic!("one member: {group:?}") };
        let mut assigned: Vec<&str> =
            member.assignment.topic_partitions.iter().map(|t| t.topic_name.as_str()).collect();
        assigned.sort_unstable();
        assert_eq!(assigned, ["seen", "topic"], "{user}");
    }
}

/// The member gets an error for partitions that it may not read, and waits for the others. It gets
/// their records once it may.
#[tokio::test(flavor = "multi_thread")]
async fn a_share_session_keeps_unauthorized_partitions() {
    use share_fetch_request::{FetchPartition, FetchTopic};
    let guarded = guarded(false).await;
    let server = guarded.server.server();
    let secret = server.create_topic("secret", 1, Default::default(), false).await.unwrap().id;
    for (kind, name) in [(ResourceType::Topic, "topic"), (ResourceType::Group, "g")] {
        guarded.acl((kind, name, LITERAL, Operation::Read, ALLOW)).await;
    }
    let mut alice = guarded.client("alice").await;
    let join = ShareGroupHeartbeatRequest::default()
        .with_group_id(GroupId(text("g")))
        .with_member_id(text("m"))
        .with_subscribed_topic_names(Some(vec![TopicName(text("topic"))]));
    assert_eq!(alice.call(1, &join).await.error_code, 0);
    let fetch = ShareFetchRequest::default()
        .with_group_id(Some(GroupId(text("g"))))
        .with_member_id(Some(text("m")))
        .with_max_wait_ms(200)
        .with_min_bytes(1)
        .with_max_bytes(1 << 20)
        .with_max_records(500)
        .with_batch_size(500);
    let topics = [guarded.topic_id, secret].map(|id| {
        FetchTopic::default().with_topic_id(id).with_partitions(vec![FetchPartition::default()])
    });
    let begun = std::time::Instant::now();
    let mut reported = alice.call(1, &fetch.clone().with_topics(topics.into())).await.responses;
    assert!(begun.elapsed().as_millis() >= 200, "it has not waited");
    reported.retain(|topic| topic.partitions[0].error_code != 0);
    let [refused] = &reported[..] else { panic!("{reported:?}") };
    assert_eq!((refused.topic_id, refused.partitions[0].error_code), (secret, TOPIC));

    guarded.acl((ResourceType::Topic, "secret", LITERAL, Operation::Read, ALLOW)).await;
    alice.call(1, &fetch.clone().with_share_session_epoch(1)).await;
    let batch = crate::batch::tests::plain(&[1]);
    let mut admin = guarded.client("admin").await;
    assert_eq!(admin.produce("secret", 0, &batch).await.0, 0);
    let got = alice.call(1, &fetch.with_share_session_epoch(2)).await.responses;
    let [given] = &got[..] else { panic!("{got:?}") };
    assert_eq!((given.topic_id, given.partitions[0].acquired_records.len()), (secret, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_acls_are_refused() {
    let guarded = guarded(false).await;
    let mut admin = guarded.client("admin").await;
    for acl in [
        (ResourceType::Cluster, "other", LITERAL, Operation::Alter, ALLOW),
        (ResourceType::Topic, "", LITERAL, Operation::Read, ALLOW),
        (ResourceType::Topic, "a", 1, Operation::Read, ALLOW),
        (ResourceType::Topic, "a", LITERAL, Operation::Read, 1),
    ] {
        assert_eq!(admin.create_acl(acl).await, ResponseError::InvalidRequest.code(), "{acl:?}");
    }
    assert_eq!(admin.describe_acls().await, (0, 0));
}

/// Otherwise a request of some hundred KiB could ask for a response of many GiB.
#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_of_acls_is_bounded() {
    let guarded = guarded(false).await;
    let mut admin = guarded.client("admin").await;
    let acl = |n: usize| {
        create_acls_request::AclCreation::default()
            .with_resource_type(ResourceType::Topic as i8)
            .with_resource_name(text(&format!("topic-{n}")))
            .with_resource_pattern_type(LITERAL)
            .with_principal(text("User:alice"))
            .with_host(text("*"))
            .with_operation(Operation::Read as i8)
            .with_permission_type(ALLOW)
    };
    let create = CreateAclsRequest::default().with_creations((0..400).map(acl).collect());
    assert!(admin.call(3, &create).await.results.iter().all(|result| result.error_code == 0));
    for (filters, code) in [
        (251, ResponseError::PolicyViolation.code()),
        (10_001, ResponseError::PolicyViolation.code()),
        (250, 0),
    ] {
        let request = DeleteAclsRequest::default().with_filters(vec![any_acl(None); filters]);
        let results = admin.call(3, &request).await.filter_results;
        assert_eq!(results.len(), filters);
        assert!(results.iter().all(|result| result.error_code == code), "{filters}");
        let left = if code == 0 { 0 } else { 400 };
        assert_eq!(admin.describe_acls().await, (0, left));
    }
}

/// As in Kafka: a client that may delete in the cluster needs no permission for each topic.
#[tokio::test(flavor = "multi_thread")]
async fn the_delete_permission_on_the_cluster_covers_all_topics() {
    let guarded = guarded(false).await;
    let mut alice = guarded.client("alice").await;
    let request = DeleteTopicsRequest::default().with_topic_names(vec![TopicName(text("topic"))]);
    assert_eq!(alice.call(5, &request).await.responses[0].error_code, TOPIC);
    let all = (ResourceType::Cluster, "kafka-cluster", LITERAL, Operation::Delete, ALLOW);
    guarded.acl(all).await;
    assert_eq!(alice.call(5, &request).await.responses[0].error_code, 0);
    assert_eq!(
        alice.call(5, &request).await.responses[0].error_code,
        ResponseError::UnknownTopicOrPartition.code()
    );
}

/// A pattern matches the topics that its client may describe, from the next heartbeat after a
/// change.
#[tokio::test(flavor = "multi_thread")]
async fn a_regular_expression_matches_topics_that_the_client_may_describe() {
    let guarded = guarded(false).await;
    let hidden = guarded.server.server().create_topic("hidden", 1, Default::default(), false);
    let hidden = hidden.await.unwrap();
    guarded.acl((ResourceType::Group, "g", LITERAL, Operation::Read, ALLOW)).await;
    guarded.acl((ResourceType::Topic, "topic", LITERAL, Operation::Read, ALLOW)).await;
    let mut alice = guarded.client("alice").await;
    let beat = |epoch| {
        ConsumerGroupHeartbeatRequest::default()
            .with_group_id(GroupId(text("g")))
            .with_member_id(text("a"))
            .with_member_epoch(epoch)
            .with_rebalance_timeout_ms(if epoch == 0 { 60_000 } else { -1 })
            .with_subscribed_topic_names(None)
            .with_subscribed_topic_regex((epoch == 0).then(|| text(".*")))
            .with_topic_partitions((epoch == 0).then(Vec::new))
    };
    let topics = |response: ConsumerGroupHeartbeatResponse| -> Vec<Uuid> {
        assert_eq!(response.error_code, 0, "{:?}", response.error_message);
        let assignment = response.assignment.unwrap_or_default();
        assignment.topic_partitions.iter().map(|topic| topic.topic_id).collect()
    };
    let joined = alice.call(1, &beat(0)).await;
    let epoch = joined.member_epoch;
    assert_eq!(topics(joined), [guarded.topic_id]);
    guarded.acl((ResourceType::Topic, "hidden", LITERAL, Operation::Describe, ALLOW)).await;
    let mut both = [guarded.topic_id, hidden.id];
    both.sort_unstable();
    assert_eq!(topics(alice.call(1, &beat(epoch)).await), both);
}
