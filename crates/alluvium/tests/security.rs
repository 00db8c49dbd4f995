//! `alluvium user` and logging in to a server of the built binary; no password appears in its log.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kafka_protocol::messages::{
    RequestHeader, ResponseHeader, SaslAuthenticateRequest, SaslHandshakeRequest,
};
use kafka_protocol::protocol::{Decodable, Encodable, HeaderVersion, Request, StrBytes};
use rustix::process::Signal;
use support::{Server, alluvium, ok, ok_json, refused, stderr};

fn call<R: Request>(stream: &mut TcpStream, version: i16, request: &R) -> R::Response {
    let mut body = BytesMut::new();
    RequestHeader::default()
        .with_request_api_key(R::KEY)
        .with_request_api_version(version)
        .encode(&mut body, R::header_version(version))
        .unwrap();
    request.encode(&mut body, version).unwrap();
    let mut frame = BytesMut::new();
    frame.put_u32(body.len() as u32);
    frame.put(body);
    stream.write_all(&frame).unwrap();
    let mut len = [0; 4];
    stream.read_exact(&mut len).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(len) as usize];
    stream.read_exact(&mut answer).unwrap();
    let mut answer = Bytes::from(answer);
    ResponseHeader::decode(&mut answer, R::Response::header_version(version)).unwrap();
    let response = R::Response::decode(&mut answer, version).unwrap();
    assert!(!answer.has_remaining());
    response
}

/// Logs in with PLAIN; returns the error code.
fn log_in(address: &str, user: &str, password: &str) -> i16 {
    let mut stream = TcpStream::connect(address).unwrap();
    let plain = SaslHandshakeRequest::default().with_mechanism(StrBytes::from_static_str("PLAIN"));
    assert_eq!(call(&mut stream, 1, &plain).error_code, 0);
    let message = Bytes::from(format!("\0{user}\0{password}"));
    let request = SaslAuthenticateRequest::default().with_auth_bytes(message);
    call(&mut stream, 1, &request).error_code
}

fn add_user(data_dir: &str, name: &str, password: &str) -> std::process::Output {
    let mut child = alluvium()
        .args(["user", "add", name, "--data-dir", data_dir])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{password}\n").as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn users_are_added_and_log_in_and_no_password_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().to_str().unwrap();
    let message = refused(1, &["user", "list", "--data-dir", data_dir]);
    assert!(message.contains("alluvium serve"), "{message}");

    let listener = "{name = 'sasl', listen = '127.0.0.1:0', protocol = 'SASL_PLAINTEXT', \
                    sasl-mechanisms = ['PLAIN']}";
    let mut command = alluvium();
    command.args(["serve", "--data-dir", data_dir, "--admin-listen", "none"]);
    command.args(["--wal-capacity", "64MiB", "--log", "trace", "--listener", listener]);
    let server = Server::start_command(command);

    let secrets = ["correct-horse-1", "battery-staple-2", "wrong-guess-3"];
    let added = add_user(data_dir, "alice", secrets[0]);
    assert!(added.status.success(), "{}", stderr(&added));
    assert_eq!(log_in(&server.kafka, "alice", secrets[0]), 0);
    assert_eq!(log_in(&server.kafka, "alice", secrets[2]), 58);
    // Some users enter their password as the user name.
    assert_eq!(log_in(&server.kafka, secrets[2], secrets[2]), 58);
    assert!(add_user(data_dir, "alice", secrets[1]).status.success());
    assert_eq!(log_in(&server.kafka, "alice", secrets[0]), 58);
    assert_eq!(log_in(&server.kafka, "alice", secrets[1]), 0);

    let refused_name = add_user(data_dir, "", secrets[1]);
    assert_eq!(refused_name.status.code(), Some(1));
    let users = ok_json(&["user", "list", "--json", "--data-dir", data_dir]);
    assert_eq!(users[0]["name"], "alice");
    ok(&["user", "delete", "alice", "--data-dir", data_dir]);
    assert_eq!(log_in(&server.kafka, "alice", secrets[1]), 58);
    refused(1, &["user", "delete", "alice", "--data-dir", data_dir]);

    let (status, log) = server.stop(Signal::TERM);
    assert!(status.success());
    assert!(log.contains("authentication failed") && log.contains("DEBUG"), "{log}");
    for secret in secrets {
        assert!(!log.contains(secret), "{secret} is in the log");
        assert!(!stderr(&refused_name).contains(secret));
    }
    let mut directories = vec![dir.path().to_owned()];
    while let Some(directory) = directories.pop() {
        for file in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
            if file.is_dir() {
                directories.push(file);
                continue;
            }
            let Ok(content) = std::fs::read(&file) else { continue };
            for secret in secrets {
                let found = content.windows(secret.len()).any(|part| part == secret.as_bytes());
                assert!(!found, "{secret} is in {}", file.display());
            }
        }
    }
}

