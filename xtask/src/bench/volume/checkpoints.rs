//! Latencies of writes with and without a checkpoint in progress, of the same runs.
//!
//! The servers are asked again and again whether they have a checkpoint in progress, and fio logs
//! the latency of each write. A write counts as one with a checkpoint if it was in flight between
//! two successive answers of which one states a checkpoint, or between which one was completed.

use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::cluster::Cluster;
use super::fio::{self, Length, Logged, Target, Workload};
use super::{Plan, RANDOM_DEEP, RANDOM_ONE};
use crate::Error;
use crate::bench::{Bar, judged, median, unix_seconds};
use crate::report::Case;
use crate::server::Metrics;

/// The pause between two answers of a server.
const EVERY: Duration = Duration::from_millis(5);
/// Runs of each workload.
const RUNS: u32 = 3;
/// The target of the p99 with a checkpoint, over that without.
const RATIO: f64 = 1.3;

/// What the servers have answered.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    /// When they were asked, and when they had answered, in milliseconds since the Unix epoch.
    from_ms: f64,
    to_ms: f64,
    is_running: bool,
    /// Completed checkpoints of all servers.
    completed: f64,
}

/// Whether a checkpoint was in progress at some time between two answers.
fn has_checkpoint(before: &Seen, after: &Seen) -> bool {
    before.is_running || after.is_running || before.completed != after.completed
}

/// Whether a write was in flight with a checkpoint. `None` if it was in flight before the first
/// answer, or after the last one.
fn is_with(seen: &[Seen], write: &Logged) -> Option<bool> {
    let first = seen.partition_point(|seen| seen.to_ms <= write.began_ms).checked_sub(1)?;
    let behind = seen.partition_point(|seen| seen.from_ms < write.ended_ms);
    let during = seen.get(first..=behind)?;
    Some(during.windows(2).any(|pair| has_checkpoint(&pair[0], &pair[1])))
}

/// The latency that `share` of the writes do not exceed; NaN without writes.
fn percentile(latencies: &mut [f64], share: f64) -> f64 {
    latencies.sort_by(f64::total_cmp);
    let rank = (latencies.len() as f64 * share).ceil() as usize;
    latencies.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Figures of a run.
struct Run {
    with_p50_us: f64,
    with_p99_us: f64,
    without_p50_us: f64,
    without_p99_us: f64,
    share_with: f64,
    checkpoints: f64,
}

impl Run {
    fn new(seen: &[Seen], writes: &[Logged]) -> Self {
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for write in writes {
            match is_with(seen, write) {
                Some(true) => with.push(write.latency_us()),
                Some(false) => without.push(write.latency_us()),
                None => {}
            }
        }
        let completed = |seen: Option<&Seen>| seen.map_or(0.0, |seen| seen.completed);
        Self {
            with_p50_us: percentile(&mut with, 0.5),
            with_p99_us: percentile(&mut with, 0.99),
            without_p50_us: percentile(&mut without, 0.5),
            without_p99_us: percentile(&mut without, 0.99),
            share_with: with.len() as f64 / writes.len() as f64,
            checkpoints: completed(seen.last()) - completed(seen.first()),
        }
    }
}

pub(super) fn measure(cluster: &Cluster, plan: &Plan) -> Result<Vec<Case>, Error> {
    let mut cases = Vec::new();
    // A quarter of the log takes some seconds at depth 1.
    let seconds = plan.seconds * 2;
    for workload in [RANDOM_DEEP, RANDOM_ONE] {
        let mut ratios = Vec::new();
        for _ in 0..RUNS.min(plan.rounds) {
            let run = watch(cluster, plan, &workload, seconds)?;
            println!(
                "{}: with a checkpoint in progress p50 {:.0} us, p99 {:.0} us; without p50 {:.0} \
                 us, p99 {:.0} us; {:.0} checkpoints of three servers, {:.0}% of the writes",
                workload.name,
                run.with_p50_us,
                run.with_p99_us,
                run.without_p50_us,
                run.without_p99_us,
                run.checkpoints,
                run.share_with * 100.0,
            );
            ratios.push(run.with_p99_us / run.without_p99_us);
        }
        let name = format!("{}: p99 with a checkpoint, over without", workload.name);
        cases.push(match ratios.iter().any(|ratio| ratio.is_nan()) {
            true => {
                Case::failed(&name, "not measured: a run had no checkpoint; use longer --seconds")
            }
            false => judged(&name, median(ratios), Bar::AtMost(RATIO)),
        });
    }
    Ok(cases)
}

/// Runs fio and asks the servers meanwhile.
fn watch(cluster: &Cluster, plan: &Plan, workload: &Workload, seconds: u32) -> Result<Run, Error> {
    const LOG: &str = "writes";
    cluster.settled()?;
    let addresses = cluster.metrics_addresses();
    let (socket, volume) = (cluster.socket(), plan.sizes.volume);
    let seen = thread::scope(|scope| -> Result<Vec<Seen>, Error> {
        let (end, ended) = mpsc::channel::<()>();
        let asking = scope.spawn(move || -> Result<Vec<Seen>, String> {
            let mut seen = Vec::new();
            loop {
                seen.push(ask(addresses).map_err(|error| error.to_string())?);
                if ended.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    return Ok(seen);
                }
            }
        });
        let target = Target::Export(&socket);
        let length = Length::Seconds(seconds);
        let run = fio::run(&cluster.directory, &target, volume, workload, length, Some(LOG));
        drop(end);
        let seen = asking.join().expect("the asking thread does not panic")?;
        run?;
        Ok(seen)
    })?;
    Ok(Run::new(&seen, &fio::read_log(&cluster.directory, LOG)?))
}

