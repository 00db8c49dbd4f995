//! Single-threaded and multi-threaded tests of arenas.

use std::sync::Arc;
use std::thread;

use super::*;

fn publish(arena: &Arena, bytes: &[u8]) -> Option<usize> {
    let mut taken = arena.reserve(bytes.len())?;
    taken.copy_from_slice(bytes);
    let at = taken.at();
    taken.publish();
    Some(at)
}

#[test]
fn only_published_bytes_are_readable() {
    let arena = Arena::new(PAGE_BYTES).unwrap();
    assert_eq!(publish(&arena, b"eleven byte"), Some(0));
    let mut taken = arena.reserve(8).unwrap();
    assert_eq!((taken.at(), taken.len()), (16, 8));
    assert_eq!(publish(&arena, b"later"), Some(24));
    assert_eq!(arena.read(0..11), Some(&b"eleven byte"[..]));
    assert_eq!(arena.read(11..16), Some(&[0; 5][..]), "padding up to a granule");
    assert_eq!(arena.read(24..29), Some(&b"later"[..]));
    for hidden in [16..17, 0..17, 16..24, 23..25, 0..29, 32..33] {
        assert_eq!(arena.read(hidden.clone()), None, "{hidden:?}");
    }
    assert_eq!(
        (arena.published_from(0), arena.published_from(16), arena.published_from(24)),
        (16, 16, 32)
    );
    taken.fill(1);
    taken.publish();
    assert_eq!((arena.published_from(0), arena.taken_bytes()), (32, Some(32)));
    assert_eq!(arena.read(16..25), Some(&b"\x01\x01\x01\x01\x01\x01\x01\x01l"[..]));
    for beyond in [PAGE_BYTES..PAGE_BYTES + 1, 0..usize::MAX] {
        assert_eq!(arena.read(beyond), None);
    }
    #[expect(clippy::reversed_empty_ranges)]
    {
        assert_eq!(arena.read(8..0), None);
    }
}

#[test]
fn a_dropped_reservation_is_never_readable() {
    let arena = Arena::new(PAGE_BYTES).unwrap();
    let _never_published = arena.reserve(8).unwrap();
    publish(&arena, b"behind").unwrap();
    assert_eq!((arena.read(0..8), arena.read(8..14)), (None, Some(&b"behind"[..])));
    arena.close();
    assert!(!arena.try_seal());
}

#[test]
fn a_full_arena_refuses_reservations_and_can_be_sealed() {
    let arena = Arena::new(PAGE_BYTES).unwrap();
    publish(&arena, &[1; PAGE_BYTES - 16]).unwrap();
    assert_eq!((arena.end_bytes(), arena.try_seal()), (None, false));
    assert!(arena.reserve(17).is_none(), "it does not fit");
    assert!(arena.reserve(1).is_none(), "this would fit, but the arena is full");
    assert_eq!(
        (arena.end_bytes(), arena.taken_bytes()),
        (Some(PAGE_BYTES - 16), Some(PAGE_BYTES - 16))
    );
    assert!(arena.try_seal());
    assert_eq!(arena.read(0..PAGE_BYTES - 16), Some(&[1; PAGE_BYTES - 16][..]));
    assert_eq!(arena.read(0..PAGE_BYTES), None);

    let exact = Arena::new(PAGE_BYTES).unwrap();
    publish(&exact, &[2; PAGE_BYTES]).unwrap();
    assert!(exact.reserve(1).is_none());
    assert_eq!((exact.end_bytes(), exact.try_seal()), (Some(PAGE_BYTES), true));
    assert_eq!(exact.read(0..PAGE_BYTES), Some(&[2; PAGE_BYTES][..]));

    for _ in 0..100 {
        assert!(exact.reserve(usize::MAX).is_none());
        exact.close();
    }
    assert!(exact.taken.tail.load(Ordering::Relaxed) < 10_000, "the counter stops growing");

    let huge = Arena::new(PAGE_BYTES).unwrap();
    assert!(huge.reserve(usize::MAX).is_none());
    assert!(huge.reserve(1).is_none());
    assert_eq!(huge.end_bytes(), Some(0));
}

#[test]
fn an_arena_can_be_reused() {
    let mut arena = Arena::new(PAGE_BYTES).unwrap();
    publish(&arena, &[7; 64]).unwrap();
    arena.close();
    assert!(arena.try_seal());
    arena.reset();
    assert_eq!((arena.read(0..1), arena.end_bytes(), arena.taken_bytes()), (None, None, Some(0)));
    publish(&arena, b"new").unwrap();
    assert_eq!(arena.read(0..8), Some(&b"new\0\0\0\0\0"[..]), "no old bytes");
    arena.memory()[..16].fill(9);
    arena.seal(16);
    assert_eq!((arena.read(0..16), arena.read(0..24)), (Some(&[9; 16][..]), None));
    assert!(arena.reserve(1).is_none());
}

#[test]
fn huge_page_memory_is_aligned_and_zero() {
    for bytes in [PAGE_BYTES, (2 << 20) - PAGE_BYTES, 2 << 20, (5 << 20) + PAGE_BYTES] {
        let mut arena = Arena::new(bytes).unwrap();
        let memory = arena.memory();
        assert_eq!(memory.len(), bytes);
        assert!(bytes < 2 << 20 || (memory.as_ptr() as usize).is_multiple_of(2 << 20));
        assert!(memory.iter().all(|byte| *byte == 0));
        memory.fill(1);
    }
    let words = crate::Words::zeroed(1 << 19).unwrap();
    assert_eq!(words.len(), 1 << 19);
    assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0));
    words[words.len() - 1].store(u64::MAX, Ordering::Relaxed);
}

/// Each thread fills its reservations with its own bytes; concurrent reads never see a partial one.
#[test]
fn concurrent_reads_never_see_a_partial_reservation() {
    const THREADS: usize = 4;
    let arena = Arc::new(Arena::new(1 << 20).unwrap());
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let arena = arena.clone();
            thread::spawn(move || {
                let mut random = crate::sim::Random::new(thread as u64);
                let mut mine = Vec::new();
                loop {
                    let len = 1 + random.index(300);
                    let mark = 1 + random.index(255) as u8;
                    let Some(at) = publish(&arena, &vec![mark; len]) else { return mine };
                    mine.push((at, len, mark));
                    // The end of one reservation, or 0.
                    let end = arena.published_from(0);
                    assert!(arena.read(0..end).is_some());
                }
            })
        })
        .collect();
    let mut all: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
    all.sort_unstable();
    assert!(arena.try_seal());
    let mut end = 0;
    for (at, len, mark) in all {
        assert_eq!(at, end, "without holes, each byte once");
        assert!(arena.read(at..at + len).unwrap().iter().all(|byte| *byte == mark));
        end = (at + len).next_multiple_of(GRANULE_BYTES);
    }
    assert_eq!(arena.end_bytes(), Some(end));
}

/// Resident memory of this process: untouched pages do not count.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE_BYTES
}

#[test]
fn populate_allocates_memory_once_and_keeps_later_content() {
    const BYTES: usize = 64 << 20;
    let mut arena = Arena::new(BYTES).unwrap();
    let before = resident_bytes();
    arena.populate();
    // Other tests allocate and free some memory meanwhile.
    assert!(resident_bytes() > before + BYTES / 2, "{} and {before}", resident_bytes());
    publish(&arena, b"written").unwrap();
    arena.populate();
    assert_eq!(arena.read(0..7), Some(&b"written"[..]));
}
