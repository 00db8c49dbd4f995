//! The volume campaign: the protocol of replicated block volumes on simulated disks and a
//! simulated network, by seed.
//!
//! Three servers have a replica of each of five groups. A server has one write-ahead log
//! (`alluvium-wal`, the real one) for all its groups and one store. A write is acknowledged when
//! raft has it durably on a majority and the leader has applied it to its overlay. It goes to the
//! store later and without a flush; a checkpoint makes the store durable for all groups at once
//! before the log is trimmed. The seed decides the order of deliveries, disk requests and ticks,
//! and the faults: power cuts, kills, partitions, lost and reordered messages, full rings, installs
//! that are interrupted.
//!
//! `docs/volumes-design.md` has the rules of the protocol, what is checked, and the rule that each
//! [`Mutation`] breaks. The modules, from the bottom:
//!
//! | module | contents |
//! |---|---|
//! | `mutation`, `op` | broken rules; the commands of the replicated state machine |
//! | `log`, `extents` | a group's log in memory; its position in the write-ahead log |
//! | `record`, `recovery` | the records of the write-ahead log; the walk over them |
//! | `store` | overlay, commit rule, words and sectors |
//! | `replica` | raft of one group |
//! | `network`, `oracle` | messages; clients and the committed log |
//! | `environment` | network, clients and seed, as a server meets them |
//! | `server` | a server; `server/turn` its turn, `server/checkpoint` its checkpoint |
//! | `world` | the schedule |

mod environment;
mod extents;
mod log;
mod mutation;
mod network;
mod op;
mod oracle;
mod record;
mod recovery;
mod replica;
mod server;
mod store;
mod world;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

pub use mutation::Mutation;
use parking_lot::Mutex;
use world::World;

/// Servers, each with a replica of every group.
const SERVERS: usize = 3;

/// Raft groups.
const GROUPS: usize = 5;

/// Blocks of a group. Few, so that writes meet.
const BLOCKS: usize = 16;

/// Bytes of a block.
const PAGE: usize = 4096;

/// Bytes of a write-ahead log. Small, so that it fills.
const RING_BYTES: u64 = 1 << 20;

/// Entries below the base that stay in memory for slow followers. Few, so that installs happen.
const KEPT_ENTRIES: u64 = 3;

/// The parameters of one simulation.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Determines every random choice.
    pub seed: u64,
    /// Steps before everything is repaired and has to converge.
    pub steps: u64,
    /// The broken rule.
    pub mutation: Mutation,
    /// Print each event to standard error.
    pub verbose: bool,
}

counts! {
    /// Counts of events, which show that the cases of the campaign have happened.
    Outcome {
        /// Operations that a client was acknowledged.
        acknowledged,
        /// Discards among them.
        discards,
        /// Reads by clients.
        reads,
        /// Reads of an operation whose outcome the client did not know.
        reads_of_unknown,
        /// Blocks of a replica that were compared with the committed log.
        compared,
        /// Power cuts of a server.
        power_cuts,
        /// Kills of a server's process.
        kills,
        /// Leaders elected.
        elections,
        /// Completed checkpoints.
        checkpoints,
        /// Groups carried forward by a checkpoint.
        carried_forward,
        /// Installs that began.
        installs,
        /// Servers that ended during an install.
        interrupted_installs,
        /// Messages with entries that a follower with a full ring refused.
        refused_appends,
        /// Records of a commit index alone.
        commit_records,
    }
}

/// A simulation that has found a defect.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The simulation.
    pub plan: Plan,
    /// The defect.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { seed, steps, mutation, .. } = self.plan;
        write!(
            f,
            "seed {seed}: {}\n\
             replay: cargo run -p alluvium-sim --bin volume -- --steps {steps} --seed {seed}",
            self.what
        )?;
        match mutation {
            Mutation::Sound => Ok(()),
            mutation => write!(f, " --mutation {mutation}"),
        }
    }
}

/// Runs one simulation. Returns its counts and the digest of its events, which is the same whenever
/// the plan is.
pub fn run(plan: Plan) -> Result<(Outcome, u64), Failure> {
    quietly(|| World::new(plan).run(plan.steps)).map_err(|what| Failure { plan, what })
}

/// The result of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The counts of all simulations that found nothing.
    pub outcome: Outcome,
    /// The simulations that found a defect, by seed.
    pub failures: Vec<Failure>,
}

/// Runs the seeds `start..start + count` on all processors, also if some of them fail.
pub fn campaign(
    start: u64,
    count: u64,
    plan: impl Fn(u64) -> Plan + Sync,
    progress: impl Fn(u64) + Sync,
) -> Report {
    let report = Mutex::new(Report::default());
    let one = |seed| {
        match run(plan(seed)) {
            Ok((outcome, _)) => report.lock().outcome.add(&outcome),
            Err(failure) => report.lock().failures.push(failure),
        }
        true
    };
    crate::seeds::each(start, count, one, progress);
    let mut report = report.into_inner();
    report.failures.sort_by_key(|failure| failure.plan.seed);
    report
}

thread_local! {
    /// Whether this thread runs a simulation, whose panics are findings.
    static SIMULATES: Cell<bool> = const { Cell::new(false) };
    /// The location of the last panic of a simulation.
    static LOCATION: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Calls `simulate` and returns its panic as text, with its location. Checks are
/// assertions because raft's own are.
fn quietly<T>(simulate: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if SIMULATES.get() {
                let location = panic.location().map(ToString::to_string).unwrap_or_default();
                LOCATION.set(location);
            } else {
                usual(panic);
            }
        }));
    });
    SIMULATES.set(true);
    let result = catch_unwind(AssertUnwindSafe(simulate));
    SIMULATES.set(false);
    result.map_err(|panic| format!("{} ({})", text(&*panic), LOCATION.take()))
}

fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text").to_owned()
}
