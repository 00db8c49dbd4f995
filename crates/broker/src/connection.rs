//! A client connection. Requests are handled one after the other, and responses are sent in the
//! same order.
//!
//! A request takes effect before the next one is handled. Only the wait for durability of a produce
//! request runs concurrently with later requests: its response keeps its position in the response
//! queue. This wait ends some time after the client has closed its side, even if the response queue
//! is full and nothing is read; appended batches become durable all the same.
//!
//! A client's disconnect does not cancel a handler, nor does a stopping server before its whole
//! grace period is over. The exceptions are long-polling requests that are safe to cancel
//! ([`api::is_cancellable`]): objects are not read for a client that is gone, and its connection
//! becomes free.

mod frame;
mod split;

use std::future::pending;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Buf;
use futures::future::BoxFuture;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};

use crate::api::{self, Answer, Api, Refused, Served};
use crate::security::{Listener, Peer, Principal, TlsError};
use crate::server::{ByteBudget, Server};
use crate::wire::response::{EncodeError, Response};

pub(crate) use frame::{Frame, read_frame};
use split::Incoming;

/// The limits on a connection's responses that are waiting to be completed or written: their number
/// and their bytes. A response larger than the limit waits alone.
const MAX_UNWRITTEN: usize = 64;
const MAX_UNWRITTEN_BYTES: u64 = 256 << 10;

/// While other connections wait for response or request memory, a client must receive or send its
/// own at this rate at least, measured over a tenth of the transfer timeout.
const LEAST_BYTES_PER_SECOND: f64 = 65_536.0;

const READ_BUFFER_BYTES: usize = 2 << 10;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    #[error("the client closed the connection")]
    Closed,
    #[error("the server is stopping")]
    Stopping,
    #[error(
        "responses were incomplete some time after the client closed the connection or the server \
         began to stop"
    )]
    Abandoned,
    #[error("no request arrived within the idle timeout")]
    Idle,
    #[error("a request did not arrive in time or fast enough")]
    SlowRequest,
    #[error("a response was not received in time or fast enough")]
    SlowResponse,
    #[error("a request announced {0} bytes, which is not allowed")]
    BadLength(i32),
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("a produce request with acks=0 failed")]
    FailedUnacknowledged,
    #[error("{0}")]
    Encode(#[from] EncodeError),
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl End {
    /// The label for the metric of connections that the server closed; `None` for ordinary ends.
    fn reason(&self) -> Option<&'static str> {
        match self {
            Self::Closed | Self::Stopping | Self::Abandoned | Self::Io(_) => None,
            Self::Idle => Some("idle"),
            Self::SlowRequest => Some("slow_request"),
            Self::SlowResponse => Some("slow_response"),
            Self::BadLength(_) => Some("bad_length"),
            Self::Tls(_) => Some("tls"),
            Self::Refused(Refused::UnknownApi(_)) => Some("unknown_api"),
            Self::Refused(Refused::UnsupportedVersion { .. }) => Some("unsupported_version"),
            Self::Refused(Refused::Unauthenticated) => Some("unauthenticated"),
            Self::Refused(Refused::Malformed(_)) => Some("malformed"),
            Self::Refused(Refused::Encode(_)) | Self::Encode(_) => Some("encode"),
            Self::FailedUnacknowledged => Some("failed_unacknowledged"),
        }
    }
}

/// A response in the connection's queue.
struct Outgoing {
    api: &'static Api,
    received: Instant,
    content: Content,
    /// A share of the connection's limit on bytes.
    _unwritten: OwnedSemaphorePermit,
    /// A share of the server's budget.
    _budget: Option<OwnedSemaphorePermit>,
}

enum Content {
    Ready(Response),
    Later(BoxFuture<'static, Result<Response, EncodeError>>),
}

/// Serves a connection until either side ends it.
pub(crate) async fn serve(
    server: Arc<Server>,
    listener: Arc<Listener>,
    socket: TcpStream,
    addr: SocketAddr,
) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY not set");
    }
    let peer = |principal| Arc::new(Peer::new(listener.clone(), addr.ip(), principal));
    let end = match &listener.tls {
        None => {
            let (reader, writer) = socket.into_split();
            run(&server, peer(Principal::anonymous()), reader, writer).await
        }
        Some(tls) => match tls.accept(socket, !listener.config.sasl.is_empty()).await {
            Ok((stream, principal)) => {
                let (reader, writer) = split::split(stream);
                run(&server, peer(principal), reader, writer).await
            }
            Err(error) => error.into(),
        },
    };
    if let Some(reason) = end.reason() {
        server.metrics.closed(reason);
    }
    if let End::Encode(_) | End::Refused(Refused::Encode(_)) = end {
        tracing::error!(%addr, %end, "response not encoded");
    } else {
        tracing::debug!(%addr, listener = listener.config.name, %end, "connection ended");
    }
}

