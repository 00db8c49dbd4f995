//! The files that the step reads, and Rust files cut into tokens.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use ra_ap_rustc_lexer::{FrontmatterAllowed, LiteralKind, TokenKind, tokenize};

use crate::Error;
use crate::exec::output;

/// Texts that are not the project's own: other projects' words, quoted.
const QUOTED: [&str; 2] = ["tests/compat/known.txt", "LICENSE"];

/// A file by its path, relative to the root.
pub(super) struct File {
    pub(super) path: String,
    pub(super) text: String,
    /// Of a Rust file.
    pub(super) tokens: Vec<Token>,
}

/// All tracked text files that have rules.
pub(super) struct Tree {
    pub(super) files: Vec<File>,
    /// The paths of all files, those without rules included, and of their directories.
    paths: BTreeSet<String>,
}

impl Tree {
    /// Reads the files that git tracks or would add.
    pub(super) fn read(root: &Path) -> Result<Self, Error> {
        let listed = output(Command::new("git").current_dir(root).args([
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))
        .map_err(|error| format!("the tidy step needs a git checkout: {error}"))?;
        let listed = String::from_utf8(listed)?;
        // A file that is deleted and not yet staged is listed, and is not there.
        let present: Vec<&str> = listed.lines().filter(|path| root.join(path).exists()).collect();
        let mut files = Vec::new();
        for &path in &present {
            let known = [".rs", ".md", ".py", ".go", ".java", ".js", ".sh", ".toml"];
            let wanted = known.iter().any(|end| path.ends_with(end)) && !QUOTED.contains(&path);
            if wanted {
                files.push(File::new(path, fs::read_to_string(root.join(path))?));
            }
        }
        Ok(Self::new(files, &present))
    }

    /// A tree of `files` in which the files at `paths` exist.
    pub(super) fn new(files: Vec<File>, paths: &[&str]) -> Self {
        let with_directories = |path: &&str| {
            let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
            ends.map(|end| path[..end].to_owned()).collect::<Vec<_>>()
        };
        let mut paths: BTreeSet<String> = paths.iter().flat_map(with_directories).collect();
        // The root.
        paths.insert(String::new());
        Self { files, paths }
    }

    /// Whether a file or directory exists.
    pub(super) fn has(&self, path: &str) -> bool {
        self.paths.contains(path)
    }

    /// The Rust files.
    pub(super) fn rust(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is_rust())
    }
}

impl File {
    pub(super) fn new(path: &str, text: String) -> Self {
        let tokens = if path.ends_with(".rs") { cut(&text) } else { Vec::new() };
        Self { path: path.to_owned(), text, tokens }
    }

    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    pub(super) fn is_markdown(&self) -> bool {
        self.path.ends_with(".md")
    }

    /// The tokens of a Rust file without comments, and without the test module that a file may have
    /// at its end.
    pub(super) fn code(&self) -> Vec<&Token> {
        let mut code: Vec<&Token> =
            self.tokens.iter().filter(|token| token.kind != Kind::Comment).collect();
        let tests = code.windows(8).position(|tokens| {
            let texts: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
            matches!(texts[..], ["cfg", "(", "test", ")", "]", "mod", _, "{"])
        });
        code.truncate(tests.unwrap_or(code.len()));
        code
    }

    /// Whether the file holds tests only.
    pub(super) fn is_test(&self) -> bool {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        self.path.split('/').any(|part| part == "tests" || part == "benches")
            || matches!(name, "tests.rs" | "models.rs")
            || name.ends_with("_tests.rs")
    }
}

/// What a token is, as far as the rules care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Comment,
    Text,
    Name,
    Other,
}

/// A token that is not white space.
#[derive(Clone, Debug)]
pub(super) struct Token {
    pub(super) kind: Kind,
    /// Counted from 1.
    pub(super) line: usize,
    pub(super) text: String,
}

fn cut(source: &str) -> Vec<Token> {
    let (mut at, mut line) = (0, 1);
    let mut tokens = Vec::new();
    for token in tokenize(source, FrontmatterAllowed::No) {
        let text = &source[at..at + token.len as usize];
        let kind = match token.kind {
            TokenKind::Whitespace => None,
            TokenKind::LineComment { .. } | TokenKind::BlockComment { .. } => Some(Kind::Comment),
            TokenKind::Literal {
                kind: LiteralKind::Str { .. } | LiteralKind::RawStr { .. },
                ..
            } => Some(Kind::Text),
            TokenKind::Ident | TokenKind::RawIdent => Some(Kind::Name),
            _ => Some(Kind::Other),
        };
        if let Some(kind) = kind {
            tokens.push(Token { kind, line, text: text.to_owned() });
        }
        line += text.matches('\n').count();
        at += token.len as usize;
    }
    tokens
}
