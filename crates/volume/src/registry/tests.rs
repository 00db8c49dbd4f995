//! Tests of the registry: encodings, rules, and all functions under faults by seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use alluvium_coordination::faulty::{Faults, Faulty};
use alluvium_coordination::keys::NumberKind;
use alluvium_coordination::{
    Identity, LeaseId, Limits, ListRequest, ManualClock, MemoryCoordination,
};
use futures::StreamExt as _;
use futures::future::join_all;

use super::*;

const TIB: u64 = 1 << 40;

fn memory(restores: u32) -> MemoryCoordination {
    let identity = Identity { store: Uuid::nil(), restores };
    MemoryCoordination::with_identity(Limits::default(), Arc::new(ManualClock::default()), identity)
}

fn keys() -> Keys {
    Keys::new("c").unwrap()
}

fn id(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

async fn lease(service: &dyn Coordination) -> LeaseId {
    service.grant(Duration::from_secs(5)).await.unwrap().id
}

fn request(owner: u128, lease: LeaseId) -> AttachRequest {
    AttachRequest {
        owner: id(owner),
        server: Some(ServerId(1)),
        address: "127.0.0.1:9".to_owned(),
        now_ms: 1000,
        lease,
        take: false,
    }
}

async fn servers(registry: Registry<'_>, count: u128) {
    for n in 1..=count {
        registry.register_server("h:1", [id(n), id(100 + n)], id(7)).await.unwrap();
    }
}

#[test]
fn values_have_the_documented_encoding_and_no_other_fields() {
    fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T, json: &str) {
        // `#4` is the UUID 4.
        let uuid = |json: String, n| json.replace(&format!("#{n}"), &id(n).to_string());
        let json = (1..=5).fold(json.to_owned(), uuid);
        assert_eq!(String::from_utf8(encode(value)).unwrap(), json);
        assert_eq!(serde_json::from_str::<T>(&json).unwrap(), *value);
        let more = format!("{},\"new\":1}}", &json[..json.len() - 1]);
        assert!(serde_json::from_str::<T>(&more).is_err(), "{more}");
    }
    let server = ServerValue {
        address: "h:1".to_owned(),
        store: id(1),
        wal: id(2),
        mark: 3,
        incarnation: id(4),
        features: 5,
    };
    let server_json = concat!(
        r##"{"address":"h:1","store":"#1","wal":"#2","mark":3,"incarnation":"#4","##,
        r##""features":5}"##,
    );
    check(&server, server_json);
    let volume = VolumeValue {
        name: "v".to_owned(),
        bytes: 4096,
        family: VolumeId(9),
        state: VolumeState::Deleting,
        regions: BTreeMap::from([(2, GroupId(6))]),
        creation: id(4),
    };
    let volume_json = concat!(
        r##"{"name":"v","bytes":4096,"family":9,"state":"deleting","regions":{"2":6},"##,
        r##""creation":"#4"}"##,
    );
    check(&volume, volume_json);
    let name_json = r##"{"volume":9,"creation":"#4"}"##;
    check(&NameValue { volume: VolumeId(9), creation: id(4) }, name_json);
    let peer = PeerValue { peer: PeerId(8), server: ServerId(1), created: Some(id(4)), lost: true };
    let epoch = FirstEpoch { volume: VolumeId(9), epoch: AttachEpoch(3), nonce: 17 };
    let group = GroupValue {
        family: VolumeId(9),
        region: 2,
        founders: vec![PeerId(8)],
        peers: vec![peer],
        epochs: vec![epoch],
        creation: id(5),
    };
    let group_json = concat!(
        r##"{"family":9,"region":2,"founders":[8],"peers":[{"peer":8,"server":1,"##,
        r##""created":"#4","lost":true}],"epochs":[{"volume":9,"epoch":3,"nonce":17}],"##,
        r##""creation":"#5"}"##,
    );
    check(&group, group_json);
    let attach = AttachValue {
        epoch: AttachEpoch(3),
        nonce: 17,
        owner: id(4),
        server: None,
        address: "h:2".to_owned(),
        since_ms: 5,
    };
    let attach_json =
        r##"{"epoch":3,"nonce":17,"owner":"#4","server":null,"address":"h:2","since_ms":5}"##;
    check(&attach, attach_json);
    let lease = values::AttachLeaseValue { epoch: AttachEpoch(3), nonce: 17 };
    check(&lease, r#"{"epoch":3,"nonce":17}"#);
}

#[tokio::test]
async fn a_value_of_a_newer_version_is_an_error_with_its_key() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    for (key, value) in [(keys.volume(1), "{\"new\":1}"), (format!("{}x", keys.volume(2)), "{}")] {
        let changes = vec![Change::put(key.clone(), value)];
        service.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap();
        let found = registry.volumes().await;
        assert!(matches!(&found, Err(RegistryError::Value { key: at, .. }) if *at == key));
        let changes = vec![Change::Delete(key)];
        service.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_server_is_registered_once_and_an_old_or_second_opening_is_refused() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    servers(registry, 2).await;
    let disks = [id(2), id(102)];
    let server = registry.register_server("h:9", disks, id(8)).await.unwrap();
    assert_eq!(server, ServerId(2), "the devices are registered already");
    let mixed = registry.register_server("h:9", [id(2), id(101)], id(8)).await;
    assert!(matches!(mixed, Err(RegistryError::WrongDisks { .. })), "{mixed:?}");
    let wrong = registry.check_opening(server, [id(1), id(102)], 0).await;
    assert!(matches!(wrong, Err(RegistryError::WrongDisks { .. })), "{wrong:?}");
    let unknown = registry.check_opening(ServerId(9), disks, 0).await;
    assert_eq!(unknown.unwrap_err(), RegistryError::UnknownServer(ServerId(9)));
    // The mark may be above the registered one: an opening crashed before it was recorded.
    let opening = registry.check_opening(server, disks, 4).await.unwrap();
    let copy = registry.check_opening(server, disks, 4).await.unwrap();
    registry.record_opening(&opening, 5, id(20), "h:3", 1).await.unwrap();
    registry.record_opening(&opening, 5, id(20), "h:3", 1).await.expect("the same run again");
    let second = registry.record_opening(&copy, 5, id(21), "h:4", 1).await;
    assert_eq!(second, Err(RegistryError::OpenedElsewhere(server)));
    let stored = registry.server(server).await.unwrap().value;
    assert_eq!((stored.mark, stored.incarnation), (5, id(20)));
    assert_eq!(stored.address, "h:3");
    let old = registry.check_opening(server, disks, 4).await.unwrap_err();
    assert_eq!(old, RegistryError::OldCopy { server, mark: 4, registered: 5 });
    let opening = registry.check_opening(server, disks, 5).await.unwrap();
    let same = registry.record_opening(&opening, 5, id(22), "h:3", 1).await;
    assert!(matches!(same, Err(RegistryError::OldCopy { .. })), "an opening raises the mark");
}

#[tokio::test]
async fn the_name_of_a_new_volume_starts_with_a_letter_or_a_digit() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    let longest = "a".repeat(128);
    for name in ["a", "0", "A.b_c-d", "a..", &longest] {
        registry.create_volume(name, 4096).await.unwrap();
    }
    let longer = "a".repeat(129);
    for name in ["", ".", "..", "-y", "_a", "a/b", "a b", "é", &longer] {
        let refused = registry.create_volume(name, 4096).await.unwrap_err();
        let RegistryError::Invalid(text) = &refused else { panic!("{name}: {refused}") };
        assert!(text.contains(&format!("{name:?} is not a name for a volume")), "{text}");
    }
    // Earlier versions have accepted these: they can be looked up.
    for name in [".", "..", "-y", "_a"] {
        let unknown = registry.volume_by_name(name).await.unwrap_err();
        assert_eq!(unknown, RegistryError::UnknownVolume(name.to_owned()));
    }
}

