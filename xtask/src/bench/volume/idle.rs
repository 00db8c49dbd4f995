//! Processor time of servers with many volumes that nothing is written to.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Plan;
use super::cluster::Cluster;
use crate::Error;
use crate::bench::{Bar, judged};
use crate::report::Case;
use crate::volume::nbd::{Command, Connection};

/// Volumes that are created at a time.
const LANES: usize = 4;
/// Time after the creation of volumes before the servers are measured.
const PAUSE: Duration = Duration::from_secs(5);
/// The target with the most volumes, in percent of a processor.
const MOST_PERCENT: f64 = 2.0;

pub(super) fn measure(cluster: &Cluster, plan: &Plan) -> Result<Vec<Case>, Error> {
    let mut cases = Vec::new();
    // The measured volume is the first one.
    let mut existing = 1;
    for volumes in &plan.volumes {
        let start = Instant::now();
        create(cluster, existing, *volumes)?;
        let created = volumes.saturating_sub(existing);
        if created > 0 {
            let seconds = start.elapsed().as_secs_f64();
            println!("{created} volumes created and written to in {seconds:.0} s");
        }
        existing = existing.max(*volumes);
        thread::sleep(PAUSE);
        cluster.settled()?;
        let before = cluster.usage()?;
        let start = Instant::now();
        thread::sleep(Duration::from_secs(plan.idle_seconds));
        let used = cluster.usage()?.since(&before);
        let seconds = start.elapsed().as_secs_f64();
        let percents = used.servers_cpu.iter().map(|cpu| cpu.as_secs_f64() / seconds * 100.0);
        let percents: Vec<f64> = percents.collect();
        let listed: Vec<String> = percents.iter().map(|each| format!("{each:.2}")).collect();
        println!(
            "{existing} idle volumes, {seconds:.0} s: {}% of a processor for each server; {:.0} \
             turns/s of all",
            listed.join(", "),
            used.counters.turns / seconds
        );
        if Some(volumes) == plan.volumes.last() {
            let most = percents.iter().copied().fold(0.0, f64::max);
            let name = format!("{existing} idle volumes: % of a processor, the busiest server");
            cases.push(judged(&name, most, Bar::AtMost(MOST_PERCENT)));
        }
    }
    Ok(cases)
}

/// Creates the volumes with the numbers from `existing` to below `volumes`, each with one group.
fn create(cluster: &Cluster, existing: u32, volumes: u32) -> Result<(), Error> {
    let next = AtomicU32::new(existing);
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES)
            .map(|lane| {
                let (next, directory) = (&next, cluster.directory.join(format!("lane{lane}")));
                scope.spawn(move || -> Result<(), String> {
                    let failed = |error: Error| error.to_string();
                    loop {
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        if number >= volumes {
                            return Ok(());
                        }
                        create_one(cluster, number, &directory).map_err(failed)?;
                    }
                })
            })
            .collect();
        for lane in lanes {
            lane.join().expect("a lane does not panic")?;
        }
        Ok(())
    })
}

/// Creates a volume. The first write creates its group.
fn create_one(cluster: &Cluster, number: u32, socket: &Path) -> Result<(), Error> {
    let name = format!("idle{number}");
    cluster.command(&["create", &name, "--size", "1GiB"])?;
    let mut export = cluster.exporter(&name, socket);
    export.start()?;
    let mut connection = Connection::open(socket)?;
    let block = [7; 4096];
    connection
        .request(Command::Write, 0, block.len() as u32, &block)
        .map_err(|error| format!("volume {name}: {error}"))?;
    drop(connection);
    export.stop()
}
