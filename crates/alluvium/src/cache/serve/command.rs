//! The commands: from a request to its answer.

use std::time::Duration;

use alluvium_journal::{Cache, Error, Lookup, MAX_KEY_BYTES, ScanCursor};
use bytes::Bytes;

use super::answers::{Answers, FRAME_BYTES};
use super::buffers::Share;
use super::glob::{MAX_PATTERN_BYTES, Pattern};
use super::{Client, Server, info, set, talk};

/// Values up to this size are copied on the connection threads.
const INLINE_BYTES: usize = 64 << 10;
/// Values up to this total size are copied there into the answer to a command.
pub(super) const INLINE_ANSWER_BYTES: usize = 1 << 20;
/// Commands with more words always run on blocking threads.
const INLINE_WORDS: usize = 1000;
/// The number of keys of an MGET, EXISTS or DEL that are read from disk concurrently.
const KEYS_AT_ONCE: usize = 16;
/// The maximum total size of their records.
const RECORDS_AT_ONCE_BYTES: usize = 1 << 20;
/// The additional memory for reading them: the batch of reads, and for each compressed record its
/// frame of up to 256 KiB.
const AT_ONCE_BYTES: usize = (1 << 20) + KEYS_AT_ONCE * (256 << 10);
/// The maximum number of keys of a SCAN, whatever its COUNT.
const MAX_COUNT: usize = 10_000;

/// What a command may access on the thread that it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Memory: it runs on a connection thread.
    Memory,
    /// The disk: it may block.
    Disk,
}

/// The outcome of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ran {
    Answered,
    /// It would have to block, which [`Reach::Memory`] does not permit: it had no effect and was
    /// not answered.
    Waits,
}

/// An error answer: a code and a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused(pub(super) String);

impl From<&str> for Refused {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        // The code of Redis for exhausted memory, which clients know.
        let code = if matches!(error, Error::DiskFull { .. }) { "OOM" } else { "ERR" };
        Self(format!("{code} {error}"))
    }
}

pub(super) type Result<T = Ran> = std::result::Result<T, Refused>;

