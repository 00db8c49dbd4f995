//! ShareFetch, ShareAcknowledge and DescribeShareGroupOffsets in versions that `kafka-protocol`
//! does not support: version 2 of the first two adds one or two fields, version 1 of the last one
//! the lag. The codec handles the rest.
//!
//! Requests were checked against their shapes before, so each array's elements exist.

use anyhow::Result;
use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::share_fetch_response::AcquiredRecords;
use kafka_protocol::messages::{
    DescribeShareGroupOffsetsRequest, ShareAcknowledgeRequest, ShareAcknowledgeResponse,
    ShareFetchRequest,
};
use kafka_protocol::protocol::buf::{ByteBuf, ByteBufMut};
use kafka_protocol::protocol::{Decodable, Encodable, StrBytes};
use uuid::Uuid;

use super::compact::{encoded_len, put_len, put_text, take_text};
use super::response::{Builder, EncodeError, Response};

/// The version of ShareFetch and ShareAcknowledge that the codec supports.
const KNOWN: i16 = 1;

/// A ShareFetch request, versions 1 and 2.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ShareFetch {
    pub(crate) body: ShareFetchRequest,
    /// 0: whole batches; 1: at most the requested number of records.
    pub(crate) acquire_mode: i8,
    /// Whether some acknowledgements request more time.
    pub(crate) is_renew_ack: bool,
}

/// A ShareAcknowledge request, versions 1 and 2.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ShareAcknowledge {
    pub(crate) body: ShareAcknowledgeRequest,
    pub(crate) is_renew_ack: bool,
}

/// A ShareAcknowledge response.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ShareAcknowledged {
    pub(crate) body: ShareAcknowledgeResponse,
    /// From version 2 on.
    pub(crate) acquisition_lock_timeout_ms: i32,
}

/// A DescribeShareGroupOffsets request, versions 0 and 1, which are identical.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DescribeShareOffsets(pub(crate) DescribeShareGroupOffsetsRequest);

/// A DescribeShareGroupOffsets response.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DescribedShareOffsets {
    pub(crate) throttle_time_ms: i32,
    pub(crate) groups: Vec<DescribedGroup>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DescribedGroup {
    pub(crate) group_id: StrBytes,
    pub(crate) topics: Vec<DescribedTopic>,
    pub(crate) error_code: i16,
    pub(crate) error_message: Option<StrBytes>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DescribedTopic {
    pub(crate) name: StrBytes,
    pub(crate) id: Uuid,
    pub(crate) partitions: Vec<DescribedPartition>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DescribedPartition {
    pub(crate) index: i32,
    pub(crate) start_offset: i64,
    pub(crate) leader_epoch: i32,
    /// From version 1 on.
    pub(crate) lag: i64,
    pub(crate) error_code: i16,
    pub(crate) error_message: Option<StrBytes>,
}

impl Decodable for ShareFetch {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version <= KNOWN {
            let body = ShareFetchRequest::decode(buf, version)?;
            return Ok(Self { body, ..Self::default() });
        }
        // Group, member; session epoch, wait time, bytes (two fields), records, batch size.
        let (body, [acquire_mode, is_renew_ack]) = decode_without(buf, 2, 6 * size_of::<i32>())?;
        Ok(Self { body, acquire_mode: acquire_mode as i8, is_renew_ack: is_renew_ack != 0 })
    }
}

impl Decodable for ShareAcknowledge {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        if version <= KNOWN {
            let body = ShareAcknowledgeRequest::decode(buf, version)?;
            return Ok(Self { body, ..Self::default() });
        }
        // Group, member; session epoch.
        let (body, [is_renew_ack]) = decode_without(buf, 2, size_of::<i32>())?;
        Ok(Self { body, is_renew_ack: is_renew_ack != 0 })
    }
}

/// Decodes a message as the version that the codec supports. The `N` additional bytes after `texts`
/// strings and `fixed` bytes are taken out and returned.
fn decode_without<M: Decodable, const N: usize, B: ByteBuf>(
    buf: &mut B,
    texts: usize,
    fixed: usize,
) -> Result<(M, [u8; N])> {
    let all = buf.try_peek_bytes(0..buf.remaining())?;
    let mut rest = all.clone();
    for _ in 0..texts {
        take_text(&mut rest)?;
    }
    rest.try_get_bytes(fixed)?;
    let before = all.slice(..all.len() - rest.len());
    let mut more = [0; N];
    more.copy_from_slice(&rest.try_get_bytes(N)?);
    let mut without = Bytes::from([before, rest].concat());
    let message = M::decode(&mut without, KNOWN)?;
    buf.advance(all.len() - without.len());
    Ok((message, more))
}

