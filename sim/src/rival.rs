//! A log whose owner continues although another one has opened it, as if both were machines that
//! reach the same disk.

use std::sync::Arc;

use alluvium_device::sim::Mode;
use alluvium_wal::{LogOffset, WalError};

use crate::Profile;
use crate::life::Run;
use crate::plug::Plug;
use crate::ring::{PAGE, SLOT_AT};
use crate::traffic::Traffic;

/// An old owner.
pub(crate) struct Rival {
    traffic: Traffic,
    pub(crate) plug: Arc<Plug>,
    /// Whether the disk refuses its writes.
    pub(crate) fenced: bool,
    /// The durable offset when it was taken over.
    durable: LogOffset,
    /// Whether it appends nothing more, so that it first meets its successor at a header.
    quiet: bool,
}

impl Run {
    /// Keeps the owner of the log running as an old owner.
    pub(crate) fn take_over(
        &mut self,
        mut traffic: Traffic,
        plug: Arc<Plug>,
    ) -> Result<Rival, String> {
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
        plug.set_adrift(fenced);
        // Requests that have reached the disk are executed, and the next owner finds the result.
        // Requests that follow from them are late.
        self.disk.set_mode(Mode::Immediate);
        let Self { model, random, outcome, .. } = self;
        traffic.settle(model, outcome)?;
        for _ in 0..if quiet { 0 } else { random.below(10) } {
            traffic.append(model, random, outcome)?;
        }
        if random.chance(0.7) {
            traffic.trim(model, random);
        }
        outcome.takeovers += 1;
        outcome.fenced += u64::from(fenced);
        self.say(|| format!("-- taken over, fenced: {fenced}"));
        Ok(Rival { durable: traffic.wal.durable(), traffic, plug, fenced, quiet })
    }

    /// Lets the old owner continue as if nothing had happened.
    pub(crate) fn rival_acts(&mut self, rival: &mut Rival) -> Result<(), String> {
        match self.random.below(8) {
            0..4 if !rival.quiet => rival.traffic.append_late(&mut self.model, &mut self.random),
            4 => rival.traffic.trim_late(),
            _ => drop(rival.plug.arrive()),
        }
        if rival.traffic.wal.stopped().is_some() {
            rival.traffic.abandoned()?;
        }
        rival.check_fence()
    }

    /// Lets the old owner try to close the log.
    pub(crate) fn rival_closes(&mut self, mut rival: Rival) -> Result<(), String> {
        rival.plug.hurry();
        let headers = self.headers();
        let result = rival.traffic.wal.clone().close();
        self.say(|| format!("the old owner closes: {result:?}"));
        match result {
            Err(WalError::Fenced { .. }) => self.outcome.noticed += 1,
            Err(WalError::Device(_)) => {}
            other => return Err(format!("an owner that was taken over closed the log: {other:?}")),
        }
        if self.headers() != headers {
            return Err("an old owner has written a header while closing".into());
        }
        rival.traffic.abandoned()?;
        rival.check_fence()?;
        self.rival_goes(Some(rival));
        Ok(())
    }

    /// Ends the old owner, because its disk is gone or it is no longer needed.
    pub(crate) fn rival_goes(&mut self, rival: Option<Rival>) {
        if let Some(rival) = rival {
            let counts = rival.plug.sink();
            self.outcome.refused_writes += counts.refused;
            self.outcome.late_writes += counts.landed;
            self.outcome.late_headers += counts.headers;
        }
    }

    fn headers(&self) -> [Vec<u8>; 2] {
        SLOT_AT.map(|at| self.disk.peek(at, PAGE as usize))
    }
}

impl Rival {
    fn check_fence(&self) -> Result<(), String> {
        let durable = self.traffic.wal.durable();
        match self.fenced && durable != self.durable {
            true => Err(format!("an old owner acknowledged up to {durable} behind a fence")),
            false => Ok(()),
        }
    }
}
