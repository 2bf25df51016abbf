"""Runs the cells of a benchmark and hands out rows as soon as they exist."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...io.errors import MoestreamError
from ..plan import Plan
from . import drives
from .arms import PREFETCH, NotForThisArm, Sample
from .cells import Cell, in_groups, turn_order
from .job import Bench, Listener, nothing_kept
from .model import BenchModel, look_at
from .padding import padded_records
from .rivals import Rival, run_rival
from .rows import Row, Status
from .seats import MEMORY_SHARE, RESIDENT, Seats, batches, memory_left, warm_up
from .summary import Reference, fill

ARM_ORDER = ("off", "ours", "fifo", RESIDENT)
"""In which arms are opened: what the others are compared with first."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Why an arm has no figures."""

    status: Status
    reason: str


Result = list[Sample] | Missing


async def run_bench(bench: Bench, listener: Listener) -> None:
    """Run all cells. What fails in one of them becomes a row and ends nothing else.

    Raises:
        MoestreamError: the model cannot be streamed at all.
    """
    with ExitStack() as stack:
        stack.enter_context(nothing_kept())
        if bench.record_mb is not None:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(dir=bench.scratch, prefix=".moestream-bench-")
            )
            stack.enter_context(padded_records(Path(folder), int(bench.record_mb * 1e6)))
        model = look_at(bench.model, suite=bench.suite, conditions=bench.conditions)
        number = 0
        for group in in_groups(bench.cells):
            await _Group(bench, listener, model, group, number).run()
            number += len(group)


