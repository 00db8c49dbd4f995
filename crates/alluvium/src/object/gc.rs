//! `alluvium object gc`.

use std::time::SystemTime;

use alluvium_stream::{Mismatch, Orphan, Survey};
use clap::Args;
use serde::Serialize;

use super::content::Contents;
use crate::catalog::CatalogArgs;
use crate::output::{self, Failure, Table};
use crate::units::{Span, about, counted};

/// Compare the objects of a server with its catalog: list objects that are not in the catalog
/// (orphans, which interrupted uploads leave), and objects in the catalog that are missing.
///
/// Nothing is deleted. A server deletes orphans by itself, at its start and once a day, when it has
/// ensured that no other server needs them. While the server runs, objects of an upload in progress
/// are listed as newer than the catalog.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit codes: 0 done; 1 an object with records in it is missing or has another \
                  size, or something failed; 2 wrong usage."
)]
pub(crate) struct GcArgs {
    #[command(flatten)]
    catalog: CatalogArgs,
    /// Orphans older than this are reported as old enough for the next server to delete.
    #[arg(long, value_name = "TIME", default_value = "24h")]
    older_than: Span,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    right: usize,
    orphans: Vec<OrphanView>,
    wrong: Vec<WrongView>,
}

#[derive(Serialize)]
struct OrphanView {
    object: String,
    size_bytes: u64,
    age_s: u64,
    state: String,
}

#[derive(Serialize)]
struct WrongView {
    object: String,
    size_bytes: u64,
    found_bytes: Option<u64>,
    /// Whether a stream has records in it.
    needed: bool,
    /// These records, by partition.
    #[serde(skip_serializing_if = "Option::is_none")]
    holds: Option<String>,
}

/// Lists orphans and missing objects.
///
/// # Errors
/// The catalog cannot be read, the object store fails, or an object with records is missing.
pub(super) async fn run(args: &GcArgs) -> Result<(), Failure> {
    let url = args.catalog.url()?;
    let before = args.catalog.load().await?;
    let store = crate::objects::open_to_read(&url)?;
    let failed = |error: alluvium_stream::ObjectError| {
        Failure::Failed(format!("object store {url}: {error}"))
    };
    let mut survey = alluvium_stream::survey(&*store, &before).await.map_err(failed)?;
    // What a running server has changed meanwhile is no difference.
    let state = args.catalog.load().await?;
    survey.confirm(&state);
    let Survey { matching, orphans, mismatches } = survey;
    let contents = Contents::of(&state);
    let report = Report {
        right: matching,
        orphans: orphans.iter().map(|orphan| OrphanView::of(orphan, args)).collect(),
        wrong: mismatches.iter().map(|wrong| WrongView::of(wrong, &contents)).collect(),
    };
    if args.json {
        output::json(&report)?;
    } else {
        report.print()?;
    }
    let missing: Vec<_> = report.wrong.iter().filter(|wrong| wrong.needed).collect();
    match missing.first() {
        Some(first) => Err(Failure::Failed(format!(
            "{} with records missing or of another size; first {}",
            counted(missing.len() as u64, "object is", "objects are"),
            first.object
        ))),
        None => Ok(()),
    }
}

impl OrphanView {
    fn of(orphan: &Orphan, args: &GcArgs) -> Self {
        let age = SystemTime::now().duration_since(orphan.written).unwrap_or_default();
        let state = if !orphan.is_past {
            "newer than the catalog".into()
        } else if age <= args.older_than.0 {
            format!("not older than {}", args.older_than)
        } else {
            "old enough".into()
        };
        let (object, size_bytes) = (orphan.name.clone(), orphan.size_bytes);
        Self { object, size_bytes, age_s: age.as_secs(), state }
    }
}

impl WrongView {
    fn of(wrong: &Mismatch, contents: &Contents<'_>) -> Self {
        Self {
            object: wrong.object.name.clone(),
            size_bytes: wrong.object.size_bytes,
            found_bytes: wrong.found_bytes,
            needed: wrong.is_needed,
            holds: contents.describe(&wrong.object.name),
        }
    }
}

impl Report {
    fn print(&self) -> Result<(), Failure> {
        output::line(format_args!(
            "{} as in the catalog; {}; {} missing or of another size",
            counted(self.right as u64, "object is", "objects are"),
            counted(self.orphans.len() as u64, "orphan", "orphans"),
            self.wrong.len()
        ))?;
        if !self.orphans.is_empty() {
            let mut table = Table::of_text(&["ORPHAN", "SIZE", "AGE", "STATE"]);
            for orphan in &self.orphans {
                let (size, age) = (about(orphan.size_bytes), format!("{} s", orphan.age_s));
                table.row(vec![orphan.object.clone(), size, age, orphan.state.clone()]);
            }
            output::line(format_args!("\n{table}"))?;
        }
        if !self.wrong.is_empty() {
            let mut table = Table::of_text(&["OBJECT", "SIZE", "FOUND", "NEEDED"]);
            for wrong in &self.wrong {
                table.row(vec![
                    wrong.object.clone(),
                    wrong.size_bytes.to_string(),
                    wrong.found_bytes.map_or("missing".into(), |found| found.to_string()),
                    if wrong.needed { "yes: records are lost" } else { "no" }.into(),
                ]);
            }
            output::line(format_args!("\n{table}"))?;
        }
        for wrong in &self.wrong {
            if let Some(holds) = &wrong.holds {
                output::line(format_args!("{}: contains {holds}", wrong.object))?;
            }
        }
        Ok(())
    }
}
