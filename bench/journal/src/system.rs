//! What the kernel knows of this process and of its files.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::engine::Result;

fn time_of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Processor time of this thread.
pub fn thread_cpu() -> Duration {
    time_of(ClockId::ThreadCPUTime)
}

/// Processor time of all threads of this process.
pub fn process_cpu() -> Duration {
    time_of(ClockId::ProcessCPUTime)
}

/// Bytes that are resident.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resident {
    pub now_bytes: u64,
    pub peak_bytes: u64,
}

pub fn resident() -> Result<Resident> {
    let status = fs::read_to_string("/proc/self/status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.map(|kib| kib << 10).ok_or_else(|| format!("/proc/self/status has no {name}"))
    };
    Ok(Resident { now_bytes: field("VmRSS:")?, peak_bytes: field("VmHWM:")? })
}

/// Let the peak begin anew (proc(5)).
pub fn reset_peak() -> Result<()> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

/// Bytes that this process had written to disks so far, those that the kernel will write by itself
/// included.
pub fn written_bytes() -> Result<u64> {
    let io = fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes:"));
    line.and_then(|bytes| bytes.trim().parse().ok())
        .ok_or_else(|| "/proc/self/io has no write_bytes".into())
}

/// Have the file system of a directory written.
pub fn sync(directory: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(File::open(directory)?)?)
}

/// As long as the kernel takes, and longer, to give back what a process of some GiB has left.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(10);

/// Whether the kernel of a virtual machine may give memory that is free back to its host, a few
/// seconds after it came free (free page reporting). Who is given such memory again waits for the
/// host to find and clear it, some twenty times as long as for what has just come free: so the one
/// who runs right behind another has it better.
pub fn gives_memory_back() -> bool {
    Path::new("/sys/module/page_reporting").exists()
}

/// Wait until what the process before has left is given back: everybody begins alike.
pub fn forget_memory() {
    if gives_memory_back() {
        thread::sleep(GIVEN_BACK_WITHIN);
    }
}

/// Room that a directory takes on its disk: holes do not count.
pub fn disk_bytes(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += match metadata.is_dir() {
            true => disk_bytes(&entry.path())?,
            false => metadata.blocks() * 512,
        };
    }
    Ok(bytes)
}

const QUIET_WINDOW: Duration = Duration::from_millis(100);
/// Processor time in such a window with which a process does nothing that matters.
const QUIET: Duration = Duration::from_millis(5);
const QUIET_LIMIT: Duration = Duration::from_secs(60);

/// Wait until the engine's own threads have nothing to do any more, for a minute at most: what an
/// engine has put off is its own, and not of what comes next.
pub fn settle() {
    let until = Instant::now() + QUIET_LIMIT;
    loop {
        let before = process_cpu();
        thread::sleep(QUIET_WINDOW);
        if process_cpu() - before < QUIET || Instant::now() >= until {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_answers() {
        let resident = resident().unwrap();
        assert!(0 < resident.now_bytes && resident.now_bytes <= resident.peak_bytes);
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("below")).unwrap();
        let before = disk_bytes(directory.path()).unwrap();
        fs::write(directory.path().join("below/file"), vec![1_u8; 1 << 20]).unwrap();
        sync(directory.path()).unwrap();
        assert!(disk_bytes(directory.path()).unwrap() >= before + (1 << 20));
        let file = File::create(directory.path().join("hole")).unwrap();
        file.set_len(1 << 30).unwrap();
        assert!(disk_bytes(directory.path()).unwrap() < before + (4 << 20));
        written_bytes().unwrap();
    }
}
