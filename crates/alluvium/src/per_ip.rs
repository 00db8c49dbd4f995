//! Numbers by address, as `10.0.0.1:100,2001:db8::1:5`: Kafka's `max.connections.per.ip.overrides`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Limits on connections by address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PerIp(pub(crate) BTreeMap<IpAddr, u32>);

impl FromStr for PerIp {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        alluvium_broker::per_ip(text).map(Self)
    }
}

impl fmt::Display for PerIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (ip, count)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{ip}:{count}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_numbers_by_address_can_be_parsed_again() {
        let text = "10.0.0.1:100, [2001:db8::1]:5,::1:0";
        let read: PerIp = text.parse().unwrap();
        let wanted = [("10.0.0.1", 100), ("2001:db8::1", 5), ("::1", 0)];
        assert_eq!(read.0, wanted.map(|(ip, count)| (ip.parse().unwrap(), count)).into());
        assert_eq!(read.to_string().parse(), Ok(read));
        assert_eq!("".parse(), Ok(PerIp::default()));
        for wrong in ["10.0.0.1", "host:5", "10.0.0.1:-1", "10.0.0.1:5,::ffff:10.0.0.1:6"] {
            assert!(wrong.parse::<PerIp>().is_err(), "{wrong}");
        }
    }
}
