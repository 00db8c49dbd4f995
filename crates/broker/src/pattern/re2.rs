//! Translates the syntax of RE2/J, in which Kafka's clients write patterns, into that of the crate
//! `regex`.
//!
//! The two differ in more than missing features: `\<` is a character in RE2/J and the start of a
//! word here, `[a&&b]` is a class of two characters there and an empty one here, `a**` is an error
//! there. So each element is read by RE2/J's rules (`Parser.java`), and written in a form with one
//! meaning here. Expressions that RE2/J refuses are refused.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::iter::Peekable;
use std::str::Chars;

/// The greatest repetition count.
const MAX_REPETITIONS: u32 = 1000;

/// The greatest number of `\p` and `\P` in an expression. Each is a list of hundreds of ranges,
/// which the parser sorts again whenever one is added to a class, so thousands would take seconds.
/// RE2/J has no limit.
const MAX_UNICODE_CLASSES: u32 = 16;

/// A class without characters.
const NOTHING: &str = r"[^\x{0}-\x{10FFFF}]";
/// Any character including line breaks.
const ANY: &str = r"[\x{0}-\x{10FFFF}]";

/// The general categories that RE2/J supports, by the names that it accepts.
const CATEGORIES: &str = "C Cc Cf Co Cs L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc \
    Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl Zp Zs";

/// The scripts that RE2/J supports, by the names that it accepts.
const SCRIPTS: &str = "Arabic Armenian Avestan Balinese Bamum Batak Bengali Bopomofo Brahmi \
    Braille Buginese Buhid Canadian_Aboriginal Carian Cham Cherokee Common Coptic Cuneiform \
    Cypriot Cyrillic Deseret Devanagari Egyptian_Hieroglyphs Ethiopic Georgian Glagolitic Gothic \
    Greek Gujarati Gurmukhi Han Hangul Hanunoo Hebrew Hiragana Imperial_Aramaic Inherited \
    Inscriptional_Pahlavi Inscriptional_Parthian Javanese Kaithi Kannada Katakana Kayah_Li \
    Kharoshthi Khmer Lao Latin Lepcha Limbu Linear_B Lisu Lycian Lydian Malayalam Mandaic \
    Meetei_Mayek Mongolian Myanmar New_Tai_Lue Nko Ogham Ol_Chiki Old_Italic Old_Persian \
    Old_South_Arabian Old_Turkic Oriya Osmanya Phags_Pa Phoenician Rejang Runic Samaritan \
    Saurashtra Shavian Sinhala Sundanese Syloti_Nagri Syriac Tagalog Tagbanwa Tai_Le Tai_Tham \
    Tai_Viet Tamil Telugu Thaana Thai Tibetan Tifinagh Ugaritic Unknown Vai Yi";

/// The POSIX classes, which have the same names and ASCII characters in both.
const POSIX: &str =
    "alnum alpha ascii blank cntrl digit graph lower print punct space upper word xdigit";

/// Translates an expression.
///
/// # Errors
/// Why RE2/J refuses it. Unbalanced parentheses are left to the parser of `regex`.
pub(super) fn translate(regex: &str) -> Result<String, String> {
    let mut translation = Translation {
        rest: regex.chars().peekable(),
        out: String::new(),
        flags: String::new(),
        is_operand: false,
        is_repetition: false,
        names: BTreeSet::new(),
        has_no_posix_class: false,
        unicode_classes: 0,
    };
    while translation.rest.peek().is_some() {
        translation.element()?;
    }
    Ok(translation.out + &translation.flags)
}

struct Translation<'a> {
    rest: Peekable<Chars<'a>>,
    out: String,
    /// Flag groups after the last operand: a repetition after them applies to that operand.
    flags: String,
    /// Whether the last element can be repeated.
    is_operand: bool,
    /// Whether the last element is a repetition.
    is_repetition: bool,
    names: BTreeSet<String>,
    /// Whether the rest contains no `:]`. Avoids a search at each bracket.
    has_no_posix_class: bool,
    unicode_classes: u32,
}

