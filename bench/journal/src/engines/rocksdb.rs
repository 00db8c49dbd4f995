//! RocksDB, by the C interface of Debian's library (7.8).

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::marker::{PhantomData, PhantomPinned};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null, null_mut};

use crate::engine::{Engine, Error, Result, Session, Setup};
use crate::workload::{BATCH_KEYS, Key};

macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        struct $name {
            _bytes: [u8; 0],
            _not_ours: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque!(
    Db,
    DbOptions,
    TableOptions,
    LruCache,
    Filter,
    ReadOptions,
    WriteOptions,
    Family,
    Iter,
    Pinned
);

// `rocksdb/c.h` of librocksdb-dev 7.8.3.
#[link(name = "rocksdb")]
unsafe extern "C" {
    fn rocksdb_options_create() -> *mut DbOptions;
    fn rocksdb_options_destroy(options: *mut DbOptions);
    fn rocksdb_options_set_create_if_missing(options: *mut DbOptions, on: c_uchar);
    fn rocksdb_options_set_write_buffer_size(options: *mut DbOptions, bytes: usize);
    fn rocksdb_options_set_max_write_buffer_number(options: *mut DbOptions, number: c_int);
    fn rocksdb_options_increase_parallelism(options: *mut DbOptions, threads: c_int);
    fn rocksdb_options_set_compression(options: *mut DbOptions, kind: c_int);
    fn rocksdb_options_set_manual_wal_flush(options: *mut DbOptions, on: c_uchar);
    fn rocksdb_options_set_block_based_table_factory(
        options: *mut DbOptions,
        table: *mut TableOptions,
    );
    fn rocksdb_block_based_options_create() -> *mut TableOptions;
    fn rocksdb_block_based_options_destroy(options: *mut TableOptions);
    fn rocksdb_block_based_options_set_filter_policy(
        options: *mut TableOptions,
        filter: *mut Filter,
    );
    fn rocksdb_block_based_options_set_block_cache(
        options: *mut TableOptions,
        cache: *mut LruCache,
    );
    fn rocksdb_filterpolicy_create_bloom_full(bits_per_key: f64) -> *mut Filter;
    fn rocksdb_cache_create_lru(bytes: usize) -> *mut LruCache;
    fn rocksdb_cache_destroy(cache: *mut LruCache);
    fn rocksdb_readoptions_create() -> *mut ReadOptions;
    fn rocksdb_readoptions_destroy(options: *mut ReadOptions);
    fn rocksdb_writeoptions_create() -> *mut WriteOptions;
    fn rocksdb_writeoptions_destroy(options: *mut WriteOptions);
    fn rocksdb_open_column_families(
        options: *const DbOptions,
        name: *const c_char,
        families: c_int,
        names: *const *const c_char,
        family_options: *const *const DbOptions,
        handles: *mut *mut Family,
        error: *mut *mut c_char,
    ) -> *mut Db;
    fn rocksdb_column_family_handle_destroy(family: *mut Family);
    fn rocksdb_flush_wal(db: *mut Db, sync: c_uchar, error: *mut *mut c_char);
    fn rocksdb_close(db: *mut Db);
    fn rocksdb_put(
        db: *mut Db,
        options: *const WriteOptions,
        key: *const c_char,
        key_len: usize,
        value: *const c_char,
        value_len: usize,
        error: *mut *mut c_char,
    );
    fn rocksdb_get_pinned(
        db: *mut Db,
        options: *const ReadOptions,
        key: *const c_char,
        key_len: usize,
        error: *mut *mut c_char,
    ) -> *mut Pinned;
    fn rocksdb_batched_multi_get_cf(
        db: *mut Db,
        options: *const ReadOptions,
        family: *mut Family,
        keys: usize,
        key_list: *const *const c_char,
        key_lens: *const usize,
        values: *mut *mut Pinned,
        errors: *mut *mut c_char,
        is_sorted: bool,
    );
    fn rocksdb_pinnableslice_value(slice: *const Pinned, len: *mut usize) -> *const c_char;
    fn rocksdb_pinnableslice_destroy(slice: *mut Pinned);
    fn rocksdb_create_iterator(db: *mut Db, options: *const ReadOptions) -> *mut Iter;
    fn rocksdb_iter_destroy(iter: *mut Iter);
    fn rocksdb_iter_seek_to_first(iter: *mut Iter);
    fn rocksdb_iter_valid(iter: *const Iter) -> c_uchar;
    fn rocksdb_iter_next(iter: *mut Iter);
    fn rocksdb_iter_key(iter: *const Iter, len: *mut usize) -> *const c_char;
    fn rocksdb_iter_value(iter: *const Iter, len: *mut usize) -> *const c_char;
    fn rocksdb_iter_get_error(iter: *const Iter, error: *mut *mut c_char);
    fn rocksdb_free(pointer: *mut c_void);
}

const NO_COMPRESSION: c_int = 0;
/// The value that its documentation recommends.
const BLOOM_BITS_PER_KEY: f64 = 10.0;
/// One being filled, and two being written.
const WRITE_BUFFERS: u8 = 3;
const BACKGROUND_THREADS: c_int = 2;

pub struct RocksDb {
    db: *mut Db,
    family: *mut Family,
    cache: *mut LruCache,
    reading: *mut ReadOptions,
    writing: *mut WriteOptions,
}

// SAFETY: the database is thread-safe, and options that do not change may be read by all threads.
unsafe impl Sync for RocksDb {}

/// Converts the error of the preceding call.
fn checked(error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a message of the library is a zero-terminated string.
    let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    // SAFETY: the library allocated it for its caller, and nothing refers to it any more.
    unsafe { rocksdb_free(error.cast()) };
    Err(Error::from(format!("RocksDB: {text}")))
}

/// Returns bytes of the library.
///
/// # Safety
/// There are `len` readable bytes at `bytes`, which do not change for as long as the caller uses
/// the result.
unsafe fn shown<'a>(bytes: *const c_char, len: usize) -> &'a [u8] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(bytes.cast(), len) }
}

