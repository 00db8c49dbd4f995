//! The asynchronous handle, on servers in memory and with tokio's paused clock.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use alluvium_device::sim::Random;
use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::model::{Cluster, SERVERS};
use crate::gateway::map::BLOCK;
use crate::gateway::types::SendId;
use crate::gateway::{
    Attachment, Closed, Completion, Done, Extent, Failure, GroupError, GroupReplicas, Groups,
    REGION_BLOCKS, RegionIndex, Servers, Trouble, UserRequest, Volume, VolumeConfig,
};
use crate::op::{BLOCK_BYTES, Op};
use crate::request::{Answer, BlockState, ErrorCode, Request, RequestError};
use crate::state::{GroupState, VolumeState};
use crate::types::{AttachEpoch, GroupId, Layer, ServerId, VolumeId};
use crate::window::Window;

const VOLUME: VolumeId = VolumeId(4);
/// The tests use the last blocks of the first region and the first ones of the second.
const BASE: u64 = REGION_BLOCKS * BLOCK - 8 * BLOCK;
const SIZE_BYTES: u64 = BASE + 16 * BLOCK;

/// Three servers whose groups commit at once, with delays and faults by seed.
struct Memory {
    state: Mutex<State>,
    /// A permit lets one request through.
    gate: Semaphore,
    trouble: Arc<Trouble>,
}

struct State {
    random: Random,
    /// Probability of a fault of a request.
    faults: f64,
    clusters: BTreeMap<GroupId, Cluster>,
    origin: u64,
    requests: usize,
}

impl Memory {
    fn new(seed: u64, faults: f64) -> Arc<Self> {
        let (random, clusters) = (Random::new(seed), BTreeMap::new());
        let state = State { random, faults, clusters, origin: 0, requests: 0 };
        let (state, gate) = (Mutex::new(state), Semaphore::new(1 << 20));
        Arc::new(Self { state, gate, trouble: Arc::new(Trouble::new("disk")) })
    }

    /// Lets no request through.
    fn close_gate(&self) {
        self.gate.forget_permits(1 << 20);
    }

    fn open_gate(&self) {
        self.gate.add_permits(1 << 20);
    }

    async fn attach(self: &Arc<Self>, epoch: u64, config: VolumeConfig) -> Result<Volume, Failure> {
        let groups = self.state.lock().clusters.keys().map(|group| view(*group)).collect();
        let attachment = Attachment {
            volume: VOLUME,
            parent: None,
            layer: Layer(0),
            size_bytes: SIZE_BYTES,
            epoch: AttachEpoch(epoch),
            nonce: 1,
            gateway: Some(ServerId(2)),
            groups,
        };
        let trouble = self.trouble.clone();
        Volume::attach(attachment, config, self.clone(), self.clone(), trouble).await
    }
}

fn view(group: GroupId) -> (RegionIndex, GroupReplicas) {
    (RegionIndex(group.0 as u16 - 1), GroupReplicas { group, replicas: SERVERS.to_vec() })
}

#[async_trait]
impl Servers for Memory {
    async fn send(
        &self,
        server: ServerId,
        request: Request,
    ) -> Result<Result<Answer, RequestError>, Closed> {
        self.state.lock().requests += 1;
        self.gate.acquire().await.expect("it is never closed").forget();
        self.gate.add_permits(1);
        let (before, after, fault) = {
            let State { random, faults, .. } = &mut *self.state.lock();
            let fault = random.chance(*faults).then(|| random.below(4));
            (random.below(20), random.below(20), fault)
        };
        sleep(Duration::from_millis(before)).await;
        if fault == Some(0) {
            return Err(Closed);
        }
        let outcome = {
            let state = &mut *self.state.lock();
            match request {
                Request::Op { group, .. } | Request::Read(crate::ReadRequest { group, .. })
                    if fault == Some(1) =>
                {
                    let error = RequestError::new(ErrorCode::Busy, group, "");
                    Err(RequestError { retry_after_ms: 30, ..error })
                }
                Request::Op { group, op } => state.op(group, server, op),
                Request::Read(read) => {
                    let cluster = state.clusters.get_mut(&read.group).expect("it exists");
                    cluster.apply(server, usize::MAX);
                    cluster.read(server, read, &mut state.random)
                }
                Request::Status { .. } => unreachable!("not sent by a gateway"),
            }
        };
        sleep(Duration::from_millis(after)).await;
        if fault == Some(2) {
            return Err(Closed);
        }
        if fault == Some(3) {
            // Slower than the patience of the gateway.
            sleep(Duration::from_secs(2)).await;
        }
        Ok(outcome)
    }
}

