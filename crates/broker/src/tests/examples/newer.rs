//! The client's side of versions that the codec does not support: OffsetCommit and OffsetFetch 10,
//! ListOffsets 11, DescribeLogDirs 5.

use anyhow::Result;
use bytes::{Buf, BufMut, Bytes};
use kafka_protocol::messages::describe_log_dirs_response::{
    DescribeLogDirsResult, DescribeLogDirsTopic,
};
use kafka_protocol::messages::offset_commit_response::{
    OffsetCommitResponsePartition, OffsetCommitResponseTopic,
};
use kafka_protocol::messages::offset_fetch_response::{
    OffsetFetchResponseGroup, OffsetFetchResponsePartitions, OffsetFetchResponseTopics,
};
use kafka_protocol::messages::{
    ApiKey, DescribeLogDirsRequest, DescribeLogDirsResponse, GroupId, ListOffsetsRequest,
    ListOffsetsResponse, OffsetCommitRequest, OffsetCommitResponse, OffsetFetchRequest,
    OffsetFetchResponse,
};
use kafka_protocol::protocol::buf::{ByteBuf, ByteBufMut};
use kafka_protocol::protocol::{
    Decodable, Encodable, HeaderVersion, Message, Request, StrBytes, VersionRange,
};
use uuid::Uuid;

use super::encode;
use crate::wire::newer::{DescribedLogDirs, Unchanged};
use crate::wire::offsets::{OffsetCommit, OffsetCommitted, OffsetFetch, OffsetsFetched};

/// Implements a message with one version more than the codec has, and the same header.
macro_rules! newer {
    ($type:ty, $known:ty) => {
        impl Message for $type {
            const VERSIONS: VersionRange = VersionRange {
                min: <$known as Message>::VERSIONS.min,
                max: <$known as Message>::VERSIONS.max + 1,
            };
            const DEPRECATED_VERSIONS: Option<VersionRange> = None;
        }
        impl HeaderVersion for $type {
            fn header_version(version: i16) -> i16 {
                <$known>::header_version(version)
            }
        }
    };
}
newer!(OffsetCommit, OffsetCommitRequest);
newer!(OffsetCommitted, OffsetCommitResponse);
newer!(OffsetFetch, OffsetFetchRequest);
newer!(OffsetsFetched, OffsetFetchResponse);
newer!(Unchanged<ListOffsetsRequest>, ListOffsetsRequest);
newer!(Unchanged<ListOffsetsResponse>, ListOffsetsResponse);
newer!(Unchanged<DescribeLogDirsRequest>, DescribeLogDirsRequest);
newer!(DescribedLogDirs, DescribeLogDirsResponse);

impl Request for OffsetCommit {
    const KEY: i16 = ApiKey::OffsetCommit as i16;
    type Response = OffsetCommitted;
}

impl Request for OffsetFetch {
    const KEY: i16 = ApiKey::OffsetFetch as i16;
    type Response = OffsetsFetched;
}

impl Request for Unchanged<ListOffsetsRequest> {
    const KEY: i16 = ApiKey::ListOffsets as i16;
    type Response = Unchanged<ListOffsetsResponse>;
}

impl Request for Unchanged<DescribeLogDirsRequest> {
    const KEY: i16 = ApiKey::DescribeLogDirs as i16;
    type Response = DescribedLogDirs;
}

/// Writes a length, which is short here: one byte, 0 for null.
fn put_len(buf: &mut impl BufMut, len: Option<usize>) {
    let len = len.map_or(0, |len| len + 1);
    assert!(len < 0x80, "{len}");
    buf.put_u8(len as u8);
}

fn put_text(buf: &mut impl BufMut, text: Option<&StrBytes>) {
    put_len(buf, text.map(|text| text.len()));
    buf.put_slice(text.map_or(&[][..], |text| text.as_bytes()));
}

fn take_len(buf: &mut Bytes) -> usize {
    let len = buf.get_u8();
    assert!((1..0x80).contains(&len), "{len}");
    usize::from(len) - 1
}

fn take_text(buf: &mut Bytes) -> StrBytes {
    let len = take_len(buf);
    StrBytes::from_utf8(buf.split_to(len)).unwrap()
}

fn take_id(buf: &mut Bytes) -> Uuid {
    Uuid::from_slice(&buf.split_to(16)).unwrap()
}

/// Reads an array; its elements have no tags.
fn take_structs<T>(buf: &mut Bytes, mut take: impl FnMut(&mut Bytes) -> T) -> Vec<T> {
    let len = take_len(buf);
    let element = |_| {
        let element = take(buf);
        assert_eq!(buf.get_u8(), 0);
        element
    };
    (0..len).map(element).collect()
}