/// An implemented command.
pub(super) struct Command {
    pub(super) name: &'static str,
    /// The number of words including the command; negative: at least that many.
    pub(super) arity: i32,
    pub(super) is_write: bool,
    /// Which words are keys: first, last (negative: from the end), step.
    pub(super) keys: [i64; 3],
    run: fn(&mut Call<'_>) -> Result,
    /// Permitted without authentication.
    is_open: bool,
}

const fn command(
    name: &'static str,
    arity: i32,
    keys: [i64; 3],
    run: fn(&mut Call<'_>) -> Result,
) -> Command {
    Command { name, arity, is_write: false, keys, run, is_open: false }
}

const fn write(
    name: &'static str,
    arity: i32,
    keys: [i64; 3],
    run: fn(&mut Call<'_>) -> Result,
) -> Command {
    Command { is_write: true, ..command(name, arity, keys, run) }
}

const fn open(name: &'static str, arity: i32, run: fn(&mut Call<'_>) -> Result) -> Command {
    Command { is_open: true, ..command(name, arity, NO_KEYS, run) }
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
    command("TYPE", 2, ONE_KEY, kind),
    command("SCAN", -2, NO_KEYS, scan),
    command("DBSIZE", 1, NO_KEYS, dbsize),
    command("PING", -1, NO_KEYS, talk::ping),
    command("ECHO", 2, NO_KEYS, talk::echo),
    command("SELECT", 2, NO_KEYS, talk::select),
    command("INFO", -1, NO_KEYS, info::info),
    command("COMMAND", -1, NO_KEYS, talk::command),
    command("CONFIG", -2, NO_KEYS, talk::config),
    command("CLIENT", -2, NO_KEYS, talk::client),
    open("HELLO", -1, talk::hello),
    open("AUTH", -2, talk::auth),
    open("QUIT", -1, talk::quit),
    command("FLUSHALL", -1, NO_KEYS, flush_all),
    command("FLUSHDB", -1, NO_KEYS, flush_all),
];

/// A request being executed.
pub(super) struct Call<'a> {
    pub(super) server: &'a Server,
    pub(super) client: &'a mut Client,
    /// The command and its arguments.
    pub(super) words: &'a [Bytes],
    pub(super) reach: Reach,
    /// The memory of the record being read from disk.
    reading: Option<Share>,
}

/// Returns the position of a command in [`COMMANDS`].
pub(super) fn find(name: &[u8]) -> Option<usize> {
    COMMANDS.iter().position(|command| name.eq_ignore_ascii_case(command.name.as_bytes()))
}

/// Executes a request and answers it, if that is possible within `reach`.
pub(super) fn run(server: &Server, client: &mut Client, words: &[Bytes], reach: Reach) -> Ran {
    let answered = client.answers.len();
    let found = find(&words[0]);
    let ran = match found.map(|at| &COMMANDS[at]) {
        None => Err(Refused(unknown(words))),
        Some(command) if server.is_stranger(client) && !command.is_open => {
            Err("NOAUTH Authentication required.".into())
        }
        Some(command) if !fits(command.arity, words.len()) => Err(wrong_number(command.name)),
        Some(_) if reach == Reach::Memory && words.len() > INLINE_WORDS => Ok(Ran::Waits),
        // A refused write must have no effect: a client that retries it would see its own change.
        Some(command) if command.is_write && !client.answers.make_room(FRAME_BYTES) => {
            Err(too_large())
        }
        Some(command) => {
            (command.run)(&mut Call { server, client: &mut *client, words, reach, reading: None })
        }
    };
    let refused = match ran {
        Ok(Ran::Waits) => {
            client.answers.take_back(answered);
            return Ran::Waits;
        }
        Ok(Ran::Answered) if client.answers.is_over() => too_large(),
        Ok(Ran::Answered) => {
            server.counters.count(found);
            return Ran::Answered;
        }
        Err(refused) => refused,
    };
    server.counters.count(found);
    client.answers.take_back(answered);
    client.answers.error(&refused.0);
    Ran::Answered
}

fn too_large() -> Refused {
    "ERR the answer is too large, or the memory for answers (--buffer-memory) is used up; request \
     less at once"
        .into()
}

/// Returns whether this is a command that writes.
pub(super) fn is_write(name: &[u8]) -> bool {
    find(name).is_some_and(|at| COMMANDS[at].is_write)
}

fn fits(arity: i32, words: usize) -> bool {
    let least = arity.unsigned_abs() as usize;
    if arity < 0 { words >= least } else { words == least }
}

pub(super) fn wrong_number(name: &str) -> Refused {
    let name = name.to_ascii_lowercase();
    Refused(format!("ERR wrong number of arguments for '{name}' command"))
}

/// Returns a client's argument, escaped and truncated for an answer.
pub(super) fn shown(word: &[u8]) -> String {
    word[..word.len().min(64)].escape_ascii().to_string()
}

fn unknown(words: &[Bytes]) -> String {
    let arguments = words[1..].iter().take(3).map(|word| format!("'{}'", shown(word)));
    let arguments: Vec<_> = arguments.collect();
    format!(
        "ERR unknown command '{}', with args beginning with: {}",
        shown(&words[0]),
        arguments.join(" ")
    )
}

pub(super) fn syntax_error() -> Refused {
    "ERR syntax error".into()
}

/// Parses a number in canonical form, as Redis does.
pub(super) fn number<T: std::str::FromStr + std::fmt::Display>(word: &[u8]) -> Result<T> {
    let number = std::str::from_utf8(word).ok().and_then(|word| {
        let number: T = word.parse().ok()?;
        (number.to_string() == word).then_some(number)
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

    /// Looks up a key within the permitted reach.
    fn look(&mut self, key: &[u8]) -> Result<Lookup> {
        let found = self.cache().try_get(key)?;
        if self.reach == Reach::Memory || !matches!(found, Lookup::OnDisk) {
            return Ok(found);
        }
        self.hold_read(key)?;
        Ok(match self.cache().get_with_ttl(key)? {
            Some((value, left)) => Lookup::Found(value, left),
            None => Lookup::Absent,
        })
    }

    /// Reserves the memory for reading the record of a key from disk, if it is there: the whole
    /// record is read whatever is asked of it, and by as many threads as there are.
    pub(super) fn hold_read(&mut self, key: &[u8]) -> Result<()> {
        self.hold(self.cache().read_bytes(key))
    }

    /// Reserves the memory for a command that only needs to know whether the key is present.
    pub(super) fn hold_presence(&mut self, key: &[u8]) -> Result<()> {
        self.hold(self.cache().presence_bytes(key))
    }

    /// Reserves space in the answer for the value of a key before it is replaced, since it cannot
    /// be read afterwards. (This does not cover a larger value that is put meanwhile.)
    pub(super) fn hold_answer(&mut self, key: &[u8]) -> Result<()> {
        let bytes = match self.cache().try_get(key)? {
            Lookup::Found(value, _) => value.len(),
            Lookup::Absent => 0,
            Lookup::OnDisk => self.cache().read_bytes(key),
        };
        match self.answers().make_room(bytes + FRAME_BYTES) {
            true => Ok(()),
            false => Err(too_large()),
        }
    }

    fn hold(&mut self, bytes: usize) -> Result<()> {
        let buffers = &self.server.buffers;
        match self.reading.get_or_insert_with(|| Share::new(buffers)).hold(bytes) {
            true => Ok(()),
            false => Err("ERR the memory for reads (--buffer-memory) is used up".into()),
        }
    }

    /// Reserves the memory for reading the first of several keys concurrently, where `bytes_of`
    /// returns the size of each; returns how many, which is one if there is no memory for more.
    fn hold_reads(
        &mut self,
        keys: &[Bytes],
        bytes_of: fn(&Cache, &[u8]) -> usize,
    ) -> Result<usize> {
        let (mut count, mut bytes) = (0, 0);
        for key in keys.iter().take(KEYS_AT_ONCE) {
            let more = bytes_of(self.cache(), key);
            if count > 0 && bytes + more > RECORDS_AT_ONCE_BYTES {
                break;
            }
            count += 1;
            bytes += more;
        }
        if count > 1 {
            // If all are in memory nothing is read.
            let wanted = if bytes > 0 { bytes + AT_ONCE_BYTES } else { 0 };
            let buffers = &self.server.buffers;
            if self.reading.get_or_insert_with(|| Share::new(buffers)).hold(wanted) {
                return Ok(count);
            }
        }
        self.hold(bytes_of(self.cache(), &keys[0]))?;
        Ok(1)
    }

    pub(super) fn must_wait(&self) -> bool {
        self.reach == Reach::Memory
    }

    /// Writes a value unconditionally.
    pub(super) fn put(&mut self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> Result {
        if self.must_wait() {
            let is_written = !self.server.flushes
                && value.len() <= INLINE_BYTES
                && self.cache().try_put(key, value, ttl)?;
            return Ok(if is_written { Ran::Answered } else { Ran::Waits });
        }
        match ttl {
            Some(ttl) => self.cache().put_with_ttl(key, value, ttl)?,
            None => self.cache().put(key, value)?,
        }
        self.client.must_flush = true;
        Ok(Ran::Answered)
    }

    /// Answers with the value if the key is present.
    fn value(&mut self, found: &Lookup) -> Ran {
        match found {
            Lookup::Found(value, _) if self.must_wait() && value.len() > INLINE_ANSWER_BYTES => {
                return Ran::Waits;
            }
            Lookup::Found(value, _) => self.answers().bulk(value),
            Lookup::Absent => self.answers().null(),
            Lookup::OnDisk => return Ran::Waits,
        }
        Ran::Answered
    }
}

fn get(call: &mut Call<'_>) -> Result {
    let found = call.look(&call.words[1])?;
    let ran = call.value(&found);
    if ran == Ran::Answered {
        let is_hit = matches!(found, Lookup::Found(..));
        call.server.counters.count_hits(is_hit.into(), (!is_hit).into());
    }
    Ok(ran)
}

fn mget(call: &mut Call<'_>) -> Result {
    if !call.must_wait() {
        return mget_from_disk(call);
    }
    let keys = &call.words[1..];
    let before = call.client.answers.len();
    call.answers().array(keys.len());
    let (mut hits, mut misses) = (0, 0);
    for key in keys {
        let found = call.look(key)?;
        if call.value(&found) == Ran::Waits {
            return Ok(Ran::Waits);
        }
        if call.client.answers.len() - before > INLINE_ANSWER_BYTES {
            return Ok(Ran::Waits);
        }
        // An answer that is already too large needs no further reads.
        if call.answers().is_over() {
            break;
        }
        match found {
            Lookup::Found(..) => hits += 1,
            Lookup::Absent | Lookup::OnDisk => misses += 1,
        }
    }
    call.server.counters.count_hits(hits, misses);
    Ok(Ran::Answered)
}

/// MGET on a blocking thread: reads several keys concurrently.
fn mget_from_disk(call: &mut Call<'_>) -> Result {
    let mut keys = &call.words[1..];
    call.answers().array(keys.len());
    let (mut hits, mut misses) = (0, 0);
    // An answer that is already too large needs no further reads.
    while !keys.is_empty() && !call.answers().is_over() {
        let (now, later) = keys.split_at(call.hold_reads(keys, Cache::read_bytes)?);
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
    Ok(Ran::Answered)
}

fn exists(call: &mut Call<'_>) -> Result {
    if !call.must_wait() {
        return exists_on_disk(call);
    }
    let mut there = 0;
    for key in &call.words[1..] {
        match call.look(key)? {
            Lookup::Found(..) => there += 1,
            Lookup::Absent => {}
            Lookup::OnDisk => return Ok(Ran::Waits),
        }
    }
    call.answers().integer(there);
    Ok(Ran::Answered)
}

/// EXISTS on a blocking thread: reads several keys concurrently.
fn exists_on_disk(call: &mut Call<'_>) -> Result {
    let mut keys = &call.words[1..];
    let mut there = 0;
    while !keys.is_empty() {
        let (now, later) = keys.split_at(call.hold_reads(keys, Cache::read_bytes)?);
        for value in call.cache().get_many(now) {
            there += i64::from(value?.is_some());
        }
        keys = later;
    }
    call.answers().integer(there);
    Ok(Ran::Answered)
}

fn strlen(call: &mut Call<'_>) -> Result {
    let len = match call.look(&call.words[1])? {
        Lookup::Found(value, _) => value.len(),
        Lookup::Absent => 0,
        Lookup::OnDisk => return Ok(Ran::Waits),
    };
    call.answers().integer(i64::try_from(len).unwrap_or(i64::MAX));
    Ok(Ran::Answered)
}

fn kind(call: &mut Call<'_>) -> Result {
    let kind = match call.look(&call.words[1])? {
        Lookup::Found(..) => "string",
        Lookup::Absent => "none",
        Lookup::OnDisk => return Ok(Ran::Waits),
    };
    call.answers().simple(kind);
    Ok(Ran::Answered)
}

/// TTL in seconds, PTTL in milliseconds; -1 for a value that does not expire, -2 for an absent key.
fn ttl(call: &mut Call<'_>) -> Result {
    let left = match call.look(&call.words[1])? {
        Lookup::Found(_, Some(left)) => {
            let millis = i64::try_from(left.as_millis()).unwrap_or(i64::MAX);
            let is_in_millis = call.words[0].eq_ignore_ascii_case(b"PTTL");
            if is_in_millis { millis } else { millis.saturating_add(500) / 1000 }
        }
        Lookup::Found(_, None) => -1,
        Lookup::Absent => -2,
        Lookup::OnDisk => return Ok(Ran::Waits),
    };
    call.answers().integer(left);
    Ok(Ran::Answered)
}

/// MSET writes each key by itself: others may see some of them written and others not. If one
/// cannot be written, none is.
fn mset(call: &mut Call<'_>) -> Result {
    let pairs = &call.words[1..];
    if !pairs.len().is_multiple_of(2) {
        return Err(wrong_number("MSET"));
    }
    // Not one by one without blocking: keys already written must not be written again when a later
    // one has to block.
    if call.must_wait() {
        return Ok(Ran::Waits);
    }
    for pair in pairs.chunks_exact(2) {
        call.cache().check(&pair[0], &pair[1])?;
    }
    for pair in pairs.chunks_exact(2) {
        call.put(&pair[0], &pair[1], None)?;
    }
    call.answers().ok();
    Ok(Ran::Answered)
}

fn del(call: &mut Call<'_>) -> Result {
    if call.must_wait() {
        return Ok(Ran::Waits);
    }
    let mut deleted = 0;
    // Also for absent keys: their deletion by another client may not be on stable storage yet.
    call.client.must_flush = true;
    // Keys of invalid length are absent.
    let is_no_key = |key: &Bytes| !(1..=MAX_KEY_BYTES).contains(&key.len());
    for mut keys in call.words[1..].split(is_no_key) {
        while !keys.is_empty() {
            let (now, later) = keys.split_at(call.hold_reads(keys, Cache::presence_bytes)?);
            deleted += call.cache().delete_many(now)?;
            keys = later;
        }
    }
    call.answers().integer(i64::try_from(deleted).unwrap_or(i64::MAX));
    Ok(Ran::Answered)
}

fn scan(call: &mut Call<'_>) -> Result {
    let from = std::str::from_utf8(&call.words[1]).ok().and_then(|word| word.parse().ok());
    let from: u64 = from.ok_or("ERR invalid cursor")?;
    let (mut pattern, mut count, mut has_none) = (None, 10, false);
    let mut options = call.words[2..].iter();
    while let Some(word) = options.next() {
        let value = options.next().ok_or_else(syntax_error)?;
        match &word.to_ascii_uppercase()[..] {
            b"MATCH" if value.len() > MAX_PATTERN_BYTES => {
                return Err(Refused(format!(
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
                // Tools ask for each type in turn.
                b"list" | b"set" | b"zset" | b"hash" | b"stream" => has_none = true,
                _ => return Err("ERR unknown type name".into()),
            },
            _ => return Err(syntax_error()),
        }
    }
    if has_none {
        call.answers().array(2);
        call.answers().text("0");
        call.answers().array(0);
        return Ok(Ran::Answered);
    }
    if call.must_wait() {
        return Ok(Ran::Waits);
    }
    // As in `Call::hold_read`. Of a long record only the beginning is read if that is sufficient.
    let mut reading = Share::new(&call.server.buffers);
    let may_read = |bytes| reading.hold(bytes);
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
    Ok(Ran::Answered)
}

fn dbsize(call: &mut Call<'_>) -> Result {
    // Each shard of the index is locked briefly, and a writer may hold it while it copies a large
    // value.
    if call.must_wait() {
        return Ok(Ran::Waits);
    }
    let entries = call.cache().stats().entries;
    call.answers().integer(i64::try_from(entries).unwrap_or(i64::MAX));
    Ok(Ran::Answered)
}

fn flush_all(_: &mut Call<'_>) -> Result {
    Err("ERR a cache cannot be emptied while it is open: stop the server, and remove the cache's \
        directory"
        .into())
}

#[cfg(test)]
mod tests;
