//! Ends that violate the protocol, are slow, or disappear. Nothing that they do grows without
//! bound, and the server goes on.

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::client::MAX_ANSWER_COST;
use super::connection_tests::*;
use super::tests::{frame_of, read_answer_of, read_request, write};
use super::*;
use crate::op::BlockRange;
use crate::request::{ErrorCode, MAX_READ_BLOCKS, ReadRequest, Request, RequestError};
use crate::types::{AttachEpoch, ChunkIndex, GroupId, Index, Layer, ServerId, VolumeId};

/// The server answers a client, whatever others have done to it.
async fn assert_serves(server: &mut TestServer) {
    let client = server.client().await;
    // No other test sends this one.
    let request = read_request(3);
    let call = async { client.call(&request).await };
    let handle = async {
        loop {
            match server.event().await {
                NetEvent::Client { connection, request_id, request: received, .. }
                    if received == request =>
                {
                    let answer = Ok(read_answer_of(&received, 1));
                    return server.net.answer(connection, request_id, &answer);
                }
                _ => {}
            }
        }
    };
    let (answer, ()) = tokio::join!(call, handle);
    assert!(answer.is_ok(), "{answer:?}");
}

#[tokio::test]
async fn garbage_is_not_answered() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let mut socket = TcpStream::connect(&server.address).await.unwrap();
    socket.write_all(&[b'x'; 128]).await.unwrap();
    let mut bytes = Vec::new();
    let _ = socket.read_to_end(&mut bytes).await;
    assert!(bytes.is_empty(), "{bytes:?}");
    // Half a `Hello`, and the end.
    let mut socket = TcpStream::connect(&server.address).await.unwrap();
    socket.write_all(b"ALLUVVOL").await.unwrap();
    drop(socket);
    assert_serves(&mut server).await;
}

/// A dialer that connects and sends nothing holds a place for 5 s only.
#[tokio::test]
async fn half_a_hello_times_out() {
    let limits = NetLimits { handshakes: 1, ..NetLimits::default() };
    let mut server = TestServer::start(1, limits).await;
    let mut socket = TcpStream::connect(&server.address).await.unwrap();
    socket.write_all(b"ALLUVVOL").await.unwrap();
    // Until it was accepted.
    while server.net.shared.handshakes.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    let mut bytes = Vec::new();
    let _ = socket.read_to_end(&mut bytes).await;
    assert!(bytes.is_empty(), "{bytes:?}");
    assert_eq!(started.elapsed().as_secs(), 5);
    tokio::time::resume();
    assert_serves(&mut server).await;
}

#[tokio::test]
async fn strangers_are_refused_by_their_code() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let peer = ConnectionRole::Peer;
    for (local, code) in [
        (Local { cluster: [2; 16], ..local(2, 10) }, ErrorCode::WrongCluster),
        (local(2, 9), ErrorCode::OldOpening),
        (local(3, 1), ErrorCode::UnknownServer),
    ] {
        let (mut socket, welcome) = dial_by_hand(&server.address, &local, peer).await;
        assert_eq!(welcome, Err(HandshakeError::RefusedByServer(code)));
        assert_eq!(read_to_end(&mut socket, peer).await.len(), 0);
    }
    // A client that expects another server.
    let expected = Some(ServerId(2));
    let refused = ClientConnection::connect(&client(), &server.address, expected, None).await;
    let code = HandshakeError::RefusedByServer(ErrorCode::WrongServer);
    assert_eq!(refused.err(), Some(ConnectFailure::Handshake(code)));
    assert_serves(&mut server).await;
}