fn options(setup: &Setup, cache: *mut LruCache) -> *mut DbOptions {
    // SAFETY: it takes no arguments.
    let table = unsafe { rocksdb_block_based_options_create() };
    // SAFETY: it takes only a number.
    let filter = unsafe { rocksdb_filterpolicy_create_bloom_full(BLOOM_BITS_PER_KEY) };
    // SAFETY: both are valid; the table's options own the filter from here on.
    unsafe { rocksdb_block_based_options_set_filter_policy(table, filter) };
    // SAFETY: both are valid; the options share the cache.
    unsafe { rocksdb_block_based_options_set_block_cache(table, cache) };
    // SAFETY: it takes no arguments.
    let options = unsafe { rocksdb_options_create() };
    // SAFETY: both are valid; the table's options are copied.
    unsafe { rocksdb_options_set_block_based_table_factory(options, table) };
    // SAFETY: copied above, so it is not in use.
    unsafe { rocksdb_block_based_options_destroy(table) };
    // SAFETY: the options are valid, here and below.
    unsafe { rocksdb_options_set_create_if_missing(options, 1) };
    // SAFETY: as above.
    unsafe { rocksdb_options_set_write_buffer_size(options, setup.write_buffer_bytes()) };
    // SAFETY: as above.
    unsafe { rocksdb_options_set_max_write_buffer_number(options, WRITE_BUFFERS.into()) };
    // SAFETY: as above.
    unsafe { rocksdb_options_increase_parallelism(options, BACKGROUND_THREADS) };
    // SAFETY: as above.
    unsafe { rocksdb_options_set_compression(options, NO_COMPRESSION) };
    // Its log is written a buffer at a time, like ours, and not with a system call for each put.
    // SAFETY: as above.
    unsafe { rocksdb_options_set_manual_wal_flush(options, 1) };
    options
}

impl Engine for RocksDb {
    type Session<'a> = &'a RocksDb;

    fn open(setup: &Setup) -> Result<Self> {
        let path = CString::new(setup.path.as_os_str().as_bytes())?;
        // SAFETY: it takes only a number.
        let cache =
            unsafe { rocksdb_cache_create_lru(setup.block_cache_bytes(WRITE_BUFFERS.into())) };
        let options = options(setup, cache);
        let mut family = null_mut();
        let mut error = null_mut();
        // With the column family, which batched reads have to name.
        let names = [c"default".as_ptr()];
        let family_options = [options.cast_const()];
        // SAFETY: all pointers are valid until the call returns: a string each, and one family with
        // its name, its options and space for its handle.
        let db = unsafe {
            rocksdb_open_column_families(
                options,
                path.as_ptr(),
                1,
                names.as_ptr(),
                family_options.as_ptr(),
                &raw mut family,
                &raw mut error,
            )
        };
        // SAFETY: the database has copied them.
        unsafe { rocksdb_options_destroy(options) };
        checked(error)?;
        // SAFETY: it takes no arguments.
        let reading = unsafe { rocksdb_readoptions_create() };
        // SAFETY: it takes no arguments. (By default writes are not synced.)
        let writing = unsafe { rocksdb_writeoptions_create() };
        Ok(Self { db, family, cache, reading, writing })
    }

    fn session(&self) -> Result<&RocksDb> {
        Ok(self)
    }

