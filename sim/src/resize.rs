//! Resizing between two runs.

use alluvium_device::SharedDevice;
use alluvium_wal::{OpenError, Record, Wal};

use crate::Profile;
use crate::ring::{DATA_START, PAGE, Ring};
use crate::simulation::Simulation;

impl Simulation {
    /// Resizes the log to any size, sometimes with a power cut meanwhile.
    pub(crate) fn resize(&mut self) -> Result<(), String> {
        let device: SharedDevice = self.disk.device();
        let Ok(found) = Wal::inspect(&device) else { return Ok(()) };
        self.model.resized(&found.header, &mut self.hits.lock());
        let before = self.scan();
        let image = self.disk.image();
        let most = (image.len() as u64 - DATA_START) / PAGE;
        let wanted = DATA_START + (32 + self.random.below(most - 31 + 3)) * PAGE;
        let possible = wanted <= image.len() as u64;

        let plug = self.plug();
        plug.set_copies();
        if self.random.chance(0.4) {
            plug.set_fuse(Some((self.random.below(8), self.end())));
        }
        let errors = self.failures();
        self.inject_failures(0.1);
        let device: SharedDevice = plug.clone();
        let result = Wal::resize(&device, wanted, None);
        self.disk.set_faults(self.usual);
        self.trace(|| format!("resize to {wanted}: {result:?}"));
        let failed = self.failures() > errors;
        match (&result, plug.successor()) {
            (_, Some(successor)) => {
                self.outcome.resizes_interrupted += 1;
                self.replace_disk(successor);
            }
            (Ok(new), None) => {
                if new.capacity_bytes != wanted || !possible {
                    return Err(format!("resized to {new:?}, wanted {wanted} bytes"));
                }
                self.outcome.resized += 1;
                let live = new.trim.0..new.durable.0;
                self.outcome.moved += u64::from(Ring::of(new).differs(self.model.ring, &live));
                if self.random.chance(0.7) {
                    let end = self.end();
                    self.replace_disk(end.of(&self.disk));
                }
            }
            (Err(OpenError::ResizeBlocked { .. } | OpenError::LargerThanDevice { .. }), None) => {
                self.outcome.resizes_refused += 1;
                if self.disk.image() != image {
                    return Err(format!("a resize was refused, and changed the disk: {result:?}"));
                }
            }
            // Writes may have failed, and with them the device; the next process finds it as it is.
            (
                Err(
                    OpenError::Device(_)
                    | OpenError::HeaderDamaged { .. }
                    | OpenError::EndUnreadable { .. }
                    | OpenError::Fenced { .. },
                ),
                None,
            ) if failed => {
                self.replace_disk(self.disk.process_crash());
            }
            (Err(cause), None) => return Err(format!("cannot be resized: {cause}")),
        }
        let Ok(after) = Wal::inspect(&self.disk.device()) else {
            return match self.plan.profile {
                Profile::PowerCut => Err("a resize has left no header".into()),
                Profile::Faults => Ok(()),
            };
        };
        let capacities = [found.header.capacity_bytes, wanted];
        if !capacities.contains(&after.header.capacity_bytes) {
            return Err(format!(
                "{} bytes after a resize, {capacities:?}",
                after.header.capacity_bytes
            ));
        }
        if result.is_err() && after.header.capacity_bytes == wanted {
            self.outcome.resizes_interrupted_late += 1;
        }
        self.model.resized(&after.header, &mut self.hits.lock());
        if self.plan.profile == Profile::PowerCut && self.scan() != before {
            return Err("a resize has changed the log".into());
        }
        Ok(())
    }

    /// The records that a walk hands out now.
    fn scan(&self) -> Option<Vec<Record>> {
        let mut records = Vec::new();
        let scanned = Wal::scan(&self.disk.device(), None, &mut |record| {
            records.push(record);
            Ok(())
        });
        scanned.ok().map(|_| records)
    }
}
