//! The tests that every implementation of [`Coordination`] passes. Each panics where the
//! implementation is wrong.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use tokio::task::yield_now;

use crate::election::{self, list_all};
use crate::{
    Change, Changes, Coordination, Entry, Error, Guard, LeaseId, ListRequest, MAX_KEY_BYTES,
    MAX_TRANSACTION_ITEMS, MAX_TTL, MAX_VALUE_BYTES, MIN_TTL, Result, Revision, Transaction,
};

/// A service without keys, with its clock.
#[async_trait]
pub trait Fixture: Send + Sync {
    /// Returns the service.
    fn service(&self) -> &dyn Coordination;

    /// Moves the service's clock forward, and ends the leases whose time is over.
    async fn advance(&self, by: Duration);

    /// Drops all history before the current revision, which it may raise by writing keys that begin
    /// with `compaction`.
    async fn compact(&self);
}

/// Makes a new service for each test.
pub type Factory<'a> = &'a (dyn Fn() -> Box<dyn Fixture> + Sync);

/// Runs all tests, each on a service of its own.
///
/// # Panics
/// If the service does something else than [`Coordination`] promises.
pub async fn run(new: Factory<'_>) {
    puts_and_deletes(new().service()).await;
    guards_decide_about_all_changes(new().service()).await;
    requests_out_of_bounds_change_nothing(new().service()).await;
    concurrent_increments_all_count(new().service()).await;
    pages_are_of_one_revision(new().service()).await;
    a_list_of_keys_has_no_values(new().service()).await;
    list_and_watch_lose_and_repeat_nothing(new().service()).await;
    a_watch_has_whole_revisions_of_its_prefix(new().service()).await;
    history_that_is_gone_is_reported(&*new()).await;
    revisions_of_the_future_are_refused(new().service()).await;
    leases_end_by_the_clock(&*new()).await;
    renewed_leases_live_on(&*new()).await;
    keys_follow_their_last_lease(&*new()).await;
    an_ended_lease_cannot_be_used(&*new()).await;
    the_oldest_candidate_leads(&*new()).await;
}

fn put(key: &str, value: &'static str) -> Change {
    Change::put(key, value.as_bytes())
}

fn transaction(guards: Vec<Guard>, changes: Vec<Change>) -> Transaction {
    Transaction { guards, changes }
}

async fn apply(service: &dyn Coordination, changes: Vec<Change>) -> Revision {
    service.commit(&transaction(Vec::new(), changes)).await.unwrap().unwrap()
}

async fn read(service: &dyn Coordination, key: &str) -> Option<Entry> {
    service.get(key).await.unwrap()
}

async fn all(service: &dyn Coordination) -> (Vec<Entry>, Revision) {
    list_all(service, "").await.unwrap()
}

async fn next(watch: &mut BoxStream<'static, Result<Changes>>) -> Changes {
    watch.next().await.expect("a watch goes on").expect("history is kept")
}

async fn puts_and_deletes(service: &dyn Coordination) {
    assert_eq!(read(service, "a").await, None);
    let first = apply(service, vec![put("a", "1")]).await;
    let second = apply(service, vec![put("a", "1"), put("b", "")]).await;
    assert!(second > first, "a put of the same value is a change");
    let a = read(service, "a").await.unwrap();
    assert_eq!((a.created, a.modified, a.lease), (first, second, None));
    assert_eq!(a.value, Bytes::from_static(b"1"));
    assert_eq!(read(service, "b").await.unwrap().created, second);
    let third = apply(service, vec![Change::Delete("a".to_owned())]).await;
    assert_eq!(third, second.next());
    assert_eq!(read(service, "a").await, None);
    let same = apply(service, vec![Change::Delete("a".to_owned())]).await;
    assert_eq!(same, third, "a deletion of an absent key is no change");
    let fourth = apply(service, vec![put("a", "2")]).await;
    assert_eq!(read(service, "a").await.unwrap().created, fourth, "it is created again");
}

