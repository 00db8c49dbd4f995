//! Impersonation attacks: replaying a recorded exchange, and guessing the password.

use std::num::NonZeroU32;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::{digest, hmac, pbkdf2};

use super::wire::{Body, METADATA, Reader, Wire, authenticate, handshake, request};
use crate::Error;

/// A user and its password.
pub(super) const USER: (&str, &str) = ("someone", "someone-has-this-secret");
const WRONG_PASSWORD: &str = "this-password-is-wrong";

const SCRAM: &str = "SCRAM-SHA-256";
const PLAIN: &str = "PLAIN";
const SASL_AUTHENTICATION_FAILED: i16 = 58;

/// Twice the number of failures that an address has free.
const GUESSES: u32 = 40;
/// One failure is forgotten each second, so some guesses may arrive too late. If all of these leave
/// the right password usable, guessing is unbounded.
const MAX_GUESSES: u32 = 10 * GUESSES;
/// Far above the seconds until an address may try again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The messages of a client, as an eavesdropper sees them.
struct Recorded {
    first: String,
    last: String,
}

/// Runs both attacks on a listener that offers SCRAM and PLAIN.
pub(super) fn attack(address: &str) -> Result<(), Error> {
    replay(address, &record(address)?)?;
    guess(address)
}

/// Logs in with SCRAM and records the messages.
fn record(address: &str) -> Result<Recorded, Error> {
    let mut wire = begin(address, SCRAM)?;
    let refused = |code: i16| format!("the right password was refused with code {code}");
    let bare = format!("n={},r=the-nonce-of-this-client", USER.0);
    let first = format!("n,,{bare}");
    let challenge = String::from_utf8(authenticate_with(&mut wire, &first)?.map_err(refused)?)?;
    let last = proof(USER.1, &bare, &challenge)?;
    authenticate_with(&mut wire, &last)?.map_err(refused)?;
    wire.call(&ask())?;
    // An authenticated connection does not accept the message a second time either.
    match authenticate_with(&mut wire, &last)? {
        Ok(_) => Err("the same message was accepted twice on one connection".into()),
        Err(_) => Ok(Recorded { first, last }),
    }
}

/// Replays a recorded exchange from the beginning, and its last message alone.
fn replay(address: &str, Recorded { first, last }: &Recorded) -> Result<(), Error> {
    for with_first in [true, false] {
        let mut wire = begin(address, SCRAM)?;
        if with_first && authenticate_with(&mut wire, first)?.is_err() {
            return Err(
                "the first message of a replay was refused, although it proves nothing".into()
            );
        }
        if authenticate_with(&mut wire, last)?.is_ok() {
            return Err("a replayed exchange was accepted".into());
        }
        if !wire.closed_after(&ask())? {
            return Err("a refused client was served".into());
        }
    }
    Ok(())
}

