//! Objects that have the name of a cache's file but are not files, created by mistake or with
//! malicious intent.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::mpsc;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;
use crate::files::RealDirectory;
use crate::{files_set_aside, inspect};

/// A pipe without a writer, which an ordinary open waits for.
fn pipe(path: &Path) {
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
}

fn directory(path: &Path) {
    fs::create_dir_all(path.join("with/something")).unwrap();
}

fn zeroes(path: &Path) {
    symlink("/dev/zero", path).unwrap();
}

const ALL: [fn(&Path); 3] = [pipe, directory, zeroes];

/// Creates a closed cache with a value.
fn make(path: &Path) {
    let cache = Cache::open(path, options()).unwrap();
    cache.put(b"key", b"value").unwrap();
    cache.close().unwrap();
}

/// Fails the test if `run` does not end.
fn within_time<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(run()));
    receiver.recv_timeout(Duration::from_secs(20)).expect("it does not wait for ever")
}

fn inspected(path: &Path) -> Result<usize, Error> {
    let path = path.to_owned();
    within_time(move || inspect(path, |_| Ok(())))
}

fn opened(path: &Path) -> Result<Cache, Error> {
    let path = path.to_owned();
    within_time(move || Cache::open(path, options()))
}

#[test]
fn a_journal_that_is_not_a_file_is_set_aside() {
    for make_it in ALL {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        make(path);
        let other = path.join("000000000900.journal");
        make_it(&other);
        let error = inspected(path).unwrap_err().to_string();
        assert!(error.starts_with(other.to_str().unwrap()), "{error}");
        assert!(error.contains("not a regular file"), "{error}");
        let cache = opened(path).unwrap();
        assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
        assert_eq!((cache.stats().set_aside.files, cache.recovered().damaged_bytes), (1, 0));
        let aside = path.join("000000000900.journal.damaged");
        assert!(!other.exists() && aside.exists());
        // A directory belongs to another program and is no obstacle.
        let is_directory = aside.is_dir();
        if is_directory {
            fs::write(path.join("000000000901.journal.damaged"), "of old").unwrap();
            assert_eq!(cache.remove_damaged().unwrap(), 1);
            assert_eq!((cache.stats().set_aside.files, aside.is_dir()), (1, true));
        }
        cache.close().unwrap();
        // From now on it is no obstacle.
        inspected(path).unwrap();
        let path = path.to_owned();
        assert_eq!(within_time(move || files_set_aside(path)).unwrap().files, 1);
    }
}

/// The records are found without it.
#[test]
fn a_hint_that_is_not_a_file_is_reported() {
    for make_it in ALL {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        make(path);
        let hint = path.join("000000000000.hint");
        fs::remove_file(&hint).unwrap();
        make_it(&hint);
        let error = inspected(path).unwrap_err().to_string();
        assert!(error.starts_with(hint.to_str().unwrap()), "{error}");
        let cache = opened(path).unwrap();
        assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
        cache.close().unwrap();
    }
}

#[test]
fn an_identity_that_is_not_a_file_is_reported() {
    for make_it in ALL {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        make(path);
        let identity = path.join("cache");
        fs::remove_file(&identity).unwrap();
        make_it(&identity);
        for error in [inspected(path).unwrap_err(), opened(path).unwrap_err()] {
            let error = error.to_string();
            assert!(error.starts_with(identity.to_str().unwrap()), "{error}");
            assert!(error.contains("not a regular file"), "{error}");
        }
    }
}

/// The target of a link may be on a disk that is not mounted at present, so the journal's number is
/// not reused.
#[test]
fn a_dangling_journal_link_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    make(path);
    let journal = path.join("000000000900.journal");
    symlink("/nowhere/at/all", &journal).unwrap();
    for error in [inspected(path).unwrap_err(), opened(path).unwrap_err()] {
        let error = error.to_string();
        assert!(error.starts_with(journal.to_str().unwrap()), "{error}");
        assert!(error.contains("restore its target, or remove the link"), "{error}");
    }
}

/// A cache creates no directories, so an opening removes none.
#[test]
fn a_directory_with_the_name_of_a_leftover_file_stays() {
    for name in ["000000000900.journal.tmp", "000000000900.hint", "cache.tmp"] {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path();
        make(path);
        let other = path.join(name);
        directory(&other);
        let error = inspected(path).unwrap_err().to_string();
        assert!(error.starts_with(other.to_str().unwrap()), "{error}");
        let cache = opened(path).unwrap();
        assert_eq!(cache.get(b"key").unwrap().as_deref(), Some(&b"value"[..]));
        cache.close().unwrap();
        assert!(other.join("with/something").exists());
    }
    // Other objects are removed like a file.
    for name in ["000000000900.journal.tmp", "000000000900.hint"] {
        for make_it in [pipe, zeroes] {
            let temporary = tempfile::tempdir().unwrap();
            let path = temporary.path();
            make(path);
            make_it(&path.join(name));
            opened(path).unwrap().close().unwrap();
            assert!(fs::symlink_metadata(path.join(name)).is_err());
        }
    }
}

/// The file system is not blamed for it, and reads by io_uring may wait.
#[test]
fn opened_files_have_the_usual_flags() {
    use rustix::fs::{OFlags, fcntl_getfl};
    let temporary = tempfile::tempdir().unwrap();
    make(temporary.path());
    let real = RealDirectory::open(temporary.path(), false).unwrap().unwrap();
    let file = real.open("cache").unwrap();
    let flags = fcntl_getfl(file.descriptor().unwrap()).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK), "{flags:?}");
    for make_it in ALL {
        let other = temporary.path().join("000000000900.journal");
        make_it(&other);
        assert!(real.open("000000000900.journal").is_err());
        assert!(!real.has_logged_direct_io());
        fs::remove_file(&other).or_else(|_| fs::remove_dir_all(&other)).unwrap();
    }
}
