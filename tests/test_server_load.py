"""Many clients, slow ones, ones that leave, ones that wait; and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moestream import Engine, EngineDead, ReadFailed
from moestream.runtime import server
from moestream.runtime.engine import Engine as RealEngine
from moestream.runtime.errors import GenerationFailed
from moestream.runtime.server.admission import Admission
from moestream.runtime.server.errors import ApiError
from moestream.runtime.server.service import Service

from .serving import QUESTION, ScriptedEngine, calling, listening, tokenizer_with

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_with(tmp_path_factory.mktemp("load"), demo, TEMPLATE)


def service_of(application: Any) -> Service:
    service = application.state.service
    assert isinstance(service, Service)
    return service


class RawClient:
    """A client of which every step is ours: what a library would do by itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: Any) -> RawClient:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 12)
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await writer.drain()
        return cls(reader, writer)

    async def until(self, mark: bytes) -> bytes:
        return await self._reader.readuntil(mark)

    async def rest(self, *, step: int = 1 << 16) -> bytes:
        """Everything up to the end mark of a stream, read in small steps."""
        got = b""
        while b"[DONE]" not in got:
            piece = await self._reader.read(step)
            if not piece:
                break
            got += piece
        return got

    def vanish(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def until(condition: Any) -> None:
    """Let the loop turn until something has happened; the test's own time limit ends it."""
    while not condition():  # noqa: ASYNC110  # turns the loop, never waits for a time
        await asyncio.sleep(0)


# -- two hundred


@pytest.mark.one_loop
async def test_two_hundred_streaming_clients(demo: Path) -> None:
    """Every fourth vanishes, some before their first token; every fifth reads in small bites."""
    async with await Engine.open(demo, slots=32) as engine:
        application = server.app(engine, max_waiting=300, keep_alive=0.2)
        body = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True}
        expected = (await engine.generate("Once upon a time", max_tokens=2)).text

        async def client(number: int, url: str) -> str | None:
            raw = await RawClient.post(url, TEXT, body)
            if number % 8 == 0:
                raw.vanish()
                return None
            await raw.until(b"\r\n\r\n")
            if number % 4 == 0:
                raw.vanish()
                return None
            got = await raw.rest(step=16 if number % 5 == 0 else 1 << 16)
            await raw.close()
            lines = [line for line in got.split(b"\n") if line.startswith(b"data: {")]
            return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

        async with listening(application) as url:
            texts = await asyncio.gather(*(client(number, url) for number in range(200)))
            service = service_of(application)
            await until(lambda: service.admission.active == 0)
        assert [text for text in texts if text is not None] == [expected] * 150

        # Given up requests leave the engine's queue when their turn comes.
        await engine.generate("Hello", max_tokens=1)
        statistics = engine.statistics()
        assert (statistics.requests_running, statistics.requests_waiting) == (0, 0)
        assert statistics.requests_failed == 0
        assert statistics.requests_finished + statistics.requests_cancelled <= 202
        assert statistics.requests_finished >= 152
        engine.check_integrity(idle=True)


# -- leaving


@asynccontextmanager
async def held(tokenizer: Any, **settings: Any) -> AsyncIterator[tuple[ScriptedEngine, Any]]:
    """An engine that does not begin to answer before it is told to, and its app."""
    engine = ScriptedEngine(tokenizer, "one two three four five")
    engine.hold = asyncio.Event()
    yield engine, server.app(engine.as_engine(), name="m", **settings)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES])
async def test_leaving_cancels(path: str, stream: bool, tokenizer: Any) -> None:
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == TEXT else {"messages": QUESTION}
    async with held(tokenizer) as (engine, application), listening(application) as url:
        client = await RawClient.post(url, path, {**prompt, "max_tokens": 9, "stream": stream})
        await engine.begun.wait()
        assert service_of(application).admission.active == 1
        client.vanish()
        await engine.ended.wait()
        assert (engine.cancelled, engine.finished, engine.open) == (1, 0, 0)
        await until(lambda: service_of(application).admission.active == 0)


