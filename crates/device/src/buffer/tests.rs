//! Tests of buffers and their pool.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

const SLOT: usize = 4 * PAGE_BYTES;
const SPARES: usize = 1 << 20;

fn address(buf: &[u8]) -> usize {
    buf.as_ptr() as usize
}

fn panics<T>(run: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(|| drop(run()))).is_err()
}

#[test]
fn heap_buffers_are_aligned_and_zero() {
    for (asked, given) in
        [(1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES + 1, 2 * PAGE_BYTES)]
    {
        let mut buf = AlignedBuf::zeroed(asked);
        assert_eq!((buf.len(), address(&buf) % PAGE_BYTES), (given, 0));
        assert!(buf.iter().all(|byte| *byte == 0));
        buf.fill(7);
        assert!(buf.freeze().iter().all(|byte| *byte == 7));
    }
    assert!(panics(|| AlignedBuf::zeroed(0)));
}

#[test]
fn try_zeroed_returns_an_error_without_memory() {
    let buf = AlignedBuf::try_zeroed(PAGE_BYTES + 1).unwrap();
    assert_eq!((buf.len(), address(&buf) % PAGE_BYTES), (2 * PAGE_BYTES, 0));
    assert!(buf.iter().all(|byte| *byte == 0));
    // Larger than the address space.
    let error = AlignedBuf::try_zeroed(1 << 62).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    assert!(panics(|| AlignedBuf::try_zeroed(0)));
}

#[test]
fn heap_buffers_are_cut_and_sliced_at_pages() {
    let mut buf = AlignedBuf::zeroed(3 * PAGE_BYTES);
    for page in 0..3 {
        buf[page * PAGE_BYTES..(page + 1) * PAGE_BYTES].fill(page as u8);
    }
    for bad in [0, 1, PAGE_BYTES + 1, 4 * PAGE_BYTES] {
        assert!(panics(|| buf.truncate(bad)), "cut to {bad}");
    }
    let whole = buf.freeze();
    let second = whole.slice(PAGE_BYTES..3 * PAGE_BYTES).slice(0..PAGE_BYTES);
    assert_eq!(*second, [1; PAGE_BYTES]);
    assert_eq!(address(&second), address(&whole) + PAGE_BYTES, "no copy");
    for bad in [0..0, 0..1, 1..PAGE_BYTES, 0..4 * PAGE_BYTES] {
        assert!(panics(|| whole.slice(bad.clone())), "{bad:?}");
    }
    assert!(panics(|| second.slice(0..2 * PAGE_BYTES)), "beyond the slice, within the buffer");
    drop(whole);
    let bytes = second.into_bytes();
    assert_eq!(bytes.slice(10..20), [1; 10][..]);
}

#[test]
fn heap_spares_are_reused_up_to_a_bound() {
    let pool = Pool::new(SLOT, 0, 3 * SPARE_STEP).unwrap();
    let kept = |pool: &Pool| pool.free.lock().spare_bytes;
    let buf = pool.alloc(PAGE_BYTES);
    let first = address(&buf);
    let shared = buf.freeze();
    let clone = shared.clone();
    drop(shared);
    assert_eq!(kept(&pool), 0, "a clone still holds it");
    drop(clone.into_bytes());
    assert_eq!(kept(&pool), SPARE_STEP);
    let again = pool.alloc(SPARE_STEP - 1);
    assert_eq!((address(&again), kept(&pool)), (first, 0), "a buffer of the same size is reused");
    let larger = pool.alloc(SPARE_STEP + 1);
    assert_eq!(larger.len(), SPARE_STEP + PAGE_BYTES);
    drop(again);
    drop(larger);
    assert_eq!(kept(&pool), 3 * SPARE_STEP, "larger ones are kept too");
    let held: Vec<_> = (0..3).map(|_| pool.alloc(1)).collect();
    assert_eq!(kept(&pool), 2 * SPARE_STEP, "a larger spare is not used for a smaller buffer");
    drop(held);
    assert_eq!(kept(&pool), 3 * SPARE_STEP, "memory beyond the bound is freed");
}

#[test]
fn every_buffer_lies_within_its_memory() {
    let pool = Pool::new(SLOT, 1, SPARES).unwrap();
    for len in [PAGE_BYTES, SLOT, SLOT + PAGE_BYTES, 5 * SPARE_STEP] {
        let bufs = [pool.alloc(len), pool.alloc(len), AlignedBuf::zeroed(len)];
        assert!(
            bufs.iter().all(|buf| buf.len() == len && buf.memory.capacity() >= len),
            "{bufs:?}"
        );
    }
}

#[test]
fn heap_buffers_outlive_their_pool_and_cross_threads() {
    let pool = Pool::new(SLOT, 0, SPARES).unwrap();
    let mut buf = pool.alloc(SLOT);
    drop(pool);
    buf.fill(3);
    let shared = buf.freeze();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let shared = shared.clone();
            scope.spawn(move || assert!(shared.iter().all(|byte| *byte == 3)));
        }
    });
}

#[test]
fn slots_return_whole_from_any_last_owner() {
    let pool = Pool::new(SLOT, 1, SPARES).unwrap();
    let (base, len) = pool.region().unwrap();
    assert_eq!((base as usize % PAGE_BYTES, len), (0, SLOT));
    for round in 0..4 {
        let mut buf = pool.alloc(SLOT);
        assert_eq!(address(&buf), base as usize, "round {round}: the only slot is free again");
        assert!(buf.registered());
        buf.truncate(PAGE_BYTES);
        assert_eq!(buf.len(), PAGE_BYTES);
        let shared = buf.freeze();
        assert!(shared.registered());
        let other = pool.alloc(SLOT);
        assert!(!other.registered(), "while it is held, memory comes from the heap");
        match round {
            0 => drop(shared),
            1 => drop(shared.clone()),
            2 => drop(shared.slice(0..PAGE_BYTES)),
            _ => drop(shared.into_bytes().slice(1..2)),
        }
    }
}

#[test]
fn slots_do_not_overlap() {
    let pool = Pool::new(SLOT, 8, SPARES).unwrap();
    let (base, len) = pool.region().unwrap();
    let mut held: Vec<_> = (0..8).map(|_| pool.alloc(1)).collect();
    let addresses: BTreeSet<usize> = held.iter().map(|buf| address(buf)).collect();
    let expected = (0..8).map(|slot| base as usize + slot * SLOT).collect();
    assert_eq!(addresses, expected);
    assert_eq!(len, 8 * SLOT);
    assert!(!pool.alloc(1).registered(), "a ninth is not there");
    for (index, buf) in held.iter_mut().enumerate() {
        buf.fill(index as u8);
    }
    for (index, buf) in held.iter().enumerate() {
        assert!(buf.iter().all(|byte| *byte == index as u8));
    }
}

#[test]
fn the_mapping_outlives_the_pool_while_a_buffer_is_held() {
    let pool = Pool::new(SLOT, 2, SPARES).unwrap();
    let mut buf = pool.alloc(SLOT);
    drop(pool);
    buf.fill(9);
    assert_eq!(*buf, [9; SLOT]);
}
