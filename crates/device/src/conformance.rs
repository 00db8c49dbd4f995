//! The required behaviour of every engine, as one suite that all of them run. Tests only.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::{
    AlignedBuf, DeviceError, DeviceOffset, OpenError, PAGE_BYTES, Request, SharedBuf, SharedDevice,
};

/// An engine under test. Targets hold at least 2 MiB.
pub(crate) struct Subject<'a> {
    /// Opens the same target each time, never twice concurrently.
    pub(crate) open: &'a dyn Fn() -> Result<SharedDevice, OpenError>,
    /// Opens the same target so that every write and flush that reaches it fails.
    pub(crate) broken: &'a dyn Fn() -> SharedDevice,
    /// Opens the same target read-only.
    pub(crate) read_only: Option<&'a dyn Fn() -> SharedDevice>,
    /// Makes queued requests progress, for an engine that does not do so by itself.
    pub(crate) drive: &'a dyn Fn(),
}

type Outcome = Result<Option<AlignedBuf>, DeviceError>;

/// Runs the whole suite.
pub(crate) fn run(subject: &Subject<'_>) {
    subject.reads_what_was_written();
    subject.splits_a_buffer_at_the_end_of_the_device();
    subject.keeps_concurrent_requests_apart();
    subject.runs_completions_that_submit();
    subject.flushes();
    subject.refuses_what_is_out_of_bounds();
    subject.serves_buffers_beyond_its_pool();
    subject.completes_everything_when_dropped();
    subject.can_be_dropped_by_a_completion();
    subject.latches();
    subject.completes_everything_when_dropped_after_the_latch();
    subject.only_reads_when_read_only();
}

