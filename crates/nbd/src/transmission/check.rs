//! The rules of a request that need nothing but its header.

use std::borrow::Cow;

use crate::disk::{DiskError, ZeroMode};
use crate::protocol::{Command, Errno, MAX_PAYLOAD, Request, command_flag as flag};

/// Greatest number of extents of a reply to BLOCK_STATUS. Clients ask again for the rest.
pub(crate) const MAX_EXTENTS: usize = 8192;

/// What a connection has negotiated, as far as it decides which requests are valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) size_bytes: u64,
    pub(crate) is_read_only: bool,
    pub(crate) is_structured: bool,
    pub(crate) has_allocation: bool,
}

/// What to do for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Read; in one chunk if unfragmented.
    Read {
        is_unfragmented: bool,
    },
    Write,
    Flush,
    Discard,
    Prefetch,
    Zero {
        mode: ZeroMode,
        only_if_fast: bool,
    },
    Status {
        max_extents: usize,
    },
    /// A request without effect, for a range of length 0.
    Nothing,
}

/// Why a request failed, as the client gets to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) errno: Errno,
    pub(crate) text: Cow<'static, str>,
}

impl Failure {
    pub(crate) const fn new(errno: Errno, text: &'static str) -> Self {
        Self { errno, text: Cow::Borrowed(text) }
    }

    /// The failure of requests after the export was removed or the disk was fenced.
    pub(crate) const SHUTDOWN: Self =
        Self::new(Errno::Shutdown, "the disk is not exported here any more");
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        let errno = match error {
            DiskError::NoSpace => Errno::NoSpace,
            DiskError::Fenced => Errno::Shutdown,
            DiskError::Invalid(_) => Errno::Invalid,
            DiskError::Io(_) => Errno::Io,
        };
        Self { errno, text: error.to_string().into() }
    }
}

