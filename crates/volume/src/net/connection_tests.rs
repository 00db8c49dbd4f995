//! Connections over loopback between well-behaved ends.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use raft::eraftpb::MessageType;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::tests::{message_of, read_answer_of, read_request, write, write_entry};
use super::*;
use crate::messages::{PullChunk, PullContent, PullItem};
use crate::op::block_crcs;
use crate::request::*;
use crate::types::*;
use crate::{BLOCK_BYTES, Op};

/// A host that hands its events to the test.
pub(super) struct TestHost {
    events: mpsc::UnboundedSender<NetEvent>,
    pub(super) registry: Mutex<HashMap<ServerId, ServerRecord>>,
}

impl Host for TestHost {
    fn event(&self, event: NetEvent) {
        // A test that has ended does not receive them.
        let _ = self.events.send(event);
    }

    fn look_up(
        &self,
        server: ServerId,
    ) -> Pin<Box<dyn Future<Output = Option<ServerRecord>> + Send + '_>> {
        let record = self.registry.lock().get(&server).copied();
        Box::pin(async move { record })
    }
}

pub(super) fn opening(server: u32, mark: u64) -> ServerRecord {
    let id = |n| Uuid::from_u128(u128::from(server) << 8 | n);
    ServerRecord { store: id(1), wal: id(2), mark, incarnation: id(3 + u128::from(mark)) }
}

pub(super) fn local(server: u32, mark: u64) -> Local {
    let identity = Identity { server: ServerId(server), opening: opening(server, mark) };
    Local {
        cluster: [1; 16],
        identity: Some(identity),
        features: Features::PULLS,
        window_bytes: MIN_WINDOW_BYTES,
    }
}

pub(super) fn client() -> Local {
    Local { identity: None, ..local(1, 1) }
}

/// A running server.
pub(super) struct TestServer {
    pub(super) net: Arc<Net>,
    pub(super) events: mpsc::UnboundedReceiver<NetEvent>,
    pub(super) host: Arc<TestHost>,
    pub(super) address: String,
    pub(super) serving: tokio::task::JoinHandle<()>,
}

