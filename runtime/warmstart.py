"""What earlier runs used most, to be read before anybody asks: chosen, ordered, kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..io.queue import Key
from ..io.records import Record

FORGET = 0.5
"""Weight of all earlier runs together against the last one's counts (arbitrary)."""

Heat = list[float]
"""Per expert of a layer: layer calls that wanted it, those of earlier runs weighing less."""


def choose(heat: Sequence[Sequence[float]], slots: Sequence[int]) -> list[Key]:
    """The hottest experts of each layer, as many as it has slots; none that was never used.

    Args:
        heat: per group.
        slots: per group.

    Returns:
        (group, expert), each group's hottest first.
    """
    keys: list[Key] = []
    for group, (counts, most) in enumerate(zip(heat, slots, strict=True)):
        used = [expert for expert, count in enumerate(counts) if count > 0]
        used.sort(key=lambda expert: (-counts[expert], expert))
        keys += [(group, expert) for expert in used[:most]]
    return keys


def in_file_order(keys: Sequence[Key], records: Sequence[Record]) -> list[Key]:
    """The keys as their records lie in the files, so that the drive reads forwards."""

    def place(key: Key) -> tuple[str, int]:
        group, expert = key
        first = min(records[group].components, key=lambda part: (str(part.path), part.offset))
        return str(first.path), first.offset + expert * first.stride

    return sorted(keys, key=place)


def merge(old: Heat, uses: Sequence[int]) -> Heat:
    """The heat after a run that wanted each expert so often; without calls nothing changes."""
    if not any(uses):
        return old
    return [round(FORGET * before + now, 3) for before, now in zip(old, uses, strict=True)]


def to_json(heat: Sequence[Heat], records: Sequence[Record]) -> dict[str, Heat]:
    """By number of the transformer layer: which layers are streamed depends on the memory."""
    return {str(record.layer): counts for record, counts in zip(records, heat, strict=True)}


def from_json(table: Mapping[str, Any], records: Sequence[Record]) -> list[Heat]:
    """The heat of these layers; zeros where the table has none, or one of another model.

    Raises:
        TypeError, ValueError, AttributeError: the table is not one of ours.
    """
    heat: list[Heat] = []
    for record in records:
        counts = [max(float(count), 0.0) for count in table.get(str(record.layer), ())]
        heat.append(counts if len(counts) == record.experts else [0.0] * record.experts)
    return heat
