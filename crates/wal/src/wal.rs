//! The interface.
#![allow(clippy::unimplemented, unused_variables)]
use std::future::Future;
use std::ops::RangeTo;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use alluvium_device::SharedDevice;
use uuid::Uuid;

use crate::*;

/// An open write-ahead log. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Wal {
    shared: Arc<SharedDevice>,
}

impl Wal {
    /// Make a WAL on the device. Refuses where something else is, unless forced.
    pub fn format(device: &SharedDevice, options: &FormatOptions) -> Result<HeaderInfo, OpenError> {
        unimplemented!()
    }
    /// Recover, then open for traffic. `visit` gets every record in log order. Blocking.
    pub fn open(
        device: SharedDevice,
        options: &Options,
        progress: Option<Progress>,
        visit: &mut dyn FnMut(Record) -> Result<(), VisitError>,
    ) -> Result<(Self, RecoveryReport), OpenError> {
        unimplemented!()
    }
    /// The same walk, read-only: for inspect, dump, verify. Writes nothing.
    pub fn scan(
        device: &SharedDevice,
        progress: Option<Progress>,
        visit: &mut dyn FnMut(Record) -> Result<(), VisitError>,
    ) -> Result<RecoveryReport, OpenError> {
        unimplemented!()
    }
    /// Both header slots and which one counts.
    pub fn inspect(device: &SharedDevice) -> Result<Inspection, OpenError> {
        unimplemented!()
    }
    /// Identity, fixed by format.
    pub fn id(&self) -> Uuid {
        unimplemented!()
    }
    /// `parts` are concatenated into one payload. Never blocks on I/O. Nothing is changed on error.
    pub fn append(&self, parts: &[&[u8]]) -> Result<Append, AppendError> {
        unimplemented!()
    }
    /// Everything before it is on stable storage.
    pub fn durable(&self) -> LogOffset {
        unimplemented!()
    }
    /// Where the log ends now. The next record starts here, or behind a padding.
    pub fn appended(&self) -> LogOffset {
        unimplemented!()
    }
    /// Resolves when everything before `offset` is durable.
    pub fn wait_durable(&self, offset: LogOffset) -> Durable {
        unimplemented!()
    }
    /// Resolves after durable or trim have moved since the call, or the WAL failed or closed.
    pub fn wait_room(&self) -> Room {
        unimplemented!()
    }
    /// Give up everything before `to.end`, a record's start or end that is durable.
    pub fn trim(&self, to: RangeTo<LogOffset>) -> Trim {
        unimplemented!()
    }
    /// Numbers of this moment.
    pub fn stats(&self) -> Stats {
        unimplemented!()
    }
    /// Waits for what is in flight, writes the clean header. Blocking. Appends after it: Closed.
    pub fn close(self) -> Result<(), WalError> {
        unimplemented!()
    }
}

macro_rules! wait_future {
    ($(#[$meta:meta])* $name:ident, $output:ty) => {
        $(#[$meta])*
        #[derive(Debug)]
        #[must_use]
        pub struct $name {
            offset: LogOffset,
            end: LogOffset,
        }
        impl Future for $name {
            type Output = $output;
            fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
                unimplemented!()
            }
        }
        impl $name {
            /// Block this thread instead of awaiting.
            pub fn wait(self) -> $output {
                unimplemented!()
            }
        }
    };
}
wait_future!(
    /// Resolves when the record and everything before it is durable. Dropping it changes nothing.
    Append, Result<(), WalError>
);
wait_future!(
    /// See [`Wal::wait_durable`].
    Durable, Result<(), WalError>
);
wait_future!(
    /// See [`Wal::wait_room`].
    Room, ()
);
wait_future!(
    /// Resolves when the trim is durable and the space reusable.
    Trim, Result<(), WalError>
);
impl Append {
    /// Where the record starts.
    pub fn offset(&self) -> LogOffset {
        self.offset
    }
    /// Where it ends.
    pub fn end(&self) -> LogOffset {
        self.end
    }
}
