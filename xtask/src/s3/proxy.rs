//! A proxy between the server and its object store that injects the faults of networks and busy
//! servers, driven by a seed.

use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::rng::Rng;
use crate::web::accept;

/// One request in this many meets a fault.
const FAULT_EVERY: u64 = 8;
/// Longer than the server waits for the answer to any request other than the completion of an
/// object.
const STALL: Duration = Duration::from_secs(40);

const METHODS: [&[u8]; 5] = [b"GET ", b"PUT ", b"POST ", b"DELETE ", b"HEAD "];

/// The current treatment of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NetworkState {
    /// All requests pass.
    Healthy,
    /// All requests pass, each delayed by this time, however many are concurrent.
    Delayed(Duration),
    /// Some requests meet a fault.
    Faulty,
    /// Each connection is closed immediately.
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Unavailable,
    TooMany,
    Slow,
    CutRequest,
    CutAnswer,
    Stall,
}

const FAULTS: [Fault; 6] = [
    Fault::Unavailable,
    Fault::TooMany,
    Fault::Slow,
    Fault::CutRequest,
    Fault::CutAnswer,
    Fault::Stall,
];

struct State {
    upstream: SocketAddr,
    network: Mutex<NetworkState>,
    rng: Mutex<Rng>,
    requests: AtomicU64,
    faults: [AtomicU64; FAULTS.len()],
    ended: Arc<AtomicBool>,
}

/// Listens on loopback until it is dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

impl Proxy {
    pub(crate) fn start(upstream: SocketAddr, seed: u64) -> Result<Self, Error> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(State {
            upstream,
            network: Mutex::new(NetworkState::Healthy),
            rng: Mutex::new(Rng::new(seed)),
            requests: AtomicU64::new(0),
            faults: Default::default(),
            ended: Arc::default(),
        });
        let serving = state.clone();
        accept(listener, move |client| State::serve(&serving, client), state.ended.clone());
        Ok(Self { address, state })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn set(&self, network: NetworkState) {
        *self.state.network.lock().expect("no thread panics with the lock held") = network;
    }

    /// Number of requests that have met a fault.
    pub(crate) fn faults(&self) -> u64 {
        self.state.faults.iter().map(|count| count.load(Ordering::SeqCst)).sum()
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests", self.state.requests.load(Ordering::SeqCst))?;
        for (fault, count) in FAULTS.iter().zip(&self.state.faults) {
            write!(f, ", {fault:?} {}", count.load(Ordering::SeqCst))?;
        }
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

impl State {
    fn network(&self) -> NetworkState {
        *self.network.lock().expect("no thread panics with the lock held")
    }

    fn below(&self, end: u64) -> u64 {
        self.rng.lock().expect("no thread panics with the lock held").below(end)
    }

    /// Chooses the fault of the next request. Stalls take long, so they are rare.
    fn next_fault(&self) -> Option<Fault> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        if self.network() != NetworkState::Faulty || self.below(FAULT_EVERY) > 0 {
            return None;
        }
        let mut at = self.below(FAULTS.len() as u64) as usize;
        if FAULTS[at] == Fault::Stall && self.below(6) > 0 {
            at = 0;
        }
        self.faults[at].fetch_add(1, Ordering::SeqCst);
        Some(FAULTS[at])
    }

    fn serve(self: &Arc<Self>, mut client: TcpStream) -> std::io::Result<()> {
        if self.network() == NetworkState::Down {
            return Ok(());
        }
        let mut upstream = TcpStream::connect(self.upstream)?;
        client.set_nodelay(true)?;
        upstream.set_nodelay(true)?;
        // Bytes of the responses that may pass before the connection is cut.
        let answer_bytes = Arc::new(AtomicI64::new(i64::MAX));
        let answers = (upstream.try_clone()?, client.try_clone()?, answer_bytes.clone());
        let state = self.clone();
        thread::spawn(move || {
            let (mut upstream, mut client, left) = answers;
            drop(state.pass_answers(&mut upstream, &mut client, &left));
            close(&upstream, &client);
        });
        let passed = self.pass_requests(&mut client, &mut upstream, &answer_bytes);
        close(&upstream, &client);
        passed
    }

    fn pass_answers(
        &self,
        upstream: &mut TcpStream,
        client: &mut TcpStream,
        left: &AtomicI64,
    ) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = upstream.read(&mut buffer)?;
            let passing = left.fetch_sub(read as i64, Ordering::SeqCst).clamp(0, read as i64);
            client.write_all(&buffer[..passing as usize])?;
            if read == 0 || (passing as usize) < read || self.network() == NetworkState::Down {
                return Ok(());
            }
        }
    }

    fn pass_requests(
        &self,
        client: &mut TcpStream,
        upstream: &mut TcpStream,
        answer_bytes: &AtomicI64,
    ) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let read = client.read(&mut buffer)?;
            if read == 0 || self.network() == NetworkState::Down {
                return Ok(());
            }
            // The client sends a request only after the answer to the previous one, so a request
            // starts where a read starts.
            let begun = &buffer[..read];
            let is_request = METHODS.iter().any(|method| begun.starts_with(method));
            let mut passing = read;
            match is_request.then(|| self.next_fault()).flatten() {
                None => {
                    if let (true, NetworkState::Delayed(time)) = (is_request, self.network()) {
                        thread::sleep(time);
                    }
                }
                Some(Fault::Unavailable) => return refuse(client, "503 Service Unavailable"),
                Some(Fault::TooMany) => return refuse(client, "429 Too Many Requests"),
                Some(Fault::Slow) => thread::sleep(Duration::from_millis(100 + self.below(1500))),
                Some(Fault::CutRequest) => passing = self.below(read as u64) as usize,
                Some(Fault::CutAnswer) => {
                    answer_bytes.store(self.below(300) as i64, Ordering::SeqCst);
                }
                Some(Fault::Stall) => return self.stall(),
            }
            upstream.write_all(&buffer[..passing])?;
            if passing < read {
                return Ok(());
            }
        }
    }

    /// Lets nothing more pass for a long time.
    fn stall(&self) -> std::io::Result<()> {
        let until = Instant::now() + STALL;
        while Instant::now() < until && !self.ended.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

fn refuse(client: &mut TcpStream, status: &str) -> std::io::Result<()> {
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    client.write_all(answer.as_bytes())?;
    client.shutdown(Shutdown::Write)?;
    // The rest of the request is read so that a reset does not destroy the answer.
    client.set_read_timeout(Some(Duration::from_millis(500)))?;
    std::io::copy(client, &mut std::io::sink()).map(drop)
}

fn close(one: &TcpStream, other: &TcpStream) {
    // Either may be closed already.
    let _ = one.shutdown(Shutdown::Both);
    let _ = other.shutdown(Shutdown::Both);
}
