"""What is known of a model before anything of it is measured."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...io.records import Record
from ..core import Prepared, Settings, prepare
from ..plan import Plan
from ..streams import leased_streams
from .cells import Budget
from .machine import facts, model_facts
from .rows import Row
from .texts import Routing, prompt_of, recorded_routing


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model of which only headers have been read.

    Attributes:
        directory: of the checkpoint.
        routing: where the routing comes from, if from a recording.
        records: of its MoE layers, as they are read.
        row: with everything that all rows share.
        experts: of the largest layer.
        resident_bytes: of all parameters in memory, every expert included.
        packed: whether it is a packed store, which mlx-lm cannot load.
    """

    directory: Path
    routing: Routing | None
    records: tuple[Record, ...]
    row: Row
    experts: int
    resident_bytes: int
    packed: bool
    _prepared: Prepared

    def settings(self, budget: Budget, context: int) -> dict[str, Any]:
        """Arguments of ``Engine.open`` for a budget."""
        slots = budget.slots
        if budget.share is not None:
            slots = max(round(self.experts * budget.share), 1)
        return {"slots": slots, "memory": budget.memory, "context": context}

    def plan(self, budget: Budget, context: int) -> Plan:
        """How the memory would be divided.

        Raises:
            BudgetTooSmall: says the smallest budget that would do.
        """
        settings = Settings(self.directory, **self.settings(budget, context))
        return _prepare(settings).plan

    def prompt(self, count: int, seed: int) -> list[int]:
        """Token ids, the same for the same arguments."""
        if self.routing is not None:
            return self.routing.prompt(count, seed)
        size = self._prepared.blueprint.size
        return prompt_of(self._prepared.tokenizer, count, seed, vocabulary=size.vocabulary)


def _prepare(settings: Settings) -> Prepared:
    """Plan an engine on a thread of its own: one thread can lease streams of a GPU only once."""

    def work() -> Prepared:
        with leased_streams():
            return prepare(settings)

    with ThreadPoolExecutor(1, thread_name_prefix="moestream-bench-plan") as thread:
        return thread.submit(work).result()


def look_at(model: str | Path, *, suite: str, conditions: str) -> BenchModel:
    """Read the headers of a model.

    Args:
        model: directory or Hub id.
        suite: name for the rows.
        conditions: what is not as usual, for the rows.

    Raises:
        MoestreamError: it cannot be streamed.
    """
    prepared = _prepare(Settings(model, slots=1))
    blueprint, records = prepared.blueprint, prepared.records
    size = blueprint.size
    routing = recorded_routing(blueprint.checkpoint.directory, blueprint.lazy.config)
    row = Row(
        suite=suite,
        conditions=conditions,
        routing="" if routing is None else routing.description,
        **facts(),
        **model_facts(prepared, records),
    )
    return BenchModel(
        directory=blueprint.checkpoint.directory,
        routing=routing,
        records=records,
        row=row,
        experts=max(layer.experts for layer in size.layers),
        resident_bytes=size.trunk_bytes
        + sum(layer.experts * layer.slot_bytes for layer in size.layers),
        packed=blueprint.manifest is not None,
        _prepared=prepared,
    )
