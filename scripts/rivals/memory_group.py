"""Runs a program under a memory limit that counts the page cache as well (a control group)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.rivals.errors import NoControlGroup, RivalError

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit: int, root: Path = ROOT) -> Iterator[Path]:
    """Make a control group for ``limit`` bytes, of either version; it is removed at the end.

    Raises:
        NoControlGroup: the system has none, or it may not be written to.
    """
    # Version 1 has a hierarchy of its own for memory, version 2 one for everything.
    first = (root / "memory").is_dir()
    group = (root / "memory" if first else root) / f"moestream-rivals-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoControlGroup(error) from error
    try:
        try:
            name = "memory.limit_in_bytes" if first else "memory.max"
            (group / name).write_text(str(limit))
        except OSError as error:
            raise NoControlGroup(error) from error
        yield group
    finally:
        group.rmdir()


def run_limited(command: Sequence[str], limit: int | None, root: Path = ROOT) -> str:
    """What a program prints, run under the limit from its first instruction on.

    Args:
        command: program and arguments; its standard error stays ours.
        limit: bytes, page cache included; None for no limit.
        root: where the system's control groups are.

    Raises:
        NoControlGroup: see ``memory_group``.
        RivalError: the program failed; it has said why on standard error.
    """
    if limit is None:
        return _output(command)
    with memory_group(limit, root) as group:
        # The shell joins the group before it becomes the program.
        join = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        return _output(["/bin/sh", "-c", join, str(group), *command])


def _output(command: Sequence[str]) -> str:
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        how = f"status {run.returncode}" if run.returncode > 0 else f"signal {-run.returncode}"
        raise RivalError(f"{Path(sys.argv[0]).name}: the measured process ended with {how}")
    return run.stdout
