//! Who tries to come in as somebody else: by an exchange that was listened to, and by guessing the
//! password.

use std::num::NonZeroU32;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::{digest, hmac, pbkdf2};

use super::wire::{Body, METADATA, Reader, Wire, authenticate, handshake, request};
use crate::Error;

/// Who may log in, and by what password.
pub(super) const USER: (&str, &str) = ("someone", "someone-has-this-secret");
const WRONG_PASSWORD: &str = "this-password-is-wrong";

const SCRAM: &str = "SCRAM-SHA-256";
const PLAIN: &str = "PLAIN";
const SASL_AUTHENTICATION_FAILED: i16 = 58;

/// Twice as many failures as an address has free.
const GUESSES: u32 = 40;
/// One failure is forgotten each second, so some guesses may come too late; if all of these leave
/// the right password free, nothing bounds them.
const MAX_GUESSES: u32 = 10 * GUESSES;
/// Far above the seconds until an address may try again.
const PATIENCE: Duration = Duration::from_secs(60);

/// The messages of a client, as somebody on the way sees them.
struct Recorded {
    first: String,
    last: String,
}

/// Both, at a listener that has SCRAM and PLAIN.
pub(super) fn attack(address: &str) -> Result<(), Error> {
    replay(address, &record(address)?)?;
    guess(address)
}

/// Log in by SCRAM.
fn record(address: &str) -> Result<Recorded, Error> {
    let mut wire = begin(address, SCRAM)?;
    let refused = |code: i16| format!("the right password is refused with {code}");
    let bare = format!("n={},r=the-nonce-of-this-client", USER.0);
    let first = format!("n,,{bare}");
    let challenge = String::from_utf8(say(&mut wire, &first)?.map_err(refused)?)?;
    let last = proof(USER.1, &bare, &challenge)?;
    say(&mut wire, &last)?.map_err(refused)?;
    wire.call(&ask())?;
    // A connection that has logged in does not take it a second time either.
    match say(&mut wire, &last)? {
        Ok(_) => Err("the same message is taken twice on a connection".into()),
        Err(_) => Ok(Recorded { first, last }),
    }
}

/// Say again what somebody else has said, from the beginning, and its end alone.
fn replay(address: &str, Recorded { first, last }: &Recorded) -> Result<(), Error> {
    for with_first in [true, false] {
        let mut wire = begin(address, SCRAM)?;
        if with_first && say(&mut wire, first)?.is_err() {
            return Err("a first message is refused, before it has proved anything".into());
        }
        if say(&mut wire, last)?.is_ok() {
            return Err("an exchange that was listened to lets somebody else in".into());
        }
        if !wire.closed_after(&ask())? {
            return Err("who was refused is served".into());
        }
    }
    Ok(())
}

/// Guess until the address is not let in with the right password either, and wait until it is
/// again. Nobody is told that the right password is wrong: connections are closed then.
fn guess(address: &str) -> Result<(), Error> {
    if plain(address, USER.1)? != Told::Welcome {
        return Err("the right password is refused".into());
    }
    let mut guesses = 0;
    loop {
        // At the same time, since each failure takes its time.
        let wires: Result<Vec<Wire>, Error> = (0..GUESSES).map(|_| begin(address, PLAIN)).collect();
        let mut wires = wires?;
        let message = authenticate(plain_message(WRONG_PASSWORD).as_bytes());
        wires.iter_mut().for_each(|wire| wire.send(&message));
        for wire in &mut wires {
            // Those beyond the bound are closed.
            if let Some(mut answer) = wire.answer()?
                && hear(&mut answer)?.is_ok()
            {
                return Err("a wrong password is taken".into());
            }
        }
        guesses += GUESSES;
        match plain(address, USER.1)? {
            Told::Welcome => {}
            Told::Wrong => return Err("the right password is said to be wrong".into()),
            Told::Nothing => break,
        }
        if guesses >= MAX_GUESSES {
            return Err(format!("after {guesses} guesses an address may still try").into());
        }
    }
    println!("logins: no more of them after {guesses} guesses");
    let give_up = Instant::now() + PATIENCE;
    while plain(address, USER.1)? != Told::Welcome {
        if Instant::now() >= give_up {
            return Err(format!("not let in {} s later either", PATIENCE.as_secs()).into());
        }
        thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// What becomes of a password.
#[derive(PartialEq)]
enum Told {
    Welcome,
    Wrong,
    /// The connection is closed.
    Nothing,
}

fn plain(address: &str, password: &str) -> Result<Told, Error> {
    let mut wire = begin(address, PLAIN)?;
    wire.send(&authenticate(plain_message(password).as_bytes()));
    let Some(mut answer) = wire.answer()? else { return Ok(Told::Nothing) };
    match hear(&mut answer)? {
        Ok(_) => Ok(Told::Welcome),
        Err(SASL_AUTHENTICATION_FAILED) => Ok(Told::Wrong),
        Err(code) => Err(format!("a password is answered with {code}").into()),
    }
}

fn plain_message(password: &str) -> String {
    format!("\0{}\0{password}", USER.0)
}

fn begin(address: &str, mechanism: &str) -> Result<Wire, Error> {
    let mut wire = Wire::connect(address)?;
    match wire.call(&handshake(mechanism))?.i16()? {
        0 => Ok(wire),
        code => Err(format!("{mechanism} is refused with {code}").into()),
    }
}

/// What the server answers to a message, or the code by which it refuses.
fn say(wire: &mut Wire, message: &str) -> Result<Result<Vec<u8>, i16>, Error> {
    hear(&mut wire.call(&authenticate(message.as_bytes()))?)
}

/// No secret may be in the words of an answer.
fn hear(answer: &mut Reader) -> Result<Result<Vec<u8>, i16>, Error> {
    let code = answer.i16()?;
    let words = answer.text()?;
    if [USER.1, WRONG_PASSWORD].iter().any(|secret| words.contains(*secret)) {
        return Err(format!("a password is in an error message: {words}").into());
    }
    let bytes = answer.bytes()?;
    Ok(if code == 0 { Ok(bytes) } else { Err(code) })
}

/// What is answered only to who has logged in.
fn ask() -> Vec<u8> {
    request(METADATA, 4, &Body::default().i32(0).i8(0))
}

/// A client's last message (RFC 5802), by its first one and the server's challenge.
fn proof(password: &str, bare: &str, challenge: &str) -> Result<String, Error> {
    let part = |name: &str| {
        let found = challenge.split(',').find_map(|part| part.strip_prefix(name));
        found.ok_or_else(|| format!("no `{name}` in the challenge {challenge}"))
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

    /// The exchange of RFC 7677, section 3.
    #[test]
    fn the_proof_is_that_of_the_rfc() {
        let nonces = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
        let challenge = format!("r={nonces},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096");
        let last = proof("pencil", "n=user,r=rOprNGfwEbeRWgbNEkqO", &challenge).unwrap();
        let wanted = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
        assert_eq!(last, format!("c=biws,r={nonces},p={wanted}"));
        assert!(proof("pencil", "n=user,r=x", "e=other-error").is_err());
    }
}
