//! Property files in the format of `java.util.Properties`, in UTF-8.

use std::collections::BTreeMap;

/// The blanks of the format.
const BLANK: [char; 3] = [' ', '\t', '\x0c'];

/// Parses names and values, with blanks around values removed as Kafka does.
///
/// # Errors
/// An invalid escape. The error does not show the value.
pub(super) fn parse(text: &str) -> Result<BTreeMap<String, String>, String> {
    let pair = |line: String| -> Result<_, String> {
        let (name, value) = split(&line);
        let name = unescape(name).ok_or("a name contains an invalid \\uXXXX")?;
        let value = unescape(value).ok_or_else(|| format!("{name} contains an invalid \\uXXXX"))?;
        Ok((name, value.trim_matches(|c| c <= ' ').to_owned()))
    };
    lines(text).into_iter().map(pair).collect()
}

/// The lines without comments. A line with an odd number of backslashes at its end continues on the
/// next one, unless it is a comment.
fn lines(text: &str) -> Vec<String> {
    let mut lines = text.lines().map(|line| line.trim_start_matches(BLANK));
    let mut whole = Vec::new();
    while let Some(first) = lines.next() {
        if first.is_empty() || first.starts_with(['#', '!']) {
            continue;
        }
        let mut line = first.to_owned();
        while (line.len() - line.trim_end_matches('\\').len()) % 2 == 1 {
            line.pop();
            let Some(next) = lines.next() else { break };
            line.push_str(next);
        }
        whole.push(line);
    }
    whole
}

/// Splits a line at the first `=`, `:` or blank that is not escaped by a backslash.
fn split(line: &str) -> (&str, &str) {
    let mut escaped = false;
    let end = line.find(|c: char| {
        let found = !escaped && (BLANK.contains(&c) || c == '=' || c == ':');
        escaped = c == '\\' && !escaped;
        found
    });
    let (name, rest) = line.split_at(end.unwrap_or(line.len()));
    let rest = rest.trim_start_matches(BLANK);
    (name, rest.strip_prefix(['=', ':']).unwrap_or(rest).trim_start_matches(BLANK))
}

/// Resolves `\t`, `\n`, `\r`, `\f` and `\uXXXX`, a unit of UTF-16; in front of any other character
/// a backslash is dropped.
fn unescape(text: &str) -> Option<String> {
    let mut units = Vec::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let c = match c {
            '\\' => match chars.next() {
                None => break,
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('f') => '\x0c',
                Some('u') => {
                    let (digits, rest) = chars.as_str().split_at_checked(4)?;
                    let is_number = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
                    units.push(u16::from_str_radix(digits, 16).ok().filter(|_| is_number)?);
                    chars = rest.chars();
                    continue;
                }
                Some(c) => c,
            },
            c => c,
        };
        units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
    }
    String::from_utf16(&units).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> (String, String) {
        let mut all = parse(text).unwrap();
        assert_eq!(all.len(), 1, "{all:?}");
        all.pop_first().unwrap()
    }

    #[test]
    fn lines_are_parsed_as_by_java() {
        for (text, name, value) in [
            ("a=b", "a", "b"),
            ("  a : b c  ", "a", "b c"),
            ("\ta\x0cb=c", "a", "b=c"),
            ("a==b", "a", "=b"),
            ("a", "a", ""),
            ("a=b\\\n   c\\\r\n\td", "a", "bcd"),
            ("a=b\\\n# c", "a", "b# c"),
            ("a=b\\\\\n!c", "a", "b\\"),
            ("# a comment is at its end with its line \\\na=b", "a", "b"),
            ("\n  ! so is this one\\\n\na=b\\", "a", "b"),
        ] {
            assert_eq!(one(text), (name.to_owned(), value.to_owned()), "{text:?}");
        }
    }

    #[test]
    fn escapes_are_resolved_as_by_java() {
        for (text, name, value) in [
            (r"a=\\", "a", "\\"),
            (r"a=b\\\\c\d\=\:\#\!", "a", "b\\\\cd=:#!"),
            (r"a=b\tc\nd\re\ff", "a", "b\tc\nd\re\x0cf"),
            (r"a\ b\=c\:d\\=e", "a b=c:d\\", "e"),
            (r"a=\u00fc\uD83D\ude00ü\u005Cn", "a", "ü😀ü\\n"),
        ] {
            assert_eq!(one(text), (name.to_owned(), value.to_owned()), "{text:?}");
        }
        for text in [r"a=\u", r"a=\u12", r"a=\u12g4", r"a=\u+123", r"a=\u00ü", r"a=\ud83d"] {
            assert_eq!(parse(text), Err("a contains an invalid \\uXXXX".into()), "{text}");
        }
    }
}
