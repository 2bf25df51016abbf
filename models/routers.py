"""What a MoE block would choose, worked out without running the block.

A router is read off the block's structure: a linear layer (or a bare weight) with one output for
each expert, perhaps a selection bias, perhaps groups of experts. Several rules fit the same
structure, so each is tried against the block's own choice, and only one that agrees is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .experts import ExpertSite

Scores = Callable[[mx.array], mx.array]
"""Input of a router ``[..., hidden]`` -> selection scores ``[..., outputs]``."""

_ROUTER_NAME = re.compile(r"gate|router|classifier|route")
_MASKED = 1e4
"""Taken off the scores of experts in groups that lost: they come last, in their own order."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Only experts of the best groups may be chosen."""

    count: int
    kept: int


@dataclass(frozen=True, slots=True)
class Gate:
    """The part of a block that has one output for each expert.

    Attributes:
        path: below the block, for messages.
        apply: the linear map.
        outputs: how many there are; more than there are experts where some do no work.
        biases: arrays that may be added to the scores.
        softcap: bound of the logits, 0 for none.
        temperature: divisor of the logits.
        groups: of experts, if any.
        scale: weight of a norm inside the router, if it has its own.
        eps: of that norm.
    """

    path: str
    apply: Scores
    outputs: int
    biases: tuple[mx.array, ...]
    softcap: float
    temperature: float
    groups: Groups | None
    scale: mx.array | None
    eps: float


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to make selection scores from a gate.

    Attributes:
        gate: gives the logits.
        label: says which rule it is; equal in layers that are alike.
        scores: the rule itself.
    """

    gate: Gate
    label: str
    scores: Scores


class Chosen(Exception):
    """Ends the call of a block at its experts, with what the router has chosen."""

    def __init__(self, indices: mx.array) -> None:
        self.indices = indices


class Stop:
    """Stands in for the experts of a block: the call goes no further."""

    def __init__(self, switch: Any) -> None:
        self._switch = switch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._switch, name)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        raise Chosen(indices)


def own_choice(site: ExpertSite, block: Any, x: mx.array) -> tuple[mx.array, mx.array | None]:
    """The experts that a block, or a router module by itself, chooses; unevaluated.

    Args:
        site: where the block calls its experts.
        block: called with ``x``. One that returns without having called the experts is a router
            that returns indices and weights.
        x: input of the block.

    Returns:
        ``[..., top_k]`` expert ids, and their weights where they are known.

    Raises:
        LookupError: nothing was chosen.
    """
    parent, name = site.parent, site.attribute
    switch = parent[int(name)] if isinstance(parent, list) else getattr(parent, name)
    site.put(Stop(switch))
    try:
        result = block(x)
    except Chosen as chosen:
        return chosen.indices, None
    finally:
        site.put(switch)
    returned = result if isinstance(result, tuple | list) else ()
    parts = [part for part in returned if isinstance(part, mx.array)]
    indices = [part for part in parts if mx.issubdtype(part.dtype, mx.integer)]
    if not indices:
        raise LookupError("it never calls its experts")
    weights = [part for part in parts if part.shape == indices[0].shape and part is not indices[0]]
    return indices[0], weights[0] if weights else None


def find_gates(block: nn.Module, site: ExpertSite, hidden: int) -> list[Gate]:
    """What may be the gate of a block, likeliest first."""
    experts = site.experts
    found = []
    for path, chain in _walk(block, site.module):
        module = chain[-1]
        weight = module.get("weight")
        if not isinstance(weight, mx.array) or weight.ndim != 2:
            continue
        named = bool(_ROUTER_NAME.search(path)) and "shared" not in path and "share_" not in path
        outputs = int(weight.shape[0])
        if outputs != experts and not (named and experts < outputs <= 2 * experts):
            continue
        linear = isinstance(module, nn.Linear | nn.QuantizedLinear)
        if not linear and hidden and int(weight.shape[1]) != hidden:
            continue
        found.append(((outputs != experts, not named, len(chain)), _gate(path, chain, linear)))
    found.sort(key=lambda item: item[0])
    return [gate for _, gate in found]


def find_rules(gate: Gate, dtype: mx.Dtype) -> Iterator[Rule]:
    """Every rule that fits the structure of a gate, likeliest first."""
    # Adding nothing, all scores have the order of the logits; so have groups by their maximum.
    kinds: list[tuple[str, mx.array | None]] = [
        (kind, bias) for bias in gate.biases for kind in ("sigmoid", "softmax", "sqrtsoftplus")
    ]
    kinds += [("logits", bias) for bias in gate.biases] + [("logits", None)]
    if gate.groups is not None:
        kinds += [(kind, None) for kind in ("softmax", "sigmoid", "sqrtsoftplus")]
    maskings = [""] if gate.groups is None else ["sum", "max", "sum-zero", "max-zero", ""]
    for masking in maskings:
        for kind, bias in kinds:
            for wide in (False,) if dtype == mx.float32 else (False, True):
                words = [kind, "bias" if bias is not None else "", masking and f"groups-{masking}"]
                if gate.softcap > 0:
                    words.append("softcap")
                words += ["own-norm" if gate.scale is not None else "", "wide" if wide else ""]
                label = "+".join(word for word in words if word)
                yield Rule(gate, label, _scores(gate, kind, bias, masking, wide))


# -- finding ----------------------------------------------------------------------------------


def _walk(
    block: nn.Module, skip: nn.Module, path: str = "", chain: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """All modules below and including the block but the experts, with the way to them."""
    chain = (*chain, block)
    yield path, chain
    for name, child in block.items():
        children = child if isinstance(child, list) else [child]
        for module in children:
            if isinstance(module, nn.Module) and module is not skip:
                yield from _walk(module, skip, f"{path}.{name}" if path else name, chain)


def _gate(path: str, chain: tuple[nn.Module, ...], linear: bool) -> Gate:
    module = chain[-1]
    weight: mx.array = module["weight"]
    outputs = int(weight.shape[0])
    holders = chain[:-1] if linear else chain  # a linear layer adds its own bias
    arrays = [(name, value) for holder in reversed(holders) for name, value in holder.items()]
    biases = [
        value
        for name, value in arrays
        if isinstance(value, mx.array) and value.shape == (outputs,) and "bias" in name
    ]
    scales = [value for name, value in chain[-2].items() if name == "scale"] if chain[1:] else []
    count = int(_setting(chain, "n_group", "num_expert_group", "n_groups") or 1)
    kept = int(_setting(chain, "topk_group", "topk_groups") or count)
    grouped = 1 <= kept < count and outputs % count == 0 and outputs // count > 1
    return Gate(
        path=path,
        apply=module if linear else _matmul(module),
        outputs=outputs,
        biases=tuple(biases),
        softcap=float(_setting(chain, "softcap") or 0.0),
        temperature=float(_setting(chain, "gate_temp") or 1.0),
        groups=Groups(count, kept) if grouped else None,
        scale=scales[0] if scales else None,
        eps=float(_setting(chain, "eps", "rms_norm_eps") or 1e-6),
    )


def _matmul(module: nn.Module) -> Scores:
    def apply(x: mx.array) -> mx.array:
        weight: mx.array = module["weight"]
        return x @ weight.T

    return apply


def _setting(chain: tuple[nn.Module, ...], *names: str) -> Any:
    """A number among the attributes of a router, of what holds it, or of their settings."""
    for module in reversed(chain):
        for source in (module, getattr(module, "args", None), getattr(module, "config", None)):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int | float):
                    return value
    return None


# -- scoring ----------------------------------------------------------------------------------


def _scores(gate: Gate, kind: str, bias: mx.array | None, masking: str, wide: bool) -> Scores:
    steps: list[Scores] = []
    if gate.scale is not None:
        weight = gate.scale * gate.scale.shape[0] ** -0.5
        steps.append(lambda x: mx.fast.rms_norm(x, weight, gate.eps))
    if wide:
        steps.append(_widen)
    steps.append(gate.apply)
    if kind != "logits" or bias is not None or masking:
        steps.append(_widen)
    if gate.temperature != 1.0:
        steps.append(lambda x: x / gate.temperature)
    if gate.softcap > 0:
        steps.append(lambda x: mx.tanh(x / gate.softcap) * gate.softcap)
    if kind != "logits":
        steps.append(_ACTIVATIONS[kind])
    if bias is not None:
        steps.append(lambda x: x + bias)
    if masking and gate.groups is not None:
        steps.append(_masking(gate.groups, masking))
    if len(steps) == 1:
        return steps[0]

    def scores(x: mx.array) -> mx.array:
        for step in steps:
            x = step(x)
        return x

    return scores


def _widen(x: mx.array) -> mx.array:
    return x if x.dtype == mx.float32 else x.astype(mx.float32)


def _softmax(x: mx.array) -> mx.array:
    return mx.softmax(x, axis=-1)


def _sqrt_softplus(x: mx.array) -> mx.array:
    return mx.sqrt(mx.logaddexp(x, 0))


_ACTIVATIONS: dict[str, Scores] = {
    "sigmoid": mx.sigmoid,
    "softmax": _softmax,
    "sqrtsoftplus": _sqrt_softplus,
}


def _masking(groups: Groups, kind: str) -> Scores:
    lost = groups.count - groups.kept
    best = kind.startswith("max")
    zero = kind.endswith("zero")

    def mask(scores: mx.array) -> mx.array:
        grouped = mx.unflatten(scores, -1, (groups.count, -1))
        if best:
            values = mx.max(grouped, axis=-1, keepdims=True)
        else:
            values = mx.sum(mx.topk(grouped, 2, axis=-1), axis=-1, keepdims=True)
        if zero:
            losers = mx.argpartition(values, kth=lost - 1, axis=-2)[..., :lost, :]
            grouped = mx.put_along_axis(grouped, losers, mx.array(0.0, grouped.dtype), axis=-2)
        else:
            worst = mx.partition(values, kth=lost, axis=-2)[..., lost : lost + 1, :]
            grouped = grouped - (values < worst) * _MASKED
        return mx.flatten(grouped, -2, -1)

    return mask