impl TestServer {
    /// Starts server `n` of servers 1 and 2, which know each other with mark 10.
    pub(super) async fn start(n: u32, limits: NetLimits) -> Self {
        let (events, receiver) = mpsc::unbounded_channel();
        let host = Arc::new(TestHost { events, registry: Mutex::default() });
        let net = Arc::new(Net::new(local(n, 10), limits, Arc::<TestHost>::clone(&host)));
        for server in [1, 2] {
            net.update_server(ServerId(server), opening(server, 10));
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let served = Arc::clone(&net);
        let serving = tokio::spawn(async move { served.serve(listener).await });
        Self { net, events: receiver, host, address, serving }
    }

    pub(super) async fn event(&mut self) -> NetEvent {
        self.events.recv().await.expect("the host exists")
    }

    /// The next request of a client.
    pub(super) async fn request(&mut self) -> (u64, u64, Request, Held) {
        match self.event().await {
            NetEvent::Client { connection, request_id, request, held, .. } => {
                (connection, request_id, request, held)
            }
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn connect_to(&self, server: u32, address: &str) {
        self.net.set_peers(&HashMap::from([(ServerId(server), address.to_owned())]));
    }

    pub(super) async fn client(&self) -> ClientConnection {
        let expected = self.net.shared.local.identity.map(|identity| identity.server);
        ClientConnection::connect(&client(), &self.address, expected, None).await.unwrap()
    }
}

/// Ends that speak by hand. Returns the socket and the answer to `Hello`.
pub(super) async fn dial_by_hand(
    address: &str,
    local: &Local,
    role: ConnectionRole,
) -> (TcpStream, Result<Welcome, HandshakeError>) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let hello = Hello::new(local, role, None, HAND);
    socket.write_all(&hello.encode()).await.unwrap();
    let mut bytes = [0; HANDSHAKE_BYTES];
    socket.read_exact(&mut bytes).await.unwrap();
    (socket, Welcome::decode(&bytes))
}

/// The connection id of [`dial_by_hand`].
pub(super) const HAND: ConnectionId = ConnectionId([9; 8]);

pub(super) async fn send_by_hand(socket: &mut TcpStream, frame: Frame) {
    for buffer in frame.encode(HAND) {
        socket.write_all(&buffer).await.unwrap();
    }
}

/// Reads what the server sends until it closes the connection.
pub(super) async fn read_to_end(socket: &mut TcpStream, role: ConnectionRole) -> Vec<Received> {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = socket.read_to_end(&mut bytes).await;
    let mut rest = Bytes::from(bytes);
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let (frame, more) = Received::parse(&rest, HAND, role, Side::Dialer).unwrap();
        frames.push(frame);
        rest = more;
    }
    frames
}

/// The code of the `Close` with which a connection ends.
pub(super) fn close_code(frames: &[Received]) -> Option<ErrorCode> {
    let last = frames.last().filter(|frame| frame.header.kind == FrameType::Close)?;
    Some(decode_error(last).unwrap().code)
}

pub(super) fn heartbeat(term: u64) -> GroupMessage {
    let message = message_of(MessageType::MsgHeartbeat, 1, 2, term);
    GroupMessage { group: GroupId(5), message }
}

pub(super) fn append(blocks: u16, index: u64) -> GroupMessage {
    let mut message = message_of(MessageType::MsgAppend, 1, 2, 3);
    (message.index, message.log_term) = (index, 1);
    message.entries = vec![write_entry(index + 1, 2, blocks)].into();
    GroupMessage { group: GroupId(5), message }
}

async fn peer_messages(server: &mut TestServer) -> (Vec<GroupMessage>, Held) {
    match server.event().await {
        NetEvent::Peer { frame: PeerFrame::Messages(messages), held, .. } => {
            (messages.messages, held)
        }
        other => panic!("{other:?}"),
    }
}

async fn connected() -> (TestServer, TestServer) {
    let mut one = TestServer::start(1, NetLimits::default()).await;
    let two = TestServer::start(2, NetLimits::default()).await;
    one.connect_to(2, &two.address);
    let event = one.event().await;
    assert!(matches!(event, NetEvent::PeerUp { server: ServerId(2) }), "{event:?}");
    (one, two)
}

#[tokio::test]
async fn messages_reach_the_other_server_and_their_memory_is_counted() {
    let (one, mut two) = connected().await;
    let free = two.net.shared.entry_bytes.available_permits();
    let sent: Vec<_> = (1..20).map(|index| append(100, index)).collect();
    assert_eq!(one.net.send_peer(ServerId(2), sent.clone()), Ok(0));
    let (mut received, mut held) = (Vec::new(), Vec::new());
    while received.len() < sent.len() {
        let (messages, permit) = peer_messages(&mut two).await;
        received.extend(messages);
        held.push(permit);
    }
    assert_eq!(received, sent);
    // Not by the slice: one entry keeps the whole buffer.
    let blocks = 19 * 100 * BLOCK_BYTES;
    drop(held);
    assert!(two.net.shared.entry_bytes.available_permits() <= free - blocks);
    let last = received.pop().unwrap();
    drop(received);
    let used = free - two.net.shared.entry_bytes.available_permits();
    assert!(used > 100 * BLOCK_BYTES, "{used}");
    drop(last);
    assert_eq!(two.net.shared.entry_bytes.available_permits(), free);
    // A server without a connection.
    assert_eq!(one.net.send_peer(ServerId(9), sent), Ok(19));
    one.net.send_peer_frame(ServerId(2), encode_gone(&[GONE]).next().unwrap());
    match two.event().await {
        NetEvent::Peer { server: ServerId(1), frame: PeerFrame::Gone(gone), .. } => {
            assert_eq!(gone, [GONE]);
        }
        other => panic!("{other:?}"),
    }
}

const GONE: Gone = Gone { group: GroupId(1), peer: PeerId(2), to: PeerId(3) };

/// An end that does not handle entries still gets heartbeats.
#[tokio::test]
async fn entries_above_the_budget_are_dropped_and_heartbeats_are_not() {
    let mut one = TestServer::start(1, NetLimits::default()).await;
    let limits = NetLimits { entry_bytes: 1 << 20, ..NetLimits::default() };
    let mut two = TestServer::start(2, limits).await;
    one.connect_to(2, &two.address);
    one.event().await;
    one.net.send_peer(ServerId(2), [append(200, 1)]).unwrap();
    let (kept, held) = peer_messages(&mut two).await;
    assert_eq!(kept.len(), 1);
    for term in 1..6 {
        one.net.send_peer(ServerId(2), [append(200, 2)]).unwrap();
        one.net.send_peer(ServerId(2), [heartbeat(term)]).unwrap();
    }
    let (mut dropped, mut heartbeats) = (0, 0);
    while (dropped, heartbeats) != (5, 5) {
        match two.event().await {
            NetEvent::Peer { frame: PeerFrame::Messages(messages), .. } => {
                dropped += messages.dropped;
                heartbeats += messages.messages.len();
                let entries = messages.messages.iter().map(|m| m.message.entries.len());
                assert_eq!(entries.sum::<usize>(), 0);
            }
            other => panic!("{other:?}"),
        }
    }
    // The budget is free again.
    drop((kept, held));
    one.net.send_peer(ServerId(2), [append(200, 3)]).unwrap();
    assert_eq!(peer_messages(&mut two).await.0, [append(200, 3)]);
    // The server itself wants none.
    two.net.set_sender_state(SenderState { drops_entries: true, ..SenderState::default() });
    one.net.send_peer(ServerId(2), [append(1, 4), heartbeat(9)]).unwrap();
    let heartbeats = peer_messages(&mut two).await.0;
    assert_eq!(heartbeats, [heartbeat(9)]);
    assert_eq!(peer_messages(&mut two).await.0, []);
}

/// A refused connection proves that the process is gone; a lost one does not.
#[tokio::test]
async fn a_refused_reconnect_is_reported_once() {
    let (mut one, two) = connected().await;
    two.serving.abort();
    let lost = one.event().await;
    assert!(matches!(lost, NetEvent::PeerDown { is_gone: false, .. }), "{lost:?}");
    let gone = one.event().await;
    assert!(matches!(gone, NetEvent::PeerDown { is_gone: true, .. }), "{gone:?}");
    // All attempts of a minute are refused, and not reported.
    tokio::time::pause();
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    tokio::time::resume();
    assert!(one.events.try_recv().is_err());
    // It comes back at the same address.
    let listener = TcpListener::bind(&two.address).await.unwrap();
    let served = Arc::clone(&two.net);
    let serving = tokio::spawn(async move { served.serve(listener).await });
    let back = one.event().await;
    assert!(matches!(back, NetEvent::PeerUp { server: ServerId(2) }), "{back:?}");
    serving.abort();
    let lost = one.event().await;
    assert!(matches!(lost, NetEvent::PeerDown { is_gone: false, .. }), "{lost:?}");
}

#[tokio::test]
async fn a_handshake_that_fails_is_reported_once_for_each_reason() {
    let mut one = TestServer::start(1, NetLimits::default()).await;
    let two = TestServer::start(2, NetLimits::default()).await;
    two.net.update_server(ServerId(1), opening(1, 11));
    one.connect_to(2, &two.address);
    let error = match one.event().await {
        NetEvent::PeerRefused { server: ServerId(2), error } => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(error, HandshakeError::RefusedByServer(ErrorCode::OldOpening));
    two.net.remove_server(ServerId(1));
    match one.event().await {
        NetEvent::PeerRefused { error, .. } => {
            assert_eq!(error, HandshakeError::RefusedByServer(ErrorCode::UnknownServer));
        }
        other => panic!("{other:?}"),
    }
    // The registry has it, and the acceptor's view does not yet.
    two.host.registry.lock().insert(ServerId(1), opening(1, 10));
    let up = one.event().await;
    assert!(matches!(up, NetEvent::PeerUp { .. }), "{up:?}");
}

#[tokio::test]
async fn calls_share_a_connection_and_are_answered_in_any_order() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let client = Arc::new(server.client().await);
    assert_eq!(client.server().server, ServerId(1));
    let write = Request::Op { group: GroupId(1), op: write(256, 3, 1) };
    let requests = [write, read_request(2), Request::Status { group: None, after: GroupId(0) }];
    let calls: Vec<_> = requests
        .iter()
        .cloned()
        .map(|request| {
            let client = Arc::clone(&client);
            tokio::spawn(async move { client.call(&request).await })
        })
        .collect();
    let mut received = Vec::new();
    for _ in &requests {
        received.push(server.request().await);
    }
    let error = RequestError {
        leader: Some(ServerId(2)),
        ..RequestError::new(ErrorCode::NotLeader, GroupId(1), "another one leads")
    };
    let index = Index(77);
    let op_answer = OpAnswer { index, epoch: AttachEpoch(1), is_duplicate: false };
    for (connection, id, request, _) in received.iter().rev() {
        let answer = match request {
            Request::Op { .. } => Ok(Answer::Op(op_answer)),
            Request::Read(_) => Ok(read_answer_of(request, 7)),
            Request::Status { .. } => Err(error.clone()),
        };
        server.net.answer(*connection, *id, &answer);
        // A second answer, and one to nothing, are dropped.
        server.net.answer(*connection, *id, &answer);
        server.net.answer(*connection, 1 << 40, &answer);
    }
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await.unwrap());
    }
    let expected = [
        Ok(Answer::Op(op_answer)),
        Ok(read_answer_of(&requests[1], 7)),
        Err(CallError::Request(error)),
    ];
    assert_eq!(answers, expected);
    for (_, _, request, _) in received {
        assert!(requests.contains(&request));
        if let Request::Op { op, .. } = request {
            assert_eq!(Op::verify(&op), Ok(()));
        }
    }
}

