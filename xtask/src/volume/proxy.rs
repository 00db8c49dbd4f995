//! The network between servers and clients: a proxy in front of each server, which can stop and
//! refuse the traffic of one pair.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::SERVERS;
use crate::Error;

/// Bytes of a handshake, and the position of the dialer's server id in it:
/// `docs/format/volume-wire.md`, section 2.
const HELLO_BYTES: usize = 128;
const HELLO_SERVER: std::ops::Range<usize> = 32..36;
/// The interval at which a connection notices a change of its link.
const POLL: Duration = Duration::from_millis(5);

/// What happens to the connections from one dialer to one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Open,
    /// Bytes to the server are held back; those from it arrive.
    HoldsToServer,
    /// Bytes from the server are held back; those to it arrive.
    HoldsFromServer,
    /// Bytes are held back in both directions.
    HoldsBoth,
    /// Connections are closed, and new ones too.
    Refuses,
}

/// The links by server and dialer. Dialer 0 is every client, dialer `i` server `i`.
type Links = Arc<Mutex<[[Link; SERVERS + 1]; SERVERS]>>;

/// The proxies of all servers.
pub(super) struct Network {
    links: Links,
    routes: Vec<(SocketAddr, SocketAddr)>,
    listeners: Vec<Option<Arc<AtomicBool>>>,
}

impl Network {
    /// A proxy for each server, from its advertised address to the one it listens on. None accepts
    /// connections yet.
    pub(super) fn new(routes: Vec<(SocketAddr, SocketAddr)>) -> Self {
        let links = Links::new(Mutex::new([[Link::Open; SERVERS + 1]; SERVERS]));
        let listeners = routes.iter().map(|_| None).collect();
        Self { links, routes, listeners }
    }

    /// Accepts connections to a server from now on.
    pub(super) fn open(&mut self, server: usize) -> Result<(), Error> {
        let (advertised, listen) = self.routes[server];
        let listener = TcpListener::bind(advertised)?;
        listener.set_nonblocking(true)?;
        let links = Arc::clone(&self.links);
        let is_open = Arc::new(AtomicBool::new(true));
        self.listeners[server] = Some(Arc::clone(&is_open));
        thread::spawn(move || {
            while is_open.load(Ordering::Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(POLL);
                    continue;
                };
                let links = Arc::clone(&links);
                // A connection that fails is closed, which its ends notice.
                thread::spawn(move || drop(connection(stream, listen, server, &links)));
            }
            drop(listener);
            is_open.store(true, Ordering::Release);
        });
        Ok(())
    }

    /// Refuses connections to a server, as the system does when the process has ended. That proves
    /// to the others that it has.
    pub(super) fn close(&mut self, server: usize) {
        if let Some(is_open) = self.listeners[server].take() {
            is_open.store(false, Ordering::Relaxed);
            while !is_open.load(Ordering::Acquire) {
                thread::sleep(POLL);
            }
        }
    }

    /// Sets the link from a dialer to a server; servers are counted from 0 and are dialer `i + 1`.
    pub(super) fn set(&self, server: usize, dialer: usize, link: Link) {
        self.links.lock().expect("no holder panics")[server][dialer] = link;
    }

    /// Opens all links.
    pub(super) fn open_all(&self) {
        *self.links.lock().expect("no holder panics") = [[Link::Open; SERVERS + 1]; SERVERS];
    }
}

fn connection(
    mut dialer: TcpStream,
    listen: SocketAddr,
    server: usize,
    links: &Links,
) -> std::io::Result<()> {
    let mut hello = [0; HELLO_BYTES];
    dialer.read_exact(&mut hello)?;
    let id = u32::from_le_bytes(hello[HELLO_SERVER].try_into().expect("four bytes")) as usize;
    // The servers register in their order, and so get the ids 1, 2 and 3.
    let id = if id <= SERVERS { id } else { 0 };
    let link = || links.lock().expect("no holder panics")[server][id];
    if link() == Link::Refuses {
        return Ok(());
    }
    let mut accepted = TcpStream::connect(listen)?;
    for stream in [&dialer, &accepted] {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(POLL))?;
    }
    while matches!(link(), Link::HoldsToServer | Link::HoldsBoth) {
        thread::sleep(POLL);
    }
    accepted.write_all(&hello)?;
    thread::scope(|scope| {
        scope.spawn(|| {
            pump(&dialer, &accepted, || match link() {
                Link::Refuses => None,
                link => Some(matches!(link, Link::HoldsToServer | Link::HoldsBoth)),
            });
        });
        pump(&accepted, &dialer, || match link() {
            Link::Refuses => None,
            link => Some(matches!(link, Link::HoldsFromServer | Link::HoldsBoth)),
        });
    });
    Ok(())
}

/// Forwards bytes until an end closes or the link is refused. `held` says whether bytes are held
/// back; `None` ends the connection.
fn pump(mut from: &TcpStream, mut to: &TcpStream, held: impl Fn() -> Option<bool>) {
    let mut buffer = vec![0; 64 << 10];
    'connection: loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock) => 0,
            Err(_) => break,
        };
        loop {
            match held() {
                None => break 'connection,
                Some(true) if count > 0 => thread::sleep(POLL),
                Some(_) => break,
            }
        }
        if count > 0 && to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // Both ends learn of it; they may be closed already.
    for stream in [from, to] {
        drop(stream.shutdown(Shutdown::Both));
    }
}
