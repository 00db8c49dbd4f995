//! Shapes of requests about replicas and deleted records.

use super::*;

const DELETED_PARTITION: Struct = plain(&[Field(0, MAX, INT32), Field(0, MAX, INT64)]);
const DELETED_TOPIC: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&DELETED_PARTITION))]);
pub(crate) const DELETE_RECORDS: Shape =
    shape(2, &[Field(0, MAX, Structs(&DELETED_TOPIC)), Field(0, MAX, INT32)]);

const PARTITIONS: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Values(&INT32))]);
const LOG_DIR: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&PARTITIONS))]);
pub(crate) const ALTER_REPLICA_LOG_DIRS: Shape = shape(2, &[Field(0, MAX, Structs(&LOG_DIR))]);
pub(crate) const DESCRIBE_LOG_DIRS: Shape = shape(2, &[Field(0, MAX, Structs(&PARTITIONS))]);
pub(crate) const ELECT_LEADERS: Shape =
    shape(2, &[Field(1, MAX, INT8), Field(0, MAX, Structs(&PARTITIONS)), Field(0, MAX, INT32)]);

const REASSIGNED_PARTITION: Struct = plain(&[Field(0, MAX, INT32), Field(0, MAX, Values(&INT32))]);
const REASSIGNED_TOPIC: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&REASSIGNED_PARTITION))]);
pub(crate) const ALTER_PARTITION_REASSIGNMENTS: Shape = shape(
    0,
    &[Field(0, MAX, INT32), Field(1, MAX, BOOL), Field(0, MAX, Structs(&REASSIGNED_TOPIC))],
);
pub(crate) const LIST_PARTITION_REASSIGNMENTS: Shape =
    shape(0, &[Field(0, MAX, INT32), Field(0, MAX, Structs(&PARTITIONS))]);

const DELETED_OFFSET: Struct = plain(&[Field(0, MAX, INT32)]);
const DELETED_OFFSETS: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&DELETED_OFFSET))]);
pub(crate) const OFFSET_DELETE: Shape =
    shape(MAX, &[Field(0, MAX, Text), Field(0, MAX, Structs(&DELETED_OFFSETS))]);

const NAMED_TOPIC: Struct = plain(&[Field(0, MAX, Text)]);
const CURSOR: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, INT32)]);
pub(crate) const DESCRIBE_TOPIC_PARTITIONS: Shape = shape(
    0,
    &[
        Field(0, MAX, Structs(&NAMED_TOPIC)),
        Field(0, MAX, INT32),
        Field(0, MAX, Kind::MaybeStruct(&CURSOR)),
    ],
);
