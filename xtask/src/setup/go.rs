//! What comes from the Go module proxy.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Missing, apt, files_below, make_executable, number_behind, read, runs};
use crate::Error;
use crate::exec::{output, quietly};

/// Go, and the module of the suites with all that it needs.
pub(crate) struct Go {
    program: PathBuf,
    module: PathBuf,
}

impl Go {
    /// Lets a command run this Go in the suites' module.
    pub(crate) fn command(&self, client: impl FnOnce(&Path) -> Command) -> Command {
        let mut command = client(&self.program);
        // Where Go comes from Debian it may be told to stay at its own version.
        command.current_dir(&self.module).env("GOTOOLCHAIN", "auto").env_remove("GOROOT");
        command
    }
}

/// Go in the version that `go.mod` names, or one that fetches it.
pub(crate) fn go(root: &Path) -> Result<Go, Missing> {
    let module = root.join("tests/clients/go");
    if !runs("go", &["version"]) {
        let why = "the franz-go suite, the kill test and the endless test";
        apt(&["golang-go", "ca-certificates"], why)?;
    }
    let asked =
        output(Command::new("go").args(["env", "GOVERSION", "GOMODCACHE", "GOOS", "GOARCH"]))?;
    let asked = String::from_utf8_lossy(&asked);
    let [version, cache, os, arch] = asked.lines().collect::<Vec<_>>()[..] else {
        return Err(Missing::Failed(format!("`go env` says {asked:?}").into()));
    };
    // From 1.21 on Go fetches by itself what go.mod asks for.
    let program = if number_behind(version, "go1.").is_some_and(|minor| minor >= 21) {
        PathBuf::from("go")
    } else {
        toolchain(&module, Path::new(cache), &format!("{os}-{arch}"))?
    };
    let go = Go { program, module };
    if !Path::new(cache).join("github.com/twmb").exists() {
        println!("setup: go mod download (franz-go from the Go module proxy)");
    }
    quietly(go.command(|program| Command::new(program)).args(["mod", "download"]))?;
    Ok(go)
}

/// The Go that `go.mod` names, for a Go that is too old to fetch it by itself, as Debian 12 has it. Toolchains are modules like others,
/// so the old one can download the new one, and checks it against the checksum database.
fn toolchain(module: &Path, cache: &Path, platform: &str) -> Result<PathBuf, Missing> {
    let go_mod = read(&module.join("go.mod"))?;
    let version = go_mod.lines().find_map(|line| line.strip_prefix("go "));
    let version = version.ok_or_else(|| Error::from("go.mod names no version of Go"))?;
    let name = format!("golang.org/toolchain@v0.0.1-go{version}.{platform}");
    let installed = cache.join(&name);
    if !installed.exists() {
        println!("setup: go mod download {name} (from the Go module proxy, since go.mod needs it)");
        quietly(Command::new("go").current_dir("/").args(["mod", "download", &name]))?;
    }
    // A module has no executable files. The newer Go does the same when it has downloaded one.
    for directory in ["bin", "pkg/tool"] {
        for file in files_below(&installed.join(directory))? {
            make_executable(&file)?;
        }
    }
    Ok(installed.join("bin/go"))
}

/// A program of the Go module, compiled.
pub(crate) fn go_program(root: &Path, name: &str) -> Result<PathBuf, Missing> {
    let program = root.join("target/e2e/go").join(name);
    let package = format!("./cmd/{name}");
    let mut build = go(root)?.command(|go| Command::new(go));
    // Go must not look for a version in git: the checkout may belong to another user.
    build.args(["build", "-buildvcs=false", "-o"]).arg(&program).arg(package);
    quietly(&mut build)?;
    Ok(program)
}

/// A test program of Go, and the package that it must run in.
pub(crate) struct GoTest {
    pub(crate) program: PathBuf,
    pub(crate) package: PathBuf,
}

/// The tests of franz-go's package `kgo`, in the version that the suites use.
pub(crate) fn kgo_tests(root: &Path) -> Result<GoTest, Missing> {
    let go = go(root)?;
    let mut list = go.command(|go| Command::new(go));
    list.args(["list", "-m", "-f", "{{.Version}} {{.Dir}}", "github.com/twmb/franz-go"]);
    let listed = String::from_utf8_lossy(&output(&mut list)?).trim().to_owned();
    let Some((version, module)) = listed.split_once(' ') else {
        return Err(Missing::Failed(format!("`go list` says {listed:?}").into()));
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
