//! The messages between a host and its clients as bytes: `docs/format/coordination-wire.md`.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use crate::{
    Conflict, Entry, Error, Event, Identity, Lease, LeaseId, ListRequest, Page, Revision,
    Transaction,
};

/// The versions that this build speaks.
pub(crate) const VERSION: u16 = 1;
/// Greatest length of a frame before the handshake is over.
pub(crate) const MAX_HANDSHAKE_BYTES: usize = 512;
/// Greatest length of a frame from a client. The largest transaction takes 1.3 MiB.
pub(crate) const MAX_CLIENT_BYTES: usize = 2 << 20;
/// Greatest length of a frame from a host. The largest page takes 3.1 MiB.
pub(crate) const MAX_HOST_BYTES: usize = 4 << 20;
/// Bytes of keys and values after which the changes of a revision continue in another frame.
pub(crate) const PART_BYTES: usize = 1 << 20;
/// Bytes of a watch that a host sends before the client has taken any of them. A frame counts with
/// [`watch_cost`]. One frame may always be under way.
pub(crate) const WATCH_WINDOW_BYTES: u64 = 256 << 10;

/// How often each side shows that it is there.
const PING_EVERY: Duration = Duration::from_secs(1);

const MAGIC: [u8; 8] = *b"ALLUVCRD";
const HELLO_BYTES: usize = 12;

/// The first frame of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) lowest: u16,
    pub(crate) highest: u16,
    /// The cluster that the client expects.
    pub(crate) cluster: String,
}

/// The first frame of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// The version that the connection uses; 0 if the host refuses it.
    pub(crate) version: u16,
    pub(crate) highest: u16,
    pub(crate) body: WelcomeBody,
}

/// The part of a [`Welcome`] that depends on the version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum WelcomeBody {
    Accepted {
        identity: Identity,
        /// A revision at or above every one that was acknowledged before.
        revision: Revision,
    },
    /// Why the host refuses the connection.
    Refused(String),
}

/// A frame from a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ClientMessage {
    /// Shows that the client is there.
    Ping,
    /// An operation, answered by [`HostMessage::Answer`] with its number.
    Call(u64, Request),
    /// Opens a watch with a number that no call or watch of the connection has had.
    Watch { id: u64, prefix: String, after: Revision },
    /// The client has taken this much of a watch, in the unit of [`watch_cost`].
    Taken { id: u64, bytes: u64 },
    /// Ends a watch. It may have ended already.
    Cancel(u64),
}

/// An operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    Get(String),
    List(ListRequest),
    Commit(Transaction),
    Grant(Duration),
    KeepAlive(LeaseId),
    Revoke(LeaseId),
}

impl Request {
    /// Returns whether sending it twice differs from sending it once.
    pub(crate) fn is_change(&self) -> bool {
        matches!(self, Self::Commit(_) | Self::Grant(_) | Self::Revoke(_))
    }

    /// Returns the greatest number of bytes that its answer takes in the memory of the host.
    pub(crate) fn answer_bytes(&self) -> usize {
        match self {
            Self::Get(_) | Self::Commit(_) => crate::MAX_VALUE_BYTES + (4 << 10),
            Self::List(_) => MAX_HOST_BYTES,
            Self::Grant(_) | Self::KeepAlive(_) | Self::Revoke(_) => 4 << 10,
        }
    }
}

/// What an operation returned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    Entry(Option<Entry>),
    Page(Page),
    Committed(Result<Revision, Conflict>),
    Lease(Lease),
    Done,
}

/// A frame from a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HostMessage {
    /// Shows that the host is there.
    Ping,
    Answer(u64, Result<Answer, Error>),
    /// Changes of one revision, for a watch. `more`: the next frame of the watch continues it.
    Changes {
        id: u64,
        revision: Revision,
        events: Vec<Event>,
        more: bool,
    },
    /// A watch has ended with an error.
    WatchEnded(u64, Error),
}

/// Returns what a frame of a watch counts in its window: small frames count more than their bytes,
/// so that the window bounds their number too.
pub(crate) fn watch_cost(frame_bytes: usize) -> u64 {
    frame_bytes as u64 + 256
}

/// What reads frames from a socket.
pub(crate) type Reader = FramedRead<OwnedReadHalf, LengthDelimitedCodec>;
/// What writes frames to a socket.
pub(crate) type Writer = FramedWrite<OwnedWriteHalf, LengthDelimitedCodec>;

/// Returns the two directions of a new connection. The reader takes frames of the handshake.
pub(crate) fn split(stream: TcpStream, max_sent_bytes: usize) -> (Reader, Writer) {
    // Small frames must not wait for each other. Without it they are slower, and nothing else.
    let _ = stream.set_nodelay(true);
    let (reader, writer) = stream.into_split();
    let reader = FramedRead::new(reader, codec(MAX_HANDSHAKE_BYTES));
    (reader, FramedWrite::new(writer, codec(max_sent_bytes)))
}

/// Returns the times at which a connection sends a ping.
pub(crate) fn ping_times() -> Interval {
    let mut times = interval(PING_EVERY);
    times.set_missed_tick_behavior(MissedTickBehavior::Delay);
    times
}

/// Returns the codec that puts a length of 4 bytes before each frame.
pub(crate) fn codec(max_frame_bytes: usize) -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .little_endian()
        .length_field_type::<u32>()
        .max_frame_length(max_frame_bytes)
        .new_codec()
}

/// Returns the frame of a message: the CRC32C of the rest, then the message.
pub(crate) fn encode(message: &impl Serialize) -> Bytes {
    seal(vec![0; 4], message)
}

