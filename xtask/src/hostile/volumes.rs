//! Malicious clients of volume servers and of an NBD export.

use std::fs;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::wire::Wire;
use super::{Honest, OpenConnections, attack, raise_file_limit, too_few};
use crate::Error;
use crate::exec::output;
use crate::report::Case;
use crate::server::{Metrics, free_address};
use crate::volume::member::{self, Coordination, Process, volume_command};
use crate::volume::nbd::{self, Command, Connection};

const SERVERS: usize = 3;
const NAME: &str = "v";
/// Beyond what volume servers and exports accept by default.
const CONNECTIONS: u32 = 1_100;
const BLOCK: u32 = 4096;

const PEER: u16 = 1;
const CLIENT: u16 = 2;
const PULL: u16 = 3;
/// Types of frames.
const PING: u16 = 2;
const RAFT: u16 = 0x10;
const OP: u16 = 0x20;
const READ: u16 = 0x21;
const STATUS: u16 = 0x22;

/// Runs all attacks.
pub(crate) fn run(binary: &Path, directory: &Path) -> Result<Vec<Case>, Error> {
    let connections = raise_file_limit(CONNECTIONS)?;
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let mut cluster = Cluster::start(binary, directory)?;
    let mut cases = Attacks::begin(&cluster, connections)?.all();
    cases.extend(too_few(connections, CONNECTIONS));
    cases.push(Case::run("no panic is in the logs", || cluster.check_logs()));
    cases.push(Case::run("all processes stop on SIGTERM", || cluster.stop()));
    if cases.iter().any(Case::has_failed) {
        println!("devices and logs are kept in {}", directory.display());
    } else {
        fs::remove_dir_all(directory)?;
    }
    Ok(cases)
}

/// Three servers and an export.
struct Cluster {
    coordination: SocketAddr,
    servers: Vec<Process>,
    listens: Vec<SocketAddr>,
    metrics: Vec<SocketAddr>,
    exporter: Process,
    /// The export's socket, and its port.
    socket: PathBuf,
    port: SocketAddr,
}

impl Cluster {
    fn start(binary: &Path, directory: &Path) -> Result<Self, Error> {
        let [coordination, port] = [free_address()?, free_address()?];
        let hosted = Coordination::Hosted(coordination);
        let (mut servers, mut listens, mut metrics) = (Vec::new(), Vec::new(), Vec::new());
        for server in 1..=SERVERS {
            let [listen, admin] = [free_address()?, free_address()?];
            let options = [("listen", listen.to_string()), ("metrics-listen", admin.to_string())];
            let devices = member::small_devices(directory, server).into_iter();
            let options: Vec<_> = devices.chain(options).collect();
            let mut process = member::server(binary, directory, server, &hosted, &options);
            process.start()?;
            servers.push(process);
            listens.push(listen);
            metrics.push(admin);
        }
        output(&mut volume_command(binary, &hosted, &["create", NAME, "--size", "64MiB"]))?;
        let socket = directory.join("nbd.sock");
        let options = [("listen", port.to_string())];
        let mut exporter = member::exporter(binary, directory, NAME, &hosted, &socket, &options);
        exporter.start()?;
        Ok(Self { coordination, servers, listens, metrics, exporter, socket, port })
    }

