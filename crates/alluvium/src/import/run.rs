//! The steps of an import: a pass over all topics, committed offsets and ACLs, and the opening of
//! topics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use alluvium_broker::RecordDigest;
use uuid::Uuid;

use super::acls::{self, Shown};
use super::copy::{self, Copied, Pass};
use super::groups::Verified;
use super::reader::{Isolation, Position};
use super::report::{Report, State, TopicReport};
use super::settings::Settings;
use super::source::{Source, SourceTopic};
use super::target::{NotBegun, Target};
use super::{compare, groups};
use crate::address::HostPort;
use crate::kafka::Access;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::topic::{self, EARLIEST, LATEST};

/// The interval at which the ends of all partitions are noted as compared, also of those without
/// new records: committed offsets expire, by default after a week.
const NOTE_ALL: Duration = Duration::from_secs(24 * 3600);

/// Why a topic is blocked that the source has deleted.
const DELETED: &str = "the source does not have the topic any more: delete it at the target as \
                       well, or remove its setting alluvium.import to keep it";

/// What is imported, and from where to where.
pub(super) struct Plan {
    pub(super) from: Vec<HostPort>,
    pub(super) from_access: Access,
    pub(super) to: HostPort,
    pub(super) to_access: Access,
    /// Names, and prefixes of names followed by `*`. Empty: all topics.
    pub(super) wanted: Vec<String>,
    /// Those of them that are left out.
    pub(super) excluded: Vec<String>,
}

/// An import: both sides, and what is known of each topic.
pub(super) struct Import {
    pub(super) plan: Plan,
    /// The settings of the source when the import of a topic began.
    settings: BTreeMap<String, Settings>,
    /// The IDs at the target of topics whose import has begun in this run.
    begun: BTreeMap<String, Uuid>,
    pub(super) report: Report,
    progress: Option<Progress>,
    /// Whether a pass has ended.
    pub(super) has_copied: bool,
    /// When the ends of all partitions were noted.
    noted: Option<Instant>,
}

/// Progress until the source has no more.
struct Progress {
    meter: Meter,
    /// Offsets that are copied.
    done: u64,
}

impl Plan {
    /// Connects to both sides. Connections do not last for the whole import: servers close those
    /// without requests.
    pub(super) fn connect(&self) -> Result<(Source, Target), Failure> {
        let source = Source::connect(&self.from, &self.from_access)?;
        Ok((source, Target::connect(&self.to, &self.to_access)?))
    }

    /// Returns the topics of the source that are wanted.
    ///
    /// # Errors
    /// The source does not have one.
    pub(super) fn topics(&self, source: &Source) -> Result<Vec<SourceTopic>, Failure> {
        let all = &source.topics;
        let is_missing = |name: &&String| !all.iter().any(|topic| matches(name, &topic.name));
        let missing: Vec<_> = self.wanted.iter().filter(is_missing).collect();
        if !missing.is_empty() {
            return Err(Failure::Usage(format!(
                "the source has no topic {}: it has {}",
                output::listed(&missing),
                output::listed(&all.iter().map(|topic| &topic.name).collect::<Vec<_>>())
            )));
        }
        if let Some(unknown) = self.excluded.iter().find(is_missing) {
            return Err(Failure::Usage(format!(
                "--exclude-topics {unknown}: the source has no such topic"
            )));
        }
        Ok(self.existing(source))
    }

    /// Returns those of the wanted topics that the source has.
    fn existing(&self, source: &Source) -> Vec<SourceTopic> {
        let topics = source.topics.iter().filter(|topic| self.wants(&topic.name));
        topics.cloned().collect()
    }

    fn wants(&self, name: &str) -> bool {
        let is_in = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        (self.wanted.is_empty() || is_in(&self.wanted)) && !is_in(&self.excluded)
    }
}

/// Whether a name is this one, or has this prefix, which `*` follows.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == pattern,
    }
}

