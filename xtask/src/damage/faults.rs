//! The faults: pure functions from a server's files and random numbers to changes of the files.

use std::collections::BTreeSet;

use super::files::{
    CATALOGS, Content, DISK_CACHE, Edit, Files, MARK, OBJECT_STORE, OBJECTS, RESERVE, WAL, WAL_ID,
};
use super::layout::{
    Class, DATA_START, Extent, Object, PAGE, SLOTS, WalRecord, objects, wal_records,
};
use crate::rng::Rng;

/// Changes of the files, and the data that they may affect.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) edits: Vec<Edit>,
    /// A description of each change.
    pub(super) descriptions: Vec<String>,
    /// The offsets that the changes may make lost or unreadable; no others may be. `None` if
    /// unknown.
    pub(super) reach: Option<BTreeSet<Extent>>,
    /// Whether the server must start in spite of the damage.
    pub(super) must_start: bool,
    /// If not empty, a refusal to start must contain one of these names.
    pub(super) named: Vec<String>,
}

/// The files that a fault is applied to.
pub(super) struct Target<'a> {
    pub(super) files: &'a Files,
    /// Earlier states of the log and the object store.
    pub(super) earlier: &'a Files,
}

/// A type of damage.
pub(super) struct Fault {
    pub(super) name: &'static str,
    /// Whether it is also applied to a running server.
    pub(super) running: bool,
    /// Plans the damage. `None` if the files offer no target for it.
    pub(super) plan: fn(&Target<'_>, &mut Rng) -> Option<Plan>,
}

const fn fault(
    name: &'static str,
    running: bool,
    plan: fn(&Target<'_>, &mut Rng) -> Option<Plan>,
) -> Fault {
    Fault { name, running, plan }
}

/// All faults. A replay depends on their order: append new ones at the end.
pub(super) const FAULTS: &[Fault] = &[
    fault("log: flip in a record", true, |s, r| in_record(s, r, &[Class::Data], false)),
    fault("log: flip in a transactional record", true, |s, r| {
        in_record(s, r, &[Class::Transactional], false)
    }),
    fault("log: flip in a marker", true, |s, r| in_record(s, r, &[Class::Marker], false)),
    fault("log: flip in the server's own record", true, |s, r| {
        in_record(s, r, &[Class::State], false)
    }),
    fault("log: flip in a record's header", true, |s, r| {
        in_record(s, r, &Class::NOT_PADDING, true)
    }),
    fault("log: flip in padding", false, |s, r| in_record(s, r, &[Class::Padding], false)),
    fault("log: flip in a partition's last record", true, |s, r| last_of_stream(s, r, false)),
    fault("log: flip in a partition's last header", false, |s, r| last_of_stream(s, r, true)),
    fault("log: flip in the last record", false, |s, r| last_record(s, r, false)),
    fault("log: flip in the last record's header", false, |s, r| last_record(s, r, true)),
    fault("log: many flips", true, many_flips),
    fault("log: a zeroed page", true, |s, r| log_pages(s, r, 1, zeroes)),
    fault("log: zeroed pages", true, |s, r| {
        let pages = 2 + r.below(15);
        log_pages(s, r, pages, zeroes)
    }),
    fault("log: the last page zeroed", false, last_page_zeroed),
    fault("log: the end zeroed", false, end_zeroed),
    fault("log: all records zeroed", false, all_zeroed),
    fault("log: a page of garbage", true, |s, r| log_pages(s, r, 1, garbage)),
    fault("log: two pages swapped", true, log_pages_swapped),
    fault("log: two records swapped", false, records_swapped),
    fault("log: a record repeated in place of another", false, record_repeated),
    fault("log: a page of an earlier time", false, earlier_page),
    fault("log: flip behind the end", false, after_the_end),
    fault("log: flip in one header", false, |s, r| slots(s, r, 1, Slots::Flip)),
    fault("log: flips in both headers", false, |s, r| slots(s, r, 2, Slots::Flip)),
    fault("log: one header zeroed", true, |s, r| slots(s, r, 1, Slots::Zero)),
    fault("log: both headers zeroed", false, |s, r| slots(s, r, 2, Slots::Zero)),
    fault("log: headers swapped", false, |s, r| slots(s, r, 2, Slots::Swap)),
    fault("log: headers of an earlier time", false, |s, r| slots(s, r, 2, Slots::Earlier)),
    fault("log: one header of an earlier time", false, |s, r| slots(s, r, 1, Slots::Earlier)),
    fault("log: truncated", false, log_truncated),
    fault("log: truncated to nothing", false, |s, _| truncated(s, WAL, 0, None)),
    fault("log: lost", true, |s, _| removed(s, WAL)),
    fault("log: of an earlier time", false, |s, _| earlier(s, WAL)),
    fault("object: flip in a block", true, |s, r| in_object(s, r, Part::Block, flip_of)),
    fault("object: flips in many blocks", true, many_blocks),
    fault("object: a zeroed page", true, |s, r| in_object(s, r, Part::Block, zero_page_of)),
    fault("object: garbage in a block", true, |s, r| in_object(s, r, Part::Block, garbage_of)),
    fault("object: flip in the header", true, |s, r| in_object(s, r, Part::Header, flip_of)),
    fault("object: two blocks swapped", true, blocks_swapped),
    fault("object: two objects swapped", true, objects_swapped),
    fault("object: truncated", true, object_truncated),
    fault("object: empty", true, |s, r| whole_object(s, r, FileDamage::Empty)),
    fault("object: longer than it was", false, |s, r| whole_object(s, r, FileDamage::Longer)),
    fault("object: lost", true, |s, r| whole_object(s, r, FileDamage::Lost)),
    fault("object: all lost", true, |s, _| all_lost(s, OBJECTS)),
    fault("index: flip", true, |s, r| in_object(s, r, Part::Index, flip_of)),
    fault("index: zeroed", true, |s, r| in_object(s, r, Part::Index, zero_all_of)),
    fault("index: flip in the footer", true, |s, r| in_object(s, r, Part::Footer, flip_of)),
    fault("index: of another object", true, index_of_another),
    fault("object store: lost", true, |s, _| all_lost(s, OBJECT_STORE)),
    fault("object store: flip in its mark", true, |s, r| needless(s, r, MARK, FileDamage::Flip)),
    fault("object store: its mark lost", true, |s, r| needless(s, r, MARK, FileDamage::Lost)),
    fault("object store: its reserve lost", true, |s, r| needless(s, r, RESERVE, FileDamage::Lost)),
    fault("catalog: flip in the newest object", true, |s, r| {
        of_chain(s, r, true, FileDamage::Flip)
    }),
    fault("catalog: the newest object truncated", true, |s, r| {
        of_chain(s, r, true, FileDamage::Truncated)
    }),
    fault("catalog: the newest object empty", false, |s, r| {
        of_chain(s, r, true, FileDamage::Empty)
    }),
    fault("catalog: the newest object lost", true, |s, r| of_chain(s, r, true, FileDamage::Lost)),
    fault("catalog: flip in an object", true, |s, r| of_chain(s, r, false, FileDamage::Flip)),
    fault("catalog: many flips in an object", false, |s, r| {
        of_chain(s, r, false, FileDamage::ManyFlips)
    }),
    fault("catalog: an object zeroed", true, |s, r| of_chain(s, r, false, FileDamage::Zero)),
    fault("catalog: an object truncated", false, |s, r| {
        of_chain(s, r, false, FileDamage::Truncated)
    }),
    fault("catalog: an object longer than it was", false, |s, r| {
        of_chain(s, r, false, FileDamage::Longer)
    }),
    fault("catalog: an object lost", true, |s, r| of_chain(s, r, false, FileDamage::Lost)),
    fault("catalog: two objects swapped", true, chain_swapped),
    fault("catalog: flip in the newest snapshot", true, |s, r| snapshot(s, r, FileDamage::Flip)),
    fault("catalog: the newest snapshot zeroed", false, |s, r| snapshot(s, r, FileDamage::Zero)),
    fault("catalog: the newest snapshot truncated", false, |s, r| {
        snapshot(s, r, FileDamage::Truncated)
    }),
    fault("catalog: the newest snapshot lost", true, |s, r| snapshot(s, r, FileDamage::Lost)),
    fault("catalog: all snapshots lost", true, snapshots_lost),
    fault("catalog: lost", true, |s, _| all_lost(s, CATALOGS)),
    fault("catalog: of an earlier time", true, earlier_catalog),
    fault("log id: flip", true, |s, r| damage_file(s.files, WAL_ID, r, FileDamage::Flip)),
    fault("log id: empty", false, |s, r| damage_file(s.files, WAL_ID, r, FileDamage::Empty)),
    fault("log id: lost", true, |s, r| needless(s, r, WAL_ID, FileDamage::Lost)),
    fault("disk cache: flip", true, |s, r| cache_file(s, r, FileDamage::Flip)),
    fault("disk cache: many flips", true, |s, r| cache_file(s, r, FileDamage::ManyFlips)),
    fault("disk cache: a zeroed page", true, |s, r| cache_file(s, r, FileDamage::Zero)),
    fault("disk cache: the first page zeroed", true, |s, r| {
        cache_file(s, r, FileDamage::ZeroFirst)
    }),
    fault("disk cache: two pages swapped", true, |s, r| cache_file(s, r, FileDamage::Swap)),
    fault("disk cache: truncated", true, |s, r| cache_file(s, r, FileDamage::Truncated)),
    fault("disk cache: a file lost", true, |s, r| cache_file(s, r, FileDamage::Lost)),
    fault("disk cache: lost", true, cache_lost),
    fault("log: flip in changes of the catalog", true, |s, r| {
        in_record(s, r, &[Class::Catalog], false)
    }),
    fault("object: flip in the directory", true, |s, r| in_object(s, r, Part::Directory, flip_of)),
];

#[derive(Clone, Copy)]
enum FileDamage {
    Flip,
    ManyFlips,
    Zero,
    ZeroFirst,
    Swap,
    Truncated,
    Empty,
    Longer,
    Lost,
}

#[derive(Clone, Copy, PartialEq)]
enum Slots {
    Flip,
    Zero,
    Swap,
    Earlier,
}

#[derive(Clone, Copy)]
enum Part {
    Header,
    Block,
    Directory,
    Index,
    Footer,
}

impl Plan {
    /// A plan that may affect only the offsets that are added to its reach.
    fn bounded() -> Self {
        Self { reach: Some(BTreeSet::new()), ..Self::default() }
    }

    fn write(&mut self, file: &str, at: u64, bytes: Vec<u8>, what: &str) {
        let end = at + bytes.len() as u64;
        self.descriptions.push(format!("{file}, bytes {at}..{end}: {what}"));
        self.edits.push(Edit::Write { file: file.to_owned(), at, bytes });
    }

    fn flip(&mut self, files: &Files, file: &str, at: u64, rng: &mut Rng) -> Option<()> {
        let content = files.get(file).filter(|content| at < content.len)?;
        let bit = rng.below(8);
        let byte = content.range(at, 1)[0] ^ 1 << bit;
        self.write(file, at, vec![byte], &format!("bit {bit} flipped"));
        Some(())
    }

    fn reaches(&mut self, extents: impl IntoIterator<Item = Extent>) {
        if let Some(reach) = &mut self.reach {
            reach.extend(extents);
        }
    }

    /// Adds all records that have a byte in a range of the log to the reach.
    fn reaches_log(&mut self, records: &[WalRecord], at: u64, len: u64) {
        let touched = records.iter().filter(|each| each.at < at + len && each.at + each.len > at);
        self.reaches(touched.map(|each| each.extent));
    }

    fn reaches_object(&mut self, object: &Object) {
        self.reaches(object.blocks.iter().map(|block| block.extent));
    }
}

fn pick<'a, T>(of: &'a [T], rng: &mut Rng) -> Option<&'a T> {
    if of.is_empty() { None } else { of.get(rng.below(of.len() as u64) as usize) }
}

