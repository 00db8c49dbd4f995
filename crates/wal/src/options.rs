//! Options for formatting and opening a WAL. Invalid ones are refused, never silently adjusted.

use crate::OpenError;
use crate::layout::{MIN_RING_BYTES, PAGE, RECORD_HEADER_BYTES, page_ceil, page_floor};

/// Options of [`Wal::format`](crate::Wal::format).
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// Bytes of the device to use, both header slots included; a multiple of 4 KiB, at least 192
    /// KiB. Default: the whole device, rounded down to 4 KiB.
    pub capacity_bytes: Option<u64>,
    /// Node that formats; recorded in the header for information only. Default: 0.
    pub node_id: u32,
    /// Window to record, bytes; see [`Options::window_bytes`], which replaces it at each open.
    /// Default: 64 MiB, or half of the ring if that is less.
    pub window_bytes: Option<u64>,
    /// Format even if the device holds something else. Default: false.
    pub force: bool,
}

/// Options of [`Wal::open`](crate::Wal::open).
#[derive(Clone, Debug)]
pub struct Options {
    /// Node that writes; recorded in the header for information only. Default: 0.
    pub node_id: u32,
    /// Upper bound of bytes appended and not durable. It bounds the memory that waits for the
    /// device, and how far recovery searches behind a hole. The window starts at a sixteenth of it,
    /// at least 64 KiB, and grows and shrinks with the load. A multiple of 4 KiB. Default: 64 MiB.
    /// At least 32 KiB, at most 1 GiB and half of the ring.
    pub window_bytes: u64,
    /// Size at which a block is closed and written as soon as there is an I/O slot; a record that
    /// does not fit continues in the next one. A multiple of 4 KiB. Default: 256 KiB. At least 4
    /// KiB, at most half of the window.
    pub block_bytes: u32,
    /// The largest payload that is accepted. Default: 16 MiB. At least 1, at most half of the
    /// window less 8 KiB.
    pub max_record_bytes: u32,
    /// Block writes in flight. Default: 8. At least 1, at most 1024.
    pub io_depth: usize,
    /// Writes per second; `None` (default) is no limit. At least 1. A write of more than 256 KiB
    /// counts as several, as on cloud disks; header writes count but are never delayed, and delay
    /// blocks by a second at most. Unused quota of up to a tenth of a second is kept for bursts.
    pub iops: Option<u32>,
    /// Bytes of writes per second; `None` (default) is no limit. At least 4 KiB. Bursts as for
    /// `iops`.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Reserve the device before anything is written
    /// ([`Device::reserve`](alluvium_device::Device::reserve)), so that it refuses the writes of an
    /// earlier owner on another host; the opening fails if it cannot be reserved
    /// ([`OpenError::Reserve`]). The reservation stays when the log is closed. Default: false.
    pub reserve: bool,
    /// Raise the log's mark ([`Wal::set_mark`](crate::Wal::set_mark)) to this value at the opening,
    /// which is refused ([`OpenError::MarkNotAhead`]) unless it is greater than the header's: a
    /// user with an outdated copy of the data that belongs to the log cannot open it. Default:
    /// none, the mark is unchanged.
    pub mark: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node_id: 0,
            window_bytes: DEFAULT_WINDOW_BYTES,
            block_bytes: 256 * 1024,
            max_record_bytes: 16 * 1024 * 1024,
            io_depth: 8,
            iops: None,
            bandwidth_bytes_per_second: None,
            reserve: false,
            mark: None,
        }
    }
}

pub(crate) const DEFAULT_WINDOW_BYTES: u64 = 64 * 1024 * 1024;
const MIN_WINDOW_BYTES: u64 = 32 * 1024;
pub(crate) const MAX_WINDOW_BYTES: u64 = 1024 * 1024 * 1024;
const MAX_IO_DEPTH: usize = 1024;

/// A record alone needs its header, and a padding of up to a page and a header; it may also start
/// anywhere in a page of which nothing can be reused. Two pages cover all of that.
const RECORD_OVERHEAD_BYTES: u64 = 2 * PAGE;
const _: () = assert!(RECORD_OVERHEAD_BYTES >= PAGE + 2 * RECORD_HEADER_BYTES as u64);
const _: () = assert!(MIN_RING_BYTES >= 2 * MIN_WINDOW_BYTES);

fn reject<T>(message: String) -> Result<T, OpenError> {
    Err(OpenError::InvalidOption(message))
}

