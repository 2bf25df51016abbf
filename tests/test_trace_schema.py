"""Traces of real runs, and the files for Perfetto that are made of them, against the schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moestream
from moestream import Engine
from moestream.runtime.report_perfetto import perfetto_events
from moestream.runtime.trace_records import Trace
from moestream.runtime.tracefile import read_trace

from .trace_schema import BadTrace, check_trace

PROMPT = "Once upon a time"


async def traced(demo: Path, path: Path, tokens: int, **settings: Any) -> Trace:
    """Generate with a trace, and read it."""
    async with await Engine.open(demo, slots=16, trace=path, **settings) as engine:
        result = await engine.generate(PROMPT, max_tokens=tokens, ignore_eos=True)
        assert len(result.tokens) == tokens
    assert engine.statistics().trace_events_dropped == 0
    trace = read_trace(path)
    assert trace.notices == []
    assert len(trace.tokens) == tokens
    return trace


def check_report(path: Path, folder: Path) -> dict[str, int]:
    """Make the report and check the file that it writes for Perfetto."""
    from typer.testing import CliRunner

    from moestream.runtime.cli import app

    done = CliRunner().invoke(app, ["trace", "report", str(path), "--out", str(folder)])
    assert done.exit_code == 0, done.output
    document = json.loads((folder / "trace.json").read_text())
    assert len(document["traceEvents"]) == len(list(perfetto_events(read_trace(path))))
    return check_trace(document)


@pytest.mark.one_loop
async def test_a_trace_and_its_report_are_valid(demo: Path, tmp_path: Path) -> None:
    trace = await traced(demo, tmp_path / "run.trace", 40)
    assert trace.reads and trace.stalls and trace.evictions and trace.queue_depth
    assert len(trace.routes) == len(trace.syncs) == 40 * 12
    assert check_report(tmp_path / "run.trace", tmp_path / "report")["token"] == 40


@pytest.mark.one_loop
async def test_a_trace_with_guesses_is_valid(demo: Path, tmp_path: Path) -> None:
    prefetch = moestream.PrefetchConfig(admission="always")
    trace = await traced(demo, tmp_path / "run.trace", 40, prefetch=prefetch)
    assert trace.predictions and trace.operations and trace.uses
    reported = check_report(tmp_path / "run.trace", tmp_path / "report")
    assert reported["guess to use"] > 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.one_loop
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ahead", [False, True])
async def test_a_long_trace_and_its_report_are_valid(
    ahead: bool, demo: Path, tmp_path: Path
) -> None:
    prefetch = moestream.PrefetchConfig(admission="always") if ahead else "off"
    trace = await traced(demo, tmp_path / "run.trace", 1000, prefetch=prefetch)
    assert len(trace.routes) == 12 * 1000
    assert check_report(tmp_path / "run.trace", tmp_path / "report")["token"] == 1000


SPAN = {"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 0.0, "dur": 10.0, "args": {}}
NAME = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "lane"}}
COUNT = {"ph": "C", "name": "c", "pid": 1, "tid": 1, "ts": 5.0, "args": {"n": 1}}
GOOD = [SPAN, {**SPAN, "ts": 2.0, "dur": 3.0}, NAME, COUNT]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda events: events[1].update(dur=9.0), "overlaps"),
        (lambda events: events[0].update(dur=-1.0), "negative"),
        (lambda events: events[0].update(tid=1 << 40), "thread id"),
        (lambda events: events[0].pop("dur"), "fields"),
        (lambda events: events[0].update(ts="0"), "its ts"),
        (lambda events: events[0].update(ph="Q"), "phase"),
        (lambda events: events[2].update(tid=2), "no name"),
        (lambda events: events.append(NAME), "two names"),
        (lambda events: events.append({**COUNT, "ts": 4.0}), "back in time"),
        (lambda events: events[3].update(args={"n": "1"}), "counts no numbers"),
        (lambda events: events[2].update(name="colour"), "unknown metadata"),
    ],
)
def test_the_schema_notices_damage(damage: Callable[[list[Any]], None], problem: str) -> None:
    document: dict[str, Any] = {"displayTimeUnit": "ms", "traceEvents": copy.deepcopy(GOOD)}
    assert check_trace(document) == {"a": 2, "thread_name": 1, "c": 1}
    damage(document["traceEvents"])
    with pytest.raises(BadTrace, match=problem):
        check_trace(document)
