//! What an import has done, for people and as JSON.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::compare::Compared;
use super::copy::Copied;
use super::groups::LeftOut;
use super::source::SourceTopic;
use crate::output::{self, Failure, Table};
use crate::units::counted;

/// What is known of an import.
#[derive(Default, Serialize)]
pub(super) struct Report {
    /// The ID of the cluster.
    pub(super) source: String,
    pub(super) topics: BTreeMap<String, TopicReport>,
    /// Groups whose committed offsets were copied.
    pub(super) groups: BTreeSet<String>,
    /// Groups whose committed offsets were not copied.
    pub(super) groups_left_out: BTreeMap<String, LeftOut>,
    /// ACLs that the target has, too.
    pub(super) acls: usize,
    pub(super) acls_left_out: BTreeSet<String>,
    /// Why no ACLs are copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) acls_note: Option<String>,
    /// Users of the source with SCRAM that the target does not have. Their passwords cannot be
    /// read.
    pub(super) users: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct TopicReport {
    /// What the setting `alluvium.import` is until the topic is opened.
    pub(super) source: String,
    pub(super) state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// Settings that the target refuses, with its reasons.
    pub(super) refused_settings: BTreeMap<String, String>,
    /// Settings that differ: the value of the source, and that of the target.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) different_settings: BTreeMap<String, [String; 2]>,
    pub(super) partitions: Vec<PartitionReport>,
    /// The source has records that are not copied, although the topic is open.
    pub(super) has_more: bool,
    /// The topic that was compared takes no records of producers yet.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_import: bool,
    /// Records may be missing at a side that has compacted them.
    #[serde(skip)]
    pub(super) is_compacted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// It would be imported.
    Planned,
    /// It takes no records of producers.
    Importing,
    /// As `Importing`: the source still has more.
    SourceActive,
    /// As `Importing`: the reason says why it cannot be opened, or not even copied.
    Blocked,
    Opened,
    /// It exists, is no import, and ends where the source does.
    Complete,
    /// It exists, and is not an import of this topic.
    Exists,
    /// The target does not have it.
    Missing,
    /// It was compared.
    Compared,
}

impl State {
    /// Whether another pass may copy more.
    pub(super) fn is_importing(self) -> bool {
        matches!(self, Self::Importing | Self::SourceActive | Self::Blocked)
    }
}

#[derive(Serialize)]
pub(super) struct PartitionReport {
    partition: usize,
    /// The first offset.
    pub(super) start: u64,
    /// The offset after the last one that is copied, or that was compared.
    pub(super) end: u64,
    /// Records that this run has copied.
    records: u64,
    /// Offsets of the source that the target does not have yet.
    pub(super) behind: u64,
    /// Offsets of the source that the target has deleted.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) deleted: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) compared: Option<Compared>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl PartitionReport {
    pub(super) fn new(partition: usize, start: u64, end: u64) -> Self {
        Self { partition, start, end, records: 0, behind: 0, deleted: 0, compared: None }
    }
}

impl TopicReport {
    pub(super) fn new(source: &str, refused_settings: BTreeMap<String, String>) -> Self {
        Self {
            source: source.to_owned(),
            state: State::Importing,
            reason: None,
            refused_settings,
            different_settings: BTreeMap::new(),
            partitions: Vec::new(),
            has_more: false,
            is_import: false,
            is_compacted: false,
        }
    }

    /// Keeps the topic closed for this reason.
    pub(super) fn block(&mut self, reason: &str) {
        (self.state, self.reason) = (State::Blocked, Some(reason.to_owned()));
    }

    /// Keeps the topic closed if one of its partitions cannot be read.
    pub(super) fn block_without_leader(&mut self, topic: &SourceTopic) -> bool {
        let partition = topic.without_leader();
        if let Some(partition) = partition {
            self.block(&format!("partition {partition} has no leader at the source"));
        }
        partition.is_some()
    }

    /// Keeps the topic closed if `found`, the number of partitions at the target, is more than the
    /// source has.
    pub(super) fn block_with_more(&mut self, topic: &SourceTopic, found: usize) -> bool {
        let count = topic.leaders.len();
        if found > count {
            self.block(&format!(
                "it has {found} partitions at the target, and {count} at the source: add \
                 partitions at the source, or delete the topic at the target to begin again"
            ));
        }
        found > count
    }

