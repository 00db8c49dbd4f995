//! The power-cut campaign: random histories of a WAL on a simulated disk, checked against a model.
//!
//! A history is a sequence of runs of a writer. A seed determines everything: geometry, options,
//! appends and trims, the order in which the disk completes requests, where the power is cut or the
//! process killed (recovery's own header writes included), and what the disk keeps of its unflushed
//! writes. Between runs the log is sometimes resized, with a power cut meanwhile; its owner also
//! resizes it while it is in use. Sometimes a run does not end: its owner continues, as if on
//! another machine, while the next one opens the log. After each end the log is recovered and
//! compared with the model:
//!
//! - every acknowledged record that was not trimmed is there, unchanged and in order, and so is
//!   every record that an earlier recovery has handed out, even an interrupted one;
//! - the records handed out are exactly those written, without a gap before the end of the log;
//! - a record that a recovery dropped does not come back, nor does one that was durably trimmed,
//!   nor one of an owner that has been taken over;
//! - damage is reported where the disk did damage, and nowhere else;
//! - every header on the disk states a window that the records behind its durable offset keep to,
//!   and an epoch that never goes back;
//! - a resize leaves the old capacity or the new one and the same records, and a refused one leaves
//!   the disk unchanged;
//! - an owner that has been taken over writes no header, and gets an error.
//!
//! [`Profile::PowerCut`] has a disk that keeps its promises, and that refuses the old owner of a
//! log that was taken over: nothing may be lost. [`Profile::Faults`] adds bit rot, failing reads,
//! writes and flushes, a full disk, lost and misdirected writes, and old owners that are not
//! refused: damaged data may be lost, is never handed out, and must be reported, within the limits
//! stated in `docs/format/wal.md`. [`Mutation`]s introduce defects on purpose, to show that the
//! campaign finds them.
//!
//! [`volume`] is a campaign of its own, of replicated block volumes; [`fuzz`] has the checks of the
//! fuzz targets.
#![forbid(unsafe_code)]

pub mod campaign;
#[macro_use]
mod counts;
pub mod fuzz;
mod model;
mod old_owner;
mod plug;
mod resize;
mod ring;
mod simulation;
mod traffic;
pub mod volume;

use std::fmt;

pub use campaign::Failure;
pub use plug::Mutation;

/// The faults of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Power cuts, process crashes, and takeovers with a fence.
    PowerCut,
    /// As [`Self::PowerCut`], plus bit rot, read, write and flush errors, a full disk, lost and
    /// misdirected writes, and takeovers without a fence.
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

/// The parameters of one simulation.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Determines every random choice.
    pub seed: u64,
    /// The faults of the disk.
    pub profile: Profile,
    /// The defect introduced on purpose.
    pub mutation: Mutation,
    /// Print each step to standard error.
    pub verbose: bool,
}

counts! {
    /// Counts of events in a simulation, with which a campaign can show that its cases happened.
    Outcome {
        /// Records appended.
        appended,
        /// Records handed out by recoveries.
        recovered,
        /// Records dropped by recoveries.
        dropped,
        /// Damaged ranges reported.
        damaged,
        /// Recoveries that succeeded.
        recoveries,
        /// Recoveries that were interrupted.
        interrupted,
        /// Interrupted recoveries that followed an interrupted one.
        interrupted_again,
        /// Power cuts.
        power_cuts,
        /// Crashes of the process alone.
        process_crashes,
        /// Clean closes.
        closes,
        /// Trims that took effect.
        trims,
        /// Marks that took effect, with a trim or alone.
        marks,
        /// Appends refused by a full window or ring.
        refused,
        /// Laps of the ring.
        laps,
        /// Windows that grew.
        grown,
        /// Windows that shrank.
        shrunk,
        /// Completed resizes.
        resized,
        /// Completed resizes that moved records.
        moved,
        /// Resizes refused because the log did not fit or could not be moved.
        resizes_refused,
        /// Interrupted resizes.
        resizes_interrupted,
        /// Interrupted resizes that left the new capacity.
        resizes_interrupted_late,
        /// Resizes of a log in use that took effect.
        resized_in_use,
        /// Resizes of a log in use that were pending when the owner ended.
        resizes_cut_short,
        /// Logs opened while their owner continued.
        takeovers,
        /// Takeovers with a disk that refused the old owner.
        fenced,
        /// Writes of old owners that the disk refused.
        refused_writes,
        /// Writes of old owners that were executed during or after a takeover.
        late_writes,
        /// Late writes of old owners to a header.
        late_headers,
        /// Old owners that found a successor's header.
        noticed,
        /// Openings that found that another header had been written meanwhile.
        openings_refused,
        /// Bytes that rotted at rest.
        rotten,
        /// Failed reads, writes and flushes.
        io_errors,
        /// Writes that found the disk full.
        no_space,
    }
}

impl Plan {
    fn failure(&self, what: String) -> Failure {
        let Self { seed, profile, mutation, .. } = *self;
        let mut replay = format!("cargo run -p alluvium-sim -- --profile {profile} --seed {seed}");
        if mutation != Mutation::Sound {
            replay += &format!(" --break {mutation}");
        }
        Failure { seed, what, replay }
    }
}

/// Runs the pure power-cut simulation of `seed`.
pub fn run_seed(seed: u64) -> Result<Outcome, Failure> {
    run(Plan { seed, profile: Profile::PowerCut, mutation: Mutation::Sound, verbose: false })
}

/// Runs one simulation.
pub fn run(plan: Plan) -> Result<Outcome, Failure> {
    simulation::Simulation::new(plan)
        .and_then(simulation::Simulation::run)
        .map_err(|what| plan.failure(what))
}

/// Runs the seeds `start..start + count` on all processors; the first failure (by seed) ends the
/// campaign.
pub fn campaign(
    start: u64,
    count: u64,
    plan: impl Fn(u64) -> Plan + Sync,
    progress: impl Fn(u64) + Sync,
) -> Result<Outcome, Failure> {
    let total = parking_lot::Mutex::new(Outcome::default());
    let failure = parking_lot::Mutex::new(None::<Failure>);
    let one = |seed| match run(plan(seed)) {
        Ok(outcome) => {
            total.lock().add(&outcome);
            true
        }
        Err(found) => {
            let mut failure = failure.lock();
            if failure.as_ref().is_none_or(|known| found.seed < known.seed) {
                *failure = Some(found);
            }
            false
        }
    };
    campaign::each(start, count, one, progress);
    match failure.into_inner() {
        Some(failure) => Err(failure),
        None => Ok(total.into_inner()),
    }
}
