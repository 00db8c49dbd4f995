//! A client for tests: it builds requests, and checks that what the server sends obeys the
//! protocol.

use std::collections::HashMap;

use bytes::{Buf, BufMut};

use crate::protocol::{
    ALLOCATION_CONTEXT_ID, Command, DONE, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    Request, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, command_flag, option, option_reply,
};

/// A reply to an option: option, type, data.
pub(crate) type OptionReply = (u32, u32, Vec<u8>);

/// Appends an option.
pub(crate) fn put_option(to: &mut Vec<u8>, option: u32, data: &[u8]) {
    to.put_u64(OPTION_MAGIC);
    to.put_u32(option);
    to.put_u32(data.len() as u32);
    to.put_slice(data);
}

/// Data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
pub(crate) fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = Vec::new();
    data.put_u32(name.len() as u32);
    data.put_slice(name.as_bytes());
    data.put_u16(wanted.len() as u16);
    wanted.iter().for_each(|kind| data.put_u16(*kind));
    data
}

/// Data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
pub(crate) fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    data.put_u32(name.len() as u32);
    data.put_slice(name.as_bytes());
    data.put_u32(queries.len() as u32);
    for query in queries {
        data.put_u32(query.len() as u32);
        data.put_slice(query.as_bytes());
    }
    data
}

/// Takes the server's greeting.
pub(crate) fn parse_greeting(bytes: &mut &[u8]) -> Result<u16, String> {
    match (bytes.try_get_u64(), bytes.try_get_u64(), bytes.try_get_u16()) {
        (Ok(GREETING_MAGIC), Ok(OPTION_MAGIC), Ok(flags)) => Ok(flags),
        other => Err(format!("greeting {other:x?}")),
    }
}

/// Takes a reply to an option; `None` if it is not whole.
pub(crate) fn parse_option_reply(bytes: &mut &[u8]) -> Result<Option<OptionReply>, String> {
    let mut rest = *bytes;
    if rest.len() < 20 {
        return Ok(None);
    }
    let magic = rest.get_u64();
    if magic != OPTION_REPLY_MAGIC {
        return Err(format!("a reply to an option begins with {magic:x}"));
    }
    let (option, kind, len) = (rest.get_u32(), rest.get_u32(), rest.get_u32());
    let Some((data, rest)) = rest.split_at_checked(len as usize) else { return Ok(None) };
    *bytes = rest;
    let is_valid = match kind {
        option_reply::ACK => data.is_empty(),
        option_reply::SERVER => data.len() >= 4 && option == option::LIST,
        option_reply::INFO => matches!(option, option::INFO | option::GO) && data.len() >= 2,
        option_reply::META_CONTEXT => data.len() > 4 && option >= option::LIST_META_CONTEXT,
        error => error >> 31 == 1 && str::from_utf8(data).is_ok_and(|text| text.len() <= 4096),
    };
    match is_valid {
        true => Ok(Some((option, kind, data.to_vec()))),
        false => Err(format!("reply {kind:x} to option {option}: {data:?}")),
    }
}

/// Whether a reply is the last one to its option.
pub(crate) fn is_final((_, kind, _): &OptionReply) -> bool {
    *kind == option_reply::ACK || kind >> 31 == 1
}

/// How a request ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) request: Request,
    /// Errors: number, text, and the offset if there is one.
    pub(crate) errors: Vec<(u32, String, Option<u64>)>,
    /// What was read, with zeros for holes and for what is missing.
    pub(crate) data: Vec<u8>,
    /// Content chunks of a read, in order of their arrival: type, offset, length.
    pub(crate) chunks: Vec<(u16, u64, u32)>,
    /// Extents of a status: length, flags.
    pub(crate) extents: Vec<(u32, u32)>,
}

impl Outcome {
    /// The number of the error; 0 for success.
    pub(crate) fn error(&self) -> u32 {
        self.errors.first().map_or(0, |(error, ..)| *error)
    }
}

/// Parses the replies of a transmission.
#[derive(Default)]
pub(crate) struct Replies {
    pub(crate) is_structured: bool,
    /// What has arrived so far of the replies to requests. A second reply is one to no request.
    pub(crate) pending: HashMap<u64, Outcome>,
}

/// What was parsed.
pub(crate) enum Parsed {
    /// Nothing; the message is not whole.
    Incomplete,
    /// A part of a reply.
    Partial,
    /// The rest of a reply.
    Finished(Outcome),
}

