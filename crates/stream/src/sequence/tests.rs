use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Weak;

use alluvium_device::sim::Random;
use async_trait::async_trait;
use futures::future::join_all;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    PutMultipartOptions, PutOptions, PutResult, Result,
};
use parking_lot::Mutex;
use uuid::Uuid;

use super::conformance::sealed;
use super::*;
use crate::objects::local_objects;

const RETRY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

#[tokio::test]
async fn memory_conforms() {
    conformance::all(Arc::new(InMemory::new()), "a").await;
}

#[tokio::test]
async fn a_directory_conforms() {
    let directory = tempfile::tempdir().unwrap();
    let objects = local_objects(directory.path()).unwrap();
    conformance::all(objects.clone(), "catalogs/b").await;
    // A directory in place of the one that was opened, such as a mount point.
    let sequence = Sequence::new(objects, "catalogs/c".into(), RETRY);
    assert_eq!(sequence.create(&sealed(1, 0, "x"), deadline()).await.unwrap(), Created::Won);
    let (moved, other) = (tempfile::tempdir().unwrap(), sealed(2, 0, "y"));
    std::fs::rename(directory.path(), moved.path()).unwrap();
    std::fs::create_dir(directory.path()).unwrap();
    assert!(sequence.create(&other, Instant::now()).await.is_err());
    assert!(sequence.exists(1).await.is_err() && sequence.get(1).await.is_err());
    assert!(sequence.last(1).await.is_err());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing was written");
    std::fs::remove_dir(directory.path()).unwrap();
    std::fs::rename(moved.path(), directory.path()).unwrap();
    assert_eq!(sequence.create(&other, deadline()).await.unwrap(), Created::Won);
    std::fs::create_dir(moved.path()).unwrap();
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// It has no effect, and an error is returned.
    Lost,
    /// It takes effect, and an error is returned.
    AnswerLost,
    /// An error is returned, and it takes effect after this time.
    Late(Duration),
    /// It is answered with "exists", without effect.
    Conflict,
    /// It is refused.
    Refused,
    /// The object store has no such request.
    Unsupported,
    /// It creates the object even if that exists.
    Overwrites,
}

type Select = Box<dyn Fn(&str, bool) -> Fault + Send + Sync>;

/// An object store with faults.
struct Faulty {
    inner: Arc<InMemory>,
    /// Selects the fault of a request by its name and whether it is a create.
    fault: Select,
    creates: Mutex<BTreeMap<String, u32>>,
    /// Names that listings do not show, as if they were created after they were passed.
    unlisted: Mutex<Vec<String>>,
}

impl Faulty {
    fn new(fault: impl Fn(&str, bool) -> Fault + Send + Sync + 'static) -> Arc<Self> {
        let (inner, fault) = (Arc::new(InMemory::new()), Box::new(fault));
        Arc::new(Self { inner, fault, creates: Mutex::default(), unlisted: Mutex::default() })
    }

    fn creates(&self, name: &str) -> u32 {
        self.creates.lock().get(name).copied().unwrap_or_default()
    }
}

fn failed() -> Error {
    Error::Generic { store: "Faulty", source: "broken pipe".into() }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faulty")
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(
        &self,
        to: &Path,
        data: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        assert_eq!(options.mode, PutMode::Create);
        *self.creates.lock().entry(to.to_string()).or_default() += 1;
        match (self.fault)(to.as_ref(), true) {
            Fault::None => self.inner.put_opts(to, data, options).await,
            Fault::Lost => Err(failed()),
            Fault::AnswerLost => {
                let _ = self.inner.put_opts(to, data, options).await;
                Err(failed())
            }
            Fault::Late(delay) => {
                let (inner, to) = (Arc::downgrade(&self.inner), to.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    if let Some(inner) = Weak::upgrade(&inner) {
                        let _ = inner.put_opts(&to, data, options).await;
                    }
                });
                Err(failed())
            }
            Fault::Conflict => {
                let source = "409 ConditionalRequestConflict".into();
                Err(Error::AlreadyExists { path: to.to_string(), source })
            }
            Fault::Refused => {
                let source = "status code: 403".into();
                Err(Error::PermissionDenied { path: to.to_string(), source })
            }
            Fault::Unsupported => {
                let source = "Server returned non-2xx status code: 501 Not Implemented".into();
                Err(Error::Generic { store: "Faulty", source })
            }
            Fault::Overwrites => self.inner.put_opts(to, data, PutMode::Overwrite.into()).await,
        }
    }

    async fn get_opts(&self, from: &Path, options: GetOptions) -> Result<GetResult> {
        match (self.fault)(from.as_ref(), false) {
            Fault::None => self.inner.get_opts(from, options).await,
            _ => Err(failed()),
        }
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("an object of a sequence is created by one request")
    }

    fn delete_stream(
        &self,
        names: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(names)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let unlisted = self.unlisted.lock().clone();
        let is_listed = move |found: &ObjectMeta| !unlisted.contains(&found.location.to_string());
        let listing = self.inner.list(prefix);
        listing.try_filter(move |found| std::future::ready(is_listed(found))).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("nothing is copied")
    }
}