#[tokio::test]
async fn connections_above_the_limit_are_refused() {
    let limits = NetLimits { clients: 1, ..NetLimits::default() };
    let mut server = TestServer::start(1, limits).await;
    let first = server.client().await;
    let (_, welcome) = dial_by_hand(&server.address, &client(), ConnectionRole::Client).await;
    assert_eq!(welcome, Err(HandshakeError::RefusedByServer(ErrorCode::Busy)));
    drop(first);
    // Its place is free when the event is dropped, so that events do not pile up either.
    let gone = server.event().await;
    let (_, welcome) = dial_by_hand(&server.address, &client(), ConnectionRole::Client).await;
    assert!(welcome.is_err());
    drop(gone);
    let (_, welcome) = dial_by_hand(&server.address, &client(), ConnectionRole::Client).await;
    assert!(welcome.is_ok());
}

#[tokio::test]
async fn a_newer_connection_and_a_newer_opening_replace_the_older() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let peer = ConnectionRole::Peer;
    let (mut first, _) = dial_by_hand(&server.address, &local(2, 10), peer).await;
    send_by_hand(&mut first, Frame::ping(1)).await;
    let (mut second, _) = dial_by_hand(&server.address, &local(2, 10), peer).await;
    let frames = read_to_end(&mut first, peer).await;
    assert_eq!(close_code(&frames), Some(ErrorCode::Superseded));
    let (mut pull, welcome) =
        dial_by_hand(&server.address, &local(2, 10), ConnectionRole::Pull).await;
    assert!(welcome.is_ok());
    send_by_hand(&mut second, Frame::ping(1)).await;
    send_by_hand(&mut pull, Frame::ping(1)).await;
    let (_third, welcome) = dial_by_hand(&server.address, &local(2, 12), peer).await;
    assert!(welcome.is_ok());
    let frames = read_to_end(&mut second, peer).await;
    assert_eq!(close_code(&frames), Some(ErrorCode::OldOpening));
    let frames = read_to_end(&mut pull, ConnectionRole::Pull).await;
    assert_eq!(close_code(&frames), Some(ErrorCode::OldOpening));
    let (_, welcome) = dial_by_hand(&server.address, &local(2, 11), peer).await;
    assert_eq!(welcome, Err(HandshakeError::RefusedByServer(ErrorCode::OldOpening)));
    assert_serves(&mut server).await;
}

#[tokio::test]
async fn frames_that_are_not_valid_close_the_connection_with_the_reason() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let roles = [
        (ConnectionRole::Peer, local(2, 10)),
        (ConnectionRole::Client, client()),
        (ConnectionRole::Pull, local(2, 10)),
    ];
    for (role, local) in roles {
        // A header of another connection, and a frame of another role.
        let foreign = Frame::ping(1).encode(ConnectionId([0; 8])).remove(0);
        let (mut socket, _) = dial_by_hand(&server.address, &local, role).await;
        socket.write_all(&foreign).await.unwrap();
        let frames = read_to_end(&mut socket, role).await;
        assert_eq!(close_code(&frames), Some(ErrorCode::BadFrame), "{role:?}");
        let (mut socket, _) = dial_by_hand(&server.address, &local, role).await;
        send_by_hand(&mut socket, Frame::pong(1)).await;
        let frames = read_to_end(&mut socket, role).await;
        assert_eq!(close_code(&frames), Some(ErrorCode::BadFrame), "{role:?}");
    }
    // A block of a peer that does not have its checksum.
    let (mut socket, _) = dial_by_hand(&server.address, &local(2, 10), ConnectionRole::Peer).await;
    let mut append = append(2, 1);
    let mut blocks = append.message.entries[0].context.to_vec();
    blocks[5000] ^= 1;
    append.message.entries[0].context = blocks.into();
    send_by_hand(&mut socket, frame_of(append)).await;
    let frames = read_to_end(&mut socket, ConnectionRole::Peer).await;
    assert_eq!(close_code(&frames), Some(ErrorCode::BadChecksum));
    assert_serves(&mut server).await;
}

