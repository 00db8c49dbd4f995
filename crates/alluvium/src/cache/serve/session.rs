//! Commands about the connection and the server, as far as clients and tools use them.

use bytes::Bytes;

use super::Server;
use super::command::{
    COMMANDS, Call, Command, CommandError, INLINE_ANSWER_BYTES, Outcome, Result, find, number,
    shown, syntax_error, wrong_number,
};
use super::glob::{MAX_PATTERN_BYTES, Pattern};
use super::info::MAXMEMORY;

/// The version of Redis whose answers are imitated. Clients derive the server's features from it.
pub(super) const REDIS_VERSION: &str = "7.0.0";
/// The maximum length of a client name, which is stored for CLIENT GETNAME.
const MAX_NAME_BYTES: usize = 256;
/// The maximum number of patterns in one CONFIG GET.
const MAX_PATTERNS: usize = 32;
/// The number of wrong passwords after which the connection is closed.
const MAX_FAILED_LOGINS: u32 = 10;

pub(super) fn ping(call: &mut Call<'_>) -> Result {
    match call.args {
        [_] => call.client.answers.simple("PONG"),
        [_, text] => return answer_text(call, text),
        _ => return Err(wrong_number("PING")),
    }
    Ok(Outcome::Answered)
}

pub(super) fn echo(call: &mut Call<'_>) -> Result {
    let [_, text] = call.args else { return Err(wrong_number("ECHO")) };
    answer_text(call, text)
}

fn answer_text(call: &mut Call<'_>, text: &[u8]) -> Result {
    if !call.may_block() && text.len() > INLINE_ANSWER_BYTES {
        return Ok(Outcome::WouldBlock);
    }
    call.answers().bulk(text);
    Ok(Outcome::Answered)
}

pub(super) fn quit(call: &mut Call<'_>) -> Result {
    call.answers().ok();
    call.client.is_closing = true;
    Ok(Outcome::Answered)
}

pub(super) fn select(call: &mut Call<'_>) -> Result {
    match number::<i64>(&call.args[1])? {
        0 => call.answers().ok(),
        _ => return Err("ERR DB index is out of range".into()),
    }
    Ok(Outcome::Answered)
}

/// `AUTH password`, or with the only user: `AUTH default password`.
pub(super) fn auth(call: &mut Call<'_>) -> Result {
    let (user, password) = match call.args {
        [_, _] if call.server.password.is_none() => {
            return Err(
                "ERR AUTH <password> called without any password configured for the default \
                user. Are you sure your configuration is correct?"
                    .into(),
            );
        }
        [_, password] => (&b"default"[..], password),
        [_, user, password] => (&user[..], password),
        _ => return Err(syntax_error()),
    };
    log_in(call, user, password)?;
    call.answers().ok();
    Ok(Outcome::Answered)
}

/// Authenticates a client. Without a configured password any password is accepted, as in Redis, so
/// that clients configured with one can connect.
fn log_in(call: &mut Call<'_>, user: &[u8], password: &[u8]) -> Result<()> {
    let expected = call.server.password.as_ref();
    if user != b"default" || expected.is_some_and(|expected| !expected.matches(password)) {
        call.server.counters.count_failed_login();
        call.client.failed_logins += 1;
        call.client.is_closing |= call.client.failed_logins >= MAX_FAILED_LOGINS;
        return Err("WRONGPASS invalid username-password pair or user is disabled.".into());
    }
    call.client.is_authenticated = true;
    Ok(())
}

fn check_name(name: &[u8]) -> Result<()> {
    match name.len() <= MAX_NAME_BYTES && name.iter().all(u8::is_ascii_graphic) {
        true => Ok(()),
        false => {
            Err("ERR Client names cannot contain spaces, newlines or special characters.".into())
        }
    }
}

/// `HELLO [2|3 [AUTH user password] [SETNAME name]]`. It has no effect unless all of it is valid.
pub(super) fn hello(call: &mut Call<'_>) -> Result {
    let version = match call.args.get(1).map(|version| number::<i64>(version)) {
        None => None,
        Some(Ok(2)) => Some(false),
        Some(Ok(3)) => Some(true),
        Some(Ok(_)) => return Err("NOPROTO unsupported protocol version".into()),
        Some(Err(_)) => {
            return Err("ERR Protocol version is not an integer or out of range".into());
        }
    };
    let mut options = call.args.get(2..).unwrap_or_default();
    let (mut login, mut wanted_name) = (None, None);
    while let [option, rest @ ..] = options {
        options = match (&option.to_ascii_uppercase()[..], rest) {
            (b"AUTH", [user, password, rest @ ..]) => {
                login = Some((user, password));
                rest
            }
            (b"SETNAME", [name, rest @ ..]) => {
                check_name(name)?;
                wanted_name = Some(name);
                rest
            }
            _ => {
                return Err(CommandError(format!(
                    "ERR Syntax error in HELLO option '{}'",
                    shown(option)
                )));
            }
        };
    }
    if let Some((user, password)) = login {
        log_in(call, user, password)?;
    }
    if call.server.is_unauthenticated(call.client) {
        return Err(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise \
            the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and \
            select the RESP protocol version at the same time"
                .into(),
        );
    }
    if let Some(wanted) = wanted_name {
        call.client.name = wanted.to_vec();
    }
    let id = call.client.id;
    let answers = call.answers();
    answers.is_resp3 = version.unwrap_or(answers.is_resp3);
    answers.map(7);
    for (name, value) in [("server", "alluvium"), ("version", REDIS_VERSION)] {
        answers.text(name);
        answers.text(value);
    }
    answers.text("proto");
    answers.integer(if answers.is_resp3 { 3 } else { 2 });
    answers.text("id");
    answers.integer(id);
    for (name, value) in [("mode", "standalone"), ("role", "master")] {
        answers.text(name);
        answers.text(value);
    }
    answers.text("modules");
    answers.array(0);
    Ok(Outcome::Answered)
}

