//! Tests of commands from arguments to answers, with a cache in a directory.

use std::sync::Arc;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use alluvium_journal::{Durability, WhenFull};
use clap::Parser as _;

use super::super::tests::{Cli, server_in};
use super::*;

/// A client with its own server.
struct Fixture {
    server: Arc<Server>,
    client: Client,
    _directory: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self::with_password(None)
    }

    fn with_password(password: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = server_in(directory.path(), &[], password);
        let client = server.client();
        Self { server, client, _directory: directory }
    }

    /// Returns the answer to a request, and whether it was answered without blocking.
    fn execute(&mut self, args: &[&[u8]]) -> (Vec<u8>, bool) {
        let args: Vec<Bytes> = args.iter().map(|arg| Bytes::copy_from_slice(arg)).collect();
        let outcome = run(&self.server, &mut self.client, &args, Mode::NonBlocking);
        let is_from_memory = outcome == Outcome::Answered;
        if !is_from_memory {
            assert!(self.client.answers.bytes().is_empty(), "there is no answer yet");
            assert_eq!(
                run(&self.server, &mut self.client, &args, Mode::Blocking),
                Outcome::Answered
            );
        }
        let answer = self.client.answers.bytes().to_vec();
        self.client.answers.clear();
        (answer, is_from_memory)
    }

    /// Returns the answer to the arguments in a line.
    fn ask(&mut self, line: &str) -> String {
        let args: Vec<_> = line.split(' ').map(str::as_bytes).collect();
        String::from_utf8(self.execute(&args).0).unwrap()
    }

    #[track_caller]
    fn expect(&mut self, line: &str, answer: &str) {
        assert_eq!(self.ask(line), answer, "{line}");
    }

    #[track_caller]
    fn expect_error(&mut self, line: &str, why: &str) {
        let answer = self.ask(line);
        assert!(answer.starts_with('-') && answer.contains(why), "{line}: {answer}");
    }

    fn ttl_ms(&mut self, key: &str) -> i64 {
        self.ask(&format!("PTTL {key}"))[1..].trim_end().parse().unwrap()
    }
}

#[test]
fn values_are_set_read_and_deleted() {
    let mut fixture = Fixture::new();
    fixture.expect("GET a", "$-1\r\n");
    fixture.expect("SET a 1", "+OK\r\n");
    fixture.expect("get a", "$1\r\n1\r\n");
    fixture.expect("MSET b 2 c 3", "+OK\r\n");
    fixture.expect("MGET a x c b", "*4\r\n$1\r\n1\r\n$-1\r\n$1\r\n3\r\n$1\r\n2\r\n");
    fixture.expect("EXISTS a a x b", ":3\r\n");
    fixture.expect("STRLEN a", ":1\r\n");
    fixture.expect("TYPE a", "+string\r\n");
    fixture.expect("TYPE x", "+none\r\n");
    fixture.expect("DBSIZE", ":3\r\n");
    fixture.expect("DEL a x b", ":2\r\n");
    fixture.expect("UNLINK c", ":1\r\n");
    fixture.expect("DBSIZE", ":0\r\n");
    fixture.expect("GETSET a 4", "$-1\r\n");
    fixture.expect("GETSET a 5", "$1\r\n4\r\n");
    fixture.expect_error("MSET a 1 b", "wrong number of arguments for 'mset'");
    let large = vec![b'x'; 1 << 20];
    let wrong: [(&[u8], &[u8]); 3] =
        [(b"", b"1"), (&large[..MAX_KEY_BYTES + 1], b"1"), (b"b", &large[..])];
    for (key, value) in wrong {
        let (answer, _) = fixture.execute(&[b"MSET", b"new", b"1", key, value]);
        assert!(answer.starts_with(b"-ERR the "), "{}", answer.escape_ascii());
        fixture.expect("EXISTS new", ":0\r\n");
    }
    let (answer, _) = fixture.execute(&[b"SET", b"\r\n\0", b"\xff\r\n"]);
    assert_eq!(answer, b"+OK\r\n");
    assert_eq!(fixture.execute(&[b"GET", b"\r\n\0"]).0, b"$3\r\n\xff\r\n\r\n");
    assert_eq!(
        fixture.execute(&[b"SET", b"", b"x"]).0,
        b"-ERR the key is empty; a key has at least one byte\r\n"
    );
}

