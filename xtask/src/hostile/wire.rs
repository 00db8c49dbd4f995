//! A hand-written Kafka protocol, since no client library sends what this suite sends.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::Error;

pub(super) const PRODUCE: i16 = 0;
pub(super) const FETCH: i16 = 1;
pub(super) const METADATA: i16 = 3;
pub(super) const JOIN_GROUP: i16 = 11;
const SASL_HANDSHAKE: i16 = 17;
const API_VERSIONS: i16 = 18;
pub(super) const CREATE_TOPICS: i16 = 19;
pub(super) const INIT_PRODUCER_ID: i16 = 22;
const SASL_AUTHENTICATE: i16 = 36;
pub(super) const CONSUMER_GROUP_HEARTBEAT: i16 = 68;

/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// The body of a request, built field by field.
#[derive(Clone, Default)]
pub(super) struct Body(pub(super) Vec<u8>);

impl Body {
    pub(super) fn i8(mut self, value: i8) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn i16(mut self, value: i16) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn i32(mut self, value: i32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn i64(mut self, value: i64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub(super) fn text(mut self, text: &str) -> Self {
        self = self.i16(text.len() as i16);
        self.0.extend(text.bytes());
        self
    }

    /// Appends a compact string of newer versions; the texts here are short.
    pub(super) fn compact(mut self, text: &str) -> Self {
        self.0.push(text.len() as u8 + 1);
        self.0.extend(text.bytes());
        self
    }

    pub(super) fn bytes(mut self, bytes: &[u8]) -> Self {
        self = self.i32(bytes.len() as i32);
        self.0.extend(bytes);
        self
    }
}

/// Encodes a request with its length, in a version whose header has no tagged fields.
pub(super) fn request(key: i16, version: i16, body: &Body) -> Vec<u8> {
    frame(&header(key, version).0, &body.0)
}

/// Encodes a request with its length, in a version whose header has tagged fields.
pub(super) fn flexible(key: i16, version: i16, body: &Body) -> Vec<u8> {
    frame(&header(key, version).i8(0).0, &body.0)
}

fn header(key: i16, version: i16) -> Body {
    Body::default().i16(key).i16(version).i32(7).text("hostile")
}

fn frame(header: &[u8], body: &[u8]) -> Vec<u8> {
    let len = (header.len() + body.len()) as i32;
    [&len.to_be_bytes(), header, body].concat()
}

/// A connection.
pub(super) struct Wire(pub(super) TcpStream);

impl Wire {
    pub(super) fn connect(address: &str) -> Result<Self, Error> {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(socket))
    }

    /// Sends bytes. A connection that the server closed is not an error here: reading the answer
    /// shows it.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    /// Reads the next answer after its correlation ID; `None` if the server closed the connection.
    pub(super) fn answer(&mut self) -> Result<Option<Reader>, Error> {
        let mut len = [0; 4];
        match self.0.read_exact(&mut len) {
            Ok(()) => {}
            Err(error) if closed(&error) => return Ok(None),
            Err(error) => return Err(format!("no answer: {error}").into()),
        }
        let mut bytes = vec![0; u32::from_be_bytes(len) as usize];
        self.0.read_exact(&mut bytes)?;
        Ok(Some(Reader { bytes, at: 4 }))
    }

    /// Sends a request and reads its answer.
    pub(super) fn call(&mut self, request: &[u8]) -> Result<Reader, Error> {
        self.send(request);
        Ok(self.answer()?.ok_or("the connection was closed")?)
    }

    /// Sends bytes and returns whether the server closes the connection without an answer.
    pub(super) fn closed_after(mut self, bytes: &[u8]) -> Result<bool, Error> {
        self.send(bytes);
        Ok(self.answer()?.is_none())
    }
}

fn closed(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(error.kind(), Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe)
}

/// Parser of an answer.
pub(super) struct Reader {
    bytes: Vec<u8>,
    at: usize,
}

impl Reader {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let bytes = self.bytes.get(self.at..self.at + N).ok_or("the answer is too short")?;
        self.at += N;
        Ok(bytes.try_into()?)
    }

    pub(super) fn i8(&mut self) -> Result<i8, Error> {
        Ok(i8::from_be_bytes(self.take()?))
    }

    pub(super) fn i16(&mut self) -> Result<i16, Error> {
        Ok(i16::from_be_bytes(self.take()?))
    }

    pub(super) fn i32(&mut self) -> Result<i32, Error> {
        Ok(i32::from_be_bytes(self.take()?))
    }

    pub(super) fn i64(&mut self) -> Result<i64, Error> {
        Ok(i64::from_be_bytes(self.take()?))
    }

    pub(super) fn skip_text(&mut self) -> Result<(), Error> {
        self.at += usize::try_from(self.i16()?).unwrap_or(0);
        Ok(())
    }

    /// Reads a string; empty if it is null.
    pub(super) fn text(&mut self) -> Result<String, Error> {
        let len = self.i16()?;
        Ok(String::from_utf8_lossy(self.slice(len.into())?).into_owned())
    }

    pub(super) fn bytes(&mut self) -> Result<Vec<u8>, Error> {
        let len = self.i32()?;
        Ok(self.slice(len)?.to_vec())
    }