async def test_leaving_cancels_in_the_real_engine(demo: Path) -> None:
    async with await Engine.open(demo, slots=8) as engine:
        async with listening(server.app(engine)) as url:
            body = {"prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
            client = await RawClient.post(url, TEXT, body)
            await client.until(b"data: ")
            client.vanish()
            # Behind it, since requests are served in turn: it can only end if the first one has.
            await engine.generate("Hello", max_tokens=1)
        statistics = engine.statistics()
        assert (statistics.requests_cancelled, statistics.requests_finished) == (1, 1)
        assert statistics.tokens < 2000
        engine.check_integrity(idle=True)


async def test_all_answers_of_a_request_are_cancelled(tokenizer: Any) -> None:
    async with held(tokenizer) as (engine, application), listening(application) as url:
        body = {"prompt": ["a", "b"], "n": 3, "stream": True}
        client = await RawClient.post(url, TEXT, body)
        await until(lambda: engine.open == 6)
        assert service_of(application).admission.active == 6
        client.vanish()
        await until(lambda: engine.open == 0)
        assert engine.cancelled == 6


async def test_a_client_that_does_not_read_is_given_up(tokenizer: Any) -> None:
    """Nothing is collected for it: the answer waits in the engine, which bounds its length."""
    engine = ScriptedEngine(tokenizer, "word " * 2000)
    # A long name, so that the answer is far more than what the system's buffers take.
    application = server.app(engine.as_engine(), send_timeout=0.3, name="m" * 1000)
    async with listening(application) as url:
        body = {"prompt": "Hi", "max_tokens": 2000, "stream": True, "n": 16}
        client = await RawClient.post(url, TEXT, body)
        await engine.ended.wait()
        assert engine.cancelled >= 1
        await until(lambda: service_of(application).admission.active == 0)
        client.vanish()


# -- silence


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES])
async def test_silence_is_filled(path: str, tokenizer: Any) -> None:
    prompt: dict[str, Any] = {"prompt": "Hi"} if path == TEXT else {"messages": QUESTION}
    mark = b'data: {"type":"ping"}' if path == MESSAGES else b": keep-alive\n\n"
    settings = {"keep_alive": 0.01}
    async with held(tokenizer, **settings) as (engine, application), listening(application) as url:
        client = await RawClient.post(url, path, {**prompt, "max_tokens": 9, "stream": True})
        for _ in range(3):
            await client.until(mark)
        assert engine.hold is not None
        engine.hold.set()
        await client.until(b'"stop_reason":"end_turn"' if path == MESSAGES else b"[DONE]")
        await client.close()
    assert engine.finished == 1


# -- waiting


async def test_more_than_may_wait_are_refused(tokenizer: Any) -> None:
    async with held(tokenizer, max_waiting=2) as (engine, application):
        async with calling(application) as client:
            body = {"prompt": "Hi", "max_tokens": 9}
            tasks = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(3)]
            await until(lambda: engine.open == 3)
            for path in (TEXT, MESSAGES):
                answer = await client.post(path, json=body)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) > 0
                error = answer.json()["error"]
                assert error["type"] == "rate_limit_error"
            assert (await client.get("/health")).status_code == 200  # others are not kept out
            assert engine.hold is not None
            engine.hold.set()
            assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
            assert (await client.post(TEXT, json=body)).status_code == 200
            answer = await client.post(TEXT, json={**body, "n": 4})  # never fits
            assert answer.status_code == 400
        admission = service_of(application).admission
        assert (admission.active, admission.refused) == (0, 2)


@pytest.mark.one_loop
async def test_admission_counts_what_the_engine_works_on() -> None:
    running = 0
    admission = Admission(1, lambda: running)
    with admission.admit(), admission.admit():
        with pytest.raises(ApiError):
            admission.admit().__enter__()
        running = 2  # an engine that computes several at once
        with admission.admit():
            assert admission.active == 3
    assert admission.active == 0
    with admission.admit() as ticket:
        running = 0
        admission.enlarge(ticket, 2)
        with pytest.raises(ApiError) as refused:
            admission.admit().__enter__()
        assert refused.value.status == 429
        with pytest.raises(ApiError) as never:
            admission.enlarge(ticket, 3)
        assert never.value.status == 400
    assert admission.active == 0
    admission.drain()
    with pytest.raises(ApiError) as stopping:
        admission.admit().__enter__()
    assert stopping.value.status == 503


