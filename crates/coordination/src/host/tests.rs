//! Tests of a host with clients that violate the protocol or take too much.

use bytes::BytesMut;
use futures::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use super::*;
use crate::wire::{ClientMessage, Hello, HostMessage, MAX_HOST_BYTES, codec, decode, encode};
use crate::{
    Change, Limits, ListRequest, ManualClock, MemoryCoordination, Remote, RemoteOptions, Revision,
    Transaction,
};

const ANY: &str = "127.0.0.1:0";

fn service() -> Arc<MemoryCoordination> {
    Arc::new(MemoryCoordination::new(Limits::default(), Arc::new(ManualClock::default())))
}

async fn host(options: HostOptions) -> Host {
    Host::bind(ANY.parse().unwrap(), service(), options).await.unwrap()
}

fn put(key: &str, bytes: usize) -> Transaction {
    Transaction { guards: Vec::new(), changes: vec![Change::put(key, vec![0; bytes])] }
}

async fn serves(host: &Host) {
    let deadline = Duration::from_secs(600);
    let options = RemoteOptions { deadline, ..RemoteOptions::new("c", host.address().to_string()) };
    Remote::new(options).commit(&put("good", 1)).await.unwrap().unwrap();
}

fn hello() -> bytes::Bytes {
    Hello { lowest: 1, highest: 9, cluster: "c".to_owned() }.encode()
}

type Client = Framed<TcpStream, LengthDelimitedCodec>;

async fn connect(host: &Host) -> Client {
    let stream = TcpStream::connect(host.address()).await.unwrap();
    let mut client = Framed::new(stream, codec(MAX_HOST_BYTES));
    client.send(hello()).await.unwrap();
    let welcome = Welcome::decode(&client.next().await.unwrap().unwrap()).unwrap();
    assert_eq!(welcome.version, 1, "{welcome:?}");
    client
}

async fn next(client: &mut Client) -> HostMessage {
    loop {
        match decode(&client.next().await.unwrap().unwrap()).unwrap() {
            HostMessage::Ping => {}
            message => return message,
        }
    }
}

/// Reads until the host closes the connection; returns what it has sent.
async fn closed(stream: &mut TcpStream) -> BytesMut {
    let mut bytes = BytesMut::new();
    // A reset is an end, too.
    while stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {}
    bytes
}

#[tokio::test]
async fn beyond_loopback_a_host_needs_the_permission_for_plaintext() {
    let address = "0.0.0.0:0".parse().unwrap();
    let refused = Host::bind(address, service(), HostOptions::new("c")).await;
    assert!(matches!(refused, Err(Error::Invalid(text)) if text.contains("0.0.0.0:0")));
}

#[tokio::test]
async fn garbage_before_the_handshake_closes_the_connection_without_an_answer() {
    let host = host(HostOptions::new("c")).await;
    let huge = u32::MAX.to_le_bytes();
    let too_long = [513_u32.to_le_bytes().to_vec(), vec![0; 513]].concat();
    let mut damaged = with_length(&hello());
    *damaged.last_mut().unwrap() ^= 1;
    let mut magic = with_length(&hello());
    magic[8] = b'B';
    let ping = with_length(&encode(&ClientMessage::Ping));
    for garbage in [&huge[..], &too_long, &damaged, &magic, &ping, b"GET / HTTP/1.1\r\n\r\n"] {
        let mut stream = TcpStream::connect(host.address()).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        assert_eq!(closed(&mut stream).await.len(), 0, "{garbage:?}");
    }
    serves(&host).await;
}

