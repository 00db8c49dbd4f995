//! Indexes of several pages: what is fetched of them, cached, and verified.

use super::*;
use crate::object::{Encoder, ORIGIN, version_1};
use crate::types::KIND_LOG;

/// Entries of a page.
const PAGE: u64 = 73;

type Content = Vec<(StreamId, Batch)>;

fn batch(base: u64) -> Batch {
    let payload = vec![base as u8; 50].into();
    Batch { base: StreamOffset(base), count: 1, max_timestamp_ms: base.cast_signed(), payload }
}

/// Streams of one block each, one of several pages, one that ends where a page does, and more.
fn content() -> Content {
    let of_stream =
        |id: u64, batches: u64| (0..batches).map(move |base| (StreamId(id), batch(base)));
    let mut content: Content = (0..70).flat_map(|id| of_stream(id, 1)).collect();
    content.extend(of_stream(100, 3 + 2 * PAGE + 10));
    content.extend(of_stream(200, PAGE - 10));
    content.extend((300..400).flat_map(|id| of_stream(id, 1)));
    content
}

/// Returns an object with a block for each batch.
fn encoded(content: &Content) -> (Bytes, ObjectInfo) {
    let (encoder, header) = Encoder::new(Uuid::from_u128(1));
    let mut encoder = encoder.with_block_bytes(1);
    let mut bytes = header.to_vec();
    for (stream, batch) in content {
        encoder.begin(*stream, KIND_LOG, &Bytes::new());
        bytes.extend(encoder.push(batch, None).into_iter().flatten().flatten());
    }
    let (last, tail, summary) = encoder.finish(&ORIGIN);
    bytes.extend(last.into_iter().flatten().flatten());
    bytes.extend(tail);
    let info = ObjectInfo {
        id: ObjectId(1),
        name: "o".into(),
        size_bytes: summary.size_bytes,
        format: 2,
        index_position: summary.index.position,
        index_bytes: summary.index.len_bytes,
        index_crc32c: summary.index.crc32c,
        created_at_ms: 0,
        generation: 0,
        payload_bytes: 0,
    };
    (bytes.into(), info)
}

async fn stored(objects: &Objects, bytes: Bytes) {
    objects.store(RequestClass::Upload).put(&"o".into(), bytes.into()).await.unwrap();
}

/// Reads all of a stream from an offset on.
async fn read_all(
    objects: &Objects,
    object: &Arc<ObjectInfo>,
    stream: StreamId,
    from: u64,
) -> Result<Vec<Batch>, ObjectError> {
    let budget = &mut Budget::new(1 << 20);
    let read = objects.fetch(object, stream, StreamOffset(from), budget, &mut None).await;
    read.map(|part| part.batches)
}

fn expected(content: &Content, stream: StreamId, from: u64) -> Vec<Batch> {
    let wanted = content.iter().filter(|(id, batch)| *id == stream && batch.base.0 >= from);
    wanted.map(|(_, batch)| batch.clone()).collect()
}

#[tokio::test]
async fn a_reader_fetches_the_top_and_the_pages_of_its_stream() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let top_bytes = info.index_bytes;
    assert_eq!(top_bytes, 8 + 24 * 6, "six pages");
    let object = Arc::new(info);
    // (stream, from, pages)
    for (stream, from, pages) in [
        (0, 0, 1),
        (99, 0, 1), // not there: where it would be
        (100, 0, 4),
        (100, 2, 4),
        (100, 3, 3),
        (100, 3 + PAGE, 2),
        (100, 3 + 2 * PAGE, 1),
        (200, 0, 1),
        (399, 0, 1),
        (400, 0, 1),
    ] {
        let objects = objects(1 << 20);
        stored(&objects, bytes.clone()).await;
        let blocks = objects.blocks(&object, StreamId(stream), StreamOffset(from)).await.unwrap();
        let expected = expected(&content, StreamId(stream), from);
        let found = blocks.after(StreamOffset(from)).iter().map(|block| block.start);
        assert!(found.eq(expected.iter().map(|batch| batch.base)), "stream {stream} from {from}");
        let stats = objects.read_stats();
        let of_pages = stats.get_bytes - top_bytes;
        assert_eq!(stats.gets, 2, "stream {stream} from {from}: the top, and its pages");
        assert!(of_pages <= pages * PAGE * 56, "stream {stream} from {from}: {of_pages} bytes");
        let read = read_all(&objects, &object, StreamId(stream), from).await.unwrap();
        assert!(read == expected, "stream {stream} from {from}");
    }
}