fn zeroes(len: u64, _: &mut Rng) -> Vec<u8> {
    vec![0; len as usize]
}

fn garbage(len: u64, rng: &mut Rng) -> Vec<u8> {
    (0..len).map(|_| rng.below(256) as u8).collect()
}

fn flip_record(
    target: &Target<'_>,
    rng: &mut Rng,
    record: &WalRecord,
    in_header: bool,
) -> Option<Plan> {
    let (at, len) = match in_header {
        true => (record.at, 32),
        false => record.payload(),
    };
    if len == 0 {
        return None;
    }
    let mut plan = Plan::bounded();
    plan.flip(target.files, WAL, at + rng.below(len), rng)?;
    if record.class != Class::Padding {
        plan.reaches([record.extent]);
    }
    Some(plan)
}

fn in_record(
    target: &Target<'_>,
    rng: &mut Rng,
    classes: &[Class],
    in_header: bool,
) -> Option<Plan> {
    let mut records = wal_records(target.files);
    records.retain(|record| classes.contains(&record.class));
    let record = pick(&records, rng)?;
    flip_record(target, rng, record, in_header)
}

fn last_of_stream(target: &Target<'_>, rng: &mut Rng, in_header: bool) -> Option<Plan> {
    let mut records = wal_records(target.files);
    let is_of_partition = |record: &WalRecord| !record.class.is_of_server();
    records.retain(is_of_partition);
    let streams: BTreeSet<u64> = records.iter().map(|record| record.extent.stream).collect();
    let streams: Vec<u64> = streams.into_iter().collect();
    let stream = *pick(&streams, rng)?;
    let last = records.iter().rfind(|record| record.extent.stream == stream)?;
    flip_record(target, rng, last, in_header)
}