#[tokio::test]
async fn other_versions_and_clusters_get_the_reason() {
    let host = host(HostOptions::new("c")).await;
    let cases = [
        (Hello { lowest: 2, highest: 3, cluster: "c".to_owned() }, "versions 2 to 3"),
        (Hello { lowest: 1, highest: 1, cluster: "d".to_owned() }, "expects cluster \"d\""),
    ];
    for (hello, expected) in cases {
        let mut stream = TcpStream::connect(host.address()).await.unwrap();
        stream.write_all(&with_length(&hello.encode())).await.unwrap();
        let answer = Welcome::decode(&closed(&mut stream).await[4..]).unwrap();
        assert_eq!(answer.version, 0);
        let crate::wire::WelcomeBody::Refused(reason) = answer.body else { panic!("accepted") };
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn half_a_message_is_closed_after_a_while() {
    let options = HostOptions {
        handshake_timeout: Duration::from_millis(50),
        idle_timeout: Duration::from_millis(50),
        ..HostOptions::new("c")
    };
    let host = host(options).await;
    let mut silent = TcpStream::connect(host.address()).await.unwrap();
    assert_eq!(closed(&mut silent).await.len(), 0);
    let mut half = TcpStream::connect(host.address()).await.unwrap();
    let hello = with_length(&hello());
    half.write_all(&hello[..10]).await.unwrap();
    assert_eq!(closed(&mut half).await.len(), 0);
    let mut half = TcpStream::connect(host.address()).await.unwrap();
    half.write_all(&hello).await.unwrap();
    half.write_all(&[200, 0, 0, 0, 1]).await.unwrap();
    assert!(!closed(&mut half).await.is_empty(), "the welcome");
}

#[tokio::test]
async fn garbage_after_the_handshake_closes_the_connection() {
    let host = host(HostOptions::new("c")).await;
    let mut damaged = with_length(&encode(&ClientMessage::Ping));
    damaged[5] ^= 1;
    let huge = (2_u32 << 20) + 1;
    let unknown = [5_u32.to_le_bytes(), crc32c::crc32c(&[9]).to_le_bytes()].concat();
    let unknown = [unknown, vec![9]].concat();
    let twice = [1, 2].map(|_| {
        let watch = ClientMessage::Watch { id: 1, prefix: String::new(), after: Revision(0) };
        with_length(&encode(&watch))
    });
    for garbage in [&damaged[..], &huge.to_le_bytes(), &unknown, &[0; 4], &twice.concat()] {
        let mut stream = connect(&host).await.into_inner();
        stream.write_all(garbage).await.unwrap();
        closed(&mut stream).await;
    }
    serves(&host).await;
}

#[tokio::test]
async fn requests_out_of_bounds_get_an_error_and_the_connection_goes_on() {
    let host = host(HostOptions::new("c")).await;
    let mut client = connect(&host).await;
    let many = Transaction {
        guards: Vec::new(),
        changes: (0..1000).map(|n| Change::Delete(n.to_string())).collect(),
    };
    let requests = [
        Request::Get(String::new()),
        Request::Get("k".repeat(100_000)),
        Request::Commit(many),
        Request::Grant(Duration::MAX),
        Request::List(ListRequest { limit: usize::MAX, ..ListRequest::new("") }),
    ];
    for (id, request) in requests.into_iter().enumerate() {
        let id = id as u64;
        client.send(encode(&ClientMessage::Call(id, request))).await.unwrap();
        let answer = next(&mut client).await;
        let HostMessage::Answer(of, Err(Error::Invalid(_))) = answer else { panic!("{answer:?}") };
        assert_eq!(of, id);
    }
    for unknown in [ClientMessage::Cancel(77), ClientMessage::Taken { id: 77, bytes: u64::MAX }] {
        client.send(encode(&unknown)).await.unwrap();
    }
    client.send(encode(&ClientMessage::Call(9, Request::Get("a".to_owned())))).await.unwrap();
    assert_eq!(next(&mut client).await, HostMessage::Answer(9, Ok(Answer::Entry(None))));
}

#[tokio::test]
async fn thousands_of_watches_are_refused_beyond_the_bound() {
    let host = host(HostOptions::new("c")).await;
    let (mut sink, mut stream) = connect(&host).await.split();
    let send = async {
        for id in 0..5000 {
            let watch = ClientMessage::Watch { id, prefix: "a".to_owned(), after: Revision(0) };
            sink.send(encode(&watch)).await.unwrap();
        }
        sink.send(encode(&ClientMessage::Call(9999, Request::Get("a".to_owned())))).await.unwrap();
    };
    let receive = async {
        let mut refused = 0;
        loop {
            match decode(&stream.next().await.unwrap().unwrap()).unwrap() {
                HostMessage::WatchEnded(_, Error::Full(_)) => refused += 1,
                HostMessage::Answer(9999, _) => return refused,
                HostMessage::Ping => {}
                message => panic!("{message:?}"),
            }
        }
    };
    let (refused, ()) = futures::join!(receive, send);
    assert_eq!(refused, 5000 - 64);
    serves(&host).await;
}

#[tokio::test]
async fn connections_beyond_the_bound_get_the_reason_and_a_free_slot_is_reused() {
    let host = host(HostOptions { max_connections: 2, ..HostOptions::new("c") }).await;
    let (first, _second) = (connect(&host).await, connect(&host).await);
    let mut third = TcpStream::connect(host.address()).await.unwrap();
    let refusal = Welcome::decode(&closed(&mut third).await[4..]).unwrap();
    assert_eq!(refusal, Welcome::refused("the host has 2 connections and takes no more".into()));
    drop(first);
    serves(&host).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_is_closed_and_frees_the_memory_of_all() {
    let options = HostOptions {
        memory_bytes: 12 << 20,
        write_timeout: Duration::from_millis(200),
        ..HostOptions::new("c")
    };
    let host = host(options).await;
    let mut client = connect(&host).await;
    client.send(encode(&ClientMessage::Call(1, Request::Commit(put("a", 1 << 20))))).await.unwrap();
    assert!(matches!(next(&mut client).await, HostMessage::Answer(1, Ok(_))));
    // Their answers take more than the buffers of the socket hold. The host closes the connection,
    // so that a send may fail.
    for id in 2..200 {
        let get = ClientMessage::Call(id, Request::Get("a".to_owned()));
        if client.send(encode(&get)).await.is_err() {
            break;
        }
    }
    serves(&host).await;
}
