//! The losses that a server reports in its log, and the errors with which it refuses to start.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::model::Partition;
use super::window::{Offsets, has};

/// Losses that the log reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reported {
    /// Lost and skipped offsets of partitions.
    pub(super) partitions: Offsets,
    /// The skipped ones among them, which are upper bounds.
    pub(super) bounds: Offsets,
    /// Skipped offsets of the server's own state, by the name of the state.
    pub(super) bounded_states: BTreeMap<String, Vec<Range<i64>>>,
    /// Offsets lost in the silent window, which need no report.
    pub(super) silent: Offsets,
    /// Lost offsets of the server's own state, by the name of the state.
    pub(super) states: BTreeMap<String, Vec<Range<i64>>>,
    /// Lost offsets that the log attributes to the number of a stream only.
    pub(super) streams: Vec<Range<i64>>,
    /// The log reports that its end is missing, without the offsets.
    pub(super) end: bool,
    /// The log reports that changes of the catalog are lost.
    pub(super) changes: bool,
    /// Transactions that were aborted because of a loss.
    pub(super) aborts: BTreeSet<Abort>,
    /// The log lines with losses, for the report.
    pub(super) lines: Vec<String>,
}

/// A transaction that the log reports as aborted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Abort {
    pub(super) producer_id: i64,
    /// The partition, and the transaction's first offset in it. `None` if the log does not contain
    /// them.
    pub(super) position: Option<(Partition, i64)>,
}

impl Reported {
    /// Whether offsets of the server's own state with this word in its name are lost.
    pub(super) fn has_lost_state(&self, of: &str) -> bool {
        self.states.keys().any(|state| state.contains(of))
    }

    /// Returns all ranges of lost offsets.
    pub(super) fn ranges(&self) -> impl Iterator<Item = &Range<i64>> {
        let named = self.partitions.values().chain(self.states.values()).flatten();
        named.chain(&self.streams)
    }

    pub(super) fn is_lost(&self, partition: &Partition, offset: i64) -> bool {
        has(&self.partitions, partition, offset)
    }

    /// Ranges of a partition that are reported as lost, not as skipped.
    fn exact<'a>(&'a self, partition: &'a Partition) -> impl Iterator<Item = &'a Range<i64>> {
        let bounds = self.bounds.get(partition);
        let is_bound = move |range: &&Range<i64>| bounds.is_some_and(|all| all.contains(range));
        let ranges = self.partitions.get(partition).into_iter().flatten();
        ranges.filter(move |range| !is_bound(range))
    }

    /// Whether an offset is reported as lost, not only as skipped.
    pub(super) fn is_exactly_lost(&self, partition: &Partition, offset: i64) -> bool {
        self.exact(partition).any(|range| range.contains(&offset))
    }

    /// Whether offsets of this state are reported as lost, not only as skipped.
    pub(super) fn has_exactly_lost_state(&self, of: &str) -> bool {
        let named = self.states.iter().filter(|(state, _)| state.contains(of));
        named.into_iter().any(|(state, ranges)| {
            let bounds = self.bounded_states.get(state);
            ranges.iter().any(|range| !bounds.is_some_and(|all| all.contains(range)))
        })
    }

    /// Describes a range that is reported as lost and ends beyond the assigned offsets.
    pub(super) fn beyond(&self, next: impl Fn(&Partition) -> i64) -> Option<String> {
        self.partitions.keys().find_map(|partition| {
            let next = next(partition);
            let range = self.exact(partition).find(|range| range.end > next)?;
            let Range { start, end } = range;
            Some(format!(
                "{partition}: {start}..{end} are reported as lost, but {next} was never assigned"
            ))
        })
    }

    pub(super) fn is_lost_somewhere(&self, offset: i64) -> bool {
        self.streams.iter().any(|range| range.contains(&offset))
    }

