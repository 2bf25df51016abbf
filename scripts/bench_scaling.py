"""What one more layer, expert or caller costs: does the engine scale?

Synthetic checkpoints, equal but for one number, are open at once and take turns, repetition by
repetition; half of their experts are held, so that a layer call misses as often in all of them.

- layers: time of a token by layer, 48 to 96;
- experts: time of a token by routed expert, 128 to 512 of them;
- callers: time of a token of all callers, 1 to 8 of them.

The target is 1.15 times the cost at the smallest count at most.

    python scripts/bench_scaling.py [--layers 48 72 96] [--experts 128 256 512] [--callers 1 2 4 8]
                                    [--hidden 128] [--inner 128] [--tokens 32] [--repeats 5]
                                    [--arms off ours] [--csv FILE]

Rows are those of `moestream bench`, appended to the same file; `moestream bench plot` draws them.
The checkpoints take about 1.5 GB in the current directory and are gone afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moestream.runtime.bench import drives
from moestream.runtime.bench.arms import Arm, Sample
from moestream.runtime.bench.cells import Budget, Cell, turn_order
from moestream.runtime.bench.display import row_line
from moestream.runtime.bench.figures import SCALES, relative
from moestream.runtime.bench.job import nothing_kept
from moestream.runtime.bench.model import BenchModel, look_at
from moestream.runtime.bench.rows import Ledger, Row
from moestream.runtime.bench.seats import Seats, warm_up
from moestream.runtime.bench.summary import Reference, fill
from scripts.make_checkpoint import Shape, make_checkpoint

LANES = 8
SHARE = 0.5
TOP_K = 8
PROMPT = 16


@dataclass(frozen=True)
class Variant:
    """One of the models or numbers of callers that are compared.

    Attributes:
        count: of layers, experts or callers.
        model: to run.
        cell: what to do with it.
        seats: its open arms.
        bandwidth: of the drive.
    """

    count: int
    model: BenchModel
    cell: Cell
    seats: Seats
    bandwidth: float


async def once(variant: Variant, arm: Arm, turn: int) -> Sample:
    """One repetition; of one caller, too, from the prompt on where callers are compared."""
    drives.drop(drives.buffered_files(variant.model.records))
    cell = variant.cell
    prompts = [variant.model.prompt(PROMPT, turn * 64 + n) for n in range(cell.callers)]
    if cell.kind == "decode":
        return await arm.decode(prompts[0], cell.tokens)
    return await arm.together(prompts, cell.tokens)


async def compare(what: str, variants: Sequence[Variant]) -> list[Row]:
    """All variants and arms in turn; a row for each."""
    arms = variants[0].cell.arms
    samples: dict[tuple[int, str], list[Sample]] = {}
    places = [(variant, arm) for variant in variants for arm in arms]
    names = [str(index) for index in range(len(places))]
    for turn in range(-1, variants[0].cell.repeats):
        for name in turn_order(names, max(turn, 0)):
            variant, arm = places[int(name)]
            seat = await variant.seats.arm(arm)
            if turn < 0:
                await warm_up(seat, variant.cell, variant.model)
            else:
                taken = await once(variant, seat, turn)
                samples.setdefault((variant.count, arm), []).append(taken)
    rows = []
    for variant, arm in places:
        row = replace(
            variant.model.row,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            kind=f"scale-{what}",
            arm=arm,
            cache="cold",
            share=SHARE,
            slots=float(round(variant.model.experts * SHARE)),
            context=PROMPT,
            callers=variant.cell.callers,
            tokens=variant.cell.tokens,
            turns="together",
            direct_share=drives.direct_share(variant.model.records),
        )
        reference = Reference(variant.bandwidth, samples.get((variant.count, "off")))
        rows.append(fill(row, samples[variant.count, arm], reference))
    return rows


def checkpoint(folder: Path, layers: int, experts: int, given: argparse.Namespace) -> Path:
    """A model of these sizes, written unless it is there already."""
    directory = folder / f"{layers}x{experts}"
    if not directory.exists():
        shape = Shape(
            layers=layers,
            experts=experts,
            top_k=min(TOP_K, min(given.experts) // 2),
            hidden=given.hidden,
            inner=given.inner,
        )
        make_checkpoint(directory, shape, aligned=True, quiet=True)
    return directory


async def measure(what: str, folder: Path, given: argparse.Namespace) -> list[Row]:
    """Make the checkpoints, open them all, compare."""
    async with AsyncExitStack() as stack:
        variants = []
        for count in getattr(given, what):
            layers = count if what == "layers" else given.layers[0]
            experts = count if what == "experts" else given.experts[0]
            callers = count if what == "callers" else 1
            directory = checkpoint(folder, layers, experts, given)
            model = look_at(directory, suite="scaling", conditions="")
            cell = Cell(
                kind="callers" if what == "callers" else "decode",
                budget=Budget(share=SHARE),
                cache="cold",
                arms=tuple(given.arms),
                context=PROMPT,
                callers=callers,
                tokens=given.tokens,
                repeats=given.repeats,
            )
            arguments = {
                **model.settings(cell.budget, cell.longest),
                "lanes": LANES,
                "max_running": callers,
            }
            bandwidth = drives.drive_bandwidth(model.records, lanes=LANES, throttle=None)
            seats = Seats(model, given.arms, arguments, throttle=None)
            await stack.enter_async_context(seats)
            for problem in seats.problems.values():
                raise problem
            variants.append(Variant(count, model, cell, seats, bandwidth))
        return await compare(what, variants)


def show(what: str, rows: Sequence[Row]) -> None:
    """The rows, and what they say about scaling."""
    for row in rows:
        sizes = f"{row.layers} layers, {row.experts} experts, {row.callers} callers"
        print(f"{sizes}; {row_line(row)}")
    for arm in dict.fromkeys(row.arm for row in rows):
        own = [row for row in rows if row.arm == arm]
        for name, host in (("time", False), ("Python", True)):
            costs = "  ".join(
                f"{count}: {middle:.2f}" + ("" if host else f" ({low:.2f} to {high:.2f})")
                for count, middle, low, high in relative(own, what, host=host)
            )
            print(f"{what}, {arm}, {name} against the smallest: {costs}", flush=True)


def main(words: list[str] | None = None) -> None:
    """Parse the command line, measure, print, append rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[48, 72, 96])
    parser.add_argument("--experts", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=["off", "ours"])
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args(words)
    ledger = None if given.csv is None else Ledger(given.csv)
    scratch = tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".moestream-scaling-")
    with nothing_kept(), scratch as folder:
        for what in SCALES:
            rows = asyncio.run(measure(what, Path(folder), given))
            for row in rows:
                if ledger is not None:
                    ledger.append(row)
            show(what, rows)


if __name__ == "__main__":
    main()
