//! Tables, targets and plots.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use alluvium_chart::{Bar, Bars, Panel};

use crate::child::{Message, Plan, Row, Store};
use crate::engine::Result;
use crate::engines::Name;
use crate::race::{Results, Scene};
use crate::workload::Workload;

const OURS: Name = Name::Journal;
/// Relative to the fastest of the others. An iteration of LMDB is a walk over its map.
const MOST_READSEQ: f64 = 1.5;
// In us of processor time of the calling threads, with data that fit.
const MOST_WRITE_CPU: f64 = 0.5;
const MOST_READ_CPU: f64 = 0.75;
const MOST_GETMANY_CPU: f64 = 0.35;
/// For ten million entries, in seconds; fewer must not take longer.
const MOST_OPEN: f64 = 2.0;
/// An engine that finds less has done less work, and is not compared.
const LEAST_FOUND: f64 = 0.999;

const MIB: f64 = 1048576.0;

const WORKLOADS: [Workload; 8] = [
    Workload::Fillseq,
    Workload::Fillrandom,
    Workload::Overwrite,
    Workload::Readseq,
    Workload::Readrandom,
    Workload::Readmissing,
    Workload::Getmany,
    Workload::Mixed,
];

pub fn scene(scene: Scene) -> String {
    let threads = if scene.threads == 1 {
        "1 thread".to_owned()
    } else {
        format!("{} threads", scene.threads)
    };
    format!("data {} memory, {threads}", if scene.is_large { "4 times the" } else { "within" })
}

/// Formats a message of a child as progress output.
pub fn line(message: &Message) -> String {
    match message {
        Message::Row(row) => format!(
            "{:<12}{:>9.3} us, {:.3} us of CPU, {:.3} of the process, p99 {:.2} us, {:.0} MiB \
             resident{}",
            row.workload.text(),
            row.wall_us,
            row.cpu_us,
            row.process_cpu_us,
            row.p99_us,
            row.peak_bytes as f64 / MIB,
            remarks(row.found, row.wrong, row.workload.fills() && row.is_cut)
        ),
        Message::Store(store) => format!(
            "{:<12}{:.0} MiB on disk, {:.2} bytes written per byte put, opened in {:.2} s",
            "closed",
            store.disk_bytes as f64 / MIB,
            written(store),
            store.open_seconds
        ),
    }
}

fn remarks(found: f64, wrong: u64, is_given_up: bool) -> String {
    let mut text = String::new();
    if found < 1.0 {
        let _ = write!(text, "; found {:.1}%", found * 100.0);
    }
    if wrong > 0 {
        let _ = write!(text, "; {wrong} WRONG");
    }
    if is_given_up {
        text.push_str("; given up");
    }
    text
}

fn written(store: &Store) -> f64 {
    store.written_bytes as f64 / store.user_bytes.max(1) as f64
}

/// Returns the middle value, or the mean of the two in the middle.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some(f64::midpoint(values[low], values[high]))
}

impl Results {
    fn rows(&self, scene: Scene, engine: Name, workload: Workload) -> impl Iterator<Item = &Row> {
        self.outcomes.iter().filter_map(move |outcome| match &outcome.message {
            Message::Row(row)
                if (outcome.scene, outcome.engine, row.workload) == (scene, engine, workload) =>
            {
                Some(row)
            }
            _ => None,
        })
    }

    fn stores(&self, scene: Scene, engine: Name, plan: Plan) -> impl Iterator<Item = &Store> {
        self.outcomes.iter().filter_map(move |outcome| match &outcome.message {
            Message::Store(store)
                if (outcome.scene, outcome.engine, store.plan) == (scene, engine, plan) =>
            {
                Some(store)
            }
            _ => None,
        })
    }

    /// Returns how often an engine was measured.
    fn rounds(&self, scene: Scene, engine: Name) -> usize {
        let rounds = WORKLOADS.iter().map(|workload| self.rows(scene, engine, *workload).count());
        rounds.max().unwrap_or(0)
    }

    fn most_rounds(&self, scene: Scene) -> usize {
        self.engines.iter().map(|engine| self.rounds(scene, *engine)).max().unwrap_or(0)
    }

