"""Probabilities of candidates: by rank, by what was routed before, kept between runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestream import Engine, PrefetchConfig
from moestream.runtime import calibration as module
from moestream.runtime.calibration import Calibration

PROMPT = "Once upon a time there was a small boat."
QUESTIONS = (
    "Tell me a story about a cat.",
    "Why do birds sing?",
    "Describe a garden in spring.",
    "Write a short letter to a friend.",
)


def make(count: int = 2, experts: int = 10, top_k: int = 2) -> Calibration:
    return Calibration(range(count), [experts] * count, [top_k] * count)


def missing(calibration: Calibration, group: int, ranked: Sequence[int], *routed: int) -> Any:
    """Probabilities of missing candidates one layer ahead."""
    return calibration.probabilities(group, 1, ranked, [True] * len(ranked), routed)


# -- ranks ------------------------------------------------------------------------------------


def test_it_learns_each_rank() -> None:
    calibration = make(top_k=4)
    for _ in range(300):
        calibration.learn(1, 1, [[5, 6, 7]], [[True] * 3], [[5, 9]])
    row = missing(calibration, 1, [1, 2, 3])
    assert row[0] > 0.99
    assert row[1] < 0.01
    other = missing(calibration, 0, [1, 2, 3])
    assert other[0] > other[1] > other[2] > 0.5


def test_missing_candidates_are_counted_apart() -> None:
    calibration = make()
    for _ in range(300):
        # Resident, it is always routed; missing, never.
        calibration.learn(0, 1, [[5], [5]], [[False], [True]], [[5, 9], [8, 9]])
    assert calibration.probabilities(0, 1, [4], [True])[0] < 0.01
    assert calibration.probabilities(0, 1, [4], [False])[0] > 0.99


def test_a_layer_begins_with_the_mean_of_others() -> None:
    calibration = make(3)
    for _ in range(300):
        calibration.learn(0, 1, [[5]], [[True]], [[8, 9]])
    first = missing(calibration, 1, [5])[0]
    calibration.learn(1, 1, [[5]], [[True]], [[5, 9]])
    assert missing(calibration, 1, [5])[0] < first / 2


# -- what was routed before -------------------------------------------------------------------


def after_three(calibration: Calibration, *, absent: bool = True, calls: int = 400) -> None:
    """Expert 7, ranked behind 6, is routed after 3 and never after 4; 6 the other way round."""
    for call in range(calls):
        source = 3 + call % 2
        calibration.learn(
            1, 1, [[6, 7]], [[absent, absent]], [[7 if source == 3 else 6, 9]], [[source, 1]]
        )


@pytest.mark.parametrize("absent", [True, False])
def test_it_learns_what_follows_from_all_candidates(absent: bool) -> None:
    calibration = make()
    after_three(calibration, absent=absent)
    behind, ahead = missing(calibration, 1, [6, 7], 3, 1)
    assert ahead > 2 * behind
    behind, ahead = missing(calibration, 1, [6, 7], 4, 1)
    assert behind > 2 * ahead


def test_without_what_was_routed_it_is_the_rank() -> None:
    calibration = make()
    after_three(calibration)
    assert missing(calibration, 1, [6, 7]) == missing(calibration, 1, [0, 0])
    # An expert that has never been seen there says nothing.
    assert missing(calibration, 1, [6, 7], 8) == missing(calibration, 1, [6, 7])


def test_other_layers_and_distances_have_their_own() -> None:
    calibration = make(3)
    after_three(calibration)
    for group, distance in ((2, 1), (2, 2)):
        row = calibration.probabilities(group, distance, [6, 7], [True, True], [3, 1])
        assert row == calibration.probabilities(group, distance, [6, 7], [True, True])


def test_no_expert_has_no_weight() -> None:
    calibration = make()
    for call in range(50):  # rows that are shorter than the routing is wide
        calibration.learn(1, 1, [[6]], [[True]], [[6 if call % 3 else 9, -1]], [[-1, -1]])
    assert missing(calibration, 1, [6], *range(10)) == missing(calibration, 1, [6])


def test_layers_may_have_different_numbers_of_experts() -> None:
    calibration = Calibration([0, 1], [4, 9], [2, 3])
    for _ in range(50):
        calibration.learn(1, 1, [[8, 0]], [[True, True]], [[8, 7, 6]], [[3, 0]])
    assert missing(calibration, 1, [8], 3, 0) > missing(calibration, 1, [8])


def test_one_step_is_the_gradient_of_the_log_loss() -> None:
    """Two equal calls at once move the weights twice as far as one."""
    once, twice = make(), make()
    call = [[6]], [[True]], [[6, 9]], [[3, 4]]
    once.learn(1, 1, *call)
    twice.learn(1, 1, *(part * 2 for part in call))

    def weight(calibration: Calibration) -> float:
        with_it, without = (missing(calibration, 1, [6], *routed)[0] for routed in ((3,), ()))
        return math.log(with_it / (1 - with_it)) - math.log(without / (1 - without))

    start = 0.95 * 0.93
    assert weight(once) == pytest.approx(0.9 / 2 * (1 - start), rel=1e-4)
    assert weight(twice) == pytest.approx(2 * weight(once), rel=1e-4)


def test_log_loss_falls_where_layers_depend_on_each_other() -> None:
    """Recorded in miniature: each expert calls for its own successors, ranks tell half of it."""
    rng = np.random.default_rng(0)
    experts, top_k = 16, 2
    follows = rng.permutation(experts)
    calibration = make(experts=experts, top_k=top_k)
    losses: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(600):
        before = rng.choice(experts, top_k, replace=False)
        chosen = follows[before] if rng.random() < 0.8 else rng.choice(experts, 2, replace=False)
        wrong = rng.choice(np.setdiff1d(np.arange(experts), chosen), top_k, replace=False)
        ranked = rng.permutation(np.concatenate([chosen, wrong])).tolist()
        for known, found in losses.items():
            row = missing(calibration, 1, ranked, *(before.tolist() if known else ()))
            right = [p if e in chosen else 1 - p for p, e in zip(row, ranked, strict=True)]
            found.append(-sum(map(math.log, right)) / len(right))
        calibration.learn(1, 1, [ranked], [[True] * 4], [chosen], [before])
    assert np.mean(losses[True][300:]) < 0.6 * np.mean(losses[False][300:])


# -- kept -------------------------------------------------------------------------------------


def test_it_is_saved_and_loaded() -> None:
    calibration = make()
    after_three(calibration)
    again = make()
    again.load_json(json.loads(json.dumps(calibration.to_json())))
    for routed in ((), (3, 1), (4, 1)):
        row = missing(calibration, 1, [6, 7], *routed)
        assert missing(again, 1, [6, 7], *routed) == pytest.approx(row, abs=0.02)
    for absent in (True, False):
        there = [absent, absent]
        assert again.probabilities(1, 1, [6, 7], there) == pytest.approx(
            calibration.probabilities(1, 1, [6, 7], there), abs=1e-3
        )


def test_weights_belong_to_transformer_layers() -> None:
    """With more memory the first layers are whole, and the others are counted from nought."""
    calibration = Calibration([4, 5, 6], [10] * 3, [2] * 3)
    for _ in range(200):
        calibration.learn(2, 1, [[6, 7]], [[True, True]], [[7, 9]], [[3, 1]])
    fewer = Calibration([5, 6], [10] * 2, [2] * 2)
    fewer.load_json(calibration.to_json())
    assert missing(fewer, 1, [7], 3, 1) > missing(fewer, 1, [7])
    fewest = Calibration([6], [10], [2])  # what predicted the layer is not streamed any more
    fewest.load_json(calibration.to_json())
    assert fewest.to_json()["pairs"] == {}


def test_a_file_of_before_is_taken() -> None:
    calibration = make()
    calibration.load_json({"1:1": [0.8, 0.25], "heat": {"0": [1.0]}})
    assert missing(calibration, 1, [5, 6]) == pytest.approx([0.8, 0.25])


def test_weights_of_another_model_are_left_alone() -> None:
    other = make(experts=12)
    after_three(other)
    calibration = make()
    calibration.load_json(other.to_json())
    row = missing(calibration, 1, [6, 7])
    assert missing(calibration, 1, [6, 7], 3) == row
    calibration.load_json({"pairs": {"1:0": "", "9:1": "", "0:1": "", "a:1": "", "1:5": ""}})
    assert missing(calibration, 1, [6, 7], 3) == row


@pytest.mark.parametrize(
    "damaged", [{"pairs": {"1:1": "no base64"}}, {"pairs": {"1:1": "AAAA"}}, {"pairs": []}]
)
def test_damaged_weights_are_refused(damaged: dict[str, Any]) -> None:
    with pytest.raises((ValueError, AttributeError)):
        make().load_json(damaged)


# -- in an engine -----------------------------------------------------------------------------


async def test_calibration_is_kept(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "calibration.json"
    for _ in range(2):
        async with await Engine.open(
            demo, slots=16, prefetch=PrefetchConfig(), calibration=path
        ) as engine:
            await engine.generate(PROMPT, max_tokens=10, ignore_eos=True)
    table = json.loads(path.read_text())
    assert len(table) > 11
    path.write_text("not json")
    async with await Engine.open(
        demo, slots=16, prefetch=PrefetchConfig(), calibration=path
    ) as engine:
        await engine.generate(PROMPT, max_tokens=2)
    assert json.loads(path.read_text())


async def test_weights_are_kept(demo: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    settings: dict[str, Any] = {"slots": 16, "prefetch": PrefetchConfig(), "calibration": path}
    async with await Engine.open(demo, **settings) as engine:
        await engine.generate(PROMPT, max_tokens=20, ignore_eos=True)
    saved = json.loads(path.read_text())
    assert len(saved["pairs"]) == 11  # each layer but the first, from the one before
    async with await Engine.open(demo, **settings) as engine:
        assert engine._core.ahead is not None
        assert engine._core.ahead.calibration.to_json()["pairs"] == saved["pairs"]


@pytest.mark.slow
@pytest.mark.one_loop
async def test_weights_make_fewer_guesses_wrong(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to timing: as many guesses are used, and fewer are in vain."""
    config = PrefetchConfig(deterministic=True, min_score=0.4, layer_budget=6)
    used, wasted = [], []
    for step in (module._Pairs.STEP, 0.0):
        monkeypatch.setattr(module._Pairs, "STEP", step)
        async with await Engine.open(demo, slots=16, prefetch=config) as engine:
            for question in QUESTIONS:
                await engine.generate(question, max_tokens=48, ignore_eos=True)
            prefetch = engine.statistics().prefetch
            used.append(prefetch.used)
            wasted.append(prefetch.begun - prefetch.used)
    assert used[0] > 0.98 * used[1]
    assert wasted[0] < 0.9 * wasted[1]


