//! Model-checked tests of the log's threads, in every order of their steps: `cargo xtask loom`.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use alluvium_device::sim::{Faults, Mode, SimDisk, SimOptions};
use bytes::Bytes;
use loom::model::Builder;
use loom::thread::{self, JoinHandle};

use crate::layout::{HEADER_SLOT_AT, HEADER_SLOT_BYTES};
use crate::limit::Alarm;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, OnceLock};
use crate::wait::{Source, Wait, Watermark, block_on};
use crate::{AppendError, FormatOptions, LogOffset, Options, Parts, Slot, Wal, WalError, header};

// -- The watermark alone

/// What a watermark represents: offsets below it are done.
struct Log {
    mark: Watermark,
    /// Relaxed, so that the watermark has to provide the ordering.
    done: [AtomicBool; 2],
    stopped: OnceLock<&'static str>,
}

#[derive(Clone)]
struct At(Arc<Log>);

impl Source for At {
    type Error = &'static str;
    fn watermark(&self) -> &Watermark {
        &self.0.mark
    }
    fn failure(&self) -> Option<&'static str> {
        self.0.stopped.get().copied()
    }
}

impl At {
    fn new() -> Self {
        let done = [AtomicBool::new(false), AtomicBool::new(false)];
        Self(Arc::new(Log { mark: Watermark::new(0), done, stopped: OnceLock::new() }))
    }

    fn complete(&self, offset: u64) {
        self.0.done[offset as usize - 1].store(true, Ordering::Relaxed);
        self.0.mark.advance(offset);
    }

    fn stop(&self) {
        self.0.stopped.set("stopped").unwrap();
        self.0.mark.wake_all();
    }

    /// Waits for `offset`, and checks that it is done if the wait succeeds.
    fn wait(&self, offset: u64) -> Result<(), &'static str> {
        block_on(Wait::new(self.clone(), offset))?;
        for done in &self.0.done[..offset as usize] {
            assert!(done.load(Ordering::Relaxed), "acknowledged too early");
        }
        Ok(())
    }
}

fn spawn<T: 'static>(log: &At, run: impl FnOnce(At) -> T + 'static) -> JoinHandle<T> {
    let log = log.clone();
    thread::spawn(move || run(log))
}

fn poll(wait: &mut Wait<At>) -> Poll<Result<(), &'static str>> {
    Pin::new(wait).poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn waiters_are_woken_when_their_target_is_reached_and_not_before() {
    loom::model(|| {
        let log = At::new();
        let waiters = [1, 2].map(|offset| spawn(&log, move |log| log.wait(offset)));
        log.complete(1);
        log.complete(2);
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Ok(()));
        }
        assert_eq!(log.0.mark.entries(), 0);
    });
}

/// As the completions of one device on several threads.
#[test]
fn a_concurrently_raised_watermark_never_goes_back() {
    loom::model(|| {
        let log = At::new();
        let other = spawn(&log, |log| {
            log.0.mark.advance(1);
            assert!(log.0.mark.get() >= 1);
        });
        let waiter = spawn(&log, |log| block_on(Wait::new(log, 2)));
        log.0.mark.advance(2);
        assert_eq!(log.0.mark.get(), 2);
        other.join().unwrap();
        assert_eq!(waiter.join().unwrap(), Ok(()));
        assert_eq!(log.0.mark.entries(), 0);
    });
}

#[test]
fn a_dropped_future_does_not_affect_other_waiters() {
    loom::model(|| {
        let log = At::new();
        let waiter = spawn(&log, |log| log.wait(1));
        let impatient = spawn(&log, |log| poll(&mut Wait::new(log, 1)).is_ready());
        log.complete(1);
        assert_eq!(waiter.join().unwrap(), Ok(()));
        impatient.join().unwrap();
        assert_eq!(log.0.mark.entries(), 0);
    });
}

