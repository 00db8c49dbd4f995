//! Requests of share groups (KIP-932), and the client's side of those that the codec does not
//! support.

use anyhow::Result;
use bytes::{Buf, Bytes, BytesMut};
use kafka_protocol::messages::{
    ApiKey, DescribeShareGroupOffsetsResponse, GroupId, ShareAcknowledgeResponse,
    ShareFetchResponse, ShareGroupDescribeRequest, ShareGroupHeartbeatRequest, TopicName,
    alter_share_group_offsets_request, delete_share_group_offsets_request,
    describe_share_group_offsets_request, share_acknowledge_request, share_fetch_request,
};
use kafka_protocol::protocol::buf::{ByteBuf, ByteBufMut};
use kafka_protocol::protocol::{
    Decodable, Encodable, HeaderVersion, Message, Request, VersionRange,
};

use super::{World, encode, text};
use crate::wire::share::{DescribeShareOffsets, ShareAcknowledge, ShareAcknowledged, ShareFetch};

const FLEXIBLE_REQUEST: i16 = 2;

macro_rules! message {
    ($type:ty, $min:literal, $max:literal, $header:expr) => {
        impl Message for $type {
            const VERSIONS: VersionRange = VersionRange { min: $min, max: $max };
            const DEPRECATED_VERSIONS: Option<VersionRange> = None;
        }
        impl HeaderVersion for $type {
            fn header_version(_: i16) -> i16 {
                $header
            }
        }
    };
}
message!(ShareFetch, 1, 2, FLEXIBLE_REQUEST);
message!(ShareAcknowledge, 1, 2, FLEXIBLE_REQUEST);
message!(DescribeShareOffsets, 0, 1, FLEXIBLE_REQUEST);
message!(Fetched, 1, 2, 1);
message!(ShareAcknowledged, 1, 2, 1);
message!(Offsets, 0, 1, 1);

impl Request for ShareFetch {
    const KEY: i16 = ApiKey::ShareFetch as i16;
    type Response = Fetched;
}

impl Request for ShareAcknowledge {
    const KEY: i16 = ApiKey::ShareAcknowledge as i16;
    type Response = ShareAcknowledged;
}

impl Request for DescribeShareOffsets {
    const KEY: i16 = ApiKey::DescribeShareGroupOffsets as i16;
    type Response = Offsets;
}

/// Both versions are equal.
#[derive(Debug)]
pub(crate) struct Fetched(pub(crate) ShareFetchResponse);

/// The response of version 0, and the lags in order.
#[derive(Debug)]
pub(crate) struct Offsets(pub(crate) DescribeShareGroupOffsetsResponse, pub(crate) Vec<i64>);

impl Encodable for ShareFetch {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        let more = [self.acquire_mode as u8, self.is_renew_ack.into()];
        put_with(&self.body, buf, version, 2, 24, &more)
    }
    fn compute_size(&self, version: i16) -> Result<usize> {
        Ok(encode(self, version).len())
    }
}

impl Encodable for ShareAcknowledge {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        put_with(&self.body, buf, version, 2, 4, &[self.is_renew_ack.into()])
    }
    fn compute_size(&self, version: i16) -> Result<usize> {
        Ok(encode(self, version).len())
    }
}

/// Version 2 has additional bytes after `texts` strings and a number of other bytes. (Strings are
/// short here.)
fn put_with<B: ByteBufMut>(
    message: &impl Encodable,
    buf: &mut B,
    version: i16,
    texts: usize,
    fixed: usize,
    more: &[u8],
) -> Result<()> {
    let mut known = BytesMut::new();
    message.encode(&mut known, 1)?;
    if version < 2 {
        buf.put_slice(&known);
        return Ok(());
    }
    let texts = (0..texts).fold(0, |at, _| at + usize::from(known[at].max(1)));
    let (before, behind) = known.split_at(texts + fixed);
    buf.put_slice(before);
    buf.put_slice(more);
    buf.put_slice(behind);
    Ok(())
}

impl Encodable for DescribeShareOffsets {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, _version: i16) -> Result<()> {
        self.0.encode(buf, 0)
    }
    fn compute_size(&self, _version: i16) -> Result<usize> {
        self.0.compute_size(0)
    }
}

impl Encodable for Fetched {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, _version: i16) -> Result<()> {
        self.0.encode(buf, 1)
    }
    fn compute_size(&self, _version: i16) -> Result<usize> {
        self.0.compute_size(1)
    }
}

impl Decodable for Fetched {
    fn decode<B: ByteBuf>(buf: &mut B, _version: i16) -> Result<Self> {
        ShareFetchResponse::decode(buf, 1).map(Self)
    }
}

impl Decodable for ShareAcknowledged {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version < 2 {
            let body = ShareAcknowledgeResponse::decode(buf, 1)?;
            return Ok(Self { body, acquisition_lock_timeout_ms: 0 });
        }
        let all = buf.get_bytes(buf.remaining());
        // Time, error, message.
        let at = 6 + usize::from(all[6].max(1));
        let acquisition_lock_timeout_ms = all.slice(at..).get_i32();
        let mut known = Bytes::from([&all[..at], &all[at + 4..]].concat());
        let body = ShareAcknowledgeResponse::decode(&mut known, 1)?;
        assert!(known.is_empty());
        Ok(Self { body, acquisition_lock_timeout_ms })
    }
}

impl Encodable for Offsets {
    fn encode<B: ByteBufMut>(&self, _: &mut B, _version: i16) -> Result<()> {
        unreachable!("the server's own type is encoded")
    }
    fn compute_size(&self, _version: i16) -> Result<usize> {
        unreachable!("the server's own type is encoded")
    }
}