    fn check_logs(&self) -> Result<(), Error> {
        for process in self.servers.iter().chain([&self.exporter]) {
            if let Some(line) = process.log()?.lines().find(|line| line.contains("panicked")) {
                return Err(line.into());
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), Error> {
        self.exporter.stop()?;
        // The first one hosts the coordination service of the others.
        self.servers.iter_mut().rev().try_for_each(Process::stop)
    }
}

/// Returns rounds that write blocks and read them back, over one connection.
fn write_and_read(socket: &Path) -> Result<impl FnMut() -> Result<(), Error> + use<>, Error> {
    let mut connection = Connection::open(socket)?;
    let mut rounds = 0_u32;
    Ok(move || {
        rounds += 1;
        let (at, data) = (u64::from(rounds % 256 * BLOCK), rounds.to_le_bytes().repeat(2048));
        let len = data.len() as u32;
        let failed = |error| Error::from(format!("{error}"));
        connection.request(Command::Write, at, len, &data).map_err(failed)?;
        let read = connection.request(Command::Read, at, len, &[]).map_err(failed)?;
        match read == data {
            true => Ok(()),
            false => Err(format!("round {rounds}: other data than written").into()),
        }
    })
}

/// What connections of the protocol of volume servers need: what a server states in its handshake.
struct Stated {
    cluster: [u8; 16],
    server: u32,
}

/// A connection to a volume server after its handshake.
struct Peer {
    wire: Wire,
    id: [u8; 8],
}

struct Attacks<'a> {
    cluster: &'a Cluster,
    honest: Honest,
    connections: u32,
    stated: Stated,
    /// The group of the volume.
    group: u64,
    volume: u32,
}

impl<'a> Attacks<'a> {
    fn begin(cluster: &'a Cluster, connections: u32) -> Result<Self, Error> {
        let mut round = write_and_read(&cluster.socket)?;
        // The first write creates the group.
        round()?;
        // A refused handshake states the cluster, too.
        let mut wire = Wire::connect(&cluster.listens[1].to_string())?;
        wire.send(&hello(&Stated { cluster: [0; 16], server: 0 }, CLIENT, [1; 8], &[0; 56]));
        let mut welcome = [0; 128];
        wire.0.read_exact(&mut welcome)?;
        let server = u32::from_le_bytes(welcome[32..36].try_into().expect("four bytes"));
        let stated = Stated { cluster: welcome[16..32].try_into().expect("sixteen bytes"), server };
        let mut attacks = Self {
            cluster,
            honest: Honest::start(round),
            connections,
            stated,
            group: 0,
            volume: 1,
        };
        let mut client = attacks.client()?;
        client.send(STATUS, 1, &[0; 16], 0);
        let (_, status) = client.answer()?.ok_or("the status of the groups was not answered")?;
        let group = status.get(56..64).ok_or("the server has no group")?;
        attacks.group = u64::from_le_bytes(group.try_into().expect("eight bytes"));
        Ok(attacks)
    }

    fn all(&self) -> Vec<Case> {
        type Attack<'a> = fn(&Attacks<'a>) -> Result<OpenConnections, Error>;
        let server = &self.cluster.servers[1];
        let coordinator = &self.cluster.servers[0];
        let exporter = &self.cluster.exporter;
        // The number is how much the process's memory may grow at its peak, in MiB: the documented
        // bounds plus allocator overhead.
        let attacks: [(&str, &Process, u64, Attack<'a>); 12] = [
            ("volumes: handshakes that never end", server, 64, Self::handshakes),
            ("volumes: strangers", server, 64, Self::strangers),
            ("volumes: frames that violate the protocol", server, 64, Self::frames),
            ("volumes: frames that never arrive", server, 128, Self::half_frames),
            // One answer for each connection, and 128 MiB.
            ("volumes: requests above the window", server, 320, Self::above_window),
            ("volumes: answers that are never read", server, 448, Self::unread_answers),
            ("volumes: connections", server, 128, Self::idle_clients),
            ("coordination: garbage and silence", coordinator, 64, Self::coordination),
            ("volumes: a full metrics port", server, 64, Self::metrics_port),
            ("nbd: handshakes and requests out of bounds", exporter, 64, Self::nbd_bytes),
            // 1 MiB for each connection, and the pool of 512 MiB.
            ("nbd: payloads that never arrive", exporter, 1_600, Self::nbd_half_writes),
            ("nbd: replies that are never read", exporter, 1_024, Self::nbd_unread),
        ];
        let run = |(name, process, more, run): (&str, &Process, u64, Attack<'a>)| {
            Case::run(name, || attack(name, process.pid()?, &self.honest, more, || run(self)))
        };
        attacks.into_iter().map(run).collect()
    }