impl Replies {
    /// Expects a reply to a request.
    pub(crate) fn expect(&mut self, request: Request) {
        let data = match request.command() {
            Some(Command::Read) if request.len <= 32 << 20 => vec![0; request.len as usize],
            _ => Vec::new(),
        };
        let outcome = Outcome { request, errors: vec![], data, chunks: vec![], extents: vec![] };
        assert!(self.pending.insert(request.cookie, outcome).is_none(), "cookies differ");
    }

    /// Takes a message.
    pub(crate) fn parse(&mut self, bytes: &mut &[u8]) -> Result<Parsed, String> {
        let mut rest = *bytes;
        match rest.try_get_u32() {
            Ok(SIMPLE_REPLY_MAGIC) if rest.len() < 12 => return Ok(Parsed::Incomplete),
            Ok(SIMPLE_REPLY_MAGIC) => {}
            Ok(STRUCTURED_REPLY_MAGIC) => return self.parse_chunk(bytes),
            Ok(magic) => return Err(format!("a reply begins with {magic:x}")),
            Err(_) => return Ok(Parsed::Incomplete),
        }
        let (error, cookie) = (rest.get_u32(), rest.get_u64());
        let outcome = self.pending.get_mut(&cookie).ok_or("a reply to no request")?;
        if outcome.request.command() == Some(Command::Read) && self.is_structured {
            return Err("a simple reply to a read".to_owned());
        }
        if !outcome.chunks.is_empty() {
            return Err("a simple reply behind chunks".to_owned());
        }
        if error == 0 {
            let Some((data, behind)) = rest.split_at_checked(outcome.data.len()) else {
                return Ok(Parsed::Incomplete);
            };
            outcome.data.copy_from_slice(data);
            rest = behind;
        } else {
            check_error(error)?;
            outcome.errors.push((error, String::new(), None));
        }
        *bytes = rest;
        Ok(Parsed::Finished(self.pending.remove(&cookie).expect("it is there")))
    }

    fn parse_chunk(&mut self, bytes: &mut &[u8]) -> Result<Parsed, String> {
        if !self.is_structured {
            return Err("a structured reply was not negotiated".to_owned());
        }
        let mut rest = &bytes[4..];
        if rest.len() < 16 {
            return Ok(Parsed::Incomplete);
        }
        let (flags, kind) = (rest.get_u16(), rest.get_u16());
        let (cookie, len) = (rest.get_u64(), rest.get_u32() as usize);
        let Some((mut payload, rest)) = rest.split_at_checked(len) else {
            return Ok(Parsed::Incomplete);
        };
        *bytes = rest;
        let outcome = self.pending.get_mut(&cookie).ok_or("a chunk for no request")?;
        let command = outcome.request.command();
        match kind {
            chunk::NONE if flags == DONE && len == 0 => {}
            chunk::OFFSET_DATA if command == Some(Command::Read) && len > 8 => {
                let at = payload.get_u64();
                let range = outcome.content(kind, at, payload.len() as u64)?;
                outcome.data[range].copy_from_slice(payload);
            }
            chunk::OFFSET_HOLE if command == Some(Command::Read) && len == 12 => {
                let at = payload.get_u64();
                outcome.content(kind, at, payload.get_u32().into())?;
            }
            chunk::BLOCK_STATUS
                if command == Some(Command::BlockStatus) && len > 4 && (len - 4) % 8 == 0 =>
            {
                outcome.status(payload)?;
            }
            chunk::ERROR | chunk::ERROR_OFFSET if len >= 6 => {
                let (error, text_len) = (payload.get_u32(), payload.get_u16() as usize);
                let (text, mut rest) =
                    payload.split_at_checked(text_len).ok_or("an error's text is too long")?;
                let text = str::from_utf8(text).map_err(|error| error.to_string())?.to_owned();
                let at = match kind {
                    chunk::ERROR => None,
                    _ => Some(rest.try_get_u64().map_err(|error| error.to_string())?),
                };
                let Request { at: from, len, .. } = outcome.request;
                if !rest.is_empty()
                    || at.is_some_and(|at| !(from..from + u64::from(len)).contains(&at))
                {
                    return Err(format!("error at {at:?} in {:?}", outcome.request));
                }
                check_error(error)?;
                outcome.errors.push((error, text, at));
            }
            _ => return Err(format!("chunk {kind:x}, flags {flags}, {len} bytes, {command:?}")),
        }
        match flags {
            0 => Ok(Parsed::Partial),
            DONE => {
                let outcome = self.pending.remove(&cookie).expect("it is there");
                outcome.check_end()?;
                Ok(Parsed::Finished(outcome))
            }
            _ => Err(format!("chunk flags {flags:x}")),
        }
    }
}

