//! Defects that the campaign must find.

use std::fmt;
use std::str::FromStr;

use alluvium_volume::{Broken, Rule};

macro_rules! mutations {
    ($($(#[$doc:meta])* $variant:ident $name:literal $($rule:ident)?,)*) => {
        /// A rule of the protocol that is broken on purpose, to show that the campaign finds it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutation {
            $($(#[$doc])* $variant,)*
        }

        impl Mutation {
            /// All mutations, `Sound` included.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
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
    Sound "sound",
    /// A checkpoint does not wait until the blocks at or below its base have landed.
    NoLandingWait "no-landing-wait" LandingWait,
    /// A checkpoint does not flush the store before its record.
    NoFlush "no-flush" Flush,
    /// Followers do no step of a checkpoint at the store (the defect of CurveBS).
    FollowersSkipCheckpoint "followers-skip-checkpoint" FollowersCheckpoint,
    /// Blocks go to the store before the log durably states that their entries are committed.
    NoCommitRule "no-commit-rule" CommitRule,
    /// The word of a block is set when its entry is applied, not when its write is submitted.
    WordAtApply "word-at-apply" WordAtSubmission,
    /// A freed slot is used again before a checkpoint covers the freeing.
    FreedSlotReused "freed-slot-reused" FreedSlotWaits,
    /// A slot is taken when a block is written, not when its entry is applied.
    SlotAtWriteBack "slot-at-write-back" SlotAtApply,
    /// A ring that fills does not start a checkpoint.
    FullRingIgnored "full-ring-ignored" FullRing,
    /// The log is trimmed to the checkpoint's record, whatever entries a group still needs.
    TrimToCheckpoint "trim-to-checkpoint" TrimKeepsEntries,
    /// The record of a checkpoint states the base as the commit index, although more is applied.
    CheckpointCommitLow "checkpoint-commit-low" CheckpointCommit,
    /// A group is carried forward with only a part of its entries above the base.
    CarryForwardPart "carry-forward-part" CarryForwardWhole,
    /// Each record of a ready that is split states the commit index of the whole.
    CommitInEachRecord "commit-in-each-record" CommitInLastRecord,
    /// An install writes blocks without a durable record of its barrier.
    InstallWithoutRecord "install-without-record" InstallRecord,
    /// Checkpoints do not repeat the barriers.
    BarrierDropped "barrier-dropped" Barrier,
    /// An install leaves the blocks that its source does not have.
    InstallLeavesRest "install-leaves-rest" InstallRemoves,
    /// An install skips a block whose word is equal, without reading the block.
    PulledWordTrusted "pulled-word-trusted" PulledWord,
    /// An install keeps the windows that the target had.
    InstallOldVolumes "install-old-volumes" InstallVolumes,
    /// The old log may be trimmed from the start of an install on, not from its completion.
    OldLogReleased "old-log-released" OldLogStays,
    /// A checkpoint during an install states the commit index of the snapshot for the old log,
    /// lowered to its last index.
    CommitOfInstall "commit-of-install" CommitOfOldLog,
    /// An install is reported to raft before a checkpoint has made it durable.
    InstallReportedEarly "install-reported-early" InstallReported,
    /// Votes and acknowledgements of entries are sent before the log is durable.
    PersistedMessagesEarly "persisted-messages-early" PersistedMessages,
    /// The epoch of an op is compared when it is proposed, and not when it is applied.
    EpochAtProposal "epoch-at-proposal" EpochAtApply,
    /// An op that is sent again takes effect again.
    NoWindow "no-window" Window,
    /// An attachment that is sent again empties the window.
    EqualAttachEmpties "equal-attach-empties" EqualAttach,
    /// The floor is raised after the number is tested.
    FloorLast "floor-last" FloorFirst,
    /// A gateway has overlapping ops in flight.
    NoRangeLock "no-range-lock",
    /// A gateway unlocks the range of a failed op before its floor has passed the number.
    FailedOpReleased "failed-op-released",
    /// Reads carry no token.
    NoToken "no-token",
    /// A read does not raise the token, only an acknowledged op does.
    TokenIgnoresReads "token-ignores-reads",
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mutation {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.iter().copied().find(|mutation| mutation.name() == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|mutation| mutation.name()).collect();
            format!("no such mutation; expected one of {}", names.join(", "))
        })
    }
}
