//! A server in this process on a real store, and a minimal client.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use alluvium_device::sim::{SimDisk, SimOptions, Stepper};
use alluvium_device::{OpenOptions, SharedDevice};
use alluvium_stream::{Fold, Options, Rebuild, Store, local_objects};
use alluvium_wal::{FormatOptions, Wal};
use async_trait::async_trait;
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use kafka_protocol::messages::*;
use kafka_protocol::protocol::{Decodable, Request, StrBytes};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use prometheus_client::registry::Registry;
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use super::examples;
use crate::batch::Outcome;
use crate::batch::tests::plain;
use crate::server::Server;
use crate::{Broker, BrokerConfig, BrokerFold};

/// Long enough for a loaded machine; reached only by a test that hangs.
pub(super) const HANG: Duration = Duration::from_secs(60);

/// The storage that outlives a server.
enum Backing {
    /// A file and a directory of objects.
    Files(TempDir),
    /// Everything in memory, on a disk whose requests wait while they are held.
    Simulated { disk: SimDisk, objects: Arc<SlowObjects> },
}

pub(super) struct TestServer {
    backing: Backing,
    config: BrokerConfig,
    wal_bytes: u64,
    /// The options of the store, except for its size.
    pub(super) options: Options,
    running: Option<Running>,
    pub(super) registry: Registry,
}

struct Running {
    broker: Broker,
    store: Store,
    stepper: Option<Stepper>,
}

impl TestServer {
    /// Starts a server on files, with the default configuration except for the address.
    pub(super) async fn start() -> Self {
        Self::with(16 << 20, |_| {}).await
    }

    pub(super) async fn with(wal_bytes: u64, configure: impl FnOnce(&mut BrokerConfig)) -> Self {
        Self::on(Backing::Files(tempfile::tempdir().unwrap()), wal_bytes, configure).await
    }

    /// Starts a server on a simulated disk.
    pub(super) async fn simulated(wal_bytes: u64) -> Self {
        Self::simulated_with(wal_bytes, |_| {}).await
    }

    pub(super) async fn simulated_with(
        wal_bytes: u64,
        configure: impl FnOnce(&mut BrokerConfig),
    ) -> Self {
        let disk = SimDisk::new(SimOptions { capacity_bytes: wal_bytes, ..SimOptions::default() });
        Wal::format(&disk.device(), &FormatOptions::default()).unwrap();
        let backing = Backing::Simulated { disk, objects: Arc::default() };
        Self::on(backing, wal_bytes, configure).await
    }

    async fn on(
        backing: Backing,
        wal_bytes: u64,
        configure: impl FnOnce(&mut BrokerConfig),
    ) -> Self {
        let mut config = BrokerConfig::default();
        config.listeners[0].listen.set_port(0);
        configure(&mut config);
        let options = Options {
            cache_bytes: wal_bytes,
            upload_interval: Duration::from_secs(3_600),
            ..Options::for_wal(wal_bytes)
        };
        let registry = Registry::default();
        let mut server = Self { backing, config, wal_bytes, options, running: None, registry };
        server.run().await;
        server
    }

    /// Opens the log, which is formatted if it is new, and the object store.
    fn storage(&self) -> (SharedDevice, Arc<dyn ObjectStore>) {
        match &self.backing {
            Backing::Files(dir) => {
                let path = dir.path().join("wal");
                let fresh = !path.exists();
                let options =
                    OpenOptions { create_bytes: Some(self.wal_bytes), ..OpenOptions::default() };
                let device = alluvium_device::open(&path, &options).unwrap();
                if fresh {
                    Wal::format(&device, &FormatOptions::default()).unwrap();
                }
                let objects = dir.path().join("objects");
                std::fs::create_dir_all(&objects).unwrap();
                (device, local_objects(&objects).unwrap())
            }
            Backing::Simulated { disk, objects } => (disk.device(), objects.clone()),
        }
    }

    async fn open(&self, device: SharedDevice, objects: Arc<dyn ObjectStore>) -> Store {
        let window_bytes = (self.wal_bytes / 4).min(64 << 20) & !4095;
        let wal_options = alluvium_wal::Options {
            window_bytes,
            block_bytes: (window_bytes / 4).min(256 << 10) as u32 & !4095,
            max_record_bytes: (window_bytes / 4) as u32,
            ..alluvium_wal::Options::default()
        };
        let (fold, options) = (Arc::new(BrokerFold), self.options.clone());
        let opened = Store::open(device, wal_options, objects, fold, options, None);
        opened.await.unwrap().store
    }

