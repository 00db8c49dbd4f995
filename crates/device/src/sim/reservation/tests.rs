//! Hosts that take a disk over from each other: only one can write, whatever happens between the
//! commands, including the death of a host.

use std::cell::Cell;

use super::*;
use crate::sim::{Mode, SimOptions};
use crate::{AlignedBuf, Device, DeviceError, DeviceOffset, PAGE_BYTES, Request, SharedDevice};

fn disk() -> SimDisk {
    SimDisk::new(SimOptions::default())
}

fn filled(byte: u8) -> crate::SharedBuf {
    let mut buf = AlignedBuf::zeroed(PAGE_BYTES);
    buf.fill(byte);
    buf.freeze()
}

fn write(host: &SimDisk, byte: u8) -> Result<(), DeviceError> {
    let device: SharedDevice = host.device();
    device.write_durable(DeviceOffset(0), filled(byte))
}

fn take(host: &SimDisk) -> Result<(), ReserveError> {
    Device::reserve(host)
}

fn holds(host: &SimDisk) -> bool {
    host.0
        .medium
        .state
        .lock()
        .reservation
        .as_ref()
        .unwrap()
        .holder
        .as_ref()
        .is_some_and(|holder| Arc::ptr_eq(holder, &host.0.core))
}

#[test]
fn only_the_last_host_to_reserve_can_write() {
    let first = disk();
    let second = first.other_host();
    write(&first, 1).unwrap();
    write(&second, 2).unwrap();
    for (old, new) in [(&first, &second), (&second, &first)] {
        // Each round needs a fresh latch: a refused write has latched.
        let (old, new) = (old.clone(), new.clone());
        take(&old).unwrap();
        take(&old).unwrap();
        take(&new).unwrap();
        assert!(holds(&new) && !holds(&old));
    }
    write(&first, 3).unwrap();
    let error = write(&second, 4).unwrap_err();
    assert!(error.is_reserved(), "{error}");
    assert!(error.to_string().ends_with("another host has reserved the device"), "{error}");
    assert!(second.failure().unwrap().is_reserved(), "it has latched");
    let device: SharedDevice = second.device();
    assert_eq!(device.read(DeviceOffset(0), PAGE_BYTES).unwrap()[..], [3; PAGE_BYTES]);
    assert_eq!(first.counters().reserved_writes, 1);
    write(&first, 5).unwrap();
}

#[test]
fn in_flight_writes_of_the_old_owner_are_refused() {
    let old = disk();
    take(&old).unwrap();
    old.set_mode(Mode::Queued);
    let (tx, rx) = std::sync::mpsc::channel();
    let request = Request::Write { at: DeviceOffset(0), buf: filled(1), durable: true };
    old.submit(request, Box::new(move |result| tx.send(result).unwrap()));
    let new = old.other_host();
    take(&new).unwrap();
    old.set_mode(Mode::Immediate);
    assert!(rx.recv().unwrap().unwrap_err().is_reserved());
    assert_eq!(new.peek(0, 1), [0]);
    write(&new, 2).unwrap();
}

#[test]
fn a_reservation_survives_a_power_cut_and_the_death_of_its_owner() {
    let first = disk();
    let second = first.other_host();
    take(&first).unwrap();
    let first = first.power_cut();
    assert!(write(&first.other_host(), 1).is_err());
    write(&first, 2).unwrap();
    // `second` refers to the disk before the power cut, which has ended.
    assert!(write(&second, 3).is_err());
    let first = first.process_crash();
    assert!(write(&first.other_host(), 4).is_err());
    write(&first, 5).unwrap();
    first.lose_reservation();
    write(&first.other_host(), 6).unwrap();
}

/// Passes one host's commands on, with an action before each or a failure in place of one.
struct Steps<'a> {
    host: &'a SimDisk,
    sent: Cell<usize>,
    before: &'a dyn Fn(usize) -> Result<(), Refusal>,
}

impl Steps<'_> {
    fn step(&self) -> Result<(), Refusal> {
        let step = self.sent.get();
        self.sent.set(step + 1);
        (self.before)(step)
    }
}

impl Reservations for Steps<'_> {
    fn register(&self, before: u64, key: u64) -> Result<(), Refusal> {
        self.step().and_then(|()| self.host.register(before, key))
    }

    fn reserve(&self, key: u64) -> Result<(), Refusal> {
        self.step().and_then(|()| Reservations::reserve(self.host, key))
    }

    fn preempt(&self, key: u64) -> Result<(), Refusal> {
        self.step().and_then(|()| self.host.preempt(key))
    }
}

