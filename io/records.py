"""Where the bytes of each expert lie: components, their extents, and the reads that fetch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


@dataclass(frozen=True, slots=True)
class Run:
    """Components that lie one behind the other for every expert, so that one read fetches them.

    Attributes:
        path: the file.
        offset: byte offset of the first run on disk.
        stride: bytes from one run to the next one.
        nbytes: length of one run.
        members: indices into the record's components, in file order.
        straight: how many of the members, from the first on, are read straight into their rows. The
            others pass a scratch buffer of the lane: those behind the first one that is widened or,
            in a run of whole pages, is not made of whole pages.
        direct: whether every run begins and may end at a page boundary, so that direct I/O is
            possible.
    """

    path: Path
    offset: int
    stride: int
    nbytes: int
    members: tuple[int, ...]
    straight: int
    direct: bool


JOB_BYTES = 1 << 20
"""What one lane reads at once (arbitrary; from 512 KiB on drives are near their peak): large
records are read by several lanes, and a demand never waits long behind a guess."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``begin`` to ``end`` of a component's tensor, as it is stored."""

    member: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length of the piece."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``begin`` to ``end`` of a run: one read.

    Attributes:
        straight: what is read straight into rows, in file order.
        staged: what follows, and passes the scratch buffer.
        scratch_bytes: of ``staged``, and of the padding up to the next page that is read along
            where the run is direct.
    """

    run: Run
    begin: int
    end: int
    straight: tuple[Piece, ...]
    staged: tuple[Piece, ...]
    scratch_bytes: int

    @property
    def nbytes(self) -> int:
        """Length of the read."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Checksums:
    """CRC-32 of the blocks of packed records.

    Attributes:
        block: bytes of a block; the last one of a record may be shorter.
        values: of each expert, those of its blocks in order.
    """

    block: int
    values: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The experts of one MoE layer as they lie on disk.

    Attributes:
        layer: number of the transformer layer, for messages.
        experts: how many experts the layer has.
        components: the tensors of an expert.
        place: of each expert, where it stands among the records on disk; None: in order.
        checksums: of a packed layer, where reads are to be checked. Its blocks are then the parts.
        runs: neighbouring components, in file order (derived).
        jobs: the reads of one expert as the lanes take them, each about ``JOB_BYTES`` (derived).
    """

    layer: int
    experts: int
    components: tuple[Component, ...]
    place: tuple[int, ...] | None = None
    checksums: Checksums | None = None
    runs: tuple[Run, ...] = field(init=False)
    jobs: tuple[tuple[Part, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        runs = merge_runs(self.components)
        block = None if self.checksums is None else self.checksums.block
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "jobs", divide_runs(runs, self.components, block=block))

    @property
    def stored_bytes(self) -> int:
        """Bytes read from disk for one expert."""
        return sum(component.stored_bytes for component in self.components)

    @property
    def pooled_bytes(self) -> int:
        """Bytes that one slot takes in memory."""
        return sum(component.pooled_bytes for component in self.components)

    def offset(self, part: Part, expert: int) -> int:
        """Byte offset in the file of a part of an expert."""
        place = expert if self.place is None else self.place[expert]
        return part.run.offset + place * part.run.stride + part.begin


def whole_pages(nbytes: int) -> int:
    """The next multiple of ``PAGE``."""
    return -(-nbytes // PAGE) * PAGE


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
    nbytes = sum(components[i].stored_bytes for i in members)
    # The stride leaves room for the padding: a read never reaches into the next expert.
    direct = first.offset % PAGE == first.stride % PAGE == 0 and whole_pages(nbytes) <= first.stride
    straight = 0
    for index in members:
        component = components[index]
        if component.widened or (direct and component.stored_bytes % PAGE):
            break
        straight += 1
    return Run(
        path=first.path,
        offset=first.offset,
        stride=first.stride,
        nbytes=nbytes,
        members=tuple(members),
        straight=straight,
        direct=direct,
    )


def divide_runs(
    runs: Sequence[Run],
    components: Sequence[Component],
    job_bytes: int = JOB_BYTES,
    *,
    block: int | None = None,
) -> tuple[tuple[Part, ...], ...]:
    """Cut long runs at page boundaries and put short ones together, into jobs for the lanes.

    Args:
        runs: from ``merge_runs``.
        components: of the record.
        job_bytes: what a job has at most.
        block: cut every so many bytes instead.
    """
    parts = [part for run in runs for part in _cut(run, components, job_bytes, block)]
    jobs: list[list[Part]] = []
    filled = job_bytes
    for part in parts:
        if filled + part.nbytes > job_bytes:
            jobs.append([])
            filled = 0
        jobs[-1].append(part)
        filled += part.nbytes
    return tuple(tuple(job) for job in jobs)


def block_bytes(nbytes: int, job_bytes: int = JOB_BYTES) -> int:
    """Into what pieces of whole pages a run is cut: equal ones, so that no lane gets a tiny one."""
    count = max(-(-nbytes // job_bytes), 1)
    return whole_pages(-(-nbytes // count)) or PAGE


def _cut(
    run: Run, components: Sequence[Component], job_bytes: int, block: int | None
) -> list[Part]:
    step = block or block_bytes(run.nbytes, job_bytes)
    if not _divisible(run, components):
        step = max(run.nbytes, 1)
    edges = [*range(0, run.nbytes, step), run.nbytes] if run.nbytes else [0, 0]
    return [_part(run, components, begin, end) for begin, end in pairwise(edges)]


def _divisible(run: Run, components: Sequence[Component]) -> bool:
    """Whether no cut at a page boundary goes through a number that is to be widened."""
    at = 0
    for index in run.members:
        component = components[index]
        if component.widened and at % ITEM_BYTES[component.stored]:
            return False
        at += component.stored_bytes
    return True


def _part(run: Run, components: Sequence[Component], begin: int, end: int) -> Part:
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    at = 0
    for position, index in enumerate(run.members):
        nbytes = components[index].stored_bytes
        first, last = max(begin - at, 0), min(end - at, nbytes)
        if first < last:
            pieces[position >= run.straight].append(Piece(index, first, last))
        at += nbytes
    scratch_bytes = sum(piece.nbytes for piece in pieces[1])
    if run.direct and end == run.nbytes:
        scratch_bytes += whole_pages(end) - end
    return Part(run, begin, end, tuple(pieces[0]), tuple(pieces[1]), scratch_bytes)
