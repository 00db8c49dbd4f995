//! Limits of authentication: attempts, connections and users.

use super::*;

/// All clients of a machine reconnect at once when a server is restarted, and none of them has
/// failed.
#[tokio::test(flavor = "multi_thread")]
async fn many_clients_can_authenticate_at_the_same_time() {
    let server = with_users(|_| {}).await;
    let log_in = async |n: usize| {
        let mut client = Client::connect(server.addr_of("sasl")).await;
        match n % 2 {
            0 => client.scram(Hash::Sha256, "bob", "builder").await.0,
            _ => client.plain("bob", "builder").await.0,
        }
    };
    let outcomes = futures::future::join_all((0..100).map(log_in)).await;
    assert!(outcomes.iter().all(|code| *code == 0), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn password_guessing_is_slowed_down() {
    let server = with_users(|config| {
        config.security.session_lifetime = Some(Duration::from_secs(60));
    })
    .await;
    let mut inside = Client::connect(server.addr_of("sasl")).await;
    assert_eq!(inside.plain("alice", "wonder=land,").await.0, 0);
    let log_in = async |password: &str| {
        Client::connect(server.addr_of("sasl")).await.try_plain("bob", password).await
    };
    // A failure expires each second, so the right password may be accepted the first time.
    let mut rounds = 0;
    loop {
        let guesses = futures::future::join_all((0..60).map(|_| log_in("guess")));
        // An authenticated client stays so.
        tokio::time::sleep(Duration::from_millis(600)).await;
        let (guesses, again) = tokio::join!(guesses, inside.plain("alice", "wonder=land,"));
        assert_eq!(again.0, 0);
        let answered = guesses
            .iter()
            .filter(|code| **code == Some(ResponseError::SaslAuthenticationFailed.code()))
            .count();
        let closed = guesses.iter().filter(|code| code.is_none()).count();
        assert!(closed > 0 && answered + closed == 60, "{answered} and {closed}");
        // Now the right password is not checked either, for a while. The response must not say that
        // it is wrong, which would be fatal for clients.
        match log_in("builder").await {
            None => break,
            answered => assert!(answered == Some(0) && rounds < 30, "{answered:?}"),
        }
        rounds += 1;
    }
    // An authenticated client cannot guess another user's password either: it is not checked.
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(inside.handshake("PLAIN").await, 0);
    let token = Bytes::from_static(b"\0bob\0builder");
    let request = SaslAuthenticateRequest::default().with_auth_bytes(token);
    let refused = inside.call(2, &request).await;
    assert_eq!(refused.error_code, ResponseError::SaslAuthenticationFailed.code());
    let message = refused.error_message.unwrap();
    assert!(message.contains("invalid credentials"), "{message}");
    assert!(inside.receive_frame().await.is_none());
    let forgiven = async { while log_in("builder").await != Some(0) {} };
    tokio::time::timeout(HANG, forgiven).await.expect("the address stays locked");
}

/// An unauthenticated client cannot keep a connection by asking for versions again and again; nor
/// can an authenticated one by unexpected messages.
#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_clients_cannot_keep_a_connection() {
    let server = with_users(|config| {
        config.security.session_lifetime = Some(Duration::from_secs(10));
    })
    .await;
    let mut client = Client::connect(server.addr_of("sasl")).await;
    let mut answered = 0;
    while answered < 10 && served(&mut client).await {
        answered += 1;
    }
    assert_eq!(answered, 4);
    let mut client = Client::connect(server.addr_of("sasl")).await;
    assert!(served(&mut client).await);
    assert_eq!(client.plain("bob", "builder").await.0, 0);
    for _ in 0..10 {
        assert!(served(&mut client).await);
    }
    assert_eq!(client.token("x").await.0, ResponseError::IllegalSaslState.code());
    assert!(served(&mut client).await);
    tokio::time::sleep(Duration::from_millis(10_200)).await;
    assert_eq!(client.token("x").await.0, ResponseError::IllegalSaslState.code());
    assert!(client.receive_frame().await.is_none());
}

/// At the maximum number of users, their passwords can still be changed.
#[tokio::test(flavor = "multi_thread")]
async fn passwords_can_be_changed_at_the_maximum_number_of_users() {
    // They fit into the log, and a tenth of them into a record of it.
    let server = TestServer::simulated(64 << 20).await;
    let users = &server.server().authentication.users;
    let iterations = std::num::NonZeroU32::new(4096).unwrap();
    let made = Credential::of_password(Hash::Sha256, b"a", b"salt".to_vec(), iterations);
    let one = |n: usize| ((format!("user-{n}"), Hash::Sha256), Some(made.clone()));
    let some = MAX_CREDENTIALS / 10;
    for from in (0..MAX_CREDENTIALS).step_by(some) {
        users.change((from..from + some).map(one).collect()).await.unwrap();
    }
    users.change((0..2).map(one).collect()).await.unwrap();
    let several = vec![one(0), one(MAX_CREDENTIALS)];
    assert!(matches!(users.change(several).await, Err(UserError::TooMany)));
    let upsertion = alter_user_scram_credentials_request::ScramCredentialUpsertion::default()
        .with_name(text("user-1"))
        .with_mechanism(Hash::Sha512 as i8)
        .with_iterations(4096)
        .with_salt(Bytes::from_static(b"salt"))
        .with_salted_password(Bytes::from_static(b"salted"));
    let request = AlterUserScramCredentialsRequest::default().with_upsertions(vec![upsertion]);
    let refused = server.client().await.call(0, &request).await.results.remove(0);
    assert_eq!(refused.error_code, ResponseError::PolicyViolation.code(), "{refused:?}");
    users.change(vec![(("user-7".into(), Hash::Sha256), None)]).await.unwrap();
    users.change(vec![one(MAX_CREDENTIALS)]).await.unwrap();
}

/// An attempt in progress occupies a slot that other clients of its address need. So a client
/// cannot hold one by staying silent or by sending something else.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_continue_its_authentication_is_disconnected() {
    let server = with_users(|config| {
        config.security.session_lifetime = Some(Duration::from_secs(60));
        config.transfer_timeout = Duration::from_secs(1);
    })
    .await;
    for anew in [false, true] {
        for then in ["nothing", "a handshake", "a request"] {
            let mut client = Client::connect(server.addr_of("sasl")).await;
            if anew {
                assert_eq!(client.scram(Hash::Sha256, "bob", "builder").await.0, 0);
                tokio::time::sleep(Duration::from_millis(600)).await;
            }
            assert_eq!(client.handshake("SCRAM-SHA-256").await, 0);
            assert_eq!(client.token("n,,n=bob,r=nonce").await.0, 0);
            match then {
                "a handshake" => assert_eq!(
                    client.handshake("SCRAM-SHA-256").await,
                    ResponseError::IllegalSaslState.code()
                ),
                "a request" => {
                    client.send(0, &ApiVersionsRequest::default()).await;
                }
                _ => {}
            }
            assert!(client.receive_frame().await.is_none(), "{then}");
        }
    }
}
