use std::sync::atomic::AtomicUsize;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use super::*;
use crate::protocol::{Command, option};
use crate::testing::{Bench, Client, TestDisk, info_data, put_option, value};

fn bench(options: Options) -> Bench {
    Bench::new(TestDisk::new(1 << 20), options)
}

#[tokio::test(start_paused = true)]
async fn a_slow_handshake_is_ended() {
    let bench = bench(Options::default());
    let mut bytes = vec![0, 0, 0, 3];
    put_option(&mut bytes, option::GO, &info_data("disk", &[]));
    for sent in 0..bytes.len() {
        let (mut stream, serving) = bench.open(1024);
        let began = tokio::time::Instant::now();
        // Each byte is progress, which does not count.
        for byte in &bytes[..sent] {
            stream.write_all(&[*byte]).await.unwrap();
            sleep(Duration::from_millis(200)).await;
        }
        serving.await.unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(10), "{sent}");
    }
    assert_eq!(value(&bench.counters().failed_handshakes), bytes.len() as u64);
    assert_eq!(value(&bench.counters().open_connections), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_receive_the_greeting_or_a_list_is_ended() {
    let bench = bench(Options::default());
    for number in 0..100 {
        let disk = TestDisk::new(1);
        bench.exports.add(&format!("{number:0>1000}"), "", disk).unwrap();
    }
    let (_stream, serving) = bench.open(5);
    serving.await.unwrap();
    let mut bytes = vec![0, 0, 0, 3];
    put_option(&mut bytes, option::LIST, &[]);
    let (mut stream, serving) = bench.open(1024);
    stream.write_all(&bytes).await.unwrap();
    serving.await.unwrap();
    assert_eq!(value(&bench.counters().failed_handshakes), 2);
}

#[tokio::test(start_paused = true)]
async fn a_handshake_in_progress_does_not_keep_a_stopped_server() {
    let bench = bench(Options::default());
    let (stream, serving) = bench.open(1024);
    let mut client = Client::greet(stream).await;
    bench.stop.send_replace(true);
    let replies = client.option(option::LIST, &[]).await;
    assert_eq!(replies[0].1, crate::protocol::option_reply::ERR_SHUTDOWN);
    let began = tokio::time::Instant::now();
    serving.await.unwrap();
    assert_eq!(began.elapsed(), HANDSHAKE_GRACE);
}

#[tokio::test(start_paused = true)]
async fn an_aborted_handshake_is_no_failure() {
    let bench = bench(Options::default());
    let (stream, serving) = bench.open(1024);
    let mut client = Client::greet(stream).await;
    client.option(option::ABORT, &[]).await;
    assert!(client.outcome().await.is_none());
    serving.await.unwrap();
    assert_eq!(value(&bench.counters().failed_handshakes), 0);
    assert_eq!(value(&bench.counters().connections), 1);
}

#[test]
fn exports_have_valid_names_and_sizes() {
    use crate::exports::ExportError;
    let exports = Exports::default();
    let add =
        |name: &str, description: &str, size| exports.add(name, description, TestDisk::new(size));
    assert_eq!(add("a", "", 1), Ok(()));
    assert_eq!(add("a", "", 1), Err(ExportError::Exists("a".into())));
    assert!(matches!(add("", "", 1), Err(ExportError::Text(_))));
    assert!(matches!(add("a\0", "", 1), Err(ExportError::Text(_))));
    assert!(matches!(add(&"x".repeat(4097), "", 1), Err(ExportError::Text(_))));
    assert!(matches!(add("b", &"x".repeat(4097), 1), Err(ExportError::Text(_))));
    assert_eq!(add(&"x".repeat(4096), &"x".repeat(4096), i64::MAX as u64), Ok(()));
    assert_eq!(add("c", "", 1 << 63), Err(ExportError::Size("c".into(), 1 << 63)));
    assert_eq!(exports.list().len(), 2);
}

/// A connection over a socket, after the handshake.
async fn over_a_socket<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S) {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).await.unwrap();
    let mut bytes = vec![0, 0, 0, 3];
    put_option(&mut bytes, option::EXPORT_NAME, b"disk");
    stream.write_all(&bytes).await.unwrap();
    let mut size_and_flags = [0; 10];
    stream.read_exact(&mut size_and_flags).await.unwrap();
    assert_eq!(size_and_flags[..8], (1_u64 << 20).to_be_bytes());
}

fn request(command: Command) -> [u8; 28] {
    crate::protocol::Request { flags: 0, kind: command as u16, cookie: 1, at: 0, len: 1 }.encode()
}

#[tokio::test]
async fn unix_sockets_and_tcp_share_the_bounds_of_a_server() {
    let bench = bench(Options { max_connections: 2, ..Options::default() });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let unix = UnixListener::bind(&path).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let stop = watch::Sender::new(false);
    let mut serving = JoinSet::new();
    for listener in [Listener::from(unix), Listener::from(tcp)] {
        let (server, mut stop) = (bench.server.clone(), stop.subscribe());
        serving.spawn(async move {
            let stopped = async {
                stop.wait_for(|stop| *stop).await.unwrap();
            };
            server.serve(listener, stopped).await;
        });
    }
    let mut by_unix = UnixStream::connect(&path).await.unwrap();
    over_a_socket(&mut by_unix).await;
    let mut by_tcp = TcpStream::connect(address).await.unwrap();
    over_a_socket(&mut by_tcp).await;
    let mut refused = TcpStream::connect(address).await.unwrap();
    assert_eq!(refused.read(&mut [0; 1]).await.unwrap(), 0);
    assert_eq!(value(&bench.counters().refused_connections), 1);
    for stream in [&mut by_unix as &mut (dyn AsyncWrite + Unpin), &mut by_tcp] {
        stream.write_all(&request(Command::Read)).await.unwrap();
    }
    let mut reply = [0; 17];
    by_unix.read_exact(&mut reply).await.unwrap();
    by_tcp.read_exact(&mut reply).await.unwrap();
    stop.send_replace(true);
    assert_eq!(by_unix.read(&mut reply).await.unwrap(), 0);
    assert_eq!(by_tcp.read(&mut reply).await.unwrap(), 0);
    drop((by_unix, by_tcp));
    while let Some(ended) = serving.join_next().await {
        ended.unwrap();
    }
    assert!(TcpStream::connect(address).await.is_err());
    assert_eq!(value(&bench.counters().open_connections), 0);
}

#[tokio::test]
async fn a_disk_that_does_not_answer_keeps_a_server_for_the_grace_only() {
    let bench = bench(Options { grace: Duration::from_millis(50), ..Options::default() });
    bench.disk.hold.send_replace(Some(0));
    let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let server = bench.server.clone();
    let serving = tokio::spawn(async move {
        let stopped = async {
            stopped.await.unwrap();
        };
        server.serve(tcp, stopped).await;
    });
    let mut stream = TcpStream::connect(address).await.unwrap();
    over_a_socket(&mut stream).await;
    stream.write_all(&request(Command::Read)).await.unwrap();
    while bench.disk.calls.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    stop.send(()).unwrap();
    serving.await.unwrap();
    let dropped: &AtomicUsize = &bench.disk.dropped;
    assert_eq!(dropped.load(std::sync::atomic::Ordering::Relaxed), 1);
    assert_eq!(value(&bench.counters().bytes_in_flight), 0);
}
