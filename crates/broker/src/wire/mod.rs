//! Bytes on the wire: what requests may look like, and how responses are framed.

pub(crate) mod fetch_response;
pub(crate) mod response;
pub(crate) mod shape;
