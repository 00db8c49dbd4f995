//! kcat against the server: third-party data goes in and comes out unchanged.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Error;
use crate::exec::{describe, output};
use crate::report::Case;
use crate::server::Server;

const PRODUCED_BYTES: &str = "alluvium_kafka_produced_bytes_total";

/// Each codec compresses English text to at most this fraction.
const MOST_OF_A_TEXT: f64 = 0.7;

const CODECS: [&str; 5] = ["none", "gzip", "snappy", "lz4", "zstd"];

/// Runs all tests. `words` is a list of words, one per line; `scratch` a directory for files to
/// send.
pub(crate) fn run(server: &Server, words: &Path, scratch: &Path) -> Result<Vec<Case>, Error> {
    let suite = Suite { server, scratch };
    let lines = lines_of(&fs::read(words)?);
    let packages = package_descriptions();
    fs::create_dir_all(scratch)?;
    let mut cases = Vec::new();
    cases.push(Case::run("metadata lists the server and its topics", || suite.metadata()));
    for codec in CODECS {
        let name = format!("a list of words, one message each, {codec}");
        cases.push(Case::run(&name, || suite.lines(codec, &lines)));
    }
    for codec in CODECS {
        let name = format!("package descriptions, one message each, {codec}");
        cases.push(match &packages {
            Ok(packages) => Case::run(&name, || suite.files(codec, packages)),
            Err(reason) => Case::skipped(&name, reason),
        });
    }
    cases.push(Case::run("keys, headers and null values", || suite.keys_and_headers()));
    cases.push(Case::run("offsets: absolute, from the end, by time", || suite.offsets()));
    cases.push(Case::run("a balanced consumer reads and resumes", || suite.balanced_consumer()));
    Ok(cases)
}

/// Returns the file's lines with their line ends, without empty ones: kcat sends no message for an
/// empty line.
fn lines_of(text: &[u8]) -> Vec<u8> {
    let lines = text.split_inclusive(|&byte| byte == b'\n').filter(|&line| line != b"\n");
    lines.flatten().copied().collect()
}

/// Returns the package manager's descriptions of the installed packages, in pieces of about 100 KB,
/// or the reason why there are none.
fn package_descriptions() -> Result<Vec<Vec<u8>>, String> {
    let path = "/var/lib/dpkg/status";
    let text = fs::read(path).map_err(|error| format!("{path}: {error}"))?;
    if text.is_empty() {
        return Err(format!("{path} is empty"));
    }
    Ok(text.chunks(100_000).map(<[u8]>::to_vec).collect())
}

struct Suite<'a> {
    server: &'a Server,
    scratch: &'a Path,
}

