//! The checks of the fuzz targets `nbd_handshake` and `nbd_requests`.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use bytes::BufMut;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, watch};

use crate::budget::Budget;
use crate::exports::{Exports, InUse};
use crate::handshake::{Negotiated, negotiate};
use crate::memory::MemoryDisk;
use crate::protocol::{Command, MAX_PAYLOAD, Request, STATE_ZERO, command_flag as flag};
use crate::testing::{
    Outcome, Parsed, Replies, is_final, parse_greeting, parse_option_reply, put_option,
};
use crate::transmission::{Environment, transmit};

/// Blocks of 4 KiB, and a part of one.
const SIZE: usize = (3 << 20) + 100;

/// Runs a server's side to its end. All input is in memory, so nothing waits.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: OnceCell<Runtime> = const { OnceCell::new() };
    }
    let build = || Builder::new_current_thread().enable_time().build().expect("it has no I/O");
    RUNTIME.with(|runtime| runtime.get_or_init(build).block_on(future))
}

fn exports(disk: MemoryDisk) -> Exports {
    let exports = Exports::default();
    exports.add("disk", "a description", Arc::new(disk)).expect("the name is valid");
    exports.set_default(Some("disk"));
    exports
}

/// Takes `data` as the client's side of a handshake: a byte of client flags, then options of a byte
/// for their type, two for their length, and their data. An option above 200 is raw bytes.
///
/// Each option that the server answers has one final reply, of its type.
pub fn handshake(data: &[u8]) -> Result<(), String> {
    let Some((flags, mut rest)) = data.split_first() else { return Ok(()) };
    let mut input = vec![0, 0, 0, flags % 5];
    let mut options = Vec::new();
    while let Some((&[option, high, low], behind)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_be_bytes([high, low])).min(behind.len());
        let (data, behind) = behind.split_at(len);
        rest = behind;
        if option > 200 {
            input.put_slice(data);
        } else {
            put_option(&mut input, (option % 13).into(), data);
            options.push(u32::from(option % 13));
        }
    }
    let (exports, mut output) = (exports(MemoryDisk::new(1)), Vec::new());
    let stop = watch::Sender::new(false).subscribe();
    let result = block_on(negotiate(&mut &input[..], &mut output, &exports, &stop));
    let mut output = &output[..];
    parse_greeting(&mut output)?;
    let mut answered = Vec::new();
    while !output.is_empty() && !matches!(&result, Ok(Some(_)) if matches!(output.len(), 10 | 134))
    {
        let reply = parse_option_reply(&mut output)?.ok_or("a reply is cut off")?;
        if is_final(&reply) {
            answered.push(reply.0);
        }
    }
    let (is_raw, count) = (data.iter().any(|byte| *byte > 200), answered.len());
    // Raw bytes may be options, too.
    match is_raw || options.get(..count).is_some_and(|options| options == answered) {
        true => Ok(()),
        false => Err(format!("options {options:?} are answered by {answered:?}")),
    }
}

/// A request of [`requests`], in ten bytes: command, flags, three bytes of the offset, one that
/// the data is made of, three of the length, and one that varies the rest.
fn decode(bytes: &[u8; 10], cookie: u64) -> (Request, u8) {
    let [command, flags, a, b, c, content, mantissa, shift, low, more] = *bytes;
    let at = u64::from(u32::from_be_bytes([0, a, b, c])) % (SIZE as u64 + 9000);
    let at = if more == 255 { u64::MAX - at } else { at };
    let len = (u32::from(mantissa) << (shift % 15)) + u32::from(low);
    let flags = if more & 1 == 0 { 0 } else { u16::from(flags) };
    (Request { flags, kind: (command % 9).into(), cookie, at, len }, content | 1)
}

/// What a disk with the content of `MemoryDisk` answers.
struct Model {
    content: Vec<u8>,
    is_read_only: bool,
    is_structured: bool,
    has_allocation: bool,
}

impl Model {
    /// Applies a request and returns the number of its error.
    fn apply(&mut self, request: &Request, byte: u8) -> u32 {
        let command = request.command();
        let valid = match command {
            Some(Command::Read) if self.is_structured => flag::DF,
            Some(Command::WriteZeroes) => flag::NO_HOLE | flag::FAST_ZERO,
            Some(Command::BlockStatus) => flag::REQ_ONE,
            None => return 22,
            _ => 0,
        };
        if request.flags & !(valid | flag::FUA) != 0 {
            return 22;
        }
        let is_write = matches!(command, Some(Command::Write | Command::WriteZeroes));
        if self.is_read_only && (is_write || command == Some(Command::Trim)) {
            return 1;
        }
        if command == Some(Command::Flush) {
            return if request.at == 0 && request.len == 0 { 0 } else { 22 };
        }
        let end = u128::from(request.at) + u128::from(request.len);
        if end > self.content.len() as u128 {
            return if is_write { 28 } else { 22 };
        }
        let range = request.at as usize..end as usize;
        match command {
            Some(Command::Write) => self.content[range].fill(byte),
            Some(Command::WriteZeroes) => self.content[range].fill(0),
            Some(Command::Trim) => {
                let (start, end) = (range.start.div_ceil(4096) * 4096, range.end / 4096 * 4096);
                if start < end {
                    self.content[start..end].fill(0);
                }
            }
            Some(Command::BlockStatus) if !self.has_allocation || range.is_empty() => return 22,
            _ => {}
        }
        0
    }

