//! The identity of a cluster in handshakes.

/// The id of the cluster with a name: the first 16 bytes of its SHA-256.
pub fn cluster_id(name: &str) -> [u8; 16] {
    let digest = ring::digest::digest(&ring::digest::SHA256, name.as_bytes());
    digest.as_ref()[..16].try_into().expect("a digest has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first test vector of FIPS 180-2.
    #[test]
    fn the_id_is_that_of_sha_256() {
        assert_eq!(
            cluster_id("abc"),
            [
                0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae,
                0x22, 0x23
            ]
        );
    }
}
