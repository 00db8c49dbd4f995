//! `alluvium bench produce`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use clap::Args;
use kafka_protocol::messages::ProduceRequest;
use kafka_protocol::records::{
    Compression, NO_PARTITION_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE, Record,
    RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};

use super::{LoadArgs, Sample, Share, Tally, shares};
use crate::kafka::{Client, Receiving, produce};
use crate::output::Failure;
use crate::units::{Size, Span};

/// Default duration.
const DURATION: Duration = Duration::from_secs(10);

/// All records contain the same random bytes and the time of the start.
#[derive(Args, Debug)]
pub(crate) struct ProduceArgs {
    #[command(flatten)]
    common: LoadArgs,
    /// Offer this number of bytes of records per second over all partitions, evenly spaced, however
    /// long earlier batches take; latency is measured from when a batch was due. Default: as fast
    /// as possible; latency is measured from when a batch is sent.
    #[arg(long, value_name = "SIZE")]
    rate: Option<Size>,
    /// Duration. Default: 10s, without --total.
    #[arg(long, value_name = "TIME")]
    duration: Option<Span>,
    /// Bytes of records, in complete batches, over all partitions. Default: no limit.
    #[arg(long, value_name = "SIZE")]
    total: Option<Size>,
    /// Bytes of a record's value; it has no key.
    #[arg(long, value_name = "SIZE", default_value_t = Size::kib(1))]
    record_size: Size,
    /// Bytes of the values in a batch, one batch per request. The server must accept it: see
    /// max.message.bytes.
    #[arg(long, value_name = "SIZE", default_value_t = Size::kib(64))]
    batch_size: Size,
    /// When a batch is acknowledged: by all replicas in sync, or by the leader. A server without
    /// replicas treats both alike.
    #[arg(long, value_name = "all|1", default_value = "all", value_parser = acks)]
    acks: i16,
    /// Maximum requests in flight on a connection.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(1..),
    )]
    in_flight: u16,
}

fn acks(text: &str) -> Result<i16, String> {
    match text {
        "all" => Ok(produce::ALL),
        "1" => Ok(1),
        _ => Err("it must be all or 1".into()),
    }
}

/// The batches that a connection is to send.
struct Plan<'a> {
    args: &'a ProduceArgs,
    batch: Bytes,
    /// Bytes of values in a batch.
    batch_bytes: u64,
    /// Interval between batches of one connection, and of all connections.
    spacing: Option<(Duration, Duration)>,
    /// Batches left to send, over all connections.
    left: AtomicU64,
    end: Option<Instant>,
}

/// Each record takes some 150 bytes here before the batch is built.
const MAX_RECORDS_OF_A_BATCH: u64 = 1_000_000;

/// Runs the producers.
///
/// # Errors
/// The arguments contradict each other; the server cannot be reached, or refuses a batch.
pub(super) fn run(args: &ProduceArgs) -> Result<(), Failure> {
    let (record_bytes, batch_bytes) = (args.record_size.bytes, args.batch_size.bytes);
    if record_bytes == 0 || batch_bytes < record_bytes || batch_bytes > Size::mib(64).bytes {
        return Err(Failure::Usage(
            "--batch-size must hold a record of at least one byte, and be at most 64MiB".into(),
        ));
    }
    if args.rate.is_some_and(|rate| rate.bytes == 0) {
        return Err(Failure::Usage("--rate is 0: nothing would be produced".into()));
    }
    let records = batch_bytes / record_bytes;
    if records > MAX_RECORDS_OF_A_BATCH {
        return Err(Failure::Usage(format!(
            "--batch-size holds {records} records, but at most {MAX_RECORDS_OF_A_BATCH} are allowed"
        )));
    }
    let batch_bytes = records * record_bytes;
    let (_, shares) = shares(&args.common)?;
    let spacing = args.rate.map(|rate| {
        let of_all = batch_bytes as f64 / rate.bytes as f64;
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        (seconds(of_all * shares.len() as f64), seconds(of_all))
    });
    let batch = batch(record_bytes as usize, records as usize)?;
    let tally = Tally::new(&args.common)?;
    let duration = args.duration.map(|span| span.0);
    let duration = duration.or_else(|| args.total.is_none().then_some(DURATION));
    let plan = Plan {
        args,
        batch,
        batch_bytes,
        spacing,
        left: AtomicU64::new(
            args.total.map_or(u64::MAX, |total| total.bytes.div_ceil(batch_bytes)),
        ),
        end: duration.and_then(|duration| tally.started.checked_add(duration)),
    };
    tally.drive(&shares, |number, share| drive(number, share, &plan, &tally))?;
    tally.report(&args.common)
}

