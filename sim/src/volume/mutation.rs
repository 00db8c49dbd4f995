//! Defects that the campaign must find.

use std::fmt;
use std::str::FromStr;

macro_rules! mutations {
    ($($(#[$doc:meta])* $variant:ident $name:literal,)*) => {
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
        }
    };
}

mutations! {
    /// No rule is broken.
    Sound "sound",
    /// A checkpoint does not wait until the blocks at or below its base have landed.
    NoLandingWait "no-landing-wait",
    /// A checkpoint does not flush the store before its record.
    NoFlush "no-flush",
    /// Followers neither wait for landings nor flush (the defect of CurveBS).
    FollowersSkipCheckpoint "followers-skip-checkpoint",
    /// Blocks go to the store before the log durably states that their entries are committed.
    NoCommitRule "no-commit-rule",
    /// The word of a block is set when its entry is applied, not when its write is submitted.
    WordAtApply "word-at-apply",
    /// A ring that fills does not start a checkpoint.
    FullRingIgnored "full-ring-ignored",
    /// The log is trimmed to the checkpoint's record, whatever entries a group still needs.
    TrimToCheckpoint "trim-to-checkpoint",
    /// The record of a checkpoint states the base as the commit index, although more is applied.
    CheckpointCommitLow "checkpoint-commit-low",
    /// A group is carried forward with only a part of its entries above the base.
    CarryForwardPart "carry-forward-part",
    /// An install writes blocks without a durable record of its barrier.
    InstallWithoutRecord "install-without-record",
    /// Checkpoints do not repeat the barriers.
    BarrierDropped "barrier-dropped",
    /// An install leaves the blocks that its source does not have.
    InstallLeavesRest "install-leaves-rest",
    /// An install skips a block whose word is equal, without reading the block.
    PulledWordTrusted "pulled-word-trusted",
    /// The old log may be trimmed from the start of an install on, not from its completion.
    OldLogReleased "old-log-released",
    /// A checkpoint during an install states the commit index of the snapshot for the old log, and
    /// recovery lowers it to the last index.
    CommitOfInstall "commit-of-install",
    /// An install is reported to raft before a checkpoint has made it durable.
    InstallReportedEarly "install-reported-early",
    /// Votes and acknowledgements of entries are sent before the log is durable.
    PersistedMessagesEarly "persisted-messages-early",
    /// Reads carry no token.
    NoToken "no-token",
    /// A read does not raise the token, only an acknowledged write does.
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
