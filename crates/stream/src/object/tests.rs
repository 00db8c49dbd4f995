//! Encoding and decoding of whole objects in memory, and of damaged ones.

use std::collections::BTreeMap;

use super::encoder::SHARED_BYTES;
use super::index::{INDEX_ENTRY_BYTES, PAGE_BYTES, PAGE_ENTRIES};
use super::*;
use crate::types::KIND_LOG;

fn batch(base: u64, count: u32, len_bytes: usize) -> Batch {
    let payload: Vec<u8> = (0..len_bytes).map(|i| (base as usize * 31 + i * 7) as u8).collect();
    Batch {
        base: StreamOffset(base),
        count,
        max_timestamp_ms: 1000 - base.cast_signed(),
        payload: payload.into(),
    }
}

type Content = Vec<(StreamId, Batch)>;

fn label(stream: StreamId) -> Bytes {
    format!("stream {stream}").into()
}

fn encode(content: &Content) -> (Bytes, Summary) {
    encode_with(BLOCK_TARGET_BYTES, content)
}

fn encode_with(block_bytes: usize, content: &Content) -> (Bytes, Summary) {
    let (encoder, header) = Encoder::new(Uuid::from_u128(0x1234_5678));
    let mut encoder = encoder.with_block_bytes(block_bytes);
    let mut object = BytesMut::from(&header[..]);
    for (at, (stream, batch)) in content.iter().enumerate() {
        let crc32c = (at % 2 == 0).then(|| crc32c::crc32c(&batch.payload));
        encoder.begin(*stream, KIND_LOG, &label(*stream));
        object.extend(encoder.push(batch, crc32c).into_iter().flatten().flatten());
    }
    let (last, tail, summary) = encoder.finish(&ORIGIN);
    object.extend(last.into_iter().flatten().flatten());
    object.extend(tail);
    assert_eq!(object.len() as u64, summary.size_bytes);
    (object.freeze(), summary)
}

fn decode(bytes: Bytes) -> Result<Content, DecodeError> {
    let object = Whole::open(bytes)?;
    let mut content = Vec::new();
    for block in &object.blocks {
        content.extend(object.batches(block)?.into_iter().map(|batch| (block.stream, batch)));
    }
    Ok(content)
}

fn small() -> Content {
    vec![
        (StreamId(1), batch(0, 2, 5)),
        (StreamId(1), batch(2, 1, 0)),
        (StreamId(1), batch(9, 1, 3)), // a gap before it
        (StreamId(2), batch(u64::from(u32::MAX), u32::MAX, 4)),
        (StreamId(u64::MAX), batch(7, 1, 1)),
    ]
}

#[test]
fn encoded_batches_decode_unchanged() {
    let (bytes, summary) = encode(&small());
    let object = Whole::open(bytes.clone()).unwrap();
    assert_eq!(object.nonce, Uuid::from_u128(0x1234_5678));
    assert_eq!(object.blocks.len(), 3, "a block holds one stream");
    assert_eq!(object.blocks[0].end, StreamOffset(10));
    assert_eq!(object.blocks[1].end, StreamOffset(u64::from(u32::MAX) * 2), "offsets have 64 bits");
    assert_eq!(summary.index.len_bytes, 8 + 24, "one page");
    assert_eq!(decode(bytes).unwrap(), small());
    assert_eq!(decode(encode(&Vec::new()).0).unwrap(), Vec::new(), "an empty object is valid");
}

#[test]
fn blocks_have_about_the_target_size() {
    let quarter = BLOCK_TARGET_BYTES / 4;
    let mut content: Content = (0..10).map(|i| (StreamId(1), batch(i, 1, quarter))).collect();
    content.push((StreamId(1), batch(10, 1, 3 * BLOCK_TARGET_BYTES)));
    content.push((StreamId(1), batch(11, 1, 1)));
    let (bytes, _) = encode(&content);
    let object = Whole::open(bytes.clone()).unwrap();
    let entries: Vec<_> = object.blocks.iter().map(|block| block.entries).collect();
    assert_eq!(entries, [3, 3, 3, 1, 1, 1], "a large batch has a block to itself");
    assert_eq!(decode(bytes).unwrap(), content);
}

#[test]
fn only_small_payloads_are_copied() {
    let (mut encoder, _) = Encoder::new(Uuid::from_u128(1));
    encoder.begin(StreamId(1), KIND_LOG, &Bytes::new());
    let small = batch(0, 1, SHARED_BYTES - 1);
    let large = batch(1, 1, SHARED_BYTES);
    for batch in [&small, &large, &batch(2, 1, 10), &batch(3, 1, 10)] {
        assert!(encoder.push(batch, None).is_none());
    }
    let (block, ..) = encoder.finish(&ORIGIN);
    let pieces: Vec<Bytes> = block.unwrap().into_iter().collect();
    assert!(pieces.iter().any(|piece| piece.as_ptr() == large.payload.as_ptr()));
    assert_eq!(pieces.len(), 3, "copied payloads share a piece");
}