/// A task that has moved to another thread.
#[test]
fn the_waker_of_the_last_poll_is_woken() {
    loom::model(|| {
        let log = At::new();
        let waiter = spawn(&log, |log| {
            let mut wait = Wait::new(log, 1);
            match poll(&mut wait) {
                Poll::Ready(result) => result,
                Poll::Pending => block_on(wait),
            }
        });
        log.complete(1);
        assert_eq!(waiter.join().unwrap(), Ok(()));
        assert_eq!(log.0.mark.entries(), 0);
    });
}

#[test]
fn a_stop_wakes_all_waiters() {
    loom::model(|| {
        let log = At::new();
        let waiters = [1, 2].map(|offset| spawn(&log, move |log| log.wait(offset)));
        log.stop();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), Err("stopped"));
        }
    });
}

#[test]
fn a_target_reached_before_a_stop_has_not_failed() {
    loom::model(|| {
        let log = At::new();
        let waiters = [1, 2].map(|offset| spawn(&log, move |log| log.wait(offset)));
        log.complete(1);
        log.stop();
        let results = waiters.map(|waiter| waiter.join().unwrap());
        assert_eq!(results, [Ok(()), Err("stopped")]);
    });
}

/// Closing waits for the appended records, and stops the log as soon as they are durable.
#[test]
fn a_stop_after_a_target_is_reached_does_not_fail_it() {
    loom::model(|| {
        let log = At::new();
        let waiter = spawn(&log, |log| log.wait(1));
        let completion = spawn(&log, |log| log.complete(1));
        let seen = log.0.mark.get() == 1;
        log.stop();
        let result = waiter.join().unwrap();
        assert!(result == Ok(()) || !seen);
        completion.join().unwrap();
    });
}

// -- The whole log, on a disk that completes requests on the submitting thread

const STACK_WORDS: usize = 64 * 1024;

fn options() -> Options {
    Options {
        window_bytes: 32 << 10,
        block_bytes: 4096,
        max_record_bytes: 8 << 10,
        ..Options::default()
    }
}

fn format() -> (SimDisk, Wal) {
    let disk = SimDisk::new(SimOptions { capacity_bytes: 256 << 10, ..SimOptions::default() });
    let forced =
        FormatOptions { capacity_bytes: Some(192 << 10), force: true, ..FormatOptions::default() };
    Wal::format(&disk.device(), &forced).unwrap();
    let (wal, _) = Wal::open(disk.device(), &options(), None, &mut |_| Ok(())).unwrap();
    (disk, wal)
}

/// Runs `model` on a fresh log. Its creation is not part of the exploration.
fn with_log(model: impl Fn(SimDisk, Wal) + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.max_branches = 20_000;
    builder.expect_explicit_explore = true;
    let model = Arc::new(model);
    builder.check(move || {
        let model = model.clone();
        let thread = spawn_deep(move || {
            let (disk, wal) = format();
            loom::explore();
            model(disk, wal);
        });
        thread.join().unwrap();
    });
}

/// Spawns a thread whose stack is large enough for nested completions. That of loom's first thread
/// is not, and cannot be changed.
fn spawn_deep<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    thread::Builder::new().stack_size(STACK_WORDS).spawn(run).unwrap()
}

/// Spawns a thread that completes queued requests.
fn spawn_completions(disk: &SimDisk) -> JoinHandle<()> {
    let disk = disk.clone();
    spawn_deep(move || disk.run_until_idle())
}

/// Runs `run` on this thread and concurrently on another one.
fn on_two_threads(wal: &Wal, run: impl Fn(&Wal) + Clone + Send + 'static) {
    let thread = spawn_deep({
        let (wal, run) = (wal.clone(), run.clone());
        move || run(&wal)
    });
    run(wal);
    thread.join().unwrap();
}

/// Whether a record of `byte` would be on the disk after a power cut.
fn is_durable(disk: &SimDisk, byte: u8) -> bool {
    disk.peek_durable(64 << 10, 192 << 10).windows(16).any(|found| found == [byte; 16])
}

