//! The settings of topics, and the rules for appends, retention and compaction that follow from
//! them.

use super::{Allowed, ConfigType, Overrides, Setting};
use crate::batch::Codec;
use crate::errors::ApiError;

/// The setting of a topic that is imported. Kafka does not have it.
pub const IMPORT: &str = "alluvium.import";
const CLEANUP_POLICY: &str = "cleanup.policy";
const DELETE_RETENTION_MS: &str = "delete.retention.ms";
const MIN_DIRTY_RATIO: &str = "min.cleanable.dirty.ratio";
const COMPACT: &str = "compact";
const DELETE: &str = "delete";
const COMPRESSION_TYPE: &str = "compression.type";
const GZIP_LEVEL: &str = "compression.gzip.level";
const LZ4_LEVEL: &str = "compression.lz4.level";
const ZSTD_LEVEL: &str = "compression.zstd.level";
const MAX_COMPACTION_LAG_MS: &str = "max.compaction.lag.ms";
const MAX_DECOMPRESSED_BYTES: &str = "max.decompressed.message.bytes";
pub(crate) const MAX_MESSAGE_BYTES: &str = "max.message.bytes";
const MIN_COMPACTION_LAG_MS: &str = "min.compaction.lag.ms";
const LOCAL_RETENTION_BYTES: &str = "local.retention.bytes";
const LOCAL_RETENTION_MS: &str = "local.retention.ms";
const COPY_LAG_BYTES: &str = "remote.copy.lag.bytes";
const COPY_LAG_MS: &str = "remote.copy.lag.ms";
const COPY_DISABLE: &str = "remote.log.copy.disable";
const REMOTE_STORAGE: &str = "remote.storage.enable";
const DELETE_ON_DISABLE: &str = "remote.log.delete.on.disable";
/// The value of a local retention that is that of the topic.
const INHERITED: i64 = -2;
const RETENTION_BYTES: &str = "retention.bytes";
const RETENTION_MS: &str = "retention.ms";
const TIMESTAMP_AFTER_MAX_MS: &str = "message.timestamp.after.max.ms";
const TIMESTAMP_BEFORE_MAX_MS: &str = "message.timestamp.before.max.ms";
const TIMESTAMP_TYPE: &str = "message.timestamp.type";
const LOG_APPEND_TIME: &str = "LogAppendTime";

const FOREVER: &str = "9223372036854775807";

const fn used(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: Allowed,
    broker_name: &'static str,
    documentation: &'static str,
) -> Setting {
    Setting {
        name,
        kind,
        default,
        allowed,
        broker_name: Some(broker_name),
        effective: true,
        documentation,
    }
}

/// A setting without a default of brokers.
const fn used_by_topics(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default, allowed: Any, broker_name: None, effective: true, documentation }
}

const fn unused(
    name: &'static str,
    kind: ConfigType,
    default: &'static str,
    allowed: Allowed,
    broker_name: Option<&'static str>,
    documentation: &'static str,
) -> Setting {
    Setting { name, kind, default, allowed, broker_name, effective: false, documentation }
}

use Allowed::{Any, AtLeast, Between, MinusOneOr, OneOf, Only, Replicas};
use ConfigType::{Boolean, Double, Int, List, Long, String as Text};

