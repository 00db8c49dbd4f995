//! ACLs and the decisions that follow from them: pure functions.
//!
//! Numbers are those of Kafka's protocol; ACLs are stored with them too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// A type of resource, with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResourceType {
    Topic = 2,
    Group = 3,
    Cluster = 4,
    TransactionalId = 5,
    DelegationToken = 6,
    User = 7,
}

impl ResourceType {
    const ALL: [Self; 6] = [
        Self::Topic,
        Self::Group,
        Self::Cluster,
        Self::TransactionalId,
        Self::DelegationToken,
        Self::User,
    ];

    pub(crate) fn from_number(number: i8) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known as i8 == number)
    }

    /// The operations on resources of this type.
    pub(crate) fn operations(self) -> &'static [Operation] {
        use Operation as O;
        match self {
            Self::Topic => &[
                O::Read,
                O::Write,
                O::Create,
                O::Delete,
                O::Alter,
                O::Describe,
                O::DescribeConfigs,
                O::AlterConfigs,
            ],
            Self::Group => &[O::Read, O::Delete, O::Describe, O::DescribeConfigs, O::AlterConfigs],
            Self::Cluster => &[
                O::Create,
                O::Alter,
                O::Describe,
                O::ClusterAction,
                O::DescribeConfigs,
                O::AlterConfigs,
                O::IdempotentWrite,
            ],
            Self::TransactionalId => &[O::Describe, O::Write, O::TwoPhaseCommit],
            Self::DelegationToken => &[O::Describe],
            Self::User => &[O::CreateTokens, O::DescribeTokens],
        }
    }
}

/// An operation, with its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    All = 2,
    Read = 3,
    Write = 4,
    Create = 5,
    Delete = 6,
    Alter = 7,
    Describe = 8,
    ClusterAction = 9,
    DescribeConfigs = 10,
    AlterConfigs = 11,
    IdempotentWrite = 12,
    CreateTokens = 13,
    DescribeTokens = 14,
    TwoPhaseCommit = 15,
}

impl Operation {
    /// Whether an ACL can have this operation.
    pub(crate) fn is_number(number: i8) -> bool {
        (Self::All as i8..=Self::TwoPhaseCommit as i8).contains(&number)
    }

    /// Whether the right to do `granted` includes this operation.
    fn is_covered_by(self, granted: i8) -> bool {
        let by = |granters: &[Self]| granters.iter().any(|granter| *granter as i8 == granted);
        granted == self as i8
            || granted == Self::All as i8
            || match self {
                Self::Describe => by(&[Self::Read, Self::Write, Self::Delete, Self::Alter]),
                Self::DescribeConfigs => by(&[Self::AlterConfigs]),
                _ => false,
            }
    }
}

/// Numbers of pattern types.
pub(crate) const LITERAL: i8 = 3;
pub(crate) const PREFIXED: i8 = 4;
/// In filters only: every pattern, and every pattern that matches the name.
const ANY: i8 = 1;
const MATCH: i8 = 2;

/// Numbers of permissions.
pub(crate) const DENY: i8 = 2;
pub(crate) const ALLOW: i8 = 3;

/// All resources of a type, or all hosts.
const WILDCARD: &str = "*";
const ALL_USERS: &str = "User:*";

/// The only resource of its type.
pub(crate) const CLUSTER_NAME: &str = "kafka-cluster";

/// An access control list entry: allows or denies a principal an operation on resources.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Acl {
    pub(crate) resource_type: i8,
    pub(crate) resource_name: String,
    pub(crate) pattern_type: i8,
    pub(crate) principal: String,
    pub(crate) host: String,
    pub(crate) operation: i8,
    pub(crate) permission: i8,
}

impl Acl {
    /// Whether the ACL applies to this client.
    fn applies_to(&self, requester: &Requester<'_>) -> bool {
        (self.principal == ALL_USERS || self.principal == requester.principal)
            && (self.host == WILDCARD || is_host(&self.host, requester.host))
    }

    fn denies(&self, operation: Operation) -> bool {
        self.permission == DENY
            && (self.operation == operation as i8 || self.operation == Operation::All as i8)
    }
}

/// Whether a host in an ACL is this address. An IPv6 address can be written in many ways, and
/// Java's is not the usual one; a denying ACL must not depend on that.
fn is_host(named: &str, address: &str) -> bool {
    let canonical = |ip: IpAddr| ip.to_canonical().to_string();
    named == address
        || named.contains(':') && named.parse().is_ok_and(|named| canonical(named) == address)
}

