"""`moestream run` in a process that is told to end: cleanly, with the exit code of the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moestream.runtime.tracefile import read_trace

from .fakes import TIMEOUT

ENVIRONMENT = {**os.environ, "NO_COLOR": "1"}

MAIN = """
import sys, threading, time
from moestream.runtime.cli import main
{patch}
try:
    main()
finally:
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    print("left:", others, file=sys.stderr)
"""

LOADING = """
from moestream.runtime import core
def load(arrays, *, check, advance):
    print("here", flush=True)
    while True:
        check()
        time.sleep(0.001)
core.load_parameters = load
"""

PREFILLING = """
from moestream.runtime.streaming import ExpertStream
run, calls = ExpertStream.run, []
def announced(self, *arguments):
    calls.append(1)
    if len(calls) == 5:
        print("here", flush=True)
    return run(self, *arguments)
ExpertStream.run = announced
"""


@pytest.mark.parametrize("phase", ["loading", "prefilling", "decoding"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_cleanly(
    phase: str, number: signal.Signals, code: int, demo: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "run.trace"
    patch = {"loading": LOADING, "prefilling": PREFILLING, "decoding": ""}[phase]
    prompt = "Once upon a time there was a cat. " * (150 if phase == "prefilling" else 1)
    arguments = ["run", str(demo), "-p", prompt, "--slots", "8", "--trace", str(trace)]
    arguments += ["--ignore-eos", "--max-tokens", "1900"]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", MAIN.format(patch=patch), *arguments]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline() if patch else process.stdout.read(1)
            assert first
            process.send_signal(number)
            output, errors = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert errors.splitlines() == ["left: []"]
    if phase == "prefilling":
        assert output == ""
    read = read_trace(trace)
    assert read.notices == []  # it has an end
    assert bool(read.reads) == (phase != "loading")


def test_a_second_signal_changes_nothing(demo: Path) -> None:
    arguments = ["run", str(demo), "-p", "Once", "--ignore-eos", "--max-tokens", "1900"]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", MAIN.format(patch=""), *arguments]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None and process.stdout.read(1)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == 143, errors
    assert errors.splitlines() == ["left: []"]
