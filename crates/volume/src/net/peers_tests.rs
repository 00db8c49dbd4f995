//! What a server concludes of the process of another one from its connections.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::connection_tests::*;
use super::tests::frame_of;
use super::*;
use crate::types::ServerId;

/// Server 2, played by the test: where server 1 dials it.
async fn played() -> (TestServer, TcpListener) {
    let one = TestServer::start(1, NetLimits::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    one.connect_to(2, &listener.local_addr().unwrap().to_string());
    (one, listener)
}

/// Accepts a connection of server 1, as an opening of server 2.
async fn accept(listener: &TcpListener, mark: u64) -> TcpStream {
    let (mut socket, _) = listener.accept().await.unwrap();
    let mut bytes = [0; HANDSHAKE_BYTES];
    socket.read_exact(&mut bytes).await.unwrap();
    let hello = Hello::decode(&bytes).unwrap();
    let welcome = Welcome::new(&local(2, mark), Some(&hello), Ok(()));
    socket.write_all(&welcome.encode()).await.unwrap();
    socket
}

/// Dials server 1 as an opening of server 2.
async fn dial(one: &TestServer, mark: u64) -> TcpStream {
    let (socket, welcome) = dial_by_hand(&one.address, &local(2, mark), ConnectionRole::Peer).await;
    welcome.unwrap();
    socket
}

fn is_gone(event: &NetEvent) -> bool {
    matches!(event, NetEvent::PeerDown { server: ServerId(2), is_gone: true })
}

/// The events up to the next one that fits.
async fn events_until(one: &mut TestServer, fits: impl Fn(&NetEvent) -> bool) -> Vec<NetEvent> {
    let mut events = Vec::new();
    while !events.last().is_some_and(&fits) {
        events.push(one.event().await);
    }
    events
}

fn is_message(event: &NetEvent) -> bool {
    matches!(event, NetEvent::Peer { .. })
}

fn is_up(event: &NetEvent) -> bool {
    matches!(event, NetEvent::PeerUp { .. })
}

/// Lets all attempts of a minute to connect fail. Returns the events.
async fn events_of_a_minute(one: &mut TestServer) -> Vec<NetEvent> {
    tokio::time::pause();
    tokio::time::sleep(Duration::from_secs(60)).await;
    tokio::time::resume();
    std::iter::from_fn(|| one.events.try_recv().ok()).collect()
}

/// What leads a group when the report arrives is the earlier opening. The newer one may lead it
/// soon after its first message, and nothing is reported then.
#[tokio::test]
async fn a_newer_opening_is_reported_once_and_before_its_first_message() {
    let (mut one, listener) = played().await;
    let _earlier = accept(&listener, 10).await;
    events_until(&mut one, is_up).await;
    let mut newer = dial(&one, 11).await;
    send_by_hand(&mut newer, frame_of(heartbeat(1))).await;
    let events = events_until(&mut one, is_message).await;
    assert_eq!(events.iter().filter(|event| is_gone(event)).count(), 1, "{events:?}");
    // The connection to the earlier one is closed, and this server reaches the newer one itself.
    let _reached = accept(&listener, 11).await;
    let mut events = events_until(&mut one, is_up).await;
    send_by_hand(&mut newer, frame_of(heartbeat(2))).await;
    events.extend(events_until(&mut one, is_message).await);
    assert!(!events.iter().any(is_gone), "{events:?}");
}

#[tokio::test]
async fn a_newer_opening_that_this_server_reaches_first_is_reported() {
    let (mut one, listener) = played().await;
    drop(accept(&listener, 10).await);
    events_until(&mut one, is_up).await;
    let _reached = accept(&listener, 11).await;
    let events = events_until(&mut one, is_up).await;
    assert_eq!(events.iter().filter(|event| is_gone(event)).count(), 1, "{events:?}");
}

/// The newer opening has another address, which the registry states later.
#[tokio::test]
async fn a_refusal_at_the_address_of_an_earlier_opening_does_not_concern_a_newer_one() {
    let (mut one, listener) = played().await;
    let earlier = accept(&listener, 10).await;
    events_until(&mut one, is_up).await;
    let mut newer = dial(&one, 11).await;
    send_by_hand(&mut newer, frame_of(heartbeat(1))).await;
    events_until(&mut one, is_message).await;
    drop((earlier, listener));
    let events = events_of_a_minute(&mut one).await;
    assert!(!events.iter().any(is_gone), "{events:?}");
}

#[tokio::test]
async fn a_refusal_at_an_address_that_was_never_reached_proves_nothing() {
    let (mut one, listener) = played().await;
    drop(listener);
    let mut live = dial(&one, 10).await;
    send_by_hand(&mut live, frame_of(heartbeat(1))).await;
    let mut events = events_until(&mut one, is_message).await;
    events.extend(events_of_a_minute(&mut one).await);
    assert!(!events.iter().any(is_gone), "{events:?}");
}
