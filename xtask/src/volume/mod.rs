//! `cargo xtask volume`: three servers of volumes and an exporter under load, while servers are
//! killed, stopped and cut off, and the exporter is killed.
//!
//! [`checker`] is the load and knows which contents a read may return. In rounds that leave the
//! exporter alone, fio writes and verifies another range: its NBD engine does not reconnect. Each
//! round ends with all processes running and progress on each connection. The last round ends when
//! all replicas are exact at the same index and all processes have ended on SIGTERM. When several
//! servers are killed, and at the end, `tools/volume_reader.py` must find their devices intact, at
//! the end with the content that was read last.

mod checker;
mod devices;
pub(crate) mod member;
pub(crate) mod nbd;
mod proxy;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use self::checker::{Checker, FIO_OFFSET, VOLUME_BYTES, WORKERS};
use self::devices::Devices;
use self::member::{Coordination, Process, metric, volume_command};
use self::proxy::{Link, Network};
use crate::Error;
use crate::exec::{output, wait};
use crate::report::Case;
use crate::rng::Rng;
use crate::server::free_address;

const SERVERS: usize = 3;
const ETCD_MEMBERS: usize = 3;
const NAME: &str = "v";
/// Each connection must have an answer again within this time after everything is repaired.
const PROGRESS_LIMIT: Duration = Duration::from_secs(60);
/// All replicas must be exact at the same index within this time after the load has ended.
const EXACT_LIMIT: Duration = Duration::from_secs(60);
const FIO_LIMIT: Duration = Duration::from_secs(180);

/// What a round does to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    /// SIGKILL of a server, and a start after a while.
    Kill,
    /// SIGKILL of two or three servers.
    KillMany,
    /// SIGSTOP and SIGCONT of a server.
    Stop,
    /// Connections between a server and the others, or clients, are held back or refused.
    Cut,
    /// SIGKILL of the exporter, and a start.
    Exporter,
    /// SIGKILL or SIGSTOP of a member of etcd, or SIGKILL of all.
    Etcd,
}

/// What the rounds have shown.
#[derive(Default)]
struct Figures {
    rounds: BTreeMap<Fault, u32>,
    exporter_kills: u32,
    fio_runs: u32,
    installs: u64,
    /// Longest waits of operations, by what was done to a leader while all replicas were exact.
    killed_leader: Vec<Duration>,
    stopped_leader: Vec<Duration>,
    /// Writes acknowledged while one server was killed.
    writes_by_two: u64,
}

/// Runs the campaign in `directory`.
pub(crate) fn run(
    root: &Path,
    binary: &Path,
    directory: &Path,
    rounds: u32,
    seed: u64,
    with_etcd: bool,
) -> Result<Vec<Case>, Error> {
    let etcd = if with_etcd { " --etcd" } else { "" };
    println!(
        "volumes, {rounds} rounds; repeat with: cargo xtask volume --rounds {rounds} --seed \
         {seed}{etcd}"
    );
    if directory.exists() {
        fs::remove_dir_all(directory)?;
    }
    fs::create_dir_all(directory)?;
    let mut campaign = Campaign::start(root, binary, directory, seed, with_etcd)?;
    for round in 1..=rounds {
        campaign.round(round).map_err(|error| format!("seed {seed}, round {round}: {error}"))?;
    }
    campaign.finish().map_err(|error| format!("seed {seed}, end: {error}"))?;
    fs::remove_dir_all(directory)?;
    Ok(vec![Case::passed(&format!("{rounds} rounds, seed {seed}{etcd}"))])
}

/// Starts members of etcd, and returns them with where they are.
fn etcd(directory: &Path) -> Result<(Vec<Process>, Coordination), Error> {
    let addresses = (0..ETCD_MEMBERS).map(|_| Ok((free_address()?, free_address()?)));
    let addresses = addresses.collect::<Result<Vec<_>, Error>>()?;
    let mut members: Vec<_> =
        (0..ETCD_MEMBERS).map(|number| member::etcd(directory, number, &addresses)).collect();
    // A member is ready when a majority is.
    members.iter_mut().try_for_each(Process::begin)?;
    members.iter_mut().try_for_each(Process::wait_until_ready)?;
    let clients = addresses.into_iter().map(|(client, _)| client).collect();
    Ok((members, Coordination::Etcd(clients)))
}

