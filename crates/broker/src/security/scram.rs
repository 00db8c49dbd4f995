//! The server's side of SCRAM (RFC 5802) with SHA-256 and SHA-512, and its credentials. Pure
//! functions from user names, nonces and credentials to messages.
//!
//! As in Kafka, user names and passwords are UTF-8 without normalization, and there is no channel
//! binding.

use std::num::NonZeroU32;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ring::{digest, hmac, pbkdf2};
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;

/// The hash function, with its number in AlterUserScramCredentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hash {
    Sha256 = 1,
    Sha512 = 2,
}

impl Hash {
    pub(crate) const ALL: [Self; 2] = [Self::Sha256, Self::Sha512];

    pub(crate) fn from_number(number: i8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| *hash as i8 == number)
    }

    /// The mechanism's name.
    pub(crate) fn mechanism(self) -> &'static str {
        match self {
            Self::Sha256 => "SCRAM-SHA-256",
            Self::Sha512 => "SCRAM-SHA-512",
        }
    }

    fn hmac(self, key: &[u8], message: &[u8]) -> Vec<u8> {
        let algorithm = match self {
            Self::Sha256 => hmac::HMAC_SHA256,
            Self::Sha512 => hmac::HMAC_SHA512,
        };
        hmac::sign(&hmac::Key::new(algorithm, key), message).as_ref().to_vec()
    }

    fn digest(self, message: &[u8]) -> Vec<u8> {
        let algorithm = match self {
            Self::Sha256 => &digest::SHA256,
            Self::Sha512 => &digest::SHA512,
        };
        digest::digest(algorithm, message).as_ref().to_vec()
    }

    /// `Hi` of the RFC: takes milliseconds.
    fn salted(self, password: &[u8], salt: &[u8], iterations: NonZeroU32) -> Vec<u8> {
        let (algorithm, len) = match self {
            Self::Sha256 => (pbkdf2::PBKDF2_HMAC_SHA256, 32),
            Self::Sha512 => (pbkdf2::PBKDF2_HMAC_SHA512, 64),
        };
        let mut out = vec![0; len];
        pbkdf2::derive(algorithm, iterations, salt, password, &mut out);
        out
    }
}

/// The stored form of a password: sufficient to verify it, not to authenticate with it. (It has no
/// `Debug`, so that it does not appear in logs.)
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Credential {
    pub(crate) iterations: NonZeroU32,
    #[serde(with = "base64_text")]
    pub(crate) salt: Vec<u8>,
    #[serde(with = "base64_text")]
    stored_key: Vec<u8>,
    #[serde(with = "base64_text")]
    server_key: Vec<u8>,
    /// Incremented with each change of this user's credentials: those with the greatest number
    /// belong to the newest password. 0 in credentials stored before the number existed.
    #[serde(default)]
    pub(crate) change: u64,
}

impl Credential {
    /// Derives the credential of a password. Takes milliseconds of CPU.
    pub(crate) fn of_password(
        hash: Hash,
        password: &[u8],
        salt: Vec<u8>,
        iterations: NonZeroU32,
    ) -> Self {
        let salted = hash.salted(password, &salt, iterations);
        Self::of_salted(hash, &salted, salt, iterations)
    }

    /// Derives the credential of a password that the client salted and hashed.
    pub(crate) fn of_salted(
        hash: Hash,
        salted: &[u8],
        salt: Vec<u8>,
        iterations: NonZeroU32,
    ) -> Self {
        Self {
            iterations,
            salt,
            stored_key: hash.digest(&hash.hmac(salted, b"Client Key")),
            server_key: hash.hmac(salted, b"Server Key"),
            change: 0,
        }
    }

    /// Whether the credential belongs to this password. Takes milliseconds of CPU, independently of
    /// the result.
    pub(crate) fn is_of_password(&self, hash: Hash, password: &[u8]) -> bool {
        let other = Self::of_password(hash, password, self.salt.clone(), self.iterations);
        self.stored_key.ct_eq(&other.stored_key).into()
    }
}

mod base64_text {
    use super::{BASE64, Deserialize};
    use base64::Engine as _;

    pub(super) fn serialize<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&BASE64.encode(bytes))
    }

    pub(super) fn deserialize<'de, D: serde::Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<u8>, D::Error> {
        // The decoder's own error would show a part of its input.
        let text = String::deserialize(from)?;
        BASE64.decode(text).map_err(|_| serde::de::Error::custom("not base64"))
    }
}

