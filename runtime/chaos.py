"""`moestream doctor --chaos`: runs a model on a drive with faults and looks at who notices.

For each kind of fault three requests run: the victim, whose third read it hits; one that waits
beside it; and the victim's prompt once more behind them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..io.errors import MoestreamError
from ..io.faults import ERRORS, KINDS, FaultyDrive, Kind
from ..io.manifest import MANIFEST
from .inspection import CHAOS_CONTEXT

if TYPE_CHECKING:
    from .engine import Engine

TOKENS = 4
PROMPT_TOKENS = 8
PLACE = 3
"""Which read of the victim is hit (arbitrary: not the first of a layer call)."""

READ_TIMEOUT = 2.0
"""Seconds after which a read that hangs is given up here."""

LIMIT = 120.0
"""Seconds within which a request ends, or it hangs."""

RIGHT, HUNG = "right tokens", "hung"

Fault = Kind | Literal["slow drive"]
Verdict = Literal["passed", "failed", "skipped"]


class NothingStreamed(MoestreamError):
    """The model has no layer of which experts are read while it runs."""

    def __init__(self) -> None:
        super().__init__(
            "all experts of this model fit into their slots: there are no reads to fail"
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """What one kind of fault has done.

    Attributes:
        fault: its kind, see ``io.faults.Kind``; "slow drive" for a fault of every read.
        expected: what the victim should get: the name of an error, or "right tokens".
        victim, beside, after: what the requests got; "" when they were not tried.
        verdict: "passed" when all of them got what they should.
        note: why it was skipped, or what is wrong beside the requests.
    """

    fault: str
    expected: str
    victim: str = ""
    beside: str = ""
    after: str = ""
    verdict: Verdict = "skipped"
    note: str = ""


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """All trials with a model.

    Attributes:
        model: its directory.
        slots: slots per layer that it ran with.
        reads: reads in all.
        trials: one per kind of fault.
    """

    model: str
    slots: int
    reads: int
    trials: tuple[Trial, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing has failed."""
        return all(trial.verdict != "failed" for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {"passed": self.passed, **asdict(self)}


async def try_faults(
    model: str, *, slots: int, advance: Callable[[int, int], None] | None = None
) -> ChaosReport:
    """Open a model and run it on a drive with each kind of fault.

    Args:
        model: a directory.
        slots: per layer; few enough that there is something to read.
        advance: called with (trials done, in all).

    Raises:
        NothingStreamed: there is nothing to read.
        MoestreamError: the model cannot be opened.
    """
    from .engine import Engine

    kinds: tuple[Fault, ...] = (*KINDS, "slow drive")
    trials: list[Trial] = []
    with FaultyDrive(slow=READ_TIMEOUT / 8) as drive:
        async with await Engine.open(
            model,
            slots=slots,
            context=CHAOS_CONTEXT,
            max_running=1,  # in turn, so that it is known whose read the fault meets
            checksum=(Path(model) / MANIFEST).is_file(),
            read_timeout=READ_TIMEOUT,
        ) as engine:
            bench = _Bench(engine, drive)
            await bench.prepare()
            for kind in kinds:
                trials.append(await bench.try_kind(kind))
                if advance is not None:
                    advance(len(trials), len(kinds))
                if HUNG in (trials[-1].victim, trials[-1].beside, trials[-1].after):
                    break  # the engine is of no use any more
    return ChaosReport(model, slots, drive.reads, tuple(trials))


class _Bench:
    """An engine on a faulty drive, and what its requests give without faults."""

    def __init__(self, engine: Engine, drive: FaultyDrive) -> None:
        self._engine = engine
        self._drive = drive
        self._store = engine._core.store
        vocabulary = engine._core.loaded.vocabulary
        self._prompts = [
            [(number * 7919 + at * 104729 + 11) % vocabulary for at in range(PROMPT_TOKENS)]
            for number in range(2)
        ]
        self._expected: list[tuple[int, ...]] = []

    async def prepare(self) -> None:
        if not self._store.groups:
            raise NothingStreamed
        for prompt in self._prompts:
            self._expected.append((await self._generate(prompt)).tokens)
        self._store.reader.preadv = self._drive

    async def _generate(self, prompt: Sequence[int]) -> Any:
        return await self._engine.generate(prompt, max_tokens=TOKENS, ignore_eos=True)

    async def _outcome(self, which: int) -> str:
        try:
            async with asyncio.timeout(LIMIT):
                result = await self._generate(self._prompts[which])
        except TimeoutError:
            return HUNG
        except MoestreamError as error:
            return type(error).__name__
        return RIGHT if result.tokens == self._expected[which] else "other tokens"

    async def try_kind(self, kind: Fault) -> Trial:
        drive = self._drive
        if kind == "slow drive":
            drive.delay = 0.002
        elif kind == "corrupt" and self._store.groups[0].record.checksums is None:
            note = "only a packed store has checksums, see `moestream pack`"
            return Trial(kind, ERRORS[kind].__name__, note=note)
        else:
            drive.plan(kind, PLACE)
        expected = RIGHT
        if kind != "slow drive" and kind in ERRORS:
            expected = ERRORS[kind].__name__
        before = len(drive.happened)
        victim, beside = await asyncio.gather(self._outcome(0), self._outcome(1))
        happened = kind == "slow drive" or len(drive.happened) > before
        after = await self._outcome(0)
        drive.forget()
        drive.answer()
        drive.delay = 0.0
        if not happened:
            note = f"the request made fewer than {PLACE} reads"
            return Trial(kind, expected, victim, beside, after, note=note)
        right = (victim, beside, after) == (expected, RIGHT, RIGHT)
        note = "" if await self._is_sound() else "slots are still held"
        verdict: Verdict = "passed" if right and not note else "failed"
        return Trial(kind, expected, victim, beside, after, verdict, note)

    async def _is_sound(self) -> bool:
        """Whether all slots are in use again, once the drive has answered."""
        for _ in range(200):
            held = sum(group.residency.quarantined for group in self._store.groups)
            if not held:
                self._engine.check_integrity(idle=True)
                return True
            await asyncio.sleep(0.01)
        return False
