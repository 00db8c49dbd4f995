//! Tests of version 10 against bytes that follow Kafka's OffsetCommitRequest.json and so on.

use bytes::{BufMut, BytesMut};
use kafka_protocol::messages::offset_commit_response::{
    OffsetCommitResponsePartition, OffsetCommitResponseTopic,
};
use kafka_protocol::messages::offset_fetch_response::{
    OffsetFetchResponseGroup, OffsetFetchResponsePartitions, OffsetFetchResponseTopics,
};
use kafka_protocol::messages::{ResponseHeader, TopicName};
use kafka_protocol::protocol::StrBytes;

use super::*;
use crate::wire::response::Response;

const FIRST: &[u8; 16] = b"\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10";
const SECOND: &[u8; 16] = b"\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20";

fn ids() -> Vec<Uuid> {
    vec![Uuid::from_bytes(*FIRST), Uuid::from_bytes(*SECOND)]
}

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn commit() -> Vec<u8> {
    let pieces: &[&[u8]] = &[
        b"\x04grp",                  // group
        b"\0\0\0\x05",               // member epoch
        b"\x03m1",                   // member
        b"\x02i",                    // group instance
        b"\x03",                     // two topics
        FIRST,                       //
        b"\x03",                     // two partitions
        b"\0\0\0\x02",               // index
        b"\0\0\0\0\0\0\x12\x34",     // offset
        b"\0\0\0\x03",               // leader epoch
        b"\x05note\0",               // metadata; no tags
        b"\0\0\0\x01",               // index
        b"\0\0\0\0\0\0\0\x07",       // offset
        b"\xff\xff\xff\xff",         // leader epoch
        b"\0\0",                     // no metadata; no tags
        b"\0",                       // no tags of the topic
        SECOND,                      //
        b"\x01\0",                   // no partitions; no tags
        b"\x02\x07\x03abc\x09\x01x", // two tags of the request: 7, of three bytes, and 9
    ];
    pieces.concat()
}

#[test]
fn a_commit_names_topics_by_id() {
    let partition = |index, offset, epoch, metadata: Option<&str>| {
        OffsetCommitRequestPartition::default()
            .with_partition_index(index)
            .with_committed_offset(offset)
            .with_committed_leader_epoch(epoch)
            .with_committed_metadata(metadata.map(text))
    };
    let partitions = vec![partition(2, 0x1234, 3, Some("note")), partition(1, 7, -1, None)];
    let topic = OffsetCommitRequestTopic::default();
    let body = OffsetCommitRequest::default()
        .with_group_id(GroupId(text("grp")))
        .with_generation_id_or_member_epoch(5)
        .with_member_id(text("m1"))
        .with_group_instance_id(Some(text("i")))
        .with_topics(vec![topic.clone().with_partitions(partitions), topic]);
    let mut bytes = Bytes::from([&commit()[..], b"behind"].concat());
    let decoded = OffsetCommit::decode(&mut bytes, 10).unwrap();
    assert_eq!(decoded, OffsetCommit { body, topic_ids: ids() });
    assert_eq!(&bytes[..], b"behind");
}

#[test]
fn a_commit_response_has_the_same_ids() {
    let partition = |index, code| {
        OffsetCommitResponsePartition::default().with_partition_index(index).with_error_code(code)
    };
    let topic = OffsetCommitResponseTopic::default();
    let named = topic.clone().with_name(TopicName(text("name")));
    let body = OffsetCommitResponse::default()
        .with_throttle_time_ms(9)
        .with_topics(vec![named.with_partitions(vec![partition(2, 0), partition(1, 100)]), topic]);
    let response = OffsetCommitted { body, topic_ids: ids() };
    let expected: &[&[u8]] = &[
        b"\0\0\0\x09",         // throttle time
        b"\x03",               // two topics
        FIRST,                 //
        b"\x03",               // two partitions
        b"\0\0\0\x02\0\0\0",   // index, error; no tags
        b"\0\0\0\x01\0\x64\0", // index, UNKNOWN_TOPIC_ID; no tags
        b"\0",                 // no tags of the topic
        SECOND,                //
        b"\x01\0",             // no partitions; no tags
        b"\0",                 // no tags of the response
    ];
    let mut encoded = BytesMut::new();
    response.encode(&mut encoded, 10).unwrap();
    assert_eq!(encoded, expected.concat());
    assert_eq!(response.compute_size(10).unwrap(), encoded.len());

    let lost = OffsetCommitted { topic_ids: ids()[..1].to_vec(), ..response };
    assert!(lost.encode(&mut BytesMut::new(), 10).is_err());
}

