//! `alluvium cache serve` and `compact` with the built binary: the Redis protocol over TCP, at byte
//! level.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Server, contains, help, ok_json, refused};

/// Longer than a test takes; only a server that hangs reaches it.
const HANGS: Duration = Duration::from_secs(120);

const SMALL: [&str; 6] = ["--memory", "8MiB", "--max-disk", "64MiB", "--journal", "1MiB"];

fn start(directory: &Path, more: &[&str]) -> Server {
    let directory = directory.join("cache");
    let dir = ["--dir", directory.to_str().unwrap()];
    Server::start_cache(&[&dir[..], &SMALL, more].concat())
}

struct Client(TcpStream);

impl Client {
    fn new(server: &Server) -> Self {
        Self::at(&server.redis)
    }

    fn at(address: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(HANGS)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// Receives bytes, which must be these.
    #[track_caller]
    fn expect(&mut self, bytes: &[u8]) {
        let mut came = vec![0; bytes.len()];
        self.0.read_exact(&mut came).unwrap();
        assert_eq!(came.escape_ascii().to_string(), bytes.escape_ascii().to_string());
    }

    fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.0.read_exact(&mut byte).unwrap();
        byte[0]
    }

    fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(self.byte());
        }
        String::from_utf8(line).unwrap().trim_end().to_string()
    }

    /// Sends a request; returns the first line of its answer.
    fn ask(&mut self, words: &[&str]) -> String {
        self.send(&request(words));
        self.line()
    }

    /// Sends a request whose answer is a bulk string.
    fn bulk(&mut self, words: &[&str]) -> Option<Vec<u8>> {
        let line = self.ask(words);
        let len: i64 = line.strip_prefix('$').unwrap_or_else(|| panic!("{line}")).parse().unwrap();
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        self.0.read_exact(&mut bytes).unwrap();
        self.expect(b"\r\n");
        Some(bytes)
    }

    /// Reads until the server closes the connection.
    fn rest(mut self) -> String {
        let mut rest = Vec::new();
        // If the server closes with unread input, the read ends with a reset.
        let _ = self.0.read_to_end(&mut rest);
        String::from_utf8_lossy(&rest).into_owned()
    }

    /// One call of SCAN: the next cursor, and keys.
    fn scan(&mut self, cursor: &str, options: &[&str]) -> (String, Vec<String>) {
        assert_eq!(self.ask(&[&["SCAN", cursor][..], options].concat()), "*2");
        let mut text = || {
            self.line();
            self.line()
        };
        let next = text();
        let count: usize = self.line()[1..].parse().unwrap();
        let keys = (0..count).map(|_| {
            self.line();
            self.line()
        });
        (next, keys.collect())
    }

    fn scan_all(&mut self, options: &[&str]) -> BTreeSet<String> {
        let (mut cursor, mut found) = ("0".to_string(), BTreeSet::new());
        loop {
            let (next, keys) = self.scan(&cursor, options);
            found.extend(keys);
            if next == "0" {
                return found;
            }
            cursor = next;
        }
    }
}

fn request(words: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len());
    for word in words {
        bytes += &format!("${}\r\n{word}\r\n", word.len());
    }
    bytes.into_bytes()
}

#[test]
fn a_pipeline_is_answered_in_order_however_it_is_split() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut pipeline = Vec::new();
    for words in [
        &["SET", "a", "1"][..],
        &["GET", "a"],
        &["SET", "a", "2", "NX"],
        &["INCR", "a"],
        &["DEL", "a", "b"],
        &["GET", "a"],
    ] {
        pipeline.extend(request(words));
    }
    pipeline.extend_from_slice(b"PING\r\n");
    let answers =
        b"+OK\r\n$1\r\n1\r\n$-1\r\n-ERR unknown command 'INCR', with args beginning with: \
                    'a'\r\n:1\r\n$-1\r\n+PONG\r\n";
    let mut client = Client::new(&server);
    client.send(&pipeline);
    client.expect(answers);
    // Split at each byte.
    for at in 1..pipeline.len() {
        client.send(&pipeline[..at]);
        client.send(&pipeline[at..]);
        client.expect(answers);
    }
    for byte in &pipeline {
        client.send(&[*byte]);
    }
    client.expect(answers);
    // Many at once, more than are answered in one piece.
    let (asked, answered) = (pipeline.repeat(3000), answers.repeat(3000));
    let mut sender = client.0.try_clone().unwrap();
    let sending = thread::spawn(move || sender.write_all(&asked).unwrap());
    client.expect(&answered);
    sending.join().unwrap();
}

