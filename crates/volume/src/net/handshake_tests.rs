//! Which ends accept each other.

use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::request::ErrorCode;
use crate::types::ServerId;

const CONNECTION: ConnectionId = ConnectionId([7; 8]);

fn opening(server: u32, mark: u64, run: u128) -> ServerRecord {
    let incarnation = Uuid::from_u128(run);
    ServerRecord { incarnation, ..connection_tests::opening(server, mark) }
}

fn local(server: u32, mark: u64, run: u128) -> Local {
    let identity = Identity { server: ServerId(server), opening: opening(server, mark, run) };
    Local { identity: Some(identity), ..connection_tests::local(server, mark) }
}

/// Servers 1 and 2, at mark 10 of run 1.
fn directory() -> Directory {
    let mut directory = Directory::default();
    directory.update(ServerId(1), opening(1, 10, 1));
    directory.update(ServerId(2), opening(2, 10, 1));
    directory
}

fn judge(hello: &Hello, directory: &mut Directory) -> Result<ConnectionRole, ErrorCode> {
    hello.judge(&local(2, 10, 1), directory)
}

fn hello(mark: u64, run: u128) -> Hello {
    Hello::new(&local(1, mark, run), ConnectionRole::Peer, Some(ServerId(2)), CONNECTION)
}

#[test]
fn each_check_has_its_code_and_its_position() {
    let good = hello(10, 1);
    let check = |hello: Hello| judge(&hello, &mut directory());
    assert_eq!(check(good), Ok(ConnectionRole::Peer));
    // Each one has the faults of those below it as well.
    let unknown = Identity { server: ServerId(9), ..good.identity.unwrap() };
    let faults = Hello { identity: Some(unknown), ..good };
    assert_eq!(check(faults), Err(ErrorCode::UnknownServer));
    let faults = Hello { role: 4, ..faults };
    assert_eq!(check(faults), Err(ErrorCode::Role));
    let faults = Hello { expected: Some(ServerId(3)), ..faults };
    assert_eq!(check(faults), Err(ErrorCode::WrongServer));
    let faults = Hello { cluster: [6; 16], ..faults };
    assert_eq!(check(faults), Err(ErrorCode::WrongCluster));
    // Disks that were replaced.
    for opening in [
        ServerRecord { store: Uuid::nil(), mark: 99, ..opening(1, 10, 1) },
        ServerRecord { wal: Uuid::nil(), mark: 99, ..opening(1, 10, 1) },
    ] {
        let identity = Some(Identity { server: ServerId(1), opening });
        assert_eq!(check(Hello { identity, ..good }), Err(ErrorCode::WrongServer));
    }
    // A peer states an identity, a client does not.
    assert_eq!(check(Hello { identity: None, ..good }), Err(ErrorCode::UnknownServer));
    let client = Hello { role: ConnectionRole::Client as u16, identity: None, ..good };
    assert_eq!(check(client), Ok(ConnectionRole::Client));
    assert_eq!(check(Hello { identity: good.identity, ..client }), Err(ErrorCode::BadFrame));
    // A pull is a feature.
    let pull = Hello { role: ConnectionRole::Pull as u16, ..good };
    assert_eq!(check(pull), Ok(ConnectionRole::Pull));
    assert_eq!(check(Hello { features: Features(0), ..pull }), Err(ErrorCode::Role));
}

/// Two runs of one server never both count: not the one with the lower mark, nor a second one with
/// the same mark.
#[test]
fn only_the_newest_opening_is_accepted() {
    let directory = &mut directory();
    let mut check = |mark, run| judge(&hello(mark, run), directory).map(drop);
    assert_eq!(check(9, 1), Err(ErrorCode::OldOpening));
    assert_eq!(check(10, 2), Err(ErrorCode::OldOpening));
    assert_eq!(check(10, 1), Ok(()));
    // It is ahead of the registry's view.
    assert_eq!(check(12, 3), Ok(()));
    assert_eq!(check(12, 4), Err(ErrorCode::OldOpening));
    assert_eq!(check(10, 1), Err(ErrorCode::OldOpening));
    // The view catches up, and does not bring the old opening back.
    directory.update(ServerId(1), opening(1, 11, 2));
    assert_eq!(judge(&hello(11, 2), directory), Err(ErrorCode::OldOpening));
    assert!(judge(&hello(12, 3), directory).is_ok());
    // The server gets new disks, which start again.
    let fresh = ServerRecord { store: Uuid::from_u128(77), ..opening(1, 1, 1) };
    directory.update(ServerId(1), fresh);
    assert_eq!(directory.get(ServerId(1)), Some(&fresh));
    assert_eq!(judge(&hello(12, 3), directory), Err(ErrorCode::WrongServer));
}