struct Campaign {
    binary: PathBuf,
    directory: PathBuf,
    coordination: Coordination,
    /// The members of etcd, if it is the coordination service.
    etcd: Vec<Process>,
    servers: Vec<Process>,
    metrics: Vec<SocketAddr>,
    exporter: Process,
    network: Network,
    devices: Option<Devices>,
    checker: Arc<Checker>,
    workers: Vec<JoinHandle<()>>,
    rng: Rng,
    figures: Figures,
}

impl Campaign {
    fn start(
        root: &Path,
        binary: &Path,
        directory: &Path,
        seed: u64,
        with_etcd: bool,
    ) -> Result<Self, Error> {
        let (etcd, coordination) = match with_etcd {
            true => etcd(directory)?,
            false => (Vec::new(), Coordination::Hosted(free_address()?)),
        };
        let (mut servers, mut metrics, mut routes) = (Vec::new(), Vec::new(), Vec::new());
        for server in 1..=SERVERS {
            let [listen, advertised, admin] = [free_address()?, free_address()?, free_address()?];
            let options = [
                ("listen", listen.to_string()),
                ("advertise", advertised.to_string()),
                ("metrics-listen", admin.to_string()),
                // The least: a server that was away may lack entries that the others have dropped.
                ("entry-memory", "16MiB".to_owned()),
            ];
            let devices = member::small_devices(directory, server).into_iter();
            let options: Vec<_> = devices.chain(options).collect();
            servers.push(member::server(binary, directory, server, &coordination, &options));
            metrics.push(admin);
            routes.push((advertised, listen));
        }
        let mut network = Network::new(routes);
        for (number, server) in servers.iter_mut().enumerate() {
            network.open(number)?;
            server.start()?;
        }
        let (size, socket) = (VOLUME_BYTES.to_string(), directory.join("nbd.sock"));
        let create = ["create", NAME, "--size", &size];
        output(&mut volume_command(binary, &coordination, &create))?;
        let mut exporter = member::exporter(binary, directory, NAME, &coordination, &socket, &[]);
        exporter.start()?;
        let (checker, workers) = Checker::start(&socket, seed);
        Ok(Self {
            binary: binary.to_path_buf(),
            directory: directory.to_path_buf(),
            coordination,
            etcd,
            servers,
            metrics,
            exporter,
            network,
            devices: Devices::new(root, directory),
            checker,
            workers,
            rng: Rng::new(seed),
            figures: Figures::default(),
        })
    }

