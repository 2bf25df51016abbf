"""Finds the modules around the routers of a model, and lets one listen to them.

One forward pass is built, and never computed, with the norms and blocks replaced by recorders. The
pre-MoE norm is the module whose output the MoE block gets, by identity of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .experts import ExpertSite, SiteUse, projections
from .routers import find_gates
from .taps import Place, Tap


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """How the choice of one MoE layer can be predicted.

    Attributes:
        use: the layer.
        norm: what makes the block's input; None where the router takes the residual itself.
        block: takes the norm's output: the MoE block, or a router module.
        tapped: the module whose input is the residual.
        entry: the layer's first norm, whose input is the layer's own.
        hidden, dtype: of the residual.
    """

    use: SiteUse
    norm: Callable[[mx.array], mx.array] | None
    block: nn.Module
    tapped: Place
    entry: Place | None
    hidden: int
    dtype: mx.Dtype

    def routed(self, residual: mx.array) -> mx.array:
        """What the router sees."""
        return residual if self.norm is None else self.norm(residual)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call of a module in the probing pass."""

    place: Place
    module: nn.Module
    given: Any
    result: Any


class _Recorder(Tap):
    """Keeps what went in and came out of a module."""

    def __init__(self, place: Place, calls: list[_Call]) -> None:
        super().__init__(place.get())
        self._log = _Log(place, calls)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        result = self["inner"](x, *args, **kwargs)
        self._log.calls.append(_Call(self._log.place, self["inner"], x, result))
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _Log:
    place: Place
    calls: list[_Call]


