//! A service at another process's port: `docs/format/coordination-wire.md`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use crate::wire::{Answer, ClientMessage, MAX_CLIENT_BYTES, Request, encode};
use crate::{
    Changes, Conflict, Coordination, Entry, Error, Identity, Lease, LeaseId, ListRequest, Page,
    Result, Revision, Transaction, check_key, check_prefix, granted_ttl,
};

mod connection;
#[cfg(test)]
mod tests;

use connection::{Broken, Connection, OpenWatch, WatchFrame, dial};

/// The first and the longest pause between attempts to connect.
const BACK_OFF: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// A connection counts as one once it was open for this time.
const STEADY: Duration = Duration::from_secs(1);

/// The options of a client.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// The cluster that the client expects.
    pub cluster: String,
    /// The host's address: `HOST:PORT`.
    pub address: String,
    /// The time within which an operation ends, with a result or an error. It includes reconnects.
    pub deadline: Duration,
    /// The time for an attempt to connect, with its handshake.
    pub connect_timeout: Duration,
    /// The time after which a connection on which the host sends nothing is closed. Hosts send
    /// something each second.
    pub idle_timeout: Duration,
}

impl RemoteOptions {
    /// Returns the default options.
    pub fn new(cluster: impl Into<String>, address: impl Into<String>) -> Self {
        Self {
            cluster: cluster.into(),
            address: address.into(),
            deadline: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(5),
        }
    }
}

/// A client of a [`crate::Host`].
///
/// A task connects, and connects again with back-off when the connection ends. Operations wait for
/// a connection until their deadline; then they end with [`Error::Unavailable`], which names the
/// address and the last failure. Reads and renewals are sent again on the next connection. A
/// change whose connection ends before its answer is not: it ends with [`Error::Unknown`]. Watches
/// have no deadline, and continue on the next connection after the last revision that they
/// returned.
///
/// If the host has another [`Identity`] than before, or a lower revision than this client has seen,
/// every operation and watch ends with [`Error::Replaced`] from then on.
pub struct Remote {
    shared: Arc<Shared>,
    task: AbortHandle,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

#[derive(Clone)]
enum Link {
    /// Not connected, and why.
    Down(String),
    Up(Arc<Connection>),
    /// There will be no other connection.
    Ended(Error),
}

struct Shared {
    options: RemoteOptions,
    link: watch::Sender<Link>,
    identity: Mutex<Option<Identity>>,
    /// The greatest revision that the host has shown.
    seen: AtomicU64,
    next_id: AtomicU64,
}

impl Remote {
    /// Returns a client, which connects in the background. Runs in a runtime of tokio.
    #[must_use]
    pub fn new(options: RemoteOptions) -> Self {
        let (link, _) = watch::channel(Link::Down("no attempt to connect has ended".to_owned()));
        let shared = Arc::new(Shared {
            options,
            link,
            identity: Mutex::default(),
            seen: AtomicU64::new(0),
            next_id: AtomicU64::new(1),
        });
        let task = tokio::spawn(keep_connected(shared.clone())).abort_handle();
        Self { shared, task }
    }

    async fn call(&self, request: Request) -> Result<Answer> {
        let shared = &self.shared;
        let (is_change, id) = (request.is_change(), shared.next_id());
        let frame = encode(&ClientMessage::Call(id, request));
        if frame.len() > MAX_CLIENT_BYTES {
            let bytes = frame.len();
            return Err(Error::Invalid(format!(
                "a request has {bytes} bytes, and at most {MAX_CLIENT_BYTES} are allowed"
            )));
        }
        let is_sent = AtomicBool::new(false);
        let address = &shared.options.address;
        let attempts = async {
            loop {
                let connection = shared.connected().await?;
                match connection.call(id, frame.clone(), &is_sent).await {
                    Ok(answer) => return answer,
                    Err(Broken(reason)) if is_change && is_sent.load(Ordering::Relaxed) => {
                        return Err(Error::Unknown(format!(
                            "the connection to {address} ended before the answer: {reason}"
                        )));
                    }
                    Err(Broken(_)) => {}
                }
            }
        };
        let limit = shared.options.deadline;
        match timeout(limit, attempts).await {
            Ok(answer) => answer,
            Err(_) if is_sent.load(Ordering::Relaxed) && is_change => {
                Err(Error::Unknown(format!("{address} has not answered within {limit:?}")))
            }
            Err(_) => Err(shared.unavailable()),
        }
    }

