//! `alluvium object verify`.

use alluvium_stream::{ObjectError, StoredObject};
use clap::Args;
use serde::Serialize;
use uuid::Uuid;

use super::content::Contents;
use super::find::{Found, find};
use crate::catalog::CatalogArgs;
use crate::objects::S3Args;
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::units::{about, counted};

/// Read a whole object, or all objects below a directory or prefix, and report whether they are
/// intact.
///
/// Header, footer, index, and each block with every entry in it are checked against their checksums
/// and against each other. Damage is listed with its position and the reason; the other blocks are
/// still read. Memory use does not grow with the object.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 all are intact; 1 at least one is damaged; 2 at least one could \
                  not be read, and none is damaged."
)]
pub(crate) struct VerifyArgs {
    /// Files or directories, or URLs of objects or prefixes (file:///absolute/path,
    /// s3://bucket/prefix).
    #[arg(value_name = "FILE|URL", required = true)]
    objects: Vec<String>,
    /// The object store of the server that has written them: for damaged objects, the offsets of
    /// each partition in them are listed, as its catalog has them.
    #[arg(long, value_name = "URL")]
    catalog: Option<String>,
    /// The store, if that object store has the catalogs of several servers.
    #[arg(long, value_name = "ID", requires = "catalog")]
    store: Option<Uuid>,
    #[command(flatten)]
    s3: S3Args,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Verified {
    intact: bool,
    objects: Vec<VerifiedObject>,
}

#[derive(Serialize)]
struct VerifiedObject {
    object: String,
    size_bytes: u64,
    intact: bool,
    damage: Vec<Damaged>,
    /// The records in it by partition, if it is damaged and in the given catalog.
    #[serde(skip_serializing_if = "Option::is_none")]
    holds: Option<String>,
    /// Why it could not be read completely.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Damaged {
    position: u64,
    reason: String,
}

/// Checks all objects.
///
/// # Errors
/// An object is damaged (exit code 1), or cannot be read (2).
pub(super) async fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let mut found = Vec::new();
    for location in &args.objects {
        found.extend(find(location, &args.s3).await?);
    }
    let catalog = match &args.catalog {
        Some(url) => Some(CatalogArgs::new(url.clone(), args.s3.clone(), args.store).load().await?),
        None => None,
    };
    let contents = catalog.as_ref().map(Contents::of);
    let total_bytes: u64 = found.iter().map(|found| found.size_bytes).sum();
    let many = found.len() as u64;
    let meter = Meter::new(format!("verifying {}", counted(many, "object", "objects")));
    let report = meter.callback();
    let (mut objects, mut done_bytes) = (Vec::with_capacity(found.len()), 0);
    let (mut damaged, mut first_unreadable) = (None, None);
    for found in &found {
        let progress = |bytes: u64| report(done_bytes + bytes, total_bytes);
        let mut verified = verify_object(found, &progress).await;
        if !verified.intact {
            let contents = contents.as_ref();
            verified.holds = contents.and_then(|all| all.describe(found.location.as_ref()));
        }
        done_bytes += found.size_bytes;
        if !args.json {
            for Damaged { position, reason } in &verified.damage {
                output::line(format_args!(
                    "{}: damaged at byte {position}: {reason}",
                    verified.object
                ))?;
            }
            if let Some(holds) = &verified.holds {
                output::line(format_args!("{}: contains {holds}", verified.object))?;
            }
        }
        if let Some(first) = verified.damage.first() {
            let shown = &verified.object;
            damaged.get_or_insert_with(|| {
                format!("{shown} at byte {}: {}", first.position, first.reason)
            });
        }
        if let Some(error) = &verified.error {
            first_unreadable.get_or_insert_with(|| format!("{}: {error}", verified.object));
        }
        objects.push(verified);
    }
    drop(meter);
    let bad = objects.iter().filter(|verified| !verified.damage.is_empty()).count() as u64;
    let unreadable = objects.iter().filter(|verified| verified.error.is_some()).count() as u64;
    if args.json {
        output::json(&Verified { intact: bad + unreadable == 0, objects })?;
    }
    match (damaged, first_unreadable) {
        (Some(first), _) => Err(Failure::Failed(format!(
            "{} of {many} damaged; first {first}",
            counted(bad, "object is", "objects are")
        ))),
        (None, Some(first)) => Err(Failure::NotChecked(format!(
            "{unreadable} of {} could not be read; first {first}",
            counted(many, "object", "objects")
        ))),
        (None, None) if args.json => Ok(()),
        (None, None) => output::line(format_args!(
            "{}, {}: intact, every checksum is correct",
            counted(many, "object", "objects"),
            about(total_bytes)
        )),
    }
}

async fn verify_object(found: &Found, progress: &dyn Fn(u64)) -> VerifiedObject {
    let mut verified = VerifiedObject {
        object: found.shown.clone(),
        size_bytes: found.size_bytes,
        intact: false,
        damage: Vec::new(),
        holds: None,
        error: None,
    };
    let object = StoredObject::open(found.store.clone(), &found.location).await;
    let damage = match object {
        Ok(object) => object.verify(progress).await,
        Err(error) => Err(error),
    };
    match damage {
        Ok(damage) => {
            let damaged = |damage: alluvium_stream::object::Damage| Damaged {
                position: damage.position,
                reason: damage.reason,
            };
            verified.damage = damage.into_iter().map(damaged).collect();
            verified.intact = verified.damage.is_empty();
        }
        Err(ObjectError::Damaged { source, .. }) => {
            let (position, reason) = (source.position, source.reason.clone());
            verified.damage.push(Damaged { position, reason });
        }
        Err(error) => verified.error = Some(error.reason()),
    }
    verified
}
