//! The results: lines, tables, plots, and the targets.

use std::fs;
use std::path::Path;
use std::time::Duration;

use alluvium_chart::{Axis, Chart, Scale, Series};

use super::{Load, Options, Rate, SYSTEMS, Sample, System};
use crate::Error;
use crate::bench::{Bar, judged, median};
use crate::report::Case;

// The targets, all for Alluvium, which flushes. Compared with a Kafka that flushes:
const LEAST_THROUGHPUT: f64 = 5.0;
const MOST_P99: f64 = 0.2;
// Compared with one that does not:
const LEAST_PER_CPU_SECOND: f64 = 1.5;
const MOST_P99_UNFLUSHED: f64 = 1.0;
// Compared with both:
const MOST_MEMORY: f64 = 0.25;

impl Load {
    pub(super) fn name(self) -> String {
        match self {
            Self::Produce(rate) => format!("produce, {rate}"),
            Self::Unacknowledged(rate) => format!("acks=0, {rate}"),
            Self::Consume => "consume".into(),
            Self::EndToEnd => "end to end".into(),
        }
    }
}

/// The loads of a run, in order.
pub(super) fn loads(options: &Options) -> Vec<Load> {
    let mut loads = Vec::new();
    for rate in &options.rates {
        loads.push(Load::Produce(*rate));
        loads.push(match rate {
            Rate::Max => Load::Consume,
            Rate::Megabytes(_) => Load::Unacknowledged(*rate),
        });
    }
    if options.end_to_end > 0 {
        loads.push(Load::EndToEnd);
    }
    loads
}

type Figure = fn(&Sample) -> f64;

const FIGURES: [(&str, Figure); 5] = [
    ("MiB/s", |sample| sample.throughput),
    ("p50 ms", |sample| sample.p50_ms),
    ("p99 ms", |sample| sample.p99_ms),
    ("MiB/CPU s", |sample| sample.per_cpu_second),
    ("peak MiB", |sample| sample.peak_memory),
];

/// The median of the rounds.
fn of(samples: &[Sample], system: System, partitions: u32, load: Load, figure: Figure) -> f64 {
    let this = |sample: &&Sample| {
        (sample.system, sample.partitions) == (system, partitions) && sample.load == load
    };
    median(samples.iter().filter(this).map(figure))
}

pub(super) fn line(sample: &Sample, took: Duration, cpu: Duration) -> String {
    let figures = FIGURES.map(|(name, figure)| format!("{:.2} {name}", figure(sample)));
    format!(
        "{:<17} {} ({:.0} s, {:.1} s of CPU)",
        sample.load.name(),
        figures.join(", "),
        took.as_secs_f64(),
        cpu.as_secs_f64()
    )
}

pub(super) fn table(options: &Options, partitions: u32, samples: &[Sample]) -> String {
    let title = format!("{partitions} partitions");
    let mut text = format!("{title:<18}{:<18}", "");
    for (name, _) in FIGURES {
        text.push_str(&format!("{name:>12}"));
    }
    for load in loads(options) {
        for system in SYSTEMS {
            let is_measured = samples.iter().any(|sample| {
                (sample.system, sample.partitions, sample.load) == (system, partitions, load)
            });
            if !is_measured {
                continue;
            }
            text.push_str(&format!("\n{:<18}{:<18}", load.name(), system.name()));
            for (_, figure) in FIGURES {
                let value = of(samples, system, partitions, load, figure);
                text.push_str(&format!("{value:>12.2}"));
            }
        }
    }
    text
}

pub(super) fn judge(options: &Options, samples: &[Sample]) -> Vec<Case> {
    let mut cases = Vec::new();
    for partitions in &options.partitions {
        let is_judged = |load: &Load| !matches!(load, Load::Unacknowledged(_));
        for load in loads(options).into_iter().filter(is_judged) {
            let mut judge = |peer: System, what: &str, figure: Figure, bar: Bar| {
                let [ours, theirs] = [System::Alluvium, peer]
                    .map(|system| of(samples, system, *partitions, load, figure));
                let name = format!(
                    "{partitions} partitions, {}: {what}, over {}",
                    load.name(),
                    peer.name()
                );
                cases.push(judged(&name, ours / theirs, bar));
            };
            let (flushed, unflushed) = (System::KafkaFlushed, System::KafkaUnflushed);
            if load == Load::Produce(Rate::Max) {
                let least = Bar::AtLeast(LEAST_THROUGHPUT);
                judge(flushed, "throughput", |sample| sample.throughput, least);
            }
            if load != Load::Consume {
                let p99: Figure = |sample| sample.p99_ms;
                judge(flushed, "p99", p99, Bar::AtMost(MOST_P99));
                judge(unflushed, "p99", p99, Bar::AtMost(MOST_P99_UNFLUSHED));
            }
            if load != Load::EndToEnd {
                let least = Bar::AtLeast(LEAST_PER_CPU_SECOND);
                judge(unflushed, "per CPU second", |sample| sample.per_cpu_second, least);
            }
            for peer in [flushed, unflushed] {
                let most = Bar::AtMost(MOST_MEMORY);
                judge(peer, "resident memory", |sample| sample.peak_memory, most);
            }
        }
    }
    cases
}

pub(super) fn plot(
    directory: &Path,
    options: &Options,
    rounds: u32,
    samples: &[Sample],
) -> Result<(), Error> {
    fs::create_dir_all(directory)?;
    let of_rounds = match rounds {
        1 => "one round".to_owned(),
        _ => format!("medians of {rounds} rounds"),
    };
    let write = |name: &str, title: &str, y: &str, load: Load, figure: Figure| {
        let series = SYSTEMS.map(|system| {
            let at = |partitions: &u32| {
                (f64::from(*partitions), of(samples, system, *partitions, load, figure))
            };
            Series {
                name: system.name().into(),
                points: options.partitions.iter().map(at).filter(|point| point.1 > 0.0).collect(),
                dashed: system == System::KafkaUnflushed,
            }
        });
        let chart = Chart {
            title: title.into(),
            subtitle: format!("{}, records of 1 KiB, acks=all; {of_rounds}", load.name()),
            x: Axis { label: "partitions".into(), scale: Scale::Logarithmic },
            y: Axis { label: y.into(), scale: Scale::Logarithmic },
            series: series.into(),
            marks: Vec::new(),
        };
        let path = directory.join(name);
        fs::write(&path, chart.render())?;
        println!("wrote {}", path.display());
        Ok::<(), Error>(())
    };
    for rate in &options.rates {
        let load = Load::Produce(*rate);
        let name = match rate {
            Rate::Megabytes(megabytes) => megabytes.to_string(),
            Rate::Max => "max".into(),
        };
        let p99 = format!("kafka-p99-{name}.svg");
        write(&p99, "Latency of producing", "p99, ms", load, |sample| sample.p99_ms)?;
        if *rate == Rate::Max {
            let throughput: Figure = |sample| sample.throughput;
            write("kafka-throughput.svg", "Producing", "MiB/s", load, throughput)?;
            let per_cpu: Figure = |sample| sample.per_cpu_second;
            let y = "MiB per second of the server's CPU";
            write("kafka-cpu.svg", "Producing", y, load, per_cpu)?;
        }
    }
    Ok(())
}