/// A certificate authority and a certificate for `localhost`, as files.
fn authority(dir: &Path, name: &str) -> PathBuf {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    let key = rcgen::KeyPair::generate().unwrap();
    let ca = dir.join(format!("{name}.pem"));
    std::fs::write(&ca, params.self_signed(&key).unwrap().pem()).unwrap();
    let issuer = rcgen::Issuer::new(params, key);
    let key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["localhost".into(), "127.0.0.1".into()];
    let params = rcgen::CertificateParams::new(names).unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let both = certificate.pem() + &key.serialize_pem();
    std::fs::write(dir.join(format!("{name}-server.pem")), both).unwrap();
    ca
}

#[test]
fn topic_and_bench_use_tls_and_log_in() {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().to_str().unwrap();
    let (ca, other) = (authority(dir.path(), "ours"), authority(dir.path(), "other"));
    let both = dir.path().join("ours-server.pem").display().to_string();
    let listener = format!(
        "{{name = 'both', listen = '127.0.0.1:0', protocol = 'SASL_SSL', \
         tls-certificate = '{both}', tls-key = '{both}'}}"
    );
    let mut command = alluvium();
    command.args(["serve", "--data-dir", data_dir, "--admin-listen", "none"]);
    command.args(["--wal-capacity", "64MiB", "--listener", &listener]);
    let server = Server::start_command(command);
    let secret = "correct-horse-1";
    assert!(add_user(data_dir, "a=l,ice", secret).status.success());

    let config = |name: &str, ca: &Path, mechanism: &str, password: &str| {
        let file = dir.path().join(format!("{name}.properties"));
        let text = format!(
            "security.protocol=SASL_SSL\nssl.ca.location={}\nsasl.mechanism={mechanism}\n\
             sasl.username=a=l,ice\nsasl.password={password}\n",
            ca.display()
        );
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    };
    for mechanism in ["SCRAM-SHA-256", "SCRAM-SHA-512"] {
        let good = config("good", &ca, mechanism, secret);
        let to = ["--bootstrap", &server.kafka, "--command-config", &good];
        let run = |arguments: &[&str]| ok(&[arguments, &to].concat());
        run(&["topic", "create", mechanism, "--partitions", "2"]);
        let load = ["bench", "produce", mechanism, "--total", "4MiB", "--batch-size", "64KiB"];
        run(&load);
        let read = ok_json(&[&["bench", "consume", mechanism, "--json"], &to[..]].concat());
        assert_eq!(read["bytes"].as_u64().map(|bytes| bytes >= 4 << 20), Some(true), "{read}");
        run(&["topic", "delete", mechanism]);
    }
    let wrong = config("wrong", &ca, "SCRAM-SHA-256", "a-wrong-secret");
    let plain = config("plain", &ca, "PLAIN", secret);
    let stranger = config("stranger", &other, "SCRAM-SHA-256", secret);
    for (file, words) in [
        (&wrong, "invalid credentials"),
        (&plain, "its listener accepts SCRAM-SHA-256, SCRAM-SHA-512"),
        (&stranger, "TLS handshake failed: invalid peer certificate: UnknownIssuer"),
    ] {
        let to = ["--bootstrap", &server.kafka, "--command-config", file];
        let message = refused(1, &[&["topic", "list"], &to[..]].concat());
        assert!(message.contains(words), "{message}");
        assert!(!message.contains(secret) && !message.contains("a-wrong-secret"), "{message}");
    }
    let message = refused(1, &["topic", "list", "--bootstrap", &server.kafka]);
    assert!(message.contains("--command-config"), "{message}");
    let (status, _) = server.stop(Signal::TERM);
    assert!(status.success());
}