impl Translation<'_> {
    fn element(&mut self) -> Result<(), String> {
        let was_repetition = std::mem::take(&mut self.is_repetition);
        let Some(c) = self.rest.next() else { return Ok(()) };
        match c {
            '(' if self.rest.peek() == Some(&'?') => self.perl_group()?,
            '(' => self.put("(?:", false),
            ')' => self.put(")", true),
            '|' => self.put("|", false),
            '^' | '$' | '.' => self.put(c.encode_utf8(&mut [0; 4]), true),
            '[' => {
                let class = self.class()?;
                self.put(&class, true);
            }
            '*' | '+' | '?' => self.repetition(&c.to_string(), was_repetition)?,
            '{' => match self.counts()? {
                Some(counts) => self.repetition(&counts, was_repetition)?,
                None => self.literal('{'),
            },
            '\\' => self.escape()?,
            other => self.literal(other),
        }
        Ok(())
    }

    fn put(&mut self, element: &str, is_operand: bool) {
        self.out.push_str(&std::mem::take(&mut self.flags));
        self.out.push_str(element);
        self.is_operand = is_operand;
    }

    fn literal(&mut self, c: char) {
        self.put(&literal(c), true);
    }

    fn repetition(&mut self, operator: &str, was_repetition: bool) -> Result<(), String> {
        let is_lazy = self.rest.next_if_eq(&'?').is_some();
        if was_repetition {
            return Err(format!("invalid nested repetition operator: `{operator}`"));
        }
        if !self.is_operand {
            return Err(format!("missing argument to repetition operator: `{operator}`"));
        }
        // Before the flags, which are not an operand.
        self.out.push_str(operator);
        self.out.push_str(if is_lazy { "?" } else { "" });
        self.is_repetition = true;
        Ok(())
    }

    /// Reads `{2}`, `{2,}` or `{2,3}` after the brace. `None` if it is not a repetition; then
    /// nothing has been consumed.
    fn counts(&mut self) -> Result<Option<String>, String> {
        let mut ahead = self.rest.clone();
        let number = |ahead: &mut Peekable<Chars<'_>>| {
            let digits: String =
                std::iter::from_fn(|| ahead.next_if(char::is_ascii_digit)).collect();
            let is_number = !digits.is_empty() && (digits.len() == 1 || !digits.starts_with('0'));
            is_number.then(|| digits.parse().unwrap_or(u32::MAX))
        };
        let Some(min) = number(&mut ahead) else { return Ok(None) };
        let max = match ahead.next_if_eq(&',') {
            None => Some(min),
            Some(_) if ahead.peek() == Some(&'}') => None,
            Some(_) => match number(&mut ahead) {
                Some(max) => Some(max),
                None => return Ok(None),
            },
        };
        if ahead.next() != Some('}') {
            return Ok(None);
        }
        if min > MAX_REPETITIONS || max.is_some_and(|max| max > MAX_REPETITIONS || max < min) {
            return Err(format!("invalid repeat count: at most {MAX_REPETITIONS}, in order"));
        }
        self.rest = ahead;
        Ok(Some(match max {
            Some(max) => format!("{{{min},{max}}}"),
            None => format!("{{{min},}}"),
        }))
    }

    /// Reads an element that begins with `(?`: a group with or without a name or flags, or flags.
    fn perl_group(&mut self) -> Result<(), String> {
        self.rest.next();
        let mut ahead = self.rest.clone();
        ahead.next_if_eq(&'P');
        if ahead.next() == Some('<') {
            let name: String = ahead.by_ref().take_while(|c| *c != '>').collect();
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let is_closed = self.rest.clone().any(|c| c == '>');
            if !is_closed || name.is_empty() || !name.chars().all(is_word) {
                return Err(format!("invalid named capture: `(?<{name}`"));
            }
            if !self.names.insert(name.clone()) {
                return Err(format!("duplicate capture group name: `{name}`"));
            }
            self.rest = ahead;
            self.put("(?:", false);
            return Ok(());
        }
        let (mut on, mut off) = (BTreeSet::new(), BTreeSet::new());
        let mut is_negative = false;
        loop {
            match self.rest.next() {
                Some(flag @ ('i' | 'm' | 's' | 'U')) if is_negative => drop(off.insert(flag)),
                Some(flag @ ('i' | 'm' | 's' | 'U')) => drop(on.insert(flag)),
                Some('-') if !is_negative => is_negative = true,
                Some(end @ (':' | ')')) if !is_negative || !off.is_empty() => {
                    let on: String = on.difference(&off).collect();
                    let off: String = off.into_iter().collect();
                    let minus = if off.is_empty() { "" } else { "-" };
                    match end {
                        ':' => self.put(&format!("(?{on}{minus}{off}:"), false),
                        _ if on.is_empty() && off.is_empty() => {}
                        _ => drop(write!(self.flags, "(?{on}{minus}{off})")),
                    }
                    return Ok(());
                }
                _ => return Err("invalid or unsupported Perl syntax after `(?`".into()),
            }
        }
    }

    fn escape(&mut self) -> Result<(), String> {
        match self.rest.peek() {
            // `\w` is ASCII in RE2/J, and so is the word boundary of `\b`.
            Some('b') => self.put(r"(?-u:\b)", true),
            Some('B') => self.put(r"(?-u:\B)", true),
            Some('A') => self.put(r"\A", true),
            Some('z') => self.put(r"\z", true),
            Some('Q') => {
                self.rest.next();
                while let Some(c) = self.rest.next() {
                    if c == '\\' && self.rest.next_if_eq(&'E').is_some() {
                        break;
                    }
                    self.literal(c);
                }
                return Ok(());
            }
            _ => {
                match self.escaped_class()? {
                    Some(class) => self.put(&format!("[{class}]"), true),
                    None => match self.escaped_character()? {
                        Some(c) => self.literal(c),
                        None => self.put(NOTHING, true),
                    },
                }
                return Ok(());
            }
        }
        self.rest.next();
        Ok(())
    }

    /// Reads a class after a backslash, as an element of a class. `None` if there is none; then
    /// nothing has been consumed.
    fn escaped_class(&mut self) -> Result<Option<String>, String> {
        let class = match self.rest.peek() {
            Some('d') => "0-9",
            Some('D') => "[^0-9]",
            Some('s') => r"\t\n\f\r\x{20}",
            Some('S') => r"[^\t\n\f\r\x{20}]",
            Some('w') => "0-9A-Za-z_",
            Some('W') => "[^0-9A-Za-z_]",
            Some('p' | 'P') => return self.unicode_class().map(Some),
            _ => return Ok(None),
        };
        self.rest.next();
        Ok(Some(class.into()))
    }

    fn unicode_class(&mut self) -> Result<String, String> {
        self.unicode_classes += 1;
        if self.unicode_classes > MAX_UNICODE_CLASSES {
            return Err(format!(
                r"too many Unicode classes (`\p`, `\P`): at most {MAX_UNICODE_CLASSES} are allowed"
            ));
        }
        let mut is_negative = self.rest.next() == Some('P');
        let mut name = match self.rest.next() {
            Some('{') => {
                let mut name = String::new();
                loop {
                    match self.rest.next() {
                        Some('}') => break name,
                        Some(c) => name.push(c),
                        None => return Err("invalid character class range: no `}`".into()),
                    }
                }
            }
            Some(c) => c.to_string(),
            None => return Err(r"invalid character class range: `\p` without a name".into()),
        };
        if name.starts_with('^') {
            is_negative = !is_negative;
            name.remove(0);
        }
        let knows = |names: &str| names.split_whitespace().any(|known| known == name);
        let class = match name.as_str() {
            "Any" => ANY.to_owned(),
            // Surrogates do not occur in text; for characters without a script RE2/J has no table.
            "Cs" | "Unknown" => NOTHING.to_owned(),
            // Without unassigned code points.
            "C" => r"[\p{Cc}\p{Cf}\p{Co}]".to_owned(),
            _ if knows(CATEGORIES) => format!(r"\p{{gc={name}}}"),
            _ if knows(SCRIPTS) => format!(r"\p{{sc={name}}}"),
            _ => return Err(format!("invalid character class range: `{name}`")),
        };
        Ok(if is_negative { format!("[^{class}]") } else { class })
    }

    /// Reads the character after a backslash; `None` for a surrogate, which does not occur in text.
    fn escaped_character(&mut self) -> Result<Option<char>, String> {
        Ok(char::from_u32(self.escaped_code()?))
    }

    fn escaped_code(&mut self) -> Result<u32, String> {
        let c = self.rest.next().ok_or(r"trailing backslash at end of expression: `\`")?;
        let invalid = || Err(format!("invalid escape sequence: `\\{c}`"));
        let code = match c {
            '1'..='7' if !matches!(self.rest.peek(), Some('0'..='7')) => return invalid(),
            '0'..='7' => {
                let mut code = c.to_digit(8).unwrap_or_default();
                for _ in 0..2 {
                    let Some(digit) = self.rest.peek().and_then(|c| c.to_digit(8)) else { break };
                    code = code * 8 + digit;
                    self.rest.next();
                }
                code
            }
            'x' if self.rest.next_if_eq(&'{').is_some() => {
                let mut code: Option<u32> = None;
                loop {
                    match (self.rest.next(), code) {
                        (Some('}'), Some(code)) => break code,
                        (Some(c), _) if c.is_ascii_hexdigit() => {
                            let code = code.get_or_insert(0);
                            *code = *code * 16 + c.to_digit(16).unwrap_or_default();
                            if *code > u32::from(char::MAX) {
                                return invalid();
                            }
                        }
                        _ => return invalid(),
                    }
                }
            }
            'x' => {
                let mut digit = || self.rest.next().and_then(|c| c.to_digit(16));
                let (Some(high), Some(low)) = (digit(), digit()) else { return invalid() };
                high * 16 + low
            }
            'a' => 7,
            't' => 9,
            'n' => 10,
            'v' => 11,
            'f' => 12,
            'r' => 13,
            c if c.is_ascii_alphanumeric() => return invalid(),
            c => u32::from(c),
        };
        Ok(code)
    }

    /// Reads a class after its opening bracket.
    fn class(&mut self) -> Result<String, String> {
        let is_negative = self.rest.next_if_eq(&'^').is_some();
        let mut items = String::new();
        let mut is_first = true;
        while is_first || self.rest.peek() != Some(&']') {
            is_first = false;
            if self.rest.peek() == Some(&'[')
                && let Some(class) = self.posix_class()?
            {
                items.push_str(&class);
                continue;
            }
            if self.rest.peek() == Some(&'\\') {
                let mut ahead = self.rest.clone();
                ahead.next();
                if matches!(ahead.peek(), Some('d' | 'D' | 's' | 'S' | 'w' | 'W' | 'p' | 'P')) {
                    self.rest = ahead;
                    items.push_str(&self.escaped_class()?.unwrap_or_default());
                    continue;
                }
            }
            let low = self.class_code()?;
            let mut high = low;
            if self.rest.peek() == Some(&'-') {
                let mut ahead = self.rest.clone();
                ahead.next();
                if ahead.peek() != Some(&']') {
                    self.rest = ahead;
                    high = self.class_code()?;
                }
            }
            if high < low {
                return Err("invalid character class range: its end is before its start".into());
            }
            // Surrogates do not occur in text.
            let low = char::from_u32(low).unwrap_or('\u{e000}');
            let high = char::from_u32(high).unwrap_or('\u{d7ff}');
            if low <= high {
                let _ = write!(items, "{}-{}", literal(low), literal(high));
            }
        }
        self.rest.next();
        Ok(match (is_negative, items.is_empty()) {
            (false, true) => NOTHING.into(),
            (true, true) => ANY.into(),
            (false, false) => format!("[{items}]"),
            (true, false) => format!("[^{items}]"),
        })
    }

    fn class_code(&mut self) -> Result<u32, String> {
        match self.rest.next() {
            Some('\\') => self.escaped_code(),
            Some(c) => Ok(c.into()),
            None => Err("missing closing ]".into()),
        }
    }

    /// Reads `[:alpha:]` or `[:^alpha:]` within a class. `None` if there is none; then nothing has
    /// been consumed.
    fn posix_class(&mut self) -> Result<Option<String>, String> {
        let mut ahead = self.rest.clone().skip(1);
        if self.has_no_posix_class || ahead.next() != Some(':') {
            return Ok(None);
        }
        let mut name = String::new();
        let mut is_closed = false;
        for c in ahead {
            if c == ']' && name.ends_with(':') {
                name.pop();
                is_closed = true;
                break;
            }
            name.push(c);
        }
        if !is_closed {
            self.has_no_posix_class = true;
            return Ok(None);
        }
        let positive = name.strip_prefix('^').unwrap_or(&name);
        if !POSIX.split_whitespace().any(|known| known == positive) {
            return Err(format!("invalid character class range: `[:{name}:]`"));
        }
        let class = format!("[:{name}:]");
        for _ in class.chars() {
            self.rest.next();
        }
        Ok(Some(class))
    }
}

/// Writes a literal character, valid inside and outside of a class.
fn literal(c: char) -> String {
    match c {
        '0'..='9' | 'A'..='Z' | 'a'..='z' => c.into(),
        c => format!(r"\x{{{:X}}}", u32::from(c)),
    }
}
