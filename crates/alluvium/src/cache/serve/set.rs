//! SET and related commands: what is written depends on options and on the present value.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use alluvium_journal::{Ttl, When};
use bytes::Bytes;

use super::command::{Call, CommandError, Outcome, Result, number, syntax_error, wrong_number};

/// The options of SET.
#[derive(Debug, Default, PartialEq, Eq)]
struct SetOptions {
    when: When,
    ttl: Ttl,
    /// Answer with the previous value.
    returns_old: bool,
}

fn set_options(args: &[Bytes]) -> Result<SetOptions> {
    let mut options = SetOptions::default();
    let mut args = args.iter();
    while let Some(option) = args.next() {
        let option = option.to_ascii_uppercase();
        match &option[..] {
            b"NX" if options.when == When::Always => options.when = When::IfAbsent,
            b"XX" if options.when == When::Always => options.when = When::IfPresent,
            b"GET" => options.returns_old = true,
            b"KEEPTTL" if options.ttl == Ttl::None => options.ttl = Ttl::Keep,
            b"EX" | b"PX" | b"EXAT" | b"PXAT" if options.ttl == Ttl::None => {
                let time = args.next().ok_or_else(syntax_error)?;
                options.ttl = Ttl::After(time_to_live(&option, time, "set")?);
            }
            _ => return Err(syntax_error()),
        }
    }
    Ok(options)
}

/// Returns the time to live that an option such as `EX 10` denotes; zero if it is over.
fn time_to_live(unit: &[u8], time: &[u8], command: &str) -> Result<Duration> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    time_from(now, unit, time, command)
}

/// As [`time_to_live`], with `now` given as the time since 1970.
fn time_from(now: Duration, unit: &[u8], time: &[u8], command: &str) -> Result<Duration> {
    let wrong = || CommandError(format!("ERR invalid expire time in '{command}' command"));
    let time: i64 = number(time)?;
    let is_in_millis = unit.starts_with(b"P");
    let millis = if is_in_millis { Some(time) } else { time.checked_mul(1000) };
    let millis = millis.filter(|millis| *millis > 0).ok_or_else(wrong)?;
    // The cache counts from the current whole millisecond: subtracting a fraction here would make
    // the value expire too early.
    let now_millis = i64::try_from(now.as_millis()).unwrap_or(i64::MAX);
    let left = if unit.ends_with(b"AT") {
        millis.saturating_sub(now_millis).max(0)
    } else {
        // As in Redis, the time of expiry must fit the same type.
        millis.checked_add(now_millis).map(|_| millis).ok_or_else(wrong)?
    };
    Ok(Duration::from_millis(left.unsigned_abs()))
}

pub(super) fn set(call: &mut Call<'_>) -> Result {
    let [_, key, value, options @ ..] = call.args else { return Err(wrong_number("SET")) };
    let SetOptions { when, ttl, returns_old } = set_options(options)?;
    let time = match ttl {
        Ttl::After(time) => Some(time),
        Ttl::None | Ttl::Keep => None,
    };
    if when == When::Always && ttl != Ttl::Keep && !returns_old {
        let outcome = call.put(key, value, time)?;
        call.answers().ok();
        return Ok(outcome);
    }
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    if when == When::IfAbsent && !returns_old {
        // If it is written, there is no earlier expiry to keep.
        match put_if_absent(call, key, value, time)? {
            true => call.answers().ok(),
            false => call.answers().null(),
        }
        return Ok(Outcome::Answered);
    }
    call.reserve_read(key)?;
    if returns_old {
        call.reserve_answer(key)?;
    }
    let swapped = call.cache().swap(key, value, when, ttl)?;
    // Also if it was not written: the value that it depended on may not be on stable storage yet.
    call.client.must_flush = true;
    match (returns_old, swapped.old) {
        (true, Some(old)) => call.answers().bulk(&old),
        (false, _) if swapped.is_written => call.answers().ok(),
        _ => call.answers().null(),
    }
    Ok(Outcome::Answered)
}

/// SETEX and PSETEX.
pub(super) fn setex(call: &mut Call<'_>) -> Result {
    let [name, key, time, value] = call.args else { return Err(wrong_number("SETEX")) };
    let is_in_millis = name.eq_ignore_ascii_case(b"PSETEX");
    let (unit, name) = if is_in_millis { (&b"PX"[..], "psetex") } else { (&b"EX"[..], "setex") };
    let ttl = time_to_live(unit, time, name)?;
    let outcome = call.put(key, value, Some(ttl))?;
    call.answers().ok();
    Ok(outcome)
}

pub(super) fn setnx(call: &mut Call<'_>) -> Result {
    let [_, key, value] = call.args else { return Err(wrong_number("SETNX")) };
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    let is_written = put_if_absent(call, key, value, None)?;
    call.answers().integer(is_written.into());
    Ok(Outcome::Answered)
}

/// Writes a value if the key is absent; returns whether it was written. Nothing is read of the
/// present value except its time to live, if it has one.
fn put_if_absent(
    call: &mut Call<'_>,
    key: &[u8],
    value: &[u8],
    time: Option<Duration>,
) -> Result<bool> {
    call.reserve_presence(key)?;
    let is_written = call.cache().put_if_absent(key, value, time)?;
    // Also if it was not written: the value that it depended on may not be on stable storage yet.
    call.client.must_flush = true;
    Ok(is_written)
}

pub(super) fn getset(call: &mut Call<'_>) -> Result {
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    call.reserve_read(&call.args[1])?;
    call.reserve_answer(&call.args[1])?;
    let swapped = call.cache().swap(&call.args[1], &call.args[2], When::Always, Ttl::None)?;
    call.client.must_flush = true;
    match swapped.old {
        Some(old) => call.answers().bulk(&old),
        None => call.answers().null(),
    }
    Ok(Outcome::Answered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expiry_is_exact_to_the_millisecond() {
        // Near the end of a millisecond.
        let now = Duration::from_millis(1_000_000) + Duration::from_micros(900);
        for (unit, time, millis) in [
            ("EX", "2", 2000),
            ("PX", "2", 2),
            ("PXAT", "1000100", 100),
            ("PXAT", "1000000", 0),
            ("PXAT", "1", 0),
            ("EXAT", "1001", 1000),
            ("EXAT", "1", 0),
            ("PX", "9223372036853775807", 9_223_372_036_853_775_807),
            ("PXAT", "9223372036854775807", 9_223_372_036_853_775_807),
            ("EX", "9223372036853775", 9_223_372_036_853_775_000),
        ] {
            let left = time_from(now, unit.as_bytes(), time.as_bytes(), "set");
            assert_eq!(left, Ok(Duration::from_millis(millis)), "{unit} {time}");
        }
        for (unit, time) in [
            ("PX", "9223372036853775808"),
            ("EX", "9223372036854775"),
            ("EX", "9223372036854776"),
            ("EX", "18446744073709551"),
            ("EXAT", "9223372036854776"),
            ("PX", "0"),
            ("EX", "-9223372036854775808"),
        ] {
            let wrong = CommandError("ERR invalid expire time in 'set' command".into());
            let parsed = time_from(now, unit.as_bytes(), time.as_bytes(), "set");
            assert_eq!(parsed, Err(wrong), "{unit} {time}");
        }
    }
}
