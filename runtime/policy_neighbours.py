"""The policy that looks for tokens with a routing like the present one's, and at what came next.

Nearest neighbours, as in forecasting by analogues; the likeness counts experts of several layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .policy import Policy
from .policy_frequency import LANE, LATER, DecayedFrequency, lanes

MOST_ALIKE = 255
"""Likeness has a lane of 8 bits for each token."""


class Neighbours(DecayedFrequency):
    """Decayed frequency, and what tokens used that came after tokens like this one.

    Two tokens are alike by the experts that they share: those of this layer count ``OWN``, those of
    the ``LAYERS`` layers called before it once each. The ``NEAREST`` of the last tokens are asked
    which experts the next four tokens used, the likest ones loudest. A weight is the aged number of
    uses plus ``PULL`` times the share that these answers give to the expert. Only the coldest by
    frequency are looked up: the cost of a call does not grow with the number of experts or slots.

    A prompt's experts weigh what their aged uses by its last tokens add up to, at most one use.
    These tokens are remembered like all others.

    Args:
        experts: of the layer; the tables take up to 0.3 MB for 128 experts, 0.8 MB from 512 on.
        width: experts of a token; only calls of so many are tokens.
    """

    HALF_LIFE = 12.0
    PULL = 27.0
    NEAREST = 20
    REACH = 12
    OWN = 2
    LAYERS = 3
    AHEAD = (8, 5, 3, 2)
    """What the first, second, ... token after a neighbour counts. All these numbers were chosen on
    the first halves of recorded traces and other prompts of the demo model; around them little
    changes. ``REACH`` experts are looked up."""

    SHARPNESS = 4
    """A neighbour counts by its likeness to this power."""

    LOUDEST = 180
    """What a neighbour counts that shares all experts: the sum of all still fits in a lane."""

    DOUBT = 0.1
    """Of a neighbour that shares everything: little is believed where no token is much alike."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__(experts, self.HALF_LIFE)
        self._lanes = lanes(experts + 1)
        self._bytes = (experts + 1) * LANE // 8
        self._reaches = max(min(self.LAYERS, MOST_ALIKE // width - self.OWN), 0)
        # Where even the own layer's experts do not fit into a lane, no call is taken for a token.
        self._width = width if width * self.OWN <= MOST_ALIKE else 0
        self._window = window(experts)
        self._below: tuple[Neighbours, ...] = ()  # the layers called before, nearest first
        self._clock = Clock()
        self._layer = 0
        self._token = -2  # number of the last token, the same in all layers
        self._row = 0  # how many tokens came right before it
        # One large number per expert with a lane per token: likeness to all takes a few sums.
        self._used = [0] * experts
        self._tokens: list[Sequence[int]] = [()] * self._window
        # Per token what followed it: a lane per expert, and one more for what has come of AHEAD.
        self._after = [0] * self._window
        self._own = 0  # likeness of the last token to all others, this layer's experts alone
        self._alike = 0  # the same of all layers that count
        self._most = 0  # what the likeness of the same token would be
        self._recent: dict[int, float] | None = None  # of the prompt that will be called next
        self._prompt = False  # whether the last call was that of a prompt

    def behind(self, before: Policy) -> None:
        if isinstance(before, Neighbours) and (before._window, before._width) == (
            self._window,
            self._width,
        ):
            self._below = (before, *before._below)[: self._reaches]
            self._clock = before._clock
            self._layer = before._layer + 1

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        self._recent = self._aged(rows)
        first = self._clock.numbers(self._layer, len(rows))
        self._token = -2  # what came before is another text
        self._alike = 0
        for number, experts in enumerate(rows, first):
            if len(experts) <= self._width:  # else likeness would not fit into its lane
                self._remember(number, experts)

    def routed(self, experts: Sequence[int]) -> None:
        recent, self._recent = self._recent, None
        self._prompt = recent is not None
        if recent is not None:
            self._read(experts, recent)
            return
        super().routed(experts)
        if len(experts) == self._width:
            self._remember(self._clock.numbers(self._layer, 1), experts)
        else:  # tokens of several requests, which do not come one after the other
            self._alike = 0

    def _aged(self, rows: Sequence[Sequence[int]]) -> dict[int, float]:
        """What the uses by a prompt's last tokens weigh at its end, at most one use each."""
        recent: dict[int, float] = {}
        use = 1.0
        for experts in reversed(rows):
            for expert in experts:
                recent[expert] = min(recent.get(expert, 0.0) + use, 1.0)
            use /= self._growth
        return recent

    def _read(self, experts: Sequence[int], recent: dict[int, float]) -> None:
        """A prompt, which ages the others once and counts by its last tokens."""
        self._age()
        weight, use = self._weight, self._unit
        for place, expert in enumerate(experts):
            weight[expert] += use * (recent.get(expert, 0.0) + LATER * place)
        self._begin(experts)

    def _remember(self, number: int, experts: Sequence[int]) -> None:
        """A token: find out what it is like, and make it known to later ones for the oldest."""
        used, after, place = self._used, self._after, number % self._window
        self._own = own = sum(map(used.__getitem__, experts))
        alike, layers = own * self.OWN, self.OWN
        for layer in self._below:
            if layer._token == number:
                alike += layer._own
                layers += 1
        self._alike, self._most = alike, layers * len(experts)
        self._row = self._row + 1 if number == self._token + 1 else 0
        self._token = number
        lane = 1 << 8 * place
        for expert in self._tokens[place]:
            used[expert] ^= lane
        for expert in experts:
            used[expert] ^= lane
        self._tokens[place] = experts
        follows = sum(map(self._lanes.__getitem__, experts), self._lanes[-1])
        after[place] = 0
        for count in self.AHEAD[: self._row]:
            place -= 1
            after[place] += count * follows

    def _order(self, cold: list[int]) -> list[int]:
        cold = super()._order(cold)
        if len(cold) < 2 or not self._alike:
            return cold
        said = self._answers()
        asked = said[-1]
        if not asked:
            return cold
        near, weight = cold[: self.REACH], self._weight
        pull = self._unit * self.PULL / (asked + self.DOUBT * self.LOUDEST * self.AHEAD[0])
        worth = {expert: weight[expert] + pull * said[expert] for expert in near}
        cold[: self.REACH] = sorted(near, key=worth.__getitem__)
        return cold

    def order(self, experts: list[int]) -> list[int]:
        return experts if self._prompt else self._order(experts)

    def _answers(self) -> Sequence[int]:
        """How often the nearest tokens were followed by each expert, and last by any token."""
        size, after = self._window, self._after
        # Turned so that the newest token is last: of equals the newest are asked.
        turn = self._token % size
        alike = self._alike.to_bytes(size, "little")
        alike = alike[turn:] + alike[:turn]
        turn -= size  # from here on places count from the end where they would be beyond it
        left, answers = self.NEAREST, 0
        for shared, loud in loudness(self._most, self.SHARPNESS, self.LOUDEST):
            place = alike.rfind(shared)
            if place < 0:
                continue
            said = 0
            while place >= 0:
                if follows := after[place + turn]:
                    said += follows
                    left -= 1
                    if not left:
                        break
                place = alike.rfind(shared, 0, place)
            answers += loud * said
            if not left:
                break
        return memoryview(answers.to_bytes(self._bytes, "little")).cast("H")


class Clock:
    """Numbers the tokens that go through a model, for all of its layers alike."""

    def __init__(self) -> None:
        self._layer = 0
        self._first = self._end = 0

    def numbers(self, layer: int, count: int) -> int:
        """Number of the first of ``count`` tokens that the layer is called with.

        A layer that was called before, or with so many tokens not, is called for new ones.
        """
        if layer <= self._layer or count != self._end - self._first:
            self._first = self._end
            self._end += count
        self._layer = layer
        return self._first


def window(experts: int) -> int:
    """How many tokens are remembered: what the tables of a layer take stays below 1 MB."""
    return max(min(768, (1 << 18) // experts), 64)


@lru_cache(maxsize=64)
def loudness(most: int, sharpness: int, loudest: int) -> list[tuple[int, int]]:
    """Each likeness that counts, the largest first, and how much its tokens count."""
    levels = [(alike, round(loudest * (alike / most) ** sharpness)) for alike in range(1, most + 1)]
    return [(alike, loud) for alike, loud in reversed(levels) if loud]
