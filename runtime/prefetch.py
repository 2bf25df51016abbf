"""What may be read ahead, and how much of it: the configuration and the rules of admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .errors import InvalidRequest

Destination = Literal["slots", "staging", "pagecache", "off"]

BACKOFF = 0.5
RECOVERY = 1.1
JUDGED = 64
"""Guesses between two decisions of the governor (arbitrary)."""


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """How experts are read ahead. The defaults need no tuning.

    Attributes:
        distances: layers to look ahead; 0 predicts a layer from its own input before attention.
        width: candidates per layer, as a multiple of its top_k.
        min_score: calibrated probability below which a candidate is left alone.
        layer_budget: most guesses for one layer call; None for no bound.
        forward_budget: most guesses for one token; None for no bound.
        layers: transformer layers that may be predicted, like "0-3,5"; None for all.
        missing_only: leave candidates that are resident alone; False protects them from eviction.
        destination: "slots" reads into the pool; "staging" into memory beside it, from where it is
            copied on demand; "pagecache" only warms the system's page cache; "off" reads nothing.
        staging_bytes: memory of the staging area.
        prompts: while a layer of a prompt is computed, read the first experts of the next one into
            memory beside the slots, two waves of them (see ``runtime/waves.py``).
        predict_only: predict and calibrate, but read nothing: shows what predicting costs.
        profile: measure the time from asking for a guess until it is there, by layer.
        admission: "idle" reads guesses only in the time that the drive would be idle, and less when
            they delay demands or are wasted; "always" whenever no demand waits.
        order: "value" reads by probability and distance, "fifo" as they come.
        lookahead_price: cost of one layer of distance, in nats of log probability.
        embedding: predict the first layers of a token from its embedding, before anything else of
            it is computed; needs a synchronisation of its own.
        hits_first: compute the experts that are there while the missing ones are read.
        deterministic: residency does not depend on timing: guesses get their slots when they are
            made, and are waited for at the next layer. For debugging and tests.
    """

    distances: tuple[int, ...] = (1,)
    width: float = 1.0
    min_score: float = 0.0
    layer_budget: int | None = None
    forward_budget: int | None = None
    layers: str | None = None
    missing_only: bool = True
    destination: Destination = "slots"
    staging_bytes: int = 64 << 20
    prompts: bool = True
    predict_only: bool = False
    profile: bool = False
    admission: Literal["idle", "always"] = "idle"
    order: Literal["value", "fifo"] = "value"
    lookahead_price: float = 0.5
    embedding: bool = False
    hits_first: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        distances = tuple(self.distances)
        object.__setattr__(self, "distances", distances)
        if not all(isinstance(d, int) and not isinstance(d, bool) for d in distances):
            raise InvalidRequest("distances must be whole numbers")
        if any(not 0 <= d <= 16 for d in distances) or len(set(distances)) != len(distances):
            raise InvalidRequest("distances must be different numbers from 0 to 16")
        if not 0.0 < self.width <= 16.0:
            raise InvalidRequest(f"width={self.width} must be above 0 and at most 16")
        if not 0.0 <= self.min_score <= 1.0:
            raise InvalidRequest(f"min_score={self.min_score} must be from 0 to 1")
        for name in ("layer_budget", "forward_budget"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InvalidRequest(f"{name}={value} must not be negative")
        if self.staging_bytes < 0:
            raise InvalidRequest(f"staging_bytes={self.staging_bytes} must not be negative")
        for name, allowed in (
            ("destination", ("slots", "staging", "pagecache", "off")),
            ("admission", ("idle", "always")),
            ("order", ("value", "fifo")),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidRequest(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        if self.deterministic and self.destination in ("staging", "pagecache"):
            raise InvalidRequest(
                f"deterministic guesses go to slots; destination={self.destination!r} does not fit"
            )
        if not 0.0 <= self.lookahead_price < float("inf"):
            raise InvalidRequest(f"lookahead_price={self.lookahead_price} must be finite and >= 0")
        parse_layers(self.layers)

    @property
    def reads(self) -> bool:
        """Whether guesses are read at all."""
        return self.destination != "off" and not self.predict_only

    @property
    def staged_bytes(self) -> int:
        """Memory that guesses take beside the slots."""
        return self.staging_bytes if self.destination == "staging" else 0

    @property
    def predicts(self) -> bool:
        """Whether anything is predicted at all."""
        wanted = bool(self.distances) or self.reads_prompts
        return wanted and (self.destination != "off" or self.predict_only)

    @property
    def reads_prompts(self) -> bool:
        """Whether a layer of a prompt reads for the next; the order of waves depends on timing."""
        return self.prompts and self.reads and not self.deterministic


def parse_layers(text: str | None) -> frozenset[int] | None:
    """The numbers of ``"0-3,5"``; None stays None.

    Raises:
        InvalidRequest: the text is not of this form.
    """
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InvalidRequest(f"layers={text!r} is not a list of layers like '0-3,5'")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


OFF = PrefetchConfig(distances=(), destination="off")


class Calibration:
    """Probability that a candidate which is not resident is routed; averaged online.

    By layer, distance and rank, and only over candidates that were missing when they were
    predicted: where most calls hit, the likely experts are resident, and a missing candidate of the
    same rank is routed far less often than a resident one. Such candidates are few, so a layer's
    own average is drawn towards that of all layers until it has seen enough of them.

    Starts from what several models showed for all candidates (one layer ahead .96 .93 .86 ..., less
    for each further layer) and forgets it soon.
    """

    RATE = 0.05
    POOL_RATE = 0.01
    DRAW = 8.0
    """Candidates of its own that weigh as much as the average of all layers."""

    def __init__(self, top_k: Sequence[int]) -> None:
        self._top_k = tuple(top_k)
        self._table: dict[tuple[int, int], list[float]] = {}
        self._own: dict[tuple[int, int], _Average] = {}
        self._pool: dict[int, _Average] = {}

    def probabilities(self, group: int, distance: int, count: int) -> list[float]:
        """Of the candidates of ranks 0 to ``count`` - 1; the list is the table itself."""
        row = self._table.get((group, distance))
        if row is None:
            row = self._table[group, distance] = []
        if len(row) < count:
            decay = 0.93**distance
            ranks = range(len(row), count)
            row.extend(0.95 * decay / (1 + (rank / self._top_k[group]) ** 3 * 3) for rank in ranks)
        return row

    def learn(
        self,
        group: int,
        distance: int,
        ranked: npt.ArrayLike,
        missing: npt.ArrayLike,
        routed: npt.ArrayLike,
    ) -> npt.NDArray[np.bool_]:
        """Count which of the candidates were routed.

        Args:
            group: the layer that was predicted.
            distance: from how far.
            ranked: ``[calls, candidates]`` expert ids, best first; the calls in order.
            missing: ``[calls, candidates]``: whether the candidate was absent then.
            routed: ``[calls, top_k]`` expert ids.

        Returns:
            ``[calls, candidates]``: whether a candidate was routed.
        """
        candidates, chosen = np.asarray(ranked), np.asarray(routed)
        absent = np.asarray(missing, np.bool_)
        hits: npt.NDArray[np.bool_] = (candidates[:, :, None] == chosen[:, None, :]).any(axis=2)
        count = hits.shape[1]
        row = self.probabilities(group, distance, count)
        pool = self._pool.get(distance)
        if pool is None or len(pool.means) < count:
            pool = self._pool[distance] = _Average(np.array(row))
        own = self._own.get((group, distance))
        if own is None or len(own.means) < count:
            own = self._own[group, distance] = _Average(np.array(row))
        for average, rate in ((pool, self.POOL_RATE), (own, self.RATE)):
            average.add(hits, absent, rate)
        weight = own.seen[:count] / (own.seen[:count] + self.DRAW)
        blend = weight * own.means[:count] + (1 - weight) * pool.means[:count]
        row[:count] = blend.tolist()
        return hits

    def to_json(self) -> dict[str, list[float]]:
        """The table with string keys."""
        return {f"{g}:{d}": [round(p, 4) for p in row] for (g, d), row in self._table.items()}

    def load_json(self, table: dict[str, list[float]]) -> None:
        """Take over a saved table; entries of other layers are ignored."""
        for name, row in table.items():
            group, _, distance = name.partition(":")
            if group.isdecimal() and distance.isdecimal() and int(group) < len(self._top_k):
                key, values = (
                    (int(group), int(distance)),
                    [min(max(float(p), 0.0), 1.0) for p in row],
                )
                self._table[key] = values
                self._own[key] = _Average(np.array(values), seen=self.DRAW)


class _Average:
    """Means by rank: plain ones at first, averages over the recent past later.

    Attributes:
        means: by rank.
        seen: candidates that they come from.
    """

    FIRST = 2.0
    """Candidates that what it starts from weighs as much as."""

    def __init__(self, means: npt.NDArray[np.float64], seen: float = 0.0) -> None:
        self.means = means
        self.seen = np.full(len(means), seen)

    def add(self, hits: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_], rate: float) -> None:
        """Add the counted ones of ``[calls, ranks]``."""
        ranks = hits.shape[1]
        more = counted.sum(axis=0)
        share = (hits & counted).sum(axis=0) / np.maximum(more, 1)
        step = np.maximum(1 - (1 - rate) ** more, more / (self.FIRST + self.seen[:ranks] + more))
        self.means[:ranks] += step * (share - self.means[:ranks])
        self.seen[:ranks] += more


class Governor:
    """How many bytes of guesses may be begun per layer call: the admission rule.

    The compute part of a layer call times the drive's bandwidth is what the drive could read while
    nobody waits for it. That is granted, times ``share``. The share falls by half when the guesses
    cost more than they bring, and recovers by a tenth otherwise:

        gain = bytes of guesses that were used            (would have been waited for)
        cost = bytes of guesses that were running when a demand came   (shared the drive with it)

    A layer whose guesses are used less than one time in four is switched off, and tried again
    after a while.
    """

    FLOOR = 1 / 64
    USEFUL = 0.25
    RETRY = 256

    def __init__(self, layers: int) -> None:
        self.share = 1.0
        self._windows = [0.0] * layers
        self._useful = [1.0] * layers
        self._off_until = [0] * layers
        self._calls = 0
        self._gain = 0.0
        self._cost = 0.0
        self._seen = 0

    @property
    def switched_off(self) -> tuple[int, ...]:
        """Groups that are switched off at the moment."""
        return tuple(g for g, until in enumerate(self._off_until) if until > self._calls)

    def window(self, group: int, seconds: float) -> None:
        """The compute thread has worked so long on the layer after it had its experts."""
        old = self._windows[group]
        self._windows[group] = seconds if old == 0.0 else old + 0.1 * (seconds - old)

    def grant(self, group: int, bandwidth: float) -> float:
        """Bytes of guesses that may be begun behind this layer's demands."""
        return self._windows[group] * bandwidth * self.share

    def wants(self, group: int) -> bool:
        """Whether guesses for the layer are read at present."""
        self._calls += group == 0
        return self._off_until[group] <= self._calls

    def judge(self, group: int, *, used: bool, nbytes: int) -> None:
        """A guess for the layer has been used, or has been evicted unused."""
        useful = self._useful[group] = self._useful[group] + 0.05 * (used - self._useful[group])
        if useful < self.USEFUL:
            self._off_until[group] = self._calls + self.RETRY
            self._useful[group] = 2 * self.USEFUL
        self._gain += nbytes * used
        self._seen += 1
        if self._seen >= JUDGED:
            change = BACKOFF if self._cost > self._gain else RECOVERY
            self.share = min(max(self.share * change, self.FLOOR), 1.0)
            self._gain = self._cost = 0.0
            self._seen = 0

    def delayed(self, nbytes: float) -> None:
        """So many bytes of guesses were running when a demand came."""
        self._cost += nbytes