    fn of(
        &self,
        scene: Scene,
        engine: Name,
        workload: Workload,
        figure: fn(&Row) -> f64,
    ) -> Option<f64> {
        median(self.rows(scene, engine, workload).map(figure))
    }

    /// Returns whether an engine has done all of a workload, each time.
    fn has_done(&self, scene: Scene, engine: Name, workload: Workload) -> bool {
        self.rows(scene, engine, workload).all(|row| row.found >= LEAST_FOUND && row.wrong == 0)
    }

    /// Returns the fastest of the others that have done all of a workload.
    fn best_other(&self, scene: Scene, workload: Workload) -> Option<(Name, f64)> {
        let others = self.engines.iter().filter(|engine| **engine != OURS);
        others
            .filter(|engine| self.has_done(scene, **engine, workload))
            .filter_map(|engine| {
                Some((*engine, self.of(scene, *engine, workload, |row| row.wall_us)?))
            })
            .min_by(|one, other| one.1.total_cmp(&other.1))
    }
}

/// A target, and whether it is met.
pub struct Judged {
    pub name: String,
    pub detail: String,
    pub is_met: bool,
}

impl Judged {
    pub fn line(&self) -> String {
        let met = if self.is_met { "met" } else { "missed" };
        format!("bar: {met}: {}: {}", self.name, self.detail)
    }
}

fn most(name: String, value: f64, unit: &str, most: f64) -> Judged {
    let detail = format!("{value:.3} {unit}, target at most {most}");
    Judged { name, detail, is_met: value <= most }
}

/// Returns the targets of a workload.
fn judge(results: &Results, of: Scene, workload: Workload) -> Vec<Judged> {
    if !results.engines.contains(&OURS) {
        return Vec::new();
    }
    let name = |what: &str| format!("{}, {}, {what}", scene(of), workload.text());
    let Some(ours) = results.of(of, OURS, workload, |row| row.wall_us) else {
        return vec![Judged {
            name: name("done"),
            detail: "it was not done".into(),
            is_met: false,
        }];
    };
    let mut judged = Vec::new();
    if !results.has_done(of, OURS, workload) {
        let found = results.of(of, OURS, workload, |row| row.found).unwrap_or(0.0);
        let wrong: u64 = results.rows(of, OURS, workload).map(|row| row.wrong).sum();
        let detail =
            format!("it found {:.1}% of the present keys, and {wrong} wrong values", found * 100.0);
        judged.push(Judged { name: name("all found"), detail, is_met: false });
    }
    let factor = match workload {
        Workload::Readseq => Some(MOST_READSEQ),
        Workload::Readrandom | Workload::Readmissing => Some(1.0),
        _ => workload.writes().then_some(1.0),
    };
    if let Some(factor) = factor.filter(|_| results.engines.len() > 1) {
        let what = if factor > 1.0 { "within 1.5 of the best" } else { "first" };
        judged.push(match results.best_other(of, workload) {
            Some((engine, theirs)) => Judged {
                name: name(what),
                detail: format!(
                    "{ours:.3} us; the best of the others is {}, {theirs:.3}",
                    engine.text()
                ),
                is_met: ours <= theirs * factor,
            },
            None => Judged {
                name: name(what),
                detail: format!("{ours:.3} us; no other engine has done it"),
                is_met: false,
            },
        });
    }
    let most_cpu = match workload {
        Workload::Readrandom => Some(MOST_READ_CPU),
        Workload::Getmany => Some(MOST_GETMANY_CPU),
        _ => workload.writes().then_some(MOST_WRITE_CPU),
    };
    let cpu = results.of(of, OURS, workload, |row| row.cpu_us);
    if let (false, Some(bar), Some(cpu)) = (of.is_large, most_cpu, cpu) {
        judged.push(most(name("CPU of the calling thread"), cpu, "us", bar));
    }
    judged
}

/// Returns the target of an opening: of the store that takes longer.
fn judge_opening(results: &Results, of: Scene) -> Option<Judged> {
    let of_plan = |plan| median(results.stores(of, OURS, plan).map(|store| store.open_seconds));
    let seconds = [Plan::Ordered, Plan::Random].into_iter().filter_map(of_plan).reduce(f64::max)?;
    Some(most(format!("{}, opening", scene(of)), seconds, "s", MOST_OPEN))
}

