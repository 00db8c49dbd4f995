//! Rules of the protocol that the simulation breaks on purpose, to show that it would find their
//! absence. Outside of tests and without the feature `simulation` none can be broken, and the
//! checks are constants.

/// A rule of the protocol. `docs/volumes-design.md` has their text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A checkpoint waits until the blocks at or below its bases have landed.
    LandingWait,
    /// The store is flushed before the checkpoint is recorded.
    Flush,
    /// A failed flush ends the server.
    FlushResult,
    /// Followers do all steps of a checkpoint.
    FollowersCheckpoint,
    /// A block goes to the store only when its entry is at or below the durable commit.
    CommitRule,
    /// A word is set when the write of its block is submitted.
    WordAtSubmission,
    /// A freed slot is used again only when a checkpoint that covers the freeing is complete.
    FreedSlotWaits,
    /// The sector of a former replica of the group does not count.
    FormerReplica,
    /// A damaged sector is not a free slot.
    DamagedSector,
    /// A slot is reserved when the entry is applied.
    SlotAtApply,
    /// A ring that fills starts a checkpoint.
    FullRing,
    /// A trim keeps the entries above each base.
    TrimKeepsEntries,
    /// A checkpoint states a commit index that is not below what was applied at its swap.
    CheckpointCommit,
    /// A group is carried forward with all its entries above the base.
    CarryForwardWhole,
    /// Only the last record of a ready states its commit index.
    CommitInLastRecord,
    /// Votes and acknowledgements are sent when they are durable.
    PersistedMessages,
    /// A follower's messages without a ready wait until its earlier readies are durable.
    EarlierReadies,
    /// Damage in the log makes replicas lost.
    DamageInLog,
    /// A replica that was created before and is not in the log is lost.
    CreatedOnce,
    /// The record of an install is durable before its first block is written.
    InstallRecord,
    /// Checkpoints repeat the barriers.
    Barrier,
    /// An install removes the blocks that its source lacks.
    InstallRemoves,
    /// A base becomes a pair only if the replica was exact at the swap.
    PairWhenExact,
    /// A source sends the blocks of the overlay, whose words are older.
    OverlayChanged,
    /// A source finds the changed blocks by a checkpoint whose base is not above the index asked
    /// for.
    PairBelow,
    /// An install reads a block before it treats it as equal.
    PulledWord,
    /// The volumes of an install are those of exactly its index.
    InstallVolumes,
    /// Only the snapshot whose blocks were pulled is handed to raft.
    InstallIndex,
    /// The old log stays until the install is complete.
    OldLogStays,
    /// The commit index belongs to the log that it was written with.
    CommitOfOldLog,
    /// Raft learns of an install when it is durable.
    InstallReported,
    /// The epoch of an op is compared when it is applied.
    EpochAtApply,
    /// An op takes effect once.
    Window,
    /// An attachment that is sent again keeps the window.
    EqualAttach,
    /// Overlapping changes of a gateway are never in flight together.
    RangeLock,
    /// The range of a failed op stays locked until the floor has passed its number.
    FailedRange,
    /// A gateway's floor is the lowest number that is not completed.
    GatewayFloor,
    /// A read carries the token.
    Token,
    /// An answered read raises the token.
    TokenOfReads,
    /// An op that is sent again keeps its number.
    NumberOfRetry,
}

/// The rule that is broken, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Broken(#[cfg(any(test, feature = "simulation"))] Option<Rule>);

impl Broken {
    /// Breaks a rule.
    #[cfg(any(test, feature = "simulation"))]
    pub fn rule(rule: Rule) -> Self {
        Self(Some(rule))
    }

    /// Whether the rule is broken.
    #[cfg(any(test, feature = "simulation"))]
    pub fn is(self, rule: Rule) -> bool {
        self.0 == Some(rule)
    }

    /// Whether the rule is broken.
    #[cfg(not(any(test, feature = "simulation")))]
    pub fn is(self, _: Rule) -> bool {
        false
    }
}
