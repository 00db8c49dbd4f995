//! The asynchronous handle of an attached volume: a session with connections, a clock and a bound
//! of its memory.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::counters::Counters;
use super::map::RegionIndex;
use super::session::Session;
use super::trouble::Trouble;
use super::types::{
    Attachment, Closed, Done, Extent, Failure, GroupError, GroupReplicas, Output, SessionConfig,
    UserId, UserRequest,
};
use crate::op::BLOCK_BYTES;
use crate::request::{Answer, Request, RequestError};
use crate::types::{GroupId, ServerId};

/// Connections to volume servers.
#[async_trait]
pub trait Servers: Send + Sync + 'static {
    /// Sends a request and returns its outcome. It waits for a connection, and until the window of
    /// the connection has space. `Closed` is returned when the server cannot be reached, or the
    /// connection ends before the answer; the request may have an effect nevertheless.
    async fn send(
        &self,
        server: ServerId,
        request: Request,
    ) -> Result<Result<Answer, RequestError>, Closed>;
}

/// The groups of the volume in the registry.
#[async_trait]
pub trait Groups: Send + Sync + 'static {
    /// Creates the group of a region, unless it exists, and returns it.
    async fn create(&self, region: RegionIndex) -> Result<GroupReplicas, GroupError>;

    /// Reads a group.
    async fn read(&self, region: RegionIndex, group: GroupId) -> Result<GroupReplicas, GroupError>;
}

/// Settings of a volume's handle.
#[derive(Clone, Copy, Debug)]
pub struct VolumeConfig {
    /// After this time a request fails. `None`: requests are repeated without end.
    pub io_timeout: Option<Duration>,
    /// Greatest number of bytes of writes and reads that are submitted and not completed. A larger
    /// request is submitted alone.
    pub memory_bytes: u64,
    /// Seed of the random part of back-offs.
    pub seed: u64,
}

/// What is called with the result of a request.
pub type Completion = Box<dyn FnOnce(Result<Done, Failure>) + Send>;

/// An attached volume. Offsets and lengths are in bytes, of any alignment; dropping a future does
/// not cancel its request. Dropping the handle ends the attachment's requests with
/// [`Failure::Detached`].
#[derive(Debug)]
pub struct Volume {
    shared: Arc<Shared>,
    /// A permit for each block of memory.
    memory: Arc<Semaphore>,
    memory_blocks: u32,
    size_bytes: u64,
    io_timeout: Option<Duration>,
    counters: Arc<Counters>,
    timer: AbortHandle,
}

struct Shared {
    state: Mutex<State>,
    servers: Arc<dyn Servers>,
    groups: Arc<dyn Groups>,
    trouble: Arc<Trouble>,
    /// Why the attachment has ended.
    ended: watch::Sender<Option<Failure>>,
    runtime: Handle,
    /// The time of the session is a duration since then.
    origin: Instant,
    /// The session is due earlier than the timer expects.
    timer: Arc<Notify>,
}

struct State {
    session: Session,
    requests: HashMap<UserId, (Completion, OwnedSemaphorePermit)>,
    attached: Option<oneshot::Sender<Result<(), Failure>>>,
    /// When the timer wakes up; `None` if it waits for [`Shared::timer`].
    timer_at: Option<Duration>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("session", &self.state.lock().session).finish()
    }
}

