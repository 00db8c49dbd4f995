//! Parsing of requests as they arrive: each is an array of bulk strings, or an inline command.
//!
//! Not done by a crate, since the crates for this protocol parse answers, which nest: they recurse
//! for each level, so that some ten thousand bytes overflow the stack, and they start over each
//! time that more bytes have arrived (`docs/decisions/0002-dependencies.md`). Requests do not nest.
//! The parser keeps its progress, and memory grows with what has arrived, never with what is
//! announced.

use std::io;
use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::net::TcpStream;

use super::buffers::{Buffers, Reservation};

/// The maximum length of the line before an array or a bulk string: a letter and a number.
const MAX_HEADER_BYTES: usize = 32;
/// The maximum length of an inline command.
const MAX_LINE_BYTES: usize = 4096;
/// The minimum free space of a new buffer.
const READ_BYTES: usize = 16 << 10;
/// A buffer with less free space than this is not read into any more.
const MIN_READ_BYTES: usize = 4 << 10;
/// The overhead of an argument.
const ARGUMENT_BYTES: usize = 64;

/// A command and its arguments; at least the command.
pub(super) type Request = Vec<Bytes>;

/// The limits of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) arguments: usize,
    /// The size of one argument.
    pub(super) argument_bytes: usize,
    /// The total size of the arguments, with an overhead for each.
    pub(super) request_bytes: usize,
}

impl Limits {
    /// The limits before authentication.
    pub(super) const UNAUTHENTICATED: Self =
        Self { arguments: 10, argument_bytes: 16 << 10, request_bytes: 32 << 10 };

    /// Returns the limits after authentication, for a cache with records of up to this many bytes.
    pub(super) fn new(max_record_bytes: usize) -> Self {
        Self {
            arguments: 1 << 20,
            argument_bytes: max_record_bytes,
            request_bytes: max_record_bytes.saturating_add(1 << 20),
        }
    }
}

/// Why a request cannot be received; the connection has to end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestError {
    #[error("Protocol error: {0}")]
    Invalid(&'static str),
    #[error("Protocol error: expected '$', got '{}'", .0.escape_ascii())]
    ExpectedBulk(u8),
    #[error("Protocol error: invalid bulk length: {len} bytes; an argument may have at most {max}")]
    TooLong { len: usize, max: usize },
    #[error(
        "Protocol error: the request is too large: its arguments may have {max} bytes in total, \
         counting {ARGUMENT_BYTES} more for each"
    )]
    TooLarge { max: usize },
    #[error("the memory for requests and answers (--buffer-memory) is used up")]
    NoMemory,
    /// An HTTP request, as from a browser.
    #[error("this is not a web server")]
    Http,
}

/// The received part of a connection's requests.
pub(super) struct Requests {
    bytes: BytesMut,
    /// An upper bound of the size of the buffer that `bytes` is part of.
    buffer_bytes: usize,
    /// The arguments of the request being received.
    arguments: Vec<Bytes>,
    arguments_bytes: usize,
    missing_arguments: usize,
    /// The size of requests that were returned and not yet answered.
    unanswered_bytes: usize,
    /// The length of the argument being received.
    next_len: Option<usize>,
    /// The length of the prefix that is known to contain no end of a line.
    scanned_bytes: usize,
    reservation: Reservation,
    error: Option<RequestError>,
    pub(super) limits: Limits,
}

impl Requests {
    pub(super) fn new(buffers: &Arc<Buffers>, limits: Limits) -> Self {
        Self {
            bytes: BytesMut::new(),
            buffer_bytes: 0,
            arguments: Vec::new(),
            arguments_bytes: 0,
            missing_arguments: 0,
            unanswered_bytes: 0,
            next_len: None,
            scanned_bytes: 0,
            reservation: Reservation::new(buffers),
            error: None,
            limits,
        }
    }

    /// Returns whether a request was received in part.
    pub(super) fn has_partial_request(&self) -> bool {
        self.missing_arguments > 0 || !self.bytes.is_empty()
    }

