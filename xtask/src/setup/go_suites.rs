//! Test suites of Go clients: copies of their modules with a few changes to the tests, which
//! tests/compat/README.md describes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::go::{Go, go};
use super::{GoTest, Missing, Stamp, files_below, read};
use crate::Error;
use crate::exec::quietly;

/// A change to the files whose names have this suffix: suffix, old text and new text.
type Change = (&'static str, &'static str, &'static str);

const KAFKA_GO: &str = "github.com/segmentio/kafka-go@v0.4.51";

/// The tests expect servers at fixed ports. Some files are about addresses only.
const KAFKA_GO_CHANGES: [Change; 14] = [
    ("_test.go", "\"localhost:9092\"", "testBroker"),
    ("_test.go", "\"127.0.0.1:9092\"", "testBroker"),
    ("_test.go", "TCP(\"localhost\")", "TCP(testBroker)"),
    ("_test.go", "Host: \"localhost\", Port: 9092", "Host: testHost, Port: testPort"),
    ("_test.go", "Host != \"localhost\"", "Host != testHost"),
    ("_test.go", "Port != 9092", "Port != testPort"),
    ("_test.go", "\"example.com:9092\"", "\"example.com:\" + strconv.Itoa(testPort)"),
    ("dialer_test.go", "\t\"reflect\"\n", "\t\"reflect\"\n\t\"strconv\"\n"),
    ("conn_test.go", "\tconst (\n\t\ttcp ", "\tvar (\n\t\ttcp "),
    // A constant cannot be initialized from the environment.
    ("reader_test.go", "\tconst broker = testBroker", "\tbroker := testBroker"),
    // Unchanged, it calls a function that is never set, and the program panics.
    (
        "reader_test.go",
        "\tconn, err := cg.coordinator()\n",
        "\tcg.config.Timeout = 10 * time.Second\n\tcg.config.connect = makeConnect(cg.config)\n\t\
         conn, err := cg.coordinator()\n",
    ),
    ("conn_test.go", "\"127.0.0.1:9093\"", "testBrokerSASL"),
    ("writer_test.go", "\"localhost:9093\"", "testBrokerSASL"),
    (
        "sasl/sasl_test.go",
        "\tsaslTestConnect = \"localhost:9093\" // connect to sasl listener\n",
        "",
    ),
];
const KAFKA_GO_UNCHANGED: [&str; 3] =
    ["address_test.go", "example_consumergroup_test.go", "example_writer_test.go"];

/// The packages with tests that need a server, and the code added to their tests.
const KAFKA_GO_PACKAGES: [(&str, &str); 3] = [
    (
        ".",
        "package kafka

import (
\t\"net\"
\t\"os\"
\t\"strconv\"
)

var (
\ttestBroker     = os.Getenv(\"BOOTSTRAP\")
\ttestBrokerSASL = os.Getenv(\"BOOTSTRAP_SASL\")
\ttestHost, testPort = func() (string, int) {
\t\thost, port, _ := net.SplitHostPort(testBroker)
\t\tnumber, _ := strconv.Atoi(port)
\t\treturn host, number
\t}()
)
",
    ),
    (
        "sasl",
        "package sasl_test\n\nimport \"os\"\n\nvar saslTestConnect = \
         os.Getenv(\"BOOTSTRAP_SASL\")\n",
    ),
    ("topics", "package topics\n\nimport \"os\"\n\nvar testBroker = os.Getenv(\"BOOTSTRAP\")\n"),
];

/// Our own tests, which run with those of the first package.
const KAFKA_GO_ADDED: &str = include_str!("../../../tests/compat/kafka-go/timestamps_test.go");

/// Builds the tests of kafka-go, one program per package. They find servers in `BOOTSTRAP` and
/// `BOOTSTRAP_SASL`.
pub(crate) fn kafka_go_tests(root: &Path) -> Result<Vec<GoTest>, Missing> {
    let _lock = super::lock()?;
    let copy = root.join("target/e2e/compat").join(KAFKA_GO.replace('/', "_"));
    let tests = KAFKA_GO_PACKAGES.map(|(package, _)| {
        let package = copy.join(package);
        GoTest { program: package.join("alluvium.test"), package }
    });
    let go = go(root)?;
    let changes = format!("{KAFKA_GO_CHANGES:?}{KAFKA_GO_PACKAGES:?}{KAFKA_GO_ADDED}");
    let Some(done) = fresh_copy(&go, KAFKA_GO, &copy, &changes)? else { return Ok(tests.into()) };
    change(&copy, &KAFKA_GO_CHANGES, &KAFKA_GO_UNCHANGED)?;
    for (directory, added) in KAFKA_GO_PACKAGES {
        let file = copy.join(directory).join("alluvium_test.go");
        fs::write(file, added).map_err(Error::from)?;
    }
    fs::write(copy.join("timestamps_test.go"), KAFKA_GO_ADDED).map_err(Error::from)?;
    for test in &tests {
        compile(&go, test, &[])?;
    }
    done.set()?;
    Ok(tests.into())
}

const SARAMA: &str = "github.com/IBM/sarama@v1.61.1";

/// A topic has one replica on a single node, and the proxies listen on free ports.
const SARAMA_CHANGES: [Change; 2] = [
    ("functional_test.go", "ReplicationFactor: 3,", "ReplicationFactor: 1,"),
    ("functional_test.go", "fmt.Sprintf(\"127.0.0.1:%d\", 29090+i)", "proxy.ListenAddr"),
];

/// Builds the functional tests of sarama, which share a package with the unit tests.
pub(crate) fn sarama_tests(root: &Path) -> Result<GoTest, Missing> {
    let _lock = super::lock()?;
    let copy = root.join("target/e2e/compat").join(SARAMA.replace('/', "_"));
    let tests = GoTest { program: copy.join("alluvium.test"), package: copy.clone() };
    let go = go(root)?;
    let changes = format!("{SARAMA_CHANGES:?}");
    let Some(done) = fresh_copy(&go, SARAMA, &copy, &changes)? else { return Ok(tests) };
    change(&copy, &SARAMA_CHANGES, &[])?;
    compile(&go, &tests, &["-tags", "functional"])?;
    done.set()?;
    Ok(tests)
}

const TOXIPROXY: &str = "v2.5.0";

/// Installs the proxy through which sarama's tests reach servers.
pub(crate) fn toxiproxy(root: &Path) -> Result<PathBuf, Missing> {
    let _lock = super::lock()?;
    let directory = root.join(format!("target/e2e/bin/toxiproxy@{TOXIPROXY}"));
    let program = directory.join("server");
    if !program.exists() {
        let package = format!("github.com/Shopify/toxiproxy/v2/cmd/server@{TOXIPROXY}");
        println!("setup: go install {package} (from the Go module proxy)");
        let mut install = go(root)?.command(|go| Command::new(go));
        install.current_dir("/").env("GOBIN", &directory).args(["install", &package]);
        quietly(&mut install)?;
    }
    Ok(program)
}

/// Copies a module, unless the copy is up to date. Returns a stamp to set once the copy is changed
/// and built.
fn fresh_copy(go: &Go, module: &str, copy: &Path, changes: &str) -> Result<Option<Stamp>, Missing> {
    let done = Stamp::of(&copy.join("alluvium.stamp"), changes);
    if done.is_fresh() {
        return Ok(None);
    }
    println!("setup: go mod download {module} (from the Go module proxy)");
    let mut download = go.command(|go| Command::new(go));
    quietly(download.current_dir("/").args(["mod", "download", module]))?;
    if copy.exists() {
        fs::remove_dir_all(copy).map_err(Error::from)?;
    }
    let source = go.source(module);
    for file in files_below(&source)? {
        let to = copy.join(file.strip_prefix(&source).map_err(Error::from)?);
        fs::create_dir_all(to.parent().expect("a file is in a directory")).map_err(Error::from)?;
        // Not `copy`: the files of the cache are read-only.
        fs::write(&to, fs::read(&file).map_err(Error::from)?).map_err(Error::from)?;
    }
    Ok(Some(done))
}

/// Applies the changes to a copy. A change whose old text is missing is an error.
fn change(copy: &Path, changes: &[Change], unchanged: &[&str]) -> Result<(), Error> {
    let mut found = vec![false; changes.len()];
    for file in files_below(copy)? {
        let name = file.strip_prefix(copy)?.to_string_lossy().into_owned();
        if !name.ends_with(".go") || unchanged.contains(&name.as_str()) {
            continue;
        }
        let before = read(&file)?;
        let mut text = before.clone();
        for ((suffix, from, to), found) in changes.iter().zip(&mut found) {
            if name.ends_with(suffix) && text.contains(from) {
                text = text.replace(from, to);
                *found = true;
            }
        }
        if text != before {
            // A constant cannot be initialized from the environment.
            fs::write(
                &file,
                text.replace("\tconst broker = testBroker", "\tbroker := testBroker"),
            )?;
        }
    }
    match changes.iter().zip(found).find(|(_, found)| !found) {
        None => Ok(()),
        Some(((file, from, _), _)) => {
            Err(format!("{}: no {file} contains `{from}` any more", copy.display()).into())
        }
    }
}

fn compile(go: &Go, test: &GoTest, further: &[&str]) -> Result<(), Error> {
    println!("setup: go test -c ({})", test.package.display());
    let mut build = go.command(|go| Command::new(go));
    build.current_dir(&test.package).args([
        "test",
        "-c",
        "-mod=mod",
        "-vet=off",
        "-buildvcs=false",
    ]);
    quietly(build.args(further).arg("-o").arg(&test.program).arg("."))
}
