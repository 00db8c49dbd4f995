//! Each rule fails on a planted violation, and names its file and line.

use super::source::{File, Tree};
use super::{Allowances, Finding, Rule, check, compare, parse, tightened};

fn tree(files: &[(&str, &str)]) -> Tree {
    let paths: Vec<&str> = files.iter().map(|(path, _)| *path).collect();
    let files = files.iter().map(|(path, text)| File::new(path, (*text).to_owned()));
    Tree::new(files.collect(), &paths)
}

/// What the step prints about files that have no allowance.
fn failures(files: &[(&str, &str)]) -> Vec<(Rule, String)> {
    compare(&check(&tree(files)), &Allowances::new())
}

fn failure(files: &[(&str, &str)]) -> (Rule, String) {
    let mut failures = failures(files);
    assert_eq!(failures.len(), 1, "{failures:?}");
    failures.remove(0)
}

#[test]
fn a_clean_tree_passes() {
    let code = "//! Appends records.\n\nfn append() { log(\"record appended\"); }\n";
    assert_eq!(failures(&[("crates/wal/src/a.rs", code), ("README.md", "# A log\n")]), []);
}

#[test]
fn a_long_line_fails() {
    let comment = format!("fn a() {{}}\n// {}\n", "word ".repeat(20));
    let (rule, message) = failure(&[("crates/wal/src/a.rs", &comment)]);
    assert_eq!(rule, Rule::Width);
    assert!(
        message.starts_with("crates/wal/src/a.rs:2: 103 columns, the limit is 100"),
        "{message}"
    );
    let prose = "word ".repeat(30);
    assert_eq!(failure(&[("docs/a.md", &prose)]).0, Rule::Width);
}

#[test]
fn columns_are_characters_and_links_may_be_wider() {
    let line = format!("// {}\n", "ä".repeat(97));
    assert_eq!(failures(&[("crates/wal/src/a.rs", &line)]), []);
    let link = format!("[name]: https://example.org/{}\n", "a".repeat(150));
    assert_eq!(failures(&[("docs/a.md", &link)]), []);
    let row = format!("| {} |\n", "word ".repeat(30));
    assert_eq!(failures(&[("docs/a.md", &row)]), []);
}

#[test]
fn a_long_file_fails() {
    let (rule, message) = failure(&[("crates/wal/src/a.rs", &"fn a() {}\n".repeat(801))]);
    assert_eq!(rule, Rule::Length);
    assert!(message.contains("the file has 801 lines, the limit is 800"), "{message}");
    assert_eq!(failures(&[("crates/wal/src/a.rs", &"fn a() {}\n".repeat(800))]), []);
}

#[test]
fn banned_words_fail_in_comments_strings_names_and_markdown() {
    let path = "crates/wal/src/a.rs";
    for (line, code) in [
        (2, "\n/// Nobody reads it.\nfn a() {}"),
        (3, "\n// The record is put in\n// line now.\nfn a() {}"),
        (2, "\nfn a() { log(\"it can not be read\"); }"),
        (2, "\nfn nobody_waits() {}"),
        (2, "\n/// The same for a group.\nfn a() {}"),
    ] {
        let (rule, message) = failure(&[(path, code)]);
        assert_eq!(rule, Rule::Words, "{code}");
        assert!(message.starts_with(&format!("{path}:{line}: ")) || line == 3, "{message}");
    }
    assert_eq!(failure(&[("docs/a.md", "A record\nthat somebody\nreads.\n")]).0, Rule::Words);
    assert_eq!(failure(&[("tests/a.py", "# whoever reads it\n")]).0, Rule::Words);
}

#[test]
fn code_is_not_prose() {
    let code = "/// Calls `nobody` and [`somebody`](Self::somebody).\nlet nobody = young;";
    assert_eq!(failures(&[("crates/wal/src/a.rs", code)]), []);
    assert_eq!(failures(&[("docs/a.md", "```\nnobody\n```\n")]), []);
    // Only where an index lists it alone.
    assert_eq!(failures(&[("crates/wal/src/a.rs", "/// Two readers see the same.")]), []);
}