class _Group:
    """Cells with the same budget and state of the page cache, which share open engines."""

    def __init__(
        self,
        bench: Bench,
        listener: Listener,
        model: BenchModel,
        cells: Sequence[Cell],
        number: int,
    ) -> None:
        self._bench = bench
        self._listener = listener
        self._model = model
        self._cells = cells
        self._number = number
        self._warm = cells[0].cache == "warm"
        self._context = max(cell.longest for cell in cells)
        self._files = drives.record_files(model.records)
        self._buffered = () if self._warm else drives.buffered_files(model.records)
        self._row = replace(
            model.row,
            cache=cells[0].cache,
            share=cells[0].budget.share,
            direct_share=0.0 if self._warm else drives.direct_share(model.records),
        )
        self._bandwidth: float | None = None
        self._off: dict[Cell, list[Sample]] = {}
        self._not_cold = ""

    async def run(self) -> None:
        """Measure all cells."""
        await self._measure_drive()
        try:
            plan = self._model.plan(self._cells[0].budget, self._context)
        except MoestreamError as error:
            self._refuse_all(error)
            return
        self._row = replace(
            self._row, slots=sum(plan.slots) / len(plan.slots), expert_bytes=self._budget(plan)
        )
        together = batches(needs := self._needs(plan), int(MEMORY_SHARE * memory_left()))
        for arms in together:
            # An arm by itself has met the others only if there are none.
            turns = len(together) == 1 or (len(arms) > 1 and "off" in arms)
            self._row = replace(self._row, turns="together" if turns else "in turn")
            await self._run_batch(arms, sum(needs[arm] for arm in arms))
        for number, cell in self._numbered():
            for rival in self._bench.rivals:
                self._listener.cell(cell, number)
                await self._run_rival(cell, rival)
        if self._bench.trace_dir is not None:
            await self._write_traces(self._bench.trace_dir)

    def _numbered(self) -> Iterator[tuple[int, Cell]]:
        return enumerate(self._cells, self._number + 1)

    def _needs(self, plan: Plan) -> dict[str, int]:
        """Bytes that each arm takes beside the process."""
        arms = {arm for cell in self._cells for arm in cell.arms}
        common = plan.kv_bytes + plan.scratch_bytes
        engine = plan.total_bytes - plan.process_bytes
        resident = self._model.resident_bytes + common
        return {arm: resident if arm == RESIDENT else engine for arm in ARM_ORDER if arm in arms}

    def _budget(self, plan: Plan) -> int:
        """What the experts that are held take on disk."""
        records = self._model.records
        return sum(
            slots * record.stored_bytes for slots, record in zip(plan.slots, records, strict=True)
        )

    def _arguments(self) -> dict[str, Any]:
        return {
            **self._model.settings(self._cells[0].budget, self._context),
            "direct": not self._warm,
            "lanes": self._bench.lanes,
            "max_running": max(cell.callers for cell in self._cells),
        }

    async def _measure_drive(self) -> None:
        """While nothing is open, so that nothing else reads."""
        measure = drives.cache_bandwidth if self._warm else drives.drive_bandwidth
        try:
            if self._warm:
                await asyncio.to_thread(drives.touch, self._files)
            self._bandwidth = await asyncio.to_thread(
                measure, self._model.records, lanes=self._bench.lanes, throttle=self._bench.throttle
            )
        except (MoestreamError, OSError) as error:
            self._row = _noted(self._row, f"the drive could not be measured: {error}")

    # -- arms of this process -----------------------------------------------------------------

    async def _run_batch(self, arms: Sequence[str], need: int) -> None:
        missing: dict[str, Missing] = {}
        if RESIDENT in arms:
            reason = self._why_not_resident(need)
            if reason is not None:
                missing[RESIDENT] = Missing("skipped", reason)
        opened = [arm for arm in arms if arm not in missing]
        throttle = self._bench.throttle
        async with Seats(self._model, opened, self._arguments(), throttle=throttle) as seats:
            missing |= {arm: _failed(error) for arm, error in seats.problems.items()}
            if self._warm and (reason := await self._warm_files()) is not None:
                missing |= {arm: Missing("skipped", reason) for arm in arms if arm != RESIDENT}
            self._not_cold = self._why_not_cold()
            for number, cell in self._numbered():
                own = [arm for arm in cell.arms if arm in arms]
                if own:
                    self._listener.cell(cell, number)
                    await self._run_cell(cell, own, seats, missing)

    def _why_not_resident(self, need: int) -> str | None:
        if self._model.packed:
            return "mlx-lm cannot load a packed store"
        left = memory_left()
        if need > left:
            return f"does not fit: {need / 1e9:.1f} GB, and {left / 1e9:.1f} GB are free"
        return None

    async def _warm_files(self) -> str | None:
        """Bring all experts into the page cache; why that did not work, or None."""
        await asyncio.to_thread(drives.touch, self._files)
        share = drives.cached_share(self._files)
        if share is not None and share < drives.WARM_ENOUGH:
            return f"only {100 * share:.0f} % of the experts stay in the page cache"
        return None

    def _why_not_cold(self) -> str:
        """What is to be said where the page cache cannot be kept out of it; "" if it can."""
        if not self._buffered:
            return ""
        if not drives.drop(self._buffered):
            return "unaligned experts may come from the page cache"
        share = drives.cached_share(self._buffered)
        if share is None or share <= 1 - drives.WARM_ENOUGH:
            return ""
        return f"{100 * share:.0f} % of what is not read directly stayed in the page cache"

    async def _run_cell(
        self, cell: Cell, arms: Sequence[str], seats: Seats, missing: Mapping[str, Missing]
    ) -> None:
        results = await self._measure(cell, arms, seats, missing)
        if isinstance(samples := results.get("off"), list):
            self._off[cell] = samples
        for arm in arms:
            row = replace(self._cell_row(cell), arm=arm)
            if cell.kind == "callers" and isinstance(results[arm], list):
                row = _noted(row, (await seats.arm(arm)).remark(cell.callers))
            if arm == RESIDENT:
                row = replace(row, slots=None, share=None, expert_bytes=None, direct_share=None)
            else:
                row = _noted(row, self._not_cold)
            self._hand_out(row, cell, results[arm])

    async def _measure(
        self, cell: Cell, arms: Sequence[str], seats: Seats, missing: Mapping[str, Missing]
    ) -> dict[str, Result]:
        """The repetitions of each arm, or why there are none. Arms take turns."""
        samples: dict[str, list[Sample]] = {arm: [] for arm in arms}
        lost = {arm: missing[arm] for arm in arms if arm in missing}
        for turn in range(-1, cell.repeats):  # the first turn is not counted
            for arm in turn_order(arms, max(turn, 0)):
                if arm not in lost:
                    try:
                        sample = await self._once(cell, arm, seats, turn)
                    except NotForThisArm as reason:
                        lost[arm] = Missing("skipped", str(reason))
                    except Exception as error:
                        lost[arm] = _failed(error)
                    else:
                        samples[arm] += [] if sample is None else [sample]
                if turn >= 0:
                    self._listener.step(1)
        return {arm: lost.get(arm, samples[arm]) for arm in arms}

    async def _once(self, cell: Cell, arm: str, seats: Seats, turn: int) -> Sample | None:
        seat = await seats.arm(arm)
        drives.drop(self._buffered)
        if turn < 0:
            await warm_up(seat, cell, self._model)
            return None
        prompts = self._prompts(cell, turn)
        if cell.kind == "decode":
            return await seat.decode(prompts[0], cell.tokens)
        if cell.kind == "prefill":
            return await seat.prefill(prompts[0])
        return await seat.together(prompts, cell.tokens)

    def _prompts(self, cell: Cell, turn: int) -> list[list[int]]:
        seeds = range(turn * cell.callers, (turn + 1) * cell.callers)
        return [self._model.prompt(cell.context, seed) for seed in seeds]

    # -- other systems ------------------------------------------------------------------------

    async def _run_rival(self, cell: Cell, rival: Rival) -> None:
        row = replace(self._cell_row(cell), arm=rival.name, turns="own process", direct_share=None)
        result: Result
        if cell.kind == "callers":
            result = Missing("skipped", "the protocol is about one caller")
        elif self._bench.conditions:
            result = Missing(
                "skipped", f"only engines of this process see {self._bench.conditions}"
            )
        else:
            try:
                result, note = await self._ask(cell, rival)
                row = _noted(row, note)
            except Exception as error:
                result = _failed(error)
        self._hand_out(row, cell, result)
        self._listener.step(cell.repeats)

    async def _ask(self, cell: Cell, rival: Rival) -> tuple[list[Sample], str]:
        with tempfile.TemporaryDirectory(prefix="moestream-bench-") as folder:
            prompts = [self._prompts(cell, turn)[0] for turn in range(cell.repeats)]
            file = Path(folder) / "prompts.json"
            file.write_text(json.dumps(prompts))
            answer = await run_rival(
                rival,
                model=self._model.directory,
                budget=self._row.expert_bytes or 0,
                prompt_file=file,
                kind=cell.kind,
                tokens=cell.tokens,
                repeats=cell.repeats,
                warm=self._warm,
                seconds=self._bench.rival_seconds,
            )
        return list(answer.samples), answer.note

    # -- rows ---------------------------------------------------------------------------------

    def _cell_row(self, cell: Cell) -> Row:
        tokens = cell.context if cell.kind == "prefill" else cell.tokens
        return replace(
            self._row,
            kind=cell.kind,
            context=cell.context,
            callers=cell.callers,
            tokens=tokens,
        )

    def _hand_out(self, row: Row, cell: Cell, result: Result) -> None:
        row = replace(row, time=datetime.now(UTC).isoformat(timespec="seconds"))
        if isinstance(result, Missing):
            row = row.failed(result.reason, status=result.status)
        else:
            row = fill(row, result, Reference(self._bandwidth, self._off.get(cell)))
        self._listener.row(row)

    def _refuse_all(self, error: Exception) -> None:
        for number, cell in self._numbered():
            self._listener.cell(cell, number)
            for arm in (*cell.arms, *(rival.name for rival in self._bench.rivals)):
                self._hand_out(replace(self._cell_row(cell), arm=arm), cell, _failed(error))
                self._listener.step(cell.repeats)

    # -- traces -------------------------------------------------------------------------------

    async def _write_traces(self, folder: Path) -> None:
        """The first repetition of each cell again, by engines that write traces, uncounted."""
        for number, cell in self._numbered():
            for arm in cell.arms:
                if arm in PREFETCH:
                    trace = folder / f"cell{number:03}-{cell.kind}-{cell.cache}-{arm}.trace"
                    arguments = {**self._arguments(), "trace": trace}
                    throttle = self._bench.throttle
                    async with Seats(self._model, [arm], arguments, throttle=throttle) as seats:
                        if arm not in seats.problems:
                            await self._once(cell, arm, seats, 0)


def _failed(error: Exception) -> Missing:
    known = isinstance(error, MoestreamError)
    return Missing("failed", str(error) if known else f"{type(error).__name__}: {error}")


def _noted(row: Row, text: str) -> Row:
    parts = dict.fromkeys([*filter(None, row.note.split("; ")), " ".join(text.split())])
    return replace(row, note="; ".join(filter(None, parts)))
