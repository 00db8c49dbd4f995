//! What an import would do, and whether both sides are equal.

use std::collections::BTreeMap;
use std::ops::Range;
use std::thread;
use std::time::Duration;

use super::compare::{self, Compared};
use super::reader::{Isolation, Position};
use super::report::{PartitionReport, Report, State, TopicReport};
use super::run::{Plan, has_same_ends};
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
    let topics = plan.topics(&source)?;
    let mut report = Report { source: source.cluster.clone(), ..Report::default() };
    let there = topic::metadata(&mut target.admin, None)?;
    let there: BTreeMap<_, _> =
        there.topics.iter().map(|it| (topic::name_of(it), it.partitions.len())).collect();
    let mut imports = imports(&mut target, &topics)?;
    for topic in topics {
        let id = topic.id_in(&source.cluster);
        let settings = Settings::read(&mut source.admin, &topic.name)?;
        let count = there.get(topic.name.as_str()).copied();
        let is_there = count.is_some();
        let import = imports.remove(&topic.name).flatten();
        let refused = match (is_there, &import) {
            (false, _) => target.refused_for_new(&topic.name, &settings.wanted())?,
            (true, None) => BTreeMap::new(),
            (true, Some(_)) => {
                let of_target = Settings::read(&mut target.admin, &topic.name)?;
                target.refused_changes(&topic.name, &settings.changes(&of_target))?
            }
        };
        let mut planned = TopicReport::new(&id, refused);
        let is_ours = import.as_ref() == Some(&id);
        if planned.block_without_leader(&topic)
            || (is_ours && planned.block_with_more(&topic, count.unwrap_or(0)))
        {
            report.topics.insert(topic.name, planned);
            continue;
        }
        planned.state = match import {
            None if !is_there => State::Planned,
            Some(of) if of == id => State::Planned,
            None if has_same_ends(&source, &mut target, &topic)? => State::Complete,
            _ => State::Exists,
        };
        let (starts, ends) = range(&source, &topic)?;
        let partitions = starts.into_iter().zip(ends).enumerate();
        planned.partitions = partitions
            .map(|(partition, (start, end))| PartitionReport::new(partition, start, end))
            .collect();
        report.topics.insert(topic.name, planned);
    }
    Ok(report)
}

/// Returns what topics of the target are being imported from.
fn imports(
    target: &mut Target,
    topics: &[SourceTopic],
) -> Result<BTreeMap<String, Option<String>>, Failure> {
    let names: Vec<_> = topics.iter().map(|topic| topic.name.as_str()).collect();
    target.imports_of(&names)
}

/// Returns the first offset and the last stable offset of each partition.
fn range(source: &Source, topic: &SourceTopic) -> Result<(Vec<u64>, Vec<u64>), Failure> {
    let partitions = topic.positions();
    let starts = source.offsets(&partitions, EARLIEST, Isolation::Committed)?;
    Ok((starts, source.offsets(&partitions, LATEST, Isolation::Committed)?))
}

/// Compares all records that both sides have, and the settings of topics.
///
/// # Errors
/// A side cannot be reached, or refuses.
pub(super) fn verify(plan: &Plan) -> Result<Report, Failure> {
    let (mut source, mut target) = plan.connect()?;
    let topics = plan.topics(&source)?;
    let mut report = Report { source: source.cluster.clone(), ..Report::default() };
    let there = topic::metadata(&mut target.admin, None)?.topics;
    let mut imports = imports(&mut target, &topics)?;
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
        of_topic.is_import = imports.remove(&topic.name).flatten().is_some();
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
        let starts_of_target = topic::offsets(&mut target.admin, found, EARLIEST)?;
        let ends_of_target = topic::offsets(&mut target.admin, found, LATEST)?;
        for (index, (position, leader)) in (0..).zip(topic.positions()) {
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
        let found = compared(plan, &mut source, &target, &position, leader, range)?;
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
    let of_target = Settings::read(&mut target.admin, &topic.name)?;
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
    source: &mut Source,
    target: &Target,
    position: &Position,
    mut leader: i32,
    range: Range<u64>,
) -> Result<Compared, Failure> {
    let Position { topic, partition, .. } = position;
    let mut attempt = 1;
    loop {
        let compared = source.broker(leader).and_then(|mut of_source| {
            let range = range.clone();
            compare::compare(&mut of_source, &mut target.reader()?, topic, *partition, range)
        });
        match compared {
            Err(Failure::Failed(reason)) if attempt < ATTEMPTS => {
                tracing::warn!("{reason}; comparing the partition again");
                attempt += 1;
                thread::sleep(Duration::from_secs(1));
                (*source, _) = plan.connect()?;
                let found = source.topics.iter().find(|it| it.name == *topic);
                // A topic that was created again may have fewer partitions.
                let leaders = found.map(|found| &found.leaders[..]).unwrap_or_default();
                leader = leaders.get(*partition).copied().unwrap_or(leader);
            }
            result => return result,
        }
    }
}