/// Builds one batch of equal records.
fn batch(record_bytes: usize, records: usize) -> Result<Bytes, Failure> {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let value = Bytes::from(crate::load::noise(record_bytes));
    let record = |offset| Record {
        transactional: false,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: NO_PARTITION_LEADER_EPOCH,
        producer_id: NO_PRODUCER_ID,
        producer_epoch: NO_PRODUCER_EPOCH,
        timestamp_type: TimestampType::Creation,
        offset,
        // Only the first record's sequence is written. With sequences that are not consecutive, the
        // encoder begins a new batch at each record.
        sequence: NO_SEQUENCE.wrapping_add(offset as i32),
        timestamp: now.as_millis() as i64,
        key: None,
        value: Some(value.clone()),
        headers: Default::default(),
    };
    let records: Vec<Record> = (0..records as i64).map(record).collect();
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    let mut batch = BytesMut::new();
    RecordBatchEncoder::encode(&mut batch, &records, &options)
        .map_err(|error| Failure::Failed(format!("cannot build a batch: {error}")))?;
    Ok(batch.freeze())
}

fn drive(number: usize, share: &Share, plan: &Plan<'_>, tally: &Tally) -> Result<(), Failure> {
    let client = Client::connect(&share.broker, &share.access).map_err(Failure::new)?;
    let version = client.version::<ProduceRequest>(produce::NEWEST).map_err(Failure::new)?;
    let (mut sending, receiving) = client.into_halves();
    let (sent, waiting) = mpsc::channel();
    let (answered, permits) = mpsc::channel();
    for _ in 0..plan.args.in_flight {
        answered.send(()).expect("its receiver is here");
    }
    let first = plan.spacing.map_or(Duration::ZERO, |(_, of_all)| of_all * number as u32);
    thread::scope(|scope| {
        let answers = Answers { receiving, version, bytes: plan.batch_bytes, tally };
        let answers = scope.spawn(move || answers.receive(&waiting, &answered));
        let mut due = tally.started + first;
        for partition in share.partitions.iter().copied().cycle() {
            if tally.is_over() {
                break;
            }
            if plan.spacing.is_some() {
                tally.sleep_until(plan.end.map_or(due, |end| due.min(end)));
            }
            // There are no more permits when the thread that receives the answers has failed.
            if permits.recv().is_err() {
                break;
            }
            if plan.spacing.is_none() {
                due = Instant::now();
            }
            if plan.end.is_some_and(|end| due >= end) || !take(&plan.left) {
                break;
            }
            let topic = &plan.args.common.topic;
            let request = produce::request(plan.args.acks, topic, partition, plan.batch.clone());
            let correlation = sending.send(version, &request).map_err(Failure::new)?;
            if sent.send((correlation, due)).is_err() {
                break;
            }
            if let Some((spacing, _)) = plan.spacing {
                due += spacing;
            }
        }
        drop(sent);
        answers.join().expect("it does not panic")
    })
}

/// Takes one of the remaining batches; returns false if there is none.
fn take(left: &AtomicU64) -> bool {
    left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// The thread that receives the answers of a connection.
struct Answers<'a> {
    receiving: Receiving,
    version: i16,
    /// Bytes of values in each request.
    bytes: u64,
    tally: &'a Tally,
}

impl Answers<'_> {
    fn receive(
        mut self,
        waiting: &mpsc::Receiver<(i32, Instant)>,
        answered: &mpsc::Sender<()>,
    ) -> Result<(), Failure> {
        for (correlation, due) in waiting {
            let answer = self.receiving.answer::<ProduceRequest>(self.version, correlation);
            produce::check(&answer.map_err(Failure::new)?).map_err(Failure::Failed)?;
            self.tally.add(Sample { due, latency: due.elapsed(), bytes: self.bytes });
            // The sender may have finished.
            let _ = answered.send(());
        }
        Ok(())
    }
}
