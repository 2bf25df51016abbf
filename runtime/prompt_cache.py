"""Keeps the caches of prompts and answers, so that a repeated prefix is not computed again.

Compute thread only. What is kept are copies of mlx-lm's caches, what is handed out are copies of
these. A copy of an MLX array costs nothing: both share the memory until one of them is written to,
and then MLX copies; rows of keys and values are copied to grow. So no two requests, and no request
and this cache, ever write to the same arrays.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache, RotatingKVCache

from .kvsize import arrays, nbytes, parts
from .prompt_index import LEAST_TOKENS, MOST_SCORES, Kept, PromptIndex, as_tokens

logger = logging.getLogger("moestream")


@dataclass(frozen=True, slots=True)
class Taken:
    """The beginning of a prompt that need not be computed.

    Attributes:
        cache: mlx-lm's, one per layer, behind ``length`` tokens; the caller's own. Empty when
            nothing of the prompt is known.
        length: of the prefix in tokens.
        logits: ``[1, vocabulary]`` behind it, when it is the whole prompt.
        branch: where another kept sequence leaves the prompt: caches offered there are likely to be
            of use. 0 for nowhere.
    """

    cache: list[Any]
    length: int
    logits: mx.array | None
    branch: int


class PromptCache:
    """Computed token sequences of one model.

    Args:
        limit: bytes that all of it may take.

    Attributes:
        index: the sequences.
    """

    def __init__(self, limit: int) -> None:
        self.index = PromptIndex(limit)

    @property
    def nbytes(self) -> int:
        """Bytes that are held. Any thread."""
        return self.index.nbytes

    def take(self, tokens: Sequence[int]) -> Taken:
        """Caches behind the longest known prefix of a prompt."""
        match = self.index.find(tokens)
        if match.kept is None:
            return Taken([], 0, None, match.branch)
        cache: list[Any] = copy.deepcopy(match.kept.caches)
        for part in parts(cache):
            if match.length < len(match.kept.tokens):
                _cut(part, match.length)
            if type(part) is KVCache and part.keys is not None:
                part.keys, part.values = _blocks(part.keys), _blocks(part.values)
        logits = match.kept.scores[match.length] if match.length == len(tokens) else None
        return Taken(cache, match.length, logits, match.branch)

    def offer(
        self,
        tokens: Sequence[int],
        cache: Sequence[Any],
        logits: mx.array | None = None,
        *,
        sound: bool = True,
    ) -> bool:
        """Keep a copy of caches, if they are worth it and there is room.

        Args:
            tokens: that have been computed.
            cache: behind them; not changed. More may be in it when ``sound`` is false.
            logits: ``[1, vocabulary]`` behind the last token, if they are known.
            sound: the last forward has been completed. Of one that was given up some layers have
                noted its tokens and some have not: only what can be divided is kept then.

        Returns:
            Whether they are kept now.
        """
        wanted = as_tokens(tokens)
        length = len(wanted)
        if length < LEAST_TOKENS or not cache:
            return False
        divisible = is_divisible(cache, length)
        if not divisible and not sound:
            return False
        try:
            if (known := self.index.holds(wanted)) is not None:
                self._score(known, length, logits)
                return True
            copies = [_copy(entry, length) for entry in cache]
            kept = Kept(wanted, copies, divisible, 0)
            useless = self.index.prefixes(wanted) if divisible else []
            kept.scores = {n: logits for one in useless for n, logits in one.scores.items()}
            if logits is not None:
                kept.scores[length] = mx.contiguous(logits)
            for prefix in sorted(kept.scores)[:-MOST_SCORES]:
                del kept.scores[prefix]
            kept.nbytes = sequence_bytes(kept)
            if kept.nbytes > self.index.limit:
                return False
            while useless:
                self.index.remove(useless.pop())
            self.index.make_room(kept.nbytes)
            for entry in copies:  # one by one, so that little is there twice
                mx.eval(arrays([entry]))
            mx.eval(list(kept.scores.values()))
            self.index.add(kept)
        except (RuntimeError, MemoryError) as error:  # of MLX: no memory
            logger.warning("a prompt is not kept: %s", error)
            return False
        return True

    def add(self, kept: Kept) -> bool:
        """Keep a sequence that was saved; False when there is no room for it."""
        if self.index.holds(kept.tokens) is not None:
            return True
        if not self.index.make_room(kept.nbytes):
            return False
        self.index.add(kept)
        return True

    def clear(self) -> bool:
        """Let everything go; whether there was anything."""
        held = bool(len(self.index))
        self.index.clear()
        return held

    def _score(self, kept: Kept, length: int, logits: mx.array | None) -> None:
        """Note the logits behind a prefix of a known sequence."""
        if logits is None or length in kept.scores or len(kept.scores) == MOST_SCORES:
            return
        scores = mx.contiguous(logits)
        if self.index.nbytes + scores.nbytes > self.index.limit:
            return
        mx.eval(scores)
        kept.scores[length] = scores
        kept.nbytes += scores.nbytes
        self.index.nbytes += scores.nbytes


def sequence_bytes(kept: Kept) -> int:
    """What a sequence takes."""
    scores = sum(logits.nbytes for logits in kept.scores.values())
    return int(kept.tokens.nbytes) + nbytes(kept.caches) + int(scores)


def is_divisible(cache: Sequence[Any], length: int) -> bool:
    """Whether caches behind any prefix of ``length`` tokens can be had from these.

    mlx-lm's ``is_trimmable`` is not enough: chunked caches say so though what they have dropped is
    missing in front, and so do concatenating ones, which do not cut their arrays. Exact types, as
    in ``batching``: a subclass may keep more.
    """
    return all(_divides(part, length) for part in parts(cache))


def _divides(part: Any, length: int) -> bool:
    if type(part) is RotatingKVCache:
        return bool(length <= part.offset < part.max_size)
    # A smaller offset counts something else than tokens.
    return type(part) is KVCache and bool(part.offset >= length or part.keys is None)


def _cut(part: Any, length: int) -> None:
    """Leave the first tokens. A view: what is written next makes its own array."""
    if part.keys is None:
        return
    part.keys, part.values = part.keys[..., :length, :], part.values[..., :length, :]
    part.offset = length
    if type(part) is RotatingKVCache:
        part._idx = length


def _blocks(rows: Any) -> mx.array:
    """``[1, heads, rows, size]`` with as many rows as mlx-lm would have: whole blocks."""
    return mx.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[2] % KVCache.step), (0, 0)])


def _copy(entry: Any, length: int) -> Any:
    """A copy of a layer's cache, unevaluated, that holds on to no larger memory."""
    twin = copy.deepcopy(entry)
    for part in parts([twin]):
        if type(part) is KVCache:
            _cut(part, min(length, part.offset))  # they grow by blocks
        elif _divides(part, length):
            _cut(part, length)
        for name, value in list(vars(part).items()):
            setattr(part, name, tree_map(_compact, value))
    return twin


def _compact(value: Any) -> Any:
    return mx.contiguous(value) if isinstance(value, mx.array) else value
