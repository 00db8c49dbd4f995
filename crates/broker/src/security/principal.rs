//! Principals, and their derivation from a certificate's subject: `ssl.principal.mapping.rules`, as
//! in Kafka.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use regex::Regex;

/// A principal in the form that ACLs use: `User:alice`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Principal(Arc<str>);

impl Principal {
    /// The principal of the user with this name.
    pub(crate) fn user(name: &str) -> Self {
        Self(format!("User:{name}").into())
    }

    /// The principal of all unauthenticated clients.
    pub(crate) fn anonymous() -> Self {
        Self::user("ANONYMOUS")
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The user's name, as used by quotas.
    pub(crate) fn name(&self) -> &str {
        self.0.strip_prefix("User:").unwrap_or(&self.0)
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Rules that derive a user name from a certificate's subject: `RULE:pattern/replacement/[LU]` and
/// `DEFAULT`, separated by commas. The first rule whose pattern matches the whole subject applies;
/// `DEFAULT` uses the subject unchanged.
#[derive(Clone, Debug)]
pub struct PrincipalRules {
    text: String,
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
enum Rule {
    Default,
    Replace { pattern: Regex, replacement: String, case: Option<Case> },
}

#[derive(Clone, Copy, Debug)]
enum Case {
    Lower,
    Upper,
}

/// Rules that cannot be parsed; the message says which.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidRules(String);

impl Default for PrincipalRules {
    fn default() -> Self {
        Self { text: "DEFAULT".into(), rules: vec![Rule::Default] }
    }
}

impl PartialEq for PrincipalRules {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for PrincipalRules {}

impl fmt::Display for PrincipalRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for PrincipalRules {
    type Err = InvalidRules;

    fn from_str(text: &str) -> Result<Self, InvalidRules> {
        let mut rules = Vec::new();
        let mut rest = text.trim_start();
        while !rest.is_empty() {
            let (rule, behind) = read_rule(rest).map_err(|why| {
                InvalidRules(format!(
                    "`{rest}` is not DEFAULT or RULE:pattern/replacement/[LU]: {why}"
                ))
            })?;
            rules.push(rule);
            rest = behind.trim_start();
            match rest.strip_prefix(',') {
                Some(next) => rest = next.trim_start(),
                None if rest.is_empty() => {}
                None => return Err(InvalidRules(format!("a comma is missing before `{rest}`"))),
            }
        }
        if rules.is_empty() {
            return Err(InvalidRules("no rule is given".into()));
        }
        Ok(Self { text: text.into(), rules })
    }
}

/// Parses the first rule in `text`, and returns the rest.
fn read_rule(text: &str) -> Result<(Rule, &str), String> {
    if let Some(rest) = text.strip_prefix("DEFAULT") {
        return Ok((Rule::Default, rest));
    }
    let rest = text.strip_prefix("RULE:").ok_or("it starts with neither")?;
    let (pattern, rest) = until_slash(rest).ok_or("the pattern is not terminated")?;
    let (replacement, rest) = until_slash(rest).ok_or("the replacement is not terminated")?;
    let (case, rest) = match rest.as_bytes().first() {
        Some(b'L') => (Some(Case::Lower), &rest[1..]),
        Some(b'U') => (Some(Case::Upper), &rest[1..]),
        _ => (None, rest),
    };
    // Compiled alone first: the text put around it must not complete it.
    Regex::new(pattern).map_err(|error| error.to_string())?;
    let pattern = Regex::new(&format!("^(?:{pattern})$")).map_err(|error| error.to_string())?;
    Ok((Rule::Replace { pattern, replacement: replacement.into(), case }, rest))
}

/// Splits at the next slash that is not escaped by a backslash.
fn until_slash(text: &str) -> Option<(&str, &str)> {
    let mut escaped = false;
    let end = text.char_indices().find(|&(_, c)| {
        let found = c == '/' && !escaped;
        escaped = c == '\\' && !escaped;
        found
    })?;
    Some((&text[..end.0], &text[end.0 + 1..]))
}

impl PrincipalRules {
    /// The user name for this subject in the form of RFC 2253; `None` if no rule matches.
    pub(crate) fn apply(&self, subject: &str) -> Option<String> {
        self.rules.iter().find_map(|rule| match rule {
            Rule::Default => Some(subject.to_owned()),
            Rule::Replace { pattern, replacement, case } => {
                let groups = pattern.captures(subject)?;
                let name = expand(replacement, &groups);
                Some(match case {
                    None => name,
                    Some(Case::Lower) => name.to_lowercase(),
                    Some(Case::Upper) => name.to_uppercase(),
                })
            }
        })
    }
}

/// Replaces `$1`, `$2` and so on by groups, as Java does: the number takes as many digits as there
/// are groups; a backslash makes the next character literal, and a `$` without a group is literal
/// too.
fn expand(replacement: &str, groups: &regex::Captures<'_>) -> String {
    let mut name = String::new();
    let mut chars = replacement.chars().peekable();
    let digit = |c: &char| c.to_digit(10).map(|digit| digit as usize);
    while let Some(c) = chars.next() {
        match c {
            '\\' => name.extend(chars.next()),
            '$' => match chars.peek().and_then(digit).filter(|&group| group < groups.len()) {
                None => name.push('$'),
                Some(mut group) => {
                    chars.next();
                    while let Some(longer) = chars.peek().and_then(digit).map(|d| group * 10 + d)
                        && longer < groups.len()
                    {
                        group = longer;
                        chars.next();
                    }
                    name.push_str(groups.get(group).map_or("", |found| found.as_str()));
                }
            },
            c => name.push(c),
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: &str = "CN=Duke,OU=ServiceUsers,O=Org,C=US";

    #[test]
    fn subjects_become_names_as_in_kafka() {
        for (rules, subject, name) in [
            ("DEFAULT", SUBJECT, Some(SUBJECT)),
            ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/", SUBJECT, Some("Duke")),
            ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L", SUBJECT, Some("duke")),
            (
                "RULE:CN=(.*?),OU=(.*?),O=(.*?),C=(.*?)/$1@$2/U , DEFAULT",
                SUBJECT,
                Some("DUKE@SERVICEUSERS"),
            ),
            ("RULE:^CN=(.*?),OU=Admins.*$/$1/,DEFAULT", SUBJECT, Some(SUBJECT)),
            ("RULE:^CN=(.*?),OU=Admins.*$/$1/", SUBJECT, None),
            // The whole subject has to match.
            ("RULE:CN=(.*?),OU=ServiceUsers/$1/", SUBJECT, None),
            ("RULE:^CN=a\\/b$/c\\/$9$1\\$/", "CN=a/b", Some("c/$9$1$")),
            ("RULE:^(C)N=(.*)$/$2$11/", "CN=x", Some("xC1")),
        ] {
            let rules: PrincipalRules = rules.parse().unwrap();
            assert_eq!(rules.apply(subject).as_deref(), name, "{rules}");
        }
    }

    #[test]
    fn a_name_may_look_like_a_principal() {
        let principal = Principal::user("User:bob");
        assert_eq!((principal.as_str(), principal.name()), ("User:User:bob", "User:bob"));
    }

    #[test]
    fn invalid_rules_are_refused() {
        for text in [
            "",
            "default",
            "RULE:a/b",
            "RULE:(/b/",
            "RULE:a/b/ DEFAULT",
            "DEFAULTS",
            "RULE:a/b/X",
            "RULE:a)|(?:b/c/",
        ] {
            assert!(text.parse::<PrincipalRules>().is_err(), "{text}");
        }
    }
}