fn seal(head: Vec<u8>, message: &impl Serialize) -> Bytes {
    let mut frame = postcard::to_extend(message, head).expect("a message has an encoding");
    let checksum = crc32c::crc32c(&frame[4..]);
    frame[..4].copy_from_slice(&checksum.to_le_bytes());
    frame.into()
}

/// Returns the message of a frame.
///
/// # Errors
/// Why it is none.
pub(crate) fn decode<T: DeserializeOwned>(frame: &[u8]) -> Result<T, String> {
    decode_body(unseal(frame)?)
}

fn decode_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    let (message, rest) = postcard::take_from_bytes(body).map_err(|error| error.to_string())?;
    match rest.len() {
        0 => Ok(message),
        rest => Err(format!("{rest} bytes follow the message")),
    }
}

fn unseal(frame: &[u8]) -> Result<&[u8], String> {
    let (checksum, body) = frame.split_first_chunk().ok_or("the frame has no checksum")?;
    if u32::from_le_bytes(*checksum) != crc32c::crc32c(body) {
        return Err("the checksum of the frame is wrong".to_owned());
    }
    Ok(body)
}

/// Magic and two versions, as both handshake frames begin in every version of the protocol.
fn encode_head(versions: [u16; 2]) -> Vec<u8> {
    let mut head = vec![0; 4];
    head.extend(MAGIC);
    for version in versions {
        head.extend(version.to_le_bytes());
    }
    head
}

fn decode_head(frame: &[u8]) -> Result<([u16; 2], &[u8]), String> {
    let body = unseal(frame)?;
    let (head, body) = body.split_first_chunk::<HELLO_BYTES>().ok_or("the frame is too short")?;
    if head[..8] != MAGIC {
        return Err("the peer does not speak this protocol".to_owned());
    }
    let version = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    Ok(([version(8), version(10)], body))
}

impl Hello {
    pub(crate) fn encode(&self) -> Bytes {
        seal(encode_head([self.lowest, self.highest]), &self.cluster)
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self, String> {
        let ([lowest, highest], body) = decode_head(frame)?;
        Ok(Self { lowest, highest, cluster: decode_body(body)? })
    }
}

impl Welcome {
    pub(crate) fn accepted(identity: Identity, revision: Revision) -> Self {
        let body = WelcomeBody::Accepted { identity, revision };
        Self { version: VERSION, highest: VERSION, body }
    }

    /// Returns the refusal with this reason, cut to what a frame holds.
    pub(crate) fn refused(mut reason: String) -> Self {
        reason.truncate(reason.floor_char_boundary(MAX_HANDSHAKE_BYTES - 64));
        Self { version: 0, highest: VERSION, body: WelcomeBody::Refused(reason) }
    }

    pub(crate) fn encode(&self) -> Bytes {
        seal(encode_head([self.version, self.highest]), &self.body)
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self, String> {
        let ([version, highest], body) = decode_head(frame)?;
        Ok(Self { version, highest, body: decode_body(body)? })
    }
}

/// Returns a frame with its length before it, for a socket that is written without a codec.
pub(crate) fn with_length(frame: &[u8]) -> BytesMut {
    let length = u32::try_from(frame.len()).expect("frames are bounded");
    let mut bytes = BytesMut::from(&length.to_le_bytes()[..]);
    bytes.extend_from_slice(frame);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Change, Guard};

    /// The bytes are written by hand from the document.
    #[test]
    fn frames_have_the_documented_bytes() {
        let body = |frame: &Bytes| frame[4..].to_vec();
        let hello = Hello { lowest: 1, highest: 1, cluster: "c-1".to_owned() };
        assert_eq!(body(&hello.encode()), b"ALLUVCRD\x01\0\x01\0\x03c-1");
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let get = ClientMessage::Call(300, Request::Get("k".to_owned()));
        assert_eq!(body(&encode(&get)), [1, 0xac, 2, 0, 1, b'k']);
        let transaction = Transaction {
            guards: vec![Guard::Modified("a".to_owned(), Revision(7))],
            changes: vec![Change::put("a", "v"), Change::Delete("b".to_owned())],
        };
        let commit = ClientMessage::Call(1, Request::Commit(transaction));
        let expected = [1, 1, 2, 1, 1, 1, b'a', 7, 2, 0, 1, b'a', 1, b'v', 0, 1, 1, b'b'];
        assert_eq!(body(&encode(&commit)), expected);
        assert_eq!(decode(&encode(&commit)), Ok(commit));
        let ended = HostMessage::WatchEnded(5, Error::Unknown("x".to_owned()));
        assert_eq!(body(&encode(&ended)), [3, 5, 7, 1, b'x']);
        let answer = HostMessage::Answer(2, Ok(Answer::Committed(Ok(Revision(128)))));
        assert_eq!(body(&encode(&answer)), [1, 2, 0, 2, 0, 0x80, 1]);
    }

    #[test]
    fn the_checksum_is_crc32c_of_the_rest() {
        let frame = encode(&ClientMessage::Ping);
        assert_eq!(frame[..], [0x51, 0x53, 0x7d, 0x52, 0][..]);
        for at in 0..frame.len() {
            let mut damaged = frame.to_vec();
            damaged[at] ^= 1;
            assert!(decode::<ClientMessage>(&damaged).is_err());
        }
        assert!(decode::<ClientMessage>(&frame[..4]).is_err());
        assert!(decode::<ClientMessage>(&seal(vec![0; 4], &[0_u8, 0])).is_err(), "a byte too many");
    }

    #[test]
    fn a_refusal_fits_into_a_handshake_frame() {
        let frame = Welcome::refused("ä".repeat(1000)).encode();
        assert!(frame.len() <= MAX_HANDSHAKE_BYTES);
        Welcome::decode(&frame).unwrap();
    }
}
