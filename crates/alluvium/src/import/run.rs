//! The steps of an import: a pass over all topics, committed offsets and ACLs, and the opening of
//! topics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64};

use uuid::Uuid;

use super::copy::{self, Copied, Pass};
use super::reader::{Isolation, Position};
use super::report::{PartitionReport, Report, State, TopicReport};
use super::source::{Settings, Source, SourceTopic};
use super::target::{NotBegun, Target};
use super::{acls, compare, groups};
use crate::address::HostPort;
use crate::kafka::Access;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::topic::{self, EARLIEST, LATEST};

/// An import: both sides, and what is known of each topic.
pub(super) struct Import {
    from: (Vec<HostPort>, Access),
    to: (HostPort, Access),
    /// Names, and beginnings of names followed by `*`. Empty: all topics.
    wanted: Vec<String>,
    settings: BTreeMap<String, Settings>,
    report: Report,
    progress: Option<Progress>,
}

/// Progress until the source has no more.
struct Progress {
    meter: Meter,
    /// Offsets that are copied.
    done: u64,
}

impl Import {
    pub(super) fn new(
        from: (Vec<HostPort>, Access),
        to: (HostPort, Access),
        wanted: Vec<String>,
    ) -> Self {
        let (settings, report) = (BTreeMap::new(), Report::default());
        Self { from, to, wanted, settings, report, progress: None }
    }

    pub(super) fn report(&self) -> &Report {
        &self.report
    }

    /// Whether a pass has ended.
    pub(super) fn has_copied(&self) -> bool {
        !self.report.topics.is_empty()
    }

    /// Logs how much is copied.
    pub(super) fn log_state(&self) {
        let Report { groups, acls, .. } = &self.report;
        let importing = self.report.topics.values().filter(|it| it.state == State::Importing);
        let topics = importing.clone().count();
        let records: u64 = importing.map(TopicReport::records).sum();
        tracing::info!(
            "caught up: {records} records of {topics} topics copied by this run; {groups} groups, \
             {acls} ACLs"
        );
    }

    /// Connects to both sides. Connections do not last for the whole import: servers close those
    /// without requests.
    fn sides(&self) -> Result<(Source, Target), Failure> {
        let source = Source::connect(&self.from.0, &self.from.1)?;
        Ok((source, Target::connect(&self.to.0, &self.to.1)?))
    }

    /// Returns the topics of the source that are wanted.
    fn topics(&self, source: &mut Source) -> Result<Vec<SourceTopic>, Failure> {
        let all = source.topics()?;
        let matches = |wanted: &str, name: &str| match wanted.strip_suffix('*') {
            Some(beginning) => name.starts_with(beginning),
            None => name == wanted,
        };
        let missing: Vec<_> = self
            .wanted
            .iter()
            .filter(|wanted| !all.iter().any(|topic| matches(wanted, &topic.name)))
            .collect();
        if !missing.is_empty() {
            return Err(Failure::Usage(format!(
                "the source has no topic {}: it has {}",
                output::listed(&missing),
                output::listed(&all.iter().map(|topic| &topic.name).collect::<Vec<_>>())
            )));
        }
        let is_wanted = |topic: &SourceTopic| {
            self.wanted.is_empty() || self.wanted.iter().any(|wanted| matches(wanted, &topic.name))
        };
        Ok(all.into_iter().filter(is_wanted).collect())
    }

    /// Copies what the source has, up to the limit of a pass, and compares what was copied. Returns
    /// whether that was everything.
    ///
    /// # Errors
    /// A side cannot be reached, or refuses; records differ.
    pub(super) fn pass(&mut self, stop: &AtomicBool) -> Result<bool, Failure> {
        let (mut source, mut target) = self.sides()?;
        let topics = self.topics(&mut source)?;
        self.report.source.clone_from(&source.cluster);
        let mut partitions = Vec::new();
        for topic in &topics {
            let next = self.begin(&mut source, &mut target, topic)?;
            let next = next.into_iter().flatten().enumerate().zip(&topic.leaders);
            partitions.extend(next.map(|((partition, next), leader)| Copied {
                position: Position { topic: topic.name.clone(), partition, next },
                leader: *leader,
                from: next,
                start: 0,
                end: 0,
                digest: alluvium_broker::RecordDigest::default(),
            }));
        }
        self.compare_unverified(&source, &mut target, &partitions)?;
        let progress = self
            .progress
            .get_or_insert_with(|| Progress { meter: Meter::of_offsets("importing"), done: 0 });
        let pass = Pass {
            stop,
            done: AtomicU64::new(progress.done),
            total: AtomicU64::new(progress.done),
            progress: progress.meter.callback(),
        };
        copy::run(&source, &target, &mut partitions, &pass).map_err(Failure::Failed)?;
        progress.done = pass.done.into_inner();
        Self::read_back(&mut target, &partitions)?;
        let is_behind = partitions.iter().any(Copied::is_behind);
        for copied in partitions {
            let topic = self.report.topics.get_mut(&copied.position.topic);
            if let Some(report) = topic {
                report.add(copied);
            }
        }
        if !is_behind {
            self.progress = None;
        }
        Ok(!is_behind)
    }

