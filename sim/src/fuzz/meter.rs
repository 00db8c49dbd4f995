//! A device that counts requests, can have unreadable pages, and can cut its own power.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use alluvium_device::sim::{Mode, SimDisk};
use alluvium_device::{
    AlignedBuf, Completion, Device, DeviceError, Geometry, Request, SharedDevice,
};
use parking_lot::Mutex;

use crate::ring::PAGE;

/// The metering device; see the module documentation.
pub(super) struct Meter {
    disk: SimDisk,
    /// Device offsets of unreadable pages.
    unreadable: Vec<u64>,
    read_bytes: AtomicU64,
    plug: Mutex<Plug>,
}

#[derive(Default)]
struct Plug {
    /// Number of writes until the cut, and whether it is a power cut.
    fuse: Option<(u64, bool)>,
    successor: Option<SimDisk>,
}

impl Meter {
    pub(super) fn new(disk: &SimDisk, unreadable: &[u64]) -> Arc<Self> {
        let (disk, unreadable) = (disk.clone(), unreadable.to_vec());
        Arc::new(Self { disk, unreadable, read_bytes: AtomicU64::new(0), plug: Mutex::default() })
    }

    /// Cuts the power, or kills the process, while write number `writes` from now (0 is the next
    /// one) is in flight.
    pub(super) fn set_fuse(&self, writes: u64, power_cut: bool) {
        self.plug.lock().fuse = Some((writes, power_cut));
    }

    pub(super) fn clear_fuse(&self) {
        self.plug.lock().fuse = None;
    }

    /// The disk after the cut.
    pub(super) fn successor(&self) -> Option<SimDisk> {
        self.plug.lock().successor.clone()
    }

    /// Whether the cut happens at this write, and how.
    fn takes_cut(&self) -> Option<bool> {
        let fuse = &mut self.plug.lock().fuse;
        let (left, power_cut) = fuse.take()?;
        if left > 0 {
            *fuse = Some((left - 1, power_cut));
            return None;
        }
        Some(power_cut)
    }

    pub(super) fn device(self: &Arc<Self>) -> SharedDevice {
        self.clone()
    }

    /// Bytes read, including unreadable ones.
    pub(super) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }
}

impl Device for Meter {
    fn geometry(&self) -> &Geometry {
        self.disk.geometry()
    }

    /// Whatever an image states, no buffer needs to be larger than the device.
    fn alloc(&self, len_bytes: usize) -> AlignedBuf {
        let capacity_bytes = self.geometry().capacity_bytes;
        assert!(len_bytes as u64 <= capacity_bytes, "a buffer of {len_bytes} bytes");
        self.disk.alloc(len_bytes)
    }

    fn submit(&self, request: Request, done: Completion) {
        if let Request::Read { at, buf } = &request {
            let end = at.0 + buf.len() as u64;
            self.read_bytes.fetch_add(buf.len() as u64, Ordering::Relaxed);
            if self.unreadable.iter().any(|&page| page < end && at.0 < page + PAGE) {
                return done(Err(DeviceError {
                    device: self.geometry().name.as_str().into(),
                    operation: "read",
                    at: at.0,
                    len_bytes: buf.len() as u64,
                    source: Arc::new(io::Error::other("a page that cannot be read")),
                }));
            }
        }
        let write = matches!(request, Request::Write { .. });
        let pulled = if write { self.takes_cut() } else { None };
        if pulled.is_some() {
            self.disk.set_mode(Mode::Queued);
        }
        self.disk.submit(request, done);
        if let Some(power_cut) = pulled {
            let successor =
                if power_cut { self.disk.power_cut() } else { self.disk.process_crash() };
            self.plug.lock().successor = Some(successor);
        }
    }

    fn failure(&self) -> Option<DeviceError> {
        self.disk.failure()
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.disk)
    }
}
