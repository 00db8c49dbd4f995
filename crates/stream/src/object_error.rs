//! Errors of requests to the object store.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use object_store::Error;

use crate::damage::{Damage, DecodeError};

/// The longest text of a response that is passed on, in characters.
const TEXT_LIMIT: usize = 300;

/// Error codes of responses that are not worth a retry, in addition to status 401 and 403. Some of
/// them come with status 400 or 301.
const PERMANENT: [&str; 7] = [
    "NoSuchBucket",
    "InvalidBucketName",
    "ExpiredToken",
    "InvalidToken",
    "InvalidIdentityToken",
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
];

/// Why an object could not be written, read or deleted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObjectError {
    /// The object store refused the request or could not be reached.
    #[error("object {name}: {reason}")]
    Store {
        /// Its path in the object store.
        name: String,
        /// A description. The response itself is not kept: an S3 server repeats in it what was
        /// signed, including session tokens.
        reason: String,
        /// The kind of error.
        kind: ErrorKind,
    },
    /// The object is not what was written.
    #[error("object {name}: {source}")]
    Damaged {
        /// Its path in the object store.
        name: String,
        /// What is damaged, and where.
        source: Arc<Damage>,
    },
}

/// The kind of an error of the object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// There is no such object.
    NotFound,
    /// The bucket does not exist, or the credentials do not suffice: a retry is useless until that
    /// is changed.
    Refused,
    /// The object store, or the file system of a directory, does not have this request.
    Unsupported,
    /// The object was written by a later version of this program.
    LaterVersion,
    /// A retry may succeed.
    Failed,
}

impl ObjectError {
    pub(crate) fn store(name: &str, error: &Error) -> Self {
        let text = error.to_string();
        if is_beyond_the_end(error, &text) {
            let reason = format!("it is shorter than when it was written: {}", describe(&text).0);
            return Self::damaged(name, Damage::of_all(reason));
        }
        let (mut reason, code) = describe(&text);
        // If there was no response, the reason (a certificate, a connection) is only in the sources
        // of the error.
        let mut reported = text.clone();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            let why = error.to_string();
            if !reported.contains(&why) {
                reason = format!("{reason}: {}", describe(&why).0);
                reported = why;
            }
            cause = error.source();
        }
        // Not every request returns the variant for its status, and the status is only in the text.
        let denied = ["status code: 401", "status code: 403"].iter().any(|it| text.contains(it));
        let kind = match (error, &code) {
            (_, Some(code)) if PERMANENT.contains(&code.as_str()) => ErrorKind::Refused,
            (Error::PermissionDenied { .. } | Error::Unauthenticated { .. }, _) => {
                ErrorKind::Refused
            }
            _ if denied => ErrorKind::Refused,
            (Error::NotFound { .. }, _) => ErrorKind::NotFound,
            (Error::NotImplemented { .. }, _) => ErrorKind::Unsupported,
            // As of a file system without hard links.
            _ if io_kind(error) == Some(io::ErrorKind::Unsupported) => ErrorKind::Unsupported,
            _ if text.contains("status code: 501") => ErrorKind::Unsupported,
            _ => ErrorKind::Failed,
        };
        Self::Store { name: name.into(), reason, kind }
    }

    pub(crate) fn no_response(name: &str, deadline: Duration) -> Self {
        Self::failed(name, format!("no response for {deadline:?}"))
    }

    pub(crate) fn later_version(name: &str, reason: String) -> Self {
        Self::Store { name: name.into(), reason, kind: ErrorKind::LaterVersion }
    }

    pub(crate) fn failed(name: &str, reason: String) -> Self {
        Self::Store { name: name.into(), reason, kind: ErrorKind::Failed }
    }

    /// Returns the error of a read that ended without a result, which only a panic explains.
    pub(crate) fn defect(name: &str) -> Self {
        Self::failed(name, "a read has ended without a result".into())
    }

    pub(crate) fn damaged(name: &str, source: Damage) -> Self {
        Self::Damaged { name: name.into(), source: Arc::new(source) }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Store { kind: ErrorKind::NotFound, .. })
    }

    pub(crate) fn is_temporary(&self) -> bool {
        matches!(self, Self::Store { kind: ErrorKind::Failed, .. })
    }

    /// Whether a retry is useless until the object store, the bucket or the credentials are
    /// changed.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::Store { kind: ErrorKind::Refused | ErrorKind::Unsupported, .. })
    }

    pub(crate) fn is_unsupported(&self) -> bool {
        matches!(self, Self::Store { kind: ErrorKind::Unsupported, .. })
    }

    /// Whether the records in the object are lost: it is damaged or missing. No retry brings them
    /// back.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Damaged { .. }) || self.is_not_found()
    }

    /// Returns the path of the object in the object store.
    pub fn object(&self) -> &str {
        match self {
            Self::Store { name, .. } | Self::Damaged { name, .. } => name,
        }
    }

    /// Returns the error without the object's name.
    pub fn reason(&self) -> String {
        match self {
            Self::Store { reason, .. } => reason.clone(),
            Self::Damaged { source, .. } => source.to_string(),
        }
    }
}

impl DecodeError {
    /// Returns the error as that of the object with this name.
    pub(crate) fn of(self, name: &str) -> ObjectError {
        match self {
            Self::Damaged(damage) => ObjectError::damaged(name, damage),
            Self::LaterVersion(reason) => ObjectError::later_version(name, reason),
        }
    }
}

/// Whether the requested range lies beyond the end of an object. Objects are written once and in
/// full, and ranges come from the catalog or the object's own index, so such an object was
/// truncated. `object_store` has no variant for this: local stores only have a text, others respond
/// with status 416.
fn is_beyond_the_end(error: &Error, text: &str) -> bool {
    let is_generic = matches!(error, Error::Generic { .. });
    is_generic
        && (text.contains("Requested range was invalid") || text.contains("status code: 416"))
}

