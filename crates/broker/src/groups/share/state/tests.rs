use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::groups::share::table::Remembered;

fn offset(at: u64) -> StreamOffset {
    StreamOffset(at)
}

fn member(name: &str) -> Arc<str> {
    name.into()
}

fn batch(from: u64, to: u64) -> Found {
    Found { from: offset(from), to: offset(to), is_for_members: true }
}

fn nothing(from: u64, to: u64) -> Found {
    Found { is_for_members: false, ..batch(from, to) }
}

const WANTED: Wanted =
    Wanted { max_records: 500, is_exact: false, batch_records: 500, max_in_flight: 100 };

/// Members and a clock that advances only on request.
struct Bench {
    partition: SharePartition,
    now: Instant,
}

const LOCK: Duration = Duration::from_secs(30);
const MAX_DELIVERIES: u16 = 3;

impl Bench {
    fn new(start: u64) -> Self {
        Self { partition: SharePartition::new(offset(start), []), now: Instant::now() }
    }

    fn acquire(&mut self, who: &str, from: u64, found: &[Found], wanted: Wanted) -> Vec<[u64; 3]> {
        let until = self.now + LOCK;
        let acquired = self.partition.acquire(offset(from), found, &member(who), until, wanted);
        acquired.iter().map(|a| [a.from.0, a.to.0, a.deliveries.into()]).collect()
    }

    fn acknowledge(
        &mut self,
        who: &str,
        acks: &[(u64, u64, AckKind)],
    ) -> Result<Vec<Change>, NotAcquired> {
        let acks: Vec<Ack> = acks
            .iter()
            .map(|(from, to, kind)| Ack { from: offset(*from), to: offset(*to), kind: *kind })
            .collect();
        let mut next = self.partition.clone();
        let changes = next.acknowledge(who, &acks, self.now + LOCK, MAX_DELIVERIES)?;
        self.partition = next;
        Ok(changes)
    }

    fn ends(&self) -> (u64, u64) {
        (self.partition.start().0, self.partition.end().0)
    }
}

#[test]
fn each_record_goes_to_one_member_and_the_start_follows_finished_records() {
    use AckKind::{Accept, Reject, Release};
    let mut bench = Bench::new(10);
    assert_eq!(bench.partition.next_read(100), Some(offset(10)));
    assert_eq!(bench.acquire("a", 10, &[batch(8, 13), batch(13, 15)], WANTED), [[10, 15, 1]]);
    // The other has read the same records, but later.
    assert!(bench.acquire("b", 10, &[batch(8, 13), batch(13, 15)], WANTED).is_empty());
    assert_eq!(bench.acquire("b", 15, &[batch(15, 17)], WANTED), [[15, 17, 1]]);
    assert_eq!(bench.ends(), (10, 17));

    assert_eq!(bench.acknowledge("b", &[(14, 16, Accept)]), Err(NotAcquired));
    assert_eq!(bench.ends(), (10, 17), "all or nothing");
    let changes = bench.acknowledge("a", &[(11, 12, Accept), (12, 13, Release), (13, 15, Reject)]);
    let kinds: Vec<_> = changes.unwrap().iter().map(|c| (c.from.0, c.to.0, c.state)).collect();
    let (available, archived) = (Stored::Available, Stored::Archived);
    assert_eq!(kinds, [(11, 12, Stored::Acknowledged), (12, 13, available), (13, 15, archived)]);
    assert_eq!(bench.ends(), (10, 17), "10 is not finished");
    assert_eq!(bench.partition.next_read(100), Some(offset(12)));
    assert_eq!(bench.acquire("b", 12, &[batch(8, 13), batch(13, 15)], WANTED), [[12, 13, 2]]);
    bench.acknowledge("a", &[(10, 11, Accept)]).unwrap();
    assert_eq!(bench.ends(), (12, 17));
    assert_eq!(bench.acknowledge("a", &[(10, 11, Accept)]).unwrap(), [], "ignored below the start");
    bench.acknowledge("b", &[(12, 13, Accept), (15, 17, Accept)]).unwrap();
    assert_eq!(bench.ends(), (17, 17));
    assert_eq!(bench.acknowledge("b", &[(16, 18, Accept)]), Err(NotAcquired), "not read yet");
}

