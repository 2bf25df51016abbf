"""Bodies that are wrong, hostile or too large get an error, and nothing else happens."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from moestream.runtime import server
from moestream.runtime.server import preparing
from moestream.runtime.server.body import DEEPEST, parse_body
from moestream.runtime.server.errors import ApiError

from .serving import QUESTION, TOOLS_TEMPLATE, ScriptedEngine, calling, tokenizer_with

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ],
        "tools": [TOOL],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "stream": False,
    },
    TEXT: {"model": "m", "prompt": ["Hi", "there"], "max_tokens": 2, "n": 2, "logprobs": 1},
    MESSAGES: {
        "model": "m",
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "max_tokens": 2,
        "stop_sequences": ["x"],
    },
}
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    -(2**63),
    1.5,
    1e308,
    "",
    "x",
    "\x00\u202e\ufffd",
    "9" * 2000,
    [],
    [[]],
    [None],
    {},
    {"type": "text"},
    {"role": "user"},
    [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
    {"a": {"b": {"c": [1, 2, {"d": None}]}}},
]


@pytest.fixture(scope="module")
def tokenizer(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_with(tmp_path_factory.mktemp("bodies"), demo, TOOLS_TEMPLATE)


def nest(depth: int, kind: str = "[]") -> bytes:
    return kind[0].encode() * depth + kind[1].encode() * depth


def check_error(path: str, status: int, text: str) -> str:
    """The message of an error in the form of its API."""
    assert 400 <= status < 500, (status, text)
    body = json.loads(text)
    assert "Traceback" not in text
    if path == MESSAGES:
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str) and message
    return message


# -- fuzzing


def mutate(value: Any, chance: random.Random) -> Any:
    """A copy with one place replaced, removed or added to."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(sorted(value))
        copy = dict(value)
        kind = chance.random()
        if kind < 0.1:
            del copy[key]
        elif kind < 0.15:
            copy[chance.choice(["stream", "n", "best_of", "thinking", "tool_choice", "seed"])] = (
                chance.choice(HOSTILE)
            )
        else:
            copy[key] = mutate(value[key], chance)
        return copy
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        return [*value[:at], mutate(value[at], chance), *value[at + 1 :]]
    return chance.choice(HOSTILE)


def spoil(raw: bytes, chance: random.Random) -> bytes:
    """Bytes that are hardly JSON any more."""
    at = chance.randrange(len(raw))
    return chance.choice(
        [
            raw[:at],
            raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :],
            raw[:at] + b"\xff\xfe" + raw[at:],
            raw[:at] + b"NaN" + raw[at:],
            raw.replace(b"2", b"NaN"),
            raw.replace(b"2", b"1e999"),
            raw.replace(b"Hi", b"\\ud800"),
            raw.replace(b"2", b"9" * 5000),
            raw.replace(b'"x"', nest(chance.choice([60, 100, 5000, 200_000]))),
            nest(chance.choice([3, 300_000]), "{}"),
        ]
    )


@pytest.mark.one_loop
async def test_two_thousand_fuzzed_bodies(tokenizer: Any) -> None:
    chance = random.Random(20)
    engine = ScriptedEngine(tokenizer, "fine, thank you")
    answered = refused = 0
    async with calling(server.app(engine.as_engine(), name="m")) as client:
        for number in range(2000):
            path = chance.choice(sorted(BODIES))
            body = BODIES[path]
            for _ in range(chance.choice([1, 1, 1, 2, 3])):
                body = mutate(body, chance)
                body = body if isinstance(body, dict) else {"messages": body}
            raw = json.dumps(body).encode()
            if number % 4 == 0:
                raw = spoil(raw, chance)
            answer = await client.post(path, content=raw)
            if answer.status_code == 200:
                answered += 1
            else:
                refused += 1
                check_error(path, answer.status_code, answer.text)
        assert (await client.get("/health")).json() == {"status": "ready"}
        assert (await client.get("/stats")).json()["active"] == 0
    assert answered > 200 and refused > 1000  # both kinds were there
    assert engine.open == 0


