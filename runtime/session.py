"""`moestream run` and `moestream chat`: an engine, a prompt, and text that appears as it comes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.errors import ReadFailed
from .policies import DEFAULT_POLICY, PolicyName
from .terminal import (
    Terminated,
    interrupts_held,
    note,
    patient,
    progress_bar,
    run_until_signal,
    show_error,
)

if TYPE_CHECKING:
    from .api import Chunk, Generation
    from .engine import Engine, SamplingArguments
    from .plan import Plan
    from .sampling import Message, Prompt


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to open and how; see ``Engine.open``."""

    model: str
    memory: str | None = None
    slots: int | None = None
    context: int | None = None
    dtype: str | None = None
    direct: bool = True
    lanes: int | None = None
    prefetch: str = "off"
    trace: str | None = None
    checksum: bool = False
    policy: PolicyName = DEFAULT_POLICY
    read_timeout: float | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    prefill_chunk: int | None = None
    prompt_cache: int | bool | None = None


async def open_engine(options: EngineOptions) -> Engine:
    """Open the engine under a progress bar."""
    from .engine import Engine
    from .prefetch import PROMPTS, PrefetchConfig

    arguments: dict[str, Any] = asdict(options)
    knows = ("lanes", "read_timeout", "max_running", "max_waiting", "prefill_chunk", "prompt_cache")
    for name in knows:
        if arguments[name] is None:  # the engine knows its defaults
            del arguments[name]
    named = {"on": PrefetchConfig(), "prompts": PROMPTS}
    arguments["prefetch"] = named.get(options.prefetch, "off")
    with progress_bar("loading", sizes=True) as progress:
        return await Engine.open(**arguments, progress=progress)


def check_request(prompt: Prompt, sampling: SamplingArguments) -> None:
    """Refuse a request before a large model has been loaded for it."""
    with interrupts_held():
        from . import engine  # noqa: F401  # not used here, but now it is there
        from .sampling import check_prompt, make_sampling

    check_prompt(prompt)
    make_sampling(sampling)


async def follow(
    engine: Engine, prompt: Prompt, sampling: SamplingArguments, show: Callable[[Chunk], None]
) -> Generation:
    """Generate one answer, showing each token as it comes."""
    result: Generation | None = None
    with ExitStack() as bar:
        report = bar.enter_context(progress_bar("reading the prompt", late=True))
        progress = None if report is None else patient(report)
        async with aclosing(engine.stream(prompt, progress=progress, **sampling)) as chunks:
            async for chunk in chunks:
                bar.close()  # it would write over the text
                show(chunk)
                result = chunk.result
    assert result is not None  # the last chunk of an answer has it
    return result


async def load_prompts(engine: Engine, path: Path | None) -> None:
    """Take up the prompts that an earlier run has saved."""
    if path is not None:
        await engine.load_prompt_cache(path)


def _existing(path: Path | None) -> Path | None:
    return path if path is not None and path.exists() else None


async def save_prompts(engine: Engine, path: Path | None) -> None:
    """Save the prompts for the next run; a dead engine has none."""
    if path is not None and engine.alive:
        await engine.save_prompt_cache(path)


def run_prompt(
    options: EngineOptions,
    prompt: Prompt,
    sampling: SamplingArguments,
    *,
    quiet: bool,
    prompts: Path | None = None,
) -> tuple[Generation, Plan]:
    """Generate one answer; unless quiet, it is written to standard output as it comes.

    Args:
        options: what to open and how.
        prompt: text or messages.
        sampling: of the answer.
        quiet: write nothing.
        prompts: file of saved prompts, read before and written behind the answer.
    """
    check_request(prompt, sampling)
    earlier = _existing(prompts)

    async def generate() -> tuple[Generation, Plan]:
        async with await open_engine(options) as engine:
            await load_prompts(engine, earlier)
            if quiet:
                result = await engine.generate(prompt, **sampling)
            else:
                note_changes(options, engine.plan, sampling)
                result = await follow(engine, prompt, sampling, on_chunk)
            await save_prompts(engine, prompts)
            return result, engine.plan

    begun = False

    def on_chunk(chunk: Chunk) -> None:
        nonlocal begun
        begun = True
        show(chunk)

    try:
        return run_until_signal(generate())
    finally:
        if begun:  # what is said next, an error too, begins a line of its own
            print(flush=True)


def show(chunk: Chunk) -> None:
    """Write a chunk's text to standard output at once."""
    print(chunk.text, end="", flush=True)


def read_prompt(text: str) -> str:
    """The text of a prompt; "-" stands for standard input, without the end of its last line."""
    return sys.stdin.read().removesuffix("\n") if text == "-" else text


def messages(text: str, system: str | None) -> list[Message]:
    """A chat's beginning."""
    head = [{"role": "system", "content": system}] if system is not None else []
    return [*head, {"role": "user", "content": text}]


def stats_line(result: Generation) -> str:
    """What an answer cost, in a line."""
    from .cli_output import percent, size

    stats = result.stats
    first = stats.time_to_first_token
    cached = f" ({result.cached_tokens} cached)" if result.cached_tokens else ""
    parts = [
        f"prompt {result.prompt_tokens} tokens{cached} in {first:.{2 if first < 100 else 0}f} s",
        f"answer {len(result.tokens)} at {stats.decode_tokens_per_second:.1f}/s",
    ]
    if stats.hits + stats.misses == 0:
        parts.append("all experts resident")
    else:
        seconds = first + _decode_seconds(result)
        parts += [
            f"hits {percent(stats.hit_rate)}",
            f"read {size(stats.bytes_read)}",
            f"stalled {stats.stall_seconds / seconds if seconds else 0.0:.0%}",
        ]
    return "; ".join(parts)


