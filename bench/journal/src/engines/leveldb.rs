//! LevelDB, by the C interface of Debian's library (1.23).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::{PhantomData, PhantomPinned};
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;

use crate::engine::{Engine, Error, Result, Session, Setup};
use crate::workload::Key;

macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        struct $name {
            _bytes: [u8; 0],
            _not_ours: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque!(Db, DbOptions, LruCache, Filter, ReadOptions, WriteOptions, Iter);

// `leveldb/c.h` of libleveldb-dev 1.23.
#[link(name = "leveldb")]
unsafe extern "C" {
    fn leveldb_options_create() -> *mut DbOptions;
    fn leveldb_options_destroy(options: *mut DbOptions);
    fn leveldb_options_set_create_if_missing(options: *mut DbOptions, on: u8);
    fn leveldb_options_set_write_buffer_size(options: *mut DbOptions, bytes: usize);
    fn leveldb_options_set_cache(options: *mut DbOptions, cache: *mut LruCache);
    fn leveldb_options_set_filter_policy(options: *mut DbOptions, filter: *mut Filter);
    fn leveldb_options_set_compression(options: *mut DbOptions, kind: c_int);
    fn leveldb_filterpolicy_create_bloom(bits_per_key: c_int) -> *mut Filter;
    fn leveldb_filterpolicy_destroy(filter: *mut Filter);
    fn leveldb_cache_create_lru(bytes: usize) -> *mut LruCache;
    fn leveldb_cache_destroy(cache: *mut LruCache);
    fn leveldb_readoptions_create() -> *mut ReadOptions;
    fn leveldb_readoptions_destroy(options: *mut ReadOptions);
    fn leveldb_writeoptions_create() -> *mut WriteOptions;
    fn leveldb_writeoptions_destroy(options: *mut WriteOptions);
    fn leveldb_open(
        options: *const DbOptions,
        name: *const c_char,
        error: *mut *mut c_char,
    ) -> *mut Db;
    fn leveldb_close(db: *mut Db);
    fn leveldb_put(
        db: *mut Db,
        options: *const WriteOptions,
        key: *const c_char,
        key_len: usize,
        value: *const c_char,
        value_len: usize,
        error: *mut *mut c_char,
    );
    fn leveldb_get(
        db: *mut Db,
        options: *const ReadOptions,
        key: *const c_char,
        key_len: usize,
        value_len: *mut usize,
        error: *mut *mut c_char,
    ) -> *mut c_char;
    fn leveldb_create_iterator(db: *mut Db, options: *const ReadOptions) -> *mut Iter;
    fn leveldb_iter_destroy(iter: *mut Iter);
    fn leveldb_iter_seek_to_first(iter: *mut Iter);
    fn leveldb_iter_valid(iter: *const Iter) -> u8;
    fn leveldb_iter_next(iter: *mut Iter);
    fn leveldb_iter_key(iter: *const Iter, len: *mut usize) -> *const c_char;
    fn leveldb_iter_value(iter: *const Iter, len: *mut usize) -> *const c_char;
    fn leveldb_iter_get_error(iter: *const Iter, error: *mut *mut c_char);
    fn leveldb_free(pointer: *mut c_void);
}

const NO_COMPRESSION: c_int = 0;
/// The value that its documentation recommends.
const BLOOM_BITS_PER_KEY: c_int = 10;
/// One being filled, and one being written.
const WRITE_BUFFERS: u64 = 2;

pub struct LevelDb {
    db: *mut Db,
    options: *mut DbOptions,
    cache: *mut LruCache,
    filter: *mut Filter,
    reading: *mut ReadOptions,
    writing: *mut WriteOptions,
}

// SAFETY: the database is thread-safe, and options that do not change may be read by all threads.
unsafe impl Sync for LevelDb {}

/// Converts the error of the preceding call.
fn checked(error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a message of the library is a zero-terminated string.
    let text = unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned();
    // SAFETY: the library allocated it for its caller, and nothing refers to it any more.
    unsafe { leveldb_free(error.cast()) };
    Err(Error::from(format!("LevelDB: {text}")))
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

impl Engine for LevelDb {
    type Session<'a> = &'a LevelDb;

    fn open(setup: &Setup) -> Result<Self> {
        let path = CString::new(setup.path.as_os_str().as_bytes())?;
        // SAFETY: it takes only a number.
        let cache = unsafe { leveldb_cache_create_lru(setup.block_cache_bytes(WRITE_BUFFERS)) };
        // SAFETY: it takes only a number.
        let filter = unsafe { leveldb_filterpolicy_create_bloom(BLOOM_BITS_PER_KEY) };
        // SAFETY: it takes no arguments.
        let options = unsafe { leveldb_options_create() };
        // SAFETY: the options are valid, here and below.
        unsafe { leveldb_options_set_create_if_missing(options, 1) };
        // SAFETY: as above.
        unsafe { leveldb_options_set_write_buffer_size(options, setup.write_buffer_bytes()) };
        // SAFETY: as above; the cache is valid until the database is closed.
        unsafe { leveldb_options_set_cache(options, cache) };
        // SAFETY: as above; the filter too.
        unsafe { leveldb_options_set_filter_policy(options, filter) };
        // SAFETY: as above.
        unsafe { leveldb_options_set_compression(options, NO_COMPRESSION) };
        let mut error = null_mut();
        // SAFETY: the options are valid, and so is the name until the call returns.
        let db = unsafe { leveldb_open(options, path.as_ptr(), &raw mut error) };
        checked(error)?;
        // SAFETY: it takes no arguments.
        let reading = unsafe { leveldb_readoptions_create() };
        // SAFETY: it takes no arguments. (By default writes are not synced.)
        let writing = unsafe { leveldb_writeoptions_create() };
        Ok(Self { db, options, cache, filter, reading, writing })
    }

    fn session(&self) -> Result<&LevelDb> {
        Ok(self)
    }

    fn close(self) -> Result<()> {
        // SAFETY: this is the only owner of the database, so it is not in use.
        unsafe { leveldb_close(self.db) };
        // SAFETY: without the database the rest is not in use, here and below.
        unsafe { leveldb_options_destroy(self.options) };
        // SAFETY: as above.
        unsafe { leveldb_readoptions_destroy(self.reading) };
        // SAFETY: as above.
        unsafe { leveldb_writeoptions_destroy(self.writing) };
        // SAFETY: as above.
        unsafe { leveldb_cache_destroy(self.cache) };
        // SAFETY: as above.
        unsafe { leveldb_filterpolicy_destroy(self.filter) };
        Ok(())
    }
}

impl Session for &LevelDb {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        let mut error = null_mut();
        // SAFETY: the database is open; key and value are valid until the call returns, which
        // copies them.
        unsafe {
            leveldb_put(
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
        let mut len = 0;
        // SAFETY: the database is open; the key is valid until the call returns.
        let value = unsafe {
            leveldb_get(
                self.db,
                self.reading,
                key.as_ptr().cast(),
                key.len(),
                &raw mut len,
                &raw mut error,
            )
        };
        checked(error)?;
        if !value.is_null() {
            // SAFETY: the result is a copy of this many bytes, which belongs to the caller until it
            // is freed below.
            see(unsafe { shown(value, len) });
            // SAFETY: the library allocated it for this caller, and nothing refers to it any more.
            unsafe { leveldb_free(value.cast()) };
        }
        Ok(())
    }

    fn scan(&mut self, mut see: impl FnMut(&[u8], &[u8]) -> bool) -> Result<()> {
        // SAFETY: the database is open, and outlives the iterator.
        let iter = unsafe { leveldb_create_iterator(self.db, self.reading) };
        // SAFETY: the iterator is valid until it is destroyed below; this applies to all calls
        // here.
        unsafe { leveldb_iter_seek_to_first(iter) };
        // SAFETY: as above.
        while unsafe { leveldb_iter_valid(iter) } != 0 {
            let (mut key_len, mut value_len) = (0, 0);
            // SAFETY: as above, and it is at an entry.
            let key = unsafe { leveldb_iter_key(iter, &raw mut key_len) };
            // SAFETY: as above.
            let value = unsafe { leveldb_iter_value(iter, &raw mut value_len) };
            // SAFETY: the library returns the entry's bytes, which are valid until the iterator
            // moves.
            let key = unsafe { shown(key, key_len) };
            // SAFETY: as above.
            let value = unsafe { shown(value, value_len) };
            if !see(key, value) {
                break;
            }
            // SAFETY: as above.
            unsafe { leveldb_iter_next(iter) };
        }
        let mut error = null_mut();
        // SAFETY: as above.
        unsafe { leveldb_iter_get_error(iter, &raw mut error) };
        // SAFETY: it was created above, and nothing that it returned is in use.
        unsafe { leveldb_iter_destroy(iter) };
        checked(error)
    }
}
