//! Persistent reservations: the device itself refuses the writes of every host but one.
//!
//! A SCSI disk and an NVMe namespace remember which hosts have *registered* with a key, and which
//! of those holds the *reservation*. With the type "write exclusive" only the holder can write;
//! every host can read. `docs/decisions/0009-fence-by-reservation.md` explains the sequence used
//! here.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};

use crate::ReserveError;
use crate::claim::Claim;

/// The key of every owner: `ALLUVWAL`, which `sg_persist` and `nvme` print in hexadecimal as
/// 414c4c555657414c. All owners use the same key so that a successor knows its predecessor's; the
/// device distinguishes them by host.
pub(crate) const KEY: u64 = u64::from_be_bytes(*b"ALLUVWAL");

/// Retries for "unit attention": a device reports each action of another host once, instead of
/// executing this host's next command. Several reports may be pending. Since Linux 6.9 the kernel
/// handles them.
const ATTENTIONS: usize = 5;

/// Why a command was not executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Reservation conflict: another host holds the reservation, or this one is not registered.
    Conflict,
    /// Any other status that the device answered with.
    Status(u32),
    /// The kernel did not send the command.
    System(Errno),
}

/// The reservation commands of one host. The type is always "write exclusive".
pub(crate) trait Reservations {
    /// Registers `key` in place of `before`, the host's current key (0 for none). With `key` 0,
    /// cancels the registration, and with it the reservation if this host holds it. The
    /// registration survives a loss of power.
    fn register(&self, before: u64, key: u64) -> Result<(), Refusal>;

    /// Takes the reservation if no host has it. Succeeds if this host has it already.
    fn reserve(&self, key: u64) -> Result<(), Refusal>;

    /// Cancels the registrations of other hosts under `key`, which is this host's key as well;
    /// aborts their requests; takes over the reservation if one of them holds it.
    fn preempt(&self, key: u64) -> Result<(), Refusal>;
}

/// Takes the reservation for this host, from any host that holds it under our key.
pub(crate) fn acquire(device: &impl Reservations, name: &str) -> Result<(), ReserveError> {
    let failed = |command: &'static str| {
        move |refusal| match refusal {
            Refusal::System(errno) => ReserveError::system(name, command, errno),
            Refusal::Conflict => ReserveError::Held { device: name.into() },
            Refusal::Status(status) => ReserveError::Unsupported {
                device: name.into(),
                reason: format!("it answers {command} with status {status:#x}"),
            },
        }
    };
    // Register as new first: replacing an existing key could break other software on this host that
    // depends on it.
    match retry_attention(|| device.register(0, KEY)) {
        Err(Refusal::Conflict) => retry_attention(|| device.register(KEY, KEY)),
        answer => answer,
    }
    .map_err(failed("REGISTER"))?;
    match retry_attention(|| device.reserve(KEY)) {
        Ok(()) | Err(Refusal::Conflict) => {}
        Err(refusal) => return Err(failed("RESERVE")(refusal)),
    }
    // Preempt even without a predecessor, so that a device that cannot do it is detected now and
    // not when it is needed.
    match retry_attention(|| device.preempt(KEY)) {
        Ok(()) | Err(Refusal::Conflict) => {}
        Err(refusal) => {
            if let Err(left) = retry_attention(|| device.register(KEY, 0)) {
                tracing::warn!("{name}: it may stay reserved for this host: {left:?}");
            }
            return Err(failed("PREEMPT AND ABORT")(refusal));
        }
    }
    // The reservation may be held under another key. In that case the preemption has cancelled our
    // own registration, and still returned success.
    retry_attention(|| device.reserve(KEY)).map_err(|refusal| match refusal {
        Refusal::Conflict | Refusal::Status(_) => ReserveError::Held { device: name.into() },
        refusal => failed("RESERVE")(refusal),
    })
}