    fn round(&mut self, round: u32) -> Result<(), Error> {
        self.wait_for_progress()?;
        let fault = match self.rng.below(if self.etcd.is_empty() { 10 } else { 13 }) {
            0..=2 => Fault::Kill,
            3 => Fault::KillMany,
            4 | 5 => Fault::Stop,
            6 | 7 => Fault::Cut,
            8 | 9 => Fault::Exporter,
            _ => Fault::Etcd,
        };
        *self.figures.rounds.entry(fault).or_default() += 1;
        let victim = self.rng.below(SERVERS as u64) as usize;
        // Leaders of groups before the fault. A wait is one for a new leader only then.
        let replicas = self.replicas()?;
        let is_leader = leaders(&replicas).contains(&victim);
        // A replica that installs takes no part in elections: its server is not back yet.
        let installing = replicas.iter().filter(|replica| replica["state"] != "exact").count();
        // The exporter cannot start without the coordination service, which server 1 hosts.
        let coordination_is_away = match self.etcd.is_empty() {
            true => victim == 0 && fault != Fault::Exporter,
            false => fault == Fault::Etcd,
        };
        let kills_exporter = fault == Fault::Exporter
            || !coordination_is_away && fault != Fault::KillMany && self.rng.below(4) == 0;
        let mut fio = match !kills_exporter && self.rng.below(2) == 0 {
            true => Some(self.fio()?),
            false => None,
        };
        let began = Instant::now();
        let writes = self.checker.written();
        let text = self.fault(fault, victim, kills_exporter)?;
        let written_during = self.checker.written() - writes;
        let repaired = Instant::now();
        self.repair(fault, victim)?;
        if kills_exporter {
            self.exporter.wait_until_ready()?;
        }
        let started = repaired.elapsed();
        self.wait_for_progress()?;
        if let Some(fio) = &mut fio {
            self.figures.fio_runs += 1;
            match wait(fio, FIO_LIMIT)? {
                Some(status) if status.success() => {}
                Some(status) => return Err(format!("fio: {status}; see fio.log").into()),
                None => return Err(format!("fio has not ended after {FIO_LIMIT:?}").into()),
            }
        }
        let longest = self.checker.longest_wait(began);
        if !kills_exporter && is_leader && installing == 0 {
            match fault {
                Fault::Kill => self.figures.killed_leader.push(longest),
                Fault::Stop => self.figures.stopped_leader.push(longest),
                _ => {}
            }
        }
        if fault == Fault::Kill {
            self.figures.writes_by_two += written_during;
        }
        let of_leader = if is_leader { ", a leader" } else { "" };
        let of_installing = match installing {
            0 => String::new(),
            count => format!(", {count} replicas not exact before"),
        };
        println!(
            "round {round}: {text}{of_leader}{of_installing}{}{}; {written_during} writes \
             meanwhile, longest wait {} ms, started again in {} ms",
            if kills_exporter { ", exporter killed" } else { "" },
            if fio.is_some() { ", fio" } else { "" },
            longest.as_millis(),
            started.as_millis(),
        );
        Ok(())
    }

    /// Does the damage of a round, and lets it last.
    fn fault(
        &mut self,
        fault: Fault,
        victim: usize,
        kills_exporter: bool,
    ) -> Result<String, Error> {
        let lasts = self.rng.duration(Duration::from_millis(500), Duration::from_secs(4));
        let ms = lasts.as_millis();
        let server = victim + 1;
        let text = match fault {
            Fault::Kill => {
                self.kill(victim)?;
                format!("server {server} killed for {ms} ms")
            }
            Fault::KillMany => {
                let spared = self.rng.below(SERVERS as u64 + 1) as usize;
                let killed = || (0..SERVERS).filter(|other| *other != spared);
                killed().try_for_each(|other| self.kill(other))?;
                if let Some(devices) = &self.devices {
                    killed().try_for_each(|other| devices.check(other))?;
                }
                match spared < SERVERS {
                    true => format!("all servers but {} killed for {ms} ms", spared + 1),
                    false => format!("all servers killed for {ms} ms"),
                }
            }
            Fault::Stop => {
                self.servers[victim].signal(Signal::STOP)?;
                format!("server {server} stopped for {ms} ms")
            }
            Fault::Cut => format!("{} for {ms} ms", self.cut(victim)),
            Fault::Exporter => "all servers running".to_owned(),
            Fault::Etcd => format!("{} for {ms} ms", self.etcd_fault()?),
        };
        let half = lasts / 2;
        self.pause(half)?;
        if kills_exporter {
            // Before, so that no worker finds its connection lost without a reason.
            self.checker.exporter.fetch_add(1, Ordering::Relaxed);
            self.exporter.kill()?;
            self.figures.exporter_kills += 1;
            // It attaches when the leaders can be reached, maybe not before the repair.
            self.exporter.begin()?;
        }
        self.pause(lasts - half)?;
        Ok(text)
    }

    /// Kills or stops members of etcd, and describes it.
    fn etcd_fault(&mut self) -> Result<String, Error> {
        let victim = self.rng.below(ETCD_MEMBERS as u64) as usize;
        let member = victim + 1;
        Ok(match self.rng.below(3) {
            0 => {
                self.etcd.iter_mut().try_for_each(Process::kill)?;
                "all members of etcd killed".to_owned()
            }
            1 => {
                self.etcd[victim].kill()?;
                format!("member {member} of etcd killed")
            }
            _ => {
                self.etcd[victim].signal(Signal::STOP)?;
                format!("member {member} of etcd stopped")
            }
        })
    }