#[tokio::test]
async fn a_volume_has_its_name_alone_and_its_number_for_ever() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    for bytes in [0, 4095, MAX_VOLUME_BYTES + 4096] {
        let refused = registry.create_volume("v", bytes).await;
        assert!(matches!(refused, Err(RegistryError::Invalid(_))), "{refused:?}");
    }
    let first = registry.create_volume("v", MAX_VOLUME_BYTES).await.unwrap();
    let taken = registry.create_volume("v", 4096).await.unwrap_err();
    assert_eq!(taken, RegistryError::NameTaken { name: "v".to_owned(), volume: first });
    assert_eq!(registry.volume_by_name("v").await.unwrap().0, first);
    registry.delete_volume(first).await.unwrap();
    let unknown = RegistryError::UnknownVolume(first.to_string());
    assert_eq!(registry.delete_volume(first).await, Err(unknown.clone()));
    assert_eq!(registry.volume(first).await.unwrap_err(), unknown);
    let second = registry.create_volume("v", 4096).await.unwrap();
    assert!(second > first);
    let all: Vec<_> = registry.volumes().await.unwrap().into_iter().map(|one| one.0).collect();
    assert_eq!(all, [second]);
}

#[tokio::test]
async fn an_attached_volume_is_taken_only_on_request_or_without_its_lease() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    let volume = registry.create_volume("v", TIB).await.unwrap();
    let leases = [lease(&service).await, lease(&service).await];
    let first = registry.attach(volume, &request(1, leases[0])).await.unwrap();
    assert_eq!(registry.attachment(volume).await.unwrap(), Some((first.clone(), true)));
    let other = request(2, leases[1]);
    let refused = registry.attach(volume, &other).await;
    assert!(matches!(refused, Err(RegistryError::Attached { .. })), "{refused:?}");
    let again = registry.attach(volume, &request(1, leases[0])).await.unwrap();
    assert!(again.epoch > first.epoch && again.nonce != first.nonce, "the same process may");
    let taken = registry.attach(volume, &AttachRequest { take: true, ..other.clone() }).await;
    let taken = taken.unwrap();
    assert!(taken.epoch > again.epoch);
    let fenced = registry.detach(volume, again.epoch).await.unwrap_err();
    let (epoch, found) = (again.epoch, taken.epoch);
    assert_eq!(fenced, RegistryError::Fenced { volume, epoch, found });
    let deleted = registry.delete_volume(volume).await;
    assert!(matches!(deleted, Err(RegistryError::Attached { .. })), "{deleted:?}");
    // The lease of the former owner does not end the attachment of the new one.
    service.revoke(leases[0]).await.unwrap();
    assert!(registry.attachment(volume).await.unwrap().unwrap().1);
    registry.detach(volume, taken.epoch).await.unwrap();
    registry.detach(volume, taken.epoch).await.expect("detached already");
    assert_eq!(registry.attachment(volume).await.unwrap(), Some((taken.clone(), false)));
    let third = registry.attach(volume, &other).await.unwrap();
    assert!(third.epoch > taken.epoch, "epochs go on after a detach");
    service.revoke(leases[1]).await.unwrap();
    let lost = registry.attach(volume, &other).await.unwrap_err();
    assert_eq!(lost, RegistryError::Coordination(Error::LeaseNotFound(leases[1])));
    let next = request(3, lease(&service).await);
    assert!(registry.attach(volume, &next).await.unwrap().epoch > third.epoch);
}

