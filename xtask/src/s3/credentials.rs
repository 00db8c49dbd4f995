//! The sources of credentials, and the messages when credentials are insufficient.

use std::fs;
use std::path::PathBuf;

use super::issuer::{Credentials, IDENTITY, Issuer, ROLE, WRONG_IDENTITY};
use super::{
    CREDENTIALS, Gateway, LIMIT, SECRET, Test, WRONG_SECRET, WRONG_TOKEN, eventually, no_secret,
};
use crate::Error;
use crate::exec::follow;
use crate::server::Server;
use crate::web::Authority;

const LASTING: Credentials =
    Credentials { secret: SECRET, token: "", expiration: "2099-01-01T00:00:00Z" };

/// A source of credentials other than the environment itself.
struct Source {
    name: &'static str,
    issuer: Issuer,
    /// The file with what the server presents to get them.
    identity: Option<PathBuf>,
    arguments: Vec<String>,
    environment: Vec<(&'static str, String)>,
}

impl Test<'_> {
    /// For each source: valid credentials work and are renewed, and invalid ones end the start.
    /// Neither kind is printed.
    pub(super) fn credentials(&self) -> Result<(), Error> {
        let gateway = self.gateway("credentials")?;
        let mut no_secret_key = self.refused_server(&gateway, "s3://bucket/prefix")?;
        no_secret_key.env(CREDENTIALS[0].0, CREDENTIALS[0].1);
        self.ends(&mut no_secret_key, 2, &["Missing SecretAccessKey"])?;
        self.nothing_was_made()?;
        for source in self.sources()? {
            println!("credentials from {}", source.name);
            self.source(&gateway, &source)
                .map_err(|error| format!("from {}: {error}", source.name))?;
        }
        gateway.finish()
    }

    fn sources(&self) -> Result<Vec<Source>, Error> {
        let authority = Authority::new(&self.directory.join("authority"))?;
        let identity = self.directory.join("identity");
        fs::write(&identity, IDENTITY)?;
        let shown = || identity.display().to_string();
        let start = || Issuer::start(None, LASTING);
        let proxied = |issuer: &Issuer| {
            vec![("http_proxy", issuer.url()), ("no_proxy", "127.0.0.1".to_owned())]
        };

        let issuer = Issuer::start(Some(&authority), LASTING)?;
        let web_identity = Source {
            name: "a web identity",
            environment: vec![
                ("AWS_WEB_IDENTITY_TOKEN_FILE", shown()),
                ("AWS_ROLE_ARN", ROLE.into()),
                ("AWS_ENDPOINT_URL_STS", issuer.url()),
            ],
            arguments: vec![format!("--s3-ca-file={}", authority.root().display())],
            identity: Some(identity.clone()),
            issuer,
        };
        let issuer = start()?;
        let container = Source {
            name: "the container, by a full URL",
            environment: vec![
                ("AWS_CONTAINER_CREDENTIALS_FULL_URI", format!("{}/container", issuer.url())),
                ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", shown()),
            ],
            arguments: Vec::new(),
            identity: Some(identity.clone()),
            issuer,
        };
        let issuer = start()?;
        let mut environment = proxied(&issuer);
        environment.push(("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/container".into()));
        let name = "the container, by a path";
        let by_path = Source { name, environment, arguments: Vec::new(), identity: None, issuer };
        let issuer = start()?;
        let environment = proxied(&issuer);
        let name = "the instance";
        let instance = Source { name, environment, arguments: Vec::new(), identity: None, issuer };
        Ok(vec![web_identity, container, by_path, instance])
    }

    fn source(&self, gateway: &Gateway, source: &Source) -> Result<(), Error> {
        let Source { issuer, arguments, environment, .. } = source;
        let refused = |reason| {
            let mut command = self.refused_server(gateway, "s3://bucket/prefix")?;
            command.args(arguments).envs(environment.clone());
            self.ends(&mut command, 1, &[reason])?;
            self.nothing_was_made()
        };
        if let Some(file) = &source.identity {
            fs::write(file, WRONG_IDENTITY)?;
            let handed_out = issuer.handed_out();
            refused("403 Forbidden")?;
            if issuer.handed_out() > handed_out {
                return Err("credentials were issued without authentication".into());
            }
            fs::write(file, IDENTITY)?;
        }
        for (credentials, reason) in [
            (Credentials { secret: WRONG_SECRET, ..LASTING }, "SignatureDoesNotMatch"),
            (Credentials { token: WRONG_TOKEN, ..LASTING }, "Invalid"),
        ] {
            issuer.issue(credentials);
            refused(reason)?;
        }

        // Valid ones that expire before they are used a second time.
        issuer.issue(Credentials { expiration: "2020-01-01T00:00:00Z", ..LASTING });
        let mut objects = gateway.objects(&["--log=trace", "--upload-interval=300ms"]);
        objects.arguments.extend(arguments.clone());
        objects.environment.clone_from(environment);
        let server = Server::start(self.config("credentials", objects))?;
        let (before, there) = (issuer.handed_out(), gateway.objects_there()?);
        let status = follow(&mut self.endless(&server, 4), LIMIT, |_| ())?;
        if !status.success() {
            return Err(format!("the client ended with {status}{}", server.log_tail()).into());
        }
        eventually("something is uploaded", || Ok(gateway.objects_there()? > there))?;
        eventually("credentials are renewed", || Ok(issuer.handed_out() > before + 1))?;
        no_secret("the server's log", &server.log()?)?;
        server.finish()
    }
}
