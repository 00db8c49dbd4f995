//! OffsetCommit and OffsetFetch by topic ids: version 10.

use std::slice::from_ref;

use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::*;
use kafka_protocol::protocol::StrBytes;
use uuid::Uuid;

use super::deleting::{commit, committed, delete_group};
use super::harness::{Client, TestServer, text};
use super::transactions::{Producer, delete_topic};
use crate::wire::offsets::{OffsetCommit, OffsetCommitted, OffsetFetch, OffsetsFetched};

const UNKNOWN_TOPIC_OR_PARTITION: i16 = ResponseError::UnknownTopicOrPartition.code();
const ILLEGAL_GENERATION: i16 = ResponseError::IllegalGeneration.code();
const UNKNOWN_MEMBER_ID: i16 = ResponseError::UnknownMemberId.code();
const GROUP_ID_NOT_FOUND: i16 = ResponseError::GroupIdNotFound.code();
const UNSTABLE_OFFSET_COMMIT: i16 = ResponseError::UnstableOffsetCommit.code();
const UNKNOWN_TOPIC_ID: i16 = ResponseError::UnknownTopicId.code();
const STALE_MEMBER_EPOCH: i16 = ResponseError::StaleMemberEpoch.code();

/// An id that no topic has.
const NO_TOPIC: Uuid = Uuid::from_u128(7);

/// The member that commits or fetches: its id and its generation or epoch.
type Member<'a> = (&'a str, i32);
const NO_MEMBER: Member<'static> = ("", -1);