/// All settings of topics, by name: [`IMPORT`], and those of Apache Kafka 4.4, with its types,
/// defaults and bounds.
#[rustfmt::skip]
pub(crate) const SETTINGS: &[Setting] = &[
    Setting {
        name: IMPORT,
        kind: Text,
        default: "",
        allowed: Any,
        broker_name: None,
        effective: true,
        documentation: "What the topic is imported from. If it is not empty, the topic takes \
                        batches at the offsets that they have there, and none of producers; \
                        nothing is deleted or compacted. Set only when a topic is created.",
    },
    used(CLEANUP_POLICY, List, DELETE, OneOf(&[COMPACT, DELETE]), "log.cleanup.policy",
        "Removal of old records. delete: by retention.ms and retention.bytes. compact: the last \
         record of each key is kept; keys are required. Neither: all are kept."),
    used(GZIP_LEVEL, Int, "-1", MinusOneOr(1, 9), GZIP_LEVEL,
        "The level of gzip if compression.type is gzip; -1 for its default."),
    used(LZ4_LEVEL, Int, "9", Between(1, 17), LZ4_LEVEL,
        "The level of lz4 if compression.type is lz4."),
    used(COMPRESSION_TYPE, Text, "producer",
        OneOf(&["uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"]), COMPRESSION_TYPE,
        "The compression of stored batches. producer: unchanged. With any other value, batches \
         with other compression are recompressed, which costs processor time."),
    used(ZSTD_LEVEL, Int, "3", Between(-131_072, 22), ZSTD_LEVEL,
        "The level of zstd if compression.type is zstd."),
    used(DELETE_RETENTION_MS, Long, "86400000", AtLeast(0), "log.cleaner.delete.retention.ms",
        "How long log compaction keeps a record without a value after compacting it for the first \
         time."),
    unused("errors.deadletterqueue.group.enable", Boolean, "false", Any, None,
        "Whether share groups may use it as a dead letter queue. No effect here: they have none."),
    unused("file.delete.delay.ms", Long, "60000", AtLeast(0), Some("log.segment.delete.delay.ms"),
        "How long files of deleted segments are kept. No effect here: a log has no segments."),
    unused("flush.messages", Long, FOREVER, AtLeast(1), Some("log.flush.interval.messages"),
        "Records after which the log is flushed. No effect here: every record is flushed before \
         it is acknowledged."),
    unused("flush.ms", Long, FOREVER, AtLeast(0), Some("log.flush.interval.ms"),
        "Time after which the log is flushed. No effect here: every record is flushed before it \
         is acknowledged."),
    unused("follower.replication.throttled.replicas", List, "", Replicas, None,
        "Replicas that are throttled as followers. No effect here: there is one replica."),
    unused("index.interval.bytes", Int, "4096", AtLeast(0), Some("log.index.interval.bytes"),
        "The density of the offset index. No effect here: there is none to tune."),
    unused("leader.replication.throttled.replicas", List, "", Replicas, None,
        "Replicas that are throttled as leaders. No effect here: there is one replica."),
    used(LOCAL_RETENTION_BYTES, Long, "-2", AtLeast(-2), "log.local.retention.bytes",
        "The bytes that are kept when remote.storage.enable is switched off; -2 for \
         retention.bytes."),
    used(LOCAL_RETENTION_MS, Long, "-2", AtLeast(-2), "log.local.retention.ms",
        "The age up to which records are kept when remote.storage.enable is switched off; -2 for \
         retention.ms."),
    used(MAX_COMPACTION_LAG_MS, Long, FOREVER, AtLeast(1), "log.cleaner.max.compaction.lag.ms",
        "The age at which a record is compacted regardless of min.cleanable.dirty.ratio."),
    used(MAX_DECOMPRESSED_BYTES, Int, "2147483639", Between(1, 2_147_483_639),
        MAX_DECOMPRESSED_BYTES,
        "The largest record of a compressed batch in bytes, decompressed. The records of a batch \
         have at most 256 MiB together."),
    used(MAX_MESSAGE_BYTES, Int, "1048588", AtLeast(0), "message.max.bytes",
        "The largest record batch in bytes, after compression. The server's limit, 16 MiB or half \
         of its log cache if that is less, applies to greater values."),
    used(TIMESTAMP_AFTER_MAX_MS, Long, "3600000", AtLeast(0), "log.message.timestamp.after.max.ms",
        "How far a record's timestamp may be ahead of the server's clock. Not checked with \
         LogAppendTime."),
    used(TIMESTAMP_BEFORE_MAX_MS, Long, FOREVER, AtLeast(0), "log.message.timestamp.before.max.ms",
        "How far a record's timestamp may be behind the server's clock. Not checked with \
         LogAppendTime."),
    used(TIMESTAMP_TYPE, Text, "CreateTime", OneOf(&["CreateTime", LOG_APPEND_TIME]),
        "log.message.timestamp.type",
        "Whether records carry their producer's timestamp or the time of the append. A change \
         applies to new batches."),
    used(MIN_DIRTY_RATIO, Double, "0.5", Between(0, 1), "log.cleaner.min.cleanable.ratio",
        "The fraction of new data in a partition above which it is compacted."),
    used(MIN_COMPACTION_LAG_MS, Long, "0", AtLeast(0), "log.cleaner.min.compaction.lag.ms",
        "The age below which a record is not compacted."),
    unused("min.insync.replicas", Int, "1",
        Only("1", "a single server keeps one replica of each partition"),
        Some("min.insync.replicas"),
        "The replicas that have a record when it is acknowledged. No effect here: only 1 is \
         allowed."),
    unused("preallocate", Boolean, "false", Any, Some("log.preallocate"),
        "Whether segment files are preallocated. No effect here: a log has no segments."),
    unused(COPY_LAG_BYTES, Long, "-1", AtLeast(-1), Some("log.remote.copy.lag.bytes"),
        "Bytes that stay local before they are copied to remote storage. No effect here: uploads \
         are not delayed."),
    unused(COPY_LAG_MS, Long, "0", AtLeast(-1), Some("log.remote.copy.lag.ms"),
        "The age at which records are copied to remote storage. No effect here: uploads are not \
         delayed."),
    unused(COPY_DISABLE, Boolean, "false", Any, None,
        "Whether copying to remote storage is disabled. No effect here: true is refused."),
    used_by_topics(DELETE_ON_DISABLE, Boolean, "false",
        "Whether switching remote.storage.enable off deletes the records that local.retention.ms \
         and local.retention.bytes do not keep. Without it, switching off is refused."),
    used_by_topics(REMOTE_STORAGE, Boolean, "false",
        "Whether the topic has tiered storage by Kafka's terms. All records go to the object store \
         regardless; if true, ListOffsets reports where the tiers end."),
    used(RETENTION_BYTES, Long, "-1", Any, "log.retention.bytes",
        "The size to which a partition is cut by deleting its oldest records, object by object; \
         at least this much is kept. Negative for no limit."),
    used(RETENTION_MS, Long, "604800000", AtLeast(-1), "log.retention.ms",
        "The age at which records are deleted, object by object, when the newest record of an \
         object has reached it. -1 for no limit."),
    unused("segment.bytes", Int, "1073741824", AtLeast(1 << 20), Some("log.segment.bytes"),
        "The size of a segment's file. No effect here: a log has no segments."),
    unused("segment.index.bytes", Int, "10485760", AtLeast(4), Some("log.index.size.max.bytes"),
        "The size of a segment's index. No effect here: a log has no segments."),
    unused("segment.jitter.ms", Long, "0", AtLeast(0), Some("log.roll.jitter.ms"),
        "The jitter of the ends of segments. No effect here: a log has no segments."),
    unused("segment.ms", Long, "604800000", AtLeast(1), Some("log.roll.ms"),
        "The time after which a segment ends. No effect here: a log has no segments."),
    unused("unclean.leader.election.enable", Boolean, "false", Any,
        Some("unclean.leader.election.enable"),
        "Whether a lagging replica may become leader. No effect here: there is one replica."),
];