impl Import {
    pub(super) fn new(plan: Plan) -> Self {
        Self {
            plan,
            settings: BTreeMap::new(),
            begun: BTreeMap::new(),
            report: Report::default(),
            progress: None,
            has_copied: false,
            noted: None,
        }
    }

    /// Returns the topics of the source that are wanted. Names that the source had once may be
    /// missing.
    fn topics(&self, source: &Source) -> Result<Vec<SourceTopic>, Failure> {
        match self.has_copied {
            true => Ok(self.plan.existing(source)),
            false => self.plan.topics(source),
        }
    }

    /// Logs how much is copied.
    pub(super) fn log_state(&self) {
        let importing = self.report.topics.values().filter(|it| it.state == State::Importing);
        let topics = importing.clone().count();
        let records: u64 = importing.map(TopicReport::records).sum();
        tracing::info!(
            "caught up: {records} records of {topics} topics copied by this run; committed offsets \
             of {} groups",
            self.report.groups.len()
        );
    }

    /// Copies what the source has, up to the limit of a pass, and compares what was copied. Returns
    /// whether that was everything.
    ///
    /// # Errors
    /// A side cannot be reached, or refuses; records differ.
    pub(super) fn pass(&mut self, stop: &AtomicBool) -> Result<bool, Failure> {
        let passed = self.run_pass(stop);
        if let Err(Failure::Lost(_)) = &passed {
            // Producers may have changed a topic that was opened meanwhile.
            let mut target = Target::connect(&self.plan.to, &self.plan.to_access)?;
            if self.leave_opened(&mut target)? {
                return Ok(false);
            }
        }
        passed
    }

    fn run_pass(&mut self, stop: &AtomicBool) -> Result<bool, Failure> {
        let (mut source, mut target) = self.plan.connect()?;
        let topics = self.topics(&source)?;
        self.report.source.clone_from(&source.cluster);
        let there = topic::metadata(&mut target.admin, None)?.topics;
        self.leave_opened(&mut target)?;
        if !self.has_copied {
            let names: Vec<_> = there.iter().map(topic::name_of).collect();
            self.add_deleted(&source, &mut target, &names)?;
        }
        self.block_deleted(&topics);
        let mut importing = Vec::new();
        for topic in &topics {
            let found = there.iter().find(|it| topic::name_of(it) == topic.name);
            let known = self.report.topics.get(&topic.name).map(|known| known.source.as_str());
            let is_same = known == Some(&topic.id_in(&source.cluster));
            let is_begun = found.is_some_and(|found| {
                is_same
                    && self.begun.get(&topic.name) == Some(&found.topic_id)
                    && found.partitions.len() == topic.leaders.len()
                    && topic.without_leader().is_none()
            });
            let is_importing = match is_begun {
                true => self.resume(&topic.name),
                false => self.begin(&mut source, &mut target, topic, found.is_some())?,
            };
            if is_importing {
                importing.extend(topic.positions());
            }
        }
        let mut partitions = continued(&target, importing)?;
        learn(&source, &mut target, &mut partitions)?;
        self.compare_unverified(&source, &mut target, &partitions)?;
        let progress = self
            .progress
            .get_or_insert_with(|| Progress { meter: Meter::of_offsets("importing"), done: 0 });
        let pass = Pass {
            stop,
            done: AtomicU64::new(progress.done),
            total: progress.done + partitions.iter().map(Copied::offsets_behind).sum::<u64>(),
            progress: progress.meter.callback(),
        };
        copy::run(&source, &target, &mut partitions, &pass)?;
        progress.done = pass.done.into_inner();
        self.read_back(&mut target, &partitions)?;
        let is_behind = partitions.iter().any(Copied::is_behind);
        for copied in partitions {
            let report = self.report.topics.get_mut(&copied.position.topic);
            report.expect("it is being imported").add(copied);
        }
        if !is_behind {
            self.progress = None;
        }
        self.has_copied = true;
        Ok(!is_behind)
    }

