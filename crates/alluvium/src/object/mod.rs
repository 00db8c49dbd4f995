//! `alluvium object`: tools for objects in the object store.

mod content;
mod find;
mod gc;
mod inspect;
mod probe;
mod verify;

use std::path::PathBuf;

use alluvium_stream::ObjectError;
use clap::{Args, Subcommand};

use crate::objects::S3Settings;
use crate::output::{self, Failure};

#[derive(Debug, Subcommand)]
pub(crate) enum ObjectCommand {
    /// Show an object's header, its index, and its content by stream. Reads no records.
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Gc(gc::GcArgs),
    Probe(probe::ProbeArgs),
}

/// Runs an `object` command.
///
/// # Errors
/// Those of the command.
pub(crate) fn run(command: ObjectCommand) -> Result<(), Failure> {
    // The tools print their results; only warnings and progress are logged.
    output::start_logging("warn,alluvium::progress=info")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        match command {
            ObjectCommand::Gc(args) => gc::run(&args).await,
            ObjectCommand::Probe(args) => probe::run(&args).await,
            ObjectCommand::Inspect(args) => inspect::run(&args).await,
            ObjectCommand::Verify(args) => verify::run(&args).await,
        }
    })
}

/// How S3 is reached; the same options as for `alluvium serve`.
#[derive(Args, Clone, Debug)]
struct S3Args {
    /// Endpoint, if it is not AWS: `https://s3.example.org`.
    #[arg(long, env = "ALLUVIUM_S3_ENDPOINT", value_name = "URL")]
    s3_endpoint: Option<String>,
    /// The bucket's region.
    #[arg(long, env = "ALLUVIUM_S3_REGION", value_name = "NAME")]
    s3_region: Option<String>,
    /// Put the bucket into the path of the URL and not into the host name.
    #[arg(long, env = "ALLUVIUM_S3_PATH_STYLE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    s3_path_style: Option<bool>,
    /// Allow an http:// endpoint that is not on loopback.
    #[arg(long, env = "ALLUVIUM_S3_ALLOW_HTTP", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    s3_allow_http: Option<bool>,
    /// Certificates (PEM) to trust in addition to the system's.
    #[arg(long, env = "ALLUVIUM_S3_CA_FILE", value_name = "FILE")]
    s3_ca_file: Option<PathBuf>,
}

impl S3Args {
    fn settings(&self) -> S3Settings {
        let Self { s3_endpoint, s3_region, s3_path_style, s3_allow_http, s3_ca_file } = self;
        S3Settings {
            endpoint: s3_endpoint.clone(),
            region: s3_region.clone(),
            path_style: *s3_path_style,
            allow_http: *s3_allow_http,
            ca_file: s3_ca_file.clone(),
        }
    }
}

/// Distinguishes damage that was found from errors because of which nothing was checked.
fn failure(shown: &str, error: &ObjectError) -> Failure {
    let message = format!("{shown}: {}", error.reason());
    match error {
        ObjectError::Damaged { .. } => Failure::Failed(message),
        ObjectError::Store { .. } => Failure::NotChecked(message),
    }
}

/// Formats a greatest timestamp: milliseconds since the Unix epoch.
fn timestamp(max_timestamp_ms: i64) -> String {
    if max_timestamp_ms == -1 { "-".into() } else { max_timestamp_ms.to_string() }
}
