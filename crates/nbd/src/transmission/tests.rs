//! Connections as clients see them. Time is paused: it advances only when nothing can progress.

use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

use super::*;
use crate::disk::{Allocation, Part, ZeroMode};
use crate::memory::MemoryDisk;
use crate::protocol::{REQUEST_MAGIC, chunk, command_flag as flag};
use crate::server::{Options, Server};
use crate::testing::{Bench, Outcome, TestDisk, value};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

fn bench() -> Bench {
    Bench::new(TestDisk::new(SIZE), Options::default())
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8 | 1).collect()
}

/// Number of an error, and whether it has a text.
fn errors(outcome: &Outcome) -> Vec<(u32, bool, Option<u64>)> {
    let errors = outcome.errors.iter();
    errors.map(|(error, text, at)| (*error, !text.is_empty(), *at)).collect()
}

#[tokio::test(start_paused = true)]
async fn holes_are_not_sent_to_clients_with_structured_replies() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    let data = pattern(8192);
    assert_eq!(client.write(4096, &data).await, 0);
    let read = client.ask(Command::Read, 0, 100, 20_000).await;
    let expected = [&[0; 3996][..], &data, &[0; 7812]].concat();
    assert!(read.data == expected);
    let (data_kind, hole) = (chunk::OFFSET_DATA, chunk::OFFSET_HOLE);
    assert_eq!(read.chunks, [(hole, 100, 3996), (data_kind, 4096, 8192), (hole, 12_288, 7812)]);
    let read = client.ask(Command::Read, flag::DF, 100, 20_000).await;
    assert!(read.data == expected);
    assert_eq!(read.chunks, [(data_kind, 100, 20_000)]);
    let read = client.ask(Command::Read, flag::DF | flag::FUA, 1 << 20, 300_000).await;
    assert_eq!(read.chunks, [(hole, 1 << 20, 300_000)]);
    let (mut client, _) = bench.connect(false).await;
    let read = client.ask(Command::Read, 0, 100, 20_000).await;
    assert!(read.data == expected && read.chunks.is_empty());
    let read = client.ask(Command::Read, 0, 1 << 20, 300_000).await;
    assert!(read.data == vec![0; 300_000]);
}

#[tokio::test(start_paused = true)]
async fn requests_without_alignment_read_and_write_their_bytes() {
    for is_structured in [false, true] {
        let bench = bench();
        let (mut client, _) = bench.connect(is_structured).await;
        let data = pattern(3 * MIB as usize + 4567);
        let mut content = vec![0; 4 * MIB as usize];
        for (at, len) in
            [(1, 1), (4095, 2), (12_345, 67_890), (MIB as usize - 3, 7), (77, data.len())]
        {
            assert_eq!(client.write(at as u64, &data[..len]).await, 0);
            content[at..at + len].copy_from_slice(&data[..len]);
            let from = at.saturating_sub(5);
            let read = client.ask(Command::Read, 0, from as u64, len as u32 + 9).await;
            assert!(read.data == content[from..from + len + 9], "{at} {len}");
        }
        let read = client.ask(Command::Read, 0, 0, content.len() as u32).await;
        assert!(read.data == content);
    }
}

#[tokio::test(start_paused = true)]
async fn a_large_request_is_executed_in_pieces_and_answered_once() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    let data = pattern(2 * MIB as usize + 10);
    assert_eq!(client.write(MIB - 5, &data).await, 0);
    let pieces = [(MIB - 5, 5), (MIB, MIB), (2 * MIB, MIB), (3 * MIB, 5)];
    let calls = |name| pieces.map(|(at, len)| (name, at, len));
    assert_eq!(bench.disk.take_calls(), calls("write"));
    let read = client.ask(Command::Read, 0, MIB - 5, data.len() as u32).await;
    assert!(read.data == data);
    assert_eq!(bench.disk.take_calls(), calls("read"));
    // A request of up to 1 MiB is one piece.
    assert_eq!(client.write(5, &data[..MIB as usize]).await, 0);
    assert_eq!(bench.disk.take_calls(), [("write", 5, MIB)]);
    // One chunk, and a simple reply, need all data at once.
    let read = client.ask(Command::Read, flag::DF, MIB - 5, data.len() as u32).await;
    assert!(read.data[10..] == data[10..] && read.chunks.len() == 1);
    let (mut client, _) = bench.connect(false).await;
    let read = client.ask(Command::Read, 0, MIB - 5, data.len() as u32).await;
    assert!(read.data[10..] == data[10..]);
    let call = ("read", MIB - 5, data.len() as u64);
    assert_eq!(bench.disk.take_calls(), [call, call]);
    let largest = client.ask(Command::Read, 0, 0, MAX_PAYLOAD).await;
    assert_eq!((largest.error(), largest.data.len()), (0, MAX_PAYLOAD as usize));
}