    /// Leaves topics alone that are ordinary ones since their import has begun in this run: another
    /// command, or an operator, has opened them. Returns whether there are any.
    fn leave_opened(&mut self, target: &mut Target) -> Result<bool, Failure> {
        let importing = self.report.importing();
        let begun = importing.iter().map(String::as_str);
        let begun: Vec<_> = begun.filter(|name| self.begun.contains_key(*name)).collect();
        let mut has_opened = false;
        for (name, of) in target.imports_of(&begun)? {
            let report = self.report.topics.get_mut(&name).expect("it is being imported");
            if of.as_ref() != Some(&report.source) {
                let reason = "it was opened at the target: nothing is copied any more";
                tracing::warn!("topic {name}: {reason}");
                (report.state, report.reason) = (State::Exists, Some(reason.to_owned()));
                self.begun.remove(&name);
                has_opened = true;
            }
        }
        Ok(has_opened)
    }

    /// Adds topics whose import has begun in another run, and that the source does not have any
    /// more.
    fn add_deleted(
        &mut self,
        source: &Source,
        target: &mut Target,
        names: &[&str],
    ) -> Result<(), Failure> {
        let is_at_source = |name: &str| source.topics.iter().any(|topic| topic.name == name);
        let is_left = |name: &&str| self.plan.wants(name) && !is_at_source(name);
        let left: Vec<_> = names.iter().copied().filter(is_left).collect();
        for (name, of) in target.imports_of(&left)? {
            if let Some(of) = of.filter(|of| of.starts_with(&source.identity())) {
                self.report.topics.insert(name, TopicReport::new(&of, BTreeMap::new()));
            }
        }
        Ok(())
    }

    /// Blocks the topics that the source does not have any more.
    fn block_deleted(&mut self, topics: &[SourceTopic]) {
        let names: BTreeSet<_> = topics.iter().map(|topic| topic.name.as_str()).collect();
        for (name, report) in &mut self.report.topics {
            let is_known = report.reason.as_deref() == Some(DELETED);
            if report.state.is_importing() && !names.contains(name.as_str()) && !is_known {
                tracing::warn!("topic {name}: {DELETED}");
                report.block(DELETED);
            }
        }
    }

    /// Continues a topic whose import has begun in this run. Returns whether it is imported.
    fn resume(&mut self, name: &str) -> bool {
        let report = self.report.topics.get_mut(name).expect("its import has begun");
        let is_importing = report.state.is_importing();
        if is_importing {
            (report.state, report.reason) = (State::Importing, None);
        }
        is_importing
    }

    /// Creates a topic, or resumes its import. Returns whether it is imported.
    fn begin(
        &mut self,
        source: &mut Source,
        target: &mut Target,
        topic: &SourceTopic,
        exists: bool,
    ) -> Result<bool, Failure> {
        let name = &topic.name;
        let known = self.report.topics.get(name).map(|known| known.state);
        // One that was in the way may be deleted since.
        let is_free = !exists && known == Some(State::Exists);
        if known.is_some_and(|state| !state.is_importing()) && !is_free {
            return Ok(false);
        }
        let id = topic.id_in(&source.cluster);
        if self.report.topics.get(name).is_some_and(|known| known.source != id) {
            // It was created again at the source: what is known is about another topic.
            self.settings.remove(name);
            self.begun.remove(name);
        }
        if !self.settings.contains_key(name) {
            let mut settings = Settings::read(&mut source.admin, name)?;
            // Of a topic that exists they are found when it is opened.
            let mut refused = BTreeMap::new();
            if !exists {
                refused = target.refused_for_new(name, &settings.wanted())?;
                // Some may be valid only with what comes from the source's brokers, which the topic
                // gets when it is opened.
                let not_yet = target.refused_for_new(name, &settings.own)?;
                settings.own.retain(|key, _| !not_yet.contains_key(key));
            }
            self.settings.insert(name.clone(), settings);
            self.report.topics.insert(name.clone(), TopicReport::new(&id, refused));
        }
        let report = self.report.topics.get_mut(name).expect("it was added with the settings");
        if report.block_without_leader(topic) {
            return Ok(false);
        }
        let settings = &self.settings[name].own;
        let count = topic.leaders.len();
        let mut begun = target.begin(name, &id, count, settings.clone());
        if let Err(NotBegun::Partitions { found, .. }) = &begun
            && *found < count
        {
            // The source has more since.
            target.add_partitions(name, count)?;
            begun = target.begin(name, &id, count, settings.clone());
        }
        match begun {
            Ok(begun) => {
                (report.state, report.reason) = (State::Importing, None);
                self.begun.insert(name.clone(), begun.id);
                Ok(true)
            }
            Err(NotBegun::Exists { is_import, reason }) => {
                let is_complete = !is_import && has_same_ends(source, target, topic)?;
                report.state = if is_complete { State::Complete } else { State::Exists };
                if !is_complete {
                    tracing::warn!("{reason}: it is left alone");
                    report.reason = Some(reason);
                }
                Ok(false)
            }
            Err(NotBegun::Partitions { found, reason }) => {
                match report.block_with_more(topic, found) {
                    true => Ok(false),
                    false => Err(Failure::Failed(reason)),
                }
            }
            Err(NotBegun::Failed(failure)) => Err(failure),
        }
    }

