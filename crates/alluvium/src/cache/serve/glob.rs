//! Patterns of keys, as in SCAN: `*`, `?`, `[a-z]`, `[^a]`, and `\` before a literal.
//!
//! All possible matches are tracked in parallel, one bit for each (Baeza-Yates and Gonnet's
//! shift-and, with loops for the stars): the time depends only on the lengths, and no pattern
//! causes backtracking.

/// The maximum length of a pattern. Matching takes a step for each byte of the text and each 64
/// bytes of the pattern.
pub(super) const MAX_PATTERN_BYTES: usize = 1024;

/// A compiled pattern.
pub(super) struct Pattern {
    /// The number of words of a state, in which bit n says that the first n positions are matched.
    words: usize,
    /// That many words for each byte: bit n says that the byte matches position n.
    accepting: Vec<u64>,
    /// Bit n: there is a star before position n, or at the end.
    looping: Vec<u64>,
    /// The bit of a state in which everything is matched.
    end: usize,
}

fn set(bits: &mut [u64], at: usize) {
    bits[at / 64] |= 1 << (at % 64);
}

impl Pattern {
    pub(super) fn new(pattern: &[u8]) -> Self {
        // At most as many positions as bytes, and the end.
        let words = pattern.len() / 64 + 1;
        let (mut accepting, mut looping) = (vec![0u64; 256 * words], vec![0u64; words]);
        let (mut at, mut position) = (0, 0);
        while let Some(rest) = pattern.get(at..).filter(|rest| !rest.is_empty()) {
            if rest[0] == b'*' {
                set(&mut looping, position);
                at += 1;
                continue;
            }
            let (bytes, len) = element(rest);
            for byte in (0..=u8::MAX).filter(|byte| bytes[usize::from(*byte)]) {
                set(&mut accepting[usize::from(byte) * words..], position);
            }
            (at, position) = (at + len, position + 1);
        }
        Self { words, accepting, looping, end: position }
    }

    /// Returns whether the pattern matches the whole text.
    pub(super) fn matches(&self, text: &[u8]) -> bool {
        let mut state = vec![0u64; self.words];
        state[0] = 1;
        for byte in text {
            let accepting = &self.accepting[usize::from(*byte) * self.words..][..self.words];
            let (mut carry, mut alive) = (0, 0);
            for ((state, accepting), looping) in state.iter_mut().zip(accepting).zip(&self.looping)
            {
                let matched = *state & accepting;
                *state = (matched << 1) | carry | (*state & looping);
                carry = matched >> 63;
                alive |= *state;
            }
            if alive == 0 {
                return false;
            }
        }
        (state[self.end / 64] >> (self.end % 64)) & 1 == 1
    }
}

/// Returns the set of bytes that the first element of a pattern, which is not a star, matches, and
/// the element's length.
fn element(pattern: &[u8]) -> ([bool; 256], usize) {
    let mut bytes = [false; 256];
    match *pattern {
        [b'?', ..] => ([true; 256], 1),
        [b'[', ..] => class(pattern),
        [b'\\', itself, ..] => {
            bytes[usize::from(itself)] = true;
            (bytes, 2)
        }
        _ => {
            bytes[usize::from(pattern[0])] = true;
            (bytes, 1)
        }
    }
}

/// Returns the set of bytes that a class in brackets matches, and its length. A class without an
/// end extends to the end of the pattern.
fn class(pattern: &[u8]) -> ([bool; 256], usize) {
    let is_negated = pattern.get(1) == Some(&b'^');
    let mut at = if is_negated { 2 } else { 1 };
    let mut bytes = [is_negated; 256];
    let mut add = |from: u8, to: u8| {
        bytes[usize::from(from.min(to))..=usize::from(from.max(to))].fill(!is_negated);
    };
    loop {
        match pattern[at..] {
            [] => break,
            [b']', ..] => {
                at += 1;
                break;
            }
            [b'\\', itself, ..] => {
                add(itself, itself);
                at += 2;
            }
            [from, b'-', to, ..] => {
                add(from, to);
                at += 3;
            }
            [itself, ..] => {
                add(itself, itself);
                at += 1;
            }
        }
    }
    (bytes, at)
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::Random;

    use super::*;

    fn matches(pattern: &[u8], text: &[u8]) -> bool {
        Pattern::new(pattern).matches(text)
    }

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, yes, no) in [
            ("*", &["", "a", "abc"][..], &["x"; 0][..]),
            ("", &[""], &["a"]),
            ("user:*", &["user:", "user:1"], &["user", "xuser:1"]),
            ("*:1", &[":1", "a:1", "1:1:1"], &["a:11", "1"]),
            ("h?llo", &["hello", "hxllo"], &["hllo", "heello"]),
            ("h[ae]llo", &["hello", "hallo"], &["hillo"]),
            ("h[^e]llo", &["hallo"], &["hello"]),
            ("h[a-b]llo", &["hallo", "hbllo"], &["hcllo"]),
            ("h[b-a]llo", &["hallo"], &["hcllo"]),
            ("a\\*b", &["a*b"], &["axb", "a\\*b"]),
            ("[\\]]", &["]"], &["\\"]),
            ("[ab", &["a"], &["c", "[ab"]),
            ("a\\", &["a\\"], &["a"]),
            ("*a*b*c", &["abc", "xaxbxbxc", "aabbcc"], &["acb", "abcx"]),
        ] {
            for text in yes {
                assert!(matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
            }
            for text in no {
                assert!(!matches(pattern.as_bytes(), text.as_bytes()), "{pattern} {text}");
            }
        }
    }

    /// Matches by backtracking.
    fn may_match(pattern: &[u8], text: &[u8]) -> bool {
        match (pattern, text) {
            ([], _) => text.is_empty(),
            ([b'*', rest @ ..], _) => {
                may_match(rest, text) || (!text.is_empty() && may_match(pattern, &text[1..]))
            }
            ([one, pattern @ ..], [byte, text @ ..]) => {
                (*one == b'?' || one == byte) && may_match(pattern, text)
            }
            (_, []) => false,
        }
    }

    #[test]
    fn matching_agrees_with_backtracking() {
        for seed in 0..20_000 {
            let mut random = Random::new(seed);
            // Also around the ends of words.
            let same = vec![b'a'; [0, 60, 125][random.index(3)]];
            let mut some = |letters: &[u8]| {
                let mut bytes = same.clone();
                bytes.extend((0..random.index(9)).map(|_| letters[random.index(letters.len())]));
                bytes
            };
            let (pattern, text) = (some(b"ab*?"), some(b"ab"));
            assert_eq!(
                matches(&pattern, &text),
                may_match(&pattern, &text),
                "{} {}",
                pattern.escape_ascii(),
                text.escape_ascii()
            );
        }
    }

    /// The longest patterns that cause backtracking at each byte in other implementations.
    #[test]
    fn matching_long_texts_is_linear() {
        let stars = b"a*".repeat(MAX_PATTERN_BYTES / 2);
        assert!(matches(&stars, &[b'a'; 60_000]));
        assert!(!matches(&[&stars[..1000], b"b"].concat(), &[b'a'; 60_000]));
        let tail = [&b"*"[..], &[b'a'; 1000], b"b"].concat();
        assert!(!matches(&tail, &[b'a'; 60_000]));
        assert!(matches(&tail, &[&[b'a'; 60_000][..], b"b"].concat()));
    }
}
