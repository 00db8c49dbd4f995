//! Copying into buffers that the device reads next, not the processor.

/// From this length on, [`copy_to_device`] goes around the caches.
const STREAM_FROM_BYTES: usize = 16 * 1024;

/// Copy `from` into `to`, a part of a buffer that is about to be written to a device.
///
/// Long copies use non-temporal stores where the processor has them: the lines of a buffer that a device, or a hypervisor for it, has
/// just read belong to its cache, and an ordinary store fetches each of them from there before it overwrites it.
///
/// Panics if the lengths differ.
pub fn copy_to_device(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "lengths of a copy");
    if from.len() < STREAM_FROM_BYTES {
        to.copy_from_slice(from);
    } else {
        stream(to, from);
    }
}

#[cfg(target_arch = "x86_64")]
fn stream(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    let unaligned = to.as_ptr().align_offset(size_of::<__m128i>()).min(to.len());
    let (head, body) = to.split_at_mut(unaligned);
    let (from_head, from_body) = from.split_at(unaligned);
    head.copy_from_slice(from_head);
    let mut targets = body.chunks_exact_mut(size_of::<__m128i>());
    let mut sources = from_body.chunks_exact(size_of::<__m128i>());
    for (target, source) in (&mut targets).zip(&mut sources) {
        // SAFETY: `source` is 16 readable bytes, and the load needs no alignment. SSE2 is part of x86_64.
        let bytes = unsafe { _mm_loadu_si128(source.as_ptr().cast()) };
        // SAFETY: `target` is 16 writable bytes, and aligned: `body` begins aligned, and each chunk is 16 bytes long.
        unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), bytes) };
    }
    // Non-temporal stores are not ordered with later ones; the fence makes them so, before anybody else is told of the buffer
    // (Intel SDM volume 1, section 10.4.6.2; the contract of `_mm_stream_si128` in Rust asks for it too).
    // SAFETY: SSE is part of x86_64; a fence touches no memory.
    unsafe { _mm_sfence() };
    targets.into_remainder().copy_from_slice(sources.remainder());
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_whole() {
        let from: Vec<u8> =
            (0..STREAM_FROM_BYTES + 100).map(|index| (index * 7 + index / 251) as u8).collect();
        for len in [0, 1, STREAM_FROM_BYTES - 1, STREAM_FROM_BYTES, STREAM_FROM_BYTES + 37] {
            for at in 0..33 {
                let mut to = vec![0xaa; at + len + 40];
                copy_to_device(&mut to[at..at + len], &from[1..=len]);
                assert!(to[..at].iter().all(|byte| *byte == 0xaa));
                assert_eq!(to[at..at + len], from[1..=len], "{len} bytes at {at}");
                assert!(to[at + len..].iter().all(|byte| *byte == 0xaa));
            }
        }
    }

    #[test]
    #[should_panic(expected = "lengths of a copy")]
    fn lengths_must_agree() {
        copy_to_device(&mut [0; 2], &[0; 3]);
    }
}