    fn connect(&self) -> Result<Wire, Error> {
        Wire::connect(&self.cluster.listens[1].to_string())
    }

    /// Connects as a gateway does.
    fn client(&self) -> Result<Peer, Error> {
        let id = *b"hostile!";
        let mut wire = self.connect()?;
        wire.send(&hello(&self.stated, CLIENT, id, &[0; 56]));
        let mut welcome = [0; 128];
        wire.0.read_exact(&mut welcome)?;
        match u16::from_le_bytes([welcome[12], welcome[13]]) {
            0 => Ok(Peer { wire, id }),
            code => Err(format!("a client was refused with code {code}").into()),
        }
    }

    fn clients(&self, count: usize) -> Result<Vec<Peer>, Error> {
        (0..count).map(|_| self.client()).collect()
    }

    /// Nothing, a part of a handshake, or bytes of another protocol.
    fn handshakes(&self) -> Result<OpenConnections, Error> {
        let hello = hello(&self.stated, CLIENT, [1; 8], &[0; 56]);
        let mut wires = Vec::new();
        for n in 0..300 {
            let mut wire = self.connect()?;
            match n % 4 {
                0 => {}
                1 => wire.send(&hello[..127]),
                2 => wire.send(&vec![b'x'; 64 << 10]),
                _ => wire.send(b"GET / HTTP/1.1\r\nHost: volumes\r\n\r\n"),
            }
            wires.push(wire);
        }
        // Each is closed by the limit on handshakes, or after 5 seconds.
        for wire in &mut wires {
            closes(wire).map_err(|error| format!("a handshake that never ends: {error}"))?;
        }
        Ok(OpenConnections(wires))
    }

    /// Handshakes that must be refused: servers that are not registered, and unknown roles.
    fn strangers(&self) -> Result<OpenConnections, Error> {
        let server = |id: u32, mark: u64| {
            let mut fields = [0; 56];
            fields[32..40].copy_from_slice(&mark.to_le_bytes());
            (id, fields)
        };
        for (role, (id, fields)) in [
            (PEER, server(999, 1)),
            (PULL, server(999, u64::MAX)),
            // The ids of its devices are wrong.
            (PEER, server(1, u64::MAX)),
            (PEER, server(self.stated.server, 0)),
            (CLIENT, server(1, 0)),
            (0, server(0, 0)),
            (4, server(0, 0)),
            (u16::MAX, server(0, 0)),
        ] {
            let mut bytes = hello(&self.stated, role, [1; 8], &fields);
            bytes[32..36].copy_from_slice(&id.to_le_bytes());
            seal(&mut bytes, 124, &[]);
            let mut wire = self.connect()?;
            wire.send(&bytes);
            let mut welcome = [0; 128];
            wire.0.read_exact(&mut welcome)?;
            if u16::from_le_bytes([welcome[12], welcome[13]]) == 0 {
                return Err(format!("server {id} was accepted with role {role}").into());
            }
            closes(&mut wire).map_err(|error| format!("role {role}, server {id}: {error}"))?;
        }
        Ok(OpenConnections::default())
    }

