"""A small test runner: functions marked with @test run in order and report in TAP (testanything.org)."""

import os
import sys
import time
import traceback

BOOTSTRAP = os.environ.get("BOOTSTRAP", "127.0.0.1:9092")
# Limit after which a test fails instead of hanging. No test measures time.
PATIENCE_SECONDS = 60

_tests = []


def test(function):
    """Marks a function as a test. Its name is the test's name."""
    _tests.append(function)
    return function


def equal(got, wanted, what):
    """Fails the running test unless both are equal, and reports what differs and where."""
    if got == wanted:
        return
    if isinstance(got, list) and isinstance(wanted, list):
        for index, pair in enumerate(zip(got, wanted)):
            if pair[0] != pair[1]:
                raise AssertionError(f"{what}: item {index} is {pair[0]!r}, not {pair[1]!r}")
        raise AssertionError(f"{what}: {len(got)} items, not {len(wanted)}")
    raise AssertionError(f"{what}: {got!r}, not {wanted!r}")


def check(condition, what):
    """Fails the running test unless the condition holds. (`assert` is dropped by `python -O`.)"""
    if not condition:
        raise AssertionError(what)


def eventually(what, attempt):
    """Repeats `attempt` until it returns a true value, and returns it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        result = attempt()
        if result:
            return result
    raise AssertionError(f"{what}: not within {PATIENCE_SECONDS} s")


def main(names):
    """Runs all tests, or only the named ones; the exit status is 0 if all passed."""
    chosen = [t for t in _tests if not names or t.__name__ in names]
    print(f"1..{len(chosen)}", flush=True)
    failed = 0
    for number, function in enumerate(chosen, 1):
        try:
            function()
            print(f"ok {number} - {function.__name__}", flush=True)
        except Exception as error:  # a failing test must not prevent the others from running
            failed += 1
            for line in traceback.format_exc().splitlines():
                print(f"# {line}", flush=True)
            reason = str(error).replace("\n", " ")
            print(f"not ok {number} - {function.__name__}: {reason}", flush=True)
    sys.exit(1 if failed or not chosen else 0)
