//! The image that virtual machines of the tests start from: Debian's kernel and an initial file
//! system with a few programs. QEMU is the only package that is installed for it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;
use crate::exec::{output, quietly};
use crate::setup::{Missing, apt, runs};

const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";

/// A kernel and its initial file system.
pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
}

/// The contents of an initial file system besides busybox.
pub(crate) struct Contents<'a> {
    /// The first program: a script for `/bin/busybox sh`. It loads the modules in `/modules`, in
    /// the order of their names.
    pub(crate) init: &'a str,
    /// Drivers, without their dependencies.
    pub(crate) modules: &'a [&'a str],
    /// Files, each with its name below `/bin`. Their libraries are included.
    pub(crate) programs: &'a [(&'a Path, &'a str)],
    /// The directory of an unpacked, not installed Debian package, if a program is from there.
    pub(crate) unpacked: Option<&'a Path>,
}

impl Image {
    /// Builds the image below `directory`. `cache` holds the kernel.
    pub(crate) fn prepare(
        cache: &Path,
        directory: &Path,
        contents: &Contents<'_>,
    ) -> Result<Self, Missing> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Missing::NotAllowed("the guest's kernel requires x86_64".into()));
        }
        let programs = [("qemu-system-x86_64", "qemu-system-x86"), ("busybox", "busybox-static")];
        let missing = programs.iter().filter(|(program, _)| !runs(program, &["--help"]));
        let packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
        if !packages.is_empty() {
            apt(&packages, "a virtual machine")?;
        }
        let packaged = kernel(cache)?;
        let initramfs = directory.join("initramfs");
        pack(&packaged, &directory.join("root"), contents, &initramfs)?;
        let kernel = find(&packaged.join("boot"), &|name| name.starts_with("vmlinuz"))?;
        let kernel = kernel.ok_or_else(|| Error::from(format!("no kernel in {KERNEL_PACKAGE}")))?;
        Ok(Self { kernel, initramfs })
    }
}

/// Unpacks Debian's kernel for virtual machines below `cache` without installing it: this machine's
/// own boot is unchanged.
fn kernel(cache: &Path) -> Result<PathBuf, Missing> {
    let unpacked = cache.join("kernel");
    if unpacked.exists() {
        return Ok(unpacked);
    }
    let depends = output(Command::new("apt-cache").args(["depends", KERNEL_PACKAGE]));
    let depends = String::from_utf8_lossy(&depends.unwrap_or_default()).into_owned();
    let package = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
    let Some(package) = package else {
        let reason = format!("apt has no package {KERNEL_PACKAGE}; try `apt-get update`");
        return Err(Missing::NotAllowed(reason));
    };
    unpack(&unpacked, &[package], "the guest's kernel")?;
    Ok(unpacked)
}

/// Downloads Debian packages and unpacks them into `directory`, without installing them.
pub(crate) fn unpack(directory: &Path, packages: &[&str], why: &str) -> Result<(), Error> {
    println!("setup: apt-get download {} ({why}, unpacked, not installed)", packages.join(" "));
    let unfinished = directory.with_extension("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)?;
    }
    fs::create_dir_all(&unfinished)?;
    quietly(
        Command::new("apt-get").current_dir(&unfinished).args(["download", "-q"]).args(packages),
    )?;
    for package in packages {
        let archive = find(&unfinished, &|name| {
            name.ends_with(".deb") && name.starts_with(&format!("{package}_"))
        })?;
        let archive = archive.ok_or_else(|| format!("no archive of {package}"))?;
        quietly(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(&unfinished))?;
        fs::remove_file(&archive)?;
    }
    Ok(fs::rename(&unfinished, directory)?)
}

