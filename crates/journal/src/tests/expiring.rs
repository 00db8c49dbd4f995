//! Values that expire while a writer that has found them present is still in progress.

use std::sync::mpsc;

use super::*;
use crate::disk_budget::WriteClass;
use crate::{Lookup, ScanCursor};

/// Long enough for a reader that does not wait for the writer.
const A_WHILE: Duration = Duration::from_millis(100);

/// Reads a key that has expired while a writer, which found it present before, is about to replace
/// it. The write happens before the expiry, so each reader must see the new value.
fn reads_what_replaces_an_expired_value(
    fill_bytes: usize,
    read: impl Fn(&Cache) -> Option<Vec<u8>> + Sync,
) {
    let cache = open(&SimDirectory::default(), &options());
    let shared = &cache.shared;
    let expires_at = shared.clock.advance(1) + 1;
    shared.put(b"key", b"old", Some(expires_at)).unwrap();
    for filler in 0..fill_bytes / 1000 {
        cache.put(format!("filler {filler}").as_bytes(), &[0; 1000]).unwrap();
    }
    assert_eq!(read(&cache), Some(b"old".to_vec()));

    let hash = shared.hasher.hash(b"key");
    let mut writer = shared.index.lock(hash);
    shared.clock.advance(1);
    let (done, is_done) = mpsc::channel();
    let (cache, read) = (&cache, &read);
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let found = read(cache);
            let _ = done.send(());
            found
        });
        let _ = is_done.recv_timeout(A_WHILE);
        let record = shared.new_value(b"key", b"new", None).unwrap();
        let appended = shared.append_and_index(&mut writer, hash, &record, WriteClass::Put);
        assert!(appended.is_ok());
        drop(writer);
        assert_eq!(reader.join().unwrap(), Some(b"new".to_vec()));
    });
}

#[test]
fn a_read_waits_for_the_writer_that_replaces_an_expired_value() {
    reads_what_replaces_an_expired_value(0, |cache| cache.get_bytes(b"key").unwrap());
    reads_what_replaces_an_expired_value(0, |cache| match cache.try_get(b"key").unwrap() {
        Lookup::Found(value, _) => Some(value.to_vec()),
        Lookup::Absent | Lookup::OnDisk => None,
    });
    reads_what_replaces_an_expired_value(0, |cache| {
        cache.get_many(&[b"key"]).remove(0).unwrap().map(|value| value.to_vec())
    });
}

#[test]
fn a_scan_waits_for_the_writer_that_replaces_an_expired_value() {
    reads_what_replaces_an_expired_value(0, |cache| {
        let keys = cache.scan(ScanCursor::default(), usize::MAX).unwrap().keys;
        // A scan returns no values.
        keys.contains(&b"key".to_vec()).then(|| cache.get_bytes(b"key").unwrap().unwrap())
    });
}

/// In the newest journal, and in one that is sealed and in memory.
#[test]
fn an_iteration_waits_for_the_writer_that_replaces_an_expired_value() {
    for fill_bytes in [0, 3 << 19] {
        reads_what_replaces_an_expired_value(fill_bytes, |cache| {
            let mut entries = cache.iter().map(Result::unwrap);
            entries.find(|entry| entry.key() == b"key").map(|entry| entry.value().to_vec())
        });
    }
}
