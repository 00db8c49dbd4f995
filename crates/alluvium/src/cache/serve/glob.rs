//! Patterns of keys, as SCAN has them: `*`, `?`, `[a-z]`, `[^a]`, and `\` in front of what stands for itself.

/// Matching takes at most as many steps as pattern and text have bytes, multiplied.
pub(super) const MAX_PATTERN_BYTES: usize = 1024;

/// Whether a pattern matches all of a text.
pub(super) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    // Behind the last star, and where its end was tried last. An earlier star never has to be tried again: the last one takes what that could give up.
    let mut last_star = None;
    while from < text.len() {
        if pattern.get(at) == Some(&b'*') {
            at += 1;
            last_star = Some((at, from));
        } else if let Some(len) = one(&pattern[at..], text[from]) {
            (at, from) = (at + len, from + 1);
        } else if let Some((star, tried)) = last_star {
            (at, from) = (star, tried + 1);
            last_star = Some((star, from));
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// How many bytes of the pattern stand for this one byte, if they do.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern {
        [] => None,
        [b'?', ..] => Some(1),
        [b'\\', itself, ..] => (itself == byte).then_some(2),
        [b'[', ..] => {
            let (is_in, len) = class(pattern, byte);
            is_in.then_some(len)
        }
        [itself, ..] => (itself == byte).then_some(1),
    }
}

/// Whether the class in brackets at the beginning has a byte, and the length of the class. One without an end goes to the end of the pattern.
fn class(pattern: &[u8], byte: u8) -> (bool, usize) {
    let is_not = pattern.get(1) == Some(&b'^');
    let mut at = if is_not { 2 } else { 1 };
    let mut is_in = false;
    loop {
        match pattern[at..] {
            [] => break,
            [b']', ..] => {
                at += 1;
                break;
            }
            [b'\\', itself, ..] => {
                is_in |= itself == byte;
                at += 2;
            }
            [one, b'-', other, ..] => {
                is_in |= (one.min(other)..=one.max(other)).contains(&byte);
                at += 3;
            }
            [itself, ..] => {
                is_in |= itself == byte;
                at += 1;
            }
        }
    }
    (is_in != is_not, at)
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn many_stars_do_not_take_for_ever() {
        let pattern = b"a*".repeat(MAX_PATTERN_BYTES / 2);
        assert!(!matches(&[&pattern[..], b"b"].concat(), &[b'a'; 60_000]));
    }
}