    /// Parses the log of a server.
    pub(super) fn read(&mut self, log: &str, partitions: &[Partition]) {
        for line in log.lines().filter(|line| is_warning(line)) {
            let lower = line.to_ascii_lowercase();
            let named = partition_in(line, partitions);
            let mut is_new = false;
            if lower.contains("lost") || lower.contains("skipped") {
                let is_bound = lower.contains(" are skipped:");
                for range in ranges_behind(line, "offsets") {
                    is_new = true;
                    match (&named, state_in(line)) {
                        (Some(partition), _) => {
                            if is_bound {
                                let bounds = self.bounds.entry(partition.clone()).or_default();
                                bounds.push(range.clone());
                            }
                            self.partitions.entry(partition.clone()).or_default().push(range);
                        }
                        (None, Some(state)) => {
                            if is_bound {
                                let bounds = self.bounded_states.entry(state.to_owned());
                                bounds.or_default().push(range.clone());
                            }
                            self.states.entry(state.to_owned()).or_default().push(range);
                        }
                        (None, None) => self.streams.push(range),
                    }
                }
            }
            if lower.contains("the log ends at") {
                (self.end, is_new) = (true, true);
            }
            if lower.contains("lists of changes of the catalog") && lower.contains(" are lost") {
                (self.changes, is_new) = (true, true);
            }
            if let Some(abort) = abort_in(line, named) {
                is_new |= self.aborts.insert(abort);
            }
            if is_new {
                self.lines.push(line.to_owned());
            }
        }
    }
}

fn is_warning(line: &str) -> bool {
    line.contains("ERROR") || line.contains("WARN")
}

/// Parses the name of the server's own state: `the server's own state of transactions are lost`.
fn state_in(line: &str) -> Option<&str> {
    let (_, state) = line.split_once("the server's own state of ")?;
    state.split_once(" are ").map(|(state, _)| state)
}

/// Parses a transaction that was aborted because of a loss. A marker that is written again with the
/// decided outcome is not an abort: its line does not contain ABORTED.
fn abort_in(line: &str, named: Option<Partition>) -> Option<Abort> {
    let is_one = line.contains("transaction is ABORTED");
    let producer_id = field(line, "producer_id").filter(|_| is_one)?.parse().ok()?;
    let first = field(line, "first").and_then(|first| first.parse().ok());
    Some(Abort { producer_id, position: named.zip(first) })
}

/// Returns the value of a field after a message: `first=7`, `topic="orders"`.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let value = |word: &'a str| word.strip_prefix(name)?.strip_prefix('=');
    line.split_whitespace().find_map(value).map(|value| value.trim_matches('"'))
}

/// Returns the partition in a line: `topic-0`, `topic "topic" partition 0`, `partition 0 of topic`.
fn partition_in(line: &str, partitions: &[Partition]) -> Option<Partition> {
    let plain: String = line
        .chars()
        .map(|each| if each.is_alphanumeric() || "-_.".contains(each) { each } else { ' ' })
        .collect();
    let words: Vec<&str> = plain.split(' ').filter(|word| !word.is_empty()).collect();
    let has = |phrase: &[&str]| words.windows(phrase.len()).any(|window| window == phrase);
    let names = |partition: &&Partition| {
        let (topic, index) = (partition.topic.as_str(), partition.index.to_string());
        has(&[&format!("{topic}-{index}")])
            || has(&[topic, "partition", &index])
            || has(&["partition", &index, "of", topic])
            || has(&["partition", &index, "of", "topic", topic])
            || has(&["partition", &index, "of", "the", "topic", topic])
    };
    partitions.iter().find(names).cloned()
}

/// Parses all ranges `1..5` (end excluded) and `1 to 4` (end included) after a word.
fn ranges_behind(line: &str, word: &str) -> Vec<Range<i64>> {
    let Some((_, rest)) = line.split_once(word) else { return Vec::new() };
    let number = |word: &str| -> Option<i64> {
        word.trim_matches(|each: char| !each.is_ascii_digit()).parse().ok()
    };
    let range = |word: &str| {
        let word = word.trim_matches(|each: char| !each.is_ascii_digit());
        let (start, end) = word.split_once("..")?;
        Some(start.parse().ok()?..end.parse().ok()?)
    };
    let words: Vec<&str> = rest.split_whitespace().collect();
    if let [start, "to", last, ..] = words[..]
        && let Some((start, last)) = number(start).zip(number(last))
    {
        return vec![Range { start, end: last + 1 }];
    }
    words
        .into_iter()
        .map_while(|word| match range(word) {
            Some(range) => Some(Some(range)),
            None if matches!(word, "and" | "of") => Some(None),
            None => None,
        })
        .flatten()
        .collect()
}