/// Rows of cells, and rows that span all columns.
pub struct Table {
    pub head: Vec<&'static str>,
    pub lines: Vec<Line>,
}

pub enum Line {
    Cells(Vec<String>),
    Through(String),
}

/// Formats a row: names to the left, numbers to the right.
fn row_of<'a>(widths: &[usize], cells: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::new();
    for (n, (width, cell)) in widths.iter().zip(cells).enumerate() {
        let _ = match n < 2 || n + 1 == widths.len() {
            true => write!(text, "{cell:<width$}  "),
            false => write!(text, "{cell:>width$}  "),
        };
    }
    text.trim_end().to_owned() + "\n"
}

impl Table {
    pub fn text(&self) -> String {
        let mut widths: Vec<usize> = self.head.iter().map(|cell| cell.len()).collect();
        for line in &self.lines {
            if let Line::Cells(cells) = line {
                for (width, cell) in widths.iter_mut().zip(cells) {
                    *width = (*width).max(cell.chars().count());
                }
            }
        }
        let mut text = row_of(&widths, self.head.iter().copied());
        for line in &self.lines {
            match line {
                Line::Cells(cells) => text += &row_of(&widths, cells.iter().map(String::as_str)),
                Line::Through(line) => {
                    text.push_str(line);
                    text.push('\n');
                }
            }
        }
        text
    }

    pub fn markdown(&self) -> String {
        let mut text = format!("| {} |\n|", self.head.join(" | "));
        text += &"---|".repeat(self.head.len());
        text.push('\n');
        for line in &self.lines {
            if let Line::Cells(cells) = line {
                let _ = writeln!(text, "| {} |", cells.join(" | "));
            }
        }
        for line in &self.lines {
            if let Line::Through(line) = line {
                let _ = write!(text, "\n- {line}");
            }
        }
        text.push('\n');
        text
    }
}

fn workloads(results: &Results, of: Scene) -> Table {
    let head = vec![
        "workload",
        "engine",
        "us/op",
        "CPU us/op",
        "process CPU us/op",
        "p99 us",
        "resident MiB",
        "peak MiB",
        "remarks",
    ];
    let mut lines = Vec::new();
    for workload in WORKLOADS {
        for engine in &results.engines {
            let figure = |figure: fn(&Row) -> f64| results.of(of, *engine, workload, figure);
            let Some(wall) = figure(|row| row.wall_us) else { continue };
            let cell = |value: Option<f64>, digits: usize| {
                value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
            };
            let rows = || results.rows(of, *engine, workload);
            let found = rows().map(|row| row.found).fold(1.0, f64::min);
            let is_given_up = rows().any(|row| row.is_cut && workload.fills());
            let remarks = remarks(found, rows().map(|row| row.wrong).sum(), is_given_up);
            lines.push(Line::Cells(vec![
                workload.text().into(),
                engine.text().into(),
                cell(Some(wall), 3),
                cell(figure(|row| row.cpu_us), 3),
                cell(figure(|row| row.process_cpu_us), 3),
                cell(figure(|row| row.p99_us), 2),
                cell(figure(|row| row.resident_bytes as f64 / MIB), 0),
                cell(figure(|row| row.peak_bytes as f64 / MIB), 0),
                remarks.trim_start_matches("; ").into(),
            ]));
        }
        lines.extend(judge(results, of, workload).iter().map(|it| Line::Through(it.line())));
    }
    Table { head, lines }
}