/// The client's first message.
pub(crate) struct ClientFirst {
    pub(crate) user: String,
    nonce: String,
    /// The part before the bare message, which the client repeats later.
    header: String,
    bare: String,
}

impl ClientFirst {
    /// Parses a first message. `None` if it is not valid or requests an unsupported feature
    /// (channel binding, acting as another user, delegation tokens).
    pub(crate) fn parse(message: &[u8]) -> Option<Self> {
        let message = std::str::from_utf8(message).ok()?;
        let (binding, rest) = message.split_once(',')?;
        // `y`: the client supports channel binding and assumes that the server does not, which is
        // right.
        if binding != "n" && binding != "y" {
            return None;
        }
        let (acting_as, bare) = rest.split_once(',')?;
        let mut parts = bare.split(',');
        let user = parts.next()?.strip_prefix("n=").and_then(unescape)?;
        let nonce = parts.next()?.strip_prefix("r=")?;
        let acts_as_itself = match acting_as {
            "" => true,
            other => other.strip_prefix("a=").and_then(unescape)? == user,
        };
        let delegated = parts.any(|extension| extension == "tokenauth=true");
        if user.is_empty() || nonce.is_empty() || !acts_as_itself || delegated {
            return None;
        }
        Some(Self {
            user,
            nonce: nonce.into(),
            header: format!("{binding},{acting_as},"),
            bare: bare.into(),
        })
    }

    /// Builds the response. `nonce` is fresh and contains no commas or control characters.
    pub(crate) fn answer(&self, nonce: &str, credential: &Credential) -> (Challenge, String) {
        let nonce = format!("{}{nonce}", self.nonce);
        let salt = BASE64.encode(&credential.salt);
        let first = format!("r={nonce},s={salt},i={}", credential.iterations);
        let begin = format!("{},{first}", self.bare);
        let binding = BASE64.encode(&self.header);
        (Challenge { expected: format!("c={binding},r={nonce}"), begin }, first)
    }
}

/// The server's state until the client's last message.
pub(crate) struct Challenge {
    /// The required last message of the client, without its proof.
    expected: String,
    /// The messages so far.
    begin: String,
}

impl Challenge {
    /// Verifies the client's last message.
    ///
    /// # Returns
    /// The server's last message, which proves that it has the credential; `None` if the client did
    /// not prove that it knows the password.
    pub(crate) fn verify(
        &self,
        hash: Hash,
        credential: &Credential,
        message: &[u8],
    ) -> Option<String> {
        let message = std::str::from_utf8(message).ok()?;
        let (without_proof, proof) = message.rsplit_once(",p=")?;
        if without_proof != self.expected {
            return None;
        }
        let proof = BASE64.decode(proof).ok()?;
        let signed = format!("{},{without_proof}", self.begin);
        let signature = hash.hmac(&credential.stored_key, signed.as_bytes());
        if proof.len() != signature.len() {
            return None;
        }
        let client_key: Vec<_> = proof.iter().zip(&signature).map(|(a, b)| a ^ b).collect();
        let proven: bool = hash.digest(&client_key).ct_eq(&credential.stored_key).into();
        let answer = hash.hmac(&credential.server_key, signed.as_bytes());
        proven.then(|| format!("v={}", BASE64.encode(answer)))
    }
}

/// Decodes a name in which commas and equals signs are written as `=2C` and `=3D`.
fn unescape(name: &str) -> Option<String> {
    let mut parts = name.split('=');
    let mut out = parts.next()?.to_owned();
    for part in parts {
        let (c, rest) = match (part.strip_prefix("2C"), part.strip_prefix("3D")) {
            (Some(rest), _) => (',', rest),
            (_, Some(rest)) => ('=', rest),
            _ => return None,
        };
        out.push(c);
        out.push_str(rest);
    }
    Some(out)
}

/// The client's side, for tests.
#[cfg(test)]
pub(crate) mod client {
    use super::*;

