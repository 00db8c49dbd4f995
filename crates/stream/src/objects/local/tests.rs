use bytes::Bytes;
use object_store::ObjectStoreExt;

use super::*;

/// Whole and partial pages, in parts that begin at a page or not, of pieces of any length.
#[tokio::test]
async fn parts_become_an_object() {
    let directory = tempfile::tempdir().unwrap();
    let store = local_objects(directory.path()).unwrap();
    for part_bytes in [PAGE_BYTES, WRITE_BYTES, 3 * WRITE_BYTES, 2 * WRITE_BYTES + 17] {
        for last_bytes in [0, 1, PAGE_BYTES, WRITE_BYTES + 5] {
            let pattern = |len: usize| (0..len).map(|i| (i * 7 + i / 4096) as u8);
            let whole: Vec<u8> = pattern(2 * part_bytes + last_bytes).collect();
            let name = format!("{part_bytes}-{last_bytes}").into();
            let mut upload = store.put_multipart(&name).await.unwrap();
            for part in whole.chunks(part_bytes) {
                let pieces = part.chunks(1_000_001).map(Bytes::copy_from_slice);
                upload.put_part(PutPayload::from_iter(pieces)).await.unwrap();
            }
            upload.complete().await.unwrap();
            let found = store.get(&name).await.unwrap().bytes().await.unwrap();
            assert!(found == whole, "parts of {part_bytes}, the last of {last_bytes}");
        }
    }
}

#[tokio::test]
async fn objects_of_any_length_are_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let store = local_objects(directory.path()).unwrap();
    for len in [0, 1, FREED_BYTES, FREED_BYTES + 1, 3 * FREED_BYTES + 17] {
        let file = File::create(directory.path().join("a")).unwrap();
        file.set_len(len).unwrap();
        store.delete(&"a".into()).await.unwrap();
        assert!(!directory.path().join("a").exists(), "{len} bytes");
        let again = store.delete(&"a".into()).await;
        assert!(matches!(again, Err(object_store::Error::NotFound { .. })), "{again:?}");
    }
}

/// During a deletion, and however it ends.
#[tokio::test]
async fn an_object_being_deleted_is_neither_found_nor_listed() {
    let directory = tempfile::tempdir().unwrap();
    let store = local_objects(directory.path()).unwrap();
    let prefix = format!("{OBJECTS_DIRECTORY}/store");
    let store_directory = directory.path().join(&prefix);
    std::fs::create_dir_all(&store_directory).unwrap();
    let (path, hidden) = (store_directory.join("a"), store_directory.join(format!("a#{DELETED}")));
    File::create(&path).unwrap().set_len(100 * FREED_BYTES).unwrap();
    let deletion = tokio::spawn({
        let (store, name) = (store.clone(), ObjectPath::from(format!("{prefix}/a")));
        async move { store.delete(&name).await }
    });
    // The deletion continues only while this task waits: it cannot be further than its first step.
    while path.exists() {
        tokio::task::yield_now().await;
    }
    assert!(hidden.metadata().unwrap().len() > 90 * FREED_BYTES);
    let found = store.get(&format!("{prefix}/a").into()).await;
    assert!(matches!(found, Err(object_store::Error::NotFound { .. })), "{found:?}");
    let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
    assert!(listed.is_empty(), "{listed:?}");

    // Its caller is gone.
    deletion.abort();
    let gone = async {
        while hidden.exists() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();

    // If it was interrupted, opening the directory completes it.
    File::create(&hidden).unwrap().set_len(2 * FREED_BYTES).unwrap();
    drop(local_objects(directory.path()).unwrap());
    assert!(!hidden.exists());
}

#[tokio::test]
async fn a_directory_is_not_deleted_for_an_object() {
    let directory = tempfile::tempdir().unwrap();
    let store = local_objects(directory.path()).unwrap();
    std::fs::create_dir(directory.path().join("a")).unwrap();
    store.delete(&"a".into()).await.unwrap_err();
    assert!(directory.path().join("a").is_dir());
}

/// The last step is not a large one.
#[tokio::test]
async fn a_file_is_freed_except_for_the_last_step() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    for (len, left) in
        [(0, 0), (FREED_BYTES, FREED_BYTES), (FREED_BYTES + 1, 1), (3 * FREED_BYTES, FREED_BYTES)]
    {
        File::create(&path).unwrap().set_len(len).unwrap();
        free(path.clone()).await.unwrap();
        assert_eq!(path.metadata().unwrap().len(), left, "{len} bytes");
    }
    // A file with another hard link and a symbolic link are left as they are.
    File::create(&path).unwrap().set_len(3 * FREED_BYTES).unwrap();
    let other = directory.path().join("backup");
    std::fs::hard_link(&path, &other).unwrap();
    free(path.clone()).await.unwrap();
    assert_eq!(other.metadata().unwrap().len(), 3 * FREED_BYTES);
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    free(path.clone()).await.unwrap();
    assert_eq!(other.metadata().unwrap().len(), 3 * FREED_BYTES);
    std::fs::remove_file(&path).unwrap();
    free(path).await.unwrap();
}