fn last_record(target: &Target<'_>, rng: &mut Rng, in_header: bool) -> Option<Plan> {
    let records = wal_records(target.files);
    let last = records.iter().rfind(|record| record.class != Class::Padding)?;
    flip_record(target, rng, last, in_header)
}

/// Returns the device offset at which the log's records end.
fn log_end(records: &[WalRecord]) -> Option<u64> {
    records.last().map(|last| last.at + last.len)
}

fn many_flips(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    let (start, end) = (records.first()?.at, log_end(&records)?);
    let mut plan = Plan::bounded();
    for _ in 0..2 + rng.below(20) {
        let at = start + rng.below(end - start);
        plan.flip(target.files, WAL, at, rng)?;
        plan.reaches_log(&records, at, 1);
    }
    Some(plan)
}

fn log_pages(
    target: &Target<'_>,
    rng: &mut Rng,
    pages: u64,
    bytes: fn(u64, &mut Rng) -> Vec<u8>,
) -> Option<Plan> {
    let records = wal_records(target.files);
    let (start, end) = (records.first()?.at / PAGE, log_end(&records)?.div_ceil(PAGE));
    let first = start + rng.below(end - start);
    let pages = pages.min(end - first);
    let mut plan = Plan::bounded();
    plan.write(WAL, first * PAGE, bytes(pages * PAGE, rng), "overwritten");
    plan.reaches_log(&records, first * PAGE, pages * PAGE);
    Some(plan)
}