#[tokio::test]
async fn pages_are_cached_and_shared_by_readers() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let object = Arc::new(info);
    let objects = objects(1 << 20);
    stored(&objects, bytes).await;
    let streams = [0, 33, 69, 100, 200, 300, 350, 399].map(StreamId);
    let readers = streams.repeat(5).into_iter().map(|stream| {
        let (objects, object) = (objects.clone(), object.clone());
        tokio::spawn(async move { (stream, read_all(&objects, &object, stream, 0).await.unwrap()) })
    });
    for reader in readers.collect::<Vec<_>>() {
        let (stream, read) = reader.await.unwrap();
        assert!(read == expected(&content, stream, 0), "stream {stream}");
    }
    let stats = objects.read_stats();
    let most_bytes = object.size_bytes;
    assert!(stats.get_bytes < most_bytes, "nothing is fetched twice: {stats:?}");
    for stream in streams {
        let budget = &mut Budget::new(1 << 20);
        let cached = objects.fetch_cached(&object, stream, StreamOffset(0), budget);
        assert!(cached == expected(&content, stream, 0), "stream {stream}");
    }
    assert_eq!(objects.read_stats().gets, stats.gets, "all of it is cached");
}

#[tokio::test]
async fn what_is_cached_is_returned_up_to_the_first_page_that_is_not() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let object = Arc::new(info);
    let objects = objects(1 << 20);
    stored(&objects, bytes).await;
    let stream = StreamId(100);
    let all = read_all(&objects, &object, stream, 0).await.unwrap();
    for (gone, left) in [(2, 3 + PAGE), (1, 3), (0, 0)] {
        objects.core.cache.remove(&Key::Page(object.id, gone));
        let budget = &mut Budget::new(1 << 20);
        let cached = objects.fetch_cached(&object, stream, StreamOffset(0), budget);
        assert!(cached == all[..usize::try_from(left).unwrap()], "{} batches", cached.len());
    }
    let before = objects.read_stats();
    assert!(read_all(&objects, &object, stream, 0).await.unwrap() == all);
    let stats = objects.read_stats();
    assert_eq!(stats.gets - before.gets, 1, "three neighbouring pages");
    assert_eq!(stats.get_bytes - before.get_bytes, 3 * PAGE * 56);
}

#[tokio::test]
async fn a_damaged_page_is_an_error_for_its_streams_only() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let page_at = info.index_position - 56 * content.len() as u64;
    let object = Arc::new(info);
    let objects = objects(1 << 20);
    let mut damaged = bytes.to_vec();
    let second = page_at + PAGE * 56;
    damaged[usize::try_from(second).unwrap() + 100] ^= 4;
    stored(&objects, damaged.into()).await;
    for (stream, is_intact) in [(0, true), (100, false), (200, true), (399, true)] {
        let stream = StreamId(stream);
        match read_all(&objects, &object, stream, 0).await {
            Ok(read) => assert!(is_intact && read == expected(&content, stream, 0), "{stream}"),
            Err(error) => {
                let text = error.to_string();
                assert!(!is_intact && error.is_loss(), "{stream}: {text}");
                let place = format!("byte {second}: page 1 of the index does not match");
                assert!(text.contains(&place), "{text}");
            }
        }
    }
    let behind = read_all(&objects, &object, StreamId(100), 3 + PAGE).await.unwrap();
    assert!(behind == expected(&content, StreamId(100), 3 + PAGE), "behind the damaged page");
    assert_eq!(objects.read_stats().failures, 1);

    let mut damaged = bytes.to_vec();
    damaged[usize::try_from(object.index_position).unwrap() + 10] ^= 4;
    let objects = super::objects(1 << 20);
    stored(&objects, damaged.into()).await;
    let error = read_all(&objects, &object, StreamId(0), 0).await.unwrap_err().to_string();
    assert!(error.contains("the top of the index does not match"), "{error}");
}

