//! The client's side of SASL: PLAIN, SCRAM (RFC 5802) with SHA-256 and SHA-512, and OAUTHBEARER
//! (RFC 7628).

use std::num::NonZeroU32;

use alluvium_broker::Mechanism;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::{digest, hmac, pbkdf2};

/// An impostor of the server that requests fewer iterations could guess the password from the
/// client's proof; more would only keep the client busy.
const ITERATIONS: std::ops::RangeInclusive<u32> = 4096..=1_000_000;

/// The mechanism and the credentials. (Without `Debug`, so that nothing prints them.)
pub(crate) struct Login {
    pub(super) mechanism: Mechanism,
    /// Empty if a token identifies the user.
    pub(super) user: String,
    /// The password, or the token.
    pub(super) password: String,
}

/// Sends a message and returns the server's answer.
pub(super) type Exchange<'a> = &'a mut dyn FnMut(Vec<u8>) -> Result<Vec<u8>, String>;

impl Login {
    /// Exchanges the messages of the mechanism.
    ///
    /// # Errors
    /// The server refuses the login, or does not prove that it knows the password.
    pub(super) fn run(&self, exchange: Exchange<'_>) -> Result<(), String> {
        match self.mechanism {
            Mechanism::Plain => {
                exchange(format!("\0{}\0{}", self.user, self.password).into_bytes()).map(drop)
            }
            Mechanism::ScramSha256 => self.scram(&SHA256, &nonce(), exchange),
            Mechanism::ScramSha512 => self.scram(&SHA512, &nonce(), exchange),
            Mechanism::OauthBearer => self.bearer(exchange),
        }
    }

    fn bearer(&self, exchange: Exchange<'_>) -> Result<(), String> {
        let message = format!("n,,\x01auth=Bearer {}\x01\x01", self.password);
        let refused = exchange(message.into_bytes())?;
        if refused.is_empty() {
            return Ok(());
        }
        // Acknowledges the error; the server then reports that the login has failed.
        exchange(b"\x01".to_vec())?;
        Err(format!("the token was refused: {}", String::from_utf8_lossy(&refused)))
    }

    fn scram(&self, hash: &Hash, nonce: &str, exchange: Exchange<'_>) -> Result<(), String> {
        let strange = || "its answer is not a SCRAM message".to_owned();
        let user = self.user.replace('=', "=3D").replace(',', "=2C");
        let bare = format!("n={user},r={nonce}");
        let first = exchange(format!("n,,{bare}").into_bytes())?;
        let first = String::from_utf8(first).map_err(|_| strange())?;
        let part = |name: &str| first.split(',').find_map(|part| part.strip_prefix(name));
        let both = part("r=").filter(|both| both.starts_with(nonce)).ok_or_else(strange)?;
        let salt = part("s=").and_then(|salt| BASE64.decode(salt).ok()).ok_or_else(strange)?;
        let iterations: NonZeroU32 =
            part("i=").and_then(|number| number.parse().ok()).ok_or_else(strange)?;
        if !ITERATIONS.contains(&iterations.get()) {
            let (min, max) = (ITERATIONS.start(), ITERATIONS.end());
            return Err(format!(
                "it requests {iterations} iterations, but {min} to {max} are allowed"
            ));
        }
        let mut salted = vec![0; hash.digest.output_len()];
        pbkdf2::derive(hash.pbkdf2, iterations, &salt, self.password.as_bytes(), &mut salted);
        let sign = |key: &[u8], message: &[u8]| {
            hmac::sign(&hmac::Key::new(hash.hmac, key), message).as_ref().to_vec()
        };
        let client_key = sign(&salted, b"Client Key");
        // Without channel binding: `biws` is `n,,`.
        let last = format!("c=biws,r={both}");
        let signed = format!("{bare},{first},{last}");
        let stored_key = digest::digest(hash.digest, &client_key);
        let signature = sign(stored_key.as_ref(), signed.as_bytes());
        let proof: Vec<u8> = client_key.iter().zip(&signature).map(|(a, b)| a ^ b).collect();
        let answer = exchange(format!("{last},p={}", BASE64.encode(proof)).into_bytes())?;
        // Only a server that has the credential can compute this.
        let expected = sign(&sign(&salted, b"Server Key"), signed.as_bytes());
        match answer == format!("v={}", BASE64.encode(expected)).into_bytes() {
            true => Ok(()),
            false => Err("it did not prove that it knows the password".into()),
        }
    }
}

struct Hash {
    digest: &'static digest::Algorithm,
    hmac: hmac::Algorithm,
    pbkdf2: pbkdf2::Algorithm,
}

static SHA256: Hash =
    Hash { digest: &digest::SHA256, hmac: hmac::HMAC_SHA256, pbkdf2: pbkdf2::PBKDF2_HMAC_SHA256 };
static SHA512: Hash =
    Hash { digest: &digest::SHA512, hmac: hmac::HMAC_SHA512, pbkdf2: pbkdf2::PBKDF2_HMAC_SHA512 };

fn nonce() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login(password: &str) -> Login {
        Login { mechanism: Mechanism::ScramSha256, user: "user".into(), password: password.into() }
    }

    /// The exchange of RFC 7677, section 3.
    fn rfc(password: &str, verifier: &str) -> (Result<(), String>, Vec<String>) {
        let mut said = Vec::new();
        let answers = [
            "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
             s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
            verifier,
        ];
        let mut answers = answers.into_iter();
        let outcome = login(password).scram(&SHA256, "rOprNGfwEbeRWgbNEkqO", &mut |message| {
            said.push(String::from_utf8(message).unwrap());
            Ok(answers.next().unwrap().into())
        });
        (outcome, said)
    }

    #[test]
    fn scram_follows_the_example_of_rfc_7677() {
        let (outcome, said) = rfc("pencil", "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
        assert_eq!(outcome, Ok(()));
        assert_eq!(said[0], "n,,n=user,r=rOprNGfwEbeRWgbNEkqO");
        assert_eq!(
            said[1],
            "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
             p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
        );
    }

    #[test]
    fn a_server_that_does_not_know_the_password_is_detected() {
        for verifier in ["", "v=", "v=AAAA", "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G5="] {
            assert!(rfc("pencil", verifier).0.is_err(), "{verifier}");
        }
        for first in [
            "",
            "r=other,s=AAAA,i=4096",
            "r=mine,s=AAAA,i=4000000000",
            "r=mine,s=AAAA,i=0",
            "r=mine,s=AAAA,i=4095",
        ] {
            let mut said = 0;
            let outcome = login("x").scram(&SHA256, "mine", &mut |_| {
                said += 1;
                Ok(first.into())
            });
            assert!(outcome.is_err() && said == 1, "{first}");
        }
    }

    #[test]
    fn a_refused_token_is_acknowledged_and_reported() {
        let login = Login {
            mechanism: Mechanism::OauthBearer,
            user: String::new(),
            password: "aa.bb.cc".into(),
        };
        let run = |answer: &'static str| {
            let mut said = Vec::new();
            let outcome = login.run(&mut |message| {
                said.push(String::from_utf8(message).unwrap());
                Ok(answer.into())
            });
            (outcome, said)
        };
        let message = "n,,\x01auth=Bearer aa.bb.cc\x01\x01".to_owned();
        assert_eq!(run(""), (Ok(()), vec![message.clone()]));
        let refused = Err("the token was refused: invalid_token".to_owned());
        assert_eq!(run("invalid_token"), (refused, vec![message, "\x01".into()]));
    }
}