/// Cold reads have four threads for files, and share them with the writes of object compaction.
#[test]
fn waiting_parts_occupy_no_thread() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(1)
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        let unfinished = Unfinished::begin(directory.path().join("a")).unwrap();
        let unfinished = Arc::new(Mutex::new(unfinished));
        let writing = unfinished.clone().lock_owned().await;
        let mut parts = Parts { unfinished, next: 0 };
        let waiting: Vec<_> =
            (b'a'..=b'c').map(|byte| tokio::spawn(parts.put_part(vec![byte; 2].into()))).collect();
        tokio::task::yield_now().await;
        let other = tokio::task::spawn_blocking(|| ());
        tokio::time::timeout(Duration::from_secs(60), other).await.unwrap().unwrap();
        drop(writing);
        for part in waiting {
            part.await.unwrap().unwrap();
        }
        parts.complete().await.unwrap();
    });
    assert_eq!(std::fs::read(directory.path().join("a")).unwrap(), b"aabbcc");
}

#[test]
fn the_page_cache_serves_where_direct_writes_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    // Only a number can be written to it: to the writer it looks like a file system that needs
    // larger units.
    let refusing = || File::options().write(true).open("/proc/self/oom_score_adj").unwrap();
    for direct in [None, Some(refusing())] {
        let mut unfinished = Unfinished::begin(directory.path().join("a")).unwrap();
        unfinished.direct = direct;
        let data: Vec<u8> = (0..2 * WRITE_BYTES + 1).map(|i| b'a' + (i % 23) as u8).collect();
        unfinished.write(0, &data.clone().into()).unwrap();
        unfinished.finish().unwrap();
        assert!(unfinished.direct.is_none());
        assert!(std::fs::read(directory.path().join("a")).unwrap() == data);
    }
}

/// The file system is not mounted: its mount point is an empty directory.
#[tokio::test]
async fn nothing_is_read_or_written_in_a_replaced_directory() {
    let parent = tempfile::tempdir().unwrap();
    let [path, away, copy] = ["objects", "away", "copy"].map(|name| parent.path().join(name));
    let store = local_objects(&path).unwrap();
    let content = PutPayload::from_static(b"content");
    store.put(&"streams/a".into(), content.clone()).await.unwrap();

    std::fs::rename(&path, &away).unwrap();
    for is_there in [false, true] {
        if is_there {
            std::fs::create_dir(&path).unwrap();
        }
        let unavailable = |error: object_store::Error| {
            assert!(matches!(error, object_store::Error::Generic { .. }), "{error:?}");
            assert!(error.to_string().contains("not mounted"), "{error}");
        };
        let a = ObjectPath::from("streams/a");
        unavailable(store.put(&a, content.clone()).await.unwrap_err());
        unavailable(store.put_multipart(&a).await.unwrap_err());
        unavailable(store.get(&a).await.unwrap_err());
        unavailable(store.head(&a).await.unwrap_err());
        unavailable(store.delete(&a).await.unwrap_err());
        unavailable(store.copy(&a, &"streams/b".into()).await.unwrap_err());
        unavailable(store.list(None).try_collect::<Vec<_>>().await.unwrap_err());
        unavailable(store.list_with_delimiter(None).await.unwrap_err());
    }
    assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0, "nothing was created there");

    let works = async || {
        let got = store.get(&"streams/a".into()).await.unwrap();
        assert_eq!(got.bytes().await.unwrap(), &b"content"[..]);
        let missing = store.get(&"streams/b".into()).await.unwrap_err();
        assert!(matches!(missing, object_store::Error::NotFound { .. }), "{missing:?}");
        store.put(&"streams/c".into(), PutPayload::from_static(b"new")).await.unwrap();
    };
    std::fs::remove_dir(&path).unwrap();
    std::fs::rename(&away, &path).unwrap();
    works().await;

    // When it is mounted again under another device number, it is recognized by its mark. (Another
    // directory simulates that.)
    std::fs::create_dir_all(copy.join("streams")).unwrap();
    for name in [MARK, "streams/a"] {
        std::fs::copy(path.join(name), copy.join(name)).unwrap();
    }
    std::fs::rename(&path, &away).unwrap();
    std::fs::rename(&copy, &path).unwrap();
    works().await;

    // Another store's directory is not accepted.
    std::fs::rename(&path, &copy).unwrap();
    drop(local_objects(&path).unwrap());
    store.get(&"streams/c".into()).await.map(drop).unwrap_err();
    store.put(&"streams/c".into(), PutPayload::new()).await.unwrap_err();
    assert!(!path.join("streams").exists());
}
