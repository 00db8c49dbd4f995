//! `alluvium wal bench` with the built binary: modelled disks, loads on a schedule, plots, windows.
//! `wal.rs` tests its effects on targets.

mod support;

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{fs, thread};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{contains, help, ok, ok_json, refused};

/// A disk that is fast enough for short tests.
const BRISK: &str = "iops=100000,bandwidth=4GiB,latency=100us,transfer=4GiB";
const QUICK: [&str; 4] = ["--duration", "100ms", "--warmup", "10ms"];

fn bench<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    [&["wal", "bench"], arguments, &QUICK].concat()
}

fn cases<'a>(report: &'a Value, kind: &str) -> Vec<&'a Value> {
    let cases = report["cases"].as_array().unwrap();
    cases.iter().map(|case| &case[kind]).collect()
}

#[test]
fn a_modelled_disk_needs_no_target_and_is_never_faster_than_the_model() {
    let plots = tempfile::tempdir().unwrap();
    let directory = plots.path().join("new").display().to_string();
    let report = ok_json(&bench(&[
        "--model",
        "cloud",
        "--capacity",
        "64MiB",
        "--record",
        "4KiB",
        "--record",
        "64KiB",
        "--rate",
        "2MiB",
        "--rate",
        "4MiB",
        "--plot",
        &directory,
        "--json",
    ]));
    assert_eq!(report["model"], "iops=3000,bandwidth=125MiB,latency=500us,transfer=220MiB");
    let cases = cases(&report, "paced");
    assert_eq!(cases.len(), 4);
    for (case, idle_us) in cases.iter().zip([517.0, 517.0, 784.0, 784.0]) {
        assert!(case["p50_us"].as_f64().unwrap() >= idle_us, "{case}");
        assert!(case["mean_us"].as_f64().unwrap() >= idle_us, "{case}");
        assert!(case["iops"].as_f64().unwrap() > 0.0, "{case}");
        assert!(case["queue"].as_f64().unwrap() > 0.0, "{case}");
    }
    // 2 MiB/s for 100 ms on any machine: the schedule determines how many records count.
    let offered: Vec<_> = cases.iter().map(|case| case["records"].as_u64().unwrap()).collect();
    assert_eq!(offered, [51, 102, 3, 7]);
    assert_eq!(report["verdicts"].as_array().unwrap().len(), 0, "no bar for these loads");
    for plot in ["latency-over-load.svg", "full-load-latency.svg", "full-load-throughput.svg"] {
        let svg = fs::read_to_string(plots.path().join("new").join(plot)).unwrap();
        contains(&svg, &["<svg", "</svg>", "iops=3000", "MiB/s"]);
    }
}

#[test]
fn a_machine_that_stalls_has_rates_too() {
    let arguments =
        bench(&["--model", "cloud", "--record", "64KiB", "--rate", "2MiB", "--rate", "4MiB"]);
    let mut process = Command::new(env!("CARGO_BIN_EXE_alluvium"))
        .args([&arguments[..], &["--json"]].concat())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&process);
    // Each stop is longer than the measured time, and often covers all of it.
    while process.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(25));
        kill_process(pid, Signal::STOP).unwrap();
        thread::sleep(Duration::from_millis(150));
        kill_process(pid, Signal::CONT).unwrap();
    }
    let mut text = String::new();
    process.stdout.unwrap().read_to_string(&mut text).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    let cases = cases(&report, "paced");
    assert_eq!(cases.len(), 2);
    for case in cases {
        assert!(case["seconds"].as_f64().unwrap() >= 0.1, "{case}");
        assert!(case["iops"].as_f64().unwrap() > 0.0, "{case}");
    }
}

#[test]
fn a_target_can_be_slowed_down_to_a_modelled_disk() {
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("wal");
    let path = target.to_str().unwrap();
    let report = ok_json(&bench(&[
        "--target",
        path,
        "--capacity",
        "8MiB",
        "--model",
        "latency=2ms",
        "--record",
        "4KiB",
        "--outstanding",
        "1",
        "--json",
    ]));
    let case = cases(&report, "measured")[0];
    assert!(case["p50_us"].as_f64().unwrap() >= 2000.0, "{case}");
    assert!(!target.exists(), "the file was created by the bench");
}

#[test]
fn the_published_load_and_a_tenth_of_it_have_bars() {
    let arguments =
        ["--model", "cloud", "--record", "256KiB", "--rate", "12MiB", "--rate", "120MiB"];
    let text = ok(&bench(&arguments));
    contains(
        &text,
        &[
            "compared with the published figures",
            "1.950",
            "251.0",
            "compared with the idle disk",
            "1.636",
            "<= 1.2",
        ],
    );
}

#[test]
fn the_window_follows_the_load_unless_it_is_given() {
    let plots = tempfile::tempdir().unwrap();
    let memory = [
        "--model",
        BRISK,
        "--capacity",
        "200MiB",
        "--json",
        "--plot",
        plots.path().to_str().unwrap(),
    ];
    let load = [
        "--record",
        "1MiB",
        "--outstanding",
        "64",
        "--outstanding",
        "1024",
        "--outstanding",
        "200",
    ];
    let report = ok_json(&bench(&[&memory[..], &load].concat()));
    assert_eq!(report["window_bytes"], 64 << 20);
    let measured = cases(&report, "measured");
    assert_eq!(measured[0]["window_bytes"], 65 << 20);
    contains(
        &fs::read_to_string(plots.path().join("throughput-by-record.svg")).unwrap(),
        &["64 outstanding"],
    );
    assert!(plots.path().join("latency-by-record.svg").exists());
    let skipped = cases(&report, "skipped");
    contains(skipped[1]["reason"].as_str().unwrap(), &["1033MiB", "1GiB"]);
    contains(skipped[2]["reason"].as_str().unwrap(), &["202MiB", "--capacity 405MiB"]);

    let text = ok(&bench(&[
        "--model",
        BRISK,
        "--window",
        "2MiB",
        "--record",
        "64KiB",
        "--outstanding",
        "64",
    ]));
    contains(&text, &["not measured: 64KiB x 64", "--window 2MiB", "use --window 5MiB"]);
}