pub(super) fn client(call: &mut Call<'_>) -> Result {
    let asked = call.args[1].to_ascii_uppercase();
    match (&asked[..], &call.args[2..]) {
        (b"ID", []) => {
            let id = call.client.id;
            call.answers().integer(id);
        }
        (b"GETNAME", []) => {
            let name = call.client.name.clone();
            match name.is_empty() {
                true => call.answers().null(),
                false => call.answers().bulk(&name),
            }
        }
        (b"SETNAME", [wanted]) => {
            check_name(wanted)?;
            call.client.name = wanted.to_vec();
            call.answers().ok();
        }
        // Information of a client library about itself.
        (b"SETINFO", [_, _]) => call.answers().ok(),
        _ => return Err(unknown_subcommand("CLIENT", &asked)),
    }
    Ok(Outcome::Answered)
}

fn unknown_subcommand(command: &str, asked: &[u8]) -> CommandError {
    CommandError(format!(
        "ERR unknown subcommand or wrong number of arguments for '{}' of {command}",
        shown(asked)
    ))
}

/// The settings that tools request with CONFIG GET: this server's actual values in the terms of
/// Redis.
fn redis_settings(server: &Server) -> [(&'static str, String); 8] {
    [
        ("save", String::new()),
        ("appendonly", "no".into()),
        ("databases", "1".into()),
        ("proto-max-bulk-len", server.limits.argument_bytes.to_string()),
        ("maxmemory", MAXMEMORY.into()),
        ("maxmemory-policy", server.eviction_policy().into()),
        ("maxclients", server.max_connections.to_string()),
        ("timeout", server.idle_timeout.as_secs().to_string()),
    ]
}

pub(super) fn config(call: &mut Call<'_>) -> Result {
    let asked = call.args[1].to_ascii_uppercase();
    let patterns = &call.args[2..];
    if asked != b"GET" || patterns.is_empty() {
        return Err(match &asked[..] {
            b"SET" => {
                "ERR settings can be changed only on the command line: `alluvium cache serve \
                 --help`"
                    .into()
            }
            _ => unknown_subcommand("CONFIG", &asked),
        });
    }
    let is_too_long = |pattern: &Bytes| pattern.len() > MAX_PATTERN_BYTES;
    if patterns.len() > MAX_PATTERNS || patterns.iter().any(is_too_long) {
        return Err(syntax_error());
    }
    let patterns: Vec<_> =
        patterns.iter().map(|pattern| Pattern::new(&pattern.to_ascii_lowercase())).collect();
    let wanted: Vec<_> = redis_settings(call.server)
        .into_iter()
        .filter(|(name, _)| patterns.iter().any(|pattern| pattern.matches(name.as_bytes())))
        .collect();
    let answers = call.answers();
    answers.map(wanted.len());
    for (name, value) in wanted {
        answers.text(name);
        answers.text(&value);
    }
    Ok(Outcome::Answered)
}

/// `COMMAND`, `COMMAND COUNT` and `COMMAND INFO name ...`. Not `COMMAND DOCS`: redis-cli has its
/// own table for servers without it.
pub(super) fn command(call: &mut Call<'_>) -> Result {
    let asked = call.args.get(1).map(|arg| arg.to_ascii_uppercase());
    let names = call.args.get(2..).unwrap_or_default();
    let answers = call.answers();
    match asked.as_deref() {
        None => {
            answers.array(COMMANDS.len());
            COMMANDS.iter().for_each(|command| describe(answers, command));
        }
        Some(b"COUNT") => answers.integer(COMMANDS.len() as i64),
        Some(b"INFO") => {
            answers.array(names.len());
            for name in names {
                match find(name) {
                    Some(at) => describe(answers, &COMMANDS[at]),
                    None => answers.null_array(),
                }
            }
        }
        Some(asked) => return Err(unknown_subcommand("COMMAND", asked)),
    }
    Ok(Outcome::Answered)
}

fn describe(answers: &mut super::answers::Answers, command: &Command) {
    answers.array(6);
    answers.text(&command.name.to_ascii_lowercase());
    answers.integer(command.arity.into());
    answers.array(1);
    answers.simple(if command.is_write { "write" } else { "readonly" });
    command.keys.into_iter().for_each(|key| answers.integer(key));
}