#[test]
fn batches_are_acquired_as_a_whole_unless_the_limit_is_strict() {
    let few = Wanted { max_records: 3, ..WANTED };
    let found = [batch(0, 2), batch(2, 12), batch(12, 14)];
    assert_eq!(Bench::new(0).acquire("a", 0, &found, few), [[0, 12, 1]]);
    let exact = Wanted { is_exact: true, ..few };
    let mut bench = Bench::new(0);
    assert_eq!(bench.acquire("a", 0, &found, exact), [[0, 3, 1]]);
    assert_eq!(bench.partition.next_read(100), Some(offset(3)));
    assert_eq!(bench.acquire("b", 3, &found[1..], exact), [[3, 6, 1]]);
    // Released records are split as well.
    bench.partition.release(|member| member == "a", Return::Lost, MAX_DELIVERIES);
    let one = Wanted { max_records: 1, ..exact };
    assert_eq!(bench.acquire("b", 0, &found, one), [[0, 1, 2]]);
    assert_eq!(
        bench.acquire("b", 1, &found, Wanted { max_records: 9, ..exact }),
        [[1, 3, 2], [6, 13, 1]]
    );

    let bounded = Wanted { max_in_flight: 5, ..WANTED };
    let mut bench = Bench::new(0);
    assert_eq!(bench.acquire("a", 0, &found, bounded), [[0, 5, 1]]);
    assert_eq!((bench.partition.in_flight(), bench.partition.next_read(5)), (5, None));
    bench.acknowledge("a", &[(0, 2, AckKind::Accept)]).unwrap();
    assert_eq!(bench.partition.next_read(5), Some(offset(5)));
    assert_eq!(bench.acquire("a", 5, &found[1..], bounded), [[5, 7, 1]]);
}

#[test]
fn acquired_records_are_reported_in_ranges_of_about_the_batch_size() {
    let small = Wanted { batch_records: 4, ..WANTED };
    let found = [batch(0, 2), batch(2, 4), batch(4, 10), batch(10, 11)];
    let reported = Bench::new(0).acquire("a", 0, &found, small);
    assert_eq!(reported, [[0, 4, 1], [4, 10, 1], [10, 11, 1]]);
}

#[test]
fn offsets_without_records_for_members_are_skipped() {
    let mut bench = Bench::new(0);
    // A marker at 3, an aborted batch at 6 to 8, nothing from 8 to 20.
    let found = [batch(0, 3), nothing(3, 4), batch(4, 6), nothing(6, 8), batch(20, 22)];
    assert_eq!(bench.acquire("a", 0, &found, WANTED), [[0, 3, 1], [4, 6, 1], [20, 22, 1]]);
    assert_eq!(bench.partition.in_flight(), 7);
    bench.acknowledge("a", &[(0, 3, AckKind::Accept)]).unwrap();
    assert_eq!(bench.ends(), (4, 22));
    bench.acknowledge("a", &[(4, 6, AckKind::Gap), (20, 22, AckKind::Accept)]).unwrap();
    assert_eq!(bench.ends(), (22, 22));
    assert!(bench.acquire("a", 22, &[nothing(22, 23)], WANTED).is_empty());
    assert_eq!(bench.ends(), (23, 23));
    // It is not persisted, and determined again.
    let mut bench = Bench::new(0);
    bench.acquire("a", 0, &[batch(0, 1), nothing(1, 2), batch(2, 3)], WANTED);
    let changes = bench.acknowledge("a", &[(2, 3, AckKind::Accept)]).unwrap();
    let mut again = SharePartition::new(offset(0), changes);
    assert_eq!(again.next_read(100), Some(offset(0)));
    let found = [batch(0, 1), nothing(1, 2), batch(2, 3)];
    let until = bench.now + LOCK;
    let acquired = again.acquire(offset(0), &found, &member("b"), until, WANTED);
    assert_eq!(acquired.iter().map(|a| (a.from.0, a.to.0)).collect::<Vec<_>>(), [(0, 1)]);
}

