//! SaslHandshake and SaslAuthenticate: authentication of clients, including the bare messages after
//! version 0 of SaslHandshake (KIP-43).

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use kafka_protocol::messages::{
    ApiKey, SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest,
    SaslHandshakeResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::{APIS, Answer, Context, Refused, Served};
use crate::security::{Peer, Refusal};
use crate::server::Server;
use crate::wire::response::Response;

impl Refusal {
    fn kind(self) -> ResponseError {
        match self {
            Self::IllegalState => ResponseError::IllegalSaslState,
            Self::UnsupportedMechanism => ResponseError::UnsupportedSaslMechanism,
            Self::Failed(_) | Self::OtherPrincipal | Self::TooMany => {
                ResponseError::SaslAuthenticationFailed
            }
        }
    }

    /// The message for the client. It does not reveal which users exist.
    fn message(self) -> String {
        match self {
            Self::IllegalState => "authentication is not in a state for this request".into(),
            Self::UnsupportedMechanism => "the mechanism is not enabled on this listener".into(),
            Self::Failed(mechanism) => format!(
                "Authentication failed during authentication due to invalid credentials with SASL \
                 mechanism {mechanism}"
            ),
            Self::TooMany => "too many failed attempts from this address".into(),
            Self::OtherPrincipal => {
                "a re-authentication must use the same user and mechanism".into()
            }
        }
    }
}

pub(super) async fn handshake(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: SaslHandshakeRequest = cx.decode(body)?;
    let mechanisms = cx.peer.listener.config.sasl.iter();
    let mechanisms = mechanisms.map(|mechanism| StrBytes::from_static_str(mechanism.name()));
    let response = SaslHandshakeResponse::default().with_mechanisms(mechanisms.collect());
    match cx.peer.begin(&request.mechanism, cx.version == 0, Instant::now()) {
        Ok(()) => cx.reply(&response),
        Err(refusal) => {
            cx.reply_to_refused(refusal, &response.with_error_code(refusal.kind().code()))
        }
    }
}

pub(super) async fn authenticate(cx: Context, body: Bytes) -> Result<Answer, Refused> {
    let request: SaslAuthenticateRequest = cx.decode(body)?;
    let longest = cx.server.config.security.session_lifetime;
    match cx.peer.message(&cx.server.authentication, &request.auth_bytes, longest).await {
        Ok(answered) => {
            let lifetime = answered.lifetime.map_or(0, |lifetime| lifetime.as_millis());
            let mut response =
                SaslAuthenticateResponse::default().with_auth_bytes(answered.answer.into());
            if cx.version >= 1 {
                response.session_lifetime_ms = i64::try_from(lifetime).unwrap_or(i64::MAX);
            }
            cx.reply(&response)
        }
        Err(refusal @ Refusal::TooMany) => {
            log_failure(&cx.peer, refusal);
            Err(Refused::Unauthenticated)
        }
        Err(refusal) => {
            let message = StrBytes::from_string(refusal.message());
            let response = SaslAuthenticateResponse::default()
                .with_error_code(refusal.kind().code())
                .with_error_message(Some(message));
            cx.reply_to_refused(refusal, &response)
        }
    }
}

/// Handles a message without a request around it. The response is bare too, or missing.
pub(super) async fn bare_message(
    server: &Server,
    peer: &Arc<Peer>,
    message: &Bytes,
) -> Result<Served, Refused> {
    let api = APIS.iter().find(|api| api.key == ApiKey::SaslAuthenticate);
    let api = api.expect("the API is supported");
    let longest = server.config.security.session_lifetime;
    match peer.message(&server.authentication, message, longest).await {
        Ok(answered) => {
            let answer = Answer::Ready(Response::bare(answered.answer.into()));
            Ok(Served { api, answer, budget: None, throttle: Duration::ZERO })
        }
        Err(refusal) => {
            log_failure(peer, refusal);
            Err(Refused::Unauthenticated)
        }
    }
}

impl Context {
    /// Responds, and closes the connection unless its client is authenticated and has only sent the
    /// request at the wrong time.
    fn reply_to_refused<M: kafka_protocol::protocol::Encodable>(
        &self,
        refusal: Refusal,
        response: &M,
    ) -> Result<Answer, Refused> {
        log_failure(&self.peer, refusal);
        let harmless = refusal == Refusal::IllegalState && self.peer.is_logged_in(Instant::now());
        let response = self.encode(response)?;
        Ok(if harmless { Answer::Ready(response) } else { Answer::Last(response) })
    }
}

/// Logs a failure for the operator, without the user's name, where people enter their password by
/// mistake.
fn log_failure(peer: &Peer, refusal: Refusal) {
    let (ip, listener) = (peer.ip, &peer.listener.config.name);
    tracing::info!(%ip, %listener, "authentication failed: {}", refusal.message());
}