fn stores(results: &Results, of: Scene) -> Table {
    let head = vec![
        "store",
        "engine",
        "MiB on disk",
        "per byte of data",
        "written per byte put",
        "close s",
        "open s",
        "open without hints s",
        "remarks",
    ];
    let data = results.entries as f64 * crate::workload::ENTRY_BYTES as f64;
    let mut lines = Vec::new();
    for (plan, name) in [(Plan::Ordered, "fillseq"), (Plan::Random, "the others")] {
        for engine in &results.engines {
            let all = || results.stores(of, *engine, plan);
            let figure = |figure: fn(&Store) -> f64, digits: usize| {
                median(all().map(figure))
                    .map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
            };
            let Some(disk) = median(all().map(|store| store.disk_bytes as f64)) else { continue };
            let bare = median(all().filter_map(|store| store.open_bare_seconds));
            let kept = all().filter_map(|store| store.kept).fold(1.0, f64::min);
            let mut remarks = String::new();
            if kept < 1.0 {
                remarks = format!("found {:.1}% when opened again", kept * 100.0);
            }
            lines.push(Line::Cells(vec![
                name.into(),
                engine.text().into(),
                format!("{:.0}", disk / MIB),
                format!("{:.2}", disk / data),
                figure(written, 2),
                figure(|store| store.close_seconds, 2),
                figure(|store| store.open_seconds, 2),
                bare.map_or_else(|| "-".into(), |seconds| format!("{seconds:.2}")),
                remarks,
            ]));
        }
    }
    lines.extend(judge_opening(results, of).iter().map(|it| Line::Through(it.line())));
    Table { head, lines }
}

