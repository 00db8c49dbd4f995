//! Saves the results of a run while it continues, and makes tables from the results of several
//! runs: a run takes hours, and its parts can be measured on different days, or be interrupted in
//! between.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::engine::Result;
use crate::engines::{ALL, Name};
use crate::race::{Outcome, Results, Scene};

const ABOUT: &str = "run.json";
const OUTCOMES: &str = "results.jsonl";

/// What has to be the same for figures in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    pub entries: u64,
    /// Memory of an engine with data that fit, including its index.
    pub fits_bytes: u64,
    /// Memory of an engine with data that do not fit.
    pub large_bytes: u64,
    /// The time limit of workloads without dependents.
    pub seconds: u64,
    /// A control group limited the memory.
    pub is_bounded: bool,
    /// Every store began under the same memory conditions.
    pub has_pauses: bool,
}

/// A run, apart from its figures.
#[derive(Serialize, Deserialize)]
struct About {
    settings: Settings,
    notes: Vec<String>,
    failures: Vec<String>,
}

/// The files that a run saves to.
pub struct Log {
    directory: PathBuf,
    outcomes: File,
    about: About,
}

impl Log {
    /// Creates the files in `directory`, replacing those of another run.
    pub fn new(directory: &Path, settings: Settings, notes: &[String]) -> Result<Self> {
        let about = About { settings, notes: notes.to_vec(), failures: Vec::new() };
        let outcomes = File::create(directory.join(OUTCOMES))?;
        let log = Self { directory: directory.to_owned(), outcomes, about };
        log.write_about()?;
        Ok(log)
    }

    fn write_about(&self) -> Result<()> {
        Ok(fs::write(self.directory.join(ABOUT), serde_json::to_string_pretty(&self.about)?)?)
    }

    pub fn outcome(&mut self, outcome: &Outcome) -> Result<()> {
        Ok(writeln!(self.outcomes, "{}", serde_json::to_string(outcome)?)?)
    }

    pub fn failure(&mut self, what: &str) -> Result<()> {
        self.about.failures.push(what.to_owned());
        self.write_about()
    }
}

/// Combines the results of several runs as if they were one.
///
/// # Errors
/// A file cannot be read, or the settings are not the same.
pub fn combine(directories: &[PathBuf]) -> Result<Results> {
    let mut settings: Option<(Settings, &Path)> = None;
    let (mut outcomes, mut notes, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for directory in directories {
        let read = |name: &str| {
            let path = directory.join(name);
            File::open(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let about: About = serde_json::from_reader(BufReader::new(read(ABOUT)?))?;
        let (first, of) = *settings.get_or_insert((about.settings, directory));
        if first != about.settings {
            return Err(format!(
                "{} and {} were measured with different settings and cannot share a table: \
                 {first:?}, {:?}",
                of.display(),
                directory.display(),
                about.settings
            )
            .into());
        }
        for line in BufReader::new(read(OUTCOMES)?).lines() {
            outcomes.push(serde_json::from_str::<Outcome>(&line?)?);
        }
        notes
            .extend(about.notes.into_iter().map(|note| format!("{}: {note}", directory.display())));
        failures.extend(about.failures);
    }
    let (settings, _) = settings.ok_or("--report has no directory")?;
    let mut scenes: Vec<Scene> = outcomes.iter().map(|outcome| outcome.scene).collect();
    scenes.sort_unstable();
    scenes.dedup();
    let was_there = |engine: &Name| outcomes.iter().any(|outcome| outcome.engine == *engine);
    let engines = ALL.into_iter().filter(was_there).collect();
    Ok(Results { entries: settings.entries, engines, scenes, outcomes, notes, failures })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::{Message, Plan, Store};

    const SETTINGS: Settings = Settings {
        entries: 1000,
        fits_bytes: 3000,
        large_bytes: 250,
        seconds: 10,
        is_bounded: true,
        has_pauses: true,
    };

    fn run(directory: &Path, settings: Settings, engine: Name, threads: u64) {
        let mut log = Log::new(directory, settings, &["a note".into()]).unwrap();
        let message = Message::Store(Store {
            plan: Plan::Ordered,
            disk_bytes: 1,
            user_bytes: 1,
            written_bytes: 1,
            close_seconds: 1.0,
            open_seconds: 1.0,
            open_bare_seconds: None,
            kept: None,
        });
        let scene = Scene { is_large: false, threads };
        log.outcome(&Outcome { engine, scene, round: 1, message }).unwrap();
        log.failure("it did not start").unwrap();
    }

    #[test]
    fn runs_with_the_same_settings_are_combined() {
        let directories = [0, 1].map(|_| tempfile::tempdir().unwrap());
        let paths: Vec<PathBuf> = directories.iter().map(|it| it.path().to_owned()).collect();
        run(&paths[0], SETTINGS, Name::Lmdb, 2);
        run(&paths[1], SETTINGS, Name::Journal, 1);
        let results = combine(&paths).unwrap();
        assert_eq!(results.engines, [Name::Journal, Name::Lmdb]);
        let threads: Vec<u64> = results.scenes.iter().map(|scene| scene.threads).collect();
        assert_eq!((threads, results.outcomes.len()), (vec![1, 2], 2));
        assert_eq!((results.notes.len(), results.failures.len()), (2, 2));
        run(&paths[1], Settings { seconds: 1, ..SETTINGS }, Name::Journal, 1);
        let error = combine(&paths).err().unwrap().to_string();
        assert!(error.contains("were not measured alike"), "{error}");
        assert!(combine(&[]).is_err());
    }
}
