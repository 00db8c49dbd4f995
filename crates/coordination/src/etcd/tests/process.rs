//! Real members of etcd on loopback.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Whether etcd is installed. If it is not, the test is skipped and prints so, or fails if the
/// environment requires it.
pub(super) fn is_installed() -> bool {
    let runs = |program: &str, argument: &str| {
        let mut command = Command::new(program);
        command.arg(argument).env("ETCDCTL_API", "3").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let installed = runs("etcd", "--version") && runs("etcdctl", "version");
    if !installed {
        let text = "etcd or etcdctl not found; `cargo xtask test etcd` installs them";
        assert!(std::env::var_os("ALLUVIUM_ETCD").is_none(), "{text}");
        println!("skipped: {text}");
    }
    installed
}

/// Files of one certificate: its authority, itself, its key.
pub(super) struct Certificates {
    pub(super) ca: PathBuf,
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// A member, in a directory. Dropping it kills it.
pub(super) struct Member {
    name: String,
    pub(super) address: String,
    peer: String,
    cluster: String,
    data: PathBuf,
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Member {
    pub(super) fn start(&mut self) {
        let scheme = if self.arguments.is_empty() { "http" } else { "https" };
        let client = format!("{scheme}://{}", self.address);
        let peer = format!("http://{}", self.peer);
        let log = self.data.with_extension("log");
        let log = fs::File::options().create(true).append(true).open(log).unwrap();
        let mut command = Command::new("etcd");
        command.args(["--name", &self.name, "--data-dir"]).arg(&self.data);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &self.cluster, "--logger", "zap"]);
        command.args(&self.arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.child = Some(command.spawn().unwrap());
    }

    /// Kills the process, as SIGKILL does.
    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Sends a signal.
    pub(super) fn signal(&self, name: &str) {
        let pid = self.child.as_ref().expect("it runs").id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    pub(super) fn data(&self) -> &Path {
        &self.data
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Members of one cluster.
pub(super) struct Members {
    pub(super) members: Vec<Member>,
    pub(super) directory: TempDir,
}

impl Members {
    /// Starts a cluster of this many members.
    pub(super) fn start(count: usize) -> Self {
        Self::start_with(count, |_| Vec::new())
    }

    /// Starts a cluster whose members have these arguments. With any, their clients use TLS.
    pub(super) fn start_with(count: usize, arguments: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let directory = TempDir::new().unwrap();
        let arguments = arguments(directory.path());
        // Bound all at a time, so that they differ.
        let ports: Vec<_> =
            (0..2 * count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<_> =
            ports.iter().map(|port| port.local_addr().unwrap().to_string()).collect();
        drop(ports);
        let peers = &addresses[count..];
        let of_one = |(number, peer): (usize, &String)| format!("m{number}=http://{peer}");
        let cluster = peers.iter().enumerate().map(of_one).collect::<Vec<_>>().join(",");
        let member = |number: usize| Member {
            name: format!("m{number}"),
            address: addresses[number].clone(),
            peer: peers[number].clone(),
            cluster: cluster.clone(),
            data: directory.path().join(format!("m{number}")),
            arguments: arguments.clone(),
            child: None,
        };
        let mut members: Vec<_> = (0..count).map(member).collect();
        members.iter_mut().for_each(Member::start);
        Self { members, directory }
    }

    pub(super) fn addresses(&self) -> Vec<String> {
        self.members.iter().map(|member| member.address.clone()).collect()
    }
}

/// Runs etcdctl against a member with TLS.
pub(super) fn etcdctl(member: &Member, files: &Certificates, arguments: &[&str]) {
    let mut command = Command::new("etcdctl");
    command.env("ETCDCTL_API", "3");
    command.args(["--endpoints", &format!("https://{}", member.address), "--cacert"]);
    command.arg(&files.ca).arg("--cert").arg(&files.certificate).arg("--key").arg(&files.key);
    let output = command.args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "etcdctl {arguments:?}: {text}");
}