/// Callers may start more than the window holds; the connection makes them wait, and the server
/// sees no violation.
#[tokio::test]
async fn callers_wait_for_the_window() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let client = Arc::new(server.client().await);
    let request = read_request(256);
    let calls: Vec<_> = (0..40)
        .map(|_| {
            let (client, request) = (Arc::clone(&client), request.clone());
            tokio::spawn(async move { client.call(&request).await })
        })
        .collect();
    let most = MIN_WINDOW_BYTES as usize / request_cost(0, &request);
    let mut waiting = Vec::new();
    for _ in 0..most {
        waiting.push(server.request().await);
    }
    assert!(server.events.try_recv().is_err(), "more than the window");
    for n in 0..40 {
        let (connection, id, request, _) = waiting.swap_remove(n % waiting.len());
        server.net.answer(connection, id, &Ok(read_answer_of(&request, n as u8)));
        if n + most < 40 {
            waiting.push(server.request().await);
        }
    }
    for call in calls {
        assert!(call.await.unwrap().is_ok());
    }
    assert!(!client.is_closed());
}

#[tokio::test]
async fn calls_fail_when_the_connection_ends() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let client = Arc::new(server.client().await);
    // Two that are sent, and one that waits for the window.
    let calls: Vec<_> = (0..4)
        .map(|_| {
            let client = Arc::clone(&client);
            tokio::spawn(async move { client.call(&read_request(256)).await })
        })
        .collect();
    let (connection, ..) = server.request().await;
    server.net.stop();
    for call in calls {
        assert_eq!(call.await.unwrap(), Err(CallError::Closed));
    }
    assert_eq!(client.call(&read_request(1)).await, Err(CallError::Closed));
    assert!(client.is_closed());
    loop {
        match server.event().await {
            NetEvent::ClientGone { connection: gone, .. } => break assert_eq!(gone, connection),
            NetEvent::Client { .. } => {}
            other => panic!("{other:?}"),
        }
    }
    server.serving.await.unwrap();
}