/// Repeats a command that was not executed because the device had a unit attention to report. Each
/// of the commands can safely be sent twice.
fn retry_attention(command: impl Fn() -> Result<(), Refusal>) -> Result<(), Refusal> {
    let mut answer = command();
    for _ in 0..ATTENTIONS {
        if !matches!(answer, Err(Refusal::Status(_))) {
            break;
        }
        answer = command();
    }
    answer
}

/// Reserves the block device `name`, which is open as `claim`.
pub(crate) fn acquire_block_device(claim: &Claim, name: &str) -> Result<(), ReserveError> {
    let unsupported = |reason: &str| {
        Err(ReserveError::Unsupported { device: name.into(), reason: reason.into() })
    };
    let stat = rustix::fs::fstat(claim.fd())
        .map_err(|errno| ReserveError::system(name, "reading its status", errno))?;
    let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    let sysfs = format!("/sys/dev/block/{major}:{minor}");
    match part_of(Path::new(&sysfs)) {
        Some(reason) => unsupported(reason),
        None => acquire(&Kernel(claim), name),
    }
}

/// Why a block device cannot be reserved, according to its directory in sysfs: a reservation
/// applies to a whole disk, over one path.
fn part_of(sysfs: &Path) -> Option<&'static str> {
    let has = |name: &str| fs::exists(sysfs.join(name)).unwrap_or(false);
    if has("partition") {
        Some("it is a partition; only a whole disk can be reserved")
    } else if has("dm") {
        Some("it is a device-mapper target; only a disk itself can be reserved, by one path")
    } else {
        None
    }
}

/// The kernel's commands: `linux/pr.h`, and Documentation/block/pr.rst.
struct Kernel<'a>(&'a Claim);

/// `enum pr_type`
const PR_WRITE_EXCLUSIVE: u32 = 1;

/// `struct pr_registration`
#[repr(C)]
struct Registration {
    old_key: u64,
    new_key: u64,
    flags: u32,
    pad: u32,
}

/// `struct pr_reservation`
#[repr(C)]
struct Reservation {
    key: u64,
    kind: u32,
    flags: u32,
}

/// `struct pr_preempt`
#[repr(C)]
struct Preempt {
    old_key: u64,
    new_key: u64,
    kind: u32,
    flags: u32,
}

impl Reservations for Kernel<'_> {
    fn register(&self, before: u64, key: u64) -> Result<(), Refusal> {
        self.send(Command::<200, _>(Registration {
            old_key: before,
            new_key: key,
            flags: 0,
            pad: 0,
        }))
    }

    fn reserve(&self, key: u64) -> Result<(), Refusal> {
        self.send(Command::<201, _>(Reservation { key, kind: PR_WRITE_EXCLUSIVE, flags: 0 }))
    }

    fn preempt(&self, key: u64) -> Result<(), Refusal> {
        // The documentation and the drivers disagree about which of the two keys is this host's.
        // They are equal here.
        let (old_key, new_key) = (key, key);
        let kind = PR_WRITE_EXCLUSIVE;
        self.send(Command::<204, _>(Preempt { old_key, new_key, kind, flags: 0 }))
    }
}

impl Kernel<'_> {
    fn send<const NUMBER: u8, T>(&self, command: Command<NUMBER, T>) -> Result<(), Refusal>
    where
        Command<NUMBER, T>: Ioctl<Output = IoctlOutput>,
    {
        // SAFETY: `Command` is implemented for the three numbers of linux/pr.h with the structures
        // that belong to them.
        let answered = unsafe { rustix::ioctl::ioctl(self.0.fd().as_fd(), command) };
        match answered {
            Ok(answer) => interpret(answer),
            Err(errno) => Err(Refusal::System(errno)),
        }
    }
}

/// Interprets the kernel's answer where it is not an error number but the device's status. Since
/// Linux 6.3 it is an `enum pr_status`; before that, the driver's status: for a SCSI disk in the
/// lowest byte, for NVMe type and code in the lowest 11 bits.
fn interpret(answer: IoctlOutput) -> Result<(), Refusal> {
    const SCSI_RESERVATION_CONFLICT: i32 = 0x18;
    const NVME_RESERVATION_CONFLICT: i32 = 0x83;
    if answer == 0 {
        Ok(())
    } else if answer & 0xff == SCSI_RESERVATION_CONFLICT
        || answer & 0x7ff == NVME_RESERVATION_CONFLICT
    {
        Err(Refusal::Conflict)
    } else {
        Err(Refusal::Status(answer.cast_unsigned()))
    }
}

