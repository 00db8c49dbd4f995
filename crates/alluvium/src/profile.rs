//! Credentials and region from the files of AWS's own tools:
//! <https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html>.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use configparser::ini::{Ini, IniDefault};
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use parking_lot::Mutex;

const KEY_ID: &str = "aws_access_key_id";
const SECRET_KEY: &str = "aws_secret_access_key";
const TOKEN: &str = "aws_session_token";
/// Other sources of credentials that AWS's tools support. (`role_arn` represents the settings that
/// accompany it.)
const NOT_KNOWN: [&str; 5] =
    ["role_arn", "credential_process", "sso_session", "sso_start_url", "login_session"];

/// The settings of a profile.
#[derive(Debug)]
pub(crate) struct Profile {
    pub(crate) region: Option<String>,
    /// `None` if the profile has only other settings.
    pub(crate) credentials: Option<ProfileCredentials>,
}

impl Profile {
    /// Finds the profile that `AWS_PROFILE` names, or `default` if there is one, in the files that
    /// `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE` name, or in those in `~/.aws`.
    ///
    /// # Errors
    /// The named profile is missing or has no credentials, its credentials are of an unsupported
    /// kind, or a file cannot be read.
    pub(crate) fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let named = variable("AWS_PROFILE");
        let home = variable("HOME").map(PathBuf::from).or_else(std::env::home_dir);
        let file = |name: &str, usual: &str| match variable(name) {
            Some(path) => Some(PathBuf::from(path)),
            None => Some(home.as_ref()?.join(".aws").join(usual)),
        };
        let location = ProfileLocation {
            name: named.clone().unwrap_or_else(|| "default".into()),
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: file("AWS_CONFIG_FILE", "config"),
        };
        let stamps = location.stamps();
        let found = location.read()?;
        if named.is_some() && found.key.is_none() {
            return Err(format!("AWS_PROFILE: {location} has no {KEY_ID}, or does not exist"));
        }
        let credentials = found.key.map(|key| ProfileCredentials {
            location,
            latest: Mutex::new((stamps, Arc::new(key))),
        });
        Ok(Self { region: found.region, credentials })
    }
}

/// The keys of a profile, read again when a file has changed, because some tools renew keys in the
/// file before they expire.
#[derive(Debug)]
pub(crate) struct ProfileCredentials {
    location: ProfileLocation,
    latest: Mutex<(Stamps, Arc<AwsCredential>)>,
}

impl ProfileCredentials {
    /// The profile's name.
    pub(crate) fn name(&self) -> &str {
        &self.location.name
    }
}

#[async_trait]
impl CredentialProvider for ProfileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let stamps = self.location.stamps();
        let mut latest = self.latest.lock();
        if stamps != latest.0 {
            let found = self.location.read();
            let gone = || format!("{} no longer has {KEY_ID}", self.location);
            match found.and_then(|found| found.key.ok_or_else(gone)) {
                Ok(key) => latest.1 = Arc::new(key),
                // The file may be half written; it is read again at its next change.
                Err(error) => tracing::warn!("keeping the previous credentials: {error}"),
            }
            latest.0 = stamps;
        }
        Ok(latest.1.clone())
    }
}

/// The location of a profile.
#[derive(Debug)]
struct ProfileLocation {
    name: String,
    credentials: Option<PathBuf>,
    config: Option<PathBuf>,
}

/// Modification times of the files, and their lengths.
type Stamps = [Option<(SystemTime, u64)>; 2];

struct Found {
    region: Option<String>,
    key: Option<AwsCredential>,
}

impl std::fmt::Display for ProfileLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let files = [&self.credentials, &self.config].into_iter().flatten();
        let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
        write!(f, "the profile `{}` in {}", self.name, files.join(" and "))
    }
}

impl ProfileLocation {
    fn stamps(&self) -> Stamps {
        [&self.credentials, &self.config].map(|file| {
            let metadata = fs::metadata(file.as_ref()?).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        })
    }