class _Experts:
    """Stands in for a switch module; keeps the indices it is called with."""

    def __init__(self, site: ExpertSite, indices: dict[str, mx.array]) -> None:
        self._site = site
        self._indices = indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site.module, name)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._indices[self._site.path] = indices
        last = list(projections(self._site.module).values())[-1]
        return mx.zeros((*indices.shape, last.output_dims), x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Surroundings:
    """The places around an expert module.

    Attributes:
        blocks: modules between the transformer layer and the experts, innermost first.
        norms: norms in the layer and in the blocks.
        routers: siblings that may be routers.
        first: norms of the model's first layer.
    """

    blocks: tuple[Place, ...]
    norms: tuple[Place, ...]
    routers: tuple[Place, ...]
    first: tuple[Place, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What a probing pass has found.

    Attributes:
        targets: of each MoE layer, None where there is nothing to predict it with.
        problems: of each MoE layer: why there is no target, or "".
        embedding: the module that embeds tokens, if it was seen.
        embedded: what it gave in the pass.
        entered: what the first layer got there.
    """

    targets: list[Target | None]
    problems: list[str]
    embedding: nn.Module | None = None
    embedded: mx.array | None = None
    entered: mx.array | None = None


def probe(model: nn.Module, uses: Sequence[SiteUse], cache: Sequence[Any]) -> Probed:
    """Find out how each MoE layer can be predicted; evaluates nothing.

    Args:
        model: with its own switch modules.
        uses: its MoE layers.
        cache: a prompt cache of the model, used up by this.
    """
    around = [_look_around(model, use.site) for use in uses]
    places: dict[tuple[int, Any], Place] = {}
    for place in _candidates(model, around):
        places.setdefault((id(place.owner), place.key), place)
    calls: list[_Call] = []
    indices: dict[str, mx.array] = {}
    failure = _record(model, uses, cache, list(places.values()), calls, indices)
    if failure:
        return Probed([None] * len(uses), [failure] * len(uses))
    pairs = zip(uses, around, strict=True)
    targets = [_target(use, near, calls, indices) for use, near in pairs]
    found = Probed(
        targets, ["" if target else "its router's input is no norm's output" for target in targets]
    )
    embedded = next((call for call in calls if _is_embedding(call.module)), None)
    entered = next((call.given for call in calls if _leaf(call.module)), None)
    if embedded is None or entered is None or embedded.result.shape != entered.shape:
        return found
    return Probed(found.targets, found.problems, embedded.module, embedded.result, entered)


def _candidates(model: nn.Module, around: Sequence[_Surroundings]) -> Iterator[Place]:
    for near in around:
        yield from (*near.blocks, *near.norms, *near.routers, *near.first)
    for _, module in model.named_modules():
        yield from (place for place in _children(module) if _is_embedding(place.get()))


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding)


def _record(
    model: nn.Module,
    uses: Sequence[SiteUse],
    cache: Sequence[Any],
    places: Sequence[Place],
    calls: list[_Call],
    indices: dict[str, mx.array],
) -> str:
    """Build a forward pass with everything recorded; returns why that failed, or ""."""
    for place in places:
        place.put(_Recorder(place, calls))
    for use in uses:
        use.site.put(_Experts(use.site, indices))
    try:
        # Token 1: the embedding of token 0 is often padding, and zero.
        model(mx.ones((1, 1), mx.int32), cache=cache)
    except Exception as error:  # whatever the code of a model may raise
        line = str(error).strip().partition("\n")[0]
        return f"the forward pass cannot be probed ({line})"
    finally:
        for use in uses:
            use.site.put(use.site.module)
        for place in places:
            place.put(place.get()["inner"])
    return ""


def _target(
    use: SiteUse, near: _Surroundings, calls: Sequence[_Call], indices: dict[str, mx.array]
) -> Target | None:
    norms = [call for call in calls if _among(call.place, near.norms)]
    chosen = indices.get(use.site.path)
    if not norms or chosen is None:
        return None
    entry = next((call.place for call in norms if _plain(call.given)), None)
    hidden = int(norms[0].given.shape[-1])
    for place in near.blocks:
        for call in calls:
            if not _among(call.place, (place,)):
                continue
            if not find_gates(call.module, use.site, hidden):
                continue
            norm = _norm_before(call, norms)
            if norm is not None:
                return _make(use, norm.module, call.module, norm, entry)
    for call in calls:  # a router beside the block
        returned = call.result if isinstance(call.result, tuple | list) else ()
        if any(part is chosen for part in returned):
            norm = _norm_before(call, norms)
            if norm is not None:
                return _make(use, norm.module, call.module, norm, entry)
            return _make(use, None, call.module, call, entry) if _plain(call.given) else None
    return None


def _norm_before(call: _Call, norms: Sequence[_Call]) -> _Call | None:
    return next((norm for norm in norms if norm.result is call.given and _plain(norm.given)), None)


def _make(
    use: SiteUse, norm: nn.Module | None, block: nn.Module, tapped: _Call, entry: Place | None
) -> Target:
    given: mx.array = tapped.given
    return Target(use, norm, block, tapped.place, entry, int(given.shape[-1]), given.dtype)


def _plain(array: Any) -> bool:
    """Whether this has the shape of a residual stream of the probe's one token."""
    return isinstance(array, mx.array) and array.ndim == 3 and array.shape[:2] == (1, 1)


def _look_around(model: nn.Module, site: ExpertSite) -> _Surroundings:
    owner: Any = model
    layer: nn.Module | None = None
    first: nn.Module | None = None
    blocks: list[Place] = []
    for part in site.path.split(".")[:-1]:
        listed = isinstance(owner, list)
        place = Place(owner, int(part) if listed else part)
        if listed and layer is None:
            first = owner[0]
        owner = place.get()
        if listed and layer is None:
            layer = owner
        elif layer is not None and isinstance(owner, nn.Module):
            blocks.append(place)
    layer = model if layer is None else layer
    blocks.reverse()
    inside = [layer, *(place.get() for place in blocks)]
    return _Surroundings(
        blocks=tuple(blocks),
        norms=tuple(p for module in inside for p in _children(module) if _leaf(p.get())),
        routers=tuple(
            place
            for place in _children(layer)
            if "router" in str(place.key)
            and not _leaf(place.get())
            and find_gates(place.get(), site, 0)
        ),
        first=tuple(p for p in _children(first or layer) if _leaf(p.get())),
    )


def _children(module: nn.Module) -> list[Place]:
    places = []
    for name, child in module.items():
        if isinstance(child, nn.Module):
            places.append(Place(module, name))
        elif isinstance(child, list):
            places += [Place(child, i) for i, m in enumerate(child) if isinstance(m, nn.Module)]
    return places


def _leaf(module: nn.Module) -> bool:
    """Whether a module looks like a norm: vectors at most, and nothing inside."""
    values = list(module.values())
    if not all(isinstance(value, mx.array) and value.ndim == 1 for value in values):
        return False
    return bool(values) or "norm" in type(module).__name__.lower()


def _among(place: Place, places: Sequence[Place]) -> bool:
    return any(place.owner is other.owner and place.key == other.key for other in places)