/// More than the system buffers in both directions.
#[test]
fn a_pipeline_may_be_sent_whole_before_an_answer_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut client = Client::new(&server);
    let text = "x".repeat(100_000);
    client.send(&request(&["ECHO", &text]).repeat(400));
    let answer = format!("$100000\r\n{text}\r\n").into_bytes();
    let mut came = vec![0; answer.len()];
    for _ in 0..400 {
        client.0.read_exact(&mut came).unwrap();
        assert!(came == answer);
    }
    assert_eq!(client.ask(&["PING"]), "+PONG");
}

#[test]
fn large_values_go_in_and_out() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut client = Client::new(&server);
    let value = "0123456789".repeat(100_000);
    assert_eq!(client.ask(&["SET", "large", &value]), "+OK");
    assert!(client.bulk(&["GET", "large"]).unwrap() == value.as_bytes());
    // A small one follows, before the first answer is read.
    client.send(&[request(&["GET", "large"]), request(&["GET", "none"])].concat());
    client.expect(format!("$1000000\r\n{value}\r\n$-1\r\n").as_bytes());
    // Larger than a journal accepts.
    let mut other = Client::new(&server);
    other.send(b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1048576\r\n");
    contains(&other.rest(), &["-ERR Protocol error: invalid bulk length"]);
}

#[test]
fn an_invalid_request_ends_only_its_connection() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut honest = Client::new(&server);
    for (bytes, expected) in [
        (b"*99999999999999\r\n".to_vec(), "invalid multibulk length"),
        (b"*-1\r\n".to_vec(), "invalid multibulk length"),
        (b"*1\r\n$-1\r\n".to_vec(), "invalid bulk length"),
        (b"*1\r\n$536870912\r\n".to_vec(), "invalid bulk length"),
        (b"*1\r\n".repeat(100_000), "expected '$', got '*'"),
        (b"*2\r\n$3\r\nGET\r\n:1\r\n".to_vec(), "expected '$', got ':'"),
        (vec![b'x'; 100_000], "too big inline request"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(), "this is not a web server"),
        (vec![0xff; 5000], "too big inline request"),
    ] {
        let mut client = Client::new(&server);
        // The server may close before everything was sent.
        let _ = client.0.write_all(&bytes);
        let said = client.rest();
        // A reset may overtake the answer if the client continues to send.
        if bytes.len() < 1000 || !said.is_empty() {
            contains(&said, &["-ERR", expected]);
        }
        assert_eq!(honest.ask(&["PING"]), "+PONG");
    }
    // Earlier requests are answered.
    let mut client = Client::new(&server);
    client.send(b"PING\r\n*1\r\n$4\r\nPING\r\n*1\r\n+PING\r\nPING\r\n");
    assert_eq!(client.rest(), "+PONG\r\n+PONG\r\n-ERR Protocol error: expected '$', got '+'\r\n");
    // A client that disconnects in the middle of a request.
    let mut client = Client::new(&server);
    client.send(b"*2\r\n$3\r\nGET\r\n$10\r\nabc");
    client.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.rest(), "");
    let mut client = Client::new(&server);
    assert_eq!(client.ask(&["QUIT"]), "+OK");
    assert_eq!(client.rest(), "");
    assert_eq!(honest.ask(&["PING"]), "+PONG");
}

