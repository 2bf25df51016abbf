"""Reading ahead in prompts: the next layer's first experts, while the drive has nothing else to do.

A prompt chunk asks a layer for nearly all of its experts, and their number in the predictions of
many tokens says which of them for certain. They are read into memory beside the pools: the next
layer's own experts are wanted as well, so none of them may lose its slot for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..io.asks import Guess
from ..models.lookahead import Predictor
from .prefetch import Trial, parse_layers
from .residency import NONE
from .sizes import LayerSize
from .staging import place_bytes
from .store import ExpertStore
from .waves import wave_size

SAMPLE = 256
"""Tokens of a chunk that are predicted at most (arbitrary: some thousand votes)."""

LIKELY, CERTAIN = 4, 8
"""Votes for an expert from which on it is read ahead, and first of all (measured with the demo
model, 40 to 900 tokens: up to six in a hundred are not wanted from 4 votes on, one from 8)."""


class PromptAhead:
    """Says what to read for the layer behind the one that is computed. Compute thread only.

    Args:
        predictor: ranks the experts of a layer; taps installed.
        store: owner of the experts.
        layers: transformer layer of each group.
        top_k: routing width of each group.
        allowed: transformer layers that may be predicted, as ``PrefetchConfig.layers``.
    """

    def __init__(
        self,
        predictor: Predictor,
        store: ExpertStore,
        *,
        layers: Sequence[int],
        top_k: Sequence[int],
        allowed: str | None,
    ) -> None:
        chosen = parse_layers(allowed)
        self._predictor = predictor
        self._groups = store.groups
        self._top_k = tuple(top_k)
        self._allowed = [chosen is None or layer in chosen for layer in layers]
        self._guessed: list[list[int]] = [[] for _ in layers]
        self._resting = False
        self._spent = (0.0, 0.0)  # seconds, and those waited, of the last forward of a prompt

    def begin_forward(self) -> None:
        """Decide by the last forward of a prompt, as ``Trial`` does for tokens: where it hardly
        waited for experts, computing is the limit, and predicting would only add to that."""
        (seconds, waited), self._spent = self._spent, (0.0, 0.0)
        if seconds:
            little = Trial.LITTLE * (1.0 if self._resting else 0.5)
            self._resting = waited < little * seconds

    def spent(self, seconds: float, waited: float) -> None:
        """What the present forward of a prompt has taken up to here."""
        self._spent = seconds, waited

    def build(self, group: int) -> list[mx.array]:
        """Votes for the layer behind this one, unevaluated: they belong into its own sync.

        Returns:
            One array ``[tokens, top_k]`` of expert ids; nothing where there is no such layer, or
            it cannot be predicted, or the call is not of one prompt.
        """
        # Both are taken in any case: taps would hold them until the end of the forward.
        residual, target = self._predictor.residual(group), group + 1
        self._predictor.input_residual(group)
        if self._resting or target == len(self._groups):
            return []
        if residual is None or residual.shape[0] != 1:
            return []
        if not (self._allowed[target] and self._predictor.predictable[target]):
            return []
        step = -(-residual.shape[1] // SAMPLE)
        return [self._predictor.rank(target, residual[:, ::step], self._top_k[target])]

    def guesses(self, group: int, votes: Sequence[mx.array], position: int) -> list[Guess]:
        """The experts that the layer behind this one will be asked for and lacks.

        Args:
            group: this layer.
            votes: of ``build``, evaluated.
            position: absolute index of this layer call.
        """
        target = group + 1
        if target == len(self._groups):
            return []
        guessed = self._guessed[target] = []
        if votes:
            books = self._groups[target]
            counts = np.bincount(np.asarray(votes[0]).ravel(), minlength=books.record.experts)
            slot = books.residency.slot
            # Read without the lock: only a call of that layer could change it.
            guessed += [expert for expert in chosen(counts) if slot(expert) == NONE]
        return [Guess((target, expert), position + 1, 1.0, sure=True) for expert in guessed]

    def guessed(self, group: int) -> list[int]:
        """What the layer before has guessed for this one in the present forward."""
        return self._guessed[group]


def chosen(counts: npt.NDArray[np.integer]) -> list[int]:
    """The experts to read ahead: the certain ones, and behind them the likely ones.

    Of the certain ones the coldest come first, as in the waves, which leave the hottest in the
    pool; of the others those with more votes.

    Args:
        counts: votes of each expert.
    """
    order: list[int] = np.argsort(counts, kind="stable").tolist()
    certain = [expert for expert in order if counts[expert] >= CERTAIN]
    return certain + [expert for expert in order[::-1] if LIKELY <= counts[expert] < CERTAIN]


WAVES = 2
"""What is read ahead, in waves: while a layer's last wave is computed, the next one gets to its
router and computes the experts that are there (measured: one wave fills less than half of that)."""


def staging_for(layers: Sequence[LayerSize], slots: Sequence[int], spare: int | None) -> int:
    """Bytes beside the slots for the first waves of a layer.

    Args:
        layers: all MoE layers.
        slots: of each; those that hold all their experts need nothing.
        spare: what it may take at most; None for as much as it likes.
    """
    streamed = [(layer, n) for layer, n in zip(layers, slots, strict=True) if n < layer.experts]
    if not streamed:
        return 0
    places = WAVES * max(wave_size(n, layer.record_bytes) for layer, n in streamed)
    size = max(place_bytes(layer.slot_bytes) for layer, _ in streamed)
    if spare is not None:
        places = min(places, max(spare, 0) // size)
    return places * size