    /// Compares what an interrupted pass has copied with the source.
    fn compare_unverified(
        &self,
        source: &Source,
        target: &mut Target,
        partitions: &[Copied],
    ) -> Result<(), Failure> {
        let unverified: Vec<_> =
            partitions.iter().filter(|it| it.verified < it.position.next).collect();
        for copied in &unverified {
            let Position { topic, partition, next } = &copied.position;
            let range = copied.verified.max(copied.start)..*next;
            if range.is_empty() {
                continue;
            }
            let mut of_source = source.broker(copied.leader)?;
            let mut of_target = target.reader()?;
            let found = compare::compare(&mut of_source, &mut of_target, topic, *partition, range)?;
            // What log compaction has removed from the source since is additional.
            let is_compacted = self.settings.get(topic).is_some_and(Settings::is_compacted);
            let is_additional = found.additional > 0 && !is_compacted;
            if found.missing > 0 || found.different > 0 || is_additional {
                return Err(differs(topic, *partition, found.first));
            }
        }
        note(target, unverified.into_iter())
    }

    /// Reads back what a pass has copied, and compares it.
    fn read_back(&mut self, target: &mut Target, partitions: &[Copied]) -> Result<(), Failure> {
        let mut reader = target.reader()?;
        let is_new = |it: &&Copied| it.from < it.position.next;
        for Copied { position, from, digest, .. } in partitions.iter().filter(is_new) {
            let Position { topic, partition, next } = position;
            let found = compare::digest(&mut reader, topic, *partition, *from..*next)?;
            if (found.records, found.hex()) != (digest.records, digest.hex()) {
                return Err(differs(topic, *partition, None));
            }
        }
        match self.noted.is_none_or(|noted| noted.elapsed() >= NOTE_ALL) {
            true => {
                note(target, partitions.iter())?;
                self.noted = Some(Instant::now());
                Ok(())
            }
            false => note(target, partitions.iter().filter(is_new)),
        }
    }

    /// Copies the committed offsets of the topics that are being imported.
    ///
    /// # Errors
    /// A side does not answer, or the source refuses to show groups.
    pub(super) fn copy_groups(&mut self) -> Result<(), Failure> {
        let (mut source, mut target) = self.plan.connect()?;
        self.leave_opened(&mut target)?;
        let importing = self.report.importing();
        let names: BTreeSet<&str> = importing.iter().map(String::as_str).collect();
        if names.is_empty() {
            return Ok(());
        }
        let mut read = groups::read(&mut source, &names)?;
        for group in &mut read {
            group.cap(|topic, partition| {
                let report = self.report.topics.get(topic)?;
                report.partitions.get(partition).map(|partition| partition.end)
            });
        }
        let left_out = groups::commit(&mut target.admin, &read)?;
        for group in read.iter().filter(|group| !group.is_empty()) {
            self.report.groups_left_out.remove(&group.name);
            self.report.groups.insert(group.name.clone());
        }
        for group in left_out {
            self.report.groups.remove(&group.group);
            self.report.groups_left_out.insert(group.group.clone(), group);
        }
        Ok(())
    }