/// Returns the errors of a server that has ended.
pub(super) fn final_error(log: &str) -> String {
    let is_error = |line: &&str| line.starts_with("error:") || line.contains(" ERROR ");
    let errors: Vec<&str> = log.lines().filter(is_error).collect();
    // The lines after the first one of the final error belong to it.
    match log.rsplit_once("\nerror:").or_else(|| log.strip_prefix("error:").map(|it| ("", it))) {
        Some((_, message)) => format!("error:{}", message.trim_end()),
        None => errors.join("\n"),
    }
}

/// Returns the line of a panic in the log.
pub(super) fn panic_in(log: &str) -> Option<&str> {
    log.lines().find(|line| line.contains("panicked at"))
}

/// Verbs and commands with which a message advises the operator.
const ADVICE: &[&str] = &[
    "alluvium ",
    "restore",
    "point ",
    "open the wal with",
    "open the catalog with",
    "put ",
    "copy ",
    "give it",
    "give the",
    "start it with",
    "start with",
    "start without",
    "move ",
    "remove ",
    "delete ",
    "check ",
    "mount",
    "free ",
    "bring back",
    "use ",
    "set --",
    "create ",
    "run ",
    "replace ",
    "try again",
    "--force-format",
];

/// Checks that an error names a file, device or object, and contains advice.
pub(super) fn advice(message: &str, directory: &str) -> Result<(), String> {
    if message.is_empty() {
        return Err("it has no text".into());
    }
    let lower = message.to_ascii_lowercase();
    let names_file = message.contains(directory) || lower.contains("/dev/");
    let names_object = lower.contains("streams/") || lower.contains("catalogs/");
    if !names_file && !names_object {
        return Err("it names no file, device or object".into());
    }
    // A word in the file's own path is not advice.
    let advice = lower.replace(&directory.to_ascii_lowercase(), "");
    if !ADVICE.iter().any(|word| advice.contains(word)) {
        return Err("it contains no advice".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partitions() -> Vec<Partition> {
        [0, 1, 11].map(|index| Partition { topic: "orders".into(), index }).into()
    }

    fn reported(log: &str) -> Reported {
        let mut reported = Reported::default();
        reported.read(log, &partitions());
        reported
    }

    #[test]
    fn losses_are_parsed_with_each_form_of_the_partition() {
        for line in [
            "ERROR offsets 34 to 35 of partition 1 of topic orders are lost: the write-ahead log \
             is",
            "ERROR orders-1 has lost offsets 34..36 to a damaged WAL; readers skip them",
            "ERROR topic \"orders\", partition 1: lost offsets 34..36 to damage",
            "ERROR partition 1 of orders has lost offsets 34..36.",
            "ERROR partition 1 of topic `orders` (stream 9) has lost offsets 34..36, 40..41",
        ] {
            let reported = reported(line);
            let [zero, one, eleven] = partitions().try_into().unwrap();
            assert!(reported.is_lost(&one, 34) && reported.is_lost(&one, 35), "{line}");
            assert!(!reported.is_lost(&one, 36) && !reported.is_lost(&one, 33), "{line}");
            assert!(!reported.is_lost(&zero, 34) && !reported.is_lost(&eleven, 34), "{line}");
            assert_eq!(reported.is_lost(&one, 40), line.contains("40"), "{line}");
        }
    }

    #[test]
    fn a_loss_of_a_stream_is_parsed_and_other_lines_are_ignored() {
        let log = "ERROR stream 9 has lost offsets 34..35 to a damaged WAL; readers skip them";
        let by_stream = reported(log);
        assert!(by_stream.partitions.is_empty() && by_stream.is_lost_somewhere(34));
        assert_eq!(by_stream.lines, [log]);
        let fine = "INFO orders-1: offsets 1..5 are uploaded\nINFO lost offsets 1..2";
        assert_eq!(reported(fine), Reported::default());
        assert!(reported("ERROR the log ends at 5, but was durable up to 9 once").end);
    }

    #[test]
    fn a_loss_of_the_servers_own_state_is_parsed_with_its_name() {
        let line = |state| {
            format!(
                "ERROR offsets 5 to 8 of the server's own state of {state} are lost: the \
                 write-ahead log is damaged"
            )
        };
        let reported = reported(&(line("groups offsets") + "\n" + &line("transactions")));
        assert!(reported.has_lost_state("offsets") && reported.has_lost_state("transactions"));
        assert!(!reported.has_lost_state("members") && !reported.is_lost_somewhere(5));
        assert_eq!(reported.ranges().cloned().collect::<Vec<_>>(), [5..9, 5..9]);
    }

    #[test]
    fn a_skipped_range_is_a_bound_and_a_lost_one_is_exact() {
        let line =
            |what| format!("ERROR offsets 5 to 8 of partition 1 of topic orders are {what}:");
        let one = &partitions()[1];
        let [lost, skipped] = ["lost", "skipped"].map(|what| reported(&line(what)));
        assert!(lost.is_lost(one, 8) && lost.is_exactly_lost(one, 8));
        assert!(skipped.is_lost(one, 8) && !skipped.is_exactly_lost(one, 8));
        assert_eq!(lost.beyond(|_| 9), None);
        assert!(lost.beyond(|_| 8).is_some_and(|it| it.contains("orders-1: 5..9")));
        assert_eq!(skipped.beyond(|_| 5), None);
        let state =
            |what| format!("ERROR offsets 5 to 8 of the server's own state of x are {what}:");
        assert!(reported(&state("lost")).has_exactly_lost_state("x"));
        assert!(!reported(&state("skipped")).has_exactly_lost_state("x"));
    }

    #[test]
    fn an_aborted_transaction_is_named_by_partition_producer_and_first_offset() {
        let abort = |line: &str| reported(line).aborts.into_iter().next();
        let fields = "topic=\"orders\" partition=1 producer_id=7 epoch=2 transactional_id=\"two\" \
                      first=34";
        let position = Some((partitions()[1].clone(), 34));
        for why in [
            "ERROR open transaction is ABORTED: its partitions have lost records to damage, \
             possibly its own",
            "ERROR decision of a transaction was lost to damage and its outcome is unknown: the \
             transaction is ABORTED where it is open",
            "ERROR end of a transaction was lost to damage and its outcome is unknown: the \
             transaction is ABORTED",
            "ERROR end of a transaction was lost to damage and its outcome is unknown: the \
             transaction is ABORTED from its first offset to the offset of the loss",
        ] {
            let named = format!("{why} {fields}");
            assert_eq!(abort(&named), Some(Abort { producer_id: 7, position: position.clone() }));
            let vague = format!("{why} producer_id=0 epoch=0 transactional_id=\"one\"");
            assert_eq!(abort(&vague), Some(Abort { producer_id: 0, position: None }));
            assert_eq!(abort(&named.replace("ERROR", "INFO")), None);
        }
        for no_loss in [
            "WARN marker of a transaction was lost to damage and is written again with the \
             decided outcome",
            "WARN decision of a transaction was lost to damage; one of its markers proves a \
             commit, so it is committed",
            "ERROR marker of a transaction was lost to damage and cannot be written again, as no \
             lost offset is left: the transaction merges with the next one of its producer",
        ] {
            for outcome in ["", " outcome=Abort"] {
                let line = format!("{no_loss} {fields}{outcome}");
                assert_eq!(abort(&line), None, "{line}");
            }
        }
    }

    #[test]
    fn a_loss_of_changes_of_the_catalog_is_parsed() {
        let line = "ERROR 1 lists of changes of the catalog were in the log and are lost: topics";
        assert!(reported(line).changes);
        assert!(!reported("WARN the catalog is behind").changes);
    }

    #[test]
    fn an_error_needs_a_file_and_advice() {
        for good in [
            "error: /run/3/data/wal: both headers are damaged; restore it from a copy",
            "error: object catalogs/1/chain/0000000000000007 is damaged: `alluvium rebuild`",
        ] {
            assert_eq!(advice(good, "/run/3"), Ok(()));
        }
        for bad in [
            "",
            "error: both headers are damaged; restore it from a copy",
            "error: /run/3/data/wal: both headers are damaged",
            // The path itself contains a word of advice.
            "error: /run/3/check /data/wal: is damaged",
        ] {
            assert!(
                advice(bad, if bad.contains("check") { "/run/3/check " } else { "/run/3" })
                    .is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn the_final_error_is_the_one_that_ended_the_server() {
        let log = "INFO a\nWARN b\nerror: c\n  more of c\n";
        assert_eq!(final_error(log), "error: c\n  more of c");
        assert_eq!(final_error("x ERROR y\n"), "x ERROR y");
        assert_eq!(final_error("INFO a\n"), "");
        assert!(panic_in("thread 'main' panicked at src/x.rs:1:2:\nboom").is_some());
        assert!(panic_in(log).is_none());
    }
}
