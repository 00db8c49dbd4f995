//! The shapes of the requests that are served, and a check of a request's bytes against its shape.
//!
//! The decoders of `kafka-protocol` allocate an array for as many elements as the request claims to
//! have, before they have read one. So before a request is decoded, it is walked once without
//! allocating anything: every array's elements must really be there, and their number is known
//! before memory is spent on them. Tests hold the shapes against the decoders.

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

/// A request's structure over all versions.
pub(crate) struct Shape {
    /// The first version with compact lengths and tagged fields.
    flexible: i16,
    body: Struct,
}

struct Struct {
    fields: &'static [Field],
    tagged: &'static [Tagged],
}

/// A field, and the versions that have it.
struct Field(i16, i16, Kind);

/// A tagged field that is known, from this version on. All others are skipped by their length.
struct Tagged(u32, i16, Kind);

enum Kind {
    Fixed(usize),
    /// A string, nullable or not.
    Text,
    Bytes,
    /// Elements without a structure of their own.
    Values(&'static Kind),
    Structs(&'static Struct),
    Struct(&'static Struct),
    /// A structure, or none, as the byte before it says.
    MaybeStruct(&'static Struct),
}

use Kind::{Bytes, Fixed, Structs, Text, Values};

const MAX: i16 = i16::MAX;

/// The longest string, as in Kafka: what a fixed-width length can say. Compact lengths could say
/// more.
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

/// A request's bytes do not have the shape of such a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Misshapen {
    #[error("it ends in the middle of a field")]
    Truncated,
    #[error("a length is negative")]
    NegativeLength,
    #[error("a length takes more than five bytes")]
    LongLength,
    #[error("a string is longer than {} bytes", MAX_TEXT_BYTES)]
    LongText,
    #[error("a tagged field's content and length differ")]
    TaggedLength,
    #[error("it has more than {0} array elements")]
    TooManyElements(usize),
}

impl Shape {
    /// Walk over a request: its header, then its body.
    ///
    /// # Returns
    /// The number of array elements and tagged fields in it: what decoding will allocate for.
    ///
    /// # Errors
    /// The first place where the bytes and the shape part, or where `max_elements` is exceeded.
    /// Bytes behind the end are no error, as in Kafka.
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
        // API key, version, correlation id, client id; the last keeps its fixed-width length in
        // flexible headers.
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

    /// A compact length is stored plus one, 0 means null.
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
                    // The decoder reads the content without regard to the length, so they must
                    // agree.
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
                // As the decoder has it; clients send 1 or -1.
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
        // Every element takes at least a byte, so a lie is seen before the loop that it would
        // prolong.
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
