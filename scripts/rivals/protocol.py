"""What all runners have in common: arguments, prompts, and the JSON lines that they print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from scripts.rivals import page_cache
from scripts.rivals.errors import RivalError
from scripts.rivals.memory_group import run_limited

WARM_TOKENS = 32
"""Tokens decoded before anything is measured: what is learnt while decoding needs some."""

Line = dict[str, Any]
"""A line of JSON."""


@dataclass
class Sample:
    """One repetition of one kind.

    Attributes:
        seconds: wall time.
        bytes_read: that the system itself has counted; of expert files where it knows.
        stall_seconds: time that the computing thread waited for the drive; None when unknown.
        device_bytes: fetched from the drive by the process, by the kernel's count; None if unknown.
        major_faults: page faults that had to wait for the drive.
        hits, misses: routed experts, per layer call, that were there or had to be read; what was
            read ahead in time, or nearly, is a hit. None when unknown.
    """

    seconds: float
    bytes_read: int | None
    stall_seconds: float | None
    device_bytes: int | None
    major_faults: int
    hits: int | None = None
    misses: int | None = None


@dataclass
class Measured:
    """What one run has measured.

    Attributes:
        arm: name of the system and its setting.
        prompt_tokens: per repetition.
        tokens: decoded per repetition, the first one (it belongs to the prompt) excluded.
        prefill, decode: a sample per repetition.
        outputs: token ids per repetition, the first one included.
        note: conditions, and what was changed in the system.
        extra: further figures of this system.
    """

    arm: str
    prompt_tokens: list[int] = field(default_factory=list)
    tokens: int = 0
    prefill: list[Sample] = field(default_factory=list)
    decode: list[Sample] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[Line]:
        """The JSON lines: one for the prompts, one for decoding."""
        lengths = self.prompt_tokens
        same = len(set(lengths)) == 1
        return [
            self._line("prefill", lengths[0] if same else lengths, self.prefill),
            self._line("decode", self.tokens, self.decode) | {"outputs": self.outputs},
        ]

    def _line(self, kind: Literal["prefill", "decode"], tokens: Any, samples: list[Sample]) -> Line:
        columns = {
            field.name: [getattr(sample, field.name) for sample in samples]
            for field in fields(Sample)
        }
        return {
            "arm": self.arm,
            "kind": kind,
            "tokens": tokens,
            **columns,
            **self.extra,
            "note": self.note,
        }


def between(begun: Sample, ended: Sample) -> Sample:
    """What has come between two looks at clock and counters."""
    differences: dict[str, Any] = {}
    for column in fields(Sample):
        first, last = getattr(begun, column.name), getattr(ended, column.name)
        differences[column.name] = None if first is None or last is None else last - first
    return Sample(**differences)


def make_parser(description: str | None, *, reads: bool = True) -> argparse.ArgumentParser:
    """The arguments that every runner takes.

    Args:
        description: docstring of the runner.
        reads: whether the way of reading can be chosen.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="mlx-lm checkpoint")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--budget-bytes", type=_positive, metavar="N", help="memory of experts")
    size.add_argument("--slots", type=_positive, metavar="N", help="experts held per layer")
    add("--prompt-file", type=Path, required=True, metavar="FILE", help=f"{read_prompts.__doc__}")
    add("--tokens", type=_positive, default=32, metavar="N", help="decoded per repetition")
    add("--repeats", type=_positive, default=3, metavar="R", help="repetitions")
    add(
        "--warm-tokens",
        type=_positive,
        default=WARM_TOKENS,
        metavar="N",
        help=f"decoded behind the first prompt before anything is measured; default {WARM_TOKENS}",
    )
    temperature = parser.add_mutually_exclusive_group()
    temperature.add_argument(
        "--cold", action="store_true", help="misses come from the drive (the default)"
    )
    temperature.add_argument(
        "--warm", action="store_true", help="files are in the page cache; reads are buffered"
    )
    if reads:
        add(
            "--reads",
            choices=["direct", "buffered"],
            help="past the page cache, or through it (with --cold it is emptied before each "
            "repetition, and --memory-limit bounds what it keeps); default: direct, with --warm "
            "buffered",
        )
    else:
        parser.set_defaults(reads=None)
    add(
        "--memory-limit",
        type=_positive,
        metavar="BYTES",
        help="run in a control group of this size, page cache included",
    )
    add("--inside", action="store_true", help=argparse.SUPPRESS)  # already under the limit
    return parser


def check_conditions(options: argparse.Namespace) -> None:
    """Fill in what was left out.

    Raises:
        RivalError: options that contradict each other.
    """
    options.cold = not options.warm
    if options.reads is None:
        options.reads = "buffered" if options.warm else "direct"
    if options.warm and options.reads == "direct":
        raise RivalError("--warm is about the page cache, which --reads direct goes past")
    if not options.model.is_dir():
        raise RivalError(f"--model {options.model} is no directory")


def cool(options: argparse.Namespace, files: Sequence[Path]) -> None:
    """Before a repetition: empty the page cache of the files where it would help.

    Raises:
        RivalError: there is no way to do so.
    """
    # With direct reads, too: those whose alignment does not allow them are buffered.
    if options.cold and not page_cache.drop(files) and options.reads == "buffered":
        raise RivalError("this system cannot empty the page cache; use --reads direct")


def condition(options: argparse.Namespace) -> str:
    """The conditions in words, for the note."""
    parts = ["warm" if options.warm else "cold", f"{options.reads} reads"]
    if not options.warm and options.reads != "memory-mapped":
        parts.append("page cache emptied before each repetition")
    if options.memory_limit:
        parts.append(f"memory limit {options.memory_limit} bytes with page cache")
    return ", ".join(parts)


def read_prompts(path: Path) -> list[list[int]]:
    """JSON: a list of token ids, or a list of such lists that take turns over the repetitions."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RivalError(f"--prompt-file {path}: {error}") from error
    prompts = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    for prompt in prompts:
        whole = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not whole or not prompt:
            raise RivalError(
                f"--prompt-file {path} must hold token ids: [1, 2, 3] or [[1, 2], [3]]"
            )
    return prompts


def slots_for(budget: int, record_bytes: Sequence[int]) -> int:
    """Slots per layer when all layers get the same number.

    Args:
        budget: bytes for the experts of all layers.
        record_bytes: bytes on disk of one expert, per streamed layer.

    Raises:
        RivalError: not even one fits.
    """
    slots = budget // sum(record_bytes)
    if not slots:
        raise RivalError(f"--budget-bytes {budget}: one expert per layer takes {sum(record_bytes)}")
    return slots


def launch(
    measure: Callable[[argparse.Namespace], Measured], options: argparse.Namespace, script: str
) -> list[Line]:
    """Measure here, or in a process of its own under the memory limit.

    Args:
        measure: does it.
        options: checked.
        script: file of the runner, which is started again under a limit.
    """
    if options.memory_limit is None or options.inside:
        return measure(options).lines()
    command = [sys.executable, script, *sys.argv[1:], "--inside"]
    return [json.loads(line) for line in run_limited(command, options.memory_limit).splitlines()]


def run_main(run: Callable[[Sequence[str]], list[Line]]) -> None:
    """Run, print the JSON lines; errors of the caller's become one line and exit status 2."""
    try:
        for line in run(sys.argv[1:]):
            print(json.dumps(line), flush=True)
    except RivalError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number