impl Outcome {
    /// Checks and adds a content chunk. Returns the range of `data`.
    fn content(&mut self, kind: u16, at: u64, len: u64) -> Result<std::ops::Range<usize>, String> {
        let overlaps = |&(_, other, other_len): &(u16, u64, u32)| {
            at < other + u64::from(other_len) && other < at + len
        };
        let Request { at: from, len: asked, flags, .. } = self.request;
        let is_inside = at >= from && at + len <= from + u64::from(asked);
        let is_fragment = flags & command_flag::DF != 0 && !self.chunks.is_empty();
        if len == 0 || !is_inside || is_fragment || self.chunks.iter().any(overlaps) {
            return Err(format!("chunk {kind} of {len} at {at} in {:?}", self.request));
        }
        self.chunks.push((kind, at, len as u32));
        let start = (at - from) as usize;
        Ok(start..start + len as usize)
    }

    fn status(&mut self, mut payload: &[u8]) -> Result<(), String> {
        if payload.get_u32() != ALLOCATION_CONTEXT_ID || !self.extents.is_empty() {
            return Err("a status of another context, or a second one".to_owned());
        }
        while !payload.is_empty() {
            self.extents.push((payload.get_u32(), payload.get_u32()));
        }
        let lens = self.extents.iter().map(|(len, _)| u64::from(*len));
        let is_one = self.request.flags & command_flag::REQ_ONE != 0;
        let is_valid = lens.clone().all(|len| len > 0)
            && lens.sum::<u64>() <= self.request.len.into()
            && (!is_one || self.extents.len() == 1);
        match is_valid {
            true => Ok(()),
            false => Err(format!("extents {:?} for {:?}", self.extents, self.request)),
        }
    }

    fn check_end(&self) -> Result<(), String> {
        let read: u64 = self.chunks.iter().map(|(_, _, len)| u64::from(*len)).sum();
        let is_whole = match self.request.command() {
            Some(Command::Read) => read == self.data.len() as u64,
            Some(Command::BlockStatus) => !self.extents.is_empty(),
            _ => true,
        };
        match is_whole || !self.errors.is_empty() {
            true => Ok(()),
            false => Err(format!("an incomplete reply without an error to {:?}", self.request)),
        }
    }
}

/// The protocol restricts the numbers of errors.
fn check_error(error: u32) -> Result<(), String> {
    match error {
        1 | 5 | 12 | 22 | 28 | 75 | 95 | 108 => Ok(()),
        _ => Err(format!("error {error}")),
    }
}

#[cfg(test)]
pub(crate) use self::with_a_connection::*;

#[cfg(test)]
mod with_a_connection {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    use async_trait::async_trait;
    use bytes::Bytes;
    use parking_lot::Mutex;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::sync::watch;
    use tokio::task::JoinHandle;

    use super::*;
    use crate::counters::Counters;
    use crate::disk::{Disk, DiskError, Extent, Part, ZeroMode};
    use crate::exports::Exports;
    use crate::memory::MemoryDisk;
    use crate::server::{Options, Server};

    /// A server with one export, `disk`, and connections in memory.
    pub(crate) struct Bench {
        pub(crate) server: Server,
        pub(crate) exports: Arc<Exports>,
        pub(crate) disk: Arc<TestDisk>,
        pub(crate) stop: watch::Sender<bool>,
    }

    impl Bench {
        pub(crate) fn new(disk: Arc<TestDisk>, options: Options) -> Self {
            let exports = Arc::new(Exports::default());
            exports.add("disk", "", disk.clone()).unwrap();
            let server = Server::new(Arc::clone(&exports), options);
            Self { server, exports, disk, stop: watch::Sender::new(false) }
        }

        /// Opens a connection whose stream holds that many bytes in each direction. Returns the
        /// client's end and the server's task.
        pub(crate) fn open(&self, stream_bytes: usize) -> (DuplexStream, JoinHandle<()>) {
            let (ours, theirs) = tokio::io::duplex(stream_bytes);
            let (server, stop) = (self.server.clone(), self.stop.subscribe());
            let serving = tokio::spawn(async move { server.serve_stream(theirs, stop).await });
            (ours, serving)
        }