/// Thousands of clients announce large requests and send little.
#[test]
fn announced_lengths_take_no_memory() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["--metrics-listen", "127.0.0.1:0", "--buffer-memory", "16MiB"];
    let server = start(directory.path(), &more);
    let metric = |name: &str| -> u64 {
        let (_, metrics) = server.get("/metrics");
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}: {metrics}")).parse().unwrap()
    };
    let resident = || metric("alluvium_process_resident_memory_bytes");
    let before = resident();
    let mut clients: Vec<_> = (0..500).map(|_| Client::new(&server)).collect();
    for client in &mut clients {
        client.send(b"*1000000\r\n$1000000\r\nabc");
    }
    let mut honest = Client::new(&server);
    assert_eq!(honest.ask(&["PING"]), "+PONG");
    assert_eq!(metric("alluvium_cache_connections"), 501);
    assert!(resident() < before + (100 << 20), "{before}, {}", resident());
    // Half a megabyte each would be 250 MB: most clients get no memory, and receive an error.
    let count_answered = |clients: &[Client]| {
        clients.iter().filter(|client| client.0.peek(&mut [0]).is_ok()).count()
    };
    let mut sent = 0;
    while count_answered(&clients[..sent]) <= 20 {
        match clients.get_mut(sent) {
            Some(client) => {
                // The server may close before everything was sent.
                let _ = client.0.write_all(&vec![b'x'; 500_000]);
                client.0.set_nonblocking(true).unwrap();
                sent += 1;
            }
            // The answers are in flight.
            None => thread::yield_now(),
        }
    }
    assert!(metric("alluvium_cache_buffer_memory_bytes") <= 16 << 20);
    assert_eq!(honest.ask(&["PING"]), "+PONG");
}

/// Hundreds of requests per packet, all refused, from clients that do not read the errors.
#[test]
fn unread_errors_are_bounded_like_all_answers() {
    const CLIENTS: usize = 20;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    fs::write(&file, "open-sesame\n").unwrap();
    let password = ["--password-file", file.to_str().unwrap()];
    let unknown = [&[[1; 64]; 4].join(&b' ')[..], b"\n"].concat();
    for (login, refused) in [(&password[..], b"HELLO\n".to_vec()), (&[], unknown)] {
        let more = ["--metrics-listen", "127.0.0.1:0", "--buffer-memory", "1MiB"];
        let server = start(directory.path(), &[&more[..], login].concat());
        let resident = || -> usize {
            let (_, metrics) = server.get("/metrics");
            let name = "alluvium_process_resident_memory_bytes ";
            metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
        };
        let mut clients: Vec<_> = (0..CLIENTS).map(|_| Client::new(&server)).collect();
        for client in &mut clients {
            contains(&client.ask(&["HELLO", "x"]), &["-ERR"]);
            client.0.set_nonblocking(true).unwrap();
        }
        let before = resident();
        let requests = refused.repeat((64 << 10) / refused.len());
        let (mut sent, mut last) = (vec![0; CLIENTS], Instant::now());
        // Until the server accepts no more from any client.
        while last.elapsed() < Duration::from_secs(1) {
            for (client, sent) in clients.iter_mut().zip(&mut sent) {
                while let Ok(more) = client.0.write(&requests[*sent % requests.len()..]) {
                    *sent += more;
                    last = Instant::now();
                }
            }
            thread::sleep(Duration::from_millis(1));
        }
        // Per client 64 KiB for requests and as much for answers, the MiB that they share, and a
        // margin for the allocator and the runtime, per client and in total.
        let grown = resident().saturating_sub(before);
        let most = CLIENTS * (192 << 10) + (1 << 20) + (2 << 20);
        assert!(grown < most, "{login:?}: {before} + {grown}");
    }
}

#[test]
fn more_connections_than_allowed_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &["--max-connections", "3"]);
    let mut clients: Vec<_> = (0..3).map(|_| Client::new(&server)).collect();
    for client in &mut clients {
        assert_eq!(client.ask(&["PING"]), "+PONG");
    }
    contains(&Client::new(&server).rest(), &["-ERR max number of clients reached"]);
    drop(clients.pop());
    // The server notices the disconnect asynchronously.
    loop {
        let mut client = Client::new(&server);
        let _ = client.0.write_all(b"PING\r\n");
        let mut first = [0];
        if client.0.read_exact(&mut first).is_ok() && first[0] == b'+' {
            break;
        }
        thread::yield_now();
    }
}