impl Subject<'_> {
    fn open(&self) -> SharedDevice {
        // A parallel test that starts a program shares all open files of this process with its
        // child until `exec`, so a closed device may stay in use for that moment.
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match (self.open)() {
                Err(OpenError::InUse(_)) if Instant::now() < deadline => thread::yield_now(),
                opened => return opened.expect("the target exists and is free"),
            }
        }
    }

    /// Submits all requests and waits for their outcomes, in the order of `requests`. Asserts that
    /// each completes exactly once.
    fn submit(&self, device: &SharedDevice, requests: Vec<Request>) -> Vec<Outcome> {
        let (tx, rx) = mpsc::channel();
        let count = requests.len();
        for (index, request) in requests.into_iter().enumerate() {
            let tx = tx.clone();
            device.submit(request, Box::new(move |outcome| tx.send((index, outcome)).unwrap()));
        }
        drop(tx);
        (self.drive)();
        let mut outcomes: Vec<Option<Outcome>> = (0..count).map(|_| None).collect();
        for (index, outcome) in rx {
            assert!(outcomes[index].replace(outcome).is_none(), "request {index} completed twice");
        }
        let completed =
            outcomes.into_iter().map(|outcome| outcome.expect("each request completes"));
        completed.collect()
    }

    fn one(&self, device: &SharedDevice, request: Request) -> Outcome {
        self.submit(device, vec![request]).pop().unwrap()
    }

    fn read(&self, device: &SharedDevice, at: u64, len: usize) -> AlignedBuf {
        let buf = device.alloc(len);
        self.one(device, Request::Read { at: DeviceOffset(at), buf }).unwrap().unwrap()
    }

    fn write(&self, device: &SharedDevice, at: u64, buf: SharedBuf, durable: bool) {
        let outcome = self.one(device, Request::Write { at: DeviceOffset(at), buf, durable });
        assert!(outcome.unwrap().is_none(), "a write returns no buffer");
    }

    fn reads_what_was_written(&self) {
        let device = self.open();
        for (round, len) in
            [PAGE_BYTES, 3 * PAGE_BYTES, 256 * 1024, 1024 * 1024].into_iter().enumerate()
        {
            for at in [0, PAGE_BYTES as u64, device.geometry().capacity_bytes - len as u64] {
                let content = pattern(&device, len, round as u64 + at);
                self.write(&device, at, content.clone(), round % 2 == 0);
                assert_eq!(*self.read(&device, at, len), *content, "{len} bytes at {at}");
            }
        }
    }

    fn splits_a_buffer_at_the_end_of_the_device(&self) {
        let device = self.open();
        let end = device.geometry().capacity_bytes;
        let whole = pattern(&device, 4 * PAGE_BYTES, 4);
        let cut = PAGE_BYTES;
        let parts =
            [(end - cut as u64, whole.slice(0..cut)), (0, whole.slice(cut..4 * PAGE_BYTES))];
        let writes = parts
            .map(|(at, buf)| Request::Write { at: DeviceOffset(at), buf, durable: true })
            .into();
        self.submit(&device, writes).into_iter().for_each(|outcome| drop(outcome.unwrap()));
        assert_eq!(*self.read(&device, end - cut as u64, cut), whole[..cut]);
        assert_eq!(*self.read(&device, 0, 3 * PAGE_BYTES), whole[cut..]);
    }

    /// More requests in flight than any queue is deep, reads beside writes at other positions.
    fn keeps_concurrent_requests_apart(&self) {
        let device = self.open();
        let page = PAGE_BYTES as u64;
        let position = |index: u64| DeviceOffset(index * 2 * page);
        let content: Vec<_> = (0..200).map(|index| pattern(&device, PAGE_BYTES, index)).collect();
        let write = |index: usize, durable| Request::Write {
            at: position(index as u64),
            buf: content[index].clone(),
            durable,
        };
        self.submit(&device, (0..100).map(|index| write(index, index % 3 == 0)).collect())
            .into_iter()
            .for_each(|outcome| drop(outcome.unwrap()));
        let mixed = (0..100)
            .flat_map(|index| {
                let buf = device.alloc(PAGE_BYTES);
                [
                    write(index + 100, index % 3 == 0),
                    Request::Read { at: position(index as u64), buf },
                ]
            })
            .collect();
        for (index, pair) in self.submit(&device, mixed).chunks(2).enumerate() {
            let read = pair[1].as_ref().unwrap().as_ref().unwrap();
            assert_eq!(**read, *content[index], "page {index} while others are written");
            assert!(pair[0].as_ref().unwrap().is_none());
        }
        for (index, content) in content.iter().enumerate() {
            assert_eq!(
                *self.read(&device, position(index as u64).0, PAGE_BYTES),
                **content,
                "page {index}"
            );
        }
    }

    /// As a log does, which submits its next block from the completion of the previous one.
    fn runs_completions_that_submit(&self) {
        fn chain(device: &SharedDevice, left: u32, done: mpsc::Sender<()>) {
            let next = device.clone();
            let buf = pattern(device, PAGE_BYTES, u64::from(left));
            let at = DeviceOffset(u64::from(left) * PAGE_BYTES as u64);
            let completion = move |outcome: Outcome| {
                outcome.unwrap();
                match left {
                    0 => {
                        drop(next); // so that the test holds the last handle
                        done.send(()).unwrap();
                    }
                    _ => chain(&next, left - 1, done),
                }
            };
            device.submit(Request::Write { at, buf, durable: false }, Box::new(completion));
        }
        let device = self.open();
        let (tx, rx) = mpsc::channel();
        chain(&device, 50, tx);
        (self.drive)();
        rx.recv().expect("the last of the chain completes");
        let last = self.read(&device, 50 * PAGE_BYTES as u64, PAGE_BYTES);
        assert_eq!(*last, *pattern(&device, PAGE_BYTES, 50));
    }

    fn flushes(&self) {
        let device = self.open();
        self.write(&device, 0, pattern(&device, PAGE_BYTES, 9), false);
        assert!(self.one(&device, Request::Flush).unwrap().is_none());
    }

    fn refuses_what_is_out_of_bounds(&self) {
        let device = self.open();
        let capacity = device.geometry().capacity_bytes;
        let page = PAGE_BYTES as u64;
        let offsets =
            [1, 512, page - 1, capacity - 512, capacity, capacity + page, u64::MAX - page + 1];
        for at in offsets.map(DeviceOffset) {
            let refused = |request: Request| {
                let submit =
                    || device.submit(request, Box::new(|_| panic!("completed although refused")));
                catch_unwind(AssertUnwindSafe(submit)).is_err()
            };
            let buf = device.alloc(PAGE_BYTES);
            assert!(refused(Request::Read { at, buf }), "a read at {at:?}");
            let buf = device.alloc(PAGE_BYTES).freeze();
            assert!(refused(Request::Write { at, buf, durable: true }), "a write at {at:?}");
        }
        // The last page is inside the device, the next one is not, and a refusal has no side
        // effects.
        self.write(&device, capacity - page, pattern(&device, PAGE_BYTES, 5), true);
        let buf = device.alloc(2 * PAGE_BYTES).freeze();
        let beyond = Request::Write { at: DeviceOffset(capacity - page), buf, durable: true };
        let submit = || device.submit(beyond, Box::new(|_| panic!("completed although refused")));
        assert!(catch_unwind(AssertUnwindSafe(submit)).is_err());
        assert_eq!(
            *self.read(&device, capacity - page, PAGE_BYTES),
            *pattern(&device, PAGE_BYTES, 5)
        );
    }

    fn serves_buffers_beyond_its_pool(&self) {
        let device = self.open();
        for _ in 0..3 {
            let held: Vec<_> =
                (0..64).map(|index| pattern(&device, 2 * PAGE_BYTES, index)).collect();
            for (index, buf) in held.iter().enumerate() {
                assert_eq!(
                    **buf,
                    *pattern(&device, 2 * PAGE_BYTES, index as u64),
                    "buffer {index} was overwritten"
                );
                self.write(&device, 0, buf.clone(), false);
                assert_eq!(*self.read(&device, 0, 2 * PAGE_BYTES), **buf);
            }
        }
    }

    fn completes_everything_when_dropped(&self) {
        let device = self.open();
        let content: Vec<_> =
            (0..64).map(|index| pattern(&device, PAGE_BYTES, 1000 + index)).collect();
        let completed = Arc::new(AtomicU32::new(0));
        for (index, buf) in content.iter().enumerate() {
            let completed = completed.clone();
            let at = DeviceOffset((index * PAGE_BYTES) as u64);
            let request = Request::Write { at, buf: buf.clone(), durable: true };
            device.submit(
                request,
                Box::new(move |outcome| {
                    outcome.unwrap();
                    completed.fetch_add(1, Ordering::SeqCst);
                }),
            );
        }
        drop(device);
        (self.drive)();
        assert_eq!(completed.load(Ordering::SeqCst), 64);
        // The target is free again at once.
        let device = self.open();
        for (index, content) in content.iter().enumerate() {
            assert_eq!(*self.read(&device, (index * PAGE_BYTES) as u64, PAGE_BYTES), **content);
        }
    }

    fn can_be_dropped_by_a_completion(&self) {
        let device = self.open();
        let (tx, rx) = mpsc::channel();
        let (hand_over, handle) = mpsc::channel::<SharedDevice>();
        let buf = device.alloc(PAGE_BYTES);
        let read = Request::Read { at: DeviceOffset(0), buf };
        if device.geometry().engine == "simulated" {
            hand_over.send(device.clone()).unwrap();
        }
        device.submit(
            read,
            Box::new(move |_| {
                drop(handle.recv().unwrap());
                tx.send(()).unwrap();
            }),
        );
        // Where completions have a thread of their own, that thread drops the last handle.
        drop(hand_over.send(device));
        (self.drive)();
        rx.recv().expect("the completion has run");
        // A thread cannot join itself; the target becomes free when it ends.
        while let Err(OpenError::InUse(_)) = (self.open)() {
            thread::yield_now();
        }
    }

    fn latches(&self) {
        let device = self.open();
        let before = pattern(&device, PAGE_BYTES, 77);
        self.write(&device, 0, before.clone(), true);
        drop(device);

        let device = (self.broken)();
        assert!(device.failure().is_none());
        let at = DeviceOffset(8 * PAGE_BYTES as u64);
        let write = || Request::Write { at, buf: pattern(&device, PAGE_BYTES, 78), durable: true };
        let first = self.one(&device, write()).expect_err("writes must fail");
        assert_eq!(
            (first.operation, first.at, first.len_bytes),
            ("write", at.0, PAGE_BYTES as u64)
        );
        assert_eq!(*first.device, device.geometry().name, "the error names the device");
        let later = self.submit(&device, vec![write(), Request::Flush, write()]);
        for later in
            later.into_iter().map(|outcome| outcome.expect_err("nothing succeeds after the latch"))
        {
            assert!(
                Arc::ptr_eq(&first.source, &later.source),
                "{later} is not the first cause, {first}"
            );
        }
        assert!(Arc::ptr_eq(&first.source, &device.failure().expect("it has latched").source));
        assert_eq!(*self.read(&device, 0, PAGE_BYTES), *before, "reads still work");
    }

    fn completes_everything_when_dropped_after_the_latch(&self) {
        let device = (self.broken)();
        let failed = Arc::new(AtomicU32::new(0));
        let buf = pattern(&device, PAGE_BYTES, 1);
        for index in 0..64 {
            let (failed, buf) = (failed.clone(), buf.clone());
            let request = match index % 4 {
                0 => Request::Flush,
                _ => Request::Write { at: DeviceOffset(0), buf, durable: true },
            };
            device.submit(
                request,
                Box::new(move |outcome| {
                    failed.fetch_add(u32::from(outcome.is_err()), Ordering::SeqCst);
                }),
            );
        }
        drop(device);
        (self.drive)();
        // Flushes that ran before the first write failed may have succeeded.
        assert!(failed.load(Ordering::SeqCst) >= 48, "{failed:?} of 48 writes failed");
    }

    fn only_reads_when_read_only(&self) {
        let Some(open) = self.read_only else { return };
        let device = self.open();
        let content = pattern(&device, PAGE_BYTES, 31);
        self.write(&device, 0, content.clone(), true);

        // A reader beside the open writer.
        let reader = open();
        assert!(reader.geometry().read_only);
        assert_eq!(*self.read(&reader, 0, PAGE_BYTES), *content);
        let buf = pattern(&device, PAGE_BYTES, 32);
        let write = Request::Write { at: DeviceOffset(0), buf, durable: true };
        let error = self.one(&reader, write).expect_err("the device is read-only");
        assert_eq!(error.source.kind(), std::io::ErrorKind::PermissionDenied);
        self.one(&reader, Request::Flush).expect_err("the device is read-only");
        assert!(reader.failure().is_none(), "nothing has failed");
        assert_eq!(*self.read(&device, 0, PAGE_BYTES), *content);
        assert!(device.failure().is_none());
    }
}

/// Returns `len` bytes that differ between seeds and between positions.
pub(crate) fn pattern(device: &SharedDevice, len: usize, seed: u64) -> SharedBuf {
    let mut random = crate::sim::Random::new(seed);
    let mut buf = device.alloc(len);
    for word in buf.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes());
    }
    buf.freeze()
}
