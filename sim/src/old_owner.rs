//! A log whose owner continues although another one has opened it, as if both were machines that
//! reach the same disk.

use std::sync::Arc;

use alluvium_device::sim::Mode;
use alluvium_wal::{LogOffset, WalError};

use crate::Profile;
use crate::plug::Plug;
use crate::ring::{PAGE, SLOT_AT};
use crate::simulation::Simulation;
use crate::traffic::Traffic;

/// An old owner.
pub(crate) struct OldOwner {
    traffic: Traffic,
    pub(crate) plug: Arc<Plug>,
    /// Whether the disk refuses its writes.
    pub(crate) fenced: bool,
    /// The durable offset when it was taken over.
    durable: LogOffset,
    /// Whether it appends nothing more, so that it first meets its successor at a header.
    quiet: bool,
}

impl Simulation {
    /// Keeps the owner of the log running as an old owner.
    pub(crate) fn take_over(
        &mut self,
        mut traffic: Traffic,
        plug: Arc<Plug>,
    ) -> Result<OldOwner, String> {
        let Self { model, random, outcome, .. } = self;
        let quiet = random.chance(0.5);
        for _ in 0..if quiet { 0 } else { random.below(20) } {
            traffic.append(model, random, outcome)?;
        }
        traffic.trim(model, random);
        if quiet {
            self.disk.set_mode(Mode::Immediate);
        }
        let fenced = self.plan.profile == Profile::PowerCut || self.random.chance(0.3);
        plug.set_taken_over(fenced);
        // Requests that have reached the disk are executed, and the next owner finds the result.
        // Requests that follow from them are late.
        self.disk.set_mode(Mode::Immediate);
        let Self { model, random, outcome, .. } = self;
        traffic.poll_futures(model, outcome)?;
        for _ in 0..if quiet { 0 } else { random.below(10) } {
            traffic.append(model, random, outcome)?;
        }
        if random.chance(0.7) {
            traffic.trim(model, random);
        }
        outcome.takeovers += 1;
        outcome.fenced += u64::from(fenced);
        self.trace(|| format!("-- taken over, fenced: {fenced}"));
        Ok(OldOwner { durable: traffic.wal.durable(), traffic, plug, fenced, quiet })
    }

    /// Lets the old owner continue as if nothing had happened.
    pub(crate) fn old_owner_acts(&mut self, old_owner: &mut OldOwner) -> Result<(), String> {
        match self.random.below(8) {
            0..4 if !old_owner.quiet => {
                old_owner.traffic.append_late(&mut self.model, &mut self.random);
            }
            4 => old_owner.traffic.trim_late(),
            _ => drop(old_owner.plug.arrive()),
        }
        if old_owner.traffic.wal.stopped().is_some() {
            old_owner.traffic.check_stopped()?;
        }
        old_owner.check_fence()
    }

    /// Lets the old owner try to close the log.
    pub(crate) fn old_owner_closes(&mut self, mut old_owner: OldOwner) -> Result<(), String> {
        old_owner.plug.release_all();
        let headers = self.headers();
        let result = old_owner.traffic.wal.clone().close();
        self.trace(|| format!("the old owner closes: {result:?}"));
        match result {
            Err(WalError::Fenced { .. }) => self.outcome.noticed += 1,
            Err(WalError::Device(_)) => {}
            other => return Err(format!("an owner that was taken over closed the log: {other:?}")),
        }
        if self.headers() != headers {
            return Err("an old owner has written a header while closing".into());
        }
        old_owner.traffic.check_stopped()?;
        old_owner.check_fence()?;
        self.old_owner_ends(Some(old_owner));
        Ok(())
    }

    /// Ends the old owner, because its disk is gone or it is no longer needed.
    pub(crate) fn old_owner_ends(&mut self, old_owner: Option<OldOwner>) {
        if let Some(old_owner) = old_owner {
            let counts = old_owner.plug.finish();
            self.outcome.refused_writes += counts.refused;
            self.outcome.late_writes += counts.landed;
            self.outcome.late_headers += counts.headers;
        }
    }

    fn headers(&self) -> [Vec<u8>; 2] {
        SLOT_AT.map(|at| self.disk.peek(at, PAGE as usize))
    }
}

impl OldOwner {
    fn check_fence(&self) -> Result<(), String> {
        let durable = self.traffic.wal.durable();
        match self.fenced && durable != self.durable {
            true => Err(format!("an old owner acknowledged up to {durable} behind a fence")),
            false => Ok(()),
        }
    }
}
