//! The bytes of a simulated disk: the durable content, the visible content, and the unflushed
//! writes between the two.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::SECTOR_BYTES;
use crate::PAGE_BYTES;

/// Sparse bytes; unwritten ones are zero. Clones share pages until one of them is written.
#[derive(Clone, Default)]
pub(super) struct Pages(BTreeMap<u64, Arc<[u8; PAGE_BYTES]>>);

impl Pages {
    pub(super) fn read(&self, at: u64, into: &mut [u8]) {
        for (page, within, range) in split(at, into.len()) {
            let into = &mut into[range];
            match self.0.get(&page) {
                Some(bytes) => into.copy_from_slice(&bytes[within..within + into.len()]),
                None => into.fill(0),
            }
        }
    }

    pub(super) fn write(&mut self, at: u64, from: &[u8]) {
        for (page, within, range) in split(at, from.len()) {
            let from = &from[range];
            let bytes = self.0.entry(page).or_insert_with(|| Arc::new([0; PAGE_BYTES]));
            Arc::make_mut(bytes)[within..within + from.len()].copy_from_slice(from);
        }
    }
}

/// Splits `len` bytes at `at` at page boundaries: page number, offset within it, range of the
/// bytes.
fn split(at: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let here = at + done as u64;
        let within = (here % PAGE_BYTES as u64) as usize;
        let part = (PAGE_BYTES - within).min(len - done);
        let range = done..done + part;
        done += part;
        (part > 0).then_some((here / PAGE_BYTES as u64, within, range))
    })
}

/// A write that readers see and a power cut may lose.
#[derive(Clone)]
struct Unflushed {
    /// Position in the order of completion.
    sequence: u64,
    at: u64,
    data: Vec<u8>,
    /// Sectors of this write that are not yet on the media; the others were never written (a torn
    /// write) or are superseded by a later durable write.
    live: Vec<bool>,
}

/// The media plus the volatile cache.
#[derive(Clone, Default)]
pub(super) struct Storage {
    media: Pages,
    visible: Pages,
    cache: Vec<Unflushed>,
    next_sequence: u64,
}

impl Storage {
    pub(super) fn read(&self, at: u64, into: &mut [u8]) {
        self.visible.read(at, into);
    }

    pub(super) fn read_durable(&self, at: u64, into: &mut [u8]) {
        self.media.read(at, into);
    }

    /// Writes durably.
    pub(super) fn write_through(&mut self, at: u64, data: &[u8]) {
        self.overtake(at, data.len());
        self.media.write(at, data);
        self.visible.write(at, data);
    }

    /// Changes bytes at rest, at any position, both on the media and for readers.
    pub(super) fn overwrite(&mut self, at: u64, data: &[u8]) {
        self.media.write(at, data);
        self.visible.write(at, data);
        for unflushed in &mut self.cache {
            let start = unflushed.at.max(at);
            let end = (unflushed.at + unflushed.data.len() as u64).min(at + data.len() as u64);
            if start < end {
                let into = (start - unflushed.at) as usize..(end - unflushed.at) as usize;
                unflushed.data[into]
                    .copy_from_slice(&data[(start - at) as usize..(end - at) as usize]);
            }
        }
    }

    /// Writes the sectors in `live` to the cache.
    pub(super) fn write_back(&mut self, at: u64, data: &[u8], live: Vec<bool>) {
        if !live.contains(&true) {
            return;
        }
        write_sectors(&mut self.visible, at, data, &live);
        self.cache.push(Unflushed { sequence: self.next_sequence, at, data: data.to_vec(), live });
        self.next_sequence += 1;
    }

    /// The current position in the order of completed writes, for [`Storage::flush`].
    pub(super) fn mark(&self) -> u64 {
        self.next_sequence
    }

    /// Makes the writes before `mark` durable, and no others.
    pub(super) fn flush(&mut self, mark: u64) {
        let media = &mut self.media;
        self.cache.retain(|unflushed| {
            let flush = unflushed.sequence < mark;
            if flush {
                write_sectors(media, unflushed.at, &unflushed.data, &unflushed.live);
            }
            !flush
        });
    }

    /// Returns the media plus the sectors of each unflushed write that `keep(at, sectors)` selects,
    /// in the order of completion, so that a later write always wins over an earlier one to the
    /// same sectors.
    pub(super) fn after_power_cut(&self, mut keep: impl FnMut(u64, usize) -> Vec<bool>) -> Pages {
        let mut media = self.media.clone();
        for unflushed in &self.cache {
            let mut kept = keep(unflushed.at, unflushed.live.len());
            kept.iter_mut().zip(&unflushed.live).for_each(|(kept, live)| *kept &= live);
            write_sectors(&mut media, unflushed.at, &unflushed.data, &kept);
        }
        media
    }

    pub(super) fn from_media(media: Pages) -> Self {
        Self { visible: media.clone(), media, cache: Vec::new(), next_sequence: 0 }
    }

    /// Drops sectors from unflushed writes, so that they do not reappear over a later durable
    /// write.
    fn overtake(&mut self, at: u64, len: usize) {
        let overtaken = at..at + len as u64;
        for unflushed in &mut self.cache {
            for (index, live) in unflushed.live.iter_mut().enumerate() {
                *live &= !overtaken.contains(&(unflushed.at + (index * SECTOR_BYTES) as u64));
            }
        }
        self.cache.retain(|unflushed| unflushed.live.contains(&true));
    }
}

/// Writes the sectors of `data` that `which` selects.
pub(super) fn write_sectors(pages: &mut Pages, at: u64, data: &[u8], which: &[bool]) {
    for (index, sector) in data.chunks(SECTOR_BYTES).enumerate().filter(|(index, _)| which[*index])
    {
        pages.write(at + (index * SECTOR_BYTES) as u64, sector);
    }
}
