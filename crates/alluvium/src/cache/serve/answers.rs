//! Answers in version 2 or 3 of the protocol, collected in a buffer that is written at once.

use std::sync::Arc;

use super::buffers::{Buffers, Reservation, UNCOUNTED_BYTES};

/// The maximum overhead of an answer.
pub(super) const FRAME_BYTES: usize = 32;
/// The maximum length of an error; longer ones are truncated.
pub(super) const ERROR_BYTES: usize = 2 << 10;
/// The increment of a buffer that cannot be doubled for lack of memory.
const STEP_BYTES: usize = 64 << 10;
/// An empty buffer larger than this is released.
const MAX_IDLE_BYTES: usize = 16 << 10;

/// Answers that are not written yet.
pub(super) struct Answers {
    bytes: Vec<u8>,
    reservation: Reservation,
    max_bytes: usize,
    /// An answer did not fit.
    has_overflowed: bool,
    /// Version 3 of the protocol, as requested by HELLO.
    pub(super) is_resp3: bool,
}

impl Answers {
    /// Creates an empty buffer of at most `max_bytes`.
    pub(super) fn new(buffers: &Arc<Buffers>, max_bytes: usize) -> Self {
        let reservation = Reservation::new(buffers);
        Self { bytes: Vec::new(), reservation, max_bytes, has_overflowed: false, is_resp3: false }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Discards the answers after they were written.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        if self.bytes.capacity() > MAX_IDLE_BYTES {
            self.bytes = Vec::new();
        }
        self.reservation.resize(0);
    }

    /// Removes the answers added since the length was `len`; returns whether one did not fit.
    pub(super) fn truncate(&mut self, len: usize) -> bool {
        self.bytes.truncate(len);
        std::mem::take(&mut self.has_overflowed)
    }

    pub(super) fn has_overflowed(&self) -> bool {
        self.has_overflowed
    }

    /// Reserves memory for `more` bytes of answers; returns whether they fit. They then fit until
    /// answers are written.
    pub(super) fn reserve(&mut self, more: usize) -> bool {
        let len = self.bytes.len() + more;
        len <= self.max_bytes && self.reservation.grow_to(len)
    }

    fn add(&mut self, parts: &[&[u8]]) {
        let more = parts.iter().map(|part| part.len()).sum();
        self.has_overflowed |= !self.reserve(more);
        if !self.has_overflowed {
            self.has_overflowed = !self.append(parts, more);
        }
    }

    /// Appends `more` bytes, which must fit; false if the system has no memory for them.
    fn append(&mut self, parts: &[&[u8]], more: usize) -> bool {
        let (len, capacity) = (self.bytes.len() + more, self.bytes.capacity());
        if len > capacity {
            // The shared memory is charged for the allocation, not only for the used part.
            let doubled = len.max(2 * capacity);
            let wanted = match len <= UNCOUNTED_BYTES {
                true => doubled.min(UNCOUNTED_BYTES),
                false => [doubled, len + STEP_BYTES]
                    .into_iter()
                    .find(|wanted| self.reservation.grow_to(*wanted))
                    .unwrap_or(len),
            };
            let used = self.bytes.len();
            let mut allocate = |size: usize| self.bytes.try_reserve_exact(size - used).is_ok();
            if !allocate(wanted) && !allocate(len) {
                return false;
            }
        }
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
        true
    }

    fn number(&mut self, kind: &str, number: impl std::fmt::Display) {
        use std::io::Write as _;
        let mut line = [0; FRAME_BYTES];
        let mut rest = &mut line[..];
        write!(rest, "{kind}{number}\r\n").expect("64 bits have 20 digits");
        let len = FRAME_BYTES - rest.len();
        self.add(&[&line[..len]]);
    }

    pub(super) fn ok(&mut self) {
        self.simple("OK");
    }

    /// Adds a line without an end of line in it.
    pub(super) fn simple(&mut self, text: &str) {
        self.add(&[b"+", text.as_bytes(), b"\r\n"]);
    }

    /// Adds an error: a code such as `ERR`, then a text. It always fits, since [`ERROR_BYTES`] are
    /// reserved before a command runs.
    pub(super) fn error(&mut self, text: &str) {
        let line = text.replace(['\r', '\n'], " ");
        let line = &line.as_bytes()[..line.len().min(ERROR_BYTES - 3)];
        let more = line.len() + 3;
        self.reserve(more);
        let parts = [b"-", line, b"\r\n"];
        if !self.append(&parts, more) {
            // The buffer is moved for it, or the process ends: without the error the client would
            // mistake the next answer for this one.
            parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
        }
    }

