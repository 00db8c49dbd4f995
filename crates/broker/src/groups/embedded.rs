//! The formats that consumers embed in the metadata and the assignments of the classic protocol
//! (Kafka's `ConsumerProtocolSubscription` and `ConsumerProtocolAssignment`). Parsed only for
//! groups that change their type and for those whose offsets are deleted or expire.
//!
//! Parsed by hand: the decoders of `kafka-protocol` allocate what a length field claims, and these
//! bytes have not passed a shape check.

use std::collections::BTreeSet;

use bytes::{BufMut, Bytes, BytesMut};

use super::consumer::Assignment;
use super::topics_view::TopicsView;

/// The protocol type of consumers.
pub(super) const CONSUMER: &str = "consumer";

/// A member's subscription and the partitions that it owns.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Subscription {
    pub(super) topics: BTreeSet<String>,
    /// By topic name. Empty for members that give up all partitions before they join again.
    owned: Vec<(String, Vec<i32>)>,
    pub(super) rack: Option<String>,
}

impl Subscription {
    /// Parses a subscription; `None` if it is malformed.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut input = Input(bytes);
        let version = input.version()?;
        let topics = input.list(Input::string)?.into_iter().collect();
        input.user_data()?;
        let mut subscription = Self { topics, ..Self::default() };
        if version >= 1 {
            subscription.owned = input.list(Input::topic)?;
        }
        if version >= 2 {
            // The generation in which it received them.
            input.i32()?;
        }
        if version >= 3 {
            subscription.rack = input.nullable_string()?;
        }
        // Fields of newer versions follow; they are not needed.
        Some(subscription)
    }

    /// The member's partitions of topics that exist.
    pub(super) fn owned(&self, topics: &TopicsView) -> Assignment {
        by_id(&self.owned, topics)
    }
}

/// Parses only the topics of a [`Subscription`], and ignores what follows them. `None` if they are
/// malformed.
pub(super) fn read_topics(bytes: &[u8]) -> Option<Vec<String>> {
    let mut input = Input(bytes);
    input.version()?;
    input.list(Input::string)
}

/// Parses the assignment that a leader has given a member; `None` if it is malformed. Empty bytes
/// mean no partitions.
pub(super) fn read_assignment(bytes: &[u8], topics: &TopicsView) -> Option<Assignment> {
    if bytes.is_empty() {
        return Some(Assignment::new());
    }
    let mut input = Input(bytes);
    input.version()?;
    Some(by_id(&input.list(Input::topic)?, topics))
}

/// Encodes an assignment as a leader would. A deleted topic has no name and is left out.
pub(super) fn write_assignment(assignment: &Assignment, topics: &TopicsView) -> Bytes {
    let named =
        assignment.iter().filter_map(|(id, partitions)| Some((topics.name(*id)?, partitions)));
    let named: Vec<_> = named.collect();
    let mut out = BytesMut::new();
    out.put_i16(0);
    put_len(&mut out, named.len());
    for (name, partitions) in named {
        out.put_u16(u16::try_from(name.len()).expect("names of topics are short"));
        out.put_slice(name.as_bytes());
        put_len(&mut out, partitions.len());
        partitions.iter().for_each(|partition| out.put_i32(*partition));
    }
    // No user data.
    out.put_i32(-1);
    out.freeze()
}

fn put_len(out: &mut BytesMut, len: usize) {
    out.put_u32(u32::try_from(len).expect("partitions are bounded"));
}

