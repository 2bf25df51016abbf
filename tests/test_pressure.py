"""How pressed the machine is, and what share of the slots that leaves: pure, and from files."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestream.runtime import machine, machine_pressure
from moestream.runtime.machine_pressure import judge, linux_level, stall_share
from moestream.runtime.pressure import Level, Pressure, Rules, watch

CALM, WARNING, CRITICAL = Level.CALM, Level.WARNING, Level.CRITICAL
RULES = Rules(patience=3, settle_seconds=5.0, calm_seconds=30.0, growth=0.25, least=0.1)


def feed(pressure: Pressure, *readings: tuple[float, Level]) -> list[float]:
    return [pressure.step(level, now) for now, level in readings]


# -- the decision -----------------------------------------------------------------------------


def test_a_calm_machine_changes_nothing() -> None:
    pressure = Pressure(RULES)
    assert feed(pressure, *[(float(now), CALM) for now in range(100)]) == [1.0] * 100


def test_critical_pressure_halves_at_once_and_again_when_it_lasts() -> None:
    pressure = Pressure(RULES)
    readings = [(float(now), CRITICAL) for now in range(11)]
    assert feed(pressure, *readings) == [0.5] * 5 + [0.25] * 5 + [0.125]
    assert pressure.shrinks == 3


def test_a_warning_has_to_last() -> None:
    pressure = Pressure(RULES)
    assert feed(pressure, (0, WARNING), (1, WARNING), (2, CALM), (3, WARNING)) == [1.0] * 4
    assert feed(pressure, (4, WARNING), (5, WARNING)) == [1.0, 0.8]


def test_what_was_given_up_has_time_to_show() -> None:
    pressure = Pressure(RULES)
    assert feed(pressure, (0, CRITICAL), (1, WARNING), (2, WARNING), (4.9, WARNING)) == [0.5] * 4
    assert feed(pressure, (5, WARNING)) == [0.4]


def test_growth_is_slow_and_waits_for_calm() -> None:
    pressure = Pressure(RULES)
    feed(pressure, (0, CRITICAL), (5, CRITICAL))
    assert feed(pressure, (6, CALM), (35.9, CALM), (36, CALM), (65.9, CALM)) == [
        *(0.25, 0.25, 0.5, 0.5)
    ]
    # A warning that does not last shrinks nothing, but the calm begins anew.
    assert feed(pressure, (66, WARNING), (67, CALM), (96, CALM), (97, CALM)) == [
        *(0.5, 0.5, 0.5, 0.75)
    ]
    assert feed(pressure, (127, CALM), (157, CALM), (187, CALM)) == [1.0] * 3


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from(list(Level))), max_size=60))
@settings(deadline=None)
def test_the_share_stays_within_bounds_and_falls_only_under_pressure(
    steps: list[tuple[float, Level]],
) -> None:
    pressure, now, share = Pressure(RULES), 0.0, 1.0
    for seconds, level in steps:
        now += seconds
        after = pressure.step(level, now)
        assert RULES.least <= after <= 1.0
        assert after == share or (after > share) == (level is CALM)
        share = after


class Over(Exception):
    """The script is at its end."""


async def test_the_watcher_tells_of_changes_and_survives_missing_files() -> None:
    script: list[Level | Exception] = [CALM, OSError(), CRITICAL, WARNING, Over()]
    seen: list[float] = []
    pressure = Pressure(RULES)

    def source() -> Level:
        item = script.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    with pytest.raises(Over):
        await watch(source, pressure, lambda: seen.append(pressure.share), seconds=0.0)
    assert seen == [0.5]
    assert pressure.level is WARNING


# -- Linux ------------------------------------------------------------------------------------

STALLS = """some avg10={some} avg60=0.12 avg300=0.01 total=123456
full avg10={full} avg60=0.00 avg300=0.00 total=23456
"""


def stalls(some: float, full: float = 0.0) -> str:
    return STALLS.format(some=f"{some:.2f}", full=f"{full:.2f}")


def test_stall_information_is_read() -> None:
    assert stall_share(stalls(12.5, 3.25), "some") == 12.5
    assert stall_share(stalls(12.5, 3.25), "full") == 3.25
    assert stall_share("", "some") == 0.0
    assert stall_share("some avg10=oh", "some") == 0.0


@pytest.mark.parametrize(
    ("free", "text", "expected"),
    [
        (0.5, "", CALM),
        (0.5, stalls(90, 80), CALM),  # page cache that is read again and again
        (0.05, stalls(9), CALM),
        (0.05, stalls(30, 5), WARNING),
        (0.05, stalls(30, 20), CRITICAL),
        (0.015, "", WARNING),
        (0.015, stalls(30, 20), CRITICAL),
        (0.005, "", CRITICAL),
    ],
)
def test_levels(free: float, text: str, expected: Level) -> None:
    assert judge(free, text) is expected


@pytest.fixture
def quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with free memory and an empty tree of groups; the process is in ``/outer``."""

    class Memory:
        total, available = 1000, 900

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(machine_pressure, "SYSTEM_STALLS", tmp_path / "stalls")
    monkeypatch.setattr(machine, "PROCESS_GROUPS", tmp_path / "self")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "cgroup")
    (tmp_path / "self").write_text("0::/outer\n")
    folder = tmp_path / "cgroup" / "outer"
    folder.mkdir(parents=True)
    return folder


def test_the_machine_counts(quiet_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linux_level() is CALM

    class Memory:
        total, available = 1000, 50

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert linux_level() is CALM
    machine_pressure.SYSTEM_STALLS.write_text(stalls(50, 40))
    assert linux_level() is CRITICAL


def test_a_limited_group_counts(quiet_machine: Path) -> None:
    (quiet_machine / "memory.max").write_text("10000\n")
    (quiet_machine / "memory.current").write_text("9500\n")
    (quiet_machine / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    assert linux_level() is CALM
    (quiet_machine / "memory.pressure").write_text(stalls(20))
    assert linux_level() is WARNING
    (quiet_machine / "memory.stat").write_text("inactive_file 4000\nactive_file 0\n")
    assert linux_level() is CALM, "half of it is page cache"


def test_a_group_of_the_first_version_counts(quiet_machine: Path) -> None:
    machine.PROCESS_GROUPS.write_text("4:memory:/inner\n")
    folder = machine.GROUPS / "memory" / "inner"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("10000\n")
    (folder / "memory.usage_in_bytes").write_text("9950\n")
    (folder / "memory.stat").write_text("total_inactive_file 0\ntotal_active_file 0\n")
    assert linux_level() is CRITICAL
    (folder / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert linux_level() is CALM, "no limit"


# -- macOS ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "expected"), [(1, CALM), (2, WARNING), (4, CRITICAL)])
def test_the_level_of_macos(number: int, expected: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def by_name(name: bytes, value: Any, size: Any, _new: None, _length: Any) -> int:
        asked.append(name)
        assert size._obj.value == ctypes.sizeof(ctypes.c_int)
        value._obj.value = number
        return 0

    class Library:
        sysctlbyname = staticmethod(by_name)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    source = machine_pressure.mac_source()
    assert source is not None
    assert source() is expected
    assert set(asked) == {b"kern.memorystatus_vm_pressure_level"}


def test_a_system_without_the_level_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        sysctlbyname = staticmethod(lambda *_: -1)

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Library)
    assert machine_pressure.mac_source() is None
