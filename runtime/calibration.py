"""How likely a predicted expert is to be routed, learnt while decoding. Pure."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

SURE = 0.995
"""No mean is believed beyond this, nor below the opposite: log odds stay finite."""

PAIR_BYTES = 4
"""Memory of a weight, for the plan: one for each pair of experts of neighbouring layers."""

SAVED_STEP = 1 / 32
"""Weights are saved as bytes in units of this; it changes a sum of eight by .03 (deviation)."""


class Calibration:
    """Probability that a candidate is routed: by its rank, and by what was routed before it.

    A logistic model. The log odds of a candidate are those of its rank, plus one weight for each
    expert that was routed at the layer which predicts: the residual stream that is ranked there
    does not hold yet what these experts add to it, and the weights learn what that does to the
    candidate.

    Ranks are counted apart for candidates that were missing when they were predicted and for the
    others: where most calls hit, the likely experts are resident, and a missing candidate of the
    same rank is routed far less often. The weights learn from both.

    Groups are the ordinals of the streamed layers. The weights of a pair of layers take 4 bytes for
    each pair of their experts: 3 MB for 48 layers of 128, 50 MB for 48 layers of 512.

    Args:
        layers: transformer layer of each group.
        experts: number of experts of each group.
        top_k: routing width of each group.
    """

    def __init__(self, layers: Sequence[int], experts: Sequence[int], top_k: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._experts = tuple(experts)
        self._missing = _Ranks(top_k)
        self._present = _Ranks(top_k)
        self._pairs: dict[tuple[int, int], _Pairs] = {}

    def probabilities(
        self,
        group: int,
        distance: int,
        ranked: Sequence[int],
        missing: Sequence[bool],
        routed: Sequence[int] = (),
    ) -> list[float]:
        """Probability of each candidate; of those that are resident, the mean of their rank.

        Args:
            group: the layer that is predicted.
            distance: from how far.
            ranked: expert ids, best first.
            missing: whether the candidate is absent.
            routed: experts routed at the layer that predicts, where that is known.
        """
        odds = self._missing.odds(group, distance, len(ranked))
        present = self._present.means(group, distance, len(ranked))
        pairs = self._pairs.get((group, distance)) if routed else None
        # Lists and memoryviews: on a few numbers, behind a sync, numpy is ten times slower.
        rows = [] if pairs is None else [pairs.rows[expert] for expert in routed]
        chances = []
        for rank, expert in enumerate(ranked):
            if missing[rank]:
                total = odds[rank]
                for row in rows:
                    total += row[expert]
                chances.append(1.0 / (1.0 + math.exp(-total)))
            else:
                chances.append(present[rank])
        return chances

    def learn(
        self,
        group: int,
        distance: int,
        ranked: npt.ArrayLike,
        missing: npt.ArrayLike,
        routed: npt.ArrayLike,
        before: npt.ArrayLike | None = None,
    ) -> Bools:
        """Learn from which of the candidates were routed.

        Args:
            group: the layer that was predicted.
            distance: from how far.
            ranked: ``[calls, candidates]`` expert ids, best first; the calls in order.
            missing: ``[calls, candidates]``: whether the candidate was absent then.
            routed: ``[calls, top_k]`` expert ids.
            before: ``[calls, width]`` expert ids that were routed at the layer that predicted, -1
                for none; None where they were not known.

        Returns:
            ``[calls, candidates]``: whether a candidate was routed.
        """
        candidates, chosen = np.asarray(ranked), np.asarray(routed)
        absent = np.asarray(missing, np.bool_)
        hits: Bools = (candidates[:, :, None] == chosen[:, None, :]).any(axis=2)
        if before is not None:
            odds = np.where(
                absent,
                self._missing.odds(group, distance, hits.shape[1])[: hits.shape[1]],
                self._present.odds(group, distance, hits.shape[1])[: hits.shape[1]],
            )
            self._pairs_of(group, distance).learn(np.asarray(before), candidates, odds, hits)
        self._missing.learn(group, distance, hits, absent)
        self._present.learn(group, distance, hits, ~absent)
        return hits

    def _pairs_of(self, group: int, distance: int) -> _Pairs:
        pairs = self._pairs.get((group, distance))
        if pairs is None:
            pairs = _Pairs(self._experts[group - distance], self._experts[group])
            self._pairs[group, distance] = pairs
        return pairs

    # -- kept between runs --------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What was learnt: the means of missing candidates by "group:distance", as ever, those of
        the others under "present", and weights under "pairs" by "layer:distance"."""
        pairs = {
            f"{self._layers[group]}:{distance}": found.to_text()
            for (group, distance), found in self._pairs.items()
        }
        return {**self._missing.to_json(), "present": self._present.to_json(), "pairs": pairs}

    def load_json(self, table: Mapping[str, Any]) -> None:
        """Take over what was saved; what is of other layers, or not there, is ignored.

        Raises:
            TypeError, ValueError, AttributeError: the table is not one of ours.
        """
        self._missing.load_json(table)
        self._present.load_json(table.get("present", {}))
        for name, text in table.get("pairs", {}).items():
            layer, _, distance = name.partition(":")
            if not distance.isdecimal() or not layer.isdecimal():
                continue
            if int(layer) not in self._layers:
                continue
            group, reach = self._layers.index(int(layer)), int(distance)
            if 0 < reach <= group:
                self._pairs_of(group, reach).load_text(text)


