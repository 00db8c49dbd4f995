//! Reads the printed output of runs: rounds that were measured one at a time, or a run that ended
//! before its last round, are combined into one table.

use super::figures::loads;
use super::{Load, Options, SYSTEMS, Sample, System};
use crate::Error;

/// Reads the rounds in these outputs: how many, and their samples. If a run ended in the middle of
/// a system, the loads that were completed are used.
///
/// # Errors
/// A line that starts like a load but lacks its figures; no samples at all.
pub(super) fn read(options: &Options, outputs: &[String]) -> Result<(u32, Vec<Sample>), Error> {
    let mut samples = Vec::new();
    let mut rounds = 0;
    for output in outputs {
        let mut of = None;
        let mut round = "";
        for line in output.lines() {
            if let Some((this, partitions, system)) = heading(line) {
                rounds += u32::from(this != round);
                (round, of) = (this, Some((partitions, system)));
            } else if let (Some((partitions, system)), Some(line)) = (of, line.strip_prefix("  ")) {
                let load = loads(options).into_iter().find(|load| line.starts_with(&load.name()));
                let Some(load) = load else { continue };
                let sample = sample(system, partitions, load, line);
                samples
                    .push(sample.ok_or_else(|| format!("not a printed line of figures: {line}"))?);
            }
        }
    }
    match samples.is_empty() {
        true => Err("no figures of `cargo xtask bench kafka` found".into()),
        false => Ok((rounds, samples)),
    }
}

/// `round 1 of 3: 100 partitions, Kafka, flushed`: the round, partitions and system.
fn heading(line: &str) -> Option<(&str, u32, System)> {
    let (round, rest) = line.strip_prefix("round ")?.split_once(" of ")?;
    let (partitions, name) = rest.split_once(": ")?.1.split_once(" partitions, ")?;
    let system = SYSTEMS.into_iter().find(|system| system.name() == name)?;
    Some((round, partitions.parse().ok()?, system))
}

/// Parses a line of [`super::figures::line`].
fn sample(system: System, partitions: u32, load: Load, line: &str) -> Option<Sample> {
    let figures = line[load.name().len()..].split(" (").next()?;
    let mut values =
        figures.split(", ").map(|figure| figure.split_whitespace().next()?.parse().ok());
    let mut next = || values.next().flatten();
    Some(Sample {
        system,
        partitions,
        load,
        throughput: next()?,
        p50_ms: next()?,
        p99_ms: next()?,
        per_cpu_second: next()?,
        peak_memory: next()?,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser as _;

    use super::super::{Rate, figures};
    use super::*;

    #[derive(clap::Parser)]
    struct Arguments {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn printed_figures_are_read_back() {
        let options = Arguments::parse_from(["bench"]).options;
        let measured = |system, load, throughput| Sample {
            system,
            partitions: 100,
            load,
            throughput,
            p50_ms: 1.0,
            p99_ms: 2.5,
            per_cpu_second: 333.25,
            peak_memory: 99.75,
        };
        let (ours, theirs) = (System::Alluvium, System::KafkaFlushed);
        let produce = measured(ours, Load::Produce(Rate::Max), 184.5);
        let slow = measured(theirs, Load::Produce(Rate::Megabytes(5)), 4.75);
        let line = |sample| figures::line(sample, Duration::from_secs(3), Duration::from_secs(1));
        let output = format!(
            "Compiling\nround 1 of 3: 100 partitions, Alluvium\n  {}\n  an error of another one\n\
               round 1 of 3: 100 partitions, Kafka, flushed\n  {}\n\
             round 2 of 3: 100 partitions, Kafka, flushed\n  {}\n",
            line(&produce),
            line(&slow),
            line(&slow)
        );
        let (rounds, samples) = read(&options, &[output]).unwrap();
        assert_eq!((rounds, samples.len()), (2, 3));
        let first = &samples[0];
        assert!((first.system, first.partitions) == (ours, 100) && first.load == produce.load);
        assert_eq!(
            (first.throughput, first.p99_ms, first.per_cpu_second, first.peak_memory),
            (184.5, 2.5, 333.25, 99.75)
        );
        assert!(samples[1].system == theirs && samples[1].load == slow.load);
        let cut =
            "round 1 of 1: 1 partitions, Alluvium\n  consume   3.00 MiB/s, 0.00 p50".to_owned();
        assert!(read(&options, &[cut]).is_err());
        assert!(read(&options, &["nothing".to_owned()]).is_err());
    }
}