#[tokio::test]
async fn a_group_is_created_once_and_only_for_the_newest_attachment() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    let volume = registry.create_volume("v", 130 << 30).await.unwrap();
    let none = AttachEpoch(1);
    let unattached = registry.create_group(volume, 0, none, 1).await.unwrap_err();
    let found = AttachEpoch(0);
    assert_eq!(unattached, RegistryError::Fenced { volume, epoch: none, found });
    let owner = request(1, lease(&service).await);
    let old = registry.attach(volume, &owner).await.unwrap();
    servers(registry, 2).await;
    let few = registry.create_group(volume, 0, old.epoch, 1).await.unwrap_err();
    assert_eq!(few, RegistryError::TooFewServers(2));
    servers(registry, 3).await;
    let (group, stored) = registry.create_group(volume, 2, old.epoch, 1).await.unwrap();
    let value = stored.value.clone();
    let epoch = FirstEpoch { volume, epoch: old.epoch, nonce: old.nonce };
    assert_eq!((value.region, value.family, value.epochs), (2, volume, vec![epoch]));
    let placed: BTreeSet<_> = value.peers.iter().map(|peer| peer.server).collect();
    assert_eq!(placed, [1, 2, 3].map(ServerId).into());
    assert_eq!(registry.group(group).await.unwrap(), stored);
    let beyond = registry.create_group(volume, 3, old.epoch, 1).await;
    assert!(matches!(beyond, Err(RegistryError::Invalid(_))), "130 GiB have three regions");
    let new = registry.attach(volume, &owner).await.unwrap();
    for region in [1, 2] {
        let fenced = registry.create_group(volume, region, old.epoch, 1).await;
        assert!(matches!(fenced, Err(RegistryError::Fenced { .. })), "{fenced:?}");
    }
    let again = registry.create_group(volume, 2, new.epoch, 9).await.unwrap();
    assert_eq!(again, (group, stored));
    let (other, next) = registry.create_group(volume, 1, new.epoch, 1).await.unwrap();
    assert!(other > group && next.value.founders[0] > value.founders[2]);
}

