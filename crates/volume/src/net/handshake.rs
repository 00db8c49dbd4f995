//! The handshake: the identities of both ends of a connection, and whether each accepts the other.
//! The checks are functions of both messages and of what is known of the servers.
//! `docs/format/volume-wire.md`, section 2.

use std::collections::BTreeMap;

use bytes::Bytes;
use uuid::Uuid;

use super::error::WireError;
use super::frame::{ConnectionId, ConnectionRole};
use crate::fields::{Put, Reader};
use crate::request::ErrorCode;
use crate::types::ServerId;

/// Bytes of `Hello` and of `Welcome`.
pub const HANDSHAKE_BYTES: usize = 128;
/// The only version of the protocol so far.
pub const VERSION: u16 = 1;
/// Smallest window that an acceptor may state.
pub const MIN_WINDOW_BYTES: u32 = 4 << 20;

const MAGIC: [u8; 8] = *b"ALLUVVOL";

/// Optional parts of the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Pulls of blocks from another replica.
    pub const PULLS: Self = Self(1);
    /// Layers of snapshots.
    pub const LAYERS: Self = Self(2);

    /// The features that both have.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether all of `other` are among these.
    pub fn has(self, other: Self) -> bool {
        self.and(other) == other
    }
}

/// One opening of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerRecord {
    /// The identity of its store.
    pub store: Uuid,
    /// The identity of its log.
    pub wal: Uuid,
    /// The mark of the opening.
    pub mark: u64,
    /// The random identity of the run.
    pub incarnation: Uuid,
}

/// A server and its opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The server.
    pub server: ServerId,
    /// Its opening.
    pub opening: ServerRecord,
}

/// What this process states in every handshake.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// The cluster.
    pub cluster: [u8; 16],
    /// This server; `None` for a client.
    pub identity: Option<Identity>,
    /// The features that it supports.
    pub features: Features,
    /// Bytes of unanswered requests that a client connection may have.
    pub window_bytes: u32,
}

/// The servers of the cluster with their newest known openings.
#[derive(Debug, Default)]
pub struct Directory {
    servers: BTreeMap<ServerId, ServerRecord>,
}

impl Directory {
    /// Records what the registry has for a server. A newer opening that is known from a connection
    /// stays, since a view of the registry may be behind.
    pub fn update(&mut self, server: ServerId, record: ServerRecord) {
        let known = self.servers.entry(server).or_insert(record);
        let is_same = (known.store, known.wal) == (record.store, record.wal);
        if !is_same || record.mark >= known.mark {
            *known = record;
        }
    }

    /// Removes a server that the registry no longer has.
    pub fn remove(&mut self, server: ServerId) {
        self.servers.remove(&server);
    }

    /// The newest known opening of a server.
    pub fn get(&self, server: ServerId) -> Option<&ServerRecord> {
        self.servers.get(&server)
    }

    /// Judges the server at the other end, and remembers its opening if it is newer than the known
    /// one.
    ///
    /// # Errors
    /// `UnknownServer`, `WrongServer` or `OldOpening`.
    pub fn judge(&mut self, peer: &Identity) -> Result<(), ErrorCode> {
        let known = self.servers.get_mut(&peer.server).ok_or(ErrorCode::UnknownServer)?;
        let opening = peer.opening;
        if (known.store, known.wal) != (opening.store, opening.wal) {
            return Err(ErrorCode::WrongServer);
        }
        if opening.mark < known.mark
            || (opening.mark == known.mark && opening.incarnation != known.incarnation)
        {
            return Err(ErrorCode::OldOpening);
        }
        *known = opening;
        Ok(())
    }
}

/// The first message of the dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The number of the role; it may be unknown.
    pub role: u16,
    /// The dialer's cluster.
    pub cluster: [u8; 16],
    /// The dialer; `None` for a client.
    pub identity: Option<Identity>,
    /// The server that the dialer expects, if it knows.
    pub expected: Option<ServerId>,
    /// The features that the dialer supports.
    pub features: Features,
    /// The connection.
    pub connection: ConnectionId,
}

/// The answer of the acceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Whether the connection is accepted.
    pub result: Result<(), ErrorCode>,
    /// The acceptor's cluster.
    pub cluster: [u8; 16],
    /// The acceptor.
    pub identity: Identity,
    /// Bytes of unanswered requests that a client connection may have.
    pub window_bytes: u32,
    /// The features that the connection uses.
    pub features: Features,
    /// The dialer's number of the connection.
    pub connection: ConnectionId,
}

/// Why a handshake fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The other end does not speak the protocol, and is not answered.
    #[error("the other end does not speak the protocol of volume servers")]
    NotTheProtocol,
    /// The message violates the protocol.
    #[error("the handshake is not valid: {0}")]
    Wire(#[from] WireError),
    /// This end refuses the other one.
    #[error("the other end is refused with {}", .0.name())]
    Refused(ErrorCode),
    /// The acceptor refuses this end.
    #[error("the server refuses the connection with {}", .0.name())]
    RefusedByServer(ErrorCode),
}

