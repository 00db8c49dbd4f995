//! ListOffsets and DescribeLogDirs in versions that `kafka-protocol` does not support.

use anyhow::Result;
use kafka_protocol::messages::DescribeLogDirsResponse;
use kafka_protocol::protocol::buf::{ByteBuf, ByteBufMut};
use kafka_protocol::protocol::{Decodable, Encodable, Message};

use super::compact::{encoded_len, put_len, put_no_tagged, put_text};

/// A message whose newer versions have the same encoding as the last one that the codec supports.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Unchanged<M>(pub(crate) M);

impl<M: Message + Decodable> Decodable for Unchanged<M> {
    fn decode<B: ByteBuf>(buf: &mut B, version: i16) -> Result<Self> {
        Ok(Self(M::decode(buf, version.min(M::VERSIONS.max))?))
    }
}

impl<M: Message + Encodable> Encodable for Unchanged<M> {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        self.0.encode(buf, version.min(M::VERSIONS.max))
    }

    fn compute_size(&self, version: i16) -> Result<usize> {
        self.0.compute_size(version.min(M::VERSIONS.max))
    }
}

/// A DescribeLogDirs response, versions 1 to 5. Version 5 adds whether a directory is cordoned:
/// gets no new partitions. The only directory here never is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DescribedLogDirs(pub(crate) DescribeLogDirsResponse);

impl DescribedLogDirs {
    /// The last version that the codec supports.
    const KNOWN: i16 = 4;
    const IS_CORDONED: u8 = 0;
}

impl Encodable for DescribedLogDirs {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, version: i16) -> Result<()> {
        let Self(body) = self;
        if version <= Self::KNOWN {
            return body.encode(buf, version);
        }
        buf.put_i32(body.throttle_time_ms);
        buf.put_i16(body.error_code);
        put_len(buf, body.results.len());
        for dir in &body.results {
            buf.put_i16(dir.error_code);
            put_text(buf, Some(&dir.log_dir));
            put_len(buf, dir.topics.len());
            for topic in &dir.topics {
                topic.encode(buf, Self::KNOWN)?;
            }
            buf.put_i64(dir.total_bytes);
            buf.put_i64(dir.usable_bytes);
            buf.put_u8(Self::IS_CORDONED);
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
mod tests {
    use bytes::{Bytes, BytesMut};
    use kafka_protocol::messages::describe_log_dirs_response::{
        DescribeLogDirsPartition, DescribeLogDirsResult, DescribeLogDirsTopic,
    };
    use kafka_protocol::messages::{ListOffsetsRequest, TopicName};
    use kafka_protocol::protocol::StrBytes;

    use super::*;

    /// The expected bytes follow Kafka's DescribeLogDirsResponse.json.
    #[test]
    fn version_5_of_describe_log_dirs_reports_nothing_as_cordoned() {
        let text = StrBytes::from_static_str;
        let partition =
            DescribeLogDirsPartition::default().with_partition_index(2).with_partition_size(0x300);
        let topic = DescribeLogDirsTopic::default()
            .with_name(TopicName(text("t")))
            .with_partitions(vec![partition]);
        let dir =
            DescribeLogDirsResult::default().with_log_dir(text("/a")).with_topics(vec![topic]);
        let response = DescribedLogDirs(
            DescribeLogDirsResponse::default().with_throttle_time_ms(7).with_results(vec![dir]),
        );
        let mut encoded = BytesMut::new();
        response.encode(&mut encoded, 5).unwrap();
        let expected: &[&[u8]] = &[
            b"\0\0\0\x07\0\0",                   // throttle time, error
            b"\x02\0\0\x03/a",                   // one directory: error, path
            b"\x02\x02t",                        // one topic: name
            b"\x02\0\0\0\x02",                   // one partition: index,
            b"\0\0\0\0\0\0\x03\0",               // size,
            b"\0\0\0\0\0\0\0\0\0\0",             // lag, whether it is a future replica; no tags
            b"\0",                               // the topic has no tags
            b"\xff\xff\xff\xff\xff\xff\xff\xff", // total bytes
            b"\xff\xff\xff\xff\xff\xff\xff\xff", // usable bytes
            b"\0\0\0", // whether it is cordoned; no tags, none of the response
        ];
        assert_eq!(encoded, expected.concat());
        assert_eq!(response.compute_size(5).unwrap(), encoded.len());

        let mut before = BytesMut::new();
        response.encode(&mut before, 4).unwrap();
        assert_eq!(before.len() + 1, encoded.len());
    }

    #[test]
    fn version_11_of_list_offsets_is_version_10() {
        let request = Unchanged(ListOffsetsRequest::default().with_timeout_ms(5));
        let [mut known, mut newer] = [BytesMut::new(), BytesMut::new()];
        request.encode(&mut known, 10).unwrap();
        request.encode(&mut newer, 11).unwrap();
        assert_eq!(known, newer);
        assert_eq!(Unchanged::decode(&mut Bytes::from(newer), 11).unwrap(), request);
    }
}
