//! Fast copies into page-aligned buffers on all processors.

/// Below the length at which the C library's `memcpy` switches to the processor's string
/// instructions.
const STEP_BYTES: usize = 2 * 1024;

/// Copies `from` into `to`, which may be a part of a page-aligned buffer.
///
/// Equivalent to `to.copy_from_slice(from)`, but in steps. The C library copies more than about 2
/// KiB by `rep movsb` where the processor reports it as fast. On AMD's Zen 3 and 4 it is slower by
/// a factor of four if source and target have nearly the same offset in their pages (glibc bug
/// 30994), which is the usual case for page-aligned buffers that differ by a record header.
///
/// Panics if the lengths differ.
pub fn copy_in_steps(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "lengths of a copy");
    for (to, from) in to.chunks_mut(STEP_BYTES).zip(from.chunks(STEP_BYTES)) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_length_is_copied_whole() {
        let from: Vec<u8> =
            (0..3 * STEP_BYTES + 100).map(|index| (index * 7 + index / 251) as u8).collect();
        for len in [0, 1, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES + 37] {
            for at in 0..33 {
                let mut to = vec![0xaa; at + len + 40];
                copy_in_steps(&mut to[at..at + len], &from[1..=len]);
                assert!(to[..at].iter().all(|byte| *byte == 0xaa));
                assert_eq!(to[at..at + len], from[1..=len], "{len} bytes at {at}");
                assert!(to[at + len..].iter().all(|byte| *byte == 0xaa));
            }
        }
    }

    #[test]
    #[should_panic(expected = "lengths of a copy")]
    fn lengths_must_agree() {
        copy_in_steps(&mut [0; 2], &[0; 3]);
    }
}
