//! Sizes and durations as written in options: `512MiB`, `60s`.
//!
//! Parsing is strict: a unit is either exact or an error, and what is printed can be parsed again.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use alluvium_device::ByteSize;
use serde::de::{Deserialize, Deserializer, Visitor};

/// A number of bytes: `4096`, `64KiB`, `512MiB`, `2GiB`, `1TiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size {
    pub(crate) bytes: u64,
}

/// A length of time: `500ms`, `60s`, `5m`, `1h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span(pub(crate) Duration);

/// Units by falling size, so that printing takes the first that divides.
const SPAN_UNITS_MS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl Size {
    pub(crate) const fn kib(n: u64) -> Self {
        Self { bytes: n << 10 }
    }
    pub(crate) const fn mib(n: u64) -> Self {
        Self { bytes: n << 20 }
    }
    pub(crate) const fn gib(n: u64) -> Self {
        Self { bytes: n << 30 }
    }
    pub(crate) const fn tib(n: u64) -> Self {
        Self { bytes: n << 40 }
    }

    /// The number of bytes of memory.
    pub(crate) fn in_memory(self) -> usize {
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }

    /// Whether a write-ahead log could have this size: a multiple of its page size.
    pub(crate) const fn is_whole_pages(self) -> bool {
        self.bytes.is_multiple_of(alluvium_device::PAGE_BYTES as u64)
    }
}

/// Splits `512MiB` into the number and the unit.
fn number_and_unit(text: &str) -> Result<(u64, &str), String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(format!("`{text}` does not start with a whole number"));
    }
    let number = number.parse().map_err(|_| format!("`{text}` is too large"))?;
    Ok((number, unit.trim_start()))
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = number_and_unit(text.trim())?;
        let unit = if unit.is_empty() { "B" } else { unit };
        let Some((_, factor)) = ByteSize::UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(format!(
                "`{unit}` is not a unit of size; write B, KiB, MiB, GiB or TiB, as in 512MiB"
            ));
        };
        let bytes = number.checked_mul(*factor).ok_or_else(|| format!("`{text}` is too large"))?;
        Ok(Self { bytes })
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = number_and_unit(text.trim())?;
        let Some((_, factor)) = SPAN_UNITS_MS.iter().find(|(name, _)| *name == unit) else {
            return Err(format!(
                "`{text}` needs a unit of time: ms, s, m or h, as in 500ms or 60s"
            ));
        };
        let ms = number.checked_mul(*factor).ok_or_else(|| format!("`{text}` is too large"))?;
        Ok(Self(Duration::from_millis(ms)))
    }
}

/// A parser of sizes, or of lengths of time, within bounds.
pub(crate) fn within<T>(
    bounds: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: FromStr<Err = String> + PartialOrd + fmt::Display + Clone + Send + Sync + 'static,
{
    move |text| match text.parse()? {
        value if bounds.contains(&value) => Ok(value),
        _ => Err(format!("it must be from {} to {}", bounds.start(), bounds.end())),
    }
}

impl fmt::Display for Size {
    /// Exact: uses the largest unit that divides.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ByteSize(self.bytes).fmt(f)
    }
}

impl fmt::Display for Span {
    /// Exact: uses the largest unit that divides.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        let (unit, factor) = SPAN_UNITS_MS
            .iter()
            .find(|(_, factor)| ms >= u128::from(*factor) && ms.is_multiple_of(u128::from(*factor)))
            .unwrap_or(&("ms", 1));
        write!(f, "{}{unit}", ms / u128::from(*factor))
    }
}

/// Formats bytes with one decimal: `1.9 GiB`. Not exact, and not parsed again.
pub(crate) fn about(bytes: u64) -> String {
    match ByteSize::UNITS.iter().find(|(_, factor)| bytes >= *factor) {
        Some((unit, factor)) if *factor > 1 => {
            format!("{:.1} {unit}", bytes as f64 / *factor as f64)
        }
        _ => format!("{bytes} B"),
    }
}

/// Formats usage as in `81.0 MiB of 2.0 GiB (4.0%)`.
pub(crate) fn usage(used_bytes: u64, of_bytes: u64) -> String {
    let percent = used_bytes as f64 * 100.0 / of_bytes.max(1) as f64;
    format!("{} of {} ({percent:.1}%)", about(used_bytes), about(of_bytes))
}

