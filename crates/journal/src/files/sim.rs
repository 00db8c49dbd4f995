//! A directory in memory that can lose what was not synced.
//!
//! Of the names created, changed or removed since the directory was synced, a power cut keeps those
//! up to some point of their order, like a journaling file system; but names removed before a
//! failed sync may each reappear independently. Of unsynced data, each sector survives or not
//! independently, which models reordering in a disk's cache.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use alluvium_device::sim::{Random, SECTOR_BYTES};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::{Directory, File, ReadAt};

#[derive(Clone, Default)]
pub(crate) struct SimDirectory {
    state: Arc<Mutex<State>>,
    removals: Arc<Gate>,
    writes: Arc<Gate>,
    after_reads: Arc<Mutex<Option<Hook>>>,
    after_read: Arc<Mutex<Option<Hook>>>,
    path: PathBuf,
}

type Hook = Box<dyn FnOnce() + Send>;

/// Blocks removals of journals, or writes.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    is_shut: bool,
    /// A thread is blocked at it.
    is_waited_at: bool,
}

#[derive(Clone, Default)]
struct State {
    files: Vec<SimContents>,
    /// Index into `files`, by name.
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    unsynced_names: Vec<Change>,
    /// Bytes that may still be allocated.
    space_bytes: Option<u64>,
    /// The maximum number of journals: a file stays open as long as it exists.
    max_journals: Option<usize>,
    /// The directory's own name is durable.
    has_durable_name: bool,
    /// Writes and syncs fail.
    is_broken: bool,
    /// They fail after this many of them.
    steps_left: Option<u64>,
    /// Removals count as steps.
    are_removals_steps: bool,
    /// Number of reads still to fail.
    failing_reads: u64,
    /// Number of reads of all files.
    reads: u64,
    /// Number of truncations.
    cuts: u64,
    /// Number of syncs of the directory still to fail.
    failing_syncs: u64,
    /// Number of removals of journals still to fail.
    failing_removals: u64,
    /// Files removed before a failed sync: a power cut may restore them, independently of later
    /// names.
    doubtful: BTreeMap<String, usize>,
}

#[derive(Clone)]
enum Change {
    Make(String, usize),
    Rename(String, String),
    Remove(String),
}

#[derive(Clone, Default)]
struct SimContents {
    /// Counts the open handles of the file, plus this one.
    handles: Arc<()>,
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Byte ranges of `now` written since the last sync.
    unsynced: Vec<(usize, usize)>,
    /// Byte ranges that the disk cannot deliver.
    unreadable: Vec<Range<usize>>,
}

impl Change {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Make(name, file) => {
                names.insert(name.clone(), *file);
            }
            Self::Rename(from, to) => {
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                }
            }
            Self::Remove(name) => {
                names.remove(name);
            }
        }
    }
}

impl State {
    /// Called before each operation that may fail.
    fn step(&mut self) -> io::Result<()> {
        match &mut self.steps_left {
            Some(0) => self.is_broken = true,
            Some(left) => *left -= 1,
            None => {}
        }
        if self.is_broken { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
    }

    /// Makes the disk work again, for the next process.
    fn repair(&mut self) {
        self.is_broken = false;
        self.steps_left = None;
        self.are_removals_steps = false;
        self.failing_reads = 0;
        self.failing_syncs = 0;
        self.failing_removals = 0;
    }

    fn journals(&self) -> usize {
        self.names.keys().filter(|name| name.ends_with(".journal")).count()
    }

    /// Returns whether this many more bytes can be allocated.
    fn has_space(&self, more_bytes: u64) -> bool {
        more_bytes <= self.free_bytes()
    }

    fn free_bytes(&self) -> u64 {
        let used: usize = self.names.values().map(|file| self.files[*file].now.len()).sum();
        self.space_bytes.map_or(u64::MAX, |space_bytes| space_bytes.saturating_sub(used as u64))
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.unsynced_names.push(change);
    }

    /// Opens an existing file.
    fn open(&self, file: usize) -> Arc<()> {
        self.files[file].handles.clone()
    }

    /// Drops the contents of files without a name that are not open: tests write more than there is
    /// memory.
    fn forget_removed(&mut self) {
        let named: BTreeSet<usize> =
            self.names.values().chain(self.doubtful.values()).copied().collect();
        for (index, file) in self.files.iter_mut().enumerate() {
            if !named.contains(&index) && Arc::strong_count(&file.handles) == 1 {
                *file = SimContents::default();
            }
        }
    }
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock();
        while state.is_shut {
            state.is_waited_at = true;
            self.changed.notify_all();
            self.changed.wait(&mut state);
        }
    }

    fn shut(&self) {
        self.state.lock().is_shut = true;
    }

    /// Waits until a thread is blocked at the gate.
    fn wait(&self) {
        let mut state = self.state.lock();
        while !state.is_waited_at {
            self.changed.wait(&mut state);
        }
    }

    fn open(&self) {
        *self.state.lock() = GateState::default();
        self.changed.notify_all();
    }
}

