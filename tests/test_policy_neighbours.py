"""The policy of neighbours by its definition, counted anew, and at its edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestream.runtime import policy_neighbours
from moestream.runtime.policy import LeastRecentlyUsed
from moestream.runtime.policy_frequency import LANE, DecayedFrequency
from moestream.runtime.policy_neighbours import MOST_ALIKE, Clock, Neighbours, loudness, window

EXPERTS = 8
WIDTH = 3

token = st.lists(st.integers(0, EXPERTS - 1), min_size=WIDTH, max_size=WIDTH, unique=True)


def chain(layers: int, experts: int = EXPERTS, width: int = WIDTH) -> list[Neighbours]:
    """Policies of layers that are called one after the other, all experts held."""
    policies = [Neighbours(experts, width) for _ in range(layers)]
    for before, policy in pairwise(policies):
        policy.behind(before)
    for policy in policies:
        for expert in range(experts):
            policy.added(expert)
    return policies


def hear(policy: Neighbours, rows: Sequence[Sequence[int]]) -> None:
    """A forward of these tokens; more than one are a prompt."""
    if len(rows) == 1:
        policy.routed(rows[0])
        return
    policy.tokens(rows)
    policy.routed(list(dict.fromkeys(expert for row in rows for expert in row)))


# -- by definition --------------------------------------------------------------------------------


@dataclass
class Naive:
    """The definition, with lists: forwards of rows, for each layer."""

    size: int
    texts: list[int] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)  # by number, by layer
    forwards: list[list[list[list[int]]]] = field(default_factory=list)

    def hear(self, rows: list[list[list[int]]]) -> None:
        text = (self.texts[-1] if self.texts else 0) + (len(rows) > 1)
        self.texts += [text] * len(rows)
        self.tokens += rows
        self.forwards.append(rows)

    def worth(self, layer: int) -> dict[int, float]:
        growth = math.exp2(1 / Neighbours.HALF_LIFE)
        weight = dict.fromkeys(range(EXPERTS), 0.0)
        for ago, rows in enumerate(reversed(self.forwards)):
            for expert in range(EXPERTS):
                uses = [
                    growth**-back for back, row in enumerate(reversed(rows)) if expert in row[layer]
                ]
                weight[expert] += growth**-ago * min(sum(uses), 1.0)
        said, asked = self.answers(layer)
        doubt = Neighbours.DOUBT * Neighbours.LOUDEST * Neighbours.AHEAD[0]
        return {e: weight[e] + Neighbours.PULL * said[e] / (asked + doubt) for e in range(EXPERTS)}

    def answers(self, layer: int) -> tuple[dict[int, int], int]:
        last = len(self.tokens) - 1
        counted = [(layer, 2)] + [(below, 1) for below in range(max(layer - 3, 0), layer)]
        most = WIDTH * sum(count for _, count in counted)
        found = []
        for number in range(max(last - self.size + 1, 0), last):
            alike = sum(
                count * len({*self.tokens[number][at]} & {*self.tokens[last][at]})
                for at, count in counted
            )
            loud = round(Neighbours.LOUDEST * (alike / most) ** Neighbours.SHARPNESS)
            if loud and self.texts[number] == self.texts[number + 1]:
                found.append((alike, number, loud))
        said, asked = dict.fromkeys(range(EXPERTS), 0), 0
        for _, number, loud in sorted(found, reverse=True)[: Neighbours.NEAREST]:
            for ahead, count in enumerate(Neighbours.AHEAD, number + 1):
                if ahead <= last and self.texts[ahead] == self.texts[number]:
                    asked += loud * count
                    for expert in self.tokens[ahead][layer]:
                        said[expert] += loud * count
        return said, asked


@given(st.integers(1, 5), st.sampled_from([8, 64]), st.data())
def test_neighbours_by_their_definition(layers: int, size: int, data: st.DataObject) -> None:
    with mock.patch.object(policy_neighbours, "window", lambda experts: size):
        policies = chain(layers)
    naive = Naive(size)
    every = st.lists(token, min_size=layers, max_size=layers)
    prompts = st.lists(every, min_size=2, max_size=5)
    tokens = st.lists(every, min_size=1, max_size=1)
    told = data.draw(st.lists(st.one_of(tokens, tokens, tokens, prompts), min_size=1, max_size=30))
    heard: list[list[list[list[int]]]] = []
    for rows in told:
        # Behind a prompt, a token that shares nothing with it is taken for a part of it.
        prompt = (
            [{e for row in heard[-1] for e in row[at]} for at in range(layers)] if heard else []
        )
        if len(rows) == 1 and heard and len(heard[-1]) > 1:
            rows = [
                [
                    r if p & {*r} else heard[-1][-1][at]
                    for at, (r, p) in enumerate(zip(rows[0], prompt, strict=True))
                ]
            ]
        heard.append(rows)
        naive.hear(rows)
        for layer, policy in enumerate(policies):
            hear(policy, [row[layer] for row in rows])
    for layer, policy in enumerate(policies):
        ranking = list(policy.coldest())
        assert sorted(ranking) == list(range(EXPERTS))
        asked = {expert for row in heard[-1] for expert in row[layer]}
        cold = ranking[: EXPERTS - len(asked)]
        assert asked.isdisjoint(cold)
        worth = naive.worth(layer)
        assert all(worth[a] <= worth[b] + 1e-7 for a, b in pairwise(cold))


def test_of_more_neighbours_than_are_asked_the_likest_and_newest_are() -> None:
    """Long enough for more than ``NEAREST``, through a window that turns over several times."""
    chance = Random(1)
    size = 40
    with mock.patch.object(policy_neighbours, "window", lambda experts: size):
        policies = chain(4)
    naive = Naive(size)
    for _ in range(150):
        rows = [[chance.sample(range(EXPERTS), WIDTH) for _ in policies]]
        naive.hear(rows)
        for layer, policy in enumerate(policies):
            policy.routed(rows[0][layer])
            said, asked = naive.answers(layer)
            assert list(policy._answers()) == [*said.values(), asked]


def test_what_followed_tokens_like_this_one_stays() -> None:
    (policy,) = chain(1, width=2)
    # 4 and 5 are used alike; what is like 0 and 1 is followed by 4, what is like 2 and 3 by 5.
    for _ in range(6):
        for experts in ([0, 1], [4, 6], [2, 3], [5, 7]):
            policy.routed(experts)
    policy.routed([0, 1])
    ranking = list(policy.coldest())
    assert ranking.index(4) > ranking.index(5)
    for experts in ([4, 6], [2, 3]):
        policy.routed(experts)
    ranking = list(policy.coldest())
    assert ranking.index(5) > ranking.index(4)


def test_the_layers_before_tell_apart_what_one_layer_cannot() -> None:
    """This layer has the same experts in both texts; the layer before it has not."""
    below, policy = chain(2, width=1)
    for _ in range(8):
        for first, second in ((0, 4), (1, 5)):
            below.routed([first])
            policy.routed([0])
            below.routed([2])
            policy.routed([second])
    for first, expected in ((0, [5, 4]), (1, [4, 5])):
        below.routed([first])
        policy.routed([0])
        assert [e for e in policy.coldest() if e in (4, 5)] == expected
        below.routed([2])
        policy.routed([2])  # nothing that came before


# -- prompts and texts ----------------------------------------------------------------------------


def test_calls_of_several_requests_are_told_from_tokens_and_prompts() -> None:
    (policy,) = chain(1)
    for row in ([0, 1, 2], [3, 4, 5], [0, 1, 2]):
        policy.routed(row)
    policy.routed([5, 6, 7, 0, 1])  # two tokens, which nobody says anything about
    assert list(policy.coldest()) == [3, 4, 2, 6, 7, 5, 0, 1]  # by frequency alone
    assert (policy._token, policy._alike) == (2, 0)
    aged = math.exp2(-1 / Neighbours.HALF_LIFE)
    relative = [weight / policy._unit for weight in policy._weight]
    assert relative == pytest.approx(
        [
            1 + aged + aged**3,
            1 + aged + aged**3,
            aged + aged**3,
            aged**2,
            aged**2,
            1 + aged**2,
            1,
            1,
        ]
    )


def test_a_token_behind_a_prompt_may_use_none_of_its_experts() -> None:
    (policy,) = chain(1)
    policy.tokens([[0, 1, 2], [3, 4, 5]])
    policy.routed([0, 1, 2, 3, 4, 5])
    policy.routed([6, 7, 0])
    assert policy._token == 2


# -- calls that do not fit ------------------------------------------------------------------------


def test_experts_of_a_token_are_ordered_by_what_came_after_tokens_like_it() -> None:
    (policy,) = chain(1)
    for row in ([0, 1, 2], [1, 6, 7]) * 4:
        policy.routed(row)
    policy.routed([2, 1, 0])
    assert policy.order([1, 2, 0])[-1] == 1  # comes next, the others do not
    policy.tokens([[2, 1, 0]])
    policy.routed([0, 1, 2])
    assert policy.order([1, 2, 0]) == [1, 2, 0]  # of a prompt they come by their heat


def test_prompts_without_tokens_behind_them_do_not_overflow() -> None:
    (policy,) = chain(1)
    for _ in range(20_000):
        policy.tokens([[0, 1, 2], [3, 4, 5]])
        policy.routed([0, 1, 2, 3, 4, 5])
    policy.routed([0, 1, 2])
    assert set(list(policy.coldest())[:2]) == {6, 7}
    assert all(math.isfinite(weight) for weight in policy._weight)


# -- the layers together --------------------------------------------------------------------------


def test_layers_number_tokens_alike_though_one_is_left_out() -> None:
    clock = Clock()
    assert [clock.numbers(layer, 1) for layer in (0, 1, 2)] == [0, 0, 0]
    assert [clock.numbers(layer, 4) for layer in (0, 1, 2)] == [1, 1, 1]
    assert [clock.numbers(layer, 1) for layer in (1, 2)] == [5, 5]
    assert [clock.numbers(layer, 1) for layer in (0, 2)] == [6, 6]
    assert clock.numbers(2, 1) == 7


def test_a_layer_that_has_not_heard_of_a_token_is_not_asked() -> None:
    below, policy = chain(2)
    for row in ([0, 1, 2], [3, 4, 5], [0, 1, 2]):
        below.routed(row)
        policy.routed(row)
    assert policy._most == 3 * WIDTH
    policy.routed([0, 1, 2])  # without the other one
    assert policy._most == 2 * WIDTH
    below.routed([0, 1, 2])
    policy.routed([0, 1, 2])
    assert (below._token, policy._token, policy._most) == (4, 4, 3 * WIDTH)


def test_layers_of_another_kind_or_size_are_not_linked() -> None:
    policy = Neighbours(EXPERTS, WIDTH)
    others = (LeastRecentlyUsed(), DecayedFrequency(EXPERTS), Neighbours(EXPERTS, 2))
    for other in (*others, Neighbours(1024, WIDTH)):
        policy.behind(other)
    assert policy._below == ()


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 50, 51, 63, 64, 85, 86, 127, 128, 200])
def test_likeness_fits_its_lane_at_every_width(width: int) -> None:
    policies = chain(5, experts=256, width=width)
    alike = list(range(width))
    for _ in range(3):
        for policy in policies:
            policy.routed(alike)
    last = policies[-1]
    if width > MOST_ALIKE // 2:
        assert last._token < 0
        assert last._alike == 0
    else:
        layers = min(3, MOST_ALIKE // width - 2)
        assert last._most == (2 + layers) * width <= MOST_ALIKE
        lanes = last._alike.to_bytes(window(256), "little")
        assert list(lanes[:3]) == [last._most, last._most, 0]
    assert sorted(last.coldest()) == list(range(256))


@pytest.mark.parametrize("width", [127, 128, 200])
def test_likeness_of_a_prompt_fits_its_lane_at_every_width(width: int) -> None:
    policies = chain(2, experts=256, width=width)
    rows = [list(range(256 - width, 256))] * window(256)
    for policy in policies:
        policy.tokens(rows)
        policy.routed(rows[0])
        assert policy._alike.bit_length() <= 8 * window(256)
        assert (policy._alike > 0) == (width <= MOST_ALIKE // 2)
        assert sorted(policy.coldest()) == list(range(256))


def test_answers_fit_their_lanes() -> None:
    most = Neighbours.NEAREST * Neighbours.LOUDEST * sum(Neighbours.AHEAD)
    assert most < 1 << LANE
    (policy,) = chain(1)
    for _ in range(40):  # all neighbours are as loud as can be
        policy.routed([0, 1, 2])
    said = policy._answers()
    assert said[0] == said[-1] > 0.9 * most
    assert said[3] == 0


def test_the_window_keeps_tables_below_a_megabyte() -> None:
    for experts in (8, 64, 128, 256, 512, 1024, 4096):
        tokens = window(experts)
        assert tokens > len(Neighbours.AHEAD)
        if tokens > 64:
            assert tokens * experts * (1 + LANE // 8) < 1e6


def test_loudness_is_a_power_of_likeness() -> None:
    assert loudness(4, 2, 16) == [(4, 16), (3, 9), (2, 4), (1, 1)]
    assert loudness(4, 4, 8) == [(4, 8), (3, 3)]