/// Handles requests and writes responses until either of them ends, and returns the reason.
async fn run(
    server: &Arc<Server>,
    peer: Arc<Peer>,
    reader: impl Incoming,
    writer: impl AsyncWrite + Unpin,
) -> End {
    let reader = BufReader::with_capacity(READ_BUFFER_BYTES, reader);
    let (outgoing, queue) = mpsc::channel(MAX_UNWRITTEN);
    let (abandon, read_ended) = oneshot::channel();
    let read = async {
        let end = read_all(server, &peer, reader, outgoing).await;
        match end {
            End::Abandoned => drop(abandon.send(())),
            _ => drop(abandon),
        }
        end
    };
    let abandoned = async {
        if read_ended.await.is_err() {
            sleep(server.config.transfer_timeout).await;
        }
    };
    let (read_end, write_end) = tokio::join!(read, write_all(server, writer, queue, abandoned));
    // Not at the server's end: then all locks are dropped, and that must not count as a failed
    // delivery.
    if !server.is_stopping() {
        server.groups.shares().disconnected(peer.connection()).await;
    }
    write_end.err().unwrap_or(read_end)
}

async fn read_all(
    server: &Arc<Server>,
    peer: &Arc<Peer>,
    mut reader: BufReader<impl Incoming>,
    outgoing: mpsc::Sender<Outgoing>,
) -> End {
    let unwritten = ByteBudget::new(MAX_UNWRITTEN_BYTES);
    let mut stopping = pin!(server.stopping());
    loop {
        let frame = tokio::select! {
            frame = read_frame(server, peer, &mut reader) => frame,
            () = &mut stopping => return End::Stopping,
            // The writer has ended.
            () = outgoing.closed() => return End::Closed,
        };
        let frame = match frame {
            Ok(frame) => frame,
            Err(end) => return end,
        };
        let received = Instant::now();
        let is_cancellable = !peer.sends_bare_message() && api::is_cancellable(&frame.bytes);
        let served = tokio::select! {
            biased;
            served = api::serve(server, peer, frame) => served,
            () = disconnected(&mut reader, &outgoing), if is_cancellable => return End::Closed,
        };
        let Served { api, answer, budget, throttle } = match served {
            Ok(served) => served,
            Err(refused) => return refused.into(),
        };
        let mut is_last = false;
        let (held_bytes, content) = match answer {
            Answer::Ready(response) => (response.len_bytes(), Content::Ready(response)),
            Answer::Later { response, held_bytes } => (held_bytes, Content::Later(response)),
            Answer::Last(response) => {
                let last = (response.len_bytes(), Content::Ready(response));
                is_last = true;
                last
            }
            Answer::Nothing => {
                pause_reading(server, throttle, &outgoing).await;
                continue;
            }
            Answer::Close => return End::FailedUnacknowledged,
        };
        let space = async { (unwritten.acquire(held_bytes).await, outgoing.reserve().await) };
        let (_unwritten, slot) = tokio::select! {
            biased;
            space = space => space,
            end = client_abandoned(server, reader.get_ref()) => return end,
        };
        let Ok(slot) = slot else { return End::Closed };
        slot.send(Outgoing { api, received, content, _unwritten, _budget: budget });
        if is_last {
            return Refused::Unauthenticated.into();
        }
        pause_reading(server, throttle, &outgoing).await;
    }
}

/// Pauses reading for `throttle`, or until the writer ends.
async fn pause_reading(server: &Server, throttle: Duration, outgoing: &mpsc::Sender<Outgoing>) {
    if throttle.is_zero() {
        return;
    }
    tokio::select! {
        () = sleep(throttle) => {}
        () = server.stopping() => {}
        () = outgoing.closed() => {}
    }
}

/// Resolves some time after the client has closed its side or the server has begun to stop. It is
/// used while the connection is not read and these would go unnoticed. The end of a client that has
/// sent more than the socket buffer holds is not visible; this resolves after the idle timeout as
/// if the client were silent.
async fn client_abandoned(server: &Server, incoming: &impl Incoming) -> End {
    let transfer_timeout = server.config.transfer_timeout;
    let closed = async {
        loop {
            sleep(transfer_timeout / 10).await;
            if incoming.has_ended() {
                return;
            }
        }
    };
    tokio::select! {
        () = closed => {}
        () = server.stopping() => {}
        () = sleep(server.config.idle_timeout) => return End::Idle,
    }
    sleep(transfer_timeout).await;
    End::Abandoned
}

/// Resolves when the client has disconnected. A client that has sent more requests counts as
/// connected until they are read.
async fn disconnected(
    reader: &mut BufReader<impl AsyncRead + Unpin>,
    outgoing: &mpsc::Sender<Outgoing>,
) {
    let closed = async {
        match reader.fill_buf().await {
            Ok(more) if !more.is_empty() => pending().await,
            _ => {}
        }
    };
    tokio::select! {
        () = closed => {}
        () = outgoing.closed() => {}
    }
}