/// Every bit of a small object flipped, one at a time, and every truncation gives an error: never
/// other content, never a panic.
#[test]
fn every_flipped_bit_and_every_truncation_is_detected() {
    let (of_version_2, _) = encode(&small());
    let of_version_1 = version_1(&of_version_2);
    for bytes in [of_version_2, of_version_1] {
        assert_eq!(decode(bytes.clone()).unwrap(), small());
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.to_vec();
                flipped[at] ^= 1 << bit;
                assert!(decode(flipped.into()).is_err(), "bit {bit} of byte {at}");
            }
        }
        for len in 0..bytes.len() {
            assert!(decode(bytes.slice(..len)).is_err(), "cut at {len}");
            assert!(decode(bytes.slice(len + 1..)).is_err(), "begun at {}", len + 1);
        }
        let mut longer = bytes.to_vec();
        longer.push(0);
        assert!(decode(longer.into()).is_err());
    }
}

/// Flips and truncations behind the blocks, where the index has several pages.
#[test]
fn every_flipped_bit_of_an_index_of_several_pages_is_detected() {
    let content: Content =
        (0..2 * PAGE_ENTRIES as u64 + 1).map(|id| (StreamId(id), batch(id, 1, 1))).collect();
    let (bytes, summary) = encode(&content);
    assert_eq!(summary.index.len_bytes, 8 + 3 * 24);
    let data_end = HEADER_BYTES + content.len() * (ENTRY_BYTES + 1);
    for at in data_end..bytes.len() {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1 << (at % 8);
        assert!(Whole::open(flipped.into()).is_err(), "byte {at}");
        assert!(Whole::open(bytes.slice(..at)).is_err(), "cut at {at}");
    }
}

#[test]
fn a_directory_states_what_the_object_has() {
    let quarter = BLOCK_TARGET_BYTES / 4;
    let mut content: Content = (0..5).map(|i| (StreamId(1), batch(i, 1, quarter))).collect();
    content.extend(small().into_iter().filter(|(stream, _)| *stream != StreamId(1)));
    let (bytes, _) = encode(&content);
    let whole = Whole::open(bytes.clone()).unwrap();
    assert_eq!((whole.format, whole.origin), (2, Some(ORIGIN)));
    let mut expected: BTreeMap<StreamId, (u64, i64)> = BTreeMap::new();
    for (stream, batch) in &content {
        let sums = expected.entry(*stream).or_insert((0, i64::MIN));
        *sums = (sums.0 + batch.payload.len() as u64, sums.1.max(batch.max_timestamp_ms));
    }
    let stated = whole.rows.iter().map(|row| {
        assert_eq!((row.kind, row.label.as_ref()), (KIND_LOG, Some(&label(row.stream))));
        (row.stream, (row.payload_bytes, row.max_timestamp_ms))
    });
    assert_eq!(stated.collect::<BTreeMap<_, _>>(), expected);
    let of_1 = &whole.rows[0];
    assert_eq!((of_1.start, of_1.end, of_1.blocks), (StreamOffset(0), StreamOffset(5), 2));

    let older = Whole::open(version_1(&bytes)).unwrap();
    assert_eq!((older.format, older.origin), (1, None));
    let without_labels = whole.rows.into_iter().map(|row| DirectoryRow { label: None, ..row });
    assert!(older.rows.iter().cloned().eq(without_labels), "they follow from the index");
}

/// Replaces the directory of an object by another one, with a valid checksum.
fn with_directory(bytes: &Bytes, origin: &Origin, rows: &[DirectoryRow]) -> Bytes {
    let footer_at = bytes.len() - FOOTER_BYTES;
    let footer = Footer::decode(footer_at as u64, &bytes[footer_at..]).unwrap();
    let directory = directory::encode(origin, rows);
    let [start, end] = [footer.directory().start, footer.directory().end];
    let moved = |at: u64| at - (end - start) + directory.len() as u64;
    let changed = Footer {
        index: IndexPlace { position: moved(footer.index.position), ..footer.index },
        directory_bytes: directory.len() as u32,
        directory_crc32c: crc32c::crc32c(&directory),
        ..footer
    };
    let (start, end) = (start as usize, end as usize);
    let parts = [&bytes[..start], &directory, &bytes[end..footer_at], &changed.encode()];
    parts.concat().into()
}