impl HandshakeError {
    /// The code that an acceptor answers; `None` if it does not answer.
    pub fn code(self) -> Option<ErrorCode> {
        match self {
            Self::NotTheProtocol => None,
            Self::Wire(_) => Some(ErrorCode::BadFrame),
            Self::Refused(code) | Self::RefusedByServer(code) => Some(code),
        }
    }
}

impl From<crate::FieldError> for HandshakeError {
    fn from(error: crate::FieldError) -> Self {
        Self::Wire(error.into())
    }
}

/// The fields of both messages, in their order.
struct Fields {
    versions: [u16; 2],
    role_or_code: u16,
    cluster: [u8; 16],
    server: u32,
    expected_or_window: u32,
    opening: ServerRecord,
    features: u64,
    connection: ConnectionId,
}

const NO_OPENING: ServerRecord =
    ServerRecord { store: Uuid::nil(), wal: Uuid::nil(), mark: 0, incarnation: Uuid::nil() };

impl Fields {
    fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let mut out = Vec::with_capacity(HANDSHAKE_BYTES);
        out.extend(MAGIC);
        out.put_u16(self.versions[0]);
        out.put_u16(self.versions[1]);
        out.put_u16(self.role_or_code);
        out.put_zeros(2);
        out.extend(self.cluster);
        out.put_u32(self.server);
        out.put_u32(self.expected_or_window);
        out.extend(self.opening.store.as_bytes());
        out.extend(self.opening.wal.as_bytes());
        out.put_u64(self.opening.mark);
        out.extend(self.opening.incarnation.as_bytes());
        out.put_u64(self.features);
        out.extend(self.connection.0);
        out.put_zeros(12);
        out.put_u32(crc32c::crc32c(&out));
        out.try_into().expect("the fields have this length")
    }

    /// Parses the message, after `check` has accepted its two fields of versions.
    fn decode(
        bytes: &[u8; HANDSHAKE_BYTES],
        check: impl Fn([u16; 2], u16) -> Result<(), HandshakeError>,
    ) -> Result<Self, HandshakeError> {
        let (fields, crc) = bytes.split_at(HANDSHAKE_BYTES - 4);
        if fields[..8] != MAGIC || crc32c::crc32c(fields).to_le_bytes() != crc {
            return Err(HandshakeError::NotTheProtocol);
        }
        let fields = &Bytes::copy_from_slice(&fields[8..]);
        let reader = &mut Reader::new(fields);
        let versions = [reader.u16()?, reader.u16()?];
        let role_or_code = reader.u16()?;
        check(versions, role_or_code)?;
        reader.zeros::<2>()?;
        let cluster = reader.array()?;
        let (server, expected_or_window) = (reader.u32()?, reader.u32()?);
        let (store, wal) = (Uuid::from_bytes(reader.array()?), Uuid::from_bytes(reader.array()?));
        let mark = reader.u64()?;
        let incarnation = Uuid::from_bytes(reader.array()?);
        let features = reader.u64()?;
        let connection = ConnectionId(reader.array()?);
        reader.zeros::<12>()?;
        reader.end()?;
        let opening = ServerRecord { store, wal, mark, incarnation };
        Ok(Self {
            versions,
            role_or_code,
            cluster,
            server,
            expected_or_window,
            opening,
            features,
            connection,
        })
    }
}