fn zero_from(records: &[WalRecord], from: u64) -> Option<Plan> {
    let end = log_end(records)?;
    let mut plan = Plan::bounded();
    plan.write(WAL, from, vec![0; (end.next_multiple_of(PAGE) - from) as usize], "zeroed");
    plan.reaches_log(records, from, end - from);
    Some(plan)
}

fn last_page_zeroed(target: &Target<'_>, _: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    zero_from(&records, (log_end(&records)? - 1) / PAGE * PAGE)
}

fn end_zeroed(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    let from = pick(&records, rng)?.at / PAGE * PAGE;
    zero_from(&records, from)
}

fn all_zeroed(target: &Target<'_>, _: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    zero_from(&records, records.first()?.at / PAGE * PAGE)
}

fn log_pages_swapped(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    let (start, end) = (records.first()?.at / PAGE, log_end(&records)?.div_ceil(PAGE));
    let one = start + rng.below(end - start);
    let other = start + rng.below(end - start);
    if one == other {
        return None;
    }
    let mut plan = Plan::bounded();
    for (to, from) in [(one, other), (other, one)] {
        let bytes = target.files.get(WAL)?.range(from * PAGE, PAGE);
        plan.write(WAL, to * PAGE, bytes, &format!("from byte {}", from * PAGE));
        plan.reaches_log(&records, to * PAGE, PAGE);
    }
    Some(plan)
}

fn data_records(target: &Target<'_>) -> Vec<WalRecord> {
    let mut records = wal_records(target.files);
    records.retain(|record| record.class != Class::Padding);
    records
}

