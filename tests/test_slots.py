"""Slot pools: dense MLX arrays that the reader writes into."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from moestream.io.reader import RecordReader
from moestream.io.records import ITEM_BYTES, PAGE, Component, Record
from moestream.runtime import slots as slots_module
from moestream.runtime.device import address_of
from moestream.runtime.slots import DTYPES, SlotPool

from .fakes import Tensor, write_packed


def record(*tensors: Tensor) -> Record:
    components = tuple(
        Component(t.name, Path("none"), 0, t.nbytes, t.shape, t.stored, t.pooled or t.stored)
        for t in tensors
    )
    return Record(layer=0, experts=8, components=components)


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.mark.parametrize("code", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(1,), (3, 5), (PAGE,)])
def test_a_write_through_a_row_is_seen_by_the_next_evaluation(
    code: str, shape: tuple[int, ...]
) -> None:
    pool = SlotPool(record(Tensor("w", shape, code)), 3)
    array = pool.arrays["w"]
    assert array.dtype == DTYPES[code]
    assert array.shape == (3, *shape)
    assert not mx.any(array != 0).item()
    (row,) = pool.rows(1)
    assert len(row) == ITEM_BYTES[code] * int(np.prod(shape))
    row[:] = b"\x01" * len(row)
    bits = array.view(mx.uint8).reshape(3, -1)
    assert mx.all(bits[1] == 1).item()
    assert not mx.any(bits[0::2] != 0).item()
    row[:] = bytes(len(row))
    assert not mx.any(array != 0).item()


def test_a_graph_that_is_not_evaluated_yet_sees_the_write_too() -> None:
    pool = SlotPool(record(Tensor("w", (4,), "F32")), 2)
    total = pool.arrays["w"][1].sum()
    np.frombuffer(pool.rows(1)[0], np.float32)[:] = 2.5
    assert total.item() == 10.0


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_pool_starts_at_a_page(code: str) -> None:
    for items in (1, 7, PAGE, 3 * PAGE + 1):
        pool = SlotPool(record(Tensor("w", (items,), code), Tensor("v", (3,), code)), 2)
        for name, row in zip(("w", "v"), pool.rows(0), strict=True):
            assert address(row) % PAGE == 0
            exported: Any = pool.arrays[name]
            assert address(row) == address_of(memoryview(exported).cast("B"))


def test_rows_lie_one_behind_the_other() -> None:
    pool = SlotPool(record(Tensor("w", (PAGE // 4,)), Tensor("s", (6,), "BF16", "F32")), 4)
    for component, width in enumerate((PAGE, 24)):
        starts = [address(pool.rows(slot)[component]) for slot in range(4)]
        assert starts == [starts[0] + slot * width for slot in range(4)]
    assert all(address(pool.rows(slot)[0]) % PAGE == 0 for slot in range(4))


def test_bytes_are_counted_as_pooled() -> None:
    layer = record(Tensor("w", (10,)), Tensor("s", (6,), "BF16", "F32"))
    pool = SlotPool(layer, 5)
    assert pool.nbytes == 5 * (40 + 24) == sum(array.nbytes for array in pool.arrays.values())


def test_a_record_read_into_a_slot_is_what_mlx_computes_with(tmp_path: Path) -> None:
    tensors = [Tensor("w", (PAGE // 4,)), Tensor("s", (6,), "BF16", "F32")]
    layer = write_packed(tmp_path / "packed", tensors, experts=4)
    pool = SlotPool(layer.record, 2)
    reader = RecordReader([layer.record])
    reader.read(0, 3, pool.rows(1))
    reader.read(0, 2, pool.rows(0))
    for slot, expert in ((1, 3), (0, 2)):
        got = [np.array(pool.arrays[tensor.name][slot]).tobytes() for tensor in tensors]
        assert got == layer.expected(expert)
    reader.close()


def test_rows_keep_the_memory_of_a_pool_that_is_gone() -> None:
    """A read that was abandoned may still write when the pool has been dropped."""
    pool = SlotPool(record(Tensor("w", (1 << 16,), "U8")), 2)
    row = pool.rows(1)[0]
    del pool
    gc.collect()
    others = [mx.full((1 << 17,), 7, mx.uint8, stream=mx.cpu) for _ in range(8)]
    mx.eval(others)
    row[:] = b"\xff" * len(row)
    assert all(mx.all(other == 7).item() for other in others)


def test_dropped_pools_give_their_memory_back() -> None:
    layer = record(Tensor("w", (1 << 16,)), Tensor("s", (1 << 10,), "BF16", "F32"))
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(30):
        pool = SlotPool(layer, 8)
        pool.rows(3)[0][:4] = b"abcd"
        assert mx.get_active_memory() - before < 2 * pool.nbytes
        del pool
    assert mx.get_active_memory() == before
    mx.clear_cache()


def test_a_pool_that_mlx_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = address_of
    calls = iter(range(100))
    monkeypatch.setattr(slots_module, "address_of", lambda view: real(view) + 8 * next(calls))
    with pytest.raises(RuntimeError, match="copied"):
        SlotPool(record(Tensor("w", (8,))), 2)