impl Volume {
    /// Attaches a volume: returns when all its groups know the attachment. The epoch is in the
    /// registry already. What requests wait for is reported to `trouble`.
    ///
    /// # Errors
    /// A newer attachment exists, the volume is deleted, a server refuses the attachment, or the
    /// I/O timeout has passed.
    ///
    /// # Panics
    /// It is called outside of a tokio runtime.
    pub async fn attach(
        attachment: Attachment,
        config: VolumeConfig,
        servers: Arc<dyn Servers>,
        groups: Arc<dyn Groups>,
        trouble: Arc<Trouble>,
    ) -> Result<Self, Failure> {
        let (sender, attached) = oneshot::channel();
        let size_bytes = attachment.size_bytes;
        let counters = Arc::new(Counters::default());
        let session_config = SessionConfig {
            io_timeout: config.io_timeout,
            seed: config.seed,
            ..SessionConfig::default()
        };
        let state = State {
            session: Session::new(attachment, session_config, counters.clone()),
            requests: HashMap::new(),
            attached: Some(sender),
            timer_at: None,
        };
        let memory_blocks = (config.memory_bytes / BLOCK_BYTES as u64).clamp(1, 1 << 20) as u32;
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            servers,
            groups,
            trouble,
            ended: watch::Sender::default(),
            runtime: Handle::current(),
            origin: Instant::now(),
            timer: Arc::default(),
        });
        let timer = run_timer(Arc::downgrade(&shared), shared.timer.clone());
        let timer = tokio::spawn(timer).abort_handle();
        let memory = Arc::new(Semaphore::new(memory_blocks as usize));
        let io_timeout = config.io_timeout;
        let volume =
            Self { shared, memory, memory_blocks, size_bytes, io_timeout, counters, timer };
        volume.shared.input(|_, _| {});
        attached.await.unwrap_or(Err(Failure::Detached))?;
        Ok(volume)
    }

    /// Replaces bytes. When it returns, they are durable on a majority of the replicas.
    ///
    /// # Errors
    /// See [`Failure`], here and below.
    pub async fn write(&self, offset: u64, data: Bytes) -> Result<(), Failure> {
        self.run(UserRequest::Write { offset, data }).await.map(drop)
    }

    /// Makes bytes read as zeros. Whole blocks keep their space.
    pub async fn zero(&self, offset: u64, len: u64) -> Result<(), Failure> {
        self.run(UserRequest::Zero { offset, len }).await.map(drop)
    }

    /// Frees the whole blocks of a range, which then read as zeros. Blocks that are covered in
    /// part do not change.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), Failure> {
        self.run(UserRequest::Discard { offset, len }).await.map(drop)
    }

    /// Reads bytes: of each block a version that is not older than any write that was answered, or
    /// read, before.
    pub async fn read(&self, offset: u64, len: u64) -> Result<Bytes, Failure> {
        match self.run(UserRequest::Read { offset, len }).await? {
            Done::Read(data) => Ok(data),
            _ => unreachable!("a read is answered with data"),
        }
    }

    /// Returns which blocks exist, from `offset` on. The extents may end before the range does,
    /// and cover at least one block.
    pub async fn status(&self, offset: u64, len: u64) -> Result<Vec<Extent>, Failure> {
        match self.run(UserRequest::Status { offset, len }).await? {
            Done::Status(extents) => Ok(extents),
            _ => unreachable!("a status query is answered with extents"),
        }
    }

    /// Returns at once, since answered writes are durable; or with the failure that has ended the
    /// attachment.
    pub async fn flush(&self) -> Result<(), Failure> {
        self.run(UserRequest::Flush).await.map(drop)
    }

    /// Returns when the attachment has ended.
    pub async fn ended(&self) -> Failure {
        let mut ended = self.shared.ended.subscribe();
        let ended = ended.wait_for(Option::is_some).await;
        ended.ok().and_then(|ended| ended.clone()).unwrap_or(Failure::Detached)
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.size_bytes
    }

    /// The counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Submits a request, if the memory for it is free, without waiting. The completion is called
    /// on a thread that must not block.
    ///
    /// # Errors
    /// The memory is in use: the request and its completion, to be submitted later.
    pub fn submit(
        &self,
        request: UserRequest,
        completion: Completion,
    ) -> Result<(), (UserRequest, Completion)> {
        let permits = self.permits(&request);
        match self.memory.clone().try_acquire_many_owned(permits) {
            Ok(permit) => {
                self.shared.submit(self.shared.origin.elapsed(), request, completion, permit);
                Ok(())
            }
            Err(_) => Err((request, completion)),
        }
    }

    /// Takes a group that has changed in the registry.
    pub fn group_changed(&self, region: RegionIndex, view: GroupReplicas) {
        self.shared.input(|session, now| session.group_known(now, region, Ok(view)));
    }

    async fn run(&self, request: UserRequest) -> Result<Done, Failure> {
        let permits = self.permits(&request);
        // The wait for memory is a part of the request's time.
        let begun = self.shared.origin.elapsed();
        let permit = self.memory.clone().acquire_many_owned(permits);
        let permit = match self.io_timeout {
            None => permit.await,
            Some(limit) => timeout(limit, permit).await.map_err(|_| {
                Failure::TimedOut("earlier requests occupy the memory for requests".to_owned())
            })?,
        };
        let permit = permit.expect("the semaphore is never closed");
        let (sender, result) = oneshot::channel();
        let completion = Box::new(move |result| {
            // The caller may have dropped its future.
            let _ = sender.send(result);
        });
        self.shared.submit(begun, request, completion, permit);
        result.await.unwrap_or(Err(Failure::Detached))
    }

    fn permits(&self, request: &UserRequest) -> u32 {
        request.memory_blocks().min(self.memory_blocks.into()) as u32
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.timer.abort();
        self.shared.input(|session, _| session.end(Failure::Detached));
    }
}

