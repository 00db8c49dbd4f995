//! What the writer was promised, compared with what is left. Pure; no I/O. The lines are those of
//! `sim/src/bin/numbered.rs`.

use std::fmt;

/// Records by number, half open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) first: u64,
    pub(super) next: u64,
}

impl Held {
    /// From a line `held A B`.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let (first, next) = line.strip_prefix("held ")?.split_once(' ')?;
        Some(Self { first: first.parse().ok()?, next: next.parse().ok()? })
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.first, self.next)
    }
}

/// The promises of all rounds so far.
#[derive(Debug, Default)]
pub(super) struct Promises {
    /// All records before it were acknowledged, or handed out by a recovery.
    next: u64,
    /// All records before it were given up for certain, and the most that was asked for.
    trimmed: u64,
    trim: u64,
    /// What was found after the last cut; nobody has written since then and the next recovery.
    found: Option<Held>,
    closed: bool,
}

impl Promises {
    /// All records before it may not be lost, unless they were trimmed.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Take one line of the writer. An error is a broken promise, or not a line of a writer.
    pub(super) fn line(&mut self, line: &str) -> Result<(), String> {
        let number = |what: &str| -> Option<u64> {
            line.strip_prefix(what)?.strip_prefix(' ')?.parse().ok()
        };
        if let Some(held) = Held::parse(line) {
            if let Some(found) = self.found.take()
                && found != held
            {
                return Err(format!("recovery has handed out {held}, but {found} was there"));
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
            return Err(format!("not a line of the writer: {line:?}"));
        }
        Ok(())
    }

    /// Compare with what is there after a cut.
    pub(super) fn check(&mut self, held: Held) -> Result<(), String> {
        if std::mem::take(&mut self.closed) && held.next != self.next {
            return Err(format!("closed with all before {} durable, {held} is there", self.next));
        }
        self.found = Some(held);
        self.keep(held)
    }

    /// A walk has handed out `held`: it must cover what was promised, and is promised from now on.
    fn keep(&mut self, held: Held) -> Result<(), String> {
        let Self { next, trimmed, trim, .. } = *self;
        if held.next < next {
            return Err(format!("all before {next} was acknowledged, but {held} is there"));
        }
        if held.first < trimmed || held.first > trim {
            return Err(format!(
                "{held} is there: the log was trimmed to {trimmed}, and nobody asked for more than {trim}"
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

    fn held(first: u64, next: u64) -> Held {
        Held { first, next }
    }

    const LIFE: [&str; 6] = ["opening", "held 0 0", "acked 5", "trim 2", "trimmed 2", "acked 9"];

    #[test]
    fn what_was_acknowledged_must_be_there_and_more_may_be() {
        after(&LIFE).check(held(2, 9)).unwrap();
        after(&LIFE).check(held(2, 12)).unwrap();
        let lost = after(&LIFE).check(held(2, 8)).unwrap_err();
        assert_eq!(lost, "all before 9 was acknowledged, but 2..8 is there");
        assert!(after(&LIFE).check(held(0, 0)).is_err());
    }

    #[test]
    fn a_trim_counts_once_it_was_asked_for_and_must_once_it_has_taken_effect() {
        assert!(after(&LIFE).check(held(1, 9)).is_err(), "trimmed records are back");
        assert!(after(&LIFE).check(held(3, 9)).is_err(), "nobody has trimmed that");
        let mut asked = after(&LIFE);
        asked.line("trim 6").unwrap();
        asked.check(held(2, 9)).unwrap();
        asked.check(held(6, 9)).expect_err("the trim has not taken effect, and is forgotten");
        let mut asked = after(&LIFE);
        asked.line("trim 6").unwrap();
        asked.check(held(6, 9)).unwrap();
    }

    #[test]
    fn what_was_found_is_handed_out_and_stays() {
        let mut promises = after(&LIFE);
        promises.check(held(2, 12)).unwrap();
        assert!(promises.line("held 2 11").is_err());
        let mut promises = after(&LIFE);
        promises.check(held(2, 12)).unwrap();
        promises.line("held 2 12").unwrap();
        assert!(promises.check(held(2, 11)).is_err(), "it was handed out");
    }

    #[test]
    fn a_closed_log_ends_where_it_was_closed() {
        let mut promises = after(&LIFE);
        promises.line("closed").unwrap();
        assert!(promises.check(held(2, 10)).is_err());
        let mut promises = after(&LIFE);
        promises.line("closed").unwrap();
        promises.check(held(2, 9)).unwrap();
    }

    #[test]
    fn only_lines_of_a_writer_count() {
        for line in ["", "held 1", "acked", "acked x", "ackedd 3", "panicked"] {
            assert!(Promises::default().line(line).is_err(), "{line:?}");
        }
        assert!(after(&LIFE).line("acked 9").is_err(), "acknowledgements go up");
        after(&LIFE).line("failed the device is gone").unwrap();
    }
}
