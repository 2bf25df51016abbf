"""What can go wrong before or while another system is measured."""

from __future__ import annotations

from pathlib import Path


class RivalError(Exception):
    """Something that the caller has to put right; the message says what."""


class CheckoutMissing(RivalError):
    """The other system's files are not where they should be.

    Args:
        option: the option that named the place.
        directory: the place.
        lacks: the file or folder that should be in it.
    """

    def __init__(self, option: str, directory: Path, lacks: str) -> None:
        super().__init__(
            f"{option} {directory} has no {lacks}; scripts/rivals/README.md says how to get it"
        )


class ModelUnsupported(RivalError):
    """The other system does not run this checkpoint."""

    def __init__(self, system: str, directory: Path, reason: object) -> None:
        super().__init__(f"{system} does not run {directory}: {reason}")


class NoControlGroup(RivalError):
    """No control group with a memory limit can be made."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            f"no memory limit can be set here ({reason}); run as root, or leave --memory-limit out "
            "and start the runner with `systemd-run --user --scope -p MemoryMax=BYTES`"
        )