    /// Returns whether more may be read while there are requests to be answered, up to `max_bytes`.
    pub(super) fn may_read_ahead(&mut self, max_bytes: usize) -> bool {
        // A full buffer is doubled.
        let next = self.memory_bytes(self.bytes.capacity() * 2 + READ_BYTES);
        self.bytes.len() < max_bytes && self.reservation.resize(next)
    }

    /// Records that all returned requests are answered, and their memory is free.
    pub(super) fn set_answered(&mut self) {
        self.unanswered_bytes = 0;
    }

    /// Reads what the socket has; returns the number of bytes, 0 if the client has closed it.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is nothing; the connection is broken.
    pub(super) fn read_from(&mut self, socket: &TcpStream) -> io::Result<usize> {
        self.reserve();
        socket.try_read_buf(&mut self.bytes)
    }

    /// Adds bytes as if they had been read.
    #[cfg(test)]
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.reserve();
        self.bytes.extend_from_slice(bytes);
    }

    /// Reserves buffer space for the next read.
    fn reserve(&mut self) {
        // For a long argument, at most as much again as has arrived.
        let missing = self.next_len.map_or(0, |len| (len + 2).saturating_sub(self.bytes.len()));
        let wanted = missing.min(self.bytes.len());
        let free = self.bytes.capacity() - self.bytes.len();
        // Arguments keep the whole buffer that contains them. So a new one is allocated only when
        // this one is nearly full: otherwise input of a few bytes at a time would allocate a buffer
        // for each few.
        if free < wanted.max(MIN_READ_BYTES) {
            self.bytes.reserve(wanted.max(READ_BYTES));
            self.buffer_bytes = self.buffer_bytes.max(self.bytes.capacity());
        }
        self.account();
    }

    /// Releases unused buffers; called when all returned requests are answered. An idle connection
    /// has no buffer, and the received part of a request, including its first arguments, does not
    /// keep the large buffer of the request before it.
    pub(super) fn shrink(&mut self) {
        if !self.has_partial_request() {
            self.bytes = BytesMut::new();
            self.arguments = Vec::new();
            self.buffer_bytes = 0;
        } else if self.buffer_bytes > 2 * (self.bytes.len() + self.arguments_bytes + READ_BYTES) {
            self.move_partial_request();
        } else {
            return;
        }
        self.account();
    }

    /// Moves the received part of a request to a buffer of its own.
    fn move_partial_request(&mut self) {
        let arguments_bytes: usize = self.arguments.iter().map(Bytes::len).sum();
        let mut bytes = BytesMut::with_capacity(arguments_bytes + self.bytes.len() + READ_BYTES);
        self.buffer_bytes = bytes.capacity();
        for argument in &mut self.arguments {
            bytes.extend_from_slice(argument);
            *argument = bytes.split().freeze();
        }
        bytes.extend_from_slice(&self.bytes);
        self.bytes = bytes;
    }

    /// Returns the memory of all requests, with `receiving_bytes` for the received part of the
    /// next ones.
    fn memory_bytes(&self, receiving_bytes: usize) -> usize {
        // An answered request stays in memory as long as anything that arrived with it.
        (receiving_bytes + self.arguments_bytes + self.unanswered_bytes).max(self.buffer_bytes)
    }

    fn account(&mut self) {
        let bytes = self.memory_bytes(self.bytes.capacity());
        if !self.reservation.resize(bytes) {
            self.error = Some(RequestError::NoMemory);
        }
    }

    /// Returns the next complete request.
    ///
    /// # Errors
    /// The input is not a request. The error is permanent.
    pub(super) fn next(&mut self) -> Result<Option<Request>, RequestError> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        self.parse().inspect_err(|error| self.error = Some(error.clone()))
    }

    fn parse(&mut self) -> Result<Option<Request>, RequestError> {
        while self.missing_arguments == 0 {
            match self.bytes.first() {
                None => return Ok(None),
                Some(b'*') => {
                    let Some(count) = self.header("invalid multibulk length")? else {
                        return Ok(None);
                    };
                    if count > self.limits.arguments {
                        return Err(RequestError::Invalid("invalid multibulk length"));
                    }
                    self.missing_arguments = count;
                }
                Some(_) => match self.inline_command()? {
                    Some(request) if request.is_empty() => {}
                    request => {
                        self.unanswered_bytes +=
                            request.iter().flatten().map(argument_size).sum::<usize>();
                        return Ok(request);
                    }
                },
            }
        }
        while self.missing_arguments > 0 {
            let Some(argument) = self.argument()? else { return Ok(None) };
            self.arguments_bytes += argument_size(&argument);
            self.arguments.push(argument);
            self.missing_arguments -= 1;
        }
        self.unanswered_bytes += std::mem::take(&mut self.arguments_bytes);
        Ok(Some(std::mem::take(&mut self.arguments)))
    }

    /// Takes a line like `*3` and returns its number; an invalid one is the error `wrong`.
    fn header(&mut self, wrong: &'static str) -> Result<Option<usize>, RequestError> {
        let Some(end) = self.bytes.iter().take(MAX_HEADER_BYTES).position(|byte| *byte == b'\n')
        else {
            return match self.bytes.len() < MAX_HEADER_BYTES {
                true => Ok(None),
                false => Err(RequestError::Invalid(wrong)),
            };
        };
        let digits = self.bytes[1..end]
            .strip_suffix(b"\r")
            .filter(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit));
        let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        let number = number.ok_or(RequestError::Invalid(wrong))?;
        self.bytes.advance(end + 1);
        Ok(Some(number))
    }

    /// Returns the next argument, if it is complete.
    fn argument(&mut self) -> Result<Option<Bytes>, RequestError> {
        let len = match self.next_len {
            Some(len) => len,
            None => {
                match self.bytes.first() {
                    None => return Ok(None),
                    Some(b'$') => {}
                    Some(other) => return Err(RequestError::ExpectedBulk(*other)),
                }
                let Some(len) = self.header("invalid bulk length")? else { return Ok(None) };
                let Limits { argument_bytes, request_bytes, .. } = self.limits;
                if len > argument_bytes {
                    return Err(RequestError::TooLong { len, max: argument_bytes });
                }
                if self.arguments_bytes.saturating_add(len) > request_bytes {
                    return Err(RequestError::TooLarge { max: request_bytes });
                }
                *self.next_len.insert(len)
            }
        };
        if self.bytes.len() < len + 2 {
            return Ok(None);
        }
        if &self.bytes[len..len + 2] != b"\r\n" {
            return Err(RequestError::Invalid("a bulk string does not end with CR LF"));
        }
        let argument = self.bytes.split_to(len).freeze();
        self.bytes.advance(2);
        self.next_len = None;
        Ok(Some(argument))
    }

    /// Returns an inline command; an empty request for an empty line.
    fn inline_command(&mut self) -> Result<Option<Request>, RequestError> {
        let from = std::mem::take(&mut self.scanned_bytes);
        let Some(end) = self.bytes[from..].iter().position(|byte| *byte == b'\n') else {
            if self.bytes.len() >= MAX_LINE_BYTES {
                return Err(RequestError::Invalid("too big inline request"));
            }
            self.scanned_bytes = self.bytes.len();
            return Ok(None);
        };
        let end = from + end;
        if end >= MAX_LINE_BYTES {
            return Err(RequestError::Invalid("too big inline request"));
        }
        let line = self.bytes.split_to(end + 1).freeze();
        if line.contains(&b'"') || line.contains(&b'\'') {
            return Err(RequestError::Invalid(
                "an inline request cannot have quotes; send an array",
            ));
        }
        let args = line.split(u8::is_ascii_whitespace).filter(|arg| !arg.is_empty());
        let request: Request = args.map(|arg| line.slice_ref(arg)).collect();
        match request.first() {
            Some(name)
                if name.eq_ignore_ascii_case(b"POST") || name.eq_ignore_ascii_case(b"Host:") =>
            {
                Err(RequestError::Http)
            }
            _ if request.len() > self.limits.arguments => {
                Err(RequestError::Invalid("too many arguments"))
            }
            _ => Ok(Some(request)),
        }
    }
}

fn argument_size(argument: &Bytes) -> usize {
    argument.len() + ARGUMENT_BYTES
}

#[cfg(test)]
mod tests {
    use alluvium_device::sim::Random;

    use super::*;

    const LIMITS: Limits =
        Limits { arguments: 1000, argument_bytes: 1 << 20, request_bytes: 2 << 20 };

    fn requests() -> Requests {
        Requests::new(&Buffers::new(8 << 20), LIMITS)
    }

    /// Parses all requests in these bytes, fed in pieces of `piece` bytes.
    fn read(bytes: &[u8], piece: usize) -> (Vec<Vec<Vec<u8>>>, Option<RequestError>) {
        let mut requests = requests();
        let mut found = Vec::new();
        for piece in bytes.chunks(piece) {
            requests.feed(piece);
            loop {
                match requests.next() {
                    Ok(Some(request)) => {
                        found.push(request.iter().map(|arg| arg.to_vec()).collect());
                    }
                    Ok(None) => break,
                    Err(error) => return (found, Some(error)),
                }
            }
        }
        (found, None)
    }

    fn error_of(bytes: &[u8]) -> String {
        let whole = read(bytes, usize::MAX).1;
        assert_eq!(read(bytes, 1).1, whole, "independent of the pieces");
        whole.map_or_else(String::new, |it| it.to_string())
    }