    fn read(&self) -> Result<Found, String> {
        let in_config = match self.name.as_str() {
            "default" => vec!["default".into(), "profile default".into()],
            name => vec![format!("profile {name}")],
        };
        let of_credentials =
            section(self.credentials.as_deref(), std::slice::from_ref(&self.name))?;
        let of_config = section(self.config.as_deref(), &in_config)?;
        let mut key = None;
        for settings in [&of_credentials, &of_config] {
            let value = |name: &str| settings.get(name).cloned();
            match (value(KEY_ID), value(SECRET_KEY)) {
                (Some(key_id), Some(secret_key)) => {
                    key = Some(AwsCredential { key_id, secret_key, token: value(TOKEN) });
                    break;
                }
                (None, None) => {}
                _ => return Err(format!("{self} has one of {KEY_ID} and {SECRET_KEY}, not both")),
            }
        }
        let has = |name: &str| of_credentials.contains_key(name) || of_config.contains_key(name);
        if key.is_none()
            && let Some(kind) = NOT_KNOWN.into_iter().find(|kind| has(kind))
        {
            return Err(format!(
                "{self} gets its credentials from `{kind}`, which is not supported: `eval \"$(aws \
                 configure export-credentials --profile {} --format env)\"` puts them into the \
                 environment",
                self.name
            ));
        }
        let region = of_config.get("region").or_else(|| of_credentials.get("region")).cloned();
        Ok(Found { region, key })
    }
}

