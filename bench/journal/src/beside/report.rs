//! The table of reads during maintenance, and its targets.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::load::{Row, Setting};
use super::scenario::{READS, Reads, SCENARIOS, Scenario};
use crate::engine::Result;
use crate::report::{Judged, Line, Table, median};

/// The ratio of times with and without maintenance.
const MOST_TIMES: f64 = 2.0;
/// With fewer samples a p99 is not significant.
const LEAST_TIMED: u64 = 1000;
/// The maximum part on disk of the reads in memory without maintenance. With more, their p99
/// approaches that of the disk.
const MOST_ON_DISK: f64 = 0.001;

const MIB: f64 = 1048576.0;

/// The contents of the table.
pub struct Results {
    pub setting: Setting,
    pub rounds: u32,
    pub rows: Vec<Row>,
    /// Failed runs, and why.
    pub failures: Vec<String>,
}

impl Results {
    fn of(&self, reads: Reads, scenario: Scenario) -> Vec<&Row> {
        let is_one = |row: &&Row| (row.reads, row.scenario) == (reads, scenario);
        self.rows.iter().filter(is_one).collect()
    }

    fn note(&self) -> String {
        let setting = &self.setting;
        format!(
            "journals of {:.0} MiB; {:.0} MiB of records put a second meanwhile; each measured for \
             {:.0} s; medians of {} rounds, the longest of all",
            setting.journal_bytes as f64 / MIB,
            setting.bytes_per_second as f64 / MIB,
            setting.time.as_secs_f64(),
            self.rounds
        )
    }
}

/// Returns the median of all rounds.
fn figure(rows: &[&Row], figure: impl Fn(&Row) -> f64) -> f64 {
    median(rows.iter().copied().map(figure)).unwrap_or(f64::NAN)
}

fn journals_per_second(row: &Row) -> f64 {
    row.work.of(row.scenario) / row.seconds
}

/// Formats a measurement as progress output.
pub fn line(row: &Row) -> String {
    format!(
        "{:<23}{:>9.0} reads/s, p50 {:.2} us, p99 {:.2}, p99.9 {:.2}, longest {:.0}; {:.1}% on \
         disk; {:.2} journals/s{}",
        row.reads.text(),
        row.reads_per_second,
        row.p50_us,
        row.p99_us,
        row.p999_us,
        row.longest_us,
        row.on_disk * 100.0,
        journals_per_second(row),
        remarks(&[row])
    )
}

fn remarks(rows: &[&Row]) -> String {
    let total = |count: fn(&Row) -> u64| rows.iter().copied().map(count).sum::<u64>();
    let all = [
        (total(|row| row.work.promoted), "journals promoted"),
        (total(|row| row.stalls), "waits of the writer"),
        (total(|row| row.missing), "not found"),
        (total(|row| row.wrong), "WRONG"),
    ];
    let mut text = String::new();
    for (count, what) in all.into_iter().filter(|(count, _)| *count > 0) {
        let _ = write!(text, "; {count} {what}");
    }
    text
}

/// Returns why the figures of a scenario are not valid, if they are not.
fn fault(reads: Reads, scenario: Scenario, rows: &[&Row]) -> Option<String> {
    if rows.is_empty() {
        return Some("it was not measured".into());
    }
    let wrong: u64 = rows.iter().map(|row| row.wrong).sum();
    if wrong > 0 {
        return Some(format!("{wrong} values belonged to another key"));
    }
    let missing: u64 = rows.iter().map(|row| row.missing).sum();
    // The oldest puts may have been evicted.
    let may_miss = (reads, scenario) == (Reads::Disk, Scenario::Eviction);
    if missing > 0 && !may_miss {
        return Some(format!("{missing} keys were not found"));
    }
    let timed = rows.iter().map(|row| row.timed).min().unwrap_or(0);
    if timed < LEAST_TIMED {
        return Some(format!("only {timed} reads were timed"));
    }
    let done = |row: &&Row| row.work.of(scenario) > 0.0;
    let on_disk = rows.iter().map(|row| row.on_disk).fold(0.0, f64::max);
    match scenario {
        quiet if quiet.is_quiet() => {
            if rows.iter().any(done) {
                return Some("there was maintenance".into());
            }
            let is_cold = reads == Reads::Memory && on_disk > MOST_ON_DISK;
            is_cold.then(|| format!("{:.1}% of the reads were not in memory", on_disk * 100.0))
        }
        _ if rows.iter().all(done) => None,
        _ => Some(format!("a round had no {}", scenario.text())),
    }
}

