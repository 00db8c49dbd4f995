//! Kafka's command-line tools, each as `bin/kafka-*.sh` starts it: one command after the other,
//! with what it must say and how it must end.

mod cases;

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

/// Far above what any of them takes. A consumer that waits for what never comes must not block the
/// rest.
const LIMIT: Duration = Duration::from_secs(60);

/// What the last tool has said, beside the files that cases name.
pub(super) const OUTPUT: &str = "output";

/// So many lines of what a tool has said are shown when it is wrong.
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
    // They do not run for long: what takes time is to start.
    java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]);
    java.args(["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", class_path]);
    java.arg(class(case.tool)?);
    let mut arguments = case.arguments.split_whitespace().peekable();
    // One of them wants its own command first.
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
    let said = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
    let told = |what: String| -> Result<(), Error> {
        // The first line is the reason in the table, so it holds the server's words.
        let lines: Vec<&str> = said.lines().filter(|line| !is_noise(line)).collect();
        let words = ["kafka.common.errors.", "Exception", "rror"];
        let found = words.iter().find_map(|&words| lines.iter().find(|line| line.contains(words)));
        let words = found.or(lines.first()).map_or("nothing", |line| line.trim());
        let shown = &lines[..lines.len().min(SHOWN)];
        Err(format!("{what}; it says: {words}\n  | {}", shown.join("\n  | ")).into())
    };
    match ended {
        None => return told(format!("it has not ended after {} s", LIMIT.as_secs())),
        Some(status) if status.success() != (case.ends == Ends::Well) => {
            return told(status.to_string());
        }
        Some(_) => {}
    }
    let lines: Vec<String> = said.lines().map(single_spaced).collect();
    for &pattern in case.says {
        let (wanted, pattern) = match pattern.strip_prefix('!') {
            Some(pattern) => (false, pattern),
            None => (true, pattern),
        };
        if lines.iter().any(|line| matches(line, pattern)) != wanted {
            let what = if wanted { "no line" } else { "a line" };
            return told(format!("{what} like `{pattern}`"));
        }
    }
    Ok(())
}

/// The tools as scripts in a directory, as Kafka's archive has them, for those who start them by
/// name.
pub(super) fn scripts(jars: &Path, directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory)?;
    // The last one starts any class, of those on `CLASSPATH` too.
    for (tool, class) in cases::CLASSES.iter().copied().chain([("run-class", "")]) {
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

/// The class that a tool's script starts.
fn class(tool: &str) -> Result<&'static str, Error> {
    let found = cases::CLASSES.iter().find(|(name, _)| *name == tool);
    Ok(found.ok_or_else(|| format!("there is no tool {tool}"))?.1)
}

/// What the JVM and the logger say of themselves.
fn is_noise(line: &str) -> bool {
    line.trim().is_empty() || line.starts_with("SLF4J") || line.trim_start().starts_with("at ")
}

/// Without the spaces that make columns.
pub(super) fn single_spaced(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the whole line is as the pattern says, in which `*` stands for anything.
pub(super) fn matches(line: &str, pattern: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return line == pattern };
    let Some(line) = line.strip_prefix(head) else { return false };
    (0..=line.len()).filter(|&at| line.is_char_boundary(at)).any(|at| matches(&line[at..], rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
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
    fn every_case_has_a_tool_and_a_name_of_its_own() {
        let mut names = std::collections::HashSet::new();
        for case in CASES {
            assert!(class(case.tool).is_ok(), "{}", case.tool);
            assert!(names.insert((case.tool, case.what)), "{}: {}", case.tool, case.what);
        }
    }
}