impl Encodable for OffsetCommit {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        let Self { body, topic_ids } = self;
        if version < 10 {
            return body.encode(buf, version);
        }
        put_text(buf, Some(&body.group_id));
        buf.put_i32(body.generation_id_or_member_epoch);
        put_text(buf, Some(&body.member_id));
        put_text(buf, body.group_instance_id.as_ref());
        assert_eq!(body.topics.len(), topic_ids.len());
        put_len(buf, Some(body.topics.len()));
        for (topic, id) in body.topics.iter().zip(topic_ids) {
            buf.put_slice(id.as_bytes());
            put_len(buf, Some(topic.partitions.len()));
            for partition in &topic.partitions {
                buf.put_i32(partition.partition_index);
                buf.put_i64(partition.committed_offset);
                buf.put_i32(partition.committed_leader_epoch);
                put_text(buf, partition.committed_metadata.as_ref());
                buf.put_u8(0);
            }
            buf.put_u8(0);
        }
        buf.put_u8(0);
        Ok(())
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        Ok(encode(self, version).len())
    }
}

impl Decodable for OffsetCommitted {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version < 10 {
            let body = OffsetCommitResponse::decode(buf, version)?;
            return Ok(Self { body, topic_ids: Vec::new() });
        }
        let mut all = buf.get_bytes(buf.remaining());
        let mut body = OffsetCommitResponse::default().with_throttle_time_ms(all.get_i32());
        let topics = take_structs(&mut all, |buf| {
            let id = take_id(buf);
            let partitions = take_structs(buf, |buf| {
                OffsetCommitResponsePartition::default()
                    .with_partition_index(buf.get_i32())
                    .with_error_code(buf.get_i16())
            });
            (OffsetCommitResponseTopic::default().with_partitions(partitions), id)
        });
        let topic_ids;
        (body.topics, topic_ids) = topics.into_iter().unzip();
        assert_eq!(&all[..], b"\0");
        Ok(Self { body, topic_ids })
    }
}

impl Encodable for OffsetFetch {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        let Self { body, topic_ids } = self;
        if version < 10 {
            return body.encode(buf, version);
        }
        assert_eq!(body.groups.len(), topic_ids.len());
        put_len(buf, Some(body.groups.len()));
        for (group, ids) in body.groups.iter().zip(topic_ids) {
            put_text(buf, Some(&group.group_id));
            put_text(buf, group.member_id.as_ref());
            buf.put_i32(group.member_epoch);
            put_len(buf, group.topics.as_ref().map(Vec::len));
            for (topic, id) in group.topics.iter().flatten().zip(ids) {
                buf.put_slice(id.as_bytes());
                put_len(buf, Some(topic.partition_indexes.len()));
                topic.partition_indexes.iter().for_each(|index| buf.put_i32(*index));
                buf.put_u8(0);
            }
            buf.put_u8(0);
        }
        buf.put_u8(body.require_stable.into());
        buf.put_u8(0);
        Ok(())
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        Ok(encode(self, version).len())
    }
}

impl Decodable for OffsetsFetched {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version < 10 {
            let body = OffsetFetchResponse::decode(buf, version)?;
            return Ok(Self { body, topic_ids: Vec::new() });
        }
        let mut all = buf.get_bytes(buf.remaining());
        let mut body = OffsetFetchResponse::default().with_throttle_time_ms(all.get_i32());
        let groups = take_structs(&mut all, |buf| {
            let group = OffsetFetchResponseGroup::default().with_group_id(GroupId(take_text(buf)));
            let topics = take_structs(buf, |buf| {
                let id = take_id(buf);
                let partitions = take_structs(buf, |buf| {
                    OffsetFetchResponsePartitions::default()
                        .with_partition_index(buf.get_i32())
                        .with_committed_offset(buf.get_i64())
                        .with_committed_leader_epoch(buf.get_i32())
                        .with_metadata(Some(take_text(buf)))
                        .with_error_code(buf.get_i16())
                });
                (OffsetFetchResponseTopics::default().with_partitions(partitions), id)
            });
            let (topics, ids) = topics.into_iter().unzip();
            (group.with_topics(topics).with_error_code(buf.get_i16()), ids)
        });
        let topic_ids;
        (body.groups, topic_ids) = groups.into_iter().unzip();
        assert_eq!(&all[..], b"\0");
        Ok(Self { body, topic_ids })
    }
}

impl Decodable for DescribedLogDirs {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version < 5 {
            return Ok(Self(DescribeLogDirsResponse::decode(buf, version)?));
        }
        let mut all = buf.get_bytes(buf.remaining());
        let body = DescribeLogDirsResponse::default()
            .with_throttle_time_ms(all.get_i32())
            .with_error_code(all.get_i16());
        let results = take_structs(&mut all, |buf| {
            let result = DescribeLogDirsResult::default()
                .with_error_code(buf.get_i16())
                .with_log_dir(take_text(buf));
            let topics = (0..take_len(buf)).map(|_| DescribeLogDirsTopic::decode(buf, 4).unwrap());
            let result = result
                .with_topics(topics.collect())
                .with_total_bytes(buf.get_i64())
                .with_usable_bytes(buf.get_i64());
            assert_eq!(buf.get_u8(), 0, "cordoned off");
            result
        });
        assert_eq!(&all[..], b"\0");
        Ok(Self(body.with_results(results)))
    }
}