#[test]
fn set_accepts_all_of_its_options() {
    let mut fixture = Fixture::new();
    fixture.expect("SET a 1 XX", "$-1\r\n");
    fixture.expect("SET a 1 NX EX 100", "+OK\r\n");
    fixture.expect("SET a 2 NX", "$-1\r\n");
    fixture.expect("SET a 2 NX GET", "$1\r\n1\r\n");
    fixture.expect("SET a 3 XX KEEPTTL", "+OK\r\n");
    assert!((90_000..=100_000).contains(&fixture.ttl_ms("a")));
    let seconds: i64 = fixture.ask("TTL a")[1..].trim_end().parse().unwrap();
    assert!((90..=100).contains(&seconds), "{seconds}");
    fixture.expect("SET a 4 GET", "$1\r\n3\r\n");
    assert_eq!(fixture.ttl_ms("a"), -1);
    assert_eq!(fixture.ttl_ms("x"), -2);
    fixture.expect("SET b 1 GET", "$-1\r\n");
    fixture.expect("SET b 1 px 5000", "+OK\r\n");
    assert!((4000..=5000).contains(&fixture.ttl_ms("b")));
    fixture.expect("SETEX b 50 1", "+OK\r\n");
    assert!((40_000..=50_000).contains(&fixture.ttl_ms("b")));
    fixture.expect("PSETEX b 5000 1", "+OK\r\n");
    assert!((4000..=5000).contains(&fixture.ttl_ms("b")));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    fixture.expect(&format!("SET b 1 EXAT {}", now + 60), "+OK\r\n");
    assert!((50_000..=60_000).contains(&fixture.ttl_ms("b")));
    fixture.expect(&format!("SET b 1 PXAT {}", (now + 60) * 1000), "+OK\r\n");
    assert!((50_000..=60_000).contains(&fixture.ttl_ms("b")));
    // A time in the past.
    fixture.expect("SET b 1 EXAT 1", "+OK\r\n");
    fixture.expect("GET b", "$-1\r\n");
    fixture.expect("SETNX b 1", ":1\r\n");
    fixture.expect("SETNX b 2", ":0\r\n");
    for (line, why) in [
        ("SET a 1 NX XX", "syntax error"),
        ("SET a 1 EX 1 PX 1", "syntax error"),
        ("SET a 1 EX 1 KEEPTTL", "syntax error"),
        ("SET a 1 EX", "syntax error"),
        ("SET a 1 MORE", "syntax error"),
        ("SET a 1 EX x", "not an integer"),
        ("SET a 1 EX 0", "invalid expire time in 'set'"),
        ("SET a 1 PX -1", "invalid expire time in 'set'"),
        ("SET a 1 EX 9223372036854775807", "invalid expire time in 'set'"),
        ("SETEX a 0 1", "invalid expire time in 'setex'"),
        ("SET a", "wrong number of arguments for 'set'"),
    ] {
        fixture.expect_error(line, why);
    }
    fixture.expect("GET a", "$1\r\n4\r\n");
}

/// SET with NX is atomic.
#[test]
fn one_of_many_conditional_sets_succeeds() {
    let fixture = Fixture::new();
    for round in 0..100 {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let server = fixture.server.clone();
                thread::spawn(move || {
                    let mut client = server.client();
                    let args = ["SET", &round.to_string(), "1", "NX"]
                        .map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
                    run(&server, &mut client, &args, Mode::Blocking);
                    client.answers.bytes() == b"+OK\r\n"
                })
            })
            .collect();
        let succeeded = threads.into_iter().map(|it| it.join().unwrap());
        assert_eq!(succeeded.filter(|succeeded| *succeeded).count(), 1, "round {round}");
    }
}

