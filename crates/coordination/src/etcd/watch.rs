//! Watches of etcd: whole revisions, in order, over connections that end.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use tokio::time::{sleep, timeout};
use tonic::{Code, Status, Streaming};

use super::link::{ATTEMPT, BACK_OFF, Failure, Link, Open, reason};
use super::rpc::{DELETED, WatchAnswer, WatchCreate, WatchEvent, WatchRequest};
use super::{end_of_prefix, entry, key_text, start_of_prefix};
use crate::{Changes, Error, Event, Result, Revision, check_prefix};

/// Returns the changes of keys with a prefix, of revisions above `after`.
pub(super) fn watch(
    link: Arc<Link>,
    prefix: &str,
    after: Revision,
) -> BoxStream<'static, Result<Changes>> {
    let watch = Watch {
        link,
        prefix: prefix.to_owned(),
        after,
        open: None,
        ready: VecDeque::new(),
        partial: None,
    };
    let unfolded = stream::unfold(Some(watch), |watch| async {
        let mut watch = watch?;
        match watch.next().await {
            Ok(changes) => Some((Ok(changes), Some(watch))),
            Err(error) => Some((Err(error), None)),
        }
    });
    unfolded.boxed()
}

/// Returns the oldest revision that etcd keeps, after it has refused an older one.
pub(super) async fn oldest(link: &Link) -> Option<Revision> {
    let question = async {
        let open = link.connected().await.ok()?;
        let mut answers = start(&open, link.identity_key(), Bytes::new(), 1).await.ok()?;
        loop {
            let answer = answers.message().await.ok()??;
            if let Some(oldest) = compacted(&answer) {
                return Some(oldest);
            }
        }
    };
    timeout(link.options().connect_timeout, question).await.ok().flatten()
}

fn compacted(answer: &WatchAnswer) -> Option<Revision> {
    u64::try_from(answer.compact_revision).ok().filter(|oldest| *oldest > 0).map(Revision)
}

async fn start(
    open: &Open,
    key: Bytes,
    range_end: Bytes,
    start_revision: i64,
) -> std::result::Result<Streaming<WatchAnswer>, Status> {
    let create = WatchCreate { key, range_end, start_revision, fragment: true };
    let request = WatchRequest { create: Some(create) };
    // The watch ends with the stream of requests.
    open.watch(stream::once(async { request }).chain(stream::pending())).await
}

struct Watch {
    link: Arc<Link>,
    prefix: String,
    /// The last revision that was received as a whole, or that the watch begins after.
    after: Revision,
    open: Option<(Arc<Open>, Streaming<WatchAnswer>)>,
    ready: VecDeque<Changes>,
    /// A revision of which more may come.
    partial: Option<Changes>,
}

impl Watch {
    async fn next(&mut self) -> Result<Changes> {
        check_prefix(&self.prefix)?;
        loop {
            if let Some(changes) = self.ready.pop_front() {
                return Ok(changes);
            }
            self.link.check_ended()?;
            let Some((open, answers)) = &mut self.open else {
                self.open().await?;
                continue;
            };
            let open = open.clone();
            let reason = match answers.message().await {
                Ok(Some(answer)) => match self.take(answer)? {
                    None => continue,
                    Some(reason) => reason,
                },
                Ok(None) => "the stream has ended".to_owned(),
                Err(status) => {
                    refused(&status)?;
                    let reason = reason(&status);
                    self.link.leave(&open, &reason);
                    reason
                }
            };
            self.again(&reason).await;
        }
    }

    /// Begins the stream after the last whole revision.
    async fn open(&mut self) -> Result<()> {
        // Members wait for a revision that does not exist yet, so this asks first.
        match self.link.revision().await {
            Ok(current) if current < self.after => {
                return Err(Error::Ahead { asked: self.after, current });
            }
            Ok(_) => {}
            Err(Failure::Error(Error::Unavailable(reason))) => {
                self.again(&reason).await;
                return Ok(());
            }
            Err(failure) => return Err(super::error(failure)),
        }
        let open = match self.link.connected().await {
            Ok(open) => open,
            Err(reason) => {
                self.again(&reason).await;
                return Ok(());
            }
        };
        let (key, range_end) = (start_of_prefix(&self.prefix), end_of_prefix(&self.prefix));
        let first = i64::try_from(self.after.0 + 1).expect("not above the current revision");
        let started = timeout(ATTEMPT, start(&open, key, range_end, first)).await;
        let reason = match started {
            Ok(Ok(answers)) => {
                self.open = Some((open, answers));
                return Ok(());
            }
            Ok(Err(status)) => {
                refused(&status)?;
                reason(&status)
            }
            Err(_) => format!("no answer within {ATTEMPT:?}"),
        };
        self.link.leave(&open, &reason);
        self.again(&reason).await;
        Ok(())
    }

    async fn again(&mut self, reason: &str) {
        tracing::debug!(prefix = self.prefix, reason, "watch of etcd interrupted");
        self.open = None;
        self.partial = None;
        sleep(BACK_OFF).await;
    }

    /// Takes an answer. Returns a reason if the watch has to begin again.
    fn take(&mut self, answer: WatchAnswer) -> Result<Option<String>> {
        self.link.check(answer.header.as_ref(), 0)?;
        if let Some(oldest) = compacted(&answer) {
            return Err(Error::Compacted { asked: self.after, oldest });
        }
        if answer.canceled {
            return match answer.cancel_reason.contains("permission denied") {
                true => Err(Error::Invalid(format!("etcd: {}", answer.cancel_reason))),
                false => Ok(Some(answer.cancel_reason)),
            };
        }
        for event in answer.events {
            let (revision, event) = event_of(event)?;
            match &mut self.partial {
                Some(partial) if partial.revision == revision => partial.events.push(event),
                _ => {
                    self.complete();
                    self.partial = Some(Changes { revision, events: vec![event] });
                }
            }
        }
        // A fragment may end within a revision.
        if !answer.fragment {
            self.complete();
        }
        Ok(None)
    }

    fn complete(&mut self) {
        if let Some(changes) = self.partial.take() {
            self.after = changes.revision;
            self.ready.push_back(changes);
        }
    }
}

fn event_of(event: WatchEvent) -> Result<(Revision, Event)> {
    let kv = event.kv.unwrap_or_default();
    if event.kind == DELETED {
        let revision = super::revision(kv.mod_revision)?;
        return Ok((revision, Event { key: key_text(&kv.key), entry: None }));
    }
    let entry = entry(kv)?;
    Ok((entry.modified, Event { key: entry.key.clone(), entry: Some(entry) }))
}

/// Passes on an error that would come again.
fn refused(status: &Status) -> Result<()> {
    match status.code() {
        Code::PermissionDenied | Code::Unimplemented => {
            Err(Error::Invalid(format!("etcd: {}", status.message())))
        }
        _ => Ok(()),
    }
}
