//! The checks of the fuzz target `chain`: arbitrary bytes as bodies of fences and deltas, as
//! changes of a state, and as sections of a snapshot.

use bytes::Bytes;
use uuid::Uuid;

use super::body::{Body, ObjectKind};
use super::entry::Entry;
use super::snapshot::{SECTIONS, Snapshot, with_sections};
use super::state::{ChainState, Head};
use crate::sequence::MAX_BODY_BYTES;

/// Takes the first byte of `data` as what the rest is: the body of a fence (0) or a delta (1), or
/// (others) the contents of the sections of a snapshot, each after its length in two bytes.
///
/// A body that is accepted is encoded to the same bytes. A state that it is applied to stays one
/// that a snapshot can hold. A snapshot that is accepted has one state.
pub fn chain(data: &[u8]) -> Result<(), String> {
    match data.split_first() {
        None => Ok(()),
        Some((0, body)) => check_body(ObjectKind::Fence, body),
        Some((1, body)) => check_body(ObjectKind::Delta, body),
        Some((_, sections)) => check_sections(sections),
    }
}

fn check_body(kind: ObjectKind, bytes: &[u8]) -> Result<(), String> {
    let bytes = Bytes::copy_from_slice(bytes);
    let Ok(body) = Body::decode(kind, &bytes) else { return Ok(()) };
    if body.encode(kind) != bytes {
        return Err(format!("{bytes:?} is encoded as {:?}", body.encode(kind)));
    }
    let (number, nonce, previous, term) = (1, Uuid::from_u128(1 << 64), 0, 7);
    let first =
        Entry { number, nonce, previous, term, kind: ObjectKind::Fence, body: fence(&body) };
    let Ok(mut state) = ChainState::first(first) else { return Ok(()) };
    let Head { number, link, .. } = state.head;
    let nonce = Uuid::from_u128(2 << 64);
    let entry = Entry { number: number + 1, nonce, previous: link, term, kind, body };
    let sealed = entry.seal(MAX_BODY_BYTES);
    match Entry::decode(&sealed.object, &sealed.object.body) {
        Ok(decoded) if decoded == entry => {}
        other => return Err(format!("{entry:?} is decoded as {other:?}")),
    }
    if state.apply(entry).is_ok() {
        check_snapshot(&state)?;
    }
    Ok(())
}

/// Returns the body of a fence that the other body may follow.
fn fence(body: &Body) -> Body {
    let mut first = Body {
        header: body.header.clone(),
        recorded: Vec::new(),
        own: Vec::new(),
        hints: body.hints.clone(),
    };
    first.header.is_clean = false;
    first.header.covers = 0;
    first.header.version = u64::from(body.header.opening) << 32;
    first
}

fn check_snapshot(state: &ChainState) -> Result<(), String> {
    let snapshot = Snapshot::of(state.clone());
    let bytes = snapshot.encode().concat().into();
    match Snapshot::decode(state.head.number, snapshot.nonce, &bytes) {
        Ok(decoded) if decoded == snapshot => Ok(()),
        other => Err(format!("{snapshot:?} is decoded as {other:?}")),
    }
}

fn check_sections(mut data: &[u8]) -> Result<(), String> {
    let sections: [&[u8]; SECTIONS] = std::array::from_fn(|_| {
        let Some((length, rest)) = data.split_first_chunk() else { return &[][..] };
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (content, rest) = rest.split_at(length);
        data = rest;
        content
    });
    let (nonce, bytes) = with_sections(&sections);
    match Snapshot::decode(1, nonce, &bytes) {
        Ok(decoded) => check_snapshot(&decoded.state),
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_seeds_are_accepted() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/chain");
        let mut kinds = [0; 3];
        for seed in fs::read_dir(directory).expect("the target has seeds") {
            let path = seed.unwrap().path();
            let bytes = Bytes::from(fs::read(&path).unwrap());
            chain(&bytes).unwrap_or_else(|what| panic!("{path:?}: {what}"));
            let body = bytes.slice(1..);
            let error = match bytes[0] {
                0 => Body::decode(ObjectKind::Fence, &body).err(),
                1 => Body::decode(ObjectKind::Delta, &body).err(),
                _ => None,
            };
            assert!(error.is_none(), "{path:?}: {error:?}");
            kinds[usize::from(bytes[0])] += 1;
        }
        assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_pass(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(chain(&data), Ok(()));
        }
    }
}
