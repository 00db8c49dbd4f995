//! What an import would do, and whether both sides are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::thread;
use std::time::Duration;

use super::compare::{self, Compared};
use super::reader::{Isolation, Position};
use super::report::{PartitionReport, Report, State, TopicReport};
use super::run::{Plan, has_same_ends, positions};
use super::settings::Settings;
use super::source::{Source, SourceTopic};
use super::target::Target;
use crate::output::Failure;
use crate::progress::Meter;
use crate::topic::{self, EARLIEST, LATEST};

/// Attempts to compare a partition, which fail if its leader moves.
const ATTEMPTS: usize = 3;

/// Finds out what an import would do.
///
/// # Errors
/// A side cannot be reached, or refuses.
pub(super) fn plan(plan: &Plan) -> Result<Report, Failure> {
    let (mut source, mut target) = plan.connect()?;
    let topics = plan.topics(&mut source)?;
    let mut report = Report { source: source.cluster.clone(), ..Report::default() };
    let there = topic::metadata(target.admin(), None)?;
    let there: BTreeSet<_> = there.topics.iter().map(topic::name_of).collect();
    for topic in topics {
        let id = topic.id_in(&source.cluster);
        let settings = Settings::read(&mut source.admin, &topic.name)?;
        let is_there = there.contains(topic.name.as_str());
        let import = if is_there { target.import_of(&topic.name)? } else { None };
        let refused = match (is_there, &import) {
            (false, _) => target.refused_for_new(&topic.name, &settings.own)?,
            (true, None) => BTreeMap::new(),
            (true, Some(_)) => {
                let of_target = Settings::read(target.admin(), &topic.name)?;
                target.refused_changes(&topic.name, &settings.changes(&of_target))?
            }
        };
        let mut planned = TopicReport::new(&id, refused);
        planned.state = match import {
            None if !is_there => State::Planned,
            Some(of) if of == id => State::Planned,
            None if is_led(&topic) && has_same_ends(&source, &mut target, &topic)? => {
                State::Complete
            }
            _ => State::Exists,
        };
        if planned.block_without_leader(&topic) {
            report.topics.insert(topic.name, planned);
            continue;
        }
        let (starts, ends) = range(&source, &topic)?;
        let partitions = starts.into_iter().zip(ends).enumerate();
        planned.partitions = partitions
            .map(|(partition, (start, end))| PartitionReport::new(partition, start, end))
            .collect();
        report.topics.insert(topic.name, planned);
    }
    Ok(report)
}

/// Whether each partition has a leader.
fn is_led(topic: &SourceTopic) -> bool {
    topic.leaders.iter().all(|leader| *leader >= 0)
}

/// Returns the first offset and the last stable offset of each partition.
fn range(source: &Source, topic: &SourceTopic) -> Result<(Vec<u64>, Vec<u64>), Failure> {
    let partitions = positions(topic);
    let offsets = |timestamp| {
        let offsets = source.offsets(&partitions, timestamp, Isolation::Committed);
        offsets.map_err(Failure::Failed)
    };
    Ok((offsets(EARLIEST)?, offsets(LATEST)?))
}

