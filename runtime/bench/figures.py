"""Which rows belong into which picture. Knows nothing of drawing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .cells import OUR_ARMS
from .rows import Row

SCALES = ("layers", "experts", "callers")
"""What the rows of ``scale-...`` count."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Rows of one model on one machine, the newest of each arm and cell.

    Attributes:
        slug: for names of files.
        caption: machine, model and commit.
        rows: without those that failed or were skipped.
    """

    slug: str
    caption: str
    rows: tuple[Row, ...]

    def of(self, kind: str) -> list[Row]:
        """The rows of a kind of cell."""
        return [row for row in self.rows if row.kind == kind]


def settings(rows: Iterable[Row]) -> list[Setting]:
    """Divide rows by machine and model; of several rows of the same thing the last one counts."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], Row]] = {}
    for row in rows:
        if row.status == "ok" and row.ms_per_token is not None:
            scaling = row.kind.startswith("scale-")
            model = ("scaling",) if scaling else (row.model, row.record_bytes, row.conditions)
            place = groups.setdefault((row.device, row.cpu, row.gpu, *model), {})
            place.pop(key := _key(row), None)  # the newest last, in the order of the file
            place[key] = row
    made: list[Setting] = []
    for own in groups.values():
        kept = tuple(own.values())
        slug = _slug(kept[-1])
        taken = sum(setting.slug.startswith(slug) for setting in made)
        made.append(Setting(f"{slug}-{taken + 1}" if taken else slug, caption(kept), kept))
    return made


def _key(row: Row) -> tuple[Any, ...]:
    """Two rows with the same key are the same measurement, made twice."""
    sizes = (row.layers, row.experts, row.top_k) if row.kind.startswith("scale-") else ()
    return (row.kind, row.arm, row.cache, row.slots, row.context, row.callers, *sizes)


def _slug(row: Row) -> str:
    model = "synthetic" if row.kind.startswith("scale-") else row.model
    size = "" if not row.record_bytes else f"-{row.record_bytes / 1e6:.3g}mb"
    text = f"{row.device}-{model}{'' if row.kind.startswith('scale-') else size}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def caption(rows: Sequence[Row]) -> str:
    """What a picture's figures come from, in two lines."""
    last = rows[-1]
    machine = last.gpu or last.cpu
    parts = [f"{machine}, {last.cores} cores, {(last.memory_bytes or 0) / 2**30:.0f} GiB"]
    parts.append(f"MLX on the {last.device.upper()}")
    if last.kind.startswith("scale-"):
        model = "synthetic models"
    else:
        model = f"{last.model}: {last.layers} layers, {last.experts} experts, top {last.top_k}"
        model += f", {(last.record_bytes or 0) / 1e6:.3g} MB each"
        model += f"; {last.conditions}" if last.conditions else ""
        model += f"; routing: {last.routing}" if last.routing else ""
    commits = list(dict.fromkeys(row.commit for row in rows if row.commit))
    versions = f"mlx {last.mlx}, mlx-lm {last.mlx_lm}"
    source = f"commit {', '.join(commits)}" if commits else f"moestream {last.moestream}"
    return f"{model}\n{', '.join(parts)}; {versions}; {source}"


def arms_of(rows: Iterable[Row]) -> list[str]:
    """The arms that occur: ours in their order, then the others."""
    found = list(dict.fromkeys(row.arm for row in rows))
    return [arm for arm in OUR_ARMS if arm in found] + [a for a in found if a not in OUR_ARMS]


def values_of(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Any]:
    """The different values, in order, without None."""
    return sorted({value for row in rows if (value := key(row)) is not None})


def relative(
    rows: Sequence[Row], what: str, *, host: bool = False
) -> list[tuple[int, float, float, float]]:
    """Cost of one more layer, expert or caller, as multiples of what it is at the smallest count.

    Layers: time of a token by layer. Experts: time of a token by routed expert. Callers: time of a
    token of all callers.

    Args:
        rows: of ``scale-<what>``.
        what: of ``SCALES``.
        host: of the Python on the compute thread alone, whose spread is not kept.

    Returns:
        For each count: the count, median, lower and upper quartile.
    """
    ordered = sorted(rows, key=lambda row: getattr(row, what))
    costs = [(getattr(row, what), *_unit_costs(row, what, host)) for row in ordered]
    if not costs or not costs[0][1]:
        return []
    base = costs[0][1]
    return [(count, mid / base, low / base, high / base) for count, mid, low, high in costs]


def _unit_costs(row: Row, what: str, host: bool) -> tuple[float, float, float]:
    layers, top_k = row.layers or 1, row.top_k or 1
    units = {"layers": layers, "experts": layers * top_k, "callers": 1}[what]
    if host:
        return 3 * ((row.host_ms or 0.0) / units,)
    middle = row.ms_per_token or 0.0
    return middle / units, (row.ms_q1 or middle) / units, (row.ms_q3 or middle) / units
