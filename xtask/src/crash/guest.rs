//! A virtual machine whose disks have volatile caches that can really be lost.
//!
//! The guest runs Debian's kernel and nothing but the writer. Its disks are served by nbdkit, which
//! keeps unflushed data in its own cache (`nbdkit-cache-filter`, `cache=writeback`) and writes it
//! to the medium, a file, on a flush. Each disk has its own, so that a flush of one does not help
//! another. SIGKILL discards that cache, possibly in the middle of a flush, and leaves the medium
//! as it is.

use std::fmt;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::image::{Contents, Image};
use crate::setup::{Missing, apt, runs};

/// Kernel modules for the two kinds of disk, without their dependencies. ext4 is built in.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod"];
/// The guest is emulated and shares the processors with other work.
const LIMIT: Duration = Duration::from_secs(180);

/// The first program of the guest: loads the drivers and starts the writer with the arguments after
/// `--` on the kernel's command line. The second serial port is the journal.
const INIT: &str = "#!/bin/busybox sh
busybox=/bin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs dev /dev
for module in /modules/*; do $busybox insmod $module; done
$busybox stty -F /dev/ttyS1 raw
$busybox ip addr add 127.0.0.1/8 dev lo
$busybox ip link set lo up
# Disks of a SCSI adapter are found in the background, and in any order.
find() {
    for wait in $($busybox seq 200); do
        for disk in /sys/block/*; do
            if $busybox grep -q $1 $disk/serial $disk/device/vpd_pg80 2>/dev/null; then
                $busybox ln -s /dev/${disk##*/} /$1
                return
            fi
        done
        $busybox usleep 50000
    done
}
program=$1; disks=$2; shift 2
for number in $($busybox seq 0 $((disks - 1))); do find disk$number; done
disk=/disk0
if [ $program = volumes ]; then
    disk=/disk
    $busybox mkdir /registry
    $busybox mount -t ext4 /disk$((disks - 1)) /registry || echo failed to mount >/dev/ttyS1
fi
/bin/$program write $disk \"$@\" >/dev/ttyS1
status=$?
[ $status -le 1 ] || echo \"ended with $status\" >/dev/ttyS1
while :; do $busybox sleep 1000; done
";

/// The guest's disk interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    /// virtio-blk, which has no FUA: the kernel sends a flush after each durable write.
    Virtio,
    /// SCSI: durable writes carry FUA.
    Scsi,
}

impl Disk {
    pub(super) const ALL: [Self; 2] = [Self::Virtio, Self::Scsi];

    /// The options of QEMU for a disk, whose serial number is its name.
    fn device(self, name: &str) -> String {
        match self {
            Self::Virtio => format!("virtio-blk-pci,drive={name},serial={name}"),
            Self::Scsi => format!("scsi-hd,drive={name},serial={name},dpofua=on"),
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

/// The writer of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// `sim/src/bin/numbered.rs`, on one disk.
    Numbered,
    /// `sim/src/bin/volumes.rs`, on disks of which the last one has a file system.
    Volumes,
}

impl Program {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Numbered => "numbered",
            Self::Volumes => "volumes",
        }
    }

    /// MiB of memory.
    fn memory(self) -> &'static str {
        match self {
            Self::Numbered => "256",
            Self::Volumes => "1024",
        }
    }
}

/// Builds the image that the machines start from: an initial file system with the `writer`, below
/// `directory`.
pub(super) fn image(
    cache: &Path,
    directory: &Path,
    program: Program,
    writer: &Path,
) -> Result<Image, Missing> {
    if !runs("nbdkit", &["--help"]) {
        apt(&["nbdkit"], "the disk whose power is cut")?;
    }
    let programs = &[(writer, program.name())];
    let contents = Contents { init: INIT, modules: &MODULES, programs, unpacked: None };
    Image::prepare(cache, directory, &contents)
}

/// The settings of one machine.
pub(super) struct Config<'a> {
    pub(super) program: Program,
    pub(super) disk: Disk,
    /// The medium of each disk: a file in the machine's directory.
    pub(super) media: &'a [&'a str],
    /// Whether each page that a flush writes to the medium takes a millisecond, so that a cut hits
    /// a flush.
    pub(super) slow_flushes: bool,
    /// Arguments of the program's command `write` after the disk.
    pub(super) writer: &'a [String],
}

/// Starts nbdkit for a disk. Dropping it discards the disk's cache.
struct Nbdkit(Child);