/// The settings in the first of these sections that exists; empty without the file.
fn section(file: Option<&Path>, names: &[String]) -> Result<HashMap<String, String>, String> {
    let Some(file) = file else { return Ok(HashMap::new()) };
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashMap::new()),
        Err(error) => return Err(format!("{}: {error}", file.display())),
    };
    let mut format = IniDefault::default();
    // Lines in front of the first section belong to no profile.
    format.default_section = String::new();
    // A secret key may contain these characters.
    format.enable_inline_comments = false;
    format.delimiters = vec!['='];
    format.case_sensitive = true;
    // Indented lines belong to the setting before them.
    format.multiline = true;
    let mut ini = Ini::new_from_defaults(format);
    // Errors name the line, not its content.
    let mut sections = ini.read(text).map_err(|error| format!("{}: {error}", file.display()))?;
    let found = names.iter().find_map(|name| sections.remove(name)).unwrap_or_default();
    let found = found.into_iter().filter_map(|(name, value)| {
        let value = value.filter(|value| !value.is_empty())?;
        Some((name.to_lowercase(), value))
    });
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A home directory with these two files, and environment variables.
    struct Home(TempDir, Vec<(&'static str, String)>);

    impl Home {
        fn new(credentials: &str, config: &str) -> Self {
            let home = tempfile::tempdir().unwrap();
            fs::create_dir(home.path().join(".aws")).unwrap();
            for (name, text) in [("credentials", credentials), ("config", config)] {
                if !text.is_empty() {
                    fs::write(home.path().join(".aws").join(name), text).unwrap();
                }
            }
            let variables = vec![("HOME", home.path().display().to_string())];
            Self(home, variables)
        }

        fn with(mut self, name: &'static str, value: &str) -> Self {
            self.1.push((name, value.into()));
            self
        }

        fn find(&self) -> Result<Profile, String> {
            Profile::find(|name| {
                let found = self.1.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.clone())
            })
        }

        fn key(&self) -> AwsCredential {
            key(&self.find().unwrap())
        }
    }

    fn key(profile: &Profile) -> AwsCredential {
        let key = profile.credentials.as_ref().expect("there is a key").latest.lock().1.clone();
        let AwsCredential { key_id, secret_key, token } = &*key;
        AwsCredential {
            key_id: key_id.clone(),
            secret_key: secret_key.clone(),
            token: token.clone(),
        }
    }

    fn known(key_id: &str, secret_key: &str, token: Option<&str>) -> AwsCredential {
        AwsCredential {
            key_id: key_id.into(),
            secret_key: secret_key.into(),
            token: token.map(String::from),
        }
    }

    const CREDENTIALS: &str = "\
        # comment\r\n[default]\r\naws_access_key_id = one\r\n\
        aws_secret_access_key = s/e+c=#r;et\r\n\r\n[two words]\naws_access_key_id=two\n\
        aws_secret_access_key=hush\naws_session_token = to==\n";
    const CONFIG: &str = "\
        [default]\nregion = eu-west-1\n\
        s3 =\n  aws_access_key_id = nested\n  max_queue_size = 1000\n[profile two words]\n\
        region=us-west-2\n[profile three]\naws_access_key_id = three\n\
        aws_secret_access_key = hush3\n[four]\naws_access_key_id = four\n\
        aws_secret_access_key = hush4\n";

    #[test]
    fn a_profile_is_found_by_name_or_by_default() {
        let home = Home::new(CREDENTIALS, CONFIG);
        assert!(home.key() == known("one", "s/e+c=#r;et", None));
        assert_eq!(home.find().unwrap().region.as_deref(), Some("eu-west-1"));
        let home = home.with("AWS_PROFILE", "two words");
        assert!(home.key() == known("two", "hush", Some("to==")));
        assert_eq!(home.find().unwrap().region.as_deref(), Some("us-west-2"));
        let home = Home::new(CREDENTIALS, CONFIG).with("AWS_PROFILE", "three");
        assert!(home.key() == known("three", "hush3", None), "keys may be in the config file");
        let home = Home::new(CREDENTIALS, CONFIG).with("AWS_PROFILE", "four");
        assert!(home.find().unwrap_err().contains("`four`"), "its section is not a profile");
    }

    #[test]
    fn the_files_may_be_elsewhere() {
        let home = Home::new("", "");
        let other = Home::new(CREDENTIALS, CONFIG);
        let path = |name: &str| other.0.path().join(".aws").join(name).display().to_string();
        let home = home
            .with("AWS_SHARED_CREDENTIALS_FILE", &path("credentials"))
            .with("AWS_CONFIG_FILE", &path("config"));
        assert!(home.key() == known("one", "s/e+c=#r;et", None));
    }

    #[test]
    fn without_a_profile_there_are_no_profile_credentials() {
        for (credentials, config) in [("", ""), ("[other]\naws_access_key_id=x\n", "[default]\n")] {
            let profile = Home::new(credentials, config).find().unwrap();
            assert!(profile.credentials.is_none() && profile.region.is_none());
        }
        let only_region = Home::new("", "[default]\nregion=eu-west-1\n").find().unwrap();
        assert!(only_region.credentials.is_none());
        assert_eq!(only_region.region.as_deref(), Some("eu-west-1"));
    }

    #[test]
    fn unusable_profiles_are_errors_without_secrets() {
        let role = "[default]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = hush\n";
        let one = "[default]\naws_secret_access_key = hush\n";
        let broken = "[default\naws_secret_access_key = hush\n";
        let no_key = "[default]\n= hush\n";
        for (credentials, config, reason) in [
            ("", role, "`role_arn`"),
            (one, "", "not both"),
            (broken, "", "line 1"),
            (no_key, "", "line 2"),
            ("", "[default]\ncredential_process = hush\n", "`credential_process`"),
        ] {
            let error = Home::new(credentials, config).find().unwrap_err();
            assert!(error.contains(reason) && !error.contains("hush"), "{error}");
        }
        let missing = Home::new(CREDENTIALS, CONFIG).with("AWS_PROFILE", "no").find();
        assert!(missing.unwrap_err().contains("AWS_PROFILE: the profile `no` in "));
    }

    #[tokio::test]
    async fn renewed_keys_are_read_and_half_written_files_are_not() {
        let home = Home::new(CREDENTIALS, CONFIG);
        let file = home.0.path().join(".aws/credentials");
        let found = home.find().unwrap();
        let now = async || {
            let provider = found.credentials.as_ref().unwrap();
            provider.get_credential().await.unwrap().key_id.clone()
        };
        assert_eq!(now().await, "one");
        for (text, expected) in [
            ("[default]\naws_access_key_id=renewed\naws_secret_access_key=x\n", "renewed"),
            ("[default]\naws_access_key_id=half", "renewed"),
            ("", "renewed"),
            ("[default]\naws_access_key_id=again\naws_secret_access_key=longer\n", "again"),
        ] {
            fs::write(&file, text).unwrap();
            assert_eq!(now().await, expected);
        }
    }
}
