//! Users and their credentials in the catalog; the format is in `docs/format/broker-metadata.md`.
//!
//! There is one kind of user: a user with a SCRAM credential may also authenticate with PLAIN, if a
//! listener allows it.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use alluvium_stream::{Change, Store, StoreError};
use parking_lot::RwLock;
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::{digest, hmac};

use super::scram::{Credential, Hash};

const KEY_PREFIX: &str = "scram/";
const DECOY_KEY: &str = "security/decoy";

/// The limits on iterations, as in Kafka.
pub(crate) const ITERATIONS: std::ops::RangeInclusive<u32> = 4096..=16384;

/// The iterations of most credentials, and hence of decoys.
const USUAL_ITERATIONS: NonZeroU32 = NonZeroU32::new(4096).unwrap();

/// The greatest number of users times mechanisms; each takes about 300 bytes.
pub(crate) const MAX_CREDENTIALS: usize = 100_000;
pub(crate) const MAX_NAME_BYTES: usize = 255;
const SALT_BYTES: usize = 24;

/// Why a user cannot be changed.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// The name is too long, empty, or has a control character.
    #[error("a user name must have 1 to {MAX_NAME_BYTES} bytes and no control characters")]
    Name,
    /// The password is empty or too long.
    #[error("a password must have 1 to 1024 bytes")]
    Password,
    /// The limit on users is reached.
    #[error("the limit of {MAX_CREDENTIALS} credentials is reached")]
    TooMany,
    /// The operating system provides no random numbers.
    #[error("the operating system provides no random numbers")]
    Random,
    /// A stored user cannot be read.
    #[error("catalog entry {0} cannot be read")]
    Damaged(String),
    /// The store failed.
    #[error("{0}")]
    Store(#[from] StoreError),
}

type Table = BTreeMap<(String, Hash), Arc<Credential>>;

/// All users.
pub(crate) struct Users {
    store: Store,
    table: RwLock<Table>,
    /// Serializes changes.
    changing: tokio::sync::Mutex<()>,
    /// The key for the salts of users that do not exist: they are the same at each attempt, also
    /// after a restart.
    decoy: hmac::Key,
}

/// A change of a credential; `None` deletes it.
pub(crate) type UserChange = ((String, Hash), Option<Credential>);

/// Reads what the catalog has.
fn stored(store: &Store) -> Result<Table, UserError> {
    let mut table = Table::new();
    for (key, value) in store.meta(KEY_PREFIX) {
        let damaged = || UserError::Damaged(key.clone());
        let (mechanism, user) = key[KEY_PREFIX.len()..].split_once('/').ok_or_else(damaged)?;
        let hash = Hash::ALL.into_iter().find(|hash| hash.mechanism() == mechanism);
        let credential = serde_json::from_slice(&value).map_err(|_| damaged())?;
        table.insert((user.into(), hash.ok_or_else(damaged)?), Arc::new(credential));
    }
    Ok(table)
}

impl Users {
    /// Loads the users.
    pub(crate) async fn open(store: Store) -> Result<Self, UserError> {
        let table = stored(&store)?;
        let secret = match store.meta_value(DECOY_KEY) {
            Some(secret) => secret,
            None if store.is_followed() => random::<32>()?.to_vec(),
            None => {
                let secret = random::<32>()?.to_vec();
                let change = Change::PutMeta { key: DECOY_KEY.into(), value: secret.clone() };
                store.commit(vec![change]).await?;
                secret
            }
        };
        let decoy = hmac::Key::new(hmac::HMAC_SHA256, &secret);
        Ok(Self { store, table: RwLock::new(table), changing: Default::default(), decoy })
    }

    /// Takes over what the catalog has now, from a store that another server writes.
    ///
    /// # Errors
    /// A stored user cannot be read; nothing has changed.
    pub(crate) fn follow(&self) -> Result<(), UserError> {
        *self.table.write() = stored(&self.store)?;
        Ok(())
    }

    pub(crate) fn credential(&self, user: &str, hash: Hash) -> Option<Arc<Credential>> {
        self.table.read().get(&(user.to_owned(), hash)).cloned()
    }

    /// The credential of the user's newest password.
    pub(crate) fn newest_credential(&self, user: &str) -> Option<(Hash, Arc<Credential>)> {
        let both = Hash::ALL.into_iter().rev();
        let both = both.filter_map(|hash| Some((hash, self.credential(user, hash)?)));
        // Of equal ones the last, which has the shorter hash.
        both.max_by_key(|(_, credential)| credential.change)
    }