    fn close(self) -> Result<()> {
        let mut error = null_mut();
        // SAFETY: the database is open.
        unsafe { rocksdb_flush_wal(self.db, 0, &raw mut error) };
        let flushed = checked(error);
        // SAFETY: this is the only owner of the database, so it is not in use.
        unsafe { rocksdb_column_family_handle_destroy(self.family) };
        // SAFETY: as above, and the family's handle, which has to be destroyed first, is gone.
        unsafe { rocksdb_close(self.db) };
        // SAFETY: without the database they are not in use.
        unsafe { rocksdb_readoptions_destroy(self.reading) };
        // SAFETY: as above.
        unsafe { rocksdb_writeoptions_destroy(self.writing) };
        // SAFETY: this reference to the cache has no other owner.
        unsafe { rocksdb_cache_destroy(self.cache) };
        flushed
    }
}

/// Passes the value to `see` and releases it.
fn see_pinned(slice: *mut Pinned, see: impl FnOnce(&[u8])) {
    let mut len = 0;
    // SAFETY: the slice is valid until it is destroyed below.
    let bytes = unsafe { rocksdb_pinnableslice_value(slice, &raw mut len) };
    // SAFETY: the library returns the slice's bytes, which are valid as long as the slice.
    see(unsafe { shown(bytes, len) });
    // SAFETY: it was created for this caller, and what it returned is not in use.
    unsafe { rocksdb_pinnableslice_destroy(slice) };
}

impl Session for &RocksDb {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        let mut error = null_mut();
        // SAFETY: the database is open; key and value are valid until the call returns, which
        // copies them.
        unsafe {
            rocksdb_put(
                self.db,
                self.writing,
                key.as_ptr().cast(),
                key.len(),
                value.as_ptr().cast(),
                value.len(),
                &raw mut error,
            );
        }
        checked(error)
    }

    fn get(&mut self, key: &Key, see: impl FnOnce(&[u8])) -> Result<()> {
        let mut error = null_mut();
        // SAFETY: the database is open; the key is valid until the call returns.
        let slice = unsafe {
            rocksdb_get_pinned(
                self.db,
                self.reading,
                key.as_ptr().cast(),
                key.len(),
                &raw mut error,
            )
        };
        checked(error)?;
        if !slice.is_null() {
            see_pinned(slice, see);
        }
        Ok(())
    }

    fn get_many(&mut self, keys: &[Key], mut see: impl FnMut(usize, &[u8])) -> Result<()> {
        assert!(keys.len() <= BATCH_KEYS, "the lists below hold this many");
        let mut list = [null::<c_char>(); BATCH_KEYS];
        for (pointer, key) in list.iter_mut().zip(keys) {
            *pointer = key.as_ptr().cast();
        }
        let lens = [size_of::<Key>(); BATCH_KEYS];
        let mut slices = [null_mut::<Pinned>(); BATCH_KEYS];
        let mut errors = [null_mut::<c_char>(); BATCH_KEYS];
        // SAFETY: the database and its family are open; each list has at least `keys.len()`
        // elements, and the keys are valid until the call returns.
        unsafe {
            rocksdb_batched_multi_get_cf(
                self.db,
                self.reading,
                self.family,
                keys.len(),
                list.as_ptr(),
                lens.as_ptr(),
                slices.as_mut_ptr(),
                errors.as_mut_ptr(),
                false,
            );
        }
        let mut outcome = Ok(());
        for (at, (slice, error)) in slices.into_iter().zip(errors).take(keys.len()).enumerate() {
            if !slice.is_null() {
                see_pinned(slice, |value| see(at, value));
            }
            outcome = outcome.and(checked(error));
        }
        outcome
    }

    fn scan(&mut self, mut see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        // SAFETY: the database is open, and outlives the iterator.
        let iter = unsafe { rocksdb_create_iterator(self.db, self.reading) };
        // SAFETY: the iterator is valid until it is destroyed below; this applies to all calls
        // here.
        unsafe { rocksdb_iter_seek_to_first(iter) };
        // SAFETY: as above.
        while unsafe { rocksdb_iter_valid(iter) } != 0 {
            let (mut key_len, mut value_len) = (0, 0);
            // SAFETY: as above, and it is at an entry.
            let key = unsafe { rocksdb_iter_key(iter, &raw mut key_len) };
            // SAFETY: as above.
            let value = unsafe { rocksdb_iter_value(iter, &raw mut value_len) };
            // SAFETY: the library returns the entry's bytes, which are valid until the iterator
            // moves.
            let key = unsafe { shown(key, key_len) };
            // SAFETY: as above.
            let value = unsafe { shown(value, value_len) };
            if !see(key, value) {
                break;
            }
            // SAFETY: as above.
            unsafe { rocksdb_iter_next(iter) };
        }
        let mut error = null_mut();
        // SAFETY: as above.
        unsafe { rocksdb_iter_get_error(iter, &raw mut error) };
        // SAFETY: it was created above, and nothing that it returned is in use.
        unsafe { rocksdb_iter_destroy(iter) };
        checked(error)
    }
}
