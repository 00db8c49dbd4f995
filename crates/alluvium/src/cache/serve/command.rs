//! The commands: from a request to its answer.

use std::time::Duration;

use alluvium_journal::{Cache, Error, Lookup, MAX_KEY_BYTES, ScanCursor};
use bytes::Bytes;

use super::answers::{Answers, FRAME_BYTES};
use super::buffers::Reservation;
use super::glob::{MAX_PATTERN_BYTES, Pattern};
use super::{Client, Server, info, session, set};

/// Values up to this size are copied on the connection threads.
const INLINE_BYTES: usize = 64 << 10;
/// Values up to this total size are copied there into the answer to a command.
pub(super) const INLINE_ANSWER_BYTES: usize = 1 << 20;
/// Commands with more arguments always run on blocking threads.
const INLINE_ARGS: usize = 1000;
/// The number of keys of an MGET, EXISTS or DEL that are read from disk concurrently.
const KEYS_PER_BATCH: usize = 16;
/// The maximum total size of their records.
const RECORDS_PER_BATCH_BYTES: usize = 1 << 20;
/// The additional memory for reading them: the batch of reads, and for each compressed record its
/// frame of up to 256 KiB.
const BATCH_OVERHEAD_BYTES: usize = (1 << 20) + KEYS_PER_BATCH * (256 << 10);
/// The maximum number of keys of a SCAN, whatever its COUNT.
const MAX_COUNT: usize = 10_000;

/// Whether a command may block the thread that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// It runs on a connection thread, and accesses only memory.
    NonBlocking,
    /// It runs on a blocking thread, and may access the disk.
    Blocking,
}

/// The outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Answered,
    /// It would have to block, which [`Mode::NonBlocking`] does not permit: it had no effect and
    /// was not answered.
    WouldBlock,
}

/// An error answer: a code and a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CommandError(pub(super) String);

impl From<&str> for CommandError {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        // The code of Redis for exhausted memory, which clients know.
        let code = if matches!(error, Error::DiskFull { .. }) { "OOM" } else { "ERR" };
        Self(format!("{code} {error}"))
    }
}

pub(super) type Result<T = Outcome> = std::result::Result<T, CommandError>;

