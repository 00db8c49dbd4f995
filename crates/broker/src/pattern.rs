//! Regular expressions that are matched with names of topics and transactions in bounded time.
//!
//! They come from clients, and are matched with all names while the group is locked. The crate
//! `regex` is linear in the length of a name times the size of the expression: a malicious
//! expression of 100 bytes takes 16 s for 10,000 malicious topic names. Therefore only its lazy
//! automaton is used, which stops with an error instead of falling back to a slower engine when its
//! states do not fit in memory. The states of ordinary expressions fit.

use std::sync::Arc;

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};

mod re2;

/// The longest expression. Nothing else bounds its syntax tree, in which a class of five bytes can
/// take some kilobytes.
pub(crate) const MAX_BYTES: usize = 4096;
/// The limit on the compiled size of an expression.
const MAX_COMPILED_BYTES: usize = 1 << 20;
/// The limits on the automaton's cached states and on how often the cache may be cleared, over all
/// names.
const CACHE_BYTES: usize = 1 << 20;
const MAX_CACHE_CLEARS: usize = 3;

/// The states do not fit in the cache, so matching would take too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it takes too long to match")]
pub(crate) struct TooCostly;

/// A compiled expression.
pub(crate) struct Pattern {
    dfa: DFA,
    cache: Cache,
}

impl Pattern {
    /// Compiles an expression that matches whole names, as RE2/J's `matches` does, which Kafka
    /// uses.
    ///
    /// # Errors
    /// Why it is not a regular expression, or that it is too large.
    pub(crate) fn new(regex: &str) -> Result<Self, String> {
        if regex.len() > MAX_BYTES {
            return Err(format!("it has {} bytes, the limit is {MAX_BYTES}", regex.len()));
        }
        let translated = re2::translate(regex)?;
        let syntax = syntax::Config::new().utf8(false);
        // Parsed alone first: the text put around it must not complete it.
        syntax::parse_with(&translated, &syntax).map_err(|error| reason(&error.to_string()))?;
        let config = DFA::config()
            .cache_capacity(CACHE_BYTES)
            .minimum_cache_clear_count(Some(MAX_CACHE_CLEARS));
        let nfa = thompson::Config::new()
            .utf8(false)
            .which_captures(WhichCaptures::None)
            .nfa_size_limit(Some(MAX_COMPILED_BYTES));
        let dfa = DFA::builder()
            .configure(config)
            .syntax(syntax)
            .thompson(nfa)
            .build(&format!(r"\A(?:{translated})\z"));
        let dfa = dfa.map_err(|error| match std::error::Error::source(&error) {
            Some(cause) => format!("{error}: {cause}"),
            None => error.to_string(),
        })?;
        let cache = dfa.create_cache();
        Ok(Self { dfa, cache })
    }

    /// The names that match.
    pub(crate) fn matching<'a>(
        &mut self,
        names: impl Iterator<Item = &'a Arc<str>>,
    ) -> Result<Vec<Arc<str>>, TooCostly> {
        let mut matching = Vec::new();
        for name in names {
            if self.is_match(name)? {
                matching.push(name.clone());
            }
        }
        Ok(matching)
    }

    /// Whether this name matches.
    pub(crate) fn is_match(&mut self, name: &str) -> Result<bool, TooCostly> {
        let input = Input::new(name.as_bytes()).anchored(Anchored::Yes);
        let found = self.dfa.try_search_fwd(&mut self.cache, &input).map_err(|_| TooCostly)?;
        Ok(found.is_some())
    }
}

