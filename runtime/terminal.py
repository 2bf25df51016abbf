"""Dealings with the person at the terminal: progress bars, notes, errors, Ctrl-C.

Consoles are made when they are needed, since tests and callers swap ``sys.stderr``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, TypeVar

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

T = TypeVar("T")

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


def patient(report: Report, seconds: float = 1.0) -> Report:
    """A report that is passed on once the work has taken so long: short ones would flicker."""
    begun: float | None = None

    def pass_on(done: int, total: int) -> None:
        nonlocal begun
        now = time.monotonic()
        begun = now if begun is None else begun
        if now - begun >= seconds and done < total:
            report(done, total)

    return pass_on


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


class Terminated(KeyboardInterrupt):
    """SIGTERM has come: the process ends as cleanly as on Ctrl-C, with another exit code."""


def raise_terminated(_number: int, _frame: FrameType | None) -> None:
    """A handler for SIGTERM outside of an event loop."""
    raise Terminated


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` in which SIGTERM cancels the work as Ctrl-C does.

    Raises:
        Terminated: once the work has cleaned up behind itself.
        KeyboardInterrupt: the same for Ctrl-C.
    """
    terminated = False

    async def main() -> T:
        nonlocal terminated
        task = asyncio.current_task()

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            if task is not None:
                task.cancel()

        with _on_termination(terminate):
            return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise


@contextmanager
def _on_termination(callback: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, previous = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Raise KeyboardInterrupt, or Terminated, at the end of the block instead of in it.

    For imports of large libraries: some swallow it, and where it passes through ``exec`` (as
    in dataclasses) the interpreter kills itself with the signal whatever the exit code is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []

    def press(number: int, _frame: FrameType | None) -> None:
        pressed.append(number)

    handled = [signal.SIGINT]
    if signal.getsignal(signal.SIGTERM) is raise_terminated:
        handled.append(signal.SIGTERM)
    previous = [signal.signal(number, press) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, previous, strict=True):
            signal.signal(number, handler)
    if signal.SIGTERM in pressed:
        raise Terminated
    if pressed:
        raise KeyboardInterrupt