#[test]
fn commands_block_only_to_access_the_disk() {
    let mut fixture = Fixture::new();
    assert!(fixture.execute(&[b"SET", b"first", &[b'x'; 100]]).1);
    // Each is read once below, since what is read again is cached.
    for key in [b"for mget", b"for exis", b"for ttl_", b"for strl", b"for type"] {
        assert!(fixture.execute(&[b"SET", key, &[b'x'; 100]]).1);
    }
    assert!(!fixture.execute(&[b"SET", b"large", &[b'x'; 100_000]]).1);
    // Enough for the first journal to be demoted.
    for key in 0..16_000u32 {
        fixture.execute(&[b"SET", &key.to_le_bytes(), &[b'y'; 1000]]);
    }
    assert_eq!(
        fixture.execute(&[b"GET", b"first"]),
        ([&b"$100\r\n"[..], &[b'x'; 100], b"\r\n"].concat(), false)
    );
    let from_disk: [&[&[u8]]; 9] = [
        &[b"MGET", b"none", b"for mget"],
        &[b"EXISTS", b"none", b"for exis"],
        &[b"TTL", b"for ttl_"],
        &[b"STRLEN", b"for strl"],
        &[b"TYPE", b"for type"],
        &[b"SET", b"a", b"1", b"NX"],
        &[b"DEL", b"a"],
        &[b"SCAN", b"0"],
        &[b"INFO"],
    ];
    for args in from_disk {
        let (answer, is_from_memory) = fixture.execute(args);
        assert!(!is_from_memory && answer[0] != b'-', "{}", answer.escape_ascii());
    }
    // Several at once, more than are read concurrently, with absent ones in between.
    let keys: Vec<_> = (0..40u32).map(u32::to_le_bytes).collect();
    let mut args: Vec<&[u8]> = vec![b"MGET"];
    let mut expected = b"*81\r\n".to_vec();
    for key in &keys {
        args.extend([&key[..], b"none"]);
        expected.extend([&b"$1000\r\n"[..], &[b'y'; 1000], b"\r\n$-1\r\n"].concat());
    }
    args.push(b"first");
    expected.extend([&b"$100\r\n"[..], &[b'x'; 100], b"\r\n"].concat());
    assert_eq!(fixture.execute(&args), (expected, false));
    // EXISTS and DEL of several batches, with a repeated key and one that is too long.
    let too_long = vec![b'k'; MAX_KEY_BYTES + 1];
    let keys: Vec<_> = (100..140u32).map(u32::to_le_bytes).collect();
    for (name, expected) in [("EXISTS", ":41\r\n"), ("DEL", ":40\r\n"), ("EXISTS", ":0\r\n")] {
        let mut args: Vec<&[u8]> = vec![name.as_bytes(), &keys[7]];
        args.extend(keys.iter().map(|key| &key[..]));
        args.insert(20, &too_long);
        args.push(b"none");
        let answer = fixture.execute(&args).0;
        assert_eq!(
            answer.escape_ascii().to_string(),
            expected.escape_default().to_string(),
            "{name}"
        );
    }
    let newest = 15_999u32.to_le_bytes();
    assert!(fixture.execute(&[b"GET", &newest]).1);
    assert!(fixture.execute(&[b"MGET", &newest, b"none"]).1);
    assert!(fixture.execute(&[b"PING"]).1);
    // A write that waits for stable storage blocks.
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &["--durability", "always"], None);
    let client = server.client();
    let mut always = Fixture { server, client, _directory: directory };
    assert!(!always.execute(&[b"SET", b"a", b"1"]).1);
    assert!(always.client.must_flush && always.server.flushes_before_answers);
    assert!(always.execute(&[b"GET", b"a"]).1);
    // Also commands that have not written, but have seen a write of others.
    for line in ["SET a 2 NX", "SET none 2 XX", "SETNX a 2", "GETSET a 2", "DEL none"] {
        always.client.must_flush = false;
        always.ask(line);
        assert!(always.client.must_flush, "{line}");
    }
}

#[test]
fn a_key_that_is_too_long_is_absent() {
    let mut fixture = Fixture::new();
    let long = "k".repeat(MAX_KEY_BYTES + 1);
    fixture.expect("SET a 1", "+OK\r\n");
    fixture.expect(&format!("GET {long}"), "$-1\r\n");
    fixture.expect(&format!("EXISTS {long} a"), ":1\r\n");
    fixture.expect(&format!("DEL {long} a"), ":1\r\n");
    fixture.expect_error(&format!("SET {long} 1"), "the key has 65536 bytes");
}

