//! Directories of objects in an object store in memory.

use std::sync::Arc;

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;

use super::*;
use crate::object::{Encoder, ORIGIN, Whole, version_1};
use crate::objects::{CountedStores, StoredObject};
use crate::request_class::RequestClass;
use crate::types::{Batch, KIND_LOG, StreamId, StreamOffset};

const NAME: &str = "streams/a/0000000000000001-000000000000000000000000000000ff";

/// Returns an object with this number of streams, of one batch each.
fn object(streams: u64) -> Bytes {
    let (mut encoder, header) = Encoder::new(Uuid::from_u128(0xff));
    let mut object = header.to_vec();
    for id in 0..streams {
        let label = format!("a label, not all of which are alike: {:x}", id * 0x9e37_79b9_7f4a);
        let payload = vec![id as u8; 20].into();
        let base = StreamOffset(id * 10);
        let batch = Batch { base, count: 2, max_timestamp_ms: 5 - id.cast_signed(), payload };
        encoder.begin(StreamId(7 * id), KIND_LOG, &label.into());
        object.extend(encoder.push(&batch, None).into_iter().flatten().flatten());
    }
    let (last, tail, _) = encoder.finish(&ORIGIN);
    object.extend(last.into_iter().flatten().flatten());
    object.extend(tail);
    object.into()
}

/// Returns what is read of an object, and the number of GETs and their bytes.
async fn read(bytes: Bytes) -> (Result<Directory, ObjectError>, u64, u64) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    store.put(&NAME.into(), bytes.into()).await.unwrap();
    let counted = CountedStores::new(&store);
    let directory = read_directory(counted.get(RequestClass::Read), NAME).await;
    let requests = counted.requests();
    let gets = requests.iter().filter(|requests| requests.kind == "get");
    let (mut count, mut bytes) = (0, 0);
    gets.for_each(|gets| (count, bytes) = (count + gets.count, bytes + gets.bytes));
    (directory, count, bytes)
}

#[tokio::test]
async fn a_directory_has_what_the_whole_object_has() {
    for (streams, gets_of_2, gets_of_1) in [(0, 1, 1), (1, 1, 1), (300, 1, 1), (5000, 2, 2)] {
        let of_version_2 = object(streams);
        let older = version_1(&of_version_2);
        for (bytes, expected_gets) in [(of_version_2, gets_of_2), (older, gets_of_1)] {
            let whole = Whole::open(bytes.clone()).unwrap();
            let (directory, gets, read_bytes) = read(bytes.clone()).await;
            let directory = directory.unwrap();
            assert_eq!((directory.format, directory.nonce), (whole.format, whole.nonce));
            assert_eq!((directory.origin, &directory.rows), (whole.origin, &whole.rows));
            assert_eq!(directory.size_bytes, bytes.len() as u64);
            assert_eq!(directory.payload_bytes(), 20 * streams);
            assert_eq!(gets, expected_gets, "{streams} streams, version {}", whole.format);
            // Neither the blocks nor, in version 2, the pages of a large index.
            let data_bytes = 44 * streams;
            assert!(read_bytes <= TAIL_BYTES + bytes.len() as u64 - data_bytes);
            if whole.format == 2 {
                assert!(read_bytes <= TAIL_BYTES + 40 * streams, "{read_bytes} bytes");
            }
            let index = directory.index_position..directory.index_position + directory.index_bytes;
            let index = &bytes[index.start as usize..index.end as usize];
            assert_eq!(directory.index_crc32c, crc32c::crc32c(index), "as in the catalog");
        }
    }
}

/// The blocks are not read, nor are the header and, in version 2, the index.
#[tokio::test]
async fn damage_of_what_is_read_is_detected() {
    let of_version_2 = object(3);
    let of_version_1 = version_1(&of_version_2);
    let index_bytes = 3 * 56 + 8 + 24;
    for (bytes, checked) in [
        (of_version_2.clone(), 32 + 3 * 44..of_version_2.len() - 64 - index_bytes),
        (of_version_1.clone(), 32 + 3 * 44..of_version_1.len() - 64),
    ] {
        let footer = bytes.len() - 64..bytes.len();
        for at in checked.chain(footer) {
            let mut flipped = bytes.to_vec();
            flipped[at] ^= 1 << (at % 8);
            let (read, gets, _) = read(flipped.into()).await;
            let error = read.unwrap_err();
            assert!(error.is_loss() && error.to_string().contains(NAME), "byte {at}: {error}");
            assert_eq!(gets, 2, "it is read again");
        }
        for len in 0..bytes.len() {
            let (read, ..) = read(bytes.slice(..len)).await;
            assert!(read.is_err(), "cut at {len}");
        }
    }
}

#[tokio::test]
async fn an_object_under_the_name_of_another_one_is_damage() {
    let store = Arc::new(InMemory::new());
    let another = NAME.replace("ff", "fe");
    store.put(&another.as_str().into(), object(1).into()).await.unwrap();
    let error = read_directory(&*store, &another).await.unwrap_err();
    assert!(error.to_string().contains("this is another object"), "{error}");
    let missing = read_directory(&*store, NAME).await.unwrap_err();
    assert!(missing.is_not_found(), "{missing}");
    // A name without a nonce states none.
    store.put(&"o".into(), object(1).into()).await.unwrap();
    assert_eq!(read_directory(&*store, "o").await.unwrap().rows.len(), 1);
}

#[tokio::test]
async fn a_stored_object_has_directory_and_blocks() {
    let store = Arc::new(InMemory::new());
    for bytes in [object(100), version_1(&object(100))] {
        store.put(&NAME.into(), bytes.clone().into()).await.unwrap();
        let stored = StoredObject::open(store.clone(), &NAME.into()).await.unwrap();
        let whole = Whole::open(bytes).unwrap();
        assert_eq!(stored.directory, read_directory(&*store, NAME).await.unwrap());
        assert_eq!(stored.blocks, whole.blocks);
        assert!(stored.verify(&|_| {}).await.unwrap().is_empty());
    }
}