/// The setting with this name.
pub(crate) fn find(name: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.name == name)
}

/// Checks all of a topic's own settings.
///
/// # Returns
/// The settings in their stored form.
///
/// # Errors
/// [`ApiError::InvalidConfig`] for an unknown name, a value that is not allowed, or values that
/// contradict each other.
pub(crate) fn check(overrides: &Overrides) -> Result<Overrides, ApiError> {
    let mut checked = Overrides::new();
    for (name, value) in overrides {
        let setting = find(name)
            .ok_or_else(|| ApiError::InvalidConfig(format!("Unknown topic config name: {name}")))?;
        checked.insert(name.clone(), setting.check(value).map_err(ApiError::InvalidConfig)?);
    }
    let values = Values { overrides: &checked, defaults: &Overrides::new() };
    let (min, max) = (values.number(MIN_COMPACTION_LAG_MS), values.number(MAX_COMPACTION_LAG_MS));
    if min > max {
        return Err(ApiError::InvalidConfig(format!(
            "conflict topic config setting {MIN_COMPACTION_LAG_MS} ({min}) > \
             {MAX_COMPACTION_LAG_MS} ({max})"
        )));
    }
    Ok(checked)
}

/// Checks that a change of settings does not begin an import: the topic may have open transactions,
/// and requests of producers in progress.
///
/// # Errors
/// [`ApiError::InvalidConfig`].
pub(crate) fn check_import(before: &Overrides, after: &Overrides) -> Result<(), ApiError> {
    let is_new = |value: &String| !value.is_empty() && before.get(IMPORT) != Some(value);
    match after.get(IMPORT).is_some_and(is_new) {
        false => Ok(()),
        true => Err(ApiError::InvalidConfig(format!(
            "{IMPORT} can be set only when a topic is created"
        ))),
    }
}