/// Formats a count as in `1 batch`, `2 batches`.
pub(crate) fn counted(n: impl Into<u64>, one: &str, many: &str) -> String {
    let n = n.into();
    format!("{n} {}", if n == 1 { one } else { many })
}

/// In a configuration file a size is a string with a unit, or a plain number of bytes.
impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SizeVisitor;
        impl Visitor<'_> for SizeVisitor {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as \"512MiB\", or a number of bytes")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Size, E> {
                let bytes =
                    u64::try_from(bytes).map_err(|_| E::custom("a size must not be negative"))?;
                Ok(Size { bytes })
            }
            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size { bytes })
            }
        }
        deserializer.deserialize_any(SizeVisitor)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Result<u64, String> {
        text.parse::<Size>().map(|size| size.bytes)
    }

    fn span(text: &str) -> Result<Duration, String> {
        text.parse::<Span>().map(|span| span.0)
    }

    #[test]
    fn sizes_are_parsed_exactly() {
        assert_eq!(size("0"), Ok(0));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("17B"), Ok(17));
        assert_eq!(size("64KiB"), Ok(65_536));
        assert_eq!(size(" 512 MiB "), Ok(536_870_912));
        assert_eq!(size("2GiB"), Ok(2_147_483_648));
        assert_eq!(size("1TiB"), Ok(1_099_511_627_776));
        assert_eq!(size("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn invalid_sizes_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "whole number"),
            ("MiB", "whole number"),
            ("-1", "whole number"),
            ("1.5GiB", "not a unit"),
            ("2GB", "write B, KiB, MiB"),
            ("2gib", "not a unit"),
            ("18446744073709551616", "too large"),
            ("16777216TiB", "too large"),
        ] {
            let error = size(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn durations_need_their_unit() {
        assert_eq!(span("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(span("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(span("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(span("1h"), Ok(Duration::from_secs(3600)));
        for text in ["60", "", "s", "5min", "1.5s", "18446744073709551615h"] {
            assert!(span(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bounds_of_options_are_part_of_them_and_of_the_error() {
        let parse = within(Size::mib(1)..=Size::gib(4));
        assert_eq!((parse("1MiB"), parse("4GiB")), (Ok(Size::mib(1)), Ok(Size::gib(4))));
        for text in ["0", "1048575", "4294967297"] {
            assert_eq!(parse(text), Err("it must be from 1MiB to 4GiB".to_owned()), "{text}");
        }
        let parse = within(Span(Duration::from_secs(1))..=Span(Duration::from_secs(3600)));
        assert_eq!(parse("1h"), Ok(Span(Duration::from_secs(3600))));
        for text in ["0s", "999ms", "2h"] {
            assert_eq!(parse(text), Err("it must be from 1s to 1h".to_owned()), "{text}");
        }
    }

    #[test]
    fn printed_units_can_be_parsed_again() {
        for bytes in [0, 1, 1023, 1024, 1025, 3 << 20, 2 << 30, 5 << 40, u64::MAX] {
            assert_eq!(size(&Size { bytes }.to_string()), Ok(bytes));
        }
        assert_eq!(Size::gib(2).to_string(), "2GiB");
        for ms in [0, 1, 999, 1000, 60_000, 61_000, 7_200_000] {
            let duration = Duration::from_millis(ms);
            assert_eq!(span(&Span(duration).to_string()), Ok(duration));
        }
        assert_eq!(Span(Duration::from_secs(60)).to_string(), "1m");
    }

    #[test]
    fn approximate_sizes_have_one_decimal() {
        assert_eq!(about(0), "0 B");
        assert_eq!(about(1023), "1023 B");
        assert_eq!(about(1536), "1.5 KiB");
        assert_eq!(about(2 << 30), "2.0 GiB");
    }

    #[test]
    fn usage_includes_the_percentage() {
        assert_eq!(usage(1 << 20, 4 << 20), "1.0 MiB of 4.0 MiB (25.0%)");
    }

    #[test]
    fn one_takes_the_singular() {
        let batches = |n: u64| counted(n, "batch", "batches");
        assert_eq!([0, 1, 2].map(batches), ["0 batches", "1 batch", "2 batches"]);
    }
}
