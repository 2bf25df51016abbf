"""Checks that the arguments of calls share: numbers, flags, paths, and how a value is shown."""

from __future__ import annotations

import errno
import math
import os
import reprlib
import stat
from numbers import Integral, Real
from pathlib import Path

from .errors import InvalidRequest, TraceUnwritable

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_LONGEST_NAME = 200


def show(value: object) -> str:
    """A value as an error message shows it: short, and never an error itself."""
    try:
        return _repr.repr(value)
    except Exception:  # a repr that fails; a whole number of thousands of digits
        return f"<{type(value).__name__}>"


def show_path(path: str | Path) -> str:
    """A path or name with its middle left out when it is far too long."""
    text = str(path)
    half = _LONGEST_NAME // 2
    return text if len(text) <= _LONGEST_NAME else f"{text[:half]}...{text[-half:]}"


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def whole(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """A whole number within bounds as a plain int; also takes numpy's.

    Raises:
        InvalidRequest: it is none, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(f"{name}={show(value)} must be a whole number")
    number = int(value)
    if number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidRequest(f"{name}={show(number)} must be {bound}")
    return number


def real(name: str, value: object, least: float, most: float) -> float:
    """A finite number within bounds as a plain float; also takes numpy's.

    Raises:
        InvalidRequest: it is none, or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name}={show(value)} must be a finite number")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name}={show(value)} must be a finite number")
    if not least <= number <= most:
        raise InvalidRequest(f"{name}={show(number)} must be from {least:g} to {most:g}")
    return number


def path_argument(name: str, value: object) -> Path | None:
    """A path given by the caller; None stays None. Does not look at the file system.

    Raises:
        InvalidRequest: it is no path, or one that no file system can have.
    """
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}={show(value)} must be a path")
    if not text:
        raise InvalidRequest(f"{name} is an empty path")
    if "\0" in text:
        raise InvalidRequest(f"{name}={show(text)} contains a null character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}={show(text)} cannot be the name of a file") from None
    return Path(text)


def cache_path_argument(name: str, value: object) -> Path:
    """The path of a file of saved prompts, whose name tells MLX what it is.

    Raises:
        InvalidRequest: it is no path, or ends in something else.
    """
    path = path_argument(name, value)
    if path is None or path.suffix != ".safetensors":
        shown = show(value if path is None else str(path))
        raise InvalidRequest(f"{name}={shown} must be a path that ends in .safetensors")
    return path


def check_trace_path(trace: object) -> Path | None:
    """The path of a trace file; None for no trace.

    Looks at what lies there already: opening a pipe that nobody reads would wait for ever.

    Raises:
        InvalidRequest: it is no path.
        TraceUnwritable: something other than a regular file (or the null device) lies there.
    """
    path = path_argument("trace", trace)
    if path is None:
        return None
    try:
        found = path.stat()
    except FileNotFoundError:
        return path  # whether it can be made turns out when it is opened
    except OSError as error:
        raise TraceUnwritable(path, error) from error
    if stat.S_ISDIR(found.st_mode):
        raise TraceUnwritable(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    if not stat.S_ISREG(found.st_mode) and not os.path.samestat(found, os.stat(os.devnull)):
        raise TraceUnwritable(path, OSError(errno.EINVAL, "it is not a regular file"))
    return path