#[test]
fn acknowledged_is_durable_with_everything_before_it() {
    with_log(|disk, wal| {
        let thread = {
            let (disk, wal) = (disk.clone(), wal.clone());
            spawn_deep(move || {
                let append = wal.append(&[&[1; 100]]).unwrap();
                let end = append.end();
                append.wait().unwrap();
                assert!(wal.durable() >= end && is_durable(&disk, 1));
                end
            })
        };
        let append = wal.append(&[&[2; 100]]).unwrap();
        let end = append.end();
        append.wait().unwrap();
        assert!(is_durable(&disk, 2));
        let other_end = thread.join().unwrap();
        assert_eq!(wal.durable(), end.max(other_end));
    });
}

#[test]
fn a_batch_is_contiguous_and_durable_when_its_end_is() {
    with_log(|disk, wal| {
        let thread = {
            let wal = wal.clone();
            spawn_deep(move || wal.append(&[&[3; 100]]).unwrap().wait().unwrap())
        };
        let (none, mut placed) = (Bytes::new(), Vec::new());
        let records = [&[[1; 100]], &[[2; 100]]].map(|head| head.each_ref().map(|part| &part[..]));
        let records = records.each_ref().map(|head| Parts { head, body: &none });
        wal.append_batch(&records, &mut placed).unwrap();
        assert_eq!(placed[0].end, placed[1].offset, "no record of another thread in between");
        wal.wait_durable(placed[1].end).wait().unwrap();
        assert!(is_durable(&disk, 1) && is_durable(&disk, 2));
        thread.join().unwrap();
    });
}

/// A full window, and a thread on which the disk completes queued requests.
fn with_full_window(model: impl Fn(Wal) + Send + Sync + 'static) {
    with_log(move |disk, wal| {
        disk.set_mode(Mode::Queued);
        while wal.append(&[&[1; 8 << 10]]).is_ok() {}
        let completions = spawn_completions(&disk);
        model(wal);
        completions.join().unwrap();
    });
}

#[test]
fn a_refused_writer_that_waits_for_space_gets_it() {
    with_full_window(|wal| {
        while let Err(refused) = wal.append(&[&[2; 8 << 10]]).map(drop) {
            assert!(matches!(refused, AppendError::WindowFull { .. }));
            wal.wait_space().wait();
        }
    });
}

#[test]
fn two_writers_that_wait_for_space_both_get_it() {
    with_full_window(|wal| {
        let write = |wal: &Wal| loop {
            let space = wal.wait_space();
            match wal.append(&[&[2; 8 << 10]]) {
                Ok(_) => break,
                Err(AppendError::WindowFull { .. }) => space.wait(),
                Err(other) => panic!("{other}"),
            }
        };
        on_two_threads(&wal, write);
    });
}

#[test]
fn a_device_failure_wakes_all_waiters() {
    with_log(|disk, wal| {
        disk.set_faults(Faults { write_error: 1.0, ..Faults::default() });
        let write = |wal: &Wal| match wal.append(&[b"lost"]) {
            Ok(append) => assert!(matches!(append.wait(), Err(WalError::Device(_)))),
            Err(refused) => assert!(matches!(refused, AppendError::Failed(_))),
        };
        on_two_threads(&wal, write);
    });
}

#[test]
fn the_drop_of_the_last_handle_wakes_all_waiters() {
    with_log(|disk, wal| {
        disk.set_mode(Mode::Queued);
        let append = wal.append(&[&[1; 100]]).unwrap();
        let completions = spawn_completions(&disk);
        let last = spawn_deep(move || drop(wal));
        match append.wait() {
            Ok(()) => assert!(is_durable(&disk, 1)),
            Err(cause) => assert!(matches!(cause, WalError::Closed)),
        }
        last.join().unwrap();
        completions.join().unwrap();
    });
}

