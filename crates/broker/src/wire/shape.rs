//! The shapes of the supported requests, and a check of a request's bytes against its shape.
//!
//! The decoders of `kafka-protocol` allocate an array for as many elements as the request
//! announces, before they read one. Therefore each request is walked once before it is decoded,
//! without allocating: every array's elements must exist, and their number is known before memory
//! is spent on them. Tests compare the shapes with the decoders.

mod cluster;
mod configs;
mod groups;
mod quotas;
mod records;
mod replicas;
mod security;
mod topics;
mod transactions;

pub(crate) use cluster::*;
pub(crate) use configs::*;
pub(crate) use groups::*;
pub(crate) use quotas::*;
pub(crate) use records::*;
pub(crate) use replicas::*;
pub(crate) use security::*;
pub(crate) use topics::*;
pub(crate) use transactions::*;

/// The structure of a request over all versions.
pub(crate) struct Shape {
    /// The first version with compact lengths and tagged fields.
    flexible: i16,
    body: Struct,
}

struct Struct {
    fields: &'static [Field],
    tagged: &'static [Tagged],
}

/// A field: its first and last version, and its kind.
struct Field(i16, i16, Kind);

/// A known tagged field: tag, first version, and kind. All others are skipped by their length.
struct Tagged(u32, i16, Kind);

enum Kind {
    Fixed(usize),
    /// A nullable or non-nullable string.
    Text,
    Bytes,
    /// An array of elements without a structure of their own.
    Values(&'static Kind),
    Structs(&'static Struct),
    Struct(&'static Struct),
    /// An optional structure; the byte before it says whether it is present.
    MaybeStruct(&'static Struct),
}

use Kind::{Bytes, Fixed, Structs, Text, Values};

const MAX: i16 = i16::MAX;

/// The longest string, as in Kafka: the greatest fixed-width length. Compact lengths could be
/// greater.
const MAX_TEXT_BYTES: usize = i16::MAX as usize;

const BOOL: Kind = Fixed(1);
const INT8: Kind = Fixed(1);
const INT16: Kind = Fixed(2);
const INT32: Kind = Fixed(4);
const INT64: Kind = Fixed(8);
const UUID: Kind = Fixed(16);

const fn plain(fields: &'static [Field]) -> Struct {
    Struct { fields, tagged: &[] }
}

const fn shape(flexible: i16, fields: &'static [Field]) -> Shape {
    Shape { flexible, body: plain(fields) }
}

/// Why a request's bytes do not match its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misshapen {
    #[error("it ends within a field")]
    Truncated,
    #[error("a length is negative")]
    NegativeLength,
    #[error("a length has more than five bytes")]
    LongLength,
    #[error("a string is longer than {} bytes", MAX_TEXT_BYTES)]
    LongText,
    #[error("a tagged field's content does not match its length")]
    TaggedLength,
    #[error("it has more than {0} array elements")]
    TooManyElements(usize),
}

impl Shape {
    /// Walks over a request: its header, then its body.
    ///
    /// # Returns
    /// The number of its array elements and tagged fields, for which decoding allocates.
    ///
    /// # Errors
    /// The first violation of the shape, or that `max_elements` is exceeded. Bytes after the end
    /// are accepted, as in Kafka.
    pub(crate) fn walk(
        &self,
        request: &[u8],
        version: i16,
        max_elements: usize,
    ) -> Result<usize, Misshapen> {
        self.walk_from(request, version, max_elements).map(|walk| walk.elements)
    }

    fn walk_from<'a>(
        &self,
        request: &'a [u8],
        version: i16,
        max_elements: usize,
    ) -> Result<Walk<'a>, Misshapen> {
        // API key, version, correlation ID, client ID; the latter has a fixed-width length in
        // flexible headers too.
        const HEADER: Struct = plain(&[Field(0, MAX, Fixed(8)), Field(0, MAX, Text)]);
        let mut walk = Walk { rest: request, version, flexible: false, elements: 0, max_elements };
        walk.structure(&HEADER)?;
        if version >= self.flexible {
            walk.flexible = true;
            walk.tagged(&[])?;
        }
        walk.structure(&self.body)?;
        Ok(walk)
    }
}

struct Walk<'a> {
    rest: &'a [u8],
    version: i16,
    flexible: bool,
    elements: usize,
    max_elements: usize,
}

