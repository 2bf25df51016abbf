"""What is to be measured: cells, made from options or from a suite's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal, get_args

Kind = Literal["decode", "prefill", "callers"]
Cache = Literal["cold", "warm"]

OUR_ARMS = ("resident", "off", "fifo", "ours")
KINDS, CACHES = get_args(Kind), get_args(Cache)


def demo_directory() -> str:
    """The model that comes with the package."""
    return str(files("moestream") / "data" / "demo-moe-4bit")


@dataclass(frozen=True, slots=True)
class Budget:
    """How many experts are held: one of the three is set.

    Attributes:
        slots: per layer.
        share: of each layer's experts.
        memory: a text for ``Engine.open``.
    """

    slots: int | None = None
    share: float | None = None
    memory: str | None = None

    def __str__(self) -> str:
        if self.slots is not None:
            return f"{self.slots} slots"
        return f"{100 * self.share:g} %" if self.share is not None else str(self.memory)


@dataclass(frozen=True, slots=True)
class Cell:
    """Arms to be compared under the same conditions.

    Attributes:
        kind: "decode" times tokens behind a prompt, "prefill" a prompt, "callers" several requests
            from the first prompt to the last token.
        budget: experts held.
        cache: whether reads come from the drive or from the page cache.
        arms: names.
        context: tokens of the prompt.
        callers: requests at once.
        tokens: decoded per caller.
        repeats: measurements of each arm.
    """

    kind: Kind
    budget: Budget
    cache: Cache
    arms: tuple[str, ...]
    context: int
    callers: int = 1
    tokens: int = 48
    repeats: int = 5

    @property
    def longest(self) -> int:
        """Tokens that a request's context has to hold."""
        return self.context + self.tokens + 1

    def with_counts(self, tokens: int | None, repeats: int | None) -> Cell:
        """The same with other counts, where they are given and apply."""
        if tokens is None or self.kind == "prefill":
            tokens = self.tokens
        return replace(self, tokens=tokens, repeats=repeats or self.repeats)

    def __str__(self) -> str:
        """In words."""
        what = {
            "decode": f"{self.tokens} tokens behind {self.context}",
            "prefill": f"prompt of {self.context}",
            "callers": f"{self.callers} at once",
        }[self.kind]
        return f"{self.budget}, {self.cache}, {what}"


def turn_order(arms: Sequence[str], turn: int) -> list[str]:
    """Who comes first, second and so on in a repetition: the order rotates."""
    first = turn % len(arms) if arms else 0
    return [*arms[first:], *arms[:first]]


def in_groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that can share open engines, in the order in which their conditions come first."""
    groups: dict[tuple[Budget, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.budget, cell.cache), []).append(cell)
    return list(groups.values())


def expand(
    budgets: Sequence[Budget],
    caches: Sequence[Cache],
    arms: Sequence[str],
    *,
    contexts: Sequence[int] = (),
    prefills: Sequence[int] = (),
    callers: Sequence[int] = (),
    tokens: int = 48,
    repeats: int = 5,
    caller_context: int = 16,
) -> list[Cell]:
    """The cells of all combinations.

    Args:
        budgets, caches, arms: of every cell.
        contexts: prompts behind which decoding is timed.
        prefills: prompts that are timed.
        callers: numbers of requests at once, behind prompts of ``caller_context`` tokens.
        tokens: decoded by each request.
        repeats: measurements of each arm.
        caller_context: tokens.
    """
    cells = []
    for budget in budgets:
        for cache in caches:
            common = Cell("decode", budget, cache, tuple(arms), 0, 1, tokens, repeats)
            cells += [replace(common, context=count) for count in contexts]
            cells += [replace(common, kind="prefill", context=n, tokens=1) for n in prefills]
            together = replace(common, kind="callers", context=caller_context)
            cells += [replace(together, callers=count) for count in callers]
    return cells