/// Each of many threads may read a record as large as a journal.
#[test]
fn reads_from_disk_count_as_memory() {
    let directory = tempfile::tempdir().unwrap();
    // Otherwise decompressed frames would be cached.
    let more = ["--buffer-memory", "1MiB", "--compression", "none"];
    let server = server_in(directory.path(), &more, None);
    let client = server.client();
    let mut fixture = Fixture { server, client, _directory: directory };
    fixture.execute(&[b"SET", b"large", &[b'x'; 500_000]]);
    fixture.execute(&[b"SETEX", b"timed", b"3600", &[b'x'; 500_000]]);
    fixture.expect("STRLEN large", ":500000\r\n");
    // Longer than what a SCAN reads for a key alone; in a journal that is not read otherwise.
    let long_key = [b'k'; 5000];
    // Enough for their journals to be demoted.
    for key in 0..16_000u32 {
        if key == 1000 {
            fixture.execute(&[b"SET", &long_key, &[b'x'; 500_000]]);
        }
        fixture.execute(&[b"SET", &key.to_le_bytes(), &[b'y'; 1000]]);
    }
    let mut others = Reservation::new(&fixture.server.buffers);
    assert!(others.resize(600 << 10));
    let of_values = ["STRLEN large", "EXISTS large", "MGET a large", "SET large 1 NX GET"];
    let of_times = ["SETNX timed 1", "SET timed 1 NX", "DEL a timed"];
    for line in of_values.into_iter().chain(of_times) {
        fixture.expect_error(line, "--buffer-memory");
    }
    // The presence of a key without a time to live is known without reading it.
    fixture.expect("SETNX large 1", ":0\r\n");
    fixture.expect("SET large 1 NX", "$-1\r\n");
    // A scan of all keys.
    let mut cursor = "0".to_owned();
    let scan = |fixture: &mut Fixture, cursor: &str| {
        let (answer, _) = fixture.execute(&[b"SCAN", cursor.as_bytes(), b"COUNT", b"10000"]);
        String::from_utf8_lossy(&answer).into_owned()
    };
    let refused = loop {
        let answer = scan(&mut fixture, &cursor);
        if answer.starts_with('-') {
            break answer;
        }
        cursor = answer.lines().nth(2).unwrap().to_owned();
        assert_ne!(cursor, "0", "all was read");
    };
    assert!(refused.contains("--buffer-memory"), "{refused}");
    others.resize(0);
    assert!(scan(&mut fixture, &cursor).starts_with("*2\r\n"));
    fixture.expect("STRLEN large", ":500000\r\n");
    assert_eq!(fixture.execute(&[b"DEL", &long_key]).0, b":1\r\n");
    // Reading the key of the other record needs little memory.
    assert!(others.resize(600 << 10));
    let mut cursor = "0".to_owned();
    loop {
        let answer = scan(&mut fixture, &cursor);
        assert!(answer.starts_with("*2\r\n"), "{answer}");
        cursor = answer.lines().nth(2).unwrap().to_owned();
        if cursor == "0" {
            break;
        }
    }
    fixture.expect("DEL a large", ":1\r\n");
    others.resize(0);
    assert_eq!(fixture.server.buffers.used_bytes(), 0);
    fixture.expect("DEL timed", ":1\r\n");
}