async fn guards_decide_about_all_changes(service: &dyn Coordination) {
    let first = apply(service, vec![put("a", "1"), put("b", "1")]).await;
    let second = apply(service, vec![put("a", "2")]).await;
    let before = all(service).await;
    let failing = [
        Guard::Absent("a".to_owned()),
        Guard::Modified("a".to_owned(), first),
        Guard::Modified("absent".to_owned(), first),
        Guard::Created("a".to_owned(), second),
        Guard::Created("absent".to_owned(), Revision(0)),
        Guard::Modified("absent".to_owned(), Revision(0)),
    ];
    for guard in failing {
        let changes = vec![put("a", "3"), put("c", "3"), Change::Delete("b".to_owned())];
        let holds = Guard::Created("b".to_owned(), first);
        let guards = vec![holds, guard.clone()];
        let conflict = service.commit(&transaction(guards, changes)).await.unwrap().unwrap_err();
        assert_eq!(conflict.key, guard.key());
        assert_eq!(conflict.found, read(service, guard.key()).await);
        assert_eq!(conflict.revision, second);
        assert_eq!(all(service).await, before, "{guard:?} failed");
    }
    let guards = vec![
        Guard::Modified("a".to_owned(), second),
        Guard::Created("a".to_owned(), first),
        Guard::Absent("c".to_owned()),
    ];
    let changes = vec![put("a", "3"), put("c", "3"), Change::Delete("b".to_owned())];
    let third = service.commit(&transaction(guards, changes)).await.unwrap().unwrap();
    let (entries, revision) = all(service).await;
    assert_eq!(revision, third);
    let keys: Vec<_> = entries.iter().map(|entry| (entry.key.as_str(), entry.modified)).collect();
    assert_eq!(keys, [("a", third), ("c", third)]);
}

async fn requests_out_of_bounds_change_nothing(service: &dyn Coordination) {
    apply(service, vec![put("a", "1")]).await;
    let before = all(service).await;
    let value = |bytes| Bytes::from(vec![0; bytes]);
    let many = |count| (0..count).map(|n| put(&format!("k{n}"), "")).collect::<Vec<_>>();
    let refused = [
        vec![put("b", ""), put("", "")],
        vec![put("b", ""), put(&"k".repeat(MAX_KEY_BYTES + 1), "")],
        vec![put("b", ""), put("c\n", "")],
        vec![put("b", ""), Change::put("c", value(MAX_VALUE_BYTES + 1))],
        vec![put("b", ""), put("c", ""), Change::Delete("b".to_owned())],
        vec![Change::put("b", value(MAX_VALUE_BYTES)), Change::put("c", value(MAX_VALUE_BYTES))],
        many(MAX_TRANSACTION_ITEMS + 1),
    ];
    for changes in refused {
        let answer = service.commit(&transaction(Vec::new(), changes)).await;
        assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
        assert_eq!(all(service).await, before);
    }
    assert!(matches!(service.get("").await, Err(Error::Invalid(_))));
    for limit in [0, crate::MAX_PAGE_ENTRIES + 1] {
        let request = ListRequest { limit, ..ListRequest::new("") };
        assert!(matches!(service.list(&request).await, Err(Error::Invalid(_))));
    }
    let longest = "k".repeat(MAX_KEY_BYTES);
    apply(service, vec![Change::put(longest.clone(), value(MAX_VALUE_BYTES))]).await;
    assert_eq!(read(service, &longest).await.unwrap().value.len(), MAX_VALUE_BYTES);
    apply(service, many(MAX_TRANSACTION_ITEMS)).await;
}

async fn concurrent_increments_all_count(service: &dyn Coordination) {
    const WRITERS: usize = 8;
    const EACH: usize = 5;
    let increment = async || {
        let mut conflicts = 0;
        for _ in 0..EACH {
            loop {
                let entry = read(service, "counter").await;
                let count: usize = entry
                    .as_ref()
                    .map_or(0, |entry| std::str::from_utf8(&entry.value).unwrap().parse().unwrap());
                // All writers read before one of them writes.
                yield_now().await;
                let guards =
                    vec![Guard::unchanged("counter", entry.as_ref().map(|entry| entry.modified))];
                let changes = vec![Change::put("counter", (count + 1).to_string())];
                match service.commit(&transaction(guards, changes)).await.unwrap() {
                    Ok(_) => break,
                    Err(_) => conflicts += 1,
                }
            }
        }
        conflicts
    };
    let conflicts: usize = join_all((0..WRITERS).map(|_| increment())).await.into_iter().sum();
    assert!(conflicts > 0, "the writers met");
    let counter = read(service, "counter").await.unwrap();
    assert_eq!(counter.value, Bytes::from((WRITERS * EACH).to_string()));
}

