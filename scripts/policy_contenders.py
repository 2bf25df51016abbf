"""Eviction policies that were tried against the engine's and lost; for `bench_policies.py` alone.

Each is the published idea fitted to calls that are atomic: what a call reads holds a slot during
the call, so a policy that would not admit it can only give it up first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from moestream.runtime.policy import Policy
from moestream.runtime.replay_policies import Calls


class Contender:
    """What they share: which experts hold a slot, oldest first, and a clock of calls."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, None] = OrderedDict()
        self.now = 0

    def behind(self, before: Policy) -> None:
        pass

    def seed(self, heat: Sequence[float]) -> None:
        pass

    def tokens(self, rows: Sequence[Sequence[int]]) -> None:
        pass

    def routed(self, experts: Sequence[int]) -> None:
        self.now += 1
        for expert in experts:
            self.use(expert)

    def use(self, expert: int) -> None:
        raise NotImplementedError

    def added(self, expert: int) -> None:
        self.held[expert] = None

    def removed(self, expert: int) -> None:
        del self.held[expert]

    def keep(self, expert: int) -> None:
        pass

    def order(self, experts: list[int]) -> list[int]:
        return experts

    def coldest(self) -> Iterator[int]:
        return iter(sorted(self.held, key=self.worth))

    def worth(self, expert: int) -> float:
        raise NotImplementedError


class Frequency(Contender):
    """LFU: all uses ever, the older one of a tie first."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: Counter[int] = Counter()
        self.last: dict[int, float] = {}
        self.clock = 0

    def use(self, expert: int) -> None:
        self.clock += 1
        self.uses[expert] += 1
        self.last[expert] = self.clock

    def worth(self, expert: int) -> float:
        return self.uses[expert] + 1e-7 * self.last[expert]


class TwoScales(Contender):
    """The sum of a fast and a slow moving average of use."""

    HALF_LIVES = (4.0, 32.0)
    SHARES = (1.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.parts = [dict[int, tuple[float, int]]() for _ in self.HALF_LIVES]

    def use(self, expert: int) -> None:
        for part, half_life in zip(self.parts, self.HALF_LIVES, strict=True):
            part[expert] = (self._aged(part, expert, half_life) + 1.0, self.now)

    def _aged(self, part: dict[int, tuple[float, int]], expert: int, half_life: float) -> float:
        value, when = part.get(expert, (0.0, 0))
        return value * float(2.0 ** ((when - self.now) / half_life))

    def worth(self, expert: int) -> float:
        return sum(
            share * (1.0 - float(2 ** (-1 / half_life))) * self._aged(part, expert, half_life)
            for part, half_life, share in zip(self.parts, self.HALF_LIVES, self.SHARES, strict=True)
        )


class NextUse(Contender):
    """Belady with an estimate: the longer of the mean gap between uses and the present one."""

    RATE = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.gap: dict[int, float] = {}
        self.last: dict[int, int] = {}

    def use(self, expert: int) -> None:
        if expert in self.last:
            gap = self.now - self.last[expert]
            old = self.gap.get(expert, float(gap))
            self.gap[expert] = old + self.RATE * (gap - old)
        self.last[expert] = self.now

    def worth(self, expert: int) -> float:
        age = self.now - self.last[expert]
        return -max(self.gap.get(expert, 2.0 * age), age) - 1e-3 * age


class Arc(Contender):
    """ARC: experts used once and more often in two LRU lists, whose shares ghosts move."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.once: OrderedDict[int, None] = OrderedDict()
        self.often: OrderedDict[int, None] = OrderedDict()
        self.ghosts: tuple[OrderedDict[int, None], OrderedDict[int, None]]
        self.ghosts = (OrderedDict(), OrderedDict())
        self.target = 0.0
        self.back: set[int] = set()

    def use(self, expert: int) -> None:
        if expert in self.held:
            self.once.pop(expert, None)
            self.often.pop(expert, None)
            self.often[expert] = None
            return
        first, second = self.ghosts
        if expert in first:
            self.target = min(self.target + max(len(second) / len(first), 1), self.slots)
        elif expert in second:
            self.target = max(self.target - max(len(first) / len(second), 1), 0)
        else:
            return
        first.pop(expert, None)
        second.pop(expert, None)
        self.back.add(expert)

    def added(self, expert: int) -> None:
        super().added(expert)
        (self.often if expert in self.back else self.once)[expert] = None
        self.back.discard(expert)

    def removed(self, expert: int) -> None:
        super().removed(expert)
        which = 0 if expert in self.once else 1
        (self.once, self.often)[which].pop(expert)
        ghosts = self.ghosts[which]
        ghosts[expert] = None
        if len(ghosts) > self.slots:
            ghosts.popitem(last=False)

    def coldest(self) -> Iterator[int]:
        lists = [list(self.once), list(self.often)]
        if len(self.once) <= self.target:
            lists.reverse()
        return iter(lists[0] + lists[1])


