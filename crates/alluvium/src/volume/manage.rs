//! Commands about volumes that end at once: create, list, info, attach, status, delete.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use alluvium_volume::gateway::{Trouble, VolumeConfig};
use alluvium_volume::registry::{RegistryError, VolumeState};
use alluvium_volume::{
    Answer, AttachOptions, Cluster, GroupId, ReplicaState, ReplicaStatus, Request, Role, ServerId,
    StatusAnswer, VolumeId,
};
use clap::Args;
use serde::Serialize;
use uuid::Uuid;

use super::{ClusterArgs, attached_by};
use crate::output::{self, Failure, Table};
use crate::serve::Signals;
use crate::units::{Size, about};

/// Time for the answer of a server.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for `volume attach`. A leader that hangs is replaced within 3 s, or within 4 s if only the
/// device of its log hangs.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of all commands.
#[derive(Args, Debug)]
pub(super) struct Common {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Create a volume. Space is allocated when blocks are written.
#[derive(Args, Debug)]
pub(crate) struct CreateArgs {
    /// Name: a letter or digit, then up to 127 letters, digits, dots, underscores and hyphens.
    name: String,
    /// Size: a multiple of 4KiB, from 4KiB to 64TiB.
    #[arg(long, value_name = "SIZE")]
    size: Size,
    #[command(flatten)]
    common: Common,
}

/// List the volumes of the cluster.
#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    common: Common,
}

/// Show a volume: its groups, their replicas, and its attachment.
#[derive(Args, Debug)]
pub(crate) struct InfoArgs {
    /// Name of the volume.
    name: String,
    #[command(flatten)]
    common: Common,
}

/// Attach a volume and detach it at once: from then on, every older attachment is fenced.
#[derive(Args, Debug)]
pub(crate) struct AttachArgs {
    /// Name of the volume.
    name: String,
    /// Take the volume from a process that has it attached and is alive. Its next write fails.
    #[arg(long)]
    take: bool,
    #[command(flatten)]
    common: Common,
}

/// Show the servers and their replicas.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    common: Common,
}

/// Delete volumes with all their data. If one of the names does not exist, none is deleted. One
/// that is attached is not deleted: `alluvium volume attach NAME --take` fences the process that
/// has it.
#[derive(Args, Debug)]
pub(crate) struct DeleteArgs {
    /// Names of the volumes.
    #[arg(required = true)]
    names: Vec<String>,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct CreatedVolume<'a> {
    name: &'a str,
    id: u32,
    bytes: u64,
}

pub(super) async fn create(args: CreateArgs) -> Result<(), Failure> {
    let cluster = args.common.cluster.connect()?;
    let bytes = args.size.bytes;
    let id = cluster.registry().create_volume(&args.name, bytes).await.map_err(Failure::new)?;
    if args.common.json {
        return output::json(&CreatedVolume { name: &args.name, id: id.0, bytes });
    }
    output::line(format_args!("created volume {}: {}, id {id}", args.name, args.size))
}

#[derive(Serialize)]
struct ListedVolume {
    name: String,
    id: u32,
    bytes: u64,
    regions: usize,
    state: VolumeState,
    attached_at: Option<String>,
    epoch: u64,
}

/// The epoch of the newest attachment of a volume, and where the volume is attached.
async fn attachment(cluster: &Cluster, id: VolumeId) -> Result<(u64, Option<String>), Failure> {
    let newest = cluster.registry().attachment(id).await.map_err(Failure::new)?;
    let Some((attached, is_fresh)) = newest else { return Ok((0, None)) };
    Ok((attached.epoch.0, is_fresh.then_some(attached.address)))
}