class _Ranks:
    """Share of the candidates of each rank that are routed, by layer and distance.

    A layer sees few missing candidates, so its own average is drawn towards that of all layers
    until it has seen enough of them. Starts from what several models showed for all candidates (one
    layer ahead .96 .93 .86 ..., less for each further layer) and forgets it soon.
    """

    RATE = 0.05
    POOL_RATE = 0.01
    DRAW = 8.0
    """Candidates of its own that weigh as much as the average of all layers."""

    def __init__(self, top_k: Sequence[int]) -> None:
        self._top_k = tuple(top_k)
        self._means: dict[tuple[int, int], list[float]] = {}
        self._odds: dict[tuple[int, int], list[float]] = {}
        self._own: dict[tuple[int, int], _Average] = {}
        self._pool: dict[int, _Average] = {}

    def means(self, group: int, distance: int, count: int) -> list[float]:
        """Of ranks 0 to ``count`` - 1, and perhaps more; the list is the table itself."""
        row = self._means.get((group, distance))
        if row is None:
            row = self._means[group, distance] = []
        if len(row) < count:
            decay = 0.93**distance
            ranks = range(len(row), count)
            row.extend(0.95 * decay / (1 + (rank / self._top_k[group]) ** 3 * 3) for rank in ranks)
            self._odds[group, distance] = _log_odds(row)
        return row

    def odds(self, group: int, distance: int, count: int) -> list[float]:
        """The same as log odds."""
        odds = self._odds.get((group, distance))
        if odds is None or len(odds) < count:
            self.means(group, distance, count)
            odds = self._odds[group, distance]
        return odds

    def learn(self, group: int, distance: int, hits: Bools, counted: Bools) -> None:
        """Add the counted candidates of ``[calls, ranks]``."""
        count = hits.shape[1]
        row = self.means(group, distance, count)
        pool = self._pool.get(distance)
        if pool is None or len(pool.means) < count:
            pool = self._pool[distance] = _Average(np.array(row))
        own = self._own.get((group, distance))
        if own is None or len(own.means) < count:
            own = self._own[group, distance] = _Average(np.array(row))
        for average, rate in ((pool, self.POOL_RATE), (own, self.RATE)):
            average.add(hits, counted, rate)
        weight = own.seen[:count] / (own.seen[:count] + self.DRAW)
        blend = weight * own.means[:count] + (1 - weight) * pool.means[:count]
        row[:count] = blend.tolist()
        self._odds[group, distance] = _log_odds(row)

    def to_json(self) -> dict[str, list[float]]:
        """The means with string keys."""
        return {f"{g}:{d}": [round(p, 4) for p in row] for (g, d), row in self._means.items()}

    def load_json(self, table: Mapping[str, Any]) -> None:
        """Take over saved means; other entries are ignored."""
        for name, row in table.items():
            group, _, distance = name.partition(":")
            if group.isdecimal() and distance.isdecimal() and int(group) < len(self._top_k):
                key = int(group), int(distance)
                self._means[key] = [min(max(float(p), 0.0), 1.0) for p in row]
                self._odds[key] = _log_odds(self._means[key])
                self._own[key] = _Average(np.array(self._means[key]), seen=self.DRAW)