class Trial:
    """Whether reading ahead pays here, by trying: tokens with guesses against tokens without.

    What a guess costs beyond the drive (processor time, memory bandwidth, the interpreter lock)
    differs between machines and cannot be seen from the drive. So decoding runs in legs of some
    tokens, the better way mostly and the other one now and then; the first token of a leg, which
    still feels the leg before, is left out. The longer the verdict stands, the rarer the trial.

    It begins with guesses and gives them time to learn. Token times scatter by more than what is to
    be found, and a wrong verdict against guesses costs more than one for them: on a tie they stay.
    """

    FIRST = 4  # legs with guesses before the first trial
    LEG = 6
    LONGEST = 32  # legs of the better way between two trials
    RATE = 0.1
    MARGIN = 1.02
    """Guesses may be so much slower before they are given up."""

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        self._weight: dict[bool, float] = {True: 0.0, False: 0.0}
        self._better = True
        self._patience = self.FIRST
        self._legs = 0  # of the better way since the last trial
        self._left = self.LEG
        self._fresh = True
        self.on = True

    @property
    def verdict(self) -> bool:
        """Whether guesses pay, as far as is known."""
        return self._better

    @property
    def seconds(self) -> tuple[float, float]:
        """Mean seconds per token (with guesses, without); 0.0 while unknown."""
        return self._seconds.get(True, 0.0), self._seconds.get(False, 0.0)

    def token(self, seconds: float) -> None:
        """A token has taken so long."""
        if self._fresh:
            self._fresh = False
        else:
            # A plain mean at first, an average over the recent past later.
            self._weight[self.on] += 1
            rate = max(self.RATE / 2, 1 / self._weight[self.on])
            old = self._seconds.get(self.on, 0.0)
            # One token that the machine took away counts no more than twice the usual.
            seconds = min(seconds, 2 * old) if old else seconds
            self._seconds[self.on] = old + rate * (seconds - old)
        self._left -= 1
        if self._left <= 0:
            self._next_leg()

    def _next_leg(self) -> None:
        self._left, self._fresh = self.LEG, True
        if self.on != self._better:  # a trial has ended
            better = self._seconds[True] < self.MARGIN * self._seconds[False]
            same = better == self._better
            self._patience = min(2 * self._patience, self.LONGEST) if same else 1
            self._better, self._legs = better, 0
            self.on = better
            return
        self._legs += 1
        self.on = self._better if self._legs < self._patience else not self._better