/// An implemented command.
pub(super) struct Command {
    pub(super) name: &'static str,
    /// The number of arguments including the name, as in Redis; negative: at least that many.
    pub(super) arity: i32,
    pub(super) is_write: bool,
    /// Which arguments are keys: first, last (negative: from the end), step.
    pub(super) keys: [i64; 3],
    run: fn(&mut Call<'_>) -> Result,
    needs_authentication: bool,
}

const fn command(
    name: &'static str,
    arity: i32,
    keys: [i64; 3],
    run: fn(&mut Call<'_>) -> Result,
) -> Command {
    Command { name, arity, is_write: false, keys, run, needs_authentication: true }
}

const fn write(
    name: &'static str,
    arity: i32,
    keys: [i64; 3],
    run: fn(&mut Call<'_>) -> Result,
) -> Command {
    Command { is_write: true, ..command(name, arity, keys, run) }
}

/// A command that is permitted without authentication.
const fn public(name: &'static str, arity: i32, run: fn(&mut Call<'_>) -> Result) -> Command {
    Command { needs_authentication: false, ..command(name, arity, NO_KEYS, run) }
}

const NO_KEYS: [i64; 3] = [0, 0, 0];
const ONE_KEY: [i64; 3] = [1, 1, 1];
const ALL_KEYS: [i64; 3] = [1, -1, 1];
const PAIRS: [i64; 3] = [1, -1, 2];

/// All commands, the most frequent first.
pub(super) static COMMANDS: [Command; 29] = [
    command("GET", 2, ONE_KEY, get),
    write("SET", -3, ONE_KEY, set::set),
    command("MGET", -2, ALL_KEYS, mget),
    write("DEL", -2, ALL_KEYS, del),
    command("EXISTS", -2, ALL_KEYS, exists),
    write("MSET", -3, PAIRS, mset),
    write("SETEX", 4, ONE_KEY, set::setex),
    write("PSETEX", 4, ONE_KEY, set::setex),
    write("SETNX", 3, ONE_KEY, set::setnx),
    write("GETSET", 3, ONE_KEY, set::getset),
    command("TTL", 2, ONE_KEY, ttl),
    command("PTTL", 2, ONE_KEY, ttl),
    write("UNLINK", -2, ALL_KEYS, del),
    command("STRLEN", 2, ONE_KEY, strlen),
    command("TYPE", 2, ONE_KEY, type_of),
    command("SCAN", -2, NO_KEYS, scan),
    command("DBSIZE", 1, NO_KEYS, dbsize),
    command("PING", -1, NO_KEYS, session::ping),
    command("ECHO", 2, NO_KEYS, session::echo),
    command("SELECT", 2, NO_KEYS, session::select),
    command("INFO", -1, NO_KEYS, info::info),
    command("COMMAND", -1, NO_KEYS, session::command),
    command("CONFIG", -2, NO_KEYS, session::config),
    command("CLIENT", -2, NO_KEYS, session::client),
    public("HELLO", -1, session::hello),
    public("AUTH", -2, session::auth),
    public("QUIT", -1, session::quit),
    command("FLUSHALL", -1, NO_KEYS, flush_all),
    command("FLUSHDB", -1, NO_KEYS, flush_all),
];

/// A request being executed.
pub(super) struct Call<'a> {
    pub(super) server: &'a Server,
    pub(super) client: &'a mut Client,
    /// The command and its arguments.
    pub(super) args: &'a [Bytes],
    pub(super) mode: Mode,
    /// The memory of the record being read from disk.
    read_memory: Option<Reservation>,
}

/// Returns the position of a command in [`COMMANDS`].
pub(super) fn find(name: &[u8]) -> Option<usize> {
    COMMANDS.iter().position(|command| name.eq_ignore_ascii_case(command.name.as_bytes()))
}

/// Executes a request and answers it, unless it would have to block and must not.
pub(super) fn run(server: &Server, client: &mut Client, args: &[Bytes], mode: Mode) -> Outcome {
    let answered = client.answers.len();
    let found = find(&args[0]);
    let outcome = match found.map(|at| &COMMANDS[at]) {
        None => Err(CommandError(unknown_command(args))),
        Some(command) if server.is_unauthenticated(client) && command.needs_authentication => {
            Err("NOAUTH Authentication required.".into())
        }
        Some(command) if !has_arity(command.arity, args.len()) => Err(wrong_number(command.name)),
        Some(_) if mode == Mode::NonBlocking && args.len() > INLINE_ARGS => Ok(Outcome::WouldBlock),
        // A refused write must have no effect: a client that retries it would see its own change.
        Some(command) if command.is_write && !client.answers.reserve(FRAME_BYTES) => {
            Err(too_large())
        }
        Some(command) => {
            (command.run)(&mut Call { server, client: &mut *client, args, mode, read_memory: None })
        }
    };
    let refused = match outcome {
        Ok(Outcome::WouldBlock) => {
            client.answers.truncate(answered);
            return Outcome::WouldBlock;
        }
        Ok(Outcome::Answered) if client.answers.has_overflowed() => too_large(),
        Ok(Outcome::Answered) => {
            server.counters.count(found);
            return Outcome::Answered;
        }
        Err(refused) => refused,
    };
    server.counters.count(found);
    client.answers.truncate(answered);
    client.answers.error(&refused.0);
    Outcome::Answered
}

fn too_large() -> CommandError {
    "ERR the answer is too large, or the memory for answers (--buffer-memory) is used up; request \
     less at once"
        .into()
}

/// Returns whether this is a command that writes.
pub(super) fn is_write(name: &[u8]) -> bool {
    find(name).is_some_and(|at| COMMANDS[at].is_write)
}

fn has_arity(arity: i32, count: usize) -> bool {
    let expected = arity.unsigned_abs() as usize;
    if arity < 0 { count >= expected } else { count == expected }
}

pub(super) fn wrong_number(name: &str) -> CommandError {
    let name = name.to_ascii_lowercase();
    CommandError(format!("ERR wrong number of arguments for '{name}' command"))
}

/// Returns a client's argument, escaped and truncated for an answer.
pub(super) fn shown(arg: &[u8]) -> String {
    arg[..arg.len().min(64)].escape_ascii().to_string()
}

fn unknown_command(args: &[Bytes]) -> String {
    let shown_args = args[1..].iter().take(3).map(|arg| format!("'{}'", shown(arg)));
    let shown_args: Vec<_> = shown_args.collect();
    format!(
        "ERR unknown command '{}', with args beginning with: {}",
        shown(&args[0]),
        shown_args.join(" ")
    )
}

pub(super) fn syntax_error() -> CommandError {
    "ERR syntax error".into()
}

/// Parses a number in canonical form, as Redis does.
pub(super) fn number<T: std::str::FromStr + std::fmt::Display>(arg: &[u8]) -> Result<T> {
    let number = std::str::from_utf8(arg).ok().and_then(|arg| {
        let number: T = arg.parse().ok()?;
        (number.to_string() == arg).then_some(number)
    });
    number.ok_or_else(|| "ERR value is not an integer or out of range".into())
}

impl<'a> Call<'a> {
    pub(super) fn cache(&self) -> &'a Cache {
        &self.server.cache
    }

