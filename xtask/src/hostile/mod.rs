//! Malicious clients against the real binary: whatever they do, memory stays bounded, and an honest
//! client is served throughout.

mod logins;
pub(crate) mod volumes;
mod wire;

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::Error;
use crate::report::Case;
use crate::server::{Config, Objects, Server, free_address, memory_kib, peak_memory_kib};
use wire::{
    Batch, Body, CONSUMER_GROUP_HEARTBEAT, FETCH, INIT_PRODUCER_ID, JOIN_GROUP, METADATA, Wire,
    create_topic, fetch, flexible, produce, produced, request, served, versions,
};

/// The longest that a round of the honest client may take. It takes a second on a busy machine;
/// half a minute if the client has to wait for an attacker's timeout.
const ROUND_LIMIT: Duration = Duration::from_secs(10);
/// Pause between two rounds, so that what the client writes stays in the log.
const PAUSE: Duration = Duration::from_millis(100);
/// More than what is read without reserving memory.
const LARGE_BYTES: usize = 200 << 10;
/// Connections that the server accepts beyond those of the largest attack.
const SPARE_CONNECTIONS: u32 = 200;
const WAL_MEBIBYTES: u64 = 256;
const LOG_CACHE_MEBIBYTES: u64 = 64;

const HONEST: &str = "honest";
/// A topic with much data.
const FULL: &str = "full";
/// A topic whose batches have the highest compression ratio.
const TRYING: &str = "trying";

/// Runs all attacks, with this many concurrent connections in the largest.
pub(crate) fn run(binary: &Path, directory: &Path, connections: u32) -> Result<Vec<Case>, Error> {
    let asked = connections;
    let connections = raise_file_limit(asked)?;
    let max_connections = (connections + SPARE_CONNECTIONS).to_string();
    let sasl = free_address()?;
    let listener = format!(
        "{{name='sasl', listen='{sasl}', protocol='SASL_PLAINTEXT', \
         sasl-mechanisms=['PLAIN', 'SCRAM-SHA-256']}}"
    );
    let arguments = ["--max-connections", &max_connections, "--upload-interval", "1h"];
    let arguments = [&arguments[..], &["--listener", &listener]].concat();
    let config = Config {
        binary: binary.to_path_buf(),
        directory: directory.to_path_buf(),
        wal_mebibytes: WAL_MEBIBYTES,
        log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
        wal: None,
        objects: Some(Objects {
            arguments: arguments.into_iter().map(str::to_owned).collect(),
            environment: Vec::new(),
        }),
    };
    let server = Server::start(config)?;
    server.add_user(logins::USER.0, logins::USER.1)?;
    let mut cases = Attacks::begin(&server, sasl.to_string(), connections)?.all();
    cases.extend(too_few(connections, asked));
    if cases.iter().any(Case::has_failed) {
        println!("the server's data and log are kept in {}", directory.display());
        return Ok(cases);
    }
    cases.push(Case::run("no panic is in the server's log", || {
        match server.log()?.contains("panicked") {
            true => Err(format!("the log contains a panic{}", server.log_tail()).into()),
            false => Ok(()),
        }
    }));
    cases.push(Case::run("no password is in the server's log", || {
        match server.log()?.contains(logins::USER.1) {
            true => Err("the log contains it".into()),
            false => Ok(()),
        }
    }));
    cases.push(Case::run("the server stops on SIGTERM", || server.finish()));
    Ok(cases)
}

/// The skipped case if fewer connections are possible than were requested.
fn too_few(connections: u32, asked: u32) -> Option<Case> {
    let why = format!("the limit of open files allows only {connections}");
    (connections < asked).then(|| Case::skipped(&format!("{asked} connections"), why))
}

/// Raises the limit of open files for this process and its children to this many connections, and
/// returns how many are possible.
fn raise_file_limit(connections: u32) -> Result<u32, Error> {
    let needed = u64::from(connections) + 1_000;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        limit.current = limit.maximum.map_or(Some(needed), |maximum| Some(maximum.min(needed)));
        setrlimit(Resource::Nofile, limit)?;
    }
    let files = limit.current.unwrap_or(needed).min(needed);
    Ok(u32::try_from(files)?.saturating_sub(1_000))
}

