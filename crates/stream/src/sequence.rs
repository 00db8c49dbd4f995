//! Numbered objects, each created once, by the writer that comes first:
//! `docs/format/sequence.md`.
//!
//! - `sealed.rs`: the bytes of an object
//! - `probe.rs`: whether an object store can have sequences
//! - `conformance.rs`: what an object store must do, as tests

pub mod conformance;
mod probe;
mod sealed;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use tokio::time::Instant;

use crate::damage::Damage;
use crate::object_error::{ObjectError, found};
use crate::objects::{Request, delete_object, list_all, object_size, within};
use crate::retry::Backoff;

pub use probe::{ProbeError, probe_creates};
pub(crate) use sealed::NUMBERS;
pub use sealed::{DecodeError, HEADER_BYTES, MAX_BODY_BYTES, Sealed};
pub(crate) use sealed::{Identity, link};

/// The result of a create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Created {
    /// The object exists, durably, and is this writer's.
    Won,
    /// The number is that of another writer's object.
    Taken(Sealed),
}

/// The result of one attempt to create an object.
enum Attempt {
    Created(Created),
    /// The create was answered with "exists", and there is no object.
    Conflict(ObjectError),
}

/// The objects below one prefix. Cheap to clone.
#[derive(Clone)]
pub struct Sequence {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    retry: (Duration, Duration),
}