async def test_what_is_cut_off_hears_of_it(tokenizer: Any) -> None:
    async with held(tokenizer) as (engine, application), listening(application) as url:
        stream = await RawClient.post(url, TEXT, {"prompt": "Hi", "stream": True})
        whole = await RawClient.post(url, TEXT, {"prompt": "Hi"})
        await until(lambda: engine.open == 2)
        assert service_of(application).admission.cut_off() == 2
        assert b"the server has stopped" in await stream.until(b"}}")
        head = await whole.until(b"\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert (engine.open, engine.cancelled) == (0, 2)
        await stream.close()
        await whole.close()
        async with calling(application) as client:
            answer = await client.post(TEXT, json={"prompt": "Hi"})
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert (await client.get("/health")).status_code == 503


# -- errors of the engine


ERRORS = [
    (GenerationFailed("a secret of the inside"), 500, "the model failed"),
    (KeyError("a secret of the inside"), 500, "something unexpected"),
    (EngineDead(RuntimeError("a secret of the inside")), 503, "engine has stopped"),
]


@pytest.mark.parametrize(("error", "status", "message"), ERRORS, ids=["failed", "bug", "dead"])
@pytest.mark.parametrize("number", [0, 2], ids=["at once", "later"])
async def test_errors_reach_the_client(
    error: Exception, status: int, message: str, number: int, tokenizer: Any
) -> None:
    engine = ScriptedEngine(tokenizer, "one two three four five")
    engine.fail = (number, error)
    application = server.app(engine.as_engine())
    body = {"prompt": "Hi", "max_tokens": 9}
    async with calling(application) as client:
        whole = await client.post(TEXT, json=body)
        assert (whole.status_code, whole.json()["error"]["type"]) == (status, "server_error")
        several = await client.post(TEXT, json={**body, "n": 3})  # all of them fail, one is told
        assert several.json() == whole.json()
        stream = await client.post(TEXT, json={**body, "stream": True})
        *_, last_frame, done = stream.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        last = json.loads(last_frame.removeprefix("data: "))
        events = await client.post(
            MESSAGES, json={"messages": QUESTION, "max_tokens": 9, "stream": True}
        )
        assert "event: error\ndata: " in events.text
        for text in (whole.text, json.dumps(last), events.text):
            assert message in text and "secret" not in text
        assert (await client.get("/health")).json() == {"status": "degraded"}
        engine.fail = None
        assert (await client.post(TEXT, json=body)).status_code == 200
        assert (await client.get("/health")).json() == {"status": "ready"}
        engine.alive = False
        assert (await client.get("/health")).json() == {"status": "dead"}
        assert (await client.post(TEXT, json=body)).status_code == 503
    assert engine.open == 0


async def test_a_read_that_fails(demo: Path, tokenizer: Any) -> None:
    engine = ScriptedEngine(tokenizer, "never")
    error = ReadFailed(
        layer=3, expert=7, component="w", path=Path("/secret/x"), offset=0, problem="broken"
    )
    engine.fail = (0, error)
    async with calling(server.app(engine.as_engine())) as client:
        answer = await client.post(TEXT, json={"prompt": "Hi"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "read_failed"
        assert "secret" not in answer.text


async def test_an_engine_that_is_closed_meanwhile(demo: Path) -> None:
    engine = await RealEngine.open(demo, slots=8)
    async with listening(server.app(engine)) as url:
        body = {"prompt": "Once", "max_tokens": 2000, "stream": True, "ignore_eos": True}
        client = await RawClient.post(url, TEXT, body)
        await client.until(b"data: ")
        await engine.aclose()
        assert b"the engine has stopped" in await client.rest()
        await client.close()
        async with calling(server.app(engine)) as other:
            assert (await other.get("/health")).json() == {"status": "dead"}
            assert (await other.post(TEXT, json=body)).status_code == 503
            assert (await other.get("/metrics")).status_code == 200
