"""What callers may pass, what is refused and how, and what is copied at the time of the call."""

from __future__ import annotations

import array
import json
import logging
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from moestream import (
    CheckpointNotFound,
    CorruptCheckpoint,
    HubUnavailable,
    InvalidRequest,
    PromptTooLong,
    TraceUnwritable,
)
from moestream.runtime import hub, tokenizing
from moestream.runtime.arguments import check_trace_path, path_argument, show
from moestream.runtime.encoding import encode
from moestream.runtime.errors import TokenizerBroken
from moestream.runtime.hub import local_model, resolve_model
from moestream.runtime.sampling import (
    MOST_STOPS,
    Sampling,
    check_prompt,
    early_check,
    freeze_prompt,
    make_sampling,
)
from moestream.runtime.tokenizing import end_tokens, load_tokenizer_of


def named(value: object) -> str:
    """A test's id: the same in every process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", show(value))


HUGE: Any = 10**5000  # Python refuses to write that many digits
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# -- sampling -----------------------------------------------------------------------------------


def test_sampling_keeps_its_own_copies() -> None:
    stops, biases = ["a"], {1: 2.0}
    sampling = make_sampling({"stop": stops, "logit_bias": biases})
    stops.append("b")
    biases[3] = 4.0
    assert sampling.stop == ("a",)
    assert sampling.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("given", "stop"),
    [
        (None, ()),
        ("a", ("a",)),
        ([], ()),
        (["a", "b"], ("a", "b")),
        ((text for text in ["a", "b"]), ("a", "b")),
        (np.array(["a"]), ("a",)),
    ],
    ids=named,
)
def test_stop_may_be_any_iterable(given: Any, stop: tuple[str, ...]) -> None:
    sampling = make_sampling({"stop": given})
    assert sampling.stop == stop
    assert all(type(text) is str for text in sampling.stop)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    sampling = make_sampling(
        {
            "max_tokens": np.int64(3),
            "temperature": np.float32(0.5),
            "top_p": Fraction(1, 2),
            "min_p": 0,
            "top_k": np.uint8(4),
            "seed": np.uint64(2**64 - 1),
            "repetition_penalty": 2,
            "logit_bias": MappingProxyType({np.int32(7): np.float16(1.5)}),
            "ignore_eos": np.True_,
            "logprobs": np.int16(2),
        }
    )
    whole = (sampling.max_tokens, sampling.top_k, sampling.seed, sampling.logprobs)
    reals = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    assert whole == (3, 4, 2**64 - 1, 2)
    assert {type(value) for value in whole} == {int}
    assert reals == (0.5, 0.5, 0.0, 2.0)
    assert {type(value) for value in reals} == {float}
    assert sampling.logit_bias == {7: 1.5}
    assert [(type(key), type(bias)) for key, bias in sampling.logit_bias.items()] == [(int, float)]
    assert sampling.ignore_eos is True


REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", np.int64(0)),
    ("max_tokens", np.float32(2)),
    ("max_tokens", np.True_),
    ("max_tokens", True),
    ("max_tokens", 2.0),
    ("max_tokens", None),
    ("max_tokens", -HUGE),
    ("seed", HUGE),
    ("temperature", 10**400),
    ("temperature", HUGE),
    ("temperature", np.float64("nan")),
    ("temperature", True),
    ("temperature", None),
    ("temperature", 1j),
    ("temperature", [1.0]),
    ("temperature", math.ulp(0.0)),
    ("temperature", 9.99e-7),
    ("top_p", 1e-300),
    ("top_p", np.float32(1e-8)),
    ("min_p", "0.1"),
    ("ignore_eos", "no"),
    ("ignore_eos", 1),
    ("logit_bias", [1, 2]),
    ("logit_bias", 5),
    ("logit_bias", {1: 10**400}),
    ("logit_bias", {1: None}),
    ("logit_bias", {1.0: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {-HUGE: 1.0}),
    ("stop", 5),
    ("stop", b"bytes"),
    ("stop", [b"bytes"]),
    ("stop", ["a", None]),
    ("stop", ["\udc80"]),
    ("stop", ["x"] * (MOST_STOPS + 1)),
    ("stop", iter(lambda: "without end", None)),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=named)
def test_refused_sampling_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        make_sampling({name: value})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_the_bound_of_tiny_values_is_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name}=1e-07 must be 0 or at least 1e-06"):
        make_sampling({name: 1e-7})
    assert make_sampling({name: 0}) == Sampling()


def test_the_smallest_values_draw_the_most_likely_token() -> None:
    logits = mx.array([[0.0, 3.0, 1.0, -20.0]])
    logprobs = logits - mx.logsumexp(logits)
    for values in ({"temperature": 1e-6}, {"temperature": 1.0, "top_p": 1e-6}):
        sampler = make_sampling(values).sampler()
        assert [sampler(logprobs).item() for _ in range(20)] == [1] * 20


def test_unknown_arguments_are_worded_as_python_does() -> None:
    with pytest.raises(TypeError) as caught:
        make_sampling({"max_tokens": 1, "bogus": 2})
    assert str(caught.value) == "generate() got an unexpected keyword argument 'bogus'"
    with pytest.raises(TypeError, match=r"^stream\(\) got"):
        make_sampling({"bogus": 2}, function="stream")


# -- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        deque([1, 2]),
        array.array("i", [1, 2]),
        np.array([1, 2]),
        np.array([1, 2], np.uint8),
        np.array([0, 1, 9, 2])[1::2],
        [np.int64(1), 2],
    ],
    ids=named,
)
def test_token_ids_come_as_many_things(prompt: Any) -> None:
    frozen = freeze_prompt(prompt)
    assert frozen == (1, 2)
    assert {type(token) for token in frozen} == {int}


def test_a_frozen_prompt_does_not_change() -> None:
    tokens = [1, 2]
    numbers = np.array([1, 2])
    message: dict[str, Any] = {"role": "user", "content": "x", "calls": [{"arguments": {"a": 1}}]}
    frozen = [freeze_prompt(prompt) for prompt in (tokens, numbers, [message])]
    tokens[0] = numbers[0] = 9
    message["content"] = "changed"
    message["calls"][0]["arguments"]["a"] = 2
    assert frozen == [
        (1, 2),
        (1, 2),
        ({"role": "user", "content": "x", "calls": [{"arguments": {"a": 1}}]},),
    ]


def test_texts_become_plain() -> None:
    class Text(str):
        def __str__(self) -> str:
            return "something else"

    assert type(freeze_prompt(Text("x"))) is str
    assert freeze_prompt(Text("x")) == "x"
    assert freeze_prompt(np.str_("y")) == "y"
    assert freeze_prompt("\U0001f600 \x00") == "\U0001f600 \x00"


LOOPED = user("x")
LOOPED[0]["itself"] = LOOPED[0]

BAD_PROMPTS: list[tuple[Any, str]] = [
    (["a"], r"prompt\[0\] is 'a', but each element must be a token id.*without a list"),
    ([1.0], r"prompt\[0\] is 1\.0, but each element must be a token id.*chat message"),
    ([1, None], r"prompt\[1\] is None, but each element"),
    ([True], r"prompt\[0\] is True"),
    ([np.True_], "True"),
    ([[1, 2]], r"prompt\[0\] is \[1, 2\]"),
    ([*user("x"), 3], "mixes kinds"),
    ("", "empty"),
    ((), "empty"),
    (np.array([], int), "empty"),
    (b"x", "not bytes"),
    (bytearray(b"x"), "not bytearray"),
    (memoryview(b"x"), "not memoryview"),
    (None, "not NoneType"),
    (7, "not int"),
    ({1}, "not set"),
    (user("x")[0], "not dict"),
    (iter([1]), "not list_iterator"),
    (mx.array([1]), "not array"),
    (np.array([[1]]), r"shape \(1, 1\)"),
    (np.array(1), r"shape \(\)"),
    (np.array([1.0]), "type float64"),
    (np.array([True]), "type bool"),
    (array.array("d", [1.0]), r"prompt\[0\] is 1\.0"),
    (range(10**30), "too long"),
    ("a\ud800", "lone surrogate.* at position 1"),
    ([{"role": "user"}], "'role' and 'content'"),
    ([{"role": 1, "content": "x"}], "role=1 must be a text"),
    (user(5), "content=5 must be a text"),
    (user({"type": "text", "text": "x"}), "must be a text"),
    (user("\udcff"), r"prompt\[0\] is not valid Unicode"),
    (user(["x"]), "only text parts"),
    (user([{"type": "text", "text": 5}]), "only text parts"),
    (user([{"type": "text", "text": "x"}, {"type": "image_url"}]), "image_url.*only text parts"),
    (LOOPED, "contain themselves"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=named)
def test_refused_prompts(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        freeze_prompt(prompt)
    with pytest.raises(InvalidRequest, match=message):
        check_prompt(prompt)


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]
    assert freeze_prompt(user(parts)) == tuple(user("ab"))
    # A message that only calls a tool has no content.
    assert freeze_prompt(user(None)) == tuple(user(None))


def test_too_many_token_ids_are_refused_before_they_are_copied() -> None:
    with pytest.raises(PromptTooLong) as caught:
        freeze_prompt(range(10**12), context=100)
    assert caught.value.tokens == 10**12
    assert freeze_prompt(range(99), context=100) == tuple(range(99))
    assert len(freeze_prompt(user("x") * 100, context=100)) == 100
    assert len(freeze_prompt("x" * 1000, context=100)) == 1000


def test_early_check() -> None:
    def check(prompt: Any = (5,), **sampling: Any) -> None:
        early_check(make_sampling(sampling), freeze_prompt(prompt), vocabulary=10, context=4)

    check((0, 9, 5))
    check("text is not looked at")
    check(user("nor are messages"))
    check(top_k=9, logprobs=10, logit_bias={9: 1.0})
    for prompt in ([10], [5, -1], [HUGE]):
        with pytest.raises(InvalidRequest, match="not in the vocabulary of 10"):
            check(prompt)
    with pytest.raises(PromptTooLong, match=r"4 tokens.*holds 4"):
        check((1, 1, 1, 1))
    for name, value in (("top_k", 10), ("top_k", HUGE), ("logprobs", 11)):
        with pytest.raises(InvalidRequest, match=name):
            check(**{name: value})
    for token in (10, HUGE):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            check("text", logit_bias={token: 1.0})


# -- tokenizers ---------------------------------------------------------------------------------


@pytest.fixture
def directory(demo: Path, tmp_path: Path) -> Path:
    """Only the tokenizer of the demo model."""
    for name in TOKENIZER_FILES:
        shutil.copy(demo / name, tmp_path / name)
    return tmp_path


def loaded(tokenizer: Any, *, vocabulary: int = 8192) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, vocabulary=vocabulary)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def remove(path: Path, key: str) -> None:
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no JSON": lambda path: (path / "tokenizer.json").write_text("{"),
    "empty": lambda path: (path / "tokenizer.json").write_text(""),
    "another JSON": lambda path: (path / "tokenizer.json").write_text("[1]"),
    "binary": lambda path: (path / "tokenizer.json").write_bytes(b"\xff\xfe\x00"),
    "no model": lambda path: remove(path / "tokenizer.json", "model"),
    "unknown model": lambda path: edit(path / "tokenizer.json", model={"type": "Oracle"}),
    "directory": lambda path: replace_by_directory(path / "tokenizer.json"),
    "gone": lambda path: (path / "tokenizer.json").unlink(),
    "config no JSON": lambda path: (path / "tokenizer_config.json").write_text("nonsense"),
    "config a list": lambda path: (path / "tokenizer_config.json").write_text("[]"),
    "config of numbers": lambda path: edit(path / "tokenizer_config.json", eos_token=[1]),
    "unknown parser": lambda path: edit(path / "tokenizer_config.json", tool_parser_type="none"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_tokenizers(damage: str, directory: Path) -> None:
    DAMAGES[damage](directory)
    with pytest.raises(TokenizerBroken) as caught:
        load_tokenizer_of(directory, {})
    message = str(caught.value)
    assert str(directory) in message
    assert "\n" not in message
    assert "download its tokenizer files again" in message
    assert caught.value.__cause__ is not None
    assert caught.value.problem


def test_a_panic_inside_the_tokenizers_library(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panic = type("PanicException", (BaseException,), {})

    def load(error: BaseException) -> Callable[..., Any]:
        def fail(*_: Any, **__: Any) -> Any:
            raise error

        return fail

    monkeypatch.setattr(tokenizing, "load_tokenizer", load(panic("index out of bounds\nmore")))
    with pytest.raises(TokenizerBroken, match="PanicException: index out of bounds;"):
        load_tokenizer_of(directory, {})
    monkeypatch.setattr(tokenizing, "load_tokenizer", load(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer_of(directory, {})


def test_no_tokenizer_is_no_error(tmp_path: Path) -> None:
    assert load_tokenizer_of(tmp_path, {"eos_token_id": 5}) is None
    assert end_tokens(None, {"eos_token_id": 5}) == {5}
    assert end_tokens(None, {"eos_token_id": [5, 6]}) == {5, 6}
    assert end_tokens(None, {"eos_token_id": None}) == frozenset()
    assert end_tokens(None, {}) == frozenset()


def test_end_tokens_of_config_and_tokenizer(directory: Path) -> None:
    config = {"eos_token_id": [7, 8]}
    tokenizer = load_tokenizer_of(directory, config)
    assert end_tokens(tokenizer, config) == {7, 8, tokenizer.eos_token_id}
    assert end_tokens(load_tokenizer_of(directory, {}), {}) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "value", ["2", "</s>", "", [[1]], ["1"], 1.0, [1, 2.0], True, [None], {"a": 1}], ids=named
)
def test_end_tokens_of_absurd_types(value: Any, directory: Path) -> None:
    config = {"eos_token_id": value}
    with pytest.raises(CorruptCheckpoint, match=r"config\.json: eos_token_id is ") as caught:
        load_tokenizer_of(directory, config)
    assert caught.value.path == directory / "config.json"
    assert repr(value) in str(caught.value)
    with pytest.raises(CorruptCheckpoint, match="neither a token id nor a list of them"):
        end_tokens(None, config)
    (directory / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptCheckpoint) as caught:
        load_tokenizer_of(directory, config)
    assert caught.value.path == directory / "generation_config.json"


@pytest.fixture
def transformers_log() -> Iterator[list[str]]:
    """What transformers logs: its loggers do not hand their records to the root."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("transformers")
    handler = Handler()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_encoding_long_prompts_is_silent(
    directory: Path, transformers_log: list[str], demo: Path
) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer_of(directory, {})
    assert len(encode(loaded(tokenizer), "hello " * 3000)) > 3000
    assert len(encode(loaded(tokenizer), user("hello " * 3000))) > 3000
    assert not [message for message in transformers_log if "longer than" in message]
    # The tokenizers of the host program go on warning.
    load_tokenizer(demo).encode("hello " * 3000)
    assert [message for message in transformers_log if "longer than" in message]


