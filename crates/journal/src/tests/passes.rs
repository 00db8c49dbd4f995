//! Derives statements about single keys from scans and iterations, for [`super::linear`]: what they
//! return for a key was true at some moment of their run. Not checked, because not guaranteed: that
//! an iteration does not return a key again, that a scan returns a key that comes and goes, and the
//! order of results.

use super::linear::{Answer, Call, check};

/// A call of `scan`, and the keys that it returned.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) begun: u64,
    pub(super) ended: u64,
    pub(super) keys: Vec<u64>,
}

/// Returns what a complete scan implies for a key.
///
/// Where it was returned, it was present. If it was not returned, it was absent at some moment;
/// also if it was returned again, since it was then removed and written in between. (With
/// evictions, one at the end of the scan explains the latter too: then only the first two are
/// checked.)
pub(super) fn scanned(pages: &[Page], key: u64) -> Vec<Call> {
    let has_key = |page: &&Page| page.keys.contains(&key);
    let call = |first: &Page, last: &Page, is_there| Call {
        begun: first.begun,
        ended: last.ended,
        answer: Answer::Contains(is_there),
    };
    let mut calls: Vec<_> = pages.iter().filter(has_key).map(|it| call(it, it, true)).collect();
    let mut returned = Vec::new();
    for page in pages {
        returned.extend(page.keys.iter().filter(|it| **it == key).map(|_| page));
    }
    calls.extend(returned.windows(2).map(|pair| call(pair[0], pair[1], false)));
    if let ([], [first, ..], [.., last]) = (&returned[..], pages, pages) {
        calls.push(call(first, last, false));
    }
    calls
}

/// A value of a key that an iteration returned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Passed {
    pub(super) value: u64,
    /// The moment before the iteration began.
    pub(super) begun: u64,
    /// The moment after it was returned.
    pub(super) ended: u64,
}

/// Checks as [`check`] a key for which iterations have returned these values.
///
/// A returned value was written by a call that had begun by then, and no later write was complete
/// when the iteration began. It is not a read at one moment: a record is returned as soon as it is
/// in its journal, perhaps before the index names it, and until the call that replaces or removes
/// it has marked it as dead, perhaps after others have seen that it is gone. So it is a read over a
/// longer time: from the beginning of the calls that may not have marked what they replaced, to the
/// end of the call that wrote it.
///
/// Evictions are not calls, so it is unknown when one is in progress: with evictions only the first
/// sentence is checked.
pub(super) fn check_passed(
    calls: &[Call],
    passed: &[Passed],
    may_evict: bool,
) -> Result<u64, String> {
    let mut all = calls.to_vec();
    for passed in passed {
        let Passed { value, begun, ended } = *passed;
        let writer = calls.iter().find(|call| call.answer.written() == Some(value));
        let Some(writer) = writer.filter(|writer| writer.begun < ended) else {
            return Err(format!("{passed:?}, which no call had written"));
        };
        let behind =
            |call: &&Call| call.answer.changes() && writer.ended < call.begun && call.ended < begun;
        if let Some(behind) = calls.iter().find(behind) {
            return Err(format!("{passed:?} of {writer:?}, which was gone: {behind:?}"));
        }
        if may_evict {
            continue;
        }
        let under_way =
            |call: &&Call| call.answer.changes() && (call.begun..call.ended).contains(&begun);
        let begun = calls.iter().filter(under_way).map(|call| call.begun).min().unwrap_or(begun);
        let answer = Answer::Get(Some(value));
        all.push(Call { begun, ended: ended.max(writer.ended), answer });
    }
    check(&all, may_evict)
}

mod tests {
    use super::Answer::*;
    use super::*;
    use crate::When;

    const KEY: u64 = 3;

    fn call(begun: u64, ended: u64, answer: Answer) -> Call {
        Call { begun, ended, answer }
    }

    /// Checks a scan concurrent with these calls, first without evictions, then with them.
    fn is_right_with_scan(calls: &[Call], pages: &[(u64, u64, &[u64])]) -> [bool; 2] {
        let page = |(begun, ended, keys): &(u64, u64, &[u64])| Page {
            begun: *begun,
            ended: *ended,
            keys: keys.to_vec(),
        };
        let pages: Vec<_> = pages.iter().map(page).collect();
        let mut all = scanned(&pages, KEY);
        all.extend_from_slice(calls);
        [false, true].map(|may_evict| check(&all, may_evict).is_ok())
    }

    fn is_right_with_iteration(calls: &[Call], passed: &[(u64, u64, u64)]) -> [bool; 2] {
        let passed = passed.iter().map(|(begun, ended, value)| Passed {
            begun: *begun,
            ended: *ended,
            value: *value,
        });
        let passed: Vec<_> = passed.collect();
        [false, true].map(|may_evict| check_passed(calls, &passed, may_evict).is_ok())
    }