async fn listed(cluster: &Cluster) -> Result<Vec<ListedVolume>, Failure> {
    let registry = cluster.registry();
    let mut rows = Vec::new();
    for (id, stored) in registry.volumes().await.map_err(Failure::new)? {
        let (epoch, attached_at) = attachment(cluster, id).await?;
        rows.push(ListedVolume {
            name: stored.value.name,
            id: id.0,
            bytes: stored.value.bytes,
            regions: stored.value.regions.len(),
            state: stored.value.state,
            attached_at,
            epoch,
        });
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(rows)
}

pub(super) async fn list(args: ListArgs) -> Result<(), Failure> {
    let cluster = args.common.cluster.connect()?;
    let rows = listed(&cluster).await?;
    if args.common.json {
        return output::json(&rows);
    }
    let mut table = Table::of_text(&["VOLUME", "SIZE", "REGIONS", "STATE", "ATTACHED AT"]);
    for row in rows {
        table.row(vec![
            row.name,
            Size { bytes: row.bytes }.to_string(),
            row.regions.to_string(),
            state_name(row.state).to_owned(),
            row.attached_at.unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    output::line(table)
}

fn state_name(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Available => "available",
        VolumeState::Deleting => "deleting",
    }
}

#[derive(Serialize)]
struct Replica {
    region: u16,
    group: u64,
    peer: u64,
    server: u32,
    lost: bool,
    role: Option<&'static str>,
    state: &'static str,
    applied: Option<u64>,
    last: Option<u64>,
}

#[derive(Serialize)]
struct VolumeInfo {
    name: String,
    id: u32,
    bytes: u64,
    state: VolumeState,
    epoch: u64,
    attached_at: Option<String>,
    replicas: Vec<Replica>,
}

pub(super) async fn info(args: InfoArgs) -> Result<(), Failure> {
    let cluster = args.common.cluster.connect()?;
    let registry = cluster.registry();
    let (id, stored) = registry.volume_by_name(&args.name).await.map_err(Failure::new)?;
    let (epoch, attached_at) = attachment(&cluster, id).await?;
    let statuses = statuses(&cluster).await?;
    let find = |server: ServerId, group: GroupId| -> Option<ReplicaStatus> {
        let asked = statuses.iter().find(|asked| asked.server == server)?;
        let status = asked.status.as_ref().ok()?;
        status.replicas.iter().find(|replica| replica.group == group).copied()
    };
    let mut replicas = Vec::new();
    for (region, group) in &stored.value.regions {
        let value = registry.group(*group).await.map_err(Failure::new)?.value;
        for peer in value.peers {
            let status = find(peer.server, *group).filter(|status| status.peer == peer.peer);
            replicas.push(Replica {
                region: *region,
                group: group.0,
                peer: peer.peer.0,
                server: peer.server.0,
                lost: peer.lost,
                role: status.map(|status| role_name(status.role)),
                state: match (peer.lost, status) {
                    (true, _) => "lost",
                    (false, Some(status)) => replica_state_name(status.state),
                    (false, None) => "no answer",
                },
                applied: status.map(|status| status.applied.0),
                last: status.map(|status| status.last.0),
            });
        }
    }
    let (name, bytes, state) = (stored.value.name, stored.value.bytes, stored.value.state);
    let info = VolumeInfo { name, id: id.0, bytes, state, epoch, attached_at, replicas };
    if args.common.json {
        return output::json(&info);
    }
    output::line(format_args!(
        "volume {}: {}, id {}, {}, epoch {}, {}",
        info.name,
        Size { bytes },
        info.id,
        state_name(state),
        info.epoch,
        info.attached_at.map_or("not attached".to_owned(), |at| format!("attached at {at}")),
    ))?;
    if info.replicas.is_empty() {
        return output::line("no region has been written");
    }
    let headings = ["REGION", "GROUP", "SERVER", "PEER", "ROLE", "STATE", "APPLIED", "LAST"];
    let mut table = Table::of_text(&headings);
    let text = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    for replica in info.replicas {
        table.row(vec![
            replica.region.to_string(),
            replica.group.to_string(),
            replica.server.to_string(),
            replica.peer.to_string(),
            replica.role.unwrap_or("-").to_owned(),
            replica.state.to_owned(),
            text(replica.applied),
            text(replica.last),
        ]);
    }
    output::line(table)
}

#[derive(Serialize)]
struct AttachedVolume<'a> {
    name: &'a str,
    epoch: u64,
}

pub(super) async fn attach(args: AttachArgs) -> Result<(), Failure> {
    let cluster = args.common.cluster.connect()?;
    let registry = cluster.registry();
    let (id, _) = registry.volume_by_name(&args.name).await.map_err(Failure::new)?;
    let options = AttachOptions {
        owner: Uuid::new_v4(),
        address: attached_by("`alluvium volume attach`"),
        take: args.take,
        config: VolumeConfig { io_timeout: Some(ATTACH_TIMEOUT), memory_bytes: 1 << 20, seed: 0 },
        trouble: Arc::new(Trouble::new(&args.name)),
    };
    let mut signals = Signals::install()?;
    let stop = async {
        signals.next().await;
    };
    let attached = cluster.attach(id, options, stop).await.map_err(Failure::new)?;
    let epoch = attached.value.epoch.0;
    attached.detach().await.map_err(Failure::new)?;
    if args.common.json {
        return output::json(&AttachedVolume { name: &args.name, epoch });
    }
    output::line(format_args!(
        "volume {} was attached with epoch {epoch}: older attachments are fenced",
        args.name
    ))
}

/// A server of the registry, and what it answers about itself and its replicas.
struct Asked {
    server: ServerId,
    address: String,
    status: Result<StatusAnswer, String>,
}

/// Asks all servers.
async fn statuses(cluster: &Cluster) -> Result<Vec<Asked>, Failure> {
    let servers = cluster.registry().servers().await.map_err(Failure::new)?;
    let asked = servers.into_iter().map(|(server, stored)| async move {
        let answer = tokio::time::timeout(STATUS_TIMEOUT, status_of(cluster, server)).await;
        let status = answer.unwrap_or_else(|_| Err("no answer".to_owned()));
        Asked { server, address: stored.value.address, status }
    });
    Ok(futures::future::join_all(asked).await)
}

/// Collects the pages of a server's answer.
async fn status_of(cluster: &Cluster, server: ServerId) -> Result<StatusAnswer, String> {
    let mut whole: Option<StatusAnswer> = None;
    loop {
        let last = whole.as_ref().and_then(|status| status.replicas.last());
        let after = last.map_or(GroupId(0), |replica| replica.group);
        let request = Request::Status { group: None, after };
        let answer =
            cluster.call(server, &request).await.map_err(|_| "not reachable".to_owned())?;
        let Answer::Status(page) = answer.map_err(|error| error.to_string())? else {
            return Err("an answer of another kind".to_owned());
        };
        let has_more = page.has_more && !page.replicas.is_empty();
        match &mut whole {
            None => whole = Some(page),
            Some(whole) => whole.replicas.extend(page.replicas),
        }
        if !has_more {
            return Ok(whole.expect("a page has arrived"));
        }
    }
}

/// What is known of a server. Without an answer there is nothing but its address and the error.
#[derive(Default, Serialize)]
struct ServerStatus {
    server: u32,
    address: String,
    error: Option<String>,
    /// Replicas that are lost, as the registry has it.
    lost: usize,
    replicas: Option<usize>,
    leaders: Option<usize>,
    not_exact: Option<usize>,
    store_bytes: Option<u64>,
    store_free_bytes: Option<u64>,
    ring_bytes: Option<u64>,
    ring_used_bytes: Option<u64>,
    checkpoint: Option<u64>,
}

pub(super) async fn status(args: StatusArgs) -> Result<(), Failure> {
    let cluster = args.common.cluster.connect()?;
    let mut lost: HashMap<ServerId, usize> = HashMap::new();
    for (_, group) in cluster.registry().groups().await.map_err(Failure::new)?.0 {
        for peer in group.value.peers.iter().filter(|peer| peer.lost) {
            *lost.entry(peer.server).or_default() += 1;
        }
    }
    let asked = statuses(&cluster).await?.into_iter();
    let rows: Vec<_> = asked
        .map(|asked| {
            let lost = lost.get(&asked.server).copied().unwrap_or_default();
            server_status(asked, lost)
        })
        .collect();
    if args.common.json {
        return output::json(&rows);
    }
    let headings = ["SERVER", "ADDRESS", "STATE", "REPLICAS", "LEADERS", "STORE FREE", "RING USED"];
    let mut table = Table::of_text(&headings);
    for row in rows {
        let not_exact = row.not_exact.unwrap_or_default();
        let counts = [(row.lost, "lost"), (not_exact, "not exact")].into_iter();
        let counts = counts.filter(|(count, _)| *count > 0);
        let counts = counts.map(|(count, what)| format!("{count} {what}"));
        let states: Vec<String> = row.error.iter().cloned().chain(counts).collect();
        let state = if states.is_empty() { "ok".to_owned() } else { states.join(", ") };
        let count = |count: Option<usize>| count.map_or("-".to_owned(), |it| it.to_string());
        let of = |part: Option<u64>, all: Option<u64>| match part.zip(all) {
            Some((part, all)) => format!("{} of {}", about(part), about(all)),
            None => "-".to_owned(),
        };
        table.row(vec![
            row.server.to_string(),
            row.address,
            state,
            count(row.replicas),
            count(row.leaders),
            of(row.store_free_bytes, row.store_bytes),
            of(row.ring_used_bytes, row.ring_bytes),
        ]);
    }
    output::line(table)
}

fn server_status(asked: Asked, lost: usize) -> ServerStatus {
    let slot = alluvium_volume::store::SLOT_BYTES;
    let Asked { server, address, status } = asked;
    let row = ServerStatus { server: server.0, address, lost, ..ServerStatus::default() };
    let status = match status {
        Ok(status) => status,
        Err(error) => return ServerStatus { error: Some(error), ..row },
    };
    let replicas = status.replicas.iter();
    let leaders = replicas.clone().filter(|replica| replica.role == Role::Leader);
    let not_exact = replicas.clone().filter(|replica| replica.state != ReplicaState::Exact);
    ServerStatus {
        replicas: Some(replicas.len()),
        leaders: Some(leaders.count()),
        not_exact: Some(not_exact.count()),
        store_bytes: Some(u64::from(status.slots) * slot),
        store_free_bytes: Some(u64::from(status.free_slots) * slot),
        ring_bytes: Some(status.ring_bytes),
        ring_used_bytes: Some(status.ring_used_bytes),
        checkpoint: Some(status.checkpoint.0),
        ..row
    }
}

pub(super) async fn delete(args: DeleteArgs) -> Result<(), Failure> {
    let cluster = args.common.cluster.connect()?;
    let registry = cluster.registry();
    let mut names = args.names;
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    let (mut volumes, mut failures) = (Vec::new(), Vec::new());
    for name in names {
        match registry.volume_by_name(&name).await {
            Ok((id, _)) => volumes.push((name, id)),
            Err(error @ RegistryError::UnknownVolume(_)) => failures.push(error.to_string()),
            Err(error) => return Err(Failure::new(error)),
        }
    }
    if !failures.is_empty() {
        return Err(Failure::Failed(format!("{}; nothing was deleted", failures.join("; "))));
    }
    let mut deleted = Vec::new();
    for (name, id) in volumes {
        match registry.delete_volume(id).await {
            Ok(()) => deleted.push(name),
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    if args.common.json {
        output::json(&deleted)?;
    } else {
        for name in &deleted {
            output::line(format_args!("deleted volume {name}"))?;
        }
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(Failure::Failed(format!("not deleted: {}", failures.join("; ")))),
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Follower => "follower",
        Role::Candidate => "candidate",
        Role::Leader => "leader",
        Role::Learner => "learner",
    }
}

fn replica_state_name(state: ReplicaState) -> &'static str {
    match state {
        ReplicaState::Exact => "exact",
        ReplicaState::Replaying => "replaying",
        ReplicaState::Installing => "installing",
        ReplicaState::Lost => "lost",
        ReplicaState::Stopped => "stopped",
        ReplicaState::Creating => "creating",
    }
}