class _Average:
    """Means by rank: plain ones at first, averages over the recent past later.

    Attributes:
        means: by rank.
        seen: candidates that they come from.
    """

    FIRST = 2.0
    """Candidates that what it starts from weighs as much as."""

    def __init__(self, means: Floats, seen: float = 0.0) -> None:
        self.means = means
        self.seen = np.full(len(means), seen)

    def add(self, hits: Bools, counted: Bools, rate: float) -> None:
        """Add the counted ones of ``[calls, ranks]``."""
        ranks = hits.shape[1]
        more = counted.sum(axis=0)
        share = (hits & counted).sum(axis=0) / np.maximum(more, 1)
        step = np.maximum(1 - (1 - rate) ** more, more / (self.FIRST + self.seen[:ranks] + more))
        self.means[:ranks] += step * (share - self.means[:ranks])
        self.seen[:ranks] += more


class _Pairs:
    """Weights of the pairs (expert routed at one layer, candidate at a later one).

    Args:
        sources: experts of the layer that predicts.
        experts: experts of the layer that is predicted.

    Attributes:
        rows: weights of all candidates, by source; views of the same memory.
    """

    STEP = 0.9
    """Part of an error that the weights of a candidate take on, all together. From .4 to .9 as
    good as any on the demo model; recorded routing of short answers would have liked more."""

    def __init__(self, sources: int, experts: int) -> None:
        # The last row is that of -1, of no expert: it stays zero.
        self._weights = np.zeros((sources + 1, experts), np.float32)
        self.rows = [row.data for row in self._weights]

    def learn(
        self, before: npt.NDArray[Any], ranked: npt.NDArray[Any], odds: Floats, hits: Bools
    ) -> None:
        """One step down the gradient of the log loss; shapes as in ``Calibration.learn``.

        Args:
            before: sources of each call.
            ranked: candidates.
            odds: log odds ``[calls, candidates]`` without the weights.
            hits: whether they were routed.
        """
        at = before[:, :, None], ranked[:, None, :]
        found = 1.0 / (1.0 + np.exp(-(odds + self._weights[at].sum(axis=1))))
        step = (self.STEP / before.shape[1] * (hits - found)).astype(np.float32)
        np.add.at(self._weights, at, step[:, None, :])
        self._weights[-1] = 0.0

    def to_text(self) -> str:
        """A byte per weight, compressed."""
        steps = np.rint(self._weights[:-1] / SAVED_STEP).clip(-127, 127).astype(np.int8)
        return base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode("ascii")

    def load_text(self, text: str) -> None:
        """Take over what ``to_text`` has made of as many experts; else nothing changes.

        Raises:
            TypeError, ValueError: it is not such a text.
        """
        size = self._weights[:-1].size
        try:
            steps = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
        except zlib.error as error:
            raise ValueError(f"damaged weights: {error}") from error
        if len(steps) == size:
            shape = self._weights[:-1].shape
            self._weights[:-1] = np.frombuffer(steps, np.int8).reshape(shape) * SAVED_STEP


def _log_odds(means: Sequence[float]) -> list[float]:
    inside = (min(max(mean, 1 - SURE), SURE) for mean in means)
    return [math.log(mean / (1 - mean)) for mean in inside]
