use std::sync::Arc;

use futures::FutureExt;

use super::*;
use crate::memory::MemoryDisk;
use crate::testing::{
    OptionReply, context_data, info_data, is_final, parse_greeting, parse_option_reply, put_option,
};

const SIZE: u64 = 123 << 20 | 5;

fn exports() -> Exports {
    let exports = Exports::default();
    exports.add("disk", "", Arc::new(MemoryDisk::new(SIZE))).unwrap();
    exports.add("other", "for tests", Arc::new(MemoryDisk::new(7).read_only())).unwrap();
    exports.set_default(Some("disk"));
    exports
}

/// The result of a handshake, the replies to options, and what the server sent behind them.
struct Run {
    result: Result<Option<Negotiated>, HandshakeError>,
    replies: Vec<OptionReply>,
    rest: Vec<u8>,
}

fn run_bytes(exports: &Exports, stop: bool, input: &[u8]) -> Run {
    let (mut input, mut output) = (input, Vec::new());
    let stop = watch::Sender::new(stop).subscribe();
    let result = negotiate(&mut input, &mut output, exports, &stop).now_or_never();
    let mut rest = &output[..];
    assert_eq!(parse_greeting(&mut rest), Ok(FIXED_NEWSTYLE | NO_ZEROES));
    let mut replies = Vec::new();
    while let Ok(Some(reply)) = parse_option_reply(&mut rest) {
        replies.push(reply);
    }
    Run { result: result.expect("memory is never pending"), replies, rest: rest.to_vec() }
}

fn run_with(exports: &Exports, flags: u32, options: &[(u32, &[u8])]) -> Run {
    let mut input = flags.to_be_bytes().to_vec();
    options.iter().for_each(|(option, data)| put_option(&mut input, *option, data));
    run_bytes(exports, false, &input)
}

/// Ends the options with an abort, and returns the replies to them.
fn replies(options: &[(u32, &[u8])]) -> Vec<OptionReply> {
    let options = [options, &[(opt::ABORT, b"ignored")]].concat();
    let mut run = run_with(&exports(), 3, &options);
    assert!(matches!(run.result, Ok(None)));
    assert_eq!(run.replies.pop().unwrap(), (opt::ABORT, rep::ACK, vec![]));
    assert!(run.rest.is_empty());
    run.replies
}

fn kinds(replies: &[OptionReply]) -> Vec<u32> {
    replies.iter().map(|(_, kind, _)| *kind).collect()
}

#[test]
fn an_export_name_begins_the_transmission() {
    for (name, size, more_flags) in [
        ("disk", SIZE, flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO),
        ("", SIZE, flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO),
        ("other", 7, flag::READ_ONLY),
    ] {
        for (client_flags, zeros) in [(0, 124), (1, 124), (2, 0), (3, 0)] {
            let name = name.as_bytes();
            let run = run_with(&exports(), client_flags, &[(opt::EXPORT_NAME, name)]);
            let negotiated = run.result.unwrap().unwrap();
            assert!(!negotiated.is_structured && !negotiated.has_allocation);
            assert_eq!(negotiated.size_bytes, size);
            // HAS_FLAGS, SEND_FLUSH, SEND_FUA, CAN_MULTI_CONN, SEND_CACHE
            let flags = (0b101_0000_1101 | more_flags).to_be_bytes();
            assert_eq!(run.rest, [&size.to_be_bytes()[..], &flags, &vec![0; zeros]].concat());
        }
    }
}

#[test]
fn an_export_name_that_does_not_exist_ends_the_connection() {
    for name in [&b"none"[..], b"\xff", b"a\0"] {
        let run = run_with(&exports(), 3, &[(opt::EXPORT_NAME, name)]);
        assert!(matches!(run.result, Err(HandshakeError::NoExport)));
        assert!(run.rest.is_empty());
    }
    let exports = exports();
    exports.set_default(None);
    assert!(run_with(&exports, 3, &[(opt::EXPORT_NAME, b"")]).result.is_err());
}

#[test]
fn go_sends_what_was_asked_for_and_begins_the_transmission() {
    let wanted = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 99];
    let run = run_with(
        &exports(),
        3,
        &[
            (opt::STRUCTURED_REPLY, b""),
            (opt::INFO, &info_data("other", &wanted)),
            (opt::GO, &info_data("other", &wanted)),
        ],
    );
    let negotiated = run.result.unwrap().unwrap();
    assert!(negotiated.is_structured && negotiated.is_read_only && !negotiated.has_allocation);
    assert_eq!((negotiated.size_bytes, negotiated.export.0.name.as_str()), (7, "other"));
    let flags = (0b101_0000_1101 | flag::READ_ONLY | flag::SEND_DF).to_be_bytes();
    let expected = [
        (rep::INFO, [&[0, 0], &7_u64.to_be_bytes()[..], &flags].concat()),
        (rep::INFO, b"\0\x01other".to_vec()),
        (rep::INFO, b"\0\x02for tests".to_vec()),
        (rep::INFO, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0".to_vec()),
        (rep::ACK, vec![]),
    ];
    let expected = |option| expected.clone().map(|(kind, data)| (option, kind, data));
    assert_eq!(run.replies[0], (opt::STRUCTURED_REPLY, rep::ACK, vec![]));
    assert_eq!(run.replies[1..6], expected(opt::INFO));
    assert_eq!(run.replies[6..], expected(opt::GO));
    assert!(run.rest.is_empty(), "no zeros follow");
}