    #[test]
    fn requests_are_parsed_from_pieces_of_any_size() {
        let long = [&b"$70000\r\n"[..], &[b'x'; 70_000][..], b"\r\n"].concat();
        let bytes = [
            &b"*1\r\n$4\r\nPING\r\n*0\r\nPING\r\n  set  a 1 \r\n\r\n\n*3\r\n$3\r\nSET\r\n"[..],
            &long[..],
            b"$0\r\n\r\n*2\r\n$3\r\nGET\r\n$4\r\n\r\n\r\n\r\nping\n",
        ]
        .concat();
        let request = |args: &[&[u8]]| args.iter().map(|arg| arg.to_vec()).collect::<Vec<_>>();
        let expected = vec![
            request(&[b"PING"]),
            request(&[b"PING"]),
            request(&[b"set", b"a", b"1"]),
            request(&[b"SET", &[b'x'; 70_000], b""]),
            request(&[b"GET", b"\r\n\r\n"]),
            request(&[b"ping"]),
        ];
        for piece in [1, 2, 3, 7, 100, 4096, usize::MAX] {
            assert_eq!(read(&bytes, piece), (expected.clone(), None), "{piece}");
        }
    }

    #[test]
    fn invalid_requests_are_reported() {
        for (bytes, expected) in [
            (&b"*-1\r\n"[..], "invalid multibulk length"),
            (b"*1001\r\n", "invalid multibulk length"),
            (b"*99999999999999999999\r\n", "invalid multibulk length"),
            (b"*00000000000000000000000000000000000000001\r\n", "invalid multibulk length"),
            (b"*\r\n", "invalid multibulk length"),
            (b"*1\n", "invalid multibulk length"),
            (b"*+1\r\n", "invalid multibulk length"),
            (b"*1\r\n$-1\r\n", "invalid bulk length"),
            (
                b"*1\r\n$1048577\r\n",
                "invalid bulk length: 1048577 bytes; an argument may have at most 1048576",
            ),
            (b"*1\r\n$18446744073709551615\r\n", "invalid bulk length"),
            (b"*1\r\n$4\r\nPINGxx", "does not end with CR LF"),
            (b"*1\r\n*1\r\n", "expected '$', got '*'"),
            (b"*1\r\n:1\r\n", "expected '$', got ':'"),
            (b"*1\r\n\x00", "expected '$', got '\\x00'"),
            (b"set \"a b\" c\r\n", "cannot have quotes"),
            (b"POST / HTTP/1.1\r\n", "not a web server"),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\n", "not a web server"),
        ] {
            let error = error_of(bytes);
            assert!(error.contains(expected), "{}: {error:?}", bytes.escape_ascii());
        }
        assert!(error_of(&[b'a'; 5000]).contains("too big inline request"));
        // All arguments together.
        let half = [&b"$1048576\r\n"[..], &vec![b'x'; 1 << 20][..], b"\r\n"].concat();
        let large = [&b"*3\r\n"[..], &half[..], &half[..], b"$1\r\n"].concat();
        assert!(read(&large, 1 << 16).1.unwrap().to_string().contains("too large"));
    }

