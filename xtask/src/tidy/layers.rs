//! The layers of `ARCHITECTURE.md`: a crate imports only from below.

use super::Violation;
use super::source::{Kind, Tree};

/// A crate's directory, its name in paths, and the crates of the project that it may import.
const LAYERS: &[(&str, &str, &[&str])] = &[
    ("crates/chart", "alluvium_chart", &[]),
    ("crates/coordination", "alluvium_coordination", &[]),
    ("crates/device", "alluvium_device", &[]),
    ("crates/nbd", "alluvium_nbd", &[]),
    ("crates/wal", "alluvium_wal", &["alluvium_device"]),
    ("crates/journal", "alluvium_journal", &["alluvium_device"]),
    ("crates/stream", "alluvium_stream", &["alluvium_device", "alluvium_wal", "alluvium_journal"]),
    (
        "crates/volume",
        "alluvium_volume",
        &["alluvium_coordination", "alluvium_device", "alluvium_wal"],
    ),
    // The broker reaches the log and the device through the streams only.
    ("crates/broker", "alluvium_broker", &["alluvium_stream"]),
    (
        "crates/alluvium",
        "alluvium",
        &[
            "alluvium_chart",
            "alluvium_coordination",
            "alluvium_nbd",
            "alluvium_volume",
            "alluvium_device",
            "alluvium_wal",
            "alluvium_journal",
            "alluvium_stream",
            "alluvium_broker",
        ],
    ),
];

/// Uses of a crate of the project that is not below. Tests may use any crate.
pub(super) fn upward(tree: &Tree) -> Vec<Violation> {
    let mut violations = Vec::new();
    for file in tree.rust().filter(|file| !file.is_test()) {
        let layer = LAYERS.iter().find(|(dir, ..)| file.path.starts_with(&format!("{dir}/src/")));
        let Some((_, own, below)) = layer else {
            // A new crate needs a layer before it has code.
            if let Some(dir) = unknown_crate(&file.path) {
                violations.push(Violation {
                    file: file.path.clone(),
                    line: 1,
                    what: format!("{dir} has no layer in xtask/src/tidy/layers.rs"),
                });
            }
            continue;
        };
        for token in file.code().into_iter().filter(|token| token.kind == Kind::Name) {
            let is_ours = LAYERS.iter().any(|(_, name, _)| *name == token.text);
            let is_crate = token.text.starts_with("alluvium_") && is_ours;
            if is_crate && token.text != *own && !below.contains(&token.text.as_str()) {
                violations.push(Violation {
                    file: file.path.clone(),
                    line: token.line,
                    what: format!("{own} must not use {}", token.text),
                });
            }
        }
    }
    violations
}

fn unknown_crate(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("crates/")?;
    let (name, below) = rest.split_once('/')?;
    below.starts_with("src/").then_some(name)
}