    /// Frames after which the server must close the connection.
    fn frames(&self) -> Result<OpenConnections, Error> {
        let id = *b"hostile!";
        let header = |kind, meta: u32, data: u32| frame_header(id, kind, 1, meta, data, 0);
        let mut wrong_checksum = header(PING, 0, 0);
        wrong_checksum[28] ^= 1;
        let mut reserved = header(PING, 0, 0);
        reserved[12] = 1;
        seal(&mut reserved, 28, &id);
        let cases = [
            ("a wrong checksum", wrong_checksum),
            ("a reserved field", reserved),
            ("an unknown type", header(0x7fff, 0, 0)),
            ("a frame of servers", header(RAFT, 16, 0)),
            ("the longest meta", header(OP, !7, 0)),
            ("a meta that is too long", header(OP, (512 << 10) + 8, 0)),
            ("an odd meta", header(OP, 7, 0)),
            ("data that is too long", header(OP, 64, (1 << 20) + 4096)),
            ("the longest data", header(OP, 64, !4095)),
            ("data of a read", header(READ, 48, 4096)),
            ("an op without a meta", header(OP, 0, 4096)),
            ("zeros", vec![0; 32]),
        ];
        for (what, bytes) in cases {
            let mut client = self.client()?;
            client.wire.send(&bytes);
            client.wire.send(&[0; 8192]);
            closes(&mut client.wire).map_err(|error| format!("{what}: {error}"))?;
        }
        for (what, kind, meta) in [
            ("an op of zeros", OP, vec![0; 64]),
            ("an op of an unknown kind", OP, [&1_u64.to_le_bytes()[..], &[0xff; 56]].concat()),
            ("a read of zeros", READ, vec![0; 48]),
            ("a read of too many blocks", READ, self.read(u16::MAX, 0)),
            ("a status with bytes to spare", STATUS, vec![0; 24]),
        ] {
            let mut client = self.client()?;
            client.send(kind, 1, &meta, 0);
            closes(&mut client.wire).map_err(|error| format!("{what}: {error}"))?;
        }
        Ok(OpenConnections::default())
    }

    /// Headers of the largest frames, and a part of what they announce.
    fn half_frames(&self) -> Result<OpenConnections, Error> {
        let mut clients = self.clients(400)?;
        for (at, client) in clients.iter_mut().enumerate() {
            let header = frame_header(client.id, OP, 1, 512 << 10, 1 << 20, 0);
            client.wire.send(&header);
            client.wire.0.set_nonblocking(true)?;
            let chunk = vec![0; 60 << 10];
            for _ in 0..if at % 4 == 0 { 8 } else { 1 } {
                client.wire.send(&chunk);
            }
        }
        Ok(held(clients))
    }

    /// Requests whose answers have more bytes than a connection may have outstanding.
    fn above_window(&self) -> Result<OpenConnections, Error> {
        let mut clients = self.clients(100)?;
        for client in &mut clients {
            client.wire.0.set_nonblocking(true)?;
            for request in 1..1_000 {
                client.send(READ, request, &self.read(256, 0), 0);
            }
            client.wire.0.set_nonblocking(false)?;
        }
        Ok(held(clients))
    }

    /// As many requests as the window allows, whose answers are not read.
    fn unread_answers(&self) -> Result<OpenConnections, Error> {
        let mut clients = self.clients(200)?;
        for client in &mut clients {
            for request in 1..=7 {
                client.send(READ, request, &self.read(256, 0), 0);
            }
            client.send(STATUS, 8, &[0; 16], 0);
        }
        Ok(held(clients))
    }

    fn idle_clients(&self) -> Result<OpenConnections, Error> {
        let (mut clients, mut refused) = (Vec::new(), 0);
        for _ in 0..self.connections {
            match self.client() {
                Ok(client) => clients.push(client),
                Err(_) => refused += 1,
            }
        }
        if refused == 0 {
            return Err("no connection was refused".into());
        }
        // A connection within the limit is served.
        let last = clients.last_mut().ok_or("no connections")?;
        last.send(STATUS, 1, &[0; 16], 0);
        last.answer()?.ok_or("a connection within the limit was closed")?;
        println!("connections: {} are open, {refused} were refused", clients.len());
        Ok(held(clients))
    }