/// An honest client, which does its rounds in a loop. No round may take longer than
/// [`ROUND_LIMIT`].
struct Honest {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<String>>>,
    thread: Option<JoinHandle<()>>,
}

impl Honest {
    fn start(mut round: impl FnMut() -> Result<(), Error> + Send + 'static) -> Self {
        let (rounds, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let failure = Arc::<Mutex<Option<String>>>::default();
        let (counted, stopped, failed) = (rounds.clone(), stop.clone(), failure.clone());
        let mut work = move || {
            while !stopped.load(Ordering::Relaxed) {
                let begun = Instant::now();
                round()?;
                let took = begun.elapsed();
                if took > ROUND_LIMIT {
                    return Err(format!("a round took {took:?}").into());
                }
                counted.fetch_add(1, Ordering::Relaxed);
                thread::sleep(PAUSE);
            }
            Ok::<_, Error>(())
        };
        let thread = thread::spawn(move || {
            if let Err(error) = work() {
                *failed.lock().expect("no thread panics with the lock held") =
                    Some(error.to_string());
            }
        });
        Self { rounds, stop, failure, thread: Some(thread) }
    }

    /// Waits until the client has been served a few more times.
    fn is_served(&self) -> Result<(), Error> {
        let until = self.rounds.load(Ordering::Relaxed) + 3;
        let give_up = Instant::now() + 3 * 2 * ROUND_LIMIT;
        while self.rounds.load(Ordering::Relaxed) < until {
            if let Some(failure) =
                self.failure.lock().expect("no thread panics with the lock held").as_ref()
            {
                return Err(format!("the honest client: {failure}").into());
            }
            if Instant::now() >= give_up {
                return Err("the honest client was not served".into());
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// Returns rounds that produce a batch, alternately a small and a large one, and read it back.
fn produce_and_fetch(address: &str) -> Result<impl FnMut() -> Result<(), Error> + use<>, Error> {
    let mut wire = Wire::connect(address)?;
    let small = Batch::good();
    let large = Batch { records: wire::record_of(LARGE_BYTES), ..Batch::good() };
    let mut batches = [small.encode(), large.encode()].into_iter().cycle();
    Ok(move || {
        let batch = batches.next().expect("a cycle is endless");
        let (code, offset) = produced(wire.call(&produce(HONEST, &batch))?)?;
        if code != 0 {
            return Err(format!("a valid batch was refused with code {code}").into());
        }
        let answer = wire.call(&fetch(HONEST, offset, 1 << 20))?;
        match answer.len_bytes() < batch.len() {
            true => Err("an acknowledged record is missing".into()),
            false => Ok(()),
        }
    })
}

impl Drop for Honest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // Its failure was reported before.
            let _ = thread.join();
        }
    }
}

/// Name, partitions and settings.
type Topic<'a> = (&'a str, i32, &'a [(&'a str, &'a str)]);

struct Attacks<'a> {
    server: &'a Server,
    /// Address of the listener with SASL.
    sasl: String,
    honest: Honest,
    connections: u32,
}

impl<'a> Attacks<'a> {
    fn begin(server: &'a Server, sasl: String, connections: u32) -> Result<Self, Error> {
        let mut wire = Wire::connect(&server.address())?;
        let topics: [Topic<'_>; 8] = [
            (HONEST, 1, &[]),
            (FULL, 1, &[]),
            ("bad", 1, &[]),
            ("bomb", 1, &[]),
            ("recompressed", 1, &[("compression.type", "gzip")]),
            ("compacted", 1, &[("cleanup.policy", "compact")]),
            (TRYING, 1, &[("compression.type", "zstd"), ("compression.zstd.level", "22")]),
            ("wide", 2_000, &[]),
        ];
        for (topic, partitions, configs) in topics {
            let mut answer = wire.call(&create_topic(topic, partitions, configs))?;
            answer.i32()?;
            answer.i32()?;
            answer.skip_text()?;
            match answer.i16()? {
                0 => {}
                code => return Err(format!("topic {topic} was refused with code {code}").into()),
            }
        }
        let large = Batch { records: wire::record_of(900 << 10), ..Batch::good() };
        let large = produce(FULL, &large.encode());
        for _ in 0..40 {
            let (code, _) = produced(wire.call(&large)?)?;
            if code != 0 {
                return Err(format!("a large batch was refused with code {code}").into());
            }
        }
        Ok(Self {
            server,
            sasl,
            honest: Honest::start(produce_and_fetch(&server.address())?),
            connections,
        })
    }