/// A cache without a descriptor for its next journal would accept no writes.
#[test]
fn connections_take_no_files_from_journals() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("cache");
    let dir = ["--dir", dir.to_str().unwrap()];
    let server = Server::start_cache_with_files(200, &[&dir[..], &SMALL].concat());
    contains(&server.log, &["connections, not 10000"]);
    let mut client = Client::new(&server);
    assert_eq!(client.ask(&["PING"]), "+PONG");
    let mut crowd: Vec<_> = (0..300).map(|_| Client::new(&server)).collect();
    // The last connection has reached the server.
    contains(&crowd.pop().unwrap().rest(), &["-ERR max number of clients reached"]);
    let value = "x".repeat(100_000);
    for key in 0..400 {
        assert_eq!(client.ask(&["SET", &format!("key:{key}"), &value]), "+OK");
    }
    assert_eq!(client.bulk(&["GET", "key:399"]).unwrap().len(), value.len());
    // Not even enough for the journals.
    let refused = std::process::Command::new("sh")
        .args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_alluvium")])
        .args(["cache", "serve", "--listen", "127.0.0.1:0", "--dir"])
        .arg(directory.path().join("other"))
        .args(SMALL)
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(2));
    contains(&support::stderr(&refused), &["more than the 100 that this process may have open"]);
}

#[test]
fn idle_clients_are_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &["--idle-timeout", "1s"]);
    let mut client = Client::new(&server);
    assert_eq!(client.ask(&["PING"]), "+PONG");
    assert_eq!(client.rest(), "");
}

#[test]
fn values_expire() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut client = Client::new(&server);
    assert_eq!(client.ask(&["SET", "short", "1", "PX", "30"]), "+OK");
    assert_eq!(client.ask(&["SET", "long", "1", "EX", "1000"]), "+OK");
    while client.bulk(&["GET", "short"]).is_some() {
        thread::yield_now();
    }
    assert_eq!(client.ask(&["TTL", "short"]), ":-2");
    assert_eq!(client.ask(&["SET", "short", "2", "NX"]), "+OK");
    assert_eq!(client.ask(&["TTL", "short"]), ":-1");
    let left: i64 = client.ask(&["TTL", "long"])[1..].parse().unwrap();
    assert!((800..=1000).contains(&left), "{left}");
}

#[test]
fn exactly_one_of_racing_writers_wins() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    for round in 0..100 {
        let key = format!("lock:{round}");
        let won = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|me| {
                    let (address, key) = (&server.redis, &key);
                    scope.spawn(move || {
                        let me = me.to_string();
                        let mut client = Client::at(address);
                        let words = ["SET", key, &me, "NX", "EX", "100"];
                        (client.ask(&words) == "+OK").then_some(me)
                    })
                })
                .collect();
            threads.into_iter().filter_map(|it| it.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(won.len(), 1, "round {round}: {won:?}");
        let held = Client::new(&server).bulk(&["GET", &key]).unwrap();
        assert_eq!(held, won[0].as_bytes());
    }
}

#[test]
fn a_scan_misses_nothing_while_others_write() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut client = Client::new(&server);
    for key in 0..200 {
        assert_eq!(client.ask(&["SET", &format!("stays:{key}"), "1"]), "+OK");
    }
    let (is_done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        // Also when an assertion fails, because the scope waits for the writer.
        let _done = Done(&is_done);
        let (address, is_done, written) = (&server.redis, &is_done, &written);
        scope.spawn(move || {
            let mut writer = Client::at(address);
            let value = "x".repeat(2000);
            while !is_done.load(Ordering::Relaxed) {
                let number = written.fetch_add(1, Ordering::Relaxed);
                let stays = format!("stays:{}", number % 200);
                assert_eq!(writer.ask(&["SET", &stays, &value]), "+OK");
                assert_eq!(writer.ask(&["SET", &format!("goes:{number}"), "1"]), "+OK");
                if number.is_multiple_of(2) {
                    assert_eq!(writer.ask(&["DEL", &format!("goes:{number}")]), ":1");
                }
            }
        });
        let mut rounds = 0;
        while rounds < 5 || written.load(Ordering::Relaxed) < 5000 {
            let found = client.scan_all(&["MATCH", "stays:*", "COUNT", "20"]);
            assert_eq!(found.len(), 200, "round {rounds}");
            rounds += 1;
        }
    });
}