    pub(super) fn answers(&mut self) -> &mut Answers {
        &mut self.client.answers
    }

    /// Looks up a key, on disk only if the command may block.
    fn lookup(&mut self, key: &[u8]) -> Result<Lookup> {
        let found = self.cache().try_get(key)?;
        if !self.may_block() || !matches!(found, Lookup::OnDisk) {
            return Ok(found);
        }
        self.reserve_read(key)?;
        Ok(match self.cache().get_with_ttl(key)? {
            Some((value, left)) => Lookup::Found(value, left),
            None => Lookup::Absent,
        })
    }

    /// Reserves the memory for reading the record of a key from disk, if it is there: the whole
    /// record is read whatever is asked of it, and by as many threads as there are.
    pub(super) fn reserve_read(&mut self, key: &[u8]) -> Result<()> {
        self.reserve_read_memory(self.cache().read_bytes(key))
    }

    /// Reserves the memory for a command that only needs to know whether the key is present.
    pub(super) fn reserve_presence(&mut self, key: &[u8]) -> Result<()> {
        self.reserve_read_memory(self.cache().presence_bytes(key))
    }

    /// Reserves space in the answer for the value of a key before it is replaced, since it cannot
    /// be read afterwards. (This does not cover a larger value that is put meanwhile.)
    pub(super) fn reserve_answer(&mut self, key: &[u8]) -> Result<()> {
        let bytes = match self.cache().try_get(key)? {
            Lookup::Found(value, _) => value.len(),
            Lookup::Absent => 0,
            Lookup::OnDisk => self.cache().read_bytes(key),
        };
        match self.answers().reserve(bytes + FRAME_BYTES) {
            true => Ok(()),
            false => Err(too_large()),
        }
    }

    fn reserve_read_memory(&mut self, bytes: usize) -> Result<()> {
        let buffers = &self.server.buffers;
        match self.read_memory.get_or_insert_with(|| Reservation::new(buffers)).resize(bytes) {
            true => Ok(()),
            false => Err("ERR the memory for reads (--buffer-memory) is used up".into()),
        }
    }