#[tokio::test]
async fn a_group_planned_before_others_were_created_and_deleted_does_not_reuse_their_numbers() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    servers(registry, 3).await;
    let own = lease(&service).await;
    let mut planned = None;
    for name in ["planned", "other"] {
        let volume = registry.create_volume(name, TIB).await.unwrap();
        let epoch = registry.attach(volume, &request(1, own)).await.unwrap().epoch;
        let read = registry.volume(volume).await.unwrap();
        let attach = registry.attached_with(volume, epoch).await.unwrap();
        if planned.is_none() {
            planned = registry.plan_group(volume, 0, 1, &read, &attach).await.ok();
            continue;
        }
        registry.create_group(volume, 0, epoch, 1).await.unwrap();
        registry.detach(volume, epoch).await.unwrap();
        registry.delete_volume(volume).await.unwrap();
    }
    let late = service.commit(&planned.unwrap().transaction).await.unwrap().unwrap_err();
    assert_eq!(late.key, keys.next(NumberKind::Group));
}

#[tokio::test]
async fn an_attachment_whose_lease_has_ended_is_registered_again_unless_another_one_came() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    let volume = registry.create_volume("v", TIB).await.unwrap();
    let first = lease(&service).await;
    let attach = registry.attach(volume, &request(1, first)).await.unwrap();
    service.revoke(first).await.unwrap();
    assert!(!registry.attachment(volume).await.unwrap().unwrap().1);
    let again = lease(&service).await;
    registry.attach_again(volume, &attach, again).await.unwrap();
    assert_eq!(registry.attachment(volume).await.unwrap(), Some((attach.clone(), true)));
    registry.attach(volume, &request(2, lease(&service).await)).await.unwrap_err();
    // Without the lease another process may attach the volume, and this one must not return.
    service.revoke(again).await.unwrap();
    let second = registry.attach(volume, &request(2, lease(&service).await)).await.unwrap();
    let refused = registry.attach_again(volume, &attach, lease(&service).await).await;
    let (epoch, found) = (attach.epoch, second.epoch);
    assert_eq!(refused, Err(RegistryError::Fenced { volume, epoch, found }));
    assert_eq!(registry.attachment(volume).await.unwrap(), Some((second.clone(), true)));
    // The same epoch with another nonce is another attachment, too.
    let other = AttachValue { nonce: second.nonce ^ 1, ..second };
    registry.attach_again(volume, &other, lease(&service).await).await.unwrap_err();
}