def test_encode(directory: Path) -> None:
    tokenizer = load_tokenizer_of(directory, {})
    tokens = encode(loaded(tokenizer), "Once upon a time")
    assert encode(loaded(None), freeze_prompt(tokens)) == tokens
    parts = [{"type": "text", "text": "Hello"}]
    assert encode(loaded(tokenizer), freeze_prompt(user(parts))) == encode(
        loaded(tokenizer), user("Hello")
    )
    with pytest.raises(InvalidRequest, match="not in the vocabulary of 5"):
        encode(loaded(tokenizer, vocabulary=5), "Once upon a time")
    with pytest.raises(InvalidRequest, match="the tokenizer refuses this text"):
        encode(loaded(tokenizer), "\ud800")
    with pytest.raises(InvalidRequest, match="the chat template refuses"):
        encode(loaded(tokenizer), user(5))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        encode(loaded(None), "text")
    with pytest.raises(InvalidRequest, match="no chat template"):
        encode(loaded(None), user("text"))


# -- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, b"bytes", 5, 1.5, True, "", "a\0b", "a/\ud800", ["a"]])
def test_models_that_are_no_names(model: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^model"):
        resolve_model(model)
    assert local_model(model) is None


@pytest.mark.parametrize(
    "model",
    ["a" * 5000, "a/" + "b" * 5000, "/a" * 5000, "~nosuchuser/x", "./nowhere", "a/b/c", "a/b..c"],
    ids=lambda model: model[:12],
)
def test_models_that_do_not_exist(model: str) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        resolve_model(model)
    assert len(str(caught.value)) < 400
    assert local_model(model) is None


def test_a_circle_of_links_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointNotFound, match="links"):
        resolve_model(tmp_path / "a")