#[test]
fn a_dialer_checks_the_server_that_it_has_reached() {
    let good_hello = hello(10, 1);
    let good = Welcome::new(&local(2, 10, 1), Some(&good_hello), Ok(()));
    let check = |welcome: Welcome| welcome.judge(&good_hello, Some(&mut directory()));
    assert_eq!(check(good), Ok(()));
    let refused = |code| Err(HandshakeError::Refused(code));
    assert_eq!(check(Welcome { cluster: [6; 16], ..good }), refused(ErrorCode::WrongCluster));
    let other = Welcome::new(&local(1, 10, 1), Some(&good_hello), Ok(()));
    assert_eq!(check(other), refused(ErrorCode::WrongServer));
    let old = Welcome::new(&local(2, 9, 1), Some(&good_hello), Ok(()));
    assert_eq!(check(old), refused(ErrorCode::OldOpening));
    // A tool has no directory.
    assert_eq!(old.judge(&good_hello, None), Ok(()));
    for bad in [
        Welcome { connection: ConnectionId([8; 8]), ..good },
        Welcome { features: Features::LAYERS, ..good },
    ] {
        assert!(matches!(check(bad), Err(HandshakeError::Wire(_))), "{bad:?}");
    }
}

#[test]
fn versions_and_refusals_are_understood_first() {
    let with = |mut bytes: [u8; HANDSHAKE_BYTES], at: usize, field: u16| {
        bytes[at..at + 2].copy_from_slice(&field.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..124]).to_le_bytes();
        bytes[124..].copy_from_slice(&crc);
        bytes
    };
    let bytes = hello(10, 1).encode();
    let version = Err(HandshakeError::Refused(ErrorCode::Version));
    assert!(Hello::decode(&bytes).is_ok());
    assert_eq!(Hello::decode(&with(bytes, 8, 2)), version);
    assert_eq!(Hello::decode(&with(bytes, 10, 0)), version);
    // A newer dialer that also speaks this version.
    assert!(Hello::decode(&with(bytes, 10, 3)).is_ok());
    // Reserved bytes.
    for at in [14, 112, 122] {
        let refused = Hello::decode(&with(bytes, at, 1));
        assert!(matches!(refused, Err(HandshakeError::Wire(_))), "{at}");
        // They have no meaning in another version.
        assert_eq!(Hello::decode(&with(with(bytes, at, 1), 8, 2)), version);
    }
    let hello = hello(10, 1);
    let local = local(2, 10, 1);
    for code in ErrorCode::ALL {
        let bytes = Welcome::new(&local, Some(&hello), Err(*code)).encode();
        assert_eq!(Welcome::decode(&bytes), Err(HandshakeError::RefusedByServer(*code)));
        assert_eq!(&bytes[8..10], [0, 0]);
    }
    let bytes = Welcome::new(&local, Some(&hello), Ok(())).encode();
    assert_eq!(
        Welcome::decode(&with(bytes, 8, 2)),
        Err(HandshakeError::Refused(ErrorCode::Version))
    );
    assert!(Welcome::decode(&with(bytes, 12, 999)).is_err());
    // A window below the smallest.
    assert!(Welcome::decode(&with(bytes, 38, 1)).is_err());
}

proptest! {
    #[test]
    fn handshakes_are_read_as_they_were_written(
        cluster: [u8; 16],
        server in 1..u32::MAX,
        expected in prop::option::of(1..u32::MAX),
        ids: [u128; 3],
        (mark, features) in any::<(u64, u64)>(),
        (connection, window) in any::<([u8; 8], u32)>(),
        (is_client, bit) in (any::<bool>(), 0..8 * HANDSHAKE_BYTES),
    ) {
        let [store, wal, incarnation] = ids.map(Uuid::from_u128);
        let opening = ServerRecord { store, wal, mark, incarnation };
        let identity = Identity { server: ServerId(server), opening };
        let hello = Hello {
            role: if is_client { 2 } else { 1 },
            cluster,
            identity: (!is_client).then_some(identity),
            expected: expected.map(ServerId),
            features: Features(features),
            connection: ConnectionId(connection),
        };
        let bytes = hello.encode();
        prop_assert_eq!(Hello::decode(&bytes), Ok(hello));
        let welcome = Welcome {
            result: Ok(()),
            cluster,
            identity,
            window_bytes: window.max(MIN_WINDOW_BYTES),
            features: Features(features),
            connection: ConnectionId(connection),
        };
        let welcome_bytes = welcome.encode();
        prop_assert_eq!(Welcome::decode(&welcome_bytes), Ok(welcome));
        for mut bytes in [bytes, welcome_bytes] {
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Hello::decode(&bytes), Err(HandshakeError::NotTheProtocol));
            prop_assert_eq!(Welcome::decode(&bytes), Err(HandshakeError::NotTheProtocol));
        }
    }
}