        /// Opens a connection that transmits.
        pub(crate) async fn connect(&self, is_structured: bool) -> (Client, JoinHandle<()>) {
            let (stream, serving) = self.open(64 << 10);
            let mut client = Client::greet(stream).await;
            client.go("disk", is_structured).await;
            (client, serving)
        }

        pub(crate) fn counters(&self) -> &Counters {
            self.server.counters()
        }
    }

    pub(crate) fn value(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    /// A client of a server, over a stream in memory.
    pub(crate) struct Client {
        pub(crate) stream: DuplexStream,
        /// What has arrived and is not parsed yet.
        received: Vec<u8>,
        pub(crate) replies: Replies,
        cookie: u64,
    }

    impl Client {
        /// Takes the greeting, and answers it.
        pub(crate) async fn greet(mut stream: DuplexStream) -> Self {
            let mut greeting = [0; 18];
            stream.read_exact(&mut greeting).await.unwrap();
            assert_eq!(parse_greeting(&mut &greeting[..]), Ok(3));
            stream.write_u32(3).await.unwrap();
            Self { stream, received: Vec::new(), replies: Replies::default(), cookie: 0 }
        }

        async fn receive(&mut self) -> usize {
            self.stream.read_buf(&mut self.received).await.unwrap()
        }

        /// Sends an option and returns its replies.
        pub(crate) async fn option(&mut self, option: u32, data: &[u8]) -> Vec<OptionReply> {
            let mut bytes = Vec::new();
            put_option(&mut bytes, option, data);
            self.stream.write_all(&bytes).await.unwrap();
            let mut replies = Vec::new();
            loop {
                let mut rest = &self.received[..];
                let reply = parse_option_reply(&mut rest).unwrap();
                let used = self.received.len() - rest.len();
                self.received.drain(..used);
                match reply {
                    Some(reply) => {
                        assert_eq!(reply.0, option);
                        replies.push(reply);
                        if is_final(replies.last().unwrap()) {
                            return replies;
                        }
                    }
                    None => assert!(self.receive().await > 0, "the connection has ended"),
                }
            }
        }

        /// Begins the transmission with an export, with structured replies and its context, or
        /// with neither.
        pub(crate) async fn go(&mut self, name: &str, is_structured: bool) {
            if is_structured {
                self.option(option::STRUCTURED_REPLY, &[]).await;
                let contexts = context_data(name, &["base:allocation"]);
                self.option(option::SET_META_CONTEXT, &contexts).await;
            }
            let replies = self.option(option::GO, &info_data(name, &[])).await;
            assert_eq!(replies.last().unwrap().1, option_reply::ACK);
            self.replies.is_structured = is_structured;
        }

        /// Sends a request with a new cookie.
        pub(crate) async fn send(
            &mut self,
            command: Command,
            flags: u16,
            at: u64,
            len: u32,
            payload: &[u8],
        ) -> u64 {
            self.cookie += 1;
            let cookie = self.cookie << 32 | 7;
            let request = Request { flags, kind: command as u16, cookie, at, len };
            if command != Command::Disconnect {
                self.replies.expect(request);
            }
            let bytes = [&request.encode()[..], payload].concat();
            self.stream.write_all(&bytes).await.unwrap();
            cookie
        }

        /// The next reply that becomes complete; `None` at the end of the connection.
        pub(crate) async fn outcome(&mut self) -> Option<Outcome> {
            loop {
                let mut rest = &self.received[..];
                let parsed = self.replies.parse(&mut rest).unwrap();
                let used = self.received.len() - rest.len();
                self.received.drain(..used);
                match parsed {
                    Parsed::Finished(outcome) => return Some(outcome),
                    Parsed::Partial => {}
                    Parsed::Incomplete if self.receive().await == 0 => {
                        assert!(self.received.is_empty(), "the connection ends inside a reply");
                        return None;
                    }
                    Parsed::Incomplete => {}
                }
            }
        }

        /// Sends a request and waits for its reply, which must be the next one.
        pub(crate) async fn ask(
            &mut self,
            command: Command,
            flags: u16,
            at: u64,
            len: u32,
        ) -> Outcome {
            let cookie = self.send(command, flags, at, len, &[]).await;
            let outcome = self.outcome().await.expect("a reply");
            assert_eq!(outcome.request.cookie, cookie);
            outcome
        }

        /// Writes and returns the error.
        pub(crate) async fn write(&mut self, at: u64, data: &[u8]) -> u32 {
            self.send(Command::Write, 0, at, data.len() as u32, data).await;
            self.outcome().await.expect("a reply").error()
        }
    }

    /// A disk that records calls, fails on demand, and lets operations wait.
    pub(crate) struct TestDisk {
        pub(crate) memory: MemoryDisk,
        /// Name, offset and length of each call, in the order of their beginnings.
        pub(crate) calls: Mutex<Vec<(&'static str, u64, u64)>>,
        /// Errors of operations that touch an offset.
        pub(crate) faults: Mutex<HashMap<u64, DiskError>>,
        /// Operations that touch this offset wait.
        pub(crate) hold: watch::Sender<Option<u64>>,
        /// Operations that were dropped before their end.
        pub(crate) dropped: AtomicUsize,
        pub(crate) is_zero_fast: bool,
    }

    impl TestDisk {
        pub(crate) fn new(size_bytes: u64) -> Arc<Self> {
            Self::of(MemoryDisk::new(size_bytes), true)
        }

        pub(crate) fn of(memory: MemoryDisk, is_zero_fast: bool) -> Arc<Self> {
            Arc::new(Self {
                memory,
                calls: Mutex::default(),
                faults: Mutex::default(),
                hold: watch::Sender::new(None),
                dropped: AtomicUsize::new(0),
                is_zero_fast,
            })
        }

        pub(crate) fn fail_at(&self, at: u64, error: DiskError) {
            self.faults.lock().insert(at, error);
        }

        /// The names of the calls so far, which are forgotten.
        pub(crate) fn take_calls(&self) -> Vec<(&'static str, u64, u64)> {
            std::mem::take(&mut *self.calls.lock())
        }

        async fn begin(&self, name: &'static str, at: u64, len: u64) -> Result<(), DiskError> {
            self.calls.lock().push((name, at, len));
            struct Running<'a>(Option<&'a AtomicUsize>);
            impl Drop for Running<'_> {
                fn drop(&mut self) {
                    self.0.map(|dropped| dropped.fetch_add(1, Ordering::Relaxed));
                }
            }
            let mut running = Running(Some(&self.dropped));
            let range = at..at + len.max(1);
            let is_free = |hold: &Option<u64>| hold.is_none_or(|hold| !range.contains(&hold));
            self.hold.subscribe().wait_for(is_free).await.unwrap();
            running.0 = None;
            let faults = self.faults.lock();
            let fault = faults.iter().find(|(fault, _)| range.contains(fault));
            fault.map_or(Ok(()), |(_, error)| Err(error.clone()))
        }
    }

