//! The power-cut campaign: random lives of a WAL on a simulated disk, checked against a model.
//!
//! A seed decides everything: geometry, options, what is appended and trimmed, the order in which the disk completes requests, where the power is cut
//! or the process killed (recovery's own header writes included), and what the disk keeps of what it had not flushed.
//! After each end the log is recovered and compared with the model:
//!
//! - every acknowledged record that was not trimmed is there, unchanged and in order, and so is every record that an earlier recovery
//!   has handed out, even one that was interrupted;
//! - what is handed out is exactly what was written, without a gap before the end of the log;
//! - a record that a recovery dropped does not come back, nor does one that was durably trimmed;
//! - damage is reported where the disk did damage, and nowhere else.
//!
//! [`Profile::PowerCut`] has a disk that keeps its promises: nothing may be lost. [`Profile::Faults`] adds bit rot, failing reads
//! and writes, lost and misdirected writes: damage may be lost, never handed out, and must be reported, within the limits that
//! `docs/format/wal.md` states. [`Mutation`]s break something on purpose, to show that the campaign has teeth.
#![forbid(unsafe_code)]

mod life;
mod model;
mod plug;

use std::fmt;

pub use plug::Mutation;

/// What the disk does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Power cuts and process crashes only.
    PowerCut,
    /// Also bit rot, read and write errors, lost and misdirected writes.
    Faults,
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PowerCut => "power-cut",
            Self::Faults => "faults",
        })
    }
}

/// One simulation.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Decides everything that is left to chance.
    pub seed: u64,
    /// What the disk does wrong.
    pub profile: Profile,
    /// What is broken on purpose.
    pub mutation: Mutation,
    /// Print each step to standard error.
    pub verbose: bool,
}

/// What a simulation did, so that a campaign can show that its cases happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Records appended.
    pub appended: u64,
    /// Records that recoveries handed out.
    pub recovered: u64,
    /// Records that recoveries dropped.
    pub dropped: u64,
    /// Damaged ranges reported.
    pub damaged: u64,
    /// Recoveries that succeeded.
    pub recoveries: u64,
    /// Recoveries that were interrupted.
    pub interrupted: u64,
    /// Ends without power.
    pub power_cuts: u64,
    /// Ends of the process alone.
    pub process_crashes: u64,
    /// Clean ends.
    pub closes: u64,
    /// Trims that took effect.
    pub trims: u64,
    /// Appends that found the window or the ring full.
    pub refused: u64,
    /// Laps of the ring.
    pub laps: u64,
}

impl Outcome {
    /// Add another one's numbers.
    pub fn add(&mut self, other: &Self) {
        self.appended += other.appended;
        self.recovered += other.recovered;
        self.dropped += other.dropped;
        self.damaged += other.damaged;
        self.recoveries += other.recoveries;
        self.interrupted += other.interrupted;
        self.power_cuts += other.power_cuts;
        self.process_crashes += other.process_crashes;
        self.closes += other.closes;
        self.trims += other.trims;
        self.refused += other.refused;
        self.laps += other.laps;
    }
}

/// A simulation that found something wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What was simulated.
    pub plan: Plan,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { seed, profile, mutation, .. } = self.plan;
        write!(
            f,
            "seed {seed}: {}\nreplay: cargo run -p alluvium-sim -- --profile {profile} --seed {seed}",
            self.what
        )?;
        match mutation {
            Mutation::Sound => Ok(()),
            mutation => write!(f, " --break {mutation}"),
        }
    }
}

/// Run the pure power-cut simulation of `seed`.
pub fn run_seed(seed: u64) -> Result<Outcome, Failure> {
    run(Plan { seed, profile: Profile::PowerCut, mutation: Mutation::Sound, verbose: false })
}

/// Run one simulation.
pub fn run(plan: Plan) -> Result<Outcome, Failure> {
    life::Run::new(plan).run().map_err(|what| Failure { plan, what })
}

/// Run the seeds `start..start + count` on all processors; the first failure (by seed) ends the campaign.
pub fn campaign(
    start: u64,
    count: u64,
    plan: impl Fn(u64) -> Plan + Sync,
    progress: impl Fn(u64) + Sync,
) -> Result<Outcome, Failure> {
    use std::sync::atomic::{AtomicU64, Ordering};
    let next = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    let total = parking_lot::Mutex::new(Outcome::default());
    let failure = parking_lot::Mutex::new(None::<Failure>);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= count || failure.lock().is_some() {
                        return;
                    }
                    match run(plan(start + index)) {
                        Ok(outcome) => total.lock().add(&outcome),
                        Err(found) => {
                            let mut failure = failure.lock();
                            if failure
                                .as_ref()
                                .is_none_or(|known| found.plan.seed < known.plan.seed)
                            {
                                *failure = Some(found);
                            }
                        }
                    }
                    progress(done.fetch_add(1, Ordering::Relaxed) + 1);
                }
            });
        }
    });
    match failure.into_inner() {
        Some(failure) => Err(failure),
        None => Ok(total.into_inner()),
    }
}
