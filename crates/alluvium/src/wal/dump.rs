//! `alluvium wal dump`.

use std::fmt::Write as _;
use std::io::IsTerminal;

use alluvium_wal::{OpenError, Record, RecoveryReport, Wal};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::content::{CatalogArgs, Content, RecordContent, Streams};
use super::{LogArgs, Walk, open_read_only, overtaken, resized, unusable};
use crate::output::{self, Failure};
use crate::progress::Meter;
use crate::units::{about, counted};

#[derive(Args, Debug)]
pub(crate) struct DumpArgs {
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    catalog: CatalogArgs,
    /// Stop after this number of records. Default: all.
    #[arg(long, value_name = "N")]
    limit: Option<u64>,
    /// Show the payload.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Payload::None)]
    payload: Payload,
    /// Print JSON: one object per line, `{"record":...}` for each record, and `{"scan":...}` at the
    /// end of a complete scan.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Payload {
    /// Omit payloads.
    None,
    /// As hexadecimal digits.
    Hex,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Record {
        offset: u64,
        end_offset: u64,
        epoch: u32,
        payload_bytes: usize,
        content: RecordContent,
        #[serde(skip_serializing_if = "Option::is_none")]
        payload: Option<String>,
    },
    Scan(Box<Walk>),
}

/// Ends the scan early: the visitor's "error" when it has listed enough records, or cannot print
/// any more.
#[derive(Debug, thiserror::Error)]
enum Stop {
    #[error("enough records were listed")]
    Enough,
    #[error("the output failed")]
    Output(Failure),
}

/// Lists the records of a log.
///
/// # Errors
/// The target cannot be read, contains no write-ahead log, or a damaged one.
pub(crate) fn run(args: &DumpArgs) -> Result<(), Failure> {
    let device = open_read_only(args.log.path())?;
    let streams = args.catalog.streams()?;
    let mut content = Content::new(&streams);
    // On a terminal the lines themselves show progress, and a bar between them would be noise.
    let to_terminal = std::io::stdout().is_terminal();
    let meter =
        (!to_terminal).then(|| Meter::new(format!("reading {}", args.log.path().display())));
    let progress = meter.as_ref().map(Meter::callback);
    let mut listed = 0;
    let mut visit = |record: Record| {
        if args.limit.is_some_and(|limit| listed >= limit) {
            return Err(Stop::Enough.into());
        }
        listed += 1;
        content.add(&record);
        print(args, &streams, &record).map_err(|failure| Stop::Output(failure).into())
    };
    if !args.json {
        let (offset, end, epoch, payload) = ("OFFSET", "END", "EPOCH", "PAYLOAD B");
        output::line(format_args!("{offset:>20}  {end:>20}  {epoch:>10}  {payload:>10}  CONTENT"))?;
    }
    let changed = |how: &str| {
        let path = args.log.path().display();
        Err(Failure::Failed(format!(
            "{path}: the rest of the log was {how} by its server; run the command again"
        )))
    };
    let listed = Wal::scan(&device, progress, &mut visit)
        .and_then(|report| Ok((overtaken(&device, &report)?, report)));
    match listed {
        Ok((true, _)) => changed("trimmed and overwritten"),
        Ok((false, report)) => finish(args, &report, content),
        Err(OpenError::Visit { at, source }) => match source.downcast::<Stop>() {
            Ok(stop) => match *stop {
                Stop::Enough => Ok(()),
                Stop::Output(failure) => Err(failure),
            },
            Err(other) => Err(Failure::Failed(format!("at log offset {at}: {other}"))),
        },
        Err(error) => match resized(&device)? {
            Some(_) => changed("moved in a resize"),
            None => Err(unusable(error)),
        },
    }
}

fn print(args: &DumpArgs, streams: &Streams, record: &Record) -> Result<(), Failure> {
    let payload = (args.payload == Payload::Hex).then(|| hex(&record.payload));
    if args.json {
        let line = Line::Record {
            offset: record.offset.0,
            end_offset: record.end.0,
            epoch: record.epoch,
            payload_bytes: record.payload.len(),
            content: streams.content_of(record),
            payload,
        };
        return output::line(serde_json::to_string(&line).map_err(Failure::new)?);
    }
    output::line(format_args!(
        "{:>20}  {:>20}  {:>10}  {:>10}  {}{}{}",
        record.offset.0,
        record.end.0,
        record.epoch,
        record.payload.len(),
        streams.content_of(record),
        if payload.is_some() { "  " } else { "" },
        payload.unwrap_or_default()
    ))
}

fn finish(args: &DumpArgs, report: &RecoveryReport, content: Content) -> Result<(), Failure> {
    let walk = Walk::of(report, content);
    if args.json {
        let verdict = walk.verdict(args.log.path());
        output::line(serde_json::to_string(&Line::Scan(Box::new(walk))).map_err(Failure::new)?)?;
        return verdict;
    }
    output::line(format_args!(
        "{}, {} of payload, epoch {}, the log ends at {}{}",
        counted(walk.records, "record", "records"),
        about(walk.payload_bytes),
        walk.epoch,
        walk.end_offset,
        if walk.clean_shutdown { "" } else { " (not closed)" }
    ))?;
    walk.verdict(args.log.path())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_shown_byte_by_byte() {
        assert_eq!(hex(&[0x00, 0x0f, 0xa5, 0xff]), "000fa5ff");
        assert_eq!(hex(&[]), "");
    }
}
