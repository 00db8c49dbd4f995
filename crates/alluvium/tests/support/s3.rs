//! An object store with the part of S3 that a server with small objects uses.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};

const BUCKET: &str = "/bucket";
const MODIFIED: &str = "2026-01-01T00:00:00.000Z";

/// A running object store, until it is dropped.
pub struct S3 {
    address: String,
    shared: Arc<Shared>,
    running: Option<Runtime>,
}

struct Shared {
    objects: Mutex<BTreeMap<String, Bytes>>,
    /// Whether writes are refused, as for credentials without the right.
    is_read_only: AtomicBool,
    /// Writes that were refused.
    refused: AtomicU64,
    /// Whether it honours the condition that an object does not exist yet.
    is_atomic: bool,
}

impl S3 {
    /// Starts an empty object store at this address.
    pub fn start(address: &str, is_atomic: bool) -> Self {
        let shared = Arc::new(Shared {
            objects: Mutex::default(),
            is_read_only: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            is_atomic,
        });
        let mut s3 = Self { address: address.to_owned(), shared, running: None };
        s3.resume();
        s3
    }

    /// Refuses connections from now on.
    pub fn pause(&mut self) {
        self.running = None;
    }

    /// Accepts connections again.
    pub fn resume(&mut self) {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("the runtime starts");
        let listener = runtime.block_on(tokio::net::TcpListener::bind(&self.address));
        let listener = listener.expect("the address is free");
        let router = Router::new().fallback(answer).with_state(self.shared.clone());
        runtime.spawn(async move { axum::serve(listener, router).await });
        self.running = Some(runtime);
    }

    /// Refuses writes from now on.
    pub fn refuse_writes(&self) {
        self.shared.is_read_only.store(true, Ordering::SeqCst);
    }

    /// Returns the number of writes that were refused.
    pub fn refused_writes(&self) -> u64 {
        self.shared.refused.load(Ordering::SeqCst)
    }

    /// Returns the options of a server that uses the object store at this address.
    pub fn options(address: &str) -> Vec<String> {
        let endpoint = format!("--s3-endpoint=http://{address}");
        vec!["--object-store=s3://bucket".into(), endpoint, "--s3-allow-http".into()]
    }

    /// Returns the names of the objects that begin with `prefix`.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let objects = self.shared.objects.lock();
        objects.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Returns its address.
    pub fn address(&self) -> &str {
        &self.address
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let name = uri.path().strip_prefix(BUCKET).unwrap_or_default().trim_start_matches('/');
    let query = uri.query().unwrap_or_default().as_bytes();
    let query: HashMap<String, String> = url::form_urlencoded::parse(query).into_owned().collect();
    if shared.is_read_only.load(Ordering::SeqCst) && !["GET", "HEAD"].contains(&method.as_str()) {
        shared.refused.fetch_add(1, Ordering::SeqCst);
        return (StatusCode::FORBIDDEN, "<Error><Code>AccessDenied</Code></Error>").into_response();
    }
    let mut objects = shared.objects.lock();
    match method.as_str() {
        "GET" if name.is_empty() => list(&objects, &query).into_response(),
        "GET" | "HEAD" => match objects.get(name) {
            Some(object) => read(object, &method, &headers),
            None => missing(),
        },
        "PUT" if query.is_empty() => {
            let is_create = headers.contains_key(header::IF_NONE_MATCH);
            if is_create && shared.is_atomic && objects.contains_key(name) {
                return StatusCode::PRECONDITION_FAILED.into_response();
            }
            objects.insert(name.to_owned(), body);
            [(header::ETAG, "\"1\"")].into_response()
        }
        "DELETE" if query.is_empty() => {
            objects.remove(name);
            StatusCode::NO_CONTENT.into_response()
        }
        "POST" if query.contains_key("delete") => {
            let request = String::from_utf8_lossy(&body).into_owned();
            let mut deleted = String::from("<DeleteResult>");
            for part in request.split("<Key>").skip(1) {
                let name = part.split('<').next().unwrap_or_default();
                objects.remove(name);
                write!(deleted, "<Deleted><Key>{name}</Key></Deleted>").expect("to a string");
            }
            deleted.push_str("</DeleteResult>");
            deleted.into_response()
        }
        _ => StatusCode::NOT_IMPLEMENTED.into_response(),
    }
}

fn missing() -> Response {
    (StatusCode::NOT_FOUND, "<Error><Code>NoSuchKey</Code></Error>").into_response()
}

fn read(object: &Bytes, method: &Method, headers: &HeaderMap) -> Response {
    let about = [
        (header::ETAG, "\"1\"".to_owned()),
        (header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT".to_owned()),
    ];
    let asked = headers.get(header::RANGE).and_then(|range| range.to_str().ok());
    let range = asked.and_then(|range| {
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        let last = last.parse::<usize>().map_or(object.len(), |last| last + 1);
        Some(first.parse::<usize>().ok()?..last.min(object.len()))
    });
    match range {
        _ if method == Method::HEAD => {
            let length = [(header::CONTENT_LENGTH, object.len().to_string())];
            (about, length).into_response()
        }
        None => (about, object.clone()).into_response(),
        Some(range) if range.start < range.end => {
            let of = format!("bytes {}-{}/{}", range.start, range.end - 1, object.len());
            let of = [(header::CONTENT_RANGE, of)];
            (StatusCode::PARTIAL_CONTENT, about, of, object.slice(range)).into_response()
        }
        Some(_) => StatusCode::RANGE_NOT_SATISFIABLE.into_response(),
    }
}

fn list(objects: &BTreeMap<String, Bytes>, query: &HashMap<String, String>) -> String {
    let prefix = query.get("prefix").map_or("", String::as_str);
    let delimiter = query.get("delimiter").map(String::as_str);
    let mut text = String::from("<ListBucketResult><IsTruncated>false</IsTruncated>");
    let mut prefixes = BTreeSet::new();
    for (name, object) in objects.iter().filter(|(name, _)| name.starts_with(prefix)) {
        let common = delimiter.and_then(|mark| name[prefix.len()..].split_once(mark));
        if let Some((common, _)) = common {
            prefixes.insert(format!("{prefix}{common}/"));
            continue;
        }
        write!(
            text,
            "<Contents><Key>{name}</Key><LastModified>{MODIFIED}</LastModified>\
             <ETag>\"1\"</ETag><Size>{}</Size></Contents>",
            object.len()
        )
        .expect("to a string");
    }
    for common in prefixes {
        write!(text, "<CommonPrefixes><Prefix>{common}</Prefix></CommonPrefixes>")
            .expect("to a string");
    }
    text.push_str("</ListBucketResult>");
    text
}
