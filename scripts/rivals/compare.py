"""Run several systems in turn on one checkpoint and print ratios to the first one.

    python scripts/rivals/compare.py COMMON --arm "NAME: RUNNER ARGUMENTS" --arm ... [--rounds 3]

COMMON are the arguments of all runners (``--model``, ``--budget-bytes`` or ``--slots``,
``--prompt-file``, ``--tokens``, ``--repeats``, ``--cold`` or ``--warm``, ``--reads``,
``--memory-limit``). Each round runs every arm once, each in a process of its own, in rotating
order; a ratio compares runs of the same round.

    python scripts/rivals/compare.py --model DIR --slots 16 --prompt-file FILE \\
        --arm "off: moestream" --arm "ours: moestream --prefetch on" \\
        --arm "streamlx: streamlx --checkout DIR"
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


from scripts.rivals.errors import RivalError
from scripts.rivals.memory_group import run_limited
from scripts.rivals.protocol import Line

RUNNERS = ("moestream", "streamlx", "llamacpp")
FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Arm:
    """One system with its setting."""

    name: str
    command: tuple[str, ...]


def read_arm(text: str) -> Arm:
    """``NAME: RUNNER ARGUMENTS``.

    Raises:
        RivalError: there is no such runner.
    """
    name, _, rest = text.partition(":")
    words = shlex.split(rest)
    if not words or words[0] not in RUNNERS:
        raise RivalError(f'--arm "{text}" must be "NAME: RUNNER ARGUMENTS", with one of {RUNNERS}')
    runner = str(FOLDER / f"{words[0]}_runner.py")
    return Arm(name.strip(), (sys.executable, runner, *words[1:]))


def per_token(line: Line, column: str) -> float | None:
    """Median over the repetitions of a column, per token; None when it was not measured."""
    lengths = line["tokens"]
    values: list[float | None] = line[column]
    counts: list[int] = lengths if isinstance(lengths, list) else [lengths] * len(values)
    known = [
        value / count for value, count in zip(values, counts, strict=True) if value is not None
    ]
    return statistics.median(known) if len(known) == len(values) else None


def hit_rate(line: Line) -> float | None:
    """Hits of all repetitions among their routed experts; None when they were not counted."""
    if None in line["hits"]:
        return None
    hits, misses = sum(line["hits"]), sum(line["misses"])
    return hits / max(hits + misses, 1)


def summarize(rounds: Sequence[dict[str, list[Line]]]) -> list[Line]:
    """A row per kind and arm.

    Args:
        rounds: arm -> lines of its run; the first arm is what the others are compared with.
    """
    rows = []
    first = next(iter(rounds[0]))
    for kind in ("prefill", "decode"):
        for arm in rounds[0]:
            lines = [_of_kind(turn[arm], kind) for turn in rounds]
            bases = [_of_kind(turn[first], kind) for turn in rounds]
            times = [per_token(line, "seconds") or 0.0 for line in lines]
            ratios = [
                time / (per_token(base, "seconds") or 1.0)
                for time, base in zip(times, bases, strict=True)
            ]
            rows.append(
                {
                    "kind": kind,
                    "arm": arm,
                    "ms_per_token": _middle(times, 1e3),
                    "stall_ms": _middle([per_token(line, "stall_seconds") for line in lines], 1e3),
                    "read_mb": _middle([per_token(line, "bytes_read") for line in lines], 1e-6),
                    "device_mb": _middle([per_token(line, "device_bytes") for line in lines], 1e-6),
                    "hit_rate": _middle([hit_rate(line) for line in lines], 1),
                    "time_ratio": _middle(ratios, 1),
                    "time_ratio_low": round(min(ratios), 3),
                    "time_ratio_high": round(max(ratios), 3),
                }
            )
    return rows


def _of_kind(lines: list[Line], kind: str) -> Line:
    return next(line for line in lines if line["kind"] == kind)


def _middle(values: Sequence[float | None], unit: float) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known) * unit, 3) if known else None


def same_tokens(rounds: Sequence[dict[str, list[Line]]]) -> dict[str, bool]:
    """Arm -> whether it generated the first arm's tokens in every round."""
    first = next(iter(rounds[0]))
    return {
        arm: all(
            _of_kind(turn[arm], "decode")["outputs"] == _of_kind(turn[first], "decode")["outputs"]
            for turn in rounds
        )
        for arm in rounds[0]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--arm", action="append", default=[], metavar="NAME: RUNNER ARGUMENTS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jsonl", type=Path, metavar="FILE", help="keep the runners' lines")
    options, common = parser.parse_known_args(arguments)
    try:
        arms = [read_arm(text) for text in options.arm]
        if not arms:
            raise RivalError("no --arm was given")
        rounds: list[dict[str, list[Line]]] = []
        for number in range(options.rounds):
            shift = number % len(arms)
            runs: dict[str, Any] = {}
            for arm in [*arms[shift:], *arms[:shift]]:
                output = run_limited([*arm.command, *common], None)
                runs[arm.name] = [json.loads(line) for line in output.splitlines()]
                if options.jsonl:
                    with options.jsonl.open("a") as file:
                        file.write(output)
            rounds.append({arm.name: runs[arm.name] for arm in arms})
    except RivalError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for row in summarize(rounds):
        print(json.dumps(row), flush=True)
    print(json.dumps({"same_tokens": same_tokens(rounds)}))


if __name__ == "__main__":
    main()
