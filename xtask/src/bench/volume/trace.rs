//! What the block layer does during each case, by its trace events `block_rq_issue` and
//! `block_rq_complete`: the time of writes and of flushes at the disk and at the loop devices.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::cluster::{Apply, Cluster};
use super::fio::{self, Length, Target};
use super::{CASES, Plan};
use crate::Error;
use crate::report::Case;

/// Tracefs, where it is mounted (Documentation/trace/ftrace.rst of Linux).
const TRACEFS: &str = "/sys/kernel/tracing";
/// Bytes of the kernel's buffer for each processor: more than the events of a second.
const BUFFER_KIBIBYTES: u32 = 64 << 10;
/// Time between the start of a load and the trace.
const WARM_UP: Duration = Duration::from_secs(1);
/// Duration of a trace.
const TRACED: Duration = Duration::from_secs(1);

/// A device: its major and minor number.
type DeviceNumber = (u32, u32);

/// Traces each case with each way of answering, and prints a table.
pub(super) fn measure(cluster: &mut Cluster, plan: &Plan) -> Result<Case, Error> {
    const NAME: &str = "trace of the block layer";
    let tracer = match Tracer::create() {
        Ok(tracer) => tracer,
        Err(error) => return Ok(Case::skipped(NAME, error)),
    };
    let disk = number_of(fs::metadata(&cluster.directory)?.dev());
    let rdev = |path: &Path| Ok::<_, Error>(number_of(fs::metadata(path)?.rdev()));
    let [logs, stores] = cluster.device_paths();
    let logs: Vec<_> = logs.iter().map(|path| rdev(path)).collect::<Result<_, _>>()?;
    let stores: Vec<_> = stores.iter().map(|path| rdev(path)).collect::<Result<_, _>>()?;
    let mut table = format!(
        "{:<38}{:>10}{:>9}{:>12}{:>9}{:>10}{:>13}{:>9}{:>13}\n",
        "a second of the block layer",
        "writes",
        "KiB each",
        "p50, p99 us",
        "",
        "flushes",
        "p50, p99 us",
        "",
        "in progress",
    );
    for apply in [Apply::Deferred, Apply::Dsync] {
        cluster.restart(apply)?;
        for (workload, ..) in &CASES {
            let (socket, directory) = (cluster.socket(), &cluster.directory);
            let events = thread::scope(|scope| {
                let load = scope.spawn(|| {
                    let (target, length) = (Target::Export(&socket), Length::Seconds(4));
                    let measured =
                        fio::run(directory, &target, plan.sizes.volume, workload, length, None);
                    measured.map(drop).map_err(|error| error.to_string())
                });
                thread::sleep(WARM_UP);
                let events = tracer.record(TRACED);
                load.join().expect("fio is run without a panic")?;
                events
            })?;
            let requests = requests(&events);
            for (what, devices) in
                [("logs", &logs[..]), ("stores", &stores[..]), ("the disk", &[disk][..])]
            {
                let name = format!("{}, {}: {what}", workload.name, apply.name());
                table.push_str(&Row::of(&requests, devices).line(&name));
            }
        }
    }
    println!("\n{table}");
    Ok(Case::passed(NAME))
}

fn number_of(device: u64) -> DeviceNumber {
    (rustix::fs::major(device), rustix::fs::minor(device))
}

/// A trace buffer of its own.
struct Tracer(PathBuf);