    /// Copies the ACLs of the topics that are being imported, and lists users that are missing.
    ///
    /// # Errors
    /// A side does not answer.
    pub(super) fn copy_acls(&mut self) -> Result<(), Failure> {
        let importing = self.report.importing();
        let names: BTreeSet<&str> = importing.iter().map(String::as_str).collect();
        if names.is_empty() {
            return Ok(());
        }
        let (mut source, mut target) = self.plan.connect()?;
        let report = &mut self.report;
        match acls::read(&mut source.admin, |topic| names.contains(topic))? {
            Shown::Acls(found) => {
                let count = found.len();
                match acls::create(&mut target.admin, found)? {
                    Some(refused) => {
                        report.acls = report.acls.max(count - refused.len());
                        report.acls_left_out.extend(refused);
                    }
                    None => {
                        let note = format!("{count} ACLs are not copied: the target has no ACLs");
                        report.acls_note = Some(note);
                    }
                }
            }
            Shown::Hidden(reason) => {
                let note = format!("ACLs are not copied: the source does not show them: {reason}");
                report.acls_note = Some(note);
            }
        }
        let users = (acls::users(&mut source.admin)?, acls::users(&mut target.admin)?);
        if let (Some(of_source), Some(of_target)) = users {
            report.users = of_source.difference(&of_target).cloned().collect();
        }
        Ok(())
    }

    /// Opens the topics that the source has no more records of, or all of them for a snapshot.
    /// Returns whether all are open.
    ///
    /// # Errors
    /// A side cannot be reached, or refuses.
    pub(super) fn open(&mut self, snapshot: bool) -> Result<bool, Failure> {
        let (mut source, mut target) = self.plan.connect()?;
        let mut all = true;
        let topics = self.topics(&source)?;
        self.leave_opened(&mut target)?;
        self.block_deleted(&topics);
        for topic in &topics {
            let Some(report) = self.report.topics.get_mut(&topic.name) else {
                all = false;
                continue;
            };
            if report.state != State::Importing {
                continue;
            }
            if topic.id_in(&source.cluster) != report.source {
                report.block("the topic was created again at the source");
                continue;
            }
            let ends = source.offsets(&topic.positions(), LATEST, Isolation::Uncommitted)?;
            let has_more = !report.partitions.iter().map(|it| it.end).eq(ends.iter().copied());
            if has_more && !snapshot {
                report.state = State::SourceActive;
                all = false;
                continue;
            }
            let mut left_out = self.report.groups_left_out.values();
            let blocking = left_out.find(|group| group.topics.contains(&topic.name));
            if let Some(group) = blocking.filter(|_| !snapshot) {
                report.block(&format!(
                    "committed offsets of group {} are not copied: {}",
                    group.group, group.reason
                ));
                all = false;
                continue;
            }
            let of_source = Settings::read(&mut source.admin, &topic.name)?;
            let of_target = Settings::read(&mut target.admin, &topic.name)?;
            let mut changes = of_source.changes(&of_target);
            let refused = target.refused_changes(&topic.name, &changes)?;
            changes.retain(|(key, _)| !refused.contains_key(key));
            report.refused_settings = refused;
            let starts: Vec<_> = report.partitions.iter().map(|it| it.start).collect();
            let finished = target.finish(&topic.name, &starts, changes);
            finished.map_err(|reason| {
                Failure::Failed(format!("topic {} is not opened: {reason}", topic.name))
            })?;
            groups::forget_verified(&mut target.admin, &topic.name, starts.len())?;
            report.state = State::Opened;
            report.has_more = has_more;
        }
        Ok(all)
    }
}