#[test]
fn a_directory_that_differs_from_the_index_is_damage() {
    let (bytes, _) = encode(&small());
    let rows = Whole::open(bytes.clone()).unwrap().rows;
    let same = Whole::open(with_directory(&bytes, &ORIGIN, &rows)).unwrap();
    assert_eq!(same.rows, rows);
    let change = |change: &dyn Fn(&mut Vec<DirectoryRow>)| {
        let mut changed = rows.clone();
        change(&mut changed);
        Whole::open(with_directory(&bytes, &ORIGIN, &changed)).unwrap_err().to_string()
    };
    for said in [
        change(&|rows| rows[1].payload_bytes += 1),
        change(&|rows| rows[1].blocks += 1),
        change(&|rows| rows[1].start.0 -= 1),
        change(&|rows| rows[1].end.0 += 1),
        change(&|rows| rows[1].max_timestamp_ms -= 1),
        change(&|rows| rows[1].stream.0 += 1),
    ] {
        assert!(said.contains("does not match the index at stream"), "{said}");
    }
    let said = change(&|rows| drop(rows.pop()));
    assert!(said.contains("the directory has 2 streams, the index 3"), "{said}");
}

/// Streams of one block each, one of several pages, and one that ends where a page does.
fn many_blocks() -> Content {
    let large = |stream, base| (StreamId(stream), batch(base, 1, 50));
    let one_each = (0..70).map(|stream| (StreamId(stream), batch(stream, 1, 1)));
    // Three entries in the first page, two whole pages, and a part of the fourth.
    let of_several = (0..3 + 2 * PAGE_ENTRIES as u64 + 10).map(|base| large(100, 2 * base));
    let to_the_border = (0..PAGE_ENTRIES as u64 - 10).map(|base| large(200, base));
    let behind = (300..310).map(|stream| (StreamId(stream), batch(9, 1, 1)));
    one_each.chain(of_several).chain(to_the_border).chain(behind).collect()
}

#[test]
fn the_pages_of_a_stream_have_all_of_its_blocks() {
    let (bytes, summary) = encode_with(100, &many_blocks());
    let index = summary.index;
    let whole = Whole::open(bytes.clone()).unwrap();
    assert!(whole.blocks.len() > 3 * PAGE_ENTRIES);
    let FirstRead::Top(top) = index.first_read().unwrap() else { panic!("more than 16 KiB") };
    let at = |range: Range<u64>| &bytes[range.start as usize..range.end as usize];
    let top = index.decode_top(at(top)).unwrap();
    let page = |number: usize| {
        let (position, len_bytes) = (top.page_position(number), top.page_bytes(number) as u64);
        top.decode_page(number, at(position..position + len_bytes)).unwrap()
    };
    let streams = (0..320).chain([u64::MAX]).map(StreamId);
    for stream in streams {
        let mut froms: Vec<u64> = vec![0, 1, u64::MAX];
        let of_stream = whole.blocks.iter().filter(|block| block.stream == stream);
        froms.extend(of_stream.flat_map(|block| [block.start.0, block.end.0]));
        for from in froms.into_iter().map(StreamOffset) {
            let is_wanted = |block: &Block| block.stream == stream && block.end > from;
            let numbers = top.pages_of(stream, from);
            let found: Vec<_> = numbers.clone().flat_map(page).filter(is_wanted).collect();
            let there = whole.blocks.iter().filter(|block| is_wanted(block));
            assert!(there.eq(&found), "stream {stream} from {from}: pages {numbers:?}");
            let most = found.len().div_ceil(PAGE_ENTRIES) + 1;
            assert!(numbers.len() <= most, "stream {stream} from {from}: pages {numbers:?}");
        }
    }
}

#[test]
fn a_page_in_the_place_of_another_one_is_damage() {
    let (bytes, summary) = encode_with(100, &many_blocks());
    let FirstRead::Top(range) = summary.index.first_read().unwrap() else { panic!("it is large") };
    let top = summary.index.decode_top(&bytes[range.start as usize..range.end as usize]).unwrap();
    let at = |number: usize| top.page_position(number) as usize;
    let page = |number: usize| &bytes[at(number)..at(number) + top.page_bytes(number)];
    assert!(top.decode_page(1, page(1)).is_ok());
    for (number, bytes) in [(1, page(2)), (1, &page(1)[56..]), (1, &[])] {
        let damage = top.decode_page(number, bytes).unwrap_err();
        assert_eq!(damage.position, top.page_position(number), "{damage}");
    }
}

