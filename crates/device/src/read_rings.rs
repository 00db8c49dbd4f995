//! Parallel reads of files for a thread that waits for all of them: one system call for many reads,
//! where io_uring is available.
//!
//! The engines serve one device and complete requests on their own threads. Here the calling thread
//! waits itself, so nothing is handed over between threads, and buffers are borrowed: the borrow
//! ends when the kernel is done with all of them, whatever has failed.

#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::process;
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;

use crate::PAGE_BYTES;
use crate::sync::Mutex;

/// Reads in flight per ring; further reads wait for these.
const ENTRIES: usize = 32;
/// Upper bound of bytes per read request; the rest is read afterwards. Below the kernel's limit of
/// 2 GiB less a page (read(2), "NOTES").
const MAX_TRANSFER_BYTES: usize = 1 << 30;
/// Consecutive submissions that may fail for lack of kernel memory before the ring is abandoned.
const MAX_RETRIES: u32 = 1_000;
/// Poll interval for a ring that can no longer be waited on.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A read of a file.
#[derive(Debug)]
pub struct FileRead<'a> {
    /// Open for reading, with or without Direct I/O.
    pub file: BorrowedFd<'a>,
    /// First byte, a multiple of [`PAGE_BYTES`].
    pub at: u64,
    /// Destination, filled with zeroes beyond the end of the file. Its length, and for Direct I/O
    /// its address, are multiples of [`PAGE_BYTES`].
    pub to: &'a mut [u8],
}

impl FileRead<'_> {
    /// Reads and waits. Interrupted and short reads are continued.
    ///
    /// # Errors
    /// Any system error; `UnexpectedEof` if a read stops inside a page that is not the last of the
    /// file.
    pub fn read(&mut self) -> io::Result<()> {
        self.finish(0)
    }

    /// Reads from byte `done` on; the bytes before it were read earlier.
    fn finish(&mut self, mut done: usize) -> io::Result<()> {
        while done < self.to.len() {
            let at = self.at + done as u64;
            if !done.is_multiple_of(PAGE_BYTES) {
                // The file ends after a partial page, and Direct I/O cannot continue from there.
                let len_bytes = u64::try_from(rustix::fs::fstat(self.file)?.st_size).unwrap_or(0);
                match at >= len_bytes {
                    true => break,
                    false => return Err(io::ErrorKind::UnexpectedEof.into()),
                }
            }
            match rustix::io::pread(self.file, &mut self.to[done..], at) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.to[done..].fill(0);
        Ok(())
    }
}

/// A pool of rings for reads, created on demand up to a bound and reused: one per concurrent call.
/// A call that gets no ring reads sequentially, as do all calls where the kernel or the container
/// refuses io_uring, which is tried once.
pub struct ReadRings {
    state: Mutex<State>,
}

struct State {
    free: Vec<Ring>,
    /// Number of rings that may still be created.
    left: usize,
}

impl ReadRings {
    /// Creates a pool of at most `max` rings. With 0 every call reads sequentially.
    pub fn new(max: usize) -> Self {
        Self { state: Mutex::new(State { free: Vec::new(), left: max }) }
    }

    /// Executes all reads and waits for them. Returns their results in order; a failed read does
    /// not affect the others. Each behaves as [`FileRead::read`].
    pub fn read(&self, reads: &mut [FileRead<'_>]) -> Vec<io::Result<()>> {
        let mut done = vec![0; reads.len()];
        // A single read needs no more system calls without a ring.
        if reads.len() > 1
            && let Some(mut ring) = self.take()
            && ring.read(reads, &mut done)
        {
            self.state.lock().free.push(ring);
        }
        reads.iter_mut().zip(done).map(|(read, done)| read.finish(done)).collect()
    }

    fn take(&self) -> Option<Ring> {
        let mut state = self.state.lock();
        if let Some(ring) = state.free.pop() {
            return Some(ring);
        }
        state.left = state.left.checked_sub(1)?;
        drop(state);
        match Ring::new() {
            Ok(ring) => Some(ring),
            // The limit of open files is reached for the moment; descriptors become free again.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                self.state.lock().left += 1;
                None
            }
            Err(error) => {
                tracing::info!(
                    "io_uring is refused ({error}): parallel reads are executed sequentially"
                );
                self.state.lock().left = 0;
                None
            }
        }
    }
}