/// The effective settings of a topic: its own, else the broker's, else Kafka's defaults. All stored
/// values have been checked.
struct Values<'a> {
    overrides: &'a Overrides,
    /// The broker's values, by the topics' setting names.
    defaults: &'a Overrides,
}

impl<'a> Values<'a> {
    fn get(&self, name: &str) -> &'a str {
        let own = self.overrides.get(name).or_else(|| self.defaults.get(name));
        match own {
            Some(value) => value,
            None => find(name).map_or("", |setting| setting.default),
        }
    }

    /// The value as a number; the default if an older version stored an invalid one.
    fn number(&self, name: &str) -> i64 {
        let default = || find(name).and_then(|setting| setting.default.parse().ok());
        self.get(name).parse().ok().or_else(default).unwrap_or_default()
    }

    fn has_policy(&self, policy: &str) -> bool {
        self.get(CLEANUP_POLICY).split(',').any(|one| one == policy)
    }
}

/// Checks a local retention against the retention, as Kafka does: names and values.
///
/// # Errors
/// The reason.
pub(super) fn check_local(
    (of_total, total): (&str, i64),
    (of_local, local): (&str, i64),
) -> Result<(), String> {
    let reason = match local {
        _ if total < 0 => return Ok(()),
        -1 => format!("must not be -1 as {of_total} value is set as {total}."),
        _ if local > total => format!("must not be more than {of_total} property value: {total}"),
        _ => return Ok(()),
    };
    Err(format!("Invalid value {local} for configuration {of_local}: Value {reason}"))
}

/// Whether a topic with these settings is being imported.
fn is_import(settings: &Overrides) -> bool {
    settings.get(IMPORT).is_some_and(|source| !source.is_empty())
}

