//! Shapes of requests about the server.

use super::*;

const METADATA_TOPIC: Struct = plain(&[Field(10, MAX, UUID), Field(0, MAX, Text)]);
pub(crate) const METADATA: Shape = shape(
    9,
    &[
        Field(0, MAX, Structs(&METADATA_TOPIC)),
        Field(4, MAX, BOOL),
        Field(8, 10, BOOL),
        Field(8, MAX, BOOL),
    ],
);

pub(crate) const API_VERSIONS: Shape = shape(3, &[Field(3, MAX, Text), Field(3, MAX, Text)]);

const QUORUM_PARTITION: Struct = plain(&[Field(0, MAX, INT32)]);
const QUORUM_TOPIC: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, Structs(&QUORUM_PARTITION))]);
pub(crate) const DESCRIBE_QUORUM: Shape = shape(0, &[Field(0, MAX, Structs(&QUORUM_TOPIC))]);

pub(crate) const DESCRIBE_CLUSTER: Shape =
    shape(0, &[Field(0, MAX, BOOL), Field(1, MAX, INT8), Field(2, MAX, BOOL)]);

const FEATURE_UPDATE: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, INT16), Field(0, 0, BOOL), Field(1, MAX, INT8)]);
pub(crate) const UPDATE_FEATURES: Shape =
    shape(0, &[Field(0, MAX, INT32), Field(0, MAX, Structs(&FEATURE_UPDATE)), Field(1, MAX, BOOL)]);