impl Shared {
    fn submit(
        self: &Arc<Self>,
        begun: Duration,
        request: UserRequest,
        completion: Completion,
        permit: OwnedSemaphorePermit,
    ) {
        self.with_state(|state, now| {
            let id = state.session.submit_begun(now, begun, request);
            state.requests.insert(id, (completion, permit));
        });
    }

    fn input(self: &Arc<Self>, input: impl FnOnce(&mut Session, Duration)) {
        self.with_state(|state, now| input(&mut state.session, now));
    }

    /// Gives the session an input and does what it asks for.
    fn with_state(self: &Arc<Self>, input: impl FnOnce(&mut State, Duration)) {
        let mut state = self.state.lock();
        input(&mut state, self.origin.elapsed());
        let completed = self.take_outputs(&mut state);
        drop(state);
        for (completion, result) in completed {
            completion(result);
        }
    }

    /// Starts what the session asks for, and returns the requests that are completed.
    fn take_outputs(
        self: &Arc<Self>,
        state: &mut State,
    ) -> Vec<(Completion, Result<Done, Failure>)> {
        let mut completed = Vec::new();
        while let Some(output) = state.session.next_output() {
            match output {
                Output::Send { id, server, request } => {
                    let (servers, shared) = (self.servers.clone(), Arc::downgrade(self));
                    self.runtime.spawn(async move {
                        let outcome = servers.send(server, request).await;
                        answer(&shared, |session, now| session.answer(now, id, outcome));
                    });
                }
                Output::CreateGroup { region } => {
                    let (groups, shared) = (self.groups.clone(), Arc::downgrade(self));
                    self.runtime.spawn(async move {
                        let view = groups.create(region).await;
                        answer(&shared, |session, now| session.group_known(now, region, view));
                    });
                }
                Output::ReadGroup { region, group } => {
                    let (groups, shared) = (self.groups.clone(), Arc::downgrade(self));
                    self.runtime.spawn(async move {
                        let view = groups.read(region, group).await;
                        answer(&shared, |session, now| session.group_known(now, region, view));
                    });
                }
                Output::Complete { id, result } => {
                    let request = state.requests.remove(&id);
                    completed.extend(request.map(|(completion, _permit)| (completion, result)));
                }
                Output::Attached => {
                    if let Some(attached) = state.attached.take() {
                        let _ = attached.send(Ok(()));
                    }
                }
                Output::Stuck(reason) => self.trouble.set_stuck(reason),
                Output::Full(reason) => self.trouble.set_full(reason),
                Output::Ended(failure) => {
                    self.trouble.clear();
                    self.ended.send_replace(Some(failure.clone()));
                    if let Some(attached) = state.attached.take() {
                        let _ = attached.send(Err(failure));
                    }
                }
            }
        }
        let due = state.session.wakes_at();
        if due.is_some_and(|due| state.timer_at.is_none_or(|timer_at| due < timer_at)) {
            self.timer.notify_one();
        }
        completed
    }
}

/// Gives an answer to a session, unless its volume was dropped.
fn answer(shared: &Weak<Shared>, input: impl FnOnce(&mut Session, Duration)) {
    if let Some(shared) = shared.upgrade() {
        shared.input(input);
    }
}

/// Advances the session when it is due, until its volume is dropped.
async fn run_timer(shared: Weak<Shared>, timer: Arc<Notify>) {
    loop {
        let due = match shared.upgrade() {
            None => return,
            Some(shared) => {
                let mut state = shared.state.lock();
                state.timer_at = state.session.wakes_at();
                state.timer_at.map(|at| shared.origin + at)
            }
        };
        let sleep = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => answer(&shared, Session::advance),
            () = timer.notified() => {}
        }
    }
}