    fn all(&self) -> Vec<Case> {
        type Attack<'a> = fn(&Attacks<'a>) -> Result<OpenConnections, Error>;
        // The number is how much the server's memory may grow at its peak, in MiB: the documented
        // bounds plus allocator overhead.
        let attacks: [(&str, u64, Attack<'a>); 12] = [
            ("impossible lengths", 64, Self::lengths),
            ("missing arrays and texts", 64, Self::arrays),
            ("invalid batches, old formats", 64, Self::batches),
            ("partial requests of 100 MiB", 384, Self::half_requests),
            ("one byte at a time", 64, Self::slow_senders),
            ("decompression bombs", 256, Self::bombs),
            ("responses that are never read", 256, Self::unread_answers),
            ("endless members, sessions, producers, transactions", 256, Self::names),
            ("thousands of topics in one request", 256, Self::many_topics),
            ("replayed and guessed passwords", 64, Self::logins),
            ("a full admin port", 64, Self::admin_port),
            ("connections", 64 + u64::from(self.connections) * 32 / 1024, Self::idle_connections),
        ];
        let run = |(name, more_mebibytes, attack): (&str, u64, Attack<'a>)| {
            Case::run(name, || {
                let pid = self.server.pid();
                self::attack(name, pid, &self.honest, more_mebibytes, || attack(self))
            })
        };
        attacks.into_iter().map(run).collect()
    }

    fn connect(&self) -> Result<Wire, Error> {
        Wire::connect(&self.server.address())
    }

    fn connect_many(&self, count: u32) -> Result<Vec<Wire>, Error> {
        (0..count).map(|_| self.connect()).collect()
    }

    /// Sends bytes after which the server must close the connection.
    fn must_close(&self, what: &str, bytes: &[u8]) -> Result<(), Error> {
        match self.connect()?.closed_after(bytes)? {
            true => Ok(()),
            false => Err(format!("{what}: answered").into()),
        }
    }

    fn lengths(&self) -> Result<OpenConnections, Error> {
        for len in [i32::MAX, i32::MIN, -1, (100 << 20) + 1, 0, 3] {
            self.must_close(&format!("{len} bytes"), &[&len.to_be_bytes()[..], &[0; 3]].concat())?;
        }
        let nothing = Body::default();
        for (key, version) in [(999, 0), (-1, 0), (STOP_REPLICA, 0), (METADATA, 99)] {
            let name = format!("API {key} version {version}");
            self.must_close(&name, &request(key, version, &nothing))?;
        }
        Ok(OpenConnections::default())
    }

    /// Sends a valid header followed by lengths of arrays and texts that the request does not
    /// contain. Not every version's header has tagged fields, so each is sent with and without
    /// them.
    fn arrays(&self) -> Result<OpenConnections, Error> {
        let spoils = [
            Body::default().i32(i32::MAX),
            Body::default().i32(i32::MIN),
            Body::default().i16(i16::MAX).i32(-2),
            Body::default().i16(-2).i32(i32::MAX),
            // Compact lengths of 4 GiB and of ten bytes.
            Body(vec![0xff, 0xff, 0xff, 0xff, 0x0f]),
            Body(vec![0xff; 16]),
            Body(vec![0x7f; 4096]),
        ];
        for (key, min, max) in served(self.connect()?.call(&versions())?)? {
            for version in min..=max {
                for with_header in [request, flexible] {
                    for spoil in &spoils {
                        let mut wire = self.connect()?;
                        wire.send(&with_header(key, version, spoil));
                        // A disconnected client waits neither for records nor for other members.
                        let _gone = wire.0.shutdown(Shutdown::Write);
                        let answer = wire.answer();
                        answer.map_err(|error| format!("API {key} version {version}: {error}"))?;
                    }
                }
            }
        }
        // A complete request with this header is answered, so it is the array that closes the
        // connection.
        let metadata = |topics: &[u8]| flexible(METADATA, 12, &Body([topics, &[0; 3]].concat()));
        self.connect()?.call(&metadata(&[1]))?;
        for topics in [&spoils[4], &spoils[5]] {
            self.must_close("a missing array", &metadata(&topics.0))?;
        }
        Ok(OpenConnections::default())
    }