/// Checks the settings of tiered storage against each other as Kafka does, with the broker's
/// `defaults`. `before` are the settings of an existing topic.
///
/// # Errors
/// [`ApiError::InvalidConfig`].
pub(crate) fn check_tiers(
    before: &Overrides,
    after: &Overrides,
    defaults: &Overrides,
) -> Result<(), ApiError> {
    let values = Values { overrides: after, defaults };
    let invalid = |name: &str, value: i64, reason: String| {
        let text = format!("Invalid value {value} for configuration {name}: {reason}");
        Err(ApiError::InvalidConfig(text))
    };
    let is_true = |settings: &Overrides, name| settings.get(name).is_some_and(|it| it == "true");
    // Earlier versions accepted it, so it may stay.
    if is_true(after, COPY_DISABLE) && !is_true(before, COPY_DISABLE) {
        return Err(ApiError::InvalidConfig(format!(
            "Invalid value true for configuration {COPY_DISABLE}: the log frees its space only by \
             copying records to the object store"
        )));
    }
    if values.get(REMOTE_STORAGE) != "true" {
        // An import takes the settings of its source, which has deleted what it wanted to.
        let was_on = is_true(before, REMOTE_STORAGE) && !is_import(before);
        if was_on && values.get(DELETE_ON_DISABLE) != "true" {
            // Kafka's text, without its advice to disable copies.
            return Err(ApiError::InvalidConfig(format!(
                "It is invalid to disable remote storage without deleting remote data. If you \
                 want to disable remote storage and delete all remote data, please set \
                 `{REMOTE_STORAGE}=false,{DELETE_ON_DISABLE}=true`."
            )));
        }
        return Ok(());
    }
    for (of_topic, of_tier, of_lag) in [
        (RETENTION_BYTES, LOCAL_RETENTION_BYTES, COPY_LAG_BYTES),
        (RETENTION_MS, LOCAL_RETENTION_MS, COPY_LAG_MS),
    ] {
        let (total, local) = (values.number(of_topic), values.number(of_tier));
        let is_own = local != INHERITED;
        if is_own {
            check_local((of_topic, total), (of_tier, local)).map_err(ApiError::InvalidConfig)?;
        }
        let lag = values.number(of_lag);
        let effective = if is_own { local } else { total };
        if lag > 0 && effective >= 0 && lag > effective {
            let reason =
                format!("Value must not be more than {of_tier} property value: {effective}");
            return invalid(of_lag, lag, reason);
        }
    }
    Ok(())
}

/// The rules for a topic's records that follow from its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rules {
    pub(crate) append: AppendRules,
    pub(crate) retention: RetentionRules,
    /// What is kept when `remote.storage.enable` is switched off.
    pub(crate) local_retention: RetentionRules,
    /// `remote.storage.enable`.
    pub(crate) is_tiered: bool,
    /// Whether only compaction may remove records.
    pub(crate) only_compacts: bool,
    /// `None` if the topic is not log-compacted.
    pub(crate) compaction: Option<CompactionRules>,
}

/// The rules for appends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AppendRules {
    /// Whether `alluvium.import` is set.
    pub(crate) is_import: bool,
    /// `max.message.bytes`, or the store's limit if that is less.
    pub(crate) max_batch_bytes: u32,
    /// `max.decompressed.message.bytes`: the limit on a record of a compressed batch.
    pub(crate) max_decompressed_record_bytes: u32,
    /// Whether `message.timestamp.type` is `LogAppendTime`.
    pub(crate) log_append_time: bool,
    /// `message.timestamp.before.max.ms`.
    pub(crate) before_max_ms: i64,
    /// `message.timestamp.after.max.ms`.
    pub(crate) after_max_ms: i64,
    /// Whether records without a key are refused: `cleanup.policy` includes `compact`.
    pub(crate) needs_keys: bool,
    /// `compression.type` and the compression level; `None` keeps the producer's compression.
    pub(crate) compression: Option<(Codec, i32)>,
}

/// The rules for log compaction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CompactionRules {
    /// `min.cleanable.dirty.ratio`.
    pub(crate) min_dirty_ratio: f64,
    /// `min.compaction.lag.ms`.
    pub(crate) min_lag_ms: i64,
    /// `max.compaction.lag.ms`; `i64::MAX` for no limit.
    pub(crate) max_lag_ms: i64,
    /// `delete.retention.ms`.
    pub(crate) delete_retention_ms: i64,
}

/// The limits for retention; `None` means no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RetentionRules {
    pub(crate) age_ms: Option<i64>,
    pub(crate) keep_bytes: Option<u64>,
}