/// Returns the kind of the I/O error that has caused an error, if one has.
pub(crate) fn io_kind(error: &Error) -> Option<io::ErrorKind> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return Some(error.kind());
        }
        cause = error.source();
    }
    None
}

/// Returns the answer to a request about an object; `None` if there is no such object.
pub(crate) fn found<T>(answer: Result<T, ObjectError>) -> Result<Option<T>, ObjectError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the text of an error and its code. Of a response in XML only code and message are passed
/// on.
fn describe(text: &str) -> (String, Option<String>) {
    let Some(at) = text.find('<') else { return (shortened(text), None) };
    let element = |name: &str| {
        let rest = text[at..].split_once(&format!("<{name}>"))?.1;
        Some(shortened(rest.split_once('<')?.0))
    };
    let (code, message) = (element("Code"), element("Message"));
    let reported: Vec<_> = code.iter().chain(&message).map(String::as_str).collect();
    let before = shortened(text[..at].trim_end());
    (format!("{before} {}", reported.join(": ")).trim().to_owned(), code)
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_LIMIT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(status: &str, body: &str, make: impl FnOnce(String) -> Error) -> ObjectError {
        let text = format!(
            "Error performing PUT https://host/bucket/a in 1ms - Server returned non-2xx status \
             code: {status}: {body}"
        );
        ObjectError::store("a", &make(text))
    }

    fn generic(text: String) -> Error {
        Error::Generic { store: "S3", source: text.into() }
    }

    fn not_found(text: String) -> Error {
        Error::NotFound { path: "a".into(), source: text.into() }
    }

    #[test]
    fn signed_content_is_not_passed_on() {
        let body = "<?xml version=\"1.0\"?><Error><Code>SignatureDoesNotMatch</Code><Message>It \
                    does not match.</Message><CanonicalRequest>PUT \
                    x-amz-security-token:SECRET</CanonicalRequest></Error>";
        let error = error("403 Forbidden", body, generic);
        let shown = format!("{error} {error:?} {}", error.reason());
        assert!(!shown.contains("SECRET"), "{shown}");
        assert!(
            shown.contains("403 Forbidden: SignatureDoesNotMatch: It does not match."),
            "{shown}"
        );
        assert!(error.is_permanent());
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Cause(String, #[source] Option<Box<Cause>>);

    /// Returns an error with a chain of sources, of which only the first text is in the text of the
    /// error.
    fn caused(texts: [&str; 3]) -> ObjectError {
        let cause = texts
            .iter()
            .rev()
            .fold(None, |cause, text| Some(Box::new(Cause((*text).to_owned(), cause))));
        let source = cause.expect("there are sources");
        ObjectError::store("a", &Error::Generic { store: "S3", source })
    }

    #[test]
    fn the_reason_for_a_missing_response_is_reported() {
        let error = caused(["error sending request", "client error", "UnknownIssuer"]);
        assert!(
            error.reason().ends_with("error sending request: client error: UnknownIssuer"),
            "{error}"
        );
        let body =
            "<Error><Code>SlowDown</Code><CanonicalRequest>SECRET</CanonicalRequest></Error>";
        let error = caused(["no", body, "no"]);
        let shown = format!("{error} {error:?}");
        assert!(shown.contains("no: SlowDown") && !shown.contains("SECRET"), "{shown}");
    }

    #[tokio::test]
    async fn a_truncated_object_is_damaged() {
        use object_store::ObjectStoreExt as _;
        let directory = tempfile::tempdir().unwrap();
        let store = crate::objects::local_objects(directory.path()).unwrap();
        store.put(&"a".into(), "short".into()).await.unwrap();
        let local = store.get_range(&"a".into(), 100..200).await.unwrap_err();
        let range = "<Error><Code>InvalidRange</Code></Error>";
        for error in
            [ObjectError::store("a", &local), error("416 Range Not Satisfiable", range, generic)]
        {
            assert!(error.is_loss() && !error.is_not_found() && !error.is_temporary(), "{error}");
        }
        let other = error("400 Bad Request", range, generic);
        assert!(!other.is_loss(), "{other}");
    }

    #[test]
    fn a_missing_bucket_is_not_a_missing_object() {
        let missing = |code| {
            error("404 Not Found", &format!("<Error><Code>{code}</Code></Error>"), not_found)
        };
        let bucket = missing("NoSuchBucket");
        assert!(bucket.is_permanent() && !bucket.is_not_found());
        let object = missing("NoSuchKey");
        assert!(object.is_not_found() && !object.is_permanent());
    }

    #[test]
    fn temporary_errors_are_not_permanent() {
        for (status, body) in [
            ("503 Service Unavailable", "<Error><Code>SlowDown</Code></Error>"),
            ("500 Internal Server Error", "no XML at all"),
            ("429 Too Many Requests", ""),
        ] {
            assert!(!error(status, body, generic).is_permanent(), "{status}");
        }
        let timed_out = ObjectError::no_response("a", Duration::from_secs(15));
        assert!(
            !timed_out.is_permanent() && timed_out.to_string().contains("no response for 15s"),
            "{timed_out}"
        );
        let region = "<Error><Code>AuthorizationHeaderMalformed</Code></Error>";
        assert!(error("400 Bad Request", region, generic).is_permanent());
    }

    #[test]
    fn long_texts_are_shortened() {
        let error = error("502 Bad Gateway", &"é".repeat(5000), generic);
        assert!(error.reason().chars().count() <= TEXT_LIMIT + 3, "{error}");
    }
}