fn fetch() -> Vec<u8> {
    let pieces: &[&[u8]] = &[
        b"\x03",                     // two groups
        b"\x04grp",                  // group
        b"\x03m1",                   // member
        b"\0\0\0\x05",               // member epoch
        b"\x03",                     // two topics
        FIRST,                       //
        b"\x03\0\0\0\x02\0\0\0\x01", // two partitions
        b"\x01\x05\x01x",            // a tag of the topic: 5, of one byte
        SECOND,                      //
        b"\x01\0",                   // no partitions; no tags
        b"\0",                       // no tags of the group
        b"\x04all",                  // group
        b"\0",                       // no member
        b"\xff\xff\xff\xff",         // member epoch
        b"\0",                       // all topics
        b"\0",                       // no tags
        b"\x01",                     // stable offsets
        b"\0",                       // no tags of the request
    ];
    pieces.concat()
}

#[test]
fn a_fetch_names_topics_by_id() {
    let topic = OffsetFetchRequestTopics::default();
    let group = OffsetFetchRequestGroup::default();
    let some = group
        .clone()
        .with_group_id(GroupId(text("grp")))
        .with_member_id(Some(text("m1")))
        .with_member_epoch(5)
        .with_topics(Some(vec![topic.clone().with_partition_indexes(vec![2, 1]), topic]));
    let all = group
        .with_group_id(GroupId(text("all")))
        .with_member_id(None)
        .with_member_epoch(-1)
        .with_topics(None);
    let body = OffsetFetchRequest::default().with_groups(vec![some, all]).with_require_stable(true);
    let mut bytes = Bytes::from([&fetch()[..], b"behind"].concat());
    let decoded = OffsetFetch::decode(&mut bytes, 10).unwrap();
    assert_eq!(decoded, OffsetFetch { body, topic_ids: vec![ids(), Vec::new()] });
    assert_eq!(&bytes[..], b"behind");
}

#[test]
fn a_fetch_response_has_ids() {
    let found = OffsetFetchResponsePartitions::default()
        .with_partition_index(2)
        .with_committed_offset(0x1234)
        .with_committed_leader_epoch(3)
        .with_metadata(Some(text("note")));
    let missing = OffsetFetchResponsePartitions::default()
        .with_partition_index(1)
        .with_committed_offset(-1)
        .with_metadata(Some(text("")))
        .with_error_code(100);
    let topic = OffsetFetchResponseTopics::default()
        .with_name(TopicName(text("name")))
        .with_partitions(vec![found, missing]);
    let group = OffsetFetchResponseGroup::default();
    let some = group.clone().with_group_id(GroupId(text("grp"))).with_topics(vec![topic]);
    let refused = group.with_group_id(GroupId(text("all"))).with_error_code(30);
    let body =
        OffsetFetchResponse::default().with_throttle_time_ms(9).with_groups(vec![some, refused]);
    let response = OffsetsFetched { body, topic_ids: vec![ids()[..1].to_vec(), Vec::new()] };
    let expected: &[&[u8]] = &[
        b"\0\0\0\x09",                       // throttle time
        b"\x03",                             // two groups
        b"\x04grp",                          // group
        b"\x02",                             // one topic
        FIRST,                               //
        b"\x03",                             // two partitions
        b"\0\0\0\x02",                       // index
        b"\0\0\0\0\0\0\x12\x34",             // offset
        b"\0\0\0\x03",                       // leader epoch
        b"\x05note\0\0\0",                   // metadata, error; no tags
        b"\0\0\0\x01",                       // index
        b"\xff\xff\xff\xff\xff\xff\xff\xff", // offset
        b"\xff\xff\xff\xff",                 // leader epoch
        b"\x01\0\x64\0",                     // metadata, UNKNOWN_TOPIC_ID; no tags
        b"\0",                               // no tags of the topic
        b"\0\0\0",                           // error of the group; no tags
        b"\x04all",                          // group
        b"\x01\0\x1e\0",                     // no topics, GROUP_AUTHORIZATION_FAILED; no tags
        b"\0",                               // no tags of the response
    ];
    let mut encoded = BytesMut::new();
    response.encode(&mut encoded, 10).unwrap();
    assert_eq!(encoded, expected.concat());
    assert_eq!(response.compute_size(10).unwrap(), encoded.len());

    for topic_ids in [vec![ids(), Vec::new()], vec![ids()[..1].to_vec()]] {
        let wrong = OffsetsFetched { body: response.body.clone(), topic_ids };
        assert!(wrong.encode(&mut BytesMut::new(), 10).is_err());
    }
}