/// Sets the flag when it is dropped.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_restart_keeps_data_whatever_the_durability() {
    for durability in ["none", "10ms", "always"] {
        let directory = tempfile::tempdir().unwrap();
        let more = ["--durability", durability];
        let server = start(directory.path(), &more);
        let mut client = Client::new(&server);
        for key in 0..300 {
            assert_eq!(client.ask(&["SET", &format!("key:{key}"), &format!("value {key}")]), "+OK");
        }
        assert_eq!(client.ask(&["DEL", "key:0"]), ":1");
        assert_eq!(client.ask(&["SET", "key:1", "1", "EX", "1000"]), "+OK");
        let (status, log) = server.stop(Signal::TERM);
        assert!(status.success(), "{log}");
        contains(&log, &["SIGTERM: stopping", "stopped: the cache is closed"]);
        assert_eq!(client.rest(), "", "the client is disconnected");
        let server = start(directory.path(), &more);
        contains(&server.log, &["299 keys"]);
        let mut client = Client::new(&server);
        assert_eq!(client.bulk(&["GET", "key:0"]), None);
        assert!(client.ask(&["TTL", "key:1"]).len() > 3);
        for key in 2..300 {
            let value = client.bulk(&["GET", &format!("key:{key}")]).unwrap();
            assert_eq!(value, format!("value {key}").as_bytes());
        }
        let (status, _) = server.stop(Signal::INT);
        assert!(status.success());
    }
}

/// Requests that have arrived are answered, and answered writes exist afterwards.
#[test]
fn a_pipeline_in_progress_ends_before_the_server() {
    let directory = tempfile::tempdir().unwrap();
    for durability in ["none", "always"] {
        let more = ["--durability", durability];
        let server = start(directory.path(), &more);
        let mut client = Client::new(&server);
        let pipeline: Vec<u8> = (0..20_000)
            .flat_map(|key| request(&["SET", &format!("{durability}:{key}"), durability]))
            .collect();
        let mut sender = client.0.try_clone().unwrap();
        let sending = thread::spawn(move || {
            // Everything, unless the server ends earlier.
            let _ = sender.write_all(&pipeline);
        });
        assert_eq!(client.line(), "+OK");
        let (status, log) = server.stop(Signal::TERM);
        assert!(status.success(), "{log}");
        contains(&log, &["stopped: the cache is closed"]);
        sending.join().unwrap();
        let rest = client.rest();
        // A reset may cut off the last answers.
        let answered = 1 + rest.matches("+OK\r\n").count();
        assert!(!rest.contains('-'), "{rest}");
        let server = start(directory.path(), &more);
        let mut client = Client::new(&server);
        for key in (0..answered).rev().step_by(7) {
            let value = client.bulk(&["GET", &format!("{durability}:{key}")]);
            assert_eq!(value.as_deref(), Some(durability.as_bytes()), "{key} of {answered}");
        }
    }
}

#[test]
fn writes_acknowledged_with_always_survive_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["--durability", "always"];
    let mut server = start(directory.path(), &more);
    for round in 0..3 {
        let mut client = Client::new(&server);
        let pipeline: Vec<u8> = (0..200)
            .flat_map(|key| request(&["SET", &format!("{round}:{key}"), &round.to_string()]))
            .collect();
        client.send(&pipeline);
        client.expect(&b"+OK\r\n".repeat(200));
        server.stop(Signal::KILL);
        server = start(directory.path(), &more);
        let mut client = Client::new(&server);
        for round in 0..=round {
            for key in 0..200 {
                let value = client.bulk(&["GET", &format!("{round}:{key}")]);
                assert_eq!(value, Some(round.to_string().into_bytes()), "{round}:{key}");
            }
        }
    }
}

