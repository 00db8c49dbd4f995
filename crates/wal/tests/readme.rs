//! The README shows the example, and the example does what it says.

#[allow(dead_code)] // its main function
#[path = "../examples/journal.rs"]
mod example;

#[test]
fn the_readme_shows_the_example() {
    let example = include_str!("../examples/journal.rs");
    let start = example.find("use std").unwrap();
    let shown = &example[start..example.find("fn main()").unwrap()];
    assert!(include_str!("../README.md").contains(shown.trim_end()), "README.md has another one");
}

#[test]
fn the_example_returns_the_previous_entries() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.wal");
    let entries = |entries: &[&str]| entries.iter().map(ToString::to_string).collect::<Vec<_>>();
    let journal = |new| example::journal(&path, &entries(new)).unwrap();
    assert!(journal(&["one", "two"]).is_empty());
    assert_eq!(journal(&["three"]), entries(&["one", "two"]));
    assert_eq!(journal(&[]), entries(&["one", "two", "three"]));
}