#[test]
fn null_in_a_required_field_is_refused() {
    let decode_commit = |bytes: Vec<u8>| OffsetCommit::decode(&mut Bytes::from(bytes), 10);
    let decode_fetch = |bytes: Vec<u8>| OffsetFetch::decode(&mut Bytes::from(bytes), 10);
    // Group, member, topics, partitions of the first topic.
    for (at, len) in [(0, 4), (8, 3), (13, 1), (30, 1)] {
        let mut bytes = commit();
        bytes.splice(at..at + len, [0]);
        let error = decode_commit(bytes).unwrap_err().to_string();
        assert!(error.ends_with("is null"), "{at}: {error}");
    }
    // Groups, group, partitions of the first topic.
    for (at, len) in [(0, 1), (1, 4), (29, 1)] {
        let mut bytes = fetch();
        bytes.splice(at..at + len, [0]);
        let error = decode_fetch(bytes).unwrap_err().to_string();
        assert!(error.ends_with("is null"), "{at}: {error}");
    }
    assert!(decode_commit(commit()).is_ok() && decode_fetch(fetch()).is_ok());
}

/// Lengths of more than one byte, and responses of some size.
#[test]
fn many_topics_survive_a_round_trip() {
    let ids: Vec<Uuid> = (0..1_000).map(Uuid::from_u128).collect();
    let mut bytes = BytesMut::new();
    bytes.put_slice(b"\x02\x04grp\0\xff\xff\xff\xff\xe9\x07");
    for id in &ids {
        bytes.put_slice(id.as_bytes());
        bytes.put_slice(b"\xad\x02");
        (0..300).for_each(|index| bytes.put_i32(index));
        bytes.put_u8(0);
    }
    bytes.put_slice(b"\0\0\0");
    let mut bytes = bytes.freeze();
    let decoded = OffsetFetch::decode(&mut bytes, 10).unwrap();
    assert!(bytes.is_empty());
    assert_eq!(decoded.topic_ids, std::slice::from_ref(&ids));
    let topics = decoded.body.groups[0].topics.as_ref().unwrap();
    assert!(topics.iter().all(|topic| topic.partition_indexes.iter().copied().eq(0..300)));

    let answer = |topic: &OffsetFetchRequestTopics| {
        let partitions = topic.partition_indexes.iter().map(|index| {
            OffsetFetchResponsePartitions::default()
                .with_partition_index(*index)
                .with_committed_offset(i64::from(*index))
                .with_metadata(Some(text("")))
        });
        OffsetFetchResponseTopics::default().with_partitions(partitions.collect())
    };
    let group = OffsetFetchResponseGroup::default()
        .with_group_id(GroupId(text("grp")))
        .with_topics(topics.iter().map(answer).collect());
    let body = OffsetFetchResponse::default().with_groups(vec![group]);
    let response = OffsetsFetched { body, topic_ids: vec![ids.clone()] };
    let response = Response::encode(7, 1, &response, 10).unwrap();
    let mut bytes = Bytes::from(response.pieces.concat());
    assert_eq!(bytes.get_u32() as usize, bytes.len());
    assert_eq!(ResponseHeader::decode(&mut bytes, 1).unwrap().correlation_id, 7);
    assert_eq!(&bytes.split_to(11)[..], b"\0\0\0\0\x02\x04grp\xe9\x07");
    for id in &ids {
        assert_eq!(&bytes.split_to(18)[..], [id.as_bytes(), &b"\xad\x02"[..]].concat());
        for index in 0..300 {
            assert_eq!((bytes.get_i32(), bytes.get_i64()), (index, index.into()));
            assert_eq!(&bytes.split_to(8)[..], b"\xff\xff\xff\xff\x01\0\0\0");
        }
        assert_eq!(bytes.get_u8(), 0);
    }
    assert_eq!(&bytes[..], b"\0\0\0\0");
}
