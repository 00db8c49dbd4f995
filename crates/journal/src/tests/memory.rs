//! A system without memory, for some pages or for more.

use super::cold::{still, text};
use super::*;
use crate::memory::refuse;

const KEYS: u64 = 6000;

/// Several journals, all of them cold except the newest.
fn closed() -> SimDirectory {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &text(key)).unwrap();
    }
    cache.put(b"long", &[7; 400_000]).unwrap();
    cache.close().unwrap();
    directory
}

#[test]
fn a_journal_is_compressed_when_there_is_memory_for_it() {
    for compression in [Compression::Lz4, Compression::Zstd, Compression::Snappy] {
        let directory = closed();
        let shared = still(&directory, &Options { compression, ..options() });
        refuse(true);
        let mut tries = 0;
        while shared.compress_one().unwrap() {
            tries += 1;
        }
        refuse(false);
        let journals = shared.journals.all();
        assert!(tries > 2 && tries < journals.len(), "each of them once: {tries}");
        assert!(shared.maintenance.has_logged_memory.load(Ordering::Relaxed));
        assert!(journals.iter().all(|it| it.frames.is_none()));
        assert!(journals.iter().all(|it| !it.counts.stays_plain.load(Ordering::Relaxed)));
        let names = directory.list().unwrap();
        assert!(!names.iter().any(|name| name.ends_with(".tmp")), "{names:?}");
        // Some seconds later.
        journals.iter().for_each(|it| *it.counts.failed_at.lock() = None);
        while shared.compress_one().unwrap() {}
        assert!(!shared.maintenance.has_logged_memory.load(Ordering::Relaxed));
        let compressed = shared.journals.all().iter().filter(|it| it.frames.is_some()).count();
        assert_eq!(compressed, tries);
    }
}

#[test]
fn a_read_without_memory_fails_alone() {
    for compression in [Compression::None, Compression::Lz4, Compression::Zstd] {
        let directory = closed();
        let options = Options { compression, ..options() };
        let shared = Arc::new(still(&directory, &options));
        while shared.compress_one().unwrap() {}
        drop(shared);
        let cache = open(&directory, &options);
        let is_cold = |key: &[u8]| matches!(cache.try_get(key), Ok(crate::Lookup::OnDisk));
        let first = 0u64.to_le_bytes();
        let keys = [&first[..], b"long", b"none"];
        for key in keys.into_iter().filter(|key| is_cold(key)) {
            refuse(true);
            let [read, read_bytes] = [cache.get(key).map(drop), cache.get_bytes(key).map(drop)];
            let many = cache.get_many(&[b"none", key]);
            let iterated = cache.iter().any(|it| matches!(it, Err(Error::NoMemory { .. })));
            refuse(false);
            for result in [read, read_bytes] {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::NoMemory { .. }), "{error}");
            }
            assert!(matches!(many[0], Ok(None)));
            assert!(matches!(many[1], Err(Error::NoMemory { .. })), "{:?}", many[1]);
            assert!(iterated);
            assert!(cache.get(key).unwrap().is_some());
            assert!(cache.get_many(&[key])[0].as_ref().unwrap().is_some());
        }
        assert!(is_cold(&first), "{compression}");
        assert!(cache.failure().is_none());
        assert_eq!(cache.stats().damaged_bytes, 0);
        cache.close().unwrap();
    }
}
