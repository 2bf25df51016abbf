"""Policies that rank by how often experts are used: decayed frequency, and what follows what.

Both remember experts that hold no slot, so that one which comes back is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from .policy import Policy

RESCALE = 2.0**512
"""Weights are scaled down beyond this; a power of two, so that nothing is rounded."""

LATER = 1e-10
"""By so much a use counts more than the one before it in the same call: ties fall to the order."""


class DecayedFrequency:
    """LFU with exponential decay (LRFU): the smallest sum of aged uses goes first.

    The ranking is made when the first victim of a call is asked for, and kept until the next call.
    The call's own experts come behind it: they are given up only if they do not fit together.

    Args:
        experts: of the layer.
        half_life: after so many calls of the layer a use counts half.
    """

    HALF_LIFE = 16.0
    """Of 4 to 256, the best on the first halves of recorded traces."""

    def __init__(self, experts: int, half_life: float = HALF_LIFE) -> None:
        # A use now weighs `_unit`, which grows: aging scales all alike, so nothing is redone.
        self._growth = 2.0 ** (1.0 / half_life)
        self._unit = 1.0
        self._weight = [0.0] * experts
        self._held: dict[int, None] = {}
        self._call: Sequence[int] = ()
        self._ranking: list[int] | None = None
        self._warm: dict[int, None] = {}  # guessed or kept since the call: behind all others

    def behind(self, before: Policy) -> None:
        pass  # each layer counts for itself

    def seed(self, heat: Sequence[float]) -> None:
        """The hottest starts as if it had just been used, the others as parts of that."""
        hottest = max(heat) or 1.0
        self._weight = [count / hottest for count in heat]

    def routed(self, experts: Sequence[int]) -> None:
        self._age()
        weight, use = self._weight, self._unit
        later = LATER * use
        for expert in experts:
            weight[expert] += use
            use += later
        self._begin(experts)

    def _age(self) -> None:
        """A use of earlier calls counts less by one call from here on."""
        self._unit *= self._growth
        if self._unit > RESCALE:
            self._unit /= RESCALE
            self._weight = [weight / RESCALE for weight in self._weight]

    def _begin(self, experts: Sequence[int]) -> None:
        """The ranking is void: these experts are asked for."""
        self._call = experts
        self._ranking = None
        self._warm.clear()

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        pass  # a prompt counts once

    def added(self, expert: int) -> None:
        self._held[expert] = None
        if expert not in self._call:
            self._warm[expert] = None

    def removed(self, expert: int) -> None:
        del self._held[expert]
        self._warm.pop(expert, None)

    def keep(self, expert: int) -> None:
        self._warm.pop(expert, None)
        self._warm[expert] = None

    def coldest(self) -> Iterator[int]:
        ranking, held, warm = self._ranking, self._held, self._warm
        if ranking is None:
            ranking = self._ranking = self._rank()
        for expert in ranking:
            if expert in held and expert not in warm:
                yield expert
        own = [expert for expert in self._call if expert in held and expert not in warm]
        yield from self.order(own)
        yield from warm

    def order(self, experts: list[int]) -> list[int]:
        return experts

    def _rank(self) -> list[int]:
        warm, call = self._warm, set(self._call)
        return self._order([e for e in self._held if e not in call and e not in warm])

    def _order(self, cold: list[int]) -> list[int]:
        return sorted(cold, key=self._weight.__getitem__)


class Successors(DecayedFrequency):
    """Decayed frequency, and how often an expert came right after the experts of this call.

    A table counts, for each pair of experts of the layer, how often the second was used by the
    token after one that used the first. A weight is the aged number of uses plus ``PULL`` times the
    share of the present call's experts that were followed by it. Only the coldest by frequency are
    looked up in the table: the cost of a call does not grow with the number of experts or slots.

    The last tokens of a prompt fill the table too, if ``tokens`` tells of them; the prompt itself
    counts as one use of each of its experts.

    Args:
        experts: of the layer; the table takes about twice this number squared in bytes.
        width: most experts of a single token; wider calls are prompts, or of several requests.
    """

    HALF_LIFE = 12.0
    PULL = 27.0
    """Chosen with the half-life on the first halves of recorded traces. A use per call sums up to
    17.8, so the table counts one and a half times as much as the frequency."""

    REACH = 16
    """Experts that are looked up; 8 lose a little, 24 and all gain nothing (replayed)."""

    DOUBT = 50.0
    """Of a table that is still thin less is believed: added to the number of times that the token's
    experts were seen, all together. Of 0.5 to 100 the best on the same halves, by little."""

    MOST = 255
    """A row is halved when its source has been seen so often: its lanes suffice, and it forgets."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__(experts, self.HALF_LIFE)
        # Where the rows of a token's experts do not fit into a lane, no call is taken for a token.
        self._width = width if width * self.MOST < 1 << LANE else 0
        # A row is one large number with a lane per expert: adding up rows takes no loop.
        self._lanes = lanes(experts)
        self._bytes = experts * LANE // 8
        self._rows = [0] * experts
        self._seen = [0] * experts
        self._token: Sequence[int] = ()  # the experts of the last token
        self._told = False  # of the prompt that will be called next

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        self._token, self._told = (), True
        for experts in rows:
            if len(experts) <= self._width:
                self._follow(experts)

    def routed(self, experts: Sequence[int]) -> None:
        super().routed(experts)
        if len(experts) <= self._width:
            self._follow(experts)
        elif not self._told:  # tokens of several requests, which do not come one after the other
            self._token = ()
        self._told = False

    def _follow(self, experts: Sequence[int]) -> None:
        """A token has come after the one before; count it in the rows of that one's experts."""
        rows, seen = self._rows, self._seen
        added = sum(map(self._lanes.__getitem__, experts))
        for source in self._token:
            if seen[source] == self.MOST:
                seen[source] //= 2
                rows[source] = rows[source] >> 1 & _halved(len(rows))
            seen[source] += 1
            rows[source] += added
        self._token = experts

    def _order(self, cold: list[int]) -> list[int]:
        cold = super()._order(cold)
        token, weight = self._token, self._weight
        seen = sum(map(self._seen.__getitem__, token))
        if len(cold) < 2 or not seen:
            return cold
        near = cold[: self.REACH]
        follows = sum(map(self._rows.__getitem__, token)).to_bytes(self._bytes, "little")
        pull = self._unit * self.PULL / (seen + self.DOUBT)
        worth = {e: weight[e] + pull * (follows[2 * e] + 256 * follows[2 * e + 1]) for e in near}
        cold[: self.REACH] = sorted(near, key=worth.__getitem__)
        return cold


LANE = 16
"""Bits of a lane: rows of up to 257 sources of 255 can be added."""


@lru_cache
def lanes(experts: int) -> list[int]:
    """A use of each expert, as a row."""
    return [1 << LANE * expert for expert in range(experts)]


@lru_cache
def _halved(experts: int) -> int:
    """What is left of a row after halving: without the bit that each lane has lost to the next."""
    return sum(lanes(experts)) * ((1 << LANE - 1) - 1)