#[test]
fn impossible_places_of_an_index_are_damage() {
    let (bytes, summary) = encode(&small());
    let place = summary.index;
    for place in [
        IndexPlace { len_bytes: 7, ..place },
        IndexPlace { len_bytes: 8 + 23, ..place },
        IndexPlace { len_bytes: u64::MAX, ..place },
        IndexPlace { position: u64::MAX, ..place },
        IndexPlace { len_bytes: u64::MAX - 7 - u64::MAX % 24, position: 100, ..place },
        IndexPlace { format: 3, ..place },
    ] {
        let whole = place.whole();
        let read = whole.as_ref().map(|range| range.end <= bytes.len() as u64);
        assert!(!matches!(read, Ok(true)), "{place:?}");
        assert!(place.decode_top(&bytes).is_err() && place.decode(&bytes, None).is_err());
    }
}

proptest::proptest! {
    #[test]
    fn any_content_is_decoded_as_it_was_encoded(
        batches in proptest::collection::vec(
            (0u64..400, 0u64..3, 1u32..5, 0usize..9000, proptest::num::i64::ANY), 0..300,
        ),
        block_bytes in 1usize..20_000,
    ) {
        let mut next: BTreeMap<u64, u64> = BTreeMap::new();
        let mut content = Content::new();
        for (stream, gap, count, len_bytes, max_timestamp_ms) in batches {
            let next = next.entry(stream).or_default();
            let base = *next + gap;
            *next = base + u64::from(count);
            let batch = Batch { max_timestamp_ms, ..batch(base, count, len_bytes) };
            content.push((StreamId(stream), batch));
        }
        content.sort_by_key(|(stream, batch)| (*stream, batch.base));
        let (bytes, summary) = encode_with(block_bytes, &content);
        proptest::prop_assert_eq!(decode(bytes.clone()).unwrap(), content.clone());
        let whole = Whole::open(bytes.clone()).unwrap();
        // As a reader finds it from the catalog.
        let range = summary.index.whole().unwrap();
        let read = &bytes[range.start as usize..range.end as usize];
        let (blocks, index_bytes) = summary.index.decode(read, None).unwrap();
        proptest::prop_assert_eq!(&blocks, &whole.blocks);
        proptest::prop_assert!(read.len() - index_bytes < PAGE_BYTES);
        proptest::prop_assert_eq!(decode(version_1(&bytes)).unwrap(), content);
    }

    /// Damage with matching checksums, as a defect of a writer would leave it, never causes a
    /// panic.
    #[test]
    fn invalid_contents_with_valid_checksums_do_not_panic(
        index_patches in proptest::collection::vec((0usize..168, proptest::num::u8::ANY), 0..6),
        data_patches in proptest::collection::vec((0usize..134, proptest::num::u8::ANY), 0..6),
        is_version_1 in proptest::bool::ANY,
    ) {
        let (mut bytes, _) = encode(&small());
        if is_version_1 {
            bytes = version_1(&bytes);
        }
        let footer_at = bytes.len() - FOOTER_BYTES;
        let footer = Footer::decode(footer_at as u64, &bytes[footer_at..]).unwrap();
        let (data_end, index_at) = (footer.directory().start, footer.directory().end);
        let (data_end, index_at) = (data_end as usize, index_at as usize);
        let mut bytes = bytes.to_vec();
        for (at, value) in data_patches {
            bytes[HEADER_BYTES + at % (data_end - HEADER_BYTES)] ^= value;
        }
        for (at, value) in index_patches {
            bytes[index_at + at] ^= value;
        }
        let mut entries = bytes[index_at..index_at + 3 * INDEX_ENTRY_BYTES].to_vec();
        for entry in entries.chunks_exact_mut(INDEX_ENTRY_BYTES) {
            let at = u64_at(entry, 24);
            let end = at.saturating_add(u64::from(u32_at(entry, 32)));
            if let (Ok(at), Ok(end)) = (usize::try_from(at), usize::try_from(end))
                && let Some(data) = bytes.get(at..end)
            {
                let crc = crc32c::crc32c(data);
                entry[48..52].copy_from_slice(&crc.to_le_bytes());
            }
        }
        let mut index = entries.clone();
        if !is_version_1 {
            let mut top = bytes[index_at + entries.len()..footer_at].to_vec();
            top[8..24].copy_from_slice(&entries[..16]);
            top[24..28].copy_from_slice(&crc32c::crc32c(&entries).to_le_bytes());
            index.extend(top);
        }
        let stated = &index[if is_version_1 { 0 } else { entries.len() }..];
        let place = IndexPlace { crc32c: crc32c::crc32c(stated), ..footer.index };
        if let Ok((blocks, _)) = place.decode(&index, None) {
            for block in &blocks {
                let at = usize::try_from(block.position).unwrap();
                let data = Bytes::copy_from_slice(&bytes[at..at + block.len_bytes as usize]);
                if let Ok(batches) = decode_block(block, &data) {
                    proptest::prop_assert_eq!(batches[0].base, block.start);
                    proptest::prop_assert_eq!(batches[batches.len() - 1].end(), block.end);
                }
            }
        }
    }
}

