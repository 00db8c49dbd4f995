//! Validates produced batches against the topic's settings and normalizes header and compression.
//!
//! The records of every batch are checked, as Kafka's `LogValidator` does; a compressed batch is
//! decompressed for this. The header's summary of the records is an index that readers, retention
//! and searches by time rely on, so it is never taken from the producer
//! (`docs/decisions/0016-compressed-batches-are-checked.md`).

use bytes::Bytes;

use crate::batch::{self, BatchHeader, Codec, HEADER_BYTES};
use crate::configs::AppendRules;
use crate::errors::ApiError;
use crate::partition::unix_time_ms;
use crate::records::{self, Checked, NO_TIMESTAMP, Summary, Unpacked};
use crate::server::Server;

/// The number of offending records that a rejection of one batch lists.
const NAMED_RECORDS: usize = 100;

/// Validates a batch that a producer has sent.
///
/// # Returns
/// The batch as it is to be appended, and its header. In nearly all cases nothing has to change,
/// and the bytes are those that were received.
///
/// # Errors
/// Those of [`batch::check_produced`], [`records::check_frame`] and [`records::check_plain`];
/// [`ApiError::RejectedRecords`] if records violate the topic's settings.
pub(crate) async fn validate(
    server: &Server,
    rules: AppendRules,
    version: i16,
    batch: Bytes,
) -> Result<(BatchHeader, Bytes), ApiError> {
    if rules.is_import {
        return validate_imported(server, rules, batch).await;
    }
    let header = batch::check_produced(&batch, version, rules.max_batch_bytes)?;
    let summary = if header.codec() == Some(Codec::None) {
        records::check_plain(&header, &batch[HEADER_BYTES..])?
    } else {
        records::check_frame(&header, &batch[HEADER_BYTES..])?;
        if let Some(small) = records::small_summary(&batch)? {
            small
        } else {
            let batch = batch.clone();
            server.run_decompression(move || records::summary(&batch)).await?
        }
    };
    let max_bytes = u64::from(rules.max_decompressed_record_bytes);
    if header.codec() != Some(Codec::None) && summary.largest_bytes > max_bytes {
        return Err(ApiError::InvalidRecord(format!(
            "a record has {} bytes after decompression, the limit is {max_bytes}",
            summary.largest_bytes
        )));
    }
    let now_ms = unix_time_ms();
    if !summary.obeys(rules, now_ms) {
        return Err(server.run_decompression(move || rejection(&batch, rules, now_ms)).await?);
    }
    let is_wrong = header.max_timestamp_ms != summary.max_timestamp_ms && !rules.log_append_time;
    let batch = match is_wrong {
        true => with_max_timestamp(batch, summary.max_timestamp_ms),
        false => batch,
    };
    let batch = match rules.compression {
        Some((codec, level)) if header.codec() != Some(codec) => {
            let max_bytes = rules.max_batch_bytes as usize;
            let compress = move || records::recompress(&batch, codec, level, max_bytes);
            // Without the spare capacity left from growing: the log cache keeps this memory.
            Bytes::from(server.run_decompression(compress).await?.into_boxed_slice())
        }
        _ => batch,
    };
    with_header(batch)
}

fn with_max_timestamp(batch: Bytes, max_timestamp_ms: i64) -> Bytes {
    let mut batch = batch::into_mut(batch);
    batch::set_max_timestamp(&mut batch, max_timestamp_ms);
    batch.freeze()
}

/// Returns a batch that may have been changed, and its header.
fn with_header(batch: Bytes) -> Result<(BatchHeader, Bytes), ApiError> {
    let header = BatchHeader::parse(&batch)
        .ok_or_else(|| ApiError::Internal("a validated batch has no header".into()))?;
    Ok((header, batch))
}

/// Validates a batch that an import has sent. Its records stay as they are, whatever the settings
/// of the topic; only the greatest timestamp of the header is corrected.
///
/// # Errors
/// Those of [`batch::check_imported`]; [`ApiError::InvalidRecord`] for records that cannot be read,
/// or have more than 64 MiB after decompression.
async fn validate_imported(
    server: &Server,
    rules: AppendRules,
    batch: Bytes,
) -> Result<(BatchHeader, Bytes), ApiError> {
    let header = batch::check_imported(&batch, rules.max_batch_bytes)?;
    let read = move || {
        let unpacked = Unpacked::new(&batch)
            .map_err(|error| ApiError::InvalidRecord(format!("imported batch: {error}")))?;
        let newest = unpacked.records().map(|record| record.timestamp_ms).max();
        Ok((newest.unwrap_or(NO_TIMESTAMP), batch))
    };
    let (newest_ms, batch) = match header.codec() {
        Some(Codec::None) => read()?,
        _ => server.run_decompression(read).await?,
    };
    match header.is_log_append_time() || header.max_timestamp_ms == newest_ms {
        true => Ok((header, batch)),
        false => with_header(with_max_timestamp(batch, newest_ms)),
    }
}

/// Whether the topic accepts a record with this timestamp.
fn is_in_time(rules: AppendRules, now_ms: i64, timestamp_ms: i64) -> bool {
    rules.log_append_time
        || timestamp_ms == NO_TIMESTAMP
        || (now_ms.saturating_sub(timestamp_ms) <= rules.before_max_ms
            && timestamp_ms.saturating_sub(now_ms) <= rules.after_max_ms)
}

impl Summary {
    fn obeys(&self, rules: AppendRules, now_ms: i64) -> bool {
        is_in_time(rules, now_ms, self.max_timestamp_ms)
            && self.min_timestamp_ms.is_none_or(|oldest| is_in_time(rules, now_ms, oldest))
            && !(rules.needs_keys && self.lacks_keys)
    }
}

/// Lists the records of a batch that violate the topic's settings, with Kafka's error texts.
fn rejection(batch: &[u8], rules: AppendRules, now_ms: i64) -> Result<ApiError, ApiError> {
    let mut rejected = Vec::new();
    let mut first_is_time = None;
    records::for_each(batch, |index, Checked { timestamp_ms, has_key, .. }| {
        if rejected.len() == NAMED_RECORDS {
            return;
        }
        let reason = if rules.needs_keys && !has_key {
            first_is_time.get_or_insert(false);
            "Compacted topic cannot accept message without key".to_owned()
        } else if !is_in_time(rules, now_ms, timestamp_ms) {
            first_is_time.get_or_insert(true);
            let from = now_ms.saturating_sub(rules.before_max_ms);
            let to = now_ms.saturating_add(rules.after_max_ms);
            format!(
                "Timestamp {timestamp_ms} of message with offset {index} is out of range. The \
                 timestamp should be within [{from}, {to}]"
            )
        } else {
            return;
        };
        rejected.push((index, reason));
    })?;
    let times = first_is_time.ok_or_else(|| {
        ApiError::Internal("a batch was rejected, but none of its records violates a rule".into())
    })?;
    Ok(ApiError::RejectedRecords { times, records: rejected })
}