#[tokio::test]
async fn an_index_of_up_to_three_pages_takes_one_request() {
    for (blocks, gets) in [(1, 1), (PAGE, 1), (3 * PAGE, 1), (3 * PAGE + 1, 2)] {
        let content: Content = (0..blocks).map(|id| (StreamId(id), batch(id))).collect();
        let (bytes, info) = encoded(&content);
        let object = Arc::new(info);
        for stream in [0, blocks - 1].map(StreamId) {
            let objects = objects(1 << 20);
            stored(&objects, bytes.clone()).await;
            let found = objects.blocks(&object, stream, StreamOffset(0)).await.unwrap();
            assert_eq!(found.after(StreamOffset(0)).len(), 1);
            let stats = objects.read_stats();
            assert_eq!(stats.gets, gets, "{blocks} blocks");
            assert!(stats.get_bytes <= 12_344, "{blocks} blocks: {stats:?}");
        }
    }
}

#[tokio::test]
async fn without_a_block_cache_pages_are_fetched_by_each_reader() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let object = Arc::new(info);
    let objects = objects(0);
    stored(&objects, bytes).await;
    for gets in [2, 4] {
        objects.blocks(&object, StreamId(100), StreamOffset(0)).await.unwrap();
        assert_eq!(objects.read_stats().gets, gets);
    }
}

#[tokio::test]
async fn an_object_of_version_1_is_read_by_its_whole_index() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let bytes = version_1(&bytes);
    let index_bytes = 56 * content.len() as u64;
    let index_position = bytes.len() as u64 - 64 - index_bytes;
    let index = &bytes[usize::try_from(index_position).unwrap()..bytes.len() - 64];
    let index_crc32c = crc32c::crc32c(index);
    let size_bytes = bytes.len() as u64;
    let older =
        ObjectInfo { format: 1, size_bytes, index_position, index_bytes, index_crc32c, ..info };
    let object = Arc::new(older);
    let objects = objects(1 << 20);
    stored(&objects, bytes).await;
    for stream in [0, 100, 200, 399].map(StreamId) {
        let read = read_all(&objects, &object, stream, 0).await.unwrap();
        assert!(read == expected(&content, stream, 0), "stream {stream}");
    }
    let (handle, info) = (objects.handle(RequestClass::Compaction), &*object);
    assert_eq!(crate::objects::index(handle, info).await.unwrap().len(), content.len());
}

/// Compaction reads all of an index at once.
#[tokio::test]
async fn the_whole_index_takes_one_request() {
    let content = content();
    let (bytes, info) = encoded(&content);
    let objects = objects(1 << 20);
    stored(&objects, bytes.clone()).await;
    let index =
        crate::objects::index(objects.handle(RequestClass::Compaction), &info).await.unwrap();
    let whole = crate::object::Whole::open(bytes).unwrap();
    assert_eq!(index, whole.blocks);
    let gets = |requests: &Requests| (requests.class, requests.kind) == ("compaction", "get");
    let requests = objects.requests();
    let gets = requests.iter().find(|requests| gets(requests)).unwrap();
    let index_bytes = 56 * content.len() as u64 + info.index_bytes;
    assert!(gets.count == 1 && gets.bytes - index_bytes < PAGE * 56, "{gets:?}");
}
