"""Small files that are kept between runs: measurements of drives, profiles of models.

They lie in the user's cache directory, or in ``MOESTREAM_CACHE_DIR``; when that is set and empty,
nothing is kept. A file that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

VARIABLE = "MOESTREAM_CACHE_DIR"


def cache_folder() -> Path | None:
    """Where the files lie; None when nothing is to be kept."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "moestream"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moestream"


def load(kind: str, key: str) -> Any:
    """What was saved last under this key, or None."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        return json.loads((folder / _name(kind, key)).read_text())
    except (OSError, ValueError):
        return None


def save(kind: str, key: str, value: Any) -> bool:
    """Save plain values; returns whether that was possible.

    Args:
        kind: of file, a word.
        key: what it is about; anything, also long.
        value: for ``json.dumps``.
    """
    folder = cache_folder()
    if folder is None:
        return False
    path = folder / _name(kind, key)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value))
        partial.replace(path)  # readers see the old file or the new one
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True


def drive_key(path: Path) -> str:
    """Names the drive that a path is on: the machine and the place where it is mounted."""
    place = path.resolve()
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return f"{platform.node()} {place}"


def model_key(directory: Path, *, variant: str) -> str:
    """Names a model on this machine: its config, the names and sizes of its weights, its place.

    Args:
        directory: of the checkpoint or store.
        variant: what else the cost of a token depends on, such as the type it is computed in.
    """
    digest = hashlib.sha256()
    directory = directory.resolve()
    for text in (platform.node(), str(directory), variant):
        digest.update(text.encode() + b"\n")
    with suppress(OSError):
        digest.update((directory / "config.json").read_bytes())
    for file in sorted([*directory.glob("*.safetensors"), *directory.glob("experts/*.bin")]):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()


def _name(kind: str, key: str) -> str:
    return f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