fn batch(n: u64) -> PullFrame {
    let data = Bytes::from(vec![n as u8; 256 * BLOCK_BYTES]);
    let crcs = block_crcs(&data);
    let content = PullContent::Blocks { first: 0, crcs, data };
    let (volume, layer, chunk) = (VolumeId(1), Layer(0), ChunkIndex(n as u32));
    let items = vec![PullItem { at: PullChunk { volume, layer, chunk }, content }];
    PullFrame::Batch(PullBatch { applied: Index(n), items })
}

fn pull() -> Pull {
    Pull {
        group: GroupId(1),
        peer: PeerId(2),
        since: Index(0),
        finished_since: Index(0),
        after: None,
        finished: Vec::new(),
    }
}

async fn pull_from(source: &mut TestServer) -> (PullStream, PullSender) {
    let directory = Mutex::new(Directory::default());
    directory.lock().update(ServerId(1), opening(1, 10));
    let (address, server) = (source.address.clone(), ServerId(1));
    let pull = pull();
    let local = local(2, 10);
    let stream = PullStream::connect(&local, &directory, &address, server, &pull);
    let stream = stream.await.unwrap();
    match source.event().await {
        NetEvent::Pull { server: ServerId(2), pull: received, sender } => {
            assert_eq!(received, pull);
            (stream, sender)
        }
        other => panic!("{other:?}"),
    }
}

/// The source is as fast as its target: what is under way is bounded by the sockets.
#[tokio::test]
async fn a_stream_waits_for_its_target() {
    let mut source = TestServer::start(1, NetLimits::default()).await;
    let (mut stream, mut sender) = pull_from(&mut source).await;
    let sent = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&sent);
    let sending = tokio::spawn(async move {
        for n in 0..64 {
            sender.send(&batch(n)).await.unwrap();
            *counted.lock() += 1;
        }
        let error = RequestError::new(ErrorCode::NotReady, GroupId(1), "not exact any more");
        sender.send(&PullFrame::End(Err(error))).await.unwrap();
    });
    for n in 0..64 {
        assert_eq!(stream.next().await, Ok(batch(n)));
        // Socket buffers grow to 6 MiB; the stream has 64.
        let ahead = *sent.lock() - n;
        assert!(ahead < 32, "{ahead} MiB ahead of the target");
    }
    match stream.next().await {
        Ok(PullFrame::End(Err(error))) => assert_eq!(error.code, ErrorCode::NotReady),
        other => panic!("{other:?}"),
    }
    sending.await.unwrap();
    assert!(stream.next().await.is_err());
}

#[tokio::test]
async fn a_source_learns_that_its_target_is_gone() {
    let mut source = TestServer::start(1, NetLimits::default()).await;
    let (stream, mut sender) = pull_from(&mut source).await;
    drop(stream);
    let mut n = 0;
    while sender.send(&batch(n)).await.is_ok() {
        n += 1;
        assert!(n < 32, "a target that is gone takes everything");
    }
    // The place is free again.
    let (mut stream, sender) = pull_from(&mut source).await;
    drop(sender);
    assert!(matches!(stream.next().await, Err(PullError::Connection(_))));
}
