//! The records of the state stream of transactions. Layout: `docs/format/transaction-state.md`.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::transaction::{Doubt, Identity, Span, State, Transaction};
use crate::batch::Outcome;
use crate::groups::Position;
use crate::state_table::{Corrupt, Reader, Table, Writer};

const VERSION: u8 = 1;
const CHECKPOINT_VERSION: u8 = 2;
/// This version of the checkpoint has neither spans nor doubts.
const WITHOUT_SPANS: u8 = 1;

const KIND_INITIALISED: u8 = 1;
const KIND_ADDED: u8 = 2;
const KIND_OFFSETS: u8 = 3;
const KIND_PREPARED: u8 = 4;
const KIND_COMPLETED: u8 = 5;
const KIND_REMOVED: u8 = 6;
const KIND_PREPARED_WITH_SPANS: u8 = 7;
const KIND_PREPARED_AT_START: u8 = 8;
const KIND_RESOLVED: u8 = 9;

/// A change of one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The transactional id.
    pub(super) id: String,
    /// The time, in milliseconds since the Unix epoch.
    pub(super) at_ms: i64,
    pub(super) event: Event,
}

/// An event of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A producer begins with this identity; no transaction is open.
    Initialised { identity: Identity, timeout_ms: i32 },
    /// These become part of the transaction, which begins if it has not.
    Added { partitions: Vec<(Uuid, i32)>, groups: Vec<String> },
    /// Offsets to commit for the group if the transaction commits. An empty list of positions
    /// removes those of the topic.
    Offsets { group: String, topics: Vec<(String, Vec<Position>)> },
    /// The end is decided. Markers carry `marker` (producer id and epoch); the producer continues
    /// with `identity`. Its records are in `spans`, which records of earlier versions do not have.
    /// `resolves_doubt`: a start has decided a transaction that was in doubt after a loss.
    Prepared {
        outcome: Outcome,
        marker: (i64, i16),
        identity: Identity,
        spans: Option<Vec<Span>>,
        resolves_doubt: bool,
    },
    /// Markers and offsets are written.
    Completed,
    /// The transactional id is removed.
    Removed,
    /// Concerns all transactional ids: a start has ended the open transactions in doubt.
    Resolved,
}

impl Record {
    /// Encodes the record. Strings must not be longer than
    /// [`crate::state_table::MAX_STRING_BYTES`].
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.u8(VERSION);
        out.u8(match &self.event {
            Event::Initialised { .. } => KIND_INITIALISED,
            Event::Added { .. } => KIND_ADDED,
            Event::Offsets { .. } => KIND_OFFSETS,
            Event::Prepared { resolves_doubt: true, .. } => KIND_PREPARED_AT_START,
            Event::Prepared { spans: None, .. } => KIND_PREPARED,
            Event::Prepared { spans: Some(_), .. } => KIND_PREPARED_WITH_SPANS,
            Event::Completed => KIND_COMPLETED,
            Event::Removed => KIND_REMOVED,
            Event::Resolved => KIND_RESOLVED,
        });
        out.str(&self.id);
        out.i64(self.at_ms);
        match &self.event {
            Event::Initialised { identity, timeout_ms } => {
                write_identity(&mut out, identity);
                out.i32(*timeout_ms);
            }
            Event::Added { partitions, groups } => {
                write_partitions(&mut out, partitions);
                out.list(groups, |out, group| out.str(group));
            }
            Event::Offsets { group, topics } => {
                out.str(group);
                out.list(topics, |out, (name, positions)| {
                    out.str(name);
                    out.list(positions, write_position);
                });
            }
            Event::Prepared {
                outcome,
                marker: (producer_id, epoch),
                identity,
                spans,
                resolves_doubt,
            } => {
                out.u8(*outcome as u8);
                out.i64(*producer_id);
                out.i32((*epoch).into());
                write_identity(&mut out, identity);
                if *resolves_doubt {
                    out.u8(spans.is_some().into());
                }
                if let Some(spans) = spans {
                    out.list(spans, write_span);
                }
            }
            Event::Completed | Event::Removed | Event::Resolved => {}
        }
        out.into_bytes()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Corrupt> {
        let mut reader = Reader::new(bytes);
        reader.version("record", VERSION)?;
        let kind = reader.u8()?;
        let id = reader.str()?;
        let at_ms = reader.i64()?;
        let event = match kind {
            KIND_INITIALISED => Event::Initialised {
                identity: read_identity(&mut reader)?,
                timeout_ms: reader.i32()?,
            },
            KIND_ADDED => Event::Added {
                partitions: read_partitions(&mut reader)?,
                groups: reader.list(Reader::str)?,
            },
            KIND_OFFSETS => Event::Offsets {
                group: reader.str()?,
                topics: reader.list(|reader| Ok((reader.str()?, reader.list(read_position)?)))?,
            },
            KIND_PREPARED | KIND_PREPARED_WITH_SPANS | KIND_PREPARED_AT_START => Event::Prepared {
                outcome: read_outcome(&mut reader)?,
                marker: (reader.i64()?, read_epoch(&mut reader)?),
                identity: read_identity(&mut reader)?,
                spans: match kind {
                    KIND_PREPARED => None,
                    KIND_PREPARED_WITH_SPANS => Some(reader.list(read_span)?),
                    _ => read_spans(&mut reader)?,
                },
                resolves_doubt: kind == KIND_PREPARED_AT_START,
            },
            KIND_COMPLETED => Event::Completed,
            KIND_REMOVED => Event::Removed,
            KIND_RESOLVED => Event::Resolved,
            kind => return Err(Corrupt::unknown_kind(kind)),
        };
        reader.end()?;
        Ok(Self { id, at_ms, event })
    }
}

