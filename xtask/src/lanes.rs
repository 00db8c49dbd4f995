//! Suites side by side, each in a process of its own.
//!
//! Many suites spend most of their time waiting: for timeouts that they test, for clients, for
//! retention. Two of them at a time use both cores of a small machine. A suite prints to a file,
//! which is shown as a whole when the suite has ended.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::exec::wait;
use crate::report::{Case, Report};

/// How many suites run at the same time.
const LANES: usize = 2;

/// A suite that has not ended after this time is killed. Suites have lower limits of their own for
/// the programs that they run.
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// A suite and the arguments with which this program runs it alone.
pub(crate) struct Task {
    pub(crate) name: String,
    pub(crate) arguments: Vec<String>,
}

/// Runs all tasks and adds their suites to the report, in the order of `tasks`. The first tasks
/// start first, so the longest ones belong there.
pub(crate) fn run(root: &Path, tasks: Vec<Task>, report: &mut Report) -> Result<(), Error> {
    let logs = root.join("target/e2e/run/logs");
    fs::create_dir_all(&logs)?;
    let program = std::env::current_exe()?;
    let count = tasks.len();
    let queue: Mutex<VecDeque<(usize, Task)>> = Mutex::new(tasks.into_iter().enumerate().collect());
    let ended = Mutex::new((0..count).map(|_| None).collect::<Vec<Option<Report>>>());
    thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().expect("no lane panics").pop_front();
                    let Some((index, task)) = next else { return };
                    let log = logs.join(format!("{}.log", task.name.replace(' ', "-")));
                    println!("started: {}", task.name);
                    let start = Instant::now();
                    let suites = run_one(&program, &task, &log).unwrap_or_else(|error| {
                        let mut failed = Report::default();
                        let case = Case::failed(&task.name, error);
                        failed.add(&task.name, vec![case], start.elapsed());
                        failed
                    });
                    let mut ended = ended.lock().expect("no lane panics");
                    // Under the lock, so that the texts of two suites do not mix.
                    let text = fs::read(&log).unwrap_or_default();
                    println!("{}", String::from_utf8_lossy(&text));
                    ended[index] = Some(suites);
                }
            });
        }
    });
    let ended = ended.into_inner().expect("no lane panics");
    ended.into_iter().flatten().for_each(|suites| report.append(suites));
    Ok(())
}

/// Runs a task and returns what it reported.
fn run_one(program: &Path, task: &Task, log: &Path) -> Result<Report, Error> {
    let result = log.with_extension("json");
    let _ = fs::remove_file(&result);
    let output = File::create(log)?;
    let mut child = Command::new(program)
        .args(&task.arguments)
        .arg("--report")
        .arg(&result)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let Some(status) = wait(&mut child, LIMIT)? else {
        return Err(format!("killed: not done after {} minutes", LIMIT.as_secs() / 60).into());
    };
    let text = fs::read(&result)
        .map_err(|error| format!("ended with {status} and without a report: {error}"))?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Task {
        // `$0` and the two that follow are the arguments that each task gets.
        Task { name: "shell".into(), arguments: vec!["-c".into(), script.into()] }
    }

    fn run_shell(name: &str, script: &str) -> Result<Report, Error> {
        let directory = std::env::temp_dir().join(format!("xtask-lanes-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        run_one(Path::new("/bin/sh"), &shell(script), &directory.join(format!("{name}.log")))
    }

    #[test]
    fn the_report_of_a_task_is_read_back() {
        let mut report = Report::default();
        report.add(
            "kcat",
            vec![Case::passed("a"), Case::failed("b", "why"), Case::skipped("c", "reason")],
            Duration::from_secs(3),
        );
        let text = serde_json::to_string(&report).unwrap();
        assert!(!text.contains('\''), "{text}");
        let read = run_shell("read", &format!("echo '{text}' > \"$1\"")).unwrap();
        assert_eq!(read.to_string(), report.to_string());
    }

    #[test]
    fn a_task_that_ends_without_a_report_has_failed() {
        let error = run_shell("none", "exit 3").err().unwrap().to_string();
        assert!(error.contains("exit status: 3 and without a report"), "{error}");
    }
}
