//! Shapes of requests about topics.

use super::*;

const ASSIGNED_REPLICAS: Struct = plain(&[Field(0, MAX, INT32), Field(0, MAX, Values(&INT32))]);
const NEW_TOPIC_CONFIG: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Text)]);
const NEW_TOPIC: Struct = plain(&[
    Field(0, MAX, Text),
    Field(0, MAX, INT32),
    Field(0, MAX, INT16),
    Field(0, MAX, Structs(&ASSIGNED_REPLICAS)),
    Field(0, MAX, Structs(&NEW_TOPIC_CONFIG)),
]);
pub(crate) const CREATE_TOPICS: Shape =
    shape(5, &[Field(0, MAX, Structs(&NEW_TOPIC)), Field(0, MAX, INT32), Field(0, MAX, BOOL)]);

const DOOMED_TOPIC: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, UUID)]);
pub(crate) const DELETE_TOPICS: Shape = shape(
    4,
    &[Field(6, MAX, Structs(&DOOMED_TOPIC)), Field(0, 5, Values(&Text)), Field(0, MAX, INT32)],
);

const CONFIG_RESOURCE: Struct =
    plain(&[Field(0, MAX, INT8), Field(0, MAX, Text), Field(0, MAX, Values(&Text))]);
pub(crate) const DESCRIBE_CONFIGS: Shape =
    shape(4, &[Field(0, MAX, Structs(&CONFIG_RESOURCE)), Field(0, MAX, BOOL), Field(3, MAX, BOOL)]);

const NEW_PARTITION: Struct = plain(&[Field(0, MAX, Values(&INT32))]);
const GROWING_TOPIC: Struct =
    plain(&[Field(0, MAX, Text), Field(0, MAX, INT32), Field(0, MAX, Structs(&NEW_PARTITION))]);
pub(crate) const CREATE_PARTITIONS: Shape =
    shape(2, &[Field(0, MAX, Structs(&GROWING_TOPIC)), Field(0, MAX, INT32), Field(0, MAX, BOOL)]);
