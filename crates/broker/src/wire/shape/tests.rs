//! Tests of the shapes against the decoders that they protect.

use bytes::{BufMut, Bytes, BytesMut};
use kafka_protocol::messages::ApiKey;
use proptest::prelude::*;

use super::*;
use crate::api::{APIS, Api};
use crate::tests::examples::{self, World};

const NO_LIMIT: usize = usize::MAX;

fn all() -> impl Iterator<Item = (&'static Api, i16)> {
    APIS.iter().flat_map(|api| (api.min..=api.max).map(move |version| (api, version)))
}

fn left_by_shape(api: &Api, version: i16, bytes: &[u8]) -> Result<usize, Misshapen> {
    api.shape.walk_from(bytes, version, NO_LIMIT).map(|walk| walk.rest.len())
}

#[test]
fn every_version_of_every_request_has_its_shape() {
    for (api, version) in all() {
        let request = examples::request(api.key, version, 1, &World::imaginary());
        let with_more = Bytes::from([&request[..], b"behind"].concat());
        assert_eq!(left_by_shape(api, version, &with_more), Ok(6), "{} v{version}", api.name);
        assert_eq!(
            examples::decode_request(api.key, version, with_more),
            Ok(6),
            "{} v{version}",
            api.name
        );
    }
}

#[test]
fn every_truncated_request_is_refused() {
    for (api, version) in all() {
        let request = examples::request(api.key, version, 1, &World::imaginary());
        for len in 0..request.len() {
            assert!(
                left_by_shape(api, version, &request[..len]).is_err(),
                "{} v{version}, {len}",
                api.name
            );
        }
    }
}

#[test]
fn a_missing_array_is_refused_before_it_is_decoded() {
    for version in [0, 9] {
        let mut request = examples::header(3, version, 1, if version >= 9 { 2 } else { 1 });
        match version {
            0 => request.put_i32(i32::MAX),
            _ => request.put_slice(&[0xff, 0xff, 0xff, 0xff, 0x0f]),
        }
        request.put_slice(&[0; 100]);
        assert_eq!(
            METADATA.walk(&request, version, NO_LIMIT),
            Err(Misshapen::Truncated),
            "v{version}"
        );
    }
    let mut request = examples::header(3, 0, 1, 1);
    request.put_i32(-2);
    assert_eq!(METADATA.walk(&request, 0, NO_LIMIT), Err(Misshapen::NegativeLength));
}

#[test]
fn elements_are_counted_and_bounded() {
    let mut request = examples::header(3, 0, 1, 1);
    request.put_i32(1_000);
    request.put_bytes(0, 2_000); // a thousand empty names
    assert_eq!(METADATA.walk(&request, 0, 1_000), Ok(1_000));
    assert_eq!(METADATA.walk(&request, 0, 999), Err(Misshapen::TooManyElements(999)));

    // Tagged fields are elements too: each becomes an entry of a map.
    let mut request = BytesMut::new();
    request.put_slice(&examples::header(18, 3, 1, 1));
    request.put_u8(100);
    for tag in 0..100 {
        request.put_slice(&[tag, 0]);
    }
    request.put_slice(&[2, b'a', 2, b'a', 0]);
    assert_eq!(API_VERSIONS.walk(&request, 3, 100), Ok(100));
    assert_eq!(API_VERSIONS.walk(&request, 3, 99), Err(Misshapen::TooManyElements(99)));
}

/// Compact lengths allow strings of any size, but what is stored of a request must not be that
/// large. This is Kafka's limit.
#[test]
fn strings_are_limited_to_the_fixed_width_maximum() {
    for (len_bytes, walked) in [(i16::MAX as usize, Ok(1)), (1 << 15, Err(Misshapen::LongText))] {
        let mut request = examples::header(3, 9, 1, 2);
        request.put_u8(2); // one topic
        let mut len = len_bytes + 1;
        while len >= 0x80 {
            request.put_u8(len as u8 | 0x80);
            len >>= 7;
        }
        request.put_u8(len as u8);
        request.put_bytes(b'x', len_bytes);
        request.put_bytes(0, 5); // three flags, two ends
        assert_eq!(METADATA.walk(&request, 9, NO_LIMIT), walked, "{len_bytes}");
    }
}

#[test]
fn the_length_of_a_known_tagged_field_is_checked() {
    let request = examples::request(ApiKey::Fetch, 12, 1, &World::imaginary());
    // The last tagged field is the cluster ID: tag 0, its length, the compact string.
    let at = request.len() - (1 + 7) - 1;
    assert_eq!(request[at], 8);
    let mut lie = request.to_vec();
    lie[at] = 7;
    assert_eq!(FETCH.walk(&lie, 12, NO_LIMIT), Err(Misshapen::TaggedLength));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    /// For every request that the shape accepts, the decoder reads to the same end, or refuses.
    /// Else the decoder could find array lengths at positions that the shape has not checked.
    #[test]
    fn shape_and_decoder_agree_on_damaged_requests(
        pick in any::<prop::sample::Index>(),
        edits in prop::collection::vec(
            (
                any::<prop::sample::Index>(),
                prop_oneof![any::<u8>(), 0u8..4, Just(0x80), Just(0xff)],
            ),
            1..4,
        ),
    ) {
        let versions: Vec<_> = all().collect();
        let (api, version) = versions[pick.index(versions.len())];
        let mut bytes = examples::request(api.key, version, 1, &World::imaginary()).to_vec();
        bytes.extend_from_slice(&[0; 64]);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(left) = left_by_shape(api, version, &bytes)
            && let Ok(decoder_left) = examples::decode_request(api.key, version, Bytes::from(bytes))
        {
            prop_assert_eq!(left, decoder_left, "{} v{}", api.name, version);
        }
    }
}