#[test]
fn a_damaged_value_affects_no_other_value() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let server = server_in(path, &["--compression", "none"], None);
    for key in ["a", "b", "c"] {
        server.cache.put(key.as_bytes(), key.repeat(1000).as_bytes()).unwrap();
    }
    let hour = Duration::from_secs(3600);
    server.cache.put_with_ttl(b"d", &[b'd'; 1000], hour).unwrap();
    drop(server);
    let journal = path.join("000000000000.journal");
    let mut bytes = std::fs::read(&journal).unwrap();
    for value in [[b'b'; 100], [b'd'; 100]] {
        let at = bytes.windows(100).position(|window| window == value).unwrap();
        bytes[at] ^= 1;
    }
    std::fs::write(&journal, bytes).unwrap();
    let server = server_in(path, &["--compression", "none"], None);
    let client = server.client();
    let mut fixture = Fixture { server, client, _directory: directory };
    let [a, c] = ["a", "c"].map(|key| key.repeat(1000));
    fixture.expect("MGET a b c", &format!("*3\r\n$1000\r\n{a}\r\n$-1\r\n$1000\r\n{c}\r\n"));
    fixture.expect_error("GET b", "the record is damaged");
    // With any options it is present, and nothing of it has to be read.
    fixture.expect("SETNX b 1", ":0\r\n");
    for options in ["NX", "NX EX 10", "NX KEEPTTL"] {
        fixture.expect(&format!("SET b 1 {options}"), "$-1\r\n");
    }
    fixture.expect_error("SET b 1 NX GET", "the record is damaged");
    // It is unknown whether it has expired.
    for write in ["SETNX d 1", "SET d 1 NX", "SET d 1 NX EX 10"] {
        fixture.expect_error(write, "the record is damaged");
    }
    fixture.expect("DEL b", ":1\r\n");
    fixture.expect("GET b", "$-1\r\n");
    fixture.expect("SET b 1 NX PX 50000", "+OK\r\n");
    assert!((40_000..=50_000).contains(&fixture.ttl_ms("b")));
}

#[test]
fn an_answer_that_is_too_large_is_an_error_and_the_connection_continues() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.execute(&[b"SET", b"a", &vec![1; 900_000]]).0, b"+OK\r\n");
    let (answer, _) = fixture.execute(&[b"GET", b"a"]);
    assert_eq!(answer.len(), 900_000 + b"$900000\r\n\r\n".len());
    // The amount copied on connection threads is limited.
    assert!(fixture.execute(&[b"GET", b"a"]).1);
    let (answer, is_from_memory) = fixture.execute(&[b"MGET", b"a", b"a"]);
    assert!(answer.len() > 1_800_000 && !is_from_memory);
    // This includes what the client has sent itself.
    let long = vec![b'x'; (1 << 20) + 1];
    for name in [&b"ECHO"[..], b"PING"] {
        let (answer, is_from_memory) = fixture.execute(&[name, &long]);
        assert!(answer.len() > long.len() && !is_from_memory);
        assert!(fixture.execute(&[name, b"x"]).1);
    }
    fixture.expect_error("MGET a a a", "the answer is too large");
    let (answer, _) = fixture.execute(&[b"SET", b"a", &vec![1; 2_000_000]]);
    assert!(answer.starts_with(b"-ERR the record has 2000017 bytes"), "{}", answer.escape_ascii());
    fixture.expect("PING", "+PONG\r\n");
}

#[test]
fn a_write_that_cannot_be_answered_has_no_effect() {
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), &["--buffer-memory", "1MiB"], None);
    let client = server.client();
    let mut fixture = Fixture { server, client, _directory: directory };
    assert_eq!(fixture.execute(&[b"SET", b"large", &[b'x'; 100_000]]).0, b"+OK\r\n");
    fixture.expect("SET a 1", "+OK\r\n");
    let mut others = Reservation::new(&fixture.server.buffers);
    assert!(others.resize(1 << 20));
    // Otherwise the previous value would be lost.
    for line in ["GETSET large 1", "SET large 1 GET", "SET large 1 XX GET"] {
        fixture.expect_error(line, "the memory for answers (--buffer-memory) is used up");
    }
    assert!(others.resize(0));
    fixture.expect("STRLEN large", ":100000\r\n");
    // Behind an unwritten answer that uses all of the memory.
    let args = |line: &str| -> Vec<_> {
        line.split(' ').map(|arg| Bytes::copy_from_slice(arg.as_bytes())).collect()
    };
    run(&fixture.server, &mut fixture.client, &args("GET large"), Mode::Blocking);
    let before = fixture.client.answers.len();
    assert!(before > 100_000 && others.resize((1 << 20) - fixture.server.buffers.used_bytes()));
    for line in ["SET a 2", "SETNX b 2", "MSET a 2 b 2", "DEL a", "GETSET a 2"] {
        run(&fixture.server, &mut fixture.client, &args(line), Mode::Blocking);
        let answer = fixture.client.answers.bytes()[before..].escape_ascii().to_string();
        assert!(answer.starts_with("-ERR the answer is too large"), "{line}: {answer}");
        fixture.client.answers.truncate(before);
    }
    fixture.client.answers.clear();
    drop(others);
    fixture.expect("MGET a b", "*2\r\n$1\r\n1\r\n$-1\r\n");
    fixture.expect("GETSET a 2", "$1\r\n1\r\n");
    assert_eq!(fixture.server.buffers.used_bytes(), 0);
}