impl Hello {
    /// The first message of `local` on a new connection.
    pub fn new(
        local: &Local,
        role: ConnectionRole,
        expected: Option<ServerId>,
        connection: ConnectionId,
    ) -> Self {
        Self {
            role: role as u16,
            cluster: local.cluster,
            identity: local.identity.filter(|_| role != ConnectionRole::Client),
            expected,
            features: local.features,
            connection,
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        Fields {
            versions: [VERSION, VERSION],
            role_or_code: self.role,
            cluster: self.cluster,
            server: self.identity.map_or(0, |identity| identity.server.0),
            expected_or_window: self.expected.map_or(0, |server| server.0),
            opening: self.identity.map_or(NO_OPENING, |identity| identity.opening),
            features: self.features.0,
            connection: self.connection,
        }
        .encode()
    }

    /// Parses the message.
    ///
    /// # Errors
    /// It is not of this protocol, of no common version, or not valid.
    pub fn decode(bytes: &[u8; HANDSHAKE_BYTES]) -> Result<Self, HandshakeError> {
        let fields = Fields::decode(bytes, |[lowest, highest], _| {
            match (lowest..=highest).contains(&VERSION) {
                true => Ok(()),
                false => Err(HandshakeError::Refused(ErrorCode::Version)),
            }
        })?;
        let Fields { server, opening, .. } = fields;
        if server == 0 && opening != NO_OPENING {
            return Err(WireError::field("opening of a client", opening.mark).into());
        }
        let identity = Identity { server: ServerId(server), opening };
        Ok(Self {
            role: fields.role_or_code,
            cluster: fields.cluster,
            identity: (server != 0).then_some(identity),
            expected: (fields.expected_or_window != 0)
                .then_some(ServerId(fields.expected_or_window)),
            features: Features(fields.features),
            connection: fields.connection,
        })
    }

    /// Judges the dialer, in the order of the protocol.
    ///
    /// # Errors
    /// The code with which it is refused. `UnknownServer` may come from a directory that is behind
    /// the registry.
    pub fn judge(
        &self,
        local: &Local,
        directory: &mut Directory,
    ) -> Result<ConnectionRole, ErrorCode> {
        if self.cluster != local.cluster {
            return Err(ErrorCode::WrongCluster);
        }
        let own = local.identity.map(|identity| identity.server);
        if self.expected.is_some() && self.expected != own {
            return Err(ErrorCode::WrongServer);
        }
        let role = ConnectionRole::from_number(self.role).ok_or(ErrorCode::Role)?;
        let features = self.features.and(local.features);
        if role == ConnectionRole::Pull && !features.has(Features::PULLS) {
            return Err(ErrorCode::Role);
        }
        match (role, &self.identity) {
            (ConnectionRole::Client, None) => Ok(role),
            (ConnectionRole::Client, Some(_)) => Err(ErrorCode::BadFrame),
            (_, None) => Err(ErrorCode::UnknownServer),
            (_, Some(identity)) => directory.judge(identity).map(|()| role),
        }
    }
}

impl Welcome {
    /// The answer of `local` to a dialer.
    ///
    /// # Panics
    /// `local` is a client.
    pub fn new(local: &Local, hello: Option<&Hello>, result: Result<(), ErrorCode>) -> Self {
        Self {
            result,
            cluster: local.cluster,
            identity: local.identity.expect("an acceptor is a server"),
            window_bytes: local.window_bytes,
            features: hello.map_or(Features(0), |hello| hello.features.and(local.features)),
            connection: hello.map_or(ConnectionId([0; 8]), |hello| hello.connection),
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; HANDSHAKE_BYTES] {
        let version = if self.result.is_ok() { VERSION } else { 0 };
        Fields {
            versions: [version, VERSION],
            role_or_code: self.result.err().map_or(0, |code| code as u16),
            cluster: self.cluster,
            server: self.identity.server.0,
            expected_or_window: self.window_bytes,
            opening: self.identity.opening,
            features: self.features.0,
            connection: self.connection,
        }
        .encode()
    }

    /// Parses the message.
    ///
    /// # Errors
    /// It is not of this protocol, refuses the connection, or is not valid.
    pub fn decode(bytes: &[u8; HANDSHAKE_BYTES]) -> Result<Self, HandshakeError> {
        let fields = Fields::decode(bytes, |[version, _], code| match (version, code) {
            (VERSION, 0) => Ok(()),
            (_, 0) => Err(HandshakeError::Refused(ErrorCode::Version)),
            (_, code) => match ErrorCode::from_number(code) {
                Some(code) => Err(HandshakeError::RefusedByServer(code)),
                None => Err(WireError::field("code of a refusal", code).into()),
            },
        })?;
        if fields.server == 0 {
            return Err(WireError::field("server id of the acceptor", 0_u64).into());
        }
        if fields.expected_or_window < MIN_WINDOW_BYTES {
            return Err(WireError::field("window", fields.expected_or_window).into());
        }
        Ok(Self {
            result: Ok(()),
            cluster: fields.cluster,
            identity: Identity { server: ServerId(fields.server), opening: fields.opening },
            window_bytes: fields.expected_or_window,
            features: Features(fields.features),
            connection: fields.connection,
        })
    }

    /// Judges the acceptor, in the order of the protocol. A tool that has only an address has no
    /// directory.
    ///
    /// # Errors
    /// The acceptor is not the one that `hello` was for.
    pub fn judge(
        &self,
        hello: &Hello,
        directory: Option<&mut Directory>,
    ) -> Result<(), HandshakeError> {
        if self.cluster != hello.cluster {
            return Err(HandshakeError::Refused(ErrorCode::WrongCluster));
        }
        if hello.expected.is_some_and(|expected| expected != self.identity.server) {
            return Err(HandshakeError::Refused(ErrorCode::WrongServer));
        }
        if self.connection != hello.connection {
            let value = u64::from_le_bytes(self.connection.0);
            return Err(WireError::field("connection id", value).into());
        }
        if !hello.features.has(self.features) {
            return Err(WireError::field("features", self.features.0).into());
        }
        match directory {
            Some(directory) => directory.judge(&self.identity).map_err(HandshakeError::Refused),
            None => Ok(()),
        }
    }
}