impl State {
    fn op(&mut self, group: GroupId, server: ServerId, op: Op) -> Result<Answer, RequestError> {
        self.origin += 1;
        let origin = (0, SendId { piece: self.origin, attempt: 0 });
        let cluster = self.clusters.get_mut(&group).expect("it exists");
        if let Some(error) = cluster.propose(server, op, origin) {
            return Err(error);
        }
        let (_, outcome) = cluster.commit().expect("it was proposed");
        outcome.expect("it is answered").1
    }
}

#[async_trait]
impl Groups for Memory {
    async fn create(&self, region: RegionIndex) -> Result<GroupReplicas, GroupError> {
        sleep(Duration::from_millis(3)).await;
        let state = &mut *self.state.lock();
        if state.random.chance(state.faults) {
            return Err(GroupError::Unavailable("test".into()));
        }
        let group = GroupId(u64::from(region.0) + 1);
        let volume = VolumeState {
            volume: VOLUME,
            parent: None,
            epoch: AttachEpoch(1),
            nonce: 1,
            window: Some(Window::default()),
            dropped_layers: Vec::new(),
        };
        let leader = SERVERS[state.random.index(3)];
        let cluster = || Cluster::new(group, &GroupState::new([volume]), leader);
        state.clusters.entry(group).or_insert_with(cluster);
        Ok(view(group).1)
    }

    async fn read(&self, _: RegionIndex, group: GroupId) -> Result<GroupReplicas, GroupError> {
        Ok(view(group).1)
    }
}

fn config() -> VolumeConfig {
    VolumeConfig { io_timeout: None, memory_bytes: 1 << 20, seed: 1 }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_time().start_paused(true).build().unwrap().block_on(test)
}

fn spawn_write(
    volume: &Arc<Volume>,
    offset: u64,
    data: Vec<u8>,
) -> JoinHandle<Result<(), Failure>> {
    let volume = volume.clone();
    tokio::spawn(async move { volume.write(offset, data.into()).await })
}

/// A completion, and the result with which it is called.
fn completion() -> (Completion, oneshot::Receiver<Result<Done, Failure>>) {
    let (sender, result) = oneshot::channel();
    (Box::new(move |result| drop(sender.send(result))), result)
}

