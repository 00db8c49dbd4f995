//! Formatting of a WAL.

use alluvium_device::{AlignedBuf, ByteSize, Device, DeviceError, DeviceOffset};
use uuid::Uuid;

use crate::layout::{
    DATA_START, HEADER_SLOT_AT, HEADER_SLOT_BYTES, LogOffset, MIN_CAPACITY_BYTES, PAGE, page_floor,
};
use crate::options::{DEFAULT_WINDOW_BYTES, check_window};
use crate::report::{HeaderInfo, Slot};
use crate::{FormatOptions, OpenError, header, probe};

/// Implements [`Wal::format`](crate::Wal::format).
pub(crate) fn format(
    device: &dyn Device,
    options: &FormatOptions,
) -> Result<HeaderInfo, OpenError> {
    let name = || device.geometry().name.clone();
    let device_bytes = device.capacity_bytes();
    let capacity_bytes = options.capacity_bytes.unwrap_or_else(|| page_floor(device_bytes));
    if capacity_bytes > device_bytes {
        return Err(OpenError::LargerThanDevice {
            device: name(),
            wanted_bytes: capacity_bytes,
            device_bytes,
        });
    }
    if !capacity_bytes.is_multiple_of(PAGE) {
        return Err(OpenError::InvalidOption(format!(
            "a capacity of {} is not a multiple of {}",
            ByteSize(capacity_bytes),
            ByteSize(PAGE)
        )));
    }
    if capacity_bytes < MIN_CAPACITY_BYTES {
        return Err(OpenError::InvalidOption(format!(
            "a capacity of {} is less than the smallest of {}",
            ByteSize(capacity_bytes),
            ByteSize(MIN_CAPACITY_BYTES)
        )));
    }
    let ring_bytes = capacity_bytes - DATA_START;
    let window_bytes = options
        .window_bytes
        .unwrap_or_else(|| DEFAULT_WINDOW_BYTES.min(page_floor(ring_bytes / 2)));
    check_window(window_bytes, ring_bytes)?;
    if !options.force
        && let Some(looks_like) = probe::looks_like(device)?
    {
        return Err(OpenError::Occupied { device: name(), looks_like });
    }
    erase(device, capacity_bytes)?;
    let first = HeaderInfo {
        wal_id: Uuid::new_v4(),
        generation: 1,
        capacity_bytes,
        trim: LogOffset(0),
        window_bytes,
        epoch: 0,
        node_id: options.node_id,
        epoch_start: LogOffset(0),
        durable: LogOffset(0),
        written_at_ms: header::now_ms(),
        clean_shutdown: true,
        origin_bytes: 0,
        mark: 0,
    };
    let second = first.next();
    device.write_durable(HEADER_SLOT_AT[0], first.page(device))?;
    device.write_durable(HEADER_SLOT_AT[1], second.page(device))?;
    device.flush()?;
    Ok(second)
}

/// Makes an older WAL, and signatures of anything else, unrecognisable. The newest header is erased
/// last: until then a crash leaves the old WAL as it was, afterwards none.
fn erase(device: &dyn Device, capacity_bytes: u64) -> Result<(), DeviceError> {
    let slots = [0, 1].map(|slot| header::read_slot(device, slot).unwrap_or(Slot::Empty));
    // If none is valid, the order does not matter.
    let newest = header::select(&slots).unwrap_or(0);
    let zero = |at: u64, len: u64| {
        device.write_durable(DeviceOffset(at), AlignedBuf::zeroed(len as usize).freeze())
    };
    zero(HEADER_SLOT_AT[1 - newest].0, HEADER_SLOT_BYTES)?;
    zero(HEADER_SLOT_AT[newest].0, HEADER_SLOT_BYTES)?;
    zero(0, capacity_bytes.min(probe::HEAD_BYTES))?;
    // Bytes beyond the capacity do not belong to the WAL.
    if page_floor(device.capacity_bytes()) == capacity_bytes {
        let tail = capacity_bytes.min(probe::TAIL_BYTES);
        zero(capacity_bytes - tail, tail)?;
    }
    device.flush()
}
