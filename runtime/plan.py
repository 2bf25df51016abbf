"""How the memory budget is spent: pure arithmetic on sizes known before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .errors import BudgetTooSmall, InvalidRequest
from .sizes import LayerSize, ModelSize

CHUNK_TOKENS = 2048
"""Longest prompt chunk; a chunk touches nearly every expert, so longer ones read less in all."""

LEAST_CHUNK_TOKENS = 64
"""Shortest chunk that a budget is planned with; longer ones are multiples of it."""

CACHE_BYTES = 64 << 20
"""What MLX may keep of freed buffers (arbitrary: enough for the buffers of one layer)."""

LOGITS_BYTES = 64 << 20
"""Largest logits ``[chunk, vocabulary]`` that are computed to take the last row (arbitrary)."""

SLACK = 0.02
"""Share of the budget left to allocator overhead (arbitrary)."""

WHOLE_FROM = 0.7
"""Share of the experts from which on slots make layers whole one by one instead of all layers a
little better: 1.2 to 1.3 times as fast for the demo model, which gains from half on; by the curves
of the recorded large models, whose misses cost more, from about here."""

LARGEST_SIZE = 1 << 60
"""No machine has more memory than this; a size beyond it is a typing error."""

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes where. Bytes, unless said otherwise.

    Attributes:
        budget: total for the process; None when the slots were given by hand without one.
        process_bytes: interpreter and libraries.
        trunk_bytes: parameters that are no routed experts.
        kv_bytes: caches of all sequences at full context.
        prompt_cache_bytes: kept for prompts to come, beside these.
        scratch_bytes: set aside for a prompt chunk.
        cache_bytes: buffers that MLX keeps.
        staging_bytes: experts read ahead that have no slot yet.
        slot_bytes: all slots, whole layers included.
        context: tokens of prompt and answer together.
        chunk_tokens: prompt tokens computed at once when the prompt fills the context.
        slots: of each MoE layer; as many as experts means that the layer is resident.
        minimum: smallest budget that would do.
        sequences: that are decoded at once.
    """

    budget: int | None
    process_bytes: int
    trunk_bytes: int
    kv_bytes: int
    scratch_bytes: int
    cache_bytes: int
    staging_bytes: int
    slot_bytes: int
    context: int
    chunk_tokens: int
    slots: tuple[int, ...]
    minimum: int
    sequences: int = 1
    prompt_cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        fixed = self.process_bytes + self.trunk_bytes + self.kv_bytes + self.prompt_cache_bytes
        return fixed + self.scratch_bytes + self.cache_bytes + self.staging_bytes + self.slot_bytes


