//! Reading files into memory that Direct I/O can fill.

use std::fs::File;
use std::io;
use std::ops::Deref;

use bytes::Bytes;
use rustix::io::{pread, retry_on_intr};

use crate::buffer::PAGE_BYTES;

/// Bytes of a file, read piece by piece into page-aligned memory.
///
/// Memory not yet read into is uninitialised, which avoids zeroing bytes that are overwritten at
/// once.
pub struct FileBytes {
    /// The first page boundary is at `start`; the capacity never grows, so the memory never moves.
    memory: Vec<u8>,
    start: usize,
}

impl FileBytes {
    /// Allocates a buffer for `len_bytes`, rounded up to whole pages.
    pub fn with_capacity(len_bytes: usize) -> Self {
        let mut memory: Vec<u8> =
            Vec::with_capacity(len_bytes.next_multiple_of(PAGE_BYTES) + PAGE_BYTES);
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        memory.resize(start, 0);
        Self { memory, start }
    }

    /// Reads at most `most_bytes` of `file` from position `at`, appending to the present bytes, as
    /// far as the capacity allows. Returns the number of bytes read: 0 at the end of the file or if
    /// the buffer is full. A short read does not mean the end of the file.
    ///
    /// # Errors
    /// The errors of `pread(2)`, except for interruption by a signal.
    pub fn read_more(&mut self, file: &File, at: u64, most_bytes: usize) -> io::Result<usize> {
        let free = self.memory.spare_capacity_mut();
        let most_bytes = most_bytes.min(free.len());
        let free = &mut free[..most_bytes];
        let read_bytes = retry_on_intr(|| {
            let (read, _) = pread(file, &mut *free, at)?;
            Ok(read.len())
        })?;
        // SAFETY: the read has initialised `read_bytes` bytes after the present length, within the
        // capacity.
        unsafe { self.memory.set_len(self.memory.len() + read_bytes) };
        Ok(read_bytes)
    }

    /// Discards the bytes and keeps the memory.
    pub fn clear(&mut self) {
        self.memory.truncate(self.start);
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

/// Converts without a copy.
impl From<FileBytes> for Bytes {
    fn from(read: FileBytes) -> Self {
        Self::from(read.memory).slice(read.start..)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn file(bytes: &[u8]) -> (tempfile::TempDir, File) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, bytes).unwrap();
        (directory, File::open(path).unwrap())
    }

    #[test]
    fn reads_append() {
        let whole: Vec<u8> =
            (0..3 * PAGE_BYTES + 5).map(|i| (i * 7 + i / PAGE_BYTES) as u8).collect();
        let (_directory, file) = file(&whole);
        let mut read = FileBytes::with_capacity(whole.len());
        assert_eq!(read.as_ptr().align_offset(PAGE_BYTES), 0);
        assert_eq!(read.read_more(&file, 0, PAGE_BYTES).unwrap(), PAGE_BYTES);
        assert_eq!(
            read.read_more(&file, PAGE_BYTES as u64, usize::MAX).unwrap(),
            2 * PAGE_BYTES + 5
        );
        assert!(*read == whole);
        assert_eq!(read.read_more(&file, whole.len() as u64, 1).unwrap(), 0, "it has an end");
        read.clear();
        assert!(read.is_empty());
        assert_eq!(read.read_more(&file, 1, 2).unwrap(), 2);
        assert_eq!(Bytes::from(read), whole[1..3]);
    }

    #[test]
    fn reads_stop_at_the_capacity() {
        let whole = vec![1; 4 * PAGE_BYTES];
        let (_directory, file) = file(&whole);
        let mut read = FileBytes::with_capacity(1);
        let memory = read.as_ptr();
        let mut at = 0;
        loop {
            match read.read_more(&file, at, usize::MAX).unwrap() {
                0 => break,
                read => at += read as u64,
            }
        }
        assert!((PAGE_BYTES..=2 * PAGE_BYTES).contains(&read.len()), "{}", read.len());
        assert_eq!(read.as_ptr(), memory);
    }
}
