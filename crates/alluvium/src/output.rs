//! What the commands print: results on standard output, everything else on standard error.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::defect;
use crate::log_queue::{self, LAST_LINES, LogQueue};
use crate::units::Size;

/// Why a command failed, which determines its exit code.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command failed: exit code 1.
    Failed(String),
    /// Wrong usage or configuration: exit code 2, as for arguments that cannot be parsed.
    Usage(String),
    /// A check could not read what it was to check: exit code 2, so that 1 is reserved for its
    /// findings.
    NotChecked(String),
    /// The write-ahead log failed while serving: exit code 3.
    WalFailed(String),
    /// The command has succeeded, and records are lost: exit code 3.
    Lost(String),
}

/// Number of names that a message lists.
const LISTED: usize = 20;

/// Lists names, for messages.
pub(crate) fn listed<T: ToString>(names: &[T]) -> String {
    let mut names: Vec<_> = names.iter().map(ToString::to_string).collect();
    names.sort();
    let more = names.len().saturating_sub(LISTED);
    names.truncate(LISTED);
    let names = names.join(", ");
    if more > 0 { format!("{names}, and {more} more") } else { names }
}

impl Failure {
    /// A failure with the text of its cause.
    pub(crate) fn new(cause: impl fmt::Display) -> Self {
        Self::Failed(cause.to_string())
    }

    /// Converts the failure of a check that could not read its target.
    pub(crate) fn not_checked(self) -> Self {
        match self {
            Self::Failed(message) => Self::NotChecked(message),
            other => other,
        }
    }

    /// The text for people.
    pub(crate) fn message(&self) -> &str {
        match self {
            Self::Failed(message)
            | Self::Usage(message)
            | Self::NotChecked(message)
            | Self::WalFailed(message)
            | Self::Lost(message) => message,
        }
    }

    /// Prints the failure to standard error, in a server as the last line of its log.
    pub(crate) fn report(&self) -> ExitCode {
        let (code, message) = match self {
            Self::Failed(message) => (1, message),
            Self::Usage(message) | Self::NotChecked(message) => (2, message),
            Self::WalFailed(message) | Self::Lost(message) => (3, message),
        };
        let line = format!("error: {message}\n");
        write_out(log_queue::of_server(), &line);
        ExitCode::from(code)
    }
}

/// Writes a text to standard error, through the queue if there is one.
fn write_out(queue: Option<&LogQueue>, text: &str) {
    match queue {
        Some(queue) => queue.put(text.as_bytes()),
        // If that fails, there is no other place to report it.
        None => drop(io::stderr().write_all(text.as_bytes())),
    }
}

/// Reports arguments that cannot be parsed. Does not wait for a blocked standard error: the
/// arguments may be those of a server.
pub(crate) fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render();
    let text = match io::IsTerminal::is_terminal(&io::stderr()) {
        true => text.ansi().to_string(),
        false => text.to_string(),
    };
    write_out(log_queue::start().ok(), &text);
    finish_log();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

impl From<alluvium_device::OpenError> for Failure {
    fn from(error: alluvium_device::OpenError) -> Self {
        Self::new(error)
    }
}

/// Uses the text of the cause, with an explanation where the meaning is not obvious.
impl From<alluvium_wal::OpenError> for Failure {
    fn from(error: alluvium_wal::OpenError) -> Self {
        use alluvium_wal::OpenError as E;
        match error {
            E::HeaderDamaged { device, slot_0, slot_1 } => Self::Failed(format!(
                "{device}: both copies of the header are damaged (slot 0: {slot_0}; slot 1: \
                 {slot_1}), so the beginning and end of the log are unknown. Its records are \
                 readable again when one of the two pages, at byte 0 and at byte 32768, is \
                 restored; uploaded data is in the object store"
            )),
            E::FutureVersion { .. } => Self::Failed(format!(
                "{error}. It was written by a later version of alluvium: use that version"
            )),
            E::LargerThanDevice { device, wanted_bytes, device_bytes } => {
                let (wanted, there) = (Size { bytes: wanted_bytes }, Size { bytes: device_bytes });
                Self::Failed(format!(
                    "{device}: a write-ahead log of {wanted} does not fit into {there}. If it did \
                     before, the file or device was truncated: restore its full length, because \
                     the missing part may contain acknowledged records"
                ))
            }
            other => Self::new(other),
        }
    }
}

