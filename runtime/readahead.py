"""Reading ahead, seen from the compute thread: what to predict, to ask for, and to learn."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..io.asks import Guess
from ..io.loop import IoLoop
from ..models.lookahead import Predictor
from .calibration import Calibration
from .prefetch import Governor, PrefetchConfig, Trial, parse_layers
from .residency import NONE
from .store import Demanded, ExpertStore
from .tracing import Tracer

HOST_SECONDS = 100e-6
"""Interpreter time of one read, on the loop and in a lane (measured on two slow cores: the compute
thread cannot build graphs meanwhile)."""

WASTE = 0.5
"""Share of a record's reading time that a wrong guess costs although it was read in idle time: a
demand may find it running, and the expert that lost its slot may be wanted (chosen by measurement:
thresholds of 0.3 to 0.4 were best, or as good, with and without locality)."""

LESSON_TOKENS = 16
"""Tokens between two updates of the calibration, which learns slowly: learning from many calls at
once takes a tenth of the time (at first it learns more often, when it knows little)."""

EMBEDDING = 99
"""Stands for the distance of a prediction that was made from the token's embedding."""


_Prediction = tuple[int, list[int], list[bool], Sequence[int]]
"""Distance, candidates, which of them were missing, and what was routed at the layer that predicts
(nothing where that was not known)."""


@dataclass(slots=True)
class Recall:
    """Predictions of one distance against what was routed; counts of experts."""

    routed: int = 0
    found_at_top_k: int = 0
    found: int = 0


@dataclass(slots=True)
class Totals:
    """What reading ahead has done so far. Written by the compute thread only."""

    predictions: int = 0
    recall: dict[int, Recall] = field(default_factory=dict)

    def shares(self) -> dict[int, tuple[float, float]]:
        """Distance -> (recall at top_k, recall of all candidates)."""
        return {
            distance: (recall.found_at_top_k / recall.routed, recall.found / recall.routed)
            for distance, recall in list(self.recall.items())
            if recall.routed
        }