@pytest.mark.one_loop
@pytest.mark.parametrize("settings", [{"layer_budget": 1}, {"forward_budget": 11}])
async def test_budgets_are_for_the_likeliest(
    settings: dict[str, Any], demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likelier with each rank: of the missing candidates the last one is asked for first."""

    def rising(
        self: Calibration, group: int, distance: int, ranked: list[int], *rest: Any
    ) -> list[float]:
        return [(rank + 1) / 10 for rank in range(len(ranked))]

    monkeypatch.setattr(Calibration, "probabilities", rising)
    config = PrefetchConfig(admission="always", **settings)
    async with await Engine.open(demo, slots=16, prefetch=config) as engine:
        ahead = engine._core.ahead
        assert ahead is not None
        guesses, checked = ahead.guesses, 0

        def checking(targets: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal checked
            made = guesses(targets, *args, **kwargs)
            for (_, target), _ in zip(targets, range(bool(made)), strict=False):
                _, ranked, absent, _ = ahead._predicted[target][-1]
                best = [e for e, there in zip(ranked, absent, strict=True) if there][::-1]
                assert [guess.key[1] for guess in made] == best[: len(made)]
                checked += 1
            return made

        monkeypatch.setattr(ahead, "guesses", checking)
        await engine.generate(PROMPT, max_tokens=10, ignore_eos=True)
        assert checked > 0