impl Suite<'_> {
    fn kcat(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("kcat");
        command.args(["-q", "-b", &self.server.address()]).args(arguments);
        command
    }

    /// Produces the lines of `input`.
    fn produce(&self, topic: &str, input: &[u8], arguments: &[&str]) -> Result<(), Error> {
        let path = self.scratch.join(format!("{topic}.in"));
        fs::write(&path, input)?;
        let mut command = self.kcat(&["-P", "-t", topic]);
        command.args(arguments).stdin(Stdio::from(fs::File::open(&path)?)).stderr(Stdio::inherit());
        let status = command.status()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("`{}`: {status}", describe(&command)).into())
        }
    }

    /// Reads a topic to its end. Each message is printed according to `format`.
    fn consume(&self, topic: &str, format: &str, arguments: &[&str]) -> Result<Vec<u8>, Error> {
        output(
            self.kcat(&["-C", "-X", "check.crcs=true", "-t", topic, "-e", "-f", format])
                .args(arguments),
        )
    }

    fn metadata(&self) -> Result<(), Error> {
        self.produce("kcat-metadata", b"x\n", &[])?;
        let listing = String::from_utf8(output(&mut self.kcat(&["-L"]))?)?;
        contains(&listing, &format!("at {}", self.server.address()))?;
        contains(&listing, "topic \"kcat-metadata\" with 1 partitions")
    }

    fn lines(&self, codec: &str, lines: &[u8]) -> Result<(), Error> {
        let topic = format!("kcat-lines-{codec}");
        self.produce(&topic, lines, &["-p", "0", "-z", codec])?;
        same(&self.consume(&topic, "%s\n", &[])?, lines)
    }

    /// Sends each file as one message; the messages are written out one after the other, with
    /// nothing between them.
    fn files(&self, codec: &str, files: &[Vec<u8>]) -> Result<(), Error> {
        let topic = format!("kcat-files-{codec}");
        let mut command = self.kcat(&["-P", "-t", &topic, "-p", "0", "-z", codec]);
        for (number, bytes) in files.iter().enumerate() {
            let path = self.scratch.join(format!("file-{number}"));
            fs::write(&path, bytes)?;
            command.arg(path);
        }
        let before = self.server.metric(PRODUCED_BYTES)?;
        output(&mut command)?;
        // A client that assumes a server without compression sends everything uncompressed, and at
        // most logs that.
        let (sent, text) = (self.server.metric(PRODUCED_BYTES)? - before, files.concat());
        if codec != "none" && sent > text.len() as f64 * MOST_OF_A_TEXT {
            return Err(format!("{sent} bytes were received for a text of {}", text.len()).into());
        }
        same(&self.consume(&topic, "%s", &[])?, &text)
    }

    fn keys_and_headers(&self) -> Result<(), Error> {
        let headers = ["-K:", "-Z", "-H", "a=1", "-H", "a=2", "-H", "b"];
        self.produce("kcat-keys", b"k1:v1\nk2:\n:v3\n", &headers)?;
        let got = self.consume("kcat-keys", "%K %k %S %s %h\n", &[])?;
        // -Z turns empty values into NULL; kcat prints the length of NULL as -1.
        same(&got, b"2 k1 2 v1 a=1,a=2,b=NULL\n2 k2 -1  a=1,a=2,b=NULL\n-1  2 v3 a=1,a=2,b=NULL\n")
    }

    fn offsets(&self) -> Result<(), Error> {
        let topic = "kcat-offsets";
        let lines: String = (0..100).map(|n| format!("{n}\n")).collect();
        self.produce(topic, lines.as_bytes(), &["-p", "0"])?;
        same(&self.consume(topic, "%o ", &["-o", "97"])?, b"97 98 99 ")?;
        same(&self.consume(topic, "%o ", &["-o", "-2"])?, b"98 99 ")?;
        same(&self.consume(topic, "%o ", &["-o", "beginning", "-c", "3"])?, b"0 1 2 ")?;
        // Timestamps: -1 requests the end, 0 the first record that is not older than 1970.
        let query = |time: &str| {
            let query = format!("{topic}:0:{time}");
            output(&mut self.kcat(&["-Q", "-t", &query]))
        };
        same(&query("-1")?, format!("{topic} [0] offset 100\n").as_bytes())?;
        same(&query("0")?, format!("{topic} [0] offset 0\n").as_bytes())
    }

    fn balanced_consumer(&self) -> Result<(), Error> {
        let topic = "kcat-group";
        let session = ["-X", "auto.offset.reset=earliest", "-X", "session.timeout.ms=6000"];
        let mut read = self.kcat(&session);
        read.args(["-G", "kcat-group", "-e", "-f", "%s\n", topic]);
        self.produce(topic, b"one\ntwo\n", &["-p", "0"])?;
        same(&output(&mut read)?, b"one\ntwo\n")?;
        // kcat commits when it leaves: the next member starts there.
        self.produce(topic, b"three\n", &["-p", "0"])?;
        same(&output(&mut read)?, b"three\n")
    }
}

fn contains(text: &str, part: &str) -> Result<(), Error> {
    if text.contains(part) { Ok(()) } else { Err(format!("no `{part}` in:\n{text}").into()) }
}

fn same(got: &[u8], wanted: &[u8]) -> Result<(), Error> {
    if got == wanted {
        return Ok(());
    }
    let at = got.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    let around = |bytes: &[u8]| {
        let part = &bytes[at.saturating_sub(20)..bytes.len().min(at + 20)];
        String::from_utf8_lossy(part).into_owned()
    };
    Err(format!(
        "{} bytes came out, {} went in; they differ from byte {at} on: {:?}, not {:?}",
        got.len(),
        wanted.len(),
        around(got),
        around(wanted)
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_found_and_shown() {
        assert!(same(b"abc", b"abc").is_ok());
        let error = same(b"abc", b"abd").unwrap_err().to_string();
        assert!(error.contains("from byte 2 on: \"abc\", not \"abd\""), "{error}");
        assert!(same(b"abc", b"abcd").is_err());
        assert!(same(b"", b"a").is_err());
    }

    #[test]
    fn empty_lines_are_left_out() {
        assert_eq!(lines_of(b"a\n\n b\n\r\n\nlast"), b"a\n b\n\r\nlast");
    }
}