#[test]
fn locks_expire_and_renew_and_records_are_archived_at_the_delivery_limit() {
    let mut bench = Bench::new(0);
    let found = [batch(0, 4)];
    bench.acquire("a", 0, &found, WANTED);
    assert_eq!(bench.partition.deadline(), Some(bench.now + LOCK));
    bench.now += LOCK / 2;
    assert_eq!(bench.acknowledge("a", &[(0, 1, AckKind::Renew)]).unwrap(), []);
    bench.now += LOCK / 2;
    let changes = bench.partition.expire(bench.now, MAX_DELIVERIES);
    assert_eq!(
        changes.iter().map(|c| (c.from.0, c.to.0, c.deliveries)).collect::<Vec<_>>(),
        [(1, 4, 1)]
    );
    assert_eq!(bench.acknowledge("a", &[(1, 2, AckKind::Accept)]), Err(NotAcquired));
    assert_eq!(bench.acquire("b", 1, &found, WANTED), [[1, 4, 2]]);
    // Released unused: that was no delivery.
    bench.partition.release(|member| member == "b", Return::Unused, MAX_DELIVERIES);
    assert_eq!(bench.acquire("b", 1, &found, WANTED), [[1, 4, 2]]);
    bench.partition.release(|member| member == "b", Return::Lost, MAX_DELIVERIES);
    assert_eq!(bench.acquire("b", 1, &found, WANTED), [[1, 4, 3]]);
    let changes = bench.acknowledge("b", &[(1, 4, AckKind::Release)]).unwrap();
    assert_eq!(changes[0].state, Stored::Archived, "three deliveries are the limit");
    bench.acknowledge("a", &[(0, 1, AckKind::Accept)]).unwrap();
    assert_eq!((bench.ends(), bench.partition.deadline()), ((4, 4), None));
}

#[test]
fn the_log_may_move_past_the_start() {
    let mut bench = Bench::new(0);
    bench.acquire("a", 0, &[batch(0, 10)], WANTED);
    assert!(bench.partition.cut(offset(4)));
    assert!(!bench.partition.cut(offset(3)));
    assert_eq!(bench.ends(), (4, 10));
    bench.acknowledge("a", &[(2, 6, AckKind::Accept)]).unwrap();
    assert_eq!(bench.ends(), (6, 10));
    assert!(bench.partition.cut(offset(50)));
    assert_eq!(bench.ends(), (50, 50));
    // A read that began before.
    assert!(bench.acquire("a", 10, &[batch(10, 12)], WANTED).is_empty());
    assert_eq!(bench.acquire("a", 10, &[batch(10, 12), batch(48, 52)], WANTED), [[50, 52, 1]]);
    let mut other = Bench::new(5);
    assert!(other.acquire("a", 50, &[batch(50, 52)], WANTED).is_empty(), "there would be a hole");
    assert_eq!(other.ends(), (5, 5));
}

/// SplitMix64: the seed is all that a run depends on.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from)
    }
}

/// The expected state of each record.
#[derive(Clone, Debug, PartialEq)]
enum Model {
    Available(u16),
    Acquired(String, Instant, u16),
    Done,
}

const RECORDS: u64 = 300;