impl Decodable for DescribeShareOffsets {
    fn decode<B: ByteBuf>(buf: &mut B, _version: i16) -> Result<Self> {
        Ok(Self(DescribeShareGroupOffsetsRequest::decode(buf, 0)?))
    }
}

impl Encodable for ShareAcknowledged {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        if version <= KNOWN {
            return self.body.encode(buf, version);
        }
        let mut known = BytesMut::new();
        self.body.encode(&mut known, KNOWN)?;
        let mut head = BytesMut::new();
        head.put_i32(self.body.throttle_time_ms);
        head.put_i16(self.body.error_code);
        put_text(&mut head, self.body.error_message.as_ref());
        buf.put_slice(&head);
        buf.put_i32(self.acquisition_lock_timeout_ms);
        buf.put_slice(&known[head.len()..]);
        Ok(())
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        encoded_len(self, version)
    }
}

impl Encodable for DescribedShareOffsets {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        buf.put_i32(self.throttle_time_ms);
        put_len(buf, self.groups.len());
        for group in &self.groups {
            put_text(buf, Some(&group.group_id));
            put_len(buf, group.topics.len());
            for topic in &group.topics {
                put_text(buf, Some(&topic.name));
                buf.put_slice(topic.id.as_bytes());
                put_len(buf, topic.partitions.len());
                for partition in &topic.partitions {
                    partition.encode(buf, version);
                }
                buf.put_u8(0); // No tagged fields, here and below.
            }
            buf.put_i16(group.error_code);
            put_text(buf, group.error_message.as_ref());
            buf.put_u8(0);
        }
        buf.put_u8(0);
        Ok(())
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        encoded_len(self, version)
    }
}

impl DescribedPartition {
    fn encode(&self, buf: &mut impl BufMut, version: i16) {
        buf.put_i32(self.index);
        buf.put_i64(self.start_offset);
        buf.put_i32(self.leader_epoch);
        if version >= 1 {
            buf.put_i64(self.lag);
        }
        buf.put_i16(self.error_code);
        put_text(buf, self.error_message.as_ref());
        buf.put_u8(0);
    }
}

/// A ShareFetch response, versions 1 and 2, which are identical. Encoded here because the codec
/// would copy the records.
#[derive(Default)]
pub(crate) struct ShareFetched {
    pub(crate) throttle_time_ms: i32,
    pub(crate) error_code: i16,
    pub(crate) error_message: Option<StrBytes>,
    pub(crate) acquisition_lock_timeout_ms: i32,
    pub(crate) topics: Vec<(Uuid, Vec<FetchedPartition>)>,
}

/// A partition's part.
#[derive(Default)]
pub(crate) struct FetchedPartition {
    pub(crate) index: i32,
    pub(crate) error_code: i16,
    pub(crate) error_message: Option<StrBytes>,
    pub(crate) acknowledge_error_code: i16,
    pub(crate) acknowledge_error_message: Option<StrBytes>,
    /// The record batches with acquired records, in order.
    pub(crate) records: Vec<Bytes>,
    pub(crate) acquired: Vec<AcquiredRecords>,
}

impl ShareFetched {
    /// Encodes the response; `leader` is the leader of all partitions, with its epoch.
    ///
    /// # Errors
    /// More than 2 GiB.
    pub(crate) fn encode(
        self,
        correlation_id: i32,
        leader: (i32, i32),
    ) -> Result<Response, EncodeError> {
        let mut out = Builder::new(correlation_id, 1);
        let buffer = out.buffer();
        buffer.put_i32(self.throttle_time_ms);
        buffer.put_i16(self.error_code);
        put_text(buffer, self.error_message.as_ref());
        buffer.put_i32(self.acquisition_lock_timeout_ms);
        put_len(buffer, self.topics.len());
        for (id, partitions) in self.topics {
            let buffer = out.buffer();
            buffer.put_slice(id.as_bytes());
            put_len(buffer, partitions.len());
            for partition in partitions {
                partition.encode(&mut out, leader);
            }
            out.buffer().put_u8(0);
        }
        let buffer = out.buffer();
        put_len(buffer, 0); // No other nodes.
        buffer.put_u8(0);
        out.finish()
    }
}

