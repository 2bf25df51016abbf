"""Measures what the lanes get out of the drive."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriveStatistics:
    """What the lanes have done.

    Attributes:
        busy_seconds: time with at least one job running.
        bytes_read: by all jobs.
        delayed_bytes: of guesses that were running when a demand came: the demand shared the drive
            with them.
        bandwidth: bytes per second while busy, the recent past weighted most; 0.0 at first.
    """

    busy_seconds: float
    bytes_read: int
    delayed_bytes: int
    bandwidth: float


class Meter:
    """Measures the drive; its owner guards it, and others may read."""

    WINDOW = 0.25  # busy seconds behind which the past weighs half (arbitrary)

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.bytes_read = 0
        self.bandwidth = 0.0
        self._since = 0.0
        self._recent_bytes = 0.0
        self._recent_seconds = 0.0

    def start(self, running: int) -> None:
        if running == 1:
            self._since = time.perf_counter()

    def add(self, nbytes: int) -> None:
        self.bytes_read += nbytes
        self._recent_bytes += nbytes

    def stop(self, running: int) -> None:
        if running:
            return
        busy = time.perf_counter() - self._since
        self.busy_seconds += busy
        self._recent_seconds += busy
        if self._recent_seconds > 0.0:
            self.bandwidth = self._recent_bytes / self._recent_seconds
        if self._recent_seconds > self.WINDOW:
            self._recent_seconds /= 2
            self._recent_bytes /= 2

    def statistics(self, delayed_bytes: int) -> DriveStatistics:
        return DriveStatistics(self.busy_seconds, self.bytes_read, delayed_bytes, self.bandwidth)
