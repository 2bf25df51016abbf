"""One request on the compute thread: its prompt in large chunks, its tokens, text and result.

Who computes when is the scheduler's business; here is what belongs to the request alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from .api import Chunk, FinishReason, Generation, GenerationStats, TokenLogprob
from .drawing import Drawn, Sampler
from .encoding import encode
from .errors import PromptTooLong
from .plan import LOGITS_BYTES
from .prompt_cache import PromptCache
from .request import Request
from .sampling import Sampling, StopText
from .scheduling import Limits
from .streaming import ExpertStream, StepCounters
from .tracing import Tracer


@dataclass(slots=True)
class LoadedModel:
    """What requests work with. Lives on the compute thread.

    Attributes:
        model: the mlx-lm model with streaming switches.
        tokenizer: mlx-lm's TokenizerWrapper, or None when the checkpoint has none.
        end_tokens: token ids that end a generation.
        stream: runs the streamed experts.
        vocabulary: number of logits.
        context: most tokens of prompt and answer together.
        chunk_tokens: length of a prompt -> tokens to compute at once.
        resident: no layer is streamed.
        limits: of what may be computed together.
        kept: caches of earlier prompts and answers; None keeps none.
    """

    model: Any
    tokenizer: Any
    end_tokens: frozenset[int]
    stream: ExpertStream
    vocabulary: int
    context: int
    chunk_tokens: Callable[[int], int]
    resident: bool
    limits: Limits
    kept: PromptCache | None = None


class Row:
    """A request's state from its turn to its end. Compute thread only.

    Args:
        request: whose.

    Attributes:
        cache: mlx-lm's, one per layer; empty before the prompt, and while a batch holds them.
        pending: the next token, when its forward has been started ahead.
        counters: what it has cost.
        cached: tokens of the prompt that were not computed; None before its first turn.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.number = request.number
        self.cache: list[Any] = []
        self.pending: Drawn | None = None
        self.counters = StepCounters()
        self.prompt_tokens = 0
        self.cached: int | None = None
        self._sampling = request.sampling
        self._tokens: list[int] = []  # of prompt and answer
        self._computed = 0  # of these, in the cache
        self._branch = 0  # of the prompt, where its caches are to be kept
        self._scores: mx.array | None = None  # behind the whole prompt, when they were kept
        self._told = -1  # of the prompt, as progress
        self._sampler: Sampler | None = None
        self._text: _Text | None = None
        self._most = 0
        self._logprobs: list[TokenLogprob] = []
        self._chunk: Chunk | None = None
        self._started = 0.0
        self._first = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """Sorts requests by whose turn it is: priority, then arrival."""
        return (-self.request.priority, self.number)

    @property
    def begun(self) -> bool:
        """Whether its prompt is known."""
        return self._sampler is not None

    def begin(self, loaded: LoadedModel) -> None:
        """Its turn has come: encode and check the prompt.

        Raises:
            InvalidRequest: the prompt does not fit, or an argument the vocabulary.
        """
        self._started = time.perf_counter()
        self._tokens = encode(loaded, self.request.prompt)
        self.prompt_tokens = len(self._tokens)
        self._sampling.check_vocabulary(loaded.vocabulary)
        room = loaded.context - self.prompt_tokens
        if room < 1:
            raise PromptTooLong(self.prompt_tokens, loaded.context)
        self._most = min(self._sampling.max_tokens, room)
        self._text = _Text(loaded.tokenizer, self._sampling)
        self._sampler = Sampler(self._sampling, self._tokens)

    # -- tokens -------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self._tokens)

    @property
    def left(self) -> int:
        """Tokens whose forward has not been computed."""
        return len(self._tokens) - self._computed

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self._tokens) - self.prompt_tokens

    @property
    def last(self) -> int:
        """The newest token."""
        return self._tokens[-1]

    @property
    def two_left(self) -> bool:
        """Whether at least two more tokens may come."""
        return self.generated + 1 < self._most

    def forget(self) -> None:
        """Let go of the caches; they are computed anew from the tokens."""
        self.cache = []
        self.pending = None
        self._computed = self._branch = 0
        self._scores = None

    def _start(self, loaded: LoadedModel) -> None:
        """Caches behind as much of the tokens as is known."""
        if loaded.kept is not None:
            taken = loaded.kept.take(self._tokens)
            self.cache, self._computed = taken.cache, taken.length
            self._scores, self._branch = taken.logits, taken.branch
        if self.cached is None:
            self.cached = self._computed
        if not self.cache:
            self.cache = make_prompt_cache(loaded.model)

    def keep(
        self,
        kept: PromptCache,
        cache: list[Any],
        logits: mx.array | None = None,
        *,
        sound: bool = True,
    ) -> None:
        """Offer what has been computed to the prompt cache.

        Args:
            kept: the prompt cache.
            cache: this request's caches.
            logits: ``[1, vocabulary]`` behind the last token, when that has been computed.
            sound: its last forward has been completed.
        """
        # A forward that has been started ahead has the newest token in the caches, too.
        computed = len(self._tokens) if self.pending is not None else self._computed
        kept.offer(self._tokens[:computed], cache, logits, sound=sound)

    def prefill(self, loaded: LoadedModel, tracer: Tracer, most: int) -> mx.array | None:
        """Compute the next chunk of what is left.

        The last chunk is one piece as long as its logits are small; otherwise, as in mlx-lm, its
        last token goes alone, so that no logits of the others are computed.

        Args:
            loaded: the model.
            tracer: gets an event per chunk.
            most: tokens to compute at most.

        Returns:
            Logits ``[1, vocabulary]`` behind the last token, unevaluated; None when something is
            still left.
        """
        if not self.cache:
            self._start(loaded)
        if not self.left:
            loaded.stream.begin_forward()  # of nothing: time counts from here
            return self._scores
        whole = max(LOGITS_BYTES // (4 * loaded.vocabulary), 1)
        limit = min(loaded.chunk_tokens(len(self._tokens)), most)
        if self._branch > self._computed:
            limit = min(limit, self._branch - self._computed)
        stream = loaded.stream
        last = self.left <= min(limit, whole)
        size = self.left if last else min(limit, self.left - 1)
        if self.request.progress is not None:
            self._tell(0)
            stream.step.passed = partial(self._tell_layer, size, stream.layers)
        stream.begin_forward()
        if last:
            logits: mx.array = loaded.model(self._piece(size), cache=self.cache)
            self._computed += size
            return logits[:, -1, :]
        begun = time.perf_counter()
        loaded.model(self._piece(size), cache=self.cache)
        states = [state for _, state in tree_flatten([entry.state for entry in self.cache])]
        stream.end_forward(*[state for state in states if isinstance(state, mx.array)])
        tracer.prompt(self.number, size, begun, time.perf_counter())
        self._computed += size
        if loaded.kept is not None and self._computed == self._branch:
            self.keep(loaded.kept, self.cache)
        return None

    def _tell(self, more: int) -> None:
        """Say how much of the prompt is computed; nothing while some of it is computed anew."""
        computed = min(self._computed + more, self.prompt_tokens)
        if computed > self._told:
            self._told = computed
            self.request.tell(computed, self.prompt_tokens)

    def _tell_layer(self, size: int, layers: int, group: int) -> None:
        """The same within a chunk, which may take long: each layer counts as a part of it."""
        self._tell(size * group // layers)

    def _piece(self, size: int) -> mx.array:
        return mx.array([self._tokens[self._computed : self._computed + size]], mx.uint32)

    def draw(self, logits: mx.array) -> Drawn:
        """Sample the next token from logits ``[1, vocabulary]``; evaluates nothing."""
        assert self._sampler is not None
        return self._sampler.draw(logits)

    # -- output -------------------------------------------------------------------------------

    def take(self, chosen: TokenLogprob, end_tokens: frozenset[int]) -> FinishReason | None:
        """Note a token and hand it out; says whether it was the last one, and why."""
        text = self._text
        assert text is not None
        if not self._first:
            self._first = time.perf_counter()
            self._tell(self.prompt_tokens)
        # The token before is in the cache now, this one is not.
        self._computed = len(self._tokens)
        self._tokens.append(chosen.token)
        asked = self._sampling.logprobs is not None
        if asked:
            self._logprobs.append(chosen)
        finish: FinishReason | None = None
        if chosen.token in end_tokens and not self._sampling.ignore_eos:
            finish = "stop"
        else:
            text.add(chosen.token)
            if text.stopped:
                finish = "stop"
            elif self.generated == self._most:
                finish = "length"
        if finish is not None:
            text.finish()
        self._chunk = Chunk(text.take(), chosen.token, chosen if asked else None, finish)
        if self.request.chunks and finish is None:  # the last one waits for the result
            self.request.post(self._chunk)
        return finish

    def result(self, finish: FinishReason) -> Generation:
        """What there is; the last chunk is handed out with it, unless the request was cut off."""
        result = self._result(finish)
        if self.request.chunks and self._chunk is not None and finish != "cancelled":
            self.request.post(replace(self._chunk, result=result))
        return result

    def _result(self, finish: FinishReason) -> Generation:
        now = time.perf_counter()
        started = self._started or now
        first = self._first or started
        counters = self.counters
        stats = GenerationStats(
            queued_seconds=started - self.request.created,
            time_to_first_token=first - started,
            decode_tokens_per_second=(
                (self.generated - 1) / (now - first) if self.generated > 1 else 0.0
            ),
            hits=counters.hits,
            misses=counters.misses,
            bytes_read=counters.bytes_read,
            stall_seconds=counters.stall_seconds,
            sync_seconds=counters.sync_seconds,
            host_seconds=counters.host_seconds,
            syncs=counters.syncs,
            waves=counters.waves,
        )
        return Generation(
            text=self._text.whole if self._text is not None else "",
            tokens=tuple(self._tokens[self.prompt_tokens :]),
            finish_reason=finish,
            prompt_tokens=self.prompt_tokens,
            stats=stats,
            logprobs=tuple(self._logprobs) if self._sampling.logprobs is not None else None,
            cached_tokens=self.cached or 0,
        )


class _Text:
    """Turns token ids into text piece by piece, up to a stop text."""

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._detokenizer = tokenizer.detokenizer if tokenizer is not None else None
        self._stop = StopText(sampling.stop)
        self._taken = 0
        self.whole = ""

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def add(self, token: int) -> None:
        if self._detokenizer is not None:
            self._detokenizer.add_token(token)
            self.whole += self._stop.feed(self._detokenizer.last_segment)

    def finish(self) -> None:
        if self._detokenizer is not None:
            self._detokenizer.finalize()
            self.whole += self._stop.feed(self._detokenizer.last_segment)
            self.whole += self._stop.finish()

    def take(self) -> str:
        piece = self.whole[self._taken :]
        self._taken = len(self.whole)
        return piece
