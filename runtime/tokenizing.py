"""Loads the tokenizer of a checkpoint and finds the tokens that end a generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from ..io.errors import CorruptCheckpoint
from .arguments import first_line, show
from .errors import TokenizerBroken

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model")
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"


def load_tokenizer_of(directory: Path, config: Mapping[str, Any]) -> Any:
    """mlx-lm's tokenizer, or None when the checkpoint comes without one.

    Args:
        directory: of the checkpoint.
        config: its config, as mlx-lm read it.

    Raises:
        CorruptCheckpoint: the config's ``eos_token_id`` is no token id or list of them.
        TokenizerBroken: mlx-lm or transformers cannot load what is there.
    """
    ids = _end_ids(config, directory)
    if not any((directory / name).exists() for name in _FILES):
        return None
    try:
        tokenizer = load_tokenizer(directory, eos_token_ids=ids)
    except BaseException as error:
        # A panic inside the tokenizers library is no Exception, but no reason to end either.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerBroken(directory, _problem(error)) from error
    # Lengths are checked against the context; the tokenizer's own limit is only ever warned about.
    warned = getattr(tokenizer, "deprecation_warnings", None)
    if isinstance(warned, dict):
        warned[_TOO_LONG] = True
    return tokenizer


def end_tokens(
    tokenizer: Any, config: Mapping[str, Any], directory: Path | None = None
) -> frozenset[int]:
    """The token ids that end a generation: those of the config and of the tokenizer.

    Args:
        tokenizer: from ``load_tokenizer_of``.
        config: the checkpoint's config, as mlx-lm read it.
        directory: of the checkpoint, for the error message.

    Raises:
        CorruptCheckpoint: the config's ``eos_token_id`` is no token id or list of them.
    """
    ids = set(_end_ids(config, directory or Path()) or ())
    return frozenset(ids | set(tokenizer.eos_token_ids if tokenizer is not None else ()))


def _end_ids(config: Mapping[str, Any], directory: Path) -> list[int] | None:
    value = config.get("eos_token_id")
    if value is None:
        return None
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CorruptCheckpoint(
            _origin(directory, value),
            f"eos_token_id is {show(value)}, which is neither a token id nor a list of them",
        )
    return ids


def _origin(directory: Path, value: object) -> Path:
    """The file that ``eos_token_id`` comes from: mlx-lm lets the second one override the first."""
    path = directory / "generation_config.json"
    with suppress(OSError, ValueError, AttributeError):
        if json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") == value:
            return path
    return directory / "config.json"


def _problem(error: BaseException) -> str:
    line = first_line(error)
    if isinstance(error, KeyError):
        return f"its files lack {line}"
    return line if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {line}"