fn by_id(named: &[(String, Vec<i32>)], topics: &TopicsView) -> Assignment {
    let mut assignment = Assignment::new();
    for (name, partitions) in named {
        if let Some((id, count)) = topics.get(name) {
            let exists = |p: &&i32| u32::try_from(**p).is_ok_and(|partition| partition < count);
            let existing: Vec<i32> = partitions.iter().filter(exists).copied().collect();
            if !existing.is_empty() {
                assignment.entry(id).or_default().extend(existing);
            }
        }
    }
    assignment
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn version(&mut self) -> Option<i16> {
        self.i16().filter(|version| *version >= 0)
    }

    fn i16(&mut self) -> Option<i16> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(i16::from_be_bytes(*head))
    }

    fn i32(&mut self) -> Option<i32> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(i32::from_be_bytes(*head))
    }

    fn string(&mut self) -> Option<String> {
        self.nullable_string()?
    }

    fn nullable_string(&mut self) -> Option<Option<String>> {
        let len = self.i16()?;
        if len == -1 {
            return Some(None);
        }
        let (text, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(Some(std::str::from_utf8(text).ok()?.to_owned()))
    }

    fn user_data(&mut self) -> Option<()> {
        let len = self.i32()?.max(0);
        self.0 = self.0.get(usize::try_from(len).ok()?..)?;
        Some(())
    }

    fn topic(&mut self) -> Option<(String, Vec<i32>)> {
        Some((self.string()?, self.list(Self::i32)?))
    }

    /// Allocates as elements are parsed, whatever the length field says.
    fn list<T>(&mut self, mut element: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let len = self.i32()?.max(0);
        let mut list = Vec::new();
        for _ in 0..len {
            list.push(element(self)?);
        }
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::consumer_protocol_subscription as subscribed;
    use kafka_protocol::messages::{ConsumerProtocolAssignment, ConsumerProtocolSubscription};
    use kafka_protocol::messages::{TopicName, consumer_protocol_assignment as assigned};
    use kafka_protocol::protocol::{Decodable, Encodable, StrBytes};
    use std::sync::Arc;
    use uuid::Uuid;

    use super::*;

    const A: Uuid = Uuid::from_u128(1);

    fn topics() -> TopicsView {
        TopicsView::new(1, [(Arc::from("a"), A, 3)].into_iter())
    }

    fn text(text: &str) -> StrBytes {
        StrBytes::from_string(text.to_owned())
    }

    #[test]
    fn topics_are_parsed_regardless_of_what_follows() {
        let bytes = b"\x00\x01\x00\x00\x00\x02\x00\x01a\x00\x02bc\xff\xff\xff\xff";
        assert_eq!(read_topics(bytes), Some(vec!["a".into(), "bc".into()]));
        for cut in 0..13 {
            assert_eq!(read_topics(&bytes[..cut]), None, "{cut}");
        }
        assert_eq!(read_topics(b"\x00\x00\x7f\xff\xff\xff\x00\x01a"), None);
        assert_eq!(read_topics(b"\x00\x00\x00\x00\x00\x01\xff\xff"), None);
    }

    #[test]
    fn subscriptions_of_all_versions_are_parsed() {
        for version in 0..=3 {
            let mut reported = ConsumerProtocolSubscription::default()
                .with_topics(vec![text("b"), text("a")])
                .with_user_data(Some(Bytes::from_static(b"whatever")));
            if version >= 1 {
                let owned = subscribed::TopicPartition::default()
                    .with_topic(TopicName(text("a")))
                    .with_partitions(vec![2, 0, 7]);
                reported.owned_partitions = vec![owned];
            }
            if version >= 3 {
                reported.rack_id = Some(text("r"));
            }
            let mut bytes = BytesMut::new();
            bytes.put_i16(version);
            reported.encode(&mut bytes, version).unwrap();
            let read = Subscription::read(&bytes).unwrap();
            assert_eq!(read.topics, ["a".to_owned(), "b".to_owned()].into());
            assert_eq!(read.rack.as_deref(), (version >= 3).then_some("r"));
            let owned = read.owned(&topics());
            // The partition that does not exist is left out.
            let wanted = Assignment::from([(A, [0, 2].into())]);
            assert_eq!(owned, if version >= 1 { wanted } else { Assignment::new() });
            for len in 0..bytes.len() {
                assert_eq!(Subscription::read(&bytes[..len]), None, "{len} bytes of v{version}");
            }
        }
        // A length that would take all memory.
        assert_eq!(Subscription::read(&[0, 0, 0x7f, 0xff, 0xff, 0xff]), None);
    }

    #[test]
    fn assignments_have_the_format_that_consumers_parse() {
        let assignment = Assignment::from([(A, [0, 2].into()), (Uuid::from_u128(9), [1].into())]);
        let bytes = write_assignment(&assignment, &topics());
        let mut body = bytes.slice(2..);
        let reported = ConsumerProtocolAssignment::decode(&mut body, 0).unwrap();
        assert!(body.is_empty());
        let partition = assigned::TopicPartition::default()
            .with_topic(TopicName(text("a")))
            .with_partitions(vec![0, 2]);
        assert_eq!(reported.assigned_partitions, [partition]);
        let back = read_assignment(&bytes, &topics()).unwrap();
        assert_eq!(back, Assignment::from([(A, [0, 2].into())]));
        assert_eq!(read_assignment(&[], &topics()), Some(Assignment::new()));
        assert_eq!(read_assignment(&[0, 0, 0], &topics()), None);
    }
}
