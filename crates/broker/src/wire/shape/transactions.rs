//! Shapes of requests about transactions.

use super::*;

const TXN_TOPIC: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Values(&INT32))]);
/// Up to version 3.
pub(crate) const ADD_PARTITIONS_TO_TXN: Shape = shape(
    3,
    &[Field(0, 3, Text), Field(0, 3, INT64), Field(0, 3, INT16), Field(0, 3, Structs(&TXN_TOPIC))],
);

pub(crate) const ADD_OFFSETS_TO_TXN: Shape = shape(
    3,
    &[Field(0, MAX, Text), Field(0, MAX, INT64), Field(0, MAX, INT16), Field(0, MAX, Text)],
);

pub(crate) const END_TXN: Shape = shape(
    3,
    &[Field(0, MAX, Text), Field(0, MAX, INT64), Field(0, MAX, INT16), Field(0, MAX, BOOL)],
);

const TXN_MARKER: Struct = plain(&[
    Field(0, MAX, INT64),
    Field(0, MAX, INT16),
    Field(0, MAX, BOOL),
    Field(0, MAX, Structs(&TXN_TOPIC)),
    Field(0, MAX, INT32),
]);
pub(crate) const WRITE_TXN_MARKERS: Shape = shape(1, &[Field(0, MAX, Structs(&TXN_MARKER))]);

const TXN_OFFSET: Struct =
    plain(&[Field(0, MAX, INT32), Field(0, MAX, INT64), Field(2, MAX, INT32), Field(0, MAX, Text)]);
const TXN_OFFSETS: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&TXN_OFFSET))]);
pub(crate) const TXN_OFFSET_COMMIT: Shape = shape(
    3,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, INT64),
        Field(0, MAX, INT16),
        Field(3, MAX, INT32),
        Field(3, MAX, Text),
        Field(3, MAX, Text),
        Field(0, MAX, Structs(&TXN_OFFSETS)),
    ],
);

pub(crate) const DESCRIBE_PRODUCERS: Shape = shape(0, &[Field(0, MAX, Structs(&TXN_TOPIC))]);

pub(crate) const DESCRIBE_TRANSACTIONS: Shape = shape(0, &[Field(0, MAX, Values(&Text))]);

pub(crate) const LIST_TRANSACTIONS: Shape = shape(
    0,
    &[
        Field(0, MAX, Values(&Text)),
        Field(0, MAX, Values(&INT64)),
        Field(1, MAX, INT64),
        Field(2, MAX, Text),
    ],
);