impl Walk<'_> {
    fn skip(&mut self, bytes: usize) -> Result<(), Misshapen> {
        self.rest = self.rest.get(bytes..).ok_or(Misshapen::Truncated)?;
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Misshapen> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(Misshapen::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    fn unsigned_varint(&mut self) -> Result<u32, Misshapen> {
        let mut value = 0;
        for at in 0..5 {
            let [byte] = self.take()?;
            value |= u32::from(byte & 0x7f) << (at * 7);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Misshapen::LongLength)
    }

    /// Takes a compact length, which is stored plus one; 0 means null.
    fn compact_len(&mut self) -> Result<usize, Misshapen> {
        Ok(self.unsigned_varint()?.saturating_sub(1) as usize)
    }

    fn fixed_len(&mut self, len: i32) -> Result<usize, Misshapen> {
        match len {
            -1 => Ok(0),
            len => usize::try_from(len).map_err(|_| Misshapen::NegativeLength),
        }
    }

    fn count(&mut self, more: usize) -> Result<(), Misshapen> {
        self.elements = self.elements.saturating_add(more);
        if self.elements > self.max_elements {
            Err(Misshapen::TooManyElements(self.max_elements))
        } else {
            Ok(())
        }
    }

    fn structure(&mut self, shape: &Struct) -> Result<(), Misshapen> {
        for Field(from, to, kind) in shape.fields {
            if (*from..=*to).contains(&self.version) {
                self.value(kind)?;
            }
        }
        if self.flexible { self.tagged(shape.tagged) } else { Ok(()) }
    }

    fn tagged(&mut self, known: &[Tagged]) -> Result<(), Misshapen> {
        let count = self.unsigned_varint()?;
        self.count(count as usize)?;
        for _ in 0..count {
            let tag = self.unsigned_varint()?;
            let len_bytes = self.unsigned_varint()? as usize;
            match known.iter().find(|Tagged(known, from, _)| *known == tag && self.version >= *from)
            {
                None => self.skip(len_bytes)?,
                Some(Tagged(_, _, kind)) => {
                    let before = self.rest.len();
                    self.value(kind)?;
                    // The decoder reads the content regardless of the length, so they must agree.
                    if before - self.rest.len() != len_bytes {
                        return Err(Misshapen::TaggedLength);
                    }
                }
            }
        }
        Ok(())
    }

    fn value(&mut self, kind: &Kind) -> Result<(), Misshapen> {
        match kind {
            Fixed(bytes) => self.skip(*bytes),
            Text if self.flexible => match self.compact_len()? {
                len if len > MAX_TEXT_BYTES => Err(Misshapen::LongText),
                len => self.skip(len),
            },
            Bytes if self.flexible => {
                let len = self.compact_len()?;
                self.skip(len)
            }
            Text => {
                let len = i16::from_be_bytes(self.take()?);
                let len = self.fixed_len(len.into())?;
                self.skip(len)
            }
            Bytes => {
                let len = i32::from_be_bytes(self.take()?);
                let len = self.fixed_len(len)?;
                self.skip(len)
            }
            Values(element) => self.array(|walk| walk.value(element)),
            Structs(element) => self.array(|walk| walk.structure(element)),
            Kind::Struct(inner) => self.structure(inner),
            Kind::MaybeStruct(inner) => {
                // As in the decoder; clients send 1 or -1.
                let [is_there] = self.take()?;
                if is_there == 1 { self.structure(inner) } else { Ok(()) }
            }
        }
    }

    fn array(
        &mut self,
        mut element: impl FnMut(&mut Self) -> Result<(), Misshapen>,
    ) -> Result<(), Misshapen> {
        let len = if self.flexible {
            self.compact_len()?
        } else {
            let len = i32::from_be_bytes(self.take()?);
            self.fixed_len(len)?
        };
        // Every element takes at least a byte, so a false length is detected before the loop.
        if len > self.rest.len() {
            return Err(Misshapen::Truncated);
        }
        self.count(len)?;
        for _ in 0..len {
            element(self)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