fn records_swapped(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = data_records(target);
    let one = pick(&records, rng)?;
    let equals: Vec<&WalRecord> =
        records.iter().filter(|each| each.len == one.len && each.at != one.at).collect();
    let other = *pick(&equals, rng)?;
    let mut plan = Plan::bounded();
    for (to, from) in [(one, other), (other, one)] {
        let bytes = target.files.get(WAL)?.range(from.at, from.len);
        plan.write(WAL, to.at, bytes, &format!("from byte {}", from.at));
        plan.reaches([to.extent]);
    }
    Some(plan)
}

fn record_repeated(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = data_records(target);
    let from = pick(&records, rng)?;
    let to = pick(&records, rng).filter(|to| to.at != from.at)?;
    let bytes = target.files.get(WAL)?.range(from.at, from.len);
    let mut plan = Plan::bounded();
    plan.reaches_log(&records, to.at, from.len);
    plan.write(WAL, to.at, bytes, &format!("from byte {}", from.at));
    Some(plan)
}

fn earlier_page(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    let (now, before) = (target.files.get(WAL)?, target.earlier.get(WAL)?);
    let (start, end) = (DATA_START / PAGE, log_end(&records)?.div_ceil(PAGE));
    let differs = |page: &u64| now.range(page * PAGE, PAGE) != before.range(page * PAGE, PAGE);
    let pages: Vec<u64> = (start..end).filter(differs).collect();
    let page = *pick(&pages, rng)?;
    let mut plan = Plan::bounded();
    plan.write(WAL, page * PAGE, before.range(page * PAGE, PAGE), "an earlier state");
    plan.reaches_log(&records, page * PAGE, PAGE);
    Some(plan)
}

fn after_the_end(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let records = wal_records(target.files);
    let end = log_end(&records)?.next_multiple_of(PAGE);
    let mut plan = Plan::bounded();
    plan.flip(target.files, WAL, end + rng.below(1 << 20), rng)?;
    Some(plan)
}

fn slots(target: &Target<'_>, rng: &mut Rng, count: usize, how: Slots) -> Option<Plan> {
    let wal = target.files.get(WAL)?;
    let first = rng.below(2) as usize;
    let mut plan = Plan::bounded();
    for slot in [first, 1 - first].into_iter().take(count) {
        let at = SLOTS[slot];
        match how {
            Slots::Flip => plan.flip(target.files, WAL, at + rng.below(128), rng)?,
            Slots::Zero => plan.write(WAL, at, zeroes(PAGE, rng), "a header zeroed"),
            Slots::Swap => {
                plan.write(WAL, at, wal.range(SLOTS[1 - slot], PAGE), "the other header");
            }
            Slots::Earlier => {
                let earlier = target.earlier.get(WAL)?.range(at, PAGE);
                plan.write(WAL, at, earlier, "an earlier header");
            }
        }
    }
    Some(plan)
}

fn log_truncated(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let pages = target.files.get(WAL)?.len / PAGE;
    truncated(target, WAL, rng.below(pages) * PAGE, None)
}

fn truncated(
    target: &Target<'_>,
    file: &str,
    len: u64,
    reach: Option<BTreeSet<Extent>>,
) -> Option<Plan> {
    let before = target.files.get(file).filter(|content| content.len > len)?.len;
    Some(Plan {
        edits: vec![Edit::Truncate { file: file.to_owned(), len }],
        descriptions: vec![format!("{file}: truncated from {before} to {len} bytes")],
        reach,
        ..Plan::default()
    })
}

fn removed(target: &Target<'_>, file: &str) -> Option<Plan> {
    target.files.get(file)?;
    Some(Plan {
        edits: vec![Edit::Remove { file: file.to_owned() }],
        descriptions: vec![format!("{file}: removed")],
        ..Plan::default()
    })
}

fn earlier(target: &Target<'_>, file: &str) -> Option<Plan> {
    let content = target.earlier.get(file)?.clone();
    Some(Plan {
        edits: vec![Edit::Replace { file: file.to_owned(), content }],
        descriptions: vec![format!("{file}: replaced by an earlier state")],
        ..Plan::default()
    })
}

fn flip_of(plan: &mut Plan, files: &Files, file: &str, at: u64, len: u64, rng: &mut Rng) {
    plan.flip(files, file, at + rng.below(len), rng);
}

