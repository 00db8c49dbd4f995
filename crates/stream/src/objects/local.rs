//! A local directory as an object store.

use std::fmt;
use std::fs::{DirEntry, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use alluvium_device::{AlignedBuf, PAGE_BYTES};
use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{
    CopyOptions, Extensions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
    Result, UploadPart,
};
use tokio::sync::Mutex;

pub use self::reserve::RESERVE;
use self::reserve::Reserve;
use self::root::Root;
pub use self::root::{MARK, is_marked};
use crate::naming::{CATALOGS_DIRECTORY, OBJECTS_DIRECTORY, PROBES_DIRECTORY};
use crate::object_error::io_kind;

mod reserve;
mod root;

/// Longer than writing any object takes.
const UNFINISHED_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Bytes written at a time.
const WRITE_BYTES: usize = 1 << 20;
/// Bytes released to the file system at a time when an object is deleted.
const FREED_BYTES: u64 = 4 << 20;
/// Follows `#` in the names of files that are being deleted. The numbers of files that are being
/// written count from 1.
const DELETED: u64 = u64::MAX;

/// Opens a local directory as an object store, and creates it if it does not exist. Its writes are
/// on stable storage when they complete: `LocalFileSystem` does not ensure that by default, and the
/// WAL is trimmed because of it.
///
/// `LocalFileSystem` writes to a file next to the object, and neither lists nor opens such files.
/// Those left by a killed process are removed here: unfinished ones when they are a day old, hidden
/// ones of a deletion at once.
pub fn local_objects(directory: &Path) -> Result<Arc<dyn ObjectStore>> {
    let failed = |what: &str, error: io::Error| object_store::Error::Generic {
        store: "LocalFileSystem",
        source: format!("cannot {what} {}: {error}", directory.display()).into(),
    };
    create_durably(directory).map_err(|error| failed("create", error))?;
    let root = Root::open(directory).map_err(|error| failed("open", error))?;
    for all in [OBJECTS_DIRECTORY, CATALOGS_DIRECTORY, PROBES_DIRECTORY] {
        let all = directory.join(all);
        if all.exists()
            && let Err(error) = remove_left_behind(&all)
        {
            tracing::warn!("cannot remove leftover files under {}: {error}", all.display());
        }
    }
    let top = directory.canonicalize().map_err(|error| failed("open", error))?;
    let reserve = Reserve::new(&top);
    if let Err(error) = reserve.fill() {
        tracing::warn!("{error}: nothing but the catalog can be written until there is space");
    }
    let files = LocalFileSystem::new_with_prefix(&top)?.with_fsync(true);
    let (files, root, reserve) = (Arc::new(files), Arc::new(root), Arc::new(reserve));
    Ok(Arc::new(Directory { files, root, reserve, top }))
}

/// An object store in a directory that writes multipart objects and deletes objects in steps.
///
/// Each part is on stable storage before the next one is written. `LocalFileSystem` would sync the
/// whole file at its end; the kernel then writes at the full speed of the disk, and the writes of a
/// log on the same disk wait: with objects of 128 MiB, for 40 to 90 ms. Writes bypass the page
/// cache where the file system allows it: its pages cost more processor time than the writing and
/// evict those of others, while the newest data is in the log cache anyway.
///
/// Objects are deleted in steps for the same reason: see [`free`]. An object is hidden before the
/// first step, so that a truncated one is never found.
///
/// Every request fails while another directory is in place of this one; see [`Root`]. On a full
/// disk only the catalog is written, from a [`Reserve`].
#[derive(Debug)]
struct Directory {
    files: Arc<LocalFileSystem>,
    root: Arc<Root>,
    reserve: Arc<Reserve>,
    /// The directory without symbolic links: the paths of objects begin with it.
    top: PathBuf,
}

impl Directory {
    async fn fill_reserve(&self) -> Result<()> {
        if self.reserve.is_whole() {
            return Ok(());
        }
        let reserve = self.reserve.clone();
        blocking(move || reserve.fill()).await
    }

    async fn give_up_reserve(&self) -> Result<bool> {
        let reserve = self.reserve.clone();
        blocking(move || reserve.give_up()).await
    }
}

/// Whether this is a fence or a delta, or the body of one.
fn is_of_catalog(path: &ObjectPath) -> bool {
    let mut parts = path.parts();
    let first = parts.next();
    let kind = parts.nth(1);
    first.is_some_and(|first| first.as_ref() == CATALOGS_DIRECTORY)
        && kind.is_some_and(|kind| matches!(kind.as_ref(), "chain" | "bodies"))
}

async fn check(root: Arc<Root>) -> Result<()> {
    blocking(move || root.check()).await
}

impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for Directory {
    async fn put_opts(
        &self,
        to: &ObjectPath,
        data: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        check(self.root.clone()).await?;
        let overwrites = !matches!(options.mode, PutMode::Create);
        if !is_of_catalog(to) {
            self.fill_reserve().await?;
        }
        let mut put = self.files.put_opts(to, data.clone(), options.clone()).await;
        while is_of_catalog(to)
            && put.as_ref().is_err_and(is_no_space)
            && self.give_up_reserve().await?
        {
            put = self.files.put_opts(to, data.clone(), options.clone()).await;
        }
        match put {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. }) if !overwrites => {
                // An earlier create may have failed after the name was there, or have been killed.
                // Then neither the name nor the directories above it are synced yet.
                let path = self.files.path_to_filesystem(to)?;
                let parents = parents(&path, &self.top)?;
                blocking(move || parents.iter().try_for_each(|parent| sync(parent))).await?;
                put
            }
            put => put,
        }
    }

    async fn put_multipart_opts(
        &self,
        to: &ObjectPath,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.fill_reserve().await?;
        let path = self.files.path_to_filesystem(to)?;
        let root = self.root.clone();
        let begin = move || root.check().and_then(|()| Unfinished::begin(path));
        let unfinished = blocking(begin).await?;
        Ok(Box::new(Parts { unfinished: Arc::new(Mutex::new(unfinished)), next: 0 }))
    }

    async fn get_opts(&self, from: &ObjectPath, options: GetOptions) -> Result<GetResult> {
        let got = self.files.get_opts(from, options).await;
        if let Err(object_store::Error::NotFound { .. }) = got {
            // Only in this directory does it mean that the object is gone.
            check(self.root.clone()).await?;
        }
        got
    }

    fn delete_stream(
        &self,
        names: BoxStream<'static, Result<ObjectPath>>,
    ) -> BoxStream<'static, Result<ObjectPath>> {
        let (files, root) = (self.files.clone(), self.root.clone());
        let delete = move |name: ObjectPath| {
            let (files, root) = (files.clone(), root.clone());
            async move {
                check(root).await?;
                let path = files.path_to_filesystem(&name)?;
                // Continues if the caller is dropped: a hidden object is not found again before the
                // next start.
                if !tokio::spawn(remove(path)).await?? {
                    // It returns the error, or succeeds without hiding.
                    files.delete(&name).await?;
                }
                Ok(name)
            }
        };
        names.and_then(delete).boxed()
    }

    fn list(&self, prefix: Option<&ObjectPath>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (files, root) = (self.files.clone(), self.root.clone());
        let prefix = prefix.cloned();
        let checked = futures::stream::once(check(root));
        checked.map_ok(move |()| files.list(prefix.as_ref())).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&ObjectPath>) -> Result<ListResult> {
        check(self.root.clone()).await?;
        self.files.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &ObjectPath,
        to: &ObjectPath,
        options: CopyOptions,
    ) -> Result<()> {
        check(self.root.clone()).await?;
        self.files.copy_opts(from, to, options).await
    }
}

