"""What the options of `moestream pack` come to, layer by layer, and which make no sense."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from moestream import InvalidRequest
from moestream.models.experts import ExpertSite
from moestream.models.quantizing import Scheme
from moestream.runtime.pack_options import (
    PackOptions,
    choose_schemes,
    losses,
    parse_bits,
    parse_rule,
)
from moestream.runtime.pack_order import by_coactivation, by_frequency, places_by_layer
from moestream.runtime.trace_records import Route, Trace


def sites(kind: Any = SwitchGLU, count: int = 4) -> list[ExpertSite]:
    return [
        ExpertSite(None, "", f"layers.{n}.mlp", kind(64, 192, 4), layer=n, experts=4)
        for n in range(count)
    ]


def bits_of(options: PackOptions, kind: Any = SwitchGLU) -> list[dict[str, int | None]]:
    """By layer, the bits of each projection."""
    schemes = choose_schemes(options, sites(kind))
    return [
        {
            name.removesuffix("_proj"): None if scheme is None else scheme.bits
            for name, scheme in each.items()
        }
        for each in schemes.values()
    ]


def glu(gate: int | None, up: int | None, down: int | None) -> dict[str, int | None]:
    return {"gate": gate, "up": up, "down": down}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [glu(None, None, None)] * 4),
        ({"bits": "3"}, [glu(3, 3, 3)] * 4),
        ({"bits": "keep"}, [glu(None, None, None)] * 4),
        ({"bits": "gate=3,up=3,down=4"}, [glu(3, 3, 4)] * 4),
        ({"bits": "down=8"}, [glu(None, None, 8)] * 4),
        ({"bits": "down_proj = 8 , up=2"}, [glu(None, 2, 8)] * 4),
        ({"mode": "affine"}, [glu(4, 4, 4)] * 4),
        ({"mode": "mxfp8"}, [glu(8, 8, 8)] * 4),
        ({"mode": "nvfp4"}, [glu(4, 4, 4)] * 4),
        ({"mode": "mxfp4", "bits": "gate=4"}, [glu(4, None, None)] * 4),
        ({"layers": ("1:6",)}, [glu(*[None] * 3), glu(6, 6, 6), *[glu(*[None] * 3)] * 2]),
        (
            {"bits": "4", "layers": ("0-1,3:6",)},
            [glu(6, 6, 6), glu(6, 6, 6), glu(4, 4, 4), glu(6, 6, 6)],
        ),
        (
            {"bits": "4", "layers": ("0-9:6", "1:gate=8", "2:keep", "3:down=keep")},
            [glu(6, 6, 6), glu(8, 6, 6), glu(None, None, None), glu(6, 6, None)],
        ),
    ],
    ids=str,
)
def test_bits(options: dict[str, Any], expected: list[dict[str, int | None]]) -> None:
    assert bits_of(PackOptions(**options)) == expected


def test_bits_of_two_matrices() -> None:
    assert bits_of(PackOptions(bits="fc1=3,fc2=5"), SwitchMLP) == [{"fc1": 3, "fc2": 5}] * 4


def test_group_sizes() -> None:
    def scheme(**options: Any) -> Scheme | None:
        return choose_schemes(PackOptions(**options), sites())["layers.0.mlp"]["up_proj"]

    assert scheme(bits="4") == Scheme(4, 64, "affine")
    assert scheme(bits="4", group_size=32) == Scheme(4, 32, "affine")
    assert scheme(mode="mxfp4") == Scheme(4, 32, "mxfp4")
    assert scheme(mode="nvfp4") == Scheme(4, 16, "nvfp4")
    assert scheme(layers=("0:4",), group_size=32) == Scheme(4, 32, "affine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": "7"}, "bits=7 must be one of 2, 3, 4, 5, 6, 8 for mode affine"),
        ({"bits": "3", "mode": "mxfp4"}, "bits=3 must be one of 4 for mode mxfp4"),
        ({"bits": "4", "mode": "mxfp8"}, "bits=4 must be one of 8 for mode mxfp8"),
        ({"mode": "int4"}, "mode='int4' must be one of affine, mxfp4, mxfp8, nvfp4"),
        ({"bits": "four"}, "bits='four' is neither a number"),
        ({"bits": ""}, "is neither a number"),
        ({"bits": "gate="}, "is neither a number"),
        ({"bits": "gate=3,4"}, "is neither a number"),
        ({"bits": "gate=3,gate=4"}, "is neither a number"),
        ({"bits": "middle=3"}, "has no projection 'middle': give gate, up, down"),
        ({"bits": "4", "group_size": 16}, "group_size=16 must be 32 or 64 or 128"),
        ({"mode": "nvfp4", "group_size": 32}, "group_size=32 must be 16 for mode nvfp4"),
        ({"group_size": 32}, "group_size quantizes nothing by itself"),
        ({"bits": "4", "group_size": 128}, "groups of 128 do not divide; give group size 64"),
        ({"layers": ("9:4",)}, "layers='9:4': 9 names no layer with routed experts; they are 0 to"),
        ({"layers": ("0-1, 9-11:4",)}, "9-11 names no layer with routed experts; they are 0 to 3"),
        ({"layers": ("4",)}, "is no rule like"),
        ({"layers": ("3-1:4",)}, "is no rule like"),
        ({"layers": ("a:4",)}, "is no rule like"),
        ({"layers": (":4",)}, "is no rule like"),
        ({"layers": ("0:",)}, "is neither a number"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        choose_schemes(PackOptions(**options), sites())
    assert message in str(caught.value)


def test_rules_are_read() -> None:
    assert parse_rule(" 0 - 2 , 5 : gate=3 ") == (frozenset({0, 1, 2, 5}), {"gate": 3})
    assert parse_bits("keep") == {None: None}


def test_experts_that_are_quantized_again_are_told() -> None:
    found = sites()
    nn.quantize(found[1].module, group_size=32, bits=8)
    plain = choose_schemes(PackOptions(layers=("0:4",)), found)
    assert losses(found, plain) == ""
    same = choose_schemes(PackOptions(bits="8", group_size=32), found)
    assert set(same["layers.1.mlp"].values()) == {None}
    assert losses(found, same) == ""
    again = choose_schemes(PackOptions(bits="4"), found)
    assert "quantized already (affine 8 bits in groups of 32)" in losses(found, again)


# -- order --------------------------------------------------------------------------------------


def test_the_most_used_experts_come_first() -> None:
    assert by_frequency([(3, 1), (3, 0), (3, 1)], 5) == [3, 1, 0, 2, 4]


def test_experts_used_together_become_neighbours() -> None:
    calls = [(0, 4), (0, 4), (0, 4), (0, 2), (1, 3), (1, 3), (2, 5)]
    order = by_coactivation(calls, 6)
    # Nothing else is used with 4: on with the most used one that is left.
    assert order == [0, 4, 1, 3, 2, 5]
    assert by_coactivation([], 3) == [0, 1, 2]


@dataclass
class _Call:
    layer: int
    experts: tuple[int, ...]
    tokens: int = 1


def trace_of(*calls: _Call) -> Trace:
    trace = Trace(Path("run.json"))
    trace.routes = [
        Route(float(n), call.layer, call.layer, n, call.experts, call.tokens)
        for n, call in enumerate(calls)
    ]
    return trace


def test_places_are_the_inverse_of_the_order() -> None:
    trace = trace_of(_Call(2, (3, 1)), _Call(2, (3, 0)), _Call(2, (3, 1)))
    assert places_by_layer(trace, {2: 5, 4: 5}, "frequency") == {2: (2, 1, 3, 0, 4)}


def test_prompts_count_only_where_there_is_nothing_else() -> None:
    prompt = _Call(0, (2, 1), tokens=9)
    assert places_by_layer(trace_of(prompt), {0: 3}, "frequency") == {0: (2, 0, 1)}
    both = trace_of(prompt, prompt, _Call(0, (0,)))
    assert places_by_layer(both, {0: 3}, "frequency") == {0: (0, 1, 2)}


@pytest.mark.parametrize("call", [_Call(7, (0,)), _Call(0, (5,))])
def test_traces_of_other_models_are_refused(call: _Call) -> None:
    with pytest.raises(InvalidRequest, match="is a trace of another model"):
        places_by_layer(trace_of(call), {0: 5}, "frequency")


def test_a_trace_without_routing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds no routed experts"):
        places_by_layer(trace_of(), {0: 5}, "frequency")