fn zero_page_of(plan: &mut Plan, _: &Files, file: &str, at: u64, len: u64, rng: &mut Rng) {
    let zeroed = len.min(PAGE);
    let at = at + rng.below(len - zeroed + 1);
    plan.write(file, at, zeroes(zeroed, rng), "zeroed");
}

fn garbage_of(plan: &mut Plan, _: &Files, file: &str, at: u64, len: u64, rng: &mut Rng) {
    let bytes = len.min(1 + rng.below(PAGE));
    let at = at + rng.below(len - bytes + 1);
    plan.write(file, at, garbage(bytes, rng), "overwritten");
}

fn zero_all_of(plan: &mut Plan, _: &Files, file: &str, at: u64, len: u64, rng: &mut Rng) {
    plan.write(file, at, zeroes(len, rng), "zeroed");
}

fn in_object(
    target: &Target<'_>,
    rng: &mut Rng,
    part: Part,
    damage: fn(&mut Plan, &Files, &str, u64, u64, &mut Rng),
) -> Option<Plan> {
    let objects = objects(target.files);
    let object = pick(&objects, rng)?;
    let mut plan = Plan::bounded();
    let (at, len) = match part {
        Part::Header => (0, 32),
        Part::Directory => object.directory,
        Part::Footer => object.footer,
        Part::Index => {
            plan.reaches_object(object);
            object.index
        }
        Part::Block => {
            let block = pick(&object.blocks, rng)?;
            plan.reaches([block.extent]);
            (block.at, block.len)
        }
    };
    damage(&mut plan, target.files, &object.name, at, len, rng);
    Some(plan)
}

fn many_blocks(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let mut all = in_object(target, rng, Part::Block, flip_of)?;
    for _ in 0..1 + rng.below(8) {
        let other = in_object(target, rng, Part::Block, flip_of)?;
        all.edits.extend(other.edits);
        all.descriptions.extend(other.descriptions);
        all.reaches(other.reach?);
    }
    Some(all)
}

fn blocks_swapped(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let objects = objects(target.files);
    let (one, other) = (pick(&objects, rng)?, pick(&objects, rng)?);
    let (block, others) = (pick(&one.blocks, rng)?, pick(&other.blocks, rng)?);
    if one.name == other.name && block.at == others.at {
        return None;
    }
    // The length that both blocks have.
    let len = block.len.min(others.len);
    let mut plan = Plan::bounded();
    for ((to, at), (from, from_at)) in
        [((one, block.at), (other, others.at)), ((other, others.at), (one, block.at))]
    {
        let bytes = target.files.get(&from.name)?.range(from_at, len);
        plan.write(&to.name, at, bytes, &format!("from byte {from_at} of {}", from.name));
    }
    plan.reaches([block.extent, others.extent]);
    Some(plan)
}

fn objects_swapped(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let objects = objects(target.files);
    let (one, other) = (pick(&objects, rng)?, pick(&objects, rng)?);
    if one.name == other.name {
        return None;
    }
    let mut plan = Plan::bounded();
    for (to, from) in [(one, other), (other, one)] {
        let (file, content) = (to.name.clone(), target.files.get(&from.name)?.clone());
        plan.edits.push(Edit::Replace { file, content });
        plan.descriptions.push(format!("{}: the content of {}", to.name, from.name));
        plan.reaches_object(to);
    }
    Some(plan)
}

fn object_truncated(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let objects = objects(target.files);
    let object = pick(&objects, rng)?;
    // The index is at the object's end.
    let reach = object.blocks.iter().map(|block| block.extent).collect();
    truncated(target, &object.name, rng.below(object.len), Some(reach))
}

fn whole_object(target: &Target<'_>, rng: &mut Rng, damage: FileDamage) -> Option<Plan> {
    let objects = objects(target.files);
    let object = pick(&objects, rng)?;
    let mut plan = match damage {
        FileDamage::Lost => removed(target, &object.name)?,
        FileDamage::Longer => {
            let mut plan = Plan::default();
            plan.write(&object.name, object.len, garbage(1 + rng.below(PAGE), rng), "appended");
            plan
        }
        _ => truncated(target, &object.name, 0, None)?,
    };
    plan.reach = Some(BTreeSet::new());
    if !matches!(damage, FileDamage::Longer) {
        plan.reaches_object(object);
    }
    Some(plan)
}

