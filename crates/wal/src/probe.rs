//! Recognition of foreign content on a device: enough to refuse to destroy it, and to name it.

use alluvium_device::{Device, DeviceError, DeviceOffset};

use crate::layout::{DATA_START, HEADER_SLOT_AT, PAGE};

/// Bytes checked at the start of the device. They include every signature below, and every file
/// system writes something there.
pub(crate) const HEAD_BYTES: u64 = 1024 * 1024;
/// Bytes checked at the end of the device: the backup partition table, and RAID superblocks.
pub(crate) const TAIL_BYTES: u64 = 128 * 1024;

/// A signature at a fixed position.
struct Signature {
    at: usize,
    bytes: &'static [u8],
    name: &'static str,
}

const fn at(at: usize, bytes: &'static [u8], name: &'static str) -> Signature {
    Signature { at, bytes, name }
}

/// More specific signatures first: a boot sector may precede a file system, and a partition table
/// may be on a whole disk. After the table in util-linux' libblkid.
const SIGNATURES: [Signature; 25] = [
    at(HEADER_SLOT_AT[0].0 as usize, b"ALLUVWAL", "an Alluvium WAL"),
    at(HEADER_SLOT_AT[1].0 as usize, b"ALLUVWAL", "an Alluvium WAL"),
    at(0, b"ALLUVSTO", "an Alluvium volume store"),
    at(32 * 1024, b"ALLUVSTO", "an Alluvium volume store"),
    at(0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    at(512, b"LABELONE", "an LVM physical volume"),
    at(0, b"LABELONE", "an LVM physical volume"),
    at(1024, b"LABELONE", "an LVM physical volume"),
    at(1536, b"LABELONE", "an LVM physical volume"),
    at(0, b"XFSB", "an xfs file system"),
    at(1024 + 56, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    at(64 * 1024 + 64, b"_BHRfS_M", "a btrfs file system"),
    at(1024, b"\x10\x20\xf5\xf2", "an f2fs file system"),
    at(0, b"hsqs", "a squashfs file system"),
    at(4096 + 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9", "a bcachefs file system"),
    at(0, b"bluestore block device", "a Ceph BlueStore device"),
    at(4096 - 10, b"SWAPSPACE2", "swap space"),
    at(4096 - 10, b"SWAP-SPACE", "swap space"),
    at(32 * 1024 + 1, b"CD001", "an ISO 9660 image"),
    at(4096, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    at(0, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    at(3, b"NTFS    ", "an NTFS file system"),
    at(512, b"EFI PART", "a GPT partition table"),
    at(4096, b"EFI PART", "a GPT partition table"),
    at(510, b"\x55\xaa", "an MBR partition table or a boot sector"),
];

/// ZFS keeps a ring of 1 KiB "uberblocks" in the second half of its first 256 KiB, each starting
/// with this number in the machine's byte order.
const ZFS_UBERBLOCKS: std::ops::Range<usize> = 128 * 1024..256 * 1024;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

fn zfs(head: &[u8]) -> bool {
    let blocks = head.get(ZFS_UBERBLOCKS).unwrap_or_default().chunks(1024);
    blocks.into_iter().any(|block| {
        block.starts_with(&ZFS_MAGIC.to_le_bytes()) || block.starts_with(&ZFS_MAGIC.to_be_bytes())
    })
}

/// Describes the content of a device: a known file system, partition table or other format by its
/// name, and anything else as unknown data. `None` if the first 1 MiB and the last 128 KiB are
/// zeros, so that the device may be formatted. Blocks.
///
/// # Errors
/// The device cannot be read.
pub fn looks_like(device: &dyn Device) -> Result<Option<String>, DeviceError> {
    let device_bytes = device.capacity_bytes() / PAGE * PAGE;
    let head = device.read(DeviceOffset(0), device_bytes.min(HEAD_BYTES) as usize)?;
    let tail_at = device_bytes - device_bytes.min(TAIL_BYTES);
    let tail = device.read(DeviceOffset(tail_at), (device_bytes - tail_at) as usize)?;
    let is_at = |signature: &&Signature| {
        head.get(signature.at..).is_some_and(|from| from.starts_with(signature.bytes))
    };
    if let Some(signature) = SIGNATURES.iter().find(is_at) {
        return Ok(Some(signature.name.into()));
    }
    if zfs(&head) {
        return Ok(Some("a ZFS pool".into()));
    }
    if tail.chunks(512).any(|sector| sector.starts_with(b"EFI PART")) {
        return Ok(Some("a GPT partition table (its copy at the end of the device)".into()));
    }
    let in_head = head.iter().position(|&byte| byte != 0);
    let in_tail = tail.iter().position(|&byte| byte != 0).map(|at| at + tail_at as usize);
    Ok(in_head.or(in_tail).map(|at| format!("unknown data (byte {at} is not zero)")))
}

const _: () = assert!(HEAD_BYTES >= DATA_START);

#[cfg(test)]
mod tests {
    use alluvium_device::sim::{SimDisk, SimOptions};

    use super::*;

    const DEVICE_BYTES: u64 = 4 * 1024 * 1024;

    fn after(pokes: &[(u64, &[u8])]) -> Option<String> {
        let disk =
            SimDisk::new(SimOptions { capacity_bytes: DEVICE_BYTES, ..SimOptions::default() });
        for (at, bytes) in pokes {
            disk.poke(*at, bytes);
        }
        looks_like(&*disk.device()).unwrap()
    }

    #[test]
    fn each_signature_is_recognised() {
        assert_eq!(after(&[]), None);
        for signature in &SIGNATURES {
            assert_eq!(
                after(&[(signature.at as u64, signature.bytes)]).as_deref(),
                Some(signature.name)
            );
        }
        assert_eq!(
            after(&[(128 * 1024 + 7 * 1024, &ZFS_MAGIC.to_le_bytes())]).as_deref(),
            Some("a ZFS pool")
        );
        assert!(after(&[(DEVICE_BYTES - 512, b"EFI PART")]).unwrap().contains("GPT"));
    }

    #[test]
    fn a_device_smaller_than_the_areas_is_read_whole() {
        let disk = SimDisk::new(SimOptions { capacity_bytes: 8192, ..SimOptions::default() });
        assert_eq!(looks_like(&*disk.device()).unwrap(), None);
        disk.poke(8191, b"x");
        assert!(looks_like(&*disk.device()).unwrap().unwrap().contains("byte 8191"));
    }

    #[test]
    fn the_more_specific_signature_wins_and_other_data_is_unknown() {
        let ext4_with_boot_sector = after(&[(510, b"\x55\xaa"), (1080, b"\x53\xef")]);
        assert_eq!(ext4_with_boot_sector.as_deref(), Some("an ext2, ext3 or ext4 file system"));
        assert!(after(&[(700_000, b"x")]).unwrap().contains("byte 700000"));
        assert!(after(&[(DEVICE_BYTES - 1, b"x")]).unwrap().contains("unknown data"));
        assert_eq!(after(&[(2 << 20, b"x")]), None, "bytes between the two areas are not checked");
    }
}
