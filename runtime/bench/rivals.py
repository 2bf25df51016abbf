"""Other systems: a program runs one of them on the same prompts and prints what it took.

The command gets, behind its own arguments,

    --model DIR --budget-bytes N --prompt-file FILE --tokens N --repeats R --cold|--warm

where N bytes is what the slots' experts take on disk, and FILE holds, as JSON, the token ids of a
prompt for each repetition, ``[[1, 2], [3]]``. It warms up by itself, ignores end tokens, and
prints one JSON object a line, among others if it likes:

    {"arm": "name", "kind": "decode", "tokens": 48, "seconds": [1.9, 2.0],
     "bytes_read": [900, 800], "stall_seconds": [0.4, 0.5], "note": "what was changed"}

``kind`` is "decode" (the tokens behind the first one) or "prefill" (the prompt up to the first
token); ``tokens`` and ``seconds`` are for each repetition; ``bytes_read`` and ``stall_seconds`` are
too, or null when the system does not count; so are ``hits`` and ``misses``, routed experts that
were there or had to be read, which may be left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arms import Sample
from .cells import OUR_ARMS
from .errors import BenchError, RivalFailed

SHOWN = 200
"""Characters of what a failed program has said."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A program that runs another system.

    Attributes:
        name: of its arm.
        command: program and first arguments.
    """

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RivalResult:
    """What it has printed about one kind."""

    samples: tuple[Sample, ...]
    note: str


def parse_rival(text: str) -> Rival:
    """Understand ``NAME=COMMAND``.

    Raises:
        BenchError: it is something else.
    """
    name, sign, command = text.partition("=")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise BenchError(f"--rival {text!r}: {error}") from error
    if not sign or not name.strip() or not words:
        raise BenchError(f"--rival {text!r}: give NAME=COMMAND")
    if name.strip() in OUR_ARMS:
        raise BenchError(f"--rival {text!r}: {name.strip()} is an arm of ours; give another name")
    return Rival(name.strip(), words)


async def run_rival(
    rival: Rival,
    *,
    model: Path,
    budget: int,
    prompt_file: Path,
    kind: str,
    tokens: int,
    repeats: int,
    warm: bool,
    seconds: float,
) -> RivalResult:
    """Run the program once and read its lines about ``kind``.

    Args:
        rival: the program.
        model: directory.
        budget: bytes of experts on disk.
        prompt_file: token ids for each repetition.
        kind: "decode" or "prefill".
        tokens, repeats, warm: see the module.
        seconds: after which it is killed.

    Raises:
        RivalFailed: it says why.
    """
    arguments = (
        *("--model", str(model), "--budget-bytes", str(budget), "--prompt-file", str(prompt_file)),
        *("--tokens", str(tokens), "--repeats", str(repeats), "--warm" if warm else "--cold"),
    )
    output = await _output((*rival.command, *arguments), seconds)
    return parse_output(output, kind, repeats)


async def _output(command: Sequence[str], seconds: float) -> str:
    try:
        # A session of its own, so that what it has started ends with it.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise RivalFailed(f"{command[0]} cannot be run: {error.strerror}") from error
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate()
    except TimeoutError:
        raise RivalFailed(f"{command[0]} did not end within {seconds:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        said = " ".join(errors.decode(errors="replace").split())[-SHOWN:]
        raise RivalFailed(f"{command[0]} ended with status {process.returncode}: {said}")
    return output.decode(errors="replace")


def parse_output(output: str, kind: str, repeats: int) -> RivalResult:
    """The repetitions of one kind in what a program has printed.

    Raises:
        RivalFailed: they are not there, or not as the protocol says.
    """
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("kind") == kind:
            return RivalResult(tuple(_samples(value, repeats)), str(value.get("note") or ""))
    raise RivalFailed(f'it printed no line with "kind": "{kind}"')


def _samples(value: Mapping[str, Any], repeats: int) -> list[Sample]:
    columns = {}
    for name in ("tokens", "seconds", "bytes_read", "stall_seconds", "hits", "misses"):
        given = value.get(name)
        column = list(given) if isinstance(given, list) else [given] * repeats
        needed = name in ("tokens", "seconds")
        numbers = all(
            (isinstance(one, int | float) and not isinstance(one, bool) and one >= 0)
            or (one is None and not needed)
            for one in column
        )
        single = name == "seconds" and not isinstance(given, list)
        if len(column) != repeats or not numbers or single:
            raise RivalFailed(f"its {name} are not {repeats} numbers: {json.dumps(given)[:SHOWN]}")
        columns[name] = column
    if not all(columns["tokens"]) or not all(columns["seconds"]):
        raise RivalFailed("its tokens and seconds must be above 0")
    return [
        Sample(
            seconds=float(seconds),
            tokens=int(tokens),
            first=float(seconds) if value["kind"] == "prefill" else 0.0,
            stall=stall,
            nbytes=None if nbytes is None else int(nbytes),
            hits=int(hits or 0),
            misses=int(misses or 0),
        )
        for tokens, seconds, nbytes, stall, hits, misses in zip(*columns.values(), strict=True)
    ]
