//! A small NBD client: one request at a time, simple replies. It checks that each reply belongs to
//! its request.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// `NBD_EIO`.
pub const IO_ERROR: u32 = 5;
/// `NBD_ENOSPC`.
pub const NO_SPACE: u32 = 28;
/// `NBD_ESHUTDOWN`.
pub const SHUTDOWN: u32 = 108;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const EXPORT_NAME: u32 = 1;
/// `NBD_FLAG_C_FIXED_NEWSTYLE` and `NBD_FLAG_C_NO_ZEROES`.
const CLIENT_FLAGS: u32 = 3;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const READ: u16 = 0;
const WRITE: u16 = 1;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
/// `NBD_CMD_FLAG_NO_HOLE`.
const NO_HOLE: u16 = 2;

/// A connection to the default export of a server.
pub struct Nbd {
    stream: UnixStream,
    cookie: u64,
    pub size_bytes: u64,
}

impl Nbd {
    pub fn open(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("the export accepts");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("the server greets");
        let mut hello = CLIENT_FLAGS.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(EXPORT_NAME.to_be_bytes());
        hello.extend(0_u32.to_be_bytes());
        stream.write_all(&hello).expect("the option can be sent");
        let mut export = [0; 10];
        stream.read_exact(&mut export).expect("there is a default export");
        let size_bytes = u64::from_be_bytes(export[..8].try_into().expect("eight bytes"));
        Self { stream, cookie: 0, size_bytes }
    }

    /// Writes; returns the error number of the reply, which is 0 for success.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn write(&mut self, at: u64, data: &[u8]) -> io::Result<u32> {
        self.request((0, WRITE), at, data.len(), data)
    }

    /// Discards; the server must succeed.
    pub fn trim(&mut self, at: u64, len: usize) {
        let error = self.request((0, TRIM), at, len, &[]).expect("the server answers");
        assert_eq!(error, 0, "a trim at {at}");
    }

    /// Writes zeros that stay allocated; the server must succeed.
    pub fn zero(&mut self, at: u64, len: usize) {
        let error = self.request((NO_HOLE, WRITE_ZEROES), at, len, &[]);
        assert_eq!(error.expect("the server answers"), 0, "zeros at {at}");
    }

    /// Reads; the server must succeed.
    pub fn read(&mut self, at: u64, len: usize) -> Vec<u8> {
        let error = self.request((0, READ), at, len, &[]).expect("the server answers");
        assert_eq!(error, 0, "a read at {at}");
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data).expect("the reply has the data");
        data
    }

    fn request(
        &mut self,
        (flags, command): (u16, u16),
        at: u64,
        len: usize,
        data: &[u8],
    ) -> io::Result<u32> {
        self.cookie += 1;
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(at.to_be_bytes());
        request.extend(u32::try_from(len).expect("a small request").to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], REPLY_MAGIC.to_be_bytes());
        assert_eq!(reply[8..], self.cookie.to_be_bytes(), "the reply belongs to the request");
        Ok(u32::from_be_bytes(reply[4..8].try_into().expect("four bytes")))
    }
}