/// A random history of a share partition, compared with a model of single records, with crashes. A
/// crash keeps the persisted changes, all or up to the last answer.
fn live(seed: u64) {
    let mut random = Random(seed);
    let mut now = Instant::now();
    // The log: batches with and without records for members, some removed by compaction.
    let mut log: Vec<Found> = Vec::new();
    let mut at = 0;
    while at < RECORDS {
        let to = (at + 1 + random.below(12)).min(RECORDS);
        match random.below(8) {
            0 => {}
            1 => log.push(nothing(at, to)),
            _ => log.push(batch(at, to)),
        }
        at = to;
    }
    let is_record =
        |at: u64| log.iter().any(|f| f.is_for_members && (f.from.0..f.to.0).contains(&at));
    let mut log_start = 0;
    let mut model: BTreeMap<u64, Model> =
        (0..RECORDS).filter(|at| is_record(*at)).map(|at| (at, Model::Available(0))).collect();
    let mut partition = SharePartition::new(offset(0), []);
    let mut stored = Remembered::default();
    // Sometimes the whole state, as after a failed write.
    let mut writes = Random(!seed);
    let mut remember =
        |stored: &mut Remembered, partition: &SharePartition, changes: Vec<Change>| {
            let start = partition.start();
            if changes.is_empty() {
                return;
            }
            match writes.below(4) {
                0 => *stored = Remembered { start, changes: partition.remembered() },
                _ => stored.apply(Remembered { start, changes }),
            }
        };
    for step in 0..400 {
        let case = format!("seed {seed}, step {step}");
        let who = ["a", "b", "c"][random.below(3) as usize];
        match random.below(12) {
            0..=3 => {
                let max_in_flight = 40;
                let Some(from) = partition.next_read(max_in_flight) else { continue };
                let bytes = random.below(6) as usize;
                let visible = log.iter().filter(|f| f.to > from && f.to.0 > log_start);
                let found: Vec<Found> = visible.take(bytes).copied().collect();
                let wanted = Wanted {
                    max_records: 1 + random.below(20),
                    is_exact: random.below(2) == 0,
                    batch_records: 1 + random.below(20),
                    max_in_flight,
                };
                let until = now + LOCK;
                let before = partition.in_flight();
                let acquired = partition.acquire(from, &found, &member(who), until, wanted);
                let mut records = 0;
                for Acquired { from, to, deliveries } in acquired {
                    for at in from.0..to.0 {
                        let record = model.get_mut(&at).unwrap_or_else(|| panic!("{case}: {at}"));
                        let Model::Available(before) = *record else {
                            panic!("{case}: {at} is {record:?}");
                        };
                        assert_eq!(deliveries, before + 1, "{case}: {at}");
                        *record = Model::Acquired(who.into(), until, deliveries);
                        records += 1;
                    }
                }
                assert!(!wanted.is_exact || records <= wanted.max_records, "{case}");
                // After a crash, offsets without records count until they are determined again.
                assert!(partition.in_flight() <= max_in_flight.max(before), "{case}");
            }
            4..=7 => {
                let mine =
                    model.iter().filter(|(_, m)| matches!(m, Model::Acquired(w, ..) if w == who));
                let mut mine: Vec<u64> = mine.map(|(at, _)| *at).collect();
                if random.below(10) == 0 {
                    mine = vec![random.between(0, RECORDS + 5)];
                }
                let mut acks = Vec::new();
                for at in mine.into_iter().filter(|_| random.below(3) > 0).collect::<Vec<_>>() {
                    let kind = AckKind::from_number(random.below(5) as i8).unwrap();
                    acks.push(Ack { from: offset(at), to: offset(at + 1), kind });
                }
                let mut next = partition.clone();
                let result = next.acknowledge(who, &acks, now + LOCK, MAX_DELIVERIES);
                let start = partition.start().0;
                let acks: Vec<Ack> = acks.into_iter().filter(|ack| ack.from.0 >= start).collect();
                let is_allowed = acks.iter().all(|ack| {
                    matches!(model.get(&ack.from.0), Some(Model::Acquired(w, ..)) if w == who)
                });
                assert_eq!(result.is_ok(), is_allowed, "{case}: {acks:?}");
                let Ok(changes) = result else { continue };
                partition = next;
                for ack in acks {
                    let record = model.get_mut(&ack.from.0).unwrap();
                    let Model::Acquired(_, until, deliveries) = record else { unreachable!() };
                    match ack.kind {
                        AckKind::Renew => *until = now + LOCK,
                        AckKind::Release if *deliveries < MAX_DELIVERIES => {
                            *record = Model::Available(*deliveries);
                        }
                        _ => *record = Model::Done,
                    }
                }
                remember(&mut stored, &partition, changes);
            }
            8 => {
                let why = [Return::Unused, Return::Lost][random.below(2) as usize];
                let changes = partition.release(|member| member == who, why, MAX_DELIVERIES);
                for record in model.values_mut() {
                    let Model::Acquired(holder, _, deliveries) = record else { continue };
                    if holder == who {
                        *record = match why {
                            Return::Unused => Model::Available(*deliveries - 1),
                            Return::Lost if *deliveries < MAX_DELIVERIES => {
                                Model::Available(*deliveries)
                            }
                            Return::Lost => Model::Done,
                        };
                    }
                }
                remember(&mut stored, &partition, changes);
            }
            9 => {
                now += Duration::from_secs(random.below(20));
                let changes = partition.expire(now, MAX_DELIVERIES);
                for record in model.values_mut() {
                    if let Model::Acquired(_, until, deliveries) = *record
                        && until <= now
                    {
                        *record = match deliveries < MAX_DELIVERIES {
                            true => Model::Available(deliveries),
                            false => Model::Done,
                        };
                    }
                }
                remember(&mut stored, &partition, changes);
            }
            10 if random.below(4) == 0 => {
                log_start = (log_start + random.below(20)).min(RECORDS);
                partition.cut(offset(log_start));
                model.retain(|at, _| *at >= log_start);
            }
            10 => {}
            _ => {
                // A crash: through the bytes of a checkpoint. Locks are gone, and finished records
                // stay finished.
                partition = stored.live();
                partition.cut(offset(log_start));
                for (at, record) in &mut model {
                    let known = stored.changes.iter().find(|c| (c.from.0..c.to.0).contains(at));
                    let deliveries = known.map_or(0, |change| change.deliveries);
                    if let Model::Acquired(_, _, now) = record {
                        assert_eq!(
                            deliveries,
                            *now - 1,
                            "{case}: {at}, except for the last delivery"
                        );
                        *record = Model::Available(deliveries);
                    }
                    let is_done = *at < stored.start.0
                        || known.is_some_and(|change| change.state != Stored::Available);
                    assert_eq!(is_done, *record == Model::Done, "{case}: {at} after a crash");
                }
            }
        }
        check(&partition, &model, &case);
    }
}