/// Offsets by topic and partition.
type Offsets<'a> = &'a [(Uuid, &'a [(i32, i64)])];

/// Error codes by topic and partition.
pub(super) type Codes = Vec<(Uuid, Vec<(i32, i16)>)>;

pub(super) fn commit_by_id(
    group: &str,
    (member, epoch): Member<'_>,
    offsets: Offsets<'_>,
) -> OffsetCommit {
    use offset_commit_request::*;
    let partition = |(index, offset): &(i32, i64)| {
        OffsetCommitRequestPartition::default()
            .with_partition_index(*index)
            .with_committed_offset(*offset)
            .with_committed_leader_epoch(0)
            .with_committed_metadata(Some(text("note")))
    };
    let topics = offsets.iter().map(|(_, partitions)| {
        let partitions = partitions.iter().map(partition).collect();
        OffsetCommitRequestTopic::default().with_partitions(partitions)
    });
    let body = OffsetCommitRequest::default()
        .with_group_id(GroupId(text(group)))
        .with_member_id(text(member))
        .with_generation_id_or_member_epoch(epoch)
        .with_topics(topics.collect());
    OffsetCommit { body, topic_ids: offsets.iter().map(|(id, _)| *id).collect() }
}

pub(super) fn codes(response: &OffsetCommitted) -> Codes {
    let topics = response.body.topics.iter().zip(&response.topic_ids);
    let topics = topics.map(|(topic, id)| {
        (*id, topic.partitions.iter().map(|p| (p.partition_index, p.error_code)).collect())
    });
    topics.collect()
}

async fn committed_by_id(
    client: &mut Client,
    group: &str,
    member: Member<'_>,
    offsets: Offsets<'_>,
) -> Codes {
    codes(&client.call(10, &commit_by_id(group, member, offsets)).await)
}

/// A group, the member, and the topics with their partitions.
type Wanted<'a> = (&'a str, Member<'a>, Option<&'a [(Uuid, &'a [i32])]>);

pub(super) fn fetch_by_id(wanted: &[Wanted<'_>], require_stable: bool) -> OffsetFetch {
    use offset_fetch_request::*;
    let group = |(group, (member, epoch), topics): &Wanted<'_>| {
        let topics = topics.map(|topics| {
            let topics = topics.iter().map(|(_, indexes)| {
                OffsetFetchRequestTopics::default().with_partition_indexes(indexes.to_vec())
            });
            topics.collect()
        });
        OffsetFetchRequestGroup::default()
            .with_group_id(GroupId(text(group)))
            .with_member_id(Some(text(member)).filter(|member: &StrBytes| !member.is_empty()))
            .with_member_epoch(*epoch)
            .with_topics(topics)
    };
    let ids =
        |(_, _, topics): &Wanted<'_>| topics.iter().copied().flatten().map(|(id, _)| *id).collect();
    let body = OffsetFetchRequest::default()
        .with_groups(wanted.iter().map(group).collect())
        .with_require_stable(require_stable);
    OffsetFetch { body, topic_ids: wanted.iter().map(ids).collect() }
}

/// Error of the group; by topic the partitions with error and offset.
pub(super) type Fetched = (i16, Vec<(Uuid, Vec<(i32, i16, i64)>)>);

pub(super) fn offsets(response: &OffsetsFetched) -> Vec<Fetched> {
    let groups = response.body.groups.iter().zip(&response.topic_ids);
    let groups = groups.map(|(group, ids)| {
        let topics = group.topics.iter().zip(ids).map(|(topic, id)| {
            let partitions = topic.partitions.iter();
            let partitions =
                partitions.map(|p| (p.partition_index, p.error_code, p.committed_offset));
            (*id, partitions.collect())
        });
        (group.error_code, topics.collect())
    });
    groups.collect()
}

async fn fetched(client: &mut Client, wanted: &[Wanted<'_>], stable: bool) -> Vec<Fetched> {
    let response: OffsetsFetched = client.call(10, &fetch_by_id(wanted, stable)).await;
    let groups = response.body.groups.iter().map(|group| group.group_id.to_string());
    let mut names: Vec<_> = wanted.iter().map(|(name, ..)| (*name).to_owned()).collect();
    names.dedup();
    assert_eq!(groups.collect::<Vec<_>>(), names);
    offsets(&response)
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_are_committed_and_fetched_by_id() {
    let mut server = TestServer::start().await;
    let (a, b) = (server.topic("a", 2, &[]).await, server.topic("b", 1, &[]).await);
    let mut client = server.client().await;
    let offsets: Offsets<'_> = &[
        (b, &[(0, 5)]),
        (NO_TOPIC, &[(0, 1), (1, 2)]),
        (a, &[(1, 6), (2, 7)]),
        (Uuid::nil(), &[(0, 1)]),
        (NO_TOPIC, &[]),
    ];
    let codes = committed_by_id(&mut client, "g", NO_MEMBER, offsets).await;
    let expected = [
        (b, vec![(0, 0)]),
        (NO_TOPIC, vec![(0, UNKNOWN_TOPIC_ID), (1, UNKNOWN_TOPIC_ID)]),
        (a, vec![(1, 0), (2, UNKNOWN_TOPIC_OR_PARTITION)]),
        (Uuid::nil(), vec![(0, UNKNOWN_TOPIC_ID)]),
        (NO_TOPIC, vec![]),
    ];
    assert_eq!(codes, expected);
    commit(&mut client, "other", "a", &[0]).await;

    for restarted in [false, true] {
        if restarted {
            server.crash().await;
            client = server.client().await;
        }
        // By name the result is the same.
        let named = [("a".to_owned(), 1), ("b".to_owned(), 0)];
        assert_eq!(committed(&mut client, "g").await, named);
        let wanted: [Wanted<'_>; 5] = [
            ("g", NO_MEMBER, None),
            ("other", NO_MEMBER, Some(&[(a, &[1, 0, 2]), (NO_TOPIC, &[4, 3]), (b, &[0])])),
            ("none", NO_MEMBER, Some(&[(a, &[0])])),
            ("none", NO_MEMBER, None),
            ("absent", NO_MEMBER, None),
        ];
        let all = (0, vec![(a, vec![(1, 0, 6)]), (b, vec![(0, 0, 5)])]);
        // Unknown topics come last, as in Kafka.
        let some = vec![
            (a, vec![(1, 0, -1), (0, 0, 7), (2, 0, -1)]),
            (b, vec![(0, 0, -1)]),
            (NO_TOPIC, vec![(4, UNKNOWN_TOPIC_ID, -1), (3, UNKNOWN_TOPIC_ID, -1)]),
        ];
        let none = (0, vec![(a, vec![(0, 0, -1)])]);
        for stable in [false, true] {
            let expected = [all.clone(), (0, some.clone()), none.clone(), (0, vec![])];
            assert_eq!(fetched(&mut client, &wanted, stable).await, expected);
        }
    }
    let response = client.call(10, &fetch_by_id(&[("g", NO_MEMBER, None)], false)).await;
    let partition = &response.body.groups[0].topics[0].partitions[0];
    assert_eq!(partition.committed_leader_epoch, 0);
    assert_eq!(partition.metadata.as_deref(), Some("note"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_again_has_no_offsets_of_the_first_one() {
    let server = TestServer::start().await;
    let first = server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    assert_eq!(
        committed_by_id(&mut client, "g", NO_MEMBER, &[(first, &[(0, 5)])]).await[0].1,
        [(0, 0)]
    );
    delete_topic(&server, "t").await;
    let of_first: Wanted<'_> = ("g", NO_MEMBER, Some(&[(first, &[0])]));
    let gone = (0, vec![(first, vec![(0, UNKNOWN_TOPIC_ID, -1)])]);
    let none: Fetched = (0, vec![]);
    for round in 0..2 {
        let refused = committed_by_id(&mut client, "g", NO_MEMBER, &[(first, &[(0, 9)])]).await;
        assert_eq!(refused, [(first, vec![(0, UNKNOWN_TOPIC_ID)])]);
        assert_eq!(fetched(&mut client, &[of_first], true).await, from_ref(&gone));
        assert_eq!(fetched(&mut client, &[("g", NO_MEMBER, None)], true).await, from_ref(&none));
        assert!(committed(&mut client, "g").await.is_empty());
        if round == 0 {
            let second = server.topic("t", 1, &[]).await;
            assert_ne!(first, second);
            let wanted: Wanted<'_> = ("g", NO_MEMBER, Some(&[(second, &[0])]));
            let nothing = (0, vec![(second, vec![(0, 0, -1)])]);
            assert_eq!(fetched(&mut client, &[wanted], true).await, [nothing]);
        }
    }
}

/// Joins as the only member of a classic group; returns id and generation.
async fn join_classic(client: &mut Client, group: &str) -> (String, i32) {
    use join_group_request::JoinGroupRequestProtocol;
    let metadata = bytes::Bytes::from_static(b"\0\0\0\0\0\x01\0\x01t\xff\xff\xff\xff");
    let protocol =
        JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(metadata);
    let join = JoinGroupRequest::default()
        .with_group_id(GroupId(text(group)))
        .with_session_timeout_ms(30_000)
        .with_rebalance_timeout_ms(30_000)
        .with_protocol_type(text("consumer"))
        .with_protocols(vec![protocol]);
    let joined = client.call(3, &join).await;
    let sync = SyncGroupRequest::default()
        .with_group_id(GroupId(text(group)))
        .with_generation_id(joined.generation_id)
        .with_member_id(joined.member_id.clone());
    assert_eq!((joined.error_code, client.call(3, &sync).await.error_code), (0, 0));
    (joined.member_id.to_string(), joined.generation_id)
}

/// The member is checked first, whatever the topics.
#[tokio::test(flavor = "multi_thread")]
async fn members_are_checked_by_id_as_by_name() {
    let server = TestServer::with(16 << 20, |config| {
        config.groups.initial_rebalance_delay = std::time::Duration::ZERO;
    })
    .await;
    let t = server.topic("t", 1, &[]).await;
    let mut client = server.client().await;
    let join = ConsumerGroupHeartbeatRequest::default()
        .with_group_id(GroupId(text("consumers")))
        .with_member_id(text("m"))
        .with_rebalance_timeout_ms(60_000)
        .with_subscribed_topic_names(Some(vec![TopicName(text("t"))]))
        .with_topic_partitions(Some(vec![]));
    let joined = client.call(1, &join).await;
    assert_eq!(joined.error_code, 0);
    let classic = join_classic(&mut client, "classic").await;
    let epoch = joined.member_epoch;
    let cases: [(&str, Member<'_>, i16); 8] = [
        ("consumers", ("m", epoch), 0),
        ("consumers", ("m", epoch - 1), STALE_MEMBER_EPOCH),
        ("consumers", ("other", epoch), UNKNOWN_MEMBER_ID),
        ("consumers", NO_MEMBER, UNKNOWN_MEMBER_ID),
        ("classic", (&classic.0, classic.1), 0),
        ("classic", (&classic.0, classic.1 + 1), ILLEGAL_GENERATION),
        ("classic", ("other", classic.1), UNKNOWN_MEMBER_ID),
        ("none", ("m", 1), GROUP_ID_NOT_FOUND),
    ];
    for (group, member, code) in cases {
        let offsets: Offsets<'_> = &[(t, &[(0, 5)]), (NO_TOPIC, &[(0, 5)])];
        let unknown = if code == 0 { UNKNOWN_TOPIC_ID } else { code };
        let codes = committed_by_id(&mut client, group, member, offsets).await;
        assert_eq!(
            codes,
            [(t, vec![(0, code)]), (NO_TOPIC, vec![(0, unknown)])],
            "{group} {member:?}"
        );
    }
    // Members of classic groups are not checked.
    let cases: [(&str, Member<'_>, i16); 5] = [
        ("consumers", ("m", epoch), 0),
        ("consumers", NO_MEMBER, 0),
        ("consumers", ("m", epoch - 1), STALE_MEMBER_EPOCH),
        ("consumers", ("other", epoch), UNKNOWN_MEMBER_ID),
        ("classic", NO_MEMBER, 0),
    ];
    for (group, member, code) in cases {
        let wanted: Wanted<'_> = (group, member, Some(&[(NO_TOPIC, &[1]), (t, &[0])]));
        let found = vec![(t, vec![(0, 0, 5)]), (NO_TOPIC, vec![(1, UNKNOWN_TOPIC_ID, -1)])];
        let expected = (code, if code == 0 { found } else { vec![] });
        assert_eq!(fetched(&mut client, &[wanted], true).await, [expected], "{group} {member:?}");
    }
    assert_eq!(delete_group(&mut client, "none").await, GROUP_ID_NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_transaction_are_unstable_by_id_too() {
    let server = TestServer::start().await;
    let t = server.topic("t", 2, &[]).await;
    let mut client = server.client().await;
    commit(&mut client, "g", "t", &[0, 1]).await;
    let mut producer = Producer::init(&server, "a", true).await;
    assert_eq!(producer.commit_offset("g", "t", 9).await, 0);
    let some: Wanted<'_> = ("g", NO_MEMBER, Some(&[(t, &[0, 1])]));
    let all: Wanted<'_> = ("g", NO_MEMBER, None);
    for (ends, first) in [(false, (0, UNSTABLE_OFFSET_COMMIT, -1)), (true, (0, 0, 9))] {
        if ends {
            assert_eq!(producer.end(true).await, 0);
        }
        for wanted in [some, all] {
            let found = fetched(&mut client, &[wanted], true).await;
            assert_eq!(found, [(0, vec![(t, vec![first, (1, 0, 7)])])]);
            let before = (0, 0, if ends { 9 } else { 7 });
            let found = fetched(&mut client, &[wanted], false).await;
            assert_eq!(found, [(0, vec![(t, vec![before, (1, 0, 7)])])]);
        }
    }
}