/// A filter for ACLs. `None` and 1 match anything.
#[derive(Clone, Debug)]
pub(crate) struct Filter {
    pub(crate) resource_type: i8,
    pub(crate) resource_name: Option<String>,
    pub(crate) pattern_type: i8,
    pub(crate) principal: Option<String>,
    pub(crate) host: Option<String>,
    pub(crate) operation: i8,
    pub(crate) permission: i8,
}

impl Filter {
    /// Whether its numbers are known.
    pub(crate) fn is_valid(&self) -> bool {
        (self.resource_type == ANY || ResourceType::from_number(self.resource_type).is_some())
            && [ANY, MATCH, LITERAL, PREFIXED].contains(&self.pattern_type)
            && (self.operation == ANY || Operation::is_number(self.operation))
            && [ANY, DENY, ALLOW].contains(&self.permission)
    }

    pub(crate) fn matches(&self, acl: &Acl) -> bool {
        let number = |wanted: i8, actual: i8| wanted == ANY || wanted == actual;
        let text = |wanted: &Option<String>, actual: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == actual)
        };
        number(self.resource_type, acl.resource_type)
            && number(self.operation, acl.operation)
            && number(self.permission, acl.permission)
            && text(&self.principal, &acl.principal)
            && text(&self.host, &acl.host)
            && match (self.pattern_type, &self.resource_name) {
                (ANY, _) | (MATCH, None) => text(&self.resource_name, &acl.resource_name),
                (MATCH, Some(name)) if acl.pattern_type == PREFIXED => {
                    name.starts_with(&acl.resource_name)
                }
                (MATCH, Some(name)) => acl.resource_name == *name || acl.resource_name == WILDCARD,
                (pattern, _) => {
                    pattern == acl.pattern_type && text(&self.resource_name, &acl.resource_name)
                }
            }
    }
}

/// A client whose rights are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester<'a> {
    pub(crate) principal: &'a str,
    /// The client's address, such as `127.0.0.1`.
    pub(crate) host: &'a str,
}

/// All ACLs, indexed by resource.
#[derive(Default)]
pub(crate) struct Table {
    all: BTreeSet<Acl>,
    by_name: HashMap<(i8, String), Vec<Acl>>,
    by_prefix: HashMap<(i8, String), Vec<Acl>>,
    /// The lengths of the prefixes of each type, in bytes.
    prefix_lens: BTreeMap<i8, BTreeSet<usize>>,
    names_hosts: bool,
}

impl Table {
    pub(crate) fn new(all: BTreeSet<Acl>) -> Self {
        let mut table = Self::default();
        for acl in &all {
            let key = (acl.resource_type, acl.resource_name.clone());
            if acl.pattern_type == PREFIXED {
                let lens = table.prefix_lens.entry(acl.resource_type).or_default();
                lens.insert(acl.resource_name.len());
                table.by_prefix.entry(key).or_default().push(acl.clone());
            } else {
                table.by_name.entry(key).or_default().push(acl.clone());
            }
        }
        table.names_hosts = all.iter().any(|acl| acl.host != WILDCARD);
        table.all = all;
        table
    }

    /// Whether decisions depend on the client's address.
    pub(crate) fn names_hosts(&self) -> bool {
        self.names_hosts
    }

    pub(crate) fn all(&self) -> &BTreeSet<Acl> {
        &self.all
    }

    /// The ACLs that apply to a resource.
    fn about(&self, kind: ResourceType, name: &str) -> impl Iterator<Item = &Acl> {
        let kind = kind as i8;
        let literal = |name: &str| self.by_name.get(&(kind, name.to_owned()));
        let lens = self.prefix_lens.get(&kind).into_iter().flatten();
        let prefixes = lens.filter_map(move |len| name.get(..*len));
        let prefixed = prefixes.filter_map(move |p| self.by_prefix.get(&(kind, p.to_owned())));
        let everything = literal(WILDCARD).filter(|_| name != WILDCARD);
        literal(name).into_iter().chain(everything).chain(prefixed).flatten()
    }

