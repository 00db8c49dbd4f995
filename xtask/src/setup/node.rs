//! Packages from the npm registry.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Missing, Stamp, apt, runs};
use crate::Error;
use crate::exec::quietly;

/// Installs KafkaJS beside the program that uses it, and returns the program's path.
pub(crate) fn kafkajs(root: &Path) -> Result<PathBuf, Missing> {
    let _lock = super::lock()?;
    let source = root.join("tests/compat/kafkajs");
    let directory = root.join("target/e2e/kafkajs");
    let files = ["package.json", "package-lock.json", "suite.js"].map(|name| source.join(name));
    let done = Stamp::new(&directory.join("alluvium.stamp"), &files)?;
    let program = directory.join("suite.js");
    if done.is_fresh() {
        return Ok(program);
    }
    if !runs("node", &["--version"]) || !runs("npm", &["--version"]) {
        apt(&["nodejs", "npm"], "runs KafkaJS")?;
    }
    fs::create_dir_all(&directory).map_err(Error::from)?;
    for file in &files {
        let name = file.file_name().expect("a file has a name");
        fs::copy(file, directory.join(name)).map_err(Error::from)?;
    }
    println!("setup: npm ci (KafkaJS from the npm registry)");
    let mut npm = Command::new("npm");
    npm.current_dir(&directory).args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]);
    quietly(&mut npm)?;
    done.set()?;
    Ok(program)
}