/// Compares all records that both sides have, and the settings of topics.
///
/// # Errors
/// A side cannot be reached, or refuses.
pub(super) fn verify(plan: &Plan) -> Result<Report, Failure> {
    let (mut source, mut target) = plan.connect()?;
    let topics = plan.topics(&mut source)?;
    let mut report = Report { source: source.cluster.clone(), ..Report::default() };
    let there = topic::metadata(target.admin(), None)?.topics;
    let mut ranges = Vec::new();
    for topic in topics {
        let mut of_topic = TopicReport::new(&topic.id_in(&source.cluster), BTreeMap::new());
        let Some(found) = there.iter().find(|it| topic::name_of(it) == topic.name) else {
            of_topic.state = State::Missing;
            report.topics.insert(topic.name, of_topic);
            continue;
        };
        of_topic.state = State::Compared;
        compare_settings(&mut source, &mut target, &topic, &mut of_topic)?;
        of_topic.is_import = target.import_of(&topic.name)?.is_some();
        let count = found.partitions.len();
        if count != topic.leaders.len() {
            let of_source = topic.leaders.len();
            of_topic.reason =
                Some(format!("the source has {of_source} partitions, the target {count}"));
        }
        if of_topic.block_without_leader(&topic) {
            report.topics.insert(topic.name, of_topic);
            continue;
        }
        let (starts, ends) = range(&source, &topic)?;
        let starts_of_target = topic::offsets(target.admin(), found, EARLIEST)?;
        let ends_of_target = topic::offsets(target.admin(), found, LATEST)?;
        for (index, (position, leader)) in (0..).zip(positions(&topic)) {
            let at = |offsets: &BTreeMap<i32, i64>| {
                offsets.get(&index).map_or(0, |offset| offset.cast_unsigned())
            };
            let partition = position.partition;
            let start = starts[partition].max(at(&starts_of_target));
            let common = start..ends[partition].min(at(&ends_of_target)).max(start);
            let mut compared = PartitionReport::new(partition, start, common.end);
            compared.behind = ends[partition].saturating_sub(common.end);
            compared.deleted = start.min(ends[partition]).saturating_sub(starts[partition]);
            of_topic.partitions.push(compared);
            ranges.push((position, leader, common));
        }
        report.topics.insert(topic.name, of_topic);
    }
    let meter = Meter::of_offsets("comparing");
    let progress = meter.callback();
    let total = ranges.iter().map(|(_, _, range)| range.end - range.start).sum();
    let mut done = 0;
    for (position, leader, range) in ranges {
        done += range.end - range.start;
        let found = compared(plan, &target, &position, leader, range)?;
        progress(done, total);
        let of_topic = report.topics.get_mut(&position.topic).expect("it was added above");
        of_topic.partitions[position.partition].compared = Some(found);
    }
    Ok(report)
}

fn compare_settings(
    source: &mut Source,
    target: &mut Target,
    topic: &SourceTopic,
    report: &mut TopicReport,
) -> Result<(), Failure> {
    let of_source = Settings::read(&mut source.admin, &topic.name)?;
    let of_target = Settings::read(target.admin(), &topic.name)?;
    let changes = of_source.changes(&of_target);
    report.is_compacted = of_source.is_compacted();
    report.refused_settings = target.refused_changes(&topic.name, &changes)?;
    for (key, value) in changes {
        if !report.refused_settings.contains_key(&key) {
            let there = of_target.effective(&key).cloned().unwrap_or_default();
            let value = value.unwrap_or_else(|| "not set".into());
            report.different_settings.insert(key, [value, there]);
        }
    }
    Ok(())
}

/// Compares a range of a partition, also if its leader moves meanwhile.
fn compared(
    plan: &Plan,
    target: &Target,
    position: &Position,
    mut leader: i32,
    range: Range<u64>,
) -> Result<Compared, Failure> {
    let Position { topic, partition, .. } = position;
    for _ in 1..ATTEMPTS {
        match compare_once(plan, target, position, leader, range.clone()) {
            Err(Failure::Failed(reason)) => {
                tracing::warn!("{reason}; comparing the partition again");
                thread::sleep(Duration::from_secs(1));
                let topics = plan.connect()?.0.topics()?;
                let found = topics.iter().find(|it| it.name == *topic);
                leader = found.map_or(leader, |found| found.leaders[*partition]);
            }
            result => return result,
        }
    }
    compare_once(plan, target, position, leader, range)
}

fn compare_once(
    plan: &Plan,
    target: &Target,
    Position { topic, partition, .. }: &Position,
    leader: i32,
    range: Range<u64>,
) -> Result<Compared, Failure> {
    let (mut source, _) = plan.connect()?;
    source.topics()?;
    let mut of_source = source.broker(leader).map_err(Failure::Failed)?;
    let mut of_target = target.reader().map_err(Failure::Failed)?;
    compare::compare(&mut of_source, &mut of_target, topic, *partition, range)
}
