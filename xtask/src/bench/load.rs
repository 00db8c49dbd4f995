//! Producers and consumers: `alluvium bench`, whichever server they connect to.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Error;
use crate::exec::{describe, quietly};

/// The program that generates the load, and its target.
pub(super) struct Load {
    pub(super) program: PathBuf,
    pub(super) address: String,
    /// Directory for files of samples and the clients' output.
    pub(super) directory: PathBuf,
}

/// A request as measured by the client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    /// When it was due, in seconds since 1970.
    pub(super) due: f64,
    pub(super) latency_ms: f64,
    pub(super) bytes: f64,
}

impl Sample {
    fn parse(line: &str) -> Option<Self> {
        let mut numbers = line.split(',').map(|number| number.parse::<f64>().ok());
        let mut next = || numbers.next().flatten();
        let (due, latency, bytes) = (next()?, next()?, next()?);
        Some(Self { due: due / 1e6, latency_ms: latency / 1e3, bytes })
    }

    /// When it was answered.
    pub(super) fn done(&self) -> f64 {
        self.due + self.latency_ms / 1e3
    }
}

/// A running client. It is killed when dropped.
pub(super) struct Running {
    what: String,
    child: Child,
    samples: PathBuf,
}

impl Load {
    pub(super) fn new(program: &Path, address: String, directory: &Path) -> Self {
        Self { program: program.to_path_buf(), address, directory: directory.to_path_buf() }
    }

    pub(super) fn create(
        &self,
        topic: &str,
        partitions: u32,
        config: &[&str],
    ) -> Result<(), Error> {
        let mut create = Command::new(&self.program);
        create.args(["topic", "create", topic, "--bootstrap", &self.address]);
        create.args(["--partitions", &partitions.to_string()]);
        for setting in config {
            create.args(["--config", setting]);
        }
        quietly(&mut create)
    }

    pub(super) fn delete(&self, topic: &str) -> Result<(), Error> {
        let mut delete = Command::new(&self.program);
        quietly(delete.args(["topic", "delete", topic, "--bootstrap", &self.address]))
    }

    /// Starts `alluvium bench KIND TOPIC ARGUMENTS`, which records a sample of each request.
    pub(super) fn start(
        &self,
        kind: &str,
        topic: &str,
        arguments: &[&str],
    ) -> Result<Running, Error> {
        let name = format!("{kind}-{topic}");
        let samples = self.directory.join(&name).with_extension("csv");
        let samples = samples.to_string_lossy();
        self.start_named(&name, kind, topic, &[arguments, &["--samples", &samples]].concat())
    }

    /// Starts a client without samples. `name` distinguishes it from concurrent ones.
    pub(super) fn start_named(
        &self,
        name: &str,
        kind: &str,
        topic: &str,
        arguments: &[&str],
    ) -> Result<Running, Error> {
        let samples = self.directory.join(name).with_extension("csv");
        let mut bench = Command::new(&self.program);
        bench.args(["bench", kind, topic, "--bootstrap", &self.address]).args(arguments);
        let what = describe(&bench);
        let log = samples.with_extension("log");
        bench.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let child = bench.spawn().map_err(|error| format!("`{what}`: {error}"))?;
        Ok(Running { what, child, samples })
    }

    pub(super) fn run(
        &self,
        kind: &str,
        topic: &str,
        arguments: &[&str],
    ) -> Result<Vec<Sample>, Error> {
        self.start(kind, topic, arguments)?.finish()
    }
}

impl Running {
    pub(super) fn has_ended(&mut self) -> Result<bool, Error> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end, which must be a success.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        if !self.child.wait()?.success() {
            let errors = fs::read_to_string(self.samples.with_extension("log"))?;
            let last = errors.lines().last().unwrap_or_default();
            return Err(format!("`{}` failed: {last}", self.what).into());
        }
        Ok(())
    }

    /// Waits for its end, and reads its samples, in the order in which requests were due.
    pub(super) fn finish(mut self) -> Result<Vec<Sample>, Error> {
        self.wait()?;
        let samples = read(&self.samples)?;
        if samples.is_empty() {
            return Err(format!("`{}` sent nothing", self.what).into());
        }
        Ok(samples)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Usually it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(path: &Path) -> Result<Vec<Sample>, Error> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().skip(1);
    let samples = lines.map(|line| {
        Sample::parse(line).ok_or_else(|| Error::from(format!("not a sample: `{line}`")))
    });
    let mut samples = samples.collect::<Result<Vec<_>, Error>>()?;
    samples.sort_by(|one, other| one.due.total_cmp(&other.due));
    Ok(samples)
}

/// The smallest latency that is at least as large as this fraction of the samples. NaN without
/// samples.
pub(super) fn quantile(samples: &[Sample], part: f64) -> f64 {
    let mut latencies: Vec<f64> = samples.iter().map(|sample| sample.latency_ms).collect();
    latencies.sort_by(f64::total_cmp);
    let rank = (latencies.len() as f64 * part).ceil() as usize;
    latencies.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// The samples that were due in this time.
pub(super) fn due(samples: &[Sample], (from, to): (f64, f64)) -> Vec<Sample> {
    samples.iter().filter(|sample| (from..to).contains(&sample.due)).copied().collect()
}

/// MiB per second of the requests that were answered in this time.
pub(super) fn rate(samples: &[Sample], from: f64, to: f64) -> f64 {
    let inside = samples.iter().filter(|sample| (from..to).contains(&sample.done()));
    inside.map(|sample| sample.bytes).sum::<f64>() / (to - from) / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(due: f64, latency_ms: f64) -> Sample {
        Sample { due, latency_ms, bytes: f64::from(1 << 20) }
    }

    #[test]
    fn a_line_is_parsed_as_a_sample() {
        let read = Sample::parse("1500000,2500,64").expect("it has three numbers");
        assert_eq!(read, Sample { due: 1.5, latency_ms: 2.5, bytes: 64.0 });
        assert_eq!(Sample::parse("1500000,2500"), None);
        assert_eq!(Sample::parse("due_unix_us,latency_us,bytes"), None);
    }

    #[test]
    fn quantiles_use_the_nearest_rank() {
        let samples: Vec<Sample> = (1..=100).rev().map(|ms| sample(0.0, f64::from(ms))).collect();
        assert_eq!(quantile(&samples, 0.5), 50.0);
        assert_eq!(quantile(&samples, 0.99), 99.0);
        assert_eq!(quantile(&samples, 1.0), 100.0);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn a_rate_counts_answers_within_its_time() {
        let samples =
            [sample(0.0, 900.0), sample(0.5, 500.0), sample(0.9, 1200.0), sample(1.9, 200.0)];
        assert_eq!(rate(&samples, 1.0, 2.0), 1.0, "only 1.0 is counted, not 0.9 and 2.1");
        assert_eq!(rate(&samples, 0.0, 2.0), 1.0);
    }
}
