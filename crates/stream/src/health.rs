//! The faults that are present: those that were reported, and those that numbers show.

use crate::faults::{Degraded, Faults, Reason};
use crate::losses::{LISTED, LostObjects};
use crate::numbers::UploadFailing;
use crate::report::Lost;
use crate::stats::Stats;

/// Returns every fault that is present, at most one per reason, in the order of [`Reason::ALL`].
/// `gaps` describes the gaps that recovery found, or the first of them.
pub(crate) fn degraded(stats: &Stats, gaps: &str, reported: &Faults) -> Vec<Degraded> {
    let mut found = reported.reported();
    found.extend(derived(stats, gaps));
    // A detail may quote an error of several lines.
    let one_line = |text: String| text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    let found = found.into_iter();
    found.map(|(reason, detail)| Degraded { reason, detail: one_line(detail) }).collect()
}

fn derived(stats: &Stats, named: &str) -> impl Iterator<Item = (Reason, String)> {
    let Lost { damaged_ranges, damaged_bytes, lists, .. } = stats.lost;
    let Lost { gaps, offsets, skipped_gaps, skipped_offsets, .. } = stats.lost;
    let log_damaged = (damaged_ranges > 0).then(|| {
        let lists = match lists {
            0 => String::new(),
            _ => format!(", in them {lists} lists of changes of topics, settings or users"),
        };
        format!(
            "damaged ranges of the write-ahead log found by the last start: {damaged_ranges}, with \
             {damaged_bytes} bytes{lists}; the log of that start names them"
        )
    });
    let lost = (gaps > 0).then(|| {
        format!("lost, with the records that had been acknowledged: {offsets} in {gaps} ranges")
    });
    let skipped = (skipped_gaps > 0).then(|| {
        format!(
            "skipped, since it is not known whether they had been used: {skipped_offsets} in \
             {skipped_gaps} ranges, which is an upper bound of what is lost"
        )
    });
    let offsets_lost = (gaps + skipped_gaps > 0).then(|| {
        let counted: Vec<_> = [lost, skipped].into_iter().flatten().collect();
        let and_more = match gaps + skipped_gaps > LISTED {
            true => ", and others, which the log of that start names",
            false => "",
        };
        format!(
            "offsets found missing by the last start: {}; {named}{and_more}",
            counted.join("; ")
        )
    });
    let percent = |used: u64, of: u64| (u128::from(used) * 100 / u128::from(of.max(1))) as u64;
    let uploads_failing = stats.upload_failing.as_ref().map(|failing| {
        let UploadFailing { elapsed, failures, error } = failing;
        format!(
            "uploads have been failing for {} s, {failures} in a row; {}% of the write-ahead log \
             and {}% of the log cache hold what is not uploaded, and records are refused when one \
             of them is full; the last error: {error}",
            elapsed.as_secs(),
            percent(stats.wal.used_bytes, stats.wal.ring_bytes),
            percent(stats.cache_pinned_bytes, stats.cache_bound_bytes),
        )
    });
    let lost = |objects: &LostObjects, what: &str| {
        let LostObjects { count, first } = objects;
        first.as_ref().map(|first| {
            format!(
                "objects known to be {what}: {count}; reads of their records fail, one of them: \
                 {first}"
            )
        })
    };
    let all = [
        (Reason::ObjectsDamaged, lost(&stats.damaged_objects, "damaged")),
        (Reason::ObjectsMissing, lost(&stats.missing_objects, "missing")),
        (Reason::LogDamaged, log_damaged),
        (Reason::OffsetsLost, offsets_lost),
        (Reason::UploadsFailing, uploads_failing),
    ];
    all.into_iter().filter_map(|(reason, detail)| Some((reason, detail?)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn labels_are_unique_and_listed_in_order() {
        let labels: std::collections::BTreeSet<_> =
            Reason::ALL.iter().map(|reason| reason.label()).collect();
        assert_eq!(labels.len(), Reason::ALL.len());
        assert!(Reason::ALL.is_sorted());
    }

    #[tokio::test]
    async fn each_fault_is_listed_until_it_is_over() {
        let (store, _disk) = crate::store::tests::small_store().await;
        assert_eq!(store.degraded(), []);

        let mut stats = store.stats();
        stats.lost = Lost {
            damaged_ranges: 1,
            damaged_bytes: 4096,
            lists: 3,
            gaps: 2,
            offsets: 7,
            skipped_gaps: 10,
            skipped_offsets: 1_000,
        };
        let elapsed = Duration::from_secs(90);
        let error = "the first line\n  the second".to_owned();
        stats.upload_failing = Some(UploadFailing { elapsed, failures: 5, error });
        let lost = |name: &str| LostObjects { count: 2, first: Some(name.to_owned()) };
        (stats.damaged_objects, stats.missing_objects) = (lost("object a"), lost("object b"));
        let found = degraded(&stats, "lost: this and that", &Faults::default());
        assert_eq!(found.iter().map(|it| it.reason).collect::<Vec<_>>(), Reason::ALL[..5]);
        assert!(found[3].detail.contains("damaged: 2"), "{found:?}");
        assert!(found[3].detail.ends_with("object a"), "{found:?}");
        assert!(found[4].detail.ends_with("object b"), "{found:?}");
        let in_log = "with 4096 bytes, in them 3 lists of changes";
        assert!(found[0].detail.contains(in_log), "{found:?}");
        let expected = "offsets found missing by the last start: lost, with the records that had \
                        been acknowledged: 7 in 2 ranges; skipped, since it is not known whether \
                        they had been used: 1000 in 10 ranges, which is an upper bound of what is \
                        lost; lost: this and that, and others, which the log of that start names";
        assert_eq!(found[1].detail, expected);
        assert!(found[2].detail.contains("for 90 s, 5 in a row"), "{found:?}");
        assert!(found[2].detail.ends_with("the first line the second"), "{found:?}");

        store.report(Reason::UploadsFailing, Some("reported".into()));
        let reported = Degraded { reason: Reason::UploadsFailing, detail: "reported".into() };
        assert_eq!(store.degraded(), [reported]);
        store.report(Reason::UploadsFailing, None);
        assert_eq!(store.degraded(), []);
    }
}
