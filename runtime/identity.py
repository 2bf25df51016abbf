"""Tells models apart whose caches are of no use to each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from ..io.manifest import MANIFEST, fingerprint


def model_identity(directory: Path, files: Sequence[Path], widen: bool) -> str:
    """Digest of what the content of a cache depends on: weights, config, type of the numbers.

    Args:
        directory: of the checkpoint or packed store.
        files: its safetensors files.
        widen: whether 16-bit floats are computed with as float32.
    """
    digest = blake2b(fingerprint(files).encode(), digest_size=16)
    for name in ("config.json", MANIFEST):  # the manifest has checksums of all experts
        with suppress(FileNotFoundError):
            digest.update(name.encode() + (directory / name).read_bytes())
    digest.update(b"float32" if widen else b"checkpoint")
    return digest.hexdigest()