    fn unexpected<T>(&self) -> Result<T> {
        // The host has answered, but not what was asked: whether it did it is unknown.
        let address = &self.shared.options.address;
        Err(Error::Unknown(format!("{address} has answered another operation")))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.end(Error::Unavailable("the client was closed".to_owned()));
    }
}

impl Shared {
    fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Waits for a connection.
    async fn connected(&self) -> Result<Arc<Connection>> {
        let mut link = self.link.subscribe();
        let up = |link: &Link| match link {
            Link::Up(connection) => connection.is_open(),
            Link::Down(_) => false,
            Link::Ended(_) => true,
        };
        let link = link.wait_for(up).await.expect("the sender is in the shared state");
        match &*link {
            Link::Up(connection) => Ok(connection.clone()),
            Link::Ended(error) => Err(error.clone()),
            Link::Down(_) => unreachable!("waited for another state"),
        }
    }

    fn unavailable(&self) -> Error {
        let RemoteOptions { cluster, address, deadline, .. } = &self.options;
        let what = match &*self.link.borrow() {
            Link::Down(reason) => format!("no connection: {reason}"),
            Link::Up(_) => "the host does not answer".to_owned(),
            Link::Ended(error) => return error.clone(),
        };
        Error::Unavailable(format!(
            "the host of cluster {cluster} at {address} was tried for {deadline:?}: {what}"
        ))
    }

    /// Ends all operations and watches, now and later.
    fn end(&self, error: Error) {
        self.link.send_replace(Link::Ended(error));
    }

    fn saw(&self, revision: Revision) {
        self.seen.fetch_max(revision.0, Ordering::Relaxed);
    }

    /// Checks that the host has the history that this client has used.
    fn check(&self, found: Identity, revision: Revision) -> Result<()> {
        let address = &self.options.address;
        let known = *self.identity.lock().get_or_insert(found);
        if known != found {
            return Err(Error::Replaced(format!(
                "{address} served {known}, and now serves {found}; restart this process if that is \
                 intended"
            )));
        }
        let seen = Revision(self.seen.load(Ordering::Relaxed));
        if revision < seen {
            return Err(Error::Replaced(format!(
                "{address} is at revision {revision}, and was at {seen} before: it was set back, \
                 and the restore was not recorded"
            )));
        }
        self.saw(revision);
        Ok(())
    }
}

/// Connects and serves the connection, again and again.
async fn keep_connected(shared: Arc<Shared>) {
    let [first, longest] = BACK_OFF;
    let mut pause = first;
    // Users of the service log an outage with its effect. Here it is logged once, with its first
    // reason.
    let mut is_away = false;
    loop {
        let reason = match dial(&shared.options).await {
            Ok((dialed, identity, revision)) => {
                if let Err(error) = shared.check(identity, revision) {
                    tracing::error!(%error, "coordination is not used any more");
                    return shared.end(error);
                }
                let (connection, running) = Connection::start(dialed, &shared.options);
                shared.link.send_replace(Link::Up(connection.clone()));
                tokio::pin!(running);
                let reason = match timeout(STEADY, &mut running).await {
                    Ok(reason) => reason,
                    Err(_) => {
                        pause = first;
                        if std::mem::take(&mut is_away) {
                            let address = &shared.options.address;
                            tracing::debug!(address, "coordination is connected again");
                        }
                        running.await
                    }
                };
                connection.close(&reason);
                reason
            }
            Err(reason) => reason,
        };
        if !std::mem::replace(&mut is_away, true) {
            let address = &shared.options.address;
            tracing::debug!(address, reason, "coordination is not connected");
        }
        shared.link.send_replace(Link::Down(reason));
        // Clients that lost the same host do not return all at once.
        let random = uuid::Uuid::new_v4().as_bytes()[0];
        sleep(pause * (192 + u32::from(random) / 2) / 256).await;
        pause = (pause * 2).min(longest);
    }
}

#[async_trait]
impl Coordination for Remote {
    async fn identity(&self) -> Result<Identity> {
        match timeout(self.shared.options.deadline, self.shared.connected()).await {
            Ok(connected) => drop(connected?),
            Err(_) => return Err(self.shared.unavailable()),
        }
        Ok(self.shared.identity.lock().expect("known once connected"))
    }

