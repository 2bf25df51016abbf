"""Predicts which experts later MoE layers will be asked for.

The guess for a layer is what its own norm and router make of the residual stream of an earlier
layer: after that layer's attention, before the output of its experts is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .experts import SiteUse
from .folded import Foldable, FoldedGates, foldable
from .probing import Probed, Target, probe
from .routers import Rule, find_gates, find_rules, own_choice
from .taps import Held, Place, Tap

__all__ = ["Predictor", "Tap", "build_predictor"]

SAMPLES = 64
AGREEMENT = 0.98
"""Share of its own choices that a block's rule must find. Not 1: experts may tie."""

Ranker = Callable[[mx.array, int], mx.array]
OnInput = Callable[[int, mx.array], None]
"""Called with a group and the input of its layer while the forward pass is being built."""


class Predictor:
    """Ranks the experts of MoE layers from the residual streams of others.

    Groups are the ordinals of the MoE layers in the order of the forward pass. Only on the compute
    thread. The order of calls: ``build_predictor``, ``install``, ``verify`` once the trunk is in
    memory, then the others.

    Attributes:
        predictable: per group, whether ``rank`` works for it.
        ranked: per group, whether its ranks go beyond the experts chosen.
        rules: per group, how it is predicted; "" where it is not.
        warnings: what cannot be predicted and why.
    """

    def __init__(self, probed: Probed, layers: Sequence[int]) -> None:
        targets = self._targets = probed.targets
        self._problems = list(probed.problems)
        self._layers = layers
        self._embedding = _Embedding.found(probed)
        self._rankers: list[Ranker | None] = [None] * len(targets)
        self._residuals = [Held() for _ in targets]
        self._inputs = [Held() for _ in targets]
        self._taps: list[tuple[Place, Tap]] = []
        self.predictable = tuple(target is not None for target in targets)
        self.ranked = self.predictable
        self.rules = ("",) * len(targets)
        self.folded = FoldedGates([])

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each reason, with the numbers of the layers."""
        reasons: dict[str, list[int]] = {}
        for layer, problem in zip(self._layers, self._problems, strict=True):
            if problem:
                reasons.setdefault(problem, []).append(layer)
        return tuple(
            f"the experts of {_name_layers(layers)} cannot be predicted: {reason}"
            for reason, layers in reasons.items()
        )

    # -- taps ---------------------------------------------------------------------------------

    def install(self, on_input: OnInput | None = None) -> None:
        """Put the taps in.

        Args:
            on_input: called as soon as the input of a MoE layer is known, before its attention is
                built; ``input_residual`` comes too late to read anything during the attention.
        """
        for group, target in enumerate(self._targets):
            if target is None:
                continue
            self._residuals[group] = self._put(target.tapped, None)
            if target.entry is not None:
                self._inputs[group] = self._put(target.entry, _bind(on_input, group))

    def remove(self) -> None:
        """Take the taps out again."""
        while self._taps:
            place, tap = self._taps.pop()
            place.put(tap["inner"])

    def clear(self) -> None:
        """Forget the arrays of this forward pass that nobody has taken."""
        for held in (*self._residuals, *self._inputs):
            held.array = None

    def residual(self, group: int) -> mx.array | None:
        """Input ``[batch, tokens, hidden]`` of the group's pre-MoE norm in this forward, once."""
        return self._residuals[group].take()

    def input_residual(self, group: int) -> mx.array | None:
        """Input ``[batch, tokens, hidden]`` of the group's layer, before its attention, once."""
        return self._inputs[group].take()

    def embedding_residual(self, token_ids: mx.array) -> mx.array | None:
        """The residual stream ``[..., hidden]`` that tokens start with, if it is known."""
        return None if self._embedding is None else self._embedding(token_ids)

    def _put(self, place: Place, on_input: Callable[[mx.array], None] | None) -> Held:
        tap = Tap(place.get(), on_input)
        place.put(tap)
        self._taps.append((place, tap))
        return tap.held

    # -- prediction ---------------------------------------------------------------------------

    def rank(self, target: int, residual: mx.array, width: int) -> mx.array:
        """The likeliest experts of a group, unevaluated.

        Args:
            target: group to predict; must be predictable.
            residual: ``[batch, tokens, hidden]``, of this or an earlier layer.
            width: how many experts; a group that is not ``ranked`` gives its top_k.

        Returns:
            ``[batch * tokens, width]`` uint32 expert ids, best first; not contiguous in memory.
        """
        ranker = self._rankers[target]
        if ranker is None:
            raise LookupError(f"group {target} cannot be predicted")
        return ranker(residual, width)

    def rank_ahead(
        self, targets: Sequence[int], residual: mx.array, widths: Sequence[int]
    ) -> list[mx.array]:
        """Ranks of several groups for one token: one array if they fold, else one for each.

        Args:
            targets: groups, in ascending order.
            residual: ``[1, 1, hidden]``.
            widths: how many experts of each.

        Returns:
            Arrays of ids whose rows, one behind the other, are those of the targets.
        """
        if self.folded.covers(targets) and len(set(widths)) == 1:
            return [self.folded.rank(targets, residual, widths[0])]
        pairs = zip(targets, widths, strict=True)
        return [self.rank(target, residual, width) for target, width in pairs]

    def verify(self) -> None:
        """Find the rule of each router by comparing with its block. The trunk must be loaded."""
        rules, ranked = [""] * len(self._targets), [False] * len(self._targets)
        foldables: list[Foldable | None] = [None] * len(self._targets)
        for group, target in enumerate(self._targets):
            if target is None:
                continue
            try:
                rule = _find_rule(target, rules)
            except Exception as error:  # whatever a block of an unknown kind may raise
                line = str(error).strip().partition("\n")[0]
                self._problems[group] = f"its block fails when called by itself ({line})"
                continue
            self._rankers[group] = _own_ranker(target) if rule is None else _ranker(target, rule)
            rules[group] = "own choice" if rule is None else rule.label
            ranked[group] = rule is not None
            foldables[group] = foldable(target, rule)
        self.rules = tuple(rules)
        self.ranked = tuple(ranked)
        self.predictable = tuple(ranker is not None for ranker in self._rankers)
        self.folded = FoldedGates(foldables)
        self.folded.fold(self.rank)
        if self._embedding is not None and not self._embedding.find_scale():
            self._embedding = None


