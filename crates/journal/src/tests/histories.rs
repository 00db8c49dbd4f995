//! Histories of threads that use one cache concurrently while its journals fill, are compacted
//! (also on demand), compressed and evicted. Each must be linearizable ([`super::linear`]), and
//! scans and iterations must return what is permitted with it ([`super::passes`]). `cargo xtask
//! model` goes further.
//!
//! A seed determines the calls, not their interleaving: a failure need not recur, and the printed
//! history is what counts.

use std::collections::BTreeSet;

use super::linear::{Answer, Call, NEVER, expiring};
use super::passes::{Page, Passed, check_passed, scanned};
use super::*;
use crate::{Lookup, ScanCursor, Ttl, When};

const THREADS: u64 = 4;
const CALLS: u64 = 600;
const KEYS: u64 = 12;
/// The threads use this many keys at a time and move on after a while, so that keys rest long
/// enough to be evicted.
const WINDOW: u64 = 3;
const CALLS_PER_WINDOW: u64 = 16;
/// So long that nothing expires by the system clock.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// If callers move the clock, values expire after at most this many steps.
const MOST_STEPS: u64 = 3;
/// After everything has expired.
const LATER: u64 = 1 << 20;

/// The properties of a cache, and the filler keys.
struct Setting {
    options: Options,
    /// The number of keys that are only written, one after the other, to fill the journals.
    fillers: u64,
    /// Callers move the clock, and values expire.
    has_clock: bool,
}

impl Setting {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let durability = match random.below(10) {
            0 => Durability::Always,
            1 => Durability::Interval(Duration::from_millis(1)),
            _ => Durability::None,
        };
        let memory_bytes = (4 + random.index(3)) * MIB;
        let (journals, when_full, fillers) = match seed % 3 {
            // More than there is space for: the oldest journals are evicted.
            0 => (8 + random.below(3), WhenFull::Evict, u64::MAX),
            // Space for everything written: nothing is evicted, most is compacted.
            1 => (400, WhenFull::Evict, 24),
            // Barely space for the live records: puts are refused until something was compacted.
            _ => (9 + random.below(3), WhenFull::Refuse, 24),
        };
        let max_disk_bytes = journals * MIB as u64;
        // Every other cache of each kind.
        let compression = match seed / 3 % 2 {
            0 => Compression::None,
            _ => Compression::Lz4,
        };
        let options = Options {
            memory_bytes,
            max_disk_bytes,
            durability,
            when_full,
            compression,
            ..options()
        };
        // Every other one of these, too.
        let has_clock = seed / 6 % 2 == 1;
        Self { options, fillers, has_clock }
    }

    fn may_evict(&self) -> bool {
        self.fillers == u64::MAX
    }
}

fn name(key: u64) -> String {
    format!("key {key}")
}

/// `None`: a filler.
fn key_of(name: &[u8]) -> Option<u64> {
    let key = std::str::from_utf8(name).unwrap().strip_prefix("key ")?;
    Some(key.parse().unwrap())
}

/// Of different sizes: 8 bytes to 48 KB.
fn content(value: u64, random: &mut Random) -> Vec<u8> {
    let most = if random.chance(0.1) { 6000 } else { 300 };
    value.to_le_bytes().repeat(1 + random.index(most))
}

/// Returns the number of the value.
fn value_of(content: &[u8]) -> u64 {
    let value: [u8; 8] = content[..8].try_into().unwrap();
    assert!(content.chunks(8).all(|part| part == value), "a value of two");
    u64::from_le_bytes(value)
}

