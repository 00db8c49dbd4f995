//! `alluvium object`: tools for what lies in the object store.

mod content;
mod find;
mod gc;
mod inspect;
mod verify;

use std::path::PathBuf;

use alluvium_stream::ObjectError;
use clap::{Args, Subcommand};

use crate::objects::S3Settings;
use crate::output::{self, Failure};

#[derive(Debug, Subcommand)]
pub(crate) enum ObjectCommand {
    /// Show an object's header, its index, and what it holds of each stream. Reads no records.
    Inspect(inspect::InspectArgs),
    Verify(verify::VerifyArgs),
    Gc(gc::GcArgs),
}

/// Run an `object` command.
///
/// # Errors
/// What the command says it can fail with.
pub(crate) fn run(command: ObjectCommand) -> Result<(), Failure> {
    // The tools print their results; of the log only warnings and progress are wanted.
    output::start_logging("warn,alluvium::progress=info")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        match command {
            ObjectCommand::Gc(args) => gc::run(&args).await,
            ObjectCommand::Inspect(args) => inspect::run(&args).await,
            ObjectCommand::Verify(args) => verify::run(&args).await,
        }
    })
}

/// How S3 is reached; as for `alluvium serve`.
#[derive(Args, Clone, Debug)]
struct S3Args {
    /// Where S3 is spoken, if not at AWS: `https://s3.example.org`.
    #[arg(long, env = "ALLUVIUM_S3_ENDPOINT", value_name = "URL")]
    s3_endpoint: Option<String>,
    /// The bucket's region.
    #[arg(long, env = "ALLUVIUM_S3_REGION", value_name = "NAME")]
    s3_region: Option<String>,
    /// Name the bucket in the path and not in the host's name.
    #[arg(long, env = "ALLUVIUM_S3_PATH_STYLE", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    s3_path_style: Option<bool>,
    /// Use an endpoint with http:// that is not on loopback.
    #[arg(long, env = "ALLUVIUM_S3_ALLOW_HTTP", value_name = "BOOL",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    s3_allow_http: Option<bool>,
    /// Certificates (PEM) that are trusted beside the system's.
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

/// Damage was found; anything else means that there was nothing to look at.
fn failure(shown: &str, error: &ObjectError) -> Failure {
    let message = format!("{shown}: {}", error.reason());
    match error {
        ObjectError::Damaged { .. } => Failure::Failed(message),
        ObjectError::Store { .. } => Failure::NotLooked(message),
    }
}

/// A greatest timestamp for people: milliseconds since the Unix epoch.
fn timestamp(max_timestamp_ms: i64) -> String {
    if max_timestamp_ms == -1 { "-".into() } else { max_timestamp_ms.to_string() }
}