fn ask(addresses: &[SocketAddr]) -> Result<Seen, Error> {
    let from_ms = unix_seconds() * 1000.0;
    let (mut is_running, mut completed) = (false, 0.0);
    for address in addresses {
        let metrics = Metrics::read(&address.to_string())?;
        let value = |name: &str| metrics.get(name).ok_or_else(|| format!("no metric {name}"));
        is_running |= value("alluvium_volume_checkpoint_running")? > 0.0;
        completed += value("alluvium_volume_checkpoints_total")?;
    }
    Ok(Seen { from_ms, to_ms: unix_seconds() * 1000.0, is_running, completed })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers every 10 ms, from 100 ms on.
    fn seen(answers: &[(bool, f64)]) -> Vec<Seen> {
        let seen = answers.iter().enumerate().map(|(number, (is_running, completed))| {
            let from_ms = 100.0 + 10.0 * number as f64;
            Seen { from_ms, to_ms: from_ms + 1.0, is_running: *is_running, completed: *completed }
        });
        seen.collect()
    }

    fn write(began_ms: f64, ended_ms: f64) -> Logged {
        Logged { began_ms, ended_ms }
    }

    #[test]
    fn a_write_is_with_a_checkpoint_if_there_was_one_while_it_was_in_flight() {
        let idle = (false, 0.0);
        let seen = seen(&[idle, idle, idle, (true, 0.0), (true, 0.0), (false, 1.0), (false, 1.0)]);
        for (began_ms, ended_ms, expected) in [
            (101.0, 105.0, Some(false)),
            (101.0, 119.0, Some(false)),
            // The checkpoint begins between 120 and 131 ms, and ends between 140 and 151.
            (112.0, 122.0, Some(true)),
            (132.0, 135.0, Some(true)),
            (101.0, 148.0, Some(true)),
            (143.0, 155.0, Some(true)),
            (152.0, 158.0, Some(false)),
            // Before the first answer, or after the last one.
            (90.0, 105.0, None),
            (155.0, 170.0, None),
            (80.0, 90.0, None),
        ] {
            let found = is_with(&seen, &write(began_ms, ended_ms));
            assert_eq!(found, expected, "{began_ms} to {ended_ms}");
        }
        assert_eq!(is_with(&[], &write(1.0, 2.0)), None);
    }

    #[test]
    fn a_checkpoint_between_two_answers_is_noticed() {
        let seen = seen(&[(false, 3.0), (false, 4.0), (false, 4.0)]);
        assert_eq!(is_with(&seen, &write(102.0, 108.0)), Some(true));
        assert_eq!(is_with(&seen, &write(112.0, 118.0)), Some(false));
    }

    #[test]
    fn writes_with_and_without_a_checkpoint_have_percentiles_of_their_own() {
        let answers = [(false, 0.0), (false, 0.0), (true, 0.0), (true, 0.0)];
        let writes = [write(101.0, 102.0), write(103.0, 105.0), write(122.0, 125.0)];
        let run = Run::new(&seen(&answers), &writes);
        assert_eq!((run.without_p50_us, run.without_p99_us), (1000.0, 2000.0));
        assert_eq!((run.with_p50_us, run.with_p99_us), (3000.0, 3000.0));
        let mut hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut hundred, 0.99), 99.0);
        assert!(percentile(&mut [], 0.99).is_nan());
    }
}