    fn batches(&self) -> Result<OpenConnections, Error> {
        let good = Batch::good;
        let mut wire = self.connect()?;
        for (what, batch) in [
            ("a wrong checksum", Batch { crc_xor: 1, ..good() }),
            ("magic 0", Batch { magic: 0, ..good() }),
            ("magic 1", Batch { magic: 1, ..good() }),
            ("magic 3", Batch { magic: 3, ..good() }),
            ("magic -1", Batch { magic: -1, ..good() }),
            ("a length too short", Batch { length_off_by: -1, ..good() }),
            ("a length too long", Batch { length_off_by: 1, ..good() }),
            ("a negative length", Batch { length_off_by: i32::MIN, ..good() }),
            ("no records", Batch { count: 0, ..good() }),
            ("too many records", Batch { count: 2, ..good() }),
            ("a negative number of records", Batch { count: -1, ..good() }),
            ("the most records", Batch { count: i32::MAX, last_delta: i32::MAX - 1, ..good() }),
            ("a negative delta", Batch { last_delta: -1, ..good() }),
            ("a control batch", Batch { attributes: 0x20, ..good() }),
            ("a transaction without a producer", Batch { attributes: 0x10, ..good() }),
            ("an unknown codec", Batch { attributes: 7, ..good() }),
            ("empty records", Batch { records: Vec::new(), ..good() }),
        ] {
            match produced(wire.call(&produce("bad", &batch.encode()))?)? {
                (0, offset) => return Err(format!("{what}: accepted at offset {offset}").into()),
                (_, -1) => {}
                (code, offset) => {
                    return Err(format!("{what}: code {code}, offset {offset}").into());
                }
            }
        }
        // None of them is in the log.
        match produced(wire.call(&produce("bad", &good().encode()))?)? {
            (0, 0) => Ok(OpenConnections::default()),
            other => Err(format!("the first valid batch: {other:?}").into()),
        }
    }

    fn half_requests(&self) -> Result<OpenConnections, Error> {
        let mut wires = self.connect_many(1_000)?;
        let claim = (100_i32 << 20).to_be_bytes();
        for (at, wire) in wires.iter_mut().enumerate() {
            wire.send(&claim);
            // Some stay below what is read without reserving memory; others send as much as they
            // can, until the server stops reading.
            wire.0.set_nonblocking(true)?;
            let chunk = vec![0; 60 << 10];
            for _ in 0..if at % 10 == 0 { 10 } else { 1 } {
                wire.send(&chunk);
            }
        }
        Ok(OpenConnections(wires))
    }

    fn slow_senders(&self) -> Result<OpenConnections, Error> {
        let mut wires = self.connect_many(500)?;
        let request = request(METADATA, 1, &Body::default().i32(-1));
        for byte in &request[..request.len() - 1] {
            wires.iter_mut().for_each(|wire| wire.send(&[*byte]));
            thread::sleep(Duration::from_millis(20));
        }
        Ok(OpenConnections(wires))
    }

    fn bombs(&self) -> Result<OpenConnections, Error> {
        let bomb = Batch::zstd_bomb(900 << 10).encode();
        for topic in ["bomb", "recompressed", "compacted"] {
            let (code, _) = produced(self.connect()?.call(&produce(topic, &bomb))?)?;
            if code != INVALID_RECORD {
                return Err(format!("unexpected code {code} for a bomb in {topic}").into());
            }
        }
        let (code, _) = produced(self.connect()?.call(&produce(TRYING, &Batch::good().encode()))?)?;
        if code != 0 {
            return Err(format!("a valid batch for {TRYING} was refused with code {code}").into());
        }
        let many = produce("bomb", &bomb);
        let mut wires = self.connect_many(20)?;
        wires.iter_mut().for_each(|wire| wire.send(&many));
        self.connect()?.call(&many)?;
        Ok(OpenConnections(wires))
    }