impl Rules {
    /// The rules of a topic with these settings of its own, and the broker's `defaults` by the
    /// topics' setting names.
    pub(crate) fn new(overrides: &Overrides, defaults: &Overrides) -> Self {
        let values = Values { overrides, defaults };
        let level = |name| i32::try_from(values.number(name)).unwrap_or_default();
        let compression = match values.get(COMPRESSION_TYPE) {
            "uncompressed" => Some((Codec::None, 0)),
            "gzip" => Some((Codec::Gzip, level(GZIP_LEVEL))),
            "snappy" => Some((Codec::Snappy, 0)),
            "lz4" => Some((Codec::Lz4, level(LZ4_LEVEL))),
            "zstd" => Some((Codec::Zstd, level(ZSTD_LEVEL))),
            _ => None,
        };
        let is_import = is_import(overrides);
        let append = AppendRules {
            is_import,
            // The source may have had another limit.
            max_batch_bytes: match is_import {
                true => u32::MAX,
                false => u32::try_from(values.number(MAX_MESSAGE_BYTES)).unwrap_or(u32::MAX),
            },
            max_decompressed_record_bytes: u32::try_from(values.number(MAX_DECOMPRESSED_BYTES))
                .unwrap_or(u32::MAX),
            // Imported batches keep their time.
            log_append_time: !is_import && values.get(TIMESTAMP_TYPE) == LOG_APPEND_TIME,
            before_max_ms: values.number(TIMESTAMP_BEFORE_MAX_MS),
            after_max_ms: values.number(TIMESTAMP_AFTER_MAX_MS),
            needs_keys: values.has_policy(COMPACT),
            compression,
        };
        let deletes = !is_import && values.has_policy(DELETE);
        let retention = RetentionRules {
            age_ms: Some(values.number(RETENTION_MS)).filter(|ms| deletes && *ms >= 0),
            keep_bytes: u64::try_from(values.number(RETENTION_BYTES)).ok().filter(|_| deletes),
        };
        let local = |name, total| match values.number(name) {
            INHERITED => total,
            own => own,
        };
        let local_age = local(LOCAL_RETENTION_MS, values.number(RETENTION_MS));
        let local_bytes = local(LOCAL_RETENTION_BYTES, values.number(RETENTION_BYTES));
        let local_retention = RetentionRules {
            age_ms: Some(local_age).filter(|ms| deletes && *ms >= 0),
            keep_bytes: u64::try_from(local_bytes).ok().filter(|_| deletes),
        };
        let compacts = !is_import && values.has_policy(COMPACT);
        let compaction = compacts.then(|| CompactionRules {
            min_dirty_ratio: values.get(MIN_DIRTY_RATIO).parse().unwrap_or(0.5),
            min_lag_ms: values.number(MIN_COMPACTION_LAG_MS),
            max_lag_ms: values.number(MAX_COMPACTION_LAG_MS),
            delete_retention_ms: values.number(DELETE_RETENTION_MS),
        });
        Self {
            append,
            retention,
            local_retention,
            is_tiered: values.get(REMOTE_STORAGE) == "true",
            only_compacts: compaction.is_some() && !deletes,
            compaction,
        }
    }

    /// Limits the batch size to that of the store. Greater values of the setting are accepted:
    /// users set the greatest batch size that they could ever need, and the tests of franz-go set
    /// 128 MiB. See [`warn_of_bound`].
    pub(crate) fn bounded(mut self, store_bytes: u64) -> Self {
        let max_bytes = &mut self.append.max_batch_bytes;
        *max_bytes = u32::try_from(store_bytes).map_or(*max_bytes, |bytes| bytes.min(*max_bytes));
        self
    }
}

/// Warns the operator if the batch size set for `scope` exceeds the limit of the store, which then
/// applies.
pub(crate) fn warn_of_bound(scope: &str, max_message_bytes: Option<&String>, store_bytes: u64) {
    let wanted = max_message_bytes.and_then(|value| value.parse::<u64>().ok());
    if let Some(wanted) = wanted.filter(|wanted| *wanted > store_bytes) {
        tracing::warn!(
            scope,
            wanted,
            counts_as = store_bytes,
            "the configured batch size exceeds the limit of the store, which applies instead"
        );
    }
}

#[cfg(test)]
mod tests {
    use kafka_protocol::ResponseError;

