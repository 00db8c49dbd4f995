//! Shapes of requests about consumer groups and their offsets.

use super::*;

const OFFSET_COMMIT_PARTITION: Struct =
    plain(&[Field(0, MAX, INT32), Field(0, MAX, INT64), Field(6, MAX, INT32), Field(0, MAX, Text)]);
const OFFSET_COMMIT_TOPIC: Struct = plain(&[
    Field(0, 9, Text),
    Field(10, MAX, UUID),
    Field(0, MAX, Structs(&OFFSET_COMMIT_PARTITION)),
]);
pub(crate) const OFFSET_COMMIT: Shape = shape(
    8,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(0, MAX, Text),
        Field(7, MAX, Text),
        Field(0, 4, INT64),
        Field(0, MAX, Structs(&OFFSET_COMMIT_TOPIC)),
    ],
);

const OFFSET_FETCH_TOPIC: Struct =
    plain(&[Field(0, 9, Text), Field(10, MAX, UUID), Field(0, MAX, Values(&INT32))]);
const OFFSET_FETCH_GROUP: Struct = plain(&[
    Field(0, MAX, Text),
    Field(9, MAX, Text),
    Field(9, MAX, INT32),
    Field(0, MAX, Structs(&OFFSET_FETCH_TOPIC)),
]);
pub(crate) const OFFSET_FETCH: Shape = shape(
    6,
    &[
        Field(0, 7, Text),
        Field(0, 7, Structs(&OFFSET_FETCH_TOPIC)),
        Field(8, MAX, Structs(&OFFSET_FETCH_GROUP)),
        Field(7, MAX, BOOL),
    ],
);

pub(crate) const FIND_COORDINATOR: Shape =
    shape(3, &[Field(0, 3, Text), Field(1, MAX, INT8), Field(4, MAX, Values(&Text))]);

const JOIN_PROTOCOL: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Bytes)]);
pub(crate) const JOIN_GROUP: Shape = shape(
    6,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(1, MAX, INT32),
        Field(0, MAX, Text),
        Field(5, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, Structs(&JOIN_PROTOCOL)),
        Field(8, MAX, Text),
    ],
);

pub(crate) const HEARTBEAT: Shape = shape(
    4,
    &[Field(0, MAX, Text), Field(0, MAX, INT32), Field(0, MAX, Text), Field(3, MAX, Text)],
);

const LEAVING_MEMBER: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Text), Field(5, MAX, Text)]);
pub(crate) const LEAVE_GROUP: Shape =
    shape(4, &[Field(0, MAX, Text), Field(0, 2, Text), Field(3, MAX, Structs(&LEAVING_MEMBER))]);

const SYNC_ASSIGNMENT: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Bytes)]);
pub(crate) const SYNC_GROUP: Shape = shape(
    4,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(0, MAX, Text),
        Field(3, MAX, Text),
        Field(5, MAX, Text),
        Field(5, MAX, Text),
        Field(0, MAX, Structs(&SYNC_ASSIGNMENT)),
    ],
);

pub(crate) const DESCRIBE_GROUPS: Shape =
    shape(5, &[Field(0, MAX, Values(&Text)), Field(3, MAX, BOOL)]);

pub(crate) const LIST_GROUPS: Shape =
    shape(3, &[Field(4, MAX, Values(&Text)), Field(5, MAX, Values(&Text))]);

pub(crate) const DELETE_GROUPS: Shape = shape(2, &[Field(0, MAX, Values(&Text))]);

const OWNED_TOPIC: Struct = plain(&[Field(0, MAX, UUID), Field(0, MAX, Values(&INT32))]);
pub(crate) const CONSUMER_GROUP_HEARTBEAT: Shape = shape(
    0,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(0, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(0, MAX, Values(&Text)),
        Field(1, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, Structs(&OWNED_TOPIC)),
    ],
);

pub(crate) const CONSUMER_GROUP_DESCRIBE: Shape =
    shape(0, &[Field(0, MAX, Values(&Text)), Field(0, MAX, BOOL)]);

pub(crate) const SHARE_GROUP_HEARTBEAT: Shape = shape(
    0,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(0, MAX, Text),
        Field(0, MAX, Values(&Text)),
    ],
);

pub(crate) const SHARE_GROUP_DESCRIBE: Shape =
    shape(0, &[Field(0, MAX, Values(&Text)), Field(0, MAX, BOOL)]);

const ACKNOWLEDGED_BATCH: Struct =
    plain(&[Field(0, MAX, INT64), Field(0, MAX, INT64), Field(0, MAX, Values(&INT8))]);
const ACKNOWLEDGED_PARTITION: Struct =
    plain(&[Field(0, MAX, INT32), Field(0, MAX, Structs(&ACKNOWLEDGED_BATCH))]);
const ACKNOWLEDGED_TOPIC: Struct =
    plain(&[Field(0, MAX, UUID), Field(0, MAX, Structs(&ACKNOWLEDGED_PARTITION))]);
pub(crate) const SHARE_FETCH: Shape = shape(
    0,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(0, MAX, INT32),
        Field(0, MAX, INT32),
        Field(0, MAX, INT32),
        Field(1, MAX, INT32),
        Field(1, MAX, INT32),
        Field(2, MAX, INT8),
        Field(2, MAX, BOOL),
        Field(0, MAX, Structs(&ACKNOWLEDGED_TOPIC)),
        Field(0, MAX, Structs(&OWNED_TOPIC)),
    ],
);

pub(crate) const SHARE_ACKNOWLEDGE: Shape = shape(
    0,
    &[
        Field(0, MAX, Text),
        Field(0, MAX, Text),
        Field(0, MAX, INT32),
        Field(2, MAX, BOOL),
        Field(0, MAX, Structs(&ACKNOWLEDGED_TOPIC)),
    ],
);

const DESCRIBED_SHARE_TOPIC: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Values(&INT32))]);
const DESCRIBED_SHARE_GROUP: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&DESCRIBED_SHARE_TOPIC))]);
pub(crate) const DESCRIBE_SHARE_GROUP_OFFSETS: Shape =
    shape(0, &[Field(0, MAX, Structs(&DESCRIBED_SHARE_GROUP))]);

const ALTERED_SHARE_PARTITION: Struct = plain(&[Field(0, MAX, INT32), Field(0, MAX, INT64)]);
const ALTERED_SHARE_TOPIC: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&ALTERED_SHARE_PARTITION))]);
pub(crate) const ALTER_SHARE_GROUP_OFFSETS: Shape =
    shape(0, &[Field(0, MAX, Text), Field(0, MAX, Structs(&ALTERED_SHARE_TOPIC))]);

const DELETED_SHARE_TOPIC: Struct = plain(&[Field(0, MAX, Text)]);
pub(crate) const DELETE_SHARE_GROUP_OFFSETS: Shape =
    shape(0, &[Field(0, MAX, Text), Field(0, MAX, Structs(&DELETED_SHARE_TOPIC))]);
