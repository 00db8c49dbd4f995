//! What a server reports to probes: `/livez`, `/readyz` and `/healthz`; see docs/metrics.md.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use alluvium_device::Progress;
use alluvium_stream::Store;
use axum::http::StatusCode;
use parking_lot::Mutex;

use crate::progress;

/// The phase of a server, from start to stop, and its faults.
pub(crate) struct Health {
    phase: Mutex<Phase>,
    /// Set once there is a component that can fail.
    condition: OnceLock<Box<dyn Fn() -> Condition + Send + Sync>>,
    /// A line about the server that is no fault, if it has one.
    note: OnceLock<Box<dyn Fn() -> Option<String> + Send + Sync>>,
    /// Called after each progress report; a test blocks the start there.
    #[cfg(test)]
    pub(crate) held: OnceLock<Progress>,
}

enum Phase {
    Starting(Step),
    Serving,
    Stopping,
}

/// A step of the start.
struct Step {
    /// Completes the sentence "the server is ...".
    what: &'static str,
    began: Instant,
    done: u64,
    /// 0 while it is unknown.
    total: u64,
}

/// Whether the components behind the server are healthy.
pub(crate) enum Condition {
    Ok,
    /// The server serves in spite of these faults: label and detail of each.
    Degraded(Vec<(&'static str, String)>),
    /// Clients are not served, for this reason, which a restart does not resolve.
    Unready(String),
    /// The server does not serve, for this reason.
    Failed(String),
}

impl Condition {
    /// The condition of a server with this store.
    pub(crate) fn of_store(store: &Store) -> Self {
        // A server that stops closes its store, which is no failure.
        if let Some(cause) = store.failure_unless_closed() {
            return Self::Failed(cause);
        }
        let faults = store.degraded();
        match faults.is_empty() {
            true => Self::Ok,
            false => Self::Degraded(
                faults.into_iter().map(|fault| (fault.reason.label(), fault.detail)).collect(),
            ),
        }
    }
}

impl Health {
    /// The health of a server that begins to start.
    pub(crate) fn new() -> Arc<Self> {
        let phase = Mutex::new(Phase::Starting(Step::new("starting")));
        Arc::new(Self {
            phase,
            condition: OnceLock::new(),
            note: OnceLock::new(),
            #[cfg(test)]
            held: OnceLock::new(),
        })
    }

    /// Enters a step of the start. `what` completes the sentence "the server is ...".
    pub(crate) fn begin(&self, what: &'static str) {
        *self.phase.lock() = Phase::Starting(Step::new(what));
    }

    /// Enters a step of the start, and returns a callback that records its progress and passes it
    /// on to `shown`.
    pub(crate) fn progress(self: &Arc<Self>, what: &'static str, shown: Progress) -> Progress {
        self.begin(what);
        self.later(what, shown)
    }

    /// Returns a callback that records the progress of a step, which begins with the first report.
    pub(crate) fn later(self: &Arc<Self>, what: &'static str, shown: Progress) -> Progress {
        let health = self.clone();
        Arc::new(move |done, total| {
            if let Phase::Starting(step) = &mut *health.phase.lock() {
                if step.what != what {
                    *step = Step::new(what);
                }
                (step.done, step.total) = (done, total);
            }
            shown(done, total);
            #[cfg(test)]
            if let Some(held) = health.held.get() {
                held(done, total);
            }
        })
    }

    /// Reports what `condition` returns from now on.
    pub(crate) fn watch(&self, condition: impl Fn() -> Condition + Send + Sync + 'static) {
        let _ = self.condition.set(Box::new(condition));
    }

    /// Adds what `note` returns to the answer of `/healthz`, which is no fault.
    pub(crate) fn note(&self, note: impl Fn() -> Option<String> + Send + Sync + 'static) {
        let _ = self.note.set(Box::new(note));
    }

    /// Enters the phase in which clients are served.
    pub(crate) fn serving(&self) {
        *self.phase.lock() = Phase::Serving;
    }

    /// Enters the phase in which the server stops.
    pub(crate) fn stopping(&self) {
        *self.phase.lock() = Phase::Stopping;
    }

    /// Whether clients are served.
    pub(super) fn is_ready(&self) -> bool {
        self.ready().0 == StatusCode::OK
    }

    /// The answer of `/readyz`.
    pub(crate) fn ready(&self) -> (StatusCode, String) {
        let unready = |why: String| (StatusCode::SERVICE_UNAVAILABLE, why + "\n");
        match self.condition() {
            Condition::Failed(cause) => return unready(format!("failed: {cause}")),
            Condition::Unready(cause) => return unready(cause),
            Condition::Ok | Condition::Degraded(_) => {}
        }
        match &*self.phase.lock() {
            Phase::Starting(step) => unready(step.describe(step.began.elapsed())),
            Phase::Serving => (StatusCode::OK, "ok\n".to_owned()),
            Phase::Stopping => unready("stopping".to_owned()),
        }
    }

    /// The answer of `/healthz`. Supervisors restart a server by its status, so the status is 200
    /// for a fault that a restart does not resolve, and while the server starts or stops.
    pub(super) fn health(&self) -> (StatusCode, String) {
        let (status, mut text) = self.state();
        if let Some(note) = self.note.get().and_then(|note| note()) {
            text.push_str(&note);
            text.push('\n');
        }
        (status, text)
    }

    fn state(&self) -> (StatusCode, String) {
        match self.condition() {
            Condition::Ok => (StatusCode::OK, "ok\n".to_owned()),
            Condition::Degraded(faults) => {
                let lines = faults.iter().map(|(label, detail)| format!("{label}: {detail}\n"));
                (StatusCode::OK, format!("degraded\n{}", lines.collect::<String>()))
            }
            Condition::Unready(cause) => (StatusCode::OK, format!("degraded\nunready: {cause}\n")),
            Condition::Failed(cause) => {
                (StatusCode::SERVICE_UNAVAILABLE, format!("failed: {cause}\n"))
            }
        }
    }

    fn condition(&self) -> Condition {
        self.condition.get().map_or(Condition::Ok, |condition| condition())
    }
}

impl Step {
    fn new(what: &'static str) -> Self {
        Self { what, began: Instant::now(), done: 0, total: 0 }
    }

    /// Formats the step as in `recovering 43%, 2 s left`.
    fn describe(&self, elapsed: Duration) -> String {
        let Self { what, done, total, .. } = *self;
        if total == 0 {
            return what.to_owned();
        }
        let percent = u128::from(done) * 100 / u128::from(total);
        match progress::seconds_left(done, total, elapsed) {
            Some(left) => format!("{what} {percent}%, {left:.0} s left"),
            None => format!("{what} {percent}%"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: StatusCode = StatusCode::SERVICE_UNAVAILABLE;

    fn answer(status: StatusCode, text: &str) -> (StatusCode, String) {
        (status, format!("{text}\n"))
    }

    #[test]
    fn readiness_follows_the_phase_of_the_server() {
        let health = Health::new();
        assert_eq!(health.ready(), answer(NO, "starting"));
        health.begin("opening the catalog");
        assert_eq!(health.ready(), answer(NO, "opening the catalog"));
        let shown = Arc::new(Mutex::new(Vec::new()));
        let seen = shown.clone();
        let progress = health.progress(
            "writing the log",
            Arc::new(move |done, total| seen.lock().push((done, total))),
        );
        assert_eq!(health.ready(), answer(NO, "writing the log"));
        progress(0, 200);
        assert_eq!(health.ready(), answer(NO, "writing the log 0%"));
        progress(86, 200);
        assert!(health.ready().1.starts_with("writing the log 43%, "), "{:?}", health.ready());
        assert_eq!(*shown.lock(), [(0, 200), (86, 200)]);
        health.serving();
        assert_eq!(health.ready(), answer(StatusCode::OK, "ok"));
        // A late progress report changes nothing.
        progress(200, 200);
        assert!(health.is_ready());
        health.stopping();
        assert_eq!(health.ready(), answer(NO, "stopping"));
        assert_eq!(health.health(), answer(StatusCode::OK, "ok"));
    }

    #[test]
    fn a_step_estimates_its_remaining_time() {
        let step = |done| Step { done, total: 100, ..Step::new("recovering") };
        let three_seconds = Duration::from_secs(3);
        assert_eq!(step(0).describe(three_seconds), "recovering 0%");
        assert_eq!(step(60).describe(three_seconds), "recovering 60%, 2 s left");
        assert_eq!(step(100).describe(three_seconds), "recovering 100%, 0 s left");
    }

    #[test]
    fn faults_leave_the_server_ready_and_a_failure_does_not() {
        let health = Health::new();
        health.serving();
        let condition = Arc::new(Mutex::new(Condition::Ok));
        let watched = condition.clone();
        health.watch(move || std::mem::replace(&mut *watched.lock(), Condition::Ok));
        assert_eq!(health.health(), answer(StatusCode::OK, "ok"));
        let faults = || Condition::Degraded(vec![("one", "a".into()), ("two", "b".into())]);
        *condition.lock() = faults();
        assert_eq!(health.health(), answer(StatusCode::OK, "degraded\none: a\ntwo: b"));
        *condition.lock() = faults();
        assert!(health.is_ready());
        let unready = || Condition::Unready("no server answers".into());
        *condition.lock() = unready();
        assert_eq!(health.ready(), answer(NO, "no server answers"));
        *condition.lock() = unready();
        let expected = answer(StatusCode::OK, "degraded\nunready: no server answers");
        assert_eq!(health.health(), expected);
        let failed = || Condition::Failed("the disk".into());
        *condition.lock() = failed();
        assert_eq!(health.health(), answer(NO, "failed: the disk"));
        *condition.lock() = failed();
        assert_eq!(health.ready(), answer(NO, "failed: the disk"));
    }
}
