//! The replicated state of a group: which attachment of each volume counts, and which of its ops
//! were applied. Every replica decides from the log alone, so all decide alike.
//! `docs/format/volume-wire.md`, section 6.

use std::collections::BTreeMap;

use crate::op::{Attach, BlockOp, Op};
use crate::rules::{Broken, Rule};
use crate::types::{AttachEpoch, Layer, Parent, VolumeId};
use crate::window::{Window, Write};

/// The replicated state of a volume in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeState {
    /// The volume.
    pub volume: VolumeId,
    /// What the volume is a clone of.
    pub parent: Option<Parent>,
    /// Epoch of the attachment that counts.
    pub epoch: AttachEpoch,
    /// The attachment's random number. It tells two processes apart that were given one epoch.
    pub nonce: u32,
    /// The ops of that attachment that were applied; `None` if the volume is not attached.
    pub window: Option<Window>,
    /// Layers that no volume needs any more, in ascending order.
    pub dropped_layers: Vec<Layer>,
}

/// The replicated state of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupState {
    volumes: BTreeMap<VolumeId, VolumeState>,
}

/// What an op did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It took effect. The blocks of a block op are to be changed.
    Effect,
    /// It had taken effect before, or its gateway has given it up: it is answered as done.
    Duplicate,
    /// It has no effect.
    Refused(Refusal),
}

/// Why an op has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A newer attachment counts.
    #[error("the volume is attached with epoch {0}, which is newer")]
    Fenced(AttachEpoch),
    /// The op's attachment has not reached this group.
    #[error("the attachment is not known; the volume is attached with epoch {0}")]
    NotAttached(AttachEpoch),
}

impl GroupState {
    /// The state of a group whose volumes are known, from a checkpoint or at its creation.
    pub fn new(volumes: impl IntoIterator<Item = VolumeState>) -> Self {
        Self { volumes: volumes.into_iter().map(|state| (state.volume, state)).collect() }
    }

    /// The volumes, in ascending order.
    pub fn volumes(&self) -> impl Iterator<Item = &VolumeState> {
        self.volumes.values()
    }

    /// Whether the group knows the volume.
    pub fn has(&self, volume: VolumeId) -> bool {
        self.volumes.contains_key(&volume)
    }

    /// The state of a volume.
    pub fn volume(&self, volume: VolumeId) -> Option<&VolumeState> {
        self.volumes.get(&volume)
    }

    /// Whether an attachment counts.
    pub fn admits(&self, volume: VolumeId, epoch: AttachEpoch) -> bool {
        let state = self.volumes.get(&volume);
        state.is_some_and(|state| state.window.is_some() && state.epoch == epoch)
    }

    /// Applies a committed op.
    pub fn apply(&mut self, op: &Op) -> Applied {
        self.apply_unless(op, Broken::default())
    }

    /// Applies a committed op, unless a rule is broken.
    pub(crate) fn apply_unless(&mut self, op: &Op, broken: Broken) -> Applied {
        match op {
            Op::Blocks(op) => self.apply_blocks(op, broken),
            Op::Attach(attach) => self.attach(attach, broken),
            Op::Noop { attachment: Some((volume, epoch)) } => match self.admit(*volume, *epoch) {
                Ok(_) => Applied::Effect,
                Err(refusal) => Applied::Refused(refusal),
            },
            // The members are raft's.
            Op::Noop { attachment: None } | Op::Configuration(_) => Applied::Effect,
        }
    }

    fn apply_blocks(&mut self, op: &BlockOp, broken: Broken) -> Applied {
        if broken.is(Rule::EpochAtApply) && self.has(op.volume) {
            return Applied::Effect;
        }
        let window = match self.admit(op.volume, op.epoch) {
            Ok(window) => window,
            Err(refusal) => return Applied::Refused(refusal),
        };
        if broken.is(Rule::Window) {
            return Applied::Effect;
        }
        match window.write(op.number, op.floor()) {
            Write::Apply => Applied::Effect,
            Write::Repeated => Applied::Duplicate,
            Write::OutOfWindow => unreachable!("the distance of an op from its floor is bounded"),
        }
    }

    /// The window of an attachment that counts.
    fn admit(&mut self, volume: VolumeId, epoch: AttachEpoch) -> Result<&mut Window, Refusal> {
        let Some(state) = self.volumes.get_mut(&volume) else {
            return Err(Refusal::NotAttached(AttachEpoch(0)));
        };
        match &mut state.window {
            Some(window) if epoch == state.epoch => Ok(window),
            _ if epoch < state.epoch => Err(Refusal::Fenced(state.epoch)),
            _ => Err(Refusal::NotAttached(state.epoch)),
        }
    }