class S3Fifo(Contender):
    """S3-FIFO: a small queue for newcomers, a main one with second chances, and ghosts."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.small_size = max(slots // 10, 1)
        self.small: OrderedDict[int, None] = OrderedDict()
        self.main: OrderedDict[int, None] = OrderedDict()
        self.ghosts: deque[int] = deque(maxlen=slots)
        self.count: Counter[int] = Counter()

    def use(self, expert: int) -> None:
        if expert in self.held:
            self.count[expert] = min(self.count[expert] + 1, 3)

    def added(self, expert: int) -> None:
        super().added(expert)
        (self.main if expert in self.ghosts else self.small)[expert] = None

    def removed(self, expert: int) -> None:
        super().removed(expert)
        if expert in self.small:
            del self.small[expert]
            self.ghosts.append(expert)
        else:
            del self.main[expert]
        del self.count[expert]

    def coldest(self) -> Iterator[int]:
        for expert in list(self.small)[: max(len(self.small) - self.small_size, 0)]:
            if self.count[expert]:
                del self.small[expert]
                self.main[expert] = None
                self.count[expert] = 0
        small = list(self.small)
        over = max(len(small) - self.small_size, 0)
        main = sorted(self.main, key=lambda expert: self.count[expert])
        yield from small[:over]
        if main:
            for expert in list(self.main):
                if not self.count[expert]:
                    break
                self.count[expert] -= 1
                self.main.move_to_end(expert)
        yield from main
        yield from small[over:]


class Sieve(Contender):
    """SIEVE: a FIFO with a hand that spares, once, what was used since it last came by."""

    def __init__(self) -> None:
        super().__init__()
        self.visited: set[int] = set()
        self.hand = -1

    def use(self, expert: int) -> None:
        if expert in self.held:
            self.visited.add(expert)

    def _from_hand(self) -> list[int]:
        queue = list(self.held)
        at = 0 if self.hand not in self.held else queue.index(self.hand)
        return queue[at:] + queue[:at]

    def removed(self, expert: int) -> None:
        order = self._from_hand()
        at = order.index(expert)
        self.visited.difference_update(order[: at + 1])
        self.hand = order[at + 1] if at + 1 < len(order) else -1
        super().removed(expert)

    def coldest(self) -> Iterator[int]:
        order = self._from_hand()
        return iter(sorted(order, key=lambda expert: expert in self.visited))


class TinyLfu(Contender):
    """LRU with admission: a newcomer has to be used more often than what it would push out."""

    HALF_LIFE = 64

    def __init__(self) -> None:
        super().__init__()
        self.uses: Counter[int] = Counter()
        self.new: set[int] = set()

    def routed(self, experts: Sequence[int]) -> None:
        super().routed(experts)
        if self.now % self.HALF_LIFE == 0:
            self.uses = Counter({e: n // 2 for e, n in self.uses.items() if n > 1})

    def use(self, expert: int) -> None:
        self.uses[expert] += 1
        if expert in self.held:
            self.held.move_to_end(expert)
            self.new.discard(expert)

    def added(self, expert: int) -> None:
        super().added(expert)
        self.new.add(expert)

    def removed(self, expert: int) -> None:
        super().removed(expert)
        self.new.discard(expert)

    def coldest(self) -> Iterator[int]:
        window = [expert for expert in self.held if expert in self.new]
        main = [expert for expert in self.held if expert not in self.new]
        while window and main:
            admitted = self.uses[window[0]] > self.uses[main[0]]
            yield (main if admitted else window).pop(0)
        yield from window
        yield from main


class MostUsed(Contender):
    """Knows how often each expert will be used in all, and nothing else: what is fixed is kept."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.uses = Counter(expert for call in calls for expert in call)

    def use(self, expert: int) -> None:
        pass

    def worth(self, expert: int) -> float:
        return self.uses[expert]


CONTENDERS: dict[str, Callable[[Calls, int], Policy]] = {
    "lfu": lambda calls, slots: Frequency(),
    "two scales": lambda calls, slots: TwoScales(),
    "next use": lambda calls, slots: NextUse(),
    "arc": lambda calls, slots: Arc(slots),
    "s3-fifo": lambda calls, slots: S3Fifo(slots),
    "sieve": lambda calls, slots: Sieve(),
    "tinylfu": lambda calls, slots: TinyLfu(),
    "static oracle": lambda calls, slots: MostUsed(calls),
}
