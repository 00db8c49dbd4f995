//! Kafka's command-line tools, each started as `bin/kafka-*.sh` does: a sequence of commands with
//! their expected output and exit status.

mod cases;
mod classes;

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::Compat;
use crate::Error;
use crate::exec::wait;
use crate::report;
use crate::setup::{self, Missing};

use cases::{CASES, Ends, FILES};
pub(super) use cases::{Case, badly, fed, well};
use classes::CLASSES;

/// Far above what any of them takes. A consumer that waits in vain must not block the rest.
const LIMIT: Duration = Duration::from_secs(60);

/// The output of the last tool, in the directory of the files that cases name.
pub(super) const OUTPUT: &str = "output";

/// Number of lines of a tool's output that are shown when a case fails.
const SHOWN: usize = 30;

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<report::Case>, Missing> {
    let jars = setup::kafka(compat.root)?;
    compat.with_peer("kafka-tools", 1, |peer, directory| {
        let scratch = directory.join("files");
        fs::create_dir_all(&scratch)?;
        for (name, text) in FILES {
            fs::write(scratch.join(name), text)?;
        }
        let class_path = format!("{}/*", jars.display());
        let run = |case: &Case| {
            report::Case::run(&format!("{}: {}", case.tool, case.what), || {
                case_passes(case, &peer.address(), &class_path, &scratch)
            })
        };
        Ok(CASES.iter().map(run).collect())
    })
}

/// Runs a case against the server at `address`; `scratch` holds the files that it names.
pub(super) fn case_passes(
    case: &Case,
    address: &str,
    class_path: &str,
    scratch: &Path,
) -> Result<(), Error> {
    let mut java = Command::new("java");
    // They are short-lived: most of their time is spent starting.
    java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]);
    java.args(["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", class_path]);
    java.arg(class(case.tool)?);
    let mut arguments = case.arguments.split_whitespace().peekable();
    // One tool wants its own command first.
    if case.tool == "cluster" {
        java.args(arguments.next());
    }
    java.args(["--bootstrap-server", address]);
    java.args(arguments.map(|word| word.replace("$FILES", &scratch.display().to_string())));
    let input = scratch.join("input");
    fs::write(&input, case.input)?;
    let output = scratch.join(OUTPUT);
    let file = File::create(&output)?;
    java.current_dir(scratch).stdin(File::open(&input)?).stdout(file.try_clone()?).stderr(file);
    let mut child = java.spawn().map_err(|error| format!("java: {error}"))?;
    let ended = wait(&mut child, LIMIT)?;
    let printed = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
    let failed = |what: String| -> Result<(), Error> {
        // The first line becomes the reason in the table, so it contains the server's message.
        let lines: Vec<&str> = printed.lines().filter(|line| !is_noise(line)).collect();
        let words = ["kafka.common.errors.", "Exception", "rror"];
        let found = words.iter().find_map(|&words| lines.iter().find(|line| line.contains(words)));
        let words = found.or(lines.first()).map_or("nothing", |line| line.trim());
        let shown = &lines[..lines.len().min(SHOWN)];
        Err(format!("{what}; its output: {words}\n  | {}", shown.join("\n  | ")).into())
    };
    match ended {
        None => return failed(format!("it did not finish within {} s", LIMIT.as_secs())),
        Some(status) if status.success() != (case.ends == Ends::Well) => {
            return failed(status.to_string());
        }
        Some(_) => {}
    }
    let lines: Vec<String> = printed.lines().map(single_spaced).collect();
    for &pattern in case.prints {
        let (wanted, pattern) = match pattern.strip_prefix('!') {
            Some(pattern) => (false, pattern),
            None => (true, pattern),
        };
        if lines.iter().any(|line| matches(line, pattern)) != wanted {
            let what = if wanted { "no line" } else { "a line" };
            return failed(format!("{what} like `{pattern}`"));
        }
    }
    Ok(())
}

/// Writes the tools as scripts into a directory, as in Kafka's archive, for programs that start
/// them by name.
pub(super) fn scripts(jars: &Path, directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory)?;
    // The last one starts any class, including those on `CLASSPATH`.
    for (tool, class) in CLASSES.iter().copied().chain([("run-class", "")]) {
        let script = directory.join(format!("kafka-{tool}.sh"));
        let jars = jars.display();
        let options = "-XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=warn";
        let path = format!("\"${{CLASSPATH:+$CLASSPATH:}}{jars}/*\"");
        let text = format!("#!/bin/sh\nexec java {options} -cp {path} {class} \"$@\"\n");
        fs::write(&script, text)?;
        setup::make_executable(&script)?;
    }
    Ok(())
}

/// Returns the class that a tool's script starts.
fn class(tool: &str) -> Result<&'static str, Error> {
    let found = CLASSES.iter().find(|(name, _)| *name == tool);
    Ok(found.ok_or_else(|| format!("unknown tool {tool}"))?.1)
}

/// Whether the line is a message of the JVM or of the logger about itself.
fn is_noise(line: &str) -> bool {
    line.trim().is_empty() || line.starts_with("SLF4J") || line.trim_start().starts_with("at ")
}

/// Collapses the spaces that align columns.
pub(super) fn single_spaced(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the whole line matches the pattern, in which `*` matches anything.
pub(super) fn matches(line: &str, pattern: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return line == pattern };
    let Some(line) = line.strip_prefix(head) else { return false };
    (0..=line.len()).filter(|&at| line.is_char_boundary(at)).any(|at| matches(&line[at..], rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_anything() {
        for (line, pattern) in [
            ("", "*"),
            ("a b", "a b"),
            ("Topic: t Partitions: 3 Configs: x=1", "Topic: t*Partitions: 3*"),
            ("aXbXc", "a*X*c"),
        ] {
            assert!(matches(line, pattern), "{line} {pattern}");
        }
        for (line, pattern) in [("", "a"), ("ab", "a"), ("ab", "*a"), ("Partitions: 31", "*: 3")] {
            assert!(!matches(line, pattern), "{line} {pattern}");
        }
    }

    #[test]
    fn every_case_has_a_tool_and_a_unique_name() {
        let mut names = std::collections::HashSet::new();
        for case in CASES {
            assert!(class(case.tool).is_ok(), "{}", case.tool);
            assert!(names.insert((case.tool, case.what)), "{}: {}", case.tool, case.what);
        }
    }
}
