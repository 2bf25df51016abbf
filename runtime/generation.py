"""The token loop of one request: prompt in large chunks, then one forward per token.

A streamed model hands a token out before the next forward starts: a forward that waits for experts
would make it one forward late. With everything resident the next forward is started first, as in
mlx-lm's loop: it runs on the device while the token is handed out.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..io.errors import ReadsPurged
from .api import Chunk, FinishReason, Generation, GenerationStats, TokenLogprob
from .arguments import first_line
from .errors import InvalidRequest, PromptTooLong
from .plan import LOGITS_BYTES
from .request import Cancelled, Request
from .sampling import Prompt, Sampling, StopText, check_tokens
from .streaming import ExpertStream, Step, StepCounters
from .tracing import Tracer


@dataclass(slots=True)
class LoadedModel:
    """What the token loop works with. Lives on the compute thread.

    Attributes:
        model: the mlx-lm model with streaming switches.
        tokenizer: mlx-lm's TokenizerWrapper, or None when the checkpoint has none.
        end_tokens: token ids that end a generation.
        stream: runs the streamed experts.
        vocabulary: number of logits.
        context: most tokens of prompt and answer together.
        chunk_tokens: length of a prompt -> tokens to compute at once.
        resident: no layer is streamed.
    """

    model: Any
    tokenizer: Any
    end_tokens: frozenset[int]
    stream: ExpertStream
    vocabulary: int
    context: int
    chunk_tokens: Callable[[int], int]
    resident: bool


class TokenLoop:
    """Runs one request to its end.

    Args:
        loaded: the model.
        request: whose turn it is.
        tracer: gets an event per token and prompt chunk.
        check: raises when the request or the engine is to stop.
    """

    def __init__(
        self, loaded: LoadedModel, request: Request, *, tracer: Tracer, check: Callable[[], None]
    ) -> None:
        self._loaded = loaded
        self._request = request
        self._sampling = request.sampling
        self._tracer = tracer
        self._check = check
        self._cache: list[Any] = []
        self._text = _Text(loaded.tokenizer, request.sampling)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._chunk: Chunk | None = None
        self.counters = StepCounters()
        self.prompt_tokens = 0

    def run(self) -> Generation:
        """Generate; chunks are posted on the way when the request wants them.

        Raises:
            InvalidRequest: the prompt does not fit, or an argument the vocabulary.
            ReadFailed: an expert could not be read.
        """
        loaded, sampling = self._loaded, self._sampling
        started = time.perf_counter()
        prompt = encode(loaded, self._request.prompt)
        self.prompt_tokens = len(prompt)
        sampling.check_vocabulary(loaded.vocabulary)
        room = loaded.context - len(prompt)
        if room < 1:
            raise PromptTooLong(len(prompt), loaded.context)
        loaded.stream.step = Step(self._request.number, self._check, self.counters)
        self._cache = make_prompt_cache(loaded.model)
        mx.random.seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)
        finish: FinishReason = "cancelled"
        first = started
        try:
            finish, first = self._decode(prompt, min(sampling.max_tokens, room))
        except (Cancelled, ReadsPurged):
            pass
        finally:
            loaded.stream.end_forward()
            loaded.stream.end_request()
        result = self._result(finish, started, first)
        if self._request.chunks and self._chunk is not None and finish != "cancelled":
            self._request.post(replace(self._chunk, result=result))
        return result

    def _decode(self, prompt: list[int], most: int) -> tuple[FinishReason, float]:
        """Generate until something ends it; returns what, and when the first token was there."""
        sampler = _Sampler(self._sampling, prompt)
        begun = time.perf_counter()
        drawn = sampler.draw(self._prefill(prompt))
        first = 0.0
        for count in range(1, most + 1):
            ahead: Drawn | None = None
            if self._loaded.resident and 1 < count < most:
                # No layer needs the host: the device goes on while this token is handed out. Not
                # behind the prompt, whose first token should not wait for anything.
                ahead = sampler.draw(self._forward(drawn.token[None]))
                self._loaded.stream.launch(*ahead.arrays())
            self._loaded.stream.end_forward(*drawn.arrays())
            chosen = drawn.resolve()
            now = time.perf_counter()
            first = first or now
            self._tracer.token(self._request.number, chosen.token, begun, now)
            finish = self._emit(chosen, last=count == most)
            if finish is not None:
                return finish, first
            begun = time.perf_counter()
            drawn = ahead or sampler.draw(
                self._forward(mx.array([[chosen.token]], mx.uint32), chosen.token)
            )
        raise AssertionError("the last token always ends the loop")

    # -- model --------------------------------------------------------------------------------

    def _prefill(self, prompt: list[int]) -> mx.array:
        """Logits ``[1, vocabulary]`` behind the prompt.

        The last chunk is one piece as long as its logits are small; otherwise, as in mlx-lm, its
        last token goes alone, so that no logits of the others are computed.
        """
        loaded = self._loaded
        limit = loaded.chunk_tokens(len(prompt))
        whole = max(LOGITS_BYTES // (4 * loaded.vocabulary), 1)
        done = 0
        while len(prompt) - done > min(limit, whole):
            self._check()
            size = min(limit, len(prompt) - done - 1)
            begun = time.perf_counter()
            self._forward(mx.array([prompt[done : done + size]], mx.uint32))
            states = [state for _, state in tree_flatten([entry.state for entry in self._cache])]
            loaded.stream.end_forward(*[state for state in states if isinstance(state, mx.array)])
            self._tracer.prompt(self._request.number, size, begun, time.perf_counter())
            done += size
        return self._forward(mx.array([prompt[done:]], mx.uint32))

    def _forward(self, tokens: mx.array, token: int | None = None) -> mx.array:
        """Logits ``[1, vocabulary]`` behind tokens ``[1, count]``, unevaluated."""
        self._check()
        self._loaded.stream.begin_forward(token)
        logits = self._loaded.model(tokens, cache=self._cache)
        last: mx.array = logits[:, -1, :]
        return last

    # -- output -------------------------------------------------------------------------------

    def _emit(self, chosen: TokenLogprob, *, last: bool) -> FinishReason | None:
        self._tokens.append(chosen.token)
        asked = self._sampling.logprobs is not None
        if asked:
            self._logprobs.append(chosen)
        finish: FinishReason | None = None
        if chosen.token in self._loaded.end_tokens and not self._sampling.ignore_eos:
            finish = "stop"
        else:
            self._text.add(chosen.token)
            if self._text.stopped:
                finish = "stop"
            elif last:
                finish = "length"
        if finish is not None:
            self._text.finish()
        self._chunk = Chunk(self._text.take(), chosen.token, chosen if asked else None, finish)
        if self._request.chunks and finish is None:  # the last one waits for the result
            self._request.post(self._chunk)
        return finish

    def _result(self, finish: FinishReason, started: float, first: float) -> Generation:
        now = time.perf_counter()
        later = len(self._tokens) - 1
        counters = self.counters
        stats = GenerationStats(
            queued_seconds=started - self._request.created,
            time_to_first_token=first - started,
            decode_tokens_per_second=later / (now - first) if later > 0 else 0.0,
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
            text=self._text.whole,
            tokens=tuple(self._tokens),
            finish_reason=finish,
            prompt_tokens=self.prompt_tokens,
            stats=stats,
            logprobs=tuple(self._logprobs) if self._sampling.logprobs is not None else None,
        )


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


class _Sampler:
    """Logits processors, log-probabilities, sampler: in the order of mlx-lm's loop."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampler = sampling.sampler()
        self._processors = sampling.processors()
        self._history = mx.array(list(prompt)) if self._processors else mx.array([])
        self._alternatives = sampling.logprobs

    def draw(self, logits: mx.array) -> Drawn:
        """Sample from logits ``[1, vocabulary]``; evaluates nothing."""
        for processor in self._processors:
            logits = processor(self._history, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = self._sampler(logprobs)
        if self._processors:
            self._history = mx.concatenate([self._history, token.astype(self._history.dtype)])
        if self._alternatives is None:
            return Drawn(token)
        best = mx.argsort(-logprobs, axis=-1)[0, : self._alternatives]
        return Drawn(token, logprobs[0, token[0]], best, logprobs[0, best])


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


def encode(loaded: LoadedModel, prompt: Prompt) -> list[int]:
    """Token ids of a prompt.

    Raises:
        InvalidRequest: there is no tokenizer or chat template for it, or a token id is unknown.
    """
    tokenizer = loaded.tokenizer
    tokens: list[int]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("the checkpoint has no tokenizer; give the prompt as token ids")
        # A text that begins with the special token already (a rendered chat template) keeps one.
        special = not tokenizer.bos_token or not prompt.startswith(tokenizer.bos_token)
        try:
            tokens = list(tokenizer.encode(prompt, add_special_tokens=special))
        except Exception as error:  # of many kinds; all of them are about this text
            raise InvalidRequest(f"the tokenizer refuses this text: {first_line(error)}") from error
    elif not isinstance(prompt[0], Mapping):
        tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
    else:
        if tokenizer is None or not tokenizer.has_chat_template:
            raise InvalidRequest("the checkpoint has no chat template; give the prompt as text")
        tokens = _render(tokenizer, prompt)
    if not tokens:
        raise InvalidRequest("the prompt is empty")
    check_tokens(tokens, loaded.vocabulary)
    return tokens


def _render(tokenizer: Any, messages: Prompt) -> list[int]:
    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages],  # type: ignore[arg-type]
            add_generation_prompt=True,
        )
    except Exception as error:  # templates raise errors of many kinds, meant for the user
        raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
    return tokens
