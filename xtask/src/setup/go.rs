//! Tools and suites from the Go module proxy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Missing, Stamp, apt, files_below, make_executable, number_behind, read, runs};
use crate::Error;
use crate::exec::{output, quietly};

/// Go, and the suites' module with all its dependencies.
pub(crate) struct Go {
    program: PathBuf,
    module: PathBuf,
    /// The directory of downloaded modules.
    cache: PathBuf,
}

impl Go {
    /// Makes a command run this Go in the suites' module.
    pub(crate) fn command(&self, client: impl FnOnce(&Path) -> Command) -> Command {
        let mut command = client(&self.program);
        // Debian's Go may be configured to stay at its own version.
        command.current_dir(&self.module).env("GOTOOLCHAIN", "auto").env_remove("GOROOT");
        command
    }

    /// The directory of a downloaded module.
    pub(super) fn source(&self, module: &str) -> PathBuf {
        let escaped = module.chars().flat_map(|c| {
            let escape = c.is_ascii_uppercase().then_some('!');
            escape.into_iter().chain([c.to_ascii_lowercase()])
        });
        self.cache.join(escaped.collect::<String>())
    }
}

/// Returns Go in the version that `go.mod` names, or one that fetches that version.
pub(crate) fn go(root: &Path) -> Result<Go, Missing> {
    let _lock = super::lock()?;
    let module = root.join("tests/clients/go");
    if !runs("go", &["version"]) {
        let why = "the franz-go suite, the kill test and the endless test";
        apt(&["golang-go", "ca-certificates"], why)?;
    }
    let asked =
        output(Command::new("go").args(["env", "GOVERSION", "GOMODCACHE", "GOOS", "GOARCH"]))?;
    let asked = String::from_utf8_lossy(&asked);
    let [version, cache, os, arch] = asked.lines().collect::<Vec<_>>()[..] else {
        return Err(Missing::Failed(format!("unexpected output of `go env`: {asked:?}").into()));
    };
    // Since 1.21, Go fetches the version in go.mod by itself.
    let program = if number_behind(version, "go1.").is_some_and(|minor| minor >= 21) {
        PathBuf::from("go")
    } else {
        toolchain(&module, Path::new(cache), &format!("{os}-{arch}"))?
    };
    let go = Go { program, module, cache: PathBuf::from(cache) };
    if !go.cache.join("github.com/twmb").exists() {
        println!("setup: go mod download (franz-go from the Go module proxy)");
    }
    quietly(go.command(|program| Command::new(program)).args(["mod", "download"]))?;
    Ok(go)
}

/// Fetches the Go version that `go.mod` names, for a Go that is too old to do so itself, such as
/// Debian 12's. Toolchains are ordinary modules, so the old Go can download the new one, and
/// verifies it against the checksum database.
fn toolchain(module: &Path, cache: &Path, platform: &str) -> Result<PathBuf, Missing> {
    let go_mod = read(&module.join("go.mod"))?;
    let version = go_mod.lines().find_map(|line| line.strip_prefix("go "));
    let version = version.ok_or_else(|| Error::from("go.mod names no Go version"))?;
    let name = format!("golang.org/toolchain@v0.0.1-go{version}.{platform}");
    let installed = cache.join(&name);
    if !installed.exists() {
        println!("setup: go mod download {name} (from the Go module proxy, since go.mod needs it)");
        quietly(Command::new("go").current_dir("/").args(["mod", "download", &name]))?;
    }
    // Module files are not executable. A newer Go sets the same permissions after a download.
    for directory in ["bin", "pkg/tool"] {
        for file in files_below(&installed.join(directory))? {
            make_executable(&file)?;
        }
    }
    Ok(installed.join("bin/go"))
}

/// Compiles a program of the Go module.
pub(crate) fn go_program(root: &Path, name: &str) -> Result<PathBuf, Missing> {
    let _lock = super::lock()?;
    let program = root.join("target/e2e/go").join(name);
    let package = format!("./cmd/{name}");
    let mut build = go(root)?.command(|go| Command::new(go));
    // Go must not read version information from git: the checkout may belong to another user.
    build.args(["build", "-buildvcs=false", "-o"]).arg(&program).arg(package);
    quietly(&mut build)?;
    Ok(program)
}

/// A compiled Go test program, and the package that it must run in.
pub(crate) struct GoTest {
    pub(crate) program: PathBuf,
    pub(crate) package: PathBuf,
}

/// Builds the tests of franz-go's package `kgo`, in the version that the suites use.
pub(crate) fn kgo_tests(root: &Path) -> Result<GoTest, Missing> {
    let _lock = super::lock()?;
    let go = go(root)?;
    let mut list = go.command(|go| Command::new(go));
    list.args(["list", "-m", "-f", "{{.Version}} {{.Dir}}", "github.com/twmb/franz-go"]);
    let listed = String::from_utf8_lossy(&output(&mut list)?).trim().to_owned();
    let Some((version, module)) = listed.split_once(' ') else {
        return Err(Missing::Failed(format!("unexpected output of `go list`: {listed:?}").into()));
    };
    let program = root.join(format!("target/e2e/compat/kgo@{version}.test"));
    let package = Path::new(module).join("pkg/kgo");
    if !program.exists() {
        println!("setup: go test -c kgo (franz-go {version} from the Go module proxy)");
        let mut build = go.command(|go| Command::new(go));
        build.current_dir(&package).args(["test", "-c", "-buildvcs=false", "-o"]);
        quietly(build.arg(&program).arg("."))?;
    }
    Ok(GoTest { program, package })
}

/// The newest version on the module proxy.
const CONFLUENT: &str = "github.com/confluentinc/confluent-kafka-go/v2@v2.11.1";

