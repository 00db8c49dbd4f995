//! OffsetCommit and OffsetFetch in version 10, which `kafka-protocol` does not support: it has
//! topic IDs instead of names. The codec handles all other versions, and partitions, which are as
//! in version 9.
//!
//! Requests were checked against their shapes before, so each array's elements exist.

use anyhow::{Result, ensure};
use bytes::{Buf, Bytes};
use kafka_protocol::messages::offset_commit_request::{
    OffsetCommitRequestPartition, OffsetCommitRequestTopic,
};
use kafka_protocol::messages::offset_fetch_request::{
    OffsetFetchRequestGroup, OffsetFetchRequestTopics,
};
use kafka_protocol::messages::{
    GroupId, OffsetCommitRequest, OffsetCommitResponse, OffsetFetchRequest, OffsetFetchResponse,
};
use kafka_protocol::protocol::buf::{ByteBuf, ByteBufMut};
use kafka_protocol::protocol::{Decodable, Encodable};
use uuid::Uuid;

use super::compact::{
    encoded_len, not_null, put_len, put_no_tagged, put_text, skip_tagged, take_array, take_text,
};

/// The last version of both that the codec supports.
const KNOWN: i16 = 9;

/// An OffsetCommit request, versions 2 to 10.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OffsetCommit {
    /// In version 10 the topic names are empty.
    pub(crate) body: OffsetCommitRequest,
    /// The IDs of its topics; none before version 10.
    pub(crate) topic_ids: Vec<Uuid>,
}

/// An OffsetCommit response.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OffsetCommitted {
    pub(crate) body: OffsetCommitResponse,
    /// The IDs of its topics; not needed before version 10.
    pub(crate) topic_ids: Vec<Uuid>,
}

/// An OffsetFetch request, versions 1 to 10.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OffsetFetch {
    /// In version 10 the topic names are empty.
    pub(crate) body: OffsetFetchRequest,
    /// The IDs of each group's topics; none before version 10.
    pub(crate) topic_ids: Vec<Vec<Uuid>>,
}

/// An OffsetFetch response.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OffsetsFetched {
    pub(crate) body: OffsetFetchResponse,
    /// The IDs of each group's topics; not needed before version 10.
    pub(crate) topic_ids: Vec<Vec<Uuid>>,
}

/// Decodes the rest of a request from one buffer without copying it.
fn decode_from<B: ByteBuf, T>(buf: &mut B, take: impl Fn(&mut Bytes) -> Result<T>) -> Result<T> {
    let mut rest = buf.try_peek_bytes(0..buf.remaining())?;
    let taken = take(&mut rest)?;
    buf.advance(buf.remaining() - rest.len());
    Ok(taken)
}

fn take_id(buf: &mut Bytes) -> Result<Uuid> {
    Ok(Uuid::from_slice(&buf.try_get_bytes(size_of::<Uuid>())?)?)
}

fn take_i32(buf: &mut Bytes) -> Result<i32> {
    Ok(buf.try_get_bytes(size_of::<i32>())?.get_i32())
}

/// Writes a topic of a response in version 10.
fn put_topic(buf: &mut impl ByteBufMut, id: Uuid, partitions: &[impl Encodable]) -> Result<()> {
    buf.put_slice(id.as_bytes());
    put_len(buf, partitions.len());
    for partition in partitions {
        partition.encode(buf, KNOWN)?;
    }
    put_no_tagged(buf);
    Ok(())
}

impl Decodable for OffsetCommit {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version <= KNOWN {
            let body = OffsetCommitRequest::decode(buf, version)?;
            return Ok(Self { body, topic_ids: Vec::new() });
        }
        decode_from(buf, |buf| {
            let mut body = OffsetCommitRequest::default()
                .with_group_id(GroupId(not_null(take_text(buf)?, "the group ID")?))
                .with_generation_id_or_member_epoch(take_i32(buf)?)
                .with_member_id(not_null(take_text(buf)?, "the member ID")?)
                .with_group_instance_id(take_text(buf)?);
            let topics = take_array(buf, |buf| {
                let id = take_id(buf)?;
                let partitions =
                    take_array(buf, |buf| OffsetCommitRequestPartition::decode(buf, KNOWN))?;
                skip_tagged(buf)?;
                let topic = OffsetCommitRequestTopic::default();
                Ok((topic.with_partitions(not_null(partitions, "an array of partitions")?), id))
            })?;
            let topic_ids;
            (body.topics, topic_ids) = not_null(topics, "the array of topics")?.into_iter().unzip();
            skip_tagged(buf)?;
            Ok(Self { body, topic_ids })
        })
    }
}

impl Encodable for OffsetCommitted {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        let Self { body, topic_ids } = self;
        if version <= KNOWN {
            return body.encode(buf, version);
        }
        ensure!(body.topics.len() == topic_ids.len(), "the numbers of topics and IDs differ");
        buf.put_i32(body.throttle_time_ms);
        put_len(buf, body.topics.len());
        for (topic, id) in body.topics.iter().zip(topic_ids) {
            put_topic(buf, *id, &topic.partitions)?;
        }
        put_no_tagged(buf);
        Ok(())
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        encoded_len(self, version)
    }
}

impl Decodable for OffsetFetch {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version <= KNOWN {
            let body = OffsetFetchRequest::decode(buf, version)?;
            return Ok(Self { body, topic_ids: Vec::new() });
        }
        decode_from(buf, |buf| {
            let mut body = OffsetFetchRequest::default();
            let groups = not_null(take_array(buf, take_group)?, "the array of groups")?;
            let topic_ids;
            (body.groups, topic_ids) = groups.into_iter().unzip();
            body.require_stable = buf.try_get_bytes(1)?[0] != 0;
            skip_tagged(buf)?;
            Ok(Self { body, topic_ids })
        })
    }
}

fn take_group(buf: &mut Bytes) -> Result<(OffsetFetchRequestGroup, Vec<Uuid>)> {
    let group = OffsetFetchRequestGroup::default()
        .with_group_id(GroupId(not_null(take_text(buf)?, "a group ID")?))
        .with_member_id(take_text(buf)?)
        .with_member_epoch(take_i32(buf)?);
    let topics = take_array(buf, |buf| {
        let id = take_id(buf)?;
        let indexes = not_null(take_array(buf, take_i32)?, "an array of partitions")?;
        skip_tagged(buf)?;
        Ok((OffsetFetchRequestTopics::default().with_partition_indexes(indexes), id))
    })?;
    skip_tagged(buf)?;
    Ok(match topics {
        None => (group.with_topics(None), Vec::new()),
        Some(topics) => {
            let (topics, ids) = topics.into_iter().unzip();
            (group.with_topics(Some(topics)), ids)
        }
    })
}

impl Encodable for OffsetsFetched {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        let Self { body, topic_ids } = self;
        if version <= KNOWN {
            return body.encode(buf, version);
        }
        ensure!(body.groups.len() == topic_ids.len(), "the numbers of groups and ID lists differ");
        buf.put_i32(body.throttle_time_ms);
        put_len(buf, body.groups.len());
        for (group, ids) in body.groups.iter().zip(topic_ids) {
            ensure!(group.topics.len() == ids.len(), "the numbers of topics and IDs differ");
            put_text(buf, Some(&group.group_id));
            put_len(buf, group.topics.len());
            for (topic, id) in group.topics.iter().zip(ids) {
                put_topic(buf, *id, &topic.partitions)?;
            }
            buf.put_i16(group.error_code);
            put_no_tagged(buf);
        }
        put_no_tagged(buf);
        Ok(())
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        encoded_len(self, version)
    }
}

#[cfg(test)]
mod tests;
