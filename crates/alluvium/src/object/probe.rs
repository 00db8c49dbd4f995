//! `alluvium object probe`.

use std::time::Duration;

use alluvium_stream::sequence::{ProbeError, probe_creates};
use alluvium_stream::{MARK, PROBES_DIRECTORY, RESERVE, is_marked};
use clap::Args;
use serde::Serialize;
use tokio::time::Instant;

use crate::objects::{ObjectStoreUrl, S3Args};
use crate::output::{self, Failure};
use crate::units::Span;

/// A test that takes longer shows its progress.
const QUIET: Duration = Duration::from_secs(2);
/// Time that a request gets which began before the timeout.
const LAST_REQUEST: Duration = Duration::from_secs(15);

/// Test whether an object store creates objects atomically: of several writers that create one
/// object at the same time, exactly one must succeed.
///
/// Not every server that speaks S3 does. The test writes some small objects below `probes/` and
/// deletes them. It can show the fault, not its absence.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 it is suitable; 1 it is not; 2 it cannot be tested, or wrong usage."
)]
pub(crate) struct ProbeArgs {
    /// The object store: file:///absolute/path or s3://bucket/prefix.
    #[arg(long, env = "ALLUVIUM_OBJECT_STORE", value_name = "URL")]
    object_store: String,
    #[command(flatten)]
    s3: S3Args,
    /// Time after which no request is sent any more.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    timeout: Span,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    object_store: String,
    suitable: bool,
    /// Why it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    seconds: f64,
}

/// Tests an object store.
///
/// # Errors
/// It is not suitable, or cannot be tested.
pub(super) async fn run(args: &ProbeArgs) -> Result<(), Failure> {
    let url =
        ObjectStoreUrl::parse(&args.object_store, args.s3.settings()).map_err(Failure::Usage)?;
    let directory = match &url {
        ObjectStoreUrl::Directory(path) if !path.is_dir() => {
            return Err(Failure::NotChecked(format!("object store {url}: no such directory")));
        }
        ObjectStoreUrl::Directory(path) => Some(path),
        ObjectStoreUrl::S3(_) | ObjectStoreUrl::Memory => None,
    };
    // A directory without a mark was never an object store, or is an empty mount point.
    let unmarked = directory.filter(|path| !is_marked(path));
    let store = crate::objects::open(&url).map_err(Failure::not_checked)?;
    let began = Instant::now();
    let mut progress = |done, all| {
        if began.elapsed() >= QUIET {
            tracing::info!(target: "alluvium::progress", "{done} of {all} rounds are done");
        }
    };
    let until = began + args.timeout.0;
    let probing = probe_creates(&store, PROBES_DIRECTORY, until, &mut progress);
    let probed = tokio::time::timeout_at(until + LAST_REQUEST, probing).await;
    if let Some(path) = directory {
        // Fails if another probe is using it.
        let _ = std::fs::remove_dir(path.join(PROBES_DIRECTORY));
    }
    if let Some(path) = unmarked {
        let _ = std::fs::remove_file(path.join(MARK));
        let _ = std::fs::remove_file(path.join(RESERVE));
    }
    let reason = match probed {
        Ok(Ok(())) => None,
        Ok(Err(ProbeError::Unsuitable(reason))) => Some(reason),
        Ok(Err(ProbeError::Object(error))) => {
            return Err(Failure::NotChecked(format!("object store {url}: {error}")));
        }
        Err(_) => {
            return Err(Failure::NotChecked(format!("object store {url}: no response")));
        }
    };
    let report = Report {
        object_store: url.to_string(),
        suitable: reason.is_none(),
        reason: reason.clone(),
        seconds: began.elapsed().as_secs_f64(),
    };
    if args.json {
        output::json(&report)?;
    } else if reason.is_none() {
        output::line(format!("{url}: creates objects atomically"))?;
    }
    match reason {
        None => Ok(()),
        Some(reason) => {
            Err(Failure::Failed(format!("object store {url} is not suitable: {reason}")))
        }
    }
}