    async fn run(&mut self) {
        let (device, objects) = self.storage();
        let store = self.open(device, objects).await;
        let stepper = match &self.backing {
            Backing::Files(_) => None,
            Backing::Simulated { disk, .. } => Some(Stepper::start(disk.clone())),
        };
        self.registry = Registry::default();
        let broker =
            Broker::start(self.config.clone(), store.clone(), &mut self.registry).await.unwrap();
        self.running = Some(Running { broker, store, stepper });
    }

    /// The directory of the objects of a server on files.
    pub(super) fn objects(&self) -> std::path::PathBuf {
        match &self.backing {
            Backing::Files(dir) => dir.path().join("objects"),
            Backing::Simulated { .. } => panic!("it has no files"),
        }
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.running.as_ref().unwrap().broker.listeners().next().unwrap().1
    }

    /// The address of the listener of this name.
    pub(super) fn addr_of(&self, name: &str) -> SocketAddr {
        let mut listeners = self.running.as_ref().unwrap().broker.listeners();
        listeners.find(|(config, _)| config.name == name).unwrap().1
    }

    pub(super) fn server(&self) -> &Arc<Server> {
        &self.running.as_ref().unwrap().broker.server
    }

    /// Waits until this many requests of this API and version have begun.
    pub(super) async fn begun(&self, api: &str, version: i16, count: usize) {
        let line = format!(
            "alluvium_kafka_requests_total{{api=\"{api}\",version=\"{version}\"}} {count}\n"
        );
        let begun = async {
            loop {
                let mut metrics = String::new();
                prometheus_client::encoding::text::encode(&mut metrics, &self.registry).unwrap();
                if metrics.contains(&line) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, begun).await.expect("the request is not read");
    }

    /// Waits until no client is connected.
    pub(super) async fn all_disconnected(&self) {
        let closed = async {
            while self.server().metrics.connections.get() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(HANG, closed).await.expect("a connection is still open");
    }

    /// Sends a request of a client of the first listener without a connection, and waits for its
    /// response.
    pub(super) async fn send_bare<R: Request>(&self, version: i16, request: &R) -> bool {
        let broker = &self.running.as_ref().unwrap().broker;
        let mut bytes = examples::header(R::KEY, version, 1, R::header_version(version));
        bytes.extend_from_slice(&examples::encode(request, version));
        broker.bare_client(0, self.addr().ip()).send(bytes.into(), HANG).await
    }

    /// Fills the log with markers in this partition, until it has no space for more than a hundred
    /// bytes while the disk is held.
    pub(super) fn fill_log(&self, topic: &str) {
        let partition = self.server().topics.by_name(topic).unwrap().partitions[0].clone();
        while partition.append_marker(1, 0, Outcome::Abort).is_ok() {}
    }

    /// The object store, for another server.
    pub(super) fn object_store(&self) -> Arc<dyn ObjectStore> {
        match &self.backing {
            Backing::Files(_) => local_objects(&self.objects()).unwrap(),
            Backing::Simulated { objects, .. } => objects.inner.clone(),
        }
    }

    pub(super) fn store(&self) -> &Store {
        &self.running.as_ref().unwrap().store
    }

    pub(super) async fn client(&self) -> Client {
        Client::connect(self.addr()).await
    }

    /// Blocks reads of a simulated server's data objects while the result lives.
    pub(super) async fn hold_objects(&self) -> OwnedMutexGuard<()> {
        let Backing::Simulated { objects, .. } = &self.backing else { panic!("not simulated") };
        objects.reading.clone().lock_owned().await
    }

    /// Lets writes and deletions of a simulated server's objects fail, or succeed again.
    pub(super) fn fail_objects(&self, fail: bool) {
        let Backing::Simulated { objects, .. } = &self.backing else { panic!("not simulated") };
        objects.fails.store(fail, SeqCst);
    }

    /// Stops the simulated disk until it is released.
    pub(super) fn hold_disk(&self, hold: bool) {
        let stepper = self.running.as_ref().unwrap().stepper.as_ref().expect("a simulated disk");
        stepper.hold(hold);
    }

    /// Stops the server gracefully.
    pub(super) async fn stop(&mut self) {
        let Running { broker, store, stepper } = self.running.take().unwrap();
        tokio::time::timeout(HANG, broker.shutdown()).await.expect("the server does not stop");
        tokio::time::timeout(HANG, store.close()).await.expect("the store does not close").unwrap();
        drop(stepper);
    }

    pub(super) async fn restart(&mut self) {
        self.stop().await;
        self.run().await;
    }

    /// Crashes and restarts the server while objects are held; they are released before it starts
    /// again.
    pub(super) async fn crash_while(&mut self, held: OwnedMutexGuard<()>) {
        // Time for background tasks to reach the objects.
        tokio::time::sleep(Duration::from_millis(20)).await;
        let Running { broker, store, stepper } = self.running.take().unwrap();
        broker.shutdown().await;
        drop(store);
        drop(stepper);
        drop(held);
        self.run().await;
    }

    /// Stops without closing the store, as a killed process does, and starts again.
    pub(super) async fn crash(&mut self) {
        self.die().await;
        self.run().await;
    }

    /// Crashes and restarts the server, and lets `damage` change the bytes of the write-ahead log
    /// in between.
    pub(super) async fn crash_and_damage(&mut self, damage: impl FnOnce(&mut [u8])) {
        self.die().await;
        let Backing::Files(dir) = &self.backing else { panic!("simulated") };
        let path = dir.path().join("wal");
        let mut bytes = std::fs::read(&path).unwrap();
        damage(&mut bytes);
        std::fs::write(&path, &bytes).unwrap();
        self.run().await;
    }

    /// Stops without closing the store, loses one of the objects, in the order of their numbers,
    /// accepts the loss with a rebuild, opens the store some times without a server, and starts
    /// again.
    pub(super) async fn accept_lost_object(&mut self, number: usize, openings: u32) {
        let store = self.store().wal_header().wal_id;
        self.die().await;
        let (device, objects) = self.storage();
        let mut names: Vec<_> = objects
            .list(Some(&"streams".into()))
            .map_ok(|object| object.location)
            .try_collect()
            .await
            .unwrap();
        names.sort();
        objects.delete(&names[number]).await.unwrap();
        let fold: Arc<dyn Fold> = Arc::new(BrokerFold);
        let (log, options) = (Some(device.clone()), Options::default());
        let rebuild =
            Rebuild::from_objects(&objects, store, log, &fold, &options, &|_, _, _| ()).await;
        let header = Wal::inspect(&device).unwrap().header;
        assert!(rebuild.unwrap().bind(&objects, &header, 1).await.unwrap());
        drop(device);
        for _ in 0..openings {
            let (device, objects) = self.storage();
            drop(self.open(device, objects).await);
            self.wait_until_unlocked().await;
        }
        self.run().await;
    }

    async fn die(&mut self) {
        let Running { broker, store, stepper } = self.running.take().unwrap();
        broker.shutdown().await;
        drop(store);
        drop(stepper);
        self.wait_until_unlocked().await;
    }

    /// Waits until the device and the lock on its file are released: when the tasks of a dropped
    /// store have noticed that they are aborted. None of them writes an object afterwards.
    async fn wait_until_unlocked(&self) {
        if let Backing::Files(dir) = &self.backing {
            let wal = dir.path().join("wal");
            let wait = async {
                while alluvium_device::open(&wal, &OpenOptions::default()).is_err() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(HANG, wait).await.expect("the store's files stay locked");
        }
    }

    /// Kills the process at this moment, so that no later write reaches disk or objects, and starts
    /// again. With a power cut the simulated disk loses unflushed writes.
    pub(super) async fn kill(&mut self, power_cut: bool) {
        let Backing::Simulated { disk, objects } = &mut self.backing else {
            panic!("not simulated")
        };
        objects.fails.store(true, SeqCst);
        *disk = if power_cut { disk.power_cut() } else { disk.process_crash() };
        let inner = objects.inner.clone();
        *objects = Arc::new(SlowObjects { inner, ..SlowObjects::default() });
        let Running { broker, store, stepper } = self.running.take().unwrap();
        tokio::time::timeout(HANG, broker.shutdown()).await.expect("the server does not stop");
        drop(store);
        drop(stepper);
        self.run().await;
    }

    /// Creates a topic with these settings, and returns its id.
    pub(super) async fn topic(
        &self,
        name: &str,
        partitions: i32,
        configs: &[(&str, &str)],
    ) -> Uuid {
        use create_topics_request::*;
        let config = |(name, value): &(&str, &str)| {
            CreatableTopicConfig::default().with_name(text(name)).with_value(Some(text(value)))
        };
        let topic = CreatableTopic::default()
            .with_name(TopicName(text(name)))
            .with_num_partitions(partitions)
            .with_replication_factor(1)
            .with_configs(configs.iter().map(config).collect());
        let request = CreateTopicsRequest::default().with_topics(vec![topic]);
        let response = self.client().await.call(7, &request).await;
        assert_eq!(response.topics[0].error_code, 0, "{:?}", response.topics[0].error_message);
        response.topics[0].topic_id
    }

    /// Checks that a good client is still served, whatever a bad one did.
    pub(super) async fn assert_alive(&self) {
        let response = self
            .client()
            .await
            .call(
                4,
                &ApiVersionsRequest::default()
                    .with_client_software_name(text("a"))
                    .with_client_software_version(text("1")),
            )
            .await;
        assert_eq!(response.error_code, 0);
    }
}

/// Objects in memory. Reads of data objects wait while they are held.
#[derive(Debug, Default)]
pub(super) struct SlowObjects {
    inner: Arc<InMemory>,
    reading: Arc<tokio::sync::Mutex<()>>,
    /// Whether writes and deletions fail, as those of a dead process.
    fails: AtomicBool,
}

impl SlowObjects {
    fn check(&self) -> object_store::Result<()> {
        match self.fails.load(SeqCst) {
            false => Ok(()),
            true => Err(object_store::Error::Generic {
                store: "Test",
                source: "writes fail, as those of a dead process".into(),
            }),
        }
    }
}

impl fmt::Display for SlowObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Test")
    }
}

#[async_trait]
impl ObjectStore for SlowObjects {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.check()?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.check()?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(
        &self,
        location: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        if location.as_ref().starts_with("streams/") {
            drop(self.reading.lock().await);
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        match self.check() {
            Ok(()) => self.inner.delete_stream(locations),
            Err(error) => futures::stream::once(async { Err(error) }).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &Path,
        to: &Path,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

pub(super) fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

/// A client connection.
pub(super) struct Client<S = TcpStream> {
    pub(super) socket: S,
    next_correlation_id: i32,
}

impl Client {
    pub(super) async fn connect(addr: SocketAddr) -> Self {
        Self::over(TcpStream::connect(addr).await.unwrap())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Client<S> {
    pub(super) fn over(socket: S) -> Self {
        Self { socket, next_correlation_id: 1 }
    }

    /// Sends a request with its length in front.
    pub(super) async fn send_frame(&mut self, request: &[u8]) {
        self.try_send_frame(request).await.unwrap();
    }

    pub(super) async fn try_send_frame(&mut self, request: &[u8]) -> std::io::Result<()> {
        let mut frame = BytesMut::new();
        frame.put_i32(request.len().try_into().unwrap());
        frame.put_slice(request);
        self.socket.write_all(&frame).await?;
        self.socket.flush().await
    }

    /// Sends a request without waiting for the response, and returns its correlation id.
    pub(super) async fn send<R: Request>(&mut self, version: i16, request: &R) -> i32 {
        let correlation_id = self.next_correlation_id;
        self.next_correlation_id += 1;
        let header_version = R::header_version(version);
        let mut bytes = examples::header(R::KEY, version, correlation_id, header_version);
        bytes.extend_from_slice(&examples::encode(request, version));
        self.send_frame(&bytes).await;
        correlation_id
    }

    /// Sends this many Produce requests in a row, and returns their correlation ids.
    pub(super) async fn send_many(&mut self, request: &ProduceRequest, count: usize) -> Vec<i32> {
        let mut ids = Vec::new();
        for _ in 0..count {
            ids.push(self.send(9, request).await);
        }
        ids
    }

    /// Receives the next response; `None` if the server has closed the connection.
    pub(super) async fn receive_frame(&mut self) -> Option<Bytes> {
        let receive = async {
            let len = self.socket.read_i32().await.ok()?;
            let mut bytes = vec![0; len.try_into().unwrap()];
            self.socket.read_exact(&mut bytes).await.ok()?;
            Some(Bytes::from(bytes))
        };
        tokio::time::timeout(HANG, receive).await.expect("no response")
    }

    /// Receives the response to `R`, which must be the next one.
    pub(super) async fn receive<R: Request>(
        &mut self,
        version: i16,
        correlation_id: i32,
    ) -> R::Response {
        use kafka_protocol::protocol::HeaderVersion;
        let mut bytes = self.receive_frame().await.expect("the connection was closed");
        let header =
            ResponseHeader::decode(&mut bytes, R::Response::header_version(version)).unwrap();
        assert_eq!(header.correlation_id, correlation_id, "responses in the order of the requests");
        let response = R::Response::decode(&mut bytes, version).unwrap();
        assert!(bytes.is_empty());
        response
    }

    pub(super) async fn call<R: Request>(&mut self, version: i16, request: &R) -> R::Response {
        let correlation_id = self.send(version, request).await;
        self.receive::<R>(version, correlation_id).await
    }

    /// Produces a record set to a partition, and returns error code and base offset.
    pub(super) async fn produce(
        &mut self,
        topic: &str,
        partition: i32,
        records: &Bytes,
    ) -> (i16, i64) {
        let response = self.call(9, &produce(topic, partition, records, -1)).await;
        let partition = &response.responses[0].partition_responses[0];
        (partition.error_code, partition.base_offset)
    }

    /// Fetches a partition once, without waiting, and returns error code, high watermark and
    /// records.
    pub(super) async fn fetch(
        &mut self,
        topic: &str,
        partition: i32,
        offset: i64,
    ) -> (i16, i64, Bytes) {
        let response = self.call(12, &fetch(topic, &[(partition, offset)], 0)).await;
        let partition = &response.responses[0].partitions[0];
        (partition.error_code, partition.high_watermark, partition.records.clone().unwrap())
    }
}

pub(super) fn produce(topic: &str, partition: i32, records: &Bytes, acks: i16) -> ProduceRequest {
    use produce_request::*;
    let data =
        PartitionProduceData::default().with_index(partition).with_records(Some(records.clone()));
    let topic = TopicProduceData::default()
        .with_name(TopicName(text(topic)))
        .with_partition_data(vec![data]);
    ProduceRequest::default().with_acks(acks).with_timeout_ms(30_000).with_topic_data(vec![topic])
}

/// A Produce request with one record to each of the first partitions, and the maximum timeout.
pub(super) fn produce_to(topic: &str, partitions: i32) -> ProduceRequest {
    let mut request = produce(topic, 0, &plain(&[1]), -1).with_timeout_ms(i32::MAX);
    let data = &mut request.topic_data[0].partition_data;
    *data = (0..partitions).map(|index| data[0].clone().with_index(index)).collect();
    request
}

/// A fetch of some partitions from some offsets, without a session.
pub(super) fn fetch(topic: &str, partitions: &[(i32, i64)], max_wait_ms: i32) -> FetchRequest {
    use fetch_request::*;
    let partition = |(partition, offset): &(i32, i64)| {
        FetchPartition::default()
            .with_partition(*partition)
            .with_fetch_offset(*offset)
            .with_partition_max_bytes(1 << 20)
    };
    let topic = FetchTopic::default()
        .with_topic(TopicName(text(topic)))
        .with_partitions(partitions.iter().map(partition).collect());
    FetchRequest::default()
        .with_max_wait_ms(max_wait_ms)
        .with_min_bytes(1)
        .with_max_bytes(50 << 20)
        .with_topics(vec![topic])
}

/// A batch as stored in the log: the bytes that were sent, with its offset and the one leader
/// epoch.
pub(super) fn stored(batch: &Bytes, base_offset: u64) -> Bytes {
    let mut bytes = batch.to_vec();
    crate::batch::set_base(&mut bytes, base_offset, 0);
    bytes.into()
}