#[test]
fn a_scan_returns_present_keys() {
    let mut fixture = Fixture::new();
    fixture.expect("SCAN 0", "*2\r\n$1\r\n0\r\n*0\r\n");
    for key in 0..500 {
        fixture.ask(&format!("SET key:{key} 1"));
    }
    let mut scan = |options: &str| {
        let (mut cursor, mut found) = ("0".to_owned(), Vec::new());
        loop {
            let answer = fixture.ask(&format!("SCAN {cursor}{options}"));
            let lines: Vec<_> = answer.split("\r\n").collect();
            cursor = lines[2].to_owned();
            assert!(cursor.parse::<i64>().is_ok(), "{cursor} is no signed number");
            found.extend(lines[5..].iter().step_by(2).map(|key| (*key).to_owned()));
            found.retain(|key| !key.is_empty());
            if cursor == "0" {
                found.sort_unstable();
                found.dedup();
                return found;
            }
        }
    };
    assert_eq!(scan("").len(), 500);
    assert_eq!(scan(" COUNT 1000000000").len(), 500);
    assert_eq!(scan(" MATCH key:4?9 COUNT 7 TYPE string").len(), 10);
    assert_eq!(scan(" MATCH nothing*"), Vec::<String>::new());
    fixture.expect_error("SCAN x", "invalid cursor");
    fixture.expect_error("SCAN -1", "invalid cursor");
    fixture.expect_error("SCAN 0 COUNT 0", "syntax error");
    fixture.expect_error("SCAN 0 COUNT x", "not an integer");
    fixture.expect_error("SCAN 0 MATCH", "syntax error");
    fixture.expect("SCAN 0 COUNT 7 TYPE LIST", "*2\r\n$1\r\n0\r\n*0\r\n");
    fixture.expect_error("SCAN 0 TYPE strings", "unknown type");
    fixture.expect_error(&format!("SCAN 0 MATCH {}", "*".repeat(1025)), "1024 bytes");
    assert!(fixture.ask("SCAN 18446744073709551615").starts_with("*2\r\n$1\r\n0\r\n"));
}

