//! Listeners, authentication and authorization: the ports for clients, how clients prove their
//! identity, and their permissions.

use std::net::SocketAddr;

use alluvium_broker::{AuthorizationConfig, ListenerConfig, Mechanism};

use super::{ConfigError, ServeOptions, limits as l, preset, within};
use crate::address::Address;
use crate::units::Span;

/// The options of security, complete and within bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Security {
    pub(crate) listeners: Vec<ListenerConfig>,
    pub(crate) session_lifetime: Option<Span>,
    pub(crate) oauth: Option<Oauth>,
    pub(crate) authorization: Option<AuthorizationConfig>,
}

/// Which tokens OAUTHBEARER accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Oauth {
    pub(crate) jwks: String,
    pub(crate) issuer: String,
    pub(crate) audience: String,
    pub(crate) scopes: Vec<String>,
    pub(crate) principal_claim: String,
    pub(crate) clock_skew: Span,
}

impl Security {
    pub(super) fn resolve(options: &ServeOptions) -> Result<Self, ConfigError> {
        let listen = options.listen.map(|Address(address)| address);
        let Address(default) = preset(l::LISTEN);
        let listeners = options.listener.clone().unwrap_or_default();
        let security = Self {
            listeners: listeners
                .resolve(listen, options.advertise.clone(), default)
                .map_err(ConfigError)?,
            session_lifetime: options.session_lifetime,
            oauth: Oauth::resolve(options)?,
            authorization: authorization(options)?,
        };
        security.check_bounds()?;
        security.check_tokens()?;
        security.check_reachable()?;
        Ok(security)
    }

    fn check_bounds(&self) -> Result<(), ConfigError> {
        if let Some(lifetime) = self.session_lifetime {
            within("session-lifetime", lifetime, l::SESSION_LIFETIME_MIN, l::SESSION_LIFETIME_MAX)?;
        }
        if let Some(oauth) = &self.oauth {
            within("oauth-clock-skew", oauth.clock_skew, l::SKEW_MIN, l::SKEW_MAX)?;
        }
        Ok(())
    }

    fn check_tokens(&self) -> Result<(), ConfigError> {
        let tokens = |listener: &ListenerConfig| listener.sasl.contains(&Mechanism::OauthBearer);
        if self.oauth.is_none() && self.listeners.iter().any(tokens) {
            return Err(ConfigError(
                "a listener accepts OAUTHBEARER: set oauth-jwks, oauth-issuer and oauth-audience, \
                 which define the accepted tokens"
                    .into(),
            ));
        }
        Ok(())
    }

    /// Requires an advertised host where the listen address is the wildcard address, to which
    /// clients cannot connect.
    fn check_reachable(&self) -> Result<(), ConfigError> {
        let unreachable = |listener: &&ListenerConfig| {
            listener.listen.ip().is_unspecified() && listener.advertised_host.is_none()
        };
        match self.listeners.iter().find(unreachable) {
            Some(listener) => Err(ConfigError(format!(
                "listen is {}, to which a client cannot connect: set an address with --advertise \
                 HOST:PORT, or `advertise` of listener {}",
                listener.listen, listener.name
            ))),
            None => Ok(()),
        }
    }

    /// Requires an explicit option to listen beyond the loopback interface without authentication,
    /// because the loopback interface is the only protection then.
    pub(super) fn check_exposure(
        &self,
        admin_listen: Option<SocketAddr>,
        allowed: bool,
    ) -> Result<(), ConfigError> {
        let open = self.listeners.iter().filter(|listener| !listener.is_protected());
        let open = open.map(|listener| (&*listener.name, "listen", listener.listen));
        let admin = admin_listen.map(|address| ("admin", "admin-listen", address));
        let mut exposed = open.chain(admin).filter(|(.., address)| !address.ip().is_loopback());
        match exposed.next().filter(|_| !allowed) {
            Some((name, option, address)) => Err(ConfigError(format!(
                "{option} is {address}, which is reachable from the network, and {name} lacks \
                 encryption or authentication: anyone who can reach it could read and write all \
                 data. Use 127.0.0.1, or TLS with authentication (docs/security.md), or give \
                 --allow-plaintext-network if the network is trusted"
            ))),
            None => Ok(()),
        }
    }
}

impl Oauth {
    fn resolve(options: &ServeOptions) -> Result<Option<Self>, ConfigError> {
        match (&options.oauth_jwks, &options.oauth_issuer, &options.oauth_audience) {
            (None, None, None) => Ok(None),
            (Some(jwks), Some(issuer), Some(audience)) => {
                if jwks.starts_with("http://") {
                    return Err(ConfigError(
                        "oauth-jwks is an http:// URL: anyone on the network path could replace \
                         the keys and log in. Use https:// or a file"
                            .into(),
                    ));
                }
                // The URL is not repeated, because it may contain a secret.
                if jwks.contains("://") && !jwks.starts_with("https://") {
                    return Err(ConfigError(
                        "oauth-jwks is a URL without https:// in lower case".into(),
                    ));
                }
                let scope = options.oauth_scope.as_deref().unwrap_or_default();
                Ok(Some(Self {
                    jwks: jwks.clone(),
                    issuer: issuer.clone(),
                    audience: audience.clone(),
                    scopes: scope.split_whitespace().map(str::to_owned).collect(),
                    principal_claim: options
                        .oauth_principal_claim
                        .clone()
                        .unwrap_or_else(|| "sub".into()),
                    clock_skew: options.oauth_clock_skew.unwrap_or(l::SKEW),
                }))
            }
            _ => Err(ConfigError(
                "oauth-jwks, oauth-issuer and oauth-audience must be set together: tokens issued \
                 for other services must not be accepted"
                    .into(),
            )),
        }
    }
}

fn authorization(options: &ServeOptions) -> Result<Option<AuthorizationConfig>, ConfigError> {
    let super_users = options.super_users.as_deref().unwrap_or_default().split(';');
    let super_users = super_users.map(str::trim).filter(|user| !user.is_empty());
    let super_users: Vec<_> = super_users.map(str::to_owned).collect();
    if let Some(user) = super_users.iter().find(|user| !user.starts_with("User:")) {
        return Err(ConfigError(format!(
            "super-users contains `{user}`: write users as User:admin, separated by semicolons"
        )));
    }
    let allow_everyone_if_no_acl_found = options.allow_everyone_if_no_acl_found.unwrap_or(false);
    if !options.authorization.unwrap_or(false) {
        // These options imply that access is meant to be restricted.
        return match super_users.is_empty() && !allow_everyone_if_no_acl_found {
            true => Ok(None),
            false => Err(ConfigError(
                "super-users and allow-everyone-if-no-acl-found need \
                                      authorization = true: without it every client may do \
                                      everything"
                    .into(),
            )),
        };
    }
    Ok(Some(AuthorizationConfig { super_users, allow_everyone_if_no_acl_found }))
}