    /// Whether the ACLs allow an operation on a resource: one must allow it, and none deny it.
    /// `without` is the result if no ACL applies to the resource.
    pub(crate) fn allows(
        &self,
        requester: &Requester<'_>,
        operation: Operation,
        kind: ResourceType,
        name: &str,
        without: bool,
    ) -> bool {
        let (mut any, mut allowed) = (false, false);
        for acl in self.about(kind, name) {
            any = true;
            if !acl.applies_to(requester) {
                continue;
            }
            if acl.denies(operation) {
                return false;
            }
            allowed |= acl.permission == ALLOW && operation.is_covered_by(acl.operation);
        }
        if any { allowed } else { without }
    }

    /// Whether the ACLs allow an operation on any resource of a type: an ACL allows it, and none
    /// denies all that it allows.
    pub(crate) fn allows_some(
        &self,
        requester: &Requester<'_>,
        operation: Operation,
        kind: ResourceType,
    ) -> bool {
        let mine = self
            .all
            .iter()
            .filter(|acl| acl.resource_type == kind as i8 && acl.applies_to(requester));
        let (denied, others): (Vec<_>, Vec<_>) = mine.partition(|acl| acl.denies(operation));
        let granted = |acl: &&&Acl| {
            acl.permission == ALLOW
                && (acl.operation == operation as i8 || acl.operation == Operation::All as i8)
        };
        let is_everything =
            |acl: &Acl| acl.pattern_type == LITERAL && acl.resource_name == WILDCARD;
        if denied.iter().any(|acl| is_everything(acl)) {
            return false;
        }
        others.iter().filter(granted).any(|acl| {
            is_everything(acl)
                || !denied.iter().any(|denied| match denied.pattern_type {
                    PREFIXED => acl.resource_name.starts_with(&denied.resource_name),
                    _ => acl.pattern_type == LITERAL && acl.resource_name == denied.resource_name,
                })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn acls() -> impl Strategy<Value = Vec<Acl>> {
        let names = prop::sample::select(vec!["*", "a", "ab", "abc", "b", "\u{e4}", "\u{e4}x"]);
        let acl = (
            prop::sample::select(vec![2_i8, 3]),
            names,
            prop::sample::select(vec![LITERAL, PREFIXED]),
            prop::sample::select(vec!["User:a", "User:b", "User:*"]),
            prop::sample::select(vec!["*", "10.0.0.1", "10.0.0.2"]),
            2_i8..=12,
            prop::sample::select(vec![DENY, ALLOW, ALLOW]),
        );
        let acl =
            acl.prop_map(|(kind, name, pattern, principal, host, operation, permission)| Acl {
                resource_type: kind,
                resource_name: name.into(),
                pattern_type: pattern,
                principal: principal.into(),
                host: host.into(),
                operation,
                permission,
            });
        prop::collection::vec(acl, 0..12)
    }

    const OPERATIONS: [Operation; 10] = [
        Operation::Read,
        Operation::Write,
        Operation::Create,
        Operation::Delete,
        Operation::Alter,
        Operation::Describe,
        Operation::ClusterAction,
        Operation::DescribeConfigs,
        Operation::AlterConfigs,
        Operation::IdempotentWrite,
    ];

    /// Kafka's documentation implemented literally, over the list.
    fn naive(
        acls: &[Acl],
        requester: (&str, &str),
        operation: Operation,
        kind: i8,
        name: &str,
        without: bool,
    ) -> bool {
        let about: Vec<_> = acls
            .iter()
            .filter(|acl| acl.resource_type == kind)
            .filter(|acl| match acl.pattern_type {
                PREFIXED => name.starts_with(&acl.resource_name),
                _ => acl.resource_name == "*" || acl.resource_name == name,
            })
            .collect();
        if about.is_empty() {
            return without;
        }
        let mine = about.iter().filter(|acl| {
            (acl.principal == "User:*" || acl.principal == requester.0)
                && (acl.host == "*" || acl.host == requester.1)
        });
        let implied: &[i8] = match operation {
            Operation::Describe => &[3, 4, 6, 7],
            Operation::DescribeConfigs => &[11],
            _ => &[],
        };
        let this = operation as i8;
        let mut allowed = false;
        for acl in mine {
            let exact = acl.operation == this || acl.operation == 2;
            if acl.permission == DENY && exact {
                return false;
            }
            allowed |= acl.permission == ALLOW && (exact || implied.contains(&acl.operation));
        }
        allowed
    }

    proptest! {
        #[test]
        fn the_table_decides_like_the_list(acls in acls(), without: bool) {
            let table = Table::new(acls.iter().cloned().collect());
            for name in ["a", "ab", "abcd", "b", "c", "\u{e4}", "\u{e4}xy", "\u{e3}"] {
                for operation in OPERATIONS {
                    for requester in [("User:a", "10.0.0.1"), ("User:c", "10.0.0.2")] {
                        let of = Requester { principal: requester.0, host: requester.1 };
                        prop_assert_eq!(
                            table.allows(&of, operation, ResourceType::Topic, name, without),
                            naive(&acls, requester, operation, 2, name, without),
                            "{:?} {:?} {}", requester, operation, name
                        );
                    }
                }
            }
        }

        /// `allows_some` holds if `allows` holds for any name.
        #[test]
        fn some_resource_is_allowed_if_a_name_is(acls in acls()) {
            let table = Table::new(acls.iter().cloned().collect());
            let requester = Requester { principal: "User:a", host: "10.0.0.1" };
            // Every name that the ACLs distinguish.
            let mut names: Vec<String> = acls.iter().map(|acl| acl.resource_name.clone()).collect();
            names.extend(names.clone().iter().map(|name| format!("{name}zz")));
            names.push("zz".into());
            names.retain(|name| name != "*");
            let found = names.iter().any(|name| {
                table.allows(&requester, Operation::Write, ResourceType::Topic, name, false)
            });
            // Kafka checks the ACLs one by one, and so may find a name that a wildcard allows and
            // others deny.
            if found {
                prop_assert!(table.allows_some(&requester, Operation::Write, ResourceType::Topic));
            }
        }
    }

    #[test]
    fn an_address_matches_in_every_spelling() {
        for (named, address, same) in [
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.10", false),
            ("0:0:0:0:0:0:0:1", "::1", true),
            ("2001:0DB8:0:0::1", "2001:db8::1", true),
            ("::ffff:10.0.0.1", "10.0.0.1", true),
            ("2001:db8::2", "2001:db8::1", false),
            ("no:address", "::1", false),
        ] {
            assert_eq!(is_host(named, address), same, "{named} {address}");
        }
        let denied = Acl {
            resource_type: 2,
            resource_name: "*".into(),
            pattern_type: LITERAL,
            principal: ALL_USERS.into(),
            host: "2001:DB8:0:0:0:0:0:1".into(),
            operation: Operation::All as i8,
            permission: DENY,
        };
        let allowed = Acl { host: "*".into(), permission: ALLOW, ..denied.clone() };
        let table = Table::new([denied, allowed].into());
        for (host, may) in [("2001:db8::1", false), ("2001:db8::2", true)] {
            let requester = Requester { principal: "User:a", host };
            assert_eq!(
                table.allows(&requester, Operation::Read, ResourceType::Topic, "t", false),
                may
            );
        }
    }

    #[test]
    fn filters_match_what_they_name() {
        let acl = |pattern_type, name: &str| Acl {
            resource_type: 2,
            resource_name: name.into(),
            pattern_type,
            principal: "User:a".into(),
            host: "*".into(),
            operation: 3,
            permission: ALLOW,
        };
        let filter = |pattern_type, name: Option<&str>| Filter {
            resource_type: ANY,
            resource_name: name.map(str::to_owned),
            pattern_type,
            principal: None,
            host: None,
            operation: ANY,
            permission: ANY,
        };
        let acls = [
            acl(LITERAL, "ab"),
            acl(LITERAL, "*"),
            acl(PREFIXED, "a"),
            acl(PREFIXED, "ab"),
            acl(LITERAL, "b"),
        ];
        for (pattern, name, expected) in [
            (ANY, None, vec![0, 1, 2, 3, 4]),
            (ANY, Some("ab"), vec![0, 3]),
            (MATCH, Some("ab"), vec![0, 1, 2, 3]),
            (MATCH, None, vec![0, 1, 2, 3, 4]),
            (LITERAL, Some("ab"), vec![0]),
            (LITERAL, Some("*"), vec![1]),
            (PREFIXED, None, vec![2, 3]),
        ] {
            let filter = filter(pattern, name);
            let taken: Vec<_> = (0..5).filter(|at| filter.matches(&acls[*at])).collect();
            assert_eq!(taken, expected, "{filter:?}");
        }
        let mut other = filter(ANY, None);
        other.principal = Some("User:b".into());
        assert!(!other.matches(&acls[0]) && other.is_valid());
        assert!(!filter(0, None).is_valid() && !filter(5, None).is_valid());
    }
}
