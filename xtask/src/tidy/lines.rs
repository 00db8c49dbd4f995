//! Width of lines and length of files.

use super::source::{File, Tree};
use super::{Finding, Rule, Violation};

/// Columns of a line of code or of a comment.
const CODE_COLUMNS: usize = 100;

/// Columns of a line of Markdown.
const MARKDOWN_COLUMNS: usize = 120;

/// Columns of a row of a table in Markdown, which cannot be wrapped.
const TABLE_COLUMNS: usize = 200;

/// Lines of a Rust file.
const FILE_LINES: usize = 800;

/// Lines that are too wide. A line of Markdown that has no space to break it at, such as a link,
/// may be wider.
pub(super) fn wide(tree: &Tree) -> Vec<Violation> {
    let mut violations = Vec::new();
    for file in tree.files.iter().filter(|file| file.is_rust() || file.is_markdown()) {
        for (index, line) in file.text.lines().enumerate() {
            let limit = limit(file, line);
            let columns = line.chars().count();
            if columns > limit && !(file.is_markdown() && is_one_word(line)) {
                violations.push(Violation {
                    file: file.path.clone(),
                    line: index + 1,
                    what: format!("{columns} columns, the limit is {limit}"),
                });
            }
        }
    }
    violations
}

fn limit(file: &File, line: &str) -> usize {
    if file.is_rust() {
        CODE_COLUMNS
    } else if line.trim_start().starts_with('|') {
        TABLE_COLUMNS
    } else {
        MARKDOWN_COLUMNS
    }
}

fn is_one_word(line: &str) -> bool {
    let line = line.trim_start_matches([' ', '-', '*', '>']);
    !line.contains(' ') || (line.starts_with('[') && line.matches(' ').count() == 1)
}

/// Rust files that are too long.
pub(super) fn long_files(tree: &Tree) -> Vec<Finding> {
    let counted = tree.rust().map(|file| (file, file.text.lines().count()));
    counted
        .filter(|(_, lines)| *lines > FILE_LINES)
        .map(|(file, lines)| Finding {
            rule: Rule::Length,
            file: file.path.clone(),
            value: lines,
            violations: vec![Violation {
                file: file.path.clone(),
                line: FILE_LINES + 1,
                what: format!("the file has {lines} lines, the limit is {FILE_LINES}"),
            }],
        })
        .collect()
}
