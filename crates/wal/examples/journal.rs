//! A journal: `cargo run -p alluvium-wal --example journal -- journal.wal "first entry" "second
//! entry"`

use std::error::Error;
use std::path::Path;

use alluvium_device::OpenOptions;
use alluvium_wal::{FormatOptions, OpenError, Options, Wal};

/// Appends `entries` to the journal in `path`, and returns its previous entries.
pub(crate) fn journal(path: &Path, entries: &[String]) -> Result<Vec<String>, Box<dyn Error>> {
    // A block device, or a file, which is created with 16 MiB if it does not exist.
    let target = OpenOptions { create_bytes: Some(16 << 20), ..OpenOptions::default() };
    let device = alluvium_device::open(path, &target)?;
    if let Err(OpenError::NotFormatted { .. }) = Wal::inspect(&device) {
        Wal::format(&device, &FormatOptions::default())?;
    }
    let options =
        Options { window_bytes: 4 << 20, max_record_bytes: 1 << 20, ..Options::default() };
    let mut before = Vec::new();
    let (wal, report) = Wal::open(device, &options, None, &mut |record| {
        before.push(String::from_utf8(record.payload.to_vec())?);
        Ok(())
    })?;
    assert!(report.damage.is_empty(), "{report}");
    // All are appended before the first is awaited, so they share writes and flushes.
    let appends: Result<Vec<_>, _> =
        entries.iter().map(|entry| wal.append(&[entry.as_bytes()])).collect();
    for append in appends? {
        append.wait()?; // or `.await`, on any runtime
    }
    wal.close()?; // without this the next opening has slightly more to read
    Ok(before)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: journal FILE_OR_DEVICE [ENTRY]...")?;
    let entries: Vec<String> = args.collect();
    for entry in journal(path.as_ref(), &entries)? {
        println!("{entry}");
    }
    Ok(())
}
