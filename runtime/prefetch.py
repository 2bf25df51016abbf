"""What may be read ahead, and how much of it: the configuration and the rules of admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
        """Whether a layer of a prompt reads for the next."""
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
PROMPTS = PrefetchConfig(distances=())


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

    Guesses save no more than the time that tokens wait for experts. Where that is little, nothing
    is tried and nothing predicted.

    It begins with guesses and gives them time to learn. Token times scatter by more than what is to
    be found, and a wrong verdict against guesses costs more than one for them: on a tie they stay.
    """

    FIRST = 4  # legs with guesses before the first trial
    LEG = 6
    LONGEST = 32  # legs of the better way between two trials
    RATE = 0.1
    LITTLE = 0.1
    """Share of a token's time spent waiting from which guesses are tried; half of it while they are
    read. Predicting takes 3 to 8 % of a small layer's time (measured on two cores)."""

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
        self._leg = [0.0, 0.0]  # seconds, and those waited, of this leg
        self._idle = False
        self.on = True

    @property
    def verdict(self) -> bool:
        """Whether guesses pay, as far as is known."""
        return self._better and not self._idle

    @property
    def seconds(self) -> tuple[float, float]:
        """Mean seconds per token (with guesses, without); 0.0 while unknown."""
        return self._seconds.get(True, 0.0), self._seconds.get(False, 0.0)

    def token(self, seconds: float, waited: float) -> None:
        """A token has taken so long, of which it has waited for experts so long."""
        if self._fresh:
            self._fresh = False
        else:
            self._leg[0] += seconds
            self._leg[1] += waited
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
        (seconds, waited), self._leg = self._leg, [0.0, 0.0]
        if waited < (0.5 if self.on else 1.0) * self.LITTLE * seconds:
            self._idle, self.on = True, False
            return
        if self._idle:
            self._idle, self._legs, self.on = False, 0, self._better
            return
        if self.on != self._better:  # a trial has ended
            better = self._seconds[True] < self.MARGIN * self._seconds[False]
            same = better == self._better
            self._patience = min(2 * self._patience, self.LONGEST) if same else 1
            self._better, self._legs = better, 0
            self.on = better
            return
        self._legs += 1
        self.on = self._better if self._legs < self._patience else not self._better