    /// Reserves the memory for reading the first of several keys concurrently, where `bytes_of`
    /// returns the size of each; returns how many, which is one if there is no memory for more.
    fn reserve_batch_read(
        &mut self,
        keys: &[Bytes],
        bytes_of: fn(&Cache, &[u8]) -> usize,
    ) -> Result<usize> {
        let (mut count, mut bytes) = (0, 0);
        for key in keys.iter().take(KEYS_PER_BATCH) {
            let more = bytes_of(self.cache(), key);
            if count > 0 && bytes + more > RECORDS_PER_BATCH_BYTES {
                break;
            }
            count += 1;
            bytes += more;
        }
        if count > 1 {
            // If all are in memory nothing is read.
            let wanted = if bytes > 0 { bytes + BATCH_OVERHEAD_BYTES } else { 0 };
            let buffers = &self.server.buffers;
            if self.read_memory.get_or_insert_with(|| Reservation::new(buffers)).resize(wanted) {
                return Ok(count);
            }
        }
        self.reserve_read_memory(bytes_of(self.cache(), &keys[0]))?;
        Ok(1)
    }

    pub(super) fn may_block(&self) -> bool {
        self.mode == Mode::Blocking
    }

    /// Writes a value unconditionally.
    pub(super) fn put(&mut self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> Result {
        if !self.may_block() {
            let is_written = !self.server.flushes_before_answers
                && value.len() <= INLINE_BYTES
                && self.cache().try_put(key, value, ttl)?;
            return Ok(if is_written { Outcome::Answered } else { Outcome::WouldBlock });
        }
        match ttl {
            Some(ttl) => self.cache().put_with_ttl(key, value, ttl)?,
            None => self.cache().put(key, value)?,
        }
        self.client.must_flush = true;
        Ok(Outcome::Answered)
    }

    /// Answers with the value if the key is present.
    fn answer_value(&mut self, found: &Lookup) -> Outcome {
        match found {
            Lookup::Found(value, _) if !self.may_block() && value.len() > INLINE_ANSWER_BYTES => {
                return Outcome::WouldBlock;
            }
            Lookup::Found(value, _) => self.answers().bulk(value),
            Lookup::Absent => self.answers().null(),
            Lookup::OnDisk => return Outcome::WouldBlock,
        }
        Outcome::Answered
    }
}

fn get(call: &mut Call<'_>) -> Result {
    let found = call.lookup(&call.args[1])?;
    let outcome = call.answer_value(&found);
    if outcome == Outcome::Answered {
        let is_hit = matches!(found, Lookup::Found(..));
        call.server.counters.count_hits(is_hit.into(), (!is_hit).into());
    }
    Ok(outcome)
}

fn mget(call: &mut Call<'_>) -> Result {
    if call.may_block() {
        return mget_from_disk(call);
    }
    let keys = &call.args[1..];
    let before = call.client.answers.len();
    call.answers().array(keys.len());
    let (mut hits, mut misses) = (0, 0);
    for key in keys {
        let found = call.lookup(key)?;
        if call.answer_value(&found) == Outcome::WouldBlock {
            return Ok(Outcome::WouldBlock);
        }
        if call.client.answers.len() - before > INLINE_ANSWER_BYTES {
            return Ok(Outcome::WouldBlock);
        }
        // An answer that is already too large needs no further reads.
        if call.answers().has_overflowed() {
            break;
        }
        match found {
            Lookup::Found(..) => hits += 1,
            Lookup::Absent | Lookup::OnDisk => misses += 1,
        }
    }
    call.server.counters.count_hits(hits, misses);
    Ok(Outcome::Answered)
}

/// MGET on a blocking thread: reads several keys concurrently.
fn mget_from_disk(call: &mut Call<'_>) -> Result {
    let mut keys = &call.args[1..];
    call.answers().array(keys.len());
    let (mut hits, mut misses) = (0, 0);
    // An answer that is already too large needs no further reads.
    while !keys.is_empty() && !call.answers().has_overflowed() {
        let (now, later) = keys.split_at(call.reserve_batch_read(keys, Cache::read_bytes)?);
        for value in call.cache().get_many(now) {
            match value {
                Ok(Some(value)) => {
                    hits += 1;
                    call.answers().bulk(&value);
                }
                // A damaged value counts as absent here: the error would not identify the key. GET
                // reports it.
                Ok(None) | Err(Error::Corrupt { .. }) => {
                    misses += 1;
                    call.answers().null();
                }
                Err(error) => return Err(error.into()),
            }
        }
        keys = later;
    }
    call.server.counters.count_hits(hits, misses);
    Ok(Outcome::Answered)
}

fn exists(call: &mut Call<'_>) -> Result {
    if call.may_block() {
        return exists_on_disk(call);
    }
    let mut present = 0;
    for key in &call.args[1..] {
        match call.lookup(key)? {
            Lookup::Found(..) => present += 1,
            Lookup::Absent => {}
            Lookup::OnDisk => return Ok(Outcome::WouldBlock),
        }
    }
    call.answers().integer(present);
    Ok(Outcome::Answered)
}

/// EXISTS on a blocking thread: reads several keys concurrently.
fn exists_on_disk(call: &mut Call<'_>) -> Result {
    let mut keys = &call.args[1..];
    let mut present = 0;
    while !keys.is_empty() {
        let (now, later) = keys.split_at(call.reserve_batch_read(keys, Cache::read_bytes)?);
        for value in call.cache().get_many(now) {
            present += i64::from(value?.is_some());
        }
        keys = later;
    }
    call.answers().integer(present);
    Ok(Outcome::Answered)
}

fn strlen(call: &mut Call<'_>) -> Result {
    let len = match call.lookup(&call.args[1])? {
        Lookup::Found(value, _) => value.len(),
        Lookup::Absent => 0,
        Lookup::OnDisk => return Ok(Outcome::WouldBlock),
    };
    call.answers().integer(i64::try_from(len).unwrap_or(i64::MAX));
    Ok(Outcome::Answered)
}

fn type_of(call: &mut Call<'_>) -> Result {
    let kind = match call.lookup(&call.args[1])? {
        Lookup::Found(..) => "string",
        Lookup::Absent => "none",
        Lookup::OnDisk => return Ok(Outcome::WouldBlock),
    };
    call.answers().simple(kind);
    Ok(Outcome::Answered)
}

/// TTL in seconds, PTTL in milliseconds; -1 for a value that does not expire, -2 for an absent key.
fn ttl(call: &mut Call<'_>) -> Result {
    let left = match call.lookup(&call.args[1])? {
        Lookup::Found(_, Some(left)) => {
            let millis = i64::try_from(left.as_millis()).unwrap_or(i64::MAX);
            let is_in_millis = call.args[0].eq_ignore_ascii_case(b"PTTL");
            if is_in_millis { millis } else { millis.saturating_add(500) / 1000 }
        }
        Lookup::Found(_, None) => -1,
        Lookup::Absent => -2,
        Lookup::OnDisk => return Ok(Outcome::WouldBlock),
    };
    call.answers().integer(left);
    Ok(Outcome::Answered)
}

/// MSET writes each key by itself: other clients may see only some of them written. If one
/// cannot be written, none is.
fn mset(call: &mut Call<'_>) -> Result {
    let pairs = &call.args[1..];
    if !pairs.len().is_multiple_of(2) {
        return Err(wrong_number("MSET"));
    }
    // Not one by one without blocking: keys already written must not be written again when a later
    // one has to block.
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    for pair in pairs.chunks_exact(2) {
        call.cache().check(&pair[0], &pair[1])?;
    }
    for pair in pairs.chunks_exact(2) {
        call.put(&pair[0], &pair[1], None)?;
    }
    call.answers().ok();
    Ok(Outcome::Answered)
}

fn del(call: &mut Call<'_>) -> Result {
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    let mut deleted = 0;
    // Also for absent keys: their deletion by another client may not be on stable storage yet.
    call.client.must_flush = true;
    // Keys of invalid length are absent.
    let is_no_key = |key: &Bytes| !(1..=MAX_KEY_BYTES).contains(&key.len());
    for mut keys in call.args[1..].split(is_no_key) {
        while !keys.is_empty() {
            let (now, later) = keys.split_at(call.reserve_batch_read(keys, Cache::presence_bytes)?);
            deleted += call.cache().delete_many(now)?;
            keys = later;
        }
    }
    call.answers().integer(i64::try_from(deleted).unwrap_or(i64::MAX));
    Ok(Outcome::Answered)
}

fn scan(call: &mut Call<'_>) -> Result {
    let from = std::str::from_utf8(&call.args[1]).ok().and_then(|arg| arg.parse().ok());
    let from: u64 = from.ok_or("ERR invalid cursor")?;
    let (mut pattern, mut count, mut matches_none) = (None, 10, false);
    let mut options = call.args[2..].iter();
    while let Some(option) = options.next() {
        let value = options.next().ok_or_else(syntax_error)?;
        match &option.to_ascii_uppercase()[..] {
            b"MATCH" if value.len() > MAX_PATTERN_BYTES => {
                return Err(CommandError(format!(
                    "ERR a pattern may have at most {MAX_PATTERN_BYTES} bytes"
                )));
            }
            b"MATCH" => pattern = Some(value),
            b"COUNT" => match number::<i64>(value)? {
                wanted @ 1.. => count = usize::try_from(wanted).unwrap_or(MAX_COUNT).min(MAX_COUNT),
                _ => return Err(syntax_error()),
            },
            b"TYPE" => match &value.to_ascii_lowercase()[..] {
                b"string" => {}
                // Tools ask for one type after another.
                b"list" | b"set" | b"zset" | b"hash" | b"stream" => matches_none = true,
                _ => return Err("ERR unknown type name".into()),
            },
            _ => return Err(syntax_error()),
        }
    }
    if matches_none {
        call.answers().array(2);
        call.answers().text("0");
        call.answers().array(0);
        return Ok(Outcome::Answered);
    }
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    // As in `Call::reserve_read`. Only the beginning of a long record is read if that is
    // sufficient.
    let mut read_memory = Reservation::new(&call.server.buffers);
    let may_read = |bytes| read_memory.resize(bytes);
    let scanned = call.cache().scan_within(ScanCursor(from << 1), count, may_read)?;
    let mut scanned = scanned.ok_or("ERR the memory for reads (--buffer-memory) is used up")?;
    if let Some(pattern) = pattern {
        let pattern = Pattern::new(pattern);
        scanned.keys.retain(|key| pattern.matches(key));
    }
    // Within 63 bits, since many clients store a cursor in a signed number. The lowest bit is never
    // set: a shard has far fewer buckets than that.
    let next = scanned.next.map_or(0, |next| next.0 >> 1);
    call.answers().array(2);
    call.answers().text(&next.to_string());
    call.answers().array(scanned.keys.len());
    scanned.keys.iter().for_each(|key| call.answers().bulk(key));
    Ok(Outcome::Answered)
}

fn dbsize(call: &mut Call<'_>) -> Result {
    // Each shard of the index is locked briefly, and a writer may hold it while it copies a large
    // value.
    if !call.may_block() {
        return Ok(Outcome::WouldBlock);
    }
    let entries = call.cache().stats().entries;
    call.answers().integer(i64::try_from(entries).unwrap_or(i64::MAX));
    Ok(Outcome::Answered)
}

fn flush_all(_: &mut Call<'_>) -> Result {
    Err("ERR a cache cannot be emptied while it is open: stop the server, and remove the cache's \
        directory"
        .into())
}

#[cfg(test)]
mod tests;