impl fmt::Debug for ReadRings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadRings").finish_non_exhaustive()
    }
}

/// A ring with no read in flight: its user waits for everything that it has submitted.
struct Ring(IoUring);

impl Ring {
    fn new() -> io::Result<Self> {
        // Unlike an engine's ring, it is not bound to a thread. Completions do not interrupt the
        // waiting thread: Linux 5.19.
        let ring: IoUring = match IoUring::builder().setup_coop_taskrun().build(ENTRIES as u32) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                IoUring::new(ENTRIES as u32)?
            }
            built => built?,
        };
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        match probe.is_supported(opcode::Read::CODE) {
            true => Ok(Self(ring)),
            false => {
                Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is too old"))
            }
        }
    }

    /// Issues one request per read, in parallel as far as there are entries, and waits for all of
    /// them. `done` receives the bytes read: fewer than requested, or none, if the request was
    /// interrupted, failed or was not submitted; the caller continues the read and gets the error
    /// from that. Returns false if the ring is no longer usable.
    fn read(&mut self, reads: &mut [FileRead<'_>], done: &mut [usize]) -> bool {
        let abort_on_unwind = AbortOnUnwind;
        let mut is_sound = true;
        let mut failures = 0;
        let mut next = 0;
        let mut in_flight = 0;
        loop {
            while is_sound && next < reads.len() && in_flight < ENTRIES {
                let FileRead { file, at, to } = &mut reads[next];
                let len = to.len().min(MAX_TRANSFER_BYTES) as u32;
                let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), to.as_mut_ptr(), len)
                    .offset(*at)
                    .build()
                    .user_data(next as u64);
                // SAFETY: the buffer is borrowed mutably until `read` returns, so no other code
                // touches or frees it, and the file is borrowed, so it stays open. This function
                // does not return before the kernel has completed the entry, or has not taken it
                // and never will (`is_sound`); and it does not unwind (`AbortOnUnwind`).
                let pushed = unsafe { self.0.submission().push(&entry) };
                pushed.expect("the ring has an entry for each read in flight");
                next += 1;
                in_flight += 1;
            }
            if in_flight == 0 {
                break;
            }
            if is_sound {
                // Wait for half of them while other reads need entries, so that the disk always has
                // some queued.
                let want = if next == reads.len() { in_flight } else { in_flight.div_ceil(2) };
                match self.0.submit_and_wait(want).map_err(|error| error.raw_os_error()) {
                    Ok(_) => failures = 0,
                    Err(Some(libc::EINTR)) => {}
                    // The kernel is short of memory; entries not submitted stay in the ring for the
                    // next round.
                    Err(Some(libc::EAGAIN | libc::EBUSY)) if failures < MAX_RETRIES => {
                        failures += 1;
                        thread::yield_now();
                    }
                    // For example a system call filter. The kernel completes the entries that it
                    // has taken, and never takes the others: only `submit_and_wait` hands entries
                    // over.
                    Err(error) => {
                        tracing::info!("io_uring_enter failed ({error:?}): the ring is abandoned");
                        is_sound = false;
                        in_flight -= self.0.submission().len();
                    }
                }
            } else {
                thread::sleep(POLL_INTERVAL);
            }
            for entry in self.0.completion() {
                done[entry.user_data() as usize] = usize::try_from(entry.result()).unwrap_or(0);
                in_flight -= 1;
            }
        }
        mem::forget(abort_on_unwind);
        is_sound
    }
}

/// Aborts on unwinding: while the kernel writes to borrowed buffers, they must not return to their
/// owners.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        tracing::error!("a panic while the kernel writes to borrowed memory; aborting");
        process::abort();
    }
}