    /// What is wrong with a reply to a request that was just applied.
    fn check(&self, outcome: &Outcome, error: u32) -> Result<(), String> {
        if outcome.error() != error {
            return Err(format!("error {} instead of {error}", outcome.error()));
        }
        if error != 0 {
            return Ok(());
        }
        let Request { at, len, .. } = outcome.request;
        let mut at = at as usize;
        if outcome.request.command() == Some(Command::Read)
            && outcome.data != self.content[at..at + len as usize]
        {
            return Err("other data".to_owned());
        }
        for (len, state) in &outcome.extents {
            let extent = &self.content[at..at + *len as usize];
            if state & STATE_ZERO != 0 && extent.iter().any(|byte| *byte != 0) {
                return Err(format!("zeros that are not at {at}"));
            }
            at += extent.len();
        }
        Ok(())
    }
}

/// Takes `data` as requests: a byte for what was negotiated, then ten bytes for each request, as
/// [`decode`] has them. What is left is raw.
///
/// Requests are executed in their order, since the disk completes them at once. Each has the reply
/// that a model has.
pub fn requests(data: &[u8]) -> Result<(), String> {
    let Some((negotiated, mut rest)) = data.split_first() else { return Ok(()) };
    let is_structured = negotiated & 1 != 0;
    let mut model = Model {
        content: vec![0; SIZE],
        is_read_only: negotiated & 2 != 0,
        is_structured,
        has_allocation: is_structured && negotiated & 4 != 0,
    };
    let (mut input, mut sent) = (Vec::new(), Vec::new());
    while let Some((bytes, behind)) = rest.split_first_chunk() {
        rest = behind;
        let (request, byte) = decode(bytes, sent.len() as u64);
        if request.kind == Command::Disconnect as u16 {
            break;
        }
        input.put_slice(&request.encode());
        sent.push((request, byte));
        if request.kind == Command::Write as u16 {
            if request.len > MAX_PAYLOAD {
                break;
            }
            input.put_bytes(byte, request.len as usize);
        }
    }
    input.put_slice(rest);
    let disk = MemoryDisk::new(SIZE as u64);
    let exports = exports(if model.is_read_only { disk.read_only() } else { disk });
    let output = serve(&input, &exports, &model);
    let mut replies = Replies { is_structured, ..Replies::default() };
    sent.iter().for_each(|(request, _)| replies.expect(*request));
    let (mut output, mut outcomes) = (&output[..], Vec::new());
    loop {
        match replies.parse(&mut output)? {
            Parsed::Incomplete if output.is_empty() => break,
            Parsed::Incomplete => return Err("a reply is cut off".to_owned()),
            Parsed::Partial => {}
            Parsed::Finished(outcome) => outcomes.push(outcome),
        }
    }
    if !replies.pending.is_empty() {
        return Err(format!("no reply to {:?}", replies.pending.keys()));
    }
    outcomes.sort_by_key(|outcome| outcome.request.cookie);
    for ((request, byte), outcome) in sent.iter().zip(&outcomes) {
        let error = model.apply(request, *byte);
        model.check(outcome, error).map_err(|what| format!("{request:?}: {what}"))?;
    }
    Ok(())
}

