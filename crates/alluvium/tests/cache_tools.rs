//! `alluvium cache inspect` and `verify` with the built binary: their exit codes.

mod support;

use std::fs;
use std::path::Path;

use alluvium_journal::{Cache, Options};
use support::{contains, help, ok, ok_json, refused, run};

/// Opening the pipe would wait forever for a writer.
#[test]
fn a_pipe_in_place_of_a_file_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cache");
    make(&path);
    let cache = path.to_str().unwrap();
    let pipe = |name: &str| {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path.join(name), kind, mode, 0).unwrap();
    };
    pipe("000000000900.journal.damaged");
    for tool in ["inspect", "verify"] {
        contains(&ok(&["cache", tool, cache]), &["1 file"]);
    }
    for name in ["000000000900.journal", "000000000900.hint", "000000000900.journal.tmp", "cache"] {
        let _ = fs::remove_file(path.join(name));
        pipe(name);
        for tool in ["inspect", "verify"] {
            let message = refused(2, &["cache", tool, cache]);
            contains(&message, &[&format!("{cache}/{name}: "), "is a pipe, not a regular file"]);
            assert!(!message.contains("Direct I/O"), "{message}");
        }
        fs::remove_file(path.join(name)).unwrap();
    }
    pipe("cache");
    contains(&refused(1, &["cache", "compact", cache, "--memory", "4MiB"]), &["is a pipe"]);
}

/// A closed cache of one journal.
fn make(path: &Path) {
    let options = Options {
        journal_bytes: 1 << 20,
        memory_bytes: 4 << 20,
        max_disk_bytes: 8 << 20,
        ..Options::default()
    };
    let cache = Cache::open(path, options).unwrap();
    for key in 0..100u64 {
        cache.put(&key.to_le_bytes(), &[7; 1000]).unwrap();
    }
    cache.close().unwrap();
}

#[test]
fn exit_codes_distinguish_damage_from_unreadable_caches() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("cache");
    make(&path);
    let cache = path.to_str().unwrap();
    let inspect = ["cache", "inspect", cache];
    let json = ["cache", "inspect", cache, "--json"];
    let verify = ["cache", "verify", cache];
    let all = [&inspect[..], &json, &verify];
    for tool in all {
        ok(tool);
    }
    assert_eq!(ok_json(&json)["journals"][0]["values"], 100);

    // A record; a header that its hint replaces; a hint.
    let (journal, hint) = ("000000000000.journal", "000000000000.hint");
    for (name, at) in [(journal, 4096 + 500), (journal, 20), (hint, 4096 + 20)] {
        let file = path.join(name);
        let whole = fs::read(&file).unwrap();
        let mut spoilt = whole.clone();
        spoilt[at] ^= 1;
        fs::write(&file, spoilt).unwrap();
        for tool in all {
            contains(&refused(1, tool), &["the cache is damaged"]);
        }
        // The tool also shows the content.
        let shown = run(&json).stdout;
        let shown: serde_json::Value = serde_json::from_slice(&shown).unwrap();
        assert!(shown["journals"][0]["values"].as_u64().is_some_and(|it| it >= 99), "{shown}");
        fs::write(&file, whole).unwrap();
    }
    for tool in all {
        ok(tool);
    }

    fs::write(path.join("cache"), "no longer").unwrap();
    for tool in all {
        contains(&refused(2, tool), &["the file `cache` cannot be used"]);
    }
    fs::remove_dir_all(&path).unwrap();
    for tool in all {
        contains(&refused(2, tool), &[cache, "No such file"]);
    }
    fs::write(&path, "a file").unwrap();
    for tool in all {
        contains(&refused(2, tool), &[cache, "Not a directory"]);
    }
    for tool in ["inspect", "verify"] {
        let message = help(&["cache", tool, "--help"]);
        contains(&message, &["0 nothing is damaged; 1 something is", "2 the cache could not be"]);
    }
}
