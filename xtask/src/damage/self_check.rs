//! Self-check of the campaign: without damage there are no findings, and each error planted in the
//! model, and each loss whose report is ignored, is found.

use std::path::Path;

use super::case::{Case, When};
use super::faults::{FAULTS, Fault};
use super::image::{End, IDLE_PRODUCER, Image, Load};
use super::model::{Commit, Model, Outcome, Partition, Record};
use super::process::Installation;
use super::verdict::Verdict;
use crate::Error;
use crate::report;

struct ModelError {
    name: &'static str,
    load: Load,
    expected: Verdict,
    /// Text that one of the findings must contain.
    detail: &'static str,
    plant: fn(&mut Model),
}

const MODEL_ERRORS: &[ModelError] = &[
    ModelError {
        name: "none",
        load: Load::Plain,
        expected: Verdict::Intact,
        detail: "",
        plant: |_| {},
    },
    ModelError {
        name: "none",
        load: Load::Transactional,
        expected: Verdict::Intact,
        detail: "",
        plant: |_| {},
    },
    ModelError {
        name: "none",
        load: Load::Compacted,
        expected: Verdict::Intact,
        detail: "",
        plant: |_| {},
    },
    ModelError {
        name: "none",
        load: Load::Grouped,
        expected: Verdict::Intact,
        detail: "",
        plant: |_| {},
    },
    ModelError {
        name: "another value",
        load: Load::Plain,
        expected: Verdict::WrongBytes,
        detail: "",
        plant: |model| some_record(model).id ^= 1 << 40,
    },
    ModelError {
        name: "a shorter value",
        load: Load::Compacted,
        expected: Verdict::WrongBytes,
        detail: "",
        plant: |model| some_record(model).bytes -= 1,
    },
    ModelError {
        name: "a record that was never written",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
        detail: "",
        plant: never_written,
    },
    ModelError {
        name: "a high watermark that is too high",
        load: Load::Plain,
        expected: Verdict::OffsetReused,
        detail: "",
        plant: |model| {
            let partition = first(model);
            model.log_mut(&partition).next += 1;
        },
    },
    ModelError {
        name: "an abort as a commit",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        detail: "",
        plant: |model| change_outcome(model, Outcome::Aborted, Outcome::Committed),
    },
    ModelError {
        name: "a commit as an abort",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        detail: "",
        plant: |model| change_outcome(model, Outcome::Committed, Outcome::Aborted),
    },
    ModelError {
        name: "a committed offset that is too high",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
        detail: "",
        plant: |model| {
            let latest = position(model);
            let next = Commit { offset: latest.offset + 1, txn: None };
            model.groups.values_mut().next().expect("a group has committed")[0].1.push(next);
        },
    },
    ModelError {
        name: "a committed offset that is too low",
        load: Load::Grouped,
        expected: Verdict::WrongBytes,
        detail: "",
        plant: |model| position(model).offset -= 1,
    },
    ModelError {
        name: "staged offsets of an abort as committed",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        detail: "from a transaction that was not committed",
        plant: |model| {
            let aborted = of_outcome(model, Outcome::Aborted);
            position(model).txn = Some(aborted);
        },
    },
    ModelError {
        name: "two transactions as one",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        detail: "is visible in part",
        plant: |model| {
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
    ModelError {
        name: "a topic that was never created",
        load: Load::Plain,
        expected: Verdict::SilentLoss,
        detail: "its creation is lost",
        plant: |model| {
            model.empty_topics.insert("never".into(), true);
        },
    },
    ModelError {
        name: "a topic that was never deleted",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
        detail: "its deletion is lost",
        plant: |model| {
            let mut topics = model.empty_topics.values_mut();
            topics.find(|exists| **exists).map(|it| *it = false).expect("a topic exists");
        },
    },
    ModelError {
        name: "a sequence number that is too high",
        load: Load::Plain,
        expected: Verdict::ProducerRefused,
        detail: "refusal 2",
        plant: |model| {
            let sequences = &mut model.idempotent[IDLE_PRODUCER].sequences;
            sequences.values_mut().next().map(|next| *next += 5).expect("it has produced");
        },
    },
];

fn never_written(model: &mut Model) {
    let partition = first(model);
    let log = model.log_mut(&partition);
    let record = log.records.values().next_back().expect("the log has records").clone();
    // Beyond the offsets that the case itself writes.
    log.records.insert(log.next + 1000, record);
}

fn first(model: &Model) -> Partition {
    model.partitions().remove(0)
}

fn some_record(model: &mut Model) -> &mut Record {
    let partition = first(model);
    // The last record is present in a compacted topic too.
    model.log_mut(&partition).records.values_mut().next_back().expect("the log has records")
}

/// Returns the first transaction with an outcome that has records. (The last ones are after an open
/// one.)
fn of_outcome(model: &Model, outcome: Outcome) -> usize {
    let has_records = |txn: &usize| {
        model.partitions().iter().any(|partition| {
            model.log(partition).records.values().any(|record| record.txn == Some(*txn))
        })
    };
    let is_one = |txn: &usize| model.outcome(*txn) == outcome && has_records(txn);
    (0..model.transactions.len()).find(is_one).expect("a transaction has this outcome")
}

/// Changes the outcome of one transaction.
fn change_outcome(model: &mut Model, from: Outcome, to: Outcome) {
    let first = of_outcome(model, from);
    model.transactions[first].outcome = to;
}

/// Returns the latest effective commit of a group.
fn position(model: &mut Model) -> &mut Commit {
    let is_committed: Vec<bool> =
        model.transactions.iter().map(|txn| txn.outcome == Outcome::Committed).collect();
    let commits = &mut model.groups.values_mut().next().expect("a group has committed")[0].1;
    let counts = |commit: &&mut Commit| commit.txn.is_none_or(|txn| is_committed[txn]);
    commits.iter_mut().rev().find(counts).expect("a commit counts")
}

/// Runs the self-check on copies of the images.
pub(super) fn run(
    images: &[Image],
    binary: &Path,
    directory: &Path,
) -> Result<Vec<report::Case>, Error> {
    let installation = Installation { binary: binary.to_owned(), directory: directory.to_owned() };
    let of = |load: Load, end: End| -> Result<Image, Error> {
        let image = images.iter().find(|image| image.load == load && image.end == end);
        Ok(image.ok_or("there is no image for the self-check")?.clone())
    };
    let mut tests = Vec::new();
    let mut test = |name: &str, case: Case<'_>, expected, detail| {
        tests.push(report::Case::run(name, || expect(&case, expected, detail, &installation)));
    };
    for error in MODEL_ERRORS {
        let mut image = of(error.load, End::Killed)?;
        (error.plant)(&mut image.model);
        let name = format!("error in the model: {}, {}", error.name, error.load.name());
        test(&name, undamaged(&image), error.expected, error.detail);
    }

    let image = of(Load::Plain, End::Killed)?;
    // The last record: uploaded ones are present regardless of the log.
    let fault = Some(named("log: flip in a partition's last record")?);
    let ignore_reports = Case { fault, ignore_reports: true, ..undamaged(&image) };
    test("a loss whose report is ignored", ignore_reports, Verdict::SilentLoss, "");

    // Cases under load, and cases killed under load.
    for load in Load::ALL {
        let image = of(load, End::KilledUnderLoad)?;
        let name = format!("no damage, killed under load, {}", load.name());
        test(&name, undamaged(&image), Verdict::Intact, "");
        let case = Case { when: When::UnderLoad, ..undamaged(&image) };
        let name = format!("no damage, under load, {}", load.name());
        test(&name, case, Verdict::Intact, "");
    }
    for when in [When::Stopped, When::UnderLoad] {
        let mut image = of(Load::Plain, End::KilledUnderLoad)?;
        never_written(&mut image.model);
        let name = format!("error in the model: a record that was never written, {when:?}");
        test(&name, Case { when, ..undamaged(&image) }, Verdict::SilentLoss, "");
    }

    // The last record before a kill is in the silent window, and only that excuses its loss.
    let image = of(Load::Plain, End::KilledUnderLoad)?;
    let last = Case { fault: Some(named("log: flip in the last record")?), ..undamaged(&image) };
    let no_window = Case { no_window: true, ..last };
    test("damage in the silent window", last, Verdict::InWindow, "");
    test("damage in the silent window, not excused", no_window, Verdict::SilentLoss, "");

    // Offsets that the log reports as lost must have been assigned.
    let mut image = of(Load::Plain, End::Killed)?;
    for log in image.model.topics.values_mut().flatten() {
        log.next -= 1;
    }
    let fault = Some(named("log: flip in a partition's last record")?);
    let name = "a high watermark that is too low, and a loss there";
    test(name, Case { fault, ..undamaged(&image) }, Verdict::LossMisreported, "was never assigned");
    Ok(tests)
}

fn undamaged(image: &Image) -> Case<'_> {
    Case {
        fault: None,
        when: When::Stopped,
        image,
        seed: 1,
        ignore_reports: false,
        no_window: false,
    }
}

fn named(name: &str) -> Result<&'static Fault, Error> {
    Ok(FAULTS
        .iter()
        .find(|fault| fault.name == name)
        .ok_or("there is no fault for the self-check")?)
}

fn expect(
    case: &Case<'_>,
    expected: Verdict,
    detail: &str,
    installation: &Installation,
) -> Result<(), Error> {
    let result = case.run(installation)?.ok_or("the image offers no target")?;
    let has_detail =
        detail.is_empty() || result.findings.iter().any(|it| it.detail.contains(detail));
    match result.verdict() {
        verdict if verdict == expected && has_detail => Ok(()),
        verdict => {
            let details: Vec<_> =
                result.findings.iter().map(|finding| finding.detail.as_str()).collect();
            Err(format!("{verdict} instead of {expected}: {}", details.join("; ")).into())
        }
    }
}
