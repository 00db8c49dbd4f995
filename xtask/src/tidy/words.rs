//! Words and phrases that `docs/STYLE.md` and `docs/glossary.md` replace.

use regex::{Regex, RegexBuilder};

use super::Violation;
use super::source::{File, Kind, Tree};

/// A phrase as a regular expression that matches whole words, and what to write instead.
const BANNED: &[(&str, &str)] = &[
    ("can not", "cannot"),
    ("nobody|somebody|anybody|everybody", "the component or client by name"),
    ("whoever|whomever|of whom", "the component or client by name"),
    (
        "who (?:is|are|was|were|has|have|had|may|must|wants?|waits?|reads?|writes?|knows?|asks?)",
        "a noun: the client, the caller, the waiter",
    ),
    ("he|she|him|his", "it, or the component by name"),
    ("told|untold|tells? (?:it|them|of|about|whether|how)", "reported, logged, notified, answered"),
    ("in line|into line|puts? in line", "appended, queued"),
    ("once more|this morning|nowadays", "what is true now"),
    ("(?:is|are|was|were|be|been) taken for", "treated as"),
    ("(?:do|does|did|done) away with", "remove"),
    ("as (?:it|they) comes?", "by default, unchanged, as received"),
    ("(?:a|the|each|one|next|last|first) look", "check, scan, probe, poll"),
    ("turn(?:s|ed)? away|push(?:es|ed)? back|pushbacks?", "refuse, backpressure"),
    ("room", "space, memory, a permit"),
    ("late reads?|late readers?|late fetch(?:es)?", "cold read, lagging consumer"),
    ("young", "cached, recent"),
    ("doomed", "being deleted"),
    ("janitor|keeper|preparer", "object cleaner, maintenance thread, allocator"),
    ("mends?|mended|mending", "repair, fix"),
    ("hopeless|misbehaves?|pull at the same rope|stands? for itself", "the condition by name"),
];

/// A phrase that is banned at the start of a documentation comment, which an index lists alone.
const BANNED_STARTS: &[(&str, &str)] =
    &[("the same|likewise|ditto|and that|so does", "a summary with a subject of its own")];

/// Files that list the phrases.
const LISTS: [&str; 4] =
    ["docs/STYLE.md", "docs/glossary.md", "xtask/src/tidy/words.rs", "xtask/src/tidy/tests.rs"];

/// Text that belongs together, with the lines that its parts begin at.
#[derive(Default)]
struct Passage {
    text: String,
    /// Offset in `text` and line, ascending.
    starts: Vec<(usize, usize)>,
    /// Whether it documents an item.
    documents: bool,
}

impl Passage {
    fn push(&mut self, line: usize, text: &str) {
        if !self.text.is_empty() {
            self.text.push(' ');
        }
        self.starts.push((self.text.len(), line));
        self.text.push_str(text.trim());
    }

    fn line(&self, offset: usize) -> usize {
        let before = self.starts.iter().take_while(|(start, _)| *start <= offset);
        before.last().map_or(1, |(_, line)| *line)
    }
}

/// Places with a banned word or phrase, in comments, string literals, names of functions and
/// Markdown.
pub(super) fn banned(tree: &Tree) -> Vec<Violation> {
    let rules = compile(BANNED, r"\b(?:", r")\b");
    let starts = compile(BANNED_STARTS, "^(?:", r")\b");
    let code = Regex::new(r"``[^`]+``|`[^`]*`|\]\([^)]*\)").expect("a valid expression");
    let mut violations = Vec::new();
    for file in tree.files.iter().filter(|file| !LISTS.contains(&file.path.as_str())) {
        for mut passage in passages(file) {
            // Code is quoted as it is; its bytes stay, so that offsets still name lines.
            passage.text = code
                .replace_all(&passage.text, |code: &regex::Captures<'_>| " ".repeat(code[0].len()))
                .into_owned();
            let of_starts = starts.iter().filter(|_| passage.documents);
            for (expression, instead) in rules.iter().chain(of_starts) {
                for found in expression.find_iter(&passage.text) {
                    violations.push(Violation {
                        file: file.path.clone(),
                        line: passage.line(found.start()),
                        what: format!("`{}`; write: {instead}", found.as_str()),
                    });
                }
            }
        }
    }
    violations.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    violations
}

fn compile(list: &[(&str, &'static str)], before: &str, after: &str) -> Vec<(Regex, &'static str)> {
    let rule = |(phrase, instead): &(&str, &'static str)| {
        let spaced = phrase.replace(' ', r"\s+");
        let expression = RegexBuilder::new(&format!("{before}{spaced}{after}"))
            .case_insensitive(true)
            .build()
            .expect("the list has valid expressions");
        (expression, *instead)
    };
    list.iter().map(rule).collect()
}

fn passages(file: &File) -> Vec<Passage> {
    if file.is_rust() {
        rust(file)
    } else if file.is_markdown() {
        markdown(&file.text)
    } else {
        let mut lines = Vec::new();
        for (index, line) in file.text.lines().enumerate() {
            let mut passage = Passage::default();
            passage.push(index + 1, line);
            lines.push(passage);
        }
        lines
    }
}

/// The comments, string literals and names of functions of a Rust file.
fn rust(file: &File) -> Vec<Passage> {
    let mut passages = Vec::<Passage>::new();
    // The line after the comment that may go on.
    let mut next = 0;
    let mut after_fn = false;
    for token in &file.tokens {
        match token.kind {
            Kind::Comment => {
                let text = token.text.trim_start_matches('/').trim_start_matches(['!', '*']);
                if token.line != next || text.trim().is_empty() {
                    let documents = token.text.starts_with("///") || token.text.starts_with("//!");
                    passages.push(Passage { documents, ..Passage::default() });
                }
                next = token.line + token.text.matches('\n').count() + 1;
                if let Some(passage) = passages.last_mut() {
                    passage.push(token.line, text);
                }
            }
            Kind::Text => {
                let mut passage = Passage::default();
                for (index, line) in token.text.lines().enumerate() {
                    passage.push(token.line + index, line.trim_end_matches('\\'));
                }
                passages.push(passage);
            }
            Kind::Name if after_fn => {
                let mut passage = Passage::default();
                passage.push(token.line, &token.text.replace('_', " "));
                passages.push(passage);
            }
            Kind::Name | Kind::Other => {}
        }
        after_fn = token.kind == Kind::Name && token.text == "fn";
    }
    passages
}

/// The paragraphs of a Markdown text, without blocks of code.
fn markdown(text: &str) -> Vec<Passage> {
    let mut passages = vec![Passage::default()];
    let mut in_code = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code || line.trim().is_empty() || line.trim_start().starts_with(['|', '-', '#']) {
            passages.push(Passage::default());
        }
        if let Some(passage) = passages.last_mut().filter(|_| !in_code) {
            passage.push(index + 1, line);
        }
    }
    passages
}