impl SimDirectory {
    /// Creates an empty directory with this path.
    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Blocks removals of journals until [`Self::allow_removals`].
    pub(crate) fn hold_removals(&self) {
        self.removals.shut();
    }

    /// Waits until the removal of a journal is blocked.
    pub(crate) fn wait_for_removal(&self) {
        self.removals.wait();
    }

    pub(crate) fn allow_removals(&self) {
        self.removals.open();
    }

    /// Blocks writes to files until [`Self::allow_writes`].
    pub(crate) fn hold_writes(&self) {
        self.writes.shut();
    }

    pub(crate) fn allow_writes(&self) {
        self.writes.open();
    }

    /// Returns what another process finds after this one is killed now.
    pub(crate) fn killed(&self) -> Self {
        let mut state = self.state.lock().clone();
        state.repair();
        Self { state: Arc::new(Mutex::new(state)), path: self.path.clone(), ..Self::default() }
    }

    /// Returns what is left if the power fails now.
    pub(crate) fn power_cut(&self, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut state = self.state.lock().clone();
        state.repair();
        let survive = random.index(state.unsynced_names.len() + 1);
        let mut names = std::mem::take(&mut state.durable_names);
        state.unsynced_names[..survive].iter().for_each(|change| change.apply(&mut names));
        for (name, file) in std::mem::take(&mut state.doubtful) {
            if random.chance(0.5) {
                names.entry(name).or_insert(file);
            }
        }
        for file in &mut state.files {
            let now = std::mem::take(&mut file.now);
            // A length is kept like a name; here always.
            file.durable.resize(now.len(), 0);
            for (start, end) in std::mem::take(&mut file.unsynced) {
                for sector in (start..end).step_by(SECTOR_BYTES) {
                    let range = sector..(sector + SECTOR_BYTES).min(end);
                    if random.chance(0.5) {
                        file.durable[range.clone()].copy_from_slice(&now[range]);
                    }
                }
            }
            file.now = file.durable.clone();
        }
        state.names = names.clone();
        state.durable_names = names;
        state.unsynced_names.clear();
        Self { state: Arc::new(Mutex::new(state)), path: self.path.clone(), ..Self::default() }
    }

    /// Makes writes and syncs fail from now on.
    pub(crate) fn fail_writes(&self) {
        self.state.lock().is_broken = true;
    }

    /// Makes writes and syncs fail after this many files were created, renamed, written or synced.
    pub(crate) fn fail_after(&self, steps: u64) {
        self.state.lock().steps_left = Some(steps);
    }

    /// Stops every change after this many steps, which include removals.
    pub(crate) fn stop_after(&self, steps: u64) {
        let mut state = self.state.lock();
        state.steps_left = Some(steps);
        state.are_removals_steps = true;
    }

    /// Makes this many of the next reads fail.
    #[cfg_attr(not(feature = "sim"), allow(dead_code))]
    pub(crate) fn fail_reads(&self, reads: u64) {
        self.state.lock().failing_reads = reads;
    }

    /// Makes this many of the next syncs of the directory fail, but not syncs of files.
    pub(crate) fn fail_directory_syncs(&self, syncs: u64) {
        self.state.lock().failing_syncs = syncs;
    }

    /// Makes this many of the next removals of journals fail: they keep their names.
    pub(crate) fn fail_removals(&self, removals: u64) {
        self.state.lock().failing_removals = removals;
    }

    /// Returns the number of truncations.
    pub(crate) fn cuts(&self) -> u64 {
        self.state.lock().cuts
    }

    /// Returns the number of reads.
    pub(crate) fn reads(&self) -> u64 {
        self.state.lock().reads
    }

    /// Runs `hook` once, after the next batch of reads and before its caller continues.
    pub(crate) fn after_reads(&self, hook: impl FnOnce() + Send + 'static) {
        *self.after_reads.lock() = Some(Box::new(hook));
    }

    /// Runs `hook` once, after the next single read and before its caller continues.
    pub(crate) fn after_read(&self, hook: impl FnOnce() + Send + 'static) {
        *self.after_read.lock() = Some(Box::new(hook));
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.state.lock().is_broken
    }

    pub(crate) fn limit(&self, space_bytes: u64) {
        self.state.lock().space_bytes = Some(space_bytes);
    }

    /// Limits the number of journals to the present one, as if the process had reached its limit of
    /// open files.
    pub(crate) fn limit_files(&self) {
        let mut state = self.state.lock();
        state.max_journals = Some(state.journals());
    }

    /// Lifts the limit of [`Self::limit_files`].
    pub(crate) fn unlimit_files(&self) {
        self.state.lock().max_journals = None;
    }

    fn file(&self, file: usize, handle: Arc<()>) -> Arc<dyn File> {
        let (state, writes) = (self.state.clone(), self.writes.clone());
        let after_read = self.after_read.clone();
        Arc::new(SimFile { state, writes, after_read, file, _handle: handle })
    }

