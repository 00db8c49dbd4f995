//! `cargo xtask dist`: the binary as it is handed out, with its debug lines in a file of their own.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::Error;
use crate::exec::{cargo, describe, output, quietly};
use crate::report::{Case, Report};

/// The profile that has line tables: release with `debug`.
const PROFILE: &str = "dist";

/// Builds `target/dist/alluvium` and `target/dist/alluvium.debug`. A backtrace of the program shows
/// lines while the second file lies beside the first.
pub(crate) fn run(root: &Path) -> Report {
    let mut report = Report::default();
    report.suite("dist", || {
        Ok(vec![Case::run("a binary without debug lines, and a file of them", || build(root))])
    });
    report
}

fn build(root: &Path) -> Result<(), Error> {
    let mut build = cargo(root);
    build.args(["build", "--locked", "--package", "alluvium", "--bin", "alluvium"]);
    println!("{}", describe(build.args(["--profile", PROFILE])));
    let status = build.status()?;
    if !status.success() {
        return Err(format!("cargo build ended with {status}").into());
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let directory = root.join(target).join(PROFILE);
    let (program, lines) = (directory.join("alluvium"), directory.join("alluvium.debug"));
    // By way of a second file: cargo has linked this name to a file of its own, which stays whole.
    let stripped = directory.join("alluvium.stripped");
    // objcopy writes the name of this file, without its directory, and its checksum into the link.
    quietly(objcopy(&directory).args(["--only-keep-debug", "alluvium", "alluvium.debug"]))?;
    quietly(
        objcopy(&directory)
            .args(["--strip-debug", "--add-gnu-debuglink=alluvium.debug"])
            .args(["alluvium", "alluvium.stripped"]),
    )?;
    fs::rename(&stripped, &program)?;
    let sections = |file: &Path| -> Result<String, Error> {
        let table = output(Command::new("readelf").args(["--wide", "--sections"]).arg(file))?;
        Ok(String::from_utf8(table)?)
    };
    let of_program = sections(&program)?;
    if of_program.contains(".debug_line") || !of_program.contains(".gnu_debuglink") {
        return Err(format!("{} still has its debug lines", program.display()).into());
    }
    if !sections(&lines)?.contains(".debug_line") {
        return Err(format!("{} has no debug lines", lines.display()).into());
    }
    for file in [&program, &lines] {
        let mebibytes = fs::metadata(file)?.len() as f64 / f64::from(1 << 20);
        println!("{}: {mebibytes:.1} MiB", file.display());
    }
    Ok(())
}

fn objcopy(directory: &Path) -> Command {
    let mut objcopy = Command::new("objcopy");
    objcopy.current_dir(directory);
    objcopy
}
