//! kaskade, a terminal UI for Kafka, used as a person does: through its keys and the contents of
//! its screen.

use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use super::LIMIT;
use crate::Error;
use crate::compat::peer::Peer;
use crate::compat::tools::{matches, single_spaced};
use crate::exec::{converse, output};
use crate::setup::Kaskade;

/// The topic that is created, filled, shown and deleted.
const TOPIC: &str = "shown";

/// The line that the program that fills the topic prints when it is done.
const READY: &str = "ready";

/// Number of the topic's records that are neither markers nor aborted.
const RECORDS: u32 = 41;

/// Columns and lines of the terminal: all settings of a topic, and all of its records, fit on one
/// screen.
const SIZE: (&str, &str) = ("160", "60");

/// The terminal's configuration: it keeps its contents after the program ends.
const TMUX: &str = "set-option -wg remain-on-exit on\nset-option -g status off\n";

/// Writes a program's exit status to a file. tmux may never report it: version 3.3a was seen to
/// leave an ended program unreaped for as long as it was watched.
const SAVE_STATUS: &str = r#""$@"; echo $? > status.part; mv status.part status"#;

pub(super) fn kaskade(
    peer: &Peer,
    kaskade: &Kaskade,
    root: &Path,
    directory: &Path,
) -> Result<(), Error> {
    let scratch = directory.join("kaskade");
    let address = peer.address();
    // Everything is refreshed only on request.
    let admin = ["admin", "-b", &address, "--refresh-interval", "0"];
    let admin = Terminal::start(peer, kaskade, &scratch.join("admin"), &admin)?;
    create(&admin)?;
    let mut readers = peer.client(&kaskade.python);
    readers.arg(root.join("tests/compat/apps/ui/readers.py")).arg(TOPIC);
    let ended = converse(&mut readers, LIMIT, |line, input| {
        if line == READY {
            describe(&admin, &address)?;
            input.write_all(b"\n")?;
        }
        Ok(())
    })?;
    if !ended.success() {
        return Err(format!("the program that fills the topic: {ended}").into());
    }
    let consumer =
        ["consumer", "-b", &address, "-t", TOPIC, "--earliest", "-k", "string", "-v", "string"];
    let consumer = Terminal::start(peer, kaskade, &scratch.join("consumer"), &consumer)?;
    read(&consumer)?;
    consumer.quit()?;
    delete(&admin)?;
    admin.quit()
}

/// Creates a topic with one partition and adds two more.
fn create(admin: &Terminal) -> Result<(), Error> {
    admin.shows(&["*Updated *", "*n Create*"])?;
    admin.press("n")?;
    admin.shows(&["*Create Topic*", "*604800000*"])?;
    // Other topics may be visible beside the form.
    admin.write(TOPIC, &format!("*{TOPIC}*"))?;
    admin.press("C-s")?;
    let row = |rest: &str| format!("{TOPIC} {rest}");
    admin.shows(&[&row("1 1 1 0 0 ≈0 ≈0")])?;
    // From here on, the list has one line.
    admin.press("/")?;
    admin.shows(&["*Filter Topics*"])?;
    admin.write(TOPIC, TOPIC)?;
    admin.press("Enter")?;
    admin.shows(&[&format!("Topics [*{TOPIC}*][1]"), "d Describe*"])?;
    admin.press("e")?;
    admin.shows(&[&format!("Edit Topic [{TOPIC}]"), "1"])?;
    admin.write("3", "3")?;
    admin.press("C-s")?;
    admin.shows(&[&row("3 1 1 0 0 ≈0 ≈0")])
}