#[test]
fn a_password_is_required() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    fs::write(&file, "open-sesame\n").unwrap();
    let server = start(directory.path(), &["--password-file", file.to_str().unwrap()]);
    let mut client = Client::new(&server);
    assert_eq!(client.ask(&["GET", "a"]), "-NOAUTH Authentication required.");
    contains(&client.ask(&["AUTH", "wrong"]), &["-WRONGPASS"]);
    assert_eq!(client.ask(&["GET", "a"]), "-NOAUTH Authentication required.");
    // The login and requests that need it in one pipeline.
    let words = [&["AUTH", "open-sesame"][..], &["SET", "a", "1"], &["GET", "a"]];
    client.send(&words.map(request).concat());
    client.expect(b"+OK\r\n+OK\r\n$1\r\n1\r\n");
    let mut other = Client::new(&server);
    assert_eq!(other.ask(&["HELLO", "3", "AUTH", "default", "open-sesame"]), "%7");
    // Clients that have not logged in get little memory.
    let mut unauthenticated = Client::new(&server);
    unauthenticated.send(b"*2\r\n$4\r\nAUTH\r\n$20000\r\n");
    contains(&unauthenticated.rest(), &["-ERR Protocol error: invalid bulk length"]);
    let mut unauthenticated = Client::new(&server);
    unauthenticated.send(b"*11\r\n");
    contains(&unauthenticated.rest(), &["-ERR Protocol error: invalid multibulk length"]);
}

#[test]
fn unusable_options_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().join("cache");
    let dir = dir.to_str().unwrap();
    let refuse = |code, more: &[&str]| {
        refused(code, &[&["cache", "serve", "--dir", dir][..], &SMALL, more].concat())
    };
    let open = refuse(2, &["--listen", "0.0.0.0:0"]);
    contains(
        &open,
        &["which is reachable from the network", "--password-file", "--allow-unauthenticated"],
    );
    contains(&refuse(2, &["--metrics-listen", "0.0.0.0:0"]), &["metrics-listen is 0.0.0.0:0"]);
    contains(&refuse(2, &["--password-file", "/nowhere"]), &["/nowhere"]);
    contains(&refuse(2, &["--when-full", "cry"]), &["neither `evict` nor `refuse`"]);
    contains(&refuse(2, &["--min-rate", "0"]), &["--min-rate", "at least 1B"]);
    assert!(!directory.path().join("cache").exists(), "nothing was created");
    let server = start(directory.path(), &[]);
    contains(&refuse(1, &["--listen", "127.0.0.1:0"]), &["in use by another process"]);
    contains(&refuse(1, &["--listen", &server.redis]), &["cannot listen", &server.redis]);
    contains(&refused(1, &["cache", "compact", dir, "--memory", "8MiB"]), &["in use by another"]);
    contains(&help(&["cache", "serve", "--help"]), &["AUTH", "127.0.0.1:6379", "512MiB", "evict"]);
}

#[test]
fn every_metric_is_documented_with_its_type() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &["--metrics-listen", "127.0.0.1:0"]);
    let mut client = Client::new(&server);
    assert_eq!(client.ask(&["SET", "a", "1"]), "+OK");
    assert_eq!(client.bulk(&["GET", "a"]), Some(b"1".to_vec()));
    assert_eq!(client.bulk(&["GET", "b"]), None);
    client.ask(&["NONSENSE"]);
    let (_, metrics) = server.get("/metrics");
    for line in [
        "alluvium_cache_hits_total 1",
        "alluvium_cache_misses_total 1",
        "alluvium_cache_entries 1",
        "alluvium_cache_commands_total{command=\"get\"} 2",
        "alluvium_cache_commands_total{command=\"unknown\"} 1",
    ] {
        assert!(metrics.lines().any(|it| it == line), "{line} is missing: {metrics}");
    }
    let documented = include_str!("../../../docs/metrics.md");
    let (_, documented) = documented.split_once("\n## The journal cache as a server\n").unwrap();
    let (documented, _) = documented.split_once("\n## Volume servers\n").unwrap();
    let mut shown = BTreeSet::new();
    for line in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        shown.insert(format!("| `{name}{suffix}` | {kind} |"));
    }
    let rows: BTreeSet<_> = documented
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.splitn(4, '|').take(3).collect::<Vec<_>>().join("|") + "|")
        .collect();
    assert_eq!(rows, shown);
    let (status, health) = server.get("/healthz");
    assert!(status.contains("200") && health == "ok\n", "{status}: {health}");
}