    fn coordination(&self) -> Result<OpenConnections, Error> {
        let address = self.cluster.coordination.to_string();
        let mut wires = Vec::new();
        for n in 0..300_usize {
            let mut wire = Wire::connect(&address)?;
            match n % 5 {
                0 => {}
                1 => wire.send(&[0xff; 4096]),
                2 => wire.send(&[0; 4096]),
                3 => wire.send(&(64_u32 << 20).to_le_bytes()),
                _ => wire.send(b"PUT /server/1 HTTP/1.1\r\n\r\n"),
            }
            wires.push(wire);
        }
        Ok(OpenConnections(wires))
    }

    fn metrics_port(&self) -> Result<OpenConnections, Error> {
        let address = self.cluster.metrics[1].to_string();
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
                Metrics::read(&address)?;
            }
        }
        Ok(OpenConnections(wires))
    }

    /// Sends an NBD server bytes that are no handshake, and requests that are out of bounds.
    fn nbd_bytes(&self) -> Result<OpenConnections, Error> {
        let address = self.cluster.port.to_string();
        let option = |number: u32, len: u32| {
            [&b"IHAVEOPT"[..], &number.to_be_bytes(), &len.to_be_bytes()].concat()
        };
        let mut wires = Vec::new();
        for bytes in [
            vec![0xff; 64 << 10],
            vec![0; 64 << 10],
            [&3_u32.to_be_bytes()[..], &option(7, u32::MAX), &[0; 64 << 10]].concat(),
            [&3_u32.to_be_bytes()[..], &option(1, 1 << 20), &[b'x'; 64 << 10]].concat(),
            // More options than a handshake may have.
            [&3_u32.to_be_bytes()[..], &option(99, 0).repeat(100_000)].concat(),
        ] {
            let mut wire = Wire::connect(&address)?;
            wire.send(&bytes);
            closes(&mut wire).map_err(|error| format!("a handshake: {error}"))?;
        }
        for (what, kind, at, len, is_closed) in [
            ("an unknown command", 99, 0, BLOCK, false),
            ("a read beyond the end", 0, u64::MAX - 1, BLOCK, false),
            ("the longest read", 0, 0, u32::MAX, false),
            ("a trim beyond the end", 4, 1 << 62, u32::MAX, false),
            ("the longest write", 1, 0, u32::MAX, true),
        ] {
            let mut connection = nbd(&address)?;
            connection.send(&nbd::request(kind, 7, at, len));
            if is_closed {
                closes(&mut connection).map_err(|error| format!("{what}: {error}"))?;
                continue;
            }
            let mut reply = [0; 16];
            connection.0.read_exact(&mut reply).map_err(|error| format!("{what}: {error}"))?;
            if reply[4..8] == [0; 4] {
                return Err(format!("{what}: success").into());
            }
        }
        let mut wire = nbd(&address)?;
        wire.send(&[0; 28]);
        closes(&mut wire).map_err(|error| format!("a request of zeros: {error}"))?;
        for n in 0..200 {
            let mut wire = Wire::connect(&address)?;
            if n % 2 == 0 {
                wire.send(&3_u32.to_be_bytes()[..2]);
            }
            wires.push(wire);
        }
        Ok(OpenConnections(wires))
    }

    /// Announces the largest writes, and sends a part.
    fn nbd_half_writes(&self) -> Result<OpenConnections, Error> {
        let address = self.cluster.port.to_string();
        let mut wires = Vec::new();
        let chunk = vec![0x5a; 512 << 10];
        for n in 0..900 {
            let mut wire = nbd(&address)?;
            wire.send(&nbd::request(Command::Write as u16, 7, 32 << 20, 32 << 20));
            wire.0.set_nonblocking(true)?;
            for _ in 0..if n % 10 == 0 { 64 } else { 1 } {
                wire.send(&chunk);
            }
            wires.push(wire);
        }
        Ok(OpenConnections(wires))
    }

    /// Reads of the largest size whose replies are not read.
    fn nbd_unread(&self) -> Result<OpenConnections, Error> {
        let address = self.cluster.port.to_string();
        let mut wires = Vec::new();
        for _ in 0..200 {
            let mut wire = nbd(&address)?;
            wire.0.set_nonblocking(true)?;
            for _ in 0..1_000 {
                if wire.0.write(&nbd::request(Command::Read as u16, 7, 0, 32 << 20)).is_err() {
                    break;
                }
            }
            wires.push(wire);
        }
        Ok(OpenConnections(wires))
    }

    /// The meta of a read.
    fn read(&self, blocks: u16, flags: u32) -> Vec<u8> {
        let mut meta = self.group.to_le_bytes().to_vec();
        meta.extend([0; 16]);
        meta.extend(self.volume.to_le_bytes());
        meta.extend([0; 8 + 2]);
        meta.extend(blocks.to_le_bytes());
        meta.extend(flags.to_le_bytes());
        meta.extend([0; 4]);
        meta
    }
}