/// Whether a topic of the target ends where that of the source does.
pub(super) fn has_same_ends(
    source: &Source,
    target: &mut Target,
    topic: &SourceTopic,
) -> Result<bool, Failure> {
    let ends = source.offsets(&topic.positions(), LATEST, Isolation::Uncommitted)?;
    let metadata = topic::metadata(&mut target.admin, Some(std::slice::from_ref(&topic.name)))?;
    let Some(found) = metadata.topics.first() else { return Ok(false) };
    let of_target = topic::offsets(&mut target.admin, found, LATEST)?;
    Ok(of_target.values().map(|end| end.cast_unsigned()).eq(ends))
}

/// Returns the partitions of a pass, which begin where the target ends.
fn continued(target: &Target, positions: Vec<(Position, i32)>) -> Result<Vec<Copied>, Failure> {
    if positions.is_empty() {
        return Ok(Vec::new());
    }
    let wanted: Vec<_> = positions.iter().map(|(position, _)| position.clone()).collect();
    let ends = target.reader()?.offsets(&wanted, LATEST, Isolation::Uncommitted)?;
    let copied = |((position, leader), next): ((Position, i32), u64)| Copied {
        position: Position { next, ..position },
        leader,
        from: next,
        start: 0,
        end: 0,
        verified: 0,
        epoch: None,
        digest: RecordDigest::default(),
    };
    Ok(positions.into_iter().zip(ends).map(copied).collect())
}

/// Learns the first offsets and ends of partitions at the source, and up to where they were
/// compared. Checks that the source still has what it had then: no partition ends before, and no
/// leader with fewer records was elected (KIP-320).
fn learn(source: &Source, target: &mut Target, partitions: &mut [Copied]) -> Result<(), Failure> {
    let names = partitions.iter().map(|it| it.position.topic.as_str()).collect();
    let verified = groups::verified(&mut target.admin, &names)?;
    let all: Vec<_> = partitions.iter().map(|it| (it.position.clone(), it.leader)).collect();
    let starts = source.offsets(&all, EARLIEST, Isolation::Committed)?;
    let ends = source.offsets(&all, LATEST, Isolation::Committed)?;
    let mut of_leaders: BTreeMap<i32, Vec<(Position, i32)>> = BTreeMap::new();
    for (copied, (start, end)) in partitions.iter_mut().zip(starts.into_iter().zip(ends)) {
        (copied.start, copied.end) = (start.min(end), end);
        let Position { topic, partition, next } = &copied.position;
        if *next > end {
            return Err(copy::lost_records(topic, *partition, end, *next));
        }
        let known = verified.get(&(topic.clone(), *partition)).copied().unwrap_or_default();
        (copied.verified, copied.epoch) = (known.end, known.epoch);
        if let Some(epoch) = known.epoch {
            let position = Position { next: known.end, ..copied.position.clone() };
            of_leaders.entry(copied.leader).or_default().push((position, epoch));
        }
    }
    for (leader, positions) in of_leaders {
        let ends = source.broker(leader)?.epoch_ends(&positions)?;
        for ((position, _), end) in positions.iter().zip(ends) {
            if let Some(end) = end.filter(|end| *end < position.next) {
                let Position { topic, partition, next } = position;
                return Err(copy::lost_records(topic, *partition, end, *next));
            }
        }
    }
    Ok(())
}

/// Notes the positions of partitions as compared.
fn note<'a>(
    target: &mut Target,
    partitions: impl Iterator<Item = &'a Copied>,
) -> Result<(), Failure> {
    let ends = partitions.map(|Copied { position, epoch, .. }| {
        let Position { topic, partition, next } = position;
        (topic.as_str(), *partition, Verified { end: *next, epoch: *epoch })
    });
    groups::note_verified(&mut target.admin, ends)
}

fn differs(topic: &str, partition: usize, first: Option<u64>) -> Failure {
    let at = first.map(|offset| format!(", first at offset {offset}")).unwrap_or_default();
    Failure::Lost(format!(
        "topic {topic}, partition {partition}: what was copied differs from the source{at}. Delete \
         the topic at the target, and repeat the command"
    ))
}