    pub(super) fn integer(&mut self, number: i64) {
        self.number(":", number);
    }

    pub(super) fn bulk(&mut self, bytes: &[u8]) {
        self.number("$", bytes.len());
        self.add(&[bytes, b"\r\n"]);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.bulk(text.as_bytes());
    }

    /// Adds a text that clients display unchanged.
    pub(super) fn verbatim(&mut self, text: &str) {
        if !self.is_resp3 {
            return self.text(text);
        }
        self.number("=", text.len() + 4);
        self.add(&[b"txt:", text.as_bytes(), b"\r\n"]);
    }

    pub(super) fn null(&mut self) {
        let null: &[u8] = if self.is_resp3 { b"_\r\n" } else { b"$-1\r\n" };
        self.add(&[null]);
    }

    /// Adds a null in place of an array.
    pub(super) fn null_array(&mut self) {
        let null: &[u8] = if self.is_resp3 { b"_\r\n" } else { b"*-1\r\n" };
        self.add(&[null]);
    }

    /// Starts an array of this many answers.
    pub(super) fn array(&mut self, len: usize) {
        self.number("*", len);
    }

    /// Starts a map of this many pairs of answers.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.is_resp3 {
            true => self.number("%", pairs),
            false => self.number("*", pairs * 2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(max_bytes: usize, is_resp3: bool) -> Answers {
        Answers { is_resp3, ..Answers::new(&Buffers::new(1 << 20), max_bytes) }
    }

    fn escaped(text: &str) -> String {
        text.as_bytes().escape_ascii().to_string()
    }

    #[test]
    fn both_protocol_versions_are_encoded() {
        for (is_resp3, expected) in
            [(false, "$-1\r\n*2\r\n$1\r\nx\r\n*4\r\n"), (true, "_\r\n*2\r\n=5\r\ntxt:x\r\n%2\r\n")]
        {
            let mut answers = answers(1000, is_resp3);
            answers.ok();
            answers.error("ERR a\r\nb");
            answers.integer(i64::MIN);
            answers.bulk(b"a\0b");
            answers.null();
            answers.array(2);
            answers.verbatim("x");
            answers.map(2);
            let same = "+OK\r\n-ERR a  b\r\n:-9223372036854775808\r\n$3\r\na\0b\r\n";
            let expected = format!("{same}{expected}");
            assert_eq!(answers.bytes().escape_ascii().to_string(), escaped(&expected));
        }
    }

    #[test]
    fn allocated_answer_buffers_are_accounted() {
        const MAX: usize = 600 << 10;
        let buffers = Buffers::new(MAX);
        let mut answers = Answers::new(&buffers, 1 << 30);
        let (value, error) = ([b'x'; 500], "ERR ".repeat(1_000));
        let check = |answers: &Answers| {
            let accounted = buffers.used_bytes().max(UNCOUNTED_BYTES);
            assert!(
                !answers.has_overflowed()
                    && answers.bytes.capacity() <= accounted
                    && accounted <= MAX
            );
        };
        while answers.reserve(ERROR_BYTES) {
            let len = answers.len();
            answers.error(&error);
            assert_eq!(answers.len(), len + ERROR_BYTES);
            check(&answers);
            answers.truncate(len);
            answers.bulk(&value);
            check(&answers);
        }
        assert!(answers.len() > MAX - ERROR_BYTES);
        answers.clear();
        assert_eq!((answers.bytes.capacity(), buffers.used_bytes()), (0, 0));
    }

    #[test]
    fn an_answer_that_does_not_fit_is_removed() {
        let mut answers = answers(100, false);
        answers.integer(1);
        let len = answers.len();
        answers.array(2);
        answers.bulk(&[1; 200]);
        answers.bulk(b"small");
        assert!(answers.has_overflowed() && answers.len() < 100);
        assert!(answers.truncate(len));
        answers.error("ERR too large");
        assert_eq!(answers.bytes(), b":1\r\n-ERR too large\r\n");
        assert!(!answers.has_overflowed());
    }
}
