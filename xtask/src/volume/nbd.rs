//! A small NBD client: one request at a time, simple replies.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const EXPORT_NAME: u32 = 1;
/// `NBD_FLAG_C_FIXED_NEWSTYLE` and `NBD_FLAG_C_NO_ZEROES`.
const CLIENT_FLAGS: u32 = 3;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// The types of requests that the campaign sends.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Command {
    Read = 0,
    Write = 1,
    Trim = 4,
    WriteZeroes = 6,
}

/// A request that has not succeeded.
#[derive(Debug)]
pub(crate) enum NbdError {
    /// The connection has ended. The outcome of the request is unknown.
    Lost(io::Error),
    /// The server has answered with this error number.
    Refused(u32),
}

impl fmt::Display for NbdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(error) => write!(f, "the connection has ended: {error}"),
            Self::Refused(number) => write!(f, "the server answers error {number}"),
        }
    }
}

impl From<io::Error> for NbdError {
    fn from(error: io::Error) -> Self {
        Self::Lost(error)
    }
}

/// Does the handshake for the default export.
pub(crate) fn handshake(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    let mut hello = CLIENT_FLAGS.to_be_bytes().to_vec();
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(EXPORT_NAME.to_be_bytes());
    hello.extend(0_u32.to_be_bytes());
    stream.write_all(&hello)?;
    let mut export = [0; 10];
    stream.read_exact(&mut export)
}

/// The header of a request.
pub(crate) fn request(command: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
    request.extend([0; 2]);
    request.extend(command.to_be_bytes());
    request.extend(cookie.to_be_bytes());
    request.extend(at.to_be_bytes());
    request.extend(len.to_be_bytes());
    request
}

/// A connection to the default export of a server.
pub(crate) struct Connection {
    stream: UnixStream,
    cookie: u64,
}

impl Connection {
    /// Connects and does the handshake.
    pub(crate) fn open(socket: &Path) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        handshake(&mut stream)?;
        Ok(Self { stream, cookie: 0 })
    }

    /// Sends a request with `data` or for `len` bytes, and returns what was read.
    pub(crate) fn request(
        &mut self,
        command: Command,
        at: u64,
        len: u32,
        data: &[u8],
    ) -> Result<Vec<u8>, NbdError> {
        self.cookie += 1;
        let mut request = request(command as u16, self.cookie, at, len);
        request.extend(data);
        self.stream.write_all(&request)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let (magic, rest) = reply.split_at(4);
        let (error, cookie) = rest.split_at(4);
        if magic != REPLY_MAGIC.to_be_bytes() || cookie != self.cookie.to_be_bytes() {
            return Err(io::Error::other(format!("not a reply: {reply:x?}")).into());
        }
        let error = u32::from_be_bytes(error.try_into().expect("four bytes"));
        if error != 0 {
            return Err(NbdError::Refused(error));
        }
        let mut read = vec![0; if command == Command::Read { len as usize } else { 0 }];
        self.stream.read_exact(&mut read)?;
        Ok(read)
    }
}
