//! The checkpoint of a partition's producers. The layout is in `docs/format/producer-state.md`.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use alluvium_stream::{Batch, StreamOffset};

use super::{Aborted, Producer, ProducerStates, REMEMBERED_BATCHES, Seen};
use crate::leader_epochs::{Begun, LeaderEpochs, MOST_EPOCHS};

const FORMAT_VERSION: u8 = 6;
/// The version without transactions.
const WITHOUT_TRANSACTIONS: u8 = 1;
/// The version without the times of last appends.
const WITHOUT_TIMES: u8 = 2;
/// The version whose times of last appends are record timestamps.
const TIMES_OF_RECORDS: u8 = 3;
/// The version without the end of lost offsets.
const WITHOUT_LOSSES: u8 = 4;
/// The version without leader epochs.
const WITHOUT_EPOCHS: u8 = 5;

/// The encoding of "no open transaction", and of "no lost offsets after the last batch".
const NONE: u64 = u64::MAX;

impl ProducerStates {
    /// Encodes the checkpoint at `to`; `None` if the state is empty. Equal states give equal bytes.
    pub(crate) fn encode(&self, to: StreamOffset) -> Option<Vec<u8>> {
        let (epochs, batches_end) = self.epochs.parts(to.0);
        let has_epochs = !epochs.is_empty() || batches_end.is_some();
        if self.producers.is_empty() && self.aborted.is_empty() && !has_epochs {
            return None;
        }
        let mut producers: Vec<_> = self.producers.iter().collect();
        producers.sort_unstable_by_key(|(id, _)| **id);
        let mut out = vec![FORMAT_VERSION];
        out.extend_from_slice(&(producers.len() as u32).to_le_bytes());
        for (id, producer) in producers {
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&producer.epoch.to_le_bytes());
            out.extend_from_slice(&producer.transaction.unwrap_or(NONE).to_le_bytes());
            out.extend_from_slice(&producer.last_offset.to_le_bytes());
            out.extend_from_slice(&producer.last_timestamp_ms.to_le_bytes());
            out.extend_from_slice(&producer.used_ms.to_le_bytes());
            out.push(producer.batches.len() as u8);
            for seen in &producer.batches {
                out.extend_from_slice(&seen.base_sequence.to_le_bytes());
                out.extend_from_slice(&seen.last_sequence.to_le_bytes());
                out.extend_from_slice(&seen.base_offset.to_le_bytes());
                out.extend_from_slice(&seen.max_timestamp_ms.to_le_bytes());
            }
        }
        out.extend_from_slice(&(self.aborted.len() as u32).to_le_bytes());
        for aborted in &self.aborted {
            out.extend_from_slice(&aborted.producer_id.to_le_bytes());
            out.extend_from_slice(&aborted.first_offset.to_le_bytes());
            out.extend_from_slice(&aborted.marker_offset.to_le_bytes());
            out.extend_from_slice(&aborted.stable_end.to_le_bytes());
        }
        out.extend_from_slice(&self.lost_end.to_le_bytes());
        out.extend_from_slice(&batches_end.unwrap_or(NONE).to_le_bytes());
        out.extend_from_slice(&(epochs.len() as u32).to_le_bytes());
        for (epoch, start) in epochs {
            out.extend_from_slice(&epoch.to_le_bytes());
            out.extend_from_slice(&start.to_le_bytes());
        }
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        Some(out)
    }

    /// Decodes a checkpoint. If its version does not hold last-append times by the server's clock,
    /// they are set to `unknown_ms`.
    ///
    /// # Errors
    /// Why the bytes are not a valid checkpoint.
    pub(crate) fn decode(bytes: &[u8], unknown_ms: i64) -> Result<Self, BadCheckpoint> {
        // The version is checked before the checksum: other versions may end differently.
        let version = match bytes.first() {
            Some(&version @ WITHOUT_TRANSACTIONS..=FORMAT_VERSION) => version,
            Some(&other) => return Err(BadCheckpoint::Version(other)),
            None => return Err(BadCheckpoint::Truncated),
        };
        let (content, crc) = bytes.split_last_chunk().ok_or(BadCheckpoint::Truncated)?;
        if crc32c::crc32c(content) != u32::from_le_bytes(*crc) {
            return Err(BadCheckpoint::Checksum);
        }
        let mut reader = Reader(content.get(1..).ok_or(BadCheckpoint::Truncated)?);
        let count = u32::from_le_bytes(reader.take()?);
        let (mut producers, mut open) = (HashMap::new(), BTreeMap::new());
        let (mut idle, mut newest_offset) = (BTreeSet::new(), 0);
        for _ in 0..count {
            let id = i64::from_le_bytes(reader.take()?);
            let producer = read_producer(&mut reader, version, id, unknown_ms)?;
            match producer.transaction {
                Some(first_offset) => {
                    open.insert(first_offset, id);
                }
                None => {
                    idle.insert((producer.last_offset, id));
                }
            }
            newest_offset = producer.last_offset.max(newest_offset);
            producers.insert(id, producer);
        }
        let mut aborted = VecDeque::new();
        if version > WITHOUT_TRANSACTIONS {
            for _ in 0..u32::from_le_bytes(reader.take()?) {
                aborted.push_back(Aborted {
                    producer_id: i64::from_le_bytes(reader.take()?),
                    first_offset: u64::from_le_bytes(reader.take()?),
                    marker_offset: u64::from_le_bytes(reader.take()?),
                    stable_end: u64::from_le_bytes(reader.take()?),
                });
            }
        }
        let mut lost_end = 0;
        if version > WITHOUT_LOSSES {
            lost_end = u64::from_le_bytes(reader.take()?);
        }
        let mut epochs = LeaderEpochs::default();
        if version > WITHOUT_EPOCHS {
            epochs = read_epochs(&mut reader)?;
        }
        if !reader.0.is_empty() {
            return Err(BadCheckpoint::Content(format!("{} bytes follow the end", reader.0.len())));
        }
        let ending = VecDeque::new();
        Ok(Self { producers, idle, newest_offset, open, ending, aborted, lost_end, epochs })
    }
}