    fn slice(&mut self, len: i32) -> Result<&[u8], Error> {
        let end = self.at + usize::try_from(len).unwrap_or(0);
        let found = self.bytes.get(self.at..end).ok_or("the answer is too short")?;
        self.at = end;
        Ok(found)
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// A batch of one record as a producer makes it, and how to corrupt it.
#[derive(Clone)]
pub(super) struct Batch {
    pub(super) magic: i8,
    pub(super) attributes: i16,
    pub(super) count: i32,
    pub(super) last_delta: i32,
    /// Added to the length that the batch states.
    pub(super) length_off_by: i32,
    /// XORed with the checksum.
    pub(super) crc_xor: u32,
    /// The records, compressed as the attributes say.
    pub(super) records: Vec<u8>,
}

impl Batch {
    pub(super) fn good() -> Self {
        // Length, attributes, time, offset, key of 2, value of 4, no headers: zigzag varints.
        let record = b"\0\0\0\x04k1\x08abcd\0".to_vec();
        let mut records = vec![record.len() as u8 * 2];
        records.extend(record);
        Self {
            magic: 2,
            attributes: 0,
            count: 1,
            last_delta: 0,
            length_off_by: 0,
            crc_xor: 0,
            records,
        }
    }

    /// One record of 1.8 GB whose value repeats a single byte, many thousand times as large as its
    /// compressed form: zstd blocks of one repeated byte.
    pub(super) fn zstd_bomb(compressed_bytes: usize) -> Self {
        const BLOCK_BYTES: u32 = 128 << 10;
        // Magic; no checksum, no content size; a window of 1 MiB.
        let mut records = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x50];
        // A raw block with the fields before the value: the lengths of the record and of the value,
        // which are zigzag varints, with attributes, time, offset and no key between them.
        const LENGTH: [u8; 5] = [0x80, 0x80, 0x80, 0x80, 0x0e];
        let fields = [&LENGTH[..], &[0, 0, 0, 1], &LENGTH].concat();
        records.extend(&((fields.len() as u32) << 3).to_le_bytes()[..3]);
        records.extend(fields);
        let blocks = compressed_bytes / 4;
        for block in 1..=blocks {
            let header = u32::from(block == blocks) | 1 << 1 | BLOCK_BYTES << 3;
            records.extend(&header.to_le_bytes()[..3]);
            records.push(0);
        }
        Self { attributes: 4, records, ..Self::good() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let time_ms = 1_000;
        let signed = Body::default()
            .i16(self.attributes)
            .i32(self.last_delta)
            .i64(time_ms)
            .i64(time_ms)
            .i64(-1)
            .i16(-1)
            .i32(-1)
            .i32(self.count);
        let signed = [&signed.0[..], &self.records].concat();
        // Leader epoch, magic and checksum precede the checksummed part.
        let length = signed.len() as i32 + 9 + self.length_off_by;
        let crc = crc32c(&signed) ^ self.crc_xor;
        let mut batch = Body::default().i64(0).i32(length).i32(-1).i8(self.magic).i32(crc as i32).0;
        batch.extend(signed);
        batch
    }
}

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// Encodes an ApiVersions request.
pub(super) fn versions() -> Vec<u8> {
    request(API_VERSIONS, 0, &Body::default())
}

/// Parses an ApiVersions response: each API with its first and last version.
pub(super) fn served(mut answer: Reader) -> Result<Vec<(i16, i16, i16)>, Error> {
    match answer.i16()? {
        0 => {}
        code => return Err(format!("ApiVersions failed with code {code}").into()),
    }
    (0..answer.i32()?).map(|_| Ok((answer.i16()?, answer.i16()?, answer.i16()?))).collect()
}

pub(super) fn handshake(mechanism: &str) -> Vec<u8> {
    request(SASL_HANDSHAKE, 1, &Body::default().text(mechanism))
}

pub(super) fn authenticate(message: &[u8]) -> Vec<u8> {
    request(SASL_AUTHENTICATE, 1, &Body::default().bytes(message))
}

/// A record without a key, with a value of zeros.
pub(super) fn record_of(value_bytes: usize) -> Vec<u8> {
    fn put_varint(to: &mut Vec<u8>, value: usize) {
        let mut zigzag = value << 1;
        while zigzag >= 0x80 {
            to.push(zigzag as u8 | 0x80);
            zigzag >>= 7;
        }
        to.push(zigzag as u8);
    }
    // Attributes, time delta, offset delta, and a key length of -1.
    let mut body = vec![0, 0, 0, 1];
    put_varint(&mut body, value_bytes);
    body.resize(body.len() + value_bytes, 0);
    // No headers.
    body.push(0);
    let mut record = Vec::new();
    put_varint(&mut record, body.len());
    record.extend(body);
    record
}

pub(super) fn produce(topic: &str, batch: &[u8]) -> Vec<u8> {
    let body = Body::default().i16(-1).i16(-1).i32(30_000).i32(1).text(topic);
    // The first version with zstd.
    request(PRODUCE, 7, &body.i32(1).i32(0).bytes(batch))
}

/// Parses a Produce response: error code and offset.
pub(super) fn produced(mut answer: Reader) -> Result<(i16, i64), Error> {
    answer.i32()?;
    answer.skip_text()?;
    answer.i32()?;
    answer.i32()?;
    Ok((answer.i16()?, answer.i64()?))
}

pub(super) fn fetch(topic: &str, offset: i64, max_bytes: i32) -> Vec<u8> {
    let body = Body::default().i32(-1).i32(1_000).i32(1).i32(max_bytes).i8(0);
    let body = body.i32(1).text(topic).i32(1).i32(0).i64(offset).i32(max_bytes);
    request(FETCH, 4, &body)
}

pub(super) fn create_topic(topic: &str, partitions: i32, configs: &[(&str, &str)]) -> Vec<u8> {
    let body = Body::default().i32(1).text(topic).i32(partitions).i16(1).i32(0);
    let body = body.i32(configs.len() as i32);
    let config = |body: Body, (name, value): &(&str, &str)| body.text(name).text(value);
    let body = configs.iter().fold(body, config);
    request(CREATE_TOPICS, 2, &body.i32(30_000).i8(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }
}