fn check(partition: &SharePartition, model: &BTreeMap<u64, Model>, case: &str) {
    let mut at = partition.start;
    for run in &partition.runs {
        assert!(run.from == at && run.from < run.to, "{case}: {:?}", partition.runs);
        at = run.to;
        for at in run.from.0..run.to.0 {
            let shown = match &run.delivery {
                Delivery::Available => Model::Available(run.deliveries),
                Delivery::Acquired { member, until } => {
                    Model::Acquired(member.to_string(), *until, run.deliveries)
                }
                Delivery::Acknowledged | Delivery::Archived | Delivery::Nothing => Model::Done,
            };
            // The partition need not know yet that an offset has no record.
            if let Some(record) = model.get(&at) {
                assert_eq!(shown, *record, "{case}: {at}");
            } else {
                assert!(!matches!(shown, Model::Acquired(..)), "{case}: {at}");
            }
        }
    }
    let first = partition.runs.first();
    assert!(
        first.is_none_or(|run| !run.delivery.is_finished()),
        "{case}: the start does not advance"
    );
    let forgotten = model.range(..partition.start().0);
    assert!(forgotten.into_iter().all(|(_, r)| *r == Model::Done), "{case}: a record is lost");
    let unseen = model.range(partition.end().0..);
    assert!(unseen.into_iter().all(|(_, r)| *r == Model::Available(0)), "{case}: beyond the end");
}

/// `SHARE_SEED` replays one.
#[test]
fn random_histories_agree_with_a_model_of_single_records() {
    if let Ok(seed) = std::env::var("SHARE_SEED") {
        return live(seed.parse().unwrap());
    }
    for seed in 0..300 {
        live(seed);
    }
}
