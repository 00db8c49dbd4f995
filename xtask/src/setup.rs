//! Fetches what the tests need from the ordinary package registries, says what and why, and skips what is there.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::Error;
use crate::exec::{output, quietly};

/// Why a tool is not there.
#[derive(Debug)]
pub(crate) enum Missing {
    /// Nobody here may install it. The suites that need it are skipped.
    NotAllowed(String),
    /// Installing it was tried and has failed. The suites that need it have failed.
    Failed(Error),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAllowed(reason) => f.write_str(reason),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl From<Error> for Missing {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Whether `program --version` (or the given arguments) runs.
fn runs(program: &str, arguments: &[&str]) -> bool {
    quietly(Command::new(program).args(arguments)).is_ok()
}

/// Installs Debian packages, after one `apt-get update` for the whole run.
fn apt(packages: &[&str], why: &str) -> Result<(), Missing> {
    static UPDATED: OnceLock<()> = OnceLock::new();
    let names = packages.join(" ");
    let sudo = !rustix::process::geteuid().is_root();
    if !runs("apt-get", &["--version"]) {
        return Err(Missing::NotAllowed(format!("{names} is missing, and there is no apt-get")));
    }
    if sudo && !runs("sudo", &["-n", "true"]) {
        let reason = format!("{names} is missing, and apt-get needs root or sudo without password");
        return Err(Missing::NotAllowed(reason));
    }
    let apt_get = |arguments: &[&str]| {
        let mut command = Command::new(if sudo { "sudo" } else { "apt-get" });
        if sudo {
            command.args(["-n", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        }
        quietly(command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments))
    };
    if UPDATED.get().is_none() {
        println!("setup: apt-get update");
        apt_get(&["update", "-q"])?;
        UPDATED.get_or_init(|| ());
    }
    println!("setup: apt-get install {names} ({why})");
    apt_get(&[&["install", "-q", "-y", "--no-install-recommends"], packages].concat())?;
    Ok(())
}

/// kcat.
pub(crate) fn kcat() -> Result<(), Missing> {
    if runs("kcat", &["-V"]) {
        return Ok(());
    }
    apt(&["kcat"], "the kcat suite, and the kill test's reader")
}

/// A list of words of a natural language: a data set that nobody here has generated.
pub(crate) fn words() -> Result<PathBuf, Missing> {
    let path = PathBuf::from("/usr/share/dict/words");
    if !path.exists() {
        apt(&["wamerican"], "a list of words as a foreign data set")?;
    }
    Ok(path)
}

/// A Python with confluent-kafka, in a virtual environment of its own.
pub(crate) fn python(root: &Path) -> Result<PathBuf, Missing> {
    let requirements = root.join("tests/clients/python/requirements.txt");
    let venv = root.join("target/e2e/venv");
    let python = venv.join("bin/python");
    let done = Stamp::new(&venv.join("alluvium.stamp"), std::slice::from_ref(&requirements))?;
    if done.is_fresh() {
        return Ok(python);
    }
    if !runs("python3", &["-c", "import venv, ensurepip"]) {
        apt(&["python3", "python3-venv"], "the confluent-kafka suite and the kill test")?;
    }
    println!("setup: pip install -r {} (PyPI)", requirements.display());
    quietly(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-r"];
    quietly(Command::new(&python).args(pip).arg(&requirements))?;
    done.set()?;
    Ok(python)
}

/// The class path of the Java suite: its own classes, compiled, and its jars.
pub(crate) fn java(root: &Path) -> Result<String, Missing> {
    let project = root.join("tests/clients/java");
    let out = root.join("target/e2e/java");
    let class_path = format!("{0}/classes:{0}/libs/*", out.display());
    if !runs("javac", &["-version"]) {
        apt(&["default-jdk-headless"], "the kafka-clients suite")?;
    }
    let mut sources = files_below(&project.join("src"))?;
    sources.push(project.join("pom.xml"));
    let done = Stamp::new(&out.join("alluvium.stamp"), &sources)?;
    if done.is_fresh() {
        return Ok(class_path);
    }
    if !runs("mvn", &["-v"]) {
        apt(&["maven"], "fetches kafka-clients and compiles its suite")?;
    }
    println!("setup: mvn process-classes (kafka-clients and kafka-tools from Maven Central)");
    let arguments = ["-q", "-B", "-ntp", "-f", "pom.xml", "process-classes"];
    quietly(Command::new("mvn").current_dir(&project).args(arguments))?;
    done.set()?;
    Ok(class_path)
}

/// The directory of the Go module, once Go is there and can fetch what `go.mod` names.
pub(crate) fn go(root: &Path) -> Result<PathBuf, Missing> {
    let module = root.join("tests/clients/go");
    if !runs("go", &["version"]) {
        apt(&["golang-go"], "the franz-go suite, the kill test and the endless test")?;
    }
    // From 1.21 on, Go fetches the toolchain that go.mod asks for by itself.
    let version = output(Command::new("go").args(["env", "GOVERSION"]))?;
    let version = String::from_utf8_lossy(&version).trim().to_owned();
    let minor = version.strip_prefix("go1.").and_then(|rest| rest.split('.').next()?.parse().ok());
    if minor.is_none_or(|minor: u32| minor < 21) {
        let reason = format!("{version} is too old to fetch the Go that go.mod names: 1.21 needed");
        return Err(Missing::NotAllowed(reason));
    }
    let module_cache = output(Command::new("go").args(["env", "GOMODCACHE"]))?;
    let module_cache = PathBuf::from(String::from_utf8_lossy(&module_cache).trim());
    if !module_cache.join("github.com/twmb").exists() {
        println!("setup: go mod download (franz-go from the Go module proxy)");
    }
    quietly(Command::new("go").current_dir(&module).args(["mod", "download"]))?;
    Ok(module)
}

/// A program of the Go module, compiled.
pub(crate) fn go_program(root: &Path, name: &str) -> Result<PathBuf, Missing> {
    let module = go(root)?;
    let program = root.join("target/e2e/go").join(name);
    let package = format!("./cmd/{name}");
    let mut build = Command::new("go");
    // Go must not look for a version in git: the checkout may belong to another user.
    build.current_dir(module).args(["build", "-buildvcs=false", "-o"]).arg(&program).arg(package);
    quietly(&mut build)?;
    Ok(program)
}

/// Remembers what was installed from which inputs.
struct Stamp {
    path: PathBuf,
    inputs: String,
}

impl Stamp {
    fn new(path: &Path, files: &[PathBuf]) -> Result<Self, Error> {
        let mut inputs = String::new();
        for file in files {
            inputs.push_str(&format!("== {}\n", file.display()));
            let text = fs::read_to_string(file);
            inputs.push_str(&text.map_err(|error| format!("{}: {error}", file.display()))?);
        }
        Ok(Self { path: path.to_path_buf(), inputs })
    }

    fn is_fresh(&self) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|text| text == self.inputs)
    }

    fn set(&self) -> Result<(), Error> {
        fs::write(&self.path, &self.inputs)
            .map_err(|error| format!("{}: {error}", self.path.display()).into())
    }
}

/// All files below a directory, sorted.
fn files_below(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for entry in
        fs::read_dir(directory).map_err(|error| format!("{}: {error}", directory.display()))?
    {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