#[tokio::test]
async fn a_peer_is_created_once_and_stays_lost() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    servers(registry, 3).await;
    let volume = registry.create_volume("v", TIB).await.unwrap();
    let attach = registry.attach(volume, &request(1, lease(&service).await)).await.unwrap();
    let (group, seen) = registry.create_group(volume, 0, attach.epoch, 1).await.unwrap();
    let [one, two] = [0, 1].map(|n| seen.value.founders[n]);
    let created = async |peer, run, is_recovered| {
        registry.mark_created(group, peer, id(run), is_recovered).await
    };
    created(one, 1, false).await.unwrap();
    created(one, 1, false).await.expect("the same run again");
    let elsewhere = Err(RegistryError::CreatedElsewhere { group, peer: one });
    assert_eq!(created(one, 2, false).await, elsewhere, "another run");
    created(one, 2, true).await.expect("the mark of the run before was late");
    created(two, 1, false).await.unwrap();
    registry.mark_lost(group, two).await.unwrap();
    registry.mark_lost(group, two).await.unwrap();
    let value = registry.group(group).await.unwrap().value;
    let marks: Vec<_> = value.peers.iter().map(|peer| (peer.created, peer.lost)).collect();
    assert_eq!(marks, [(Some(id(1)), false), (Some(id(1)), true), (None, false)]);
    let unknown = registry.mark_lost(group, PeerId(99)).await.unwrap_err();
    assert_eq!(unknown, RegistryError::UnknownPeer { group, peer: PeerId(99) });
}

#[tokio::test]
async fn a_large_volume_is_deleted_in_steps_that_can_be_continued() {
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    servers(registry, 5).await;
    let volume = registry.create_volume("v", MAX_VOLUME_BYTES).await.unwrap();
    let attach = registry.attach(volume, &request(1, lease(&service).await)).await.unwrap();
    let mut loads = BTreeMap::<_, u64>::new();
    for region in 0..150 {
        let seed = u64::from(region);
        let (_, group) = registry.create_group(volume, region, attach.epoch, seed).await.unwrap();
        group.value.peers.iter().for_each(|peer| *loads.entry(peer.server).or_default() += 1);
    }
    assert!(loads.len() == 5 && loads.values().all(|load| *load == 90), "{loads:?}");
    registry.detach(volume, attach.epoch).await.unwrap();
    // The first step of a deletion that was interrupted.
    let key = keys.volume(u64::from(volume.0));
    let stored = registry.volume(volume).await.unwrap();
    let step = registry.next_deletion(volume, &key, &stored).await.unwrap();
    service.commit(&step).await.unwrap().unwrap();
    assert!(registry.volume_by_name("v").await.is_err());
    let refused = registry.attach(volume, &request(1, lease(&service).await)).await;
    assert_eq!(refused.unwrap_err(), RegistryError::Deleting(volume));
    registry.delete_volume(volume).await.unwrap();
    for part in ["volume", "group", "attach", "name"] {
        let left = service.list(&ListRequest::new(keys.prefix(part))).await.unwrap();
        assert!(left.entries.is_empty(), "{left:?}");
    }
}

#[tokio::test]
async fn after_a_restore_all_numbers_are_above_those_that_the_backup_lacks() {
    let (service, keys) = (memory(2), keys());
    let registry = Registry::new(&service, &keys);
    // The backup has small numbers.
    let changes = vec![Change::put(keys.next(NumberKind::Group), "7")];
    service.commit(&Transaction { guards: Vec::new(), changes }).await.unwrap().unwrap();
    servers(registry, 3).await;
    let volume = registry.create_volume("v", TIB).await.unwrap();
    assert_eq!(volume, VolumeId(2 << 24));
    assert_eq!(registry.servers().await.unwrap()[0].0, ServerId(2 << 24));
    let attach = registry.attach(volume, &request(1, lease(&service).await)).await.unwrap();
    assert_eq!(attach.epoch, AttachEpoch(2 << 40));
    let (group, stored) = registry.create_group(volume, 0, attach.epoch, 1).await.unwrap();
    assert_eq!(group, GroupId(2 << 40));
    assert_eq!(stored.value.founders[2], PeerId((2 << 40) + 2));
}

/// What the clients of the fault test were answered.
#[derive(Debug, Default)]
struct Answers {
    volumes: Vec<VolumeId>,
    epochs: Vec<(VolumeId, AttachEpoch)>,
    groups: Vec<GroupId>,
    created: Vec<(GroupId, PeerId, Uuid)>,
}

/// Passes on what may happen under faults and in races.
fn allowed<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(answer) => Some(answer),
        Err(
            RegistryError::Coordination(
                Error::Unavailable(_) | Error::Unknown(_) | Error::LeaseNotFound(_),
            )
            | RegistryError::NameTaken { .. }
            | RegistryError::UnknownVolume(_)
            | RegistryError::UnknownPeer { .. }
            | RegistryError::Deleting(_)
            | RegistryError::Attached { .. }
            | RegistryError::Fenced { .. }
            | RegistryError::CreatedElsewhere { .. }
            | RegistryError::Contended(_),
        ) => None,
        Err(error) => panic!("{error}"),
    }
}