fn all_lost(target: &Target<'_>, directory: &str) -> Option<Plan> {
    target.files.below(directory).next()?;
    Some(Plan {
        edits: vec![Edit::RemoveAll { directory: directory.to_owned() }],
        descriptions: vec![format!("{directory}: removed")],
        ..Plan::default()
    })
}

fn index_of_another(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let objects = objects(target.files);
    let (to, from) = (pick(&objects, rng)?, pick(&objects, rng)?);
    if to.name == from.name {
        return None;
    }
    let len = to.index.1.min(from.index.1);
    let bytes = target.files.get(&from.name)?.range(from.index.0, len);
    let mut plan = Plan::bounded();
    plan.reaches_object(to);
    plan.write(&to.name, to.index.0, bytes, &format!("the index of {}", from.name));
    Some(plan)
}

/// Damages a file that the server can do without.
fn needless(target: &Target<'_>, rng: &mut Rng, file: &str, damage: FileDamage) -> Option<Plan> {
    let plan = damage_file(target.files, file, rng, damage)?;
    Some(Plan { reach: Some(BTreeSet::new()), must_start: true, ..plan })
}

/// Returns the number in the name of an object of the catalog.
fn number_of(name: &str) -> Option<u64> {
    let number = name.rsplit('/').next()?.split('-').next()?;
    u64::from_str_radix(number, 16).ok()
}

/// The number of the newest snapshot of the catalog.
fn newest_snapshot(files: &Files) -> u64 {
    let snapshots = files.catalog("snapshots");
    snapshots.iter().filter_map(|name| number_of(name)).max().unwrap_or(0)
}

/// Picks a fence or a delta, half of the time one that no snapshot replaces.
fn pick_in_chain<'a>(target: &Target<'a>, rng: &mut Rng) -> Option<&'a str> {
    let mut chain = target.files.catalog("chain");
    if rng.below(2) == 0 {
        let newest = newest_snapshot(target.files);
        chain.retain(|file| number_of(file).is_some_and(|number| number >= newest));
    }
    pick(&chain, rng).copied()
}

/// Completes a plan with damage to fences and deltas: all records are still there. If a snapshot is
/// after them, they are not needed; otherwise a refusal names one of them.
fn damages_chain(target: &Target<'_>, damaged: &[&str], plan: Plan) -> Plan {
    let newest = newest_snapshot(target.files);
    let name = |file: &&str| {
        let name = file.strip_prefix(OBJECT_STORE).unwrap_or(file);
        name.trim_start_matches('/').to_owned()
    };
    Plan {
        reach: Some(BTreeSet::new()),
        must_start: damaged.iter().all(|file| number_of(file).is_some_and(|it| it < newest)),
        named: damaged.iter().map(name).collect(),
        ..plan
    }
}

fn of_chain(target: &Target<'_>, rng: &mut Rng, newest: bool, damage: FileDamage) -> Option<Plan> {
    let last = target.files.catalog("chain").pop()?;
    let file = if newest { last } else { pick_in_chain(target, rng)? };
    let plan = damage_file(target.files, file, rng, damage)?;
    let mut plan = damages_chain(target, &[file], plan);
    if matches!(damage, FileDamage::Lost) && file == last {
        // The catalog is as it was before, which the log shows.
        plan.named.clear();
    }
    Some(plan)
}

fn chain_swapped(target: &Target<'_>, rng: &mut Rng) -> Option<Plan> {
    let (one, other) = (pick_in_chain(target, rng)?, pick_in_chain(target, rng)?);
    if one == other {
        return None;
    }
    let mut plan = Plan::default();
    for (to, from) in [(one, other), (other, one)] {
        let (file, content) = (to.to_owned(), target.files.get(from)?.clone());
        plan.edits.push(Edit::Replace { file, content });
        plan.descriptions.push(format!("{to}: the content of {from}"));
    }
    Some(damages_chain(target, &[one, other], plan))
}

/// A snapshot is passed over if it is damaged: the objects before it are kept for a day.
fn snapshot(target: &Target<'_>, rng: &mut Rng, damage: FileDamage) -> Option<Plan> {
    let newest = target.files.catalog("snapshots").pop()?;
    needless(target, rng, newest, damage)
}