/// Extracts the parser's reason without its quote of the translated expression, which the client
/// has not written.
fn reason(error: &str) -> String {
    let last = error.lines().last().unwrap_or_default();
    last.trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matching(regex: &str, names: &[&str]) -> Result<Vec<String>, TooCostly> {
        let names: Vec<Arc<str>> = names.iter().map(|name| Arc::from(*name)).collect();
        let found = Pattern::new(regex).expect(regex).matching(names.iter())?;
        Ok(found.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn patterns_match_whole_names() {
        let names = ["a", "ab", "abc", "b.a-1", "x_\u{e4}"];
        for (regex, expected) in [
            ("a", &["a"][..]),
            ("a|ab", &["a", "ab"]),
            ("a|ab.*", &["a", "ab", "abc"]),
            (r"\bb\..*\d", &["b.a-1"]),
            ("(?i)A(?:B)?", &["a", "ab"]),
            ("^a$", &["a"]),
            ("", &[]),
            ("a{1,3}b?|\u{e4}", &["a", "ab"]),
            (r"\w{1,60}", &["a", "ab", "abc"]),
        ] {
            assert_eq!(matching(regex, &names).unwrap(), expected, "{regex}");
        }
        for bad in ["(", "a)|(b", "*", "a{2000}{2000}", r"\", "[z-a]"] {
            assert!(Pattern::new(bad).is_err(), "{bad}");
        }
        assert!(Pattern::new(&"a".repeat(MAX_BYTES)).is_ok());
        assert!(Pattern::new(&"a".repeat(MAX_BYTES + 1)).is_err());
    }

    /// The expected results are those of RE2/J 1.8 in Kafka 4.4.0, by `Pattern.matches`.
    #[test]
    fn the_syntax_is_that_of_re2j() {
        let names =
            ["a", "a.b", "A1", "x-y", "_", "\u{e4}", "\u{3b1}", "7", "a+b", "Q", "\u{10ffff}"];
        for line in include_str!("pattern/re2j.txt").lines() {
            let (regex, expected) = line.split_once('\t').unwrap();
            let regex = regex.replace("\\u{e4}", "\u{e4}");
            match (expected, Pattern::new(&regex)) {
                ("!", outcome) => assert!(outcome.is_err(), "{regex} is refused by RE2/J"),
                (_, Err(error)) => panic!("{regex}: {error}"),
                (expected, Ok(_)) => {
                    let found = matching(&regex, &names).unwrap();
                    let found =
                        names.map(|name| if found.iter().any(|f| f == name) { '1' } else { '0' });
                    assert_eq!(String::from_iter(found), expected, "{regex}");
                }
            }
        }
    }

    #[test]
    fn unicode_classes_are_bounded() {
        let class = |count: usize| format!("(?i)[{}]", r"\pL\PL".repeat(count));
        assert!(Pattern::new(&class(8)).is_ok());
        let error = Pattern::new(&class(9)).err().expect("there are 18");
        assert!(error.contains("too many Unicode classes"), "{error}");
        assert!(Pattern::new(&format!("(?i){}", r"\pL".repeat(17))).is_err());
    }

    #[test]
    fn a_pattern_that_would_take_too_long_is_an_error() {
        // Each state is a set of positions that had an `a`; there are too many such sets to cache.
        let mut seed = 1_u64;
        let mut letter = |_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if seed >> 63 == 1 { 'a' } else { 'b' }
        };
        let names: Vec<String> = (0..1_000).map(|_| (0..249).map(&mut letter).collect()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        for costly in [
            ".*a.{120}[c-z]",
            "(?:[ab]*a[ab]{100}){2}[c-z]",
            "(?:.*a.{1,100}[d-y]|.*b.{1,90}[c-z]|.*a.{1,80}[c-z])",
        ] {
            assert_eq!(matching(costly, &names), Err(TooCostly), "{costly}");
        }
        // Ordinary expressions are matched.
        let list: Vec<String> = (0..400).map(|n| format!("topic-{n}")).collect();
        let list = list.join("|");
        for usual in [".*", "a.*b.*a", r"orders-.*|\w+\.events(-v[0-9]+)?", &list] {
            assert!(matching(usual, &names).is_ok(), "{usual}");
        }
    }
}
