//! Kills and power cuts at any moment: what is found matches the guarantees.

use super::*;

/// A writer of numbered writes, one after the other, and what is left of them at many moments.
struct Scene {
    directory: SimDirectory,
    /// The number of writes begun, and the number that returned.
    begun: Arc<AtomicU64>,
    done: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    thread: thread::JoinHandle<()>,
}

const KEYS: u64 = 200;

/// Returns the key of a write by its number, and its value; `None`: it removes the key.
fn write_of(number: u64) -> (u64, Option<Vec<u8>>) {
    let mut random = Random::new(number);
    let key = random.below(KEYS);
    let value = (!random.chance(0.15)).then(|| number.to_le_bytes().repeat(1 + random.index(60)));
    (key, value)
}

impl Scene {
    fn begin(options: &Options) -> Self {
        let directory = SimDirectory::default();
        let cache = open(&directory, options);
        let [begun, done] = [0, 0].map(|zero| Arc::new(AtomicU64::new(zero)));
        let is_over = Arc::new(AtomicBool::new(false));
        let thread = {
            let (begun, done, is_over) = (begun.clone(), done.clone(), is_over.clone());
            thread::spawn(move || {
                for number in 1.. {
                    begun.store(number, Ordering::SeqCst);
                    let (key, value) = write_of(number);
                    match value {
                        Some(value) => cache.put(&key.to_le_bytes(), &value).unwrap(),
                        None => drop(cache.delete(&key.to_le_bytes()).unwrap()),
                    }
                    done.store(number, Ordering::SeqCst);
                    if is_over.load(Ordering::SeqCst) {
                        return;
                    }
                    // Limits the number of writes, so that counting the surviving ones does not
                    // take long.
                    if number % 50 == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            })
        };
        Self { directory, begun, done, is_over, thread }
    }

    fn end(self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
    }
}

/// Returns the contents after the first `writes`.
fn after(writes: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut map = BTreeMap::new();
    for number in 1..=writes {
        let (key, value) = write_of(number);
        match value {
            Some(value) => drop(map.insert(key.to_le_bytes().to_vec(), value)),
            None => drop(map.remove(&key.to_le_bytes()[..])),
        }
    }
    map
}

/// Returns the number of writes after which the contents are `found`, if there is one in this
/// range.
fn writes_behind(found: &BTreeMap<Vec<u8>, Vec<u8>>, least: u64, most: u64) -> Option<u64> {
    let mut map = after(least);
    for number in least..=most {
        if map == *found {
            return Some(number);
        }
        let (key, value) = write_of(number + 1);
        match value {
            Some(value) => drop(map.insert(key.to_le_bytes().to_vec(), value)),
            None => drop(map.remove(&key.to_le_bytes()[..])),
        }
    }
    None
}

/// Repeatedly examines what a crash would leave while writes continue.
fn crash_often(
    options: &Options,
    least: impl Fn(u64) -> u64,
    crash: impl Fn(&SimDirectory, u64) -> SimDirectory,
) {
    let scene = Scene::begin(options);
    for round in 0..60 {
        thread::sleep(Duration::from_millis(round % 5));
        let done = scene.done.load(Ordering::SeqCst);
        let left = crash(&scene.directory, round);
        let begun = scene.begun.load(Ordering::SeqCst);
        let cache = open(&left, options);
        let found = contents(&cache);
        let behind = writes_behind(&found, least(done), begun);
        assert!(
            behind.is_some(),
            "round {round}: no number of writes between {} and {begun} leaves this",
            least(done)
        );
        // The cache is usable.
        cache.put(b"one more", b"value").unwrap();
        cache.close().unwrap();
        assert_eq!(contents(&open(&left, options)).len(), found.len() + 1, "round {round}");
    }
    scene.end();
}

#[test]
fn durable_writes_survive_a_power_cut() {
    let options = Options { durability: Durability::Always, ..options() };
    crash_often(&options, |done| done, SimDirectory::power_cut);
}

#[test]
fn durable_writes_survive_a_kill() {
    let options = Options { durability: Durability::Always, ..options() };
    crash_often(&options, |done| done, |directory, _| directory.killed());
}

#[test]
fn a_kill_leaves_a_prefix_of_the_writes() {
    // What is not yet in a file: a chunk, and the one being written.
    let least = |done: u64| done.saturating_sub(12_000);
    crash_often(&options(), least, |directory, _| directory.killed());
}

#[test]
fn flushed_writes_survive_a_power_cut() {
    let directory = SimDirectory::default();
    let cache = open(&directory, &options());
    for round in 0..40u64 {
        let first = round * 1000 + 1;
        for number in first..first + 1000 {
            let (key, value) = write_of(number);
            match value {
                Some(value) => cache.put(&key.to_le_bytes(), &value).unwrap(),
                None => drop(cache.delete(&key.to_le_bytes()).unwrap()),
            }
        }
        cache.flush().unwrap();
        let left = open(&directory.power_cut(round), &options());
        assert!(contents(&left) == after(first + 999), "round {round}");
    }
}

/// After a power cut without a durability guarantee, each key has a value that was once written for
/// it, or none.
#[test]
fn a_power_cut_leaves_only_values_that_were_written() {
    let scene = Scene::begin(&options());
    for round in 0..60 {
        thread::sleep(Duration::from_millis(round % 5));
        let left = scene.directory.power_cut(round);
        let begun = scene.begun.load(Ordering::SeqCst);
        let cache = open(&left, &options());
        for (key, value) in contents(&cache) {
            let number = u64::from_le_bytes(value[..8].try_into().unwrap());
            let (written_key, written) = write_of(number);
            assert!(number <= begun && key == written_key.to_le_bytes());
            assert_eq!(Some(value), written);
        }
    }
    scene.end();
}

/// Records may reach the disk without a sync, and the header must have reached it before them.
#[test]
fn a_power_cut_leaves_no_unreadable_file() {
    let options = Options { journal_bytes: 4 * MIB, memory_bytes: 16 * MIB, ..options() };
    let directory = SimDirectory::default();
    let cache = open(&directory, &options);
    // A journal, and most of the next one, whose whole chunks are written without a sync.
    for key in 0..900u64 {
        cache.put(&key.to_le_bytes(), &[1; 8000]).unwrap();
    }
    while cache.stats().written_bytes < 5 * MIB as u64 {
        thread::sleep(Duration::from_millis(1));
    }
    for seed in 0..20 {
        let left = open(&directory.power_cut(seed), &options);
        assert_eq!(left.stats().set_aside.files, 0, "seed {seed}");
    }
}

/// A kill leaves records that were never synced. What they replace was durable, and must not be
/// removed before they are.
#[test]
fn records_found_after_a_kill_are_synced_before_older_ones_are_removed() {
    const KEYS: u64 = 600;
    let options = Options { journal_bytes: 4 * MIB, memory_bytes: 16 * MIB, ..options() };
    let directory = SimDirectory::default();
    let cache = open(&directory, &options);
    // A journal, and a little of the next one.
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &[1; 8000]).unwrap();
    }
    cache.flush().unwrap();
    let before = cache.stats().written_bytes;
    // Most of the next one: whole chunks of it are written without a sync.
    for key in 0..KEYS {
        cache.put(&key.to_le_bytes(), &[2; 5000]).unwrap();
    }
    while cache.stats().written_bytes < before + 2 * MIB as u64 {
        thread::sleep(Duration::from_millis(1));
    }
    let left = directory.killed();
    let next = open(&left, &options);
    assert_eq!(contents(&next).len(), KEYS as usize);
    while next.stats().compacted == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    for seed in 0..8 {
        let found = contents(&open(&left.power_cut(seed), &options));
        assert_eq!(found.len(), KEYS as usize, "seed {seed}");
        assert!(found.values().all(|it| *it == [1; 8000] || *it == [2; 5000]), "seed {seed}");
    }
}

