//! The volume campaign: the protocol of replicated block volumes on simulated disks and a
//! simulated network, by seed.
//!
//! Three servers run the real shard of `alluvium-volume`, with the real `alluvium-wal` and block
//! store, on simulated disks. Each has a replica of each of five groups, and each group has one
//! volume. The seed decides the order of deliveries, disk requests and time, and the faults: power
//! cuts, kills, partitions, lost, late and repeated messages and client requests, full rings and
//! stores, attachments by another gateway, and installs that are interrupted.
//!
//! `docs/volumes-design.md` has the rules of the protocol, what is checked, and the rule that each
//! [`Mutation`] breaks. The modules, from the bottom:
//!
//! | module | contents |
//! |---|---|
//! | `mutation` | broken rules |
//! | `blocks` | the few blocks of a volume |
//! | `network` | messages and streams |
//! | `oracle` | the committed log, and the blocks and attachments that follow from it |
//! | `environment` | network, oracle and seed |
//! | `schedule` | where the faults are |
//! | `client` | gateways |
//! | `server` | a server: its disks and its shard |
//! | `world` | the schedule |

mod blocks;
mod client;
mod environment;
mod mutation;
mod network;
mod oracle;
mod schedule;
mod server;
mod world;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use alluvium_volume::shard::ShardCounters;
use alluvium_volume::{
    AttachEpoch, GroupId, GroupView, PeerId, ServerId, VolumeId, VolumeState, Window,
};
pub use mutation::Mutation;
use parking_lot::Mutex;
pub use schedule::Schedule;
use world::World;

use crate::campaign::{Failure, each};

/// Servers, each with a replica of every group.
const SERVERS: usize = 3;

/// Raft groups.
const GROUPS: usize = 5;

/// Bytes of a write-ahead log. Small, so that it fills.
const RING_BYTES: u64 = 768 << 10;

fn group_id(group: usize) -> GroupId {
    GroupId(group as u64 + 1)
}

fn volume_id(group: usize) -> VolumeId {
    VolumeId(group as u32 + 1)
}

fn server_id(server: usize) -> ServerId {
    ServerId(server as u32 + 1)
}

fn peer_id(group: usize, server: usize) -> PeerId {
    PeerId(100 * group as u64 + server as u64 + 1)
}

/// Whether a group begins with an attachment, which the registry had when it was created.
fn begins_attached(group: usize) -> bool {
    group.is_multiple_of(2)
}

/// What the registry states of a group.
fn view(group: usize) -> GroupView {
    let volume = VolumeState {
        volume: volume_id(group),
        parent: None,
        epoch: AttachEpoch(1),
        nonce: client::first_nonce(group),
        window: Some(Window::default()),
        dropped_layers: Vec::new(),
    };
    GroupView {
        region: 0,
        family: volume_id(group),
        founders: (0..SERVERS).map(|server| peer_id(group, server)).collect(),
        peers: (0..SERVERS).map(|server| (peer_id(group, server), server_id(server))).collect(),
        volumes: Vec::from_iter(begins_attached(group).then_some(volume)),
    }
}

/// The parameters of one simulation.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Determines every random choice.
    pub seed: u64,
    /// Steps before everything is repaired and has to converge.
    pub steps: u64,
    /// Where the faults are; `None` if the seed determines that.
    pub schedule: Option<Schedule>,
    /// The broken rule.
    pub mutation: Mutation,
    /// Print each event to standard error.
    pub verbose: bool,
}

counts! {
    /// Counts of events, which show that the cases of the campaign have happened.
    Outcome {
        /// Ops that a client was acknowledged.
        acknowledged,
        /// Discards among them.
        discards,
        /// Ops among them of which an earlier copy had taken effect.
        duplicates,
        /// Ops that their gateway has given up.
        given_up,
        /// Ops that were refused for lack of space.
        no_space,
        /// Attachments by another gateway.
        attachments,
        /// Requests that were refused because a newer attachment counts.
        fenced,
        /// Reads by clients.
        reads,
        /// Blocks of a replica that were compared with the committed log.
        compared,
        /// Power cuts of a server.
        power_cuts,
        /// Kills of a server's process.
        kills,
        /// Servers that ended because a device has failed.
        failed_devices,
        /// Records of a log that have rotted.
        rotten_records,
        /// Sectors of a store that have rotted.
        rotten_sectors,
        /// Servers whose disks were replaced by empty ones.
        replaced_disks,
        /// Processes that were stopped for a while.
        stopped,
        /// Logs that hung for a while.
        hung,
        /// Times that a server has found a device to be stalled.
        stalls,
        /// Leaders elected.
        elections,
        /// Completed checkpoints.
        checkpoints,
        /// Groups carried forward by a checkpoint.
        carried_forward,
        /// Installs that began.
        installs,
        /// Completed installs of changed blocks only.
        installs_of_changes,
        /// Servers that ended during an install.
        interrupted_installs,
        /// Messages with entries that a follower with a full ring refused.
        refused_appends,
        /// Records of a commit index alone.
        commit_records,
    }
}

impl Outcome {
    fn add_counters(&mut self, counters: ShardCounters) {
        self.elections += counters.elections;
        self.stalls += counters.stalls;
        self.checkpoints += counters.checkpoints;
        self.carried_forward += counters.carried_forward;
        self.installs += counters.installs;
        self.installs_of_changes += counters.installs_of_changes;
        self.refused_appends += counters.refused_appends;
        self.commit_records += counters.commit_records;
    }
}

impl Plan {
    fn failure(&self, what: String) -> Failure {
        let Self { seed, steps, schedule, mutation, .. } = *self;
        let mut replay =
            format!("cargo run -p alluvium-sim --bin volume -- --steps {steps} --seed {seed}");
        if let Some(schedule) = schedule {
            replay += &format!(" --schedule {schedule}");
        }
        if mutation != Mutation::Sound {
            replay += &format!(" --break {mutation}");
        }
        Failure { seed, what, replay }
    }
}

/// Runs one simulation. Returns its counts and the digest of its events, which is the same whenever
/// the plan is.
pub fn run(plan: Plan) -> Result<(Outcome, u64), Failure> {
    quietly(|| World::new(plan).run(plan.steps)).map_err(|what| plan.failure(what))
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
    each(start, count, one, progress);
    let mut report = report.into_inner();
    report.failures.sort_by_key(|failure| failure.seed);
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
