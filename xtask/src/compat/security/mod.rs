//! Several listeners at once, with TLS, client certificates, all SASL mechanisms and ACLs, used by
//! four kinds of clients.

mod issuer;
mod tools;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::Compat;
use crate::Error;
use crate::report::{Case, GoTests};
use crate::server::{Config, Objects, Server, free_address};
use crate::setup::{self, Missing};
use crate::tap::tap;
use crate::web::Authority;

use issuer::{AUDIENCE, Issuer, NAME, Signer};

const LIMIT: Duration = Duration::from_secs(10 * 60);

const WAL_MEBIBYTES: u64 = 128;
const LOG_CACHE_MEBIBYTES: u64 = 16;

/// Short enough that clients reauthenticate many times during the tests.
const SESSION_LIFETIME: &str = "5s";

/// The users with a password. The administrator may do everything, the others what they are
/// granted.
const USERS: [&str; 3] = ["admin", "alice", "bob"];

fn password(user: &str) -> String {
    format!("{user}-has-this-secret")
}

/// A password of no user, long enough to be found where it should not be.
const WRONG_PASSWORD: &str = "this-password-is-wrong";

/// The clients whose errors are checked; the short form has the first two.
const KINDS: &[&str] = &["java", "go", "tools", "python"];

/// What the short form leaves out, besides what the Java client reports itself.
const LEFT_OUT: [&str; 3] =
    ["Kafka's tools, by --command-config", "secured.py", "tokens, keys from a file"];

pub(super) fn run(compat: &Compat<'_>) -> Result<Vec<Case>, Missing> {
    let Some(binary) = &compat.binary else {
        return Err(Missing::NotAllowed(
            "its listeners are configured with Alluvium's options".into(),
        ));
    };
    // Everything is installed before anything runs: a suite that has partly run cannot be skipped
    // because a program is missing.
    setup::openssl()?;
    let programs = Programs {
        class_path: setup::java(compat.root)?,
        go: setup::go(compat.root)?,
        long: match compat.short {
            true => None,
            false => Some((setup::kafka(compat.root)?, setup::python(compat.root)?)),
        },
    };
    let environment =
        Environment::new(binary, &compat.root.join("target/e2e/run/compat-security"))?;
    let server = environment.start(&environment.issuer.jwks_url())?;
    let mut cases = environment.clients(compat.root, &programs)?;
    let kinds = if compat.short { &KINDS[..2] } else { KINDS };
    cases.extend(environment.secrets(&server, kinds));
    if environment.keep_files_of_failures(&cases) {
        return Ok(cases);
    }
    cases.push(Case::run("the server stops on SIGTERM", || server.finish()));
    if compat.short {
        cases.extend(LEFT_OUT.map(|what| Case::skipped(what, "the short form omits it")));
    } else {
        let of_file = |mut case: Case| {
            case.name += ", keys from a file";
            case
        };
        let file = environment.files.join("jwks.json");
        let server = environment.start(&file.display().to_string())?;
        cases.extend(environment.go(&programs.go, "^TestTokens$")?.into_iter().map(of_file));
        cases.extend(environment.secrets(&server, &["go"]).map(of_file));
        if environment.keep_files_of_failures(&cases) {
            return Ok(cases);
        }
        server.finish()?;
    }
    fs::remove_dir_all(&environment.directory).map_err(Error::from)?;
    Ok(cases)
}

/// The programs that run the clients.
struct Programs {
    class_path: String,
    go: setup::Go,
    /// Kafka's tools and Python, which the short form leaves out.
    long: Option<(PathBuf, PathBuf)>,
}

/// The listeners, and the files that their clients need.
struct Environment {
    binary: PathBuf,
    directory: PathBuf,
    /// Certificates, tokens, properties of Kafka's tools.
    files: PathBuf,
    /// The errors that clients receive when they are refused, one per line, each after the client's
    /// kind.
    errors: PathBuf,
    issuer: Issuer,
    tls: SocketAddr,
    mutual_tls: SocketAddr,
    sasl: SocketAddr,
    sasl_tls: SocketAddr,
}

