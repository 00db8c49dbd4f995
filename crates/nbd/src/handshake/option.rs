//! The data of options.

use bytes::Buf;

use crate::protocol::MAX_STRING;

/// Data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InfoRequest<'a> {
    pub(crate) name: &'a str,
    /// Types of information that the client asks for.
    pub(crate) wanted: Vec<u16>,
}

impl<'a> InfoRequest<'a> {
    /// Decodes the data; `None` if it is invalid.
    pub(crate) fn decode(mut data: &'a [u8]) -> Option<Self> {
        let name = counted_text(&mut data)?;
        let count = data.try_get_u16().ok()?;
        let is_whole = data.len() == 2 * usize::from(count);
        is_whole.then(|| Self { name, wanted: (0..count).map(|_| data.get_u16()).collect() })
    }
}

/// Data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ContextRequest<'a> {
    pub(crate) name: &'a str,
    pub(crate) queries: Vec<&'a str>,
}

impl<'a> ContextRequest<'a> {
    /// Decodes the data; `None` if it is invalid.
    pub(crate) fn decode(mut data: &'a [u8]) -> Option<Self> {
        let name = counted_text(&mut data)?;
        let count = data.try_get_u32().ok()?;
        // Grows with the data, not with the announced number.
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(counted_text(&mut data)?);
        }
        data.is_empty().then_some(Self { name, queries })
    }
}

fn counted_text<'a>(data: &mut &'a [u8]) -> Option<&'a str> {
    let len = usize::try_from(data.try_get_u32().ok()?).ok()?;
    let (bytes, rest) = data.split_at_checked(len)?;
    *data = rest;
    text(bytes)
}

/// A string of the protocol; `None` if it is invalid.
pub(crate) fn text(bytes: &[u8]) -> Option<&str> {
    let is_valid = bytes.len() <= MAX_STRING && !bytes.contains(&0);
    is_valid.then(|| str::from_utf8(bytes).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixes_are_invalid(data: &[u8], is_valid: impl Fn(&[u8]) -> bool) {
        assert!(is_valid(data));
        for end in 0..data.len() {
            assert!(!is_valid(&data[..end]), "{:?}", &data[..end]);
        }
        assert!(!is_valid(&[data, &[0]].concat()));
    }

    #[test]
    fn an_info_request_is_decoded_only_if_it_is_whole() {
        let data = b"\0\0\0\x04disk\0\x02\0\x03\xab\xcd";
        let decoded = InfoRequest { name: "disk", wanted: vec![3, 0xabcd] };
        assert_eq!(InfoRequest::decode(data), Some(decoded));
        prefixes_are_invalid(data, |data| InfoRequest::decode(data).is_some());
        let empty = InfoRequest { name: "", wanted: vec![] };
        assert_eq!(InfoRequest::decode(&[0; 6]), Some(empty));
    }

    #[test]
    fn a_context_request_is_decoded_only_if_it_is_whole() {
        let data = b"\0\0\0\x01d\0\0\0\x02\0\0\0\x05base:\0\0\0\0";
        let decoded = ContextRequest { name: "d", queries: vec!["base:", ""] };
        assert_eq!(ContextRequest::decode(data), Some(decoded));
        prefixes_are_invalid(data, |data| ContextRequest::decode(data).is_some());
        // As many queries as a number can announce, of which none is there.
        assert_eq!(ContextRequest::decode(b"\0\0\0\0\xff\xff\xff\xff"), None);
        assert_eq!(ContextRequest::decode(b"\xff\xff\xff\xff\0\0\0\0"), None);
    }

    #[test]
    fn text_is_utf8_of_bounded_length_without_nul() {
        assert_eq!(text("volume-ü".as_bytes()), Some("volume-ü"));
        assert_eq!(text(b"\xff"), None);
        assert_eq!(text(b"a\0b"), None);
        assert!(text(&[b'a'; MAX_STRING]).is_some());
        assert!(text(&[b'a'; MAX_STRING + 1]).is_none());
    }
}
