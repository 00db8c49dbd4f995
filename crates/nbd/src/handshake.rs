//! Negotiation: fixed newstyle, from the greeting to the choice of an export.

mod option;
#[cfg(test)]
mod tests;

use std::io;

use bytes::{Buf, BufMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;

use self::option::{ContextRequest, InfoRequest, text};
use crate::exports::{Export, Exports, InUse};
use crate::protocol::{
    ALLOCATION_CONTEXT, ALLOCATION_CONTEXT_ID, BLOCK_SIZES, FIXED_NEWSTYLE, GREETING_MAGIC,
    MAX_PAYLOAD, NO_ZEROES, OPTION_MAGIC, info, option as opt, option_reply as rep,
    put_option_reply, transmission_flag as flag,
};

/// Greatest number of options of a handshake.
const MAX_OPTIONS: u32 = 64;
/// Greatest length of an option's data that is read into memory.
const MAX_OPTION_BYTES: usize = 16 << 10;
/// Greatest length of an option's data that is skipped. A longer one ends the connection.
const MAX_SKIPPED_BYTES: usize = 1 << 20;
/// A list of exports is sent in parts of about this length.
const LIST_PART_BYTES: usize = 16 << 10;

/// What a handshake has agreed on.
pub(crate) struct Negotiated {
    pub(crate) export: InUse,
    pub(crate) size_bytes: u64,
    pub(crate) is_read_only: bool,
    /// Structured replies.
    pub(crate) is_structured: bool,
    /// The context `base:allocation`.
    pub(crate) has_allocation: bool,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("unknown client flags {0:#x}")]
    ClientFlags(u32),
    #[error("an option begins with {0:#x}")]
    Magic(u64),
    #[error("an option with {0} bytes of data")]
    Length(u32),
    #[error("more than {MAX_OPTIONS} options")]
    TooManyOptions,
    #[error("an export that does not exist, by an option without an error reply")]
    NoExport,
}

/// Negotiates with a client. Returns `None` if the client aborts.
///
/// The caller bounds the time. Reads no byte of the first request.
pub(crate) async fn negotiate<R, W>(
    reader: &mut R,
    writer: &mut W,
    exports: &Exports,
    stop: &watch::Receiver<bool>,
) -> Result<Option<Negotiated>, HandshakeError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut greeting = Vec::with_capacity(18);
    greeting.put_u64(GREETING_MAGIC);
    greeting.put_u64(OPTION_MAGIC);
    greeting.put_u16(FIXED_NEWSTYLE | NO_ZEROES);
    send(writer, &greeting).await?;
    let client_flags = reader.read_u32().await?;
    if client_flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
        return Err(HandshakeError::ClientFlags(client_flags));
    }
    let mut state = State { exports, is_structured: false, allocation_of: None };
    let mut data = Vec::new();
    for _ in 0..MAX_OPTIONS {
        let mut header = [0; 16];
        reader.read_exact(&mut header).await?;
        let mut header = &header[..];
        let (magic, option, announced) = (header.get_u64(), header.get_u32(), header.get_u32());
        if magic != OPTION_MAGIC {
            return Err(HandshakeError::Magic(magic));
        }
        let len = announced as usize;
        if len > MAX_SKIPPED_BYTES {
            return Err(HandshakeError::Length(announced));
        }
        // Longer data passes through the same memory, of which the option then has no use.
        let is_too_long = len > MAX_OPTION_BYTES;
        let mut missing = len;
        loop {
            data.resize(missing.min(MAX_OPTION_BYTES), 0);
            reader.read_exact(&mut data).await?;
            missing -= data.len();
            if missing == 0 {
                break;
            }
        }
        let mut reply = Vec::new();
        let is_stopping = *stop.borrow();
        match option {
            opt::EXPORT_NAME => {
                let name = if is_stopping || is_too_long { None } else { text(&data) };
                let chosen = name.and_then(|name| state.enter(name));
                let chosen = chosen.ok_or(HandshakeError::NoExport)?;
                reply.put_u64(chosen.size_bytes);
                reply.put_u16(flags(chosen.is_read_only, chosen.is_structured));
                if client_flags & u32::from(NO_ZEROES) == 0 {
                    reply.put_bytes(0, 124);
                }
                send(writer, &reply).await?;
                return Ok(Some(chosen));
            }
            opt::ABORT => {
                put_option_reply(&mut reply, option, rep::ACK, &[]);
                // The client may have closed the connection already.
                let _ = send(writer, &reply).await;
                return Ok(None);
            }
            _ if is_stopping => refuse(&mut reply, option, rep::ERR_SHUTDOWN, "shutting down"),
            _ if is_too_long => {
                refuse(&mut reply, option, rep::ERR_TOO_BIG, "more than 16 KiB of data");
            }
            opt::LIST if data.is_empty() => {
                for (name, description) in exports.list() {
                    let len = (name.len() as u32).to_be_bytes();
                    let row = [&len[..], name.as_bytes(), description.as_bytes()];
                    put_option_reply(&mut reply, option, rep::SERVER, &row);
                    if reply.len() >= LIST_PART_BYTES {
                        send(writer, &reply).await?;
                        reply.clear();
                    }
                }
                put_option_reply(&mut reply, option, rep::ACK, &[]);
            }
            opt::STRUCTURED_REPLY if data.is_empty() => {
                state.is_structured = true;
                put_option_reply(&mut reply, option, rep::ACK, &[]);
            }
            opt::LIST | opt::STRUCTURED_REPLY => {
                refuse(&mut reply, option, rep::ERR_INVALID, "the option has no data");
            }
            opt::INFO | opt::GO => {
                if let Some(chosen) = state.info(option, &data, &mut reply) {
                    send(writer, &reply).await?;
                    return Ok(Some(chosen));
                }
            }
            opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                state.contexts(option, &data, &mut reply);
            }
            _ => refuse(&mut reply, option, rep::ERR_UNSUP, "unsupported option"),
        }
        send(writer, &reply).await?;
    }
    Err(HandshakeError::TooManyOptions)
}

