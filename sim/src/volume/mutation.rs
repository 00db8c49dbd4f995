//! Defects that the campaign must find.

use std::fmt;

use alluvium_volume::{Broken, Rule};
use clap::ValueEnum;

macro_rules! mutations {
    ($($(#[$doc:meta])* $variant:ident $($rule:ident)?,)*) => {
        /// A rule of the protocol that is broken on purpose, to show that the campaign finds it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        pub enum Mutation {
            $($(#[$doc])* $variant,)*
        }

        impl Mutation {
            /// All mutations, `Sound` included.
            pub fn all() -> impl Iterator<Item = Self> {
                Self::value_variants().iter().copied()
            }

            /// The rule of the shard that is broken. The others are the clients'.
            pub(super) fn broken(self) -> Broken {
                match self {
                    $($(Self::$variant => Broken::rule(Rule::$rule),)?)*
                    _ => Broken::default(),
                }
            }
        }
    };
}

mutations! {
    /// No rule is broken.
    Sound,
    /// A checkpoint does not wait until the blocks at or below its base have landed.
    NoLandingWait LandingWait,
    /// A checkpoint does not flush the store before its record.
    NoFlush Flush,
    /// The result of a flush of the store is ignored.
    FlushResultIgnored FlushResult,
    /// Followers do no step of a checkpoint at the store (the defect of CurveBS).
    FollowersSkipCheckpoint FollowersCheckpoint,
    /// Blocks go to the store before the log durably states that their entries are committed.
    NoCommitRule CommitRule,
    /// The word of a block is set when its entry is applied, not when its write is submitted.
    WordAtApply WordAtSubmission,
    /// A slot is taken when a block is written, not when its entry is applied.
    SlotAtWriteBack SlotAtApply,
    /// A ring that fills does not start a checkpoint.
    FullRingIgnored FullRing,
    /// The log is trimmed to the checkpoint's record, whatever entries a group still needs.
    TrimToCheckpoint TrimKeepsEntries,
    /// The record of a checkpoint states the base as the commit index, although more is applied.
    CheckpointCommitLow CheckpointCommit,
    /// A group is carried forward with only a part of its entries above the base.
    CarryForwardPart CarryForwardWhole,
    /// Each record of a ready that is split states the commit index of the whole.
    CommitInEachRecord CommitInLastRecord,
    /// The log is read over its damage.
    DamageReadOver DamageInLog,
    /// A replica that the log has no record of is created again.
    CreatedAgain CreatedOnce,
    /// The slot of a damaged sector is free.
    DamagedSectorFree DamagedSector,
    /// An install writes blocks without a durable record of its barrier.
    InstallWithoutRecord InstallRecord,
    /// Checkpoints do not repeat the barriers.
    BarrierDropped Barrier,
    /// An install leaves the blocks that its source does not have.
    InstallLeavesRest InstallRemoves,
    /// The base of a replica that is not exact counts for what has changed since.
    PairWhileInexact PairWhenExact,
    /// A source leaves out the blocks of the overlay.
    OverlayNotSent OverlayChanged,
    /// A source finds the changed blocks by its newest checkpoint, whatever the target has.
    NewestPair PairBelow,
    /// An install skips a block whose word is equal, without reading the block.
    PulledWordTrusted PulledWord,
    /// An install keeps the windows that the target had.
    InstallOldVolumes InstallVolumes,
    /// Raft is handed a snapshot whose blocks were not pulled.
    OtherSnapshot InstallIndex,
    /// The old log may be trimmed from the start of an install on, not from its completion.
    OldLogReleased OldLogStays,
    /// A checkpoint during an install states the commit index of the snapshot for the old log,
    /// lowered to its last index.
    CommitOfInstall CommitOfOldLog,
    /// An install is reported to raft before a checkpoint has made it durable.
    InstallReportedEarly InstallReported,
    /// Votes and acknowledgements of entries are sent before the log is durable.
    PersistedMessagesEarly PersistedMessages,
    /// Messages for which raft has no ready are sent before the earlier readies are durable.
    MessagesOvertakeReady EarlierReadies,
    /// The epoch of an op is compared when it is proposed, and not when it is applied.
    EpochAtProposal EpochAtApply,
    /// An op that is sent again takes effect again.
    NoWindow Window,
    /// An attachment that is sent again empties the window.
    EqualAttachEmpties EqualAttach,
    /// A gateway has overlapping ops in flight.
    NoRangeLock,
    /// A gateway unlocks the range of a failed op before its floor has passed the number.
    FailedOpReleased,
    /// Reads carry no token.
    NoToken,
    /// A read does not raise the token, only an acknowledged op does.
    TokenIgnoresReads,
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no variant is skipped");
        f.write_str(value.get_name())
    }
}
