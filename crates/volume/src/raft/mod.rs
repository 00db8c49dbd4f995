//! Raft of one group: the log in memory as raft reads it (`memory.rs`), the checks of messages that
//! raft itself does not make (`check.rs`), and conversions between raft's types and those of this
//! crate (`convert.rs`).

mod check;
mod convert;
mod memory;

pub(crate) use check::{Check, Receiver, check};
pub(crate) use convert::{
    conf_from_raft, conf_to_raft, entry_from_log, entry_to_log, hard_state_from_raft,
    hard_state_to_raft,
};
pub(crate) use memory::{MemoryLog, entry_bytes, position};