#[test]
fn clients_and_tools_get_the_answers_that_they_expect() {
    let mut fixture = Fixture::new();
    fixture.expect("PING", "+PONG\r\n");
    fixture.expect("PING x", "$1\r\nx\r\n");
    fixture.expect("ECHO x", "$1\r\nx\r\n");
    fixture.expect("SELECT 0", "+OK\r\n");
    fixture.expect_error("SELECT 1", "out of range");
    for index in ["+0", " 0", "00", "-0", "0 ", "", "x"] {
        let (answer, _) = fixture.execute(&[b"SELECT", index.as_bytes()]);
        assert_eq!(answer, b"-ERR value is not an integer or out of range\r\n", "{index:?}");
    }
    fixture.expect("CONFIG GET save", "*2\r\n$4\r\nsave\r\n$0\r\n\r\n");
    fixture.expect("CONFIG GET appendonly", "*2\r\n$10\r\nappendonly\r\n$2\r\nno\r\n");
    fixture.expect("CONFIG GET nothing", "*0\r\n");
    fixture.expect(
        "CONFIG GET x SAV? *base*",
        "*4\r\n$4\r\nsave\r\n$0\r\n\r\n$9\r\ndatabases\r\n$1\r\n1\r\n",
    );
    fixture.expect(
        "CONFIG GET maxmem* maxclients timeout",
        "\
         *8\r\n$9\r\nmaxmemory\r\n$1\r\n0\r\n$16\r\nmaxmemory-policy\r\n\
         $11\r\nallkeys-lru\r\n$10\r\nmaxclients\r\n$3\r\n100\r\n$7\r\ntimeout\r\n\
         $4\r\n3600\r\n",
    );
    fixture.expect_error(&format!("CONFIG GET{}", " x".repeat(33)), "syntax error");
    fixture.expect_error("CONFIG SET save x", "command line");
    fixture.expect("CLIENT GETNAME", "$-1\r\n");
    fixture.expect("CLIENT SETNAME me", "+OK\r\n");
    fixture.expect("CLIENT GETNAME", "$2\r\nme\r\n");
    fixture.expect("CLIENT SETINFO lib-name x", "+OK\r\n");
    fixture.expect("CLIENT ID", ":1\r\n");
    fixture.expect_error("CLIENT KILL x", "unknown subcommand");
    fixture.expect("COMMAND COUNT", &format!(":{}\r\n", COMMANDS.len()));
    fixture.expect(
        "COMMAND INFO get nothing",
        "*2\r\n*6\r\n$3\r\nget\r\n:2\r\n*1\r\n+readonly\r\n:1\r\n:1\r\n:1\r\n*-1\r\n",
    );
    fixture.expect_error("COMMAND DOCS", "unknown subcommand");
    fixture.expect_error("FLUSHALL", "stop the server");
    fixture.expect_error("AUTH x", "without any password configured");
    fixture.expect("AUTH default x", "+OK\r\n");
    fixture.expect_error("AUTH other x", "WRONGPASS");
    fixture.expect_error(
        "LPUSH list 1",
        "unknown command 'LPUSH', with args beginning with: 'list' '1'",
    );
    fixture.expect_error("GET", "wrong number of arguments for 'get'");
    let info = fixture.ask("INFO");
    for part in [
        "# Server\r\n",
        "\r\nredis_version:7",
        "\r\nkeyspace_hits:0\r\n",
        "\r\nrole:master\r\n",
        "\r\ncluster_enabled:0\r\n",
        "\r\nmaxmemory:0\r\n",
        "\r\nmaxmemory_policy:allkeys-lru\r\n",
        "\r\nmax_journal_memory:8388608\r\n",
        "\r\nmax_disk_bytes:67108864\r\n",
        // Shown by `redis-cli --stat`.
        "\r\nused_memory:",
        "\r\nconnected_clients:",
        "\r\nblocked_clients:0\r\n",
        "\r\nrdb_bgsave_in_progress:0\r\n",
        "\r\naof_rewrite_in_progress:0\r\n",
    ] {
        assert!(info.contains(part), "{part} is missing in {info}");
    }
    let figure = |name: &str| -> u64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().parse().unwrap()
    };
    let parts = ["journal_memory", "index_memory", "buffer_memory"].map(figure);
    assert!(figure("used_memory") >= parts.iter().sum::<u64>() && parts[0] <= 8 << 20, "{info}");
    assert!(figure("used_memory_rss") > 0, "{info}");
    fixture.expect("INFO keyspace", "$12\r\n# Keyspace\r\n\r\n");
    fixture.expect("SET a 1", "+OK\r\n");
    let keyspace = "# Keyspace\r\ndb0:keys=1,expires=0,avg_ttl=0\r\n";
    fixture.expect("INFO keyspace", &format!("${}\r\n{keyspace}\r\n", keyspace.len()));
    assert!(fixture.ask("INFO server replication").contains("\r\n\r\n# Replication\r\n"));
    let hello = fixture.ask("HELLO 3 SETNAME you");
    assert!(hello.starts_with("%7\r\n$6\r\nserver\r\n$8\r\nalluvium\r\n"), "{hello}");
    fixture.expect("GET nothing", "_\r\n");
    fixture.expect("CLIENT GETNAME", "$3\r\nyou\r\n");
    fixture.expect("CONFIG GET databases", "%1\r\n$9\r\ndatabases\r\n$1\r\n1\r\n");
    assert!(fixture.ask("INFO").starts_with('='));
    assert!(fixture.ask("HELLO 2").starts_with("*14\r\n"));
    fixture.expect_error("HELLO 4", "NOPROTO");
    fixture.expect_error("HELLO x", "not an integer");
    assert!(fixture.ask("HELLO 2 AUTH default x").starts_with("*14\r\n"));
    fixture.expect_error("HELLO 2 MORE", "Syntax error in HELLO option 'MORE'");
    assert!(!fixture.client.is_closing);
    fixture.expect("QUIT", "+OK\r\n");
    assert!(fixture.client.is_closing);
}