/// An object store whose creates have these faults, one after the other, and then none.
fn with_faults(faults: &[Fault]) -> (Arc<Faulty>, Sequence) {
    let left = Mutex::new(VecDeque::from(faults.to_vec()));
    let next = move |_: &str, is_create| match is_create {
        true => left.lock().pop_front().unwrap_or(Fault::None),
        false => Fault::None,
    };
    let store = Faulty::new(next);
    (store.clone(), Sequence::new(store, "p".into(), RETRY))
}

#[tokio::test(start_paused = true)]
async fn a_create_ends_when_its_outcome_is_certain() {
    let late = Fault::Late(Duration::from_millis(1));
    for faults in [
        &[Fault::Lost][..],
        &[Fault::AnswerLost],
        &[Fault::Conflict],
        &[late],
        &[Fault::Lost, Fault::Conflict, Fault::AnswerLost, Fault::Lost],
    ] {
        let (store, sequence) = with_faults(faults);
        let object = sealed(1, 0, "mine");
        assert_eq!(sequence.create(&object, deadline()).await.unwrap(), Created::Won);
        assert_eq!(store.creates(&sequence.name(1)) as usize, faults.len() + 1, "{faults:?}");
        let other = sealed(1, 0, "theirs");
        let taken = sequence.create(&other, deadline()).await.unwrap();
        assert_eq!(taken, Created::Taken(object));
    }
}

#[tokio::test(start_paused = true)]
async fn a_create_without_an_answer_is_not_won_because_the_object_is_found() {
    // In a local directory the name may be there before it is durable.
    let (store, sequence) = with_faults(&[Fault::AnswerLost, Fault::Lost]);
    let object = sealed(1, 0, "mine");
    let error = sequence.create(&object, Instant::now()).await.unwrap_err();
    assert!(error.is_temporary(), "{error}");
    assert!(sequence.exists(1).await.unwrap());
    assert_eq!(sequence.create(&object, deadline()).await.unwrap(), Created::Won);
    assert_eq!(store.creates(&sequence.name(1)), 3);
}

#[tokio::test(start_paused = true)]
async fn a_refused_create_fails_at_once_and_an_unanswered_one_at_its_deadline() {
    let (store, sequence) = with_faults(&[Fault::Lost, Fault::Refused]);
    let error = sequence.create(&sealed(1, 0, "x"), deadline()).await.unwrap_err();
    assert!(error.is_permanent(), "{error}");
    assert_eq!(store.creates(&sequence.name(1)), 2);

    let (store, sequence) = with_faults(&[Fault::Lost; 1000]);
    let (started, limit) = (Instant::now(), Duration::from_secs(20));
    let error = sequence.create(&sealed(1, 0, "x"), started + limit).await.unwrap_err();
    assert!(error.is_temporary() && started.elapsed() <= limit, "{error}");
    assert!((20..50).contains(&store.creates(&sequence.name(1))));
}

#[tokio::test]
async fn damage_is_named_and_ends_a_create() {
    let (store, sequence) = with_faults(&[]);
    let name = sequence.name(1);
    sequence.create(&sealed(1, 0, "x"), deadline()).await.unwrap();
    let mut bytes = store.inner.get(&name.as_str().into()).await.unwrap().bytes().await.unwrap();
    bytes = [&bytes[..bytes.len() - 1], b"y"].concat().into();
    store.inner.put(&name.as_str().into(), bytes.into()).await.unwrap();
    for error in [
        sequence.get(1).await.unwrap_err(),
        sequence.create(&sealed(1, 0, "x"), deadline()).await.unwrap_err(),
    ] {
        assert!(error.is_loss() && error.to_string().contains(&name), "{error}");
    }
}

#[tokio::test]
async fn only_names_of_the_sequence_are_listed() {
    let (store, sequence) = with_faults(&[]);
    for number in [1, 2, 0xab] {
        sequence.create(&sealed(number, 0, "x"), deadline()).await.unwrap();
    }
    for other in [
        "p/00000000000000AC",
        "p/0000000000000003-x",
        "p/3",
        "p/0000000000000000",
        "p/8000000000000000",
        "p/0000000000000003/x",
        "pp/0000000000000003",
        "q/0000000000000003",
    ] {
        store.inner.put(&other.into(), "x".into()).await.unwrap();
    }
    assert_eq!(sequence.listed(1).await.unwrap(), [1, 2, 0xab]);
    assert_eq!(sequence.listed(2).await.unwrap(), [2, 0xab]);
    assert_eq!(sequence.last(3).await.unwrap(), Some(0xab));
}