impl Tracer {
    fn create() -> Result<Self, Error> {
        let path = Path::new(TRACEFS).join("instances/alluvium-bench");
        if !path.exists() {
            fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let tracer = Self(path);
        tracer.write("tracing_on", "0")?;
        tracer.write("buffer_size_kb", &BUFFER_KIBIBYTES.to_string())?;
        for event in ["block_rq_issue", "block_rq_complete"] {
            tracer.write(&format!("events/block/{event}/enable"), "1")?;
        }
        Ok(tracer)
    }

    fn write(&self, file: &str, text: &str) -> Result<(), Error> {
        let path = self.0.join(file);
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    /// Records events. The text is read afterwards, so that reading it disturbs nothing.
    fn record(&self, duration: Duration) -> Result<String, Error> {
        self.write("trace", "")?;
        self.write("tracing_on", "1")?;
        thread::sleep(duration);
        self.write("tracing_on", "0")?;
        Ok(String::from_utf8_lossy(&fs::read(self.0.join("trace"))?).into_owned())
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("{} is left: {error}", self.0.display());
        }
    }
}

/// A request of which the trace has both events.
#[derive(Clone, Copy, Debug, PartialEq)]
struct BlockRequest {
    device: DeviceNumber,
    is_flush: bool,
    bytes: u64,
    us: f64,
}

/// Pairs the events of writes and flushes.
fn requests(trace: &str) -> Vec<BlockRequest> {
    let mut issued = HashMap::new();
    let mut requests = Vec::new();
    for event in trace.lines().filter_map(Event::parse) {
        // A flush has no place on the device, and there is one at a time.
        let place = if event.is_flush { 0 } else { event.sector };
        let key = (event.device, event.is_flush, place);
        if event.is_issue {
            issued.insert(key, event);
        } else if let Some(issue) = issued.remove(&key) {
            requests.push(BlockRequest {
                device: event.device,
                is_flush: event.is_flush,
                bytes: 512 * issue.sectors,
                us: event.us - issue.us,
            });
        }
    }
    requests
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    us: f64,
    is_issue: bool,
    device: DeviceNumber,
    is_flush: bool,
    sector: u64,
    sectors: u64,
}

impl Event {
    /// Parses a line: task, processor, flags, seconds, event, device, kind, bytes if it is an
    /// issue, command, sector, `+`, sectors, and more. `None` for reads and everything else.
    fn parse(line: &str) -> Option<Self> {
        let (front, back) = line.split_once(": block_rq_")?;
        let seconds: f64 = front.split_whitespace().next_back()?.parse().ok()?;
        let (event, fields) = back.split_once(": ")?;
        let (named, place) = fields.split_once("() ")?;
        let mut named = named.split_whitespace();
        let (major, minor) = named.next()?.split_once(',')?;
        let kind = named.next()?;
        let mut place = place.split_whitespace();
        let sector = place.next()?.parse().ok()?;
        let sectors = place.nth(1)?.parse().ok()?;
        // `FF` is a flush, `W` a write, `FW` or `WF` a write with a flush before or after it.
        let is_flush = kind.starts_with("FF");
        if !is_flush && (!kind.contains('W') || sectors == 0) {
            return None;
        }
        Some(Self {
            us: seconds * 1e6,
            is_issue: event == "issue",
            device: (major.parse().ok()?, minor.parse().ok()?),
            is_flush,
            sector,
            sectors,
        })
    }
}

/// What a table says of some devices together.
struct Row {
    writes: Vec<f64>,
    flushes: Vec<f64>,
    kibibytes: f64,
}

impl Row {
    fn of(requests: &[BlockRequest], devices: &[DeviceNumber]) -> Self {
        let mut row = Self { writes: Vec::new(), flushes: Vec::new(), kibibytes: 0.0 };
        for request in requests.iter().filter(|request| devices.contains(&request.device)) {
            match request.is_flush {
                true => row.flushes.push(request.us),
                false => row.writes.push(request.us),
            }
            row.kibibytes += request.bytes as f64 / 1024.0;
        }
        row.writes.sort_by(f64::total_cmp);
        row.flushes.sort_by(f64::total_cmp);
        row
    }

    fn line(&self, name: &str) -> String {
        let Self { writes, flushes, kibibytes } = self;
        let busy_us: f64 = writes.iter().chain(flushes).sum();
        format!(
            "{name:<38}{:>10}{:>9.1}{:>12.0}{:>9.0}{:>10}{:>13.0}{:>9.0}{:>13.1}\n",
            writes.len(),
            kibibytes / writes.len().max(1) as f64,
            quantile(writes, 0.5),
            quantile(writes, 0.99),
            flushes.len(),
            quantile(flushes, 0.5),
            quantile(flushes, 0.99),
            busy_us / 1e6 / TRACED.as_secs_f64(),
        )
    }
}

/// Of ascending figures.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len() as f64 * share) as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_events_of_a_request_are_paired() {
        let trace = "\
# tracer: nop
   dd-28470   [000] .....  3641.182373: block_rq_issue: 254,0 WSM 4096 () 319301408 + 8 be,0,4 [dd]
   x y-1      [001] ..s..  3641.182390: block_rq_issue: 254,0 RM 4096 () 22248736 + 8 be,0,4 [bash]
   log-11713  [001] ..s..  3641.182412: block_rq_complete: 254,0 WSM () 319301408 + 8 be,0,4 [0]
   kworker-10 [000] .....  3641.182450: block_rq_issue: 254,0 FF 0 () 0 + 0 none,0,0 [kworker/0:0H]
   log-11713  [001] ..s..  3641.182481: block_rq_complete: 254,0 FF () 18446744073709551615 + 0 be
   log-11713  [001] d.s1.  3641.182483: block_rq_complete: 254,0 WS () 0 + 0 be,0,4 [0]
   dd-28470   [000] .....  3641.182587: block_rq_complete: 7,1 WS () 319301408 + 8 be,0,4 [0]
";
        let requests = requests(trace);
        let kinds: Vec<_> = requests.iter().map(|it| (it.device, it.is_flush, it.bytes)).collect();
        assert_eq!(kinds, [((254, 0), false, 4096), ((254, 0), true, 0)]);
        let times: Vec<u64> = requests.iter().map(|request| request.us.round() as u64).collect();
        assert_eq!(times, [39, 31]);
        let row = Row::of(&requests, &[(254, 0)]);
        assert_eq!((row.writes.len(), row.flushes.len(), row.kibibytes), (1, 1, 4.0));
        assert!(Row::of(&requests, &[(7, 1)]).writes.is_empty());
    }
}
