//! Compares what the writer was promised with what survived. Pure; no I/O. The lines are those of
//! `sim/src/bin/numbered.rs`.

use std::fmt;

/// A half-open range of record numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordRange {
    pub(super) first: u64,
    pub(super) next: u64,
}

impl RecordRange {
    /// Parses a line `held A B`.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let (first, next) = line.strip_prefix("held ")?.split_once(' ')?;
        Some(Self { first: first.parse().ok()?, next: next.parse().ok()? })
    }
}

impl fmt::Display for RecordRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.first, self.next)
    }
}

/// The promises of all rounds so far.
#[derive(Debug, Default)]
pub(super) struct Promises {
    /// All records below it were acknowledged, or returned by a recovery.
    next: u64,
    /// All records below `trimmed` were certainly trimmed; `trim` is the highest trim that was
    /// requested.
    trimmed: u64,
    trim: u64,
    /// The records found after the last cut; nothing is written between then and the next recovery.
    found: Option<RecordRange>,
    closed: bool,
}

impl Promises {
    /// All records below it must survive, unless they were trimmed.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Adds one line of the writer. An error is a broken promise, or not a line of a writer.
    pub(super) fn line(&mut self, line: &str) -> Result<(), String> {
        let number = |what: &str| -> Option<u64> {
            line.strip_prefix(what)?.strip_prefix(' ')?.parse().ok()
        };
        if let Some(held) = RecordRange::parse(line) {
            if let Some(found) = self.found.take()
                && found != held
            {
                return Err(format!("recovery returned {held}, but {found} was on the disk"));
            }
            self.keep(held)?;
        } else if let Some(next) = number("acked") {
            if next <= self.next {
                return Err(format!("{next} was acknowledged after {}", self.next));
            }
            self.next = next;
        } else if let Some(first) = number("trim") {
            self.trim = first;
        } else if let Some(first) = number("trimmed") {
            self.trimmed = first;
        } else if line == "closed" {
            self.closed = true;
        } else if line != "opening" && !line.starts_with("failed ") {
            return Err(format!("not a writer's line: {line:?}"));
        }
        Ok(())
    }

    /// Compares with what survived a cut.
    pub(super) fn check(&mut self, held: RecordRange) -> Result<(), String> {
        if std::mem::take(&mut self.closed) && held.next != self.next {
            return Err(format!(
                "closed with all below {} durable, but {held} survived",
                self.next
            ));
        }
        self.found = Some(held);
        self.keep(held)
    }

    /// A recovery or a check has returned `held`: it must cover what was promised, and is itself
    /// promised from now on.
    fn keep(&mut self, held: RecordRange) -> Result<(), String> {
        let Self { next, trimmed, trim, .. } = *self;
        if held.next < next {
            return Err(format!("all below {next} was acknowledged, but {held} survived"));
        }
        if held.first < trimmed || held.first > trim {
            return Err(format!(
                "{held} survived: the log was trimmed to {trimmed}, and at most {trim} was \
                 requested"
            ));
        }
        // A trim that had not taken effect is forgotten.
        (self.next, self.trimmed, self.trim) = (held.next, held.first, held.first);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(lines: &[&str]) -> Promises {
        let mut promises = Promises::default();
        for line in lines {
            promises.line(line).expect(line);
        }
        promises
    }

    fn held(first: u64, next: u64) -> RecordRange {
        RecordRange { first, next }
    }

    const WRITER_OUTPUT: [&str; 6] =
        ["opening", "held 0 0", "acked 5", "trim 2", "trimmed 2", "acked 9"];

    #[test]
    fn acknowledged_records_must_survive_and_others_may() {
        after(&WRITER_OUTPUT).check(held(2, 9)).unwrap();
        after(&WRITER_OUTPUT).check(held(2, 12)).unwrap();
        let lost = after(&WRITER_OUTPUT).check(held(2, 8)).unwrap_err();
        assert_eq!(lost, "all below 9 was acknowledged, but 2..8 survived");
        assert!(after(&WRITER_OUTPUT).check(held(0, 0)).is_err());
    }

    #[test]
    fn a_requested_trim_may_be_seen_and_a_completed_one_must_be() {
        assert!(after(&WRITER_OUTPUT).check(held(1, 9)).is_err(), "trimmed records are back");
        assert!(after(&WRITER_OUTPUT).check(held(3, 9)).is_err(), "that was not trimmed");
        let mut asked = after(&WRITER_OUTPUT);
        asked.line("trim 6").unwrap();
        asked.check(held(2, 9)).unwrap();
        asked.check(held(6, 9)).expect_err("the trim did not take effect and is forgotten");
        let mut asked = after(&WRITER_OUTPUT);
        asked.line("trim 6").unwrap();
        asked.check(held(6, 9)).unwrap();
    }

    #[test]
    fn found_records_are_returned_by_recovery_and_stay() {
        let mut promises = after(&WRITER_OUTPUT);
        promises.check(held(2, 12)).unwrap();
        assert!(promises.line("held 2 11").is_err());
        let mut promises = after(&WRITER_OUTPUT);
        promises.check(held(2, 12)).unwrap();
        promises.line("held 2 12").unwrap();
        assert!(promises.check(held(2, 11)).is_err(), "it was returned");
    }

    #[test]
    fn a_closed_log_ends_where_it_was_closed() {
        let mut promises = after(&WRITER_OUTPUT);
        promises.line("closed").unwrap();
        assert!(promises.check(held(2, 10)).is_err());
        let mut promises = after(&WRITER_OUTPUT);
        promises.line("closed").unwrap();
        promises.check(held(2, 9)).unwrap();
    }

    #[test]
    fn only_a_writers_lines_are_accepted() {
        for line in ["", "held 1", "acked", "acked x", "ackedd 3", "panicked"] {
            assert!(Promises::default().line(line).is_err(), "{line:?}");
        }
        assert!(after(&WRITER_OUTPUT).line("acked 9").is_err(), "acknowledgements go up");
        after(&WRITER_OUTPUT).line("failed the device is gone").unwrap();
    }
}
