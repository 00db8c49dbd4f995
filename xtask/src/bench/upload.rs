//! The cost of uploads and compaction: CPU and memory of the server, requests to the object store,
//! their bytes, and their price.
//!
//! In rounds, a server that uploads and compacts, and one with the same log, log cache and load
//! that does neither: its log cache holds all data. The target applies to the whole resident set;
//! the part beyond the log cache is reported as well.

use std::fs;
use std::path::Path;
use std::time::Duration;

use clap::Args;

use super::load::Load;
use super::watch::{Memory, watched};
use super::{Bar, cpu_time, judged, median, settle};
use crate::report::{Case, Report};
use crate::server::{Config, Ending, Metrics, Objects, Server, release_binary};
use crate::{Error, ServerOptions};

#[derive(Args)]
pub(crate) struct Options {
    /// Number of rounds; in each, all servers are measured from scratch. The medians count.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// MiB to produce per second.
    #[arg(long, default_value_t = 40)]
    rate: u32,
    /// Seconds to produce in a round.
    #[arg(long, default_value_t = 40)]
    seconds: u32,
    /// Partitions of the topic; each number is a separate case. Partitions with little data in an
    /// upload share an object, until compaction brings the data of each together.
    #[arg(long, value_delimiter = ',', default_values_t = [4, 200])]
    partitions: Vec<u32>,
    /// Size of an upload in MiB.
    #[arg(long, default_value_t = 64)]
    upload_size: u32,
    #[command(flatten)]
    prices: Prices,
    #[command(flatten)]
    server: ServerOptions,
}

/// Prices in any currency. The defaults are the list prices of AWS S3 Standard in us-east-1, in US
/// dollars.
#[derive(Args)]
struct Prices {
    /// Price of 1,000 requests that write or list: objects, their parts, start and completion of
    /// multipart uploads. Deletions are free. Default: S3's price of PUT, COPY, POST and LIST.
    #[arg(long, default_value_t = 0.005)]
    price_put: f64,
    /// Price of 1,000 GETs. Default: S3's price.
    #[arg(long, default_value_t = 0.0004)]
    price_get: f64,
    /// Price of storing a GiB for a month. Default: S3's price of the first 50 TB.
    #[arg(long, default_value_t = 0.023)]
    price_gib_month: f64,
    /// Price of transferring a GiB out of the object store. Default: S3's price within the region.
    #[arg(long, default_value_t = 0.0)]
    price_transfer_gib: f64,
}

const MEMORY_EVERY: Duration = Duration::from_millis(200);
/// The target: the ratio of the figure with uploads and compaction to the one without.
const MOST_RATIO: f64 = 1.1;

const CAUSES: [&str; 4] = ["upload", "read", "compaction", "clean-up"];
const KINDS: [&str; 6] = ["put", "part", "multipart", "get", "list", "delete"];
const GIBIBYTE: f64 = (1 << 30) as f64;

/// Requests and their bytes, by cause and kind, per GiB produced.
type Requests = [[(f64, f64); KINDS.len()]; CAUSES.len()];

/// The measurements of one server in a round.
struct Round {
    partitions: u32,
    uploads: bool,
    gibibytes: f64,
    /// User and system time of the server, until all produced data was processed.
    cpu_seconds: f64,
    /// Memory while producing.
    memory: Vec<Memory>,
    requests: Requests,
    /// GiB stored at the end, per GiB produced.
    kept: f64,
}

impl Round {
    fn cpu(&self) -> f64 {
        self.cpu_seconds / self.gibibytes
    }

    /// Mean memory beyond the log cache.
    fn mean(&self) -> f64 {
        let beyond = self.memory.iter().map(|memory| memory.resident - memory.cached);
        beyond.sum::<f64>() / self.memory.len() as f64
    }

    fn peak(&self) -> f64 {
        let beyond = self.memory.iter().map(|memory| memory.resident - memory.cached);
        beyond.fold(0.0, f64::max)
    }

    fn peak_of_all(&self) -> f64 {
        self.memory.iter().map(|memory| memory.resident).fold(0.0, f64::max)
    }
}

