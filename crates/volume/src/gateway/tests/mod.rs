//! Tests of sessions and handles: against a model of three servers, by seed, and one by one.

mod campaign;
mod history;
mod model;
mod session;
mod volume;