/// Returns the directories of an object, from the one that has it up to the object store's.
fn parents(path: &Path, top: &Path) -> Result<Vec<PathBuf>> {
    let inside = path.ancestors().skip(1).take_while(|parent| parent.starts_with(top));
    let parents: Vec<_> = inside.map(Path::to_owned).collect();
    match parents.last().is_some_and(|last| last == top) {
        true => Ok(parents),
        false => Err(object_store::Error::Generic {
            store: "LocalFileSystem",
            source: format!("{} is not below {}", path.display(), top.display()).into(),
        }),
    }
}

/// The directories that are synced when an object is created in an object store in `directory`.
#[cfg(test)]
pub(crate) fn local_parents(directory: &Path, name: &str) -> Result<Vec<PathBuf>> {
    let top = directory.canonicalize().unwrap();
    let files = LocalFileSystem::new_with_prefix(directory)?;
    parents(&files.path_to_filesystem(&name.into())?, &top)
}

fn sync(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Whether the disk is full or the quota of this user is used up.
fn is_no_space(error: &object_store::Error) -> bool {
    matches!(io_kind(error), Some(io::ErrorKind::QuotaExceeded | io::ErrorKind::StorageFull))
}

/// Renames an object to a name that `LocalFileSystem` ignores. Returns the new name if that
/// succeeded; a directory is not an object.
///
/// Neither name is synced: after a power cut the object may have its old name, and be whole or
/// truncated. Before it deletes an object, the caller has recorded that the object is not needed,
/// and deletes it again.
async fn hide(path: PathBuf) -> Result<Option<PathBuf>> {
    let hide = move || {
        let mut hidden = path.clone().into_os_string();
        hidden.push(format!("#{DELETED}"));
        let is_object = path.symlink_metadata().is_ok_and(|found| !found.is_dir());
        let is_hidden = is_object && std::fs::rename(&path, &hidden).is_ok();
        Ok(is_hidden.then(|| PathBuf::from(hidden)))
    };
    blocking(hide).await
}

/// Hides an object and then removes it; returns whether it could be hidden. Remains after a crash
/// are found by their name at the next start.
async fn remove(path: PathBuf) -> Result<bool> {
    let Some(hidden) = hide(path).await? else { return Ok(false) };
    free(hidden.clone()).await?;
    let remove = move || match std::fs::remove_file(hidden) {
        // Another process has opened the directory meanwhile and removed it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    };
    blocking(remove).await?;
    Ok(true)
}

/// Releases a file's space from its end, with a pause after each step that is as long as the step.
/// A file system mounted with `discard` informs the disk about free space, and a disk that discards
/// 128 MiB at once does nothing else meanwhile: flushes of a log on it take 30 ms and more, but 4
/// ms with steps of 4 MiB.
///
/// A file with another hard link, such as a backup's, is only unlinked, and so is one that cannot
/// be truncated.
async fn free(path: PathBuf) -> Result<()> {
    let open = move || {
        let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let file = File::options().write(true).custom_flags(flags).open(path).ok()?;
        let found = file.metadata().ok().filter(|found| found.nlink() == 1)?;
        Some((Arc::new(file), found.len()))
    };
    let Some((file, mut len)) = blocking(move || Ok(open())).await? else { return Ok(()) };
    // The last step is the deletion.
    while len > FREED_BYTES {
        len -= FREED_BYTES;
        let file = file.clone();
        let started = Instant::now();
        if blocking(move || file.set_len(len)).await.is_err() {
            break;
        }
        tokio::time::sleep(started.elapsed()).await;
    }
    Ok(())
}

/// An object that is being written.
#[derive(Debug)]
struct Parts {
    /// Parts are written one at a time. Those that wait occupy no thread: there are only a few that
    /// may block, and readers need them.
    unfinished: Arc<Mutex<Unfinished>>,
    /// Position of the next part.
    next: u64,
}

impl Parts {
    /// Runs `work` after the parts before it. If the future is dropped, work that has begun
    /// continues, and the next call waits for it.
    fn with<W: FnOnce(&mut Unfinished) -> io::Result<()> + Send + 'static>(
        &self,
        work: W,
    ) -> impl Future<Output = Result<()>> + use<W> {
        let unfinished = self.unfinished.clone();
        async move {
            let mut unfinished = unfinished.lock_owned().await;
            blocking(move || work(&mut unfinished)).await
        }
    }
}

#[async_trait]
impl MultipartUpload for Parts {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let at = self.next;
        self.next += data.content_length() as u64;
        let write = self.with(move |unfinished| unfinished.write(at, &data));
        Box::pin(write)
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.with(Unfinished::finish).await?;
        Ok(PutResult { e_tag: None, version: None, extensions: Extensions::default() })
    }

    async fn abort(&mut self) -> Result<()> {
        self.with(Unfinished::remove).await
    }
}

