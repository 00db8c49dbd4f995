//! An S3 server with a certificate that no system trusts.

use std::thread;

use super::{DOWN, LIMIT, Test, eventually, no_secret};
use crate::Error;
use crate::exec::follow;
use crate::server::Server;
use crate::web::Authority;

const SOON: &str = "--upload-interval=300ms";

impl Test<'_> {
    /// With the authority's certificate, everything works as without TLS. With another one or none,
    /// nothing is sent, and the reason is logged.
    pub(super) fn tls(&self) -> Result<(), Error> {
        let authority = Authority::new(&self.directory.join("authority"))?;
        let other = Authority::new(&self.directory.join("other-authority"))?;
        let gateway = self.gateway_with("tls", Some(authority.clone()))?;
        let trusting = |authority: &Authority| {
            let root = authority.root();
            gateway.objects(&["--log=trace", SOON, &format!("--s3-ca-file={}", root.display())])
        };
        let unknown = "invalid peer certificate: UnknownIssuer";

        // The server waits for an object store that may recover; but it sends nothing to one whose
        // certificate is not trusted.
        for objects in [gateway.objects(&["--log=trace", SOON]), trusting(&other)] {
            let server = Server::spawn(self.config("tls", objects))?;
            eventually("the log says that the certificate is not trusted", || {
                let log = server.log()?;
                Ok(log.contains("the object store is unavailable") && log.contains(unknown))
            })?;
            thread::sleep(DOWN);
            if server.is_ready()? {
                return Err("the server is ready without its object store".into());
            }
            no_secret("the server's log", &server.log()?)?;
        }
        if gateway.bucket().read_dir()?.any(|entry| {
            entry.is_ok_and(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
        }) {
            return Err("data was written to a server whose certificate is not trusted".into());
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
        let whole = "intact, every checksum is correct";
        let option = format!("--s3-ca-file={}", root.display());
        self.ends(self.tool(&gateway, &verify).arg(option), 0, &[whole])?;
        self.ends(self.tool(&gateway, &verify).env("SSL_CERT_FILE", &root), 0, &[whole])?;
        // Lasts as long as the retries of a broken connection.
        self.ends(&mut self.tool(&gateway, &verify), 2, &[unknown])?;
        gateway.finish()
    }
}
