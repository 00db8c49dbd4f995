//! The journal of a drill: what the server has acknowledged, and since when it is uploaded.

use std::collections::{BTreeMap, BTreeSet};

use kafka_protocol::messages::CreateAclsRequest;
use kafka_protocol::messages::create_acls_request::AclCreation;
use kafka_protocol::protocol::StrBytes;

use super::super::model::{Commit, Model, Outcome, Partition, Record, Transaction};
use super::super::work::Worker;
use super::read::Observed;
use super::site::Site;
use crate::Error;
use crate::client::Resource;
use crate::rng::Rng;

/// The setting of topics that drills change. Its values have no effect on a drill.
pub(super) const SETTING: &str = "flush.messages";
/// The topic whose setting is changed.
const SET_TOPIC: &str = "events";
/// Objects of the chain after which a change is in the chain: one may have been frozen before the
/// change, and an opening adds up to two fences.
const UNTIL_PUBLISHED: u64 = 4;

/// Topics, settings, users and ACLs with their values.
pub(super) type State = BTreeMap<String, String>;

pub(super) fn acl_name(topic: &str) -> String {
    format!("ACL {topic}")
}

/// A change of the state that was acknowledged.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) of: String,
    /// `None` if it was deleted.
    pub(super) value: Option<String>,
    /// The newest object of the chain before it was requested.
    head: u64,
}

impl Change {
    pub(super) fn new(of: &str, value: &str, head: u64) -> Self {
        Self { of: of.to_owned(), value: Some(value.to_owned()), head }
    }

    /// Whether the chain has it if it ends at `head` and lacks the objects with these numbers.
    pub(super) fn is_kept(&self, head: u64, lacks: &dyn Fn(u64) -> bool) -> bool {
        let last = self.head + UNTIL_PUBLISHED;
        head >= last && !(self.head + 1..=last).any(lacks)
    }
}

/// What is certainly uploaded.
#[derive(Clone, Debug, Default)]
pub(super) struct Uploaded {
    /// The newest object of the chain at that time.
    pub(super) head: u64,
    /// The ends of partitions.
    pub(super) ends: BTreeMap<Partition, i64>,
    /// The number of effective commits by group and partition.
    pub(super) commits: BTreeMap<(String, Partition), usize>,
    /// Transactions that have ended.
    pub(super) transactions: BTreeSet<usize>,
}

/// What was acknowledged.
#[derive(Clone, Debug, Default)]
pub(super) struct Journal {
    pub(super) model: Model,
    pub(super) changes: Vec<Change>,
    /// What was certainly uploaded at different times.
    pub(super) uploads: Vec<Uploaded>,
    /// A transaction whose end was requested without an answer.
    pub(super) unknown_end: Option<usize>,
    /// The session of that request, and an idempotent producer whose last batch had no answer.
    pub(super) unknown_session: Option<usize>,
    pub(super) unknown_sequence: Option<(usize, Partition)>,
    /// Whether a request had no answer.
    pub(super) is_cut_off: bool,
    /// The ends of partitions when the loss occurred.
    old_ends: BTreeMap<Partition, i64>,
    made: u64,
    /// Records that an earlier loss of the drill had. A rebuild without the catalog may find them
    /// again in an object from before a log compaction.
    pub(super) lost: BTreeMap<Partition, BTreeMap<i64, Record>>,
}

impl Journal {
    /// Notes that everything so far is uploaded; `head` is the newest object of the chain.
    pub(super) fn note_upload(&mut self, head: u64) {
        let model = &self.model;
        let mut uploaded = Uploaded { head, ..Uploaded::default() };
        for partition in model.partitions() {
            let next = model.log(&partition).next;
            uploaded.ends.insert(partition, next);
        }
        for (group, partitions) in &model.groups {
            for (partition, commits) in partitions {
                let done = model.effective(commits).count();
                uploaded.commits.insert((group.clone(), partition.clone()), done);
            }
        }
        let all = 0..model.transactions.len();
        uploaded.transactions = all.filter(|txn| model.outcome(*txn) != Outcome::Open).collect();
        self.uploads.push(uploaded);
    }

    /// Notes that the server has ended and something of it gets lost.
    pub(super) fn note_loss(&mut self) {
        let ends = self.model.partitions().into_iter().map(|partition| {
            let next = self.model.log(&partition).next;
            (partition, next)
        });
        self.old_ends = ends.collect();
    }

