//! The subject of a certificate as text, in the form of RFC 2253 as Java writes it, which Kafka's
//! rules and ACLs expect.
//!
//! A certificate is parsed only after its chain was verified; nevertheless no input causes a panic.

use std::fmt::Write as _;

/// DER tags.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_ID: u8 = 0x06;
const EXPLICIT_VERSION: u8 = 0xa0;
const UTF8_STRING: u8 = 0x0c;
const PRINTABLE_STRING: u8 = 0x13;
const T61_STRING: u8 = 0x14;
const IA5_STRING: u8 = 0x16;
const GENERAL_STRING: u8 = 0x1b;
const UNIVERSAL_STRING: u8 = 0x1c;
const BMP_STRING: u8 = 0x1e;

/// The keywords of RFC 2253. Every other type is written as its number, and its value as
/// hexadecimal DER.
const KEYWORDS: [(&[u8], &str); 9] = [
    (&[0x55, 4, 3], "CN"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 9], "STREET"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (&[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25], "DC"),
    (&[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1], "UID"),
];

/// An element: its tag, its content, and all of its bytes.
struct Element<'a> {
    tag: u8,
    value: &'a [u8],
    whole: &'a [u8],
}

/// Reads DER elements from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn next(&mut self) -> Option<Element<'a>> {
        let all = self.0;
        let (&[tag, first], mut rest) = all.split_first_chunk()?;
        let len = match first {
            0..=0x7f => usize::from(first),
            // Up to four bytes of length; no certificate is longer.
            0x81..=0x84 => {
                let (digits, behind) = rest.split_at_checked(usize::from(first & 0x7f))?;
                rest = behind;
                digits.iter().fold(0, |len, &digit| len << 8 | usize::from(digit))
            }
            _ => return None,
        };
        let (value, rest) = rest.split_at_checked(len)?;
        self.0 = rest;
        Some(Element { tag, value, whole: &all[..all.len() - rest.len()] })
    }

    fn expect(&mut self, tag: u8) -> Option<Reader<'a>> {
        self.next().filter(|element| element.tag == tag).map(|element| Reader(element.value))
    }
}

/// Whether a DER certificate has version 3. Also true for bytes that are not a certificate, which
/// other checks report better.
pub(super) fn is_version_3(certificate: &[u8]) -> bool {
    let fields = |certificate| Reader(certificate).expect(SEQUENCE)?.expect(SEQUENCE);
    let Some(mut fields) = fields(certificate) else { return true };
    // Versions count from 0, which is omitted.
    let version = fields.expect(EXPLICIT_VERSION).and_then(|mut field| field.next());
    version.is_some_and(|version| version.value == [2])
}

/// The subject of a DER certificate; `None` if it is not a certificate.
pub(super) fn of(certificate: &[u8]) -> Option<String> {
    let mut certificate = Reader(certificate).expect(SEQUENCE)?;
    let mut fields = certificate.expect(SEQUENCE)?;
    if fields.0.first() == Some(&EXPLICIT_VERSION) {
        fields.next()?;
    }
    // Serial number, signature algorithm, issuer, validity.
    for _ in 0..4 {
        fields.next()?;
    }
    name(&mut fields.expect(SEQUENCE)?)
}

/// Formats a name; its last part comes first.
fn name(parts: &mut Reader<'_>) -> Option<String> {
    let mut names = Vec::new();
    while !parts.0.is_empty() {
        let mut set = parts.expect(SET)?;
        let mut attributes = Vec::new();
        while !set.0.is_empty() {
            let mut attribute = set.expect(SEQUENCE)?;
            let kind = attribute.expect(OBJECT_ID)?.0;
            attributes.push(self::attribute(kind, &attribute.next()?)?);
        }
        names.push(attributes.join("+"));
    }
    names.reverse();
    Some(names.join(","))
}