async fn client(service: &Faulty<MemoryCoordination>, keys: &Keys, number: u128) -> Answers {
    let registry = Registry::new(service, keys);
    let mut answers = Answers::default();
    let mut lease = None;
    for round in 0..30_u64 {
        let name = format!("v{}", round % 3);
        if let Some(volume) = allowed(registry.create_volume(&name, TIB).await) {
            answers.volumes.push(volume);
        }
        let Some((volume, _)) = allowed(registry.volume_by_name(&name).await) else { continue };
        let of = match lease {
            Some(lease) => lease,
            None => match service.grant(Duration::from_secs(5)).await {
                Ok(granted) => *lease.insert(granted.id),
                Err(_) => continue,
            },
        };
        let take = (u128::from(round) + number).is_multiple_of(4);
        let request = AttachRequest { take, ..request(number, of) };
        let attached = registry.attach(volume, &request).await;
        if matches!(attached, Err(RegistryError::Coordination(Error::LeaseNotFound(_)))) {
            lease = None;
        }
        let Some(attach) = allowed(attached) else { continue };
        answers.epochs.push((volume, attach.epoch));
        for region in 0..2 {
            let created = registry.create_group(volume, region, attach.epoch, round).await;
            let Some((group, seen)) = allowed(created) else { continue };
            answers.groups.push(group);
            let run = id(number * 1000 + u128::from(round));
            for peer in seen.value.founders.clone() {
                if allowed(registry.mark_created(group, peer, run, false).await).is_some() {
                    answers.created.push((group, peer, run));
                }
            }
            let _ = allowed(registry.mark_lost(group, seen.value.founders[0]).await);
        }
        let _ = allowed(registry.detach(volume, attach.epoch).await);
        if round % 2 == 1 {
            let _ = allowed(registry.delete_volume(volume).await);
        }
    }
    answers
}

#[tokio::test]
async fn whatever_fails_numbers_are_unique_epochs_grow_and_groups_begin_with_them() {
    let (mut groups, mut epochs, mut late) = (0, 0, 0);
    for seed in 0..40 {
        let keys = keys();
        let service = Faulty::new(memory(0), Faults { cut_off: 0, ..Faults::ALL }, seed);
        servers(Registry::new(service.inner(), &keys), 3).await;
        let answers = join_all((1..=3).map(|number| client(&service, &keys, number))).await;
        service.settle().await.unwrap();
        let history = History::read(service.inner(), &keys, seed).await;
        let mut answered = BTreeSet::new();
        for answers in &answers {
            for volume in &answers.volumes {
                assert!(answered.insert(volume), "seed {seed}: volume {volume} twice");
                assert!(history.volumes.contains(volume), "seed {seed}: volume {volume}");
            }
            for (group, peer, run) in &answers.created {
                let created = history.created.get(&(*group, *peer));
                assert_eq!(created, Some(run), "seed {seed}: {group} {peer}");
            }
            assert!(answers.groups.iter().all(|group| history.groups.contains(group)));
        }
        let all: Vec<_> = answers.iter().flat_map(|answers| &answers.epochs).collect();
        let different: BTreeSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len(), "seed {seed}: an epoch was given out twice");
        epochs += all.len();
        groups += history.groups.len();
        late += service.applied_late();
    }
    assert!(groups > 200 && epochs > 500 && late > 100, "{groups} {epochs} {late}");
}

/// What the history of the keys shows. Its rules hold at each revision.
#[derive(Default)]
struct History {
    volumes: BTreeSet<VolumeId>,
    groups: BTreeSet<GroupId>,
    peers: BTreeSet<PeerId>,
    created: BTreeMap<(GroupId, PeerId), Uuid>,
    epochs: BTreeMap<VolumeId, AttachValue>,
}

