//! Shapes of requests about authentication, users and ACLs.

use super::*;

pub(crate) const SASL_HANDSHAKE: Shape = shape(MAX, &[Field(0, MAX, Text)]);
pub(crate) const SASL_AUTHENTICATE: Shape = shape(2, &[Field(0, MAX, Bytes)]);

const USER: Struct = plain(&[Field(0, MAX, Text)]);
pub(crate) const DESCRIBE_USER_SCRAM_CREDENTIALS: Shape =
    shape(0, &[Field(0, MAX, Structs(&USER))]);

const DELETION: Struct = plain(&[Field(0, MAX, Text), Field(0, MAX, INT8)]);
const UPSERTION: Struct = plain(&[
    Field(0, MAX, Text),
    Field(0, MAX, INT8),
    Field(0, MAX, INT32),
    Field(0, MAX, Bytes),
    Field(0, MAX, Bytes),
]);
pub(crate) const ALTER_USER_SCRAM_CREDENTIALS: Shape =
    shape(0, &[Field(0, MAX, Structs(&DELETION)), Field(0, MAX, Structs(&UPSERTION))]);

/// Type, name and pattern of a resource; principal, host, operation and permission.
const ACL_FIELDS: &[Field] = &[
    Field(0, MAX, INT8),
    Field(0, MAX, Text),
    Field(1, MAX, INT8),
    Field(0, MAX, Text),
    Field(0, MAX, Text),
    Field(0, MAX, INT8),
    Field(0, MAX, INT8),
];
const ACL: Struct = plain(ACL_FIELDS);
pub(crate) const DESCRIBE_ACLS: Shape = shape(2, ACL_FIELDS);
pub(crate) const CREATE_ACLS: Shape = shape(2, &[Field(0, MAX, Structs(&ACL))]);
pub(crate) const DELETE_ACLS: Shape = shape(2, &[Field(0, MAX, Structs(&ACL))]);