    /// Sets links of a server, and describes them.
    fn cut(&mut self, victim: usize) -> String {
        let links = [
            Link::HoldsToServer,
            Link::HoldsFromServer,
            Link::HoldsBoth,
            Link::Refuses,
            Link::Refuses,
        ];
        let link = links[self.rng.below(links.len() as u64) as usize];
        let others = || (0..SERVERS).filter(|other| *other != victim);
        let which = match self.rng.below(4) {
            0 => {
                others().for_each(|other| self.network.set(victim, other + 1, link));
                "from the others"
            }
            1 => {
                others().for_each(|other| self.network.set(other, victim + 1, link));
                "to the others"
            }
            2 => {
                self.network.set(victim, 0, link);
                "from clients"
            }
            _ => {
                for other in others() {
                    self.network.set(victim, other + 1, link);
                    self.network.set(other, victim + 1, link);
                }
                "from and to the others"
            }
        };
        format!("server {}, connections {which}: {link:?}", victim + 1)
    }

    fn repair(&mut self, fault: Fault, victim: usize) -> Result<(), Error> {
        if fault == Fault::Stop {
            self.servers[victim].signal(Signal::CONT)?;
        }
        let mut started = Vec::new();
        for member in &mut self.etcd {
            match member.is_running() {
                true => member.signal(Signal::CONT)?,
                false => {
                    member.begin()?;
                    started.push(member);
                }
            }
        }
        started.into_iter().try_for_each(Process::wait_until_ready)?;
        self.network.open_all();
        for (number, server) in self.servers.iter_mut().enumerate() {
            if !server.is_running() {
                self.network.open(number)?;
                server.start()?;
            }
        }
        Ok(())
    }

    fn kill(&mut self, server: usize) -> Result<(), Error> {
        self.figures.installs += metric(self.metrics[server], INSTALLS)?;
        // First, so that a connection that ends with the process is not accepted again.
        self.network.close(server);
        self.servers[server].kill()
    }