/// Returns the targets of these reads, in the order of the scenarios.
fn judge(results: &Results, reads: Reads) -> Vec<Judged> {
    let judge_one = |scenario: Scenario| {
        let (without, beside) = (results.of(reads, reads.without()), results.of(reads, scenario));
        let name = format!("reads {} beside {}, p99", reads.text(), scenario.text());
        let fault = fault(reads, scenario, &beside).or_else(|| {
            let fault = fault(reads, reads.without(), &without)?;
            Some(format!("without it, {fault}"))
        });
        if let Some(detail) = fault {
            return Judged { name, detail, is_met: false };
        }
        let p99 = |rows: &[&Row]| figure(rows, |row| row.p99_us);
        let (with_us, without_us) = (p99(&beside), p99(&without));
        let detail = format!(
            "{with_us:.2} us, {:.2} times {without_us:.2} without, target at most {MOST_TIMES}",
            with_us / without_us
        );
        Judged { name, detail, is_met: with_us <= without_us * MOST_TIMES }
    };
    let others = SCENARIOS.into_iter().filter(|scenario| !scenario.is_quiet());
    others.filter(|scenario| scenario.reads().contains(&reads)).map(judge_one).collect()
}

fn table(results: &Results) -> Table {
    let head = vec![
        "reads",
        "beside",
        "reads/s",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "longest us",
        "p99, times",
        "on disk %",
        "journals/s",
        "put MiB/s",
        "remarks",
    ];
    let mut lines = Vec::new();
    for reads in READS {
        let quiet_us = figure(&results.of(reads, reads.without()), |row| row.p99_us);
        for scenario in SCENARIOS {
            let rows = results.of(reads, scenario);
            if rows.is_empty() {
                continue;
            }
            let cell = |figure_of: fn(&Row) -> f64, digits: usize| {
                format!("{:.digits$}", figure(&rows, figure_of))
            };
            let longest_us = rows.iter().map(|row| row.longest_us).fold(0.0, f64::max);
            lines.push(Line::Cells(vec![
                reads.text().into(),
                scenario.text().into(),
                cell(|row| row.reads_per_second, 0),
                cell(|row| row.p50_us, 2),
                cell(|row| row.p99_us, 2),
                cell(|row| row.p999_us, 2),
                format!("{longest_us:.0}"),
                format!("{:.2}", figure(&rows, |row| row.p99_us) / quiet_us),
                cell(|row| row.on_disk * 100.0, 1),
                cell(journals_per_second, 2),
                cell(|row| row.put_bytes_per_second / MIB, 1),
                remarks(&rows).trim_start_matches("; ").into(),
            ]));
        }
        lines.extend(judge(results, reads).iter().map(|it| Line::Through(it.line())));
    }
    Table { head, lines }
}