/// All transactions by transactional id.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Transactions(pub(super) BTreeMap<String, Transaction>);

impl Table for Transactions {
    const WHAT: &'static str = "transactions";
    const AFTER_LOSS: &'static str = "open transactions are aborted";
    const CHECKPOINT: [u8; 4] = *b"ALTX";
    const QUARANTINE: [u8; 4] = *b"ALTQ";
    const VERSION: u8 = CHECKPOINT_VERSION;
    const OLDEST_VERSION: u8 = WITHOUT_SPANS;

    fn apply_encoded(&mut self, record: &[u8]) -> Result<(), Corrupt> {
        let Record { id, at_ms, event } = Record::decode(record)?;
        match event {
            Event::Removed => drop(self.0.remove(&id)),
            Event::Resolved => self.0.values_mut().for_each(Transaction::resolved),
            event => self.0.entry(id).or_default().apply(at_ms, event),
        }
        Ok(())
    }

    fn after_loss(&mut self) {
        self.0.values_mut().for_each(Transaction::after_loss);
    }

    fn write(&self, out: &mut Writer) {
        out.list(&self.0, |out, (id, transaction)| {
            out.str(id);
            write_identity(out, &transaction.identity);
            out.i32(transaction.timeout_ms);
            out.u8(transaction.state.number());
            out.i64(transaction.marker.0);
            out.i32(transaction.marker.1.into());
            out.i64(transaction.started_at_ms);
            out.i64(transaction.updated_at_ms);
            let partitions: Vec<_> = transaction.partitions.iter().copied().collect();
            write_partitions(out, &partitions);
            out.list(&transaction.groups, |out, group| out.str(group));
            out.list(&transaction.offsets, |out, (group, topics)| {
                out.str(group);
                out.list(topics, |out, (name, partitions)| {
                    out.str(name);
                    out.list(partitions.values(), write_position);
                });
            });
            out.u8(transaction.spans.is_some().into());
            if let Some(spans) = &transaction.spans {
                out.list(spans, write_span);
            }
            out.u8(transaction.doubt.number());
        });
    }