#[test]
fn an_import_from_a_higher_layer_fails() {
    let code = "use std::fs;\nuse alluvium_stream::Store;\n";
    let (rule, message) = failure(&[("crates/wal/src/a.rs", code)]);
    assert_eq!(rule, Rule::Layers);
    assert_eq!(message, "crates/wal/src/a.rs:2: alluvium_wal must not use alluvium_stream");
    assert_eq!(failures(&[("crates/broker/src/a.rs", "use alluvium_stream::Store;\n")]), []);
    assert_eq!(failure(&[("crates/broker/src/a.rs", "use alluvium_wal::Wal;\n")]).0, Rule::Layers);
    // Tests may use any crate.
    assert_eq!(failures(&[("crates/broker/src/tests/a.rs", "use alluvium_wal::Wal;\n")]), []);
    let in_file = "#[cfg(test)]\nmod tests {\n    use alluvium_wal::Wal;\n}\n";
    assert_eq!(failures(&[("crates/broker/src/a.rs", in_file)]), []);
    // Code after an item that only tests have is checked.
    let after = "#[cfg(test)]\nuse a::B;\nuse alluvium_wal::Wal;\n";
    assert_eq!(failure(&[("crates/broker/src/a.rs", after)]).0, Rule::Layers);
    assert_eq!(failure(&[("crates/unlayered/src/lib.rs", "")]).0, Rule::Layers);
}

#[test]
fn a_cycle_of_modules_fails() {
    let files = [
        ("crates/wal/src/lib.rs", "mod a;\nmod b;\npub use a::A;\n"),
        ("crates/wal/src/a.rs", "use crate::b::{self, B};\n"),
        ("crates/wal/src/b.rs", "//! B.\n\nfn f() -> crate::a::A { todo() }\n"),
    ];
    let (rule, message) = failure(&files);
    assert_eq!(rule, Rule::Cycle);
    assert!(message.contains("crates/wal/src/a.rs:1: imports b, in a cycle of 2"), "{message}");
    assert!(message.contains("crates/wal/src/b.rs:3: imports a, in a cycle of 2"), "{message}");
}

#[test]
fn a_cycle_is_found_through_parents_lists_and_re_exports() {
    let files = [
        ("crates/wal/src/lib.rs", "mod a;\nmod b;\npub use a::inner::{A, Other as Second};\n"),
        ("crates/wal/src/a/mod.rs", "pub(crate) mod inner;\n"),
        ("crates/wal/src/a/inner.rs", "use super::super::b::B;\n"),
        ("crates/wal/src/b.rs", "use crate::{Second, missing::C};\n"),
    ];
    let findings = check(&tree(&files));
    let cycles: Vec<&Finding> = findings.iter().filter(|it| it.rule == Rule::Cycle).collect();
    let [cycle] = cycles[..] else { panic!("{findings:?}") };
    // `crate::missing` is an item of the root, which is in no cycle.
    assert_eq!((cycle.value, cycle.file.as_str()), (2, "crates/wal/src"));
    let mut tests = files;
    tests[3] = ("crates/wal/src/b.rs", "#[cfg(test)]\nmod tests {\n    use crate::A;\n}\n");
    assert_eq!(failures(&tests), []);
}

#[test]
fn a_grown_cycle_fails_beyond_its_allowance() {
    let files = [
        ("crates/wal/src/a.rs", "use crate::b::B;\n"),
        ("crates/wal/src/b.rs", "use crate::c::C;\n"),
        ("crates/wal/src/c.rs", "use crate::a::A;\n"),
    ];
    let allowed = |value| parse(&format!("cycle {value} crates/wal/src\n")).unwrap();
    assert_eq!(compare(&check(&tree(&files)), &allowed(3)), []);
    let grown = compare(&check(&tree(&files)), &allowed(2));
    assert!(grown[0].1.starts_with("crates/wal/src: 3, allowed: 2\n"), "{grown:?}");
}

#[test]
fn a_link_to_a_missing_file_fails() {
    let text = "# A\n\nText with\n[a link](b.md) and [one](../README.md).\n";
    let files = [("docs/a.md", text), ("README.md", ""), ("docs/b.md", "")];
    assert_eq!(failures(&files), []);
    let (rule, message) = failure(&files[..2]);
    assert_eq!(rule, Rule::Links);
    assert_eq!(message, "docs/a.md:4: link to `b.md`: no such file or directory");
    for broken in [
        "[a](../b.md)",
        "![a](b.svg)",
        "[a]: b.md",
        "[a](/b.md)",
        "[a](../../README.md)",
        "[a](c/)",
    ] {
        let text = format!("\n{broken}\n");
        let (rule, message) = failure(&[("docs/a.md", &text), ("README.md", "")]);
        assert_eq!(rule, Rule::Links, "{broken}");
        assert!(message.starts_with("docs/a.md:2: link to "), "{message}");
    }
}