impl Nbdkit {
    fn start(
        directory: &Path,
        number: usize,
        medium: &str,
        slow_flushes: bool,
    ) -> Result<Self, Error> {
        let file = |what: &str| format!("nbdkit{number}.{what}");
        let ready = directory.join(file("pid"));
        for stale in [&ready, &directory.join(file("sock"))] {
            if stale.exists() {
                fs::remove_file(stale)?;
            }
        }
        let log = File::create(directory.join(file("log")))?;
        // The path of a socket is limited to 108 bytes, so it is relative. The cache is an unnamed
        // file below TMPDIR.
        let mut nbdkit = Command::new("nbdkit");
        nbdkit.current_dir(directory).env("TMPDIR", directory);
        nbdkit.args(["--foreground", "--unix", &file("sock"), "--pidfile", &file("pid")]);
        nbdkit.args(["--filter=cache", "--filter=delay", "file", medium]);
        nbdkit.args(["cache=writeback", "cache-min-block-size=4K"]);
        if slow_flushes {
            nbdkit.arg("wdelay=1ms");
        }
        let nbdkit = nbdkit.stdin(Stdio::null()).stderr(log).spawn();
        let mut nbdkit = Self(nbdkit.map_err(|error| format!("nbdkit: {error}"))?);
        while !ready.exists() {
            if let Some(status) = nbdkit.0.try_wait()? {
                return Err(format!("nbdkit ended with {status}, see {}", file("log")).into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(nbdkit)
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        drop((self.0.kill(), self.0.wait()));
    }
}

/// A running machine. Dropping it ends it and discards the caches of its disks.
pub(super) struct Machine {
    disks: Vec<Nbdkit>,
    qemu: Child,
    journal: Receiver<String>,
    started: Instant,
}

impl Machine {
    /// Starts a machine in `directory`.
    pub(super) fn start(
        image: &Image,
        directory: &Path,
        config: &Config<'_>,
    ) -> Result<Self, Error> {
        let media = config.media.iter().enumerate();
        let disks = media
            .map(|(number, medium)| Nbdkit::start(directory, number, medium, config.slow_flushes));
        let disks = disks.collect::<Result<Vec<_>, _>>()?;
        let mut qemu = Command::new("qemu-system-x86_64");
        // Emulated: support for nested virtualization differs too much between machines.
        qemu.current_dir(directory).args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
        qemu.args(["-smp", "2", "-m", config.program.memory(), "-nodefaults", "-no-reboot"]);
        qemu.args(["-display", "none"]);
        qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        let (program, arguments) = (config.program.name(), config.writer.join(" "));
        let arguments = format!("{program} {} {arguments}", disks.len());
        qemu.arg("-append").arg(format!("console=ttyS0 loglevel=4 panic=-1 -- {arguments}"));
        qemu.args(["-serial", "file:console.log", "-serial", "stdio"]);
        if config.disk == Disk::Scsi {
            qemu.args(["-device", "virtio-scsi-pci"]);
        }
        for number in 0..disks.len() {
            let nbd = format!("file=nbd+unix:///?socket=nbdkit{number}.sock");
            let format = "format=raw,cache=writeback,discard=ignore";
            let name = format!("disk{number}");
            qemu.arg("-drive").arg(format!("if=none,id={name},{format},{nbd}"));
            qemu.arg("-device").arg(config.disk.device(&name));
        }
        let log = File::create(directory.join("qemu.log"))?;
        let qemu = qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn();
        let mut qemu = qemu.map_err(|error| format!("qemu-system-x86_64: {error}"))?;
        let lines = BufReader::new(qemu.stdout.take().expect("standard output is piped"));
        let (tx, journal) = channel();
        thread::spawn(move || {
            for line in lines.split(b'\n').map_while(Result::ok) {
                if tx.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { disks, qemu, journal, started: Instant::now() })
    }

    /// Returns the writer's next line.
    pub(super) fn line(&mut self) -> Result<String, Error> {
        let line = self.line_within(LIMIT.saturating_sub(self.started.elapsed()))?;
        line.ok_or_else(|| format!("no line of the writer within {} s", LIMIT.as_secs()).into())
    }

    /// Returns the writer's next line if it arrives within `wait`.
    pub(super) fn line_within(&mut self, wait: Duration) -> Result<Option<String>, Error> {
        match self.journal.recv_timeout(wait) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(format!("the machine ended: {}", self.qemu.wait()?).into())
            }
        }
    }

    /// Cuts the power of the disks: unflushed data is lost. The machine keeps running, and finds
    /// its disks dead.
    ///
    /// One disk dies after the other, within milliseconds. That is as good as one moment: a disk
    /// that is dead acknowledges nothing, so nothing that happens in between depends on it.
    pub(super) fn cut(&mut self) -> Result<(), Error> {
        for disk in &mut self.disks {
            disk.0.kill()?;
        }
        self.disks.clear();
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop((self.qemu.kill(), self.qemu.wait()));
    }
}