/// With an interval no call is needed. (`flush.rs` tests how long it takes.)
#[test]
fn writes_with_an_interval_become_durable() {
    let interval = Duration::from_millis(20);
    let options = Options { durability: Durability::Interval(interval), ..options() };
    let directory = SimDirectory::default();
    let cache = open(&directory, &options);
    for number in 1..=50u64 {
        cache.put(&number.to_le_bytes(), b"value").unwrap();
    }
    // There is nothing else to wait for; the time limit is that of the test suite.
    while contents(&open(&directory.power_cut(1), &options)).len() < 50 {
        thread::sleep(interval);
    }
}

/// However much memory there is, with an interval the amount waiting for a disk that accepts
/// nothing is bounded: its age is the time to write it. Without an interval writers do not wait.
#[test]
fn writers_do_not_run_ahead_of_the_disk_with_an_interval() {
    const RECORDS: u64 = 12_000;
    const RECORD_BYTES: u64 = 1024;
    let put = |cache: &Cache, key: u64| cache.put(&key.to_le_bytes(), &[1; 1000]);
    for interval in [Some(Duration::from_millis(10)), Some(Duration::from_secs(3600)), None] {
        let options = Options {
            journal_bytes: 16 * MIB,
            memory_bytes: 64 * MIB,
            max_disk_bytes: 256 << 20,
            durability: interval.map_or(Durability::None, Durability::Interval),
            ..options()
        };
        let directory = SimDirectory::default();
        let cache = open(&directory, &options);
        directory.hold_writes();
        if interval.is_none() {
            (0..RECORDS).for_each(|key| put(&cache, key).unwrap());
            assert_eq!(cache.stats().stalls, 0);
            directory.allow_writes();
            continue;
        }
        let written = AtomicU64::new(0);
        let (ahead, tried) = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for key in 0..RECORDS {
                    put(&cache, key).unwrap();
                    written.fetch_add(1, Ordering::SeqCst);
                }
            });
            while cache.stats().stalls == 0 && !writer.is_finished() {
                thread::yield_now();
            }
            let ahead = written.load(Ordering::SeqCst);
            let tried = cache.try_put(b"one more", b"value", None);
            directory.allow_writes();
            (ahead, tried)
        });
        // Two MiB, and the one in which the excess is noticed.
        let most = 3 * MIB as u64 / RECORD_BYTES + 1;
        assert!((most / 2..=most).contains(&ahead), "{interval:?}: {ahead} records");
        assert!(matches!(tried, Ok(false)), "{tried:?}");
        // The writers continue, and nothing is lost.
        cache.flush().unwrap();
        let left = open(&directory.power_cut(1), &options);
        assert_eq!(contents(&left).len() as u64, RECORDS);
    }
}

/// Space that a process allocated and did not use before it was killed is freed: many kills take no
/// more of the budget than many closes.
#[test]
fn kills_do_not_accumulate_empty_journals() {
    const ROUNDS: u64 = 20;
    let mut directory = SimDirectory::default();
    for round in 0..ROUNDS {
        let cache = open(&directory, &options());
        cache.put(&round.to_le_bytes(), &[1; 1000]).unwrap();
        cache.flush().unwrap();
        let left = directory.killed();
        drop(cache);
        directory = left;
    }
    let cache = open(&directory, &options());
    // The newest journal, and some pages of each that was the newest one.
    let stats = cache.stats();
    assert!(stats.disk_bytes < 2 * MIB as u64, "{stats:?}");
    assert_eq!(contents(&cache).len() as u64, ROUNDS);
}
