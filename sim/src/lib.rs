//! The power-cut campaign: random lives of a WAL on a simulated disk, checked against a model.
//!
//! A seed decides everything: geometry, options, what is appended and trimmed, the order in which
//! the disk completes requests, where the power is cut or the process killed (recovery's own header
//! writes included), and what the disk keeps of what it had not flushed. Between lives the log is
//! sometimes resized, with a power cut on the way, and so it is by its owner while it is in use;
//! and sometimes a life does not end: its owner goes on, as if on another machine, while the next
//! one opens the log. After each end the log is recovered and compared with the model:
//!
//! - every acknowledged record that was not trimmed is there, unchanged and in order, and so is
//!   every record that an earlier recovery has handed out, even one that was interrupted;
//! - what is handed out is exactly what was written, without a gap before the end of the log;
//! - a record that a recovery dropped does not come back, nor does one that was durably trimmed,
//!   nor one of an owner whose time was over;
//! - damage is reported where the disk did damage, and nowhere else;
//! - every header on the disk states a window that the records behind its durable offset keep to,
//!   and an epoch that never goes back;
//! - a resize leaves the old capacity or the new one and the same records, and one that is refused
//!   leaves the disk as it was;
//! - an owner whose time is over writes no header, and is told.
//!
//! [`Profile::PowerCut`] has a disk that keeps its promises, and that refuses the old owner of a
//! log that was taken over: nothing may be lost. [`Profile::Faults`] adds bit rot, failing reads,
//! writes and flushes, a full disk, lost and misdirected writes, and old owners that are not
//! refused: damage may be lost, never handed out, and must be reported, within the limits that
//! `docs/format/wal.md` states. [`Mutation`]s break something on purpose, to show that the campaign
//! has teeth.
#![forbid(unsafe_code)]

pub mod fuzz;
mod life;
mod model;
mod plug;
mod resize;
mod ring;
mod rival;
mod traffic;

use std::fmt;

pub use plug::Mutation;

/// What the disk does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Power cuts, process crashes, and takeovers with a fence.
    PowerCut,
    /// Also bit rot, read, write and flush errors, a full disk, lost and misdirected writes,
    /// takeovers without a fence.
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

macro_rules! outcome {
    ($($(#[$doc:meta])* $field:ident,)*) => {
        /// What a simulation did, so that a campaign can show that its cases happened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Outcome {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl Outcome {
            /// Add another one's numbers.
            pub fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)*
            }
        }
    };
}

outcome! {
    /// Records appended.
    appended,
    /// Records that recoveries handed out.
    recovered,
    /// Records that recoveries dropped.
    dropped,
    /// Damaged ranges reported.
    damaged,
    /// Recoveries that succeeded.
    recoveries,
    /// Recoveries that were interrupted.
    interrupted,
    /// Those of them that followed on one that was interrupted as well.
    interrupted_again,
    /// Ends without power.
    power_cuts,
    /// Ends of the process alone.
    process_crashes,
    /// Clean ends.
    closes,
    /// Trims that took effect.
    trims,
    /// Marks that took effect, with a trim or alone.
    marks,
    /// Appends that found the window or the ring full.
    refused,
    /// Laps of the ring.
    laps,
    /// Windows that grew.
    grown,
    /// Windows that shrank.
    shrunk,
    /// Resizes that were completed.
    resized,
    /// Those of them that moved records.
    moved,
    /// Resizes that were refused, since the log did not fit or could not be moved.
    resizes_refused,
    /// Resizes that were interrupted.
    resizes_interrupted,
    /// Those of them that left the new capacity.
    resizes_interrupted_late,
    /// Resizes of a log in use that took effect.
    resized_in_use,
    /// Those that were asked for and had not when the owner ended.
    resizes_cut_short,
    /// Logs that were opened while their owner went on.
    takeovers,
    /// Those of them whose disk refused the old owner.
    fenced,
    /// Writes of old owners that the disk refused.
    refused_writes,
    /// Writes of old owners that landed after the log was taken over, or while it was.
    late_writes,
    /// Those of them that went to a header.
    late_headers,
    /// Old owners that found another one's header.
    noticed,
    /// Openings that found that another header had been written meanwhile.
    openings_refused,
    /// Bytes that rotted at rest.
    rotten,
    /// Reads, writes and flushes that failed.
    io_errors,
    /// Writes that found the disk full.
    no_space,
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
    life::Run::new(plan).and_then(life::Run::run).map_err(|what| Failure { plan, what })
}

/// Run the seeds `start..start + count` on all processors; the first failure (by seed) ends the
/// campaign.
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