def test_models_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    for model in (tmp_path, str(tmp_path), "~", "org/model", Path("org/model")):
        assert resolve_model(model).samefile(Path(model).expanduser())
        assert local_model(model) == resolve_model(model)


def test_only_texts_name_models_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnavailable):
        resolve_model("no-such-org/no-such-model")
    assert local_model("no-such-org/no-such-model") is None
    monkeypatch.setattr(hub, "_download", lambda name: pytest.fail("must not download"))
    with pytest.raises(CheckpointNotFound):
        resolve_model(Path("no-such-org/no-such-model"))


@pytest.mark.parametrize("trace", ["", "a\0b", b"bytes", 5, True, ["a"], "\ud800"])
def test_traces_that_are_no_paths(trace: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^trace"):
        check_trace_path(trace)
    with pytest.raises(InvalidRequest, match=r"^calibration"):
        path_argument("calibration", trace)


def test_where_traces_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    assert check_trace_path(None) is None
    for name in ("old", "new", "link", "missing/new"):
        path = tmp_path / name
        assert check_trace_path(path) == check_trace_path(str(path)) == path
    assert check_trace_path(os.devnull) == Path(os.devnull)
    assert (tmp_path / "old").read_text() == "old"


def test_where_traces_cannot_be_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for trace, message in (
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "link", "not a regular file"),
        (tmp_path / "file" / "x", "Not a directory"),
        ("/dev/zero", "not a regular file"),
        ("x" * 5000, "too long"),
    ):
        with pytest.raises(TraceUnwritable, match=message) as caught:
            check_trace_path(trace)
        assert len(str(caught.value)) < 400
