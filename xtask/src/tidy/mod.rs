//! The `tidy` step: the rules of `docs/STYLE.md` that a program can check.
//!
//! A violation is reported with its file and line. Values that were above a limit when the rule was
//! introduced are recorded in `xtask/tidy.txt`, one line for each rule and file. They may only
//! decrease: a value above its allowance fails, and so does one below it, until
//! `cargo xtask tidy --tighten` has lowered the allowance. A file without an allowance has to
//! satisfy the rule, so that new files have none.

mod cycles;
mod layers;
mod lines;
mod links;
mod source;
mod words;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::{fmt, fs};

use crate::Error;
use crate::report::Case;
use source::Tree;

/// The file of allowances, relative to the root of the workspace.
const ALLOWANCES: &str = "xtask/tidy.txt";

/// How many violations of one rule in one file are printed.
const PRINTED: usize = 5;

/// A rule, by what it limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rule {
    /// Lines that are wider than the limit.
    Width,
    /// The number of lines of a Rust file, where it is above the limit.
    Length,
    /// Banned words and phrases.
    Words,
    /// Imports from a higher layer.
    Layers,
    /// The number of modules in the largest import cycle of a crate, where there is one.
    Cycle,
    /// Relative links in Markdown whose target does not exist.
    Links,
}

impl Rule {
    const ALL: [Self; 6] =
        [Self::Width, Self::Length, Self::Words, Self::Layers, Self::Cycle, Self::Links];

    fn name(self) -> &'static str {
        match self {
            Self::Width => "width",
            Self::Length => "length",
            Self::Words => "words",
            Self::Layers => "layers",
            Self::Cycle => "cycle",
            Self::Links => "links",
        }
    }

    /// The name of the rule's case in the report.
    fn title(self) -> &'static str {
        match self {
            Self::Width => "line width",
            Self::Length => "lines per file",
            Self::Words => "banned words",
            Self::Layers => "imports between layers",
            Self::Cycle => "module cycles",
            Self::Links => "links between files",
        }
    }
}

/// A line that violates a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Violation {
    /// Relative to the root of the workspace; the source directory of a crate for a cycle.
    file: String,
    /// Counted from 1.
    line: usize,
    /// Describes the violation.
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

/// What one rule finds in one file: a value that is compared with the allowance, and the
/// lines that make it up.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    rule: Rule,
    file: String,
    value: usize,
    violations: Vec<Violation>,
}

/// A finding for each file, whose value is the number of its violations.
fn count(rule: Rule, violations: Vec<Violation>) -> Vec<Finding> {
    let mut by_file = BTreeMap::<String, Vec<Violation>>::new();
    for violation in violations {
        by_file.entry(violation.file.clone()).or_default().push(violation);
    }
    by_file
        .into_iter()
        .map(|(file, violations)| Finding { rule, file, value: violations.len(), violations })
        .collect()
}

/// All findings in a tree of files.
fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = count(Rule::Width, lines::wide(tree));
    findings.extend(lines::long_files(tree));
    findings.extend(count(Rule::Words, words::banned(tree)));
    findings.extend(count(Rule::Layers, layers::upward(tree)));
    findings.extend(cycles::largest(tree));
    findings.extend(count(Rule::Links, links::broken(tree)));
    findings
}

/// The recorded values, by rule and file.
type Allowances = BTreeMap<(Rule, String), usize>;

fn parse(text: &str) -> Result<Allowances, Error> {
    let mut allowances = Allowances::new();
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let entry = match fields[..] {
            [rule, value, file] => Rule::ALL
                .into_iter()
                .find(|known| known.name() == rule)
                .zip(value.parse().ok())
                .map(|(rule, value)| ((rule, file.to_owned()), value)),
            _ => None,
        };
        let line = format!("{ALLOWANCES}:{}", index + 1);
        let (key, value) = entry.ok_or(format!("{line}: expected `RULE VALUE FILE`"))?;
        if allowances.insert(key, value).is_some() {
            return Err(format!("{line}: listed twice").into());
        }
    }
    Ok(allowances)
}

/// The finding of a rule in a file, if there is one.
fn find<'a>(findings: &'a [Finding], (rule, file): &(Rule, String)) -> Option<&'a Finding> {
    findings.iter().find(|finding| finding.rule == *rule && finding.file == *file)
}

/// Compares the findings with the allowances: one message for each difference, by rule.
fn compare(findings: &[Finding], allowances: &Allowances) -> Vec<(Rule, String)> {
    let mut failures = Vec::new();
    for finding in findings {
        let allowed = allowances.get(&(finding.rule, finding.file.clone())).copied();
        if finding.value > allowed.unwrap_or(0) {
            failures.push((finding.rule, excess(finding, allowed)));
        }
    }
    for (key, allowed) in allowances {
        let value = find(findings, key).map_or(0, |finding| finding.value);
        if value < *allowed {
            let message = format!(
                "{}: {value}, better than the {allowed} in {ALLOWANCES}: \
                 run `cargo xtask tidy --tighten` and commit it",
                key.1
            );
            failures.push((key.0, message));
        }
    }
    failures
}

/// Describes a finding that exceeds its allowance.
fn excess(finding: &Finding, allowed: Option<usize>) -> String {
    let mut lines = Vec::new();
    if let Some(allowed) = allowed {
        lines.push(format!("{}: {}, allowed: {allowed}", finding.file, finding.value));
    }
    lines.extend(finding.violations.iter().take(PRINTED).map(ToString::to_string));
    let more = finding.violations.len().saturating_sub(PRINTED);
    if more > 0 {
        lines.push(format!("and {more} more in {}", finding.file));
    }
    lines.join("\n")
}

/// Runs the step: one case for each rule. Prints every difference from the allowances.
pub(crate) fn run(root: &Path) -> Result<Vec<Case>, Error> {
    let tree = Tree::read(root)?;
    let allowances = parse(&fs::read_to_string(root.join(ALLOWANCES))?)?;
    let failures = compare(&check(&tree), &allowances);
    Ok(Rule::ALL
        .into_iter()
        .map(|rule| {
            let of_rule: Vec<&str> = failures
                .iter()
                .filter(|(of, _)| *of == rule)
                .map(|(_, message)| message.as_str())
                .collect();
            let name = rule.title();
            if of_rule.is_empty() {
                return Case::passed(name);
            }
            println!("{}", of_rule.join("\n"));
            Case::failed(name, of_rule.join("\n"))
        })
        .collect())
}

/// Lowers the allowances to the values of the tree. An allowance never rises, and no file gets a
/// new one.
pub(crate) fn tighten(root: &Path) -> Result<Vec<Case>, Error> {
    let path = root.join(ALLOWANCES);
    let text = fs::read_to_string(&path)?;
    fs::write(&path, tightened(&text, &check(&Tree::read(root)?))?)?;
    run(root)
}

/// The text of the allowances after [`tighten`].
fn tightened(text: &str, findings: &[Finding]) -> Result<String, Error> {
    let mut new = String::new();
    for line in text.lines().take_while(|line| line.starts_with('#')) {
        let _ = writeln!(new, "{line}");
    }
    for (key, allowed) in parse(text)? {
        let value = find(findings, &key).map_or(0, |finding| finding.value.min(allowed));
        if value > 0 {
            let _ = writeln!(new, "{} {value} {}", key.0.name(), key.1);
        }
    }
    Ok(new)
}