/// Writes the responses. Once `abandoned` resolves, incomplete responses are dropped: the client
/// has most likely gone.
async fn write_all(
    server: &Server,
    mut writer: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Outgoing>,
    abandoned: impl Future<Output = ()>,
) -> Result<(), End> {
    let mut abandoned = pin!(abandoned);
    while let Some(Outgoing { api, received, content, _unwritten, _budget }) = queue.recv().await {
        let response = match content {
            Content::Ready(response) => response,
            Content::Later(response) => tokio::select! {
                biased;
                response = response => response?,
                () = &mut abandoned => return Ok(()),
            },
        };
        let taken = AtomicUsize::new(0);
        let transfer_timeout = server.config.transfer_timeout;
        let rate = least_rate(response.len_bytes(), transfer_timeout);
        let too_slow =
            is_too_slow(transfer_timeout / 10, rate, &taken, || server.responses_block_others());
        tokio::select! {
            biased;
            written = write_one(server, &mut writer, response, &taken) => written?,
            () = too_slow => {
                return Err(End::SlowResponse);
            }
        }
        server.metrics.answered(api.name, received.elapsed());
    }
    let closed = timeout(server.config.transfer_timeout, writer.shutdown());
    Ok(closed.await.map_err(|_| End::SlowResponse)??)
}

/// The rate in bytes per second at which a response must be received while others wait. Without a
/// higher rate for large responses, they could live much longer than the timeout of one that is not
/// received at all.
fn least_rate(len_bytes: usize, transfer_timeout: Duration) -> f64 {
    LEAST_BYTES_PER_SECOND.max(len_bytes as f64 / transfer_timeout.as_secs_f64())
}

/// Resolves when `moved` grows slower than `least_rate` over a span while others wait for the
/// memory.
async fn is_too_slow(
    span: Duration,
    least_rate: f64,
    moved: &AtomicUsize,
    is_waited_for: impl Fn() -> bool,
) {
    let mut before_bytes = moved.load(Relaxed);
    loop {
        sleep(span).await;
        let moved_bytes = moved.load(Relaxed);
        let rate = (moved_bytes - before_bytes) as f64 / span.as_secs_f64();
        if rate < least_rate && is_waited_for() {
            return;
        }
        before_bytes = moved_bytes;
    }
}

/// Writes the pieces of a response without copying them together.
async fn write_one(
    server: &Server,
    writer: &mut (impl AsyncWrite + Unpin),
    response: Response,
    taken: &AtomicUsize,
) -> Result<(), End> {
    const MAX_SLICES: usize = 64;
    let mut pieces = response.pieces.as_slice();
    let mut written_of_first = 0;
    while let Some(first) = pieces.first() {
        let mut slices = [IoSlice::new(&[]); MAX_SLICES];
        slices[0] = IoSlice::new(&first[written_of_first..]);
        for (slice, piece) in slices[1..].iter_mut().zip(&pieces[1..]) {
            *slice = IoSlice::new(piece);
        }
        let used = pieces.len().min(MAX_SLICES);
        let progress =
            timeout(server.config.transfer_timeout, writer.write_vectored(&slices[..used]));
        let written = progress.await.map_err(|_| End::SlowResponse)??;
        if written == 0 {
            return Err(io::Error::from(io::ErrorKind::WriteZero).into());
        }
        taken.fetch_add(written, Relaxed);
        written_of_first += written;
        while let Some(piece) = pieces.first()
            && written_of_first >= piece.remaining()
        {
            written_of_first -= piece.remaining();
            pieces = &pieces[1..];
        }
    }
    // Sends the bytes that TLS has encrypted and buffered.
    let flushed = timeout(server.config.transfer_timeout, writer.flush());
    Ok(flushed.await.map_err(|_| End::SlowResponse)??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn while_others_wait_a_response_must_reach_a_rate() {
        const KIB: usize = 1 << 10;
        const SPAN: Duration = Duration::from_millis(100);
        let is_disconnected = async |len_bytes: usize, is_waited_for: bool| {
            let taken = AtomicUsize::new(0);
            // At most 13 MiB/s.
            let client = async {
                for _ in 0..200 {
                    sleep(Duration::from_millis(5)).await;
                    taken.fetch_add(64 * KIB, Relaxed);
                }
            };
            let rate = least_rate(len_bytes, 10 * SPAN);
            tokio::select! {
                biased;
                () = client => false,
                () = is_too_slow(SPAN, rate, &taken, || is_waited_for) => true,
            }
        };
        assert!(is_disconnected(100 * KIB * KIB, true).await, "the time is unlimited");
        assert!(!is_disconnected(100 * KIB * KIB, false).await);
        assert!(!is_disconnected(100 * KIB, true).await);
    }
}
