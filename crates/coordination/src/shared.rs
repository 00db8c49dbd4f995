//! The state with its lock, as the implementations share it, and its watches.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::state::{State, Step};
use crate::{Changes, Error, Result, Revision, check_prefix};

pub(crate) struct Shared {
    state: Mutex<State>,
    /// The current revision, or why there will be no other.
    news: watch::Sender<std::result::Result<Revision, Error>>,
}

impl Shared {
    pub(crate) fn new(state: State) -> Arc<Self> {
        let (news, _) = watch::channel(Ok(state.revision()));
        Arc::new(Self { state: Mutex::new(state), news })
    }

    /// Runs `f` on the state, unless it was stopped. `f` must not block.
    pub(crate) fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> Result<T> {
        let mut state = self.state.lock();
        if let Err(error) = &*self.news.borrow() {
            return Err(error.clone());
        }
        Ok(f(&mut state))
    }

    /// Ends the leases whose time is over at `now`, then plans a change. `take` stores and applies
    /// each step; the caller keeps others from planning meanwhile.
    pub(crate) fn change<T>(
        &self,
        now: Duration,
        plan: impl FnOnce(&State) -> Result<(Option<Step>, T)>,
        mut take: impl FnMut(Step) -> Result<()>,
    ) -> Result<T> {
        while let Some(step) = self.with(|state| state.plan_expiry(now))? {
            take(step)?;
        }
        let (step, answer) = self.with(|state| plan(state))??;
        if let Some(step) = step {
            take(step)?;
        }
        Ok(answer)
    }

    /// Applies a planned step and wakes the watches.
    pub(crate) fn apply(&self, step: Step, now: Duration) -> Result<()> {
        let revision = self.with(|state| {
            state.apply(step, now);
            state.revision()
        })?;
        self.news.send_if_modified(|news| match news {
            Ok(known) if *known < revision => {
                *known = revision;
                true
            }
            _ => false,
        });
        Ok(())
    }

    /// Ends all operations and watches with this error, unless they have ended already.
    pub(crate) fn stop(&self, error: Error) {
        self.news.send_if_modified(|news| {
            let first = news.is_ok();
            if first {
                *news = Err(error);
            }
            first
        });
    }

    pub(crate) fn watch(
        self: &Arc<Self>,
        prefix: &str,
        after: Revision,
    ) -> BoxStream<'static, Result<Changes>> {
        let watch = Watch {
            shared: self.clone(),
            news: self.news.subscribe(),
            prefix: prefix.to_owned(),
            after,
        };
        stream::try_unfold(watch, |mut watch| async {
            let changes = watch.next().await?;
            Ok(Some((changes, watch)))
        })
        .boxed()
    }
}

struct Watch {
    shared: Arc<Shared>,
    news: watch::Receiver<std::result::Result<Revision, Error>>,
    prefix: String,
    after: Revision,
}

impl Watch {
    async fn next(&mut self) -> Result<Changes> {
        check_prefix(&self.prefix)?;
        loop {
            // Marked before the history is read, so that a revision in between wakes this again.
            self.news.borrow_and_update();
            match self.shared.with(|state| state.changes(&self.prefix, self.after))?? {
                Ok(changes) => {
                    self.after = changes.revision;
                    return Ok(changes);
                }
                Err(current) => self.after = current,
            }
            self.news.changed().await.expect("the sender is in the shared state");
        }
    }
}