impl Peer {
    fn send(&mut self, kind: u16, request: u64, meta: &[u8], data: u32) {
        let header =
            frame_header(self.id, kind, request, meta.len() as u32, data, crc32c::crc32c(meta));
        self.wire.send(&[&header, meta].concat());
    }

    /// Returns type and meta of the next answer; `None` if the connection is closed.
    fn answer(&mut self) -> Result<Option<(u16, Vec<u8>)>, Error> {
        let mut header = [0; 32];
        if self.wire.0.read_exact(&mut header).is_err() {
            return Ok(None);
        }
        let field = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four"));
        let mut body = vec![0; (field(4) + field(8)) as usize];
        self.wire.0.read_exact(&mut body)?;
        body.truncate(field(4) as usize);
        Ok(Some((u16::from_le_bytes([header[0], header[1]]), body)))
    }
}

fn held(peers: Vec<Peer>) -> OpenConnections {
    OpenConnections(peers.into_iter().map(|peer| peer.wire).collect())
}

/// Fails unless the server closes the connection. What it sends before is dropped.
fn closes(wire: &mut Wire) -> Result<(), Error> {
    wire.0.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut bytes = vec![0; 64 << 10];
    loop {
        match wire.0.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err("the connection stays open".into());
            }
            // Reset.
            Err(_) => return Ok(()),
        }
    }
}

/// A handshake. `fields` are the bytes from the store id to the incarnation.
fn hello(stated: &Stated, role: u16, connection: [u8; 8], fields: &[u8; 56]) -> Vec<u8> {
    let mut hello = b"ALLUVVOL".to_vec();
    hello.extend([1, 0, 1, 0]);
    hello.extend(role.to_le_bytes());
    hello.extend([0; 2]);
    hello.extend(stated.cluster);
    hello.extend(0_u32.to_le_bytes());
    hello.extend(stated.server.to_le_bytes());
    hello.extend(fields);
    hello.extend(u64::from(role == PULL).to_le_bytes());
    hello.extend(connection);
    hello.extend([0; 12 + 4]);
    seal(&mut hello, 124, &[]);
    hello
}

fn frame_header(
    connection: [u8; 8],
    kind: u16,
    request: u64,
    meta: u32,
    data: u32,
    meta_crc: u32,
) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 2]);
    header.extend(meta.to_le_bytes());
    header.extend(data.to_le_bytes());
    header.extend([0; 4]);
    header.extend(request.to_le_bytes());
    header.extend(meta_crc.to_le_bytes());
    header.extend([0; 4]);
    seal(&mut header, 28, &connection);
    header
}

/// Writes the checksum of `before` and of the bytes before `at` to `at`.
fn seal(bytes: &mut [u8], at: usize, before: &[u8]) {
    let crc = crc32c::crc32c_append(crc32c::crc32c(before), &bytes[..at]);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// A connection to the default export, after its handshake.
fn nbd(address: &str) -> Result<Wire, Error> {
    let mut wire = Wire::connect(address)?;
    nbd::handshake(&mut wire.0)?;
    Ok(wire)
}
