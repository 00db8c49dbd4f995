//! Compares reads of the journal cache while it compacts, compresses or evicts with its reads
//! without that. `docs/benchmarks/journal.md`, "Reads beside maintenance".

mod load;
mod report;
mod scenario;

use std::fs::{self, File};
use std::io::Write;
use std::time::Duration;

use serde::Serialize;

use crate::Options;
use crate::engine::Result;
use crate::race::{check_space, remove};
use crate::system;

use load::{Row, Setting};
use report::Results;
use scenario::SCENARIOS;

const MIB: u64 = 1 << 20;

impl Setting {
    fn of(options: &Options) -> Self {
        let bytes_per_second = options.rate * MIB;
        match options.is_measurement() {
            // Small journals, so that one after the other is compacted, compressed or evicted
            // within seconds.
            true => Self {
                journal_bytes: 16 * MIB,
                bytes_per_second,
                lead: Duration::from_secs(2),
                time: Duration::from_secs(options.seconds),
            },
            false => Self {
                journal_bytes: MIB,
                bytes_per_second,
                lead: Duration::from_millis(200),
                time: Duration::from_secs(1),
            },
        }
    }
}

/// A line of `beside.jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    round: u32,
    #[serde(flatten)]
    row: &'a Row,
}

pub fn run(options: &Options) -> Result<()> {
    let setting = Setting::of(options);
    check_space(&options.dir, setting.disk_bytes(), "use fewer --seconds or another --dir")?;
    fs::create_dir_all(&options.out)?;
    let rounds = options.rounds();
    let mut results = Results { setting, rounds, rows: Vec::new(), failures: Vec::new() };
    let mut lines = File::create(options.out.join("beside.jsonl"))?;
    let store = options.dir.join("store");
    for round in 1..=rounds {
        for position in 0..SCENARIOS.len() {
            // No scenario is always the first.
            let scenario = SCENARIOS[(position + round as usize - 1) % SCENARIOS.len()];
            println!("round {round} of {rounds}: reads beside maintenance: {}", scenario.text());
            // Dirty pages of the previous scenario must not be written while this one is measured.
            system::sync(&options.dir)?;
            let measured = load::run(scenario, &setting, &store);
            remove(&store)?;
            match measured {
                Ok(rows) => {
                    for row in rows {
                        println!("  {}", report::line(&row));
                        writeln!(lines, "{}", serde_json::to_string(&Line { round, row: &row })?)?;
                        results.rows.push(row);
                    }
                }
                // A failure does not affect the figures of the others; it is reported at the end.
                Err(error) => {
                    let what = format!("{}, round {round}: {error}", scenario.text());
                    println!("  failed: {what}");
                    results.failures.push(what);
                }
            }
        }
    }
    // Created by this program, and empty by now.
    let _ = fs::remove_dir(&options.dir);
    report::write(&results, &options.out.join("beside.md"))
}
