"""From logits to tokens, each request with a random stream of its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .api import TokenLogprob
from .sampling import Sampling


@dataclass(slots=True)
class Drawn:
    """A sampled token that need not be evaluated yet.

    Attributes:
        token: its id, ``[1]``.
        logprob: its log-probability, ``[]``, when asked for.
        best: ids of the most likely tokens, best first.
        values: their log-probabilities.
    """

    token: mx.array
    logprob: mx.array | None = None
    best: mx.array | None = None
    values: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """All that has to be evaluated."""
        parts = (self.token, self.logprob, self.best, self.values)
        return [part for part in parts if part is not None]

    def resolve(self) -> TokenLogprob:
        """The evaluated token; its log-probability is 0 when it was not asked for."""
        token: Any = self.token.item()
        if self.logprob is None or self.best is None or self.values is None:
            return TokenLogprob(token, 0.0)
        best: Any = self.best.tolist()
        values: Any = self.values.tolist()
        own: Any = self.logprob.item()
        return TokenLogprob(token, own, tuple(zip(best, values, strict=True)))


_thread = threading.local()
"""``stream``: the request whose numbers the thread's random state gives at the moment."""


class RandomStream:
    """One request's place in MLX's random numbers. Compute thread only.

    mlx-lm's samplers draw from the thread's one random state. A state is the key of a seed, so a
    request that others have interrupted goes on exactly where it was.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(63) if seed is None else seed
        self._state: mx.array | None = None

    def enter(self) -> None:
        """The next numbers are this request's."""
        if getattr(_thread, "stream", None) is self:
            return
        if self._state is not None:
            high, low = self._state.tolist()  # type: ignore[misc]
            self._seed = int(high) << 32 | int(low)  # type: ignore[arg-type]
        mx.random.seed(self._seed)
        _thread.stream = self

    def leave(self) -> None:
        """Keep the place; it is evaluated with the token that was drawn."""
        state: Any = mx.random.state
        self._state = state[0]


class Sampler:
    """Logits processors, log-probabilities, sampler: in the order of mlx-lm's loop."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampler = sampling.sampler()
        self._processors = sampling.processors()
        self._history = mx.array(list(prompt)) if self._processors else mx.array([])
        self._alternatives = sampling.logprobs
        self._random = RandomStream(sampling.seed) if sampling.temperature else None

    def draw(self, logits: mx.array) -> Drawn:
        """Sample from logits ``[1, vocabulary]``; evaluates nothing."""
        for processor in self._processors:
            logits = processor(self._history, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = self._sample(logprobs)
        if self._processors:
            self._history = mx.concatenate([self._history, token.astype(self._history.dtype)])
        if self._alternatives is None:
            return Drawn(token)
        best = mx.argsort(-logprobs, axis=-1)[0, : self._alternatives]
        return Drawn(token, logprobs[0, token[0]], best, logprobs[0, best])

    def _sample(self, logprobs: mx.array) -> mx.array:
        if self._random is None:
            return self._sampler(logprobs)
        self._random.enter()
        token = self._sampler(logprobs)
        self._random.leave()
        return token