    use super::*;

    fn overrides(settings: &[(&str, &str)]) -> Overrides {
        settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn retention_needs_a_limit_and_the_delete_policy() {
        let rules = |own: &[(&str, &str)]| Rules::new(&overrides(own), &Overrides::new()).retention;
        let none = RetentionRules::default();
        let (age, bytes) = (("retention.ms", "7"), ("retention.bytes", "9"));
        let both = RetentionRules { age_ms: Some(7), keep_bytes: Some(9) };
        let a_week = RetentionRules { age_ms: Some(7 * 86_400_000), keep_bytes: None };
        assert_eq!(rules(&[]), a_week);
        assert_eq!(rules(&[("retention.ms", "-1"), ("retention.bytes", "-1")]), none);
        assert_eq!(rules(&[age, bytes]), both);
        assert_eq!(rules(&[age]), RetentionRules { keep_bytes: None, ..both });
        assert_eq!(rules(&[bytes, ("cleanup.policy", "compact,delete")]).keep_bytes, Some(9));
        assert_eq!(rules(&[age, bytes, ("cleanup.policy", "compact")]), none);
        assert_eq!(rules(&[age, bytes, ("cleanup.policy", "")]), none);
    }

    #[test]
    fn a_topic_without_a_setting_uses_the_brokers() {
        let defaults = overrides(&[
            ("retention.ms", "5"),
            ("max.message.bytes", "9"),
            ("cleanup.policy", "compact,delete"),
        ]);
        let rules = Rules::new(&Overrides::new(), &defaults);
        assert_eq!((rules.retention.age_ms, rules.append.max_batch_bytes), (Some(5), 9));
        assert!(rules.append.needs_keys && !rules.only_compacts);
        let own = overrides(&[("retention.ms", "6"), ("cleanup.policy", "compact")]);
        let rules = Rules::new(&own, &defaults);
        assert_eq!((rules.retention.age_ms, rules.append.max_batch_bytes), (None, 9));
        assert!(rules.only_compacts);
    }

    #[test]
    fn compaction_has_kafkas_defaults() {
        let rules = |own: &[(&str, &str)]| Rules::new(&overrides(own), &Overrides::new());
        assert_eq!(rules(&[]).compaction, None);
        let mut wanted = CompactionRules {
            min_dirty_ratio: 0.5,
            min_lag_ms: 0,
            max_lag_ms: i64::MAX,
            delete_retention_ms: 86_400_000,
        };
        let compact = ("cleanup.policy", "compact,delete");
        assert_eq!(rules(&[compact]).compaction, Some(wanted));
        (wanted.min_dirty_ratio, wanted.delete_retention_ms) = (0.01, 7);
        let own = [compact, ("min.cleanable.dirty.ratio", "0.01"), ("delete.retention.ms", "7")];
        assert_eq!(rules(&own).compaction, Some(wanted));
    }

    #[test]
    fn contradictions_and_unknown_names_are_refused() {
        let refused = |own: &[(&str, &str)]| check(&overrides(own)).unwrap_err();
        let error = refused(&[("min.compaction.lag.ms", "100"), ("max.compaction.lag.ms", "50")]);
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (
                ResponseError::InvalidConfig,
                "conflict topic config setting min.compaction.lag.ms (100) > \
                 max.compaction.lag.ms (50)"
            )
        );
        let error = refused(&[("nope", "1")]);
        assert_eq!(
            (error.kind(), error.to_string().as_str()),
            (ResponseError::InvalidConfig, "Unknown topic config name: nope")
        );
    }

    #[test]
    fn an_import_deletes_and_changes_nothing() {
        let own = [
            (IMPORT, "true"),
            ("cleanup.policy", "compact,delete"),
            ("retention.bytes", "9"),
            ("message.timestamp.type", "LogAppendTime"),
        ];
        let rules = Rules::new(&check(&overrides(&own)).unwrap(), &Overrides::new());
        assert!(rules.append.is_import && !rules.append.log_append_time && !rules.only_compacts);
        assert_eq!((rules.retention, rules.compaction), (RetentionRules::default(), None));
    }