#[tokio::test]
async fn an_object_that_a_listing_has_passed_over_is_no_hole() {
    let (store, sequence) = with_faults(&[]);
    for number in 1..=5 {
        sequence.create(&sealed(number, 0, "x"), deadline()).await.unwrap();
    }
    let unlisted = |numbers: &[u64]| {
        *store.unlisted.lock() = numbers.iter().map(|number| sequence.name(*number)).collect();
    };
    for numbers in [&[2][..], &[2, 3], &[2, 4], &[4, 5], &[5], &[1, 2, 3, 4, 5]] {
        unlisted(numbers);
        assert_eq!(sequence.last(1).await.unwrap(), Some(5), "{numbers:?} are not listed");
    }
    unlisted(&[2, 3]);
    sequence.delete([3]).await.unwrap();
    let error = sequence.last(1).await.unwrap_err();
    assert!(error.is_loss() && error.to_string().contains(&sequence.name(3)), "{error}");
}

#[tokio::test]
async fn a_longer_object_is_damaged_and_one_of_a_later_version_is_not() {
    let (store, sequence) = with_faults(&[]);
    let put = async |bytes: Vec<u8>| {
        store.inner.put(&sequence.name(1).as_str().into(), bytes.into()).await.unwrap();
    };
    put(vec![0; HEADER_BYTES + MAX_BODY_BYTES + 1]).await;
    let error = sequence.get(1).await.unwrap_err();
    assert!(error.is_loss(), "{error}");
    // Longer than any object of this version.
    let mut bytes = sealed(1, 0, "x").encode().to_vec();
    bytes[8] = 2;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..HEADER_BYTES]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes.resize(HEADER_BYTES + 2 * MAX_BODY_BYTES, 1);
    put(bytes).await;
    for error in [
        sequence.get(1).await.unwrap_err(),
        sequence.create(&sealed(1, 0, "x"), deadline()).await.unwrap_err(),
    ] {
        let is_other = error.is_loss() || error.is_temporary() || error.is_permanent();
        assert!(!is_other && error.to_string().contains("format version 2"), "{error}");
    }
}

#[tokio::test]
async fn an_object_with_the_same_nonce_and_other_contents_is_not_won() {
    let (_store, sequence) = with_faults(&[]);
    let object = sealed(1, 0, "acknowledged");
    sequence.create(&object, deadline()).await.unwrap();
    let other = Sealed { body: "encoded again".into(), ..object };
    let error = sequence.create(&other, deadline()).await.unwrap_err();
    assert!(error.to_string().contains("nonce of another object"), "{error}");
}

