//! Links of Markdown files to files, directories and headings of the repository.

use std::collections::{BTreeMap, BTreeSet};

use regex::{Captures, Regex};

use super::Violation;
use super::source::{File, Tree};

/// Relative links whose file, directory or heading does not exist. Links with a scheme (`https:`)
/// are not checked, and neither are fragments of files that are not Markdown.
pub(super) fn broken(tree: &Tree) -> Vec<Violation> {
    let syntax = Syntax::new();
    let markdown = || tree.files.iter().filter(|file| file.is_markdown());
    let anchors: BTreeMap<&str, BTreeSet<String>> =
        markdown().map(|file| (file.path.as_str(), syntax.anchors(&file.text))).collect();
    let mut violations = Vec::new();
    for file in markdown() {
        for (line, target) in syntax.links(&file.text) {
            if let Err(what) = check(tree, &anchors, file, &target) {
                violations.push(Violation { file: file.path.clone(), line, what });
            }
        }
    }
    violations
}

/// Checks one target of a link in `file`.
fn check(
    tree: &Tree,
    anchors: &BTreeMap<&str, BTreeSet<String>>,
    file: &File,
    target: &str,
) -> Result<(), String> {
    let (path, fragment) = target.split_once('#').unwrap_or((target, ""));
    let path = match path {
        "" => file.path.clone(),
        path => resolve(&file.path, path)
            .filter(|path| tree.has(path))
            .ok_or_else(|| format!("link to `{target}`: no such file or directory"))?,
    };
    match anchors.get(path.as_str()) {
        Some(anchors) if !fragment.is_empty() && !anchors.contains(fragment) => {
            Err(format!("link to `{target}`: {path} has no heading for `#{fragment}`"))
        }
        _ => Ok(()),
    }
}

/// The path of a target relative to the root, empty for the root itself. `None` if it is outside.
fn resolve(file: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = match target.strip_prefix('/') {
        Some(_) => Vec::new(),
        None => file.split('/').collect(),
    };
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The parts of Markdown that the rule reads.
struct Syntax {
    code: Regex,
    inline: Regex,
    definition: Regex,
    scheme: Regex,
    heading: Regex,
    link: Regex,
}

impl Syntax {
    fn new() -> Self {
        let of = |expression| Regex::new(expression).expect("a valid expression");
        Self {
            code: of(r"``[^`]+``|`(?:[^`\n]|\n[^`\n])*`"),
            inline: of(r"\]\(<?([^()<>\s]+)"),
            definition: of(r"^ {0,3}\[[^\]^][^\]]*\]:\s+<?([^<>\s]+)"),
            scheme: of(r"^(?:[A-Za-z][A-Za-z0-9+.-]*:|//)"),
            heading: of(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$"),
            link: of(r"!?\[([^\]]*)\]\([^)]*\)"),
        }
    }

    /// The relative targets of links, with their lines.
    fn links(&self, text: &str) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        let lines: Vec<(usize, &str)> = outside_code(text).collect();
        // A code span may continue in the next line of its paragraph.
        let joined = lines.iter().map(|(_, line)| *line).collect::<Vec<_>>().join("\n");
        let newlines = |span: &Captures<'_>| "\n".repeat(span[0].matches('\n').count());
        let plain = self.code.replace_all(&joined, newlines);
        for ((number, _), line) in lines.iter().zip(plain.split('\n')) {
            let found = self.inline.captures_iter(line).chain(self.definition.captures_iter(line));
            for target in found.map(|captures| captures[1].to_owned()) {
                if !self.scheme.is_match(&target) {
                    links.push((*number, target));
                }
            }
        }
        links
    }

    /// The fragments of headings as GitHub derives them: lower case, without punctuation, a hyphen
    /// for each space, and a number behind a repeated one.
    fn anchors(&self, text: &str) -> BTreeSet<String> {
        let mut anchors = BTreeSet::new();
        let mut counts = BTreeMap::<String, usize>::new();
        for heading in outside_code(text).filter_map(|(_, line)| self.heading.captures(line)) {
            let plain = self.link.replace_all(&heading[1], "$1").to_lowercase();
            let kept = plain.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            let slug: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
            let count = counts.entry(slug.clone()).or_default();
            anchors.insert(match *count {
                0 => slug,
                count => format!("{slug}-{count}"),
            });
            *count += 1;
        }
        anchors
    }
}

/// The lines of a Markdown text that are not in a fenced block of code, counted from 1.
fn outside_code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((index + 1, line))
    })
}
