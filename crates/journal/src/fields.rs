//! Integers in bytes, and the 64 bytes at the beginning of each file of a cache: magic, fields,
//! checksum.

use crc32c::crc32c;

/// Magic, fields, and in the last 4 bytes the CRC32C of all before it.
pub(crate) const FIELDS_BYTES: usize = 64;
const CHECKSUM: usize = FIELDS_BYTES - size_of::<u32>();
/// The version of all files.
const VERSION: u32 = 1;
const VERSION_AT: usize = 8;

pub(crate) type Fields = [u8; FIELDS_BYTES];

#[inline]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// Adds magic, version and checksum to the fields in `page`.
pub(crate) fn seal(page: &mut [u8], magic: &[u8; 8]) {
    page[..VERSION_AT].copy_from_slice(magic);
    page[VERSION_AT..VERSION_AT + 4].copy_from_slice(&VERSION.to_le_bytes());
    let checksum = crc32c(&page[..CHECKSUM]);
    page[CHECKSUM..FIELDS_BYTES].copy_from_slice(&checksum.to_le_bytes());
}

/// Returns the fields at the beginning of `page`, of any version, if they are undamaged and of this
/// kind.
pub(crate) fn undamaged<'a>(page: &'a [u8], magic: &[u8; 8]) -> Option<&'a Fields> {
    let fields: &Fields = page.first_chunk()?;
    let is_whole = u32_at(fields, CHECKSUM) == crc32c(&fields[..CHECKSUM]);
    (fields.starts_with(magic) && is_whole).then_some(fields)
}

/// Returns the fields as [`undamaged`], if they are of the known version.
pub(crate) fn unseal<'a>(page: &'a [u8], magic: &[u8; 8]) -> Result<&'a Fields, &'static str> {
    let fields = undamaged(page, magic).ok_or("it is damaged, or not a file of a cache")?;
    match u32_at(fields, VERSION_AT) {
        VERSION => Ok(fields),
        _ => Err("it has another version; the program that created it can open it"),
    }
}