def parse_size(value: int | str, name: str = "memory") -> int:
    """Bytes of ``"8GB"``, ``"512 MiB"`` or a plain number, given as the argument ``name``.

    Raises:
        InvalidRequest: not a positive size.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidRequest(f"{name}={value!r} is not a size; give bytes or a text like '8GB'")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise InvalidRequest(f"{name}={value!r} is not a size; give bytes or a text like '8GB'")
        size = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if not 0 < size <= LARGEST_SIZE:
        raise InvalidRequest(f"{name}={value!r} must be positive and at most 2**60 bytes")
    return size


def make_plan(
    model: ModelSize,
    *,
    budget: int | None,
    process_bytes: int,
    context: int,
    slots: int | None = None,
    sequences: int = 1,
    routed_tokens: int = 1,
    staging_bytes: int = 0,
    prompt_cache_bytes: int = 0,
) -> Plan:
    """Divide the budget.

    Fixed parts come first; the rest goes to slots, see ``share_slots``. What is left when every
    expert is resident stays free.

    Args:
        model: sizes from the headers.
        budget: bytes for the whole process; None only with ``slots`` given.
        process_bytes: what the process holds already.
        context: tokens of prompt and answer together that one request may need.
        slots: slots per layer, instead of what the budget gives.
        sequences: requests that are decoded at once: each has its caches.
        routed_tokens: a layer gets slots at least for what so many tokens may route to in one step;
            a step of more runs in waves.
        staging_bytes: for experts that are read ahead into memory of their own.
        prompt_cache_bytes: for caches that are kept for prompts to come.

    Raises:
        BudgetTooSmall: says the smallest budget that would do, and what takes how much.
        InvalidRequest: ``slots`` is less than one.
    """
    kv_bytes = model.cache.held(context) * sequences
    fixed = process_bytes + model.trunk_bytes + kv_bytes + CACHE_BYTES + staging_bytes
    fixed += prompt_cache_bytes
    floors = [slot_floor(layer, routed_tokens) for layer in model.layers]
    floor = _slot_bytes(model, floors)
    shortest = _scratch(model, min(LEAST_CHUNK_TOKENS, context), context)
    least = fixed + floor + shortest
    minimum = int(least / (1 - SLACK)) + 1
    if slots is not None:
        if slots < 1:
            raise InvalidRequest(f"slots={slots} must be at least 1")
        chunk = min(CHUNK_TOKENS, context)
        reserved = _scratch(model, chunk, context)
        chosen = [min(slots, layer.experts) for layer in model.layers]
    else:
        assert budget is not None
        if budget < minimum:
            parts = {
                "process": process_bytes,
                "trunk": model.trunk_bytes,
                "kv": kv_bytes,
                "prompt_cache": prompt_cache_bytes,
                "scratch": shortest,
                "cache": CACHE_BYTES,
                "staging": staging_bytes,
                "slots": floor,
                "reserve": minimum - least,
            }
            raise BudgetTooSmall(budget, minimum, parts)
        usable = int(budget * (1 - SLACK)) - fixed
        chunk, reserved = _chunk(model, context, spare=usable - floor)
        chosen = share_slots(model.layers, usable - reserved, routed_tokens=routed_tokens)
        left = usable - reserved - _slot_bytes(model, chosen)
        if left > 0 and all(
            n == layer.experts for n, layer in zip(chosen, model.layers, strict=True)
        ):
            # Everything is resident: what is left makes the prompt chunks longer.
            whole = _scratch(model, min(CHUNK_TOKENS, context), context)
            reserved = min(reserved + left, max(whole, reserved))
            chunk = fitting_chunk(model, context, reserved)
    return Plan(
        budget=budget,
        process_bytes=process_bytes,
        trunk_bytes=model.trunk_bytes,
        kv_bytes=kv_bytes,
        scratch_bytes=reserved,
        cache_bytes=CACHE_BYTES,
        staging_bytes=staging_bytes,
        slot_bytes=_slot_bytes(model, chosen),
        context=context,
        chunk_tokens=chunk,
        slots=tuple(chosen),
        minimum=minimum,
        sequences=sequences,
        prompt_cache_bytes=prompt_cache_bytes,
    )


def slot_floor(layer: LayerSize, routed_tokens: int = 1) -> int:
    """Fewest slots of a layer: a step of so many tokens fits, whatever they route to."""
    return min(layer.top_k * routed_tokens, layer.experts)


def share_slots(layers: Sequence[LayerSize], spare: int, *, routed_tokens: int = 1) -> list[int]:
    """Slots per layer that ``spare`` bytes hold.

    Equal shares of the experts, not of the bytes. Let the layer l miss at a rate m(s) with the
    share s of its experts; its reads cost m(s) * top_k * record and its slots s * experts * record.
    The sum of the reads is smallest where m'(s) * top_k / experts is the same in all layers: the
    size of a record is on both sides and cancels out, so a layer of larger records gets no fewer
    slots.

    From ``WHOLE_FROM`` on layer after layer is made whole, from the first one: the last misses are
    few, and a layer without any needs no synchronisation with the device.

    Slots are handed out one by one in an order that does not depend on ``spare``: more bytes never
    give any layer fewer slots.
    """
    chosen = [slot_floor(layer, routed_tokens) for layer in layers]
    spare -= sum(n * layer.slot_bytes for n, layer in zip(chosen, layers, strict=True))
    steps = (
        (share if (share := count / layer.experts) <= WHOLE_FROM else 1.0, index, count)
        for index, layer in enumerate(layers)
        for count in range(chosen[index] + 1, layer.experts + 1)
    )
    for _, index, _ in sorted(steps):
        spare -= layers[index].slot_bytes
        if spare < 0:
            break
        chosen[index] += 1
    return chosen


def _slot_bytes(model: ModelSize, slots: Sequence[int]) -> int:
    return sum(n * layer.slot_bytes for n, layer in zip(slots, model.layers, strict=True))


def _scratch(model: ModelSize, chunk: int, context: int) -> int:
    activations = chunk * model.scratch_token_bytes + chunk * context * model.scratch_pair_bytes
    activations += model.cache.passing(context, chunk)
    row = 4 * model.vocabulary
    return activations + 2 * min(chunk * row, max(LOGITS_BYTES, row))


def _chunk(model: ModelSize, context: int, *, spare: int) -> tuple[int, int]:
    """Tokens of a prompt chunk, and the bytes set aside for its scratch.

    A quarter of what slots could have is set aside, or less if the longest chunk takes less. It
    stays set aside where the chunk takes a little less: more memory never gives fewer slots.
    """
    least, most = min(LEAST_CHUNK_TOKENS, context), min(CHUNK_TOKENS, context)
    reserved = min(_scratch(model, most, context), spare // 4)
    reserved = max(reserved, _scratch(model, least, context))
    return fitting_chunk(model, context, reserved), reserved


def spare_bytes(plan: Plan) -> int:
    """What more caches may take of the budget of a plan, because they are worth it.

    An eighth of the slots' memory (arbitrary: slots save bytes of every token), or what nothing
    else has a use for since the model is held whole.
    """
    assert plan.budget is not None
    spare = min(plan.slot_bytes // 8, (plan.budget - plan.minimum) // 2)
    return max(spare, int(plan.budget * (1 - SLACK)) - plan.total_bytes)


def fitting_chunk(model: ModelSize, length: int, scratch_bytes: int) -> int:
    """Tokens per chunk with which a prompt of ``length`` tokens stays within the scratch.

    A short prompt may be computed in larger chunks than a long one, whose scores take more.
    """
    step = LEAST_CHUNK_TOKENS
    most = min(CHUNK_TOKENS, length)
    lengths: list[int] = [most, *range(most // step * step, 0, -step)]
    for chunk in lengths:
        if _scratch(model, chunk, length) <= scratch_bytes:
            return chunk
    return min(step, most)