#[test]
fn go_sends_no_more_than_asked() {
    let run = run_with(&exports(), 0, &[(opt::GO, &info_data("", &[info::DESCRIPTION]))]);
    assert_eq!(kinds(&run.replies), [rep::INFO, rep::ACK]);
    assert_eq!(run.result.unwrap().unwrap().export.0.name, "disk");
    assert!(run.rest.is_empty());
}

#[test]
fn an_option_that_fails_leaves_the_handshake_going() {
    let name = info_data("none", &[]);
    for (option, data, kind) in [
        (opt::INFO, &name[..], rep::ERR_UNKNOWN),
        (opt::GO, &name, rep::ERR_UNKNOWN),
        (opt::GO, b"", rep::ERR_INVALID),
        (opt::GO, b"\0\0\0\x04disk\0\x01", rep::ERR_INVALID),
        (opt::INFO, b"\xff\xff\xff\xff\0\0", rep::ERR_INVALID),
        (opt::LIST, b"x", rep::ERR_INVALID),
        (opt::STRUCTURED_REPLY, b"x", rep::ERR_INVALID),
        (opt::LIST_META_CONTEXT, &context_data("disk", &[]), rep::ERR_INVALID),
        (opt::SET_META_CONTEXT, &context_data("disk", &[]), rep::ERR_INVALID),
        (crate::protocol::option::STARTTLS, b"", rep::ERR_UNSUP),
        (4, b"", rep::ERR_UNSUP),
        (11, b"", rep::ERR_UNSUP),
        (u32::MAX, b"anything", rep::ERR_UNSUP),
        (u32::MAX, &[0; MAX_OPTION_BYTES], rep::ERR_UNSUP),
        (u32::MAX, &[0; MAX_OPTION_BYTES + 1], rep::ERR_TOO_BIG),
        (opt::LIST, &[0; MAX_SKIPPED_BYTES], rep::ERR_TOO_BIG),
    ] {
        let replies = replies(&[(option, data), (opt::LIST, b"")]);
        assert_eq!((replies[0].0, replies[0].1), (option, kind), "{option} {}", data.len());
        assert_eq!(kinds(&replies[1..]), [rep::SERVER, rep::SERVER, rep::ACK]);
    }
}

#[test]
fn a_list_has_names_and_descriptions() {
    let expected = [
        (opt::LIST, rep::SERVER, b"\0\0\0\x04disk".to_vec()),
        (opt::LIST, rep::SERVER, b"\0\0\0\x05otherfor tests".to_vec()),
        (opt::LIST, rep::ACK, vec![]),
    ];
    assert_eq!(replies(&[(opt::LIST, b"")]), expected);
}

#[test]
fn a_long_list_is_sent_in_parts() {
    let exports = Exports::default();
    let disk: Arc<MemoryDisk> = Arc::new(MemoryDisk::new(1));
    for number in 0..1000 {
        exports.add(&format!("{number:0>100}"), "", disk.clone()).unwrap();
    }
    let run = run_with(&exports, 3, &[(opt::LIST, b""), (opt::ABORT, b"")]);
    assert_eq!(run.replies.len(), 1002);
    assert_eq!(run.replies.iter().filter(|reply| is_final(reply)).count(), 2);
}

#[test]
fn a_context_is_listed_if_a_query_matches() {
    let listed = |queries: &[&str]| {
        let data = context_data("disk", queries);
        replies(&[(opt::STRUCTURED_REPLY, b""), (opt::LIST_META_CONTEXT, &data)])[1..].to_vec()
    };
    let context = (opt::LIST_META_CONTEXT, rep::META_CONTEXT, b"\0\0\0\0base:allocation".to_vec());
    let ack = (opt::LIST_META_CONTEXT, rep::ACK, vec![]);
    for queries in [&[][..], &["base:"], &["x-y:", "base:allocation"], &["base:", "base:"]] {
        assert_eq!(listed(queries), [context.clone(), ack.clone()], "{queries:?}");
    }
    for queries in [&["x-y:"][..], &["base:alloc"], &["base"], &["qemu:allocation-depth"], &[""]] {
        assert_eq!(listed(queries), std::slice::from_ref(&ack), "{queries:?}");
    }
    let unknown = context_data("none", &[]);
    let replies = replies(&[(opt::STRUCTURED_REPLY, b""), (opt::LIST_META_CONTEXT, &unknown)]);
    assert_eq!(kinds(&replies[1..]), [rep::ERR_UNKNOWN]);
}