async fn pages_are_of_one_revision(service: &dyn Coordination) {
    // `p0` and `q` are the neighbours of the prefix `p/`.
    let outside = vec![put("p", "x"), put("p.", "x"), put("p0", "x"), put("q", "x")];
    apply(service, outside).await;
    for n in 0..10 {
        apply(service, vec![put(&format!("p/{n}"), "old")]).await;
    }
    let expected = list_all(service, "p/").await.unwrap();
    assert_eq!(expected.0.len(), 10);
    let mut request = ListRequest { limit: 3, ..ListRequest::new("p/") };
    let mut entries = Vec::new();
    let mut pages = 0;
    loop {
        let page = service.list(&request).await.unwrap();
        assert_eq!(page.revision, expected.1);
        assert_eq!(page.more, pages < 3, "three pages of 3 and one of 1");
        entries.extend(page.entries.iter().cloned());
        let Some(following) = request.following(&page) else { break };
        request = following;
        pages += 1;
        // Changes behind, at and before the place that the list has reached.
        let middle = format!("p/{}5", pages * 3);
        let changes = vec![
            put("p/9", "new"),
            put(&middle, "new"),
            Change::Delete(format!("p/{}", pages * 3 + 1)),
            put("p/0", "new"),
        ];
        apply(service, changes).await;
    }
    assert_eq!(entries, expected.0);
    let now = list_all(service, "p/").await.unwrap();
    assert!(now.1 > expected.1);
    assert_ne!(now.0, expected.0);
    let nothing = ListRequest { after: Some("p/\u{10ffff}".to_owned()), ..ListRequest::new("p/") };
    let page = service.list(&nothing).await.unwrap();
    assert!(page.entries.is_empty() && !page.more);
}

async fn a_list_of_keys_has_no_values(service: &dyn Coordination) {
    let revision = apply(service, vec![put("a", "1"), put("b", "2")]).await;
    let request = ListRequest { keys_only: true, ..ListRequest::new("") };
    let page = service.list(&request).await.unwrap();
    assert_eq!(page.entries.len(), 2);
    assert!(page.entries.iter().all(|entry| entry.value.is_empty() && entry.modified == revision));
}

async fn list_and_watch_lose_and_repeat_nothing(service: &dyn Coordination) {
    const WRITERS: usize = 4;
    const EACH: usize = 12;
    let write = async |writer: usize| {
        for n in 0..EACH {
            let key = format!("w/{}", (writer * 5 + n * 3) % 7);
            let change = if n % 3 == 2 {
                Change::Delete(key)
            } else {
                Change::put(key, format!("{writer} {n}"))
            };
            apply(service, vec![change, put(&format!("mine/{writer}"), "x")]).await;
            yield_now().await;
        }
    };
    // Views begin at several times while the writers write.
    let view = async |start: usize| {
        for _ in 0..start {
            yield_now().await;
        }
        let (entries, mut revision) = list_all(service, "w/").await.unwrap();
        let mut view: BTreeMap<_, _> =
            entries.into_iter().map(|entry| (entry.key.clone(), entry)).collect();
        if view.remove("w/end").is_some() {
            return view;
        }
        let mut watch = service.watch("w/", revision);
        loop {
            let changes = next(&mut watch).await;
            assert!(changes.revision > revision, "revisions come once and in order");
            revision = changes.revision;
            for event in changes.events {
                if event.key == "w/end" {
                    return view;
                }
                let known = match event.entry {
                    Some(entry) => {
                        assert_eq!(entry.modified, revision);
                        let created = view.get(&entry.key).map_or(revision, |old| old.created);
                        assert_eq!(entry.created, created, "no event in between was lost");
                        view.insert(event.key, entry);
                        continue;
                    }
                    None => view.remove(&event.key),
                };
                assert!(known.is_some(), "only a key that is there is deleted");
            }
        }
    };
    let writers = async {
        join_all((0..WRITERS).map(write)).await;
        let (entries, _) = list_all(service, "w/").await.unwrap();
        apply(service, vec![put("w/end", "")]).await;
        entries
    };
    let (entries, views) = futures::join!(writers, join_all([0, 1, 3, 7, 12].map(view)));
    assert!(!entries.is_empty());
    for view in views {
        assert_eq!(view.into_values().collect::<Vec<_>>(), entries);
    }
}