/// A file next to the object that it will become, named as `LocalFileSystem` names them.
#[derive(Debug)]
struct Unfinished {
    file: File,
    /// The file, opened for direct writes of whole pages.
    direct: Option<File>,
    /// Bytes to be written.
    buffer: AlignedBuf,
    path: PathBuf,
    becomes: PathBuf,
    is_there: bool,
}

impl Unfinished {
    fn begin(becomes: PathBuf) -> io::Result<Self> {
        if let Some(parent) = becomes.parent().filter(|parent| !parent.exists()) {
            create_durably(parent)?;
        }
        for number in 1_u64.. {
            let mut name = becomes.clone().into_os_string();
            name.push(format!("#{number}"));
            let path = PathBuf::from(name);
            match File::options().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    let direct = open_direct(&path);
                    let buffer = AlignedBuf::zeroed(WRITE_BYTES);
                    return Ok(Self { file, direct, buffer, path, becomes, is_there: true });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        unreachable!("a directory holds fewer files")
    }

    /// Writes a part to stable storage.
    fn write(&mut self, mut at: u64, data: &PutPayload) -> io::Result<()> {
        let mut filled = 0;
        for mut piece in data.iter().map(|piece| &piece[..]) {
            while !piece.is_empty() {
                let fits = piece.len().min(self.buffer.len() - filled);
                self.buffer[filled..filled + fits].copy_from_slice(&piece[..fits]);
                filled += fits;
                piece = &piece[fits..];
                if filled == self.buffer.len() {
                    self.write_buffer(at, filled)?;
                    at += filled as u64;
                    filled = 0;
                }
            }
        }
        self.write_buffer(at, filled)?;
        self.file.sync_data()
    }

    /// Writes the first bytes of the buffer; a partial page at the end of an object goes through
    /// the page cache.
    fn write_buffer(&mut self, at: u64, len: usize) -> io::Result<()> {
        let pages = if at.is_multiple_of(PAGE_BYTES as u64) { len - len % PAGE_BYTES } else { 0 };
        let mut written = 0;
        if let Some(direct) = self.direct.as_ref().filter(|_| pages > 0) {
            match direct.write_all_at(&self.buffer[..pages], at) {
                Ok(()) => written = pages,
                // The file system may need larger units.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => self.direct = None,
                Err(error) => return Err(error),
            }
        }
        self.file.write_all_at(&self.buffer[written..len], at + written as u64)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, &self.becomes)?;
        self.is_there = false;
        File::open(self.becomes.parent().unwrap_or(Path::new("/")))?.sync_all()
    }