fn take_by_steps(
    host: &SimDisk,
    before: &dyn Fn(usize) -> Result<(), Refusal>,
) -> Result<usize, ReserveError> {
    let steps = Steps { host, sent: Cell::new(0), before };
    reserve::acquire(&steps, "steps").map(|()| steps.sent.get())
}

#[test]
fn a_host_that_dies_while_reserving_does_not_block_others() {
    for owned in [false, true] {
        for died_at in 0..4 {
            let owner = disk();
            if owned {
                take(&owner).unwrap();
            }
            let dead = owner.other_host();
            let dies = |step| match step == died_at {
                true => Err(Refusal::System(rustix::io::Errno::IO)),
                false => Ok(()),
            };
            take_by_steps(&dead, &dies).unwrap_err();
            let successor = owner.other_host();
            take(&successor).unwrap();
            write(&successor, 1).unwrap();
            assert!(write(&owner, 2).is_err() && write(&dead, 3).is_err());
        }
    }
    assert_eq!(take_by_steps(&disk(), &|_| Ok(())).unwrap(), 4, "all steps were tried");
}

/// One host's takeover happens between two commands of another: exactly one of them holds the
/// reservation, and both know it.
#[test]
fn concurrent_reservations_have_one_winner() {
    let (mut refused, mut later) = (0, 0);
    for owned in [false, true] {
        for comes_at in 0..4 {
            let owner = disk();
            if owned {
                take(&owner).unwrap();
            }
            let (slow, quick) = (owner.other_host(), owner.other_host());
            let between = |step| {
                if step == comes_at {
                    take(&quick).unwrap();
                }
                Ok(())
            };
            match take_by_steps(&slow, &between) {
                // It came later than the other.
                Ok(_) => {
                    assert!(holds(&slow));
                    assert!(write(&slow, 1).is_ok() && write(&quick, 2).is_err());
                    later += 1;
                }
                Err(_) => {
                    assert!(holds(&quick));
                    assert!(write(&quick, 1).is_ok() && write(&slow, 2).is_err());
                    refused += 1;
                }
            }
            assert!(write(&owner, 3).is_err());
        }
    }
    assert!(refused > 2 && later > 1, "{refused} refused, {later} later");
}

#[test]
fn a_reservation_with_another_key_is_left_alone() {
    let stranger = disk();
    stranger.reserve_with_other_key();
    let host = stranger.other_host();
    for _ in 0..2 {
        let error = take(&host).unwrap_err();
        assert!(matches!(error, ReserveError::Held { .. }), "{error}");
    }
    assert!(holds(&stranger));
    write(&stranger, 1).unwrap();
    assert!(write(&host, 2).unwrap_err().is_reserved());
}

/// For example a cluster's own fencing, which identifies a host by its registered key.
#[test]
fn registrations_of_other_software_on_this_host_stay() {
    for holder in ["this host", "another host", "no host"] {
        let host = disk();
        let other = host.other_host();
        match holder {
            "this host" => host.reserve_with_other_key(),
            "another host" => other.reserve_with_other_key(),
            _ => {}
        }
        if holder != "this host" {
            Reservations::register(&host, 0, reserve::KEY + 2).unwrap();
        }
        let key = |host: &SimDisk| {
            let state = host.0.medium.state.lock();
            state.reservation.as_ref().unwrap().key_of(&host.0.core)
        };
        let before = (key(&host), key(&other), holds(&host), holds(&other));
        for _ in 0..2 {
            let error = take(&host).unwrap_err();
            assert!(matches!(error, ReserveError::Held { .. }), "{holder}: {error}");
        }
        assert_eq!((key(&host), key(&other), holds(&host), holds(&other)), before, "{holder}");
    }
}

#[test]
fn an_unsupporting_disk_returns_an_error_and_stays_unreserved() {
    let plain = SimDisk::new(SimOptions { reservations: false, ..SimOptions::default() });
    let error = take(&plain).unwrap_err();
    assert!(matches!(&error, ReserveError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("it answers REGISTER with status 0x402"), "{error}");
    write(&plain, 1).unwrap();

    // A disk that supports everything but preemption.
    let disk = disk();
    let third = |step| match step {
        // The answer to every retry too.
        2..8 => Err(Refusal::Status(UNKNOWN_COMMAND)),
        _ => Ok(()),
    };
    let error = take_by_steps(&disk, &third).unwrap_err();
    assert!(error.to_string().contains("PREEMPT AND ABORT"), "{error}");
    write(&disk.other_host(), 1).unwrap();
}