#[test]
fn a_context_is_set_for_the_export_that_was_named_last() {
    let allocation = |name| context_data(name, &["x-y:z", "base:allocation", "base:allocation"]);
    let [disk, default, other, unknown] = ["disk", "", "other", "none"].map(allocation);
    let nothing = context_data("disk", &[]);
    let wildcard = context_data("disk", &["base:"]);
    let invalid = &disk[..disk.len() - 1];
    for (sets, has_allocation) in [
        (&[&disk[..]][..], true),
        (&[&default], true),
        (&[&other], false),
        (&[&other, &disk], true),
        (&[&disk, &other], false),
        (&[&disk, &nothing], false),
        (&[&disk, &wildcard], false),
        (&[&disk, &unknown], false),
        (&[&disk, invalid], false),
        (&[], false),
    ] {
        let go = info_data("disk", &[]);
        let sets = sets.iter().map(|data| (opt::SET_META_CONTEXT, *data));
        let mut options = vec![(opt::STRUCTURED_REPLY, &b""[..])];
        options.extend(sets);
        options.push((opt::GO, &go));
        let run = run_with(&exports(), 3, &options);
        assert_eq!(run.result.unwrap().unwrap().has_allocation, has_allocation, "{options:?}");
    }
    let set = replies(&[(opt::STRUCTURED_REPLY, b""), (opt::SET_META_CONTEXT, &disk)]);
    let context = [&ALLOCATION_CONTEXT_ID.to_be_bytes()[..], b"base:allocation"].concat();
    assert_eq!(set[1], (opt::SET_META_CONTEXT, rep::META_CONTEXT, context));
    assert_eq!(kinds(&set[2..]), [rep::ACK]);
}

#[test]
fn a_violation_ends_the_connection() {
    let run = |input: &[u8]| run_bytes(&exports(), false, input).result.err().unwrap();
    assert!(matches!(run(&[0, 0, 0, 4]), HandshakeError::ClientFlags(4)));
    assert!(matches!(run(&[0x80, 0, 0, 3]), HandshakeError::ClientFlags(_)));
    assert!(matches!(run(b"\0\0\0\x03IHAVEOPX\0\0\0\x03\0\0\0\0"), HandshakeError::Magic(_)));
    for len in [MAX_SKIPPED_BYTES as u32 + 1, u32::MAX] {
        let option = [&b"\0\0\0\x03IHAVEOPT\0\0\0\x03"[..], &len.to_be_bytes()].concat();
        assert!(matches!(run(&option), HandshakeError::Length(announced) if announced == len));
    }
    // The client ends the connection somewhere.
    let mut whole = 3_u32.to_be_bytes().to_vec();
    put_option(&mut whole, opt::LIST, b"");
    put_option(&mut whole, opt::GO, &info_data("disk", &[]));
    for end in 0..whole.len() {
        assert!(matches!(run(&whole[..end]), HandshakeError::Io(_)), "{end}");
    }
}

#[test]
fn a_handshake_has_a_bounded_number_of_options() {
    let options = vec![(opt::LIST, &b""[..]); MAX_OPTIONS as usize + 1];
    let run = run_with(&exports(), 3, &options);
    assert!(matches!(run.result, Err(HandshakeError::TooManyOptions)));
    let acks = run.replies.iter().filter(|reply| is_final(reply)).count();
    assert_eq!(acks, MAX_OPTIONS as usize);
}

#[test]
fn a_server_that_stops_refuses_options() {
    let mut input = 3_u32.to_be_bytes().to_vec();
    let go = info_data("disk", &[]);
    for (option, data) in
        [(opt::LIST, &b""[..]), (opt::GO, &go), (u32::MAX, b""), (opt::ABORT, b"")]
    {
        put_option(&mut input, option, data);
    }
    let run = run_bytes(&exports(), true, &input);
    assert!(matches!(run.result, Ok(None)));
    assert_eq!(
        kinds(&run.replies),
        [rep::ERR_SHUTDOWN, rep::ERR_SHUTDOWN, rep::ERR_SHUTDOWN, rep::ACK]
    );
    let mut input = 3_u32.to_be_bytes().to_vec();
    put_option(&mut input, opt::EXPORT_NAME, b"disk");
    assert!(run_bytes(&exports(), true, &input).result.is_err());
}