/// Writes a line to standard output. If the reader has closed the pipe (`| head`), the command ends
/// quietly.
pub(crate) fn line(text: impl fmt::Display) -> Result<(), Failure> {
    match writeln!(io::stdout().lock(), "{text}") {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Failure::Failed(format!("standard output: {error}"))),
    }
}

/// Writes a value as indented JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(Failure::new)?;
    line(text)
}

/// Columns of text under headings; if `numbers`, all but the first column are right-aligned.
pub(crate) struct Table {
    numbers: bool,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table of words.
    pub(crate) fn of_text(headings: &[&str]) -> Self {
        Self { numbers: false, rows: vec![headings.iter().map(ToString::to_string).collect()] }
    }

    /// Creates a table of numbers whose first column names what they belong to.
    pub(crate) fn of_numbers(headings: &[&str]) -> Self {
        Self { numbers: true, ..Self::of_text(headings) }
    }

    /// Adds a row; it may be shorter than the headings.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (i, row) in self.rows.iter().enumerate() {
            let mut text = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = widths[column];
                if column > 0 {
                    text.push_str("  ");
                }
                if self.numbers && column > 0 {
                    write!(text, "{cell:>width$}")?;
                } else {
                    write!(text, "{cell:<width$}")?;
                }
            }
            if i > 0 {
                f.write_char('\n')?;
            }
            f.write_str(text.trim_end())?;
        }
        Ok(())
    }
}

/// Sends the log of a command to standard error. `filter` is a level or a list of `target=level`.
///
/// # Errors
/// A filter that cannot be parsed.
pub(crate) fn start_logging(filter: &str) -> Result<(), Failure> {
    install(parse(filter)?, io::stderr);
    Ok(())
}

/// Starts the queue through which a server writes to standard error, so that no write blocks. What
/// is reported before [`start_server_logging`] goes through the queue as well.
///
/// # Errors
/// The thread for the log cannot be started.
pub(crate) fn start_log_queue() -> Result<&'static LogQueue, Failure> {
    log_queue::start()
        .map_err(|error| Failure::Failed(format!("cannot start a thread for the log: {error}")))
}

/// Starts the logging of a server: it neither blocks nor fails, and a panic on any thread ends the
/// process.
///
/// # Errors
/// A filter that cannot be parsed.
pub(crate) fn start_server_logging(log: &'static LogQueue, filter: &str) -> Result<(), Failure> {
    install(parse(filter)?, || log.line());
    defect::end_process_on_panic(log);
    Ok(())
}

/// Gives the log of a server a moment to be written. Must be called before the process ends.
pub(crate) fn finish_log() {
    if let Some(log) = log_queue::of_server() {
        log.flush(LAST_LINES);
    }
}

/// Ends a server process without stopping the server first.
pub(crate) fn exit_at_once(code: i32) -> ! {
    finish_log();
    std::process::exit(code)
}

fn install<W>(filter: EnvFilter, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // Otherwise a line that cannot be written is reported by `eprintln!`, which panics then.
        .log_internal_errors(false)
        .init();
}

fn parse(filter: &str) -> Result<EnvFilter, Failure> {
    let wrong =
        |reason: &dyn fmt::Display| Failure::Usage(format!("log filter `{filter}`: {reason}"));
    // A lone word that is not a level would be treated as a target, and a typing error would
    // silence everything.
    let lone = |part: &&str| !part.contains(['=', '[']);
    for word in filter.split(',').map(str::trim).filter(lone) {
        word.parse::<LevelFilter>().map_err(|_| {
            wrong(&format_args!(
                "`{word}` is not a level: write one of off, error, warn, info, debug, trace"
            ))
        })?;
    }
    let asked = filter.parse::<EnvFilter>().map_err(|error| wrong(&error))?;
    // A retried request is not worth a line, and a failed one is logged by its caller. A filter
    // that names this target still enables it.
    Ok(match asked.max_level_hint() {
        Some(level) if level < LevelFilter::WARN => asked,
        _ => EnvFilter::new(format!("object_store=warn,{filter}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_align_words_left_and_numbers_right() {
        let mut table = Table::of_text(&["NAME", "N"]);
        table.row(vec!["longer".into(), "1".into()]);
        table.row(vec!["é".into(), "22".into()]);
        assert_eq!(table.to_string(), "NAME    N\nlonger  1\né       22");

        let mut table = Table::of_numbers(&["record", "us"]);
        table.row(vec!["1KiB".into(), "9".into()]);
        table.row(vec!["a note".into()]);
        assert_eq!(table.to_string(), "record  us\n1KiB     9\na note");
    }
}
