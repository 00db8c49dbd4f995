//! Running other programs.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;

/// The directory of the workspace's `Cargo.toml`.
pub(crate) fn workspace_root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().expect("xtask is a directory of the workspace").to_path_buf()
}

/// The cargo that started this task.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).stdin(Stdio::null());
    command
}

/// The command as typed in a shell.
pub(crate) fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    match words[0].rsplit_once('/') {
        Some((_, name)) => format!("{name} {}", words[1..].join(" ")),
        None => words.join(" "),
    }
}

/// Runs a program without input and returns its output if it succeeds.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, Error> {
    let what = describe(command);
    let output =
        command.stdin(Stdio::null()).output().map_err(|error| format!("`{what}`: {error}"))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let mut message = format!("`{what}` failed: {}", output.status);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().collect();
    for line in &lines[lines.len().saturating_sub(10)..] {
        message.push_str(&format!("\n  {line}"));
    }
    Err(message.into())
}

/// Runs a program without input whose output matters only if it fails.
pub(crate) fn quietly(command: &mut Command) -> Result<(), Error> {
    output(command).map(drop)
}

/// Runs a program without input, shows its standard output, and passes each line of it to
/// `on_line`.
pub(crate) fn follow(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<ExitStatus, Error> {
    each_line(command, limit, |line| {
        println!("{line}");
        on_line(line);
    })
}

/// What a compiled Go test with `-test.v=test2json` writes before each line that its framework
/// prints, also behind an unfinished line of the test itself.
const GO_MARKER: char = '\x16';

/// Like `follow`, for a compiled Go test: with standard error interleaved, where a crashing program
/// writes the reason, and without the markers of its framework.
pub(crate) fn follow_go(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<ExitStatus, Error> {
    let what = describe(command);
    let (output, ours) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(ours.try_clone()?).stderr(ours);
    let spawned = command.spawn();
    // The command holds our ends of the pipe; the output would not end while they are open.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let child = spawned.map_err(|error| format!("`{what}`: {error}"))?;
    lines_of(&what, child, output, limit, |marked, _| {
        for line in marked.strip_prefix(GO_MARKER).unwrap_or(marked).split(GO_MARKER) {
            println!("{line}");
            on_line(line);
        }
    })
}

/// Runs a program without input and passes each line of its standard output to `on_line`.
///
/// A program that is still running after `limit` is killed: a suite that hangs must fail, not block
/// the suites after it. The limit is far above what the slowest machine needs; it measures nothing.
pub(crate) fn each_line(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<ExitStatus, Error> {
    lines(command.stdin(Stdio::null()), limit, |line, _| on_line(line))
}

/// Runs a program that makes requests in lines of its standard output, shows them, and lets
/// `on_line` write the answers. If `on_line` fails, the program's input is closed.
pub(crate) fn converse(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str, &mut ChildStdin) -> Result<(), Error>,
) -> Result<ExitStatus, Error> {
    let mut failed = None;
    let status = lines(command.stdin(Stdio::piped()), limit, |line, input| {
        println!("{line}");
        if let Some(open) = input
            && let Err(error) = on_line(line, open)
        {
            failed = Some(error);
            *input = None;
        }
    });
    failed.map_or(status, Err)
}

fn lines(
    command: &mut Command,
    limit: Duration,
    on_line: impl FnMut(&str, &mut Option<ChildStdin>),
) -> Result<ExitStatus, Error> {
    let what = describe(command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|error| format!("`{what}`: {error}"))?;
    let stdout = child.stdout.take().expect("standard output is piped");
    lines_of(&what, child, stdout, limit, on_line)
}

/// Passes each line of a program's output to `on_line` and waits for the program to end.
fn lines_of(
    what: &str,
    mut child: Child,
    output: impl Read,
    limit: Duration,
    mut on_line: impl FnMut(&str, &mut Option<ChildStdin>),
) -> Result<ExitStatus, Error> {
    let mut stdin = child.stdin.take();
    let reader = BufReader::new(output);
    thread::scope(|scope| {
        let waiting = scope.spawn(move || wait(&mut child, limit));
        for line in reader.split(b'\n').map_while(Result::ok) {
            on_line(&String::from_utf8_lossy(&line), &mut stdin);
        }
        match waiting.join().expect("waiting for a process does not panic")? {
            Some(status) => Ok(status),
            None => {
                Err(format!("`{what}` was killed: not finished after {} s", limit.as_secs()).into())
            }
        }
    })
}

/// Waits for a process to end by itself; after `limit`, kills it with its descendants and returns
/// `None`.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            kill_tree(child.id());
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Kills a process and all of its descendants, from the top, so that none of them reacts to the end
/// of a child.
fn kill_tree(process: u32) {
    let children = children(process);
    if let Some(process) = i32::try_from(process).ok().and_then(Pid::from_raw) {
        // It may have ended already.
        let _ = kill_process(process, Signal::KILL);
    }
    children.into_iter().for_each(kill_tree);
}

/// The children of all threads of a process.
fn children(process: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let lists = threads
        .filter_map(Result::ok)
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|child| child.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const ASKS: &str = "echo one; read answer && echo \"$answer\"";

    fn shell() -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", ASKS]);
        shell
    }

    #[test]
    fn a_program_receives_the_answer_to_its_request() {
        let mut printed = Vec::new();
        let status = converse(&mut shell(), Duration::from_secs(60), |line, input| {
            printed.push(line.to_owned());
            if line == "one" {
                input.write_all(b"two\n")?;
            }
            Ok(())
        });
        assert!(status.unwrap().success());
        assert_eq!(printed, ["one", "two"]);
    }

    #[test]
    fn standard_error_is_followed_too_and_markers_end_lines() {
        let mut shell = Command::new("sh");
        let script = "printf '\\026one\\n'; echo two >&2; printf 'three\\026four\\n\\n'; exit 2";
        shell.args(["-c", script]);
        let mut printed = Vec::new();
        let limit = Duration::from_secs(60);
        let status = follow_go(&mut shell, limit, |line| printed.push(line.to_owned())).unwrap();
        let printed = printed.join("|");
        assert_eq!((printed.as_str(), status.code()), ("one|two|three|four|", Some(2)));
    }

    #[test]
    fn a_program_whose_request_cannot_be_answered_ends_and_fails() {
        let failed = converse(&mut shell(), Duration::from_secs(60), |_, _| Err("no".into()));
        assert_eq!(failed.unwrap_err().to_string(), "no");
    }

    #[test]
    fn a_process_is_killed_with_its_descendants() {
        let mut child =
            Command::new("/bin/sh").args(["-c", "sh -c 'sleep 600; :' & wait"]).spawn().unwrap();
        while children(child.id()).iter().all(|inner| children(*inner).is_empty()) {
            thread::sleep(Duration::from_millis(10));
        }
        let inner = children(child.id());
        assert!(wait(&mut child, Duration::ZERO).unwrap().is_none());
        for process in inner {
            // A zombie whose parent has gone is collected by process 1, at some time.
            let state = || fs::read_to_string(format!("/proc/{process}/stat")).ok();
            while state().is_some_and(|state| !state.contains(") Z ")) {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}