    #[test]
    fn settings_of_tiers_are_checked_against_each_other() {
        let on = ("remote.storage.enable", "true");
        let refused = |before: &[(&str, &str)], own: &[(&str, &str)]| {
            let own = check(&overrides(own)).unwrap();
            let checked = check_tiers(&overrides(before), &own, &Overrides::new());
            checked.err().map(|error| error.to_string())
        };
        let (week, local_ms) = ("retention.ms", "local.retention.ms");
        for fine in [
            &[on][..],
            &[on, (local_ms, "604800000")],
            &[on, (week, "-1"), (local_ms, "-1")],
            &[on, (week, "-1"), (local_ms, "5")],
            &[on, ("retention.bytes", "-1"), ("local.retention.bytes", "7")],
            &[on, ("cleanup.policy", "compact")],
            &[(local_ms, "-1")],
        ] {
            assert_eq!(refused(&[], fine), None, "{fine:?}");
        }
        for (wrong, reason) in [
            (&[on, (local_ms, "-1")][..], "Value must not be -1 as retention.ms value is set as"),
            (&[on, (local_ms, "604800001")], "more than retention.ms property value: 604800000"),
            (
                &[on, ("retention.bytes", "5"), ("local.retention.bytes", "6")],
                "Invalid value 6 for configuration local.retention.bytes: Value must not be more \
                 than retention.bytes property value: 5",
            ),
            (
                &[on, (local_ms, "5"), ("remote.copy.lag.ms", "6")],
                "Invalid value 6 for configuration remote.copy.lag.ms: Value must not be more \
                 than local.retention.ms property value: 5",
            ),
        ] {
            let error = refused(&[], wrong).unwrap_or_default();
            assert!(error.contains(reason), "{wrong:?}: {error}");
        }
        let error = refused(&[on], &[]).unwrap_or_default();
        assert!(error.contains("without deleting remote data"), "{error}");
        assert_eq!(refused(&[on], &[("remote.log.delete.on.disable", "true")]), None);
        let no_copies = ("remote.log.copy.disable", "true");
        let error = refused(&[], &[no_copies]).unwrap_or_default();
        assert!(error.contains("frees its space"), "{error}");
        assert_eq!(refused(&[no_copies], &[no_copies]), None, "an earlier version accepted it");
        assert_eq!(refused(&[on, (IMPORT, "x")], &[]), None, "the end of an import");
        let error = refused(&[on, (IMPORT, "")], &[]).unwrap_or_default();
        assert!(error.contains("without deleting remote data"), "no import: {error}");
    }

    #[test]
    fn local_retention_is_that_of_the_topic_unless_it_is_set() {
        let rules = |own: &[(&str, &str)]| Rules::new(&overrides(own), &Overrides::new());
        let own = rules(&[("retention.ms", "7"), ("local.retention.bytes", "3")]);
        assert_eq!(own.local_retention, RetentionRules { age_ms: Some(7), keep_bytes: Some(3) });
        assert!(!own.is_tiered && rules(&[("remote.storage.enable", "true")]).is_tiered);
    }

    #[test]
    fn settings_become_rules() {
        let own = [
            ("max.message.bytes", "100"),
            ("message.timestamp.type", "LogAppendTime"),
            ("message.timestamp.before.max.ms", "3"),
            ("compression.type", "zstd"),
            ("compression.zstd.level", "7"),
        ];
        let rules = Rules::new(&check(&overrides(&own)).unwrap(), &Overrides::new()).append;
        let expected = AppendRules {
            is_import: false,
            max_batch_bytes: 100,
            max_decompressed_record_bytes: 2_147_483_639,
            log_append_time: true,
            before_max_ms: 3,
            after_max_ms: 3_600_000,
            needs_keys: false,
            compression: Some((Codec::Zstd, 7)),
        };
        assert_eq!(rules, expected);
    }
}
