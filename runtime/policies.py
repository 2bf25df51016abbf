"""The eviction policies that an engine can use, by name."""

from __future__ import annotations

from typing import Literal, get_args

from .policy import Policy, PolicyFactory, least_recently_used
from .policy_frequency import DecayedFrequency, Successors
from .policy_neighbours import Neighbours

PolicyName = Literal["neighbours", "successors", "lfu-decay", "lru"]

DEFAULT_POLICY: PolicyName = "neighbours"


def _decayed_frequency(experts: int, width: int) -> Policy:
    return DecayedFrequency(experts)


POLICIES: dict[PolicyName, PolicyFactory] = {
    "neighbours": Neighbours,
    "successors": Successors,
    "lfu-decay": _decayed_frequency,
    "lru": least_recently_used,
}

assert tuple(POLICIES) == get_args(PolicyName)