    /// Sends requests and never reads the answers, until the server stops reading too.
    fn unread_answers(&self) -> Result<OpenConnections, Error> {
        let fetch = fetch(FULL, 0, 50 << 20);
        let metadata = request(METADATA, 1, &Body::default().i32(-1));
        let mut wires = self.connect_many(200)?;
        for (at, wire) in wires.iter_mut().enumerate() {
            let asked = if at % 4 == 0 { &fetch } else { &metadata };
            wire.0.set_nonblocking(true)?;
            for _ in 0..10_000 {
                if wire.0.write(asked).is_err() {
                    break;
                }
            }
        }
        Ok(OpenConnections(wires))
    }

    fn names(&self) -> Result<OpenConnections, Error> {
        const COUNT: usize = 1_000;
        let mut wire = self.connect()?;
        let mut ids = HashSet::new();
        for n in 0..COUNT {
            let long = format!("{n}-{}", "x".repeat(200));
            // A producer without a transactional ID, and one with.
            let producers =
                [Body::default().i16(-1).i32(1), Body::default().text(&long).i32(60_000)];
            for producer in producers {
                let mut answer = wire.call(&request(INIT_PRODUCER_ID, 0, &producer))?;
                answer.i32()?;
                let (code, id) = (answer.i16()?, answer.i64()?);
                if code != 0 || !ids.insert(id) {
                    return Err(
                        format!("unexpected answer to a producer: code {code}, ID {id}").into()
                    );
                }
            }
            let session = Body::default().i32(-1).i32(0).i32(0).i32(1).i8(0).i32(0).i32(0);
            let session = session.i32(1).text(&long[..100]).i32(1).i32(0).i64(0).i64(-1).i32(1);
            let mut answer = wire.call(&request(FETCH, 7, &session.i32(0)))?;
            answer.i32()?;
            let code = answer.i16()?;
            // The session, one topic with its name, and one partition with its number.
            answer.i32()?;
            answer.i32()?;
            answer.skip_text()?;
            answer.i32()?;
            answer.i32()?;
            match (code, answer.i16()?) {
                (0, UNKNOWN_TOPIC_OR_PARTITION) => {}
                codes => {
                    return Err(
                        format!("unexpected codes for a fetch without topics: {codes:?}").into()
                    );
                }
            }
            let heartbeat = Body::default().compact(&long[..100]).compact(&long[..90]).i32(0);
            let heartbeat = heartbeat.compact(&long[..90]).i8(0).i32(60_000);
            let heartbeat = heartbeat.i8(2).compact(HONEST).i8(0).i8(0).i8(1).i8(0);
            let mut answer = wire.call(&flexible(CONSUMER_GROUP_HEARTBEAT, 1, &heartbeat))?;
            // The header has tagged fields as well.
            answer.i8()?;
            answer.i32()?;
            match answer.i16()? {
                0 => {}
                code => {
                    return Err(
                        format!("unexpected code {code} for the only member of a group").into()
                    );
                }
            }
        }
        // Members of one classic group, each static and on its own connection, since each waits for
        // the others.
        let mut wires = self.connect_many(500)?;
        for (n, wire) in wires.iter_mut().enumerate() {
            let join = Body::default().text("crowd").i32(30_000).i32(60_000).text("");
            let join = join.text(&format!("instance-{n}")).text("consumer");
            let join = join.i32(1).text("range").bytes(&[0; 4096]);
            wire.send(&request(JOIN_GROUP, 5, &join));
        }
        let mut first = wires[0].answer()?.ok_or("the first member's connection was closed")?;
        first.i32()?;
        match first.i16()? {
            0 => Ok(OpenConnections(wires)),
            code => Err(format!("unexpected code {code} for the first member of a group").into()),
        }
    }

    fn logins(&self) -> Result<OpenConnections, Error> {
        logins::attack(&self.sasl)?;
        Ok(OpenConnections::default())
    }

    /// Attacks the admin port, which has no authentication; supervisors ask it whether to restart
    /// the server.
    fn admin_port(&self) -> Result<OpenConnections, Error> {
        let address = self.server.admin_address()?;
        let endless = [&b"GET /metrics HTTP/1.1\r\nX: "[..], &[b'x'; 200 << 10]].concat();
        let mut wires = Vec::new();
        for n in 0..500 {
            let mut wire = Wire::connect(&address)?;
            match n % 3 {
                0 => {}
                1 => wire.send(b"GET /metrics HTTP/1.1\r\nHost: "),
                _ => wire.send(&endless),
            }
            wires.push(wire);
            if n % 50 == 49 {
                self.server.metric("alluvium_wal_ring_bytes")?;
            }
        }
        Ok(OpenConnections(wires))
    }

