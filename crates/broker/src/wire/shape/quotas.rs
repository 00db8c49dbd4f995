//! Shapes of requests about quotas.

use super::*;

const DOUBLE: Kind = Fixed(8);

const COMPONENT: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, INT8), Field(0, MAX, Text)]);
pub(crate) const DESCRIBE_CLIENT_QUOTAS: Shape =
    shape(1, &[Field(0, MAX, Structs(&COMPONENT)), Field(0, MAX, BOOL)]);

const ENTITY: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, Text)]);
const OPERATION: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, DOUBLE), Field(0, MAX, BOOL)]);
const ENTRY: Struct = plain(&[Field(0, MAX, Structs(&ENTITY)), Field(0, MAX, Structs(&OPERATION))]);
pub(crate) const ALTER_CLIENT_QUOTAS: Shape =
    shape(1, &[Field(0, MAX, Structs(&ENTRY)), Field(0, MAX, BOOL)]);
