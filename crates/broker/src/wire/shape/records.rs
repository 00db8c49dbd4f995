//! Shapes of requests about records: produce, fetch, offsets of partitions.

use super::*;

const PRODUCE_PARTITION: Struct = plain(&[Field(0, MAX, INT32), Field(0, MAX, Bytes)]);
const PRODUCE_TOPIC: Struct =
    plain(&[Field(0, 12, Text), Field(13, MAX, UUID), Field(0, MAX, Structs(&PRODUCE_PARTITION))]);
pub(crate) const PRODUCE: Shape = shape(
    9,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, INT16),
        Field(0, MAX, INT32),
        Field(0, MAX, Structs(&PRODUCE_TOPIC)),
    ],
);

const FETCH_PARTITION: Struct = Struct {
    fields: &[
        Field(0, MAX, INT32),
        Field(9, MAX, INT32),
        Field(0, MAX, INT64),
        Field(12, MAX, INT32),
        Field(5, MAX, INT64),
        Field(0, MAX, INT32),
    ],
    tagged: &[Tagged(0, 17, UUID), Tagged(1, 18, INT64)],
};
const FETCH_TOPIC: Struct =
    plain(&[Field(0, 12, Text), Field(13, MAX, UUID), Field(0, MAX, Structs(&FETCH_PARTITION))]);
const FORGOTTEN_TOPIC: Struct =
    plain(&[Field(0, 12, Text), Field(13, MAX, UUID), Field(0, MAX, Values(&INT32))]);
const REPLICA_STATE: Struct = plain(&[Field(0, MAX, INT32), Field(0, MAX, INT64)]);
pub(crate) const FETCH: Shape = Shape {
    flexible: 12,
    body: Struct {
        fields: &[
            Field(0, 14, INT32),
            Field(0, MAX, INT32),
            Field(0, MAX, INT32),
            Field(0, MAX, INT32),
            Field(0, MAX, INT8),
            Field(7, MAX, INT32),
            Field(7, MAX, INT32),
            Field(0, MAX, Structs(&FETCH_TOPIC)),
            Field(7, MAX, Structs(&FORGOTTEN_TOPIC)),
            Field(11, MAX, Text),
        ],
        tagged: &[Tagged(0, 12, Text), Tagged(1, 15, Kind::Struct(&REPLICA_STATE))],
    },
};

const LIST_OFFSETS_PARTITION: Struct =
    plain(&[Field(0, MAX, INT32), Field(4, MAX, INT32), Field(0, MAX, INT64)]);
const LIST_OFFSETS_TOPIC: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&LIST_OFFSETS_PARTITION))]);
pub(crate) const LIST_OFFSETS: Shape = shape(
    6,
    &[
        Field(0, MAX, INT32),
        Field(2, MAX, INT8),
        Field(0, MAX, Structs(&LIST_OFFSETS_TOPIC)),
        Field(10, MAX, INT32),
    ],
);

pub(crate) const INIT_PRODUCER_ID: Shape = shape(
    2,
    &[Field(0, MAX, Text), Field(0, MAX, INT32), Field(3, MAX, INT64), Field(3, MAX, INT16)],
);

const EPOCH_PARTITION: Struct =
    plain(&[Field(0, MAX, INT32), Field(0, MAX, INT32), Field(0, MAX, INT32)]);
const EPOCH_TOPIC: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&EPOCH_PARTITION))]);
pub(crate) const OFFSET_FOR_LEADER_EPOCH: Shape =
    shape(4, &[Field(3, MAX, INT32), Field(0, MAX, Structs(&EPOCH_TOPIC))]);
