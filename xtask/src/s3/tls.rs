//! An S3 server with a certificate that no system knows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{LIMIT, Test, eventually, no_secret};
use crate::Error;
use crate::exec::{follow, quietly};
use crate::server::Server;

const SOON: &str = "--upload-interval=300ms";

/// A certificate authority of the test's own, and a certificate of its for the loopback interface, in a directory.
#[derive(Clone)]
pub(super) struct Authority(PathBuf);

impl Authority {
    /// Its name is that of the directory: of two with one name, a certificate of the other is not unknown, but wrong.
    pub(super) fn new(directory: &Path) -> Result<Self, Error> {
        if directory.exists() {
            fs::remove_dir_all(directory)?;
        }
        fs::create_dir_all(directory)?;
        let extensions = "subjectAltName=IP:127.0.0.1\nbasicConstraints=critical,CA:FALSE\n";
        fs::write(directory.join("extensions"), extensions)?;
        let openssl = |arguments: &str| {
            let mut command = Command::new("openssl");
            quietly(command.current_dir(directory).args(arguments.split(' ')))
        };
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        openssl(&format!("req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN={name}"))?;
        openssl(&format!("req {key} -keyout private.key -out request -subj /CN=server"))?;
        openssl(
            "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out public.crt",
        )?;
        Ok(Self(directory.to_path_buf()))
    }

    /// Where MinIO finds a certificate and its key, by the names that it knows.
    pub(super) fn directory(&self) -> &Path {
        &self.0
    }

    /// What who trusts the authority trusts.
    pub(super) fn root(&self) -> PathBuf {
        self.0.join("ca.pem")
    }

    pub(super) fn certificate(&self) -> PathBuf {
        self.0.join("public.crt")
    }

    pub(super) fn key(&self) -> PathBuf {
        self.0.join("private.key")
    }
}

impl Test<'_> {
    /// With the authority's certificate all goes as without TLS. With another one or none nothing goes out, and it is said why.
    pub(super) fn tls(&self) -> Result<(), Error> {
        let authority = Authority::new(&self.directory.join("authority"))?;
        let other = Authority::new(&self.directory.join("other-authority"))?;
        let gateway = self.gateway_with("tls", Some(authority.clone()))?;
        let trusting = |authority: &Authority| {
            let root = authority.root();
            gateway.objects(&["--log=trace", SOON, &format!("--s3-ca-file={}", root.display())])
        };
        let unknown = "invalid peer certificate: UnknownIssuer";

        // A start does without an object store that may come to its senses; but nothing is sent to one that nobody vouches for.
        for objects in [gateway.objects(&["--log=trace", SOON]), trusting(&other)] {
            let server = Server::start(self.config("tls", objects))?;
            eventually("it is said that the certificate is not trusted", || {
                let log = server.log()?;
                Ok(log.contains("the object store can not be used now") && log.contains(unknown))
            })?;
            follow(&mut self.endless(&server, 1), LIMIT, |_| ())?;
            eventually("uploads fail", || {
                Ok(server.metric("alluvium_upload_failures_in_a_row")? > 0.0)
            })?;
            no_secret("the server's log", &server.log()?)?;
        }
        if gateway.bucket().read_dir()?.any(|entry| {
            entry.is_ok_and(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
        }) {
            return Err("something was written to a server whose certificate is not trusted".into());
        }

        let objects = trusting(&authority);
        let server = Server::start(self.config("tls", objects))?;
        let status = follow(&mut self.endless(&server, 192), LIMIT, |_| ())?;
        if !status.success() || gateway.objects_there()? == 0 {
            return Err(format!("the client ended with {status}{}", server.log_tail()).into());
        }
        no_secret("the server's log", &server.log()?)?;
        server.finish()?;

        let verify = ["object", "verify", "s3://bucket"];
        let root = authority.root();
        let whole = "whole, every checksum is right";
        let option = format!("--s3-ca-file={}", root.display());
        self.ends(self.tool(&gateway, &verify).arg(option), 0, &[whole])?;
        self.ends(self.tool(&gateway, &verify).env("SSL_CERT_FILE", &root), 0, &[whole])?;
        // Takes as long as a broken connection is tried again.
        self.ends(&mut self.tool(&gateway, &verify), 2, &[unknown])?;
        gateway.finish()
    }
}