    fn read(reader: &mut Reader<'_>, version: u8) -> Result<Self, Corrupt> {
        let transactions = reader.list(|reader| {
            let id = reader.str()?;
            let mut transaction = Transaction {
                identity: read_identity(reader)?,
                timeout_ms: reader.i32()?,
                state: State::from_number(reader.u8()?)
                    .ok_or_else(|| Corrupt::new("unknown state of a transaction"))?,
                marker: (reader.i64()?, read_epoch(reader)?),
                started_at_ms: reader.i64()?,
                updated_at_ms: reader.i64()?,
                partitions: read_partitions(reader)?.into_iter().collect(),
                groups: reader.list(Reader::str)?.into_iter().collect(),
                ..Transaction::default()
            };
            reader.list(|reader| {
                let group = reader.str()?;
                let topics =
                    reader.list(|reader| Ok((reader.str()?, reader.list(read_position)?)))?;
                transaction.add_offsets(group, topics);
                Ok(())
            })?;
            if version > WITHOUT_SPANS {
                transaction.spans = read_spans(reader)?;
                transaction.doubt = Doubt::from_number(reader.u8()?)
                    .ok_or_else(|| Corrupt::new("unknown doubt of a transaction"))?;
            }
            Ok((id, transaction))
        })?;
        Ok(Self(transactions.into_iter().collect()))
    }
}

fn write_identity(out: &mut Writer, identity: &Identity) {
    out.i64(identity.producer_id);
    out.i32(identity.epoch.into());
    out.i64(identity.previous_producer_id);
    out.i32(identity.previous_epoch.into());
}

fn read_identity(reader: &mut Reader<'_>) -> Result<Identity, Corrupt> {
    Ok(Identity {
        producer_id: reader.i64()?,
        epoch: read_epoch(reader)?,
        previous_producer_id: reader.i64()?,
        previous_epoch: read_epoch(reader)?,
    })
}

fn read_epoch(reader: &mut Reader<'_>) -> Result<i16, Corrupt> {
    reader.i32()?.try_into().map_err(|_| Corrupt::new("producer epoch out of range"))
}

fn read_outcome(reader: &mut Reader<'_>) -> Result<Outcome, Corrupt> {
    match reader.u8()? {
        0 => Ok(Outcome::Abort),
        1 => Ok(Outcome::Commit),
        _ => Err(Corrupt::new("unknown outcome of a transaction")),
    }
}

fn write_partitions(out: &mut Writer, partitions: &[(Uuid, i32)]) {
    out.list(partitions, write_partition);
}

fn write_partition(out: &mut Writer, (topic, partition): &(Uuid, i32)) {
    let (high, low) = topic.as_u64_pair();
    out.i64(high as i64);
    out.i64(low as i64);
    out.i32(*partition);
}

fn read_partitions(reader: &mut Reader<'_>) -> Result<Vec<(Uuid, i32)>, Corrupt> {
    reader.list(read_partition)
}

fn read_partition(reader: &mut Reader<'_>) -> Result<(Uuid, i32), Corrupt> {
    let topic = Uuid::from_u64_pair(reader.i64()? as u64, reader.i64()? as u64);
    Ok((topic, reader.i32()?))
}

fn write_span(out: &mut Writer, span: &Span) {
    write_partition(out, &span.partition);
    out.u64(span.records.start);
    out.u64(span.records.end);
}

fn read_span(reader: &mut Reader<'_>) -> Result<Span, Corrupt> {
    let partition = read_partition(reader)?;
    Ok(Span { partition, records: reader.u64()?..reader.u64()? })
}

/// Reads the spans of records of recovery, and of checkpoints.
fn read_spans(reader: &mut Reader<'_>) -> Result<Option<Vec<Span>>, Corrupt> {
    match reader.u8()? {
        0 => Ok(None),
        _ => reader.list(read_span).map(Some),
    }
}

fn write_position(out: &mut Writer, position: &Position) {
    out.i32(position.partition);
    out.i64(position.offset);
    out.i32(position.leader_epoch);
    out.str(&position.metadata);
}

fn read_position(reader: &mut Reader<'_>) -> Result<Position, Corrupt> {
    Ok(Position {
        partition: reader.i32()?,
        offset: reader.i64()?,
        leader_epoch: reader.i32()?,
        metadata: reader.str()?,
    })
}
