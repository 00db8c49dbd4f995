//! Resizing of a log that is not open. `docs/format/wal.md`, section 7.

use std::ops::Range;

use alluvium_device::{Device, SharedDevice};

use crate::layout::{
    DATA_START, LogOffset, MIN_CAPACITY_BYTES, PAGE, Ring, is_capacity, page_ceil, page_floor,
};
use crate::recovery::{self, Found};
use crate::report::{HeaderInfo, Inspection};
use crate::{OpenError, Progress, header};

/// Bytes per copy step.
const STEP_BYTES: u64 = 1024 * 1024;

/// Implements [`Wal::resize`](crate::Wal::resize).
pub(crate) fn resize(
    device: &SharedDevice,
    capacity_bytes: u64,
    progress: Option<Progress>,
) -> Result<HeaderInfo, OpenError> {
    let device = &**device;
    let device_bytes = device.capacity_bytes();
    if capacity_bytes > device_bytes {
        return Err(OpenError::LargerThanDevice {
            device: device.geometry().name.clone(),
            wanted_bytes: capacity_bytes,
            device_bytes,
        });
    }
    if !is_capacity(capacity_bytes) {
        return Err(OpenError::InvalidOption(format!(
            "a capacity of {capacity_bytes} bytes is not a multiple of {PAGE}, or less than \
             {MIN_CAPACITY_BYTES}"
        )));
    }
    let Inspection { header: found, newest, .. } = header::inspect(device)?;
    // A log that has never been opened keeps epoch 0.
    let epoch = if found.epoch == 0 { 0 } else { header::next_epoch(&found)? };
    // As at an opening: the records read must stay.
    device.flush()?;
    let Found { report, .. } = recovery::walk(device, &found, progress, &mut |_| Ok(()))?;
    let end = report.end;
    let new_ring_bytes = capacity_bytes - DATA_START;
    let live = page_floor(found.trim.0)..page_ceil(end.0);
    let blocked = |reason: &str| OpenError::ResizeBlocked {
        live_bytes: live.end - live.start,
        ring_bytes: new_ring_bytes,
        reason: reason.into(),
    };
    if live.end - live.start > new_ring_bytes {
        return Err(blocked("the log does not fit"));
    }
    let (to, moves) = place(found.ring(), new_ring_bytes, &live)
        .ok_or_else(|| blocked("it cannot be moved through free space alone"))?;
    // Persist the result of the walk first: damage may be proven only by a record after the end,
    // where copies go.
    let recovered =
        HeaderInfo { epoch, epoch_start: end, durable: end, clean_shutdown: true, ..found.next() };
    let recovered = header::change(device, &found, newest, &recovered)?;
    for pages in moves {
        copy(device, found.ring(), to, pages)?;
    }
    device.flush()?;
    let resized = HeaderInfo {
        capacity_bytes,
        origin_bytes: to.position(LogOffset(0)),
        window_bytes: found.window_bytes.min(page_floor(new_ring_bytes / 2)),
        ..recovered.next()
    };
    let resized = header::change(device, &recovered, newest, &resized)?;
    device.flush()?;
    Ok(resized)
}

/// Places a new ring of `ring_bytes` such that the pages `live` of the log can be moved into it
/// through free space only, with the least copying. Returns it with the parts to move.
fn place(from: Ring, ring_bytes: u64, live: &Range<u64>) -> Option<(Ring, Vec<Range<u64>>)> {
    let capacity_bytes = DATA_START + ring_bytes;
    if live.is_empty() {
        return Some((Ring::new(capacity_bytes, 0), Vec::new()));
    }
    let first = from.position(LogOffset(live.start));
    let last = from.position(LogOffset(live.end - PAGE));
    let len = live.end - live.start;
    // Candidate positions of the first live byte.
    let candidates = [
        Some(first),                                 // unchanged
        (last + ring_bytes + PAGE).checked_sub(len), // the last live page unchanged
        Some(last + PAGE),                           // after the live pages
        Some(0),
        Some(ring_bytes - len),
    ];
    let occupied = positions(from, live);
    let placed = candidates.into_iter().flatten().map(|at| {
        let at = at % ring_bytes;
        let origin = (at + ring_bytes - live.start % ring_bytes) % ring_bytes;
        let to = Ring::new(capacity_bytes, origin);
        (to, moves(from, to, live))
    });
    let possible = placed.filter(|(to, moves)| {
        let mut targets = moves.iter().flat_map(|pages| positions(*to, pages));
        // If the last live page is beyond the new ring, the second candidate does not keep it, so
        // every candidate is checked.
        targets.all(|target| {
            occupied.iter().all(|used| target.end <= used.start || used.end <= target.start)
        })
    });
    possible.min_by_key(|(_, moves)| moves.iter().map(|pages| pages.end - pages.start).sum::<u64>())
}