#[tokio::test]
async fn a_request_with_a_bad_block_or_an_unknown_op_is_answered() {
    let server = TestServer::start(1, NetLimits::default()).await;
    let client = server.client().await;
    let mut op = write(2, 1, 1);
    let crate::Op::Blocks(crate::BlockOp { change: crate::Change::Write { crcs, .. }, .. }) =
        &mut op
    else {
        unreachable!()
    };
    crcs[1] ^= 1;
    let call = client.call(&Request::Op { group: GroupId(1), op }).await;
    let code = |call| match call {
        Err(CallError::Request(error)) => error.code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code(call), ErrorCode::BadChecksum);
    let Request::Read(read) = read_request(1) else { unreachable!() };
    let layered = Request::Read(ReadRequest { layer: Layer(1), ..read });
    assert_eq!(code(client.call(&layered).await), ErrorCode::Unsupported);
    assert!(!client.is_closed());
}

#[tokio::test]
async fn a_connection_cut_in_a_frame_leaves_nothing() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let free = server.net.shared.entry_bytes.available_permits();
    let bytes = frame_of(append(100, 1)).encode(HAND).concat();
    for len in [10, 32, 100, 5000, bytes.len() - 1] {
        let (mut socket, _) =
            dial_by_hand(&server.address, &local(2, 10), ConnectionRole::Peer).await;
        socket.write_all(&bytes[..len]).await.unwrap();
        socket.shutdown().await.unwrap();
        assert_eq!(read_to_end(&mut socket, ConnectionRole::Peer).await.len(), 0);
    }
    let request = Request::Op { group: GroupId(1), op: write(100, 1, 1) };
    let bytes = encode_request(1, &request).encode(HAND).concat();
    let (mut socket, _) = dial_by_hand(&server.address, &client(), ConnectionRole::Client).await;
    socket.write_all(&bytes[..bytes.len() - 1]).await.unwrap();
    socket.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut socket, ConnectionRole::Client).await.len(), 0);
    let gone = server.event().await;
    assert!(matches!(gone, NetEvent::ClientGone { .. }), "{gone:?}");
    assert_eq!(server.net.shared.entry_bytes.available_permits(), free);
    let budget = NetLimits::default().request_bytes;
    assert_eq!(server.net.shared.request_bytes.available_permits(), budget);
    assert_serves(&mut server).await;
}

#[tokio::test]
async fn requests_above_the_window_close_the_connection() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let role = ConnectionRole::Client;
    let (mut socket, welcome) = dial_by_hand(&server.address, &client(), role).await;
    let request = read_request(256);
    let each = request_cost(encode_request(0, &request).wire_bytes(), &request);
    let most = welcome.unwrap().window_bytes as usize / each;
    for id in 0..=most as u64 {
        send_by_hand(&mut socket, encode_request(id, &request)).await;
    }
    let frames = read_to_end(&mut socket, role).await;
    assert_eq!(close_code(&frames), Some(ErrorCode::TooManyBytes));
    for _ in 0..most {
        server.request().await;
    }
    let gone = server.event().await;
    assert!(matches!(gone, NetEvent::ClientGone { .. }), "{gone:?}");
    // Two requests with one number.
    let (mut socket, _) = dial_by_hand(&server.address, &client(), role).await;
    send_by_hand(&mut socket, encode_request(5, &request)).await;
    send_by_hand(&mut socket, encode_request(5, &request)).await;
    let frames = read_to_end(&mut socket, role).await;
    assert_eq!(close_code(&frames), Some(ErrorCode::BadFrame));
    assert_serves(&mut server).await;
}