pub(super) fn run(root: &Path, options: &Options) -> Result<Report, Error> {
    let binary = release_binary(root, options.server.server.as_deref())?;
    let directory = root.join("target/e2e/run/upload");
    let mut rounds = Vec::new();
    for number in 1..=options.rounds {
        for partitions in &options.partitions {
            // The servers alternate in going first.
            for uploads in [number % 2 == 1, number % 2 == 0] {
                let which = if uploads { "with" } else { "without" };
                println!(
                    "round {number} of {}: {partitions} partitions, {which} uploads and compaction",
                    options.rounds
                );
                if directory.exists() {
                    fs::remove_dir_all(&directory)?;
                }
                fs::create_dir_all(&directory)?;
                let round = round(options, *partitions, uploads, &binary, &directory)?;
                println!(
                    "  {:.2} GiB, CPU {:.2} s/GiB, \
                     memory beyond the log cache: mean {:.1} MiB, peak {:.1} MiB",
                    round.gibibytes,
                    round.cpu(),
                    round.mean(),
                    round.peak()
                );
                rounds.push(round);
            }
        }
    }
    fs::remove_dir_all(&directory)?;
    let mut cases = Vec::new();
    for partitions in &options.partitions {
        let of = |uploads: bool| -> Vec<&Round> {
            let this = |round: &&Round| (round.partitions, round.uploads) == (*partitions, uploads);
            rounds.iter().filter(this).collect()
        };
        let (with, without) = (of(true), of(false));
        println!("\n{partitions} partitions, medians of {} rounds", options.rounds);
        println!("{}", comparison(&with, &without));
        println!("{}", costs(&with, &options.prices));
        cases.extend(judge(*partitions, &with, &without));
    }
    let mut report = Report::default();
    report.suite("upload", || Ok(cases));
    Ok(report)
}

fn round(
    options: &Options,
    partitions: u32,
    uploads: bool,
    binary: &Path,
    directory: &Path,
) -> Result<Round, Error> {
    // An upload is at most a quarter of the log, and half of the log cache: with these sizes, none
    // is due before the end. The rest is for overhead around the records.
    let produced = u64::from(options.rate) * u64::from(options.seconds) * 5 / 4 + 64;
    let upload = if uploads {
        [format!("{}MiB", options.upload_size), "10s".into(), "256MiB".into()]
    } else {
        [format!("{produced}MiB"), "1h".into(), "0".into()]
    };
    let names = ["--upload-size", "--upload-interval", "--compaction-size"];
    let arguments = names.map(String::from).into_iter().zip(upload);
    let mut server = Server::start(Config {
        binary: binary.to_path_buf(),
        directory: directory.join("server"),
        wal_mebibytes: produced * 4 + 64,
        log_cache_mebibytes: produced * 2,
        wal: None,
        objects: Some(Objects {
            arguments: arguments.flat_map(|(name, value)| [name, value]).collect(),
            environment: Vec::new(),
        }),
    })?;
    let load = Load::new(binary, server.address(), directory);
    load.create("topic", partitions, &[])?;
    let (rate, seconds) = (format!("{}MiB", options.rate), format!("{}s", options.seconds));
    let before = cpu_time(server.pid())?;
    let (_, memory) = watched(&server, MEMORY_EVERY, || {
        load.run("produce", "topic", &["--rate", &rate, "--duration", &seconds])
    })?;
    // No longer sampled: reading the metrics costs the server something too, and the other server
    // would not be sampled for as long.
    if uploads {
        settle(&server)?;
    }
    let cpu_seconds = (cpu_time(server.pid())? - before).as_secs_f64();
    let metrics = server.metrics()?;
    let value = |name: &str| metrics.get(name).ok_or_else(|| format!("no metric {name}"));
    let gibibytes = value("alluvium_kafka_produced_bytes_total")? / GIBIBYTE;
    let kept = value("alluvium_objects_bytes")? / GIBIBYTE / gibibytes;
    let done = value("alluvium_uploads_total")?;
    if (done > 0.0) != uploads {
        return Err(format!("unexpected number of uploads: {done}").into());
    }
    let mut requests = requests(&metrics, gibibytes);
    if uploads {
        // After a restart the log cache is empty: all reads are cold.
        server.end(Ending::Sigterm)?;
        server.start_again()?;
        load.run("consume", "topic", &[])?;
        let late = self::requests(&server.metrics()?, gibibytes);
        let cause = 1;
        assert_eq!(CAUSES[cause], "read");
        requests[cause] = late[cause];
    }
    Ok(Round { partitions, uploads, gibibytes, cpu_seconds, memory, requests, kept })
}

