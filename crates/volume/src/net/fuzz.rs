//! The check of the fuzz target `volume_net`: arbitrary bytes as handshakes and as frames.

use bytes::Bytes;

use super::client::{
    Expected, Refused, decode_answer, decode_request, encode_answer, encode_request,
};
use super::frame::{ConnectionRole, Frame, FrameType, HEADER_BYTES, Header, Received, Side};
use super::handshake::{HANDSHAKE_BYTES, Hello, Welcome};
use super::messages::{Entries, MessagesFrame, check_sendable};
use super::peer::{PeerFrame, encode_gone};
use super::pull::{Pull, PullFrame};
use super::{ConnectionId, decode_error};
use crate::op::BLOCK_BYTES;

/// Takes `data` as a handshake or a frame, and gives it the checksums that a sender would. Whatever
/// is accepted is encoded to the same bytes again.
pub fn net(data: &[u8]) -> Result<(), String> {
    check(data).map(drop)
}

/// Returns whether `data` is accepted.
fn check(data: &[u8]) -> Result<bool, String> {
    match data.split_first() {
        Some((0xff, rest)) => handshake(rest),
        Some((selector, rest)) => frame(*selector, rest),
        None => Ok(false),
    }
}

fn handshake(rest: &[u8]) -> Result<bool, String> {
    let mut bytes = [0; HANDSHAKE_BYTES];
    let len = rest.len().min(HANDSHAKE_BYTES - 12);
    bytes[..8].copy_from_slice(b"ALLUVVOL");
    bytes[8..8 + len].copy_from_slice(&rest[..len]);
    bytes[HANDSHAKE_BYTES - 4..].fill(0);
    let crc = crc32c::crc32c(&bytes[..HANDSHAKE_BYTES - 4]);
    bytes[HANDSHAKE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    let hello = Hello::decode(&bytes).map(|hello| hello.encode());
    let welcome = Welcome::decode(&bytes).map(|welcome| welcome.encode());
    let mut is_accepted = false;
    for again in [hello, welcome].into_iter().flatten() {
        is_accepted = true;
        // The range of versions is the sender's own.
        if again[12..HANDSHAKE_BYTES - 4] != bytes[12..HANDSHAKE_BYTES - 4] {
            return Err(format!("{bytes:?} is encoded as {again:?}"));
        }
    }
    Ok(is_accepted)
}

fn frame(selector: u8, rest: &[u8]) -> Result<bool, String> {
    let Some(([kind, flags, blocks], meta)) = rest.split_first_chunk() else { return Ok(false) };
    let role = [ConnectionRole::Peer, ConnectionRole::Client, ConnectionRole::Pull]
        [usize::from(selector) % 3];
    let side = if selector & 0x40 == 0 { Side::Acceptor } else { Side::Dialer };
    let kind = FrameType::ALL[usize::from(*kind) % FrameType::ALL.len()];
    let meta = Bytes::copy_from_slice(&meta[..meta.len() / 8 * 8]);
    let data_bytes = usize::from(*blocks) * BLOCK_BYTES;
    let mut fields = Vec::with_capacity(HEADER_BYTES);
    fields.extend((kind as u16).to_le_bytes());
    fields.extend(u16::from(*flags).to_le_bytes());
    fields.extend((meta.len() as u32).to_le_bytes());
    fields.extend((data_bytes as u32).to_le_bytes());
    fields.extend([0; 12]);
    fields.extend(if meta.is_empty() { 0 } else { crc32c::crc32c(&meta) }.to_le_bytes());
    let Ok(header) = Header::decode_fields(&fields, role, side) else { return Ok(false) };
    let data = Bytes::from(vec![0; data_bytes]);
    let received =
        header.with_body(meta, data).map_err(|error| format!("a good checksum: {error}"))?;
    match again(&received)? {
        Some(frame) => compare(frame, &received).map(|()| true),
        None => Ok(false),
    }
}

fn compare(frame: Frame, received: &Received) -> Result<(), String> {
    let buffers = frame.encode(ConnectionId::default());
    match buffers[0][HEADER_BYTES..] == received.meta[..] {
        true => Ok(()),
        false => Err(format!("{:?} is encoded as {:?}", received.meta, &buffers[0])),
    }
}

/// Encodes what the frame is decoded to, if it is accepted.
fn again(received: &Received) -> Result<Option<Frame>, String> {
    match received.header.kind {
        FrameType::Close => Ok(decode_error(received).ok().map(|error| super::close_frame(&error))),
        FrameType::Op | FrameType::Read | FrameType::Status => match decode_request(received) {
            Ok(request) => Ok(Some(encode_request(0, &request))),
            Err(Refused::Connection(_) | Refused::Request(_)) => Ok(None),
        },
        kind @ (FrameType::OpAnswer | FrameType::ReadAnswer | FrameType::StatusAnswer) => {
            let expected = match kind {
                FrameType::OpAnswer => Expected::Op,
                FrameType::StatusAnswer => Expected::Status,
                _ => {
                    let blocks = received.meta.get(8..10).map_or(0, |n| n[0].into());
                    Expected::Read { blocks, states_only: received.data.is_empty() }
                }
            };
            match decode_answer(received, expected) {
                // The error of a block that does not have its checksum is not what was received.
                Ok(Err(_)) if !received.header.is_error => Ok(None),
                Ok(answer) => Ok(Some(encode_answer(kind, 0, &answer))),
                Err(_) => Ok(None),
            }
        }
        FrameType::Pull => Ok(Pull::decode(received).ok().map(|pull| pull.encode())),
        FrameType::PullBegin | FrameType::PullState | FrameType::PullBatch | FrameType::PullEnd => {
            Ok(PullFrame::decode(received).ok().map(|frame| frame.encode()))
        }
        FrameType::Ping | FrameType::Pong => Ok(None),
        kind => {
            // It must come to an end as well.
            let _ = PeerFrame::decode(received, Entries::Drop);
            match PeerFrame::decode(received, Entries::Keep) {
                Ok(frame) => again_peer(kind, frame),
                Err(_) => Ok(None),
            }
        }
    }
}

/// Raft can send whatever is accepted.
fn again_peer(kind: FrameType, frame: PeerFrame) -> Result<Option<Frame>, String> {
    let messages = match frame {
        PeerFrame::Messages(messages) => messages,
        PeerFrame::Gone(gone) if gone.len() > 4096 => return Ok(None),
        PeerFrame::Gone(gone) => return Ok(encode_gone(&gone).next()),
        PeerFrame::PullOffer(offer) => return Ok(Some(offer.encode())),
        PeerFrame::PullPin(pin) => return Ok(Some(pin.encode())),
        PeerFrame::Pulled(pulled) => return Ok(Some(pulled.encode())),
    };
    let mut frame = MessagesFrame::new(kind, messages.sender);
    for message in &messages.messages {
        let sendable = check_sendable(message);
        if sendable != Ok(kind) {
            return Err(format!("{message:?} is accepted and not sendable: {sendable:?}"));
        }
        if frame.push(message, 0) != Some(message.message.entries.len()) {
            return Err(format!("{message:?} was received and does not fit a frame"));
        }
    }
    Ok(messages.unknown_ops.is_empty().then(|| frame.finish()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// They are written from the document, and not by the encoder.
    fn seeds() -> Vec<Vec<u8>> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/volume_net");
        let seeds = fs::read_dir(directory).expect("the target has seeds");
        seeds.map(|seed| fs::read(seed.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn the_seeds_are_accepted() {
        let seeds = seeds();
        assert!(seeds.len() >= 8, "{} seeds", seeds.len());
        for seed in seeds {
            assert_eq!(check(&seed), Ok(true), "{seed:?}");
        }
    }

    /// Found by the fuzzer: a client states an incarnation.
    #[test]
    fn the_handshake_of_a_client_has_one_meaning() {
        let mut data = vec![0; 128];
        (data[0], data[1], data[3]) = (0xff, 1, 1);
        assert_eq!(check(&data), Ok(true), "a client states nothing of an opening");
        // The last byte of the incarnation.
        data[1 + 87] = 1;
        assert_eq!(check(&data), Ok(false));
    }

    #[test]
    fn changed_seeds_are_refused_or_have_one_meaning() {
        let seeds = seeds();
        let changes = prop::collection::vec((any::<prop::sample::Index>(), small_byte()), 1..4);
        let len = any::<prop::sample::Index>();
        let strategy = (prop::sample::select(seeds), changes, prop::option::weighted(0.1, len));
        let config = ProptestConfig::with_cases(20_000);
        let mut runner = proptest::test_runner::TestRunner::new(config);
        runner
            .run(&strategy, |(mut data, changes, len)| {
                for (at, byte) in changes {
                    let at = at.index(data.len());
                    data[at] = byte;
                }
                data.truncate(len.map_or(data.len(), |len| len.index(data.len())));
                prop_assert_eq!(net(&data), Ok(()));
                Ok(())
            })
            .unwrap();
    }

    fn small_byte() -> impl Strategy<Value = u8> {
        prop_oneof![6 => Just(0_u8), 2 => 1..4_u8, 1 => any::<u8>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// Many small fields, so that some frames are accepted.
        #[test]
        fn arbitrary_bytes_are_refused_or_have_one_meaning(
            selector: u8,
            head in (any::<u8>(), 0..2_u8, 0..2_u8),
            meta in prop::collection::vec(small_byte(), 0..300),
        ) {
            let mut data = vec![selector, head.0, head.1, head.2];
            data.extend(meta);
            prop_assert_eq!(net(&data), Ok(()));
        }

        #[test]
        fn arbitrary_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert_eq!(net(&data), Ok(()));
        }
    }
}