/// Shows the topic with its records, and its groups with their lag, while they have members.
fn describe(admin: &Terminal, address: &str) -> Result<(), Error> {
    admin.press("C-r")?;
    // The UI counts records by offsets, so the aborted record and the markers of the transactions
    // are included.
    admin.shows(&[&format!("{TOPIC} 3 1 1 2 2 ≈44 ≈18")])?;
    admin.press("d")?;
    let tabs = "Partitions [3] Configurations [33] Groups [2] Group Offsets [6] Group Members [2]";
    let partitions = ["0 1 0 18 18 [1] [1]", "1 1 0 13 13 [1] [1]", "2 1 0 13 13 [1] [1]"];
    admin.shows(&[&[tabs, "*3 1 1 2 2 ≈44 ≈18"], &partitions[..]].concat())?;
    let next_tab = |lines: &[&str]| {
        admin.press("l")?;
        admin.shows(lines)
    };
    next_tab(&[
        "cleanup.policy delete",
        "compression.type producer",
        "max.message.bytes 1048588",
        "message.timestamp.type CreateTime",
        "min.insync.replicas 1",
        "retention.bytes -1",
        // The UI created it with a week.
        "retention.ms 604800000",
        "segment.bytes 1073741824",
        "unclean.leader.election.enable false",
    ])?;
    next_tab(&[
        &format!("readers {address}/1 stable range 3 1 18"),
        &format!("walkers {address}/1 stable uniform 3 1 0"),
    ])?;
    next_tab(&[
        "readers 0 10 18 8",
        "readers 1 13 13 0",
        "readers 2 3 13 10",
        "walkers 0 18 18 0",
        "walkers 1 13 13 0",
        "walkers 2 13 13 0",
    ])?;
    next_tab(&[
        "readers client-of-readers * /127.0.0.1 [0, 1, 2]",
        "walkers client-of-walkers * /127.0.0.1 [0, 1, 2]",
    ])?;
    admin.press("Escape")?;
    admin.shows(&["d Describe*"])
}

/// Shows every record at its offset, and no aborted one.
fn read(consumer: &Terminal) -> Result<(), Error> {
    let all = format!("Records [{TOPIC}][{RECORDS}]");
    consumer.eventually(&all, |screen| {
        if screen.has(&all) {
            return Ok(true);
        }
        // The next 25. The key is ignored while the UI reads them.
        consumer.press("n")?;
        Ok(false)
    })?;
    let record = |n: u32| format!("key-{n} value-{n} 0.0* KB * {} {} 1", n % 3, n / 3);
    let mut lines: Vec<String> = (0..RECORDS - 1).map(record).collect();
    lines.push("key-committed committed 0.0* KB * 0 16 0".into());
    consumer.shows(&lines.iter().map(String::as_str).collect::<Vec<_>>())
}

fn delete(admin: &Terminal) -> Result<(), Error> {
    admin.press("C-d")?;
    admin.shows(&[&format!("Delete Topic [{TOPIC}]"), "*Type the topic name*"])?;
    admin.write(TOPIC, TOPIC)?;
    admin.press("Enter")?;
    admin.shows(&[&format!("Topics [*{TOPIC}*][0]")])
}

/// A terminal that the UI runs in, in its own tmux. Both are ended when it is dropped.
struct Terminal {
    scratch: PathBuf,
}

impl Terminal {
    fn start(
        peer: &Peer,
        kaskade: &Kaskade,
        scratch: &Path,
        arguments: &[&str],
    ) -> Result<Self, Error> {
        fs::create_dir_all(scratch)?;
        fs::write(scratch.join("tmux.conf"), TMUX)?;
        let terminal = Self { scratch: scratch.to_path_buf() };
        let mut tmux = terminal.tmux(peer.client("tmux"));
        // Keeps the operator's settings and logs out of the program's environment.
        tmux.env("XDG_CONFIG_HOME", scratch).env("XDG_STATE_HOME", scratch);
        tmux.env_remove("KASKADE_SETTINGS");
        tmux.args(["new-session", "-d", "-x", SIZE.0, "-y", SIZE.1]);
        tmux.args(["sh", "-c", SAVE_STATUS, "sh"]);
        output(tmux.arg(&kaskade.program).args(arguments))?;
        Ok(terminal)
    }

