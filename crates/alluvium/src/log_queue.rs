//! The path of a server's log to standard error: a queue bounded by bytes, and a thread that
//! writes. Code that logs never waits and never fails, whatever state standard error is in; lines
//! that are not written are counted.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Limit on the bytes of queued lines, including the line that is being written.
const BOUND_BYTES: usize = 1 << 20;
/// Time that the end of the process waits for standard error.
pub(crate) const LAST_LINES: Duration = Duration::from_secs(1);

static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// A queue of log lines; see the module.
pub(crate) struct LogQueue {
    state: Mutex<State>,
    /// Signaled when there is a line to write.
    wanted: Condvar,
    /// Signaled when everything has been written or dropped.
    idle: Condvar,
    dropped: AtomicU64,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Box<[u8]>>,
    /// Bytes of `lines` and of the line that is being written.
    bytes: usize,
}

/// The writer given to `tracing`. Each call carries one event.
pub(crate) struct Line(&'static LogQueue);

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The queue of this process, if it is a server.
pub(crate) fn of_server() -> Option<&'static LogQueue> {
    QUEUE.get()
}

/// Lines dropped since the start because the queue was full or a write failed.
pub(crate) fn dropped_lines() -> u64 {
    of_server().map_or(0, |queue| queue.dropped.load(Ordering::Relaxed))
}

/// Sends the log through a queue from now on.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn start() -> io::Result<&'static LogQueue> {
    // A descriptor of its own: while a write to it blocks, the lock of `io::stderr` is free.
    let stderr: Box<dyn Write + Send> = match io::stderr().as_fd().try_clone_to_owned() {
        Ok(descriptor) => Box::new(File::from(descriptor)),
        Err(_) => Box::new(io::stderr()),
    };
    let queue = QUEUE.get_or_init(LogQueue::new);
    thread::Builder::new().name("log".into()).spawn(move || queue.write_to(stderr))?;
    Ok(queue)
}

impl LogQueue {
    fn new() -> Self {
        Self {
            state: Mutex::default(),
            wanted: Condvar::new(),
            idle: Condvar::new(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Returns a writer for `tracing`.
    pub(crate) fn line(&'static self) -> Line {
        Line(self)
    }

    /// Queues a line, or drops and counts it if the queue is full.
    pub(crate) fn put(&self, line: &[u8]) {
        let line: Box<[u8]> = line.into();
        let mut state = self.state.lock();
        if state.bytes + line.len() > BOUND_BYTES {
            drop(state);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line);
        drop(state);
        self.wanted.notify_one();
    }

    /// Waits until every line has been written or dropped, for at most `patience`. Returns whether
    /// that has happened.
    pub(crate) fn flush(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut state = self.state.lock();
        while state.bytes > 0 {
            if self.idle.wait_until(&mut state, end).timed_out() {
                return state.bytes == 0;
            }
        }
        true
    }

    /// Writes lines forever. A failed write is not repeated: the next line is the next attempt.
    fn write_to(&self, mut to: impl Write) {
        let mut reported = 0;
        loop {
            let line = self.next_line();
            let dropped = self.dropped.load(Ordering::Relaxed);
            if dropped > reported {
                let notice = format!("{} lines of the log were dropped\n", dropped - reported);
                if to.write_all(notice.as_bytes()).is_ok() {
                    reported = dropped;
                }
            }
            if to.write_all(&line).is_err() {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
            self.written(line.len());
        }
    }

    fn next_line(&self) -> Box<[u8]> {
        let mut state = self.state.lock();
        loop {
            if let Some(line) = state.lines.pop_front() {
                return line;
            }
            self.wanted.wait(&mut state);
        }
    }

    fn written(&self, bytes: usize) {
        let mut state = self.state.lock();
        state.bytes -= bytes;
        if state.bytes == 0 {
            self.idle.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A writer whose writes wait for an outcome set by the test, and are reported when they have
    /// one.
    struct Steered {
        outcomes: Receiver<io::Result<()>>,
        writes: Sender<Vec<u8>>,
    }

    impl Write for Steered {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let outcome = self.outcomes.recv().unwrap_or(Err(io::ErrorKind::BrokenPipe.into()));
            outcome?;
            let _ = self.writes.send(line.to_vec());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn steered() -> (Arc<LogQueue>, Sender<io::Result<()>>, Receiver<Vec<u8>>) {
        let (steer, outcomes) = channel();
        let (writes, written) = channel();
        let queue = Arc::new(LogQueue::new());
        let writer = queue.clone();
        thread::spawn(move || writer.write_to(Steered { outcomes, writes }));
        (queue, steer, written)
    }

    /// Longer than a test takes.
    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_blocked_writer_blocks_no_caller_and_takes_bounded_memory() {
        let (queue, steer, written) = steered();
        let line = [b'x'; 1024];
        let capacity = (BOUND_BYTES / line.len()) as u64;
        for _ in 0..capacity + 3 {
            queue.put(&line);
        }
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 3);
        assert_eq!(queue.state.lock().bytes, BOUND_BYTES);
        assert!(!queue.flush(Duration::from_millis(1)));
        // When the writer continues, the lines are written and the loss is reported once. Whether
        // the first line was being written before the loss depends on the scheduling of threads.
        for _ in 0..=capacity {
            steer.send(Ok(())).unwrap();
        }
        assert!(queue.flush(LONG));
        let written: Vec<_> = written.try_iter().collect();
        assert_eq!(written.iter().filter(|it| it[..] == line).count() as u64, capacity);
        let notices: Vec<_> = written.iter().filter(|it| it[..] != line).collect();
        assert_eq!(notices, [b"3 lines of the log were dropped\n"]);
    }

    #[test]
    fn a_failed_write_is_counted_and_not_repeated() {
        let (queue, steer, written) = steered();
        queue.put(b"one");
        steer.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        assert!(queue.flush(LONG));
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 1);
        for _ in 0..2 {
            steer.send(Ok(())).unwrap();
        }
        queue.put(b"two");
        assert!(queue.flush(LONG));
        let written: Vec<_> = written.try_iter().collect();
        assert_eq!(written, [&b"1 lines of the log were dropped\n"[..], b"two"]);
    }

    #[test]
    fn flushing_an_empty_queue_does_not_wait() {
        let (queue, _steer, _written) = steered();
        assert!(queue.flush(Duration::ZERO));
    }
}