    async fn get(&self, key: &str) -> Result<Option<Entry>> {
        check_key(key)?;
        match self.call(Request::Get(key.to_owned())).await? {
            Answer::Entry(entry) => {
                entry.iter().for_each(|entry| self.shared.saw(entry.modified));
                Ok(entry)
            }
            _ => self.unexpected(),
        }
    }

    async fn list(&self, request: &ListRequest) -> Result<Page> {
        request.check()?;
        match self.call(Request::List(request.clone())).await? {
            Answer::Page(page) => {
                self.shared.saw(page.revision);
                Ok(page)
            }
            _ => self.unexpected(),
        }
    }

    async fn commit(
        &self,
        transaction: &Transaction,
    ) -> Result<std::result::Result<Revision, Conflict>> {
        transaction.check()?;
        match self.call(Request::Commit(transaction.clone())).await? {
            Answer::Committed(answer) => {
                self.shared.saw(match &answer {
                    Ok(revision) => *revision,
                    Err(conflict) => conflict.revision,
                });
                Ok(answer)
            }
            _ => self.unexpected(),
        }
    }

    fn watch(&self, prefix: &str, after: Revision) -> BoxStream<'static, Result<Changes>> {
        let shared = self.shared.clone();
        let watch = Watch { shared, prefix: prefix.to_owned(), after, open: None };
        stream::try_unfold(watch, |mut watch| async {
            let changes = watch.next().await?;
            Ok(Some((changes, watch)))
        })
        .boxed()
    }

    async fn grant(&self, ttl: Duration) -> Result<Lease> {
        granted_ttl(ttl)?;
        match self.call(Request::Grant(ttl)).await? {
            Answer::Lease(lease) => Ok(lease),
            _ => self.unexpected(),
        }
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<()> {
        match self.call(Request::KeepAlive(lease)).await? {
            Answer::Done => Ok(()),
            _ => self.unexpected(),
        }
    }

    async fn revoke(&self, lease: LeaseId) -> Result<()> {
        match self.call(Request::Revoke(lease)).await? {
            Answer::Done => Ok(()),
            _ => self.unexpected(),
        }
    }
}

struct Watch {
    shared: Arc<Shared>,
    prefix: String,
    after: Revision,
    open: Option<OpenWatch>,
}

impl Watch {
    async fn next(&mut self) -> Result<Changes> {
        check_prefix(&self.prefix)?;
        // The parts of a revision; they begin again with each connection.
        let mut events = Vec::new();
        loop {
            let Some(open) = &mut self.open else {
                let connection = self.shared.connected().await?;
                let id = self.shared.next_id();
                events.clear();
                // If the connection has ended, the next one is waited for.
                self.open = connection.watch(id, &self.prefix, self.after).ok();
                continue;
            };
            match open.next().await {
                None => self.open = None,
                Some(WatchFrame::Ended(error)) => return Err(error),
                Some(WatchFrame::Part { revision, events: part, more, .. }) => {
                    events.extend(part);
                    if !more {
                        self.after = revision;
                        self.shared.saw(revision);
                        return Ok(Changes { revision, events });
                    }
                }
            }
        }
    }
}