impl Sequence {
    /// Returns the sequence below `prefix`, which has no slash at its end. `retry` is the first and
    /// the longest delay between two attempts.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: String, retry: (Duration, Duration)) -> Self {
        Self { store, prefix, retry }
    }

    /// Returns the first and the longest delay between two attempts of a request.
    pub(crate) fn retry(&self) -> (Duration, Duration) {
        self.retry
    }

    /// Returns the name of the object with a number.
    pub fn name(&self, number: u64) -> String {
        format!("{}/{number:016x}", self.prefix)
    }

    /// Creates an object, and tries again until the outcome is certain.
    ///
    /// # Errors
    /// The object store refuses the request; or `until` has passed, before which the last attempt
    /// begins; or what exists under the number cannot be read. The outcome is unknown then: the
    /// number may get this object at any time, also later. So the writer may only try to create the
    /// same object again.
    ///
    /// # Panics
    /// If the object cannot be [encoded](Sealed::encode).
    pub async fn create(&self, object: &Sealed, until: Instant) -> Result<Created, ObjectError> {
        let name = self.name(object.number);
        let mut backoff = Backoff::new(self.retry);
        loop {
            let error = match self.try_create(object).await {
                Ok(Attempt::Created(created)) => return Ok(created),
                Ok(Attempt::Conflict(error)) | Err(error) => error,
            };
            let wait = backoff.failed();
            if !error.is_temporary() || Instant::now() + wait >= until {
                return Err(error);
            }
            tracing::debug!("cannot create {name}, next attempt in {wait:?}: {error}");
            tokio::time::sleep(wait).await;
        }
    }

    /// Sends one create. Only its answer decides, not what a GET finds after a create without an
    /// answer: that object may not be durable yet.
    async fn try_create(&self, object: &Sealed) -> Result<Attempt, ObjectError> {
        let name = self.name(object.number);
        let path = Path::from(name.as_str());
        let bytes = object.encode();
        let payload = PutPayload::from(bytes.clone());
        let put = async {
            match self.store.put_opts(&path, payload, PutMode::Create.into()).await {
                Ok(_) => Ok(None),
                Err(exists @ object_store::Error::AlreadyExists { .. }) => Ok(Some(exists)),
                Err(error) => Err(error),
            }
        };
        let Some(exists) = within(Request::Put, &name, put).await? else {
            return Ok(Attempt::Created(Created::Won));
        };
        // The header is enough to recognize the writer's own object: it has a checksum of the body.
        match self.header(object.number).await {
            Ok(Some(header)) if header == bytes[..HEADER_BYTES] => {
                return Ok(Attempt::Created(Created::Won));
            }
            Ok(_) | Err(ObjectError::Damaged { .. }) => {}
            Err(error) => return Err(error),
        }
        match self.get(object.number).await? {
            // It was created since the header was read, by an earlier attempt.
            Some(found) if found == *object => Ok(Attempt::Created(Created::Won)),
            Some(found) if found.nonce == object.nonce => {
                let reason = "it has the nonce of another object".into();
                Err(ObjectError::damaged(&name, Damage { position: 40, reason }))
            }
            Some(found) => Ok(Attempt::Created(Created::Taken(found))),
            // S3 answers a create that meets another one with 409, with or without an object.
            None => {
                let exists = ObjectError::store(&name, &exists).reason();
                let reason = format!("it is said to exist, and is not found: {exists}");
                Ok(Attempt::Conflict(ObjectError::failed(&name, reason)))
            }
        }
    }

    /// Reads an object; `None` if there is none with this number.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or is of a later version.
    pub async fn get(&self, number: u64) -> Result<Option<Sealed>, ObjectError> {
        let name = self.name(number);
        let path = Path::from(name.as_str());
        // One byte more than the longest object of this version; a later one may be longer.
        let most = (HEADER_BYTES + MAX_BODY_BYTES + 1) as u64;
        let range = GetRange::Bounded(0..most);
        let options = GetOptions { range: Some(range), ..GetOptions::default() };
        let read = async { self.store.get_opts(&path, options).await?.bytes().await };
        let Some(bytes) = found(within(Request::Get, &name, read).await)? else {
            return Ok(None);
        };
        Sealed::decode(number, &bytes).map(Some).map_err(|error| error.of(&name))
    }

    /// Returns what the header of an object states; `None` if there is none with this number.
    pub(crate) async fn identity(&self, number: u64) -> Result<Option<Identity>, ObjectError> {
        let Some(header) = self.header(number).await? else { return Ok(None) };
        let identity = sealed::identify(number, &header);
        identity.map(Some).map_err(|error| error.of(&self.name(number)))
    }

    /// Reads the bytes in front of the body of an object.
    async fn header(&self, number: u64) -> Result<Option<Bytes>, ObjectError> {
        let name = self.name(number);
        let path = Path::from(name.as_str());
        let header = self.store.get_range(&path, 0..HEADER_BYTES as u64);
        found(within(Request::Get, &name, header).await)
    }

    /// Whether there is an object with this number.
    ///
    /// # Errors
    /// The object store cannot be asked.
    pub async fn exists(&self, number: u64) -> Result<bool, ObjectError> {
        Ok(object_size(&*self.store, &self.name(number).into()).await?.is_some())
    }

    /// Returns the numbers of `from` and above that are listed, in order.
    ///
    /// # Errors
    /// The object store cannot be listed.
    pub async fn listed(&self, from: u64) -> Result<Vec<u64>, ObjectError> {
        let listed = self.listed_with_times().await?;
        Ok(listed.into_keys().filter(|number| *number >= from).collect())
    }

    /// Returns the listed numbers, with the times at which the objects were created, by the clock
    /// of the object store.
    pub(crate) async fn listed_with_times(&self) -> Result<BTreeMap<u64, SystemTime>, ObjectError> {
        let prefix = Path::from(self.prefix.as_str());
        let found = list_all(&*self.store, Some(&prefix)).await?.into_iter();
        let numbered = found.filter_map(|object| {
            let number = self.number(object.location.as_ref())?;
            Some((number, object.last_modified.into()))
        });
        Ok(numbered.collect())
    }

    /// Returns the greatest number of `from` (at least 1) and above; `None` if there is none.
    ///
    /// # Errors
    /// The object store cannot be asked, or a number is missing between the least one that is
    /// listed and the greatest one.
    pub async fn last(&self, from: u64) -> Result<Option<u64>, ObjectError> {
        let mut last = None;
        for number in self.listed(from).await? {
            let mut next = last.map_or(number, |last| last + 1);
            // Objects that were created after their names were passed in the listing.
            while next < number && self.exists(next).await? {
                next += 1;
            }
            if next < number {
                let reason = format!("it is missing, and number {number} exists");
                return Err(ObjectError::damaged(&self.name(next), Damage::of_all(reason)));
            }
            last = Some(number);
        }
        let mut next = last.map_or(from, |last| last + 1);
        while self.exists(next).await? {
            last = Some(next);
            next += 1;
        }
        Ok(last)
    }

    /// Deletes objects; those that do not exist count as deleted. In a local directory a power cut
    /// may bring them back, whole or truncated.
    ///
    /// # Errors
    /// One of them cannot be deleted; those before it are.
    pub async fn delete(&self, numbers: impl IntoIterator<Item = u64>) -> Result<(), ObjectError> {
        for number in numbers {
            delete_object(&*self.store, &self.name(number)).await?;
        }
        Ok(())
    }

    /// The number in the name of an object of this sequence.
    fn number(&self, name: &str) -> Option<u64> {
        let number = name.strip_prefix(&self.prefix)?.strip_prefix('/')?;
        let number = u64::from_str_radix(number, 16).ok()?;
        (self.name(number) == name && NUMBERS.contains(&number)).then_some(number)
    }
}

#[cfg(test)]
mod tests;