async fn a_watch_has_whole_revisions_of_its_prefix(service: &dyn Coordination) {
    let start = all(service).await.1;
    let mut watch = service.watch("a/", start);
    apply(service, vec![put("b/1", "x")]).await;
    let second = apply(service, vec![put("a/2", "x"), put("b/2", "x"), put("a/1", "x")]).await;
    let third = apply(service, vec![Change::Delete("a/1".to_owned()), put("a/2", "y")]).await;
    for (revision, keys) in [(second, ["a/1", "a/2"]), (third, ["a/1", "a/2"])] {
        let changes = next(&mut watch).await;
        assert_eq!(changes.revision, revision);
        let mut found: Vec<_> = changes.events.iter().map(|event| event.key.as_str()).collect();
        found.sort_unstable();
        assert_eq!(found, keys);
    }
    let mut late = service.watch("a/", second);
    let changes = next(&mut late).await;
    assert_eq!(changes.revision, third, "the revision after which it watches is not repeated");
    let deleted = changes.events.iter().find(|event| event.key == "a/1").unwrap();
    assert_eq!(deleted.entry, None);
    assert!(late.next().now_or_never().is_none(), "a watch waits for what comes later");
    let fourth = apply(service, vec![put("a/3", "x")]).await;
    assert_eq!(next(&mut late).await.revision, fourth);
}

async fn history_that_is_gone_is_reported(fixture: &dyn Fixture) {
    let service = fixture.service();
    let old = apply(service, vec![put("a", "1")]).await;
    let request = ListRequest { at: Some(old), ..ListRequest::new("a") };
    service.list(&request).await.unwrap();
    let mut slow = service.watch("a", old);
    apply(service, vec![put("a", "2")]).await;
    fixture.compact().await;
    let answer = slow.next().await.unwrap();
    assert!(matches!(answer, Err(Error::Compacted { asked, .. }) if asked == old), "{answer:?}");
    assert!(slow.next().await.is_none(), "a watch ends after an error");
    let answer = service.list(&request).await;
    assert!(matches!(answer, Err(Error::Compacted { asked, .. }) if asked == old), "{answer:?}");
    let (entries, revision) = list_all(service, "a").await.unwrap();
    assert_eq!(entries[0].value, Bytes::from_static(b"2"));
    let mut again = service.watch("a", revision);
    let third = apply(service, vec![put("a", "3")]).await;
    assert_eq!(next(&mut again).await.revision, third);
}

async fn revisions_of_the_future_are_refused(service: &dyn Coordination) {
    let current = apply(service, vec![put("a", "1")]).await;
    let asked = current.next();
    let request = ListRequest { at: Some(asked), ..ListRequest::new("") };
    assert_eq!(service.list(&request).await.unwrap_err(), Error::Ahead { asked, current });
    let answer = service.watch("", asked).next().await.unwrap();
    assert_eq!(answer.unwrap_err(), Error::Ahead { asked, current });
}

const TTL: Duration = Duration::from_secs(4);

async fn leased(service: &dyn Coordination, lease: LeaseId, keys: &[&str]) -> Revision {
    let changes = keys.iter().map(|key| Change::put_leased(*key, "x", lease)).collect();
    apply(service, changes).await
}

async fn leases_end_by_the_clock(fixture: &dyn Fixture) {
    let service = fixture.service();
    let short = service.grant(Duration::from_millis(1)).await.unwrap();
    assert!(short.ttl >= MIN_TTL);
    let answer = service.grant(MAX_TTL + Duration::from_secs(1)).await;
    assert!(matches!(answer, Err(Error::Invalid(_))), "{answer:?}");
    service.revoke(short.id).await.unwrap();
    let lease = service.grant(TTL).await.unwrap();
    assert!(lease.ttl >= TTL && lease.id != short.id);
    let put_at = leased(service, lease.id, &["a", "b"]).await;
    apply(service, vec![put("c", "x")]).await;
    assert_eq!(read(service, "a").await.unwrap().lease, Some(lease.id));
    let mut watch = service.watch("", put_at.next());
    fixture.advance(lease.ttl / 2).await;
    assert_eq!(all(service).await.0.len(), 3, "half of its time is over");
    fixture.advance(lease.ttl).await;
    let (entries, revision) = all(service).await;
    assert_eq!(entries.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>(), ["c"]);
    let changes = next(&mut watch).await;
    assert_eq!(changes.revision, revision, "its keys end in one revision");
    assert_eq!(changes.events.len(), 2);
    assert!(changes.events.iter().all(|event| event.entry.is_none()));
}

