//! A virtual machine whose disk has a volatile cache that can really be lost.
//!
//! The guest runs Debian's kernel and nothing but the writer. Its disk is served by nbdkit, which
//! keeps unflushed data in its own cache (`nbdkit-cache-filter`, `cache=writeback`) and writes it
//! to the medium, a file, on a flush. SIGKILL discards that cache, possibly in the middle of a
//! flush, and leaves the medium as it is.

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

/// Kernel modules for the two kinds of disk, without their dependencies.
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
# Disks of a SCSI adapter are found in the background.
disk=$1; shift
for wait in $($busybox seq 200); do [ -b $disk ] && break; $busybox usleep 50000; done
/bin/numbered write $disk \"$@\" >/dev/ttyS1
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

/// Builds the image that the machines start from: an initial file system with the `writer`, below
/// `directory`.
pub(super) fn image(cache: &Path, directory: &Path, writer: &Path) -> Result<Image, Missing> {
    if !runs("nbdkit", &["--help"]) {
        apt(&["nbdkit"], "the disk whose power is cut")?;
    }
    let programs = &[(writer, "numbered")];
    let contents = Contents { init: INIT, modules: &MODULES, programs, unpacked: None };
    Image::prepare(cache, directory, &contents)
}

/// The settings of one machine.
pub(super) struct Config<'a> {
    pub(super) disk: Disk,
    /// Whether each page that a flush writes to the medium takes a millisecond, so that a cut hits
    /// a flush.
    pub(super) slow_flushes: bool,
    /// Arguments of `numbered write` after the disk.
    pub(super) writer: &'a [String],
}

/// A running machine. Dropping it ends it and discards the disk's cache.
pub(super) struct Machine {
    nbdkit: Child,
    qemu: Child,
    journal: Receiver<String>,
    started: Instant,
}

impl Machine {
    /// Starts a machine on `medium.img` in `directory`.
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
        // The path of a socket is limited to 108 bytes, so it is relative. The cache is an unnamed
        // file below TMPDIR.
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
        // Emulated: support for nested virtualization differs too much between machines.
        qemu.current_dir(directory).args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
        qemu.args(["-smp", "2", "-m", "256", "-nodefaults", "-no-reboot", "-display", "none"]);
        qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        let arguments = config.writer.join(" ");
        let disk = config.disk.path();
        qemu.arg("-append").arg(format!("console=ttyS0 loglevel=4 panic=-1 -- {disk} {arguments}"));
        qemu.args(["-serial", "file:console.log", "-serial", "stdio"]);
        let nbd = "file=nbd+unix:///?socket=nbd.sock";
        qemu.arg("-drive");
        qemu.arg(format!("if=none,id=disk,format=raw,cache=writeback,discard=ignore,{nbd}"));
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

    /// Cuts the disk's power: unflushed data is lost. The machine keeps running, and finds its disk
    /// dead.
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