/// The bytes of `ring` that `pages` of the log occupy.
fn positions(ring: Ring, pages: &Range<u64>) -> Vec<Range<u64>> {
    let len = pages.end - pages.start;
    ring.pieces(LogOffset(pages.start), len)
        .map(|piece| piece.at.0 - DATA_START..piece.at.0 - DATA_START + piece.range.len() as u64)
        .collect()
}

/// The parts of `live` whose positions in `to` and `from` differ, each contiguous in both.
fn moves(from: Ring, to: Ring, live: &Range<u64>) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut x = live.start;
    while x < live.end {
        let here = (from.position(LogOffset(x)), to.position(LogOffset(x)));
        let len = (live.end - x).min(from.bytes() - here.0).min(to.bytes() - here.1);
        if here.0 != here.1 {
            parts.push(x..x + len);
        }
        x += len;
    }
    parts
}

/// Copies `pages` of the log from one ring to the other.
fn copy(device: &dyn Device, from: Ring, to: Ring, pages: Range<u64>) -> Result<(), OpenError> {
    for x in pages.clone().step_by(STEP_BYTES as usize) {
        let len = STEP_BYTES.min(pages.end - x);
        let buf = device.read(from.device_offset(LogOffset(x)), len as usize)?;
        device.write_durable(to.device_offset(LogOffset(x)), buf.freeze())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every chosen move goes through free space only, and everything not moved keeps its
        /// position.
        #[test]
        fn no_live_page_is_overwritten(
            old_pages in 32u64..80, new_pages in 32u64..80, origin in 0u64..32, start in 0u64..500,
            len_permille in 0u64..=1000,
        ) {
            let from = Ring::new(DATA_START + old_pages * PAGE, origin * PAGE);
            let len = old_pages.min(new_pages) * len_permille / 1000;
            let live = start * PAGE..(start + len) * PAGE;
            if let Some((to, moves)) = place(from, new_pages * PAGE, &live) {
                let old: Vec<u64> = (start..start + len)
                    .map(|page| from.position(LogOffset(page * PAGE)))
                    .collect();
                for page in start..start + len {
                    let x = LogOffset(page * PAGE);
                    let (before, after) = (from.position(x), to.position(x));
                    let moved = moves.iter().any(|pages| pages.contains(&(page * PAGE)));
                    prop_assert_eq!(moved, before != after);
                    prop_assert!(!moved || !old.contains(&after), "{page} overwrites a live page");
                }
            }
        }

        /// A log in one piece can always grow without a copy.
        #[test]
        fn a_log_in_one_piece_grows_without_a_move(
            old_pages in 32u64..80, more in 0u64..80, start in 0u64..500, len in 1u64..80,
        ) {
            let from = Ring::new(DATA_START + old_pages * PAGE, 0);
            prop_assume!(start % old_pages + len <= old_pages);
            let live = start * PAGE..(start + len) * PAGE;
            let (_, moves) = place(from, (old_pages + more) * PAGE, &live).expect("it fits");
            prop_assert!(moves.is_empty());
        }

        /// A log that crosses the end of its ring can grow by at least the size of its piece at the
        /// ring's start.
        #[test]
        fn a_log_in_two_pieces_grows_into_the_new_space(
            old_pages in 32u64..80, head in 1u64..16, tail in 1u64..16, more in 0u64..80,
        ) {
            let from = Ring::new(DATA_START + old_pages * PAGE, 0);
            let live = (2 * old_pages - head) * PAGE..(2 * old_pages + tail) * PAGE;
            prop_assert!(place(from, (old_pages + tail + more) * PAGE, &live).is_some());
        }
    }
}