fn snapshots_lost(target: &Target<'_>, _: &mut Rng) -> Option<Plan> {
    let mut plan = Plan { must_start: true, ..Plan::bounded() };
    for file in target.files.catalog("snapshots") {
        plan.edits.push(Edit::Remove { file: file.to_owned() });
        plan.descriptions.push(format!("{file}: removed"));
    }
    (!plan.edits.is_empty()).then_some(plan)
}

/// Objects of the catalog never change, so it is as before without the later ones.
fn earlier_catalog(target: &Target<'_>, _: &mut Rng) -> Option<Plan> {
    let mut plan = Plan::bounded();
    for file in target.files.below(CATALOGS).filter(|file| target.earlier.get(file).is_none()) {
        plan.edits.push(Edit::Remove { file: file.to_owned() });
        plan.descriptions.push(format!("{file}: removed"));
    }
    (!plan.edits.is_empty()).then_some(plan)
}

fn cache_file(target: &Target<'_>, rng: &mut Rng, damage: FileDamage) -> Option<Plan> {
    let is_used = |(name, content): &(&String, &Content)| {
        name.starts_with(DISK_CACHE) && !content.bytes.is_empty()
    };
    let names: Vec<&str> =
        target.files.0.iter().filter(is_used).map(|(name, _)| name.as_str()).collect();
    // Everything in the cache is also in the objects.
    let name = pick(&names, rng)?;
    needless(target, rng, name, damage)
}

/// Plans damage to a file regardless of its format.
fn damage_file(files: &Files, file: &str, rng: &mut Rng, damage: FileDamage) -> Option<Plan> {
    let content = files.get(file)?;
    // Pages of zeroes are usually free.
    let is_used = |page: &u64| content.range(page * PAGE, PAGE).iter().any(|byte| *byte != 0);
    let pages: Vec<u64> = (0..content.len.div_ceil(PAGE)).filter(is_used).collect();
    let any = |rng: &mut Rng| pick(&pages, rng).copied();
    let mut plan = Plan::default();
    match damage {
        FileDamage::Flip | FileDamage::ManyFlips => {
            let flips = match damage {
                FileDamage::ManyFlips => 2 + rng.below(30),
                _ => 1,
            };
            for _ in 0..flips {
                let page = any(rng)? * PAGE;
                let at = page + rng.below(PAGE.min(content.len - page));
                plan.flip(files, file, at, rng)?;
            }
        }
        FileDamage::Zero | FileDamage::ZeroFirst => {
            let page = if let FileDamage::Zero = damage { any(rng)? } else { 0 };
            let len = PAGE.min(content.len - page * PAGE);
            plan.write(file, page * PAGE, zeroes(len, rng), "zeroed");
        }
        FileDamage::Swap => {
            let (one, other) = (any(rng)?, any(rng)?);
            if one == other {
                return None;
            }
            for (to, from) in [(one, other), (other, one)] {
                let bytes = content.range(from * PAGE, PAGE);
                plan.write(file, to * PAGE, bytes, &format!("from byte {}", from * PAGE));
            }
        }
        FileDamage::Truncated => {
            let len = rng.below(content.len);
            plan = truncated(&Target { files, earlier: files }, file, len, None)?;
        }
        FileDamage::Empty => plan = truncated(&Target { files, earlier: files }, file, 0, None)?,
        FileDamage::Longer => {
            plan.write(file, content.len, garbage(1 + rng.below(PAGE), rng), "appended");
        }
        FileDamage::Lost => plan = removed(&Target { files, earlier: files }, file)?,
    }
    Some(plan)
}

fn cache_lost(target: &Target<'_>, _: &mut Rng) -> Option<Plan> {
    if !target.files.0.keys().any(|name| name.starts_with(DISK_CACHE)) {
        return None;
    }
    Some(Plan {
        edits: vec![Edit::RemoveAll { directory: DISK_CACHE.to_owned() }],
        descriptions: vec![format!("{DISK_CACHE}: removed")],
        reach: Some(BTreeSet::new()),
        must_start: true,
        ..Plan::default()
    })
}

#[cfg(test)]
#[path = "faults_tests.rs"]
mod tests;