def build_predictor(model: nn.Module, uses: Sequence[SiteUse], cache: Sequence[Any]) -> Predictor:
    """Find out how each MoE layer can be predicted; evaluates nothing.

    Args:
        model: the model with its own switch modules, its parameters of their final types.
        uses: its MoE layers in the order of the forward pass.
        cache: a prompt cache of the model, used up by this.
    """
    return Predictor(probe(model, uses, cache), [use.site.layer for use in uses])


# -- rules ------------------------------------------------------------------------------------


def _find_rule(target: Target, known: Sequence[str]) -> Rule | None:
    """The rule that agrees with the block, or None when only the block itself knows."""
    key = mx.random.key(0)
    residual = mx.random.normal((1, SAMPLES, target.hidden), key=key).astype(target.dtype)
    x = target.routed(residual)
    site, top_k = target.use.site, target.use.top_k
    own: Any = own_choice(site, target.block, x)[0].reshape(SAMPLES, top_k).tolist()
    gates = find_gates(target.block, site, target.hidden)
    candidates = [rule for gate in gates for rule in find_rules(gate, target.dtype)]
    # Layers are mostly alike: begin with what others turned out to be.
    candidates.sort(key=lambda rule: rule.label not in known)
    best, most = None, 0.0
    for rule in candidates:
        order: Any = _ranker(target, rule)(residual, top_k).tolist()
        agreement = _agreement(own, order, spare=rule.gate.outputs > site.experts)
        if agreement > most:
            best, most = rule, agreement
        if agreement > 0.9999:
            break
    return best if most >= AGREEMENT else None


def _agreement(own: list[list[int]], order: list[list[int]], *, spare: bool) -> float:
    """Share of the chosen experts that the order has.

    With ``spare`` outputs, which stand for no expert, the block asks for expert 0 in their place.
    """
    found = total = 0
    for chosen, ranks in zip(own, order, strict=True):
        wanted = {expert for expert in chosen if expert or not spare}
        found += len(wanted & set(ranks))
        total += len(wanted)
    return found / max(total, 1)


def _ranker(target: Target, rule: Rule) -> Ranker:
    norm, scores = target.norm, rule.scores
    experts = target.use.site.experts
    spare = rule.gate.outputs > experts

    def rank(residual: mx.array, width: int) -> mx.array:
        values = scores(residual if norm is None else norm(residual))
        if spare:
            values = values[..., :experts]
        order = mx.argsort(values, axis=-1)
        if order.shape[0] == 1:
            return order[0, :, : -width - 1 : -1]
        return order.flatten(0, -2)[:, : -width - 1 : -1]

    return rank


def _own_ranker(target: Target) -> Ranker:
    """The set that the block chooses: no more, and in no order unless it tells the weights."""
    site, top_k = target.use.site, target.use.top_k

    def rank(residual: mx.array, width: int) -> mx.array:
        indices, weights = own_choice(site, target.block, target.routed(residual))
        if weights is not None:
            order = mx.argsort(-weights, axis=-1)
            indices = mx.take_along_axis(indices, order, axis=-1)
        return indices.reshape(-1, top_k).astype(mx.uint32)

    return rank


def _bind(on_input: OnInput | None, group: int) -> Callable[[mx.array], None] | None:
    return None if on_input is None else lambda x: on_input(group, x)


def _name_layers(layers: Sequence[int]) -> str:
    """``layer 3``, ``layers 1-4, 7``."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("layers " if len(layers) > 1 else "layer ") + ", ".join(names)


# -- embedding --------------------------------------------------------------------------------


class _Embedding:
    """The model's embedding, and the number by which the model multiplies it.

    Args:
        module: gives the embedding of token ids.
        output: what it gave in the probing pass.
        entry: what the first layer got there.
    """

    def __init__(self, module: nn.Module, output: mx.array, entry: mx.array) -> None:
        self._module = module
        self._sample: tuple[mx.array, mx.array] | None = (output, entry)
        self._scale = 1.0

    @classmethod
    def found(cls, probed: Probed) -> _Embedding | None:
        """What the probing pass has seen of it."""
        module, output, entry = probed.embedding, probed.embedded, probed.entered
        if module is None or output is None or entry is None:
            return None
        return cls(module, output, entry)

    def __call__(self, token_ids: mx.array) -> mx.array:
        values: mx.array = self._module(token_ids)
        return values if self._scale == 1.0 else values * self._scale

    def find_scale(self) -> bool:
        """Whether the model only multiplies the embedding. Evaluates the probe's token."""
        if self._sample is None:
            return True
        (output, entry), self._sample = self._sample, None
        if output is entry:
            return True
        before, after = output.astype(mx.float32), entry.astype(mx.float32)
        scale = (before * after).sum() / (before * before).sum()
        error = mx.abs(after - scale * before).max() / mx.abs(after).max()
        try:
            found: Any = mx.stack([scale, error]).tolist()
        except RuntimeError:  # something in between that this device cannot do
            return False
        self._scale = round(found[0], 6)
        return bool(found[1] < 0.02)  # products in 16 bits are rounded
