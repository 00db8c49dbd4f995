//! What a server meets outside of itself: the network, the log of what was committed, and the seed.

use std::hash::{DefaultHasher, Hash, Hasher};

use alluvium_device::sim::Random;

use super::Outcome;
use super::mutation::Mutation;
use super::network::Network;
use super::oracle::Oracle;

/// The environment of all servers.
pub(super) struct Environment {
    pub(super) mutation: Mutation,
    pub(super) random: Random,
    pub(super) network: Network,
    pub(super) oracle: Oracle,
    pub(super) outcome: Outcome,
    pub(super) trace: Trace,
}

/// A digest of all events, by which two runs of a seed are compared.
pub(super) struct Trace {
    digest: DefaultHasher,
    verbose: bool,
}

impl Trace {
    pub(super) fn new(verbose: bool) -> Self {
        Self { digest: DefaultHasher::new(), verbose }
    }

    /// Notes an event, and prints it if the trace is verbose.
    pub(super) fn event(&mut self, name: &str, fields: &[(&str, u64)]) {
        name.hash(&mut self.digest);
        for (_, value) in fields {
            value.hash(&mut self.digest);
        }
        if self.verbose {
            let fields: Vec<String> =
                fields.iter().map(|(field, value)| format!(" {field} {value}")).collect();
            eprintln!("{name}:{}", fields.concat());
        }
    }

    pub(super) fn digest(&self) -> u64 {
        self.digest.finish()
    }
}