    /// Creates a topic, or continues it. Returns where its partitions continue, or `None` if it is
    /// not imported.
    fn begin(
        &mut self,
        source: &mut Source,
        target: &mut Target,
        topic: &SourceTopic,
    ) -> Result<Option<Vec<u64>>, Failure> {
        let name = &topic.name;
        let known = self.report.topics.get(name).map(|known| known.state);
        if known.is_some_and(|state| !matches!(state, State::Importing | State::SourceActive)) {
            return Ok(None);
        }
        let id = topic.id_in(&source.cluster);
        if !self.settings.contains_key(name) {
            let mut settings = source.settings(name)?;
            let refused = target.refused_settings(name, &settings.own)?;
            settings.own.retain(|key, _| !refused.contains_key(key));
            self.settings.insert(name.clone(), settings);
            self.report.topics.insert(name.clone(), TopicReport::new(&id, refused));
        }
        let report = self.report.topics.get_mut(name).expect("it was added with the settings");
        let settings = &self.settings[name].own;
        let count = topic.leaders.len();
        let mut begun = target.begin(name, &id, count, settings.clone());
        if let Err(NotBegun::Partitions { found, .. }) = &begun
            && *found < count
        {
            // The source has got more.
            target.add_partitions(name, count)?;
            begun = target.begin(name, &id, count, settings.clone());
        }
        match begun {
            Ok(begun) => {
                report.state = State::Importing;
                Ok(Some(begun.next))
            }
            Err(NotBegun::Exists(reason)) => {
                let is_complete = Self::has_same_ends(source, target, topic)?;
                report.state = if is_complete { State::Complete } else { State::Exists };
                report.reason = Some(reason).filter(|_| !is_complete);
                Ok(None)
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Whether a topic of the target ends where that of the source does.
    fn has_same_ends(
        source: &Source,
        target: &mut Target,
        topic: &SourceTopic,
    ) -> Result<bool, Failure> {
        let ends = source.offsets(&positions(topic), LATEST, Isolation::Uncommitted);
        let ends = ends.map_err(Failure::Failed)?;
        let metadata = topic::metadata(target.admin(), Some(std::slice::from_ref(&topic.name)))?;
        let Some(found) = metadata.topics.first() else { return Ok(false) };
        let of_target = topic::offsets(target.admin(), found, LATEST)?;
        let of_target = of_target.values().map(|end| end.cast_unsigned());
        Ok(of_target.eq(ends))
    }

    /// Compares what an interrupted pass has copied with the source.
    fn compare_unverified(
        &self,
        source: &Source,
        target: &mut Target,
        partitions: &[Copied],
    ) -> Result<(), Failure> {
        let names = partitions.iter().map(|it| it.position.topic.as_str()).collect();
        let verified = groups::verified(target.admin(), &names)?;
        let end = |it: &Position| {
            verified.get(&(it.topic.clone(), it.partition)).copied().unwrap_or_default()
        };
        let unverified: Vec<_> =
            partitions.iter().filter(|it| end(&it.position) < it.position.next).collect();
        let wanted: Vec<_> = unverified.iter().map(|it| (it.position.clone(), it.leader)).collect();
        let failed = Failure::Failed;
        let starts = source.offsets(&wanted, EARLIEST, Isolation::Committed).map_err(failed)?;
        for (copied, start) in unverified.iter().zip(starts) {
            let Position { topic, partition, next } = &copied.position;
            let range = end(&copied.position).max(start)..*next;
            if range.is_empty() {
                continue;
            }
            let mut of_source = source.broker(copied.leader).map_err(failed)?;
            let mut of_target = target.reader().map_err(failed)?;
            let found = compare::compare(&mut of_source, &mut of_target, topic, *partition, range)
                .map_err(failed)?;
            // What log compaction has removed from the source since is additional.
            if found.missing > 0 || found.different > 0 {
                return Err(differs(topic, *partition, found.first));
            }
        }
        let ends = unverified.iter().map(|it| &it.position);
        let ends = ends.map(|it| (it.topic.as_str(), it.partition, it.next));
        groups::note_verified(target.admin(), ends)
    }

    /// Reads back what a pass has copied, and compares it.
    fn read_back(target: &mut Target, partitions: &[Copied]) -> Result<(), Failure> {
        let mut reader = target.reader().map_err(Failure::Failed)?;
        let copied = partitions.iter().filter(|it| it.from < it.position.next);
        for Copied { position, from, digest, .. } in copied.clone() {
            let Position { topic, partition, next } = position;
            let found = compare::digest(&mut reader, topic, *partition, *from..*next)
                .map_err(Failure::Failed)?;
            if (found.records, found.hex()) != (digest.records, digest.hex()) {
                return Err(differs(topic, *partition, None));
            }
        }
        let ends = copied.map(|it| &it.position);
        let ends = ends.map(|it| (it.topic.as_str(), it.partition, it.next));
        groups::note_verified(target.admin(), ends)
    }

    /// Copies the committed offsets of the topics that are being imported, and ACLs.
    ///
    /// # Errors
    /// A side does not answer, or the source refuses to show groups.
    pub(super) fn copy_groups_and_acls(&mut self) -> Result<(), Failure> {
        let (mut source, mut target) = self.sides()?;
        source.topics()?;
        let importing = self.report.importing();
        let names: BTreeSet<&str> = importing.iter().map(String::as_str).collect();
        if names.is_empty() {
            return Ok(());
        }
        let read = groups::read(&mut source, &names)?;
        let left_out = groups::commit(target.admin(), &read)?;
        self.report.groups = read.iter().filter(|group| !group.is_empty()).count() - left_out.len();
        self.report.groups_left_out = left_out;
        match acls::read(&mut source.admin, |topic| names.contains(topic))? {
            Ok(found) => {
                let count = found.len();
                self.report.acls_left_out = acls::create(target.admin(), found)?;
                self.report.acls = count - self.report.acls_left_out.len();
            }
            Err(reason) => {
                self.report.acls_left_out =
                    vec![format!("the source does not show them: {reason}")];
            }
        }
        if let Some(of_source) = acls::users(&mut source.admin)? {
            let of_target = acls::users(target.admin())?.unwrap_or_default();
            self.report.users = of_source.difference(&of_target).cloned().collect();
        }
        Ok(())
    }

    /// Opens the topics that the source has no more records of, or all of them for a snapshot.
    /// Returns whether all are open.
    ///
    /// # Errors
    /// A side cannot be reached, or refuses.
    pub(super) fn open(&mut self, snapshot: bool) -> Result<bool, Failure> {
        let (mut source, mut target) = self.sides()?;
        let mut all = true;
        for topic in self.topics(&mut source)? {
            let Some(report) = self.report.topics.get_mut(&topic.name) else {
                all = false;
                continue;
            };
            if report.state != State::Importing {
                continue;
            }
            let ends = source.offsets(&positions(&topic), LATEST, Isolation::Uncommitted);
            let ends = ends.map_err(Failure::Failed)?;
            let has_more = !report.partitions.iter().map(|it| it.end).eq(ends.iter().copied());
            if has_more && !snapshot {
                report.state = State::SourceActive;
                all = false;
                continue;
            }
            let starts: Vec<_> = report.partitions.iter().map(|it| it.start).collect();
            let settings = source.settings(&topic.name)?.own;
            let refused = &report.refused_settings;
            let settings = settings.into_iter().filter(|(key, _)| !refused.contains_key(key));
            let finished = target.finish(&topic.name, &starts, settings.collect());
            finished.map_err(|reason| {
                Failure::Failed(format!("topic {} is not opened: {reason}", topic.name))
            })?;
            groups::forget_verified(target.admin(), &topic.name, starts.len())?;
            report.state = State::Opened;
            report.has_more = has_more;
        }
        Ok(all)
    }

    /// Finds out what an import would do.
    ///
    /// # Errors
    /// A side cannot be reached, or refuses.
    pub(super) fn plan(&mut self) -> Result<(), Failure> {
        let (mut source, mut target) = self.sides()?;
        let topics = self.topics(&mut source)?;
        self.report.source.clone_from(&source.cluster);
        let there = topic::metadata(target.admin(), None)?;
        let there: BTreeSet<_> = there.topics.iter().map(topic::name_of).collect();
        for topic in topics {
            let id = topic.id_in(&source.cluster);
            let is_there = there.contains(topic.name.as_str());
            let settings = source.settings(&topic.name)?.own;
            let refused = match is_there {
                true => BTreeMap::new(),
                false => target.refused_settings(&topic.name, &settings)?,
            };
            let mut report = TopicReport::new(&id, refused);
            report.state = State::Planned;
            if is_there && target.import_of(&topic.name)?.as_deref() != Some(&id) {
                let is_complete = Self::has_same_ends(&source, &mut target, &topic)?;
                report.state = if is_complete { State::Complete } else { State::Exists };
            }
            let partitions = positions(&topic);
            let offsets = |timestamp| {
                let offsets = source.offsets(&partitions, timestamp, Isolation::Committed);
                offsets.map_err(Failure::Failed)
            };
            let (starts, ends) = (offsets(EARLIEST)?, offsets(LATEST)?);
            report.partitions = starts
                .into_iter()
                .zip(ends)
                .enumerate()
                .map(|(partition, (start, end))| PartitionReport::new(partition, start, end))
                .collect();
            self.report.topics.insert(topic.name, report);
        }
        Ok(())
    }

    /// Compares all records that both sides have, and the settings of topics.
    ///
    /// # Errors
    /// A side cannot be reached, or refuses.
    pub(super) fn verify(&mut self) -> Result<(), Failure> {
        let (mut source, mut target) = self.sides()?;
        let topics = self.topics(&mut source)?;
        self.report.source.clone_from(&source.cluster);
        let there = topic::metadata(target.admin(), None)?.topics;
        let meter = Meter::of_offsets("comparing");
        let progress = meter.callback();
        let (mut done, mut total) = (0, 0);
        let mut ranges = Vec::new();
        for topic in topics {
            let mut report = TopicReport::new(&topic.id_in(&source.cluster), BTreeMap::new());
            let found = there.iter().find(|it| topic::name_of(it) == topic.name);
            let Some(found) = found else {
                report.state = State::Missing;
                self.report.topics.insert(topic.name, report);
                continue;
            };
            report.state = State::Compared;
            let partitions = positions(&topic);
            let offsets = |timestamp| {
                let offsets = source.offsets(&partitions, timestamp, Isolation::Committed);
                offsets.map_err(Failure::Failed)
            };
            let (starts, ends) = (offsets(EARLIEST)?, offsets(LATEST)?);
            let of_target = topic::offsets(target.admin(), found, EARLIEST)?;
            let ends_of_target = topic::offsets(target.admin(), found, LATEST)?;
            for (index, (position, leader)) in (0..).zip(partitions) {
                let at = |offsets: &BTreeMap<i32, i64>| {
                    offsets.get(&index).map_or(0, |offset| offset.cast_unsigned())
                };
                let start = starts[position.partition].max(at(&of_target));
                let end = ends[position.partition];
                let common = start..end.min(at(&ends_of_target)).max(start);
                let mut partition = PartitionReport::new(position.partition, start, common.end);
                partition.behind = end.saturating_sub(common.end);
                report.partitions.push(partition);
                total += common.end - common.start;
                ranges.push((position, leader, common));
            }
            let mut settings = source.settings(&topic.name)?;
            // Only a free name shows what is refused.
            let free = format!("{}.{}", topic.name, Uuid::new_v4());
            report.refused_settings = target.refused_settings(&free, &settings.own)?;
            settings.own.retain(|key, _| !report.refused_settings.contains_key(key));
            let of_target = topic::configs(target.admin(), &topic.name)?;
            for (key, value) in settings.own {
                let there = of_target.get(&key).cloned().flatten();
                if there.as_ref() != Some(&value) {
                    let there = there.unwrap_or_default();
                    report.different_settings.insert(key, [value, there]);
                }
            }
            report.is_compacted = settings.is_compacted;
            self.report.topics.insert(topic.name, report);
        }
        for (position, leader, range) in ranges {
            let mut of_source = source.broker(leader).map_err(Failure::Failed)?;
            let mut of_target = target.reader().map_err(Failure::Failed)?;
            let Position { topic, partition, .. } = &position;
            let offsets = range.end - range.start;
            let found = compare::compare(&mut of_source, &mut of_target, topic, *partition, range)
                .map_err(Failure::Failed)?;
            done += offsets;
            progress(done, total);
            let report = self.report.topics.get_mut(topic).expect("it was added above");
            report.partitions[*partition].compared = Some(found);
        }
        Ok(())
    }
}

/// Returns the partitions of a topic, with their leaders.
fn positions(topic: &SourceTopic) -> Vec<(Position, i32)> {
    let position = |partition| Position { topic: topic.name.clone(), partition, next: 0 };
    let leaders = topic.leaders.iter().enumerate();
    leaders.map(|(partition, leader)| (position(partition), *leader)).collect()
}

fn differs(topic: &str, partition: usize, first: Option<u64>) -> Failure {
    let at = first.map(|offset| format!(", first at offset {offset}")).unwrap_or_default();
    Failure::Failed(format!(
        "topic {topic}, partition {partition}: what was copied differs from the source{at}. Delete \
         the topic at the target, and repeat the command"
    ))
}