/// Builds the guest's file system: the programs with their libraries, and the drivers in the order
/// in which they load.
fn pack(
    packaged: &Path,
    root: &Path,
    contents: &Contents<'_>,
    archive: &Path,
) -> Result<(), Error> {
    let Contents { init, modules, programs, unpacked } = *contents;
    for directory in ["bin", "dev", "modules", "proc", "sys"] {
        fs::create_dir_all(root.join(directory))?;
    }
    fs::write(root.join("init"), init)?;
    quietly(Command::new("chmod").arg("+x").arg(root.join("init")))?;
    let busybox = output(Command::new("sh").args(["-c", "command -v busybox"]))?;
    let busybox = PathBuf::from(String::from_utf8(busybox)?.trim());
    let elsewhere = unpacked.map(|unpacked| unpacked.join("usr/lib/x86_64-linux-gnu"));
    for (program, name) in programs.iter().copied().chain([(&*busybox, "busybox")]) {
        fs::copy(program, root.join("bin").join(name))?;
        let mut ldd = Command::new("ldd");
        if let Some(elsewhere) = &elsewhere {
            ldd.env("LD_LIBRARY_PATH", elsewhere);
        }
        // ldd fails if there are none.
        let libraries = output(ldd.arg(program)).unwrap_or_default();
        for library in String::from_utf8(libraries)?.split_whitespace().map(Path::new) {
            if library.is_absolute() {
                let from = unpacked.filter(|unpacked| library.starts_with(unpacked));
                let inside = root.join(library.strip_prefix(from.unwrap_or(Path::new("/")))?);
                fs::create_dir_all(inside.parent().expect("below the root"))?;
                fs::copy(library, inside)?;
            }
        }
    }
    let mut loaded = Vec::new();
    for module in modules {
        load_order(&packaged.join("lib/modules"), module, &mut loaded)?;
    }
    for (index, module) in loaded.iter().enumerate() {
        fs::copy(module, root.join(format!("modules/{index:02}.ko")))?;
    }
    let mut cpio = Command::new(&busybox);
    cpio.current_dir(root).args(["cpio", "-o", "-H", "newc"]);
    let mut cpio =
        cpio.stdin(Stdio::piped()).stdout(File::create(archive)?).stderr(Stdio::null()).spawn()?;
    let names = names_below(root, Path::new(""))?;
    cpio.stdin.take().expect("standard input is piped").write_all(names.join("\n").as_bytes())?;
    match cpio.wait()? {
        status if status.success() => Ok(()),
        status => Err(format!("busybox cpio ended with {status}").into()),
    }
}

/// Appends the file of `module` after its dependencies.
fn load_order(modules: &Path, module: &str, loaded: &mut Vec<PathBuf>) -> Result<(), Error> {
    let file = find(modules, &|name| name.strip_suffix(".ko") == Some(module))?
        .ok_or_else(|| format!("{KERNEL_PACKAGE} has no file {module}.ko"))?;
    if loaded.contains(&file) {
        return Ok(());
    }
    // Section .modinfo: zero-terminated strings.
    let bytes = fs::read(&file)?;
    let depends = bytes.split(|&byte| byte == 0).find_map(|entry| entry.strip_prefix(b"depends="));
    let depends = String::from_utf8_lossy(depends.unwrap_or_default()).into_owned();
    for dependency in depends.split(',').filter(|name| !name.is_empty()) {
        load_order(modules, &dependency.replace('-', "_"), loaded)?;
    }
    loaded.push(file);
    Ok(())
}

/// Returns the first file below `directory` whose name matches.
fn find(directory: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>, Error> {
    let names = names_below(directory, Path::new(""))?;
    let found = names.iter().find(|name| wanted(name.rsplit('/').next().unwrap_or(name)));
    Ok(found.map(|name| directory.join(name)))
}

/// Returns the names of everything below `root/at`, relative to `root`, directories before their
/// contents.
fn names_below(root: &Path, at: &Path) -> Result<Vec<String>, Error> {
    let directory = root.join(at);
    let entries = fs::read_dir(&directory);
    let entries = entries.map_err(|error| format!("{}: {error}", directory.display()))?;
    let names: Result<BTreeSet<_>, _> =
        entries.map(|entry| entry.map(|entry| entry.file_name())).collect();
    let mut below = Vec::new();
    for name in names? {
        let name = at.join(name);
        below.push(name.to_str().ok_or("a name that is not UTF-8")?.to_owned());
        if root.join(&name).is_dir() && !root.join(&name).is_symlink() {
            below.extend(names_below(root, &name)?);
        }
    }
    Ok(below)
}
