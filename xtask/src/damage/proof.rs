//! The proof that the campaign can fail: without damage nothing is found, and against a model with
//! one lie in it, or with ears closed to what the server says, each lie is.

use std::path::Path;

use super::case::Case;
use super::image::{IDLE_PRODUCER, Image, Load};
use super::kinds::KINDS;
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
        tell: |model| {
            let partition = first(model);
            let log = model.log_mut(&partition);
            let record = log.records.values().next_back().expect("the log has records").clone();
            log.records.insert(log.next, record);
        },
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
    let mut tests = Vec::new();
    for lie in LIES {
        let image = images.iter().find(|image| image.load == lie.load && image.killed);
        let image = image.ok_or("there is no image for the proof")?;
        let mut model = image.model.clone();
        (lie.tell)(&mut model);
        let image = Image {
            load: image.load,
            killed: image.killed,
            files: image.files.clone(),
            earlier: image.earlier.clone(),
            model,
            streams: image.streams.clone(),
        };
        let name = format!("the model lies about {}, {}", lie.name, lie.load.name());
        tests.push(report::Case::run(&name, || {
            expect(&image, (lie.expected, lie.says), false, &place)
        }));
    }
    let image = images.iter().find(|image| image.load == Load::Plain && image.killed);
    let image = image.ok_or("there is no image for the proof")?;
    let name = "a loss of which nothing is said";
    tests.push(report::Case::run(name, || expect(image, (Verdict::SilentLoss, ""), true, &place)));
    Ok(tests)
}

fn expect(
    image: &Image,
    (expected, says): (Verdict, &str),
    deaf: bool,
    place: &Place,
) -> Result<(), Error> {
    let kind = deaf.then(|| &KINDS[0]);
    let case = Case { kind, running: false, image, seed: 1, deaf };
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
