//! The proof that the campaign can fail: without damage nothing is found, and against a model with
//! one lie in it, or with ears closed to what the server says, each lie is.

use std::path::Path;

use super::case::{Case, When};
use super::image::{End, IDLE_PRODUCER, Image, Load};
use super::kinds::{KINDS, Kind};
use super::model::{Commit, Model, Outcome, Partition, Record};
use super::process::Place;
use super::verdict::Verdict;
use crate::Error;
use crate::report;

struct Lie {
    name: &'static str,
    load: Load,
    expected: Verdict,
    /// What one of the findings has to say.
    says: &'static str,
    tell: fn(&mut Model),
}

const LIES: &[Lie] = &[
    Lie { name: "nothing", load: Load::Plain, expected: Verdict::Whole, says: "", tell: |_| {} },
    Lie {
        name: "nothing",
        load: Load::Transactional,
        expected: Verdict::Whole,
        says: "",
        tell: |_| {},
    },
    Lie {
        name: "nothing",
        load: Load::Compacted,
        expected: Verdict::Whole,
        says: "",
        tell: |_| {},
    },
    Lie { name: "nothing", load: Load::Grouped, expected: Verdict::Whole, says: "", tell: |_| {} },
    Lie {
        name: "another value",
        load: Load::Plain,
        expected: Verdict::FalseBytes,
        says: "",
        tell: |model| some_record(model).id ^= 1 << 40,
    },
    Lie {
        name: "a shorter value",
        load: Load::Compacted,
        expected: Verdict::FalseBytes,
        says: "",
        tell: |model| some_record(model).bytes -= 1,
    },
    Lie {
        name: "a record that was never written",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
        says: "",
        tell: never_written,
    },
    Lie {
        name: "an end beyond the end",
        load: Load::Plain,
        expected: Verdict::OffsetReused,
        says: "",
        tell: |model| {
            let partition = first(model);
            model.log_mut(&partition).next += 1;
        },
    },
    Lie {
        name: "a commit that was an abort",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        says: "",
        tell: |model| turn(model, Outcome::Aborted, Outcome::Committed),
    },
    Lie {
        name: "an abort that was a commit",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        says: "",
        tell: |model| turn(model, Outcome::Committed, Outcome::Aborted),
    },
    Lie {
        name: "a position further on",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
        says: "",
        tell: |model| {
            let latest = position(model);
            let next = Commit { offset: latest.offset + 1, txn: None };
            model.groups.values_mut().next().expect("it was there")[0].1.push(next);
        },
    },
    Lie {
        name: "a position further back",
        load: Load::Grouped,
        expected: Verdict::FalseBytes,
        says: "",
        tell: |model| position(model).offset -= 1,
    },
    Lie {
        name: "offsets of an abort that were committed",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        says: "of a transaction that was not committed",
        tell: |model| {
            let aborted = of_outcome(model, Outcome::Aborted);
            position(model).txn = Some(aborted);
        },
    },
    Lie {
        name: "one transaction that was two",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        says: "is shown in part",
        tell: |model| {
            let [committed, aborted] =
                [Outcome::Committed, Outcome::Aborted].map(|outcome| of_outcome(model, outcome));
            let logs = model.topics.values_mut().flatten();
            for record in logs.flat_map(|log| log.records.values_mut()) {
                if record.txn == Some(aborted) {
                    record.txn = Some(committed);
                }
            }
        },
    },
    Lie {
        name: "a producer that has written more",
        load: Load::Plain,
        expected: Verdict::ProducerRefused,
        says: "refusal 2",
        tell: |model| {
            let sequences = &mut model.idempotent[IDLE_PRODUCER].sequences;
            sequences.values_mut().next().map(|next| *next += 5).expect("it has written");
        },
    },
];

fn never_written(model: &mut Model) {
    let partition = first(model);
    let log = model.log_mut(&partition);
    let record = log.records.values().next_back().expect("the log has records").clone();
    // Behind what the case itself writes.
    log.records.insert(log.next + 1000, record);
}

fn first(model: &Model) -> Partition {
    model.partitions().remove(0)
}

fn some_record(model: &mut Model) -> &mut Record {
    let partition = first(model);
    // The last one is there in a compacted topic too.
    model.log_mut(&partition).records.values_mut().next_back().expect("the log has records")
}

/// The first transaction with an outcome that has records. (The last ones lie behind one that is
/// open.)
fn of_outcome(model: &Model, outcome: Outcome) -> usize {
    let has_records = |txn: &usize| {
        model.partitions().iter().any(|partition| {
            model.log(partition).records.values().any(|record| record.txn == Some(*txn))
        })
    };
    let is_one = |txn: &usize| model.outcome(*txn) == outcome && has_records(txn);
    (0..model.transactions.len()).find(is_one).expect("a transaction has ended so")
}