pub(crate) fn check_window(window_bytes: u64, ring_bytes: u64) -> Result<(), OpenError> {
    if !window_bytes.is_multiple_of(PAGE) {
        return reject(format!("window_bytes = {window_bytes} is not a multiple of {PAGE}"));
    }
    if !(MIN_WINDOW_BYTES..=MAX_WINDOW_BYTES).contains(&window_bytes) {
        return reject(format!(
            "window_bytes = {window_bytes} is not between {MIN_WINDOW_BYTES} and {MAX_WINDOW_BYTES}"
        ));
    }
    if window_bytes > ring_bytes / 2 {
        return reject(format!(
            "window_bytes = {window_bytes} is more than half of the ring of {ring_bytes} bytes"
        ));
    }
    Ok(())
}

impl Options {
    /// The initial window: a sixteenth of the maximum, at least 64 KiB or the maximum if that is
    /// smaller, and large enough for the largest record.
    pub(crate) fn initial_window_bytes(&self) -> u64 {
        let record_bytes = page_ceil(u64::from(self.max_record_bytes)) + RECORD_OVERHEAD_BYTES;
        page_floor(self.window_bytes / 16).max(64 * 1024).max(record_bytes).min(self.window_bytes)
    }

    /// Refuses options that cannot work with a ring of `ring_bytes`. After this check, a record of
    /// `max_record_bytes` can always be appended to a log that is completely durable and trimmed.
    pub(crate) fn check(&self, ring_bytes: u64) -> Result<(), OpenError> {
        check_window(self.window_bytes, ring_bytes)?;
        let block_bytes = u64::from(self.block_bytes);
        if !block_bytes.is_multiple_of(PAGE) || block_bytes == 0 {
            return reject(format!(
                "block_bytes = {block_bytes} is not a positive multiple of {PAGE}"
            ));
        }
        if block_bytes > self.window_bytes / 2 {
            return reject(format!(
                "block_bytes = {block_bytes} is more than half of window_bytes = {}",
                self.window_bytes
            ));
        }
        if self.max_record_bytes == 0 {
            return reject("max_record_bytes = 0: a record has at least one byte".into());
        }
        let largest = u64::from(self.max_record_bytes) + RECORD_OVERHEAD_BYTES;
        if largest > self.window_bytes / 2 {
            return reject(format!(
                "max_record_bytes = {} and {RECORD_OVERHEAD_BYTES} bytes of overhead are more than \
                 half of window_bytes = {}",
                self.max_record_bytes, self.window_bytes
            ));
        }
        if !(1..=MAX_IO_DEPTH).contains(&self.io_depth) {
            return reject(format!(
                "io_depth = {} is not between 1 and {MAX_IO_DEPTH}",
                self.io_depth
            ));
        }
        if self.iops == Some(0) {
            return reject("iops = 0 would stop all writes; omit it for no limit".into());
        }
        if let Some(rate) = self.bandwidth_bytes_per_second
            && rate < PAGE
        {
            return reject(format!(
                "bandwidth_bytes_per_second = {rate} is less than a page of {PAGE} bytes"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 1024 * 1024 * 1024;

    fn message(options: &Options, ring_bytes: u64) -> String {
        options.check(ring_bytes).expect_err("must be refused").to_string()
    }

    #[test]
    fn defaults_are_valid() {
        Options::default().check(RING).unwrap();
    }

    #[test]
    fn each_refusal_names_both_numbers() {
        let window = Options { window_bytes: 64 << 20, ..Options::default() };
        let text = message(&window, 100 << 20);
        assert!(text.contains("67108864") && text.contains("104857600"), "{text}");
        let record = Options { max_record_bytes: 33 << 20, ..Options::default() };
        let text = message(&record, RING);
        assert!(text.contains("34603008") && text.contains("67108864"), "{text}");
        let block = Options { block_bytes: 64 << 20, ..Options::default() };
        assert!(message(&block, RING).contains("block_bytes = 67108864"));
        assert!(
            message(&Options { window_bytes: 40_000, ..Options::default() }, RING)
                .contains("multiple of 4096")
        );
        assert!(
            message(&Options { io_depth: 0, ..Options::default() }, RING).contains("io_depth = 0")
        );
        assert!(
            message(&Options { iops: Some(0), ..Options::default() }, RING).contains("iops = 0")
        );
        assert!(
            message(&Options { max_record_bytes: 0, ..Options::default() }, RING)
                .contains("max_record_bytes")
        );
        let slow = Options { bandwidth_bytes_per_second: Some(100), ..Options::default() };
        assert!(message(&slow, RING).contains("100"));
    }
}
