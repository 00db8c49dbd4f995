//! `alluvium object` and `alluvium catalog` on objects that a server has uploaded to S3.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{BUCKET, CREDENTIALS, Gateway, LIMIT, PREFIX, Peer, Test, eventually};
use crate::Error;
use crate::exec::{follow, output};
use crate::report::Case;
use crate::server::{Ending, Server, clean};

/// More than the log can hold, so that most of it is in objects.
const MEBIBYTES: u64 = 192;

impl Test<'_> {
    /// The test damages, removes and adds objects as files, so it needs an S3 server that stores
    /// objects as files.
    pub(super) fn tools(&self) -> Case {
        let name = "tools list objects, and find damaged and missing ones and orphans";
        match self.peer {
            Peer::Versitygw => Case::run(name, || self.tools_on_files()),
            Peer::Minio => Case::skipped(name, "objects of this server are not files"),
        }
    }

    /// A tool that accesses this server, with credentials.
    pub(super) fn tool(&self, gateway: &Gateway, arguments: &[&str]) -> Command {
        let mut command = clean(self.binary);
        let endpoint = gateway.endpoint(gateway.address);
        command.args(arguments).args(["--s3-endpoint", &endpoint]).envs(CREDENTIALS);
        command
    }

    fn tools_on_files(&self) -> Result<(), Error> {
        let gateway = self.gateway("tools")?;
        // A compaction that the stop interrupts would leave an orphan.
        let objects = gateway.objects(&[
            "--upload-size=8MiB",
            "--upload-interval=300ms",
            "--compaction-size=0",
        ]);
        let mut server = Server::start(self.config("tools", objects))?;
        let store = format!("s3://{BUCKET}/{PREFIX}");
        let tool = |arguments: &[&str]| self.tool(&gateway, arguments);
        let gc = ["object", "gc", "--object-store", &store];
        let status = follow(&mut self.endless(&server, MEBIBYTES), LIMIT, |_| ())?;
        if !status.success() {
            return Err(format!("the client ended with {status}{}", server.log_tail()).into());
        }
        // While the server runs, too.
        self.ends(&mut tool(&gc), 0, &["as in the catalog", "; 0 missing"])?;
        eventually("everything is in objects", || {
            Ok(server.metric("alluvium_log_cache_pinned_bytes")? == 0.0)
        })?;
        server.end(Ending::Sigterm)?;

        // Undamaged objects.
        let files = object_files(&gateway.objects_directory())?;
        let (count, [first, .., last]) = (files.len(), &files[..]) else {
            return Err("the server wrote fewer than two objects".into());
        };
        let key = |file: &Path| {
            let key = file.strip_prefix(gateway.bucket()).expect("it is in the bucket");
            format!("s3://{BUCKET}/{}", text(key))
        };
        let right = format!("{count} objects are as in the catalog; 0 orphans; 0 missing");
        self.ends(&mut tool(&gc), 0, &[&right])?;
        let whole = format!("{count} objects, ");
        for location in [&store, &format!("s3://{BUCKET}")] {
            let verify = ["object", "verify", location];
            self.ends(&mut tool(&verify), 0, &[&whole, "intact, every checksum is correct"])?;
        }
        let size = format!("{} B", fs::metadata(first)?.len());
        let inspect = ["object", "inspect", &key(first)];
        self.ends(&mut tool(&inspect), 0, &[&key(first), &size, "BLOCK OF STREAM"])?;
        self.ends(&mut tool(&["object", "inspect", &store]), 2, &["name one of them"])?;

        // An orphan that cannot belong to a later catalog, with the number of an interrupted
        // upload.
        let orphan = first.with_file_name(format!("{:016x}-{:032x}", 0, 7));
        fs::copy(first, &orphan)?;
        let name = orphan.file_name().expect("it has a name").to_string_lossy().into_owned();
        let listed = self.ends(
            &mut tool(&[&gc[..], &["--older-than", "0s"]].concat()),
            0,
            &["; 1 orphan; 0 missing", &name, "old enough"],
        )?;
        let mut others = files.iter().filter_map(|file| file.file_name()?.to_str());
        if let Some(other) = others.find(|other| listed.contains(other)) {
            return Err(format!("{other} is listed beside the orphan: {listed}").into());
        }
        if !orphan.exists() {
            return Err("gc deleted a file".into());
        }
        // Its content is that of a different object.
        self.ends(&mut tool(&["object", "verify", &key(&orphan)]), 1, &["byte 16"])?;
        fs::remove_file(&orphan)?;

        // An object damaged in the middle of its blocks.
        let verify = ["object", "verify", &store];
        let middle = fs::metadata(first)?.len() / 2;
        flip(first, middle)?;
        let printed = format!("1 object is of {count} damaged; first {}", key(first));
        let damaged = self.ends(&mut tool(&verify), 1, &["damaged at byte", &printed])?;
        if damaged.contains(&key(last)) {
            return Err(
                format!("more than {} is reported as damaged: {damaged}", key(first)).into()
            );
        }
        flip(first, middle)?;
        self.ends(&mut tool(&verify), 0, &["intact, every checksum is correct"])?;

        // A missing object.
        let away = self.directory.join("away");
        fs::rename(last, &away)?;
        let missing = fs::metadata(&away)?.len().to_string();
        let printed = ["; 0 orphans; 1 missing", "missing", &missing, "yes: records are lost"];
        self.ends(&mut tool(&gc), 1, &printed)?;
        let named = key(last);
        for command in ["verify", "inspect"] {
            let missing = ["object", command, &named];
            self.ends(&mut tool(&missing), 2, &[&named, "no object found"])?;
        }
        fs::rename(&away, last)?;
        self.ends(&mut tool(&["object", "verify", "s3://missing"]), 2, &["NoSuchBucket"])?;
        let mut wrong = tool(&verify);
        wrong.env("AWS_SECRET_ACCESS_KEY", super::WRONG_SECRET);
        self.ends(&mut wrong, 2, &["403 Forbidden"])?;

        self.catalogs(&gateway, &store, count)?;
        self.without_data_directory(&mut server)?;
        server.finish()?;
        gateway.finish()
    }

    /// Lists and exports the catalog of the stopped server.
    fn catalogs(&self, gateway: &Gateway, store: &str, count: usize) -> Result<(), Error> {
        let objects = format!("{count} objects");
        let list = ["catalog", "list", "--object-store", store];
        self.ends(&mut self.tool(gateway, &list), 0, &["STORE", &objects])?;
        let export = ["catalog", "export", "--object-store", store];
        let exported = self.ends(&mut self.tool(gateway, &export), 0, &["\"objects\": ["])?;
        let file = self.directory.join("tools/export.json");
        let to_file = [&export[..], &["--output", text(&file)]].concat();
        self.ends(&mut self.tool(gateway, &to_file), 0, &[&objects])?;
        if fs::read_to_string(&file)? != exported {
            return Err("two exports differ".into());
        }
        self.ends(&mut self.tool(gateway, &to_file), 1, &["export.json", "exists"])?;
        let elsewhere = format!("s3://{BUCKET}/other");
        let elsewhere = ["catalog", "export", "--object-store", &elsewhere];
        self.ends(&mut self.tool(gateway, &elsewhere), 1, &["there is no catalog"])?;
        Ok(())
    }

    /// Starts the stopped server without what is in its data directory, except its log, and reads
    /// everything.
    fn without_data_directory(&self, server: &mut Server) -> Result<(), Error> {
        for entry in fs::read_dir(self.directory.join("tools/data"))? {
            let entry = entry?;
            if entry.file_name() != "wal" {
                fs::remove_file(entry.path())?;
            }
        }
        server.start_again()?;
        let mut read = server.client("kcat");
        read.args(["-b", &server.address(), "-C", "-t", "endless", "-o", "beginning"]);
        let lengths = output(read.args(["-e", "-q", "-f", "%S\n"]))?;
        let lengths = String::from_utf8(lengths)?;
        let bytes: u64 = lengths.lines().map(str::parse::<u64>).sum::<Result<_, _>>()?;
        match bytes == MEBIBYTES << 20 {
            true => Ok(()),
            false => Err(format!("the server has {bytes} bytes again").into()),
        }
    }
}

/// Returns the files of all objects below a directory, in the order of their creation.
fn object_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(object_files(&path)?);
        } else {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Flips a byte; a second call restores it. The file keeps its attributes, which hold the S3
/// server's metadata of the object.
fn flip(file: &Path, at: u64) -> Result<(), Error> {
    let file = fs::File::options().read(true).write(true).open(file)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the work tree's path is text")
}
