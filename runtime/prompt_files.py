"""Prompt caches in files: mlx-lm's format, with tokens, model and checksums in its metadata.

A file holds the layers of one kept sequence after those of another. Behind each of them comes one
more ``ArraysCache`` with the logits at the ends of prompts.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import ArraysCache, load_prompt_cache, save_prompt_cache

from ..io.errors import CheckpointError
from .core import Core
from .errors import InvalidRequest, PromptCacheFileError
from .kvsize import arrays, parts
from .prompt_cache import PromptCache, is_divisible, sequence_bytes
from .prompt_index import Kept, as_tokens
from .scheduler import _drop_frames

VERSION = "1"

_Work = Callable[[PromptCache, str], int]


def save(path: Path, kept: PromptCache, model: str) -> int:
    """Write all kept sequences, the oldest first; returns how many. None leave no file.

    The file appears as a whole or not at all.

    Raises:
        PromptCacheFileError: it cannot be written, or mlx-lm cannot save caches of this model.
    """
    sequences = list(kept.index)
    if not sequences:
        return 0
    caches: list[Any] = []
    about = []
    for one in sequences:
        own = _layers(one)
        for part in parts(own):
            if getattr(mlx_caches, type(part).__name__, None) is not type(part):
                problem = f"mlx-lm cannot save caches of the class {type(part).__name__}"
                raise PromptCacheFileError(path, problem, "", writing=True)
        tokens = one.tokens.tolist()
        about.append({"tokens": tokens, "scored": [*one.scores], "crc32": _checksum(own, tokens)})
        caches += own
    metadata = {"moestream": VERSION, "model": model, "sequences": json.dumps(about)}
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    try:
        save_prompt_cache(str(partial_path), caches, metadata)
        with open(partial_path, "rb") as file:
            os.fsync(file.fileno())
        partial_path.replace(path)
    except (OSError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise PromptCacheFileError(path, problem, "", writing=True) from error
    finally:
        with suppress(OSError):
            partial_path.unlink(missing_ok=True)
    return len(sequences)


def load(path: Path, kept: PromptCache, model: str) -> int:
    """Add the sequences of a file to those that are kept; returns how many there was room for.

    The newest come first when there is not room for all.

    Raises:
        PromptCacheFileError: there is no such file, it is damaged, or of another model.
    """
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise PromptCacheFileError(path, error.strerror or str(error), "") from error
    try:
        header: Any = mx.load(str(path), return_metadata=True)
    except RuntimeError as error:
        raise PromptCacheFileError(path, "it is damaged") from error
    metadata = header[1]
    if metadata.get("0.moestream") != VERSION:
        raise PromptCacheFileError(path, "no version of moestream that is known here has saved it")
    if metadata.get("0.model") != model:
        raise PromptCacheFileError(
            path, "it was saved with another model, or with another dtype of this one"
        )
    try:
        found = _read(path)
        room, chosen = kept.index.limit, []
        for one in reversed(found):
            if (room := room - one.nbytes) < 0:
                break
            chosen.append(one)
        there = [one for one in chosen if kept.index.holds(one.tokens) is not None]
        chosen = [one for one in chosen if one not in there]
        kept.index.make_room(sum(one.nbytes for one in chosen))  # before they are read
        for one in chosen:
            own = _layers(one)
            mx.eval(arrays(own))
            if _checksum(own, one.tokens.tolist()) != one.crc32:
                raise ValueError("a checksum differs")
    except Exception as error:  # what mlx-lm makes of damaged files
        raise PromptCacheFileError(path, "it is damaged") from error
    return len(there) + sum(kept.add(one) for one in reversed(chosen))


class _Saved(Kept):
    """A sequence from a file, whose arrays have not been read."""

    crc32 = 0


def _read(path: Path) -> list[_Saved]:
    caches, metadata = load_prompt_cache(str(path), return_metadata=True)
    about = json.loads(metadata["sequences"])
    layers, left = divmod(len(caches), len(about))
    if left:
        raise ValueError("layers are missing")
    found = []
    for number, entry in enumerate(about):
        own = caches[number * layers : (number + 1) * layers]
        tokens = as_tokens(entry["tokens"])
        scores = {int(prefix): own[-1][index] for index, prefix in enumerate(entry["scored"])}
        one = _Saved(tokens, own[:-1], is_divisible(own[:-1], len(tokens)), 0, scores)
        one.nbytes = sequence_bytes(one)
        one.crc32 = entry["crc32"]
        found.append(one)
    return found


def _layers(kept: Kept) -> list[Any]:
    """The caches of a sequence as they stand in a file."""
    scores = ArraysCache(0)
    scores.cache = [*kept.scores.values()] or [None]  # mlx-lm does not save an empty list
    return [*kept.caches, scores]


def _checksum(caches: Iterable[Any], tokens: list[int]) -> int:
    """CRC-32 of all that mlx-lm saves of caches, and of their tokens."""
    value = zlib.crc32(json.dumps(tokens).encode())
    for name, leaf in tree_flatten([entry.state for entry in caches]):
        value = zlib.crc32(name.encode(), value)
        if isinstance(leaf, mx.array):
            value = zlib.crc32(f"{leaf.dtype} {leaf.shape}".encode(), value)
            if leaf.size:
                numbers: Any = leaf.reshape(-1).view(mx.uint8)
                value = zlib.crc32(memoryview(numbers), value)
        else:
            value = zlib.crc32(repr(leaf).encode(), value)
    return value


class FileJob:
    """Saves or loads on the compute thread, between two rounds of the requests.

    Args:
        path: of the file.
        work: ``save`` or ``load``.

    Attributes:
        done: how many sequences.
    """

    def __init__(self, path: Path, work: Callable[[Path, PromptCache, str], int]) -> None:
        self._work: _Work = partial(work, path)
        self.done: Future[int] = Future()
        self.done.set_running_or_notify_cancel()  # so that nobody who waits can cancel it

    def run(self, core: Core) -> None:
        """Do it; only the caller hears of a failure."""
        try:
            if core.loaded.kept is None:
                raise InvalidRequest(
                    "the engine keeps no prompts; open it with prompt_cache=True or a size"
                )
            count = self._work(core.loaded.kept, core.identity())
        except (CheckpointError, InvalidRequest, OSError, PromptCacheFileError) as error:
            _drop_frames(error)
            self.done.set_exception(error)
        else:
            self.done.set_result(count)

    def abort(self, error: BaseException) -> None:
        """The thread has ended first."""
        self.done.set_exception(error)