impl Environment {
    fn new(binary: &Path, directory: &Path) -> Result<Self, Error> {
        let files = directory.join("files");
        let authority = Authority::new(&files)?;
        let stranger = Authority::new(&directory.join("stranger"))?;
        let read = |file: PathBuf| fs::read_to_string(file);
        // Certificate and key in one file, so that a rename replaces both atomically.
        for (subject, name) in
            [("/CN=server", "server"), ("/CN=renewed", "renewed"), ("/O=Example/CN=Alice", "alice")]
        {
            authority.issue(subject, "certificate", "key")?;
            let both = read(files.join("key"))? + &read(files.join("certificate"))?;
            fs::write(files.join(format!("{name}.pem")), both)?;
        }
        stranger.issue("/O=Example/CN=Alice", "certificate", "key")?;
        let directory_of_stranger = directory.join("stranger");
        let both = read(directory_of_stranger.join("key"))?
            + &read(directory_of_stranger.join("certificate"))?;
        fs::write(files.join("stranger.pem"), both)?;
        fs::copy(stranger.root(), files.join("stranger-ca.pem"))?;

        let issuer = Issuer::start(&authority)?;
        fs::write(files.join("jwks.json"), issuer.signer.jwks())?;
        for (name, token) in [
            ("alice", issuer.signer.token("alice", 3600)?),
            ("expired", issuer.signer.token("alice", -3600)?),
            ("forged", Signer::new()?.token("alice", 3600)?),
        ] {
            fs::write(files.join(format!("{name}.jwt")), token)?;
        }
        Ok(Self {
            binary: binary.to_owned(),
            directory: directory.to_owned(),
            files,
            errors: directory.join("errors"),
            issuer,
            tls: free_address()?,
            mutual_tls: free_address()?,
            sasl: free_address()?,
            sasl_tls: free_address()?,
        })
    }

    /// Starts a server that verifies tokens with keys from a file or a URL, and creates the users.
    fn start(&self, jwks: &str) -> Result<Server, Error> {
        let file = |name: &str| self.files.join(name).display().to_string();
        let tls = format!("tls-certificate='{0}', tls-key='{0}'", file("server.pem"));
        let clients = format!(
            "tls-client-auth='required', tls-client-ca='{}', \
             tls-principal-rules='RULE:^CN=(.*?),O=Example$/$1/L, DEFAULT'",
            file("ca.pem")
        );
        let all = "sasl-mechanisms=['PLAIN', 'SCRAM-SHA-256', 'SCRAM-SHA-512', 'OAUTHBEARER']";
        let some = "sasl-mechanisms=['PLAIN', 'SCRAM-SHA-256', 'SCRAM-SHA-512']";
        let listeners = [
            ("tls", self.tls, "SSL", tls.clone()),
            ("mutual", self.mutual_tls, "SSL", format!("{tls}, {clients}")),
            ("sasl", self.sasl, "SASL_PLAINTEXT", some.into()),
            ("both", self.sasl_tls, "SASL_SSL", format!("{tls}, {all}")),
        ];
        let listeners = listeners.map(|(name, address, protocol, more)| {
            format!("{{name='{name}', listen='{address}', protocol='{protocol}', {more}}}")
        });
        let listeners = format!("[{}]", listeners.join(", "));
        let arguments = [
            ("--listener", &*listeners),
            ("--authorization=true", ""),
            ("--super-users", "User:admin"),
            ("--session-lifetime", SESSION_LIFETIME),
            ("--oauth-jwks", jwks),
            ("--oauth-issuer", NAME),
            ("--oauth-audience", AUDIENCE),
            ("--log", "debug"),
        ];
        let arguments = arguments.into_iter().flat_map(|(option, value)| [option, value]);
        let arguments = arguments.filter(|word| !word.is_empty()).map(str::to_owned).collect();
        let server = Server::start(Config {
            binary: self.binary.clone(),
            directory: self.directory.join("server"),
            wal_mebibytes: WAL_MEBIBYTES,
            log_cache_mebibytes: LOG_CACHE_MEBIBYTES,
            wal: None,
            objects: Some(Objects {
                arguments,
                environment: vec![("SSL_CERT_FILE", file("ca.pem"))],
            }),
        })?;
        for user in USERS {
            server.add_user(user, &password(user))?;
        }
        Ok(server)
    }