fn attribute(kind: &[u8], value: &Element<'_>) -> Option<String> {
    let keyword = KEYWORDS.iter().find(|(number, _)| *number == kind).map(|(_, keyword)| *keyword);
    match (keyword, text(value)) {
        (Some(keyword), Some(text)) => Some(format!("{keyword}={}", escape(&text))),
        (keyword, _) => {
            let mut out = keyword.map_or_else(|| dotted(kind), |keyword| Some(keyword.into()))?;
            out.push_str("=#");
            for byte in value.whole {
                let _ = write!(out, "{byte:02x}");
            }
            Some(out)
        }
    }
}

fn text(value: &Element<'_>) -> Option<String> {
    let bytes = value.value;
    match value.tag {
        UTF8_STRING | PRINTABLE_STRING | IA5_STRING | GENERAL_STRING => {
            Some(String::from_utf8_lossy(bytes).into_owned())
        }
        T61_STRING => Some(bytes.iter().map(|&byte| char::from(byte)).collect()),
        BMP_STRING => {
            let units = bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
            Some(String::from_utf16_lossy(&units.collect::<Vec<_>>()))
        }
        UNIVERSAL_STRING => bytes
            .chunks_exact(4)
            .map(|c| char::from_u32(u32::from_be_bytes([c[0], c[1], c[2], c[3]])))
            .collect(),
        _ => None,
    }
}

fn escape(text: &str) -> String {
    let lead = text.len() - text.trim_start_matches([' ', '\r']).len();
    let trail = text.trim_end_matches([' ', '\r']).len();
    let mut out = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        match c {
            '\0' => out.push_str("\\00"),
            ',' | '=' | '+' | '<' | '>' | '#' | ';' | '"' | '\\' => out.extend(['\\', c]),
            c if at < lead || at >= trail => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

/// Formats an object ID as dotted numbers. They have up to 128 bits: below 2.25 a UUID is one
/// number.
fn dotted(kind: &[u8]) -> Option<String> {
    let mut numbers = Vec::new();
    let mut number = 0_u128;
    for &byte in kind {
        number = number.checked_mul(128)? + u128::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            numbers.push(number);
            number = 0;
        }
    }
    let (&first, rest) = numbers.split_first()?;
    let root = (first / 40).min(2);
    let mut out = format!("{root}.{}", first - root * 40);
    for number in rest {
        let _ = write!(out, ".{number}");
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};

    use super::*;

    fn certificate(parts: Vec<(DnType, &str)>) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in parts {
            params.distinguished_name.push(kind, value);
        }
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().to_vec()
    }

    #[test]
    fn a_subject_is_formatted_as_by_java() {
        let der = certificate(vec![
            (DnType::CountryName, "DE"),
            (DnType::OrganizationName, "A, B & \"C\" #1"),
            (DnType::OrganizationalUnitName, " x=y\r"),
            (DnType::CommonName, "Jürgen"),
            (DnType::CustomDnType(vec![1, 2, 840, 113_549, 1, 9, 1]), "a@b"),
        ]);
        assert_eq!(
            of(&der).unwrap(),
            "1.2.840.113549.1.9.1=#0c03614062,CN=Jürgen,\
             OU=\\ x\\=y\\\r,O=A\\, B & \\\"C\\\" \\#1,C=DE"
        );
        assert_eq!(of(&certificate(vec![])).unwrap(), "");
    }

    #[test]
    fn an_attribute_type_may_be_a_uuid() {
        let mut kind = vec![105, 0x83];
        kind.extend([0xff; 17]);
        kind.push(0x7f);
        assert_eq!(dotted(&kind).unwrap(), format!("2.25.{}", u128::MAX));
        // A larger number is not misread.
        kind[1] = 0x87;
        assert_eq!(dotted(&kind), None);
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(at in 0_usize..300, byte: u8, cut in 0_usize..400) {
            let name = vec![(DnType::CommonName, "name"), (DnType::CountryName, "DE")];
            let mut der = certificate(name);
            let at = at.min(der.len() - 1);
            der[at] = byte;
            der.truncate(cut);
            let _ = of(&der);
        }
    }
}