fn read_epochs(reader: &mut Reader<'_>) -> Result<LeaderEpochs, BadCheckpoint> {
    let batches_end = u64::from_le_bytes(reader.take()?);
    let count = u32::from_le_bytes(reader.take()?);
    let mut begun: Vec<Begun> = Vec::new();
    for _ in 0..count {
        let (epoch, start) =
            (i32::from_le_bytes(reader.take()?), u64::from_le_bytes(reader.take()?));
        let is_next = match begun.last() {
            None => epoch > 0,
            Some((before, end)) => epoch > *before && start > *end,
        };
        if !is_next || begun.len() == MOST_EPOCHS {
            let what = format!("leader epoch {epoch} at {start} after {:?}", begun.last());
            return Err(BadCheckpoint::Content(what));
        }
        begun.push((epoch, start));
    }
    Ok(LeaderEpochs::new(begun, Some(batches_end).filter(|end| *end != NONE)))
}

fn read_producer(
    reader: &mut Reader<'_>,
    version: u8,
    id: i64,
    unknown_ms: i64,
) -> Result<Producer, BadCheckpoint> {
    let epoch = i16::from_le_bytes(reader.take()?);
    let mut transaction = NONE;
    let mut last = None;
    if version > WITHOUT_TRANSACTIONS {
        transaction = u64::from_le_bytes(reader.take()?);
        last = Some((u64::from_le_bytes(reader.take()?), i64::from_le_bytes(reader.take()?)));
    }
    let mut used_ms = unknown_ms;
    if version > WITHOUT_TIMES {
        let written_ms = i64::from_le_bytes(reader.take()?);
        if version > TIMES_OF_RECORDS {
            used_ms = written_ms;
        }
    }
    let len = u8::from_le_bytes(reader.take()?);
    if usize::from(len) > REMEMBERED_BATCHES {
        return Err(BadCheckpoint::Content(format!("producer {id} with {len} batches")));
    }
    let mut batches = Vec::with_capacity(len.into());
    for _ in 0..len {
        batches.push(Seen {
            base_sequence: i32::from_le_bytes(reader.take()?),
            last_sequence: i32::from_le_bytes(reader.take()?),
            base_offset: u64::from_le_bytes(reader.take()?),
            max_timestamp_ms: i64::from_le_bytes(reader.take()?),
        });
    }
    let of_batch = |seen: &Seen| (seen.base_offset, seen.max_timestamp_ms);
    let Some((last_offset, last_timestamp_ms)) = last.or(batches.last().map(of_batch)) else {
        return Err(BadCheckpoint::Content(format!("producer {id} without batches")));
    };
    Ok(Producer {
        epoch,
        batches,
        transaction: (transaction != NONE).then_some(transaction),
        last_offset,
        last_timestamp_ms,
        used_ms,
    })
}

/// A producer checkpoint that cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadCheckpoint {
    #[error("producer state has format version {0}, this version of the server reads 1 to 6")]
    Version(u8),
    #[error("producer state is truncated")]
    Truncated,
    #[error("producer state has a wrong checksum")]
    Checksum,
    #[error("producer state is damaged: {0}")]
    Content(String),
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], BadCheckpoint> {
        let (head, rest) = self.0.split_first_chunk().ok_or(BadCheckpoint::Truncated)?;
        self.0 = rest;
        Ok(*head)
    }
}

/// Builds the checkpoint at the end of `offsets` from `batches`, the batches of these offsets, and
/// `previous`, the checkpoint at their start. In this partition nothing is left of aborted
/// transactions that ended before `start`; see [`alluvium_stream::Fold`]. Producers expire by the
/// server's clock, which is at `now_ms`: milliseconds since the Unix epoch.
pub(crate) fn fold(
    now_ms: i64,
    offsets: Range<StreamOffset>,
    start: StreamOffset,
    previous: Option<&[u8]>,
    batches: &[Batch],
) -> Option<Vec<u8>> {
    let decode = |bytes| ProducerStates::decode(bytes, now_ms);
    let mut states = match previous.map(decode).transpose() {
        Ok(states) => states.unwrap_or_default(),
        Err(error) => {
            // The server refuses to start on such a checkpoint, so this one belongs to another
            // server.
            tracing::error!(
                %error,
                "a partition's producer checkpoint cannot be read; its state starts empty"
            );
            ProducerStates::default()
        }
    };
    // A clock that is set back would make these producers look older than they are once it is
    // correct again.
    let now_ms = now_ms.max(states.latest_ms());
    states.replay(offsets.start, batches, offsets.end, now_ms);
    states.drop_expired(now_ms);
    states.drop_aborted(start);
    states.encode(offsets.end)
}
