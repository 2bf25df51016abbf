"""`moestream doctor --chaos`: what it reports of a sound engine, and of one that is not."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moestream import ReadFailed
from moestream.io.faults import ERRORS, KINDS
from moestream.runtime import chaos
from moestream.runtime.cli import app


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "READ_TIMEOUT", 0.5)


def call(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["doctor", "--chaos", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def call_json(path: Path, code: int = 0) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(call(str(path), "--json", code=code))
    return report


def test_a_packed_store_passes_every_trial(packed: Path) -> None:
    report = call_json(packed)
    assert report["passed"] is True
    assert report["slots"] == 16
    assert [trial["fault"] for trial in report["trials"]] == [*KINDS, "slow drive"]
    for trial in report["trials"]:
        expected = ERRORS.get(trial["fault"])
        assert trial["victim"] == (expected.__name__ if expected else "right tokens")
        assert trial["verdict"] == "passed"
        assert trial["note"] == ""


def test_what_cannot_be_noticed_is_skipped(demo: Path) -> None:
    output = call(str(demo))
    assert "corrupt: only a packed store has checksums" in output
    assert "and no other." in output
    assert output.count("skipped") == 1


def test_a_fault_that_nobody_notices_is_a_failure(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that takes a failed read for a whole one."""
    from moestream.io.reader import RecordReader

    read_part = RecordReader._read_part

    def careless(*arguments: Any) -> None:
        with suppress(ReadFailed):
            read_part(*arguments)

    monkeypatch.setattr(chaos, "KINDS", ("error", "short"))
    monkeypatch.setattr(RecordReader, "_read_part", careless)
    report = call_json(packed, code=1)
    assert report["passed"] is False
    assert [trial["verdict"] for trial in report["trials"]] == ["failed", "passed", "passed"]
    assert report["trials"][0]["victim"] in ("right tokens", "other tokens")


def test_models_that_cannot_be_tried(demo: Path, tmp_path: Path) -> None:
    assert "needs a model to run" in call(str(tmp_path / "nothing"), code=1)
    shutil.copy(demo / "config.json", tmp_path)
    assert call(str(tmp_path), code=1).startswith("error: ")
