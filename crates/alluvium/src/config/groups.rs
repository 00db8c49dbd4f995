//! The options of groups whose members send heartbeats to the server.

use std::time::Duration;

use alluvium_broker::groups::MemberTimes;

use super::{ConfigError, ServeOptions, within};
use crate::units::Span;

/// Bounds of all these times.
const MIN: Span = Span(Duration::from_millis(1));
const MAX: Span = Span(Duration::from_secs(24 * 3600));

/// The times of consumer groups and of share groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupTimes {
    pub(crate) consumer: MemberTimes,
    pub(crate) share: MemberTimes,
}

impl GroupTimes {
    /// The configured times, with the broker's defaults, which are Kafka's.
    pub(super) fn of(options: &ServeOptions) -> Self {
        let GroupTimes { consumer, share } = Self::default();
        let time = |said: Option<Span>, default| said.map_or(default, |Span(time)| time);
        Self {
            consumer: MemberTimes {
                heartbeat_interval: time(
                    options.group_consumer_heartbeat_interval,
                    consumer.heartbeat_interval,
                ),
                min_heartbeat_interval: time(
                    options.group_consumer_min_heartbeat_interval,
                    consumer.min_heartbeat_interval,
                ),
                max_heartbeat_interval: time(
                    options.group_consumer_max_heartbeat_interval,
                    consumer.max_heartbeat_interval,
                ),
                session_timeout: time(
                    options.group_consumer_session_timeout,
                    consumer.session_timeout,
                ),
                min_session_timeout: time(
                    options.group_consumer_min_session_timeout,
                    consumer.min_session_timeout,
                ),
                max_session_timeout: time(
                    options.group_consumer_max_session_timeout,
                    consumer.max_session_timeout,
                ),
            },
            share: MemberTimes {
                heartbeat_interval: time(
                    options.group_share_heartbeat_interval,
                    share.heartbeat_interval,
                ),
                min_heartbeat_interval: time(
                    options.group_share_min_heartbeat_interval,
                    share.min_heartbeat_interval,
                ),
                max_heartbeat_interval: time(
                    options.group_share_max_heartbeat_interval,
                    share.max_heartbeat_interval,
                ),
                session_timeout: time(options.group_share_session_timeout, share.session_timeout),
                min_session_timeout: time(
                    options.group_share_min_session_timeout,
                    share.min_session_timeout,
                ),
                max_session_timeout: time(
                    options.group_share_max_session_timeout,
                    share.max_session_timeout,
                ),
            },
        }
    }

    /// Checks the bounds and the relations between the times.
    ///
    /// # Errors
    /// The message names the option and its bounds.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        for (kind, times) in [("consumer", &self.consumer), ("share", &self.share)] {
            let option = |end: &str| format!("group-{kind}-{end}");
            let heartbeat = Span(times.heartbeat_interval);
            let (least, most) =
                (Span(times.min_heartbeat_interval), Span(times.max_heartbeat_interval));
            within(&option("min-heartbeat-interval"), least, MIN, MAX)?;
            within(&option("max-heartbeat-interval"), most, least, MAX)?;
            within(&option("heartbeat-interval"), heartbeat, least, most)?;
            let session = Span(times.session_timeout);
            let (least, most) = (Span(times.min_session_timeout), Span(times.max_session_timeout));
            within(&option("min-session-timeout"), least, MIN, MAX)?;
            within(&option("max-session-timeout"), most, least, MAX)?;
            within(&option("session-timeout"), session, least, most)?;
            if heartbeat >= session {
                return Err(ConfigError(format!(
                    "group-{kind}-heartbeat-interval is {heartbeat}, which is not less than \
                     group-{kind}-session-timeout, {session}"
                )));
            }
        }
        Ok(())
    }

    /// Formats the times for the log, by option name.
    pub(super) fn to_log_text(&self) -> String {
        let mut entries = Vec::new();
        for (kind, times) in [("consumer", &self.consumer), ("share", &self.share)] {
            for (end, time) in [
                ("heartbeat-interval", times.heartbeat_interval),
                ("min-heartbeat-interval", times.min_heartbeat_interval),
                ("max-heartbeat-interval", times.max_heartbeat_interval),
                ("session-timeout", times.session_timeout),
                ("min-session-timeout", times.min_session_timeout),
                ("max-session-timeout", times.max_session_timeout),
            ] {
                entries.push(format!("group-{kind}-{end}={}", Span(time)));
            }
        }
        entries.join(" ")
    }
}
