//! The time from the moment at which a leader is killed, or stopped, to the next answered write.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Plan;
use super::cluster::Cluster;
use crate::Error;
use crate::bench::{Bar, judged, median};
use crate::report::Case;
use crate::volume::nbd::{Command, Connection};

/// A write must be answered within this time.
const LIMIT: Duration = Duration::from_secs(60);
/// Writes go on for this time before and after each fault.
const PAUSE: Duration = Duration::from_secs(1);
/// The targets, in milliseconds.
const KILLED_MS: f64 = 1000.0;
const STOPPED_MS: f64 = 3000.0;

const BLOCK: u32 = 4096;

/// A write: when it was sent, and when it was answered.
#[derive(Clone, Copy)]
struct Write {
    sent: Instant,
    answered: Instant,
}

/// The time from a fault to the answer of the first write that was sent after it. (The answer of
/// one that was sent before may have been on its way.)
fn recovery(writes: &[Write], fault: Instant) -> Option<Duration> {
    let write = writes.iter().find(|write| write.sent > fault)?;
    Some(write.answered - fault)
}

pub(super) fn measure(cluster: &mut Cluster, plan: &Plan) -> Result<Vec<Case>, Error> {
    let socket = cluster.socket();
    let (writes, is_over) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    let blocks = (plan.sizes.volume << 20) / u64::from(BLOCK);
    thread::scope(|scope| {
        let writing = scope.spawn(|| -> Result<(), String> {
            let failed = |error: &dyn std::fmt::Display| format!("a write has failed: {error}");
            let mut connection = Connection::open(&socket).map_err(|error| failed(&error))?;
            for number in 0.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let at = number % blocks * u64::from(BLOCK);
                let sent = Instant::now();
                let data = [number as u8; BLOCK as usize];
                connection
                    .request(Command::Write, at, BLOCK, &data)
                    .map_err(|error| failed(&error))?;
                let write = Write { sent, answered: Instant::now() };
                writes.lock().map_err(|error| failed(&error))?.push(write);
            }
            Ok(())
        });
        let cases = faults(cluster, plan, &writes);
        is_over.store(true, Ordering::Relaxed);
        writing.join().expect("the writing thread does not panic")?;
        cases
    })
}

fn faults(
    cluster: &mut Cluster,
    plan: &Plan,
    writes: &Mutex<Vec<Write>>,
) -> Result<Vec<Case>, Error> {
    let mut cases = Vec::new();
    for (signal, what, most_ms) in
        [(Signal::KILL, "killed", KILLED_MS), (Signal::STOP, "stopped", STOPPED_MS)]
    {
        let mut times_ms = Vec::new();
        for _ in 0..plan.repetitions {
            let leader = cluster.leader()?;
            thread::sleep(PAUSE);
            let server = &mut cluster.servers[leader];
            let fault = Instant::now();
            server.signal(signal)?;
            let time = answered(writes, fault)?;
            if signal == Signal::KILL {
                server.kill()?;
                server.start()?;
            } else {
                server.signal(Signal::CONT)?;
            }
            times_ms.push(time.as_secs_f64() * 1000.0);
            thread::sleep(PAUSE);
        }
        let (most, middle) =
            (times_ms.iter().copied().fold(0.0, f64::max), median(times_ms.iter().copied()));
        let listed: Vec<String> = times_ms.iter().map(|ms| format!("{ms:.0}")).collect();
        println!(
            "ms from a leader {what} to the next answered write: median {middle:.0}; all: {}",
            listed.join(" ")
        );
        let name = format!("longest time to the next answer after a leader is {what}, ms");
        cases.push(judged(&name, most, Bar::AtMost(most_ms)));
    }
    Ok(cases)
}

/// Waits for the first write after a fault.
fn answered(writes: &Mutex<Vec<Write>>, fault: Instant) -> Result<Duration, Error> {
    while fault.elapsed() < LIMIT {
        let found = {
            let mut writes = writes.lock().map_err(|error| error.to_string())?;
            let found = recovery(&writes, fault);
            if found.is_some() {
                writes.clear();
            }
            found
        };
        if let Some(time) = found {
            return Ok(time);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err(format!("no write was answered within {LIMIT:?}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_was_sent_before_the_fault_does_not_count() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let write = |sent, answered| Write { sent: at(sent), answered: at(answered) };
        let writes = [write(0, 2), write(3, 11), write(12, 250), write(251, 252)];
        assert_eq!(recovery(&writes, at(10)), Some(Duration::from_millis(240)));
        assert_eq!(recovery(&writes[..2], at(10)), None);
    }
}
