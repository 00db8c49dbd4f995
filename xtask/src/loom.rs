//! The models of concurrent code, run by loom. They are in files named `models.rs` beside the code
//! that they check.

use std::path::Path;

use crate::exec::cargo;
use crate::report::{Case, Report};
use crate::{Error, LoomOptions, gate};

/// `cargo xtask loom`.
pub(crate) fn campaign(root: &Path, options: &LoomOptions) -> Report {
    let mut report = Report::default();
    report.suite("loom", || models(root, options.preemptions));
    report
}

/// Runs the models, one case each. With `--cfg loom` all crates are rebuilt, so they have their own
/// target directory.
pub(crate) fn models(root: &Path, preemptions: u32) -> Result<Vec<Case>, Error> {
    let mut command = cargo(root);
    command.env("RUSTFLAGS", "--cfg loom").env("LOOM_MAX_PREEMPTIONS", preemptions.to_string());
    command.args(["test", "--profile", "loom", "--target-dir", "target/loom", "--locked"]);
    for package in ["alluvium-device", "alluvium-wal", "alluvium-journal"] {
        command.args(["--package", package]);
    }
    command.arg("--lib");
    command.args(["--no-fail-fast", "models::"]);
    gate::test(&mut command)
}