/// Answers that are not read stay within the window, since their requests still count.
#[tokio::test]
async fn a_client_that_never_reads_is_closed_by_its_window() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let role = ConnectionRole::Client;
    let (mut socket, _) = dial_by_hand(&server.address, &client(), role).await;
    let request = read_request(256);
    let mut answered = 0;
    for id in 0.. {
        // A closed connection may refuse what is written.
        let bytes = encode_request(id, &request).encode(HAND).concat();
        let _ = socket.write_all(&bytes).await;
        match server.event().await {
            NetEvent::Client { connection, request_id, request, .. } => {
                let answer = Ok(read_answer_of(&request, 1));
                server.net.answer(connection, request_id, &answer);
                answered += 1;
            }
            NetEvent::ClientGone { .. } => break,
            other => panic!("{other:?}"),
        }
        // The kernel takes some MiB.
        assert!(answered < 64, "{answered} answers of 1 MiB are kept for a client that reads none");
    }
    assert_serves(&mut server).await;
}

/// A client whose socket takes nothing for 5 s is closed before its silence counts.
#[tokio::test]
async fn a_client_that_never_reads_is_closed_by_time() {
    let mut server = TestServer::start(1, NetLimits::default()).await;
    let (mut socket, _) = dial_by_hand(&server.address, &client(), ConnectionRole::Client).await;
    let _ = SockRef::from(&socket).set_recv_buffer_size(4096);
    for id in 0..3 {
        send_by_hand(&mut socket, encode_request(id, &read_request(256))).await;
        let (connection, request_id, request, _) = server.request().await;
        server.net.answer(connection, request_id, &Ok(read_answer_of(&request, 1)));
    }
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    let gone = server.event().await;
    assert!(matches!(gone, NetEvent::ClientGone { .. }), "{gone:?}");
    // 5 s, and one in which the socket is drained.
    assert!((5..=6).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
    tokio::time::resume();
    assert_serves(&mut server).await;
}

async fn read_pong(socket: &mut TcpStream, role: ConnectionRole) {
    let mut pong = [0; HEADER_BYTES];
    socket.read_exact(&mut pong).await.unwrap();
    let pong = Header::decode(&pong, HAND, role, Side::Dialer).unwrap();
    assert_eq!(pong.kind, FrameType::Pong);
}

/// The budget of all clients: nothing is read above it, and the ends know that the server is there.
#[tokio::test]
async fn no_client_is_read_while_too_much_is_queued() {
    let limits = NetLimits { request_bytes: 600 << 10, ..NetLimits::default() };
    let mut server = TestServer::start(1, limits).await;
    let request = Request::Op { group: GroupId(1), op: write(100, 1, 1) };
    let role = ConnectionRole::Client;
    let (mut first, _) = dial_by_hand(&server.address, &client(), role).await;
    let (mut second, _) = dial_by_hand(&server.address, &client(), role).await;
    send_by_hand(&mut first, encode_request(1, &request)).await;
    let (.., held) = server.request().await;
    send_by_hand(&mut second, encode_request(1, &request)).await;
    // A sign of life after a second, and no request.
    read_pong(&mut second, role).await;
    assert!(server.events.try_recv().is_err());
    drop(held);
    let (_, _, received, _) = server.request().await;
    assert_eq!(received, request);
}

/// The budget of answers: beyond its own share of one answer, a connection waits for the others.
#[tokio::test]
async fn answers_that_are_not_sent_share_a_budget() {
    let limits = NetLimits { answer_bytes: MAX_ANSWER_COST, ..NetLimits::default() };
    let mut server = TestServer::start(1, limits).await;
    let range = BlockRange { chunk: ChunkIndex(0), first: 0, blocks: MAX_READ_BLOCKS };
    let read = Request::Read(ReadRequest {
        group: GroupId(1),
        epoch: AttachEpoch(0),
        token: Index(0),
        volume: VolumeId(1),
        layer: Layer(0),
        range,
        states_only: false,
    });
    let role = ConnectionRole::Client;
    let (mut first, _) = dial_by_hand(&server.address, &client(), role).await;
    let (mut second, _) = dial_by_hand(&server.address, &client(), role).await;
    for request in 1..=3 {
        send_by_hand(&mut first, encode_request(request, &read)).await;
    }
    // Its own share, and what all have.
    let (connection, ..) = server.request().await;
    server.request().await;
    // The third one waits.
    read_pong(&mut first, role).await;
    assert!(server.events.try_recv().is_err());
    // Another connection has its own share, too.
    send_by_hand(&mut second, encode_request(1, &read)).await;
    server.request().await;
    let busy = RequestError::new(ErrorCode::Busy, GroupId(1), "");
    server.net.answer(connection, 1, &Err(busy));
    let (from, id, received, _) = server.request().await;
    assert_eq!((from, id, received), (connection, 3, read));
    drop((first, second));
    // All of it is given back.
    let budget = &server.net.shared.answer_bytes;
    drop(budget.acquire_many(MAX_ANSWER_COST as u32).await.unwrap());
}

/// An acceptor closes what is silent for 15 s.
#[tokio::test]
async fn a_silent_dialer_is_closed() {
    let server = TestServer::start(1, NetLimits::default()).await;
    for (role, local) in [(ConnectionRole::Client, client()), (ConnectionRole::Peer, local(2, 10))]
    {
        let (mut socket, _) = dial_by_hand(&server.address, &local, role).await;
        // The connection is served once it has answered.
        send_by_hand(&mut socket, Frame::ping(1)).await;
        read_pong(&mut socket, role).await;
        tokio::time::pause();
        let started = tokio::time::Instant::now();
        assert_eq!(read_to_end(&mut socket, role).await.len(), 0);
        let elapsed = started.elapsed().as_secs();
        assert!((14..=16).contains(&elapsed), "{elapsed}");
        tokio::time::resume();
    }
}

/// Accepts a connection as server 1.
async fn accept_by_hand(listener: &TcpListener) -> (TcpStream, Hello) {
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut bytes = [0; HANDSHAKE_BYTES];
    socket.read_exact(&mut bytes).await.unwrap();
    let hello = Hello::decode(&bytes).unwrap();
    let welcome = Welcome::new(&local(1, 10), Some(&hello), Ok(()));
    socket.write_all(&welcome.encode()).await.unwrap();
    (socket, hello)
}

/// A server that accepts connections and is stopped then: no reset arrives, and no answer.
#[tokio::test]
async fn a_silent_server_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let local = client();
    let connect = ClientConnection::connect(&local, &address, None, None);
    let (connection, _accepted) = tokio::join!(connect, accept_by_hand(&listener));
    let connection = connection.unwrap();
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    assert_eq!(connection.call(&read_request(1)).await, Err(CallError::Closed));
    // A second of silence, `Ping`, and 5 s.
    assert!((5..=7).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
}

/// A server that answers what was not asked.
#[tokio::test]
async fn an_answer_to_nothing_closes_the_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let accept = async {
        let (mut socket, hello) = accept_by_hand(&listener).await;
        let request = read_request(2);
        let answer = Ok(read_answer_of(&request, 1));
        let frame = encode_answer(FrameType::ReadAnswer, 99, &answer);
        for buffer in frame.encode(hello.connection) {
            socket.write_all(&buffer).await.unwrap();
        }
        socket
    };
    let local = client();
    let connect = ClientConnection::connect(&local, &address, None, None);
    let (connection, _socket) = tokio::join!(connect, accept);
    assert_eq!(connection.unwrap().call(&read_request(1)).await, Err(CallError::Closed));
}

#[tokio::test]
async fn connecting_to_a_server_that_does_not_answer_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let connecting = tokio::spawn(async move {
        ClientConnection::connect(&client(), &address, None, None).await.err()
    });
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut hello = [0; HANDSHAKE_BYTES];
    socket.read_exact(&mut hello).await.unwrap();
    tokio::time::pause();
    let started = tokio::time::Instant::now();
    let failed = connecting.await.unwrap();
    assert!(matches!(failed, Some(ConnectFailure::Unreachable(_))), "{failed:?}");
    assert_eq!(started.elapsed().as_secs(), 5);
}