#[test]
fn no_command_runs_without_the_password() {
    let mut fixture = Fixture::with_password(Some("open sesame"));
    for line in ["GET a", "SET a 1", "PING", "INFO", "CONFIG GET save", "COMMAND", "FLUSHALL"] {
        fixture.expect_error(line, "NOAUTH");
    }
    fixture.expect_error("HELLO 3", "NOAUTH");
    fixture.expect_error("HELLO 3 AUTH default wrong", "WRONGPASS");
    fixture.expect_error("AUTH wrong", "WRONGPASS");
    fixture.expect_error("AUTH", "wrong number");
    // A partly valid command has no effect.
    let args: [&[u8]; 6] = [b"HELLO", b"3", b"AUTH", b"default", b"open sesame", b"MORE"];
    assert!(fixture.execute(&args).0.starts_with(b"-ERR Syntax error in HELLO"));
    let args: [&[u8]; 7] =
        [b"HELLO", b"3", b"AUTH", b"default", b"open sesame", b"SETNAME", b"a b"];
    assert!(fixture.execute(&args).0.starts_with(b"-ERR Client names"));
    let wrong = fixture.execute(&[b"AUTH", b"other", b"open sesame"]).0;
    assert!(wrong.starts_with(b"-WRONGPASS"));
    fixture.expect_error("GET a", "NOAUTH");
    assert!(fixture.server.is_unauthenticated(&fixture.client));
    assert_eq!(fixture.execute(&[b"AUTH", b"open sesame"]).0, b"+OK\r\n");
    fixture.expect("SET a 1", "+OK\r\n");
    let mut other = fixture.server.client();
    std::mem::swap(&mut fixture.client, &mut other);
    fixture.expect_error("GET a", "NOAUTH");
    let args: [&[u8]; 5] = [b"HELLO", b"3", b"AUTH", b"default", b"open sesame"];
    assert!(fixture.execute(&args).0.starts_with(b"%7"));
    fixture.expect("GET a", "$1\r\n1\r\n");
    // A wrong password afterwards changes nothing.
    fixture.expect_error("AUTH wrong", "WRONGPASS");
    fixture.expect_error("HELLO 2 AUTH default wrong SETNAME me", "WRONGPASS");
    fixture.expect("CLIENT GETNAME", "_\r\n");
    fixture.expect("GET a", "$1\r\n1\r\n");
}

#[test]
fn wrong_passwords_close_the_connection() {
    let mut fixture = Fixture::with_password(Some("open sesame"));
    for _ in 0..10 {
        assert!(!fixture.client.is_closing);
        fixture.expect_error("AUTH wrong", "WRONGPASS");
    }
    assert!(fixture.client.is_closing);
}

#[test]
fn a_full_cache_without_eviction_answers_oom() {
    let directory = tempfile::tempdir().unwrap();
    let refuse = ["--when-full", "refuse", "--max-disk", "8MiB"];
    let args = Cli::try_parse_from(
        [
            "serve",
            "--dir",
            directory.path().to_str().unwrap(),
            "--memory",
            "8MiB",
            "--journal",
            "1MiB",
        ]
        .into_iter()
        .chain(refuse),
    )
    .unwrap()
    .args;
    assert_eq!(args.options().when_full, WhenFull::Refuse);
    assert_eq!(args.options().durability, Durability::None);
    let cache = Cache::open(directory.path(), args.options()).unwrap();
    let server = Server::new(cache, &args, None, 100);
    let client = server.client();
    let mut fixture = Fixture { server, client, _directory: directory };
    let mut written = 0u32;
    let refused = loop {
        let (answer, _) = fixture.execute(&[b"SET", &written.to_le_bytes(), &[0; 1000]]);
        if answer != b"+OK\r\n" {
            break answer;
        }
        written += 1;
    };
    let refused = refused.escape_ascii().to_string();
    let directory = args.dir.display();
    assert!(
        refused.starts_with(&format!("-OOM {directory}: no space for another journal")),
        "{refused}"
    );
    assert!((4000..9000).contains(&written));
    assert_eq!(fixture.execute(&[b"GET", &0u32.to_le_bytes()]).0.len(), 1000 + 9);
}
