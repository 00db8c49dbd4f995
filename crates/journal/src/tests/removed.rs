//! Files that are removed from outside while the cache is open.

use std::fs;
use std::path::Path;

use super::*;

const NEWEST: &str = "000000000000.journal";

type Removal = fn(&Path);

/// Gives another file the name, and the original one another name.
fn replace(path: &Path, name: &str) {
    fs::rename(path.join(name), path.join(name).with_extension("old")).unwrap();
    fs::write(path.join(name), "").unwrap();
}

/// A cache in the directory, with one value. It creates no more files.
fn quiet(path: &Path) -> Cache {
    let cache = Cache::open(path, options()).unwrap();
    cache.put(b"key", b"value").unwrap();
    while cache.shared.flush.state.lock().spare.is_none() {
        thread::yield_now();
    }
    cache
}

#[test]
fn writing_stops_when_a_required_file_is_removed() {
    let removals: [(&[&str], Removal); 6] = [
        (&[NEWEST], |path| fs::remove_file(path.join(NEWEST)).unwrap()),
        // Whichever is removed first.
        (&[NEWEST, "lock"], |path| fs::remove_dir_all(path).unwrap()),
        (&["lock"], |path| fs::remove_file(path.join("lock")).unwrap()),
        // Another process has locked it since.
        (&["lock"], |path| {
            fs::write(path.join("other"), "").unwrap();
            fs::rename(path.join("other"), path.join("lock")).unwrap();
        }),
        // The open file still has a name, but not the expected one.
        (&["lock"], |path| replace(path, "lock")),
        (&[NEWEST], |path| replace(path, NEWEST)),
    ];
    for (missing, remove) in removals {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("cache");
        let cache = quiet(&path);
        remove(&path);
        // Or some seconds later.
        cache.shared.maintenance.waker.wake();
        let error = loop {
            match cache.failure() {
                Some(error) => break error,
                None => thread::yield_now(),
            }
        };
        let is_missing = |found: &Path| missing.iter().any(|name| *found == path.join(name));
        assert!(matches!(&error, Error::Removed { path: found } if is_missing(found)), "{error}");
        assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
        assert!(matches!(cache.put(b"key", b"other"), Err(Error::Removed { .. })));
        assert!(matches!(cache.delete(b"key"), Err(Error::Removed { .. })));
        assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
        assert!(matches!(cache.close(), Err(Error::Removed { .. })));
        // The advice of the error message works.
        let cache = quiet(&path);
        cache.close().unwrap();
    }
}

/// A backup may have links to all files, and may be removed.
#[test]
fn writing_continues_while_the_files_have_their_names() {
    let directory = tempfile::tempdir().unwrap();
    let cache = quiet(directory.path());
    let is_all_there = || {
        let newest = cache.shared.active.load();
        cache.shared.directory.removed(NEWEST, &*newest.file).unwrap().is_none()
    };
    for name in [NEWEST, "lock"] {
        let link = directory.path().join(name).with_extension("link");
        fs::hard_link(directory.path().join(name), &link).unwrap();
        assert!(is_all_there(), "{name}");
        fs::remove_file(link).unwrap();
        assert!(is_all_there(), "{name}");
    }
    cache.put(b"key", b"other").unwrap();
    cache.close().unwrap();
}