    /// The client's last message, and the expected response.
    pub(crate) fn finish(
        hash: Hash,
        password: &str,
        first_bare: &str,
        server_first: &str,
    ) -> (String, String) {
        let part = |name: &str| {
            let part = server_first.split(',').find_map(|part| part.strip_prefix(name));
            part.unwrap().to_owned()
        };
        let salt = BASE64.decode(part("s=")).unwrap();
        let iterations = part("i=").parse().unwrap();
        let salted = hash.salted(password.as_bytes(), &salt, iterations);
        let client_key = hash.hmac(&salted, b"Client Key");
        let without_proof = format!("c=biws,r={}", part("r="));
        let signed = format!("{first_bare},{server_first},{without_proof}");
        let signature = hash.hmac(&hash.digest(&client_key), signed.as_bytes());
        let proof: Vec<_> = client_key.iter().zip(&signature).map(|(a, b)| a ^ b).collect();
        let answer = hash.hmac(&hash.hmac(&salted, b"Server Key"), signed.as_bytes());
        (
            format!("{without_proof},p={}", BASE64.encode(proof)),
            format!("v={}", BASE64.encode(answer)),
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn credential(hash: Hash, salt: &str, password: &str) -> Credential {
        let salt = BASE64.decode(salt).unwrap();
        Credential::of_password(hash, password.as_bytes(), salt, 4096.try_into().unwrap())
    }

    /// The exchange of RFC 7677, section 3.
    #[test]
    fn the_exchange_of_the_rfc() {
        let credential = credential(Hash::Sha256, "W22ZaJ0SNY7soEsUEjb6gQ==", "pencil");
        let first = ClientFirst::parse(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO").unwrap();
        let (challenge, message) = first.answer("%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", &credential);
        assert_eq!(
            message,
            "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
        );
        let last = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,\
                    p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
        let answer = challenge.verify(Hash::Sha256, &credential, last.as_bytes());
        assert_eq!(answer.unwrap(), "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=");
        for wrong in [
            last.replace("p=d", "p=e"),
            last.replace("c=biws", "c=eSws"),
            last.replace("k0,", "k1,"),
            last.replace("p=dH", "p="),
            last.replace(",p=", ",x=1,p="),
            last[..40].to_owned(),
        ] {
            assert!(
                challenge.verify(Hash::Sha256, &credential, wrong.as_bytes()).is_none(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn first_messages_with_unsupported_features_are_refused() {
        for good in
            ["n,,n=a,r=x", "y,,n=a,r=x", "n,a=a,n=a,r=x", "n,,n=a=2Cb=3D,r=x,tokenauth=false"]
        {
            assert!(ClientFirst::parse(good.as_bytes()).is_some(), "{good}");
        }
        assert_eq!(ClientFirst::parse(b"n,,n=a=2Cb=3D,r=x").unwrap().user, "a,b=");
        for bad in [
            "",
            "n",
            "n,,",
            "n,,n=a",
            "n,,r=x",
            "p=tls-unique,,n=a,r=x",
            "n,a=b,n=a,r=x",
            "n,,n=,r=x",
            "n,,n=a,r=",
            "n,,n=a=2c,r=x",
            "n,,m=1,n=a,r=x",
            "n,,n=a,r=x,tokenauth=true",
        ] {
            assert!(ClientFirst::parse(bad.as_bytes()).is_none(), "{bad}");
        }
        assert!(ClientFirst::parse(&[b'n', b',', b',', b'n', b'=', 0xff]).is_none());
    }

    proptest! {
        // HMAC does not distinguish a key from the same key with trailing zeros, so there are none
        // here.
        #[test]
        fn only_the_right_password_passes(
            password in "[^\0]{0,9}",
            other in "[^\0]{0,9}",
            user in "[^,=]{1,9}",
            sha512: bool,
        ) {
            let hash = if sha512 { Hash::Sha512 } else { Hash::Sha256 };
            let iterations = 1.try_into().unwrap();
            let kept = Credential::of_password(hash, password.as_bytes(), vec![7; 8], iterations);
            let bare = format!("n={user},r=client");
            let first = ClientFirst::parse(format!("n,,{bare}").as_bytes()).unwrap();
            prop_assert_eq!(&first.user, &user);
            let (challenge, message) = first.answer("server", &kept);
            let (last, answer) = client::finish(hash, &other, &bare, &message);
            let verified = challenge.verify(hash, &kept, last.as_bytes());
            prop_assert_eq!(verified, (password == other).then_some(answer));
            prop_assert_eq!(kept.is_of_password(hash, other.as_bytes()), password == other);
        }
    }
}
