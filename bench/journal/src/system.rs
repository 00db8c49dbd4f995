//! Information of the kernel about this process and its files.

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

/// Returns the processor time of this thread.
pub fn thread_cpu() -> Duration {
    time_of(ClockId::ThreadCPUTime)
}

/// Returns the processor time of all threads of this process.
pub fn process_cpu() -> Duration {
    time_of(ClockId::ProcessCPUTime)
}

/// Resident memory.
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

/// Resets the peak (proc(5)).
pub fn reset_peak() -> Result<()> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

/// Returns the bytes that this process has caused to be written to disks so far, including those
/// that the kernel will write later.
pub fn written_bytes() -> Result<u64> {
    let io = fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("write_bytes:"));
    line.and_then(|bytes| bytes.trim().parse().ok())
        .ok_or_else(|| "/proc/self/io has no write_bytes".into())
}

/// Syncs the file system of a directory.
pub fn sync(directory: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(File::open(directory)?)?)
}

/// An upper bound of the time in which the kernel gives back the memory of a process of some GiB.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(10);

/// Returns whether the kernel of a virtual machine may give free memory back to its host some
/// seconds after it was freed (free page reporting). A process that is given such memory again
/// waits for the host to find and clear it, which takes some twenty times as long as for memory
/// that was freed recently: so a process that starts right after another one has an advantage.
pub fn reports_free_memory() -> bool {
    Path::new("/sys/module/page_reporting").exists()
}

/// Waits until the memory of the previous process is given back, so that all start with the same
/// conditions.
pub fn wait_for_memory_reporting() {
    if reports_free_memory() {
        thread::sleep(GIVEN_BACK_WITHIN);
    }
}

/// Returns the disk space of a directory; holes do not count.
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
/// A process that uses less processor time than this in such a window is idle.
const QUIET: Duration = Duration::from_millis(5);
const QUIET_LIMIT: Duration = Duration::from_secs(60);

/// Waits until the engine's own threads are idle, for a minute at most: its deferred work belongs
/// to it, and not to what is measured next.
pub fn wait_until_idle() {
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
    fn system_figures_are_available() {
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
