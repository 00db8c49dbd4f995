//! Reads of files that are under way at one time, for a thread that waits for all of them: one call
//! of the kernel for many reads, where it lets us use io_uring.
//!
//! The engines are for one device and for requests that complete on a thread of theirs. Here the
//! thread that asks waits by itself, so that nothing is handed over, and buffers are borrowed:
//! whoever lent them gets them back when the kernel is done with all of them, whatever has failed.

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

/// Reads that one ring has under way at one time; more wait for these.
const ENTRIES: usize = 32;
/// Most bytes asked for at once; what is behind them is read afterwards. Below what the kernel
/// moves at most, 2 GiB less a page (read(2), "NOTES").
const MAX_TRANSFER_BYTES: usize = 1 << 30;
/// How often in a row the kernel may have no memory for what is submitted, before the ring is given
/// up.
const MAX_RETRIES: u32 = 1_000;
/// Between two looks at a ring that cannot be waited with any more.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// A read of a file.
#[derive(Debug)]
pub struct FileRead<'a> {
    /// Open for reading; with Direct I/O or without.
    pub file: BorrowedFd<'a>,
    /// First byte, a multiple of [`PAGE_BYTES`].
    pub at: u64,
    /// Is filled, with zeroes behind the end of the file. Its length, and for Direct I/O its
    /// address, are multiples of [`PAGE_BYTES`].
    pub to: &'a mut [u8],
}

impl FileRead<'_> {
    /// Read, and wait for it. Interruptions and short reads are continued.
    ///
    /// # Errors
    /// What the system says; `UnexpectedEof` if it stops inside a page that does not end the file.
    pub fn read(&mut self) -> io::Result<()> {
        self.finish(0)
    }

    /// The same from the `done` bytes on that were read before.
    fn finish(&mut self, mut done: usize) -> io::Result<()> {
        while done < self.to.len() {
            let at = self.at + done as u64;
            if !done.is_multiple_of(PAGE_BYTES) {
                // Behind a part that is no whole page the file ends, and past the page cache
                // nothing can be asked for there.
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

/// Rings for reads, made when they are first wanted and kept for the next who wants one: as many as
/// there are calls at one time, up to a bound. Who finds none left reads one after the other, and
/// so do all where the kernel or the container refuses io_uring, which is tried once.
pub struct ReadRings {
    state: Mutex<State>,
}

struct State {
    free: Vec<Ring>,
    /// So many may still be made.
    left: usize,
}

impl ReadRings {
    /// At most `max` rings. With 0 everything is read one after the other.
    pub fn new(max: usize) -> Self {
        Self { state: Mutex::new(State { free: Vec::new(), left: max }) }
    }

    /// Make all of these reads, and wait for them. Returns what came of each, in their order; one
    /// that fails does not keep the others from being made. Each is what [`FileRead::read`] would
    /// have been.
    pub fn read(&self, reads: &mut [FileRead<'_>]) -> Vec<io::Result<()>> {
        let mut done = vec![0; reads.len()];
        // One alone needs no more calls of the kernel without a ring.
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
            // Others have all files, and give them back.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                self.state.lock().left += 1;
                None
            }
            Err(error) => {
                tracing::info!(
                    "io_uring is refused ({error}): reads of several records are made one after the other"
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

/// A ring with nothing under way: whoever takes it waits for all that he has submitted.
struct Ring(IoUring);

impl Ring {
    fn new() -> io::Result<Self> {
        // Bound to no thread, unlike that of an engine. Completions do not interrupt the thread
        // that waits for them: Linux 5.19.
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

    /// Ask once for each read, all at one time as far as there are entries, and wait for all of it.
    /// `done` gets the bytes that came: fewer than wanted, or none, where the kernel was
    /// interrupted, has failed, or was not asked; whoever reads on learns why. False if the ring is
    /// of no use any more.
    fn read(&mut self, reads: &mut [FileRead<'_>], done: &mut [usize]) -> bool {
        let kernel_has_buffers = NobodyLeaves;
        let mut is_sound = true;
        let mut failures = 0;
        let mut next = 0;
        let mut under_way = 0;
        loop {
            while is_sound && next < reads.len() && under_way < ENTRIES {
                let FileRead { file, at, to } = &mut reads[next];
                let len = to.len().min(MAX_TRANSFER_BYTES) as u32;
                let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), to.as_mut_ptr(), len)
                    .offset(*at)
                    .build()
                    .user_data(next as u64);
                // SAFETY: the buffer is borrowed mutably until `read` returns, so nobody else
                // touches or frees it, and the file is borrowed, so it stays open. This function
                // does not return before the kernel has said that it is done with the entry, or has
                // not taken it and never will (`is_sound`); and it does not unwind
                // (`NobodyLeaves`).
                let pushed = unsafe { self.0.submission().push(&entry) };
                pushed.expect("the ring has an entry for each that is under way");
                next += 1;
                under_way += 1;
            }
            if under_way == 0 {
                break;
            }
            if is_sound {
                // Half of them while others wait for their entries: the disk should always have
                // some.
                let want = if next == reads.len() { under_way } else { under_way.div_ceil(2) };
                match self.0.submit_and_wait(want).map_err(|error| error.raw_os_error()) {
                    Ok(_) => failures = 0,
                    Err(Some(libc::EINTR)) => {}
                    // The kernel is short of memory; what was not submitted stays in the ring for
                    // the next round.
                    Err(Some(libc::EAGAIN | libc::EBUSY)) if failures < MAX_RETRIES => {
                        failures += 1;
                        thread::yield_now();
                    }
                    // A filter of system calls, say. What the kernel has taken it completes all the
                    // same; what it has not, it never will: only `submit_and_wait` hands entries
                    // over.
                    Err(error) => {
                        tracing::info!(
                            "io_uring_enter has failed ({error:?}): its ring is given up"
                        );
                        is_sound = false;
                        under_way -= self.0.submission().len();
                    }
                }
            } else {
                thread::sleep(LOOK_EVERY);
            }
            for entry in self.0.completion() {
                done[entry.user_data() as usize] = usize::try_from(entry.result()).unwrap_or(0);
                under_way -= 1;
            }
        }
        mem::forget(kernel_has_buffers);
        is_sound
    }
}

/// As long as the kernel writes to buffers that are borrowed, they must not go back to those who
/// lent them, which unwinding would do.
struct NobodyLeaves;

impl Drop for NobodyLeaves {
    fn drop(&mut self) {
        tracing::error!("a panic while the kernel reads into memory of others; aborting");
        process::abort();
    }
}
