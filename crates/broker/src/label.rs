//! The labels of streams: what each stream holds, for tools that have nothing but the object store.
//!
//! A label is JSON, at most [`alluvium_stream::MAX_LABEL_BYTES`] long:
//!
//! ```text
//! {"topic":"orders","id":"6fa459ea-ee8a-3ca4-894e-db77e160355e","partition":3}
//! {"state":"groups/offsets-stream"}
//! ```
//!
//! The first form is that of a partition, with the name and the ID of its topic. The second one is
//! that of a state stream, with the key under which the catalog's metadata names it. A label never
//! changes. The server itself does not read labels: it finds streams by the metadata. Unknown
//! fields are ignored. See `docs/format/broker-metadata.md`.

use std::borrow::Cow;

use bytes::Bytes;
use uuid::Uuid;

/// What a stream holds.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
pub enum Label<'a> {
    /// A partition.
    Partition {
        /// The topic's name, at most 249 bytes.
        topic: Cow<'a, str>,
        /// The topic's ID.
        id: Uuid,
        /// The index of the partition in its topic.
        partition: u32,
    },
    /// State of the server.
    State {
        /// The key under which the catalog's metadata names the stream.
        state: Cow<'a, str>,
    },
}

impl Label<'_> {
    /// Returns the bytes of the label.
    pub(crate) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("a struct of texts and numbers").into()
    }

    /// Reads the bytes of a label; `None` if they are no label of this server. A stream whose
    /// creation was lost to damage has an empty one.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use alluvium_stream::MAX_LABEL_BYTES;

    use super::*;
    use crate::topics::MAX_NAME_BYTES;

    fn partition(topic: &str, partition: u32) -> Label<'_> {
        let id = Uuid::from_u128(0x6fa4_59ea_ee8a_3ca4_894e_db77_e160_355e);
        Label::Partition { topic: topic.into(), id, partition }
    }

    /// The documented bytes.
    #[test]
    fn labels_are_json_and_can_be_read_back() {
        let of_partition =
            r#"{"topic":"orders","id":"6fa459ea-ee8a-3ca4-894e-db77e160355e","partition":3}"#;
        let state = Label::State { state: "groups/offsets-stream".into() };
        for (label, text) in [
            (partition("orders", 3), of_partition),
            (state, r#"{"state":"groups/offsets-stream"}"#),
        ] {
            assert_eq!(label.encode(), text);
            assert_eq!(Label::decode(text.as_bytes()), Some(label));
        }
        let newer = of_partition.replace('}', r#","more":[1]}"#);
        assert_eq!(Label::decode(newer.as_bytes()), Some(partition("orders", 3)));
    }

    #[test]
    fn the_longest_label_fits() {
        let longest = partition(&"x".repeat(MAX_NAME_BYTES), u32::MAX).encode();
        assert!(longest.len() <= MAX_LABEL_BYTES, "{} bytes", longest.len());
    }

    #[test]
    fn other_bytes_are_no_label() {
        for other in ["", "{}", "[]", "text", r#"{"topic":"t","partition":3}"#, r#"{"state":1}"#] {
            assert_eq!(Label::decode(other.as_bytes()), None, "{other:?}");
        }
        assert_eq!(Label::decode(b"{\"state\":\"\xff\"}"), None);
    }
}
