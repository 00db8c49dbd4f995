//! Over which ports clients come, what they must prove there, and what is asked before they may do
//! something.

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

/// Which tokens OAUTHBEARER takes.
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
                "a listener has OAUTHBEARER: say with oauth-jwks, oauth-issuer and oauth-audience which tokens are taken".into(),
            ));
        }
        Ok(())
    }

    /// Clients are told an address to connect to, and "every address of this machine" is none.
    fn check_reachable(&self) -> Result<(), ConfigError> {
        let unreachable = |listener: &&ListenerConfig| {
            listener.listen.ip().is_unspecified() && listener.advertised_host.is_none()
        };
        match self.listeners.iter().find(unreachable) {
            Some(listener) => Err(ConfigError(format!(
                "listen is {}, which is no address that a client could connect to: name one with --advertise HOST:PORT, \
                 or `advertise` of listener {}",
                listener.listen, listener.name
            ))),
            None => Ok(()),
        }
    }

    /// Without authentication the loopback interface is the only protection there is, so leaving it
    /// takes a word of the operator.
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
                "{option} is {address}, which the network can reach, and {name} lacks encryption or authentication: \
                 everybody who reaches it could read and write everything. Use 127.0.0.1, or TLS with \
                 authentication (docs/security.md), or give --allow-plaintext-network if the network is trusted"
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
                        "oauth-jwks is an http:// URL: whoever is on the way could let everybody in. Use https:// or a file".into(),
                    ));
                }
                // Not shown: there may be a secret in it.
                if jwks.contains("://") && !jwks.starts_with("https://") {
                    return Err(ConfigError(
                        "oauth-jwks is a URL of another kind than https://, in small letters".into(),
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
                "oauth-jwks, oauth-issuer and oauth-audience belong together: a token that was made for somebody else must not let in".into(),
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
            "super-users has `{user}`: a user is written as in User:admin, with semicolons between several"
        )));
    }
    let allow_everyone_if_no_acl_found = options.allow_everyone_if_no_acl_found.unwrap_or(false);
    if !options.authorization.unwrap_or(false) {
        // Whoever writes these means that not everybody may do everything.
        return match super_users.is_empty() && !allow_everyone_if_no_acl_found {
            true => Ok(None),
            false => Err(ConfigError("super-users and allow-everyone-if-no-acl-found need authorization = true: without it everybody may do everything".into())),
        };
    }
    Ok(Some(AuthorizationConfig { super_users, allow_everyone_if_no_acl_found }))
}