/// A directory with the name of the oldest journal: it cannot be removed, so no space can be
/// reclaimed.
#[test]
fn failing_eviction_is_reported_until_it_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let options = ["--metrics-listen", "127.0.0.1:0", "--compression", "none"];
    let server = start(directory.path(), &options);
    let mut client = Client::new(&server);
    let value = "x".repeat(10_000);
    let mut written = 0;
    let mut set = move || {
        written += 1;
        client.ask(&["SET", &format!("key:{written}"), &value])
    };
    let oldest = directory.path().join("cache/000000000000.journal");
    while !directory.path().join("cache/000000000003.journal").exists() {
        assert_eq!(set(), "+OK");
    }
    fs::remove_file(&oldest).unwrap();
    fs::create_dir(&oldest).unwrap();
    let refused =
        (0..10_000).map(|_| set()).find(|answer| answer != "+OK").expect("the disk is full");
    contains(&refused, &["-ERR ", "000000000000.journal", "directory"]);
    let state = |server: &Server| {
        let (_, health) = server.get("/healthz");
        let (_, metrics) = server.get("/metrics");
        let metric =
            metrics.lines().find_map(|it| it.strip_prefix("alluvium_cache_maintenance_failed "));
        let info = Client::new(server).bulk(&["INFO"]).unwrap();
        let info = String::from_utf8(info).unwrap();
        let info = info.lines().find_map(|it| it.strip_prefix("upkeep_failed:"));
        let text = |value: Option<&str>| value.expect("the value exists").to_string();
        (health, text(metric), text(info))
    };
    // As soon as the maintenance in the background has finished.
    let wait_for_health = |code: &str| {
        let begun = Instant::now();
        while !server.get("/healthz").0.contains(code) {
            assert!(begun.elapsed() < HANGS, "{code}");
            thread::sleep(Duration::from_millis(10));
        }
    };
    wait_for_health("503");
    let (health, metric, info) = state(&server);
    contains(&health, &["failed: ", "000000000000.journal", "directory"]);
    assert_eq!((&metric[..], &info[..]), ("1", "1"));

    // It is retried each second.
    fs::remove_dir(&oldest).unwrap();
    fs::write(&oldest, "").unwrap();
    let begun = Instant::now();
    while set() != "+OK" {
        assert!(begun.elapsed() < HANGS);
        thread::sleep(Duration::from_millis(50));
    }
    for _ in 0..1000 {
        assert_eq!(set(), "+OK");
    }
    wait_for_health("200");
    let (health, metric, info) = state(&server);
    assert_eq!(health, "ok\n");
    assert_eq!((&metric[..], &info[..]), ("0", "0"));
}

#[test]
fn a_closed_cache_is_compacted() {
    let directory = tempfile::tempdir().unwrap();
    let server = start(directory.path(), &[]);
    let mut client = Client::new(&server);
    let value = "x".repeat(1000);
    for key in 0..4000 {
        assert_eq!(client.ask(&["SET", &format!("key:{key}"), &value]), "+OK");
    }
    for key in 0..2000 {
        assert_eq!(client.ask(&["DEL", &format!("key:{}", key * 2)]), ":1");
    }
    server.stop(Signal::TERM);
    let dir = directory.path().join("cache");
    let compact = ["cache", "compact", dir.to_str().unwrap(), "--memory", "8MiB"];
    let done = ok_json(&[&compact[..], &["--json"]].concat());
    let number = |name: &str| done[name].as_u64().unwrap();
    assert!(number("rewritten") > 0 && number("damaged") == 0, "{done}");
    assert!(number("bytes_after") < number("bytes_before") * 3 / 4, "{done}");
    contains(&support::ok(&compact), &["before:", "after:", "on disk"]);
    let server = start(directory.path(), &[]);
    contains(&server.log, &["2000 keys"]);
    assert_eq!(Client::new(&server).scan_all(&["COUNT", "500"]).len(), 2000);
}