    /// Adds what a pass has copied of a partition. Partitions come in their order.
    pub(super) fn add(&mut self, copied: Copied) {
        let Copied { position, start, end, digest, .. } = copied;
        let partition = position.partition;
        if self.partitions.len() == partition {
            self.partitions.push(PartitionReport::new(partition, start, position.next));
        }
        let report = &mut self.partitions[partition];
        (report.start, report.end) = (start, position.next);
        report.behind = end.saturating_sub(position.next);
        report.records += digest.records;
    }

    /// Returns the number of records that this run has copied.
    pub(super) fn records(&self) -> u64 {
        self.partitions.iter().map(|partition| partition.records).sum()
    }

    /// Whether the comparison has found a difference.
    fn is_different(&self, partition: &PartitionReport) -> bool {
        let Some(compared) = &partition.compared else { return false };
        let Compared { missing, additional, different, .. } = compared;
        *different > 0 || (!self.is_compacted && missing + additional > 0)
    }

    fn is_unfinished(&self) -> bool {
        let is_undone = matches!(
            self.state,
            State::SourceActive | State::Blocked | State::Exists | State::Missing
        );
        is_undone
            || (self.state == State::Compared && self.reason.is_some())
            || !self.different_settings.is_empty()
            || self.partitions.iter().any(|it| self.is_different(it) || it.compared_behind() > 0)
    }
}

impl PartitionReport {
    /// Offsets that a comparison has found to be behind.
    fn compared_behind(&self) -> u64 {
        if self.compared.is_some() { self.behind + self.deleted } else { 0 }
    }
}

impl Report {
    /// Returns the names of the topics that are being imported.
    pub(super) fn importing(&self) -> Vec<String> {
        let importing = self.topics.iter().filter(|(_, topic)| topic.state.is_importing());
        importing.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the failure of a run that has not done everything.
    pub(super) fn outcome(&self) -> Result<(), Failure> {
        let topics = self.topics.iter().filter(|(_, topic)| topic.is_unfinished());
        let topics: Vec<_> = topics.map(|(name, _)| name).collect();
        if !topics.is_empty() {
            return Err(Failure::Lost(format!(
                "these topics were not imported, or differ: {}",
                output::listed(&topics)
            )));
        }
        match self.groups_left_out.is_empty() && self.acls_left_out.is_empty() {
            true => Ok(()),
            false => Err(Failure::Lost("some groups or ACLs were not imported".into())),
        }
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        if self.topics.is_empty() {
            return output::line("the source has no topics");
        }
        let is_comparison =
            self.topics.values().any(|it| matches!(it.state, State::Compared | State::Missing));
        match is_comparison {
            true => self.print_comparison()?,
            false => self.print_topics()?,
        }
        for (name, topic) in &self.topics {
            for (key, reason) in &topic.refused_settings {
                output::line(format_args!("topic {name}: setting {key} is left out: {reason}"))?;
            }
            for (key, [source, target]) in &topic.different_settings {
                output::line(format_args!(
                    "topic {name}: setting {key} is {source} at the source, {target} at the target"
                ))?;
            }
        }
        for (name, topic) in &self.topics {
            if let Some(reason) = &topic.reason {
                output::line(format_args!("topic {name}: {reason}"))?;
            }
        }
        let Self { groups, groups_left_out, acls, acls_left_out, users, .. } = self;
        if groups.len() + groups_left_out.len() > 0 {
            let groups = counted(groups.len() as u64, "group", "groups");
            output::line(format_args!("committed offsets of {groups} copied"))?;
        }
        for LeftOut { group, reason, .. } in groups_left_out.values() {
            output::line(format_args!("group {group} is left out: {reason}"))?;
        }
        if acls + acls_left_out.len() > 0 {
            let acls = counted(*acls as u64, "ACL", "ACLs");
            output::line(format_args!("{acls} copied"))?;
        }
        for reason in acls_left_out {
            output::line(format_args!("left out: {reason}"))?;
        }
        if let Some(note) = &self.acls_note {
            output::line(note)?;
        }
        if !users.is_empty() {
            output::line(format_args!(
                "users to add with their passwords, which a server does not reveal: {}",
                output::listed(users)
            ))?;
        }
        Ok(())
    }

    fn print_topics(&self) -> Result<(), Failure> {
        let mut table = Table::of_numbers(&["TOPIC", "PARTITIONS", "OFFSETS", "COPIED", "STATE"]);
        for (name, topic) in &self.topics {
            let offsets: u64 =
                topic.partitions.iter().map(|it| it.end.saturating_sub(it.start)).sum();
            let state = match topic.state {
                State::Planned => "to import",
                State::Importing => "importing",
                State::SourceActive => "source active",
                State::Blocked => "blocked",
                State::Opened if topic.has_more => "open, behind",
                State::Opened => "open",
                State::Complete => "complete",
                State::Exists => "exists",
                State::Missing | State::Compared => "",
            };
            let is_known = !matches!(topic.state, State::Complete | State::Exists);
            let number = |n: u64| if is_known { n.to_string() } else { "-".into() };
            table.row(vec![
                name.clone(),
                number(topic.partitions.len() as u64),
                number(offsets),
                number(topic.records()),
                state.into(),
            ]);
        }
        output::line(format_args!("{table}\n"))?;
        let has = |state| self.topics.values().any(|topic| topic.state == state);
        if has(State::Importing) {
            output::line(
                "topics that are importing take no records of producers. To open them: stop the \
                 producers of the source, and run the command without --follow",
            )?;
        }
        if has(State::SourceActive) {
            output::line(
                "source active: the source has records that are not copied, or open transactions. \
                 Stop its producers and repeat the command; or open a copy with --snapshot",
            )?;
        }
        if has(State::Blocked) {
            output::line(
                "blocked: the topic stays closed for the reason below. Remove it, and repeat the \
                 command",
            )?;
        }
        if has(State::Complete) {
            output::line(
                "complete: the topic exists, and ends where that of the source does. --verify \
                 compares the records",
            )?;
        }
        if has(State::Exists) {
            output::line(
                "exists: a topic of the name exists, is not an import of this one, and was left \
                 alone",
            )?;
        }
        Ok(())
    }

    fn print_comparison(&self) -> Result<(), Failure> {
        let mut table = Table::of_numbers(&[
            "TOPIC",
            "PARTITION",
            "FROM",
            "TO",
            "EQUAL",
            "MISSING",
            "ADDITIONAL",
            "DIFFERENT",
            "BEHIND",
        ]);
        for (name, topic) in &self.topics {
            for partition in &topic.partitions {
                let compared = partition.compared.clone().unwrap_or_default();
                let mut row = vec![name.clone(), partition.partition.to_string()];
                let Compared { equal, missing, additional, different, .. } = compared;
                let numbers =
                    [partition.start, partition.end, equal, missing, additional, different];
                row.extend(numbers.iter().map(ToString::to_string));
                row.push(partition.behind.to_string());
                table.row(row);
            }
        }
        output::line(format_args!("{table}\n"))?;
        for (name, topic) in &self.topics {
            if topic.state == State::Missing {
                output::line(format_args!("topic {name} does not exist at the target"))?;
            }
            for partition in topic.partitions.iter().filter(|it| it.deleted > 0) {
                output::line(format_args!(
                    "topic {name}, partition {}: {} before offset {} are deleted at the target",
                    partition.partition,
                    counted(partition.deleted, "offset", "offsets"),
                    partition.start
                ))?;
            }
            if topic.is_import {
                output::line(format_args!("topic {name} is still being imported"))?;
            }
            let differ = topic.partitions.iter().filter(|it| topic.is_different(it));
            for partition in differ {
                let first = partition.compared.as_ref().and_then(|it| it.first);
                output::line(format_args!(
                    "topic {name}, partition {}: the first difference is at offset {}",
                    partition.partition,
                    first.unwrap_or_default()
                ))?;
            }
        }
        Ok(())
    }
}