/// The number that a replaced writer may have in flight must not be deleted: it would be won again.
#[tokio::test(start_paused = true)]
async fn a_late_create_of_a_deleted_number_takes_effect() {
    let (_store, sequence) = with_faults(&[Fault::Late(Duration::from_secs(5))]);
    let late = sealed(1, 0, "late");
    assert!(sequence.create(&late, Instant::now()).await.is_err());
    assert_eq!(sequence.create(&sealed(1, 0, "x"), deadline()).await.unwrap(), Created::Won);
    sequence.delete([1]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(sequence.get(1).await.unwrap(), Some(late));
}

#[tokio::test(start_paused = true)]
async fn a_name_that_exists_and_is_not_found_is_reported_with_the_answer() {
    let (_store, sequence) = with_faults(&[Fault::Conflict; 1000]);
    let until = Instant::now() + Duration::from_secs(5);
    let error = sequence.create(&sealed(1, 0, "x"), until).await.unwrap_err();
    assert!(error.to_string().contains("ConditionalRequestConflict"), "{error}");
}

#[test]
fn parents_are_synced_up_to_a_directory_that_is_a_symbolic_link() {
    use crate::objects::local_parents;
    let directory = tempfile::tempdir().unwrap();
    let (real, link) = (directory.path().join("real"), directory.path().join("link"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let real = real.canonicalize().unwrap();
    let names = ["catalogs/a/chain", "catalogs/a", "catalogs"].map(|name| real.join(name));
    let synced = local_parents(&link, "catalogs/a/chain/1").unwrap();
    assert_eq!(synced, [&names[..], &[real]].concat());
}

#[tokio::test(start_paused = true)]
async fn the_probe_refuses_an_object_store_that_gives_a_name_to_two_writers() {
    let probe = async |store: Arc<Faulty>| {
        let objects: Arc<dyn ObjectStore> = store.clone();
        let mut rounds = 0;
        let mut progress = |done, _| rounds = done;
        let probed = probe_creates(&objects, "probes", deadline(), &mut progress).await;
        assert_eq!(store.inner.list(None).try_collect::<Vec<_>>().await.unwrap(), []);
        (probed, rounds)
    };
    let (probed, rounds) = probe(Faulty::new(|_, _| Fault::None)).await;
    assert!(matches!((probed, rounds), (Ok(()), 16)));
    // Requests that are lost, and take effect later, are no fault of the object store.
    for fault in [Fault::Lost, Fault::AnswerLost, Fault::Late(Duration::from_millis(150))] {
        let count = Mutex::new(0);
        let (probed, rounds) = probe(Faulty::new(move |_, is_create| {
            let mut count = count.lock();
            *count += u32::from(is_create);
            if is_create && *count % 10 == 3 { fault } else { Fault::None }
        }))
        .await;
        assert!(matches!((&probed, rounds), (Ok(()), 16)), "{fault:?}: {probed:?}, {rounds}");
    }
    let always =
        |fault| move |_: &str, is_create: bool| if is_create { fault } else { Fault::None };
    // As a server that looks and then writes.
    let (probed, _) = probe(Faulty::new(always(Fault::Overwrites))).await;
    assert!(matches!(probed, Err(ProbeError::Unsuitable(what)) if what.contains("two creates")));
    let (probed, _) = probe(Faulty::new(always(Fault::Unsupported))).await;
    assert!(matches!(probed, Err(ProbeError::Unsuitable(what)) if what.contains("501")));
    let (probed, _) = probe(Faulty::new(always(Fault::Refused))).await;
    assert!(matches!(probed, Err(ProbeError::Object(error)) if error.is_permanent()));
    let (probed, _) = probe(Faulty::new(always(Fault::Lost))).await;
    assert!(matches!(probed, Err(ProbeError::Object(error)) if error.is_temporary()));
}

/// Several writers extend one sequence through an object store that loses, delays and repeats
/// requests; each of them is replaced now and then, with a create on its way. No number is ever
/// won by two objects, whatever was won stays, and the links are those of one chain.
#[tokio::test(start_paused = true)]
async fn writers_agree_on_each_number() {
    for seed in 0..300 {
        let random = Mutex::new(Random::new(seed));
        let store = Faulty::new(move |_, is_create| {
            let mut random = random.lock();
            match random.below(12) {
                0 => Fault::Lost,
                1 if is_create => Fault::AnswerLost,
                2 if is_create => Fault::Late(Duration::from_millis(random.below(5_000))),
                3 if is_create => Fault::Conflict,
                _ => Fault::None,
            }
        });
        let sequence = Sequence::new(store.clone(), "p".into(), RETRY);
        let won = Arc::new(Mutex::new(BTreeMap::<u64, Uuid>::new()));
        let writers = (0..3).map(|writer| {
            let (sequence, won) = (sequence.clone(), won.clone());
            async move {
                let mut random = Random::new(seed * 3 + writer);
                let (mut number, mut previous) = (1, 0);
                for _ in 0..12 {
                    let object = sealed(number, previous, format!("{writer}"));
                    let patience = Duration::from_millis(random.below(3_000));
                    match sequence.create(&object, Instant::now() + patience).await {
                        Ok(Created::Won) => {
                            let other = won.lock().insert(number, object.nonce);
                            assert!(other.is_none_or(|other| other == object.nonce));
                            (number, previous) = (number + 1, object.link());
                        }
                        Ok(Created::Taken(found)) => {
                            assert_eq!(found.previous, previous, "seed {seed}");
                            (number, previous) = (number + 1, found.link());
                        }
                        // It is replaced: its successor creates another object for this number,
                        // while its own may still be on its way.
                        Err(error) => assert!(error.is_temporary(), "{error}"),
                    }
                }
            }
        });
        join_all(writers).await;
        // Until nothing is on its way.
        tokio::time::sleep(Duration::from_secs(10)).await;
        let healthy = Sequence::new(store.inner.clone(), "p".into(), RETRY);
        let last = healthy.last(1).await.unwrap().expect("some were created");
        let mut previous = 0;
        for number in 1..=last {
            let found = healthy.get(number).await.unwrap().expect("there is no hole");
            assert_eq!(found.previous, previous, "seed {seed}, number {number}");
            let won = won.lock().get(&number).copied();
            assert!(won.is_none_or(|won| won == found.nonce), "seed {seed}, number {number}");
            previous = found.link();
        }
        assert!(won.lock().keys().all(|number| *number <= last) && won.lock().len() > 5);
    }
}