#[test]
fn closing_acknowledges_every_accepted_record() {
    with_log(|disk, wal| {
        let thread = {
            let wal = wal.clone();
            spawn_deep(move || match wal.append(&[&[1; 100]]) {
                Ok(append) => append.wait().map(|()| true).unwrap(),
                Err(refused) => {
                    assert!(matches!(refused, AppendError::Closed));
                    false
                }
            })
        };
        wal.close().unwrap();
        let accepted = thread.join().unwrap();
        let report = Wal::scan(&disk.device(), None, &mut |_| Ok(())).unwrap();
        assert!(report.clean_shutdown && report.records == u64::from(accepted));
    });
}

#[test]
fn a_trim_is_in_both_headers_when_it_is_acknowledged() {
    with_log(|disk, wal| {
        let ends = [1, 2].map(|byte| {
            let append = wal.append(&[&[byte; 100]]).unwrap();
            let end = append.end();
            append.wait().unwrap();
            end
        });
        disk.set_mode(Mode::Queued);
        let first = wal.trim(..ends[0]);
        let completions = spawn_completions(&disk);
        let second = {
            let wal = wal.clone();
            spawn_deep(move || wal.trim(..ends[1]))
        };
        first.wait().unwrap();
        assert!(trims(&disk).iter().all(|trim| *trim >= ends[0]));
        let second = second.join().unwrap();
        completions.join().unwrap();
        disk.run_until_idle(); // if the second came too late for that thread
        second.wait().unwrap();
        assert_eq!(trims(&disk), [ends[1]; 2]);
    });
}

/// A log with nothing in the way of a resize: granted at once, while blocks wait for the headers.
#[test]
fn a_concurrent_resize_and_append_both_complete() {
    with_log(|disk, wal| {
        let thread = {
            let wal = wal.clone();
            spawn_deep(move || wal.append(&[&[1; 100]]).unwrap().wait().unwrap())
        };
        wal.request_resize(256 << 10).unwrap().wait().unwrap();
        assert_eq!(wal.header().capacity_bytes, 256 << 10);
        thread.join().unwrap();
        assert!(is_durable(&disk, 1));
    });
}

#[test]
fn a_waiter_for_a_resize_is_notified_of_a_close() {
    with_log(|disk, wal| {
        disk.set_mode(Mode::Queued);
        let resizing = wal.request_resize(256 << 10).unwrap();
        let completions = spawn_completions(&disk);
        assert_eq!(resizing.wait().unwrap().capacity_bytes, 256 << 10);
        completions.join().unwrap();
    });
}

/// The trim offsets in both header slots after a power cut.
fn trims(disk: &SimDisk) -> [LogOffset; 2] {
    HEADER_SLOT_AT.map(|at| {
        match header::decode(&disk.peek_durable(at.0, HEADER_SLOT_BYTES as usize)) {
            Slot::Valid(header) => header.trim,
            other => panic!("{other}"),
        }
    })
}

// -- The alarm of the limits

#[derive(Default)]
struct Rung {
    count: Mutex<u32>,
    changed: Condvar,
}

#[test]
fn an_alarm_rings_when_set_and_ends_when_dropped() {
    let past = Instant::now();
    let far = past + Duration::from_secs(24 * 60 * 60);
    loom::model(move || {
        let rung = Arc::new(Rung::default());
        let ring = {
            let rung = rung.clone();
            move || {
                *rung.count.lock() += 1;
                rung.changed.notify_one();
            }
        };
        let alarm = Arc::new(Alarm::start(ring).unwrap());
        let other = {
            let alarm = alarm.clone();
            thread::spawn(move || alarm.set(far))
        };
        alarm.set(past);
        let mut count = rung.count.lock();
        while *count == 0 {
            rung.changed.wait(&mut count);
        }
        drop(count);
        other.join().unwrap();
        drop(alarm);
        assert_eq!(*rung.count.lock(), 1);
    });
}
