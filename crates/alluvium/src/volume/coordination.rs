//! The options with which a command reaches the cluster and its coordination service.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use alluvium_coordination::keys::Keys;
use alluvium_coordination::{Coordination, Etcd, EtcdOptions, EtcdTls, Remote, RemoteOptions};
use alluvium_volume::Cluster;
use clap::Args;

use crate::address::HostPort;
use crate::output::Failure;
use crate::password::first_line;

/// How a command reaches the cluster.
#[derive(Args, Clone, Debug)]
pub(crate) struct ClusterArgs {
    /// Name of the cluster.
    #[arg(long, env = "ALLUVIUM_CLUSTER", value_name = "NAME", default_value = "alluvium")]
    pub(super) cluster: String,
    /// The coordination service: HOST:PORT of the server that hosts it, or the members of etcd, as
    /// etcd://HOST:PORT,HOST:PORT,HOST:PORT.
    #[arg(
        long,
        env = "ALLUVIUM_COORDINATION",
        value_name = "ADDRESS",
        default_value = "127.0.0.1:7400"
    )]
    coordination: Place,
    /// File with the certificates of the authorities that sign etcd's certificates, as PEM. With
    /// it, connections to etcd use TLS.
    #[arg(long, env = "ALLUVIUM_ETCD_CA", value_name = "FILE")]
    etcd_ca: Option<PathBuf>,
    /// File with the client's certificate for etcd, as PEM.
    #[arg(
        long,
        env = "ALLUVIUM_ETCD_CERT",
        value_name = "FILE",
        requires_all = ["etcd_ca", "etcd_key"]
    )]
    etcd_cert: Option<PathBuf>,
    /// File with the key of that certificate, as PEM.
    #[arg(long, env = "ALLUVIUM_ETCD_KEY", value_name = "FILE", requires = "etcd_cert")]
    etcd_key: Option<PathBuf>,
    /// User of etcd.
    #[arg(long, env = "ALLUVIUM_ETCD_USER", value_name = "NAME", requires = "etcd_password_file")]
    etcd_user: Option<String>,
    /// File with the password of that user, in its first line.
    #[arg(long, env = "ALLUVIUM_ETCD_PASSWORD_FILE", value_name = "FILE", requires = "etcd_user")]
    etcd_password_file: Option<PathBuf>,
}

/// Where the coordination service is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    /// At the port of a server of volumes.
    Hosted(String),
    /// At the members of etcd.
    Etcd(Vec<String>),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let check = |address: &str| address.parse::<HostPort>().map(|_| address.to_owned());
        match text.strip_prefix("etcd://") {
            Some(members) => {
                Ok(Self::Etcd(members.split(',').map(check).collect::<Result<_, _>>()?))
            }
            None => check(text).map(Self::Hosted),
        }
    }
}

impl ClusterArgs {
    pub(super) fn keys(&self) -> Result<Arc<Keys>, Failure> {
        Keys::new(&self.cluster).map(Arc::new).map_err(|error| Failure::Usage(error.to_string()))
    }

    /// The address at which a server that hosts the coordination service does so.
    pub(super) fn host_address(&self) -> Result<&str, Failure> {
        match &self.coordination {
            Place::Hosted(address) => Ok(address),
            Place::Etcd(_) => Err(Failure::Usage(
                "--coordination-file: the coordination service is etcd (--coordination), so no \
                 server hosts it"
                    .to_owned(),
            )),
        }
    }

    /// A client of the coordination service. Must be called within a runtime.
    pub(super) fn service(&self) -> Result<Arc<dyn Coordination>, Failure> {
        let endpoints = match &self.coordination {
            Place::Hosted(address) => {
                self.check_no_etcd()?;
                return Ok(Arc::new(Remote::new(RemoteOptions::new(&self.cluster, address))));
            }
            Place::Etcd(endpoints) => endpoints.clone(),
        };
        let (tls, user) = (self.tls()?, self.user()?);
        let options = EtcdOptions { tls, user, ..EtcdOptions::new(&self.cluster, endpoints) };
        Ok(Arc::new(Etcd::new(options).map_err(|error| Failure::Usage(error.to_string()))?))
    }

    /// The cluster as a client sees it. Must be called within a runtime.
    pub(super) fn connect(&self) -> Result<Arc<Cluster>, Failure> {
        Ok(Cluster::new(&self.cluster, self.service()?, self.keys()?))
    }

    fn tls(&self) -> Result<Option<EtcdTls>, Failure> {
        let Some(ca) = &self.etcd_ca else { return Ok(None) };
        let ca = read("--etcd-ca", ca)?;
        let identity = match self.etcd_cert.as_ref().zip(self.etcd_key.as_ref()) {
            Some((certificate, key)) => {
                Some((read("--etcd-cert", certificate)?, read("--etcd-key", key)?))
            }
            None => None,
        };
        Ok(Some(EtcdTls { ca, identity }))
    }

    fn user(&self) -> Result<Option<(String, String)>, Failure> {
        let Some((name, file)) = self.etcd_user.as_ref().zip(self.etcd_password_file.as_ref())
        else {
            return Ok(None);
        };
        let text = read("--etcd-password-file", file)?;
        let invalid = |reason: &str| {
            Failure::Usage(format!("--etcd-password-file: {}: {reason}", file.display()))
        };
        let password = first_line(&text).map_err(invalid)?;
        let password = std::str::from_utf8(password).map_err(|_| invalid("it is not UTF-8"))?;
        Ok(Some((name.clone(), password.to_owned())))
    }

    /// Refuses options of etcd that have no effect.
    fn check_no_etcd(&self) -> Result<(), Failure> {
        let given =
            [("--etcd-ca", self.etcd_ca.is_some()), ("--etcd-user", self.etcd_user.is_some())];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(Failure::Usage(format!(
                "{option}: the coordination service is not etcd; its members are given as \
                 --coordination etcd://HOST:PORT,HOST:PORT,HOST:PORT"
            ))),
        }
    }
}

fn read(option: &str, path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| {
        Failure::Usage(format!("{option}: cannot read {}: {error}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_is_named_with_all_of_its_members() {
        let place = |text: &str| text.parse::<Place>();
        assert_eq!(place("a:1"), Ok(Place::Hosted("a:1".to_owned())));
        let members = vec!["a:2379".to_owned(), "[::1]:2379".to_owned()];
        assert_eq!(place("etcd://a:2379,[::1]:2379"), Ok(Place::Etcd(members)));
        for text in ["etcd://", "etcd://a", "etcd://a:1,", "http://a:1", "etcd://a:1/x", ""] {
            assert!(place(text).is_err(), "{text}");
        }
    }
}
