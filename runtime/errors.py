"""Errors about requests and the engine's life."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.errors import MoestreamError

if TYPE_CHECKING:
    from .api import Generation

_PARTS = {
    "process": "process",
    "trunk": "trunk",
    "kv": "KV cache",
    "prompt_cache": "prompt cache",
    "scratch": "prompt scratch",
    "cache": "MLX's buffers",
    "staging": "staging",
    "slots": "slots",
    "reserve": "reserve",
}


class InvalidRequest(MoestreamError, ValueError):
    """An argument of a call is outside of what makes sense; says which and what would do."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the context."""

    def __init__(self, tokens: int, context: int) -> None:
        super().__init__(
            f"the prompt has {tokens} tokens but the context holds {context}; shorten the prompt "
            "or open the engine with a larger context"
        )
        self.tokens = tokens
        self.context = context


class BudgetTooSmall(MoestreamError):
    """The memory budget does not hold the trunk and the smallest slot pools.

    Attributes:
        given: the budget in bytes.
        minimum: the smallest budget in bytes that would do.
        parts: what the smallest budget would go to, in bytes, by the names of ``moestream plan``.
    """

    def __init__(self, given: int, minimum: int, parts: Mapping[str, int]) -> None:
        listed = ", ".join(
            f"{_PARTS[name]} {budget_text(nbytes)}" for name, nbytes in parts.items() if nbytes
        )
        super().__init__(
            f"memory={budget_text(given)} is too small: "
            f"this model needs at least {budget_text(minimum)} ({listed})"
        )
        self.given = given
        self.minimum = minimum
        self.parts = dict(parts)

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for ``json.dumps``."""
        return {
            "error": "budget too small",
            "message": str(self),
            "budget": self.given,
            "minimum": self.minimum,
            "parts": self.parts,
        }


class HubUnavailable(MoestreamError):
    """A model id could not be downloaded."""


class TokenizerBroken(MoestreamError):
    """The checkpoint has a tokenizer that cannot be loaded; the cause is chained.

    Args:
        directory: of the checkpoint.
        problem: what is wrong, in one line.
    """

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(
            f"the tokenizer in {directory} cannot be loaded: {problem}; download its tokenizer "
            "files again, or remove them to give prompts as token ids"
        )
        self.directory = directory
        self.problem = problem


class TraceUnwritable(MoestreamError):
    """The trace file cannot be written."""

    def __init__(self, path: Path, error: OSError) -> None:
        name = str(path)
        if len(name) > 200:
            name = f"{name[:100]}...{name[-100:]}"
        super().__init__(f"cannot write a trace to {name}: {error.strerror or error}")


class OpenFailed(MoestreamError):
    """The system or MLX refused something while the engine was being opened; see its cause."""

    def __init__(self, cause: BaseException) -> None:
        line = str(cause).strip().partition("\n")[0]
        super().__init__(
            f"the engine cannot be opened ({type(cause).__name__}: {line}); "
            "check files, free memory, the limit of open files and that of threads"
        )


class EngineBusy(MoestreamError):
    """As many requests are running and waiting as the engine takes.

    Attributes:
        running, waiting: the engine's limits.
    """

    def __init__(self, running: int, waiting: int) -> None:
        super().__init__(
            f"{running} requests are running and {waiting} waiting, which is all that the engine "
            "takes; try again later, or open it with a larger max_waiting"
        )
        self.running = running
        self.waiting = waiting


class RequestTimeout(MoestreamError):
    """A request has not ended within its ``timeout``; it has been stopped.

    Attributes:
        seconds: the timeout.
        generation: what there was by then, with the finish reason "cancelled"; None when the
            request had not begun, or the engine did not answer.
    """

    def __init__(self, seconds: float, generation: Generation | None = None) -> None:
        there = 0 if generation is None else len(generation.tokens)
        super().__init__(
            f"the request took longer than its timeout of {seconds:g} s and was stopped after "
            f"{there} tokens; give it more time or fewer tokens"
        )
        self.seconds = seconds
        self.generation = generation


class PromptCacheFileError(MoestreamError):
    """A file of saved prompts cannot be used, or not be written.

    Args:
        path: of the file.
        problem: what is wrong, in one clause.
        remedy: what the user can do about it, in one clause; "" for nothing.
        writing: whether it was to be written.
    """

    def __init__(
        self,
        path: Path,
        problem: str,
        remedy: str = "delete the file to begin with an empty prompt cache, or give another one",
        *,
        writing: bool = False,
    ) -> None:
        what = "cannot be written" if writing else "cannot be used"
        end = f"; {remedy}" if remedy else ""
        super().__init__(f"the prompt cache {path} {what}: {problem}{end}")
        self.path = path
        self.problem = problem


class EngineClosed(MoestreamError):
    """The engine has been closed."""

    def __init__(self) -> None:
        super().__init__("the engine has been closed; open a new one")


class EngineDead(MoestreamError):
    """The engine's compute thread or I/O loop has died; the cause is chained."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the engine has died ({cause!r}); close it and open a new one")
        self.__cause__ = cause


class GenerationFailed(MoestreamError):
    """One request failed for a reason inside MLX or mlx-lm; the cause is chained."""


def budget_text(nbytes: int) -> str:
    """A budget as one would type it, rounded up: the smallest one has to do as it is written."""
    if nbytes < 10**6:
        return f"{nbytes} bytes"
    if nbytes >= 10**9:
        return f"{-(-nbytes // 10**7) / 100:.2f}GB"
    return f"{-(-nbytes // 10**6)}MB"


class PackError(MoestreamError):
    """A packed store cannot be written."""


class TargetExists(PackError):
    """There is something where the store is to be, or an unfinished store made otherwise."""


class NotEnoughSpace(PackError):
    """The drive has no room for the store.

    Attributes:
        needed: bytes still to be written.
        free: bytes that the drive had left.
    """

    def __init__(self, target: Path, needed: int, free: int, *, begun: bool) -> None:
        then = "the same command again goes on where this one stopped" if begun else "try again"
        super().__init__(
            f"the drive is full: {target} needs {budget_text(needed)} more and "
            f"{budget_text(free)} are free; free some space, then {then}"
        )
        self.needed = needed
        self.free = free