    fn many_topics(&self) -> Result<OpenConnections, Error> {
        let mut wires = self.connect_many(8)?;
        let mut body = Body::default().i32(50_000);
        for n in 0..50_000 {
            body = body.text(&format!("no-such-topic-{n}"));
        }
        // The topics must not be created.
        let metadata = request(METADATA, 4, &body.i8(0));
        let again = create_topic(HONEST, i32::MAX, &[]);
        for wire in &mut wires {
            wire.call(&metadata)?;
            wire.call(&again)?;
        }
        Ok(OpenConnections(wires))
    }

    fn idle_connections(&self) -> Result<OpenConnections, Error> {
        let ask = versions();
        let mut wires = Vec::new();
        while wires.len() < self.connections as usize {
            let mut some = self.connect_many(100)?;
            some.iter_mut().for_each(|wire| wire.send(&ask));
            for wire in &mut some {
                wire.answer()?.ok_or("a connection within the bound was refused")?;
            }
            wires.append(&mut some);
        }
        // Connections beyond the bound are refused, and the existing ones are still served.
        let mut refused = 0;
        for _ in 0..SPARE_CONNECTIONS + 50 {
            let mut wire = self.connect()?;
            wire.send(&ask);
            match wire.answer()? {
                Some(_) => wires.push(wire),
                None => refused += 1,
            }
        }
        if refused == 0 {
            return Err("no connection was refused".into());
        }
        let last = wires.last_mut().ok_or("no connections")?;
        last.call(&ask)?;
        println!("connections: {} are open, {refused} were refused", wires.len());
        Ok(OpenConnections(wires))
    }
}

/// StopReplica, which brokers send to each other.
const STOP_REPLICA: i16 = 5;

const UNKNOWN_TOPIC_OR_PARTITION: i16 = 3;
const INVALID_RECORD: i16 = 87;

/// Runs an attack on a process, and checks what its memory grows by and that the honest client is
/// served, while the attack lasts and after it.
fn attack(
    name: &str,
    pid: u32,
    honest: &Honest,
    more_mebibytes: u64,
    attack: impl FnOnce() -> Result<OpenConnections, Error>,
) -> Result<(), Error> {
    let ended = "the server has ended";
    // Resets the peak of resident memory.
    fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
    let before_kib = memory_kib(pid).ok_or(ended)?;
    let held = attack()?;
    honest.is_served()?;
    let after_kib = peak_memory_kib(pid).ok_or(ended)?;
    let (held_kib, count) = (memory_kib(pid).ok_or(ended)?, held.0.len());
    drop(held);
    honest.is_served()?;
    println!("{name}: {} MiB before, {} MiB at most", before_kib >> 10, after_kib >> 10);
    if count > 0 {
        let each = |kib: u64| kib.saturating_sub(before_kib) as f64 / count as f64;
        println!(
            "{name}: {:.1} KiB for each of {count} connections while they are held, {:.1} KiB at \
             most",
            each(held_kib),
            each(after_kib)
        );
    }
    if after_kib > before_kib + (more_mebibytes << 10) {
        return Err(format!(
            "grew from {} MiB to {} MiB, allowed are {more_mebibytes} MiB more",
            before_kib >> 10,
            after_kib >> 10
        )
        .into());
    }
    Ok(())
}

/// Connections of an attack that lasts as long as they are open.
#[derive(Default)]
struct OpenConnections(Vec<Wire>);

impl Drop for OpenConnections {
    fn drop(&mut self) {
        for Wire(socket) in &self.0 {
            let _: Result<(), std::io::Error> = TcpStream::shutdown(socket, Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attack_with_fewer_connections_than_requested_is_reported() {
        assert_eq!(too_few(10, 10), None);
        let skipped = Case::skipped("10 connections", "the limit of open files allows only 7");
        assert_eq!(too_few(7, 10), Some(skipped));
    }
}