    #[test]
    fn nested_arrays_are_refused_without_recursion() {
        assert!(error_of(&b"*1\r\n".repeat(100_000)).contains("expected '$', got '*'"));
    }

    /// A megabyte is announced, and a few bytes arrive.
    #[test]
    fn memory_grows_with_received_bytes() {
        let mut requests = requests();
        requests.feed(b"*1000\r\n$1048576\r\nxxx");
        assert_eq!(requests.next(), Ok(None));
        requests.reserve();
        assert!(requests.bytes.capacity() < 64 << 10, "{}", requests.bytes.capacity());
        assert!(requests.arguments.capacity() < 16);
        assert!(requests.has_partial_request());
        requests.shrink();
        assert!(!requests.bytes.is_empty(), "it is incomplete");
    }

    #[test]
    fn a_partial_request_does_not_keep_the_buffer_of_the_one_before() {
        let mut requests = requests();
        let large =
            [&b"*1\r\n$1000000\r\n"[..], &[b'x'; 1_000_000], b"\r\n*1\r\n$4\r\nPI"].concat();
        let mut taken = None;
        for piece in large.chunks(MIN_READ_BYTES) {
            requests.feed(piece);
            taken = taken.or(requests.next().unwrap());
        }
        assert_eq!(requests.next(), Ok(None));
        let address = requests.bytes.as_ptr();
        requests.set_answered();
        requests.shrink();
        assert_ne!(requests.bytes.as_ptr(), address, "it is in a buffer of its own");
        // Until now the address could not have been reused.
        drop(taken.expect("all of it was received"));
        requests.shrink();
        requests.feed(b"NG\r\n");
        let request = requests.next().unwrap().unwrap();
        assert_eq!(request, [&b"PING"[..]]);
    }

    /// Nor do its arguments: each connection could keep a large request without accounting.
    #[test]
    fn the_first_arguments_do_not_keep_the_buffer_of_the_request_before() {
        const BETWEEN: &[u8] = b"\r\n*3\r\n$3\r\n";
        let mut requests = requests();
        let large = [&b"*1\r\n$1000000\r\n"[..], &[b'x'; 1_000_000]].concat();
        let all = [&large[..], BETWEEN, b"SET\r\n$0\r\n\r\n$1\r\n"].concat();
        let mut taken = None;
        for piece in all.chunks(MIN_READ_BYTES) {
            requests.feed(piece);
            taken = taken.or(requests.next().unwrap());
        }
        assert_eq!(requests.next(), Ok(None));
        let taken = taken.expect("all of it was received");
        let behind = taken[0].as_ptr().wrapping_add(taken[0].len() + BETWEEN.len());
        assert_eq!(requests.arguments[0].as_ptr(), behind, "it is in the same buffer");
        requests.set_answered();
        requests.shrink();
        assert_ne!(requests.arguments[0].as_ptr(), behind, "it is in a buffer of its own");
        drop(taken);
        requests.feed(b"x\r\n");
        let request = requests.next().unwrap().unwrap();
        assert_eq!(request, [&b"SET"[..], b"", b"x"]);
    }