#[tokio::test(start_paused = true)]
async fn each_command_calls_the_disk() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    for (command, flags, at, len, call) in [
        (Command::Flush, flag::FUA, 0, 0, ("flush", 0, 0)),
        (Command::Trim, flag::FUA, 4096, 8192, ("discard", 4096, 8192)),
        (Command::Cache, 0, 1, 3 << 20, ("prefetch", 1, 3 << 20)),
        (Command::WriteZeroes, flag::FUA, 3, 9 << 20, ("zero", 3, 9 << 20)),
        (Command::WriteZeroes, flag::NO_HOLE, 3, 9, ("zero, allocate", 3, 9)),
        (Command::WriteZeroes, flag::FAST_ZERO, 3, 9, ("zero", 3, 9)),
        (Command::BlockStatus, flag::REQ_ONE, 3, 9, ("status", 3, 9)),
    ] {
        let outcome = client.ask(command, flags, at, len).await;
        assert_eq!(outcome.error(), 0, "{command:?}");
        assert_eq!(bench.disk.take_calls(), [call]);
    }
    let counters = bench.counters();
    assert_eq!(value(&counters.command(Command::WriteZeroes).requests), 3);
    assert_eq!(value(&counters.command(Command::WriteZeroes).bytes), (9 << 20) + 18);
    assert_eq!(value(&counters.requests_in_flight), 0);
}