impl History {
    async fn read(service: &MemoryCoordination, keys: &Keys, seed: u64) -> Self {
        let mut history = Self::default();
        let last = service.list(&ListRequest::new("")).await.unwrap().revision;
        let mut watch = service.watch(keys.root(), Revision(0));
        let mut view = BTreeMap::new();
        let mut at = Revision(0);
        while at < last {
            let changes = watch.next().await.unwrap().unwrap();
            at = changes.revision;
            for event in changes.events {
                match event.entry {
                    None => drop(view.remove(&event.key)),
                    Some(entry) => {
                        history.put(&entry, &event.key[keys.root().len()..], seed);
                        view.insert(event.key, entry);
                    }
                }
            }
            check_view(&view, keys, seed);
        }
        history
    }

    fn put(&mut self, entry: &Entry, key: &str, seed: u64) {
        let is_new = entry.created == entry.modified;
        let (part, number) = key.rsplit_once('/').unwrap();
        let number = || u64::from_str_radix(number, 16).unwrap();
        match part {
            "volume" => {
                let id = VolumeId(number().try_into().unwrap());
                assert_eq!(self.volumes.insert(id), is_new, "seed {seed}: {key} again");
            }
            "attach" => {
                let id = VolumeId(number().try_into().unwrap());
                let value = parse::<AttachValue>(entry).unwrap().value;
                let before = self.epochs.insert(id, value.clone());
                assert!(before.is_none_or(|before| before.epoch < value.epoch), "seed {seed}");
            }
            "group" => {
                let id = GroupId(number());
                let value = parse::<GroupValue>(entry).unwrap().value;
                assert_eq!(self.groups.insert(id), is_new, "seed {seed}: {key} again");
                if is_new {
                    let first = value.epochs[0];
                    let attach = &self.epochs[&first.volume];
                    let newest = (attach.epoch, attach.nonce);
                    assert_eq!((first.epoch, first.nonce), newest, "seed {seed}: {key}");
                    let fresh = value.founders.iter().all(|peer| self.peers.insert(*peer));
                    assert!(fresh, "seed {seed}: a peer of {key} was used before");
                }
                for peer in value.peers {
                    if let Some(run) = peer.created {
                        let before = self.created.insert((id, peer.peer), run);
                        assert!(before.is_none_or(|before| before == run), "seed {seed}: {key}");
                    }
                }
            }
            _ => {}
        }
    }
}

/// Each name has its volume, each usable volume its name, and each group is in a region.
fn check_view(view: &BTreeMap<String, Entry>, keys: &Keys, seed: u64) {
    let part = |part: &str| {
        let prefix = keys.prefix(part);
        view.iter().filter(move |(key, _)| key.starts_with(&prefix)).map(|(_, entry)| entry)
    };
    let volumes: Vec<_> =
        part("volume").map(|entry| parse::<VolumeValue>(entry).unwrap().value).collect();
    let usable = volumes.iter().filter(|volume| volume.state == VolumeState::Available);
    let named: BTreeSet<_> = usable.map(|volume| (&volume.name, volume.creation)).collect();
    let mut names = 0;
    for entry in part("name") {
        let name = entry.key[keys.prefix("name").len()..].to_owned();
        let value = parse::<NameValue>(entry).unwrap().value;
        assert!(named.contains(&(&name, value.creation)), "seed {seed}: {name}");
        names += 1;
    }
    assert_eq!(names, named.len(), "seed {seed}: a volume has no name");
    let regions: BTreeSet<_> = volumes
        .iter()
        .flat_map(|volume| volume.regions.values().map(|group| keys.group(group.0)))
        .collect();
    let groups: BTreeSet<_> = part("group").map(|entry| entry.key.clone()).collect();
    assert_eq!(regions, groups, "seed {seed}");
}

/// The futures can run on any thread.
#[test]
fn the_futures_of_the_registry_are_send() {
    fn send<T: Send>(_: T) {}
    let (service, keys) = (memory(0), keys());
    let registry = Registry::new(&service, &keys);
    send(registry.create_volume("v", TIB));
    send(registry.create_group(VolumeId(1), 0, AttachEpoch(1), 0));
    send(registry.attach(VolumeId(1), &request(1, LeaseId(1))));
    send(registry.delete_volume(VolumeId(1)));
}