    /// The socket's path is relative to the directory: an absolute path may exceed the limit.
    fn tmux(&self, mut tmux: Command) -> Command {
        tmux.current_dir(&self.scratch).env("LC_ALL", "C.UTF-8").env_remove("TMUX");
        tmux.args(["-u", "-S", "socket", "-f", "tmux.conf"]);
        tmux
    }

    fn ask(&self, arguments: &[&str]) -> Result<String, Error> {
        let mut tmux = self.tmux(Command::new("tmux"));
        Ok(String::from_utf8_lossy(&output(tmux.args(arguments))?).into_owned())
    }

    fn press(&self, key: &str) -> Result<(), Error> {
        self.ask(&["send-keys", key]).map(drop)
    }

    /// Types into the focused field and waits until a line matches `shown`: a following key could
    /// overtake the text.
    fn write(&self, text: &str, shown: &str) -> Result<(), Error> {
        self.ask(&["send-keys", "-l", text])?;
        self.shows(&[shown])
    }

    /// Waits until each of the patterns matches a line of the screen.
    fn shows(&self, patterns: &[&str]) -> Result<(), Error> {
        let what = format!("`{}`", patterns.join("`, `"));
        self.eventually(&what, |screen| Ok(patterns.iter().all(|pattern| screen.has(pattern))))
    }

    fn eventually(
        &self,
        what: &str,
        mut attempt: impl FnMut(&Screen) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let screen = Screen::of(&self.ask(&["capture-pane", "-p"])?);
            if attempt(&screen)? {
                return Ok(());
            }
            let ended = self.ended()?.map(|status| format!("the program ended with {status}"));
            let timed_out = || format!("not within {} s", LIMIT.as_secs());
            if ended.is_some() || Instant::now() >= deadline {
                let why = ended.unwrap_or_else(timed_out);
                let lines = screen.lines.join("\n  | ");
                return Err(format!("the screen does not show {what}: {why}\n  | {lines}").into());
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// The program's exit status, if it has ended.
    fn ended(&self) -> Result<Option<String>, Error> {
        match fs::read_to_string(self.scratch.join("status")) {
            Ok(status) => Ok(Some(status.trim().to_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends the program by its key and checks that its log has no warning and no error.
    fn quit(self) -> Result<(), Error> {
        self.press("C-c")?;
        let mut status = None;
        self.eventually("its end", |_| {
            status = self.ended()?;
            Ok(status.is_some())
        })?;
        if status.as_deref() != Some("0") {
            return Err(format!("the UI ended with {status:?}").into());
        }
        let log = self.scratch.join("kaskade/kaskade.log");
        let text = fs::read_to_string(&log)?;
        match text.lines().find(|line| !line.contains(" INFO ")) {
            Some(line) => Err(format!("{} has: {line}", log.display()).into()),
            None => Ok(()),
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The server may not exist; the error is of no use here.
        let _ = self.ask(&["kill-server"]);
    }
}

/// The non-empty lines of a screen, without frames and without the spaces that align columns.
struct Screen {
    lines: Vec<String>,
}

impl Screen {
    fn of(text: &str) -> Self {
        // The characters that frames, bars and buttons are drawn with.
        let text = text.replace(|c| ('\u{2500}'..='\u{259f}').contains(&c), " ");
        let lines = text.lines().map(single_spaced).filter(|line| !line.is_empty());
        Self { lines: lines.collect() }
    }

    /// Whether a line matches the pattern, in which `*` matches anything.
    fn has(&self, pattern: &str) -> bool {
        self.lines.iter().any(|line| matches(line, pattern))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_parsed_without_frames() {
        let screen =
            Screen::of("\n ┌─ Topics [1] ──┐\n │ words   3   ≈40 │\n │ ▐●▌ a  │ b\n └────┘\n");
        assert_eq!(screen.lines, ["Topics [1]", "words 3 ≈40", "● a b"]);
        assert!(screen.has("words 3 ≈40") && screen.has("*a*"));
        assert!(!screen.has("words") && !screen.has("words 3 ≈4"));
    }
}
