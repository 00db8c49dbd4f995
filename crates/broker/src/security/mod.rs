//! Who may come in, by which port, and what they may do there.
//!
//! - `listeners`: the ports, each with its address, what clients are told to connect to, and its
//!   protocol.
//! - `tls`: certificates that are read again when they change; what a client's certificate says
//!   (`subject`, `principal`).
//! - `sasl`: the mechanisms by which clients log in: `scram` and PLAIN with the passwords of
//!   `users`, tokens of others by `oauth`; `attempts` slows down those who guess.
//! - `acl`: what follows from ACLs; `authorizer`: those of the catalog.
//! - `peer`: who is at the other end of a connection, and how far logging in has come.

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
    ALLOW, Acl, CLUSTER_NAME, DENY, Filter, LITERAL, Operation, PREFIXED, ResourceType, Who,
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

/// What holds for all listeners.
#[derive(Clone, Debug, Default)]
pub struct SecurityConfig {
    /// The longest time after which a client has to authenticate again
    /// (`connections.max.reauth.ms`). Default: none, 1 s to 365 days.
    pub session_lifetime: Option<Duration>,
    /// Needed where a listener has OAUTHBEARER.
    pub oauth: Option<OauthConfig>,
    /// Default: none, everybody may do everything.
    pub authorization: Option<AuthorizationConfig>,
}

/// How ACLs are applied. What they do not allow is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuthorizationConfig {
    /// Who may do everything (`super.users`), each as in `User:admin`. Default: nobody.
    pub super_users: Vec<String>,
    /// Allow everything where a resource has no ACL (`allow.everyone.if.no.acl.found`). Default
    /// false.
    pub allow_everyone_if_no_acl_found: bool,
}