/// `_IOW('p', NUMBER, T)`, whose return value is the answer.
struct Command<const NUMBER: u8, T>(T);

macro_rules! command {
    ($number:literal, $argument:ty) => {
        // SAFETY: linux/pr.h assigns this structure to this number; the kernel copies from it and
        // writes nothing to it. The pointer is to the structure inside `self`, which outlives the
        // call; the output is the call's own return value.
        unsafe impl Ioctl for Command<$number, $argument> {
            type Output = IoctlOutput;
            const IS_MUTATING: bool = false;

            fn opcode(&self) -> Opcode {
                opcode::write::<$argument>(b'p', $number)
            }

            fn as_ptr(&mut self) -> *mut std::ffi::c_void {
                (&raw mut self.0).cast()
            }

            unsafe fn output_from_ptr(
                answer: IoctlOutput,
                _: *mut std::ffi::c_void,
            ) -> rustix::io::Result<IoctlOutput> {
                Ok(answer)
            }
        }
    };
}

command!(200, Registration);
command!(201, Reservation);
command!(204, Preempt);

#[cfg(test)]
mod tests {
    use super::*;

    /// As `linux/pr.h` computes them on x86_64.
    #[test]
    fn the_ioctl_numbers_match_the_kernel() {
        let register = Command::<200, _>(Registration { old_key: 0, new_key: 0, flags: 0, pad: 0 });
        assert_eq!(u64::from(register.opcode()), 0x4018_70c8);
        let reserve = Command::<201, _>(Reservation { key: 0, kind: 0, flags: 0 });
        assert_eq!(u64::from(reserve.opcode()), 0x4010_70c9);
        let preempt = Command::<204, _>(Preempt { old_key: 0, new_key: 0, kind: 0, flags: 0 });
        assert_eq!(u64::from(preempt.opcode()), 0x4018_70cc);
    }

    #[test]
    fn a_conflict_is_distinguished_from_other_answers() {
        assert_eq!(interpret(0), Ok(()));
        // SCSI, from Linux 6.1 and from later versions; NVMe, with and without "do not retry".
        for conflict in [0x118, 0x18, 0x83, 0x4083] {
            assert_eq!(interpret(conflict), Err(Refusal::Conflict), "{conflict:#x}");
        }
        // Check condition; a path that failed; an unknown NVMe command.
        for other in [0x402, 2, 0xe_0001, 0x4001] {
            let status = other as u32;
            assert_eq!(interpret(other), Err(Refusal::Status(status)), "{other:#x}");
        }
    }

    #[test]
    fn a_permission_error_names_the_capability() {
        let error = ReserveError::system("disk", "REGISTER", Errno::PERM);
        assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}");
        let error = ReserveError::system("disk", "REGISTER", Errno::IO).to_string();
        assert!(error.starts_with("disk: cannot be reserved: REGISTER: Input/output"), "{error}");
    }

    #[test]
    fn a_regular_file_is_not_reserved() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let options = crate::OpenOptions { create_bytes: Some(4096), ..Default::default() };
        let device = crate::open(&path, &options).unwrap();
        let error = device.reserve().unwrap_err();
        assert!(matches!(&error, ReserveError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("regular file"), "{error}");
    }

    #[test]
    fn partitions_and_mapped_devices_are_not_reserved() {
        let sysfs = tempfile::tempdir().unwrap();
        assert_eq!(part_of(sysfs.path()), None);
        fs::create_dir(sysfs.path().join("dm")).unwrap();
        assert!(part_of(sysfs.path()).unwrap().contains("device-mapper"));
        fs::write(sysfs.path().join("partition"), "1").unwrap();
        assert!(part_of(sysfs.path()).unwrap().contains("partition"));
    }
}