#[test]
fn the_limit_is_raised_step_by_step() {
    let plots = tempfile::tempdir().unwrap();
    let directory = plots.path().to_str().unwrap();
    let load = ["--raise-limit", "--model", BRISK, "--capacity", "64MiB", "--pairs", "2"];
    let record = ["--record", "64KiB", "--outstanding", "8"];
    let report = ok_json(&bench(&[&load[..], &record, &["--json", "--plot", directory]].concat()));
    assert_eq!(report["cases"].as_array().unwrap().len(), 0, "only the requested measurements");
    let sweep = &report["sweeps"][0];
    assert_eq!((&sweep["record_bytes"], &sweep["outstanding"]), (&(64 << 10).into(), &8.into()));
    let steps = sweep["steps"].as_array().unwrap();
    let limits: Vec<_> = steps.iter().map(|step| step["iops_limit"].as_u64()).collect();
    assert_eq!(limits[..2], [Some(3000), Some(6000)]);
    assert_eq!((limits.len(), limits[6]), (7, None));
    for step in steps {
        let rounds: Vec<_> = step["rounds"]
            .as_array()
            .unwrap()
            .iter()
            .map(|round| round.as_f64().unwrap())
            .collect();
        assert_eq!(rounds.len(), 2, "{step}");
        let median = step["bytes_per_second"].as_f64().unwrap();
        assert!(rounds[0].min(rounds[1]) <= median && median <= rounds[0].max(rounds[1]), "{step}");
        assert!(median > 0.0, "{step}");
    }
    assert!(sweep["largest_fall"].as_f64().unwrap() < 1.0);
    let svg = fs::read_to_string(plots.path().join("throughput-over-limit.svg")).unwrap();
    contains(&svg, &["100k/s", "64KiB x 8", "MiB/s"]);

    let text = ok(&bench(&[&load[..5], &["--pairs", "1", "--record", "4KiB"]].concat()));
    contains(&text, &["with a rising limit on writes", "1024", "largest fall"]);
}

#[test]
fn opening_after_a_crash_is_compared_with_fio() {
    if Command::new("fio").arg("--version").output().is_err() {
        eprintln!("skipped: fio is not installed");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let target = directory.path().join("wal");
    let path = target.to_str().unwrap();
    let arguments =
        ["--recovery", "--target", path, "--capacity", "32MiB", "--pairs", "1", "--json"];
    let report = ok_json(&bench(&arguments));
    assert!(report["fio_version"].as_str().unwrap().starts_with("fio"));
    let round = &report["recovery_rounds"][0];
    for (opened, record_bytes) in
        round["opened"].as_array().unwrap().iter().zip([1 << 10, 64 << 10])
    {
        // The whole ring except less than two records, each with a header of 32 bytes.
        let (log, ring) = (opened["log_bytes"].as_u64().unwrap(), (32 << 20) - (64 << 10));
        assert!(log <= ring && log + 2 * (record_bytes + 4096) > ring, "{opened}");
        assert_eq!(opened["record_bytes"], record_bytes);
        assert!(opened["records"].as_u64().unwrap() * (record_bytes + 32) <= log, "{opened}");
        assert!(opened["walk_seconds"].as_f64() <= opened["seconds"].as_f64(), "{opened}");
    }
    let fio: Vec<_> =
        round["fio"].as_array().unwrap().iter().map(|fio| &fio["direction"]).collect();
    assert_eq!(fio, ["read", "read"]);
    let recoveries = report["recoveries"].as_array().unwrap();
    assert_eq!(recoveries.len(), 2);
    assert!(recoveries.iter().all(|recovery| recovery["median"].as_f64().unwrap() > 0.0));
    assert!(!target.exists(), "the file was created by the bench");
}

#[test]
fn impossible_measurements_are_refused() {
    for (arguments, reason) in [
        (&["--record", "4KiB"][..], "--target"),
        (&["--model", "disk"], "neither `cloud` nor"),
        (&["--model", "cloud", "--rate", "1MiB", "--outstanding", "1"], "--outstanding"),
        (&["--model", "cloud", "--rate", "1MiB", "--record", "1MiB"], "--duration"),
        (&["--model", "cloud", "--record", "0"], "at least one byte"),
        (&["--model", "cloud", "--force"], "--target"),
        (&["--recovery"], "--target"),
        (&["--recovery", "--target", "wal", "--model", "cloud"], "--model"),
        (&["--raise-limit", "--model", "cloud", "--rate", "1MiB"], "--rate"),
    ] {
        contains(&refused(2, &bench(arguments)), &[reason]);
    }
}

#[test]
fn the_help_states_a_default_for_each_option() {
    let text = help(&["wal", "bench", "--help"]);
    let options = [
        "capacity",
        "durability",
        "engine",
        "fio",
        "force",
        "io-depth",
        "json",
        "model",
        "only-pairs",
        "outstanding",
        "pairs",
        "plot",
        "raise-limit",
        "rate",
        "record",
        "recovery",
        "duration",
        "warmup",
        "window",
    ];
    for option in options {
        assert!(text.contains(&format!(" --{option} ")), "{option}");
    }
    let defaults =
        ["[default: ", "Default: ", "Default with "].map(|form| text.matches(form).count());
    assert_eq!(defaults.iter().sum::<usize>(), options.len(), "{text}");
}