/// `None` if there was no space: the call had no effect.
fn unless_full<T>(answer: Result<T, Error>) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(Error::DiskFull { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// A caller that records answers and their times.
struct Caller<'a> {
    cache: &'a Cache,
    /// Shared by all callers: each time is unique.
    clock: &'a AtomicU64,
    calls: Vec<(u64, Call)>,
    /// The results of iterations.
    passed: Vec<(u64, Passed)>,
    /// Journals compacted on request of this caller.
    rewritten: usize,
    /// Whether the caller moves the clock that determines expiry.
    has_clock: bool,
    /// The time of that clock, as known to the caller.
    time: u64,
}

impl<'a> Caller<'a> {
    fn new(cache: &'a Cache, clock: &'a AtomicU64, setting: &Setting) -> Self {
        let (calls, passed) = (Vec::new(), Vec::new());
        let has_clock = setting.has_clock;
        Self { cache, clock, calls, passed, rewritten: 0, has_clock, time: 1 }
    }

    /// Moves the clock that determines expiry, for all keys at once.
    fn advance(&mut self, millis: u64) {
        let begun = self.now();
        self.time = self.cache.shared.clock.advance(millis);
        for key in 0..KEYS {
            self.record(key, begun, Answer::Time(self.time));
        }
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn record(&mut self, key: u64, begun: u64, answer: Answer) {
        let ended = self.now();
        self.calls.push((key, Call { begun, ended, answer }));
    }

    fn get(&mut self, key: u64) -> Option<crate::Value> {
        let name = name(key);
        let begun = self.now();
        let found = self.cache.get(name.as_bytes()).unwrap();
        let ended = self.now();
        let answer = Answer::Get(found.as_deref().map(value_of));
        self.calls.push((key, Call { begun, ended, answer }));
        found
    }

    fn try_get(&mut self, key: u64) {
        let name = name(key);
        let begun = self.now();
        let found = self.cache.try_get(name.as_bytes()).unwrap();
        let ended = self.now();
        let answer = match &found {
            Lookup::Found(value, _) => Answer::Get(Some(value_of(value))),
            Lookup::Absent => Answer::Get(None),
            // It might have expired.
            Lookup::OnDisk if self.has_clock => return,
            // Another key with the same hash does not occur here.
            Lookup::OnDisk => Answer::Contains(true),
        };
        self.calls.push((key, Call { begun, ended, answer }));
    }

    /// Each of the keys is read at a moment of its own.
    fn get_many(&mut self, keys: &[u64]) {
        let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
        let begun = self.now();
        let found = self.cache.get_many(&names);
        let ended = self.now();
        for (key, found) in keys.iter().zip(found) {
            let answer = Answer::Get(found.unwrap().as_deref().map(value_of));
            self.calls.push((*key, Call { begun, ended, answer }));
        }
    }

    /// Each of the keys is removed at a moment of its own, and only the number of present ones is
    /// known.
    fn delete_many(&mut self, keys: &[u64]) {
        let names: Vec<_> = keys.iter().map(|key| name(*key)).collect();
        let begun = self.now();
        let removed = unless_full(self.cache.delete_many(&names));
        let ended = self.now();
        assert!(removed.is_none_or(|count| count <= keys.len()), "{removed:?} of {keys:?}");
        let (ended, answer) = match removed {
            // Some may have been removed before the space ran out.
            None => (NEVER, Answer::Remove),
            Some(0) => (ended, Answer::Delete(false)),
            Some(count) if count == keys.len() => (ended, Answer::Delete(true)),
            Some(_) => (ended, Answer::Remove),
        };
        self.calls.extend(keys.iter().map(|key| (*key, Call { begun, ended, answer })));
    }

    /// As [`Self::change`], for a value that expires at a time of the clock, which is part of its
    /// number.
    fn change_for_a_time(&mut self, kind: u64, key: u64, value: u64, random: &mut Random) {
        let at = self.time + random.below(MOST_STEPS) + 1;
        let value = expiring(value, at);
        let (name, content) = (name(key), content(value, random));
        let (name, shared) = (name.as_bytes(), &self.cache.shared);
        let begun = self.now();
        let answer = match kind {
            0..20 => unless_full(shared.put(name, &content, Some(at))).map(|()| Answer::Put(value)),
            20..26 => {
                let is_put = shared.try_put(name, &content, Some(at)).unwrap();
                is_put.then_some(Answer::Put(value))
            }
            _ => unless_full(shared.put_if_absent(name, &content, Some(at)))
                .map(|has_put| Answer::PutIfAbsent(value, has_put)),
        };
        if let Some(answer) = answer {
            self.record(key, begun, answer);
        }
    }

    fn change(&mut self, kind: u64, key: u64, value: u64, random: &mut Random) {
        if self.has_clock && kind < 37 && random.chance(0.5) {
            return self.change_for_a_time(kind, key, value, random);
        }
        let (name, content) = (name(key), content(value, random));
        let (name, cache) = (name.as_bytes(), self.cache);
        let ttl = random.chance(0.3).then_some(TTL).filter(|_| !self.has_clock);
        let begun = self.now();
        let answer = match (kind, ttl) {
            (0..14, Some(ttl)) => {
                unless_full(cache.put_with_ttl(name, &content, ttl)).map(|()| Answer::Put(value))
            }
            (0..14, None) => unless_full(cache.put(name, &content)).map(|()| Answer::Put(value)),
            // If it would have had to wait, it had no effect.
            (14..20, ttl) => {
                cache.try_put(name, &content, ttl).unwrap().then_some(Answer::Put(value))
            }
            (20..28, ttl) => unless_full(cache.put_if_absent(name, &content, ttl))
                .map(|has_put| Answer::PutIfAbsent(value, has_put)),
            (28..37, ttl) => {
                let when = [When::Always, When::IfAbsent, When::IfPresent][random.index(3)];
                // With an expiry kept from another value, the value's number would not contain it.
                let ttls = if self.has_clock { [Ttl::None; 2] } else { [Ttl::None, Ttl::Keep] };
                let ttl = ttl.map_or(ttls[random.index(2)], Ttl::After);
                unless_full(cache.swap(name, &content, when, ttl)).map(|swapped| {
                    let old = swapped.old.as_deref().map(value_of);
                    let answer = Answer::Swap(when, value, old);
                    assert_eq!(swapped.is_written, answer.written().is_some(), "{answer:?}");
                    answer
                })
            }
            _ => unless_full(cache.delete(name)).map(Answer::Delete),
        };
        if let Some(answer) = answer {
            self.record(key, begun, answer);
        }
    }

    fn contains(&mut self, key: u64) {
        let name = name(key);
        let begun = self.now();
        let is_there = self.cache.contains(name.as_bytes()).unwrap();
        self.record(key, begun, Answer::Contains(is_there));
    }

    /// Scans all keys, at least `limit` at a time.
    fn scan(&mut self, limit: usize) {
        let mut pages = Vec::new();
        let mut next = Some(ScanCursor::default());
        while let Some(from) = next {
            let begun = self.now();
            let found = self.cache.scan(from, limit).unwrap();
            let ended = self.now();
            let keys = found.keys.iter().filter_map(|name| key_of(name)).collect();
            pages.push(Page { begun, ended, keys });
            next = found.next;
        }
        for key in 0..KEYS {
            self.calls.extend(scanned(&pages, key).into_iter().map(|call| (key, call)));
        }
    }

    fn iterate(&mut self) {
        let cache = self.cache;
        let begun = self.now();
        let mut missed: BTreeSet<u64> = (0..KEYS).collect();
        for entry in cache.iter() {
            let entry = entry.unwrap();
            let Some(key) = key_of(entry.key()) else { continue };
            missed.remove(&key);
            let (value, ended) = (value_of(entry.value()), self.now());
            self.passed.push((key, Passed { value, begun, ended }));
        }
        // Keys that are present throughout are returned.
        for key in missed {
            self.record(key, begun, Answer::Contains(false));
        }
    }

    fn compact(&mut self) {
        let compacted = unless_full(self.cache.compact(|_| ()));
        self.rewritten += compacted.map_or(0, |compacted| compacted.rewritten);
    }

    fn work(&mut self, seed: u64, thread: u64, fillers: u64) {
        let mut random = Random::new((seed << 8) + thread);
        // Values that are held for a while do not change.
        let mut kept: Vec<(u64, crate::Value)> = Vec::new();
        for call in 0..CALLS {
            let key = match random.chance(0.03) {
                true => random.below(KEYS),
                false => (call / CALLS_PER_WINDOW + random.below(WINDOW)) % KEYS,
            };
            let next: Vec<_> = (key..=key + random.below(5)).map(|it| it % KEYS).collect();
            match random.below(100) {
                0..26 => {
                    if let Some(found) = self.get(key) {
                        kept.push((value_of(&found), found));
                    }
                }
                26..34 => self.try_get(key),
                34..40 => self.contains(key),
                40..50 => self.get_many(&next),
                97..100 => self.delete_many(&next),
                kind => self.change(kind - 50, key, (thread << 32) + call + 1, &mut random),
            }
            // These take as long as many calls.
            match random.below(1000) {
                0..10 => self.scan(1 + random.index(200)),
                10..15 => self.iterate(),
                15..18 => self.compact(),
                _ => {}
            }
            if self.has_clock && random.chance(0.03) {
                self.advance(1);
            }
            if kept.len() > 3 {
                let (value, found) = kept.swap_remove(random.index(kept.len()));
                assert_eq!(value_of(&found), value);
            }
            if random.chance(0.5) {
                let filler = ((thread << 32) + call) % fillers;
                let content = vec![thread as u8; random.index(60_000)];
                // A cache that may not evict has space again once something was compacted.
                while unless_full(self.cache.put(format!("filler {filler}").as_bytes(), &content))
                    .is_none()
                {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    fn read_all(&mut self) {
        for key in 0..KEYS {
            self.get(key);
            self.contains(key);
        }
        self.scan(usize::MAX);
        self.iterate();
    }
}

/// The answers to all callers, by key.
#[derive(Default)]
struct Recorded {
    calls: BTreeMap<u64, Vec<Call>>,
    passed: BTreeMap<u64, Vec<Passed>>,
    rewritten: usize,
}

impl Recorded {
    fn add(&mut self, caller: Caller<'_>) {
        for (key, call) in caller.calls {
            self.calls.entry(key).or_default().push(call);
        }
        for (key, passed) in caller.passed {
            self.passed.entry(key).or_default().push(passed);
        }
        self.rewritten += caller.rewritten;
    }
}

/// What happened in the histories.
#[derive(Debug, Default)]
struct Happened {
    calls: usize,
    /// Entries returned by iterations.
    passed: usize,
    /// Journals compacted.
    compacted: u64,
    /// Journals compacted on demand.
    rewritten: usize,
    /// Records of any key evicted.
    evicted: u64,
    /// Journals compressed at the end.
    compressed: usize,
    /// Evictions observed by a caller.
    noticed: u64,
    /// Steps of the clock.
    steps: usize,
}

/// Runs one history: several threads, then a caller that reads everything, and again after
/// reopening.
fn history(seed: u64, happened: &mut Happened) {
    let setting = Setting::new(seed);
    let directory = SimDirectory::default();
    let clock = AtomicU64::new(0);
    let mut recorded = Recorded::default();

    let cache = open(&directory, &setting.options);
    if setting.has_clock {
        cache.shared.clock.advance(1);
    }
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let mut caller = Caller::new(&cache, &clock, &setting);
                let fillers = setting.fillers;
                scope.spawn(move || {
                    caller.work(seed, thread, fillers);
                    caller
                })
            })
            .collect();
        for thread in threads {
            recorded.add(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    let mut caller = Caller::new(&cache, &clock, &setting);
    caller.read_all();
    if setting.has_clock {
        // By the system clock, which the next opening uses, everything has expired.
        caller.advance(LATER);
        caller.read_all();
    }
    recorded.add(caller);
    let stats = cache.stats();
    cache.close().unwrap();

    if Random::new(seed).chance(0.5) {
        remove_hints(&directory);
    }
    let cache = open(&directory, &setting.options);
    let mut caller = Caller::new(&cache, &clock, &setting);
    caller.read_all();
    recorded.add(caller);

    let is_step = |call: &&Call| matches!(call.answer, Answer::Time(time) if time < LATER);
    happened.steps += recorded.calls[&0].iter().filter(is_step).count();
    happened.rewritten += recorded.rewritten;
    happened.compacted += stats.compacted;
    happened.evicted += stats.evicted;
    happened.compressed += stats.compressed;
    assert!(setting.may_evict() || stats.evicted == 0, "{stats:?}");
    for (key, calls) in &recorded.calls {
        let passed = recorded.passed.get(key).map_or(&[][..], Vec::as_slice);
        happened.calls += calls.len();
        happened.passed += passed.len();
        match check_passed(calls, passed, setting.may_evict()) {
            Ok(evictions) => happened.noticed += evictions,
            Err(message) => panic!("`{}`: {message}", name(*key)),
        }
    }
}

#[test]
fn histories_are_linearizable() {
    let (start, seeds) = (number("ALLUVIUM_MODEL_START", 0), number("ALLUVIUM_MODEL_SEEDS", 12));
    let mut happened = Happened::default();
    for seed in start..start + seeds {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            history(seed, &mut happened);
        }));
        if let Err(panic) = outcome {
            eprintln!("seed {seed}: ALLUVIUM_MODEL_START={seed} ALLUVIUM_MODEL_SEEDS=1");
            std::panic::resume_unwind(panic);
        }
        if (seed + 1 - start).is_multiple_of(100) {
            println!("{} of {seeds} seeds: {happened:?}", seed + 1 - start);
        }
    }
    let has_all = happened.compacted > 0
        && happened.rewritten > 0
        && happened.evicted > 0
        && happened.passed > 0
        && happened.noticed > 0
        && (seeds < 12 || happened.steps > 0)
        // On a busy machine a few histories may end before the compressing thread has run.
        && (seeds < 100 || happened.compressed > 0);
    assert!(seeds < 6 || has_all, "{happened:?}");
}