    /// Waits, and fails as soon as something is found.
    fn pause(&mut self, time: Duration) -> Result<(), Error> {
        let end = Instant::now() + time;
        loop {
            self.check()?;
            if Instant::now() >= end {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn check(&mut self) -> Result<(), Error> {
        let found = self.checker.found();
        if !found.is_empty() {
            let shown: Vec<_> = found.iter().take(5).map(|each| format!("\n  {each}")).collect();
            return Err(format!("{} findings:{}", found.len(), shown.concat()).into());
        }
        self.exporter.check()?;
        self.etcd.iter_mut().try_for_each(Process::check)?;
        self.servers.iter_mut().try_for_each(Process::check)
    }

    /// Waits until each connection has an acknowledged write that is new.
    fn wait_for_progress(&mut self) -> Result<(), Error> {
        let counts = |checker: &Checker| -> [u64; WORKERS] {
            std::array::from_fn(|worker| checker.writes[worker].load(Ordering::Relaxed))
        };
        let before = counts(&self.checker);
        let deadline = Instant::now() + PROGRESS_LIMIT;
        while counts(&self.checker).iter().zip(before).any(|(now, before)| *now < before + 2) {
            self.pause(Duration::from_millis(10))?;
            if Instant::now() >= deadline {
                return Err(
                    format!("no progress on each connection within {PROGRESS_LIMIT:?}").into()
                );
            }
        }
        Ok(())
    }

    fn replicas(&self) -> Result<Vec<serde_json::Value>, Error> {
        let words = ["info", NAME, "--json"];
        let info = output(&mut volume_command(&self.binary, &self.coordination, &words))?;
        let info: serde_json::Value = serde_json::from_slice(&info)?;
        Ok(info["replicas"].as_array().ok_or("no replicas")?.clone())
    }

    /// fio on a range of its own: random writes, then a check of all of them.
    fn fio(&self) -> Result<Child, Error> {
        let socket = self.directory.join("nbd.sock");
        let log = File::create(self.directory.join("fio.log"))?;
        let mut fio = Command::new("fio");
        fio.args(["--name=volume", "--ioengine=nbd", "--rw=randwrite", "--bsrange=4k-64k"]);
        fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0"]);
        fio.args(["--size=8m", "--iodepth=4", "--rate=2m"]);
        fio.arg(format!("--offset={FIO_OFFSET}"));
        fio.arg(format!("--uri=nbd+unix:///{NAME}?socket={}", socket.display()));
        fio.current_dir(&self.directory).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        fio.spawn().map_err(|error| format!("fio: {error}").into())
    }

    /// Checks everything a last time, and stops the processes.
    fn finish(mut self) -> Result<(), Error> {
        self.wait_for_progress()?;
        self.checker.stop();
        for worker in self.workers.drain(..) {
            worker.join().map_err(|_| "a worker has panicked")?;
        }
        let content = self.checker.read_all();
        let content = content.map_err(|error| format!("the last read: {error}"))?;
        self.check()?;
        let deadline = Instant::now() + EXACT_LIMIT;
        let groups = loop {
            let replicas = self.replicas()?;
            let mut applied: BTreeMap<u64, Vec<(bool, u64)>> = BTreeMap::new();
            for replica in &replicas {
                let is_exact = replica["state"] == "exact";
                let index = replica["applied"].as_u64().unwrap_or_default();
                let group = replica["group"].as_u64().unwrap_or_default();
                applied.entry(group).or_default().push((is_exact, index));
            }
            let is_same = |all: &Vec<(bool, u64)>| {
                all.len() == SERVERS && all.iter().all(|one| one.0 && one.1 == all[0].1)
            };
            if applied.values().all(is_same) {
                break applied.len();
            }
            if Instant::now() >= deadline {
                let shown: Vec<_> = replicas.iter().map(|each| format!("\n  {each}")).collect();
                let limit = EXACT_LIMIT;
                return Err(format!("not equal after {limit:?}:{}", shown.concat()).into());
            }
            thread::sleep(Duration::from_millis(100));
        };
        for server in 0..SERVERS {
            self.figures.installs += metric(self.metrics[server], INSTALLS)?;
        }
        self.exporter.stop()?;
        // The first one hosts the coordination service of the others.
        self.servers.iter_mut().rev().try_for_each(Process::stop)?;
        if let Some(devices) = &self.devices {
            for server in 0..SERVERS {
                devices.check(server)?;
                devices.compare(server, &content)?;
            }
        }
        self.show(groups);
        Ok(())
    }

    fn show(&self, groups: usize) {
        let figures = &self.figures;
        println!(
            "end: {groups} groups, all replicas exact at the same index; {} writes and {} reads, \
             {} runs of fio",
            self.checker.written(),
            self.checker.reads.load(Ordering::Relaxed),
            figures.fio_runs,
        );
        println!(
            "rounds: {:?}; exporter killed {} times; {} installs; {} writes with two of three \
             servers",
            figures.rounds, figures.exporter_kills, figures.installs, figures.writes_by_two,
        );
        for (what, waits) in
            [("killed", &figures.killed_leader), ("stopped", &figures.stopped_leader)]
        {
            let mut waits: Vec<_> = waits.iter().map(Duration::as_millis).collect();
            waits.sort_unstable();
            println!("longest waits with a leader {what} and all replicas exact, in ms: {waits:?}");
        }
    }
}

/// The servers with leaders, counted from 0.
pub(crate) fn leaders(replicas: &[serde_json::Value]) -> Vec<usize> {
    let leaders = replicas.iter().filter(|replica| replica["role"] == "leader");
    let server = |replica: &serde_json::Value| replica["server"].as_u64().unwrap_or(0) as usize;
    leaders.map(server).filter_map(|server| server.checked_sub(1)).collect()
}

const INSTALLS: &str = "alluvium_volume_installs_completed_total";