fn requests(metrics: &Metrics, gibibytes: f64) -> Requests {
    // These metrics appear with the first request.
    let value = |what: &str, cause: &str, kind: &str| {
        let name =
            format!("alluvium_object_store_{what}_total{{cause=\"{cause}\",kind=\"{kind}\"}}");
        metrics.get(&name).unwrap_or(0.0) / gibibytes
    };
    CAUSES.map(|cause| {
        KINDS.map(|kind| (value("requests", cause, kind), value("bytes", cause, kind)))
    })
}

fn of(rounds: &[&Round], figure: impl Fn(&Round) -> f64) -> f64 {
    median(rounds.iter().map(|round| figure(round)))
}

/// A named figure of a round.
type Figure = (&'static str, fn(&Round) -> f64);

const FIGURES: [Figure; 4] = [
    ("CPU, s/GiB", Round::cpu),
    ("memory, peak, MiB", Round::peak_of_all),
    ("memory beyond the log cache, mean, MiB", Round::mean),
    ("memory beyond the log cache, peak, MiB", Round::peak),
];
/// The first of these have a target: the requirements of a machine.
const JUDGED: usize = 2;

fn comparison(with: &[&Round], without: &[&Round]) -> String {
    let mut text = format!("{:<42}{:>10}{:>10}{:>10}", "", "with", "without", "ratio");
    for (name, figure) in FIGURES {
        let (with, without) = (of(with, figure), of(without, figure));
        text.push_str(&format!("\n{name:<42}{with:>10.2}{without:>10.2}{:>10.2}", with / without));
    }
    text
}

fn judge(partitions: u32, with: &[&Round], without: &[&Round]) -> Vec<Case> {
    let judge = |(name, figure): &Figure| {
        let name = format!("{partitions} partitions: {name}, with over without");
        judged(&name, of(with, figure) / of(without, figure), Bar::AtMost(MOST_RATIO))
    };
    FIGURES[..JUDGED].iter().map(judge).collect()
}

/// The price of requests of this kind and of their bytes.
fn price(kind: &str, requests: f64, bytes: f64, prices: &Prices) -> f64 {
    match kind {
        "get" => {
            requests / 1000.0 * prices.price_get + bytes / GIBIBYTE * prices.price_transfer_gib
        }
        "delete" => 0.0,
        _ => requests / 1000.0 * prices.price_put,
    }
}

fn costs(with: &[&Round], prices: &Prices) -> String {
    let mut text = format!(
        "per GiB produced, and read once from objects:\n{:<12}{:<12}{:>10}{:>10}{:>14}",
        "cause", "kind", "requests", "MiB", "money"
    );
    let mut all = (0.0, 0.0, 0.0);
    for (c, cause) in CAUSES.iter().enumerate() {
        for (k, kind) in KINDS.iter().enumerate() {
            let requests = of(with, |round| round.requests[c][k].0);
            let bytes = of(with, |round| round.requests[c][k].1);
            if requests == 0.0 {
                continue;
            }
            let money = price(kind, requests, bytes, prices);
            let mebibytes = bytes / f64::from(1 << 20);
            text.push_str(&format!(
                "\n{cause:<12}{kind:<12}{requests:>10.1}{mebibytes:>10.1}{money:>14.6}"
            ));
            all = (all.0 + requests, all.1 + mebibytes, all.2 + money);
        }
    }
    let kept = of(with, |round| round.kept);
    text.push_str(&format!(
        "\n{:<24}{:>10.1}{:>10.1}{:>14.6}\nstored: {kept:.3} GiB, {:.6} a month",
        "all",
        all.0,
        all.1,
        all.2,
        kept * prices.price_gib_month
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_price_of_its_kind() {
        let prices = Prices {
            price_put: 5.0,
            price_get: 0.5,
            price_gib_month: 100.0,
            price_transfer_gib: 3.0,
        };
        for kind in ["put", "part", "multipart", "list"] {
            assert_eq!(price(kind, 2000.0, GIBIBYTE, &prices), 10.0, "{kind}");
        }
        assert_eq!(price("get", 2000.0, 2.0 * GIBIBYTE, &prices), 7.0);
        assert_eq!(price("delete", 2000.0, 0.0, &prices), 0.0);
    }
}
