//! Authentication and authorization of clients.
//!
//! - `listeners`: the ports, each with its address, advertised address and protocol.
//! - `tls`: certificates, reloaded when they change; the name in a client's certificate (`subject`,
//!   `principal`).
//! - `sasl`: the authentication mechanisms: `scram` and PLAIN with the passwords of `users`, tokens
//!   of other issuers by `oauth`; `attempts` slows down guessing.
//! - `acl`: the decisions that follow from ACLs; `authorizer`: the ACLs of the catalog.
//! - `peer`: the client of a connection, and the state of its authentication.

mod acl;
mod attempts;
mod authorizer;
mod listeners;
mod oauth;
mod peer;
mod principal;
mod sasl;
mod scram;
mod subject;
mod tls;
mod users;

use std::time::Duration;

pub use authorizer::AclError;
pub use listeners::ListenerConfig;
pub use oauth::{JwksSource, OauthConfig};
pub use principal::{InvalidRules, PrincipalRules};
pub use sasl::Mechanism;
pub use tls::{ClientCertificates, TlsConfig};
pub use users::UserError;

pub(crate) use acl::{
    ALLOW, Acl, CLUSTER_NAME, DENY, Filter, LITERAL, Operation, PREFIXED, Requester, ResourceType,
};
pub(crate) use authorizer::{Authorizer, Resource};
pub(crate) use listeners::Listener;
pub(crate) use peer::{Peer, Refusal};
pub(crate) use principal::Principal;
pub(crate) use sasl::Authentication;
pub(crate) use scram::{Credential, Hash};
pub(crate) use tls::TlsError;
pub(crate) use users::{ITERATIONS, UserChange, Users, check_name};

#[cfg(test)]
pub(crate) use oauth::issuer;
#[cfg(test)]
pub(crate) use scram::client as scram_client;
#[cfg(test)]
pub(crate) use users::MAX_CREDENTIALS;

/// The security settings of all listeners.
#[derive(Clone, Debug, Default)]
pub struct SecurityConfig {
    /// The longest time after which a client has to authenticate again
    /// (`connections.max.reauth.ms`). Default: none, 1 s to 365 days.
    pub session_lifetime: Option<Duration>,
    /// Required if a listener has OAUTHBEARER.
    pub oauth: Option<OauthConfig>,
    /// Default: none, every operation is allowed.
    pub authorization: Option<AuthorizationConfig>,
}

/// How ACLs are applied. Operations that they do not allow are refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthorizationConfig {
    /// Principals that may do everything (`super.users`), each in the form `User:admin`. Default:
    /// none.
    pub super_users: Vec<String>,
    /// Whether everything is allowed on a resource without ACLs (`allow.everyone.if.no.acl.found`).
    /// Default false.
    pub allow_everyone_if_no_acl_found: bool,
}
