//! Kafka applications in a JVM other than the `apps`: a Flink job and a Spring application.

use std::fs;
use std::io::Write;

use super::Compat;
use crate::report::Case;
use crate::setup::{self, Missing};
use crate::tap::{tap, tap_that_asks};

/// The line with which the Flink test asks to kill the server.
const KILL_THE_SERVER: &str = "kill the server";

pub(super) fn flink(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    if compat.short {
        let why = "the short form omits it: its downloads and restarts take too long";
        return Err(Missing::NotAllowed(why.into()));
    }
    let class_path = setup::maven_project(compat.root, "flink", "Flink")?;
    compat.with_peer("flink", 1, |peer, directory| {
        let scratch = directory.join("flink");
        fs::create_dir_all(&scratch)?;
        let mut java = peer.client("java");
        java.args(["-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp"]);
        java.args([&class_path, "alluvium.flink.Flink"]).arg(&scratch);
        tap_that_asks("alluvium.flink.Flink", &mut java, |line, input| {
            if line == KILL_THE_SERVER {
                peer.kill_and_start_again()?;
                input.write_all(b"\n")?;
            }
            Ok(())
        })
    })
}

pub(super) fn spring(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    if compat.short {
        let why = "the short form omits it: its downloads take too long";
        return Err(Missing::NotAllowed(why.into()));
    }
    let class_path = setup::maven_project(compat.root, "spring", "Spring Kafka")?;
    compat.with_peer("spring", 1, |peer, _| {
        let mut java = peer.client("java");
        java.args(["-Xmx256m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp"]);
        tap("alluvium.spring.Spring", java.args([&class_path, "alluvium.spring.Spring"]))
    })
}
