//! The tests with known failures and their reasons. A listed test must fail; every other one must
//! pass.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::Error;
use crate::report::{Case, Outcome};

/// The list of known failures. Its format is explained in the README beside it.
const LIST: &str = "tests/compat/known.txt";

/// The known failures of one suite against one server: test and reason.
pub(super) struct Known(BTreeMap<String, String>);

impl Known {
    pub(super) fn read(root: &Path, server: &str, suite: &str) -> Result<Self, Error> {
        let text =
            fs::read_to_string(root.join(LIST)).map_err(|error| format!("{LIST}: {error}"))?;
        Self::parse(&text, server, suite)
    }

    /// Parses one line per test: `suite | server | test | reason`, where the server is `alluvium`,
    /// `kafka` or `both`.
    fn parse(text: &str, server: &str, suite: &str) -> Result<Self, Error> {
        let mut known = BTreeMap::new();
        for (line, number) in text.lines().zip(1..) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |what: &str| Err(format!("{LIST}:{number}: {what}").into());
            let fields: Vec<&str> = line.splitn(4, '|').map(str::trim).collect();
            let [of, on, test, reason] = fields[..] else {
                return wrong("expected `suite | server | test | reason`");
            };
            if reason.is_empty() {
                return wrong("no reason");
            }
            if !["alluvium", "kafka", "both"].contains(&on) {
                return wrong("the server must be `alluvium`, `kafka` or `both`");
            }
            if of != suite || (on != server && on != "both") {
                continue;
            }
            if known.insert(test.to_owned(), reason.to_owned()).is_some() {
                return wrong("listed twice");
            }
        }
        Ok(Self(known))
    }

    /// Marks listed failures as known. A listed test that passes has failed, and so has, when all
    /// tests `ran`, a listed test that does not exist: the list must be accurate.
    pub(super) fn judge(mut self, cases: Vec<Case>, ran: bool) -> Vec<Case> {
        let mut judged = Vec::new();
        for mut case in cases {
            if let Some(reason) = self.0.remove(&case.name) {
                case.outcome = match case.outcome {
                    Outcome::Failed(_) => Outcome::Known(reason),
                    Outcome::Passed => Outcome::Failed(format!(
                        "it passes: remove it from {LIST}, where its reason is: {reason}"
                    )),
                    other => other,
                };
            }
            judged.push(case);
        }
        if ran {
            judged.extend(self.0.into_keys().map(|test| {
                Case::failed(&test, format!("it is listed in {LIST}, but no such test exists"))
            }));
        }
        judged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# comment\n\n\
        s | alluvium | a | not yet | really\n\
        s | both | b | needs three brokers\n\
        s | kafka | c | theirs\n\
        t | both | d | other suite\n";

    fn judge(cases: Vec<Case>, ran: bool) -> Vec<Case> {
        Known::parse(TEXT, "alluvium", "s").expect("a list").judge(cases, ran)
    }

    #[test]
    fn listed_tests_must_fail_and_no_other_may() {
        let known = |name: &str, reason: &str| Case {
            name: name.to_owned(),
            outcome: Outcome::Known(reason.to_owned()),
        };
        let cases = ["a", "b", "c", "d"].map(|name| Case::failed(name, "1: not 2")).to_vec();
        let wanted = [
            known("a", "not yet | really"),
            known("b", "needs three brokers"),
            Case::failed("c", "1: not 2"),
            Case::failed("d", "1: not 2"),
        ];
        assert_eq!(judge(cases, true), wanted);
        let passed =
            judge(vec![Case::passed("a"), Case::skipped("b", "no"), Case::passed("c")], true);
        assert!(passed[0].has_failed());
        assert_eq!(passed[1..], [Case::skipped("b", "no"), Case::passed("c")]);
    }

    #[test]
    fn a_listed_test_that_does_not_exist_is_reported_when_all_have_run() {
        assert_eq!(judge(vec![], false), []);
        let reported = judge(vec![], true);
        assert_eq!(reported.iter().map(|case| case.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(reported.iter().all(Case::has_failed));
    }

    #[test]
    fn an_invalid_list_is_refused() {
        for text in [
            "s | both | a",
            "s | both | a | ",
            "s | redpanda | a | why",
            "s | both | a | 1\ns | kafka | a | 2",
        ] {
            assert!(Known::parse(text, "kafka", "s").is_err(), "{text}");
        }
    }
}