    /// Damages a byte of a file.
    pub(crate) fn corrupt(&self, name: &str, at: usize) {
        let mut state = self.state.lock();
        let file = state.names[name];
        let file = &mut state.files[file];
        file.now[at] ^= 0x10;
        // Data that was never synced has no durable copy.
        file.durable.get_mut(at).into_iter().for_each(|byte| *byte ^= 0x10);
    }

    /// Returns whether the directory itself survives a power cut.
    pub(crate) fn has_durable_name(&self) -> bool {
        self.state.lock().has_durable_name
    }

    /// Makes reads of any of these bytes of a file fail from now on.
    pub(crate) fn make_unreadable(&self, name: &str, range: Range<usize>) {
        let mut state = self.state.lock();
        let file = state.names[name];
        state.files[file].unreadable.push(range);
    }

    /// Makes the whole file readable again.
    pub(crate) fn make_readable(&self, name: &str) {
        let mut state = self.state.lock();
        let file = state.names[name];
        state.files[file].unreadable.clear();
    }
}

impl Directory for SimDirectory {
    fn free_bytes(&self) -> io::Result<u64> {
        Ok(self.state.lock().free_bytes())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.state.lock().names.keys().cloned().collect())
    }

    fn create(&self, name: &str, len_bytes: u64) -> io::Result<Arc<dyn File>> {
        let mut state = self.state.lock();
        state.step()?;
        if state.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        if state.max_journals.is_some_and(|max| state.journals() >= max) {
            return Err(Errno::MFILE.into());
        }
        if !state.has_space(len_bytes) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let file = state.files.len();
        state
            .files
            .push(SimContents { now: vec![0; len_bytes as usize], ..SimContents::default() });
        state.change(Change::Make(name.into(), file));
        let handle = state.open(file);
        Ok(self.file(file, handle))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn File>> {
        let state = self.state.lock();
        let file = *state.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        let handle = state.open(file);
        Ok(self.file(file, handle))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state.lock();
        state.step()?;
        state.change(Change::Rename(from.into(), to.into()));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        if name.ends_with(".journal") {
            self.removals.pass();
        }
        let mut state = self.state.lock();
        if !state.names.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        if state.are_removals_steps {
            state.step()?;
        }
        if state.failing_removals > 0 && name.ends_with(".journal") {
            state.failing_removals -= 1;
            return Err(io::ErrorKind::Other.into());
        }
        state.change(Change::Remove(name.into()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        state.step()?;
        if state.failing_syncs > 0 {
            state.failing_syncs -= 1;
            let State { names, durable_names, doubtful, .. } = &mut *state;
            let removed = durable_names.iter().filter(|(name, _)| !names.contains_key(*name));
            doubtful.extend(removed.map(|(name, file)| (name.clone(), *file)));
            return Err(io::ErrorKind::Other.into());
        }
        state.durable_names = state.names.clone();
        state.unsynced_names.clear();
        state.forget_removed();
        Ok(())
    }

    fn sync_above(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        state.step()?;
        state.has_durable_name = true;
        Ok(())
    }

    fn read_many(&self, reads: Vec<ReadAt<'_>>) -> Vec<io::Result<()>> {
        let results = reads.into_iter().map(|read| read.file.read_at(read.at, read.to)).collect();
        let hook = self.after_reads.lock().take();
        if let Some(hook) = hook {
            hook();
        }
        results
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

struct SimFile {
    state: Arc<Mutex<State>>,
    writes: Arc<Gate>,
    after_read: Arc<Mutex<Option<Hook>>>,
    file: usize,
    _handle: Arc<()>,
}

impl File for SimFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.state.lock().files[self.file].now.len() as u64)
    }

    fn read_at(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        state.reads += 1;
        if state.failing_reads > 0 {
            state.failing_reads -= 1;
            return Err(io::ErrorKind::Other.into());
        }
        let range = at as usize..at as usize + to.len();
        let is_in_it = |bad: &Range<usize>| bad.start < range.end && range.start < bad.end;
        if state.files[self.file].unreadable.iter().any(is_in_it) {
            return Err(Errno::IO.into());
        }
        let from = state.files[self.file].now.get(at as usize..).unwrap_or(&[]);
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        to[len..].fill(0);
        drop(state);
        let hook = self.after_read.lock().take();
        if let Some(hook) = hook {
            hook();
        }
        Ok(())
    }

    fn write_at(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.writes.pass();
        let mut state = self.state.lock();
        state.step()?;
        let range = at as usize..at as usize + from.len();
        let more = range.end.saturating_sub(state.files[self.file].now.len());
        if more > 0 && !state.has_space(more as u64) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let file = &mut state.files[self.file];
        if more > 0 {
            file.now.resize(range.end, 0);
        }
        file.now[range.clone()].copy_from_slice(from);
        file.unsynced.push((range.start, range.end));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        state.step()?;
        let file = &mut state.files[self.file];
        file.durable = file.now.clone();
        file.unsynced.clear();
        Ok(())
    }

    fn truncate(&self, len_bytes: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        state.cuts += 1;
        state.files[self.file].now.resize(len_bytes as usize, 0);
        Ok(())
    }
}