    fn attach(&mut self, attach: &Attach, broken: Broken) -> Applied {
        let state = self.volumes.entry(attach.volume).or_insert_with(|| VolumeState {
            volume: attach.volume,
            parent: attach.parent,
            epoch: AttachEpoch(0),
            nonce: 0,
            window: None,
            dropped_layers: Vec::new(),
        });
        if attach.epoch > state.epoch {
            (state.epoch, state.nonce) = (attach.epoch, attach.nonce);
            state.parent = attach.parent;
            state.window = Some(Window::default());
            return Applied::Effect;
        }
        match (attach.epoch, attach.nonce) == (state.epoch, state.nonce) {
            // Sent again. The window stays: ops that were numbered since are in it.
            true => {
                if broken.is(Rule::EqualAttach) {
                    state.window = Some(Window::default());
                }
                Applied::Duplicate
            }
            false => Applied::Refused(Refusal::Fenced(state.epoch)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::op::{BlockRange, Change};
    use crate::types::{ChunkIndex, Sequence};

    const VOLUME: VolumeId = VolumeId(7);

    fn attach(epoch: u64, nonce: u32) -> Op {
        Op::Attach(Attach {
            volume: VOLUME,
            epoch: AttachEpoch(epoch),
            parent: None,
            gateway: None,
            nonce,
        })
    }

    fn zero(epoch: u64, number: u64, floor: u64) -> Op {
        Op::Blocks(BlockOp {
            volume: VOLUME,
            epoch: AttachEpoch(epoch),
            layer: Layer(0),
            number: Sequence(number),
            floor_distance: (number - floor) as u32,
            range: BlockRange { chunk: ChunkIndex(0), first: 0, blocks: 1 },
            change: Change::Zero,
        })
    }

    /// A gateway that keeps what it has sent, and may send it again.
    #[derive(Default)]
    struct Gateway {
        epoch: u64,
        next: u64,
        /// Numbers that are not completed.
        outstanding: BTreeSet<u64>,
    }

    impl Gateway {
        fn floor(&self) -> u64 {
            self.outstanding.first().copied().unwrap_or(self.next)
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// The gateway sends a new op.
        Send,
        /// An op on its way, any copy of it, is committed. The copy stays.
        Commit(prop::sample::Index),
        /// The gateway reports an outstanding op as failed.
        GiveUp(prop::sample::Index),
        /// A gateway sends an outstanding op again, with its present floor.
        Retry(prop::sample::Index),
        /// Another process attaches the volume.
        Attach,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => Just(Step::Send),
            9 => any::<prop::sample::Index>().prop_map(Step::Commit),
            1 => any::<prop::sample::Index>().prop_map(Step::GiveUp),
            3 => any::<prop::sample::Index>().prop_map(Step::Retry),
            1 => Just(Step::Attach),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Copies of ops are committed in any order, any number of times.
        #[test]
        fn an_op_takes_effect_once_and_is_answered_only_then(
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let mut state = GroupState::default();
            let mut gateways = vec![Gateway { epoch: 1, next: 1, ..Gateway::default() }];
            let mut network = vec![attach(1, 1)];
            let mut effects: BTreeMap<(u64, u64), u32> = BTreeMap::new();
            let mut newest = 0;
            for step in steps {
                let current = gateways.last_mut().unwrap();
                match step {
                    Step::Send => {
                        let number = current.next;
                        current.next += 1;
                        current.outstanding.insert(number);
                        network.push(zero(current.epoch, number, current.floor()));
                    }
                    Step::GiveUp(at) if !current.outstanding.is_empty() => {
                        let at = at.index(current.outstanding.len());
                        let number = *current.outstanding.iter().nth(at).unwrap();
                        current.outstanding.remove(&number);
                    }
                    Step::Retry(at) if !current.outstanding.is_empty() => {
                        let at = at.index(current.outstanding.len());
                        let number = *current.outstanding.iter().nth(at).unwrap();
                        network.push(zero(current.epoch, number, current.floor()));
                    }
                    Step::GiveUp(_) | Step::Retry(_) => {}
                    Step::Attach => {
                        let epoch = current.epoch + 1;
                        gateways.push(Gateway { epoch, next: 1, ..Gateway::default() });
                        network.push(attach(epoch, epoch as u32));
                    }
                    Step::Commit(at) => {
                        let op = network[at.index(network.len())].clone();
                        let applied = state.apply(&op);
                        let (epoch, number) = match &op {
                            Op::Blocks(op) => (op.epoch.0, op.number.0),
                            Op::Attach(attach) => {
                                if applied == Applied::Effect {
                                    prop_assert!(attach.epoch.0 > newest);
                                    newest = attach.epoch.0;
                                }
                                continue;
                            }
                            _ => unreachable!("not sent here"),
                        };
                        let gateway = &mut gateways[epoch as usize - 1];
                        let count = effects.entry((epoch, number)).or_default();
                        match applied {
                            Applied::Effect => {
                                *count += 1;
                                prop_assert_eq!(*count, 1, "applied again");
                                prop_assert_eq!(epoch, newest, "a fenced op was applied");
                                gateway.outstanding.remove(&number);
                            }
                            Applied::Duplicate => {
                                // An outstanding op is answered only if it had its effect.
                                let is_waiting = gateway.outstanding.remove(&number);
                                prop_assert!(!is_waiting || *count == 1, "answered without effect");
                            }
                            Applied::Refused(_) => prop_assert_ne!(epoch, newest),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn one_epoch_given_to_two_processes_attaches_only_the_first() {
        let mut state = GroupState::default();
        assert_eq!(state.apply(&attach(3, 10)), Applied::Effect);
        assert_eq!(state.apply(&zero(3, 1, 1)), Applied::Effect);
        assert_eq!(state.apply(&attach(3, 10)), Applied::Duplicate);
        assert_eq!(state.apply(&zero(3, 1, 1)), Applied::Duplicate, "the window is kept");
        let fenced = Applied::Refused(Refusal::Fenced(AttachEpoch(3)));
        assert_eq!(state.apply(&attach(3, 11)), fenced, "a second process with the same epoch");
        assert_eq!(state.apply(&attach(2, 9)), fenced);
        let unknown = Applied::Refused(Refusal::NotAttached(AttachEpoch(3)));
        assert_eq!(state.apply(&zero(4, 1, 1)), unknown);
        let noop = |epoch| Op::Noop { attachment: Some((VOLUME, AttachEpoch(epoch))) };
        assert_eq!(state.apply(&noop(3)), Applied::Effect);
        assert_eq!(state.apply(&noop(2)), fenced);
        assert_eq!(state.apply(&Op::Noop { attachment: None }), Applied::Effect);
    }
}