/// Formats up to three significant digits.
fn short(value: f64) -> String {
    let digits = match value {
        _ if value >= 99.95 => 0,
        _ if value >= 9.995 => 1,
        _ if value >= 0.0995 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Returns a smaller table with everything in the tables of a scene, a column for each engine.
fn columns(results: &Results, of: Scene) -> Table {
    let there: Vec<Name> =
        results.engines.iter().copied().filter(|it| results.rounds(of, *it) > 0).collect();
    let mut lines = Vec::new();
    let mut line = |name: String, cell: &dyn Fn(Name) -> Option<String>| {
        let cells = there.iter().map(|engine| cell(*engine).unwrap_or_else(|| "-".into()));
        lines.push(Line::Cells(std::iter::once(name).chain(cells).collect()));
    };
    line("rounds".into(), &|engine| Some(results.rounds(of, engine).to_string()));
    for workload in WORKLOADS {
        line(format!("{}, us/op (CPU us)", workload.text()), &|engine| {
            let wall = results.of(of, engine, workload, |row| row.wall_us)?;
            let cpu = results.of(of, engine, workload, |row| row.cpu_us)?;
            let mark = if results.has_done(of, engine, workload) { "" } else { " *" };
            Some(format!("{} ({}){mark}", short(wall), short(cpu)))
        });
    }
    for workload in WORKLOADS {
        line(format!("{}, p99 us", workload.text()), &|engine| {
            results.of(of, engine, workload, |row| row.p99_us).map(short)
        });
    }
    line("MiB resident, most".into(), &|engine| {
        let peaks = WORKLOADS
            .iter()
            .filter_map(|workload| results.of(of, engine, *workload, |row| row.peak_bytes as f64));
        peaks.reduce(f64::max).map(|bytes| format!("{:.0}", bytes / MIB))
    });
    let mut pair = |name: &str, figure: &dyn Fn(&Store) -> Option<f64>, cell: fn(f64) -> String| {
        line(name.into(), &|engine| {
            let of_plan = |plan| {
                let figures = results.stores(of, engine, plan).filter_map(figure);
                median(figures).map_or_else(|| "-".into(), cell)
            };
            Some([Plan::Ordered, Plan::Random].map(of_plan).join(", "))
        });
    };
    let whole = |value: f64| format!("{value:.0}");
    pair("MiB on disk (first, second store)", &|store| Some(store.disk_bytes as f64 / MIB), whole);
    pair("written per byte put", &|store| Some(written(store)), |value| format!("{value:.1}"));
    pair("opened again in s", &|store| Some(store.open_seconds), |value| format!("{value:.2}"));
    pair("the same without hints", &|store| store.open_bare_seconds, |value| format!("{value:.2}"));
    let head = std::iter::once("").chain(there.iter().map(|engine| engine.text())).collect();
    Table { head, lines }
}

/// Prints everything, and writes the tables and the plots.
pub fn write(results: &Results, out: &Path, plots: Option<&Path>) -> Result<()> {
    let mut text = String::new();
    let mut docs = String::new();
    for note in results.notes.iter().chain(&results.failures) {
        let _ = writeln!(text, "- {note}");
    }
    for of in &results.scenes {
        let rounds = results.most_rounds(*of);
        println!("\n{}, medians of {rounds} rounds", scene(*of));
        let _ = writeln!(text, "\n### {}, medians of {rounds} rounds\n", scene(*of));
        let _ = writeln!(docs, "### {}\n\n{}", scene(*of), columns(results, *of).markdown());
        for table in [workloads(results, *of), stores(results, *of)] {
            println!("{}", table.text());
            let _ = writeln!(text, "{}", table.markdown());
        }
        if let Some(directory) = plots {
            plot(results, *of, directory)?;
        }
    }
    for failure in &results.failures {
        println!("failed: {failure}");
    }
    for (name, text) in [("tables.md", text), ("docs.md", docs)] {
        let path = out.join(name);
        fs::write(&path, text)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

fn plot(results: &Results, of: Scene, directory: &Path) -> Result<()> {
    let panel = |workload: Workload| {
        let bar = |engine: &Name| {
            let value = results.of(of, *engine, workload, |row| row.wall_us)?;
            // An engine that has not done all of it is in the table with a remark.
            let is_whole = results.has_done(of, *engine, workload);
            is_whole.then(|| Bar { name: engine.text().into(), value })
        };
        let bars: Vec<Bar> = results.engines.iter().filter_map(bar).collect();
        (!bars.is_empty()).then(|| Panel { title: workload.text().into(), bars })
    };
    let chart = Bars {
        title: format!("Journal cache and others: {}", scene(of)),
        subtitle: format!(
            "us for each key, less is better; {} entries of 16 + 100 bytes, no sync; medians of {} \
             rounds",
            results.entries,
            results.most_rounds(of)
        ),
        panels: WORKLOADS.into_iter().filter_map(panel).collect(),
    };
    fs::create_dir_all(directory)?;
    let size = if of.is_large { "large" } else { "fits" };
    let path = directory.join(format!("journal-{size}-{}.svg", of.threads));
    fs::write(&path, chart.render())?;
    println!("wrote {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::race::Outcome;

    const SCENE: Scene = Scene { is_large: false, threads: 1 };

    fn outcome(engine: Name, workload: Workload, us: f64, found: f64) -> Outcome {
        let message = Message::Row(Row {
            workload,
            operations: 1000,
            found,
            wrong: 0,
            wall_us: us,
            cpu_us: us,
            process_cpu_us: us,
            p99_us: us,
            resident_bytes: 1 << 20,
            peak_bytes: 1 << 20,
            is_cut: false,
        });
        Outcome { engine, scene: SCENE, round: 1, message }
    }

    fn results(outcomes: Vec<Outcome>) -> Results {
        Results {
            entries: 1000,
            engines: vec![Name::Journal, Name::Lmdb, Name::Foyer],
            scenes: vec![SCENE],
            outcomes,
            notes: vec!["a note".into()],
            failures: Vec::new(),
        }
    }

    fn judged(results: &Results, workload: Workload) -> Vec<bool> {
        judge(results, SCENE, workload).iter().map(|judged| judged.is_met).collect()
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median([].into_iter()), None);
    }

    #[test]
    fn the_targets_are_the_documented_ones() {
        let read = Workload::Readrandom;
        let two = |ours: f64, theirs: f64, workload| {
            let outcomes = vec![
                outcome(Name::Journal, workload, ours, 1.0),
                outcome(Name::Lmdb, workload, theirs, 1.0),
            ];
            judged(&results(outcomes), workload)
        };
        assert_eq!(two(0.7, 2.0, read), [true, true]);
        assert_eq!(two(0.8, 0.79, read), [false, false]);
        assert_eq!(two(0.04, 0.03, Workload::Readseq), [true]);
        assert_eq!(two(0.05, 0.03, Workload::Readseq), [false]);
        assert_eq!(two(0.5, 0.6, Workload::Overwrite), [true, true]);
        assert_eq!(two(0.51, 0.6, Workload::Overwrite), [true, false]);
        assert_eq!(two(0.36, 0.1, Workload::Getmany), [false], "it need not be the first there");
        assert_eq!(two(9.0, 1.0, Workload::Mixed), [true; 0]);
    }

    #[test]
    fn engines_that_find_less_are_not_first_and_idle_ones_fail() {
        let read = Workload::Readrandom;
        let mut outcomes = vec![
            outcome(Name::Journal, read, 0.7, 1.0),
            outcome(Name::Lmdb, read, 2.0, 1.0),
            outcome(Name::Foyer, read, 0.1, 0.5),
        ];
        assert_eq!(judged(&results(outcomes.clone()), read), [true, true]);
        outcomes[0] = outcome(Name::Journal, read, 0.7, 0.9);
        assert_eq!(judged(&results(outcomes), read), [false, true, true]);
        assert_eq!(judged(&results(Vec::new()), read), [false]);
        let alone = vec![outcome(Name::Journal, read, 0.7, 1.0)];
        assert_eq!(judged(&results(alone.clone()), read), [false, true], "nothing is shown");
        let asked = Results { engines: vec![Name::Journal], ..results(alone) };
        assert_eq!(judged(&asked, read), [true], "no other engine was to run");
    }

    #[test]
    fn the_slower_opening_is_compared() {
        let store = |plan, open_seconds| {
            let message = Message::Store(Store {
                plan,
                disk_bytes: 1000,
                user_bytes: 1000,
                written_bytes: 1000,
                close_seconds: 0.1,
                open_seconds,
                open_bare_seconds: None,
                kept: None,
            });
            Outcome { engine: Name::Journal, scene: SCENE, round: 1, message }
        };
        let is_met = |ordered, random| {
            let outcomes = vec![store(Plan::Ordered, ordered), store(Plan::Random, random)];
            judge_opening(&results(outcomes), SCENE).map(|judged| judged.is_met)
        };
        assert_eq!(is_met(2.0, 1.0), Some(true));
        assert_eq!(is_met(2.1, 1.0), Some(false));
        assert_eq!(is_met(1.0, 2.1), Some(false));
        assert!(judge_opening(&results(Vec::new()), SCENE).is_none());
    }

    #[test]
    fn tables_have_each_engine_and_each_target() {
        let outcomes = vec![
            outcome(Name::Journal, Workload::Fillseq, 0.4, 1.0),
            outcome(Name::Lmdb, Workload::Fillseq, 1.25, 1.0),
        ];
        let table = workloads(&results(outcomes), SCENE);
        let text = table.text();
        assert!(text.contains("\nfillseq   LMDB     1.250"), "{text}");
        assert!(
            text.contains("\nbar: met: data within memory, 1 thread, fillseq, first: "),
            "{text}"
        );
        let markdown = table.markdown();
        assert!(markdown.contains("\n| fillseq | LMDB | 1.250 |"), "{markdown}");
        assert!(markdown.contains("\n- bar: met: "), "{markdown}");
    }

    #[test]
    fn the_summary_table_has_a_column_for_each_engine() {
        let outcomes = vec![
            outcome(Name::Journal, Workload::Fillseq, 0.0412, 1.0),
            outcome(Name::Journal, Workload::Fillseq, 0.4567, 1.0),
            outcome(Name::Journal, Workload::Fillseq, 123.4, 1.0),
            outcome(Name::Foyer, Workload::Fillseq, 12.34, 0.9),
        ];
        let markdown = columns(&results(outcomes), SCENE).markdown();
        assert!(markdown.starts_with("|  | journal | foyer |\n"), "{markdown}");
        assert!(markdown.contains("\n| rounds | 3 | 1 |\n"), "{markdown}");
        let fill = "\n| fillseq, us/op (CPU us) | 0.46 (0.46) | 12.3 (12.3) * |\n";
        assert!(markdown.contains(fill), "{markdown}");
        assert!(markdown.contains("\n| readseq, p99 us | - | - |\n"), "{markdown}");
        assert_eq!([0.0412, 9.996, 123.4].map(short), ["0.041", "10.0", "123"]);
    }
}