    fn remove(&mut self) -> io::Result<()> {
        match std::mem::take(&mut self.is_there) {
            true => std::fs::remove_file(&self.path),
            false => Ok(()),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // A later start removes what remains.
        let _ = self.remove();
    }
}

/// Opens a file for direct writes. Not every file system supports it; then everything goes through
/// the page cache.
fn open_direct(path: &Path) -> Option<File> {
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    File::options().write(true).custom_flags(flags).open(path).ok()
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(io::Error::other).and_then(|done| done).map_err(|error| {
        object_store::Error::Generic { store: "LocalFileSystem", source: error.into() }
    })
}

/// Creates the directory and its parents, each on stable storage.
fn create_durably(directory: &Path) -> io::Result<()> {
    match std::fs::create_dir(directory) {
        Ok(()) => {}
        // Its creator may have been killed before the sync.
        Err(_) if directory.is_dir() => {}
        Err(error) => {
            let parent = directory.parent().filter(|parent| !parent.exists());
            create_durably(parent.ok_or(error)?)?;
            std::fs::create_dir(directory)?;
        }
    }
    let parent = directory.parent().filter(|parent| !parent.as_os_str().is_empty());
    sync(parent.unwrap_or(Path::new(".")))
}

/// Removes files with hidden names that killed processes left behind. Their deletions take a single
/// step here: no log is waiting yet.
fn remove_left_behind(directory: &Path) -> io::Result<()> {
    for file in std::fs::read_dir(directory)? {
        let file = file?;
        if file.file_type()?.is_dir() {
            remove_left_behind(&file.path())?;
            continue;
        }
        let removed = is_left_behind(&file).and_then(|is| {
            if is { std::fs::remove_file(file.path()).map(|()| true) } else { Ok(false) }
        });
        match removed {
            Ok(true) => tracing::info!("removed the leftover file {}", file.path().display()),
            Ok(false) => {}
            // A running process was removing it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_left_behind(file: &DirEntry) -> io::Result<bool> {
    let name = file.file_name();
    let number = name.to_str().and_then(|name| name.rsplit_once('#')).map(|(_, number)| number);
    match number.and_then(|number| number.parse::<u64>().ok()) {
        None => Ok(false),
        Some(DELETED) => Ok(true),
        Some(_) => {
            let age = file.metadata()?.modified()?.elapsed().unwrap_or_default();
            Ok(age > UNFINISHED_AGE)
        }
    }
}

#[cfg(test)]
mod tests;