async fn renewed_leases_live_on(fixture: &dyn Fixture) {
    let service = fixture.service();
    let lease = service.grant(TTL).await.unwrap();
    leased(service, lease.id, &["a"]).await;
    for _ in 0..5 {
        fixture.advance(lease.ttl / 2).await;
        service.keep_alive(lease.id).await.unwrap();
    }
    assert!(read(service, "a").await.is_some());
    fixture.advance(lease.ttl * 2).await;
    assert_eq!(read(service, "a").await, None);
}

async fn keys_follow_their_last_lease(fixture: &dyn Fixture) {
    let service = fixture.service();
    let first = service.grant(TTL).await.unwrap();
    let second = service.grant(TTL).await.unwrap();
    leased(service, first.id, &["kept", "moved", "deleted", "own"]).await;
    leased(service, second.id, &["moved"]).await;
    apply(service, vec![put("kept", "x"), Change::Delete("deleted".to_owned())]).await;
    apply(service, vec![put("deleted", "x")]).await;
    service.revoke(first.id).await.unwrap();
    let keys = |entries: Vec<Entry>| entries.into_iter().map(|entry| entry.key).collect::<Vec<_>>();
    assert_eq!(keys(all(service).await.0), ["deleted", "kept", "moved"]);
    service.revoke(second.id).await.unwrap();
    assert_eq!(keys(all(service).await.0), ["deleted", "kept"]);
}

async fn an_ended_lease_cannot_be_used(fixture: &dyn Fixture) {
    let service = fixture.service();
    let lease = service.grant(TTL).await.unwrap();
    let revoked = service.grant(TTL).await.unwrap();
    leased(service, lease.id, &["a"]).await;
    service.revoke(revoked.id).await.unwrap();
    fixture.advance(lease.ttl * 2).await;
    for id in [lease.id, revoked.id, LeaseId(u64::MAX >> 1)] {
        let before = all(service).await;
        let changes = vec![put("b", "x"), Change::put_leased("c", "x", id)];
        let answer = service.commit(&transaction(Vec::new(), changes)).await;
        assert_eq!(answer, Err(Error::LeaseNotFound(id)));
        assert_eq!(service.keep_alive(id).await, Err(Error::LeaseNotFound(id)));
        assert_eq!(service.revoke(id).await, Err(Error::LeaseNotFound(id)));
        assert_eq!(all(service).await, before);
    }
}

async fn the_oldest_candidate_leads(fixture: &dyn Fixture) {
    const PREFIX: &str = "election/";
    let service = fixture.service();
    let mut candidates = Vec::new();
    for _ in 0..3 {
        let lease = service.grant(TTL).await.unwrap().id;
        let value = Bytes::from(lease.to_string());
        let candidacy = election::enter(service, PREFIX, lease, value.clone()).await.unwrap();
        let again = election::enter(service, PREFIX, lease, value).await.unwrap();
        assert_eq!(again, candidacy, "entering twice is entering once");
        candidates.push((lease, candidacy));
    }
    let [(first, leader), (second, middle), (_, last)] = &candidates[..] else { unreachable!() };
    assert!(election::lead(service, leader).await.unwrap());
    let found = election::leader(service, PREFIX).await.unwrap().0.unwrap();
    assert_eq!(found.key, leader.key);
    let mut waiting = Box::pin(election::lead(service, last));
    assert!(waiting.as_mut().now_or_never().is_none());
    service.revoke(*second).await.unwrap();
    yield_now().await;
    assert!(waiting.as_mut().now_or_never().is_none(), "the first one still leads");
    assert!(!election::lead(service, middle).await.unwrap(), "its key is gone");
    let act = transaction(vec![leader.guard()], vec![put("decision", "first")]);
    service.commit(&act).await.unwrap().unwrap();
    service.revoke(*first).await.unwrap();
    assert!(waiting.await.unwrap());
    let late = service.commit(&act).await.unwrap().unwrap_err();
    assert_eq!(late.key, leader.key, "a leader that was replaced changes nothing");
    let act = transaction(vec![last.guard()], vec![put("decision", "last")]);
    service.commit(&act).await.unwrap().unwrap();
    let mut watch = service.watch("x", all(service).await.1);
    assert!(watch.next().now_or_never().is_none());
    fixture.advance(TTL * 3).await;
    assert_eq!(election::leader(service, PREFIX).await.unwrap().0, None);
}
