"""Where the bytes of each expert lie: components, their extents, and the reads that fetch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096
"""Alignment, in bytes, that direct I/O needs of offset, length and address (safe on all drives)."""

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I8": 1, "U16": 2, "U32": 4, "I32": 4}
"""Bytes of one element, by safetensors dtype code, of the dtypes that experts are stored in."""

WIDENED = frozenset({"BF16", "F16"})
"""Dtypes that can be widened to F32 while they are read."""


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of every expert of a layer, e.g. ``up_proj.scales``.

    Attributes:
        name: dotted name inside the expert module.
        path: file that holds it.
        offset: byte offset of expert 0's bytes in the file.
        stride: bytes from one expert's bytes to the next one's.
        shape: shape for one expert (without the expert axis).
        stored: safetensors dtype code on disk.
        pooled: dtype code in the slot; ``F32`` for a 16-bit component that is widened.
    """

    name: str
    path: Path
    offset: int
    stride: int
    shape: tuple[int, ...]
    stored: str
    pooled: str

    @property
    def items(self) -> int:
        """Elements of one expert's tensor."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def stored_bytes(self) -> int:
        """Bytes of one expert's tensor on disk."""
        return self.items * ITEM_BYTES[self.stored]

    @property
    def pooled_bytes(self) -> int:
        """Bytes of one expert's tensor in a slot."""
        return self.items * ITEM_BYTES[self.pooled]

    @property
    def widened(self) -> bool:
        """Whether the bytes change on the way into the slot."""
        return self.stored != self.pooled

    @property
    def direct(self) -> bool:
        """Whether direct I/O can put the bytes of every expert straight into its slot."""
        aligned = self.offset % PAGE == self.stride % PAGE == self.stored_bytes % PAGE == 0
        return aligned and not self.widened


@dataclass(frozen=True, slots=True)
class Run:
    """Components that lie one behind the other for every expert, so that one read fetches them.

    Attributes:
        path: the file.
        offset: byte offset of expert 0's run.
        stride: bytes from one expert's run to the next one's.
        nbytes: length of one expert's run.
        members: indices into the record's components, in file order.
        direct: whether direct I/O is possible for the whole run.
    """

    path: Path
    offset: int
    stride: int
    nbytes: int
    members: tuple[int, ...]
    direct: bool


JOB_BYTES = 1 << 20
"""What one lane reads at once (arbitrary; from 512 KiB on drives are near their peak): large
records are read by several lanes, and a demand never waits long behind a guess."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``begin`` to ``end`` of a run: one read."""

    run: Run
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length of the read."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Record:
    """The experts of one MoE layer as they lie on disk.

    Attributes:
        layer: number of the transformer layer, for messages.
        experts: how many experts the layer has.
        components: the tensors of an expert.
        runs: neighbouring components, in file order (derived).
        jobs: the reads of one expert as the lanes take them, each about ``JOB_BYTES`` (derived).
    """

    layer: int
    experts: int
    components: tuple[Component, ...]
    runs: tuple[Run, ...] = field(init=False)
    jobs: tuple[tuple[Part, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = merge_runs(self.components)
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "jobs", divide_runs(runs, self.components))

    @property
    def stored_bytes(self) -> int:
        """Bytes read from disk for one expert."""
        return sum(component.stored_bytes for component in self.components)

    @property
    def pooled_bytes(self) -> int:
        """Bytes that one slot takes in memory."""
        return sum(component.pooled_bytes for component in self.components)


def merge_runs(components: Sequence[Component]) -> tuple[Run, ...]:
    """Join components that are neighbours on disk for every expert into single reads."""
    order = sorted(
        range(len(components)), key=lambda i: (str(components[i].path), components[i].offset)
    )
    groups: list[list[int]] = []
    for index in order:
        here = components[index]
        if groups:
            before = components[groups[-1][-1]]
            if (
                before.path == here.path
                and before.stride == here.stride
                and before.offset + before.stored_bytes == here.offset
                and components[groups[-1][0]].offset + here.stride
                >= here.offset + here.stored_bytes
            ):
                groups[-1].append(index)
                continue
        groups.append([index])
    return tuple(_run(components, group) for group in groups)


def _run(components: Sequence[Component], members: Sequence[int]) -> Run:
    first = components[members[0]]
    return Run(
        path=first.path,
        offset=first.offset,
        stride=first.stride,
        nbytes=sum(components[i].stored_bytes for i in members),
        members=tuple(members),
        direct=all(components[i].direct for i in members),
    )


def divide_runs(
    runs: Sequence[Run], components: Sequence[Component], job_bytes: int = JOB_BYTES
) -> tuple[tuple[Part, ...], ...]:
    """Cut long runs at page boundaries and put short ones together, into jobs for the lanes.

    A widened component is never cut: it is read whole before it is widened.
    """
    parts = [part for run in runs for part in _cut(run, components, job_bytes)]
    jobs: list[list[Part]] = []
    filled = job_bytes
    for part in parts:
        if filled + part.nbytes > job_bytes:
            jobs.append([])
            filled = 0
        jobs[-1].append(part)
        filled += part.nbytes
    return tuple(tuple(job) for job in jobs)


def _cut(run: Run, components: Sequence[Component], job_bytes: int) -> list[Part]:
    if run.nbytes <= job_bytes or any(components[i].widened for i in run.members):
        return [Part(run, 0, run.nbytes)]
    # Equal pieces, so that no lane is left with a long or a tiny one.
    count = -(-run.nbytes // job_bytes)
    step = -(-run.nbytes // count // PAGE) * PAGE
    return [Part(run, at, min(at + step, run.nbytes)) for at in range(0, run.nbytes, step)]
