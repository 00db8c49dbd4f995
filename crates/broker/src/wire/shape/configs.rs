//! Shapes of requests about settings.

use super::*;

const VALUE: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Text)]);
const RESOURCE: Struct =
    plain(&[Field(0, MAX, INT8), Field(0, MAX, Text), Field(0, MAX, Structs(&VALUE))]);
pub(crate) const ALTER_CONFIGS: Shape =
    shape(2, &[Field(0, MAX, Structs(&RESOURCE)), Field(0, MAX, BOOL)]);

const OPERATION: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, INT8), Field(0, MAX, Text)]);
const ALTERED_RESOURCE: Struct =
    plain(&[Field(0, MAX, INT8), Field(0, MAX, Text), Field(0, MAX, Structs(&OPERATION))]);
pub(crate) const INCREMENTAL_ALTER_CONFIGS: Shape =
    shape(1, &[Field(0, MAX, Structs(&ALTERED_RESOURCE)), Field(0, MAX, BOOL)]);

pub(crate) const LIST_CONFIG_RESOURCES: Shape = shape(0, &[Field(1, MAX, Values(&INT8))]);
