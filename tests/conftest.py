"""Every async test runs on asyncio and on uvloop; threads that outlive a test fail it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvloop

# Also for the processes that tests start: what is kept between runs is none of the user's.
KEPT = TemporaryDirectory(prefix="moestream-tests-")
os.environ["MOESTREAM_CACHE_DIR"] = KEPT.name

DEMO = Path(str(files("moestream") / "data" / "demo-moe-4bit"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both loops that callers use; one for long tests about numbers (marked ``one_loop``)."""
    factories: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("one_loop") is None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_unconfigure() -> None:
    """The interpreter would warn of a directory that it has to remove itself."""
    KEPT.cleanup()


@pytest.fixture(scope="session")
def demo() -> Path:
    """Directory of the packaged demo model."""
    return DEMO


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a packed store: its reads are direct, and can be checked."""
    from moestream.runtime.packing import pack_model

    target = tmp_path_factory.mktemp("packed") / "store"
    pack_model(DEMO, target)
    return target


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    """No thread of ours survives a test."""
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("moestream")]