#[tokio::test(start_paused = true)]
async fn an_empty_range_does_not_reach_the_disk() {
    let bench = bench();
    for is_structured in [false, true] {
        let (mut client, _) = bench.connect(is_structured).await;
        for command in [Command::Read, Command::Write, Command::Trim, Command::WriteZeroes] {
            assert_eq!(client.ask(command, 0, SIZE, 0).await.error(), 0);
        }
    }
    assert!(bench.disk.take_calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn fast_zeroing_fails_at_once_if_it_is_not_fast() {
    let bench = Bench::new(TestDisk::of(MemoryDisk::new(SIZE), false), Options::default());
    let (mut client, _) = bench.connect(true).await;
    assert_eq!(client.ask(Command::WriteZeroes, flag::FAST_ZERO, 0, 4096).await.error(), 95);
    assert!(bench.disk.take_calls().is_empty());
    assert_eq!(client.ask(Command::WriteZeroes, 0, 0, 4096).await.error(), 0);
    assert_eq!(value(&bench.counters().command(Command::WriteZeroes).errors), 1);
}

#[tokio::test(start_paused = true)]
async fn status_reports_data_zeros_and_holes() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    client.write(4096, &pattern(4096)).await;
    client.ask(Command::WriteZeroes, flag::NO_HOLE, 8192, 4096).await;
    let status = client.ask(Command::BlockStatus, 0, 0, 1 << 20).await;
    assert_eq!(status.extents, [(4096, 3), (4096, 0), (4096, 2), ((1 << 20) - 12_288, 3)]);
    let one = client.ask(Command::BlockStatus, flag::REQ_ONE, 4000, 9000).await;
    assert_eq!(one.extents, [(96, 3)]);
    let (mut simple, _) = bench.connect(false).await;
    assert_eq!(simple.ask(Command::BlockStatus, 0, 0, 1 << 20).await.error(), 22);
}

#[tokio::test(start_paused = true)]
async fn a_status_has_a_bounded_number_of_extents() {
    let size = 4096 * (MAX_EXTENTS as u64 + 100);
    let bench = Bench::new(TestDisk::new(size), Options::default());
    for block in (0..size / 4096).step_by(2) {
        bench.disk.memory.write(block * 4096, Bytes::from_static(&[1])).await.unwrap();
    }
    let (mut client, _) = bench.connect(true).await;
    let status = client.ask(Command::BlockStatus, 0, 0, size as u32).await;
    assert_eq!(status.extents.len(), MAX_EXTENTS);
    let rest = client.ask(Command::BlockStatus, 0, 4096 * MAX_EXTENTS as u64, 409_600).await;
    assert_eq!(rest.extents.len(), 100);
}

#[tokio::test(start_paused = true)]
async fn errors_of_the_disk_have_their_numbers() {
    for (error, number) in [
        (DiskError::NoSpace, 28),
        (DiskError::Invalid("no".into()), 22),
        (DiskError::Io("three servers do not answer".into()), 5),
    ] {
        for is_structured in [false, true] {
            let bench = bench();
            bench.disk.fail_at(0, error.clone());
            let (mut client, _) = bench.connect(is_structured).await;
            for command in [Command::Read, Command::Flush, Command::Trim, Command::WriteZeroes] {
                let len = if command == Command::Flush { 0 } else { 512 };
                let outcome = client.ask(command, 0, 0, len).await;
                let at = (is_structured && command == Command::Read).then_some(0);
                assert_eq!(errors(&outcome), [(number, is_structured, at)], "{command:?}");
                if is_structured {
                    assert_eq!(outcome.errors[0].1, error.to_string());
                }
            }
            assert_eq!(client.write(0, &[1]).await, number);
            assert_eq!(client.write(1, &[1]).await, 0);
            let counters = bench.counters();
            assert_eq!(value(&counters.command(Command::Write).errors), 1);
            if is_structured {
                assert_eq!(client.ask(Command::BlockStatus, 0, 0, 512).await.error(), number);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_error_text_is_cut_between_characters() {
    let bench = bench();
    bench.disk.fail_at(0, DiskError::Io("ä".repeat(5000)));
    let (mut client, _) = bench.connect(true).await;
    let outcome = client.ask(Command::Read, 0, 0, 1).await;
    assert_eq!(outcome.errors[0].1, "ä".repeat(256));
}

#[tokio::test(start_paused = true)]
async fn a_part_of_a_read_fails_by_its_offset_and_the_others_have_data() {
    let bench = bench();
    let data = pattern(3 * MIB as usize);
    let (mut client, _) = bench.connect(true).await;
    assert_eq!(client.write(0, &data).await, 0);
    bench.disk.fail_at(MIB + 100, DiskError::Io("damaged".into()));
    let read = client.ask(Command::Read, 0, 0, 3 * MIB as u32).await;
    assert_eq!(errors(&read), [(5, true, Some(MIB))]);
    let mib = MIB as usize;
    assert!(read.data[..mib] == data[..mib] && read.data[2 * mib..] == data[2 * mib..]);
    assert_eq!(value(&bench.counters().command(Command::Read).errors), 1);
    // The last piece, which ends the reply.
    bench.disk.fail_at(3 * MIB - 1, DiskError::Io("damaged".into()));
    let read = client.ask(Command::Read, 0, 0, 3 * MIB as u32).await;
    assert_eq!(errors(&read), [(5, true, Some(MIB)), (5, true, Some(2 * MIB))]);
    assert_eq!(value(&bench.counters().command(Command::Read).errors), 2);
    // Without fragments, and with simple replies, there is only the error.
    let read = client.ask(Command::Read, flag::DF, 0, 3 * MIB as u32).await;
    assert_eq!((errors(&read), read.chunks.len()), (vec![(5, true, Some(0))], 0));
    let (mut client, _) = bench.connect(false).await;
    assert_eq!(client.ask(Command::Read, 0, 0, 3 * MIB as u32).await.error(), 5);
    assert_eq!(client.ask(Command::Read, 0, 0, 100).await.error(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_write_fails_once_if_any_of_its_pieces_fails() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    bench.disk.fail_at(MIB, DiskError::NoSpace);
    bench.disk.fail_at(3 * MIB, DiskError::Io("later".into()));
    assert_eq!(client.write(0, &pattern(4 * MIB as usize)).await, 28);
    assert_eq!(client.write(0, &[1]).await, 0);
    assert_eq!(value(&bench.counters().command(Command::Write).errors), 1);
    assert_eq!(value(&bench.counters().bytes_in_flight), 0);
}

/// A disk whose results contradict the trait's rules.
struct WrongDisk;

#[async_trait]
impl Disk for WrongDisk {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn is_read_only(&self) -> bool {
        false
    }

    async fn read(&self, at: u64, len: u32) -> Result<Vec<Part>, DiskError> {
        Ok(vec![Part::Zeros(if at == 0 { len + 1 } else { len - 1 })])
    }

    async fn write(&self, _at: u64, _data: Bytes) -> Result<(), DiskError> {
        Ok(())
    }

    async fn zero(&self, _at: u64, _len: u64, _mode: ZeroMode) -> Result<(), DiskError> {
        Ok(())
    }

    fn is_zero_fast(&self, _at: u64, _len: u64, _mode: ZeroMode) -> bool {
        true
    }

    async fn discard(&self, _at: u64, _len: u64) -> Result<(), DiskError> {
        Ok(())
    }

    async fn flush(&self) -> Result<(), DiskError> {
        Ok(())
    }

    async fn status(
        &self,
        at: u64,
        _len: u64,
        max_extents: usize,
    ) -> Result<Vec<Extent>, DiskError> {
        let extent = |len| Extent { len, allocation: Allocation::Hole };
        match at {
            0 => Ok(Vec::new()),
            1 => Ok(vec![extent(0); 3]),
            // Not wrong, but not merged.
            3 => Ok(vec![extent(10), extent(0), extent(20)]),
            _ => Ok((0..max_extents as u64 + 9).map(|_| extent(u64::MAX)).collect()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn wrong_results_of_a_disk_become_errors() {
    let bench = bench();
    bench.exports.add("wrong", "", Arc::new(WrongDisk)).unwrap();
    for is_structured in [false, true] {
        let mut client = crate::testing::Client::greet(bench.open(64 << 10).0).await;
        client.go("wrong", is_structured).await;
        assert_eq!(client.ask(Command::Read, 0, 0, 512).await.error(), 5);
        assert_eq!(client.ask(Command::Read, 0, 1, 512).await.error(), 5);
        if is_structured {
            assert_eq!(client.ask(Command::BlockStatus, 0, 0, 512).await.error(), 5);
            assert_eq!(client.ask(Command::BlockStatus, 0, 1, 512).await.error(), 5);
            let status = client.ask(Command::BlockStatus, 0, 2, 512).await;
            assert_eq!(status.extents, [(512, 3)]);
            let status = client.ask(Command::BlockStatus, 0, 3, 512).await;
            assert_eq!(status.extents, [(30, 3)]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn replies_overtake_each_other() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    bench.disk.hold.send_replace(Some(100));
    let held = client.send(Command::Read, 0, 0, 4096, &[]).await;
    let held_write = client.send(Command::Write, 0, 100, 1, &[1]).await;
    for at in [4096, 8192] {
        assert_eq!(client.ask(Command::Read, 0, at, 4096).await.error(), 0);
    }
    assert_eq!(value(&bench.counters().requests_in_flight), 2);
    bench.disk.hold.send_replace(None);
    let ended = [client.outcome().await.unwrap(), client.outcome().await.unwrap()];
    let mut cookies = ended.map(|outcome| outcome.request.cookie);
    cookies.sort_unstable();
    assert_eq!(cookies, [held, held_write]);
}

#[tokio::test(start_paused = true)]
async fn requests_that_arrive_together_are_all_answered() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    let mut bytes = Vec::new();
    for number in 0..1000_u64 {
        let kind = if number % 3 == 0 { Command::Write } else { Command::Read } as u16;
        let len = (number % 61) as u32;
        let request = Request { flags: 0, kind, cookie: number, at: number * 64, len };
        client.replies.expect(request);
        bytes.extend(request.encode());
        if number % 3 == 0 {
            bytes.extend(vec![number as u8; len as usize]);
        }
    }
    let (mut reader, mut writer) = tokio::io::split(client.stream);
    let sending = tokio::spawn(async move { writer.write_all(&bytes).await.unwrap() });
    let mut received = Vec::new();
    while !client.replies.pending.is_empty() {
        assert!(reader.read_buf(&mut received).await.unwrap() > 0);
        let mut rest = &received[..];
        loop {
            match client.replies.parse(&mut rest).unwrap() {
                crate::testing::Parsed::Incomplete => break,
                crate::testing::Parsed::Partial => {}
                crate::testing::Parsed::Finished(outcome) => assert_eq!(outcome.error(), 0),
            }
        }
        received = rest.to_vec();
    }
    sending.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn refused_writes_are_skipped() {
    let disk = TestDisk::of(MemoryDisk::new(SIZE).read_only(), true);
    let read_only = Bench::new(disk, Options::default());
    let bench = bench();
    for is_structured in [false, true] {
        let (mut client, _) = read_only.connect(is_structured).await;
        assert_eq!(client.write(0, &pattern(3 << 20)).await, 1);
        assert_eq!(client.ask(Command::Read, 0, 0, 16).await.data, [0; 16]);
        let (mut client, _) = bench.connect(is_structured).await;
        assert_eq!(client.write(SIZE - 1, &pattern(200_000)).await, 28);
        let cookie = client.send(Command::Write, 1 << 15, 0, 10, &[1; 10]).await;
        let outcome = client.outcome().await.unwrap();
        assert_eq!((outcome.request.cookie, outcome.error()), (cookie, 22));
        assert_eq!(client.ask(Command::Read, 0, 0, 16).await.data, [0; 16]);
    }
    assert_eq!(value(&read_only.counters().command(Command::Write).errors), 2);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_command_is_refused_and_its_payload_is_a_violation() {
    for kind in [8, 9, 200, u16::MAX] {
        let bench = bench();
        let (mut client, serving) = bench.connect(true).await;
        let unknown = Request { flags: 0, kind, cookie: 9, at: 0, len: 100 };
        client.replies.expect(unknown);
        client.stream.write_all(&unknown.encode()).await.unwrap();
        assert_eq!(client.outcome().await.unwrap().error(), 22);
        // The connection continues if there is no payload.
        assert_eq!(client.ask(Command::Read, 0, 0, 16).await.error(), 0);
        client.stream.write_all(&[7; 100]).await.unwrap();
        assert!(client.outcome().await.is_none());
        serving.await.unwrap();
        assert_eq!(value(&bench.counters().violations), 1);
        assert_eq!(value(&bench.counters().unknown_requests), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_violation_does_not_cost_the_replies_before_it() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    bench.disk.hold.send_replace(Some(5));
    client.send(Command::Write, 0, 5, 1, &[1]).await;
    let mut wrong = Request { flags: 0, kind: 0, cookie: 0, at: 0, len: 1 }.encode();
    wrong[..4].copy_from_slice(&(REQUEST_MAGIC ^ 1).to_be_bytes());
    client.stream.write_all(&wrong).await.unwrap();
    // Time for the server to read it.
    sleep(Duration::from_secs(1)).await;
    bench.disk.hold.send_replace(None);
    assert_eq!(client.outcome().await.unwrap().error(), 0);
    assert!(client.outcome().await.is_none());
    drop(client);
    serving.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_too_long_ends_the_connection_and_takes_no_memory() {
    for len in [MAX_PAYLOAD + 1, u32::MAX] {
        let bench = bench();
        let (mut client, serving) = bench.connect(true).await;
        client.send(Command::Write, 0, 0, len, &[1; 1000]).await;
        // Longer than the export, too.
        assert!([22, 28].contains(&client.outcome().await.unwrap().error()));
        assert_eq!(value(&bench.counters().bytes_in_flight), 0);
        assert!(client.outcome().await.is_none());
        serving.await.unwrap();
        assert_eq!(value(&bench.counters().violations), 1);
    }
    // 32 MiB is not too long.
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    assert_eq!(client.write(SIZE / 2, &vec![3; MAX_PAYLOAD as usize]).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_not_complete_has_no_effect() {
    let request = Request { flags: 0, kind: 1, cookie: 1, at: 0, len: 5000 };
    let bytes = [&request.encode()[..], &[1; 5000]].concat();
    for end in [1, 27, 28, 29, 1052, 5027] {
        let bench = bench();
        let (mut client, serving) = bench.connect(true).await;
        client.stream.write_all(&bytes[..end]).await.unwrap();
        client.stream.shutdown().await.unwrap();
        serving.await.unwrap();
        assert!(client.outcome().await.is_none());
        assert!(bench.disk.take_calls().is_empty());
        assert_eq!(value(&bench.counters().bytes_in_flight), 0);
        assert_eq!(value(&bench.counters().requests_in_flight), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_stops_inside_a_request_is_disconnected() {
    let request = Request { flags: 0, kind: 1, cookie: 1, at: 0, len: 5000 };
    let bytes = [&request.encode()[..], &[1; 5000]].concat();
    for end in [1, 27, 28, 5027] {
        let bench = bench();
        let (mut client, serving) = bench.connect(true).await;
        // One byte at a time is no progress.
        for byte in &bytes[..end.min(60)] {
            client.stream.write_all(&[*byte]).await.unwrap();
            sleep(Duration::from_millis(400)).await;
        }
        client.stream.write_all(&bytes[end.min(60)..end]).await.unwrap();
        let began = Instant::now();
        serving.await.unwrap();
        assert!(began.elapsed() <= Duration::from_secs(30));
        assert_eq!(value(&bench.counters().stalled_connections), 1);
        assert_eq!(value(&bench.counters().bytes_in_flight), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_header_that_arrives_byte_by_byte_is_not_waited_for() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    let request = Request { flags: 0, kind: 0, cookie: 1, at: 0, len: 1 };
    let began = Instant::now();
    for byte in request.encode() {
        if client.stream.write_all(&[byte]).await.is_err() {
            break;
        }
        sleep(Duration::from_secs(2)).await;
    }
    serving.await.unwrap();
    assert!(began.elapsed() <= Duration::from_secs(32));
    assert_eq!(value(&bench.counters().stalled_connections), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_receives_slowly_stays_connected() {
    let bench = bench();
    bench.disk.memory.write(0, Bytes::from(pattern(MIB as usize))).await.unwrap();
    let (mut client, _) = bench.connect(true).await;
    for _ in 0..5 {
        client.send(Command::Read, 0, 0, MIB as u32, &[]).await;
    }
    // Each MiB has the time anew.
    for _ in 0..5 {
        sleep(Duration::from_secs(20)).await;
        assert_eq!(client.outcome().await.expect("it is connected").error(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_client_stays_connected() {
    let bench = bench();
    let (mut client, _) = bench.connect(true).await;
    sleep(Duration::from_secs(7 * 24 * 3600)).await;
    assert_eq!(client.ask(Command::Read, 0, 0, 16).await.error(), 0);
    // While the disk does not answer, too.
    bench.disk.hold.send_replace(Some(0));
    client.send(Command::Read, 0, 0, 16, &[]).await;
    sleep(Duration::from_secs(24 * 3600)).await;
    bench.disk.hold.send_replace(None);
    assert_eq!(client.outcome().await.unwrap().error(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_receive_replies_is_disconnected() {
    let bench = bench();
    bench.disk.memory.write(0, Bytes::from(pattern(MIB as usize))).await.unwrap();
    let (mut client, serving) = bench.connect(true).await;
    for _ in 0..100 {
        client.send(Command::Read, 0, 0, MIB as u32, &[]).await;
    }
    sleep(Duration::from_secs(1)).await;
    let (reserve, limit) = (MIB + 4096, 64 * MIB);
    let in_flight = value(&bench.counters().bytes_in_flight);
    assert!(in_flight > limit - MIB && in_flight <= reserve + limit, "{in_flight}");
    serving.await.unwrap();
    assert_eq!(value(&bench.counters().stalled_connections), 1);
    assert_eq!(value(&bench.counters().bytes_in_flight), 0);
    assert_eq!(value(&bench.counters().requests_in_flight), 0);
}

#[tokio::test(start_paused = true)]
async fn a_full_pool_leaves_each_connection_its_reserve() {
    let options = Options { pool_bytes: 0, connection_bytes: 0, ..Options::default() };
    let bench = Bench::new(TestDisk::new(SIZE), options);
    bench.disk.hold.send_replace(Some(SIZE - 1));
    let (greedy, _) = bench.connect(true).await;
    let mut stream = greedy.stream;
    let sending = tokio::spawn(async move {
        let payload = vec![1; MIB as usize];
        for cookie in 0..100 {
            let at = SIZE - MIB;
            let request = Request { flags: 0, kind: 1, cookie, at, len: MIB as u32 };
            if stream.write_all(&request.encode()).await.is_err()
                || stream.write_all(&payload).await.is_err()
            {
                return;
            }
        }
        unreachable!("the server has read 100 MiB");
    });
    sleep(Duration::from_secs(1)).await;
    // The reserve, and 31 pieces of the least pool.
    assert_eq!(bench.disk.take_calls().len(), 32);
    let (mut client, _) = bench.connect(true).await;
    let data = pattern(5 * MIB as usize);
    assert_eq!(client.write(0, &data).await, 0);
    let read = client.ask(Command::Read, 0, 0, data.len() as u32).await;
    assert!(read.data == data);
    sending.abort();
}

#[tokio::test(start_paused = true)]
async fn a_fenced_disk_ends_the_connection_after_its_answers() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    bench.disk.fail_at(0, DiskError::Fenced);
    bench.disk.hold.send_replace(Some(9999));
    let held = client.send(Command::Read, 0, 9999, 1, &[]).await;
    assert_eq!(client.write(0, &[1]).await, 108);
    assert_eq!(client.write(1, &pattern(200_000)).await, 108);
    assert_eq!(client.ask(Command::Read, 0, 1, 1).await.error(), 108);
    bench.disk.hold.send_replace(None);
    let outcome = client.outcome().await.unwrap();
    assert_eq!((outcome.request.cookie, outcome.error()), (held, 0));
    assert!(client.outcome().await.is_none());
    drop(client);
    serving.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stops_completes_what_is_in_flight_and_reads_no_more() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    let (mut idle, idle_serving) = bench.connect(false).await;
    bench.disk.hold.send_replace(Some(9999));
    let held = client.send(Command::Write, 0, 9999, 1, &[5]).await;
    assert_eq!(client.ask(Command::Read, 0, 0, 1).await.error(), 0);
    bench.stop.send_replace(true);
    assert!(idle.outcome().await.is_none());
    drop(idle);
    idle_serving.await.unwrap();
    client.send(Command::Read, 0, 0, 1, &[]).await;
    client.send(Command::Write, 0, 0, 1000, &[7; 999]).await;
    sleep(Duration::from_secs(1)).await;
    bench.disk.hold.send_replace(None);
    let outcome = client.outcome().await.unwrap();
    assert_eq!((outcome.request.cookie, outcome.error()), (held, 0));
    assert!(client.outcome().await.is_none());
    assert_eq!(bench.disk.take_calls().len(), 2);
    // The client leaves its side open: that delays the server by the linger time only.
    serving.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_server_that_stops_does_not_wait_for_the_rest_of_a_request() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    client.send(Command::Write, 0, 0, 5000, &[7; 1000]).await;
    sleep(Duration::from_secs(1)).await;
    bench.stop.send_replace(true);
    let began = Instant::now();
    assert!(client.outcome().await.is_none());
    serving.await.unwrap();
    assert!(began.elapsed() <= LINGER);
    assert_eq!(value(&bench.counters().bytes_in_flight), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_keeps_sending_does_not_keep_a_connection() {
    for is_removed in [false, true] {
        let bench = bench();
        let (client, serving) = bench.connect(false).await;
        let (mut reader, mut writer) = tokio::io::split(client.stream);
        let request = Request { flags: 0, kind: 0, cookie: 1, at: 0, len: 1 }.encode();
        let sending =
            tokio::spawn(async move { while writer.write_all(&request).await.is_ok() {} });
        let receiving = tokio::spawn(async move {
            let mut buffer = vec![0; 4096];
            while reader.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        });
        tokio::task::yield_now().await;
        match is_removed {
            true => assert!(bench.exports.remove("disk").await),
            false => drop(bench.stop.send_replace(true)),
        }
        serving.await.unwrap();
        sending.await.unwrap();
        receiving.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_removal_of_an_export_waits_for_its_connections() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    bench.disk.hold.send_replace(Some(0));
    client.send(Command::Write, 0, 0, 1, &[5]).await;
    let exports = Arc::clone(&bench.exports);
    let removing = tokio::spawn(async move { exports.remove("disk").await });
    sleep(Duration::from_secs(5)).await;
    assert!(!removing.is_finished());
    assert!(bench.exports.list().is_empty());
    assert_eq!(client.ask(Command::Read, 0, 0, 1).await.error(), 108);
    bench.disk.hold.send_replace(None);
    assert_eq!(client.outcome().await.unwrap().error(), 0);
    assert!(client.outcome().await.is_none());
    assert!(removing.await.unwrap());
    serving.await.unwrap();
    assert!(!bench.exports.remove("disk").await);
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_does_not_answer_delays_a_removal_by_the_grace_only() {
    for keeps_sending in [false, true] {
        let bench = bench();
        let (mut client, serving) = bench.connect(true).await;
        bench.disk.hold.send_replace(Some(0));
        client.send(Command::Write, 0, 0, 1, &[5]).await;
        sleep(Duration::from_secs(1)).await;
        let began = Instant::now();
        let removing = tokio::spawn(bench.exports.remove("disk"));
        let sending = tokio::spawn(async move {
            let request = Request { flags: 0, kind: 0, cookie: 1, at: 0, len: 1 }.encode();
            while keeps_sending && client.stream.write_all(&request).await.is_ok() {
                sleep(Duration::from_secs(1)).await;
            }
            client
        });
        assert!(removing.await.unwrap());
        assert!(began.elapsed() <= Duration::from_secs(10) + LINGER);
        assert_eq!(bench.disk.dropped.load(Ordering::Relaxed), 1);
        serving.await.unwrap();
        sending.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_completes_what_is_in_flight() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    bench.disk.hold.send_replace(Some(0));
    client.send(Command::Write, 0, 0, 1, &[5]).await;
    client.send(Command::Disconnect, 0, 0, 0, &[]).await;
    sleep(Duration::from_secs(1)).await;
    bench.disk.hold.send_replace(None);
    assert_eq!(client.outcome().await.unwrap().error(), 0);
    assert!(client.outcome().await.is_none());
    serving.await.unwrap();
    assert_eq!(bench.disk.dropped.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lost_connection_completes_its_operations_within_the_grace() {
    for completes in [true, false] {
        let bench = bench();
        let (mut client, serving) = bench.connect(true).await;
        bench.disk.hold.send_replace(Some(0));
        client.send(Command::Write, 0, 0, 1, &[5]).await;
        drop(client);
        sleep(Duration::from_secs(9)).await;
        assert_eq!(bench.disk.dropped.load(Ordering::Relaxed), 0);
        if completes {
            bench.disk.hold.send_replace(None);
        }
        serving.await.unwrap();
        let dropped = bench.disk.dropped.load(Ordering::Relaxed);
        assert_eq!(dropped, usize::from(!completes));
        assert_eq!(value(&bench.counters().requests_in_flight), 0);
        assert_eq!(value(&bench.counters().bytes_in_flight), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_has_closed_its_sending_side_gets_its_replies() {
    let bench = bench();
    let (mut client, serving) = bench.connect(true).await;
    for at in 0..10 {
        client.send(Command::Write, 0, at, 1, &[5]).await;
    }
    client.stream.shutdown().await.unwrap();
    for _ in 0..10 {
        assert_eq!(client.outcome().await.unwrap().error(), 0);
    }
    assert!(client.outcome().await.is_none());
    serving.await.unwrap();
}

#[test]
fn a_piece_ends_at_a_multiple_of_its_length() {
    let piece = PIECE_BYTES;
    for (at, len, first) in [
        (0, 1, 1),
        (5, piece, piece),
        (0, piece + 1, piece),
        (5, piece + 1, piece - 5),
        (u64::from(piece) - 1, 32 << 20, 1),
        (u64::MAX - 2 * u64::from(piece) + 1, 2 * piece - 1, piece),
    ] {
        assert_eq!(first_piece(at, len), first, "{at} {len}");
    }
}

#[test]
fn a_reply_references_the_data() {
    let server = Server::new(Arc::default(), Options::default());
    let pool = Arc::new(tokio::sync::Semaphore::new(1 << 30));
    let budget = Budget::new(1 << 30, pool, Arc::clone(server.counters()));
    let reservation = || futures::FutureExt::now_or_never(budget.acquire(0)).unwrap();
    let data = Bytes::from(pattern(8192));
    let parts = || vec![Part::Data(data.slice(..4096)), Part::Data(data.slice(4096..))];
    for reply in [
        Reply::chunks(0, true, 1, parts(), reservation()),
        Reply::unfragmented(0, 1, parts(), reservation()),
        Reply::simple_data(1, parts(), reservation()),
    ] {
        let pointers: Vec<_> = reply.buffers.iter().skip(1).map(|part| part.as_ptr()).collect();
        assert_eq!(pointers, [data[..].as_ptr(), data[4096..].as_ptr()]);
    }
}