    /// Returns a command for a client program, with the listeners in its environment.
    fn client(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        for (name, address) in [
            ("TLS", self.tls),
            ("MUTUAL_TLS", self.mutual_tls),
            ("SASL", self.sasl),
            ("SASL_TLS", self.sasl_tls),
        ] {
            command.env(name, address.to_string());
        }
        command.env("FILES", &self.files).env("TOKENS", self.tokens());
        command.env("WRONG_PASSWORD", WRONG_PASSWORD).env("ERRORS", &self.errors);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// Runs all kinds of clients.
    fn clients(&self, root: &Path, programs: &Programs) -> Result<Vec<Case>, Error> {
        let mut cases = Vec::new();
        let mut java = self.client("java");
        java.args(["-Xmx256m", "-XX:TieredStopAtLevel=1"]);
        // The files and URLs from which the client may get tokens.
        let files = self.token_files();
        let urls = files.iter().map(|file| format!("file://{file}")).chain([self.tokens()]);
        let urls: Vec<_> = urls.collect();
        for (what, allowed) in [("urls", urls), ("files", files)] {
            let allowed = allowed.join(",");
            java.arg(format!("-Dorg.apache.kafka.sasl.oauthbearer.allowed.{what}={allowed}"));
        }
        java.args(["-cp", &programs.class_path, "alluvium.clients.Security"]);
        if programs.long.is_none() {
            java.arg("short");
        }
        cases.extend(tap("alluvium.clients.Security", &mut java)?);
        cases.extend(self.go(&programs.go, ".")?);
        if let Some((jars, python)) = &programs.long {
            cases.extend(tools::run(jars, self)?);
            let mut python = self.client(python);
            python.arg(root.join("tests/clients/python/secured.py"));
            cases.extend(tap("secured.py", &mut python)?);
        }
        Ok(cases)
    }

    /// Checks that no secret is in the server's log, or in the errors that these kinds of clients
    /// received since the last check.
    fn secrets(&self, server: &Server, kinds: &[&str]) -> [Case; 2] {
        [
            Case::run("no secret is in the server's log", || {
                no_secret(&server.log()?, &self.all_secrets()?)
            }),
            Case::run("no secret is in the errors of clients", || {
                let errors = String::from_utf8_lossy(&fs::read(&self.errors)?).into_owned();
                no_secret_in_errors(&errors, kinds, &self.all_secrets()?)?;
                Ok(fs::remove_file(&self.errors)?)
            }),
        ]
    }

    /// Stores the output of a client of this kind.
    fn keep_errors(&self, kind: &str, output: &[u8]) -> Result<(), Error> {
        let mut file = File::options().create(true).append(true).open(&self.errors)?;
        for line in String::from_utf8_lossy(output).lines() {
            writeln!(file, "{kind}: {line}")?;
        }
        Ok(())
    }

    /// Returns whether the data is kept because a case failed.
    fn keep_files_of_failures(&self, cases: &[Case]) -> bool {
        let has_failures = cases.iter().any(Case::has_failed);
        if has_failures {
            println!("the server's data and log are kept in {}", self.directory.display());
        }
        has_failures
    }

    fn tokens(&self) -> String {
        self.issuer.token_url()
    }

    fn token_files(&self) -> Vec<String> {
        let file = |name: &str| self.files.join(format!("{name}.jwt")).display().to_string();
        ["alice", "expired", "forged"].map(file).into()
    }

    /// Runs the franz-go tests whose names contain `filter`.
    fn go(&self, go: &setup::Go, filter: &str) -> Result<Vec<Case>, Error> {
        let mut go = go.command(|program| self.client(program));
        go.args(["test", "-count=1", GoTests::VERBOSE, "-timeout", "5m"]);
        go.args(["-run", filter, "./security"]);
        let cases = GoTests::run(&mut go, LIMIT, "go test")?;
        match cases.is_empty() {
            true => Err(format!("no test matches {filter}").into()),
            false => Ok(cases),
        }
    }

    fn all_secrets(&self) -> Result<Vec<String>, Error> {
        let mut secrets: Vec<String> = USERS.iter().map(|user| password(user)).collect();
        secrets.push(WRONG_PASSWORD.into());
        secrets.extend(self.issuer.given());
        for file in self.token_files() {
            secrets.push(fs::read_to_string(file)?);
        }
        Ok(secrets)
    }
}

fn no_secret(text: &str, secrets: &[String]) -> Result<(), Error> {
    match text.lines().find(|line| secrets.iter().any(|secret| line.contains(secret.as_str()))) {
        Some(line) => Err(format!("found in: {line}").into()),
        None => Ok(()),
    }
}

/// Checks that no secret is in the clients' errors. Each kind must have reported some: otherwise
/// nothing was checked.
fn no_secret_in_errors(errors: &str, kinds: &[&str], secrets: &[String]) -> Result<(), Error> {
    for kind in kinds {
        let of_kind =
            |line: &str| line.strip_prefix(*kind).is_some_and(|rest| rest.starts_with(": "));
        if !errors.lines().any(of_kind) {
            return Err(format!("no {kind} client reported an error").into());
        }
    }
    no_secret(errors, secrets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_in_an_error_and_a_client_without_errors_are_found() {
        let secrets = ["alice-has-this-secret".to_owned()];
        let check = |errors: &str| no_secret_in_errors(errors, &["java", "go"], &secrets);
        assert!(check("java: invalid credentials\ngo: the same\n").is_ok());
        assert!(check("java: invalid credentials\n").is_err());
        assert!(check("").is_err());
        let error = check("java: x\ngo: alice-has-this-secret is wrong\n").unwrap_err();
        assert!(error.to_string().contains("go: alice"), "{error}");
    }
}
