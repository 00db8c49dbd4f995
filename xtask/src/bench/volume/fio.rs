//! Runs fio against an export, and reads what it has measured.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::Error;
use crate::exec::quietly;

/// What fio does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) pattern: &'static str,
    pub(super) block_kibibytes: u32,
    pub(super) depth: u32,
}

impl Workload {
    /// Arguments of fio.
    fn arguments(&self) -> [String; 4] {
        [
            format!("--rw={}", self.pattern),
            format!("--bs={}k", self.block_kibibytes),
            format!("--iodepth={}", self.depth),
            format!("--name={}", self.name.replace(' ', "-")),
        ]
    }
}

/// Where fio writes to.
pub(super) enum Target<'a> {
    /// The default export at a Unix socket.
    Export(&'a Path),
    /// A device, with these further arguments.
    Device(&'a Path, &'a [&'a str]),
}

/// For how long fio writes.
#[derive(Clone, Copy)]
pub(super) enum Length {
    Seconds(u32),
    /// Once over the range.
    Once,
}

/// What fio has measured of its writes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Measured {
    pub(super) writes: u64,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) iops: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Processor time of fio, in percent of one processor.
    pub(super) cpu_percent: f64,
}

impl Measured {
    pub(super) fn mebibytes_per_second(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 20) / self.seconds
    }
}

/// Runs fio over the first `mebibytes`. With `log`, it also writes the latency of each write to
/// `{log}_lat.1.log`.
pub(super) fn run(
    directory: &Path,
    target: &Target<'_>,
    mebibytes: u64,
    workload: &Workload,
    length: Length,
    log: Option<&str>,
) -> Result<Measured, Error> {
    let printed = directory.join("fio.json");
    let mut fio = Command::new("fio");
    fio.args(workload.arguments());
    fio.arg(format!("--size={mebibytes}m"));
    match target {
        Target::Export(socket) => {
            fio.arg("--ioengine=nbd");
            fio.arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
        }
        Target::Device(path, arguments) => {
            fio.args(["--ioengine=libaio", "--direct=1"]).args(*arguments);
            fio.arg(format!("--filename={}", path.display()));
        }
    }
    if let Length::Seconds(seconds) = length {
        fio.args(["--time_based".to_owned(), format!("--runtime={seconds}")]);
    }
    if let Some(log) = log {
        fio.args([format!("--write_lat_log={log}"), "--log_unix_epoch=1".to_owned()]);
    }
    // Latencies from the submission to the end, not only from the end of the submission.
    fio.args(["--lat_percentiles=1", "--clat_percentiles=0", "--randrepeat=0"]);
    fio.args(["--output-format=json", "--output"]).arg(&printed);
    quietly(fio.current_dir(directory))?;
    let text = fs::read_to_string(&printed)?;
    // fio may write warnings in front of it.
    let json = text.find('{').map_or("", |start| &text[start..]);
    measured(&serde_json::from_str(json)?).ok_or_else(|| format!("not of fio: {text}").into())
}

/// Takes the figures out of fio's JSON. `None` if a request has failed or a figure is missing.
fn measured(json: &Value) -> Option<Measured> {
    let job = json["jobs"].get(0)?;
    let writes = &job["write"];
    if job["error"].as_i64()? != 0 {
        return None;
    }
    let percentile = |which: &str| Some(writes["lat_ns"]["percentile"][which].as_f64()? / 1000.0);
    Some(Measured {
        writes: writes["total_ios"].as_u64()?,
        bytes: writes["io_bytes"].as_u64()?,
        seconds: writes["runtime"].as_f64()? / 1000.0,
        iops: writes["iops"].as_f64()?,
        p50_us: percentile("50.000000")?,
        p99_us: percentile("99.000000")?,
        cpu_percent: job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?,
    })
}

/// A write in fio's log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Logged {
    /// Times since the Unix epoch, in milliseconds.
    pub(super) began_ms: f64,
    pub(super) ended_ms: f64,
}

impl Logged {
    pub(super) fn latency_us(&self) -> f64 {
        (self.ended_ms - self.began_ms) * 1000.0
    }
}

/// Reads the log of the latencies.
pub(super) fn read_log(directory: &Path, log: &str) -> Result<Vec<Logged>, Error> {
    let path: PathBuf = directory.join(format!("{log}_lat.1.log"));
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    fs::remove_file(&path)?;
    let lines = text.lines().map(|line| logged(line).ok_or_else(|| format!("fio: `{line}`")));
    Ok(lines.collect::<Result<_, _>>()?)
}

/// Parses a line: the time of the end in milliseconds, the latency in nanoseconds, and more.
fn logged(line: &str) -> Option<Logged> {
    let mut fields = line.split(',').map(|field| field.trim().parse::<f64>().ok());
    let (ended_ms, latency_ns) = (fields.next()??, fields.next()??);
    Some(Logged { began_ms: ended_ms - latency_ns / 1e6, ended_ms })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_those_of_the_writes() {
        let mut json = json!({"fio version": "fio-3.33", "jobs": [{
            "error": 0, "usr_cpu": 12.5, "sys_cpu": 7.5,
            "read": {"io_bytes": 0, "iops": 0.0},
            "write": {"io_bytes": 8192000, "total_ios": 2000, "runtime": 4000, "iops": 500.0,
                "lat_ns": {"percentile": {"50.000000": 250000, "99.000000": 1500000}}},
        }]});
        let figures = measured(&json).unwrap();
        let expected = Measured {
            writes: 2000,
            bytes: 8_192_000,
            seconds: 4.0,
            iops: 500.0,
            p50_us: 250.0,
            p99_us: 1500.0,
            cpu_percent: 20.0,
        };
        assert_eq!(figures, expected);
        assert_eq!(figures.mebibytes_per_second(), 1.953_125);
        json["jobs"][0]["error"] = 5.into();
        assert_eq!(measured(&json), None, "a request has failed");
        assert_eq!(measured(&json!({"jobs": []})), None);
    }

    #[test]
    fn a_line_of_the_log_has_the_end_and_the_latency() {
        let write = logged("1764272400123, 1500000, 1, 4096, 8192, 0").unwrap();
        assert_eq!(write, Logged { began_ms: 1_764_272_400_121.5, ended_ms: 1_764_272_400_123.0 });
        assert_eq!(write.latency_us(), 1500.0);
        assert_eq!(logged("1764272400123"), None);
        assert_eq!(logged("time, latency"), None);
    }
}