impl FetchedPartition {
    fn encode(self, out: &mut Builder, (leader_id, leader_epoch): (i32, i32)) {
        let buffer = out.buffer();
        buffer.put_i32(self.index);
        buffer.put_i16(self.error_code);
        put_text(buffer, self.error_message.as_ref());
        buffer.put_i16(self.acknowledge_error_code);
        put_text(buffer, self.acknowledge_error_message.as_ref());
        buffer.put_i32(leader_id);
        buffer.put_i32(leader_epoch);
        buffer.put_u8(0);
        put_len(buffer, self.records.iter().map(Bytes::len).sum());
        for batch in self.records {
            out.append(batch);
        }
        let buffer = out.buffer();
        put_len(buffer, self.acquired.len());
        for acquired in self.acquired {
            buffer.put_i64(acquired.first_offset);
            buffer.put_i64(acquired.last_offset);
            buffer.put_i16(acquired.delivery_count);
            buffer.put_u8(0);
        }
        buffer.put_u8(0);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Buf;
    use kafka_protocol::ResponseError;
    use kafka_protocol::messages::{ResponseHeader, ShareFetchResponse};

    use super::*;

    #[test]
    fn the_decoder_reads_a_share_fetch_response() {
        let acquired = |first, last, count| {
            AcquiredRecords::default()
                .with_first_offset(first)
                .with_last_offset(last)
                .with_delivery_count(count)
        };
        let full = FetchedPartition {
            index: 1,
            error_code: ResponseError::UnknownTopicOrPartition.code(),
            error_message: Some(StrBytes::from_static_str("because")),
            acknowledge_error_code: ResponseError::InvalidRecordState.code(),
            acknowledge_error_message: Some(StrBytes::from_static_str("")),
            records: vec![Bytes::from(vec![1; 300]), Bytes::from_static(b"second")],
            acquired: vec![acquired(5, 7, 1), acquired(9, 9, 3)],
        };
        let empty = FetchedPartition { index: 2, ..FetchedPartition::default() };
        let id = Uuid::from_u128(9);
        let response = ShareFetched {
            throttle_time_ms: 12,
            error_code: ResponseError::ShareSessionNotFound.code(),
            error_message: Some(StrBytes::from_static_str("all of it")),
            acquisition_lock_timeout_ms: 30_000,
            topics: vec![(id, vec![full, empty]), (Uuid::nil(), vec![])],
        };
        let response = response.encode(4711, (1, 0)).unwrap();
        let mut bytes = Bytes::from(response.pieces.concat());
        assert_eq!(bytes.get_i32() as usize, bytes.len());
        assert_eq!(ResponseHeader::decode(&mut bytes, 1).unwrap().correlation_id, 4711);
        let decoded = ShareFetchResponse::decode(&mut bytes, 1).unwrap();
        assert!(bytes.is_empty());
        assert_eq!(
            (decoded.throttle_time_ms, decoded.error_code),
            (12, ResponseError::ShareSessionNotFound.code())
        );
        assert_eq!(decoded.error_message.as_deref(), Some("all of it"));
        assert_eq!(decoded.acquisition_lock_timeout_ms, 30_000);
        assert_eq!(decoded.responses.len(), 2);
        assert_eq!(decoded.responses[0].topic_id, id);
        let [full, empty] = &decoded.responses[0].partitions[..] else { panic!() };
        assert_eq!(
            (full.partition_index, full.error_code),
            (1, ResponseError::UnknownTopicOrPartition.code())
        );
        assert_eq!(full.error_message.as_deref(), Some("because"));
        assert_eq!(full.acknowledge_error_code, ResponseError::InvalidRecordState.code());
        assert_eq!(full.acknowledge_error_message.as_deref(), Some(""));
        assert_eq!((full.current_leader.leader_id, full.current_leader.leader_epoch), (1, 0));
        assert_eq!(full.records.as_ref().unwrap().len(), 306);
        assert_eq!(full.acquired_records, [acquired(5, 7, 1), acquired(9, 9, 3)]);
        assert_eq!(empty.records.as_ref().unwrap().len(), 0);
        assert!(empty.acquired_records.is_empty() && empty.error_message.is_none());
    }
}