fn serve(input: &[u8], exports: &Exports, model: &Model) -> Vec<u8> {
    let export: InUse = exports.enter("disk").expect("it exists");
    let negotiated = Negotiated {
        size_bytes: SIZE as u64,
        is_read_only: model.is_read_only,
        is_structured: model.is_structured,
        has_allocation: model.has_allocation,
        export,
    };
    let counters = Arc::default();
    let pool = Arc::new(Semaphore::new(64 << 20));
    let environment = Environment {
        budget: Budget::new(64 << 20, pool, Arc::clone(&counters)),
        counters,
        stall_timeout: Duration::from_secs(30),
        grace: Duration::from_secs(10),
    };
    let stop = watch::Sender::new(false);
    let mut output = Vec::new();
    block_on(transmit(input, &mut output, negotiated, environment, stop.subscribe()));
    output
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::{context_data, info_data};

    fn option(option: u8, data: &[u8]) -> Vec<u8> {
        let len = u16::try_from(data.len()).unwrap().to_be_bytes();
        [&[option][..], &len, data].concat()
    }

    fn request(command: u8, flags: u8, at: u32, len: u32) -> [u8; 10] {
        let [_, a, b, c] = at.to_be_bytes();
        let shift = 32_u32.saturating_sub(len.leading_zeros()).saturating_sub(8);
        let (mantissa, low) = ((len >> shift) as u8, (len & ((1 << shift) - 1)).min(255) as u8);
        [command, flags, a, b, c, 0x55, mantissa, shift as u8, low, u8::from(flags != 0)]
    }

    /// The seeds of both targets, by name. They are files for the fuzzer's sake.
    fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
        let go = info_data("disk", &[0, 1, 2, 3]);
        let contexts = context_data("", &["base:allocation", "x-y:z"]);
        let haggling = [
            vec![3],
            option(8, b""),
            option(3, b""),
            option(9, &context_data("disk", &[])),
            option(10, &contexts),
            option(6, &go),
            option(5, b""),
            option(7, &info_data("none", &[])),
            option(7, &go),
        ];
        let name = [vec![1], option(1, b"disk")];
        let abort = [vec![3], option(12, &[0; 300]), option(2, b"why")];
        let raw = [vec![3], option(201, b"IHAVEOPT\0\0\0\x03\0\0\0\0")];
        let every = [
            request(1, 0, 4096, 8192),
            request(0, 4, 100, 20_000),
            request(6, 0b10010, 8000, 600),
            request(7, 8, 0, 1 << 20),
            request(4, 1, 4000, 9000),
            request(5, 0, 0, 4096),
            request(3, 0, 0, 0),
            request(0, 0, 0, 2 << 20),
        ];
        let errors = [
            request(1, 0, SIZE as u32 - 1, 512),
            request(6, 2, SIZE as u32, 1),
            request(0, 0x80, 0, 1),
            request(8, 0, 0, 1),
            request(7, 0, 0, 1),
            request(3, 0, 0, 1),
        ];
        let large = [request(1, 1, 1, 3 << 20), request(0, 0, 0, 3 << 20)];
        let transmission =
            |kind: u8, requests: &[[u8; 10]]| [&[kind], requests.as_flattened()].concat();
        vec![
            ("nbd_handshake", "haggling", haggling.concat()),
            ("nbd_handshake", "name", name.concat()),
            ("nbd_handshake", "abort", abort.concat()),
            ("nbd_handshake", "raw", raw.concat()),
            ("nbd_requests", "every", transmission(5, &every)),
            ("nbd_requests", "every-simple", transmission(0, &every)),
            ("nbd_requests", "errors", transmission(1, &errors)),
            ("nbd_requests", "read-only", transmission(7, &every)),
            ("nbd_requests", "large", transmission(1, &large)),
            ("nbd_requests", "raw", [&transmission(5, &every[..1])[..], b"%`\x95\x13"].concat()),
        ]
    }

    /// `WRITE_SEEDS=1 cargo test -p alluvium-nbd the_seeds` writes the files again.
    #[test]
    fn the_seeds_hold_and_are_those_of_the_files() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
        for (target, name, bytes) in seeds() {
            let check = if target == "nbd_handshake" { handshake } else { requests };
            assert_eq!(check(&bytes), Ok(()), "{target}/{name}");
            let path = directory.join(target).join(name);
            if std::env::var_os("WRITE_SEEDS").is_some() {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            assert!(fs::read(&path).is_ok_and(|file| file == bytes), "{path:?} is out of date");
        }
    }

    fn options() -> impl Strategy<Value = Vec<u8>> {
        let data = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            Just(info_data("disk", &[3])),
            Just(context_data("disk", &["base:"])),
            Just(context_data("", &["base:allocation"])),
            Just(b"disk".to_vec()),
        ];
        (0..14_u8, data).prop_map(|(kind, data)| option(if kind == 13 { 255 } else { kind }, &data))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn each_option_has_one_final_reply(
            flags in any::<u8>(),
            options in prop::collection::vec(options(), 0..80),
        ) {
            prop_assert_eq!(handshake(&[vec![flags], options.concat()].concat()), Ok(()));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn each_request_has_the_reply_of_a_model(
            negotiated in any::<u8>(),
            requests in prop::collection::vec(any::<[u8; 10]>(), 0..40),
            rest in prop::collection::vec(any::<u8>(), 0..9),
        ) {
            let data = [&[negotiated], requests.as_flattened(), &rest].concat();
            prop_assert_eq!(super::requests(&data), Ok(()));
        }
    }
}