/// Prints everything, and writes the table.
pub fn write(results: &Results, markdown: &Path) -> Result<()> {
    let table = table(results);
    println!("\nreads beside maintenance: {}", results.note());
    println!("{}", table.text());
    let mut text = format!("### Reads beside maintenance\n\n- {}\n", results.note());
    for failure in &results.failures {
        println!("failed: {failure}");
        let _ = writeln!(text, "- failed: {failure}");
    }
    let _ = writeln!(text, "\n{}", table.markdown());
    fs::write(markdown, text)?;
    println!("wrote {}", markdown.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::load::Work;
    use super::*;

    fn row(reads: Reads, scenario: Scenario, p99_us: f64) -> Row {
        let work = match scenario {
            Scenario::Quiet | Scenario::Compressed => Work::default(),
            Scenario::Compaction => Work { compacted: 3, ..Work::default() },
            Scenario::Compression => Work { compressed: 3, ..Work::default() },
            Scenario::Eviction => Work { evicted: 2.5, ..Work::default() },
        };
        Row {
            reads,
            scenario,
            seconds: 2.0,
            reads_per_second: 1e6,
            timed: LEAST_TIMED,
            p50_us: 0.5,
            p99_us,
            p999_us: 9.0,
            longest_us: 99.0,
            on_disk: if reads == Reads::Memory { 0.0 } else { 0.9 },
            wrong: 0,
            missing: 0,
            work,
            put_bytes_per_second: MIB,
            stalls: 0,
        }
    }

    /// Returns complete results: 1 us without maintenance, and `beside_us` with it.
    fn results(beside_us: f64) -> Results {
        let mut rows = Vec::new();
        for scenario in SCENARIOS {
            let p99_us = if scenario.is_quiet() { 1.0 } else { beside_us };
            rows.extend(scenario.reads().iter().map(|reads| row(*reads, scenario, p99_us)));
        }
        let setting = Setting {
            journal_bytes: 16 << 20,
            bytes_per_second: 20 << 20,
            lead: Duration::ZERO,
            time: Duration::from_secs(2),
        };
        Results { setting, rounds: 1, rows, failures: Vec::new() }
    }

    fn change(results: &mut Results, reads: Reads, scenario: Scenario, how: impl Fn(&mut Row)) {
        let rows = results.rows.iter_mut();
        rows.filter(|row| (row.reads, row.scenario) == (reads, scenario)).for_each(how);
    }

    fn judged(results: &Results, reads: Reads) -> Vec<bool> {
        judge(results, reads).iter().map(|judged| judged.is_met).collect()
    }

    #[test]
    fn a_ratio_of_two_meets_the_target_and_more_does_not() {
        assert_eq!(judged(&results(2.0), Reads::Memory), [true; 3]);
        assert_eq!(judged(&results(2.0), Reads::Disk), [true; 2], "beside the others");
        assert_eq!(judged(&results(2.0), Reads::Compressed), [true], "beside compression");
        assert_eq!(judged(&results(2.01), Reads::Memory), [false; 3]);
        assert_eq!(judged(&results(2.01), Reads::Disk), [false; 2]);
        assert_eq!(judged(&results(2.01), Reads::Compressed), [false]);
    }

    #[test]
    fn compressed_reads_are_compared_with_the_compressed_baseline() {
        let compressed = Reads::Compressed;
        let mut slow = results(1.9);
        change(&mut slow, Reads::Disk, Scenario::Quiet, |row| row.p99_us = 0.1);
        assert_eq!(judged(&slow, compressed), [true]);
        change(&mut slow, compressed, Scenario::Compressed, |row| row.p99_us = 0.9);
        assert_eq!(judged(&slow, compressed), [false]);
        let mut busy = results(1.0);
        change(&mut busy, compressed, Scenario::Compressed, |row| row.work.compressed = 1);
        assert_eq!(judged(&busy, compressed), [false]);
        let mut none = results(1.0);
        none.rows.retain(|row| row.scenario != Scenario::Compressed);
        assert_eq!(judged(&none, compressed), [false]);
    }

    #[test]
    fn the_median_of_the_rounds_counts() {
        let mut results = results(1.0);
        for p99_us in [9.0, 1.5] {
            results.rows.push(row(Reads::Memory, Scenario::Eviction, p99_us));
        }
        assert_eq!(judged(&results, Reads::Memory), [true; 3]);
        results.rows.push(row(Reads::Memory, Scenario::Eviction, 9.0));
        assert_eq!(judged(&results, Reads::Memory), [true, true, false]);
    }

    #[test]
    fn measurements_without_maintenance_miss_the_target() {
        let memory = Reads::Memory;
        let mut lazy = results(1.0);
        change(&mut lazy, memory, Scenario::Compression, |row| row.work = Work::default());
        assert_eq!(judged(&lazy, memory), [true, false, true]);
        assert_eq!(judged(&lazy, Reads::Disk), [true; 2]);
        let mut busy = results(1.0);
        change(&mut busy, memory, Scenario::Quiet, |row| row.work.compressed = 1);
        assert_eq!(judged(&busy, memory), [false; 3]);
        let mut cold = results(1.0);
        change(&mut cold, memory, Scenario::Quiet, |row| row.on_disk = 0.01);
        assert_eq!(judged(&cold, memory), [false; 3]);
        let mut none = results(1.0);
        none.rows.retain(|row| row.scenario != Scenario::Compaction);
        assert_eq!(judged(&none, memory), [false, true, true]);
    }

    #[test]
    fn missing_or_wrong_values_miss_the_target() {
        for (scenario, missed) in
            [(Scenario::Compaction, [false, true]), (Scenario::Eviction, [true, true])]
        {
            let mut results = results(1.0);
            change(&mut results, Reads::Disk, scenario, |row| row.missing = 1);
            assert_eq!(judged(&results, Reads::Disk), missed, "eviction takes the oldest");
        }
        let mut results = results(1.0);
        change(&mut results, Reads::Disk, Scenario::Eviction, |row| row.wrong = 1);
        assert_eq!(judged(&results, Reads::Disk), [true, false]);
        change(&mut results, Reads::Disk, Scenario::Compaction, |row| row.timed = 9);
        assert_eq!(judged(&results, Reads::Disk), [false, false]);
    }

    #[test]
    fn the_table_has_each_scenario_and_each_target() {
        let text = table(&results(1.5)).text();
        let has = |reads: &str, beside: &str| {
            let line = format!("{reads:<22}  {beside:<17}  1000000");
            text.lines().any(|it| it.starts_with(&line))
        };
        assert!(has("in memory", "compression"), "{text}");
        assert!(has("of compressed journals", "quiet, compressed"), "{text}");
        assert!(has("of compressed journals", "compression"), "{text}");
        assert!(!has("of the disk", "compression"), "{text}");
        assert!(
            text.contains(
                "\nbar: met: reads of the disk beside eviction, p99: 1.50 us, 1.50 times 1.00 \
                 without, target at most 2\n"
            ),
            "{text}"
        );
    }
}