    /// A credential that no password matches, for a user that does not exist but must appear to.
    pub(crate) fn decoy(&self, user: &str, hash: Hash) -> Arc<Credential> {
        let of = |what: &str| {
            let name = format!("{}/{what}/{user}", hash.mechanism());
            hmac::sign(&self.decoy, name.as_bytes()).as_ref().to_vec()
        };
        let mut salt = of("salt");
        salt.truncate(SALT_BYTES);
        Arc::new(Credential::of_salted(hash, &of("password"), salt, USUAL_ITERATIONS))
    }

    /// All users with their credentials.
    pub(crate) fn all(&self) -> Vec<(String, Hash, NonZeroU32)> {
        let table = self.table.read();
        table.iter().map(|((user, hash), c)| (user.clone(), *hash, c.iterations)).collect()
    }

    /// Applies changes, all or none.
    pub(crate) async fn change(&self, mut changes: Vec<UserChange>) -> Result<(), UserError> {
        let _one_at_a_time = self.changing.lock().await;
        {
            let table = self.table.read();
            let is_new =
                |(key, credential): &&UserChange| credential.is_some() && !table.contains_key(key);
            let added = changes.iter().filter(is_new).count();
            if added > 0 && table.len() + added > MAX_CREDENTIALS {
                return Err(UserError::TooMany);
            }
        }
        for ((user, _), credential) in &mut changes {
            if let Some(credential) = credential {
                let before = self.newest_credential(user);
                credential.change = before.map_or(0, |(_, before)| before.change) + 1;
            }
        }
        let stored = changes.iter().map(|((user, hash), credential)| {
            let key = format!("{KEY_PREFIX}{}/{user}", hash.mechanism());
            match credential {
                Some(credential) => Change::PutMeta {
                    key,
                    value: serde_json::to_vec(credential).expect("a struct of texts and numbers"),
                },
                None => Change::DeleteMeta(key),
            }
        });
        self.store.commit(stored.collect()).await?;
        let mut table = self.table.write();
        let mut changed = BTreeSet::new();
        for (key, credential) in changes {
            match credential {
                Some(credential) => {
                    changed.insert(key.0.clone());
                    table.insert(key, Arc::new(credential));
                }
                None => drop(table.remove(&key)),
            }
        }
        drop(table);
        for user in changed {
            let newest = self.newest_credential(&user).map_or(0, |(_, newest)| newest.change);
            let older = |hash: &Hash| {
                self.credential(&user, *hash).is_some_and(|credential| credential.change < newest)
            };
            for hash in Hash::ALL.into_iter().filter(older) {
                let mechanism = hash.mechanism();
                tracing::warn!(
                    user,
                    mechanism,
                    "a user's password changed for some mechanisms and remains the old one for \
                     others"
                );
            }
        }
        Ok(())
    }

    /// Sets a user's password for all mechanisms.
    pub(crate) async fn set_password(&self, user: &str, password: &str) -> Result<(), UserError> {
        check_name(user)?;
        if !(1..=1024).contains(&password.len()) {
            return Err(UserError::Password);
        }
        let mut changes = Vec::new();
        for hash in Hash::ALL {
            let (password, salt) = (password.to_owned(), random::<SALT_BYTES>()?.to_vec());
            let made = tokio::task::spawn_blocking(move || {
                Credential::of_password(hash, password.as_bytes(), salt, USUAL_ITERATIONS)
            });
            let made = made.await.map_err(|_| UserError::Random)?;
            changes.push(((user.to_owned(), hash), Some(made)));
        }
        self.change(changes).await
    }

    /// Deletes a user's credentials and returns whether there were any.
    pub(crate) async fn delete(&self, user: &str) -> Result<bool, UserError> {
        let has = |hash: &Hash| self.credential(user, *hash).is_some();
        let found: Vec<_> = Hash::ALL.into_iter().filter(has).collect();
        let changes = found.iter().map(|hash| ((user.to_owned(), *hash), None)).collect();
        self.change(changes).await?;
        Ok(!found.is_empty())
    }
}

/// Checks that a user can have this name.
pub(crate) fn check_name(user: &str) -> Result<(), UserError> {
    let fits = (1..=MAX_NAME_BYTES).contains(&user.len()) && !user.chars().any(char::is_control);
    if fits { Ok(()) } else { Err(UserError::Name) }
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], UserError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| UserError::Random)?;
    Ok(bytes)
}

/// A nonce for SCRAM.
pub(crate) fn nonce() -> Result<String, UserError> {
    let digest = digest::digest(&digest::SHA256, &random::<32>()?);
    Ok(digest.as_ref()[..20].iter().map(|byte| format!("{byte:02x}")).collect())
}