    /// A client that does not receive its answers can have many of them queued.
    #[test]
    fn answered_requests_count_as_long_as_their_buffer_exists() {
        let buffers = Buffers::new(8 << 20);
        let mut requests = Requests::new(&buffers, LIMITS);
        let many = b"PING\r\n".repeat(166_700);
        for piece in many.chunks(MIN_READ_BYTES) {
            requests.feed(piece);
        }
        while requests.next().unwrap().is_some() {
            requests.set_answered();
        }
        assert!(requests.may_read_ahead(1 << 20));
        assert!(buffers.used_bytes() >= many.len(), "{}", buffers.used_bytes());
        requests.shrink();
        assert_eq!(buffers.used_bytes(), 0);
    }

    /// Otherwise a client could cause a buffer for each of them.
    #[test]
    fn small_arguments_share_a_buffer() {
        const ARGUMENT: &[u8] = b"$1\r\nx\r\n";
        let mut requests = requests();
        requests.feed(b"*1000\r\n");
        let mut addresses = Vec::new();
        for _ in 0..1000 {
            assert_eq!(requests.next(), Ok(None));
            requests.feed(ARGUMENT);
            addresses.push(requests.bytes.as_ptr() as usize);
        }
        let moved = |pair: &&[usize]| pair[1].abs_diff(pair[0]) != ARGUMENT.len();
        let moved = addresses.windows(2).filter(moved).count();
        assert!(moved < 3, "{moved} buffers for 7,000 bytes");
    }

    #[test]
    fn the_memory_of_all_connections_is_bounded() {
        let buffers = Buffers::new(300 << 10);
        let mut one = Requests::new(&buffers, LIMITS);
        one.feed(b"*1\r\n$1048576\r\n");
        assert_eq!(one.next(), Ok(None));
        let mut received = 0;
        let error = loop {
            one.feed(&[b'x'; 10_000]);
            received += 10_000;
            match one.next() {
                Ok(None) => {}
                other => break other,
            }
        };
        assert_eq!(error, Err(RequestError::NoMemory));
        assert!((100_000..400_000).contains(&received), "{received}");
        drop(one);
        assert_eq!(buffers.used_bytes(), 0);
    }

    /// The limit of reading ahead includes them.
    #[test]
    fn unanswered_requests_count() {
        let buffers = Buffers::new(8 << 20);
        let mut requests = Requests::new(&buffers, LIMITS);
        let large = [&b"*1\r\n$1000000\r\n"[..], &[b'x'; 1_000_000][..], b"\r\n"].concat();
        requests.feed(&large);
        let request = requests.next().unwrap().unwrap();
        requests.feed(b"*1\r\n");
        assert!(buffers.used_bytes() >= 1_000_000, "{}", buffers.used_bytes());
        assert!(requests.may_read_ahead(1 << 20) && !requests.may_read_ahead(1));
        drop(request);
        requests.set_answered();
        requests.feed(b"$4\r\nPING\r\n");
        assert!(requests.next().unwrap().is_some());
        requests.shrink();
        requests.set_answered();
        requests.shrink();
        assert_eq!(buffers.used_bytes(), 0);
        // With 100 KiB used, doubling would be too much.
        let mut other = Requests::new(&Buffers::new(200 << 10), LIMITS);
        other.feed(&large[..100 << 10]);
        assert!(!other.may_read_ahead(1 << 20));
    }

    /// Any input is requests or an error, independent of the size of pieces.
    #[test]
    fn arbitrary_input_gives_requests_or_an_error() {
        let tokens: [&[u8]; 12] = [
            b"*",
            b"$",
            b"1",
            b"2",
            b"-",
            b"\r\n",
            b"\n",
            b"\r",
            b"GET",
            b"x",
            b"$3\r\nabc\r\n",
            b" ",
        ];
        for seed in 0..3000 {
            let mut random = Random::new(seed);
            let bytes: Vec<u8> = (0..random.below(60))
                .flat_map(|_| tokens[random.index(tokens.len())].to_vec())
                .collect();
            let whole = read(&bytes, usize::MAX);
            for piece in [1, 2, 5] {
                assert_eq!(read(&bytes, piece), whole, "seed {seed}");
            }
        }
    }
}
