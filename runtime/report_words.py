"""The sentences of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cli_output import size
from .report_series import CAUSES
from .trace_records import Trace

if TYPE_CHECKING:
    from .report_figures import Report

NAMES = {
    "device": "computing (device)",
    "late": "stall: late",
    "evicted": "stall: evicted",
    "unpredicted": "stall: never predicted",
    "unknown": "stall: cause not recorded",
    "other": "Python and the rest",
}
MOSTLY = {
    "late": " (mostly for reads that were still queued or running)",
    "evicted": " (mostly for experts evicted again before their use)",
    "unpredicted": " (mostly for experts never predicted)",
    "unknown": "",
}

SMALL_STALL = 0.15
BUSY_DRIVE = 0.8
"""Arbitrary: from here on the drive is called the limit."""


def missing_lines(trace: Trace) -> list[str]:
    """What the file does not hold, and what cannot be told without it."""
    lines = []
    for records, line in (
        (trace.tokens, "no decoded tokens: the figures are about prompts"),
        (trace.routes, "no routing: hit rates and the perfect cache cannot be told"),
        (trace.syncs, "no syncs: the time of the device counts as 'Python and the rest'"),
        (trace.predictions, "no predictions: their usefulness cannot be told"),
        (trace.queue_depth, "no queue depths"),
        (trace.layers, "no description of the model: slots and record sizes are not known"),
        (trace.bandwidth, "no bandwidth of the drive: its utilisation and the bound are left out"),
    ):
        if not records:
            lines.append(line)
    if trace.reads and all(read.speculative is None for read in trace.reads):
        lines.append("reads do not say whether they were guesses: waste cannot be told")
    return lines


def summary(report: Report) -> str:
    """Where the time went, and what limits."""
    time = report.time
    if not time.tokens:
        return "The trace holds neither a token nor a prompt, so there is no time to account for."
    what = "token" if report.decoded else "prompt chunk"
    shares = {name: part / time.mean_ms for name, part in time.parts_ms.items() if time.mean_ms}
    stalled = f"{100 * time.stall_share:.0f} % waiting for experts"
    causes = {cause: shares.get(cause, 0.0) for cause in CAUSES}
    cause = max(causes, key=lambda name: causes[name])
    if causes[cause]:
        stalled += MOSTLY[cause]
    device, other = (f"{100 * shares.get(part, 0.0):.0f} %" for part in ("device", "other"))
    if time.parts_ms["device"]:
        rest = f"{device} computing on the device and {other} Python and the rest"
    else:
        rest = f"{other} computing and the rest"
    return f"A {what} took {time.mean_ms:.1f} ms: {stalled}, {rest}. {_limit(report)}"


def _limit(report: Report) -> str:
    time, drive = report.time, report.drive
    rate = f"{size(drive.rate)}/s"
    used = drive.busy_share if drive.utilisation is None else drive.utilisation
    if time.stall_share < SMALL_STALL:
        return "Computing limits: faster reads would hardly be felt."
    if used >= BUSY_DRIVE:
        of = f" of the {size(drive.bandwidth)}/s it can" if drive.bandwidth else ""
        return (
            f"The drive limits: it moved {rate}{of} all the time, so only fewer bytes "
            "(more slots, fewer wasted guesses) or a faster drive help."
        )
    idle = f"the drive was used to {100 * used:.0f} % only ({rate})"
    return f"Waiting limits, not bandwidth: {idle}, so earlier reads or more at once would help."
