//! The fence test: after a takeover, a disk shared by two hosts refuses the previous owner, and the
//! log is complete.
//!
//! One machine plays all parts. Linux's SCSI target (LIO) serves a file as a disk at two iSCSI
//! targets on loopback, and the machine logs in to both: two disks for the kernel, two hosts for
//! the target. The actor is `sim/src/bin/fence.rs`.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::exec::{cargo, quietly};
use crate::image::{Contents, Image, unpack};
use crate::report::{Case, Report};
use crate::setup::Missing;
use crate::{Error, FenceOptions};

/// The guest is emulated and shares the processors with other work.
const LIMIT: Duration = Duration::from_secs(300);

const MODULES: [&str; 5] =
    ["sd_mod", "target_core_mod", "target_core_file", "iscsi_target_mod", "iscsi_tcp"];

/// The first program of the guest: sets up the disk and the two paths to it, then starts the actor
/// with the arguments after `--` on the kernel's command line. The second serial port is the
/// journal. LIO stores reservations in `/var/target/pr`.
const INIT: &str = "#!/bin/busybox sh
busybox=/bin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t sysfs sysfs /sys
$busybox mount -t devtmpfs dev /dev
$busybox mkdir -p /var/target/pr /run /etc/iscsi
for module in /modules/*; do $busybox insmod $module; done
$busybox mount -t configfs config /sys/kernel/config
$busybox stty -F /dev/ttyS1 raw
$busybox ip addr add 127.0.0.1/8 dev lo
$busybox ip link set lo up
target=/sys/kernel/config/target
disk=$target/core/fileio_0/disk
$busybox truncate -s 16777216 /medium
$busybox mkdir -p $disk
echo fd_dev_name=/medium,fd_dev_size=16777216 >$disk/control
echo 1 >$disk/enable
echo alluvium >$disk/wwn/vpd_unit_serial
echo 1 >$disk/attrib/emulate_write_cache
$busybox mkdir $target/iscsi
for host in a b; do
    port=$target/iscsi/iqn.2026-01.invalid.disk:$host/tpgt_1
    $busybox mkdir -p $port/np/127.0.0.1:3260 $port/lun/lun_0
    $busybox ln -s $disk $port/lun/lun_0/port
    for attribute in generate_node_acls=1 cache_dynamic_acls=1 \\
        demo_mode_write_protect=0 authentication=0; do
        echo ${attribute#*=} >$port/attrib/${attribute%=*}
    done
    echo 1 >$port/enable
    /bin/iscsistart -i iqn.2026-01.invalid.host:$host \\
        -t iqn.2026-01.invalid.disk:$host -g 1 -a 127.0.0.1 -p 3260
done
for disk in /dev/sda /dev/sdb; do
    for wait in $($busybox seq 200); do [ -b $disk ] && break; $busybox usleep 50000; done
done
/bin/fence /dev/sda /dev/sdb \"$@\" >/dev/ttyS1
echo \"ended with $?\" >/dev/ttyS1
$busybox sleep 1
$busybox poweroff -f
";

/// `cargo xtask fence`.
pub(crate) fn campaign(root: &Path, options: &FenceOptions) -> Result<Report, Error> {
    let name = format!("{} takeovers of a reserved disk", options.rounds);
    let mut report = Report::default();
    report.suite("fence", || {
        let directory = root.join("target/e2e/run/fence");
        let image = match prepare(root, &directory) {
            Ok(image) => image,
            Err(Missing::NotAllowed(reason)) => {
                println!("skipped: {reason}");
                return Ok(vec![Case::skipped(&name, reason)]);
            }
            Err(Missing::Failed(error)) => return Err(error),
        };
        let case = Case::run(&name, || run(&image, &directory, options.rounds));
        if case.has_failed() {
            println!("console and journal are kept in {}", directory.display());
        } else {
            fs::remove_dir_all(&directory)?;
        }
        Ok(vec![case])
    });
    Ok(report)
}

fn prepare(root: &Path, directory: &Path) -> Result<Image, Missing> {
    if directory.exists() {
        fs::remove_dir_all(directory).map_err(Error::from)?;
    }
    fs::create_dir_all(directory).map_err(Error::from)?;
    let cache = root.join("target/e2e/crash");
    let initiator = cache.join("initiator");
    if !initiator.exists() {
        unpack(&initiator, &["open-iscsi", "libopeniscsiusr"], "the guest's iSCSI initiator")?;
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let actor = root.join(target).join("debug/fence");
    let package = ["--package", "alluvium-sim", "--bin", "fence"];
    quietly(cargo(root).args(["build", "--locked"]).args(package))?;
    let iscsistart = initiator.join("sbin/iscsistart");
    let contents = Contents {
        init: INIT,
        modules: &MODULES,
        programs: &[(&actor, "fence"), (&iscsistart, "iscsistart")],
        unpacked: Some(&initiator),
    };
    Image::prepare(&cache, directory, &contents)
}

/// Runs the machine to its end, and checks the last line of its actor.
fn run(image: &Image, directory: &Path, rounds: u32) -> Result<(), Error> {
    let mut qemu = Command::new("qemu-system-x86_64");
    // Emulated: support for nested virtualization differs too much between machines.
    qemu.current_dir(directory).args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
    qemu.args(["-smp", "2", "-m", "256", "-nodefaults", "-no-reboot", "-display", "none"]);
    qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
    qemu.arg("-append").arg(format!("console=ttyS0 loglevel=4 panic=-1 -- --rounds {rounds}"));
    qemu.args(["-serial", "file:console.log", "-serial", "file:journal.log"]);
    qemu.stdin(Stdio::null()).stdout(Stdio::null());
    let qemu = qemu.stderr(File::create(directory.join("qemu.log"))?).spawn();
    let qemu = qemu.map_err(|error| format!("qemu-system-x86_64: {error}"))?;
    let ended = wait(qemu)?;
    let journal = fs::read(directory.join("journal.log"))?;
    let journal = String::from_utf8_lossy(&journal);
    print!("{journal}");
    match journal.lines().last() {
        Some("ended with 0") => Ok(()),
        Some(line) => Err(line.into()),
        None if ended => Err("no output of the actor, see console.log".into()),
        None => Err(format!("no output within {} s, see console.log", LIMIT.as_secs()).into()),
    }
}

/// Returns whether the machine ended by itself.
fn wait(mut machine: Child) -> Result<bool, Error> {
    let started = Instant::now();
    while machine.try_wait()?.is_none() {
        if started.elapsed() > LIMIT {
            machine.kill()?;
            machine.wait()?;
            return Ok(false);
        }
        thread::sleep(Duration::from_millis(100));
    }
    Ok(true)
}