impl Decodable for Offsets {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version < 1 {
            return Ok(Self(DescribeShareGroupOffsetsResponse::decode(buf, 0)?, Vec::new()));
        }
        // The lag follows index, start and epoch of each partition: remove it.
        let mut all = buf.get_bytes(buf.remaining());
        let (mut known, mut lags) = (BytesMut::new(), Vec::new());
        let mut copy = |all: &mut Bytes, len: usize| {
            let bytes = all.split_to(len);
            known.extend_from_slice(&bytes);
            bytes
        };
        let text = |all: &Bytes| usize::from(all[0].max(1));
        copy(&mut all, 4);
        for _ in 1..copy(&mut all, 1)[0] {
            let len = text(&all);
            copy(&mut all, len);
            for _ in 1..copy(&mut all, 1)[0] {
                let len = text(&all);
                copy(&mut all, len + 16);
                for _ in 1..copy(&mut all, 1)[0] {
                    copy(&mut all, 16);
                    lags.push(all.get_i64());
                    copy(&mut all, 2);
                    let len = text(&all);
                    copy(&mut all, len + 1);
                }
                copy(&mut all, 1);
            }
            copy(&mut all, 2);
            let len = text(&all);
            copy(&mut all, len + 1);
        }
        let rest = all.len();
        copy(&mut all, rest);
        let mut known = known.freeze();
        let decoded = DescribeShareGroupOffsetsResponse::decode(&mut known, 0)?;
        assert!(known.is_empty());
        Ok(Self(decoded, lags))
    }
}

pub(super) fn body(key: ApiKey, version: i16, world: &World) -> Option<Bytes> {
    let group = || GroupId(text(&world.group));
    let topic = || TopicName(text(world.topic));
    let member = || Some(text("member"));
    Some(match key {
        ApiKey::ShareGroupHeartbeat => encode(
            &ShareGroupHeartbeatRequest::default()
                .with_group_id(group())
                .with_member_id(text("member"))
                .with_member_epoch(5)
                .with_rack_id(Some(text("rack")))
                .with_subscribed_topic_names(Some(vec![topic()])),
            version,
        ),
        ApiKey::ShareGroupDescribe => encode(
            &ShareGroupDescribeRequest::default()
                .with_group_ids(vec![group()])
                .with_include_authorized_operations(true),
            version,
        ),
        ApiKey::ShareFetch => {
            use share_fetch_request::*;
            let partition = FetchPartition::default().with_partition_index(2);
            let topics = FetchTopic::default()
                .with_topic_id(world.topic_id)
                .with_partitions(vec![partition]);
            let forgotten =
                ForgottenTopic::default().with_topic_id(world.topic_id).with_partitions(vec![8, 9]);
            let body = ShareFetchRequest::default()
                .with_group_id(Some(group()))
                .with_member_id(member())
                .with_max_wait_ms(1)
                .with_min_bytes(1)
                .with_max_bytes(1 << 20)
                .with_max_records(500)
                .with_batch_size(500)
                .with_topics(vec![topics])
                .with_forgotten_topics_data(vec![forgotten]);
            let is_new = version >= 2;
            encode(&ShareFetch { body, acquire_mode: is_new.into(), is_renew_ack: false }, version)
        }
        ApiKey::ShareAcknowledge => {
            use share_acknowledge_request::*;
            let batch = AcknowledgementBatch::default()
                .with_first_offset(3)
                .with_last_offset(4)
                .with_acknowledge_types(vec![1, 2]);
            let partition = AcknowledgePartition::default()
                .with_partition_index(2)
                .with_acknowledgement_batches(vec![batch]);
            let topics = AcknowledgeTopic::default()
                .with_topic_id(world.topic_id)
                .with_partitions(vec![partition]);
            let body = ShareAcknowledgeRequest::default()
                .with_group_id(Some(group()))
                .with_member_id(member())
                .with_share_session_epoch(1)
                .with_topics(vec![topics]);
            encode(&ShareAcknowledge { body, is_renew_ack: version >= 2 }, version)
        }
        ApiKey::DescribeShareGroupOffsets => {
            use describe_share_group_offsets_request::*;
            let topics = DescribeShareGroupOffsetsRequestTopic::default()
                .with_topic_name(topic())
                .with_partitions(vec![0, 1]);
            let group = DescribeShareGroupOffsetsRequestGroup::default()
                .with_group_id(group())
                .with_topics(Some(vec![topics]));
            let request = DescribeShareGroupOffsetsRequest::default().with_groups(vec![group]);
            encode(&DescribeShareOffsets(request), version)
        }
        ApiKey::AlterShareGroupOffsets => {
            use alter_share_group_offsets_request::*;
            let partition = AlterShareGroupOffsetsRequestPartition::default()
                .with_partition_index(1)
                .with_start_offset(7);
            let topics = AlterShareGroupOffsetsRequestTopic::default()
                .with_topic_name(topic())
                .with_partitions(vec![partition]);
            encode(
                &AlterShareGroupOffsetsRequest::default()
                    .with_group_id(group())
                    .with_topics(vec![topics]),
                version,
            )
        }
        ApiKey::DeleteShareGroupOffsets => {
            use delete_share_group_offsets_request::*;
            let topics = DeleteShareGroupOffsetsRequestTopic::default().with_topic_name(topic());
            encode(
                &DeleteShareGroupOffsetsRequest::default()
                    .with_group_id(group())
                    .with_topics(vec![topics]),
                version,
            )
        }
        _ => return None,
    })
}