fn stored() -> Content {
    vec![(
        StreamId(3),
        Batch {
            base: StreamOffset(5),
            count: 2,
            max_timestamp_ms: -1,
            payload: Bytes::from_static(b"alluvium"),
        },
    )]
}

/// An object of format version 1. Every later version of this code must decode it.
#[test]
fn version_1_still_decodes() {
    let bytes = Bytes::from_static(include_bytes!("../../tests/data/object-v1.bin"));
    assert_eq!(decode(bytes.clone()).unwrap(), stored());
    assert_eq!(version_1(&encode(&stored()).0), bytes, "tests make the same");
}

/// An object of format version 2. Every later version of this code must decode it.
#[test]
fn version_2_still_decodes() {
    let bytes = Bytes::from_static(include_bytes!("../../tests/data/object-v2.bin"));
    assert_eq!(decode(bytes.clone()).unwrap(), stored());
    let whole = Whole::open(bytes.clone()).unwrap();
    assert_eq!(
        (whole.origin, whole.rows[0].label.clone()),
        (Some(ORIGIN), Some(label(StreamId(3))))
    );
    // Without the directory, whose compression may differ.
    let made = encode(&stored()).0;
    let index_bytes = 56 + 8 + 24;
    let [old, new] = [&bytes, &made].map(|object| object.slice(object.len() - 64 - index_bytes..));
    assert_eq!(old[..index_bytes], new[..index_bytes], "and the encoding is unchanged");
}

#[test]
fn an_object_of_a_later_version_is_no_damage() {
    let bytes = encode(&small()).0.to_vec();
    let mut later = [&encode_header(3, Uuid::from_u128(0x1234_5678))[..], &bytes[32..]].concat();
    let is_later = |bytes: &[u8]| match Whole::open(Bytes::copy_from_slice(bytes)) {
        Err(DecodeError::LaterVersion(said)) => said.contains("version 3 is not known"),
        _ => false,
    };
    assert!(is_later(&later));
    // The header alone is of version 2.
    later[..32].copy_from_slice(&bytes[..32]);
    let footer_at = later.len() - FOOTER_BYTES;
    later[footer_at + 20] = 3;
    let crc = crc32c::crc32c(&later[footer_at..footer_at + 60]);
    later[footer_at + 60..].copy_from_slice(&crc.to_le_bytes());
    assert!(is_later(&later));
}

#[test]
fn parts_of_two_objects_are_no_object() {
    let (bytes, _) = encode(&small());
    for header in [
        encode_header(VERSION, Uuid::from_u128(0x1234_5679)),
        encode_header(VERSION_1, Uuid::from_u128(0x1234_5678)),
    ] {
        let mixed = [&header[..], &bytes[HEADER_BYTES..]].concat();
        let error = Whole::open(mixed.into()).unwrap_err().to_string();
        assert!(error.contains("the footer does not belong to the header"), "{error}");
    }
}

#[test]
fn blocks_of_two_pages_follow_one_another() {
    let block = |number: u64, position: u64| Block {
        stream: StreamId(number),
        start: StreamOffset(0),
        end: StreamOffset(1),
        position,
        len_bytes: 25,
        entries: 1,
        max_timestamp_ms: 0,
        crc32c: 0,
    };
    let page = PAGE_ENTRIES as u64;
    for gap in [0, 1] {
        let at = |number: u64| 32 + 25 * number + if number < page { 0 } else { gap };
        let blocks: Vec<_> = (0..page + 2).map(|number| block(number, at(number))).collect();
        let mut index = BytesMut::new();
        let top_bytes = index::encode(&blocks, &mut index);
        let top_at = index.len() - top_bytes;
        let place = IndexPlace {
            format: VERSION,
            position: at(page + 2) + top_at as u64,
            len_bytes: top_bytes as u64,
            crc32c: crc32c::crc32c(&index[top_at..]),
        };
        let decoded = place.decode(&index, Some(at(page + 2)));
        assert_eq!(decoded.is_ok(), gap == 0, "a gap of {gap}");
        assert!(place.decode(&index, Some(at(page + 2) + 1)).is_err(), "data behind the blocks");
    }
}
