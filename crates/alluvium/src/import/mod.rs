//! `alluvium import`: copies topics of a running Kafka cluster to a server, at the same offsets.
//! `docs/import.md`, `docs/decisions/0029-import-from-kafka.md`.

mod acls;
mod compare;
mod copy;
mod groups;
mod inspect;
mod reader;
mod report;
mod run;
mod settings;
mod source;
pub(crate) mod target;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;

use self::report::Report;
use self::run::{Import, Plan};
use crate::address::HostPort;
use crate::catalog;
use crate::kafka::Access;
use crate::load::sleep_until;
use crate::output::{self, Failure};
use crate::serve::Signals;
use crate::topic::Common;

/// Number of times that a run without `--follow` copies what the source has received meanwhile,
/// before it reports that the source is still written.
const ROUNDS: usize = 5;
/// The interval at which an import that follows asks for new records.
const POLL: Duration = Duration::from_secs(1);
/// The interval at which an import that follows copies committed offsets, and logs its state.
const GROUPS_INTERVAL: Duration = Duration::from_secs(10);
/// The longest pause after a failure.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Copy topics of a running Kafka cluster to this server: records at the same offsets, settings,
/// committed offsets and ACLs.
///
/// Each record keeps its offset, timestamp, key, value, headers and compression. Offsets without a
/// committed record stay unused, so committed offsets, and offsets that applications store, remain
/// right. What is copied is read back and compared.
///
/// To move with a short pause: run it with --follow; when it has caught up, stop the producers; end
/// it with SIGINT, and run it without --follow. That copies the rest and opens the topics for
/// producers. Then start consumers and producers with the new address.
///
/// An interrupted import resumes when the command is repeated. A topic takes no records of
/// producers until it is opened. Topics that exist already are left alone. The source is only read.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 done, or a dry run; 1 failed: repeat the command to resume; 2 \
                  wrong usage; 3 some topics, groups or ACLs were not imported, or differ: the \
                  output lists them."
)]
pub(crate) struct ImportArgs {
    /// Addresses of brokers of the cluster. One that answers is enough.
    #[arg(long, value_name = "HOST:PORT,...", required = true, value_delimiter = ',')]
    from: Vec<HostPort>,
    /// Client properties for the cluster: TLS and login, as those of --command-config.
    #[arg(long, value_name = "FILE")]
    from_config: Option<PathBuf>,
    /// Topics: names, or prefixes of names followed by `*`. Default: all but internal ones.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    topics: Vec<String>,
    /// Topics to leave out, named as for --topics.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    exclude_topics: Vec<String>,
    /// Keep copying what the source receives, until SIGINT or SIGTERM. Topics are not opened.
    #[arg(long, conflicts_with_all = ["snapshot", "verify", "dry_run"])]
    follow: bool,
    /// Open topics although the source still receives records, has open transactions, or has groups
    /// that cannot be copied: for a copy that does not replace the source.
    #[arg(long, conflicts_with_all = ["verify", "dry_run"])]
    snapshot: bool,
    /// Copy nothing. Compare all records that both sides have, and the settings of topics.
    #[arg(long, conflicts_with = "dry_run")]
    verify: bool,
    /// Copy nothing. Print the topics that would be copied, and the settings that are refused.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    common: Common,
}

/// Runs an import.
///
/// # Errors
/// A side cannot be reached, or refuses; records differ; topics are not opened.
pub(crate) fn run(args: &ImportArgs) -> Result<(), Failure> {
    output::start_logging("warn,alluvium=info,alluvium::progress=info")?;
    let mut from_access = Access::of(args.from_config.as_deref()).map_err(Failure::Usage)?;
    from_access.option = Some("--from-config");
    let names = |topics: &[String]| -> Vec<String> {
        topics.iter().filter(|name| !name.is_empty()).cloned().collect()
    };
    let wanted = names(&args.topics);
    if wanted.is_empty() && !args.topics.is_empty() {
        return Err(Failure::Usage("--topics names no topic".into()));
    }
    let plan = Plan {
        from: args.from.clone(),
        from_access,
        to: args.common.bootstrap.clone(),
        to_access: args.common.access()?,
        wanted,
        excluded: names(&args.exclude_topics),
    };
    let report = match (args.dry_run, args.verify) {
        (true, _) => inspect::plan(&plan)?,
        (_, true) => inspect::verify(&plan)?,
        _ => copy_all(Import::new(plan), args)?,
    };
    match args.common.json {
        true => output::json(&report)?,
        false => report.print()?,
    }
    if args.dry_run { Ok(()) } else { report.outcome() }
}

/// Copies records, and opens topics unless the import follows.
fn copy_all(mut import: Import, args: &ImportArgs) -> Result<Report, Failure> {
    match args.follow {
        true => follow(&mut import)?,
        false => once(&mut import, args.snapshot)?,
    }
    Ok(import.report)
}

/// Copies everything, and opens the topics that the source has no more records of.
fn once(import: &mut Import, snapshot: bool) -> Result<(), Failure> {
    let stop = AtomicBool::new(false);
    for _ in 0..ROUNDS {
        while !import.pass(&stop)? {}
        import.copy_groups()?;
        import.copy_acls()?;
        if import.open(snapshot)? {
            break;
        }
    }
    Ok(())
}

/// Copies what the source receives, until a signal.
fn follow(import: &mut Import) -> Result<(), Failure> {
    let stop = stop_on_signal()?;
    let mut pause = POLL;
    let mut groups_at: Option<Instant> = None;
    while !stop.load(Ordering::Relaxed) {
        let passed = import.pass(&stop).and_then(|caught_up| {
            let is_due = groups_at.is_none_or(|at| at.elapsed() >= GROUPS_INTERVAL);
            if caught_up && is_due {
                import.copy_groups()?;
                import.log_state();
                groups_at = Some(Instant::now());
            }
            Ok(caught_up)
        });
        match passed {
            Ok(false) => pause = Duration::ZERO,
            Ok(true) => pause = POLL,
            // The first pass shows whether the command is right.
            Err(failure) if !import.has_copied => return Err(failure),
            // A repetition does not help.
            Err(failure @ (Failure::Lost(_) | Failure::Usage(_))) => return Err(failure),
            Err(failure) => {
                pause = (pause * 2).clamp(POLL, MAX_PAUSE);
                let seconds = pause.as_secs();
                tracing::warn!("{}; next attempt in {seconds} s", failure.message());
            }
        }
        sleep_until(Instant::now() + pause, &stop);
    }
    Ok(())
}

/// Returns a flag that SIGINT or SIGTERM sets.
fn stop_on_signal() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let (installed, result) = mpsc::channel();
    thread::spawn(move || {
        let ended: Result<(), Failure> = catalog::blocking(async {
            let mut signals = Signals::install()?;
            // The receiver waits for it.
            let _ = installed.send(Ok(()));
            let name = signals.next().await;
            tracing::info!("{name}: ending after what is under way; a further one ends at once");
            stopping.store(true, Ordering::Relaxed);
            signals.end_on_second();
            std::future::pending().await
        });
        // It ends only with a failure, before the first message.
        let _ = installed.send(ended);
    });
    result.recv().map_err(Failure::new)??;
    Ok(stop)
}