    /// Gives transactions the outcome that their records have. What a rebuild has aborted of one
    /// that is visible apart from that becomes a transaction of its own.
    fn settle_transactions(&mut self, observed: &Observed) {
        let model = &mut self.model;
        let (mut shown, mut hidden) = (BTreeSet::new(), Vec::new());
        for (partition, contents) in &observed.partitions {
            for (offset, record) in &model.log(partition).records {
                let Some(txn) = record.txn else { continue };
                match contents.committed.records.contains_key(offset) {
                    true => drop(shown.insert(txn)),
                    false => hidden.push((partition.clone(), *offset, txn)),
                }
            }
        }
        for txn in &shown {
            model.transactions[*txn].outcome = Outcome::Committed;
        }
        let mut aborted: BTreeMap<usize, usize> = BTreeMap::new();
        for (partition, offset, txn) in hidden {
            if !shown.contains(&txn) {
                model.transactions[txn].outcome = Outcome::Aborted;
                continue;
            }
            let of = *aborted.entry(txn).or_insert_with(|| {
                let producer_id = model.transactions[txn].producer_id;
                let outcome = Outcome::Aborted;
                model.transactions.push(Transaction { producer_id, outcome });
                model.transactions.len() - 1
            });
            if let Some(record) = model.log_mut(&partition).records.get_mut(&offset) {
                record.txn = Some(of);
            }
        }
    }

    /// Replaces what was acknowledged by what is left of it, after that was checked.
    pub(super) fn settle(&mut self, observed: &Observed) {
        for (partition, contents) in &observed.partitions {
            let log = self.model.log_mut(partition);
            let is_lost = |offset: &i64| !contents.all.records.contains_key(offset);
            let lost = log.records.extract_if(.., |offset, _| is_lost(offset));
            self.lost.entry(partition.clone()).or_default().extend(lost);
            log.batches.retain(|base| contents.all.records.contains_key(base));
        }
        self.settle_transactions(observed);
        for (group, offsets) in &observed.groups {
            let commit = |(of, offset): &(Partition, i64)| {
                (of.clone(), vec![Commit { offset: *offset, txn: None }])
            };
            self.model.groups.insert(group.clone(), offsets.iter().map(commit).collect());
        }
        let mut left: BTreeMap<String, Change> = BTreeMap::new();
        for change in self.changes.drain(..) {
            let found = observed.state.get(&change.of);
            let is_it = |change: &Change| change.value.as_ref() == found;
            // The object of the chain that has the change may still be lost.
            if is_it(&change) || !left.get(&change.of).is_some_and(is_it) {
                let change = Change { value: found.cloned(), ..change };
                left.insert(change.of.clone(), change);
            }
        }
        self.changes = left.into_values().collect();
        self.uploads.clear();
        self.unknown_end = None;
        self.unknown_session = None;
        self.unknown_sequence = None;
    }

    /// Whether an offset was handed out after the loss.
    pub(super) fn is_new(&self, partition: &Partition, offset: i64) -> bool {
        self.old_ends.get(partition).is_some_and(|end| offset >= *end)
    }

    fn worker<'a>(&'a mut self, address: std::net::SocketAddr) -> Result<Worker<'a>, Error> {
        Worker::new(address, &mut self.model)
    }

    /// Changes a topic without records, a setting, a user or an ACL.
    pub(super) fn change(
        &mut self,
        site: &Site,
        address: std::net::SocketAddr,
        rng: &mut Rng,
    ) -> Result<(), Error> {
        self.made += 1;
        let (head, number) = (site.bucket.head(), self.made);
        let mut worker = self.worker(address)?;
        let (of, value) = match rng.below(4) {
            0 => {
                let name = format!("made-{number}");
                worker.request_topic(&name, 1, &[])?;
                (format!("topic {name}"), "there".to_owned())
            }
            1 => {
                let value = (1_000_000 + number).to_string();
                worker.client.set(Resource::Topic(SET_TOPIC), SETTING, &value)?;
                (format!("setting {SET_TOPIC}"), value)
            }
            2 => {
                let name = format!("user-{number}");
                site.add_user(&name)?;
                (format!("user {name}"), "there".into())
            }
            _ => {
                let name = format!("acl-{number}");
                allow(&mut worker, &name)?;
                (acl_name(&name), "there".into())
            }
        };
        self.changes.push(Change::new(&of, &value, head));
        Ok(())
    }
}

/// Allows a user to read a topic.
fn allow(worker: &mut Worker<'_>, topic: &str) -> Result<(), Error> {
    let text = |text: &str| StrBytes::from_string(text.to_owned());
    let acl = AclCreation::default()
        .with_resource_type(2)
        .with_resource_name(text(topic))
        .with_resource_pattern_type(3)
        .with_principal(text("User:reader"))
        .with_host(text("*"))
        .with_operation(3)
        .with_permission_type(3);
    let request = CreateAclsRequest::default().with_creations(vec![acl]);
    for result in worker.client.call(2, &request)?.results {
        if result.error_code != 0 {
            return Err(format!("CreateAcls: error code {}", result.error_code).into());
        }
    }
    Ok(())
}