/// Guesses until the address is refused even with the right password, then waits until it is
/// accepted again. The server never answers that the right password is wrong: it closes the
/// connection instead.
fn guess(address: &str) -> Result<(), Error> {
    if plain(address, USER.1)? != Reaction::Accepted {
        return Err("the right password was refused".into());
    }
    let mut guesses = 0;
    loop {
        // Concurrently, since each failure is delayed.
        let wires: Result<Vec<Wire>, Error> = (0..GUESSES).map(|_| begin(address, PLAIN)).collect();
        let mut wires = wires?;
        let message = authenticate(plain_message(WRONG_PASSWORD).as_bytes());
        wires.iter_mut().for_each(|wire| wire.send(&message));
        for wire in &mut wires {
            // Guesses beyond the bound have their connections closed.
            if let Some(mut answer) = wire.answer()?
                && read_answer(&mut answer)?.is_ok()
            {
                return Err("a wrong password was accepted".into());
            }
        }
        guesses += GUESSES;
        match plain(address, USER.1)? {
            Reaction::Accepted => {}
            Reaction::Refused => return Err("the right password was reported as wrong".into()),
            Reaction::Closed => break,
        }
        if guesses >= MAX_GUESSES {
            return Err(
                format!("an address is still allowed to try after {guesses} guesses").into()
            );
        }
    }
    println!("logins: blocked after {guesses} guesses");
    let give_up = Instant::now() + PATIENCE;
    while plain(address, USER.1)? != Reaction::Accepted {
        if Instant::now() >= give_up {
            return Err(format!("still blocked {} s later", PATIENCE.as_secs()).into());
        }
        thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// The server's reaction to a password.
#[derive(PartialEq)]
enum Reaction {
    Accepted,
    Refused,
    /// The connection was closed.
    Closed,
}

fn plain(address: &str, password: &str) -> Result<Reaction, Error> {
    let mut wire = begin(address, PLAIN)?;
    wire.send(&authenticate(plain_message(password).as_bytes()));
    let Some(mut answer) = wire.answer()? else { return Ok(Reaction::Closed) };
    match read_answer(&mut answer)? {
        Ok(_) => Ok(Reaction::Accepted),
        Err(SASL_AUTHENTICATION_FAILED) => Ok(Reaction::Refused),
        Err(code) => Err(format!("unexpected code {code} for a password").into()),
    }
}

fn plain_message(password: &str) -> String {
    format!("\0{}\0{password}", USER.0)
}

fn begin(address: &str, mechanism: &str) -> Result<Wire, Error> {
    let mut wire = Wire::connect(address)?;
    match wire.call(&handshake(mechanism))?.i16()? {
        0 => Ok(wire),
        code => Err(format!("{mechanism} was refused with code {code}").into()),
    }
}

/// Returns the server's answer to a message, or the code with which it refuses.
fn authenticate_with(wire: &mut Wire, message: &str) -> Result<Result<Vec<u8>, i16>, Error> {
    read_answer(&mut wire.call(&authenticate(message.as_bytes()))?)
}

/// Reads an answer. No secret may be in its error message.
fn read_answer(answer: &mut Reader) -> Result<Result<Vec<u8>, i16>, Error> {
    let code = answer.i16()?;
    let words = answer.text()?;
    if [USER.1, WRONG_PASSWORD].iter().any(|secret| words.contains(*secret)) {
        return Err(format!("an error message contains a password: {words}").into());
    }
    let bytes = answer.bytes()?;
    Ok(if code == 0 { Ok(bytes) } else { Err(code) })
}

/// A request that is answered only to authenticated clients.
fn ask() -> Vec<u8> {
    request(METADATA, 4, &Body::default().i32(0).i8(0))
}

/// Computes a client's last message (RFC 5802) from its first one and the server's challenge.
fn proof(password: &str, bare: &str, challenge: &str) -> Result<String, Error> {
    let part = |name: &str| {
        let found = challenge.split(',').find_map(|part| part.strip_prefix(name));
        found.ok_or_else(|| format!("missing `{name}` in the challenge {challenge}"))
    };
    let salt = BASE64.decode(part("s=")?)?;
    let iterations: NonZeroU32 = part("i=")?.parse()?;
    let mut salted = [0; 32];
    let password = password.as_bytes();
    pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, iterations, &salt, password, &mut salted);
    let sign = |key: &[u8], message: &[u8]| {
        hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), message).as_ref().to_vec()
    };
    let client_key = sign(&salted, b"Client Key");
    // There is no channel binding: `biws` is `n,,`.
    let last = format!("c=biws,r={}", part("r=")?);
    let stored_key = digest::digest(&digest::SHA256, &client_key);
    let signature = sign(stored_key.as_ref(), format!("{bare},{challenge},{last}").as_bytes());
    let proof: Vec<u8> = client_key.iter().zip(&signature).map(|(a, b)| a ^ b).collect();
    Ok(format!("{last},p={}", BASE64.encode(proof)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example exchange of RFC 7677, section 3.
    #[test]
    fn the_proof_matches_the_example_of_the_rfc() {
        let nonces = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
        let challenge = format!("r={nonces},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096");
        let last = proof("pencil", "n=user,r=rOprNGfwEbeRWgbNEkqO", &challenge).unwrap();
        let wanted = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
        assert_eq!(last, format!("c=biws,r={nonces},p={wanted}"));
        assert!(proof("pencil", "n=user,r=x", "e=other-error").is_err());
    }
}
