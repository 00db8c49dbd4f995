//! A machine whose disk has a cache that can really be lost.
//!
//! The guest runs Debian's kernel and nothing but the writer. Its disk is served by nbdkit, which keeps what was not flushed
//! in a cache of its own (`nbdkit-cache-filter`, `cache=writeback`) and writes it to the medium, a file, on a flush. SIGKILL
//! takes that cache away, in the middle of a flush perhaps, and leaves the medium as it is.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::exec::{output, quietly};
use crate::setup::{Missing, apt, runs};

const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
/// What the two kinds of disk need, dependencies apart.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod"];
/// The guest is emulated, and shares the processors with other work.
const LIMIT: Duration = Duration::from_secs(180);

/// The first program of the guest: loads the drivers, and starts the writer with the arguments that the kernel's command line
/// holds behind `--`. The second serial port is the journal.
const INIT: &str = "#!/bin/busybox sh
busybox=/bin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs dev /dev
for module in /modules/*; do $busybox insmod $module; done
$busybox stty -F /dev/ttyS1 raw
# Disks of a SCSI adapter are found in the background.
disk=$1; shift
for wait in $($busybox seq 200); do [ -b $disk ] && break; $busybox usleep 50000; done
/bin/numbered write $disk \"$@\" >/dev/ttyS1
status=$?
[ $status -le 1 ] || echo \"ended with $status\" >/dev/ttyS1
while :; do $busybox sleep 1000; done
";

/// How the guest sees its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    /// virtio-blk, which has no FUA: the kernel sends a flush behind each durable write.
    Virtio,
    /// SCSI: durable writes carry FUA.
    Scsi,
}

impl Disk {
    pub(super) const ALL: [Self; 2] = [Self::Virtio, Self::Scsi];

    fn path(self) -> &'static str {
        match self {
            Self::Virtio => "/dev/vda",
            Self::Scsi => "/dev/sda",
        }
    }

    fn devices(self) -> &'static [&'static str] {
        match self {
            Self::Virtio => &["virtio-blk-pci,drive=disk"],
            Self::Scsi => &["virtio-scsi-pci", "scsi-hd,drive=disk,dpofua=on"],
        }
    }
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Virtio => "virtio-blk (flushes)",
            Self::Scsi => "SCSI (FUA)",
        })
    }
}

/// What a machine starts from.
pub(super) struct Image {
    kernel: PathBuf,
    initramfs: PathBuf,
}

impl Image {
    /// Install what is missing, and put `writer` into an initial file system below `directory`.
    pub(super) fn prepare(cache: &Path, directory: &Path, writer: &Path) -> Result<Self, Missing> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Missing::NotAllowed("the guest's kernel is for x86_64".into()));
        }
        let programs = [
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("nbdkit", "nbdkit"),
            ("busybox", "busybox-static"),
        ];
        let missing = programs.iter().filter(|(program, _)| !runs(program, &["--help"]));
        let packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
        if !packages.is_empty() {
            apt(&packages, "the machine whose power is cut")?;
        }
        let packaged = kernel(cache)?;
        let initramfs = directory.join("initramfs");
        pack(&packaged, &directory.join("root"), writer, &initramfs)?;
        let kernel = find(&packaged.join("boot"), &|name| name.starts_with("vmlinuz"))?;
        let kernel = kernel.ok_or_else(|| Error::from(format!("no kernel in {KERNEL_PACKAGE}")))?;
        Ok(Self { kernel, initramfs })
    }
}

/// Debian's kernel for virtual machines, unpacked below `cache` and not installed: this machine's own boot stays as it is.
fn kernel(cache: &Path) -> Result<PathBuf, Missing> {
    let unpacked = cache.join("kernel");
    if unpacked.exists() {
        return Ok(unpacked);
    }
    let depends = output(Command::new("apt-cache").args(["depends", KERNEL_PACKAGE]));
    let depends = String::from_utf8_lossy(&depends.unwrap_or_default()).into_owned();
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    let Some(package) = package else {
        let reason = format!("apt knows no package {KERNEL_PACKAGE}; try `apt-get update`");
        return Err(Missing::NotAllowed(reason));
    };
    println!("setup: apt-get download {package} (the guest's kernel, unpacked, not installed)");
    let unfinished = cache.join("kernel.unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(Error::from)?;
    }
    fs::create_dir_all(&unfinished).map_err(Error::from)?;
    quietly(Command::new("apt-get").current_dir(&unfinished).args(["download", "-q", package]))?;
    let archive = find(&unfinished, &|name| name.ends_with(".deb"))?;
    let archive = archive.ok_or_else(|| Error::from(format!("no archive of {package}")))?;
    quietly(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(&unfinished))?;
    fs::remove_file(&archive).map_err(Error::from)?;
    fs::rename(&unfinished, &unpacked).map_err(Error::from)?;
    Ok(unpacked)
}

/// Make the guest's file system: the writer and busybox with their libraries, and the drivers in the order in which they load.
fn pack(packaged: &Path, root: &Path, writer: &Path, archive: &Path) -> Result<(), Error> {
    for directory in ["bin", "dev", "modules", "proc", "sys"] {
        fs::create_dir_all(root.join(directory))?;
    }
    fs::write(root.join("init"), INIT)?;
    quietly(Command::new("chmod").arg("+x").arg(root.join("init")))?;
    let busybox = output(Command::new("sh").args(["-c", "command -v busybox"]))?;
    let busybox = PathBuf::from(String::from_utf8(busybox)?.trim());
    for (program, name) in [(&*busybox, "busybox"), (writer, "numbered")] {
        fs::copy(program, root.join("bin").join(name))?;
        // Says with an error that there are none.
        let libraries = output(Command::new("ldd").arg(program)).unwrap_or_default();
        for library in String::from_utf8(libraries)?.split_whitespace().map(Path::new) {
            if library.is_absolute() {
                let inside = root.join(library.strip_prefix("/")?);
                fs::create_dir_all(inside.parent().expect("below the root"))?;
                fs::copy(library, inside)?;
            }
        }
    }
    let mut loaded = Vec::new();
    for module in MODULES {
        load_order(&packaged.join("lib/modules"), module, &mut loaded)?;
    }
    for (index, module) in loaded.iter().enumerate() {
        fs::copy(module, root.join(format!("modules/{index:02}.ko")))?;
    }
    let mut cpio = Command::new(&busybox);
    cpio.current_dir(root).args(["cpio", "-o", "-H", "newc"]);
    let mut cpio =
        cpio.stdin(Stdio::piped()).stdout(File::create(archive)?).stderr(Stdio::null()).spawn()?;
    let names = names_below(root, Path::new(""))?;
    cpio.stdin.take().expect("standard input is piped").write_all(names.join("\n").as_bytes())?;
    match cpio.wait()? {
        status if status.success() => Ok(()),
        status => Err(format!("busybox cpio ended with {status}").into()),
    }
}

/// Put the file of `module` behind those that it depends on.
fn load_order(modules: &Path, module: &str, loaded: &mut Vec<PathBuf>) -> Result<(), Error> {
    let file = find(modules, &|name| name.strip_suffix(".ko") == Some(module))?
        .ok_or_else(|| format!("{KERNEL_PACKAGE} has no file {module}.ko"))?;
    if loaded.contains(&file) {
        return Ok(());
    }
    // Section .modinfo: strings, each with a zero behind it.
    let bytes = fs::read(&file)?;
    let depends = bytes.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"depends="));
    let depends = String::from_utf8_lossy(depends.unwrap_or_default()).into_owned();
    for dependency in depends.split(',').filter(|name| !name.is_empty()) {
        load_order(modules, &dependency.replace('-', "_"), loaded)?;
    }
    loaded.push(file);
    Ok(())
}

/// The first file below `directory` whose name is as wanted.
fn find(directory: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>, Error> {
    let names = names_below(directory, Path::new(""))?;
    let found = names.iter().find(|name| wanted(name.rsplit('/').next().unwrap_or(name)));
    Ok(found.map(|name| directory.join(name)))
}

/// The names of all that lies below `root/at`, relative to `root`, directories before what is in them.
fn names_below(root: &Path, at: &Path) -> Result<Vec<String>, Error> {
    let directory = root.join(at);
    let entries = fs::read_dir(&directory);
    let entries = entries.map_err(|error| format!("{}: {error}", directory.display()))?;
    let names: Result<BTreeSet<_>, _> =
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    let mut below = Vec::new();
    for name in names? {
        let name = at.join(name);
        below.push(name.to_str().ok_or("a name that is not UTF-8")?.to_owned());
        if root.join(&name).is_dir() && !root.join(&name).is_symlink() {
            below.extend(names_below(root, &name)?);
        }
    }
    Ok(below)
}

/// What differs from one machine to the next.
pub(super) struct Config<'a> {
    pub(super) disk: Disk,
    /// Whether each page that a flush writes to the medium takes a millisecond, so that a cut falls into a flush.
    pub(super) slow_flushes: bool,
    /// Arguments of `numbered write` behind the disk.
    pub(super) writer: &'a [String],
}

/// A running machine. Dropped, it is gone, cache and all.
pub(super) struct Machine {
    nbdkit: Child,
    qemu: Child,
    journal: Receiver<String>,
    started: Instant,
}

impl Machine {
    /// Start a machine on `medium.img` in `directory`.
    pub(super) fn start(
        image: &Image,
        directory: &Path,
        config: &Config<'_>,
    ) -> Result<Self, Error> {
        let ready = directory.join("nbdkit.pid");
        for stale in [&ready, &directory.join("nbd.sock")] {
            if stale.exists() {
                fs::remove_file(stale)?;
            }
        }
        let log = |name: &str| File::create(directory.join(name));
        // A socket's path is short: 108 bytes, so it is relative. The cache is a file that has no name, below TMPDIR.
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.current_dir(directory).env("TMPDIR", directory);
        nbdkit.args(["--foreground", "--unix", "nbd.sock", "--pidfile", "nbdkit.pid"]);
        nbdkit.args(["--filter=cache", "--filter=delay", "file", "medium.img"]);
        nbdkit.args(["cache=writeback", "cache-min-block-size=4K"]);
        if config.slow_flushes {
            nbdkit.arg("wdelay=1ms");
        }
        let nbdkit = nbdkit.stdin(Stdio::null()).stderr(log("nbdkit.log")?).spawn();
        let mut nbdkit = nbdkit.map_err(|error| format!("nbdkit: {error}"))?;
        while !ready.exists() {
            if let Some(status) = nbdkit.try_wait()? {
                return Err(format!("nbdkit ended with {status}, see nbdkit.log").into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        let mut qemu = Command::new("qemu-system-x86_64");
        // Emulated: what virtual machines allow inside of themselves differs too much.
        qemu.current_dir(directory).args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
        qemu.args(["-smp", "2", "-m", "256", "-nodefaults", "-no-reboot", "-display", "none"]);
        qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        let arguments = config.writer.join(" ");
        let disk = config.disk.path();
        qemu.arg("-append").arg(format!("console=ttyS0 loglevel=4 panic=-1 -- {disk} {arguments}"));
        qemu.args(["-serial", "file:console.log", "-serial", "stdio"]);
        qemu.args(["-drive", "if=none,id=disk,format=raw,cache=writeback,discard=ignore,file=nbd+unix:///?socket=nbd.sock"]);
        for device in config.disk.devices() {
            qemu.args(["-device", device]);
        }
        let qemu =
            qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log("qemu.log")?).spawn();
        let mut qemu = match qemu {
            Ok(qemu) => qemu,
            Err(error) => {
                drop((nbdkit.kill(), nbdkit.wait()));
                return Err(format!("qemu-system-x86_64: {error}").into());
            }
        };
        let lines = BufReader::new(qemu.stdout.take().expect("standard output is piped"));
        let (tx, journal) = channel();
        thread::spawn(move || {
            for line in lines.split(b'\n').map_while(Result::ok) {
                if tx.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { nbdkit, qemu, journal, started: Instant::now() })
    }

    /// The writer's next line.
    pub(super) fn line(&mut self) -> Result<String, Error> {
        let line = self.line_within(LIMIT.saturating_sub(self.started.elapsed()))?;
        line.ok_or_else(|| format!("the writer is silent after {} s", LIMIT.as_secs()).into())
    }

    /// The writer's next line, if it comes soon.
    pub(super) fn line_within(&mut self, wait: Duration) -> Result<Option<String>, Error> {
        match self.journal.recv_timeout(wait) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(format!("the machine has ended: {}", self.qemu.wait()?).into())
            }
        }
    }

    /// Cut the disk's power: what was not flushed is gone. The machine goes on, and finds its disk dead.
    pub(super) fn cut(&mut self) -> Result<(), Error> {
        self.nbdkit.kill()?;
        self.nbdkit.wait()?;
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for child in [&mut self.qemu, &mut self.nbdkit] {
            drop((child.kill(), child.wait()));
        }
    }
}
