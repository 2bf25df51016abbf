"""Which computed token sequences are kept and which of them a prompt can use. No MLX, no waiting.

mlx-lm's ``LRUPromptCache`` has the same task. Its search lists every longer sequence token by token
(0.9 s for one of 40,000 tokens, quadratic), its order knows insertions and not uses, and it takes
any cache for divisible that says so; so the books are kept here, and mlx-lm's caches are what is
kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_TOKENS = 16
"""Shorter prefixes are neither kept nor used (arbitrary: they save less than a chunk costs)."""

MOST_SCORES = 4
"""Prompts that a sequence remembers the logits of (arbitrary: they may have a megabyte each)."""

Tokens = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Kept:
    """A sequence whose caches are kept.

    Attributes:
        tokens: int32 ``[length]``.
        caches: behind these tokens; what they are is the owner's business.
        divisible: whether caches behind any prefix of the tokens can be had from them.
        nbytes: of tokens, caches and scores.
        scores: length of a prefix -> the logits behind it, where they are known.
    """

    tokens: Tokens
    caches: Any
    divisible: bool
    nbytes: int
    scores: dict[int, Any] = field(default_factory=dict)

    def usable(self, common: int, length: int) -> int:
        """Tokens that a prompt of ``length`` tokens need not compute, of ``common`` ones.

        Its last token has to be computed for the sake of the logits, unless these are known.
        """
        if not self.divisible and common < len(self.tokens):
            return 0
        if common == length and length in self.scores:
            return length
        most = min(common, length - 1)
        return most if self.divisible or most == len(self.tokens) else 0


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt can use.

    Attributes:
        kept: the sequence; None for nothing.
        length: tokens that need not be computed.
        branch: length of a longer prefix that another sequence shares, whose caches cannot be
            divided: worth keeping when it is computed again. 0 for none.
    """

    kept: Kept | None = None
    length: int = 0
    branch: int = 0


class PromptIndex:
    """The kept sequences, the least recently used ones first.

    Args:
        limit: bytes that all of them may take together.

    Attributes:
        nbytes: that they take.
        evicted: sequences that have left for want of room.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(tuple(self._kept))

    def find(self, tokens: Sequence[int]) -> Match:
        """The longest usable prefix of a prompt; using it makes its sequence the newest."""
        wanted = as_tokens(tokens)
        best, length, branch = None, 0, 0
        for kept in reversed(self._kept):
            common = common_prefix(kept.tokens, wanted)
            usable = kept.usable(common, len(wanted))
            if usable > length and usable >= LEAST_TOKENS:
                best, length = kept, usable
            # A prompt that ends within the sequence is kept at its own end.
            if not kept.divisible and usable < common < len(wanted):
                branch = max(branch, common)
        if best is not None:
            self._touch(best)
        return Match(best, length, branch if branch >= length + LEAST_TOKENS else 0)

    def holds(self, tokens: Tokens) -> Kept | None:
        """A sequence that serves every prompt which one of these tokens would; the newest now."""
        for kept in reversed(self._kept):
            fits = kept.divisible or len(kept.tokens) == len(tokens)
            if fits and _begins(kept.tokens, tokens):
                self._touch(kept)
                return kept
        return None

    def make_room(self, nbytes: int) -> bool:
        """Let the oldest go until so many bytes fit; False when they never would."""
        if nbytes > self.limit:
            return False
        while self.nbytes + nbytes > self.limit:
            self.remove(self._kept[0])
            self.evicted += 1
        return True

    def prefixes(self, tokens: Tokens) -> list[Kept]:
        """Those that a divisible sequence of these tokens makes useless, the longest last."""
        found = [kept for kept in self._kept if _begins(tokens, kept.tokens)]
        return sorted(found, key=lambda kept: len(kept.tokens))

    def add(self, kept: Kept) -> None:
        """Keep a sequence for which room has been made, as the newest."""
        self._kept.append(kept)
        self.nbytes += kept.nbytes

    def remove(self, kept: Kept) -> None:
        """Let a sequence go."""
        self._kept.remove(kept)
        self.nbytes -= kept.nbytes

    def clear(self) -> None:
        """Let all of them go."""
        self._kept.clear()
        self.nbytes = 0

    def _touch(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)


def as_tokens(tokens: Sequence[int]) -> Tokens:
    """Token ids as an array."""
    return np.asarray(tokens, np.int32)


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Tokens that two sequences begin with alike."""
    size = min(len(first), len(second))
    different = np.flatnonzero(first[:size] != second[:size])
    return int(different[0]) if len(different) else size


def _begins(tokens: Tokens, prefix: Tokens) -> bool:
    return len(prefix) <= len(tokens) and common_prefix(tokens, prefix) == len(prefix)
