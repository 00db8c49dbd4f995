//! A read-only server: it takes over what the writer of the store changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::forget_deleted_topics;
use crate::server::Server;

/// Takes over topics, settings, quotas, users and ACLs whenever the chain that the store follows
/// has changed them, until the server stops. The state of partitions is derived where it is used.
pub(crate) async fn run(server: Arc<Server>) {
    let Some(mut versions) = server.store.versions() else { return };
    let mut reported = BTreeSet::new();
    let mut seen = None;
    loop {
        // The first time because of what has changed since the start.
        let now = Some(server.store.meta_changes());
        if seen != now || !reported.is_empty() {
            reported = take_over(&server, reported).await;
            seen = now;
        }
        tokio::select! {
            () = server.stopping() => return,
            changed = versions.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

/// Takes over what the catalog has now. What cannot be used stays as it was, and is reported unless
/// it was `reported` before. Returns what is reported now.
async fn take_over(server: &Server, reported: BTreeSet<String>) -> BTreeSet<String> {
    let mut failed = BTreeSet::new();
    // Before topics that are new: their records may be readable to few.
    if let Some(authorizer) = &server.authorizer
        && let Err(error) = authorizer.follow().await
    {
        failed.insert(error.to_string());
    }
    failed.extend(server.authentication.users.follow().err().map(|error| error.to_string()));
    failed.extend(server.quotas.follow().err());
    match server.configs.follow() {
        Ok(false) => {}
        Ok(true) => {
            server.topics.refresh_defaults(|| server.configs.topic_defaults()).await;
            server.connections.refresh(|| server.configs.connection_limits());
            server.limit_transfers();
        }
        Err(error) => drop(failed.insert(error)),
    }
    let (is_removed, bad) = server.topics.follow().await;
    failed.extend(bad.into_iter().map(|error| error.to_string()));
    if is_removed {
        forget_deleted_topics(&server.groups, &server.topics).await;
    }
    for error in failed.difference(&reported) {
        tracing::error!("a change of the catalog is not taken over: {error}");
    }
    failed
}
