//! Packages from PyPI.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Missing, Stamp, apt, edit, read, runs};
use crate::Error;
use crate::exec::quietly;

/// A Python with confluent-kafka and redis-py, in its own virtual environment.
pub(crate) fn python(root: &Path) -> Result<PathBuf, Missing> {
    let _lock = super::lock()?;
    let requirements = root.join("tests/clients/python/requirements.txt");
    environment(root, &requirements, "venv", "the confluent-kafka suite and the kill test")
}

/// Creates a virtual environment with the packages in `requirements`, and returns its Python.
fn environment(
    root: &Path,
    requirements: &Path,
    name: &str,
    why: &str,
) -> Result<PathBuf, Missing> {
    let venv = root.join("target/e2e").join(name);
    let python = venv.join("bin/python");
    let done = Stamp::new(&venv.join("alluvium.stamp"), &[requirements.to_path_buf()])?;
    if done.is_fresh() {
        return Ok(python);
    }
    if !runs("python3", &["-c", "import venv, ensurepip"]) {
        apt(&["python3", "python3-venv", "ca-certificates"], why)?;
    }
    println!("setup: pip install -r {} (PyPI)", requirements.display());
    quietly(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))?;
    let pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-r"];
    quietly(Command::new(&python).args(pip).arg(requirements))?;
    done.set()?;
    Ok(python)
}

/// Whether `python3` is at least 3.`minor`.
fn python_is(minor: u32) -> bool {
    let asks = format!("import sys; sys.exit(sys.version_info < (3, {minor}))");
    runs("python3", &["-c", &asks])
}

/// A terminal UI for Kafka, and the Python of its environment.
pub(crate) struct Kaskade {
    pub(crate) python: PathBuf,
    pub(crate) program: PathBuf,
}

/// Installs kaskade and tmux, which provides its terminal.
pub(crate) fn kaskade(root: &Path) -> Result<Kaskade, Missing> {
    let _lock = super::lock()?;
    if !runs("tmux", &["-V"]) {
        apt(&["tmux"], "the terminal of a UI")?;
    }
    if runs("python3", &["--version"]) && !python_is(10) {
        let reason = "python3 is too old for kaskade: 3.10 is needed";
        return Err(Missing::NotAllowed(reason.into()));
    }
    let requirements = root.join("tests/compat/apps/ui/requirements.txt");
    let python = environment(root, &requirements, "kaskade", "a UI for Kafka")?;
    let program = python.with_file_name("kaskade");
    Ok(Kaskade { python, program })
}

/// The versions of kafka-python whose tests run: the newest, and the last of the previous major
/// version.
pub(crate) const KAFKA_PYTHON: [&str; 2] = ["3.0.12", "2.3.3"];

/// kafka-python's tests, the directory to run them in, and a Python that has what they need.
pub(crate) struct PythonTests {
    pub(crate) python: PathBuf,
    pub(crate) directory: PathBuf,
}

/// Changes to the authentication tests of kafka-python 3: they use a running server instead of
/// starting one, and list topics without Kafka's tools. Those of 2.3.3 also create topics with
/// these tools.
const LOGGING_IN: [(&str, &str); 4] = [
    (
        "pytestmark = pytest.mark.skipif(\"KAFKA_URI\" in os.environ, \
         reason=\"Testing on external Kafka Broker\")\n",
        "",
    ),
    ("import client_params, create_topics", "import KafkaFixture, client_params, create_topics"),
    (
        "kafka_broker_factory(transport",
        "KafkaFixture.instance(0, external=True, host=os.environ[\"SASL_HOST\"], \
         port=int(os.environ[\"SASL_PORT\"]), transport",
    ),
    ("sasl_kafka.get_topic_names()", "admin.list_topics()"),
];

/// Unpacks the tests in the source archive of a version of kafka-python. The archive lacks a file
/// that starts servers; our own replaces it.
pub(crate) fn kafka_python_tests(root: &Path, version: &str) -> Result<PythonTests, Missing> {
    let _lock = super::lock()?;
    let ours = root.join("tests/compat/kafka-python");
    let major = version.split('.').next().expect("a version has a part");
    let requirements = ours.join(format!("requirements-{major}.txt"));
    let name = format!("kafka-python@{version}");
    let python = environment(root, &requirements, &name, "kafka-python's tests")?;
    let parent = root.join("target/e2e/compat").join(&name);
    let directory = parent.join(format!("kafka_python-{version}"));
    let stand_in = ours.join("service.py");
    let done =
        Stamp::of(&parent.join("alluvium.stamp"), &format!("{}{LOGGING_IN:?}", read(&stand_in)?));
    if !done.is_fresh() {
        fs::create_dir_all(&parent).map_err(Error::from)?;
        println!("setup: pip download kafka-python {version} (its source archive, from PyPI)");
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]);
        pip.args(["--no-binary", "kafka-python", "-d"]).arg(&parent);
        quietly(pip.arg(format!("kafka-python=={version}")))?;
        let archive = format!("{}.tar.gz", directory.display());
        quietly(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&parent))?;
        if major == "3" {
            edit(&directory.join("test/integration/test_sasl_integration.py"), &LOGGING_IN)?;
        }
        // The tests must use the installed package, not the one beside them.
        fs::remove_dir_all(directory.join("kafka")).map_err(Error::from)?;
        fs::copy(&stand_in, directory.join("test/service.py")).map_err(Error::from)?;
        fs::write(directory.join("test/__init__.py"), "").map_err(Error::from)?;
        done.set()?;
    }
    Ok(PythonTests { python, directory })
}

/// A Python with kafka-python 2.0.2.
pub(crate) fn kafka_python_old(root: &Path) -> Result<PathBuf, Missing> {
    let _lock = super::lock()?;
    if python_is(12) {
        let reason = "kafka-python 2.0.2 cannot be imported by Python 3.12 and later";
        return Err(Missing::NotAllowed(reason.into()));
    }
    let requirements = root.join("tests/compat/kafka-python/requirements-2.0.txt");
    environment(root, &requirements, "kafka-python@2.0.2", "kafka-python 2.0.2")
}

/// The versions of aiokafka that are tested: the newest, and one in wide use.
pub(crate) const AIOKAFKA: [&str; 2] = ["0.14.0", "0.12.0"];

/// A Python with aiokafka.
pub(crate) fn aiokafka(root: &Path, version: &str) -> Result<PathBuf, Missing> {
    let _lock = super::lock()?;
    let requirements = root.join(format!("tests/compat/aiokafka/requirements-{version}.txt"));
    environment(root, &requirements, &format!("aiokafka@{version}"), "aiokafka")
}
