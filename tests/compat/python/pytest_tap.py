"""A pytest plugin: prints one line in TAP (testanything.org) for each test, instead of pytest's own output.

    python -m pytest -p no:terminal -p pytest_tap ...
"""

import os

# pytest captures file descriptor 1 while tests run.
_OUT = os.fdopen(os.dup(1), "w", buffering=1)

# The outcome of a test in its phases so far; it ends with the last one.
_outcomes = {}
_count = 0


def pytest_collection_finish(session):
    print(f"1..{len(session.items)}", file=_OUT)


def pytest_collectreport(report):
    if report.failed:
        for line in str(report.longrepr).splitlines():
            print(f"# {line}", file=_OUT)


def pytest_runtest_logreport(report):
    previous = _outcomes.get(report.nodeid, "")
    outcome = _outcome(report)
    if outcome is not None and not previous.startswith("not ok"):
        _outcomes[report.nodeid] = outcome
    if report.when == "teardown":
        result = _outcomes.pop(report.nodeid)
        name = report.nodeid.split("integration/")[-1]
        global _count
        _count += 1
        print(result.replace("{name}", f"{_count} - {name}", 1), file=_OUT)


def _outcome(report):
    """Returns the line of a phase, if it decides the test's outcome."""
    if report.skipped:
        if hasattr(report, "wasxfail"):
            reason = f"its authors expect it to fail: {report.wasxfail}"
        else:
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        return "ok {name} # SKIP " + reason.replace("\n", " ")
    if report.failed:
        for line in report.longreprtext.splitlines():
            print(f"# {line}", file=_OUT)
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else report.longreprtext.splitlines()[-1]
        return f"not ok {{name}}: in {report.when}, " + " ".join(reason.split())[:300]
    return "ok {name}" if report.when == "call" else None