# -- one by one


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_the_plain_bodies_are_taken(path: str, tokenizer: Any) -> None:
    async with calling(
        server.app(ScriptedEngine(tokenizer, "fine").as_engine(), name="m")
    ) as client:
        assert (await client.post(path, json=BODIES[path])).status_code == 200


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'{"a": ' + nest(DEEPEST) + b"}", f"more than {DEEPEST} levels"),
        (b'{"a": ' + nest(100_000) + b"}", f"more than {DEEPEST} levels"),
        (nest(100_000, "{}"), "not JSON"),
    ],
    ids=range(14),
)
def test_what_is_no_body(raw: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(raw)
    assert refused.value.status == 400
    assert message in refused.value.message


def test_what_is_a_body() -> None:
    assert parse_body(b'{"a": "\\ud83e\\udd89"}') == {"a": "\N{OWL}"}
    assert parse_body(b'{"a": ' + nest(DEEPEST - 1) + b"}")


CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": None}, "messages is missing"),
    (CHAT, {"messages": []}, "messages is missing"),
    (CHAT, {"messages": "hi"}, "messages must be a list"),
    (CHAT, {"messages": ["hi"]}, "messages[0] must be an object"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (CHAT, {"messages": [{"role": "king", "content": ""}]}, "messages[0].role is 'king'"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a text"),
    (CHAT, {"messages": [{"role": "tool", "content": ""}]}, "tool_call_id is missing"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be at least 1"),
    (CHAT, {"max_tokens": 1.0}, "max_tokens must be a whole number"),
    (CHAT, {"max_tokens": True}, "max_tokens must be a whole number"),
    (CHAT, {"temperature": "hot"}, "temperature must be a finite number"),
    (CHAT, {"n": 0}, "n must be from 1 to 16"),
    (CHAT, {"n": 17}, "n must be from 1 to 16"),
    (CHAT, {"seed": 1.5}, "seed must be a whole number"),
    (CHAT, {"stop": 5}, "stop must be a text or a list of texts"),
    (CHAT, {"logit_bias": {"cat": 1}}, "logit_bias names 'cat'"),
    (CHAT, {"logit_bias": {"5": "much"}}, "logit_bias.5 must be a finite number"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be from 0 to 20"),
    (CHAT, {"stream": "yes"}, "stream must be true or false"),
    (CHAT, {"stream_options": {}}, "stream_options needs stream"),
    (CHAT, {"response_format": {"type": "json_object"}}, "cannot force a form"),
    (CHAT, {"tool_choice": "required"}, "cannot force a call"),
    (CHAT, {"tool_choice": {"type": "function"}}, "cannot force a call"),
    (CHAT, {"functions": [{}]}, "give tools instead"),
    (CHAT, {"tools": [{"type": "web"}]}, "must be 'function'"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "name is missing"),
    (TEXT, {"prompt": None}, "prompt must be"),
    (TEXT, {"prompt": ""}, "the prompt is empty"),
    (TEXT, {"prompt": []}, "prompt must be"),
    (TEXT, {"prompt": [1, "x"]}, "prompt must be"),
    (TEXT, {"prompt": [[1], []]}, "prompt must be"),
    (TEXT, {"prompt": [1.5]}, "prompt must be"),
    (TEXT, {"prompt": [True]}, "prompt must be"),
    (TEXT, {"suffix": "end"}, "suffix"),
    (TEXT, {"best_of": 5}, "best_of"),
    (TEXT, {"logprobs": 1, "echo": True}, "leave out echo"),
    (MESSAGES, {"max_tokens": None}, "max_tokens is missing"),
    (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"system": 5}, "system must be a text"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "cannot force a call"),
    (MESSAGES, {"thinking": {"type": "maybe"}}, "thinking.type"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "text and tools only"),
]


@pytest.mark.one_loop
async def test_wrong_fields_are_named(demo: Path, tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "never")
    async with calling(server.app(engine.as_engine(), name="m")) as client:
        for path, change, message in CASES:
            answer = await client.post(path, json={**BODIES[path], **change})
            assert message in check_error(path, answer.status_code, answer.text), change
    assert engine.open == engine.finished == 0


@pytest.mark.one_loop
async def test_wrong_values_are_named_by_the_engine(demo: Path) -> None:
    from moestream import Engine

    async with await Engine.open(demo, slots=8) as engine:
        async with calling(server.app(engine, name="m")) as client:
            for change, message in (
                ({"temperature": -1}, "temperature=-1.0 must be"),
                ({"top_p": 3}, "top_p=3.0 must be"),
                ({"presence_penalty": 5}, "presence_penalty=5.0 must be"),
                ({"stop": [""]}, "stop"),
                ({"top_k": 10**6}, "top_k=1000000 must be"),
                ({"logit_bias": {"99999999": 1}}, "logit_bias names token 99999999"),
                ({"tools": [TOOL]}, "this model knows no tools"),
            ):
                body = {"messages": QUESTION, "max_tokens": 1, **change}
                answer = await client.post(CHAT, json=body)
                assert message in check_error(CHAT, answer.status_code, answer.text)
            for ids in ([10**30], [-1], [8192], [1] * 5000):
                answer = await client.post(TEXT, json={"prompt": ids, "max_tokens": 1})
                check_error(TEXT, answer.status_code, answer.text)
            answer = await client.post(TEXT, json={"prompt": [10**30], "echo": True})
            assert "mean nothing" in check_error(TEXT, answer.status_code, answer.text)
        statistics = engine.statistics()
        assert statistics.requests_finished == statistics.requests_failed == 0
        assert statistics.requests_waiting == statistics.requests_running == 0


async def test_a_model_without_tokenizer_or_template(demo: Path, tmp_path: Path) -> None:
    engine = ScriptedEngine(None, "")
    async with calling(server.app(engine.as_engine(), name="m")) as client:
        answer = await client.post(CHAT, json={"messages": QUESTION})
        assert "no chat template" in check_error(CHAT, answer.status_code, answer.text)
        answer = await client.post(TEXT, json={"prompt": "Hi"})
        assert "no tokenizer" in check_error(TEXT, answer.status_code, answer.text)
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    engine = ScriptedEngine(load_tokenizer(tmp_path), "never")
    async with calling(server.app(engine.as_engine(), name="m")) as client:
        answer = await client.post(CHAT, json={"messages": QUESTION})
        assert "no chat template" in check_error(CHAT, answer.status_code, answer.text)


# -- size, time, and who does the work


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_that_is_too_large(declared: bool, tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "never")
    sent = 0

    async def parts() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 100

    async with calling(server.app(engine.as_engine(), max_body=1000)) as client:
        content: Any = b" " * 10_000 if declared else parts()
        for path in (CHAT, MESSAGES):
            answer = await client.post(path, content=content)
            assert answer.status_code == 413
            assert "1000 bytes" in check_error(path, 413, answer.text)
            content = b" " * 10_000
        assert declared or sent == 11  # the rest was never asked for


async def test_a_body_that_does_not_come(tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "never")
    never = asyncio.Event()

    async def parts() -> Any:
        yield b"{"
        await never.wait()

    application = server.app(engine.as_engine(), body_timeout=0.01)
    async with calling(application) as client:
        answer = await client.post(CHAT, content=parts())
    assert answer.status_code == 408
    assert application.state.service.admission.active == 0


async def test_bodies_are_read_off_the_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time for a long prompt never runs on the thread of the event loop."""
    engine = ScriptedEngine(tokenizer, "fine")
    threads: dict[str, list[int]] = {"parse": [], "encode": []}

    def watched(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            threads[name].append(threading.get_ident())
            return function(*arguments)

        return call

    for name, function in (("parse", "parse_body"), ("encode", "encode_call")):
        monkeypatch.setattr(preparing, function, watched(name, getattr(preparing, function)))
    async with calling(server.app(engine.as_engine(), name="m")) as client:
        for path, body in BODIES.items():
            assert (await client.post(path, json=body)).status_code == 200
    for calls in threads.values():
        assert len(calls) == 3
        assert threading.get_ident() not in calls
