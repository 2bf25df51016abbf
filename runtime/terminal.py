"""Dealings with the person at the terminal: progress bars, notes, errors, Ctrl-C.

Consoles are made when they are needed, since tests and callers swap ``sys.stderr``.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ..io.errors import MoestreamError

Report = Callable[[int, int], None]
"""Called with (done, in all); from any thread."""


def error_console() -> Console:
    """Standard error, with colours only on a terminal."""
    return _console(sys.stderr)


def output_console() -> Console:
    """Standard output, with colours only on a terminal."""
    return _console(sys.stdout)


def _console(stream: IO[str]) -> Console:
    return Console(file=stream, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """A line for the person who watches, without any markup."""
    error_console().print(Text(text, style="dim"))


def print_json(value: dict[str, Any]) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False))


@contextmanager
def progress_bar(title: str, *, sizes: bool = False, late: bool = False) -> Iterator[Report | None]:
    """A bar that vanishes at the end; None when nobody watches.

    Args:
        title: what is going on.
        sizes: whether bytes are counted; their rate is shown then.
        late: show it with the first figures, so that notes can come before it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    amounts = (DownloadColumn(), TransferSpeedColumn()) if sizes else (TaskProgressColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    bar = Progress(*columns, console=error_console(), transient=True)
    task = bar.add_task(title, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        bar.start()

    try:
        if not late:
            bar.start()
        yield report
    finally:
        bar.stop()


def show_error(error: Exception, *, debug: bool) -> None:
    """One or two lines on standard error, or the traceback where that is asked for."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
        return
    expected = isinstance(error, MoestreamError)
    text = str(error) if expected else f"{type(error).__name__}: {error}"
    line = " ".join(text.split())
    error_console().print(Text.assemble(("error:", "bold red"), " ", line))
    if not expected:
        note("this should not happen; `moestream --debug ...` shows where it did")


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block instead of in it.

    For imports of large libraries: some swallow it, and where it passes through ``exec`` (as
    in dataclasses) the interpreter kills itself with the signal whatever the exit code is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt
