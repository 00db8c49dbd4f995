//! Progress of long operations: nothing for the first two seconds, then a bar on a terminal, or a
//! log line every five seconds where there is none. A server logs lines on a terminal too: the
//! working thread draws the bar, and would block on a terminal that is not read.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

use crate::log_queue;
use crate::units::{about, counted};

/// Operations that take less need no report.
const QUIET: Duration = Duration::from_secs(2);
/// Interval of log lines where there is no terminal.
const LOG_EVERY: Duration = Duration::from_secs(5);

/// What the length of a job is counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Bytes,
    Offsets,
}

/// Shows the progress of a job of known length. Dropping it removes the bar.
pub(crate) struct Meter {
    state: Arc<Mutex<State>>,
}

struct State {
    what: String,
    unit: Unit,
    started: Instant,
    terminal: bool,
    bar: Option<ProgressBar>,
    last_line: Option<Duration>,
}

/// How to show a progress report; decided from times alone.
#[derive(Debug, PartialEq, Eq)]
enum Show {
    Nothing,
    Bar,
    Line,
}

fn decide(elapsed: Duration, terminal: bool, last_line: Option<Duration>) -> Show {
    if elapsed < QUIET {
        Show::Nothing
    } else if terminal {
        Show::Bar
    } else if last_line.is_none_or(|last| elapsed - last >= LOG_EVERY) {
        Show::Line
    } else {
        Show::Nothing
    }
}

impl Meter {
    /// Creates a meter of bytes. `what` completes the sentence "Alluvium is ...": `pre-writing
    /// data/wal`.
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self::of(what.into(), Unit::Bytes)
    }

    /// Creates a meter of offsets of partitions.
    pub(crate) fn of_offsets(what: impl Into<String>) -> Self {
        Self::of(what.into(), Unit::Offsets)
    }

    fn of(what: String, unit: Unit) -> Self {
        let state = State {
            what,
            unit,
            started: Instant::now(),
            terminal: log_queue::of_server().is_none() && std::io::stderr().is_terminal(),
            bar: None,
            last_line: None,
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// The callback to pass to a job: what is done, and the total.
    pub(crate) fn callback(&self) -> alluvium_device::Progress {
        let state = Arc::clone(&self.state);
        Arc::new(move |done, total| state.lock().report(done, total))
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if let Some(bar) = self.state.lock().bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl State {
    fn report(&mut self, done: u64, total: u64) {
        let elapsed = self.started.elapsed();
        match decide(elapsed, self.terminal, self.last_line) {
            Show::Nothing => {}
            Show::Bar => {
                let bar =
                    self.bar.get_or_insert_with(|| new_bar(self.what.clone(), self.unit, total));
                bar.set_length(total);
                bar.set_prefix(pace(self.unit, done, total, elapsed));
                bar.set_position(done);
            }
            Show::Line => {
                self.last_line = Some(elapsed);
                let percent =
                    if total == 0 { 100 } else { u128::from(done) * 100 / u128::from(total) };
                tracing::info!("{}: {percent}% of {}", self.what, self.unit.amount(total));
            }
        }
    }
}

impl Unit {
    fn amount(self, n: u64) -> String {
        match self {
            Self::Bytes => about(n),
            Self::Offsets => counted(n, "offset", "offsets"),
        }
    }
}

/// Formats the mean speed since the start and the remaining time at that speed. The bar's own
/// estimate would begin when the bar does, and treat what was done before as the work of an
/// instant.
fn pace(unit: Unit, done: u64, total: u64, elapsed: Duration) -> String {
    let per_second = done as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    let speed = format!("{}/s", unit.amount(per_second as u64));
    match seconds_left(done, total, elapsed) {
        Some(left) => format!("{speed}, {left:.0} s left"),
        None => speed,
    }
}

/// The remaining time at the mean speed so far; `None` if there is none yet.
pub(crate) fn seconds_left(done: u64, total: u64, elapsed: Duration) -> Option<f64> {
    let rest = total.saturating_sub(done) as f64;
    (done > 0).then(|| (rest * elapsed.as_secs_f64() / done as f64).ceil())
}

fn new_bar(what: String, unit: Unit, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(match unit {
        Unit::Bytes => "{msg} [{bar:32}] {binary_bytes}/{binary_total_bytes} {prefix}",
        Unit::Offsets => "{msg} [{bar:32}] {human_pos}/{human_len} offsets, {prefix}",
    })
    .expect("the template is valid")
    .progress_chars("=> ");
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr())
        .with_style(style)
        .with_message(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_jobs_are_silent_and_long_ones_report_at_intervals() {
        let second = Duration::from_secs(1);
        for terminal in [false, true] {
            assert_eq!(decide(second, terminal, None), Show::Nothing);
        }
        assert_eq!(decide(2 * second, true, None), Show::Bar);
        assert_eq!(decide(2 * second, false, None), Show::Line);
        assert_eq!(decide(6 * second, false, Some(2 * second)), Show::Nothing);
        assert_eq!(decide(7 * second, false, Some(2 * second)), Show::Line);
    }

    #[test]
    fn the_pace_counts_from_the_start_of_the_job_not_of_the_bar() {
        let two_seconds = Duration::from_secs(2);
        let bytes = |done, total| pace(Unit::Bytes, done, total, two_seconds);
        assert_eq!(bytes(4 << 30, 12 << 30), "2.0 GiB/s, 4 s left");
        assert_eq!(bytes(12 << 30, 12 << 30), "6.0 GiB/s, 0 s left");
        assert_eq!(bytes(0, 12 << 30), "0 B/s");
        assert_eq!(pace(Unit::Offsets, 4, 12, two_seconds), "2 offsets/s, 4 s left");
    }
}