#[test]
fn a_code_span_that_is_wrapped_hides_no_link() {
    let text = "Run `cargo xtask tidy\n--tighten`, as [a](gone.md) says, and `more`.\n";
    let (rule, message) = failure(&[("docs/a.md", text)]);
    assert_eq!(rule, Rule::Links);
    assert_eq!(message, "docs/a.md:2: link to `gone.md`: no such file or directory");
}

#[test]
fn a_link_to_a_missing_heading_fails() {
    let headings = "# The `log`, and [more](c.md)\n## Sizes\n## Sizes\n```\n# code\n```\n";
    for anchor in ["the-log-and-more", "sizes", "sizes-1"] {
        let text = format!("[a](b.md#{anchor})\n");
        let files = [("docs/a.md", text.as_str()), ("docs/b.md", headings), ("docs/c.md", "")];
        assert_eq!(failures(&files), [], "{anchor}");
    }
    for anchor in ["sizes-2", "Sizes", "code"] {
        let text = format!("\n[a](b.md#{anchor})\n");
        let files = [("docs/a.md", text.as_str()), ("docs/b.md", headings), ("docs/c.md", "")];
        let (rule, message) = failure(&files);
        assert_eq!(rule, Rule::Links);
        let link = format!("docs/a.md:2: link to `b.md#{anchor}`");
        assert_eq!(message, format!("{link}: docs/b.md has no heading for `#{anchor}`"));
    }
    assert_eq!(failures(&[("a.md", "# Here\n[a](#here)\n")]), []);
    assert_eq!(failure(&[("a.md", "# Here\n[a](#there)\n")]).0, Rule::Links);
}

#[test]
fn links_to_directories_and_other_sites_and_code_are_no_broken_links() {
    let text = "[a](../crates/wal) [a](../crates/) [a](..) [a](../crates/wal/src/a.rs#L1)\n\
                [a](https://example.org/x) [a](mailto:a@example.org) `[a](b.md)`\n\
                ```\n[a](b.md)\n```\n";
    assert_eq!(failures(&[("docs/a.md", text), ("crates/wal/src/a.rs", "")]), []);
}

#[test]
fn an_allowance_is_neither_exceeded_nor_left_too_high() {
    let two = "// nobody\n\n// whoever\n";
    let files = tree(&[("sim/src/a.rs", two)]);
    let allowed = |value| parse(&format!("# head\nwords {value} sim/src/a.rs\n")).unwrap();
    assert_eq!(compare(&check(&files), &allowed(2)), []);
    assert_eq!(compare(&check(&files), &allowed(1)).len(), 1);
    let lower = compare(&check(&files), &allowed(3));
    assert!(lower[0].1.contains("2, better than the 3"), "{lower:?}");
    // Also where the file has become clean, or is gone.
    assert_eq!(compare(&check(&tree(&[])), &allowed(3)).len(), 1);
}

#[test]
fn tightening_lowers_and_drops_allowances_and_never_adds_one() {
    let files = tree(&[("sim/src/a.rs", "// nobody\n"), ("sim/src/b.rs", "// nobody\n")]);
    let old = "# head\n# more\nwords 3 sim/src/a.rs\nwidth 2 sim/src/a.rs\n";
    let new = tightened(old, &check(&files)).unwrap();
    assert_eq!(new, "# head\n# more\nwords 1 sim/src/a.rs\n");
    let stays = tightened(
        "words 1 sim/src/a.rs\n",
        &check(&tree(&[("sim/src/a.rs", "// nobody\n\n// nobody\n")])),
    );
    assert_eq!(stays.unwrap(), "words 1 sim/src/a.rs\n");
}

#[test]
fn a_malformed_allowance_is_refused() {
    for text in ["words sim/src/a.rs", "words x sim/src/a.rs", "other 1 a.rs", "words 1 a.rs b.rs"]
    {
        assert!(parse(text).is_err(), "{text}");
    }
    assert!(parse("words 1 a.rs\nwords 2 a.rs").is_err());
}
