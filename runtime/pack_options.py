"""How the experts are to be packed: the options of `moestream pack`, and what they come to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..models.experts import ExpertSite, projections
from ..models.quantizing import BITS, GROUP_SIZES, Scheme, scheme_of
from .arguments import show
from .errors import InvalidRequest

OrderBy = Literal["frequency", "coactivation"]
Bits = dict[str | None, int | None]
"""Projection (None: those that are not named) -> bits; None keeps what the source has."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What to make of the experts.

    Attributes:
        bits: "4", "keep", or by projection "gate=3,up=3,down=4"; projections that are not named
            are kept. None keeps all, unless ``mode`` implies a number.
        mode: affine, mxfp4, mxfp8 or nvfp4; None for affine.
        group_size: weights that share a scale; None for what mlx-lm takes.
        layers: rules "0-3,44-47:6" or "0:gate=8,down=6", which replace ``bits`` in these layers;
            later ones win.
        order: a trace by whose routing the experts are put in order on disk.
        order_by: what that order is.
    """

    bits: str | None = None
    mode: str | None = None
    group_size: int | None = None
    layers: tuple[str, ...] = ()
    order: Path | None = None
    order_by: OrderBy = "frequency"


Schemes = dict[str, dict[str, Scheme | None]]
"""Path of a site -> projection -> its new scheme; None keeps what it has."""


def choose_schemes(options: PackOptions, sites: Sequence[ExpertSite]) -> Schemes:
    """The scheme of every projection of every layer.

    Raises:
        InvalidRequest: an option makes no sense for these layers; says which and what would do.
    """
    mode = options.mode or "affine"
    if mode not in BITS:
        raise InvalidRequest(f"mode={show(mode)} must be one of {', '.join(BITS)}")
    _check_group_size(options, mode)
    base = _base(options, mode)
    rules = [parse_rule(text) for text in options.layers]
    numbers = {site.layer for site in sites}
    for text in options.layers:
        for part in text.partition(":")[0].split(","):
            if not _range(part, text) & numbers:  # each of them: a slip must not pass unseen
                raise InvalidRequest(
                    f"layers={show(text)}: {part.strip()} names no layer with routed experts; "
                    f"they are {min(numbers)} to {max(numbers)}"
                )
    return {site.path: _site_schemes(site, options, mode, base, rules) for site in sites}


def _check_group_size(options: PackOptions, mode: str) -> None:
    size = options.group_size
    if size is None:
        return
    if size not in GROUP_SIZES[mode]:
        allowed = " or ".join(map(str, GROUP_SIZES[mode]))
        raise InvalidRequest(f"group_size={size} must be {allowed} for mode {mode}")
    if options.bits is None and options.mode is None and not options.layers:
        raise InvalidRequest("group_size quantizes nothing by itself: give bits, too")


def _base(options: PackOptions, mode: str) -> Bits:
    if options.bits is not None:
        return parse_bits(options.bits)
    if options.mode is None:
        return {None: None}
    return {None: 4 if mode == "affine" else BITS[mode][0]}


def _site_schemes(
    site: ExpertSite,
    options: PackOptions,
    mode: str,
    base: Bits,
    rules: Sequence[tuple[frozenset[int], Bits]],
) -> dict[str, Scheme | None]:
    linears = projections(site.module)
    chosen: dict[str, int | None] = dict.fromkeys(linears, base.get(None))
    for bits in (base, *(bits for layers, bits in rules if site.layer in layers)):
        chosen = _override(chosen, bits, site)
    return {
        name: _scheme(f"{site.path}.{name}", linears[name], chosen[name], mode, options.group_size)
        for name in linears
    }


def _override(chosen: dict[str, int | None], bits: Bits, site: ExpertSite) -> dict[str, int | None]:
    result = {name: bits.get(None, before) for name, before in chosen.items()}
    for given, value in bits.items():
        if given is None:
            continue
        name = next((name for name in chosen if given in (name, name.removesuffix("_proj"))), None)
        if name is None:
            short = ", ".join(name.removesuffix("_proj") for name in chosen)
            raise InvalidRequest(
                f"layer {site.layer} has no projection {show(given)}: give {short}"
            )
        result[name] = value
    return result


def _scheme(
    path: str, linear: Any, bits: int | None, mode: str, group_size: int | None
) -> Scheme | None:
    if bits is None:
        return None
    if bits not in BITS[mode]:
        allowed = ", ".join(map(str, BITS[mode]))
        raise InvalidRequest(f"bits={bits} must be one of {allowed} for mode {mode}")
    sizes = GROUP_SIZES[mode]
    size = group_size or (64 if 64 in sizes else sizes[0])
    width = int(linear.input_dims)
    if width % size:
        fits = [other for other in sizes if width % other == 0]
        remedy = f"give group size {max(fits)}" if fits else "keep this projection"
        raise InvalidRequest(
            f"{path} has rows of {width} weights, which groups of {size} do not divide; {remedy}"
        )
    scheme = Scheme(bits, size, mode)
    return None if scheme == scheme_of(linear) else scheme


def parse_bits(text: str) -> Bits:
    """Understand "4", "keep" or "gate=3,up=3,down=4".

    Raises:
        InvalidRequest: it is none of these.
    """
    if "=" not in text:
        return {None: _number(text, text)}
    bits: Bits = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or name in bits:
            raise _not_bits(text)
        bits[name] = _number(value, text)
    return bits


def _number(value: str, text: str) -> int | None:
    value = value.strip()
    if value == "keep":
        return None
    if not re.fullmatch(r"[0-9]{1,3}", value):
        raise _not_bits(text)
    return int(value)


def _not_bits(text: str) -> InvalidRequest:
    return InvalidRequest(
        f"bits={show(text)} is neither a number, nor 'keep', nor a list like 'gate=3,up=3,down=4'"
    )


def parse_rule(text: str) -> tuple[frozenset[int], Bits]:
    """Understand "0-3,44-47:6": the layers, and their bits.

    Raises:
        InvalidRequest: it is no such rule.
    """
    ranges, colon, bits = text.partition(":")
    if not colon:
        raise _no_rule(text)
    layers = frozenset[int]().union(*(_range(part, text) for part in ranges.split(",")))
    return layers, parse_bits(bits)


def _range(part: str, rule: str) -> frozenset[int]:
    """The layers of "3" or "0-3"."""
    match = re.fullmatch(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?", part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise _no_rule(rule)
    return frozenset(range(int(match[1]), int(match[2] or match[1]) + 1))


def _no_rule(text: str) -> InvalidRequest:
    return InvalidRequest(f"layers={show(text)} is no rule like '0-3,44-47:6' or '0:gate=8,down=6'")


def losses(sites: Sequence[ExpertSite], schemes: Mapping[str, Mapping[str, Scheme | None]]) -> str:
    """A warning where experts that are quantized already get quantized again; else ""."""
    again = sorted(
        {
            str(before)
            for site in sites
            for name, linear in projections(site.module).items()
            if schemes[site.path][name] is not None and (before := scheme_of(linear)) is not None
        }
    )
    if not again:
        return ""
    return (
        f"the experts are quantized already ({'; '.join(again)}): quantizing them again loses more "
        "than quantizing the original once"
    )
