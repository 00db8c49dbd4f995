//! Model-checked tests of arenas, in every order of the threads' steps: `cargo xtask loom`. The
//! model checker records each access to a granule's bytes, and fails on a read of one that may
//! still be written.

use loom::sync::Arc;
use loom::thread;

use super::*;

fn write(arena: &Arena, len_bytes: usize) -> Option<usize> {
    let mut taken = arena.reserve(len_bytes)?;
    taken.fill(1);
    let at = taken.at();
    taken.publish();
    Some(at)
}

#[test]
fn concurrent_readers_see_only_published_bytes() {
    loom::model(|| {
        let arena = Arc::new(Arena::new(PAGE_BYTES).unwrap());
        let writers: Vec<_> = (0..2)
            .map(|_| {
                let arena = arena.clone();
                thread::spawn(move || write(&arena, 12).unwrap())
            })
            .collect();
        for at in [0, 16] {
            if let Some(bytes) = arena.read(at..at + 12) {
                assert_eq!(bytes, [1; 12]);
            }
        }
        let whole = arena.published_from(0);
        assert!(arena.read(0..whole).is_some());
        let mut ats: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        ats.sort_unstable();
        assert_eq!((ats, arena.published_from(0)), (vec![0, 16], 32));
    });
}

#[test]
fn the_reservation_that_does_not_fit_sets_the_end() {
    loom::model(|| {
        let arena = Arc::new(Arena::new(PAGE_BYTES).unwrap());
        write(&arena, PAGE_BYTES - 16).unwrap();
        let writers: Vec<_> = [16, 8]
            .map(|len| {
                let arena = arena.clone();
                thread::spawn(move || write(&arena, len))
            })
            .into();
        // Sealed as soon as it is full and completely published; then all of it can be read.
        if arena.try_seal() {
            assert!(arena.read(0..arena.end_bytes().unwrap()).is_some());
        }
        let taken: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        arena.close();
        let end = match taken[..] {
            [Some(_), None] => PAGE_BYTES,
            [None, Some(_)] => PAGE_BYTES - 8,
            _ => panic!("one of the two fits: {taken:?}"),
        };
        assert_eq!((arena.end_bytes(), arena.try_seal()), (Some(end), true));
        assert!(arena.read(0..end).is_some());
    });
}