    #[async_trait]
    impl Disk for TestDisk {
        fn size_bytes(&self) -> u64 {
            self.memory.size_bytes()
        }

        fn is_read_only(&self) -> bool {
            self.memory.is_read_only()
        }

        async fn read(&self, at: u64, len: u32) -> Result<Vec<Part>, DiskError> {
            self.begin("read", at, len.into()).await?;
            self.memory.read(at, len).await
        }

        async fn write(&self, at: u64, data: Bytes) -> Result<(), DiskError> {
            self.begin("write", at, data.len() as u64).await?;
            self.memory.write(at, data).await
        }

        async fn zero(&self, at: u64, len: u64, mode: ZeroMode) -> Result<(), DiskError> {
            let name = if mode == ZeroMode::Allocate { "zero, allocate" } else { "zero" };
            self.begin(name, at, len).await?;
            self.memory.zero(at, len, mode).await
        }

        fn is_zero_fast(&self, _at: u64, _len: u64, _mode: ZeroMode) -> bool {
            self.is_zero_fast
        }

        async fn discard(&self, at: u64, len: u64) -> Result<(), DiskError> {
            self.begin("discard", at, len).await?;
            self.memory.discard(at, len).await
        }

        async fn flush(&self) -> Result<(), DiskError> {
            self.begin("flush", 0, 0).await
        }

        async fn status(
            &self,
            at: u64,
            len: u64,
            max_extents: usize,
        ) -> Result<Vec<Extent>, DiskError> {
            self.begin("status", at, len).await?;
            self.memory.status(at, len, max_extents).await
        }

        async fn prefetch(&self, at: u64, len: u64) -> Result<(), DiskError> {
            self.begin("prefetch", at, len).await
        }
    }
}
