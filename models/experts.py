"""Finds the routed experts of an mlx-lm model and what a forward pass asks of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    SwitchMLP,
)


@dataclass(frozen=True, slots=True)
class ExpertSite:
    """One routed-expert module and the place where the model calls it.

    Attributes:
        parent: module (or list) that holds it.
        attribute: its name (or index) there.
        path: dotted path in the model, e.g. ``model.layers.3.mlp.switch_mlp``.
        module: mlx-lm's SwitchGLU or SwitchMLP.
        layer: number of the transformer layer.
        experts: how many it holds; the module itself forgets it when it gets slot pools.
    """

    parent: Any
    attribute: str
    path: str
    module: nn.Module
    layer: int
    experts: int

    def put(self, replacement: Any) -> None:
        """Let the model call ``replacement(x, indices)`` instead of the module."""
        if isinstance(self.parent, list):
            self.parent[int(self.attribute)] = replacement
        else:
            setattr(self.parent, self.attribute, replacement)


@dataclass(frozen=True, slots=True)
class SiteUse:
    """What one forward pass asks of a site: ``top_k`` experts for each token."""

    site: ExpertSite
    top_k: int


def find_sites(model: nn.Module) -> list[ExpertSite]:
    """All routed-expert modules of a model, in no particular order."""
    sites = []
    for prefix, parent in model.named_modules():
        for attribute, child in parent.items():
            children = enumerate(child) if isinstance(child, list) else [(attribute, child)]
            for name, module in children:
                if not isinstance(module, SwitchGLU | SwitchMLP):
                    continue
                parts = [prefix, attribute] if module is child else [prefix, attribute, str(name)]
                path = ".".join(part for part in parts if part)
                owner = parent if module is child else child
                experts = int(next(iter(projections(module).values())).num_experts)
                sites.append(ExpertSite(owner, str(name), path, module, _layer_of(path), experts))
    return sites


def projections(module: nn.Module) -> dict[str, Any]:
    """The switch linears of a SwitchGLU or SwitchMLP by attribute name."""
    return {
        name: child
        for name, child in module.items()
        if isinstance(child, SwitchLinear | QuantizedSwitchLinear)
    }


def expert_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Parameters with a leading expert axis: ``up_proj.scales`` -> array ``[experts, ...]``."""
    return {
        f"{projection}.{name}": array
        for projection, linear in projections(module).items()
        for name, array in linear.items()
        if isinstance(array, mx.array)
    }


def other_parameters(module: nn.Module) -> list[mx.array]:
    """Parameters of a switch module without an expert axis: they stay in memory."""
    experts = {id(array) for array in expert_parameters(module).values()}
    return [array for _, array in tree_flatten(module.parameters()) if id(array) not in experts]


def install_parameters(module: nn.Module, arrays: dict[str, mx.array]) -> None:
    """Put slot pools ``[slots, ...]`` in the place of the stacked parameters."""
    for name, array in arrays.items():
        projection, parameter = name.split(".")
        setattr(getattr(module, projection), parameter, array)


class _Probe:
    """Stands in for a switch module in a forward pass that is never evaluated."""

    def __init__(self, site: ExpertSite, uses: list[SiteUse]) -> None:
        self._site = site
        self._uses = uses

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._uses.append(SiteUse(self._site, indices.shape[-1]))
        last = list(projections(self._site.module).values())[-1]
        return mx.zeros((*indices.shape, last.output_dims), x.dtype)


def probe_sites(
    model: nn.Module, sites: Sequence[ExpertSite], cache: Sequence[Any], *, tokens: int = 1
) -> tuple[list[SiteUse], int]:
    """Order and top_k of the sites, from building (not computing) a forward pass.

    Sites that the pass never reaches (a draft head, say) are left out. Also returns the width of
    the logits.

    Args:
        model: the lazy model.
        sites: its expert modules.
        cache: prompt cache of the model; holds the (unevaluated) tokens afterwards.
        tokens: length of the pass.
    """
    uses: list[SiteUse] = []
    for site in sites:
        site.put(_Probe(site, uses))
    try:
        logits = model(mx.zeros((1, tokens), mx.int32), cache=cache)
    finally:
        for site in sites:
            site.put(site.module)
    return list({use.site.path: use for use in uses}.values()), int(logits.shape[-1])


def _layer_of(path: str) -> int:
    numbers = re.findall(r"\.(\d+)(?=\.|$)", path)
    return int(numbers[0]) if numbers else 0