/// Waits until only what takes longer than 100 ms is left.
async fn settle() {
    sleep(Duration::from_millis(100)).await;
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, usize, u8),
    Zero(u64, u64),
    Discard(u64, u64),
    Read(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    // Half of the offsets and lengths are whole blocks or next to one.
    let size = 16 * BLOCK;
    let near =
        (0..16_u64, -1..2_i64).prop_map(|(block, off)| (block * BLOCK).saturating_add_signed(off));
    let at = || prop_oneof![near.clone(), 0..size];
    let range = (at(), at()).prop_map(move |(a, b)| (a.min(b), a.max(b) - a.min(b)));
    (range, 0..10_u8, any::<u8>()).prop_map(|((offset, len), kind, byte)| match kind {
        0..4 => Step::Write(offset, len as usize, byte),
        4 | 5 => Step::Zero(offset, len),
        6 | 7 => Step::Discard(offset, len),
        _ => Step::Read(offset, len),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn requests_of_any_alignment_equal_a_model_of_bytes(
        seed in any::<u64>(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        run(async {
            let volume = Memory::new(seed, 0.1).attach(1, config()).await.unwrap();
            let mut model = vec![0; 16 * BLOCK_BYTES];
            for step in steps {
                match step {
                    Step::Write(offset, len, byte) => {
                        // Not uniform, so that shifted bytes are seen.
                        let bytes = (0..len).map(|at| byte.wrapping_add(at as u8));
                        let data: Vec<u8> = bytes.collect();
                        model[offset as usize..][..len].copy_from_slice(&data);
                        volume.write(BASE + offset, data.into()).await.unwrap();
                    }
                    Step::Zero(offset, len) => {
                        model[offset as usize..][..len as usize].fill(0);
                        volume.zero(BASE + offset, len).await.unwrap();
                    }
                    Step::Discard(offset, len) => {
                        let whole = offset.next_multiple_of(BLOCK)..(offset + len) / BLOCK * BLOCK;
                        if !whole.is_empty() {
                            model[whole.start as usize..whole.end as usize].fill(0);
                        }
                        volume.discard(BASE + offset, len).await.unwrap();
                    }
                    Step::Read(offset, len) => {
                        let data = volume.read(BASE + offset, len).await.unwrap();
                        prop_assert_eq!(&data[..], &model[offset as usize..][..len as usize]);
                    }
                }
            }
            let data = volume.read(BASE, 16 * BLOCK).await.unwrap();
            prop_assert!(data == model);
            Ok(())
        })?;
    }

    #[test]
    fn concurrent_writes_of_parts_of_one_block_are_all_kept(
        seed in any::<u64>(),
        cuts in prop::collection::btree_set(1..3 * BLOCK, 1..20),
    ) {
        run(async {
            let volume = Memory::new(seed, 0.1).attach(1, config()).await.unwrap();
            let volume = Arc::new(volume);
            let mut model = Vec::new();
            let mut writes = Vec::new();
            let ends = cuts.iter().copied().chain([3 * BLOCK]);
            for (number, end) in (1_u8..).zip(ends) {
                let start = model.len() as u64;
                let data = vec![number; (end - start) as usize];
                model.extend(&data);
                writes.push(spawn_write(&volume, BASE + start, data));
            }
            for write in writes {
                write.await.unwrap().unwrap();
            }
            let data = volume.read(BASE, 3 * BLOCK).await.unwrap();
            prop_assert!(data == model);
            Ok(())
        })?;
    }
}

#[test]
fn a_write_whose_future_is_dropped_goes_on_and_keeps_its_lock() {
    run(async {
        let memory = Memory::new(1, 0.0);
        let volume = Arc::new(memory.attach(1, config()).await.unwrap());
        volume.write(BASE, vec![1; BLOCK_BYTES].into()).await.unwrap();
        memory.close_gate();
        let sent = memory.state.lock().requests;
        let first = spawn_write(&volume, BASE, vec![2; BLOCK_BYTES]);
        settle().await;
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let second = spawn_write(&volume, BASE + 5, vec![3]);
        settle().await;
        assert_eq!(memory.state.lock().requests, sent + 1, "the second write waits");
        memory.open_gate();
        second.await.unwrap().unwrap();
        let mut expected = vec![2; BLOCK_BYTES];
        expected[5] = 3;
        assert_eq!(volume.read(BASE, BLOCK).await.unwrap(), expected);
    });
}

#[test]
fn requests_wait_for_memory_in_order_and_a_large_one_goes_alone() {
    run(async {
        let memory = Memory::new(1, 0.0);
        let blocks = VolumeConfig { memory_bytes: 4 * BLOCK, ..config() };
        let volume = Arc::new(memory.attach(1, blocks).await.unwrap());
        volume.write(BASE, vec![1; BLOCK_BYTES].into()).await.unwrap();
        memory.close_gate();
        let (completion, mut result) = completion();
        let write = |block: u64, blocks: usize| UserRequest::Write {
            offset: BASE + block * BLOCK,
            data: vec![9; blocks * BLOCK_BYTES].into(),
        };
        assert!(volume.submit(write(0, 2), completion).is_ok());
        let small = spawn_write(&volume, BASE + 3 * BLOCK, vec![5; BLOCK_BYTES]);
        settle().await;
        let (_, refused) = volume.submit(write(4, 2), Box::new(|_| {})).unwrap_err();
        let large = spawn_write(&volume, BASE, vec![5; 8 * BLOCK_BYTES]);
        settle().await;
        let (request, _) = volume.submit(write(4, 1), refused).unwrap_err();
        assert!(matches!(request, UserRequest::Write { .. }), "it does not overtake the large one");
        assert!(result.try_recv().is_err());
        memory.open_gate();
        assert_eq!(result.await.unwrap(), Ok(Done::Changed));
        small.await.unwrap().unwrap();
        large.await.unwrap().unwrap();
        assert_eq!(volume.read(BASE, BLOCK).await.unwrap(), vec![5; BLOCK_BYTES]);
    });
}

#[test]
fn a_request_without_an_answer_fails_after_the_io_timeout() {
    run(async {
        let memory = Memory::new(1, 0.0);
        let timeout = Some(Duration::from_secs(5));
        let volume = memory.attach(1, VolumeConfig { io_timeout: timeout, ..config() }).await;
        let volume = volume.unwrap();
        volume.write(BASE, vec![1; BLOCK_BYTES].into()).await.unwrap();
        memory.close_gate();
        let begin = tokio::time::Instant::now();
        let read = volume.read(BASE, 1).await;
        assert!(matches!(read, Err(Failure::TimedOut(_))), "{read:?}");
        let write = volume.write(BASE, vec![2; 4].into()).await;
        assert!(matches!(write, Err(Failure::TimedOut(_))), "{write:?}");
        let elapsed = begin.elapsed();
        assert!((10.0..10.1).contains(&elapsed.as_secs_f64()), "{elapsed:?}");
        memory.open_gate();
        assert!(volume.read(BASE, 1).await.is_ok());
        assert!(volume.counters().read.copies.get() > 0);
    });
}

#[test]
fn a_request_that_waits_for_memory_fails_after_the_io_timeout() {
    run(async {
        let memory = Memory::new(1, 0.0);
        let timeout = Some(Duration::from_secs(5));
        let small = VolumeConfig { io_timeout: timeout, memory_bytes: BLOCK, ..config() };
        let volume = Arc::new(memory.attach(1, small).await.unwrap());
        volume.write(BASE, vec![1; BLOCK_BYTES].into()).await.unwrap();
        memory.close_gate();
        let begin = tokio::time::Instant::now();
        let writes = (0..20).map(|block| {
            let write = spawn_write(&volume, BASE + block % 8 * BLOCK, vec![2; BLOCK_BYTES]);
            async { (write.await.unwrap(), begin.elapsed()) }
        });
        for (result, elapsed) in futures::future::join_all(writes).await {
            assert!(matches!(result, Err(Failure::TimedOut(_))), "{result:?}");
            assert!(elapsed < Duration::from_millis(5_100), "{elapsed:?}");
        }
        assert!(memory.trouble.stuck().is_some());
        memory.open_gate();
        volume.write(BASE, vec![3; BLOCK_BYTES].into()).await.unwrap();
        sleep(Duration::from_secs(12)).await;
        assert_eq!(memory.trouble.stuck(), None);
    });
}

#[test]
fn dropping_the_handle_ends_its_requests() {
    run(async {
        let memory = Memory::new(1, 0.0);
        let volume = memory.attach(1, config()).await.unwrap();
        volume.write(BASE, vec![1; BLOCK_BYTES].into()).await.unwrap();
        memory.close_gate();
        let (completion, result) = completion();
        let read = UserRequest::Read { offset: BASE, len: 1 };
        assert!(volume.submit(read, completion).is_ok());
        drop(volume);
        assert_eq!(result.await.unwrap(), Err(Failure::Detached));
    });
}

#[test]
fn a_newer_attachment_fences_the_older_one() {
    run(async {
        let memory = Memory::new(1, 0.1);
        let old = memory.attach(1, config()).await.unwrap();
        old.write(BASE, vec![1; 8].into()).await.unwrap();
        let new = memory.attach(2, config()).await.unwrap();
        assert_eq!(old.write(BASE, vec![2; 8].into()).await, Err(Failure::Fenced));
        assert_eq!(old.flush().await, Err(Failure::Fenced));
        assert_eq!(new.read(BASE, 8).await.unwrap(), Bytes::from(vec![1; 8]));
        assert_eq!(memory.attach(1, config()).await.err(), Some(Failure::Fenced));
    });
}

#[test]
fn status_shows_which_blocks_exist() {
    run(async {
        let volume = Memory::new(1, 0.1).attach(1, config()).await.unwrap();
        assert_eq!(volume.size(), SIZE_BYTES);
        volume.write(BASE + 2 * BLOCK, vec![1; BLOCK_BYTES].into()).await.unwrap();
        volume.zero(BASE + 3 * BLOCK, BLOCK).await.unwrap();
        let extents = volume.status(BASE, 16 * BLOCK).await.unwrap();
        let extent = |blocks, state| Extent { len: blocks * BLOCK, state };
        let expected = [
            extent(2, BlockState::Absent),
            extent(1, BlockState::Data),
            extent(1, BlockState::Zeros),
            extent(12, BlockState::Absent),
        ];
        assert_eq!(extents, expected);
    });
}
