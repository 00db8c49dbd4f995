//! The proof that the campaign can fail: without damage nothing is found, and against a model with
//! one lie in it, or with ears closed to what the server says, each lie is.

use std::path::Path;

use super::case::Case;
use super::image::{Image, Load};
use super::kinds::KINDS;
use super::model::{Model, Outcome, Partition, Record};
use super::process::Place;
use super::verdict::Verdict;
use crate::Error;
use crate::report;

struct Lie {
    name: &'static str,
    load: Load,
    expected: Verdict,
    tell: fn(&mut Model),
}

const LIES: &[Lie] = &[
    Lie { name: "nothing", load: Load::Plain, expected: Verdict::Whole, tell: |_| {} },
    Lie { name: "nothing", load: Load::Transactional, expected: Verdict::Whole, tell: |_| {} },
    Lie { name: "nothing", load: Load::Compacted, expected: Verdict::Whole, tell: |_| {} },
    Lie { name: "nothing", load: Load::Grouped, expected: Verdict::Whole, tell: |_| {} },
    Lie {
        name: "another value",
        load: Load::Plain,
        expected: Verdict::FalseBytes,
        tell: |model| some_record(model).id ^= 1 << 40,
    },
    Lie {
        name: "a shorter value",
        load: Load::Compacted,
        expected: Verdict::FalseBytes,
        tell: |model| some_record(model).bytes -= 1,
    },
    Lie {
        name: "a record that was never written",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
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
        tell: |model| {
            let partition = first(model);
            model.log_mut(&partition).next += 1;
        },
    },
    Lie {
        name: "a commit that was an abort",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        tell: |model| turn(model, Outcome::Aborted, Outcome::Committed),
    },
    Lie {
        name: "an abort that was a commit",
        load: Load::Transactional,
        expected: Verdict::WrongOutcome,
        tell: |model| turn(model, Outcome::Committed, Outcome::Aborted),
    },
    Lie {
        name: "a position further on",
        load: Load::Grouped,
        expected: Verdict::SilentLoss,
        tell: |model| position(model, 1),
    },
    Lie {
        name: "a position further back",
        load: Load::Grouped,
        expected: Verdict::FalseBytes,
        tell: |model| position(model, -1),
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

/// The first transaction with an outcome had the other one. (The last ones lie behind one that is
/// open.)
fn turn(model: &mut Model, from: Outcome, to: Outcome) {
    let has_records = |txn: &usize| {
        model.partitions().iter().any(|partition| {
            model.log(partition).records.values().any(|record| record.txn == Some(*txn))
        })
    };
    let of_outcome = |txn: &usize| model.transactions[*txn] == from && has_records(txn);
    let first = (0..model.transactions.len()).find(of_outcome);
    model.transactions[first.expect("a transaction has ended so")] = to;
}

fn position(model: &mut Model, by: i64) {
    let offsets = model.groups.values_mut().next().expect("a group has committed");
    offsets[0].1 += by;
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
        tests.push(report::Case::run(&name, || expect(&image, lie.expected, false, &place)));
    }
    let image = images.iter().find(|image| image.load == Load::Plain && image.killed);
    let image = image.ok_or("there is no image for the proof")?;
    let name = "a loss of which nothing is said";
    tests.push(report::Case::run(name, || expect(image, Verdict::SilentLoss, true, &place)));
    Ok(tests)
}

fn expect(image: &Image, expected: Verdict, deaf: bool, place: &Place) -> Result<(), Error> {
    let kind = deaf.then(|| &KINDS[0]);
    let case = Case { kind, running: false, image, seed: 1, deaf };
    let shown = case.run(place)?.ok_or("the image has nothing to be damaged")?;
    match shown.verdict() {
        verdict if verdict == expected => Ok(()),
        verdict => {
            let details: Vec<_> =
                shown.findings.iter().map(|finding| finding.detail.as_str()).collect();
            Err(format!("{verdict} instead of {expected}: {}", details.join("; ")).into())
        }
    }
}
