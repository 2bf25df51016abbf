"""How many experts of a layer are computed at once when a call asks for more than fit."""

from __future__ import annotations

WAVE_BYTES = 16 << 20
"""What is read for a wave keeps all lanes busy from this size on (arbitrary: some records each)."""


def wave_size(room: int, record_bytes: int) -> int:
    """Experts of one wave.

    While a wave is computed the next one is read, so each may take half of the room. Smaller ones,
    as long as their reads fill the lanes, leave a part of it to the experts that are used most:
    they stay for the tokens behind the prompt.

    Args:
        room: slots of the layer that may be used.
        record_bytes: of one expert on disk; 0 where it is not known.
    """
    filling = -(-WAVE_BYTES // record_bytes) if record_bytes else room
    return max(min(max(filling, room // 4), room // 2), 1)
