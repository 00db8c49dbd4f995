//! The check of the fuzz target `coordination_wire`: arbitrary bytes as frames.

use std::sync::Arc;

use futures::FutureExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::wire::{self, ClientMessage, Hello, HostMessage, Request, Welcome};
use crate::{Coordination as _, Limits, ManualClock, MemoryCoordination};

/// Takes `data` as frames of both directions: each begins with a byte for its kind and its length
/// in two bytes. The checksums are put right, since they would stop everything else. What is
/// decoded is encoded and decoded to the same again, and operations reach a service, which ends
/// them without a panic.
///
/// # Errors
/// What was wrong.
pub fn wire(data: &[u8]) -> Result<(), String> {
    let clock = Arc::new(ManualClock::default());
    let service = MemoryCoordination::new(Limits::default(), clock);
    let mut rest = data;
    while let Some(([kind, low, high], tail)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        let (body, tail) = tail.split_at(length);
        rest = tail;
        let mut frame = crc32c::crc32c(body).to_le_bytes().to_vec();
        frame.extend(body);
        match kind % 4 {
            0 => same(&frame, Hello::decode, Hello::encode)?,
            1 => same(&frame, Welcome::decode, Welcome::encode)?,
            2 => drop(message::<HostMessage>(&frame)?),
            _ => match message::<ClientMessage>(&frame)? {
                Some(ClientMessage::Call(_, request)) => call(&service, request),
                Some(ClientMessage::Watch { prefix, after, .. }) => {
                    use futures::StreamExt as _;
                    let _ = service.watch(&prefix, after).next().now_or_never();
                }
                _ => {}
            },
        }
    }
    Ok(())
}

fn call(service: &MemoryCoordination, request: Request) {
    let answer = crate::host::execute(service, request).now_or_never();
    let _ = answer.expect("a service in memory is never pending");
}

fn message<T>(frame: &[u8]) -> Result<Option<T>, String>
where
    T: DeserializeOwned + Serialize + PartialEq + std::fmt::Debug,
{
    same(frame, wire::decode::<T>, wire::encode)?;
    Ok(wire::decode(frame).ok())
}

fn same<T: PartialEq + std::fmt::Debug>(
    frame: &[u8],
    decode: impl Fn(&[u8]) -> Result<T, String>,
    encode: impl Fn(&T) -> bytes::Bytes,
) -> Result<(), String> {
    let Ok(message) = decode(frame) else { return Ok(()) };
    match decode(&encode(&message)) {
        Ok(again) if again == message => Ok(()),
        again => Err(format!("{message:?} is decoded as {again:?} after it was encoded")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// The seeds are frames of each kind.
    #[test]
    fn the_seeds_are_messages() {
        let directory =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/coordination_wire");
        let mut seeds = 0;
        for seed in fs::read_dir(directory).expect("the target has seeds") {
            let path = seed.unwrap().path();
            let bytes = fs::read(&path).unwrap();
            wire(&bytes).unwrap_or_else(|what| panic!("{path:?}: {what}"));
            let mut frame = crc32c::crc32c(&bytes[3..]).to_le_bytes().to_vec();
            frame.extend(&bytes[3..]);
            let is_message = match bytes[0] {
                0 => Hello::decode(&frame).is_ok(),
                1 => Welcome::decode(&frame).is_ok(),
                2 => wire::decode::<HostMessage>(&frame).is_ok(),
                _ => wire::decode::<ClientMessage>(&frame).is_ok(),
            };
            assert!(is_message, "{path:?}");
            seeds += 1;
        }
        assert!(seeds >= 12, "{seeds} seeds");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Bytes that often begin as frames do.
        #[test]
        fn arbitrary_frames_are_refused_or_kept(
            frames in prop::collection::vec(
                (0..4_u8, prop::collection::vec(prop_oneof![0..8_u8, any::<u8>()], 0..60)),
                0..8,
            ),
        ) {
            let mut data = Vec::new();
            for (kind, body) in frames {
                data.push(kind);
                data.extend((body.len() as u16).to_le_bytes());
                data.extend(body);
            }
            prop_assert_eq!(wire(&data), Ok(()));
        }
    }
}
