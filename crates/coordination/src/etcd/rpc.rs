//! The messages and methods of etcd's API that the client uses, with their numbers in `rpc.proto`
//! and `kv.proto` of etcd 3.4. Fields that it does not use are left out: protobuf skips them.

use bytes::Bytes;
use prost::Message;

/// A method with one request and one answer.
pub(super) trait Unary: Message + Clone + Default + 'static {
    /// Its path.
    const PATH: &'static str;
    /// Whether its answer has the newest revision of the whole cluster, not that of one member.
    const IS_LINEARIZABLE: bool = false;
    /// Most bytes of an answer. A larger page is asked for again with fewer keys.
    const MAX_ANSWER_BYTES: usize = 4 << 20;
    type Answer: Answer;
}

/// What all answers have.
pub(super) trait Answer: Message + Default + 'static {
    fn header(&self) -> Option<&Header>;
}

macro_rules! answers {
    ($($answer:ty),*) => {
        $(impl Answer for $answer {
            fn header(&self) -> Option<&Header> {
                self.header.as_ref()
            }
        })*
    };
}

answers!(RangeAnswer, TxnAnswer, GrantAnswer, RevokeAnswer, LivingAnswer, AuthenticateAnswer);

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(uint64, tag = "1")]
    pub(super) cluster_id: u64,
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(int64, tag = "2")]
    pub(super) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "bytes", tag = "5")]
    pub(super) value: Bytes,
    #[prost(int64, tag = "6")]
    pub(super) lease: i64,
}

/// Reads a key, or the keys up to `range_end`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Range {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) range_end: Bytes,
    #[prost(int64, tag = "3")]
    pub(super) limit: i64,
    /// 0 for the newest one.
    #[prost(int64, tag = "4")]
    pub(super) revision: i64,
    #[prost(bool, tag = "8")]
    pub(super) keys_only: bool,
    #[prost(bool, tag = "9")]
    pub(super) count_only: bool,
}

impl Unary for Range {
    const PATH: &'static str = "/etcdserverpb.KV/Range";
    const IS_LINEARIZABLE: bool = true;
    type Answer = RangeAnswer;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub(super) more: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Put {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
    #[prost(int64, tag = "3")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRange {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Operation {
    #[prost(oneof = "Do", tags = "1, 2, 3")]
    pub(super) operation: Option<Do>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Do {
    #[prost(message, tag = "1")]
    Range(Range),
    #[prost(message, tag = "2")]
    Put(Put),
    #[prost(message, tag = "3")]
    Delete(DeleteRange),
}

impl From<Do> for Operation {
    fn from(operation: Do) -> Self {
        Self { operation: Some(operation) }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct OperationAnswer {
    #[prost(oneof = "Done", tags = "1")]
    pub(super) answer: Option<Done>,
}

/// The answers that are read; those of puts and deletions are skipped.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Done {
    #[prost(message, tag = "1")]
    Range(RangeAnswer),
}

/// Numbers of `CompareTarget`. The result that is compared is 0, `EQUAL`, in all cases.
pub(super) const COMPARE_CREATED: i32 = 1;
pub(super) const COMPARE_MODIFIED: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    #[prost(int32, tag = "2")]
    pub(super) target: i32,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) key: Bytes,
    #[prost(oneof = "Target", tags = "5, 6")]
    pub(super) value: Option<Target>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Target {
    #[prost(int64, tag = "5")]
    Created(i64),
    #[prost(int64, tag = "6")]
    Modified(i64),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Txn {
    #[prost(message, repeated, tag = "1")]
    pub(super) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(super) success: Vec<Operation>,
    #[prost(message, repeated, tag = "3")]
    pub(super) failure: Vec<Operation>,
}

impl Unary for Txn {
    const PATH: &'static str = "/etcdserverpb.KV/Txn";
    const IS_LINEARIZABLE: bool = true;
    /// It may have the values of all guards.
    const MAX_ANSWER_BYTES: usize = 256 << 20;
    type Answer = TxnAnswer;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(super) responses: Vec<OperationAnswer>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Grant {
    #[prost(int64, tag = "1")]
    pub(super) ttl: i64,
}

impl Unary for Grant {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseGrant";
    type Answer = GrantAnswer;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GrantAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(int64, tag = "2")]
    pub(super) id: i64,
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
    #[prost(string, tag = "4")]
    pub(super) error: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Revoke {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

impl Unary for Revoke {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseRevoke";
    type Answer = RevokeAnswer;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RevokeAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
}

/// Renews a lease. It is a stream of requests in etcd's API, and this client sends one in each.
#[derive(Clone, PartialEq, Message)]
pub(super) struct KeepAlive {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

impl Unary for KeepAlive {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseKeepAlive";
    type Answer = LivingAnswer;
}

/// Asks how long a lease still lives.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TimeToLive {
    #[prost(int64, tag = "1")]
    pub(super) id: i64,
}

impl Unary for TimeToLive {
    const PATH: &'static str = "/etcdserverpb.Lease/LeaseTimeToLive";
    type Answer = LivingAnswer;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LivingAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    /// Seconds. 0 of a renewal and -1 of a question: the lease has ended.
    #[prost(int64, tag = "3")]
    pub(super) ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Authenticate {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) password: String,
}

impl Unary for Authenticate {
    const PATH: &'static str = "/etcdserverpb.Auth/Authenticate";
    type Answer = AuthenticateAnswer;
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct AuthenticateAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(string, tag = "2")]
    pub(super) token: String,
}

pub(super) const WATCH_PATH: &str = "/etcdserverpb.Watch/Watch";

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) create: Option<WatchCreate>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchCreate {
    #[prost(bytes = "bytes", tag = "1")]
    pub(super) key: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) range_end: Bytes,
    /// The first revision that is reported.
    #[prost(int64, tag = "3")]
    pub(super) start_revision: i64,
    /// Whether large answers are divided, which keeps each within the limit of a message.
    #[prost(bool, tag = "8")]
    pub(super) fragment: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "4")]
    pub(super) canceled: bool,
    /// Not 0: the history that was asked for is gone, and this is the oldest revision that is kept.
    #[prost(int64, tag = "5")]
    pub(super) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(super) cancel_reason: String,
    /// Whether the next answer continues this one.
    #[prost(bool, tag = "7")]
    pub(super) fragment: bool,
    #[prost(message, repeated, tag = "11")]
    pub(super) events: Vec<WatchEvent>,
}

/// Number of the type of an event that deletes a key; that of a put is 0.
pub(super) const DELETED: i32 = 1;

#[derive(Clone, PartialEq, Message)]
pub(super) struct WatchEvent {
    #[prost(int32, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) kv: Option<KeyValue>,
}
