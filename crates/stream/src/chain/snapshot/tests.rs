use super::super::state::tests::Builder;
use super::*;

fn whole(snapshot: &Snapshot) -> Bytes {
    snapshot.encode().concat().into()
}

fn decode(snapshot: &Snapshot, bytes: &Bytes) -> Result<Snapshot, DecodeError> {
    Snapshot::decode(snapshot.state.head.number, snapshot.nonce, bytes)
}

#[test]
fn a_state_is_read_from_a_snapshot_as_from_the_objects_before_it() {
    for seed in 0..100 {
        let mut builder = Builder::new(seed);
        for _ in 0..30 {
            let entry = builder.next();
            builder.state.apply(entry).unwrap();
            let snapshot = Snapshot::of(builder.state.clone());
            assert_eq!(decode(&snapshot, &whole(&snapshot)).unwrap(), snapshot, "seed {seed}");
        }
        // The objects after the snapshot extend it.
        let snapshot = Snapshot::of(builder.state.clone());
        let mut read = decode(&snapshot, &whole(&snapshot)).unwrap().state;
        let entry = builder.next();
        read.apply(entry.clone()).unwrap();
        builder.state.apply(entry).unwrap();
        assert_eq!(read, builder.state);
    }
}

#[test]
fn a_snapshot_has_the_fields_beside_its_sections() {
    let mut state = Builder::new(1).state;
    state.head.term = 9;
    state.reserved = StreamId(8);
    state.largest_count = 7;
    let snapshot = Snapshot::of(state);
    assert_eq!(decode(&snapshot, &whole(&snapshot)).unwrap(), snapshot);
}

#[test]
fn a_snapshot_of_a_migration_has_its_own_link() {
    let state = Builder::new(1).state;
    let snapshot = Snapshot::of_new_base(state);
    let read = decode(&snapshot, &whole(&snapshot)).unwrap();
    assert_eq!(read, snapshot);
    assert_eq!(read.state.head.link, crate::sequence::link(snapshot.nonce));
}

#[test]
fn each_changed_bit_and_each_other_length_is_refused() {
    let mut builder = Builder::new(3);
    for _ in 0..40 {
        let entry = builder.next();
        builder.state.apply(entry).unwrap();
    }
    let snapshot = Snapshot::of(builder.state);
    let bytes = whole(&snapshot);
    for at in 0..bytes.len() {
        let mut changed = bytes.to_vec();
        changed[at] ^= 1 << (at % 8);
        assert!(decode(&snapshot, &changed.into()).is_err(), "byte {at}");
        assert!(decode(&snapshot, &bytes.slice(..at)).is_err(), "{at} bytes");
    }
    assert!(decode(&snapshot, &[&bytes[..], &[0]].concat().into()).is_err());
    let other = Snapshot { nonce: Uuid::new_v4(), ..snapshot.clone() };
    assert!(decode(&other, &bytes).is_err(), "another nonce than in the name");
}

/// What a checksum does not show, because it was written so.
#[test]
fn rows_that_contradict_each_other_are_refused() {
    let written = |write: fn(&mut Writer)| {
        let mut writer = Writer::default();
        write(&mut writer);
        Bytes::from(writer.finish())
    };
    let stream = |writer: &mut Writer, id| {
        writer.varint(id);
        writer.u8(0);
        writer.bytes(b"");
        (0..3).for_each(|_| writer.varint(0));
        writer.optional(None);
    };
    let one = Bytes::from({
        let mut writer = Writer::default();
        stream(&mut writer, 1);
        writer.finish()
    });
    let twice = [&one[..], &[0], &one[1..]].concat().into();
    assert!(decode_streams(&one).is_ok() && decode_streams(&twice).is_err());

    let ranges = |content: &Bytes| {
        let mut streams = decode_streams(&one).unwrap();
        decode_ranges(content, &mut streams)
    };
    let of_no_stream = written(|writer| {
        writer.varint(2);
        writer.varint(1);
    });
    let overlapping = written(|writer| {
        for field in [1, 2, 0, 0, 9, 0, 0, 0, 8, 9, 0, 0] {
            writer.varint(field);
        }
    });
    let too_many = written(|writer| {
        writer.varint(1);
        writer.varint(u64::MAX);
    });
    for content in [of_no_stream, overlapping, too_many] {
        assert!(ranges(&content).is_err(), "{content:?}");
    }
    let keys = |keys: &[&str]| {
        let mut writer = Writer::default();
        for key in keys {
            writer.bytes(key.as_bytes());
            writer.bytes(b"");
        }
        decode_meta(&writer.finish().into())
    };
    assert!(keys(&["a", "b"]).is_ok());
    assert!(keys(&["b", "a"]).is_err() && keys(&["a", "a"]).is_err());
    let gaps = |fields: &[u64]| {
        let mut writer = Writer::default();
        fields.iter().for_each(|field| writer.varint(*field));
        decode_gaps(&writer.finish().into())
    };
    assert!(gaps(&[1, 0, 5, 1, 7, 9]).is_ok());
    assert!(gaps(&[1, 0, 0]).is_err() && gaps(&[1, 7, 9, 1, 0, 5]).is_err());
}

#[test]
fn other_sections_are_of_a_later_version() {
    let snapshot = Snapshot::of(Builder::new(1).state);
    let [_, body] = snapshot.encode();
    let mut body = body.to_vec();
    body[SECTIONS_AT] = 8;
    let Head { number, term, .. } = snapshot.state.head;
    let (nonce, previous, body) = (snapshot.nonce, snapshot.previous(), body.into());
    let later = Sealed { kind: SNAPSHOT_KIND, flags: 0, term, number, nonce, previous, body };
    let bytes = [later.header(), later.body].concat().into();
    let error = decode(&snapshot, &bytes).unwrap_err();
    assert!(matches!(error, DecodeError::LaterVersion(_)), "{error}");
}