    #[test]
    fn a_scan_skips_no_key() {
        let put = call(0, 1, Put(1));
        assert_eq!(is_right_with_scan(&[put], &[(2, 3, &[8]), (4, 5, &[KEY])]), [true; 2]);
        let without: [(u64, u64, &[u64]); 2] = [(2, 3, &[8]), (4, 5, &[])];
        // It may have been evicted, but then it does not come back.
        assert_eq!(is_right_with_scan(&[put], &without), [false, true]);
        let read = call(6, 7, Get(Some(1)));
        assert_eq!(is_right_with_scan(&[put, read], &without), [false; 2]);
        assert_eq!(is_right_with_scan(&[put], &[(2, 3, &[])]), [false, true]);
        // It was absent before, or afterwards, or for a moment in between.
        assert_eq!(is_right_with_scan(&[call(3, 4, Put(1))], &without), [true; 2]);
        let deleted = [put, call(3, 4, Delete(true))];
        assert_eq!(is_right_with_scan(&deleted, &without), [true; 2]);
        let written = [deleted[0], deleted[1], call(4, 5, Put(2)), call(6, 7, Get(Some(2)))];
        assert_eq!(is_right_with_scan(&written, &without), [true; 2]);
        // One value was replaced by another: it was present throughout.
        let replaced = [put, call(3, 4, Swap(When::Always, 2, Some(1))), call(6, 7, Get(Some(2)))];
        assert_eq!(is_right_with_scan(&replaced, &without), [false; 2]);
    }

    #[test]
    fn a_scan_returns_only_present_keys() {
        assert_eq!(is_right_with_scan(&[], &[(2, 3, &[KEY])]), [false; 2]);
        let deleted = [call(0, 1, Put(1)), call(2, 3, Delete(true))];
        assert_eq!(is_right_with_scan(&deleted, &[(4, 5, &[KEY])]), [false; 2]);
        // Present when the scan began, and not at the call that returned it.
        assert_eq!(is_right_with_scan(&deleted, &[(1, 2, &[]), (4, 5, &[KEY])]), [false; 2]);
        assert_eq!(is_right_with_scan(&deleted, &[(1, 4, &[KEY])]), [true; 2]);
    }

    #[test]
    fn a_scan_returns_a_key_again_if_it_was_removed() {
        let put = call(0, 1, Put(1));
        let again: [(u64, u64, &[u64]); 2] = [(2, 3, &[KEY]), (4, 5, &[KEY])];
        assert_eq!(is_right_with_scan(&[put], &again), [false, true]);
        assert_eq!(is_right_with_scan(&[put], &[(2, 3, &[KEY, KEY])]), [false, true]);
        let replaced = [put, call(3, 4, Put(2))];
        assert_eq!(is_right_with_scan(&replaced, &again), [false, true]);
        let written = [put, call(2, 3, Delete(true)), call(3, 4, Put(2))];
        assert_eq!(is_right_with_scan(&written, &again), [true; 2]);
        let before = [put, call(2, 3, Delete(true)), call(6, 7, Put(2))];
        assert_eq!(is_right_with_scan(&before, &again), [false; 2]);
    }

    #[test]
    fn an_iteration_returns_nothing_removed_before_it_began() {
        let put = call(0, 1, Put(1));
        assert_eq!(is_right_with_iteration(&[put], &[(2, 3, 1), (2, 4, 1)]), [true; 2]);
        for answer in [Put(2), Swap(When::IfPresent, 2, Some(1)), Delete(true), Remove] {
            assert_eq!(
                is_right_with_iteration(&[put, call(2, 3, answer)], &[(4, 5, 1)]),
                [false; 2]
            );
            assert_eq!(
                is_right_with_iteration(&[put, call(2, 4, answer)], &[(3, 5, 1)]),
                [true; 2]
            );
        }
        for answer in [PutIfAbsent(2, false), Swap(When::IfAbsent, 2, Some(1))] {
            let not_written = [put, call(2, 3, answer)];
            assert_eq!(is_right_with_iteration(&not_written, &[(4, 5, 1)]), [true; 2]);
            assert_eq!(is_right_with_iteration(&not_written, &[(4, 5, 2)]), [false; 2]);
        }
        // Never written, and not yet written.
        assert_eq!(is_right_with_iteration(&[put], &[(2, 3, 2)]), [false; 2]);
        assert_eq!(is_right_with_iteration(&[put, call(4, 5, Put(2))], &[(2, 3, 2)]), [false; 2]);
        // A removed value does not come back, now or later.
        let back = [put, call(2, 3, Delete(true)), call(4, 9, Put(2))];
        assert_eq!(is_right_with_iteration(&back, &[(5, 6, 2), (5, 7, 1)]), [false; 2]);
    }

    #[test]
    fn an_iteration_may_see_writes_in_progress_earlier_and_old_values_later() {
        let (put, written) = (call(0, 1, Put(1)), call(2, 9, Put(2)));
        let [old, new] = [Some(1), Some(2)].map(Get);
        // Not yet marked, though it was replaced.
        assert_eq!(
            is_right_with_iteration(&[put, written, call(3, 4, new)], &[(5, 6, 1)]),
            [true; 2]
        );
        // Not yet named, though it is in its journal.
        assert_eq!(
            is_right_with_iteration(&[put, written, call(5, 6, old)], &[(3, 4, 2)]),
            [true; 2]
        );
        // No call is in progress any more: what others have seen is final.
        let at_once = [call(0, 5, Put(1)), call(1, 4, Put(2)), call(6, 7, new)];
        assert_eq!(is_right_with_iteration(&at_once, &[(8, 9, 2)]), [true; 2]);
        assert_eq!(is_right_with_iteration(&at_once, &[(8, 9, 1)]), [false, true]);
    }
}