class ReadAhead:
    """Predicts and asks, layer by layer, on the compute thread.

    Args:
        predictor: ranks the experts of a layer; taps installed, verified.
        config: what may be done.
        store: owner of the experts.
        loop: performs the reads.
        layers: transformer layer of each group.
        top_k: routing width of each group.
        tracer: gets an event per prediction.
    """

    def __init__(
        self,
        predictor: Predictor,
        config: PrefetchConfig,
        store: ExpertStore,
        loop: IoLoop,
        *,
        layers: Sequence[int],
        top_k: Sequence[int],
        tracer: Tracer,
    ) -> None:
        self._predictor = predictor
        self._config = config
        self._store = store
        self._groups = store.groups
        self._loop = loop
        self._tracer = tracer
        self._layers = tuple(layers)
        self._top_k = tuple(top_k)
        self._widths = [
            min(math.ceil(k * config.width), books.record.experts)
            for k, books in zip(top_k, store.groups, strict=True)
        ]
        count = len(layers)
        self._allowed = [False] * count
        self._targets: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        experts = [books.record.experts for books in store.groups]
        self.calibration = Calibration(layers, experts, top_k)
        self.governor = Governor(count)
        self.trial = Trial()
        self._tried = config.admission == "idle" and not config.deterministic and config.reads
        self._began = 0.0
        self._waited = 0.0
        self.totals = Totals()
        self._predicted: list[list[_Prediction]] = [[] for _ in range(count)]
        self._lessons: dict[tuple[int, int], list[tuple[_Prediction, Sequence[int]]]] = {}
        self._lesson_at = 1
        self._tokens = 0
        self._least = [0.0] * count
        self._delayed = 0
        self._forward = 0
        self._forward_left = math.inf
        self._waiting: list[Future[None]] = []

    def start(self) -> None:
        """The predictor has been verified: fix what is predicted where."""
        allowed = parse_layers(self._config.layers)
        self._allowed = [
            can and (allowed is None or layer in allowed)
            for can, layer in zip(self._predictor.predictable, self._layers, strict=True)
        ]
        count = len(self._layers)
        self._targets = [
            [
                (distance, group + distance)
                for distance in self._config.distances
                if distance and group + distance < count and self._allowed[group + distance]
            ]
            for group in range(count)
        ]

    # -- before the sync ----------------------------------------------------------------------

    def begin_forward(self, *, single: bool) -> None:
        """A new forward, perhaps of a single token: nothing is predicted yet."""
        self._began = time.perf_counter() if single else 0.0
        self._waited = 0.0
        self._predictor.clear()
        self._forward += 1
        for predicted in self._predicted:
            predicted.clear()
        budget = self._config.forward_budget
        self._forward_left = math.inf if budget is None else budget
        self._tokens += single
        if self._tokens >= self._lesson_at:
            self._learn()
            self._lesson_at = self._tokens + min(self._tokens, LESSON_TOKENS)
        priced = self._config.admission == "idle" and not self._config.deterministic
        if not self._resting and priced:  # by the drive as it was measured
            bandwidth = self._loop.bandwidth
            self._least = [self._worth(books.stored_bytes, bandwidth) for books in self._groups]

    def waited(self, seconds: float) -> None:
        """The forward has waited for experts."""
        self._waited += seconds

    def end_forward(self) -> None:
        """The forward has been evaluated."""
        if self._began and self._tried:
            self.trial.token(time.perf_counter() - self._began, self._waited)
        self._began = 0.0

    def end_request(self) -> None:
        """Nothing more will be predicted for the request."""
        self.wait()
        self._learn()

    def build(self, group: int) -> list[mx.array]:
        """Ranks of the layers ahead, unevaluated: they belong into the layer's own sync."""
        # Both are taken in any case: taps would hold them until the end of the forward.
        residual = self._predictor.residual(group)
        self._predictor.input_residual(group)
        if self._resting or residual is None or residual.shape[0] * residual.shape[1] != 1:
            return []
        return self._rank([target for _, target in self._targets[group]], residual)

    def _rank(self, targets: Sequence[int], residual: mx.array) -> list[mx.array]:
        widths = [self._widths[target] for target in targets]
        return self._predictor.rank_ahead(targets, residual, widths)

    def build_at_input(
        self, group: int, x: mx.array
    ) -> tuple[list[tuple[int, int]], list[mx.array]]:
        """Distance 0: ranks of a layer from its own input, before its attention."""
        if self._resting or not self._allowed[group] or x.shape[0] * x.shape[1] != 1:
            return [], []
        return [(0, group)], self._rank([group], x)

    def build_from_embedding(self, token: int) -> tuple[list[tuple[int, int]], list[mx.array]]:
        """The same for the first layers of a token, of which no layer has been computed."""
        if self._resting or not self._config.embedding:
            return [], []
        reach = max(self._config.distances, default=0)
        targets = [(EMBEDDING, g) for g in range(min(reach, len(self._layers))) if self._allowed[g]]
        if not targets:
            return [], []
        residual = self._predictor.embedding_residual(mx.array([[token]], mx.uint32))
        if residual is None:
            return [], []
        return targets, self._rank([target for _, target in targets], residual)

    def wait(self) -> None:
        """Deterministic mode: the guesses made at the layer before are there, or have failed."""
        for future in self._waiting:
            future.exception()
        self._waiting.clear()

    # -- behind the sync ----------------------------------------------------------------------

    def note(self, group: int, experts: Sequence[int]) -> Sequence[Container[int]]:
        """The layer's routing is known; returns what had been predicted for it."""
        predictions = self._predicted[group]
        if not predictions:
            return ()
        for prediction in predictions:
            lessons = self._lessons.setdefault((group, prediction[0]), [])
            lessons.append((prediction, experts))
        predicted = [ranked for _, ranked, _, _ in predictions]
        predictions.clear()
        return predicted

    def _learn(self) -> None:
        """Learn from the calls since the last time."""
        for (group, distance), lessons in self._lessons.items():
            top_k = self._top_k[group]
            routed = [_padded(experts, top_k) for _, experts in lessons]
            ranked = [ranked for (_, ranked, _, _), _ in lessons]
            missing = [missing for (_, _, missing, _), _ in lessons]
            before = None
            if lessons[0][0][3]:  # as for all lessons of this distance
                width = self._top_k[group - distance]
                before = [_padded(before, width) for (_, _, _, before), _ in lessons]
            hits = self.calibration.learn(group, distance, ranked, missing, routed, before)
            recall = self.totals.recall.setdefault(distance, Recall())
            recall.routed += sum(len(experts) for _, experts in lessons)
            recall.found_at_top_k += int(hits[:, :top_k].sum())
            recall.found += int(hits.sum())
        self._lessons.clear()

    def guesses(
        self,
        targets: Sequence[tuple[int, int]],
        arrays: Sequence[mx.array],
        *,
        position: int,
        first: int,
        routed: Sequence[int] = (),
    ) -> list[Guess]:
        """What to ask for, from evaluated ranks.

        Args:
            targets: (distance, group) of each array.
            arrays: ranks; their rows are those of the targets.
            position: absolute index of the layer call of ``first``.
            first: the group whose sync this is.
            routed: its experts, where they are known.
        """
        config, guesses = self._config, []
        lists: list[Any] = [array.tolist() for array in arrays]
        rows: list[list[int]] = [row for rows in lists for row in rows]
        for (distance, target), ranked in zip(targets, rows, strict=True):
            self.totals.predictions += 1
            slot = self._groups[target].residency.slot
            # Read without the lock: what has changed is noticed when the guess is asked for.
            missing = [slot(expert) == NONE for expert in ranked]
            self._predicted[target].append((distance, ranked, missing, routed))
            chances = self.calibration.probabilities(target, distance, ranked, missing, routed)
            if self._tracer.enabled:
                self._tracer.predict(target, self._forward, distance, ranked, chances)
            if not config.reads or not self._wants(target):
                continue
            at = position + target - first
            least = max(config.min_score, self._least[target])
            keep = not config.missing_only  # what is there is touched by the store
            chosen = [
                Guess((target, expert), at, chance if chance > 1e-6 else 1e-6)
                for expert, chance, absent in zip(ranked, chances, missing, strict=True)
                if chance >= least and (keep or absent)
            ]
            if config.order == "value":  # budgets are for the likeliest
                chosen.sort(key=_by_probability)
            if config.layer_budget is not None:
                chosen = chosen[: config.layer_budget]
            if len(chosen) > self._forward_left:
                chosen = chosen[: int(self._forward_left)]
            self._forward_left -= len(chosen)
            guesses += chosen
        if config.order == "value":
            price = config.lookahead_price
            guesses.sort(key=lambda guess: price * guess.position - math.log(guess.probability))
        else:
            # One probability and one position for all: the queue then keeps the order of arrival.
            guesses = [Guess(guess.key, guess.position, 1.0) for guess in guesses]
        return guesses

    def _worth(self, nbytes: int, bandwidth: float) -> float:
        """Probability from which a guess is worth what it costs when it is wrong.

        It saves the wait for a record when it is right: with ``saved = record / bandwidth``,
        p * saved > (1 - p) * (HOST_SECONDS + WASTE * saved).
        """
        saved = nbytes / bandwidth if bandwidth else 1e-3
        wrong = HOST_SECONDS + WASTE * saved
        return wrong / (wrong + saved)

    @property
    def _resting(self) -> bool:
        """Whether the trial has found tokens without guesses faster: nothing is predicted then."""
        return self._tried and not self.trial.on

    def _wants(self, target: int) -> bool:
        if self._config.admission == "always" or self._config.deterministic:
            return True
        return self.governor.wants(target)

    def targets(self, group: int) -> list[tuple[int, int]]:
        """(distance, group) of what ``build`` predicts at a layer."""
        return self._targets[group]

    def grant(self, group: int) -> float:
        """Bytes of guesses that may be begun behind this layer's demands."""
        if self._config.admission == "always":
            return math.inf
        return self.governor.grant(group, self._loop.bandwidth)

    def ahead(self, guesses: Sequence[Guess], *, owner: int) -> None:
        """Deterministic mode: begin the guesses now."""
        budget = self._config.layer_budget
        limit = max(self._top_k) // 2 if budget is None else budget
        self._waiting += self._store.ahead(guesses[:limit], owner=owner)

    def settle(self, group: int, got: Demanded) -> None:
        """Tell the governor what the layer call has shown."""
        governor, groups = self.governor, self._groups
        for _ in got.paid:
            governor.judge(group, used=True, nbytes=groups[group].stored_bytes)
        for wasted in self._store.take_wasted():
            governor.judge(wasted, used=False, nbytes=groups[wasted].stored_bytes)
        delayed = self._loop.statistics().delayed_bytes if got.futures else self._delayed
        if delayed != self._delayed:
            governor.delayed(delayed - self._delayed)
            self._delayed = delayed


def _by_probability(guess: Guess) -> float:
    return -guess.probability


def _padded(experts: Sequence[int], width: int) -> list[int]:
    """A router that asks for an expert twice leaves a shorter row: no expert has id -1."""
    return [*experts, *[-1] * (width - len(experts))]