/// The dependencies of package `kafka` and its tests, out of those of the whole module. The rest is
/// for schema registries and adds hundreds of modules.
const CONFLUENT_NEEDS: [&str; 5] = [
    "github.com/stretchr/testify",
    "github.com/davecgh/go-spew",
    "github.com/pmezard/go-difflib",
    "gopkg.in/yaml.v3",
    DOCKER_COMPOSE,
];

/// Starts servers through Docker, and is never called here since the server is already running. A
/// stub package replaces it.
const DOCKER_COMPOSE: &str = "github.com/testcontainers/testcontainers-go/modules/compose";

/// Changes to the tests. `Flush` of this version takes -1 for an expired timeout, whatever the
/// server; and tests that start in the same second would choose the same names of topics and
/// groups.
const CONFLUENT_CHANGES: [(&str, &str); 2] = [
    ("producer.Flush(-1)", "producer.Flush(60 * 1000)"),
    ("rand.Seed(time.Now().Unix())", "rand.Seed(time.Now().UnixNano())"),
];

/// Builds the tests of confluent-kafka-go's package `kafka`, with the librdkafka that it bundles.
pub(crate) fn confluent_tests(root: &Path) -> Result<GoTest, Missing> {
    let _lock = super::lock()?;
    let go = go(root)?;
    let stand_in = root.join("tests/compat/confluent-kafka/compose");
    let copy = root.join("target/e2e/compat").join(CONFLUENT.replace('/', "_"));
    let tests = GoTest { program: copy.join("kafka.test"), package: copy.join("kafka") };
    let done = Stamp::new(&copy.join("alluvium.stamp"), &files_below(&stand_in)?)?;
    if done.is_fresh() {
        return Ok(tests);
    }
    if !runs("gcc", &["--version"]) {
        apt(&["gcc", "libc6-dev"], "confluent-kafka-go calls librdkafka, which is C")?;
    }
    let source = go.cache.join(CONFLUENT);
    if !source.exists() {
        println!("setup: go mod download {CONFLUENT} (from the Go module proxy)");
        let mut download = go.command(|go| Command::new(go));
        quietly(download.current_dir("/").args(["mod", "download", CONFLUENT]))?;
    }
    if copy.exists() {
        fs::remove_dir_all(&copy).map_err(Error::from)?;
    }
    copy_package(&source, "kafka", &copy)?;
    let go_mod = only_needed(&read(&source.join("go.mod"))?, &stand_in);
    fs::write(copy.join("go.mod"), go_mod).map_err(Error::from)?;
    fs::write(copy.join("go.sum"), read(&source.join("go.sum"))?).map_err(Error::from)?;
    println!("setup: go test -c kafka ({CONFLUENT})");
    let mut build = go.command(|go| Command::new(go));
    build.current_dir(&tests.package).env("CGO_ENABLED", "1");
    build.args(["test", "-c", "-buildvcs=false", "-o"]);
    quietly(build.arg(&tests.program).arg("."))?;
    done.set()?;
    Ok(tests)
}

/// Copies a package with its subdirectories and applies the changes to its tests.
fn copy_package(source: &Path, package: &str, copy: &Path) -> Result<(), Error> {
    let mut unchanged = CONFLUENT_CHANGES.map(|(from, _)| from).to_vec();
    for file in files_below(&source.join(package))? {
        let name = file.strip_prefix(source)?.to_string_lossy().into_owned();
        // The libraries of all other platforms make up most of the module.
        if name.ends_with(".a") && !name.contains("_glibc_linux_") {
            continue;
        }
        let to = copy.join(&name);
        fs::create_dir_all(to.parent().expect("a file is in a directory"))?;
        if name.ends_with("_test.go") {
            let mut text = read(&file)?;
            unchanged.retain(|from| !text.contains(from));
            for (from, into) in CONFLUENT_CHANGES {
                text = text.replace(from, into);
            }
            fs::write(&to, text)?;
        } else {
            fs::copy(&file, &to)?;
        }
    }
    match unchanged[..] {
        [] => Ok(()),
        [missing, ..] => Err(format!("{CONFLUENT}: no test contains `{missing}` any more").into()),
    }
}

/// Writes the `go.mod` of the copy: only the dependencies that package `kafka` needs.
fn only_needed(go_mod: &str, stand_in: &Path) -> String {
    let mut text = String::new();
    for line in go_mod.lines().map(str::trim) {
        match line.split(' ').next() {
            Some("module" | "go") => text.push_str(&format!("{line}\n")),
            Some(name) if CONFLUENT_NEEDS.contains(&name) => {
                text.push_str(&format!("require {line}\n"));
            }
            _ => {}
        }
    }
    text.push_str(&format!("replace {DOCKER_COMPOSE} => \"{}\"\n", stand_in.display()));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_needed_modules_are_required() {
        let theirs = "module github.com/a/b/v2\n\ngo 1.21\n\ntoolchain go1.21.0\n\nrequire (\n\
            \tgithub.com/stretchr/testify v1.9.0\n\
            \tgithub.com/testcontainers/testcontainers-go/modules/compose v0.33.0\n\
            \tgithub.com/stretchr/testify-more v1.0.0\n)\n\nrequire (\n\
            \tgopkg.in/yaml.v3 v3.0.1 // indirect\n)\n";
        let ours = "module github.com/a/b/v2\ngo 1.21\n\
            require github.com/stretchr/testify v1.9.0\n\
            require github.com/testcontainers/testcontainers-go/modules/compose v0.33.0\n\
            require gopkg.in/yaml.v3 v3.0.1 // indirect\n\
            replace github.com/testcontainers/testcontainers-go/modules/compose => \"/a b/c\"\n";
        assert_eq!(only_needed(theirs, Path::new("/a b/c")), ours);
    }
}