def _decode_seconds(result: Generation) -> float:
    rate = result.stats.decode_tokens_per_second
    return (len(result.tokens) - 1) / rate if rate else 0.0


# -- what was not done as asked -----------------------------------------------------------------


def note_changes(
    options: EngineOptions, plan: Plan, sampling: SamplingArguments, longest: int | None = None
) -> None:
    """A line on standard error for each argument that was ignored, cut or is doubtful.

    Args:
        options: as they were given.
        plan: what was made of them.
        sampling: of the first request.
        longest: tokens that the model was made for; looked up where that is needed.
    """
    if options.context is not None and longest is None:
        longest = _limit_of(options.model)
    for line in changes(options, plan, sampling.get("max_tokens"), longest):
        note(line)


def changes(
    options: EngineOptions, plan: Plan, max_tokens: int | None, longest: int | None
) -> Iterator[str]:
    """What ``note_changes`` says."""
    import psutil

    from .cli_output import size
    from .plan import parse_size

    memory, slots, context = options.memory, options.slots, options.context
    if slots is not None and memory == "all":
        yield f"--slots {slots} is ignored: --memory all holds every expert"
    elif slots is not None:
        if memory is not None:
            yield f"--memory {memory} is ignored: --slots says what is held"
        if slots > max(plan.slots):
            yield f"--slots {slots} is more than there are: layers have {max(plan.slots)} experts"
    elif memory is not None and memory != "all":
        total = int(psutil.virtual_memory().total)
        if parse_size(memory) > total:
            yield f"--memory {memory} is more than this machine has ({size(total)})"
    if context is not None and longest is not None and context > longest:
        yield f"--context {context} is beyond the {longest} tokens that the model was made for"
    if max_tokens is not None and max_tokens > plan.context:
        yield f"--max-tokens {max_tokens} is cut: prompt and answer get {plan.context} tokens"


def _limit_of(model: str) -> int | None:
    """Tokens that a model was made for, which has been opened and so is on this machine."""
    from huggingface_hub import snapshot_download

    from .assembly import _longest_context, _text_config

    try:
        directory = Path(model).expanduser()
        if not directory.is_dir():
            directory = Path(snapshot_download(model, local_files_only=True))
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):  # it has gone meanwhile
        return None
    return _longest_context(_text_config(config)) if isinstance(config, dict) else None


# -- chat ---------------------------------------------------------------------------------------


def chat(
    options: EngineOptions,
    sampling: SamplingArguments,
    *,
    system: str | None,
    stats: bool,
    prompts: Path | None = None,
) -> None:
    """Answer lines from standard input until it ends.

    Lines are read outside of the event loop, where Ctrl-C is a KeyboardInterrupt at once; inside of
    it, it cancels the answer.

    Args:
        options: what to open and how.
        sampling: of each answer.
        system: message before the first line.
        stats: tell what each answer cost.
        prompts: file of saved prompts, read at the beginning and written at the end.
    """
    check_request("x", sampling)
    with asyncio.Runner() as runner:
        engine = runner.run(open_engine(options))
        try:
            note_changes(options, engine.plan, sampling)
            runner.run(load_prompts(engine, _existing(prompts)))
            try:
                _Chat(runner, engine, sampling, system, stats).loop()
            finally:
                runner.run(save_prompts(engine, prompts))
        finally:
            runner.run(engine.aclose())


class _Chat:
    """A conversation with its history."""

    def __init__(
        self,
        runner: asyncio.Runner,
        engine: Engine,
        sampling: SamplingArguments,
        system: str | None,
        stats: bool,
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._sampling = sampling
        self._system = system
        self._stats = stats
        self._history: list[Message] = []

    def loop(self) -> None:
        """Read and answer until /quit or the end of the input."""
        note("/reset starts a new conversation, /quit ends; Ctrl-C stops an answer")
        while (line := _read_line()) is not None:
            command = line.strip()
            if command == "/quit":
                return
            if command == "/reset":
                self._history.clear()
                note("a new conversation")
            elif command.startswith("/"):
                note(f"there is no command {command.split()[0]}; there are /reset and /quit")
            elif command:
                self._turn(line)

    def _turn(self, line: str) -> None:
        from .errors import PromptTooLong

        history = [*self._history, *messages(line, None if self._history else self._system)]
        pieces: list[str] = []
        result: Generation | None = None

        def on_chunk(chunk: Chunk) -> None:
            pieces.append(chunk.text)
            show(chunk)

        try:
            result = self._runner.run(follow(self._engine, history, self._sampling, on_chunk))
        except Terminated:
            raise
        except KeyboardInterrupt:
            pass
        except PromptTooLong as error:
            if not self._history:
                raise
            note(
                f"the conversation has {error.tokens} tokens, and the context holds "
                f"{error.context}: /reset starts a new one"
            )
            return
        except ReadFailed as error:  # the next request may work
            if pieces:
                print(flush=True)
            show_error(error, debug=False)
            return
        print(flush=True)
        # What there is of a stopped answer is part of the conversation.
        if answer := "".join(pieces):
            self._history = [*history, {"role": "assistant", "content": answer}]
        self._report(result)

    def _report(self, result: Generation | None) -> None:
        if result is None:
            note("(stopped)")
            return
        if self._stats:
            note(stats_line(result))
        if result.prompt_tokens + len(result.tokens) >= self._engine.plan.context:
            note("(the context is full: /reset starts a new conversation)")


def _read_line() -> str | None:
    """The next line, None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    try:
        import readline  # noqa: F401  # gives input() its editing keys
    except ImportError:
        pass
    try:
        return input("> ")
    except EOFError:
        print()
        return None
