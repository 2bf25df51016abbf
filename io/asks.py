"""What is said between the owner of the slots and the loop that reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .queue import Entry, Key


class ReadHost(Protocol):
    """Whoever owns the slots that reads go into.

    ``read`` runs in a lane thread and blocks. ``finish`` runs in a lane for a demand that was read
    without error, and the rest on the loop thread; all of them must be short. Each key that was
    asked for ends in exactly one ``finish``, ``abandoned``, ``dropped`` or ``void``.
    """

    def begin(self, entry: Entry) -> int | None:
        """The slot to read into, or None when the read is not wanted (any more)."""

    def jobs(self, key: Key) -> Sequence[int]:
        """Bytes of the jobs that a read consists of; the lanes take them one by one."""

    def read(self, key: Key, slot: int, job: int) -> int:
        """Do one job of a read into the slot; returns the bytes read."""

    def finish(self, key: Key, slot: int, nbytes: int, error: BaseException | None) -> None:
        """The read has ended; nothing writes into the slot any more unless it was abandoned."""

    def timeout(self, key: Key, job: int, seconds: float) -> BaseException:
        """The error of a job to which the drive has not answered for so many seconds."""

    def abandoned(self, key: Key, slot: int, error: BaseException) -> Callable[[], None]:
        """The read is given up, but a lane may still write into the slot.

        Returns what to call, on the loop thread, when nothing writes there any more.
        """

    def dropped(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        """These demands will never be read."""

    def void(self, keys: Sequence[Key], reason: BaseException | None) -> None:
        """These guesses will never be read. A demand for one of them may be on its way already.

        Without a reason compute has passed their layer.
        """

    def promoted(self, key: Key) -> None:
        """A guess in the queue has become a demand."""


class Guess(NamedTuple):
    """An expert that may be needed.

    Attributes:
        key: (group, expert).
        position: absolute index of the layer call that may need it.
        probability: calibrated chance that it will, in (0, 1].
        sure: nearly certain: read on all lanes, without a grant, as soon as no demand waits for a
            lane.
    """

    key: Key
    position: int
    probability: float
    sure: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One message to the loop: what a layer needs now, and what later ones may.

    Attributes:
        owner: request that asks.
        position: absolute index of the layer call, see ``ReadQueue``.
        demands: keys that the compute thread waits for.
        joins: keys that it waits for, too, whose read has begun as a guess.
        guesses: keys that may be needed.
        grant: bytes of guesses that may be begun until the next message, once the demands are read;
            sure ones need none.
    """

    owner: Hashable
    position: int
    demands: tuple[Key, ...] = ()
    joins: tuple[Key, ...] = ()
    guesses: tuple[Guess, ...] = ()
    grant: float = 0.0


@dataclass(frozen=True, slots=True)
class Purge:
    """One message to the loop: a request has ended, nobody wants its queued reads."""

    owner: Hashable