/// It had the other one.
fn turn(model: &mut Model, from: Outcome, to: Outcome) {
    let first = of_outcome(model, from);
    model.transactions[first].outcome = to;
}

/// The latest commit of a group that counts.
fn position(model: &mut Model) -> &mut Commit {
    let is_committed: Vec<bool> =
        model.transactions.iter().map(|txn| txn.outcome == Outcome::Committed).collect();
    let commits = &mut model.groups.values_mut().next().expect("a group has committed")[0].1;
    let counts = |commit: &&mut Commit| commit.txn.is_none_or(|txn| is_committed[txn]);
    commits.iter_mut().rev().find(counts).expect("a commit counts")
}

/// Run the cases of the proof on copies of the images.
pub(super) fn run(
    images: &[Image],
    binary: &Path,
    directory: &Path,
) -> Result<Vec<report::Case>, Error> {
    let place = Place { binary: binary.to_owned(), directory: directory.to_owned() };
    let of = |load: Load, end: End| -> Result<Image, Error> {
        let image = images.iter().find(|image| image.load == load && image.end == end);
        Ok(image.ok_or("there is no image for the proof")?.clone())
    };
    let mut tests = Vec::new();
    let mut test = |name: &str, case: Case<'_>, expected, says| {
        tests.push(report::Case::run(name, || expect(&case, expected, says, &place)));
    };
    for lie in LIES {
        let mut image = of(lie.load, End::Killed)?;
        (lie.tell)(&mut image.model);
        let name = format!("the model lies about {}, {}", lie.name, lie.load.name());
        test(&name, undamaged(&image), lie.expected, lie.says);
    }

    let image = of(Load::Plain, End::Killed)?;
    // Not any record: those that were uploaded are there whatever becomes of the log.
    let kind = Some(named("log: flip in a partition's last record")?);
    let deaf = Case { kind, deaf: true, ..undamaged(&image) };
    test("a loss of which nothing is said", deaf, Verdict::SilentLoss, "");

    // Under load, and killed under load.
    for load in Load::ALL {
        let image = of(load, End::KilledUnderLoad)?;
        let name = format!("no damage, killed under load, {}", load.name());
        test(&name, undamaged(&image), Verdict::Whole, "");
        let case = Case { when: When::UnderLoad, ..undamaged(&image) };
        let name = format!("no damage, under load, {}", load.name());
        test(&name, case, Verdict::Whole, "");
    }
    for when in [When::Stopped, When::UnderLoad] {
        let mut image = of(Load::Plain, End::KilledUnderLoad)?;
        never_written(&mut image.model);
        let name = format!("the model lies about a record that was never written, {when:?}");
        test(&name, Case { when, ..undamaged(&image) }, Verdict::SilentLoss, "");
    }

    // The last record before a kill is in the silent window, and nothing but that excuses it.
    let image = of(Load::Plain, End::KilledUnderLoad)?;
    let last = Case { kind: Some(named("log: flip in the last record")?), ..undamaged(&image) };
    let strict = Case { strict: true, ..last };
    test("damage in the silent window", last, Verdict::InWindow, "");
    test("damage in the silent window, without it", strict, Verdict::SilentLoss, "");

    // What the log calls lost was handed out.
    let mut image = of(Load::Plain, End::Killed)?;
    for log in image.model.topics.values_mut().flatten() {
        log.next -= 1;
    }
    let kind = Some(named("log: flip in a partition's last record")?);
    let name = "an end before the end, and a loss there";
    test(name, Case { kind, ..undamaged(&image) }, Verdict::LossMisstated, "was never used");
    Ok(tests)
}

fn undamaged(image: &Image) -> Case<'_> {
    Case { kind: None, when: When::Stopped, image, seed: 1, deaf: false, strict: false }
}

fn named(name: &str) -> Result<&'static Kind, Error> {
    Ok(KINDS.iter().find(|kind| kind.name == name).ok_or("there is no kind for the proof")?)
}

fn expect(case: &Case<'_>, expected: Verdict, says: &str, place: &Place) -> Result<(), Error> {
    let shown = case.run(place)?.ok_or("the image has nothing to be damaged")?;
    let is_said = says.is_empty() || shown.findings.iter().any(|it| it.detail.contains(says));
    match shown.verdict() {
        verdict if verdict == expected && is_said => Ok(()),
        verdict => {
            let details: Vec<_> =
                shown.findings.iter().map(|finding| finding.detail.as_str()).collect();
            Err(format!("{verdict} instead of {expected}: {}", details.join("; ")).into())
        }
    }
}
