"""The root of all errors, and those about files: each says what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path


class MoestreamError(Exception):
    """Base class of every error that moestream raises on purpose."""


class CheckpointError(MoestreamError):
    """A model directory or one of its files cannot be used."""


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint at the given place."""


class CorruptCheckpoint(CheckpointError):
    """A file contradicts itself or the index: cut off, overlapping, unknown dtype, bad JSON.

    Args:
        path: the file at fault.
        problem: what is wrong with it, in one clause.
        remedy: what the user can do about it, in one clause.
    """

    def __init__(
        self,
        path: Path,
        problem: str,
        remedy: str = "download or convert the checkpoint again",
    ) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path = path
        self.problem = problem


class StoreMismatch(CheckpointError):
    """The parts of a packed store do not belong together, or it is of an unknown version.

    Args:
        directory: of the store.
        problem: what does not fit, in one clause.
    """

    def __init__(self, directory: Path, problem: str, remedy: str = "pack the model again") -> None:
        super().__init__(f"{directory} is not a sound packed store: {problem}; {remedy}")
        self.directory = directory
        self.problem = problem


class ReadFailed(MoestreamError):
    """The bytes of one expert could not be read.

    The slot it was meant for is not published; the engine stays usable and a later request
    asks for the expert anew.
    """

    _remedy = ""  # ends the message

    def __init__(
        self, *, layer: int, expert: int, component: str, path: Path, offset: int, problem: str
    ) -> None:
        super().__init__(
            f"cannot read expert {expert} of layer {layer} ({component}) "
            f"from {path} at offset {offset}: {problem}{self._remedy}"
        )
        self.layer = layer
        self.expert = expert
        self.component = component
        self.path = path
        self.offset = offset
        self.problem = problem


class ChecksumMismatch(ReadFailed):
    """The bytes of one expert in a packed store are not those that were packed."""

    _remedy = "; pack the model again"


class ReadTimeout(ReadFailed):
    """The drive has not answered to the read of one expert for ``read_timeout`` seconds.

    The slot it was meant for stays out of use until the drive answers; the engine stays usable.

    Attributes:
        seconds: how long it has been waited for.
    """

    def __init__(
        self,
        *,
        layer: int,
        expert: int,
        component: str,
        path: Path,
        offset: int,
        seconds: float,
        more: str = "",
    ) -> None:
        super().__init__(
            layer=layer,
            expert=expert,
            component=component,
            path=path,
            offset=offset,
            problem=f"the drive has not answered for {seconds:.3g} s{more}; check the drive or the "
            "network that it is on, or raise read_timeout, then try again",
        )
        self.seconds = seconds


class ReadsPurged(MoestreamError):
    """The queued reads of a request were dropped because it was cancelled. Never escapes."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled before its reads began")


class LoopClosed(MoestreamError):
    """The I/O loop has been closed, or has died, and takes no more reads."""


def loop_died(cause: BaseException) -> LoopClosed:
    """What those get who wait for reads of a loop that has died."""
    error = LoopClosed(f"the I/O loop died: {cause!r}")
    error.__cause__ = cause
    return error
