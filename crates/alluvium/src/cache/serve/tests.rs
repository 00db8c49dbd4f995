//! Tests of starting the server, and helpers for other tests.

use clap::Parser;

use super::*;

#[derive(Parser)]
pub(super) struct Cli {
    #[command(flatten)]
    pub(super) args: ServeArgs,
}

/// Returns the arguments of a small cache.
fn args(directory: &Path, more: &[&str]) -> ServeArgs {
    let small = ["--memory", "8MiB", "--max-disk", "64MiB", "--journal", "1MiB"];
    let directory = directory.to_str().unwrap();
    let argv = ["serve", "--dir", directory].into_iter().chain(small).chain(more.iter().copied());
    Cli::try_parse_from(argv).unwrap().args
}

/// Starts a server of a small cache.
pub(super) fn server_in(directory: &Path, more: &[&str], password: Option<&str>) -> Arc<Server> {
    let args = args(directory, more);
    let cache = Cache::open(directory, args.options()).unwrap();
    Server::new(cache, &args, password.map(|it| Password::new(it.as_bytes())), 100)
}

/// Writes answered before are on stable storage.
#[test]
fn a_request_that_does_not_end_is_reported() {
    let values = |directory: &Path| {
        let mut values = 0;
        alluvium_journal::inspect(directory, |journal| -> alluvium_journal::Result<()> {
            values += journal.values;
            Ok(())
        })
        .unwrap();
        values
    };
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &["--durability", "none"], None);
    server.cache.put(b"key", b"value").unwrap();
    assert_eq!(values(directory.path()), 0, "it is in memory");
    let request = server.clone();
    let Err(Failure::Failed(error)) = close_cache(server) else { panic!("the cache is in use") };
    assert!(error.contains("a request did not end") && error.contains("is on stable storage"));
    assert_eq!(values(directory.path()), 1);
    // The thread that has written it may hold it for a moment.
    while Arc::strong_count(&request) > 1 {
        thread::yield_now();
    }
    assert!(close_cache(request).is_ok());
}

#[test]
fn listening_beyond_loopback_needs_an_explicit_option() {
    let directory = tempfile::tempdir().unwrap();
    let check = |more: &[&str]| args(directory.path(), more).check_exposure();
    let accepted: [&[&str]; 5] = [
        &[],
        &["--listen", "[::1]:0"],
        &["--listen", "0.0.0.0:0", "--allow-unauthenticated"],
        &["--listen", "0.0.0.0:0", "--password-file", "x"],
        &["--metrics-listen", "127.0.0.1:0"],
    ];
    for accepted in accepted {
        assert!(check(accepted).is_ok(), "{accepted:?}");
    }
    for refused in [
        &["--listen", "0.0.0.0:0"][..],
        &["--metrics-listen", "0.0.0.0:0"],
        &["--metrics-listen", "0.0.0.0:0", "--password-file", "x"],
    ] {
        assert!(check(refused).is_err(), "{refused:?}");
    }
}

#[test]
fn an_idle_timeout_below_one_second_is_refused() {
    let parsed = |time| Cli::try_parse_from(["serve", "--dir", "x", "--idle-timeout", time]);
    for (time, is_enough) in [("0s", false), ("999ms", false), ("1s", true), ("24h", true)] {
        assert_eq!(parsed(time).is_ok(), is_enough, "{time}");
    }
}

#[test]
fn a_password_is_the_first_line_of_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    for text in ["secret", "secret\n", "secret\r\nmore\n"] {
        std::fs::write(&file, text).unwrap();
        let Ok(password) = Password::read(&file) else { panic!("{text:?}") };
        assert!(
            password.matches(b"secret") && !password.matches(b"secret\n") && !password.matches(b"")
        );
    }
    std::fs::write(&file, "\nsecret").unwrap();
    assert!(Password::read(&file).is_err());
    assert!(Password::read(&directory.path().join("none")).is_err());
}