/// Decides what to do for a request with a known command other than `Disconnect`.
pub(crate) fn check(request: &Request, command: Command, rules: &Rules) -> Result<Action, Failure> {
    let fail = |errno, text| Err(Failure::new(errno, text));
    // FUA is valid with any command. It has no effect: an answered change is durable.
    let valid_flags = flag::FUA
        | match command {
            Command::Read if rules.is_structured => flag::DF,
            Command::WriteZeroes => flag::NO_HOLE | flag::FAST_ZERO,
            Command::BlockStatus => flag::REQ_ONE,
            _ => 0,
        };
    if request.flags & !valid_flags != 0 {
        return fail(Errno::Invalid, "a flag that is not valid for the command");
    }
    let is_change = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
    if is_change && rules.is_read_only {
        return fail(Errno::NotPermitted, "the export is read-only");
    }
    if command == Command::Flush {
        return match (request.at, request.len) {
            (0, 0) => Ok(Action::Flush),
            _ => fail(Errno::Invalid, "a flush has neither offset nor length"),
        };
    }
    let end = request.at.checked_add(request.len.into());
    if end.is_none_or(|end| end > rules.size_bytes) {
        let is_write = matches!(command, Command::Write | Command::WriteZeroes);
        let errno = if is_write { Errno::NoSpace } else { Errno::Invalid };
        return fail(errno, "the range ends behind the end of the export");
    }
    let has = |flag| request.flags & flag != 0;
    let action = match command {
        Command::Read if request.len > MAX_PAYLOAD => {
            // EOVERFLOW is for clients that know DF, which structured replies imply.
            let errno = if rules.is_structured { Errno::Overflow } else { Errno::Invalid };
            return fail(errno, "reads of more than 32 MiB are not supported");
        }
        Command::BlockStatus if !rules.has_allocation => {
            return fail(Errno::Invalid, "no metadata context was negotiated");
        }
        // At least one extent would have to be in the reply.
        Command::BlockStatus if request.len == 0 => {
            return fail(Errno::Invalid, "the range is empty");
        }
        _ if request.len == 0 => Action::Nothing,
        Command::Read => Action::Read { is_unfragmented: has(flag::DF) },
        Command::Write => Action::Write,
        Command::Trim => Action::Discard,
        Command::Cache => Action::Prefetch,
        Command::WriteZeroes => Action::Zero {
            mode: if has(flag::NO_HOLE) { ZeroMode::Allocate } else { ZeroMode::MayFree },
            only_if_fast: has(flag::FAST_ZERO),
        },
        Command::BlockStatus => {
            Action::Status { max_extents: if has(flag::REQ_ONE) { 1 } else { MAX_EXTENTS } }
        }
        Command::Flush | Command::Disconnect => Action::Nothing,
    };
    Ok(action)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules {
        size_bytes: 1 << 40,
        is_read_only: false,
        is_structured: true,
        has_allocation: true,
    };

    fn result(
        rules: Rules,
        command: Command,
        flags: u16,
        at: u64,
        len: u32,
    ) -> Result<Action, Errno> {
        let request = Request { flags, kind: command as u16, cookie: 0, at, len };
        check(&request, command, &rules).map_err(|failure| failure.errno)
    }

    #[test]
    fn each_command_accepts_its_flags_and_fua_and_no_other() {
        let (may_free, allocate) = (ZeroMode::MayFree, ZeroMode::Allocate);
        let zero = |mode, only_if_fast| Ok(Action::Zero { mode, only_if_fast });
        for (command, flags, expected) in [
            (Command::Read, 0, Ok(Action::Read { is_unfragmented: false })),
            (Command::Read, flag::DF, Ok(Action::Read { is_unfragmented: true })),
            (Command::Write, 0, Ok(Action::Write)),
            (Command::Trim, 0, Ok(Action::Discard)),
            (Command::Cache, 0, Ok(Action::Prefetch)),
            (Command::WriteZeroes, 0, zero(may_free, false)),
            (Command::WriteZeroes, flag::NO_HOLE, zero(allocate, false)),
            (Command::WriteZeroes, flag::FAST_ZERO, zero(may_free, true)),
            (Command::WriteZeroes, flag::FAST_ZERO | flag::NO_HOLE, zero(allocate, true)),
            (Command::BlockStatus, 0, Ok(Action::Status { max_extents: MAX_EXTENTS })),
            (Command::BlockStatus, flag::REQ_ONE, Ok(Action::Status { max_extents: 1 })),
        ] {
            assert_eq!(result(RULES, command, flags, 512, 1), expected, "{command:?} {flags}");
            assert_eq!(result(RULES, command, flags | flag::FUA, 512, 1), expected);
        }
        for command in Command::ALL {
            let valid = match command {
                Command::Read => flag::DF,
                Command::WriteZeroes => flag::NO_HOLE | flag::FAST_ZERO,
                Command::BlockStatus => flag::REQ_ONE,
                _ => 0,
            };
            for bit in 1..16 {
                if valid & 1 << bit == 0 {
                    let refused = result(RULES, command, 1 << bit, 0, 0);
                    assert_eq!(refused, Err(Errno::Invalid), "{command:?}, bit {bit}");
                }
            }
        }
        assert_eq!(result(RULES, Command::Flush, flag::FUA, 0, 0), Ok(Action::Flush));
        let simple = Rules { is_structured: false, ..RULES };
        assert_eq!(result(simple, Command::Read, flag::DF, 0, 1), Err(Errno::Invalid));
    }

    #[test]
    fn a_range_ends_at_or_below_the_size() {
        for (command, errno) in [
            (Command::Read, Errno::Invalid),
            (Command::Write, Errno::NoSpace),
            (Command::WriteZeroes, Errno::NoSpace),
            (Command::Trim, Errno::Invalid),
            (Command::Cache, Errno::Invalid),
            (Command::BlockStatus, Errno::Invalid),
        ] {
            assert!(result(RULES, command, 0, (1 << 40) - 1, 1).is_ok(), "{command:?}");
            for (at, len) in [(1 << 40, 1), ((1 << 40) - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX)]
            {
                assert_eq!(
                    result(RULES, command, 0, at, len),
                    Err(errno),
                    "{command:?} {at} {len}"
                );
            }
            assert!(result(RULES, command, 0, (1 << 40) + 1, 0).is_err());
        }
    }

    #[test]
    fn commands_without_a_payload_may_be_longer_than_one() {
        for command in [Command::Trim, Command::Cache, Command::WriteZeroes, Command::BlockStatus] {
            assert!(result(RULES, command, 0, 0, u32::MAX).is_ok(), "{command:?}");
        }
        assert!(result(RULES, Command::Read, 0, 0, MAX_PAYLOAD).is_ok());
        assert_eq!(result(RULES, Command::Read, 0, 0, MAX_PAYLOAD + 1), Err(Errno::Overflow));
        let simple = Rules { is_structured: false, ..RULES };
        assert_eq!(result(simple, Command::Read, 0, 0, MAX_PAYLOAD + 1), Err(Errno::Invalid));
    }

    #[test]
    fn a_read_only_export_refuses_changes() {
        let rules = Rules { is_read_only: true, ..RULES };
        for command in Command::ALL {
            let is_change =
                matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
            let len = u32::from(command != Command::Flush);
            let refused = result(rules, command, 0, 0, len) == Err(Errno::NotPermitted);
            assert_eq!(refused, is_change, "{command:?}");
            // Also after the end.
            let refused = result(rules, command, 0, u64::MAX, 1) == Err(Errno::NotPermitted);
            assert_eq!(refused, is_change, "{command:?}");
        }
    }

    #[test]
    fn an_empty_range_has_no_effect_or_is_refused() {
        for command in [Command::Read, Command::Write, Command::Trim, Command::Cache] {
            assert_eq!(result(RULES, command, 0, 1 << 40, 0), Ok(Action::Nothing));
        }
        assert_eq!(result(RULES, Command::BlockStatus, 0, 0, 0), Err(Errno::Invalid));
        for (at, len) in [(1, 0), (0, 1)] {
            assert_eq!(result(RULES, Command::Flush, 0, at, len), Err(Errno::Invalid));
        }
        let without = Rules { has_allocation: false, ..RULES };
        assert_eq!(result(without, Command::BlockStatus, 0, 0, 1), Err(Errno::Invalid));
    }
}