async fn send(writer: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    writer.write_all(bytes).await?;
    writer.flush().await
}

fn refuse(reply: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    put_option_reply(reply, option, kind, &[why.as_bytes()]);
}

/// Transmission flags of an export.
fn flags(is_read_only: bool, is_structured: bool) -> u16 {
    let mut flags = flag::HAS_FLAGS
        | flag::SEND_FLUSH
        | flag::SEND_FUA
        | flag::CAN_MULTI_CONN
        | flag::SEND_CACHE;
    flags |= match is_read_only {
        true => flag::READ_ONLY,
        false => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO,
    };
    if is_structured {
        flags |= flag::SEND_DF;
    }
    flags
}

/// What the options so far have set.
struct State<'a> {
    exports: &'a Exports,
    is_structured: bool,
    /// Name of the export for which the client has selected `base:allocation`.
    allocation_of: Option<String>,
}

impl State<'_> {
    fn enter(&self, name: &str) -> Option<Negotiated> {
        let export = self.exports.enter(name)?;
        let has_allocation = self.allocation_of.as_ref() == Some(&export.0.name);
        let disk = &export.0.disk;
        Some(Negotiated {
            size_bytes: disk.size_bytes(),
            is_read_only: disk.is_read_only(),
            is_structured: self.is_structured,
            has_allocation,
            export,
        })
    }

    /// Answers `NBD_OPT_INFO` and `NBD_OPT_GO`. Returns what is agreed on after the latter.
    fn info(&self, option: u32, data: &[u8], reply: &mut Vec<u8>) -> Option<Negotiated> {
        let Some(InfoRequest { name, wanted }) = InfoRequest::decode(data) else {
            refuse(reply, option, rep::ERR_INVALID, "invalid request for information");
            return None;
        };
        let Some(chosen) = self.enter(name) else {
            refuse(reply, option, rep::ERR_UNKNOWN, "no such export");
            return None;
        };
        let mut put = |kind: u16, payload: &[&[u8]]| {
            let kind = kind.to_be_bytes();
            let data = [&[&kind[..]], payload].concat();
            put_option_reply(reply, option, rep::INFO, &data);
        };
        let flags = flags(chosen.is_read_only, chosen.is_structured);
        put(info::EXPORT, &[&chosen.size_bytes.to_be_bytes(), &flags.to_be_bytes()]);
        let Export { name, description, .. } = &*chosen.export.0;
        if wanted.contains(&info::NAME) {
            put(info::NAME, &[name.as_bytes()]);
        }
        if wanted.contains(&info::DESCRIPTION) && !description.is_empty() {
            put(info::DESCRIPTION, &[description.as_bytes()]);
        }
        if wanted.contains(&info::BLOCK_SIZE) {
            let [minimum, preferred] = BLOCK_SIZES.map(u32::to_be_bytes);
            put(info::BLOCK_SIZE, &[&minimum, &preferred, &MAX_PAYLOAD.to_be_bytes()]);
        }
        put_option_reply(reply, option, rep::ACK, &[]);
        (option == opt::GO).then_some(chosen)
    }

    /// Answers `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
    fn contexts(&mut self, option: u32, data: &[u8], reply: &mut Vec<u8>) {
        let is_list = option == opt::LIST_META_CONTEXT;
        if !is_list {
            // The option replaces the earlier selection even if it fails.
            self.allocation_of = None;
        }
        if !self.is_structured {
            let why = "metadata contexts need structured replies";
            return refuse(reply, option, rep::ERR_INVALID, why);
        }
        let Some(ContextRequest { name, queries }) = ContextRequest::decode(data) else {
            return refuse(reply, option, rep::ERR_INVALID, "invalid query of metadata contexts");
        };
        let Some(export) = self.exports.find(name) else {
            return refuse(reply, option, rep::ERR_UNKNOWN, "no such export");
        };
        let is_match = queries.contains(&ALLOCATION_CONTEXT)
            || is_list && (queries.is_empty() || queries.contains(&"base:"));
        if is_match {
            // A list has no identifiers.
            let id = if is_list { 0 } else { ALLOCATION_CONTEXT_ID };
            let context = [&id.to_be_bytes()[..], ALLOCATION_CONTEXT.as_bytes()];
            put_option_reply(reply, option, rep::META_CONTEXT, &context);
            if !is_list {
                self.allocation_of = Some(export.name.clone());
            }
        }
        put_option_reply(reply, option, rep::ACK, &[]);
    }
}
